"""Checks that ranks agree, and shares values between them, before a program runs.

Callers choose the facts; these files compare and share them:

- `content_hash`: a hash of a tensor's or a text's contents, so that 8 bytes are sent for each.
- `collective`: over the process group. Compare descriptions, take rank 0's tensors, share values.
- `store`: over the key-value store through which ranks find each other. Compare facts before there
  is a process group, and share what rank 0 works out for longer than a collective would wait.

A difference, or an error of rank 0, is the same error on every rank.
"""
