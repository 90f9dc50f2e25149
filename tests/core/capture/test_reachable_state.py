"""What `forward` changes outside of its module's tensors happens in each call of a plan, or is
refused by name."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
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


def refused(
    then: Callable[[Any, Tensor], Any],
    what: str,
    *,
    advances: bool = False,
    **attributes: Any,
) -> None:
    """Asserts that the change is refused inside of another module, by its name."""
    net = nn.Sequential(Net(then, **attributes))
    with pytest.raises(sw.CaptureError) as caught:
        sw.capture(net, (BATCH,))
    message = str(caught.value)
    assert f"`forward` changes the {what}" in message, message
    # A third line names a `sw.local_map` if the model can be captured with it.
    assert message.count("\n") == 1 + ("sw.local_map" in message)
    buffers = "`register_buffer`" in message and "training loop" in message
    assert "items[self.step % len(items)]" in message if advances else buffers


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
    "[deque of outputs]": (lambda: deque(maxlen=2), lambda state, y: state.append(y.detach())),
    "[counter]": (Counter, lambda state, y: state.update(["calls"])),
    "[default]": (lambda: defaultdict(list), lambda state, y: state["y"].append(1)),
    "[ordered]": (OrderedDict, lambda state, y: state.update(calls=len(state) + 1)),
    "[moved]": (
        lambda: OrderedDict(a=1, b=2),
        lambda state, y: y * (state.move_to_end(next(iter(state))) or next(iter(state.values()))),
    ),
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


REFUSED = ("[array]", "[bytes]", "[count]")
"""Kinds of state that TorchDynamo cannot change, or changes otherwise than Python."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(name: str) -> None:
    make, change = OF_ATTRIBUTES[name]
    advances = name == "[count]"
    what = "attribute '0.state"
    refused(lambda net, y: change(net.state, y), what, advances=advances, state=make())
    if not advances:
        state = make()
        refused(lambda net, y: change(state, y), "variable ")


def contents(value: Any) -> Any:
    """What an object holds, for comparisons; sums in the place of tensors."""
    if isinstance(value, Tensor):
        return pytest.approx(value.sum().item(), abs=1e-4)
    if isinstance(value, OrderedDict):
        return [(key, contents(part)) for key, part in value.items()]
    if isinstance(value, dict):
        return {key: contents(part) for key, part in value.items()}
    if isinstance(value, list | deque):
        return [contents(part) for part in value]
    if isinstance(value, set):
        return set(value)
    if isinstance(value, Slotted):
        return value.calls
    if isinstance(value, nn.Module):
        return {name: part for name, part in vars(value).items() if isinstance(part, float)}
    return contents(vars(value)) if hasattr(value, "__dict__") else value


def calls_equal_eager(make: Callable[[], nn.Module], state: Callable[[], Any], calls: int) -> None:
    """Asserts that results and `state()` are those of the eager module, after each call."""
    torch.manual_seed(0)
    eager = make()
    wanted = [(eager(BATCH + i).item(), contents(state())) for i in range(calls)]
    torch.manual_seed(0)
    net = make()
    before = contents(state())
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    assert contents(state()) == before, "planning has changed the state"
    for i, (loss, after) in enumerate(wanted):
        assert planned(BATCH + i).item() == pytest.approx(loss, rel=1e-4)
        assert contents(state()) == after


@pytest.mark.parametrize("is_attribute", [True, False], ids=["attribute", "closure"])
@pytest.mark.parametrize("name", [name for name in OF_ATTRIBUTES if name not in REFUSED])
def test_what_an_object_holds_changes_in_each_call(name: str, is_attribute: bool) -> None:
    if name in ("[ordered]", "[moved]") and not is_attribute:
        pytest.skip("TorchDynamo cannot update an `OrderedDict` of an enclosing scope")
    make, change = OF_ATTRIBUTES[name]
    holder: list[Any] = []

    def build() -> nn.Module:
        state = make()
        holder[:] = [state]
        if is_attribute:
            return nn.Sequential(Net(lambda net, y: change(net.state, y), state=state))
        return nn.Sequential(Net(lambda net, y: change(state, y)))

    calls_equal_eager(build, lambda: holder[0], calls=3)


def test_variables_of_enclosing_scopes_change_in_each_call() -> None:
    variables: list[Callable[[], Any]] = []

    def build() -> nn.Module:
        calls, mean = 0, torch.zeros(())

        def count(net: Net, y: Tensor) -> Tensor:
            nonlocal calls, mean
            calls += 1
            mean = 0.9 * mean + y.detach().mean()
            return y * calls - mean

        variables[:] = [lambda: [calls, mean]]
        return nn.Sequential(Net(count))

    calls_equal_eager(build, lambda: variables[0](), calls=4)


