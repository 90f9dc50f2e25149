"""Counts the bytes of tensors while a program runs, be it on a device or on the meta device.

Every storage counts once, from the operator that makes it until nothing refers to it any more. What
an operator allocates inside and frees again is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PARAMETERS, WEIGHTS = "parameters", "weights"
"""Kinds of what is watched: parameters as they are stored, and what is computed from nothing else:
gathered, cast or joined parameters."""


class Held:
    """A storage that was seen."""

    __slots__ = ("kind", "size")

    def __init__(self, size: int, kind: str) -> None:
        self.size = size
        self.kind = kind


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that are made inside, and of those that are watched.

    Args:
        history: what was made (`True`) and freed (`False`), in order.
        now: bytes that are live.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history: list[tuple[Held, bool]] = []
        self.now = 0
        self._held: dict[int, tuple[weakref.ref[Any], Held]] = {}

    def watch(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Counts tensors that exist already; from here on their storages are of this `kind`."""
        for tensor in tensors:
            self._see(tensor, kind)
            self._held[tensor.untyped_storage()._cdata][1].kind = kind

    def label(self, kind: str) -> None:
        """Everything live that has no kind yet is of this one."""
        for _, held in self._held.values():
            held.kind = held.kind or kind

    def peak(self, start: int = 0, end: int | None = None) -> int:
        """How much of the history had happened when most bytes were live, from `start` to `end`."""
        live = _live(self.history[:start])
        most, place = live, start
        for number, (held, made) in enumerate(self.history[start:end], start=start + 1):
            live += held.size if made else -held.size
            if live > most:
                most, place = live, number
        return place

    def kinds(self, place: int) -> dict[str, int]:
        """Bytes by kind that were live when so much of the history had happened."""
        found: dict[str, int] = {}
        for held, made in self.history[:place]:
            found[held.kind] = found.get(held.kind, 0) + (held.size if made else -held.size)
        return found

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._made(out, args)
        elif isinstance(out, list | tuple):
            for each in out:
                if isinstance(each, Tensor):
                    self._made(each, args)
        return out

    def _made(self, out: Tensor, args: tuple[Any, ...]) -> None:
        if out.untyped_storage()._cdata not in self._held:
            self._see(out, WEIGHTS if self._from_weights(args) else "")

    def _from_weights(self, args: tuple[Any, ...]) -> bool:
        """Whether parameters alone go in."""
        kinds = {
            self._held[key][1].kind if (key := each.untyped_storage()._cdata) in self._held else ""
            for argument in args
            for each in (argument if isinstance(argument, list | tuple) else (argument,))
            if isinstance(each, Tensor)
        }
        return bool(kinds) and kinds <= {PARAMETERS, WEIGHTS}

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        held = Held(storage.nbytes(), kind)
        self.history.append((held, True))
        self.now += held.size

        def freed(_: Any) -> None:
            del self._held[key]
            self.history.append((held, False))
            self.now -= held.size

        self._held[key] = (weakref.ref(storage, freed), held)


def _live(history: Iterable[tuple[Held, bool]]) -> int:
    return sum(held.size if made else -held.size for held, made in history)
