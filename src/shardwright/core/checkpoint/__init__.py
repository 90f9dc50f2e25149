"""Save and load checkpoints, and resume a run at its position in the data."""
