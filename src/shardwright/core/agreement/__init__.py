"""Check that ranks agree, and share values between them, before a program runs.

Callers choose which facts to compare and which values to share:

- `content_hash`: hashes of tensors and texts, so that ranks compare 8 bytes for each.
- `collective`: collectives of the process group, which compare descriptions and share values.
- `store`: the key-value store of the rendezvous, which compares facts before the process group
  exists, and shares results of rank 0 that take longer than a collective's timeout.

A difference between ranks, or an error of rank 0, raises the same error on every rank.
"""
