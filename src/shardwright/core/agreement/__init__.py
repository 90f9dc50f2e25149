"""Check that all ranks have equal models, plans and settings before a program runs.

- `content_hash`: hashes of tensors and strings; ranks compare 8 bytes for each.
- `collective`: comparisons and broadcasts through the process group.
- `store`: comparisons through the rendezvous store before the process group exists, and broadcasts
  of results of rank 0 that take longer than a collective's timeout.
- `expected_calls`, `rank_states`: detection of ranks that wait in different collectives.

A difference between ranks, or an error of rank 0, raises the same error on every rank.
"""
