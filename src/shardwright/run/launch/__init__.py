"""Start, monitor and terminate the processes of a run, on one node or several."""
