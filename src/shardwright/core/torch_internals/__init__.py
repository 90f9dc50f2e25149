"""The one room that uses private names of PyTorch.

Its files give them names of our own, by subject. `tests/core/torch_internals/private_names.py`
lists each: what it does, what would replace it, and since which supported version it is there.
"""
