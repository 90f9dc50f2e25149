"""Check that ranks agree, and share values between them, before a program runs.

Callers choose the facts; these modules compare and share them:

- `content_hash`: hashes of tensors and texts, so that ranks compare 8 bytes each.
- `collective`: collectives of the process group that compare descriptions and share values.
- `store`: the key-value store of the rendezvous. Compares facts before the process group exists,
  and shares results of rank 0 that take longer than a collective's timeout.

A difference between ranks, or an error of rank 0, raises the same error on every rank.
"""
