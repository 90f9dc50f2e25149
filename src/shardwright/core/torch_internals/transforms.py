"""Intercept `torch.func` transforms while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from torch._C import _autograd, _functorch
from torch._functorch import apis, eager_transforms, vmap
from torch.autograd import forward_ad

from shardwright.errors import CaptureError

_vmap: Callable[..., Any] = vmap.vmap_impl
_grad: Callable[..., Any] = eager_transforms.grad_impl
_grad_and_value: Callable[..., Any] = eager_transforms.grad_and_value_impl
_jvp: Callable[..., Any] = eager_transforms._jvp_with_argnums
_vjp: Callable[..., Any] = eager_transforms._vjp_with_argnums

_functionalized: str = eager_transforms._wrap_all_tensors_to_functional.__name__

Calling = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs a transformed function. Arguments: the function, its positional and keyword
arguments."""


@contextmanager
def transforms_called_by(call: Calling) -> Iterator[None]:
    """Context manager in which `call` runs every outermost transformed function.

    Transformed functions are the results of `vmap`, `grad`, `grad_and_value`, `jvp`, `vjp`, and of
    transforms built on these. PyTorch itself runs nested transformed functions.

    Raises:
        CaptureError: inside the context, by functions that `functionalize` returns.
    """
    inside = False

    def outermost(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return function(*args, **kwargs)
        inside = True
        try:
            return call(function, args, kwargs)
        finally:
            inside = False

    def mapped(
        f: Any, in_dims: Any, out_dims: Any, random: str, size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return outermost(
            lambda *a, **k: _vmap(f, in_dims, out_dims, random, size, *a, **k), *args, **kwargs
        )

    # Unlike `vmap_impl`, these functions take the arguments as a tuple and a dictionary.
    def grad(f: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        return outermost(lambda *a, **k: _grad(f, argnums, has_aux, a, k), *args, **kwargs)

    def grad_and_value(f: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        return outermost(
            lambda *a, **k: _grad_and_value(f, argnums, has_aux, a, k), *args, **kwargs
        )

    def jvp(f: Any, primals: Any, tangents: Any, argnums: Any, **options: Any) -> Any:
        return outermost(lambda p, t: _jvp(f, p, t, argnums, **options), primals, tangents)

    def vjp(f: Any, *primals: Any, **options: Any) -> Any:
        """Run `vjp` with a pullback that recomputes `f`, whose unused operators are removed later
        as dead code."""
        if inside:
            return _vjp(f, *primals, **options)

        def values(*primals: Any) -> Any:
            value, _, *aux = _vjp(f, *primals, **options)
            return value, aux

        # The other arguments are `retain_graph` and `create_graph`, which a recomputed graph
        # ignores.
        def pullback(cotangents: Any, *_: Any, **__: Any) -> Any:
            return outermost(lambda p, c: _vjp(f, *p, **options)[1](c), primals, cotangents)

        value, aux = outermost(values, *primals)
        return value, pullback, *aux

    def functionalize(*_: Any) -> NoReturn:
        raise CaptureError(
            "`torch.func.functionalize` cannot be captured\n"
            "call the function without `functionalize`: in-place changes can be captured"
        )

    with ExitStack() as patches:
        # `apis` has imported `vmap_impl` by name; the others are looked up in `eager_transforms`.
        for module, name, function in (
            (apis, "vmap_impl", mapped),
            (eager_transforms, "grad_impl", grad),
            (eager_transforms, "grad_and_value_impl", grad_and_value),
            (eager_transforms, "_jvp_with_argnums", jvp),
            (eager_transforms, "_vjp_with_argnums", vjp),
            (eager_transforms, _functionalized, functionalize),
        ):
            patches.enter_context(patch.object(module, name, function))
        yield


@contextmanager
def restored_transforms() -> Iterator[None]:
    """Context manager that restores the active `torch.func` transforms on exit.

    After an error, TorchDynamo leaves the transforms of the traced code active.
    """
    depth, level = _functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    hooks_disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        # Only those that the code inside has left active.
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]
        # `torch.func` disables saved-tensor hooks while a transform is active.
        if hooks_disabled is None:
            _autograd._saved_tensors_hooks_enable()
        else:
            _autograd._saved_tensors_hooks_disable(hooks_disabled)
