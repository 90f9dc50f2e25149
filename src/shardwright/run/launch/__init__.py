"""Starts, monitors and terminates the processes of a run, on one node or several."""
