"""The training loop, its records and its profile."""
