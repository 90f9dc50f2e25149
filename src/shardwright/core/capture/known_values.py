"""Values of tensors that depend on no argument or parameter, such as of the mask
`~torch.eye(n).bool()`: where shapes or branches depend on them alone, they are known.

Those of a buffer are what it holds at capture. That one was read is part of what was captured, as
of an attribute: other values are another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.core.capture.filled_caches import CachedFunctions, fill
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.tensors import FakeTensor, version
from shardwright.errors import CaptureError

_READING = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item),
    *(Tensor.tolist, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose),
    *(Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, torch.combinations),
    *(Tensor.unique, torch.unique, Tensor.unique_consecutive, torch.unique_consecutive),
}
"""Functions whose result, or its shape, depends on values."""

_LIKE = {
    *(torch.ones_like, torch.zeros_like, torch.full_like),
    *(Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor),
}
"""Those that read no value of their first argument."""

_METADATA = {
    *(Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.untyped_storage, Tensor.numel),
    *(Tensor.dim, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg),
    *(getattr(Tensor, name).__get__ for name in ("layout", "dtype", "shape", "device", "ndim")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_nested", "is_quantized")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "is_mkldnn")),
}
"""What tracing asks of every tensor, over and over; no result is a tensor."""

_SELECTED = {torch.masked_select, Tensor.masked_select}


class _UnknownError(Exception):
    """A value that is drawn, or that cannot be computed without the model."""


@dataclass(eq=False)
class _Recipe:
    """How a tensor was made.

    Args:
        arguments: positional and named ones of `function`, with recipes in the place of tensors.
        place: of the tensor among the results; None if it is the first argument, changed in place.
    """

    function: Callable[..., Any]
    arguments: Any
    place: int | None = 0

    @cached_property
    def value(self) -> Tensor:
        result = self.result()
        value = result if self.place is None else pytree.tree_leaves(result)[self.place]
        if type(value) is not Tensor or not value.is_cpu:
            raise _UnknownError
        return value

    def result(self) -> Any:
        """What the function returns, or the first argument that it changes.

        Raises:
            _UnknownError: if it draws random numbers, or fails.
        """
        args, kwargs = pytree.tree_map_only(_Recipe, lambda r: r.value, self.arguments)
        drawn = torch.default_generator.get_state()
        try:
            with without_dispatch_modes(), without_torch_function(), torch.no_grad():
                if self.place is None:
                    args = (args[0].clone(), *args[1:])
                result = self.function(*args, **kwargs)
        except Exception as error:
            raise _UnknownError from error
        if not torch.equal(drawn, torch.default_generator.get_state()):
            torch.default_generator.set_state(drawn)
            raise _UnknownError
        return args[0] if self.place is None else result


def _held(tensor: Tensor, seen: int) -> Tensor:
    """A tensor that was there before the call, if it is what it was."""
    if version(tensor) != seen:
        raise _UnknownError
    return tensor


@dataclass(frozen=True, eq=False)
class _HeldBuffer:
    """A buffer at the start of `forward`.

    Args:
        fake: what stands for it in the trace.
        seen: the version of that.
        held: the buffer of the model.
    """

    place: tuple[str, str]
    fake: ref[Tensor]
    seen: int
    held: Tensor


def _empty(like: Tensor) -> _Recipe:
    """A tensor of that shape and dtype."""
    return _Recipe(torch.empty, ((tuple(like.shape),), {"dtype": like.dtype}))


def _is_several(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


_traces: list[KnownValues] = []
"""Those of the capture that is under way."""


@contextmanager
def filling_caches() -> Iterator[None]:
    """A context in which models are traced; at its end what the user's caches hold of known tensors
    has values, or is forgotten.

    Raises:
        CaptureError: if a cache holds others, which the next call would read.
    """
    caches = CachedFunctions()
    try:
        yield
    finally:
        kept = [pair for known in _traces for pair in known.kept()]
        _traces.clear()
        known = {id(tensor) for tensor, _ in kept}
        made = [
            cache
            for cache, tensors in caches.forget(FakeTensor)
            if not known.issuperset(map(id, tensors))
        ]
        fill(kept)
    if made:
        raise CaptureError(
            f"`{made[0].__qualname__}` keeps, under `functools.lru_cache`, a tensor that its first "
            "call draws, or computes of inputs or parameters: a captured model would make it anew "
            "in each call. Keep it in a buffer, or call the model once before `plan`"
        )


class KnownValues(TorchFunctionMode):
    """A context in which shapes and branches may depend on known values.

    Args:
        module: whose buffers have values.
        twin: the copy of it that is traced.

    Attributes:
        read: path of the module and name of each buffer whose values were read.
    """

    def __init__(self, module: nn.Module, twin: nn.Module) -> None:
        super().__init__()
        self._recipes: Any = WeakTensorKeyDictionary()
        self._held: dict[int, _HeldBuffer] = {}
        self.read: dict[tuple[str, str], None] = {}
        twin.register_forward_pre_hook(lambda *_: self._find_buffers(module, twin))
        devices = {t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta}
        self._device = next(iter(devices), torch.device("cpu"))
        _traces.append(self)

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors that are alive and known, though their trace is over, with their values where
        the model is."""
        for tensor, (seen, recipe) in list(self._recipes.items()):
            if isinstance(tensor, FakeTensor) and seen == version(tensor):
                with suppress(_UnknownError):
                    yield tensor, recipe.value.to(self._device)

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """What a tensor holds, whatever the arguments of the model are; None if that is unknown."""
        seen, recipe = self._recipes.get(tensor, (None, None))
        with suppress(_UnknownError):
            if recipe is not None and seen == version(tensor):
                value: Tensor = recipe.value
                return value
        return None if isinstance(tensor, FakeTensor) else tensor

    def _find_buffers(self, module: nn.Module, twin: nn.Module) -> None:
        """`torch.export` may have put others in the place of the twin's."""
        held = dict(module.named_modules())
        for path, part in twin.named_modules():
            for name, fake in own_buffers(part).items():
                buffer = own_buffers(held[path])[name] if path in held else None
                if fake is not None and type(buffer) is Tensor and not buffer.is_meta:
                    place = (path, name)
                    self._held[id(fake)] = _HeldBuffer(place, ref(fake), version(fake), buffer)

    def _values(self, buffer: _HeldBuffer) -> Tensor:
        self.read[buffer.place] = None
        return buffer.held.detach().cpu()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        try:
            if func in _READING or (func is torch.where and len(args) == 1):
                return _Recipe(func, self._known((args, kwargs))).result()
        except _UnknownError:
            pass
        if func is Tensor.__getitem__ or (func is Tensor.__setitem__ and _is_several(args[2])):
            args = (args[0], self._index(args[1]), *args[2:])
        elif func in _SELECTED and len(args) == 2:
            shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            mask = self._recorded(Tensor.expand, (args[1], shape), {})
            places = self._places(mask)
            if places[0] is not mask:
                return args[0].expand(shape)[places]
        return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function, and notes how its results were made."""
        try:
            read = (_empty(args[0]), *args[1:]) if func in _LIKE and args else args
            known = self._known((read, kwargs))
        except _UnknownError:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        before = 0 if first is None else version(first)
        result = func(*args, **kwargs)
        if first is not None and version(first) != before:
            self._recipes[first] = version(first), _Recipe(func, known, None)
            return result
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._recipes[leaf] = version(leaf), _Recipe(func, known, place)
        return result

    def _known(self, arguments: Any) -> Any:
        """Arguments with recipes in the place of tensors."""
        return pytree.tree_map(self._recipe, arguments)

    def _recipe(self, leaf: Any) -> Any:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
            raise _UnknownError
        if not isinstance(leaf, Tensor):
            return leaf
        seen, recipe = self._recipes.get(leaf, (None, None))
        if recipe is not None and seen == version(leaf):
            return recipe
        buffer = self._held.get(id(leaf))
        if buffer is not None and buffer.fake() is leaf and buffer.seen == version(leaf):
            return _Recipe(self._values, ((buffer,), {}))
        if type(leaf) is Tensor and not (leaf.requires_grad or leaf.is_inference()):
            return _Recipe(_held, ((leaf, version(leaf)), {}))
        raise _UnknownError

    def _index(self, index: Any) -> Any:
        """An index with the places that its known masks select."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [p for p in parts if isinstance(p, Tensor) and p.dtype is torch.bool and p.ndim]
        if not masks:
            return index
        return tuple(place for part in parts for place in self._places(part))

    def _places(self, mask: Any) -> tuple[Any, ...]:
        """The indices of what a mask selects, one for each of its dimensions; if they are not
        known, or it is none, itself."""
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or not mask.ndim:
            return (mask,)
        try:
            found = _Recipe(torch.nonzero, self._known(((mask,), {"as_tuple": True}))).result()
        except _UnknownError:
            return (mask,)
        return tuple(found)
