"""Datasets of samples, texts and tokens, and their batches."""
