"""What `forward` changes outside of its module's tensors is refused by name, and caches are not."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

BATCH = torch.ones(8, 4)


class Net(nn.Module):
    """A linear layer, and then a function of the module and its output."""

    count = 0
    seen: ClassVar[list[int]] = []

    def __init__(self, then: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4), then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        result = self.then(self, y)
        return (result if isinstance(result, Tensor) else y).square().mean()


def refused(then: Callable[[Any, Tensor], Any], what: str, **attributes: Any) -> None:
    """Asserts that the change is refused inside of another module, by its name."""
    net = nn.Sequential(Net(then, **attributes))
    with pytest.raises(sw.CaptureError) as caught:
        sw.capture(net, (BATCH,))
    message = str(caught.value)
    assert f"`forward` changes the {what}" in message, message
    assert message.count("\n") == 1
    assert "`register_buffer`" in message and "training loop" in message


def accepted(then: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
    """Asserts that a plan computes what the module does, in several calls."""
    net = nn.Sequential(Net(then, **attributes))
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for _ in range(2):
        torch.testing.assert_close(planned(BATCH), net(BATCH))


@dataclass
class Statistics:
    calls: int = 0
    values: list[Any] = field(default_factory=list)
    inner: Any = None


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Activation:
    calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y.relu()


def set_calls(holder: Any) -> None:
    holder.calls += 1


OF_ATTRIBUTES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "[deque]": (lambda: deque([0], maxlen=1), lambda state, y: state.append(state[0] + 1)),
    "[deque of outputs]": (lambda: deque(maxlen=2), lambda state, y: state.append(y)),
    "[counter]": (Counter, lambda state, y: state.update(["calls"])),
    "[default]": (lambda: defaultdict(list), lambda state, y: state["y"].append(1)),
    "[ordered]": (OrderedDict, lambda state, y: state.update(calls=len(state) + 1)),
    "[set]": (set, lambda state, y: state.add(len(state))),
    "[nested]": (lambda: {"a": [{"b": [0]}]}, lambda state, y: state["a"][0]["b"].append(1)),
    ".calls": (Statistics, lambda state, y: set_calls(state)),
    ".values": (Statistics, lambda state, y: state.values.append(y.mean())),
    ".inner.calls": (
        lambda: Statistics(inner=Statistics()),
        lambda state, y: set_calls(state.inner),
    ),
    ".inner.values": (
        lambda: SimpleNamespace(inner=SimpleNamespace(values=[])),
        lambda state, y: state.inner.values.append(1),
    ),
    "[slots]": (Slotted, lambda state, y: set_calls(state)),
    "[array]": (lambda: np.zeros(2), lambda state, y: state.__setitem__(0, state[0] + 1)),
    "[bytes]": (lambda: bytearray(1), lambda state, y: state.__setitem__(0, state[0] + 1)),
    "[count]": (itertools.count, lambda state, y: next(state)),
    "[unregistered]": (
        lambda: [nn.BatchNorm1d(4)],
        lambda state, y: setattr(state[0], "momentum", state[0].momentum / 2),
    ),
}


@pytest.mark.parametrize("name", OF_ATTRIBUTES)
def test_what_an_attribute_of_a_submodule_holds_is_not_changed(name: str) -> None:
    make, change = OF_ATTRIBUTES[name]
    refused(lambda net, y: change(net.state, y), "attribute '0.state", state=make())


def test_an_attribute_that_is_changed_unseen_or_deleted_is_refused() -> None:
    refused(lambda net, y: vars(net).update(calls=1), "attribute '0.calls' of a Net", calls=0)
    refused(lambda net, y: delattr(net, "calls"), "attribute '0.calls' of a Net", calls=0)


@pytest.mark.parametrize("name", [name for name in OF_ATTRIBUTES if name != "[count]"])
def test_what_an_enclosing_scope_holds_is_not_changed(name: str) -> None:
    make, change = OF_ATTRIBUTES[name]
    state = make()
    refused(lambda net, y: change(state, y), "variable ")


def test_variables_of_enclosing_scopes_are_refused_with_the_line() -> None:
    calls, values, mean = 0, [1], torch.zeros(())

    def count(net: Net, y: Tensor) -> None:
        nonlocal calls
        calls += 1

    def replace(net: Net, y: Tensor) -> None:
        values[0] = 2

    def average(net: Net, y: Tensor) -> Tensor:
        nonlocal mean
        mean = 0.9 * mean + y.detach().mean()
        return y - mean

    for then, name, line in (
        (count, "calls", "calls += 1"),
        (replace, "values", "values[0] = 2"),
        (average, "mean", "mean = 0.9 * mean + y.detach().mean()"),
    ):
        message = rf": `{re.escape(line)}`: `forward` changes the variable '{name}' "
        with pytest.raises(sw.CaptureError, match=rf"test_reachable_state.py:\d+{message}"):
            sw.capture(nn.Sequential(Net(then)), (BATCH,))


def test_a_position_is_not_moved() -> None:
    def numbers() -> Iterator[int]:
        for number in itertools.count():  # noqa: UP028
            yield number

    for each in (
        itertools.count(),
        numbers(),
        iter([1, 2, 3]),
        enumerate("abc"),
        zip("ab", "cd", strict=True),
    ):
        refused(lambda net, y, each=each: next(each), "default value of 'each")


def test_classes_are_not_changed() -> None:
    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            type(self).count += 1
            return super().forward(x)

    class Listing(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1)
            return super().forward(x)

    class Elsewhere:
        calls = 0

        @classmethod
        def tick(cls) -> None:
            cls.calls += 1

    def nothing(net: Net, y: Tensor) -> None:
        return None

    for net, what in (
        (Counting(nothing), "attribute 'count' of the class Counting"),
        (Listing(nothing), "attribute 'seen' of the class Net"),
        (Net(lambda net, y: Elsewhere.tick()), "attribute 'calls' of the class Elsewhere"),
    ):
        with pytest.raises(sw.CaptureError, match=f"`forward` changes the {what}"):
            sw.capture(nn.Sequential(net), (BATCH,))


def test_functions_and_their_default_values_are_not_changed() -> None:
    def counted(y: Tensor) -> Tensor:
        set_calls(counted)
        return y

    counted.calls = 0  # type: ignore[attr-defined]
    refused(lambda net, y: counted(y), "attribute 'calls' of the function ")

    def listing(net: Net, y: Tensor, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)

    refused(listing, "default value of 'seen' of ")
    partial = functools.partial(lambda seen, y: seen.append(1), [])
    refused(lambda net, y: partial(y), "variable 'partial.args[0]'")
    activation = Activation()
    refused(lambda net, y: activation(y), "variable 'activation.calls'")


def test_what_a_decorator_or_a_hook_counts_is_refused() -> None:
    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            calls[0] += 1
            return function(*args)

        return wrapper

    refused(counted(lambda net, y: y), "variable 'calls' of the scope that encloses ")
    net = nn.Linear(4, 4)
    net.register_forward_hook(counted(lambda net, inputs, output: output * 2))
    with pytest.raises(sw.CaptureError, match="`forward` changes the variable 'calls'"):
        sw.capture(net, (BATCH,))


def test_a_hook_that_forward_leaves_is_refused_and_one_that_it_removes_is_not() -> None:
    def left(net: Net, y: Tensor) -> None:
        net.linear.register_forward_hook(lambda module, inputs, output: output * 2)

    with pytest.raises(sw.CaptureError, match=r"registers a hook on module '0.linear'"):
        sw.capture(nn.Sequential(Net(left)), (BATCH,))

    def removed(net: Net, y: Tensor) -> Tensor:
        handle = net.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        y = net.linear(y)
        handle.remove()
        return y

    accepted(removed)


VARIABLE: ContextVar[int] = ContextVar("VARIABLE", default=0)
QUEUE: deque[int] = deque([0], maxlen=1)
POSITION = itertools.count()
DRAWS = np.random.default_rng(0)
STATISTICS = Statistics(inner=Statistics())


class Total:
    calls = 0


def test_global_variables_are_not_changed_deep_inside() -> None:
    def import_and_set(net: Net, y: Tensor) -> None:
        import settings_of_this_test

        settings_of_this_test.step += 1

    settings: Any = ModuleType("settings_of_this_test")
    settings.__file__, settings.step = __file__, 0
    sys.modules["settings_of_this_test"] = settings
    try:
        for then, what in (
            (lambda net, y: QUEUE.append(QUEUE[0] + 1), "global variable 'QUEUE'"),
            (lambda net, y: next(POSITION), "global variable 'POSITION'"),
            (lambda net, y: y * DRAWS.random(), "global variable 'DRAWS'"),
            (
                lambda net, y: set_calls(STATISTICS.inner),
                "global variable 'STATISTICS.inner.calls'",
            ),
            (lambda net, y: set_calls(Total), "attribute 'calls' of the class Total"),
            (lambda net, y: VARIABLE.set(VARIABLE.get() + 1), "global variable 'VARIABLE'"),
            (import_and_set, "global variable 'step' of settings_of_this_test"),
        ):
            refused(then, what)
    finally:
        del sys.modules["settings_of_this_test"]


def test_what_is_added_in_each_call_is_no_cache() -> None:
    lengths: list[int] = []
    refused(lambda net, y: lengths.append(len(y)), "variable 'lengths'")
    outputs: dict[str, Tensor] = {}
    refused(lambda net, y: outputs.update(last=y), "variable \"outputs['last']\"")
    calls: dict[str, int] = {}

    def count(net: Net, y: Tensor) -> None:
        calls["n"] = calls.get("n", 0) + 1

    refused(count, "variable \"calls['n']\"")


def test_a_cache_is_filled_once() -> None:
    numbers: dict[int, float] = {}

    def scaled(net: Net, y: Tensor) -> Tensor:
        return y * numbers.setdefault(y.shape[1], y.shape[1] ** -0.5)

    accepted(scaled)
    assert numbers == {4: 0.5}
    warned: set[str] = set()
    accepted(lambda net, y: warned.add("once"))

    class Tables:
        def __init__(self) -> None:
            self.by_length: dict[int, Tensor] = {}

        def of(self, length: int) -> Tensor:
            if length not in self.by_length:
                self.by_length[length] = torch.arange(length).float()
            return self.by_length[length]

    tables = Tables()
    accepted(lambda net, y: y * tables.of(4))
    assert torch.equal(tables.by_length[4], torch.arange(4).float())
    accepted(lambda net, y: y * net.tables.of(4), tables=Tables())


def test_a_tensor_that_is_made_of_shapes_in_each_call_is_no_change() -> None:
    last: dict[str, Tensor] = {}

    def mask(net: Net, y: Tensor) -> Tensor:
        last["mask"] = torch.ones(len(y), len(y)).tril()
        return last["mask"] @ y

    accepted(mask)


def test_what_is_restored_is_no_change() -> None:
    state: dict[str, Any] = {"on": False, "depth": 0}
    stack: list[Tensor] = []

    @contextlib.contextmanager
    def on() -> Iterator[None]:
        state["on"] = True
        try:
            yield
        finally:
            state["on"] = False

    def nested(net: Net, y: Tensor) -> Tensor:
        net.depth += 1
        state["depth"] += 1
        stack.append(y)
        with on():
            result = stack.pop() * net.depth * (2 if state["on"] else 1)
        net.depth -= 1
        state["depth"] -= 1
        return result

    accepted(nested, depth=0)


def test_what_is_only_read_or_made_in_the_call_is_no_change() -> None:
    settings = Statistics(calls=2, values=[1, 2])
    functions = {"relu": torch.relu, "twice": lambda y: y * 2}

    def local(net: Net, y: Tensor) -> Tensor:
        made, position, own = [y], itertools.count(1), Statistics()
        made.append(functions["relu"](y) * next(position))
        own.calls += settings.calls
        return functions["twice"](sum(made)) * own.calls * settings.values[1]

    accepted(local)


def test_a_registered_module_may_be_reached_from_elsewhere() -> None:
    norm = nn.BatchNorm1d(4)
    net = Net(lambda net, y: net.norm(y), norm=norm, same=[norm])
    plan = sw.plan(net, (BATCH,), devices=1)
    assert plan.graph is not None and len(plan.graph.updates) == 3
