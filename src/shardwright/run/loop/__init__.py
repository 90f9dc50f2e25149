"""The training loop, its step records and its profile."""
