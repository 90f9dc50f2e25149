"""The only package that uses private names of PyTorch; each file wraps the names of one subject.

`tests/core/torch_internals/private_names.py` lists every name with its purpose, possible public
replacements, and the first supported version that has it.
"""
