"""Lists and dicts among the arguments of a call, which `forward` may fill for its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from torch import Tensor

from shardwright.core.capture.naming import located
from shardwright.core.capture.state_contents import MISSING, Parts, contents_of, is_same
from shardwright.errors import CaptureError

_CONTAINERS = (list, dict, set, deque)


class ArgumentContainers:
    """What the containers among the arguments of a call hold before it.

    Args:
        args, kwargs: of the call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before: list[tuple[str, Any, Parts]] = []
        for index, value in enumerate(args):
            self._add(f"args[{index}]", value)
        for name, value in kwargs.items():
            self._add(name, value)

    def _add(self, path: str, value: Any) -> None:
        if isinstance(value, (*_CONTAINERS, tuple)):
            held = contents_of(value)
            if not isinstance(value, tuple):
                self._before.append((path, value, held))
            for key, part in held.items():
                self._add(f"{path}[{key!r}]", part)

    def refusal(self, codes: Iterable[CodeType]) -> CaptureError | None:
        """An error if the call has changed one for its caller, to whom a captured model returns its
        result only. Entries that are removed or replaced by tensors, as where a batch is prepared,
        are let through.

        Args:
            codes: of the functions that may have run.
        """
        for path, container, before in self._before:
            by_name = isinstance(container, dict)
            for key, now in contents_of(container).items():
                old = before.get(key, MISSING)
                prepared = by_name and isinstance(now, Tensor)
                if not prepared and not is_same(old, now, lambda one, other: False):
                    where = f"{path}[{key!r}]" if by_name else path
                    return located(
                        codes,
                        where,
                        f"`forward` changes {where!r}, an argument of the call, which a captured "
                        "model would not: return the value, or change it in the training loop",
                    )
        return None
