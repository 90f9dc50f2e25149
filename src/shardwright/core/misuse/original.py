"""Warn if the model that was passed to `parallelize(copy=True)` is changed or trained.

Changes and calls of the original have no effect on the planned copy. A user who changes or trains
the original usually means the copy, as with `DistributedDataParallel(net)`, where both share
parameters. But the original may also be a reference or a teacher, so this is a warning.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.attributes import BUFFERS, OF_MODULES, SET, content, variable
from shardwright.core.capture.global_variables import GLOBALS
from shardwright.core.misuse.ranks import is_due
from shardwright.core.runtime.adopt_optimizer import is_trained_in_original
from shardwright.core.torch_internals.modules import observe_calls, own_modules, own_parameters
from shardwright.core.torch_internals.tensors import version

log = logging.getLogger("shardwright")

FIRST_CALLS, PERIOD = 8, 256
"""The full model is compared in the first 8 calls, then in one of 256; its mode in every call."""

CALLS = 2
"""Number of training calls, before the first call of the planned model, that cause the warning; a
single call may be a comparison."""

SUBMODULES, PARAMETERS, VALUES = "submodules", "parameters", "values of parameters"
TRAINED = "requires_grad of parameters"

WatchedPlace = tuple[str, str]
"""The path of a submodule, and the name of an attribute or one of the constants above."""


class OriginalModel:
    """The last observed state of the original model, which it does not keep alive.

    Args:
        net: the model, when `parallelize` returns.
        attributes: path, name and content of the attributes that `forward` reads or sets, as in
            the graph.
    """

    def __init__(self, net: nn.Module, attributes: tuple[tuple[str, str, str], ...]) -> None:
        self._net: weakref.ref[nn.Module] | None = weakref.ref(net)
        self._read: list[WatchedPlace] = [
            (path, name)
            for path, name, text in attributes
            if name not in OF_MODULES and text != SET and not path.startswith((GLOBALS, BUFFERS))
        ]
        self._calls, self._training = 0, net.training
        self._seen = dict(self._state(net))
        self._said: set[WatchedPlace] = set()
        self._trained = 0
        self._forget_calls = observe_calls(net, self._called)

    def look(self, planned: nn.Module) -> None:
        """Warn, once per attribute, if the original has changed and the planned model has not.

        Runs at each call of the planned model.
        """
        self._forget_calls()
        net = None if self._net is None else self._net()
        if net is None:
            self._net = None
            return
        self._calls += 1
        if net.training is not self._training or is_due(self._calls, FIRST_CALLS, PERIOD):
            self._training = net.training
            self._compare(net, planned)

    def _called(self) -> None:
        """Warn, once, if the original is trained and the planned model is not called."""
        net = None if self._net is None else self._net()
        trains = net is not None and net.training and torch.is_grad_enabled()
        if net is None or not trains or not any(p.requires_grad for p in net.parameters()):
            return
        self._trained += 1
        if self._trained == CALLS:
            self._forget_calls()
            log.warning(
                "the %s that was given to `parallelize` is called for training, on this device "
                "alone, and what `parallelize` returned, a model of its own, is not called: go on "
                "with that one, as in `net = sw.parallelize(net, plan)`; if you use both, as "
                "teacher and student, all is well",
                type(net).__name__,
            )

    def _compare(self, net: nn.Module, planned: nn.Module) -> None:
        current = dict(self._state(net))
        changed = [place for place, value in current.items() if self._seen.get(place) != value]
        self._seen = current
        if not changed:
            return
        original, copy = dict(net.named_modules()), dict(planned.named_modules())
        lost = [p for p in changed if p not in self._said and not _is_equal(p, original, copy)]
        self._said.update(lost)
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            log.warning(
                "%s%s of the %s that was given to `parallelize` changed, which has no effect on "
                "what `parallelize` returned, a model of its own: change that one, or the other "
                "before `plan`; if you use both, as teacher and student, all is well",
                _named(lost[0]),
                more,
                type(net).__name__,
            )

    def _state(self, net: nn.Module) -> Iterator[tuple[WatchedPlace, Hashable]]:
        modules = dict(net.named_modules())
        for path, name in self._read:
            if path in modules:
                yield (path, name), content(variable(modules, path, name))
        for path, module in modules.items():
            yield (path, SUBMODULES), tuple((n, id(m)) for n, m in own_modules(module).items())
            parameters = {n: p for n, p in own_parameters(module).items() if p is not None}
            yield (path, PARAMETERS), tuple((n, id(p)) for n, p in parameters.items())
            yield (path, TRAINED), tuple((n, p.requires_grad) for n, p in parameters.items())
            if self._calls <= 1 and not any(map(is_trained_in_original, parameters.values())):
                # Later, in-place changes are normal: a teacher may follow the planned model.
                yield (path, VALUES), tuple(map(version, parameters.values()))


def _is_equal(
    place: WatchedPlace, original: Mapping[str, nn.Module], planned: Mapping[str, nn.Module]
) -> bool:
    """Whether an attribute that changed in the original has the same value in the planned model."""
    path, name = place
    if name in (SUBMODULES, PARAMETERS, VALUES) or path not in planned:
        return False
    if name == TRAINED:
        ours, theirs = (own_parameters(modules[path]) for modules in (original, planned))
        pairs = ((p, theirs.get(leaf)) for leaf, p in ours.items())
        # Parameters of other pipeline stages are None in the planned model.
        return all(p is None or q is None or p.requires_grad == q.requires_grad for p, q in pairs)
    value, other = (variable(modules, path, name) for modules in (original, planned))
    return _are_equal(value, other)


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.equal(value.cpu(), other.cpu())
    if (
        hasattr(value, "__dict__")
        and type(value) is type(other)
        and not isinstance(value, nn.Module)
    ):
        return {n: content(v) for n, v in vars(value).items()} == {
            n: content(v) for n, v in vars(other).items()
        }
    return content(value) == content(other)


def _named(place: WatchedPlace) -> str:
    path, name = place
    if name in (SUBMODULES, PARAMETERS, TRAINED, VALUES):
        return f"{name} of {path!r}" if path else name
    return f"attribute {f'{path}.{name}'.removeprefix('.')!r}"
