"""Hooks into `clip_grad_norm_` and related functions of `torch.nn.utils`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import wraps
from inspect import getgeneratorlocals, isgenerator, signature
from types import CellType
from typing import Any, Protocol

from torch import Tensor, nn

from shardwright.core.torch_internals.compiled import is_compiling

IMPLEMENTATION_VARIABLE = "func"
"""Name of the closure variable through which `clip_grad_norm_` calls its implementation."""

NON_FINITE = (
    "The total norm of order {} for gradients from `parameters` is non-finite, so it cannot be "
    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)
"""PyTorch's error for a non-finite total norm; `{}` stands for the order of the norm."""


class Norms(Protocol):
    """Interface of total norms over tensors that are sharded or on several devices."""

    def total(
        self,
        function: str,
        listed: Sequence[Tensor],
        measured: Sequence[Tensor],
        source: nn.Module | None,
        norm_type: float,
    ) -> Tensor | None:
        """Return the total norm of `measured` as a scalar, or None to use PyTorch's implementation.

        Args:
            function: name of the called function of `torch.nn.utils`.
            listed: the tensors passed to the function.
            measured: the tensors of the norm: `listed`, or their gradients.
            source: the module whose `parameters()` are `listed`; None if unknown.
            norm_type: the order of the norm.
        """

    def clipped(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Record that gradients of `parameters` are clipped to `max_norm`."""

    def groups(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split tensors into groups that one foreach operator can scale."""

    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Replace parameters of the original model by planned parameters that have gradients."""


def extend_norms(norms: Norms) -> None:
    """Make `clip_grad_norm_` and `get_total_norm` compute total norms by `norms`.

    `clip_grads_with_norm_` and `clip_grad_value_` process each group of `norms.groups` separately.
    All clipping functions replace their parameters by `norms.trained(parameters)`. Calls with a
    single tensor, and calls in compiled functions, are not changed. The change is permanent for the
    process; a second call is ignored.
    """
    # Whether the running call is extended: `clip_grad_norm_` calls the other two.
    running = ContextVar("running", default=False)
    extensions = (
        (nn.utils.clip_grad_norm_, _clip_grad_norm_over_all_devices),
        (nn.utils.get_total_norm, _compute_total_norm_over_all_devices),
        (nn.utils.clip_grads_with_norm_, _clip_grads_of_each_group),
        (nn.utils.clip_grad_value_, _clip_grads_of_each_group),
    )
    for function, extension in extensions:
        cell = _get_closure_cell_of_implementation(function)
        if not hasattr(cell.cell_contents, "extends_norms"):
            cell.cell_contents = _wrap_implementation(cell.cell_contents, extension, norms, running)


CallArguments = dict[str, Any]
"""Arguments of a call by name, defaults included; iterables of tensors are converted to lists."""

Extension = Callable[[Norms, CallArguments, "nn.Module | None", Callable[..., Any]], Any]
"""Replacement of a norm function. Arguments: the norms, the call's arguments, the module whose
`parameters()` are passed (None if unknown), and PyTorch's implementation, which takes keywords."""


def _clip_grad_norm_over_all_devices(
    norms: Norms, arguments: CallArguments, source: nn.Module | None, original: Callable[..., Any]
) -> Any:
    # `norm_type` may be the text `inf`.
    parameters, norm_type = norms.trained(arguments["parameters"]), float(arguments["norm_type"])
    arguments["parameters"] = parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms.clipped(parameters, float(arguments["max_norm"]))
    norm = norms.total("clip_grad_norm_", parameters, gradients, source, norm_type)
    if norm is None:
        return original(**arguments)
    _check_norm_is_finite(norm, arguments)
    # A foreach operator cannot mix meshes, or DTensors with ordinary tensors.
    for group in norms.groups(parameters):
        nn.utils.clip_grads_with_norm_(group, arguments["max_norm"], norm, arguments["foreach"])
    return norm


def _compute_total_norm_over_all_devices(
    norms: Norms, arguments: CallArguments, source: nn.Module | None, original: Callable[..., Any]
) -> Any:
    tensors, norm_type = arguments["tensors"], float(arguments["norm_type"])
    norm = norms.total("get_total_norm", tensors, tensors, source, norm_type)
    if norm is None:
        return original(**arguments)
    _check_norm_is_finite(norm, arguments)
    return norm


def _clip_grads_of_each_group(
    norms: Norms, arguments: CallArguments, source: nn.Module | None, original: Callable[..., Any]
) -> Any:
    parameters = norms.trained(arguments["parameters"])
    groups = norms.groups(parameters)
    for group in groups if len(groups) > 1 else [parameters]:
        original(**{**arguments, "parameters": group})


def _check_norm_is_finite(norm: Tensor, arguments: CallArguments) -> None:
    # Reading the value waits for the device, so it is read only if the caller asks for the error.
    if arguments["error_if_nonfinite"] and not bool(norm.isfinite()):
        raise RuntimeError(NON_FINITE.format(float(arguments["norm_type"])))


def _get_closure_cell_of_implementation(function: Callable[..., Any]) -> CellType:
    """Return the closure cell that holds the implementation of a public norm function.

    Replacing the cell's content also affects code that has imported the function before, unlike
    replacing an attribute of `torch.nn.utils`.
    """
    closure = function.__closure__
    assert closure is not None, f"{function} is expected to wrap another function"
    return closure[function.__code__.co_freevars.index(IMPLEMENTATION_VARIABLE)]


def _wrap_implementation(
    implementation: Callable[..., Any],
    extension: Extension,
    norms: Norms,
    running: ContextVar[bool],
) -> Callable[..., Any]:
    """Wrap the implementation of a norm function in a function that calls `extension`.

    Args:
        implementation: PyTorch's implementation.
        extension: the replacement, which may call `implementation`.
        norms: passed to `extension`.
        running: variable that is true while `extension` runs; nested calls run `implementation`.
    """
    signature_ = signature(implementation)
    first = next(iter(signature_.parameters))

    @wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if args else kwargs.get(first)
        # A call without tensors is left to PyTorch, which raises its own error.
        if is_compiling() or running.get() or tensors is None:
            return implementation(*args, **kwargs)
        token = running.set(True)
        try:
            # PyTorch measures a single tensor itself, also in the functions that it calls.
            if isinstance(tensors, Tensor):
                return implementation(*args, **kwargs)
            return extended(tensors, args, kwargs)
        finally:
            running.reset(token)

    def extended(tensors: Iterable[Tensor], args: Any, kwargs: Any) -> Any:
        # Before the generator is listed: an exhausted generator has no local variables.
        source, was_generator = module_of_parameters(tensors), isgenerator(tensors)
        bound = signature_.bind(*args, **kwargs)
        bound.apply_defaults()
        # A generator can be read only once, and an extension and PyTorch may both read it.
        bound.arguments[first] = list(tensors)

        def original(**arguments: Any) -> Any:
            # Pass a generator if it was one: PyTorch warns about empty generators only.
            passed = arguments[first]
            passed = (tensor for tensor in passed) if was_generator else passed
            return implementation(**{**arguments, first: passed})

        return extension(norms, bound.arguments, source, original)

    vars(call)["extends_norms"] = True
    return call


def module_of_parameters(tensors: object) -> nn.Module | None:
    """Return the module if `tensors` is a generator `module.parameters()` that includes children;
    None for other objects."""
    if not isgenerator(tensors) or tensors.gi_code is not nn.Module.parameters.__code__:
        return None
    arguments = getgeneratorlocals(tensors)
    return arguments["self"] if arguments.get("recurse") else None
