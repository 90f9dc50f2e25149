"""What one accelerator can tell, in under 8 minutes.

    python benchmarks/gpu.py --out FOLDER

It needs a checkout, torch, and what `import shardwright` needs: numpy, pydantic, safetensors,
PyYAML and rich. No network, no installation, no data.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

try:
    from benchmarks.one_gpu.run import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error}: benchmarks/gpu.py needs torch, numpy, pydantic, safetensors, PyYAML and"
        f" rich. Where there is no network, `pip download {error.name}` elsewhere and install the"
        " files with `pip install --no-index`"
    )

if __name__ == "__main__":
    sys.exit(main())
