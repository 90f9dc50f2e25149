"""Warn if the model that was passed to `parallelize(copy=True)` is changed or trained.

Changes and calls of the original have no effect on the planned copy. A user who changes or trains
the original usually means the copy: `DistributedDataParallel(net)` and `net` share parameters. But
the original may also be a reference or a teacher, so these uses only cause a warning.
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
"""`FIRST_CALLS` calls compare all watched attributes, then every `PERIOD`-th call does.

`training` is compared in every call.
"""

MIN_TRAINING_CALLS = 2
"""Number of training calls of the original model that cause a warning, if the planned model has not
been called.

A single call may only compare results.
"""

SUBMODULES, PARAMETERS, VALUES = "submodules", "parameters", "values of parameters"
TRAINED = "requires_grad of parameters"

WatchedAttribute = tuple[str, str]
"""(Path of a submodule, name of a watched attribute).

The name may also be `SUBMODULES`, `PARAMETERS`, `VALUES` or `TRAINED`.
"""


class OriginalModel:
    """The original model, by a weak reference, and its last observed state.

    Args:
        net: the original model, when `parallelize` returns.
        attributes: module path, name and content of each attribute that `forward` reads or sets, as
            in `Graph.attributes`.
    """

    def __init__(self, net: nn.Module, attributes: tuple[tuple[str, str, str], ...]) -> None:
        self._net: weakref.ref[nn.Module] | None = weakref.ref(net)
        self._watched: list[WatchedAttribute] = [
            (path, name)
            for path, name, content in attributes
            # Attributes that `forward` sets itself change in each call.
            if name not in OF_MODULES and content != SET and not path.startswith((GLOBALS, BUFFERS))
        ]
        self._calls, self._training = 0, net.training
        self._last_state = dict(self._iterate_watched_contents(net))
        self._warned_attributes: set[WatchedAttribute] = set()
        self._num_training_calls = 0
        self._stop_observing_calls = observe_calls(net, self._warn_if_original_is_trained)

    def check(self, planned: nn.Module) -> None:
        """Warn, once per attribute, if the original model has changed but `planned` has not.

        Called at each call of the planned model.
        """
        # The planned model is called, so it is not the original alone that is trained.
        self._stop_observing_calls()
        net = None if self._net is None else self._net()
        if net is None:
            # The original was freed; there is nothing to compare from now on.
            self._net = None
            return
        self._calls += 1
        # The mode is compared in each call, as this costs nothing.
        if net.training is not self._training or is_due(self._calls, FIRST_CALLS, PERIOD):
            self._training = net.training
            self._warn_if_original_has_changed(net, planned)

    def _warn_if_original_is_trained(self) -> None:
        """Warn, once, if the original is trained before the planned model is called.

        Called at each call of the original.
        """
        net = None if self._net is None else self._net()
        trains = net is not None and net.training and torch.is_grad_enabled()
        # A model without trained parameters cannot be trained by mistake.
        if net is None or not trains or not any(p.requires_grad for p in net.parameters()):
            return
        self._num_training_calls += 1
        # Equal, so that it warns once.
        if self._num_training_calls == MIN_TRAINING_CALLS:
            self._stop_observing_calls()
            log.warning(
                "the `%s` that was passed to `sw.parallelize` is trained, on this device only, but "
                "the planned copy that `sw.parallelize` returned is not called\ntrain the returned "
                "model, as in `net = sw.parallelize(net, plan)`; ignore this warning if you use "
                "both models, as teacher and student",
                type(net).__name__,
            )

    def _warn_if_original_has_changed(self, net: nn.Module, planned: nn.Module) -> None:
        current = dict(self._iterate_watched_contents(net))
        previous = self._last_state
        changed = [each for each, value in current.items() if previous.get(each) != value]
        self._last_state = current
        if not changed:
            return
        original, copy = dict(net.named_modules()), dict(planned.named_modules())
        different = [
            each
            for each in changed
            if each not in self._warned_attributes
            and not _is_equal_in_planned_model(each, original, copy)
        ]
        self._warned_attributes.update(different)
        if different:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            log.warning(
                "%s%s of the `%s` that was passed to `sw.parallelize` changed, which has no effect "
                "on the planned copy that `sw.parallelize` returned\nchange the returned model, or "
                "change the original before `sw.plan`; ignore this warning if you use both models, "
                "as teacher and student",
                _describe_attribute(different[0]),
                more,
                type(net).__name__,
            )

    def _iterate_watched_contents(
        self, net: nn.Module
    ) -> Iterator[tuple[WatchedAttribute, Hashable]]:
        """Yield (watched attribute of `net`, its content in comparable form)."""
        modules = dict(net.named_modules())
        for path, name in self._watched:
            if path in modules:
                yield (path, name), content(variable(modules, path, name))
        for path, module in modules.items():
            yield (path, SUBMODULES), tuple((n, id(m)) for n, m in own_modules(module).items())
            parameters = {n: p for n, p in own_parameters(module).items() if p is not None}
            yield (path, PARAMETERS), tuple((n, id(p)) for n, p in parameters.items())
            yield (path, TRAINED), tuple((n, p.requires_grad) for n, p in parameters.items())
            if self._calls <= 1 and not any(map(is_trained_in_original, parameters.values())):
                # In later calls in-place changes are normal: a teacher may follow the planned
                # model.
                yield (path, VALUES), tuple(map(version, parameters.values()))


def _is_equal_in_planned_model(
    attribute: WatchedAttribute,
    original: Mapping[str, nn.Module],
    planned: Mapping[str, nn.Module],
) -> bool:
    """Whether the planned model has the value that an attribute of the original was changed to.

    Args:
        attribute: a watched attribute.
        original: the submodules of the original, by path.
        planned: the submodules of the planned model, by path.
    """
    path, name = attribute
    # Identities and versions differ in a copy in any case.
    if name in (SUBMODULES, PARAMETERS, VALUES) or path not in planned:
        return False
    if name == TRAINED:
        parameters, copies = (own_parameters(modules[path]) for modules in (original, planned))
        pairs = ((p, copies.get(leaf)) for leaf, p in parameters.items())
        # Parameters of other pipeline stages are None in the planned model.
        return all(p is None or q is None or p.requires_grad == q.requires_grad for p, q in pairs)
    value, other = (variable(modules, path, name) for modules in (original, planned))
    return _are_attribute_values_equal(value, other)


def _are_attribute_values_equal(original: Any, planned: Any) -> bool:
    if isinstance(original, Tensor) and isinstance(planned, Tensor):
        # The planned model may be on another device.
        return original.shape == planned.shape and torch.equal(original.cpu(), planned.cpu())
    # Such as a configuration object: `==` of most classes compares identity.
    if (
        hasattr(original, "__dict__")
        and type(original) is type(planned)
        and not isinstance(original, nn.Module)
    ):
        return {n: content(v) for n, v in vars(original).items()} == {
            n: content(v) for n, v in vars(planned).items()
        }
    return content(original) == content(planned)


def _describe_attribute(attribute: WatchedAttribute) -> str:
    path, name = attribute
    if name in (SUBMODULES, PARAMETERS, TRAINED, VALUES):
        return f"{name} of {path!r}" if path else name
    return f"attribute {f'{path}.{name}'.removeprefix('.')!r}"
