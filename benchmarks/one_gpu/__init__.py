"""What `benchmarks/gpu.py` measures on one accelerator."""
