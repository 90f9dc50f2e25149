"""Uses of a planned model that would silently compute something else on several devices.

**What is checked.** A use that runs, or trains, on one device, and on several would give other
numbers, lose a write or a gradient, or leave ranks waiting for each other. It is an error that
names the user's line or tensor and what to do instead; a use that may also be meant is a warning,
once. What PyTorch itself refuses clearly is left to it.

**When, and at what cost.** Where the misuse can first be seen. What compares all of a model or all
of a batch does so in the first calls and in some later ones (`ranks.is_due`). Times are of one CPU
core, which also launches operators, for a model of 32 layers (`benchmarks/misuse_costs.py`, and
`guard_ranks.py` for those between ranks).

At the door, when the model is made; nothing afterwards unless DTensors are used outside of it:

- `unsupported_operators`: a DTensor meets an ordinary tensor, a collective, or an operator that
  DTensors lack. Explains an error that there is anyway.
- `gathered_copies`: a write to a part of a DTensor that was gathered. 15 us for each view of a
  DTensor, 0.1 ms where it is gathered.
- `partial_state`: one rank's shards or stage are pickled. Looks where they are.
- `stage_parameters`: a norm, or LBFGS, over the parameters of one pipeline stage. Looks at norms of
  `torch.nn.utils`, and at the first step of an optimizer.
- `calls_of_parts`: a submodule is called by itself. Explains an error that there is anyway.

At each call of the model:

- `before_backward`: `torch.func`, `create_graph`, anomaly mode, recomputation from outside. 1 us,
  and a hook for each output.
- `planned_parameters`: a parameter or its `.data` is replaced. 60 us, for the memory of one eighth
  of the parameters after 10 calls.
- `original`: the model that was given to `parallelize` is changed or trained. 3 ms in 8 first calls
  and 1 of 256, else 1 us.
- `batch_guard`: ranks make other calls, or give other batches. 0.12 ms; with the contents of the
  batch, in 10 first calls and 1 of 100, 0.36 ms. Nothing waits for the comparison but the first
  call of a kind.

At each backward pass:

- `between_outputs`: a gradient that would be missing at an output from which others are computed.
  Nothing where an output is returned as others read it; else a hook for each.
- `gradient_guard`: ranks train an output by other losses, where each gives a part of the batch. One
  pass over the gradient and an all-reduce, in 10 first passes and 1 of 100.

At each operator, where each rank gives a part of the batch:

- `whole_batch`, `paired_batch`: an output of the whole batch is paired with the part of a rank.
  0.02 ms for a number such as a loss, about 0.4 ms for a tensor: the operator runs without data.

**What is not watched.** Anything on one device and inside of `shardwright.whole`; what writes to
the memory of a local shard; in calls that a check leaves out, what it would have seen there. What
`forward` changes in Python is refused by `core/capture`.
"""
