"""Every private name of PyTorch that this package uses: what it does, what could replace it, since
which supported version it is there, and up to which it is needed.

PyTorch may change these in any release. To support a new one, run the tests of this folder with it;
where a name has moved, the file of `core/torch_internals` that uses it takes both.
"""

from __future__ import annotations

from dataclasses import dataclass

OLDEST = "2.11"
"""The oldest version of PyTorch that is supported."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of PyTorch.

    Args:
        path: from `torch` on; what belongs to objects is written as if it were their class's.
        purpose: what it does here.
        replacement: public names that could do it, and what they would lack or cost; "" for none.
        since: the oldest supported version that has it.
        before: the version from which on nothing here needs it; "" if all do.
    """

    path: str
    purpose: str
    replacement: str = ""
    since: str = OLDEST
    before: str = ""


_PYTREE = "torch.utils._pytree."

PYTREE = (
    PrivateName(f"{_PYTREE}TreeSpec", "the structure of a call's arguments and results"),
    PrivateName(f"{_PYTREE}tree_flatten", "the leaves of a nested value, and its structure"),
    PrivateName(f"{_PYTREE}tree_unflatten", "a nested value of its leaves and structure"),
    PrivateName(f"{_PYTREE}tree_leaves", "the leaves of a nested value"),
    PrivateName(f"{_PYTREE}tree_structure", "the structure of a nested value"),
    PrivateName(f"{_PYTREE}tree_map", "a nested value with every leaf replaced"),
    PrivateName(f"{_PYTREE}tree_map_only", "the same for leaves of one type"),
    PrivateName(f"{_PYTREE}tree_flatten_with_path", "leaves with the way to them, for errors"),
    PrivateName(f"{_PYTREE}SequenceKey", "a position in such a way"),
    PrivateName(f"{_PYTREE}keystr", "such a way as text"),
    PrivateName(f"{_PYTREE}treespec_dumps", "a structure as text, in the file of a plan"),
    PrivateName(f"{_PYTREE}treespec_loads", "a structure from that text"),
    PrivateName(f"{_PYTREE}MappingKey", "a key in such a way"),
    PrivateName(f"{_PYTREE}GetAttrKey", "an attribute in such a way"),
    PrivateName(f"{_PYTREE}is_namedtuple_class", "whether a class is a named tuple's"),
    PrivateName(f"{_PYTREE}SUPPORTED_NODES", "which classes are nodes, and how they flatten"),
    PrivateName(
        f"{_PYTREE}SUPPORTED_SERIALIZED_TYPES", "names of classes in the text of a structure"
    ),
    PrivateName(f"{_PYTREE}SERIALIZED_TYPE_TO_PYTHON_TYPE", "the class of such a name"),
    PrivateName(f"{_PYTREE}NO_SERIALIZED_TYPE_NAME_FOUND", "marks a class without such a name"),
    PrivateName(f"{_PYTREE}_register_namedtuple", "names a named tuple in the text"),
)

OPERATORS = (
    PrivateName(
        "torch._C._dispatch_get_all_op_names",
        "all operators, so that each mixes DTensors with ordinary tensors or says why not",
    ),
    PrivateName("torch._assert", "tells a test that only guards from others", "`assert`"),
    PrivateName("torch._pack_padded_sequence", "what modes for functions see of packed sequences"),
    PrivateName("torch._ops.OpOverload", "the type of an operator in a graph"),
    PrivateName("torch._ops.HigherOrderOperator", "the type of one that holds a sub-graph"),
    PrivateName(
        "torch._ops.OpOverload._schema",
        "names and types of arguments and results, which share memory, which are written to",
    ),
    PrivateName(
        "torch._ops.OpOverload._opname",
        "the operator's name without namespace and overload",
        "`OpOverload.name()`, taken apart",
    ),
    PrivateName(
        "torch._ops.OpOverload._overloadname",
        "the overload's name",
        "`OpOverload.name()`, taken apart",
    ),
    PrivateName(
        "torch._ops.OpOverload._op_dk",
        "runs the kernel that composes an operator of others, to capture those",
        "`OpOverload.decompose`, which lacks those of `torch._foreach_*`",
    ),
    PrivateName("torch._C.DispatchKey.CompositeImplicitAutograd", "the key of such kernels"),
    PrivateName("torch._C.DispatchKey.CompositeExplicitAutograd", "the same"),
    PrivateName("torch.fx.Node._erased", "whether a node that is met was removed meanwhile"),
    PrivateName("torch.ops.aten._efficientzerotensor", "a gradient without memory, as of `sgn`"),
    PrivateName(
        "torch.library.Library._destroy", "takes back the kernels of a dry run on meta tensors"
    ),
)

