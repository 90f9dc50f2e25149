"""The one room that uses private names of PyTorch.

`private_names.py` lists each of them: what it does, what would replace it, and since which of the
supported versions it is there. The other files give them names of our own, by subject.
"""
