"""Placeholder of a value that a program does not compute."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError


class Unavailable:
    """Placeholder of a value that a program does not compute.

    Args:
        error: the error that every use raises.
    """

    def __init__(self, error: PlanError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up optional protocol methods.
            raise AttributeError(name)
        self._refuse_use()

    def _refuse_use(self, *_: object) -> NoReturn:
        # Else the error would collect the frames of every use.
        raise self._error.with_traceback(None)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse_use()

    # Python looks special methods up in the class, and would not call `__getattr__`.
    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __call__ = _refuse_use
    __getitem__ = __setitem__ = __contains__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse_use
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse_use
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __rmatmul__ = _refuse_use


def error_of_use(error: Exception, values: Any) -> PlanError | None:
    """Return the `PlanError` of an `Unavailable` whose use has made TorchDynamo raise `error`.

    Returns None for other errors.

    Args:
        error: an error of TorchDynamo, which quotes the frames but not the message of an error in
            traced code.
        values: nested containers of Python state, with placeholders.
    """
    if Unavailable._refuse_use.__name__ not in str(error):
        return None
    placeholders = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Unavailable))
    first = next(placeholders, None)
    return None if first is None else first._error.with_traceback(None)