_FLEX = "torch.nn.attention.flex_attention."

FLEX_ATTENTION = (
    PrivateName(
        f"{_FLEX}_validate_device", "refuses gradients on the CPU, which the eager form has"
    ),
    PrivateName(
        f"{_FLEX}_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "calls the operator without `torch.compile`, so that capture can trace it",
    ),
    PrivateName(f"{_FLEX}BlockMask._flatten", "tensors of a mask and of its function"),
    PrivateName(f"{_FLEX}BlockMask._unflatten", "a mask of its tensors"),
    PrivateName("torch.utils._pytree.register_pytree_node", "masks as arguments of a call"),
)

DISPATCH = (
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every operator: counts bytes, records what initializes parameters",
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
        "dry runs call it without what keeps `torch.compile` away; without it they take longer",
    ),
    PrivateName(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "whether `no_init_parameters` is open already",
    ),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes",
        "initializes parameters whatever modes the caller is in",
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel",
        "whether an optimizer has a fused kernel, which not every version and class has",
    ),
    PrivateName(
        "torch._C._dispatch_key_for_device",
        "whether a type of device has the fused kernel of an optimizer",
    ),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "what autocast of the CPU does, to take it back where a model computes elsewhere",
    ),
    PrivateName(
        "torch._C._ExcludeDispatchKeyGuard",
        "calls an operator from the kernel by which autocast casts for it",
    ),
    PrivateName("torch.autocast._enabled", "lets a region act on tensors that stand for others"),
    PrivateName("torch._C.DispatchKeySet", "the key of that kernel"),
    PrivateName("torch._C.DispatchKey.AutocastCPU", "the same"),
    PrivateName("torch._C.DisableTorchFunction", "the same for modes and subclasses of functions"),
    PrivateName(
        "torch._C.DisableTorchFunctionSubclass",
        "reads attributes of many DTensors in half the time",
    ),
    PrivateName(
        "torch._C._disabled_torch_function_impl",
        "leaves a deferred tensor to `__torch_dispatch__` alone",
    ),
    PrivateName(
        "torch.fx.proxy.TracerBase._filter_traceback_frames",
        "names the line of a function that `forward` calls, such as a loss function",
    ),
    PrivateName(
        "torch.fx._lazy_graph_module._use_lazy_graph_module",
        "captures graphs without the Python code that `torch.fx` makes of each of their versions",
        "none: without it, captures take half as long again",
    ),
    PrivateName(
        "torch._C._functorch.peek_interpreter_stack",
        "refuses transforms of a planned model, whose collectives are differentiable once",
    ),
    PrivateName(
        "torch._functorch.apis.vmap_impl",
        "captures what a transform of a function computes, as operators",
        "`make_fx`, which cannot take its place where a model calls it",
    ),
    PrivateName("torch._functorch.vmap.vmap_impl", "the same"),
    PrivateName("torch._functorch.eager_transforms.grad_impl", "the same"),
    PrivateName("torch._functorch.eager_transforms.grad_and_value_impl", "the same"),
    PrivateName("torch._functorch.eager_transforms._jvp_with_argnums", "the same"),
    PrivateName("torch._functorch.eager_transforms._vjp_with_argnums", "the same"),
    PrivateName(
        "torch._functorch.eager_transforms._wrap_all_tensors_to_functional", "refuses functionalize"
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode_stack",
        "traces such a function apart from the model around it",
    ),
    PrivateName("torch.overrides._pop_mode_temporarily", "the same"),
    PrivateName("torch._GLOBAL_DEVICE_CONTEXT", "the default device around `with torch.device`"),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "captures where a call packs what autograd saves",
        "`saved_tensors_hooks` that change nothing, under which `torch.func.grad` fails",
    ),
    PrivateName("torch._C._autograd._pop_saved_tensors_default_hooks", "the same"),
    PrivateName("torch._C._autograd._push_saved_tensors_default_hooks", "the same"),
    PrivateName("torch.autograd.forward_ad._current_level", "the same for forward mode"),
    PrivateName("torch._C._get_tracing_state", "the same for `torch.jit.trace`"),
    PrivateName(
        "torch._C._SetExcludeDispatchKeyGuard",
        "attention in a window computes its blocks again in the backward pass",
    ),
    PrivateName("torch._C.DispatchKey", "the same"),
    PrivateName(
        "torch._C._PreserveDispatchKeyGuard",
        "a capture that fails leaves autograd on, whatever PyTorch's guards restore when freed",
    ),
    PrivateName("torch._C._DisableTorchDispatch", "runs an operator on plain meta tensors"),
    PrivateName(
        "torch.autograd.function._SingleLevelFunction",
        "sees every custom autograd function that is applied, by whatever name",
        "a replacement of `Function.apply`, of which `ste = STE.apply` holds its own reference",
    ),
    PrivateName(
        "torch._functorch.autograd_function.custom_function_call",
        "the same inside of transforms of functions",
    ),
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        "sees of what `torch.autograd.grad` and `backward(inputs=...)` take gradients",
    ),
    PrivateName("torch.autograd._engine_run_backward", "the same"),
    PrivateName(
        "torch._C._functorch.get_dynamic_layer_stack_depth",
        "leaves transforms that a refused graph of Dynamo has entered",
    ),
    PrivateName("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth", "the same"),
    PrivateName("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "the same"),
    PrivateName("torch._C._autograd._saved_tensors_hooks_enable", "the same"),
    PrivateName("torch._C._autograd._saved_tensors_hooks_disable", "the same"),
    PrivateName("torch._C._functorch.get_interpreter_stack", "whether such a transform is `grad`"),
    PrivateName("torch._C._functorch.TransformType", "the same"),
    PrivateName(
        "torch._C._current_graph_task_id", "tells bytes of the backward pass from the forward's"
    ),
)