def test_attributes_that_a_call_sets_or_deletes_are_as_in_eager() -> None:
    nets: list[nn.Module] = []

    def build(then: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            nets[:] = [nn.Sequential(Net(then, calls=0))]
            return nets[0]

        return made

    def update(net: Net, y: Tensor) -> Tensor:
        vars(net).update(calls=net.calls + 1)
        return y * net.calls

    def delete(net: Net, y: Tensor) -> None:
        if hasattr(net, "calls"):
            del net.calls

    for then in (update, delete):
        calls_equal_eager(build(then), lambda: getattr(nets[0][0], "calls", None), calls=4)  # type: ignore[index]


def test_classes_and_global_variables_change_in_each_call() -> None:
    class Elsewhere:
        calls = 0

        @classmethod
        def tick(cls) -> int:
            cls.calls += 1
            return cls.calls

    def deep(net: Net, y: Tensor) -> Tensor:
        set_calls(STATISTICS.inner)
        return y * STATISTICS.inner.calls

    def build(then: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            Elsewhere.calls = STATISTICS.inner.calls = 0
            return nn.Sequential(Net(then))

        return made

    calls_equal_eager(build(lambda net, y: y * Elsewhere.tick()), lambda: Elsewhere.calls, calls=4)
    calls_equal_eager(build(deep), lambda: STATISTICS.inner.calls, calls=4)


def test_what_decorators_hooks_and_default_values_count_is_counted() -> None:
    counts: list[list[int]] = []

    def decorated() -> nn.Module:
        calls = [0]
        counts[:] = [calls]

        def wrapper(*args: Any) -> Any:
            calls[0] += 1
            return args[1] * calls[0]

        return nn.Sequential(Net(wrapper))

    def hooked() -> nn.Module:
        calls = [0]
        counts[:] = [calls]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            calls[0] += 1
            return output * calls[0]

        net = nn.Sequential(nn.Linear(4, 4), Net(lambda net, y: y))
        net[0].register_forward_hook(hook)
        return net

    def defaulted() -> nn.Module:
        seen: list[int] = []
        counts[:] = [seen]

        def listing(net: Net, y: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(1)
            return y * len(seen)

        return nn.Sequential(Net(listing))

    for build in (decorated, hooked, defaulted):
        calls_equal_eager(build, lambda: counts[0], calls=4)


def test_what_is_left_of_python_state_is_refused_by_name() -> None:
    def counted(y: Tensor) -> Tensor:
        set_calls(counted)
        return y

    counted.calls = 0  # type: ignore[attr-defined]
    refused(lambda net, y: counted(y), "attribute 'calls' of the function ")
    activation = Activation()
    refused(lambda net, y: activation(y), "variable 'activation.calls'")


def test_a_position_is_not_moved() -> None:
    for each in (itertools.count(), iter([1, 2, 3]), enumerate("abc"), itertools.cycle("ab")):
        refused(
            lambda net, y, each=each: y * len([next(each)]),
            "default value of 'each' ",
            advances=True,
        )


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
DRAWS = np.random.default_rng(0)
STATISTICS = Statistics(inner=Statistics())


def test_global_variables_that_cannot_be_set_are_refused() -> None:
    def import_and_set(net: Net, y: Tensor) -> None:
        import settings_of_this_test

        settings_of_this_test.step += 1

    settings: Any = ModuleType("settings_of_this_test")
    settings.__file__, settings.step = __file__, 0
    sys.modules["settings_of_this_test"] = settings
    try:
        for then, what in (
            (lambda net, y: y * DRAWS.random(), "global variable 'DRAWS'"),
            (lambda net, y: VARIABLE.set(VARIABLE.get() + 1), "global variable 'VARIABLE'"),
            (import_and_set, "global variable 'step' of settings_of_this_test"),
        ):
            refused(then, what)
    finally:
        del sys.modules["settings_of_this_test"]


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


@cache
def _registry() -> dict[str, int]:
    return {}


class _CountsInACache(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        counts = _registry()
        counts["calls"] = counts.get("calls", 0) + 1
        return x * counts["calls"]


def test_a_change_of_what_a_cached_function_returned_is_refused() -> None:
    with pytest.raises(sw.CaptureError, match=r"result of `_registry` under `functools.lru_cache`"):
        sw.capture(_CountsInACache(), (torch.ones(4, 4),))


class _Entries(OrderedDict[str, int]):
    calls = 0


class _Numbers(set[int]):
    calls = 0


class _Log(list[int]):
    calls = 0

    def clear(self) -> None:
        raise AssertionError("a method of the user")


def test_a_trace_that_fails_leaves_containers_as_they_were() -> None:
    entries, numbers, log = _Entries(a=1, b=2), _Numbers((1,)), _Log((1,))
    entries.calls = numbers.calls = log.calls = 1

    def change(net: Net, y: Tensor) -> None:
        entries["c"] = 3
        entries.move_to_end("a")
        numbers.add(2)
        log.append(2)
        entries.calls = numbers.calls = log.calls = 2
        raise KeyError("the trace fails")

    with pytest.raises(sw.CaptureError, match="the trace fails"):
        sw.capture(nn.Sequential(Net(change)), (BATCH,))
    assert (list(entries.items()), numbers, log) == ([("a", 1), ("b", 2)], {1}, [1])
    assert [vars(each) for each in (entries, numbers, log)] == [{"calls": 1}] * 3


def test_an_array_that_is_replaced_is_a_change() -> None:
    scales = SimpleNamespace(array=np.ones(3))

    def scaled(net: Net, y: Tensor) -> Tensor:
        return y * float(scales.array.sum())

    net = nn.Sequential(Net(scaled))
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for number in (1.0, 2.0):
        scales.array = np.full(3, number)
        torch.testing.assert_close(planned(BATCH), net(BATCH))
