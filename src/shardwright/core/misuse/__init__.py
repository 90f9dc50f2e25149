"""Detect uses of a planned model that would silently give other results on several devices.

**Policy.** A use is checked if it works on one device, but on several devices would give other
results, lose a write or a gradient, or deadlock. A misuse raises an error that names the user's
line or tensor and the remedy. A use that may be intended causes one warning. Uses that PyTorch
rejects with a clear error are left to PyTorch.

**Time and cost.** A misuse is detected as early as possible. Checks that compare a full model or
batch run in the first calls and periodically in later calls (`ranks.is_due`). Times are for one CPU
core, which also launches operators, and a model of 32 layers (`benchmarks/misuse_costs.py`;
`guard_ranks.py` for comparisons between ranks).

Installed by `parallelize`; no cost later unless user code applies operators to DTensors:

- `unsupported_operators`: a DTensor is combined with an ordinary tensor, or passed to a collective
  or to an operator that DTensors do not support. Improves the message of an existing error, and
  assigns `.data` of local tensors.
- `gathered_copies`: a write to a gathered part of a DTensor. 15 us for each view of a DTensor,
  0.1 ms for a view that is gathered.
- `partial_state`: pickling the shards or the stage of one rank. Runs during pickling.
- `stage_parameters`: an optimizer that combines the parameters of one pipeline stage, by trial
  steps over small parameters (`coupled_updates`). 10 to 100 ms in the first step of an optimizer.
- `manual_updates`: a loop that scales gradients or updates by another factor in each stage. Samples
  of gradients and parameters in the first 10 training steps and 1 of 100.
- `calls_of_parts`: a direct call of a submodule. Improves the message of an existing error.

At each call of the model:

- `before_backward`: `torch.func`, `create_graph`, anomaly mode, activation checkpointing around the
  model. 1 us, and a hook for each output.
- `planned_parameters`: a parameter or its `.data` is replaced. 60 us; after 10 calls, the memory of
  one eighth of the parameters per call.
- `original`: the model that was passed to `parallelize` is changed or trained. 3 ms in the first 8
  calls and 1 of 256, otherwise 1 us.
- `batch_guard`: ranks make different calls, or pass different batches, or equal ones where each
  should pass its own (`equal_shards`). 0.14 ms; 0.36 ms with the
  full contents of the batch, in the first 10 calls and 1 of 100. Only the first call of each
  signature waits for the comparison. Ranks that call at different times are named by
  `core/runtime/rank_calls`.
- `training_guard`: ranks clip gradients, step optimizers, or clear gradients, differently. Options
  of the optimizer steps are compared in the all-reduce of the next call's `batch_guard`, and
  samples of replicated parameters (`replicas`) in the first 10 calls on CPUs.

At each backward pass:

- `between_outputs`: an incomplete gradient of an output from which other outputs are computed. No
  cost if the program returns the tensor that other operators read; otherwise one hook per output.
- `gradient_guard`: ranks train an output of the global batch with different losses. One pass over
  the gradient and an all-reduce, in the first 10 backward passes and 1 of 100.

**Not checked.** Any use on one device or inside `sw.whole`; writes to the memory of a local shard;
calls that a periodic check skips. `core/capture` rejects changes of Python state in `forward`.
"""