SHAPE_GUARDS = (
    PrivateName(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.produce_guards_expression",
        "what a trace with symbols has taken for granted about sizes",
        "`ExportedProgram.range_constraints`, which lack what is no range",
    ),
    PrivateName(
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
        "whether it stands for a call",
    ),
)

TENSORS = (
    PrivateName(
        "torch.autograd.graph.Node._set_sequence_nr",
        "adds up a parameter's gradient right after the operator that reads what it is cast to",
        "a cast for each micro-batch, beside its operator",
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "gives zeros as the gradient of an input that a local map has not used",
        "a walk over the autograd graph of each call",
    ),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor", "knows tensors that capture made"),
    PrivateName("torch._check_tensor_all_with", "checks values, which a captured model does not"),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode", "captures a model without its memory"
    ),
    PrivateName(
        "torch._C._storage_id",
        "the identity of a storage, also of one without data",
        "`data_ptr()`, for storages with data",
    ),
    PrivateName(
        "torch._dynamo.convert_frame.fullgraph_capture",
        "traces a function by TorchDynamo, with its guards and side effects",
        "`torch.export.export`, which refuses what the graph does not hold",
    ),
    PrivateName(
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
        "decides branches on values of tensors while TorchDynamo traces them",
        "`torch.export.export`, whose trace runs the branches themselves",
    ),
    PrivateName(
        "torch._guards.TracingContext",
        "whether this thread traces, while `torch.compiler.is_compiling()` is of the process",
    ),
    PrivateName(
        "torch.compiler._is_compiling_flag",
        "lets transformers register a class that it skips while a model is traced",
    ),
    PrivateName(
        "torch._dynamo.variables.UserDefinedDictVariable._base_vt",
        "the entries of an `OrderedDict` in a trace, whose order is replayed",
    ),
    PrivateName("torch.Tensor._base", "is told from operators that make tensors"),
    PrivateName("torch.Tensor._version", "finds tensors that were changed in place"),
    PrivateName(
        "torch.Tensor._make_subclass",
        "makes deferred tensors, and DTensors whose changes autograd sees in their shards",
    ),
    PrivateName("torch.nn.Parameter._is_param", "makes such a DTensor a parameter"),
    PrivateName(
        "torch._conj", "replays a conjugated view", "`torch.conj`, which views complex tensors only"
    ),
    PrivateName("torch._neg_view", "replays a negated view"),
    PrivateName(
        "torch._foreach_copy_", "updates all buffers at once", "`Tensor.copy_`, one by one"
    ),
    PrivateName(
        "torch._foreach_norm",
        "the norms of all gradients at once",
        "`torch.nn.utils.get_total_norm`, which gives one norm of all",
    ),
    PrivateName("torch._foreach_mul_", "clips all gradients at once", "`Tensor.mul_`, one by one"),
)

