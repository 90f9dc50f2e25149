"""Saving, loading and resuming, and the position of a run in its data."""
