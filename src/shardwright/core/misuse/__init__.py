"""Detect uses of a planned model that would silently compute something else on several devices.

**Policy.** A use is checked if it works on one device, but on several would compute other numbers,
lose a write or a gradient, or deadlock. It raises an error that names the user's line or tensor and
the remedy. A use that may be intended is a warning, once. Uses that PyTorch rejects with a clear
error are left to PyTorch.

**Time and cost.** A misuse is detected as early as possible. Checks that compare a full model or
batch run in the first calls and in some later ones (`ranks.is_due`). Times are for one CPU core,
which also launches operators, and a model of 32 layers (`benchmarks/misuse_costs.py`;
`guard_ranks.py` for comparisons between ranks).

When the model is made; later without cost unless DTensors are used outside of the model:

- `unsupported_operators`: a DTensor meets an ordinary tensor, a collective, or an operator that
  DTensors do not support. Improves the message of an existing error.
- `gathered_copies`: a write to a gathered part of a DTensor. 15 us for each view of a DTensor,
  0.1 ms if it is gathered.
- `partial_state`: pickling the shards or the stage of one rank. Runs during pickling.
- `stage_parameters`: a norm, or LBFGS, over the parameters of one pipeline stage. Checks norms of
  `torch.nn.utils`, and the first step of an optimizer.
- `calls_of_parts`: a direct call of a submodule. Improves the message of an existing error.

At each call of the model:

- `before_backward`: `torch.func`, `create_graph`, anomaly mode, activation checkpointing around the
  model. 1 us, and a hook for each output.
- `planned_parameters`: a parameter or its `.data` is replaced. 60 us; after 10 calls, the memory of
  one eighth of the parameters per call.
- `original`: the model that was passed to `parallelize` is changed or trained. 3 ms in the first 8
  calls and 1 of 256, otherwise 1 us.
- `batch_guard`: ranks make different calls, or pass different batches. 0.12 ms; 0.36 ms with the
  contents of the batch, in the first 10 calls and 1 of 100. Only the first call of each kind waits
  for the comparison.

At each backward pass:

- `between_outputs`: a gradient that would be missing at an output from which others are computed.
  No cost if the program returns the tensor that other operators read; otherwise a hook each.
- `gradient_guard`: ranks that pass shards of the batch train an output with different losses. One
  pass over the gradient and an all-reduce, in the first 10 passes and 1 of 100.

At each operator, if ranks pass shards of the batch:

- `whole_batch`, `paired_batch`: an output of the global batch is paired with a rank's shard.
  0.02 ms for a scalar such as a loss, about 0.4 ms for a tensor: the operator runs without data.

**Not checked.** Anything on one device and inside of `shardwright.whole`; writes to the memory of a
local shard; calls that a periodic check skips. Changes of Python state in `forward` are rejected by
`core/capture`.
"""