MODULES = (
    PrivateName("torch.nn.Module._modules", "what a wrapper shares with the module it wraps"),
    PrivateName("torch.nn.Module._parameters", "the same"),
    PrivateName("torch.nn.Module._buffers", "the same"),
    PrivateName("torch.nn.Module._non_persistent_buffers_set", "the same"),
    PrivateName("torch.nn.Module._state_dict_hooks", "the same"),
    PrivateName("torch.nn.Module._state_dict_pre_hooks", "the same"),
    PrivateName("torch.nn.Module._load_state_dict_pre_hooks", "the same"),
    PrivateName("torch.nn.Module._load_state_dict_post_hooks", "the same"),
    PrivateName(
        "torch.nn.Module._compiled_call_impl",
        "sees that a model is called, without a hook; copies leave it out",
        "a forward pre-hook, which would be captured with the model",
    ),
    PrivateName("torch.nn.Module._call_impl", "what is called then"),
    PrivateName("torch.nn.Module._forward_pre_hooks", "finds hooks, which are captured"),
    PrivateName("torch.nn.Module._forward_hooks", "the same"),
    PrivateName("torch.nn.Module._backward_pre_hooks", "finds hooks, which are refused"),
    PrivateName("torch.nn.Module._backward_hooks", "the same; of tensors, which are moved"),
    PrivateName(
        "torch.nn.Module._ddp_params_and_buffers_to_ignore",
        "the tensors that `DistributedDataParallel` ignores, which may be those of a planned model",
    ),
    PrivateName("torch.nn.modules.module._has_any_global_hook", "finds hooks, which are refused"),
    PrivateName(
        "torch.nn.modules.module._global_buffer_registration_hooks",
        "where `torch.export` watches assigned buffers of the root module",
    ),
    PrivateName(
        "torch.nn.modules.transformer._detect_is_causal_mask", "its test of a mask is passed"
    ),
    PrivateName(
        "torch.nn.modules.adaptive._ASMoutput", "what an adaptive softmax without branches returns"
    ),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", "finds hooks, which are moved"),
    PrivateName(
        "torch.nn.RNNBase._flat_weight_refs", "weak references, which keep tensors from a swap"
    ),
    PrivateName(
        "torch.nn.RNNBase._flat_weights", "the list of parameters that a recurrent module reads"
    ),
    PrivateName("torch.nn.RNNBase._flat_weights_names", "the names of those"),
    PrivateName(
        "torch.nn.RNNBase._init_flat_weights",
        "makes them again",
        "`flatten_parameters()`, which makes no references",
    ),
    PrivateName(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "finds the calls of `checkpoint` in a model",
        "a replacement of `checkpoint`, of which the model's files hold their own references",
    ),
    PrivateName(
        "torch._logging.set_logs",
        "keeps what PyTorch logs while it captures off the command line",
        "the environment variable `TORCH_LOGS`, read when torch is imported",
    ),
)

