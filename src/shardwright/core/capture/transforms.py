"""Capture of function transforms (`torch.vmap`, `torch.func.grad`) as ATen operators.

A separate trace below the transforms records the ATen operators that the transformed function
calls. The recorded operators are then called in place of the function. Autograd differentiates them
like the transform itself, with three corrections:

- The trace contains a `detach` of each tensor that autograd saves, which is removed; a `detach`
  that the function calls is not removed.
- Operators that the trace recorded in a no-grad region are called in a no-grad region.
- Other effects of the function, such as registering a hook, raise CaptureError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardwright.core.capture.hooks import refuse_hooks
from shardwright.core.capture.static_functions import STATIC
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import (
    TorchDispatchMode,
    without_dispatch_modes,
    without_function_modes,
)
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import data_getter, data_setter
from shardwright.errors import CaptureError

aten = torch.ops.aten

_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_, torch.detach_, data_getter)
_OF_CPUS = ("mkldnn", "onednn", "_for_cpu", "fbgemm", "nnpack")
_WITHOUT_GRADIENT, _DETACHES = "without_gradient", "detaches"


def as_operators(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the ATen operators of a function that contains transforms, and return the result.

    Raises:
        CaptureError: if the function has a side effect that its ATen operators do not reproduce.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    positions = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[n] for n in positions]
    # `make_fx` returns tensors; other leaves and the structure of the result leave by this list.
    results: list[Any] = []

    def of_tensors(operators: OperatorsAsCalled, tensors: Sequence[Tensor]) -> list[Tensor]:
        inputs = dict(enumerate(leaves)) | dict(zip(positions, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten(list(inputs.values()), spec)
        with _TransformedCallMode(operators):
            results[:] = pytree.tree_flatten(function(*args, **kwargs))
        return [leaf for leaf in results[0] if isinstance(leaf, Tensor)]

    made = iter(called_again(operators_of(of_tensors, tensors), tensors))
    returned, out_spec = results
    leaves_of_result = [next(made) if isinstance(leaf, Tensor) else leaf for leaf in returned]
    return pytree.tree_unflatten(leaves_of_result, out_spec)


class OperatorsAsCalled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that marks operators without gradients, and each `detach` that the function calls."""

    _detaching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result = func(*args, **(kwargs or {}))
        # One operator may record several nodes.
        for node in reversed(mode.tracer.graph.nodes):
            if node is last:
                break
            node.meta[_WITHOUT_GRADIENT] = not torch.is_grad_enabled()
            node.meta[_DETACHES] = self._detaching
        return result

    @contextmanager
    def detaching(self) -> Iterator[None]:
        """Return a context in which a recorded `detach` is marked as a call of the captured
        function, unlike those that autograd inserts."""
        self._detaching = True
        try:
            yield
        finally:
            self._detaching = False


class _TransformedCallMode(TorchFunctionMode):
    """Mode that replaces or rejects calls of the transformed function to `torch`."""

    def __init__(self, operators: OperatorsAsCalled) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_hooks(func, args)
        # By `==`, because each access of a slot of `Tensor.data` makes another object.
        if func == data_setter:
            raise CaptureError(
                "cannot capture an assignment to `.data` inside of a function transform\n"
                "compute a new tensor instead: `y = x + 1`"
            )
        if (static := STATIC.get(func)) is not None:
            return static(*args, **kwargs)
        if func is torch.cosine_similarity:
            # PyTorch suspends a mode while it handles a call.
            with self:
                return _compute_cosine_similarity(*args, **kwargs)
        if func in _DETACHING:
            with self._operators.detaching():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        # Autograd would differentiate the recorded operators of a gradient that is a constant.
        if func is torch.autograd.grad and not kwargs.get("create_graph"):
            with self._operators.detaching():
                return pytree.tree_map_only(Tensor, Tensor.detach, result)
        return result


def _compute_cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Compute `torch.cosine_similarity` without its in-place clamp, which autograd ignores."""
    x1, x2 = torch.broadcast_tensors(x1, x2)  # type: ignore[no-untyped-call]
    norms = [torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (x1, x2)]
    # The clamped value with the gradient of the norm.
    first, second = (norm + (norm.clamp(min=eps) - norm).detach() for norm in norms)
    products: Tensor = (x1 / first) * (x2 / second)
    return products.sum(dim)


def operators_of(
    function: Callable[[OperatorsAsCalled, Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
) -> fx.GraphModule:
    """Trace the ATen operators that a function calls on given tensors.

    Args:
        function: function of the dispatch mode that records operators, and of tensors like
            `tensors`.
        tensors: examples of the inputs.

    Raises:
        CaptureError: if an operator has a CPU kernel only, or updates statistics of a batch norm.
    """

    def traced(*tensors: Tensor) -> Sequence[Tensor]:
        operators: Any = OperatorsAsCalled()  # type: ignore[no-untyped-call]
        # Other backends of attention are kernels of one type of device.
        with operators, sdpa_kernel(SDPBackend.MATH):
            return function(operators, tensors)

    # Below the modes of `torch.export`, which records the operators when they are called again.
    with without_function_modes(), without_dispatch_modes():
        module = make_fx(traced)(*tensors)
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default and not node.meta.get(_DETACHES):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_function":
            _check_operator(node)
    return module


def _check_operator(node: fx.Node) -> None:
    name = str(node.target)
    if any(name_of_cpu in name for name_of_cpu in _OF_CPUS):
        raise CaptureError(
            f"`{name}`, called inside a function transform or where `forward` computes "
            "gradients, has a CPU kernel only\nuse operators with a kernel for accelerators"
        )
    if "batch_norm" in name and "backward" not in name and _updates_statistics(node):
        raise CaptureError(
            "not supported: a batch norm that updates running statistics inside of a function "
            "transform or of gradients computed in `forward`\n"
            "use `track_running_stats=False`, or `eval()`"
        )


def _updates_statistics(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    training = given.get("training", given.get("train"))
    return bool(training) and given.get("running_mean") is not None


def called_again(module: fx.GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call traced operators on tensors, each with or without gradients as in the trace."""
    return list(_ReplayGradientMode(module).run(*tensors))


class _ReplayGradientMode(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        # Regions inside of `no_grad` would only add nodes to the outer trace.
        without = n.meta.get(_WITHOUT_GRADIENT) and torch.is_grad_enabled()
        context: AbstractContextManager[Any] = torch.no_grad() if without else nullcontext()
        with context:
            return super().run_node(n)
