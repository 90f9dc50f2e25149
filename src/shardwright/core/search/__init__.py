"""Searches: from a graph and a device mesh to what every operator cuts."""
