"""What holds for all tests."""

import os

# No test leaves a graph in the user's own folder, or reads one; the tests of the cache ask for it.
os.environ.setdefault("SHARDWRIGHT_GRAPH_CACHE", "off")
