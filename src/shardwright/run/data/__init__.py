"""Batches of samples and of texts."""
