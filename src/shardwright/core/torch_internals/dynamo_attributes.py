"""Guards on attributes that an object does not have in a trace of TorchDynamo.

Dynamo 2.13 guards on the result of `hasattr`, but not on the `AttributeError` of a read, which
`forward` may catch to make the attribute in its first call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import UserDefinedClassVariable, UserDefinedObjectVariable


@contextmanager
def guarding_missing_attributes() -> Iterator[None]:
    """Guard on every attribute whose read fails during a trace."""
    with (
        patch.object(
            UserDefinedObjectVariable, "var_getattr", _guarding(UserDefinedObjectVariable)
        ),
        patch.object(UserDefinedClassVariable, "var_getattr", _guarding(UserDefinedClassVariable)),
    ):
        yield


def _guarding(kind: type) -> Any:
    read = vars(kind)["var_getattr"]

    def guarded(variable: Any, tx: Any, name: str) -> Any:
        try:
            return read(variable, tx, name)
        except ObservedAttributeError:
            if variable.source is not None:
                missing = partial(GuardBuilder.HASATTR, attr=name)
                install_guard(variable.source.make_guard(missing))
            raise

    return guarded