DISTRIBUTED = (
    PrivateName(
        "torch.ops._c10d_functional",
        "collectives that `torch.compile` takes into its graphs",
        "`torch.distributed`'s, which `torch.compile` takes only in part",
    ),
    PrivateName("torch.distributed.distributed_c10d._resolve_process_group", "a group by its name"),
    PrivateName(
        "torch.distributed.distributed_c10d._get_object_coll_device",
        "the device for collectives of Python values",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._new_group_with_tag",
        "counts and times process groups: all that make one call it",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._hash_ranks_to_str",
        "sees whether ranks would name a group alike",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend", "reads how long a group waits, if it splits"
    ),
    PrivateName("torch.distributed.ProcessGroup._device_types", "the same"),
    PrivateName("torch._C._distributed_c10d.Backend.Options._timeout", "the same"),
    PrivateName(
        "torch.testing._internal.distributed.fake_pg.FakeStore", "a process group of one process"
    ),
    PrivateName(
        "torch.distributed._local_tensor.LocalTensorMode", "simulates many ranks in one process"
    ),
    PrivateName("torch.distributed._local_tensor.LocalTensorMode.rank_map", "a tensor of each"),
    PrivateName("torch.distributed._local_tensor.LocalTensorMode.disable", "looks at all of them"),
    PrivateName("torch.distributed._local_tensor.LocalTensor", "a tensor of all simulated ranks"),
    PrivateName("torch.distributed._local_tensor.LocalTensor._local_tensors", "the one of each"),
    PrivateName(
        "torch.distributed._local_tensor.LocalTensor._size", "its shape, with ints of ranks"
    ),
    PrivateName("torch._functionalize_unsafe_set", "the storage of a tensor on its views"),
    PrivateName("torch.utils._python_dispatch._push_mode", "what handles operators from now on"),
    PrivateName("torch.utils._python_dispatch._pop_mode", "and no longer"),
    PrivateName("torch.distributed._local_tensor._combine_rank_results", "results of ranks as one"),
    PrivateName("torch.distributed._local_tensor._map_to_rank_local_val", "an argument of a rank"),
    PrivateName("torch.distributed._local_tensor.LocalIntNode", "a number of each simulated rank"),
    PrivateName(
        "torch.distributed._local_tensor.get_local_tensor_mode_list",
        "runs user code that depends on values rank by rank",
    ),
    PrivateName(
        "torch.distributed._local_tensor.LocalTensorMode._per_rank_rng_states",
        "the random numbers of the rank that runs",
    ),
)

