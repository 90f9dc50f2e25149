"""Processes: starting, following and ending them, on one node or several."""
