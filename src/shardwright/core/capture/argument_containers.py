"""Detection of changes that `forward` makes to lists, dicts, sets, deques and objects in its
arguments."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

from torch import Tensor

from shardwright.core.capture.naming import located
from shardwright.core.capture.state_contents import (
    MISSING,
    After,
    Attribute,
    Parts,
    contents_of,
    is_same,
)
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError

_CONTAINERS = (list, dict, set, deque)


class ArgumentContainers:
    """Contents of the mutable containers among the arguments of a call, recorded before the call.

    Args:
        args, kwargs: arguments of the call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before: list[tuple[str, Any, Parts]] = []
        for index, value in enumerate(args):
            self._record_contents(f"args[{index}]", value)
        for name, value in kwargs.items():
            self._record_contents(name, value)

    def _record_contents(self, path: str, value: Any) -> None:
        is_object = pytree.is_registered_object(value)
        if is_object or isinstance(value, (*_CONTAINERS, tuple)):
            held = contents_of(value)
            # A tuple cannot change, but the containers inside of it can.
            if is_object or not isinstance(value, tuple):
                self._before.append((path, value, held))
            for key, item in held.items():
                name = key.name if isinstance(key, Attribute) else key
                is_attribute = isinstance(name, str) and (is_object or name is not key)
                inner = f"{path}.{name}" if is_attribute else f"{path}[{key!r}]"
                self._record_contents(inner, item)

    def refusal(self, codes: Iterable[CodeType]) -> CaptureError | None:
        """Return the error for a call that changed a container among its arguments, or None.

        A captured model returns its result, but does not change arguments. Removed entries
        and dict entries set to tensors are allowed: `forward` often prepares a batch that way.

        Args:
            codes: code objects of the functions that may have run; they locate the user's line.
        """
        for path, container, before in self._before:
            by_name = type(container) in (dict, OrderedDict)
            contents = contents_of(container)
            # Also keys that are gone, with the value `MISSING`.
            for key, now in {
                **contents,
                **dict.fromkeys(before.keys() - contents, MISSING),
            }.items():
                old = before.get(key, MISSING)
                # A removed entry prepares a batch; a removed attribute changes an object.
                if now is MISSING and not pytree.is_registered_object(container):
                    continue
                prepared = by_name and isinstance(now, Tensor)
                # An `After` is the order of an `OrderedDict`, which each prepared entry may change.
                prepared |= isinstance(key, After)
                # Traced tensors have no values to compare: another tensor object is a change.
                if not prepared and not is_same(old, now, lambda before_call, other: False):
                    where = f"{path}[{key!r}]" if by_name else path
                    return located(
                        codes,
                        where,
                        f"`forward` changes {where!r}, an argument of the call; a captured model "
                        "would not\nreturn the value, or change the argument in the training loop",
                    )
        return None