DTENSOR = (
    PrivateName(
        "torch.distributed.tensor.DTensor._local_tensor",
        "a rank's shard",
        "`to_local()`, at the price of an autograd function for every parameter and step",
    ),
    *(
        PrivateName(
            f"torch.distributed.tensor.{module}.redistribute_local_tensor",
            "counts DTensors that communicate",
            "`CommDebugMode`, which is no hook before the communication",
        )
        for module in ("_api", "_dispatch", "_redistribute")
    ),
    PrivateName(
        "torch.distributed._composable.replicate._ReplicateState",
        "refuses `replicate` of a planned model, which would replace its parameters later",
    ),
    PrivateName(
        "torch.distributed._composable.replicate.DDP", "refuses to plan a model of `replicate`"
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        "refuses `fully_shard` of a planned model, for which FSDP2 raises an error without a cause",
    ),
    PrivateName("torch.distributed.tensor.DTensor._spec", "makes gradients like their parameters"),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "the same",
        "`DTensor.from_local`, which takes longer than small operators",
    ),
    PrivateName(
        "torch.distributed.tensor.DTensor.__create_chunk_list__",
        "where a rank's shard lies in the whole tensor, for single-file checkpoints",
    ),
    PrivateName(
        "torch.optim._muon._single_tensor_muon",
        "the step of `Muon`, which collects full matrices where they are sharded",
    ),
    PrivateName("torch.optim._muon._zeropower_via_newtonschulz", "orthogonalizes a full matrix"),
    PrivateName("torch.optim._muon._adjust_lr", "its learning rate for the full shape"),
    PrivateName(
        "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers",
        "finds views that are copies, so that writes to them are refused",
    ),
    PrivateName(
        "torch.distributed.tensor.DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path",
        "computes operators for which DTensors have no sharding",
    ),
    PrivateName(
        "torch._C._is_torch_function_enabled",
        "whether outputs of a model wait for DTensor's own error",
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types._StridedShard",
        "a dimension cut over axes of the mesh from right to left",
    ),
)

PIPELINING = (
    PrivateName("torch.distributed.pipelining.stage._PipelineStageBase", "the type of a stage"),
    PrivateName(
        "torch.distributed.pipelining.PipelineStage._prepare_forward_infra",
        "receive buffers of the micro-batches in flight only",
    ),
    PrivateName(
        "torch.distributed.pipelining.PipelineStage._prepare_backward_infra",
        "the same for received gradients",
    ),
    PrivateName(
        "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops",
        "leaves out messages of a rank to itself",
        before="2.13",
    ),
    PrivateName(
        "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops",
        "the order of a schedule's actions, without processes",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules._Action",
        "one pass of a chunk in a schedule, or a pair of passes",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules.ScheduleDualPipeV._calculate_single_rank_operations",
        "the order of passes, of which pairs are run one after the other",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._prepare_schedule_with_comms",
        "left out where only the order of passes is needed",
    ),
    PrivateName(
        "torch.distributed.pipelining._backward.stage_backward",
        "rehearses the backward pass of a stage as its schedule runs it",
    ),
    PrivateName(
        "torch.distributed.pipelining._backward.stage_backward_input",
        "the half of it that gives the gradients of the inputs",
    ),
    PrivateName(
        "torch.distributed.pipelining._backward.stage_backward_weight",
        "the half of it that gives the gradients of the parameters",
    ),
)

CHECKPOINTS = (
    PrivateName(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "may occur in the pickled metadata of a checkpoint",
    ),
)

PRIVATE_NAMES = (
    *PYTREE,
    *OPERATORS,
    *FLEX_ATTENTION,
    *DISPATCH,
    *SHAPE_GUARDS,
    *TENSORS,
    *MODULES,
    *DISTRIBUTED,
    *DTENSOR,
    *PIPELINING,
    *CHECKPOINTS,
)

ATEN_OPERATORS = (
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_batch_norm_with_update",
    "_conj",
    "_ctc_loss",
    "_ctc_loss_backward",
    "_flash_attention_backward",
    "_flash_attention_forward",
    "_foreach_copy_",
    "_fused_rms_norm",
    "_grouped_mm",
    *("_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_solve_ex"),
    "_linalg_svd",
    "_local_scalar_dense",
    "_log_softmax",
    "_log_softmax_backward_data",
    "_native_batch_norm_legit",
    "_neg_view",
    "_prelu_kernel",
    "_safe_softmax",
    "_sample_dirichlet",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax",
    "_softmax_backward_data",
    "_standard_gamma",
    "_to_copy",
    "_unsafe_index",
    "_unsafe_view",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "_weight_norm",
)
"""Operators of `torch.ops.aten` with an underscore. `torch.export` writes them into graphs, so the
rules and rewrites for them name them where they stand; all supported versions have them."""
