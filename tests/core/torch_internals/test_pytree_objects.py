"""Objects as arguments and results of calls: flattened by fields, and rebuilt."""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.pytree_objects import UnreadField
from shardwright.errors import CaptureError

X, Y = torch.ones(8, 4), torch.arange(32.0).view(8, 4)


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    factor: float = 1.0
    kind: Kind = Kind.SUM


@dataclass(frozen=True, slots=True)
class Outer:
    x: Tensor
    inner: Batch

    @property
    def y(self) -> Tensor:
        return self.inner.y


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self._y, self.size = x, y, len(x)

    @property
    def y(self) -> Tensor:
        return self._y * self.size


class Slotted:
    __slots__ = ("unset", "x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Ordered(OrderedDict[str, Any]):
    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


class Mapped(UserDict[str, Any]):
    x = property(lambda self: self.data["x"])
    y = property(lambda self: self.data["y"])


class Unkeyed:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


torch.utils._pytree.register_pytree_node(
    Unkeyed, lambda held: ([held.x, held.y], None), lambda parts, _: Unkeyed(*parts)
)

MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dataclass": Batch,
    "a frozen dataclass with another": lambda x, y: Outer(x, Batch(y, y)),
    "a named tuple": Pair,
    "a plain object": Plain,
    "an object with slots": Slotted,
    "a dictionary that is its own attributes": lambda x, y: Attributes(x=x, y=y),
    "a class of ordered dictionaries": lambda x, y: Ordered(x=x, y=y),
    "a class of `UserDict`": lambda x, y: Mapped(x=x, y=y),
    "a namespace": lambda x, y: SimpleNamespace(x=x, y=y),
    "a registered class without keys": Unkeyed,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = (self.linear(batch.x) - batch.y).square().mean()
        return loss


@pytest.mark.parametrize("kind", MAKERS)
def test_an_object_is_flattened_by_fields_and_rebuilt(kind: str) -> None:
    made = MAKERS[kind](X, Y)
    pytree.register_objects(made)
    leaves, spec = pytree.tree_flatten(made)
    assert [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rebuilt = pytree.tree_unflatten([x + 1 for x in leaves], spec)
    assert type(rebuilt) is type(made)
    torch.testing.assert_close(rebuilt.x, made.x + 1)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(made)[0]]
    assert len(set(paths)) == len(leaves)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_model_trains_on_an_object_as_the_eager_module(kind: str, micro_batches: int) -> None:
    make, eager = MAKERS[kind], Net()
    plan = sw.plan(eager, (make(X, Y),), devices=1, micro_batches=micro_batches)
    net = sw.parallelize(eager, plan, copy=True)
    if micro_batches == 1 or kind != "a plain object":  # The size of a micro-batch is its own.
        loss = eager(make(X, Y))
        loss.backward()
        torch.testing.assert_close(net.train_step(make(X, Y)), loss.detach())
        torch.testing.assert_close(net.linear.weight.grad, eager.linear.weight.grad)
    torch.testing.assert_close(net(make(X[:4], Y[:4])), eager(make(X[:4], Y[:4])))


def test_numbers_and_constants_of_an_object_select_the_program() -> None:
    class Reader(Net):
        def forward(self, batch: Batch) -> Tensor:
            y = self.linear(batch.x) * batch.factor
            return y.mean() if batch.kind is Kind.MEAN else y.sum()

    eager = Reader()
    net = sw.parallelize(eager, sw.plan(eager, (Batch(X, Y),), devices=1), copy=True)
    for batch in (Batch(X, Y), Batch(X, Y, 3.0), Batch(X, Y, kind=Kind.MEAN), Batch(X, Y)):
        torch.testing.assert_close(net(batch), eager(batch))


class Options:
    def __init__(self, factor: float) -> None:
        self.factor = factor


def test_an_object_without_tensors_is_a_constant_with_contents() -> None:
    class Reader(Net):
        def forward(self, x: Tensor, options: Options | None = None) -> Tensor:
            factor = 2.0 if options is None else options.factor
            return self.linear(x).sum() * factor * (3 if options is options_of_plan else 1)

    options_of_plan = Options(5.0)
    eager = Reader()
    net = sw.parallelize(eager, sw.plan(eager, (X, options_of_plan), devices=1), copy=True)
    for options in (options_of_plan, Options(5.0), None):
        torch.testing.assert_close(net(X, options), eager(X, options))
    options_of_plan.factor = 4.0
    torch.testing.assert_close(net(X, options_of_plan), eager(X, options_of_plan))


class Locked:
    def __init__(self, x: Tensor) -> None:
        self.x, self.y = x, x
        self.tokenizer = object.__new__(type("Tokenizer", (), {"__module__": "threading"}))


def test_a_field_of_which_nothing_is_known_is_refused_where_it_is_read() -> None:
    class Reader(Net):
        def forward(self, batch: Any) -> Tensor:
            return self.linear(batch.x).sum() * len(batch.tokenizer)

    sw.plan(Net(), (Locked(X),), devices=1)
    with pytest.raises(CaptureError, match="reads a field of class Tokenizer"):
        sw.plan(Reader(), (Locked(X),), devices=1)
    field = pytree.tree_map(lambda leaf: leaf, Locked(X)).tokenizer
    assert isinstance(field, UnreadField)
    with pytest.raises(CaptureError, match="reads a field of class Tokenizer"):
        bool(field)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_tensors_in_a_set_are_refused_where_they_are_read(kind: type[Any]) -> None:
    @dataclass
    class Tensors:
        members: Any

    class Reader(Net):
        def forward(self, x: Tensor, tensors: Tensors) -> Tensor:
            return self.linear(x).sum() * sum(tensors.members)

    sw.plan(Reader(), (X, Tensors(kind({2.0}))), devices=1)
    with pytest.raises(CaptureError, match=f"reads a field of class {kind.__name__}"):
        sw.plan(Reader(), (X, Tensors(kind({torch.ones(())}))), devices=1)


def test_an_object_that_contains_itself_is_refused() -> None:
    made = Plain(X, Y)
    made.__dict__["self"] = made
    with pytest.raises(CaptureError, match="contains itself"):
        sw.plan(Net(), (made,), devices=1)


def test_changes_of_an_argument_are_made_in_each_call() -> None:
    class Writer(Net):
        def forward(self, batch: Plain) -> Plain:
            batch.size = batch.size + 1
            batch.result = self.linear(batch.x).sum() * batch.size  # type: ignore[attr-defined]
            return batch

    eager = Writer()
    net = sw.parallelize(eager, sw.plan(eager, (Plain(X, Y),), devices=1), copy=True)
    for _ in range(2):
        made, wanted = Plain(X, Y), Plain(X, Y)
        assert net(made) is made
        eager(wanted)
        torch.testing.assert_close(vars(made), vars(wanted))


@pytest.mark.parametrize("kind", MAKERS)
def test_any_object_is_a_result(kind: str) -> None:
    make = MAKERS[kind]

    class Maker(Net):
        def forward(self, x: Tensor) -> Any:
            return make(self.linear(x), x)

    eager = Maker()
    net = sw.parallelize(eager, sw.plan(eager, (X,), devices=1), copy=True)
    result, wanted = net(X), eager(X)
    assert type(result) is type(wanted)
    torch.testing.assert_close(result.x, wanted.x)
    torch.testing.assert_close(result.y, wanted.y)


def test_modules_tensors_and_enumerations_are_no_objects_with_fields() -> None:
    held = [nn.Linear(2, 2), X, Kind.SUM, print, int, torch.float32, pickle.Pickler]
    pytree.register_objects(held)
    leaves = pytree.tree_leaves(held)
    assert all(leaf is other for leaf, other in zip(leaves, held, strict=True))


def test_output_classes_of_transformers_that_forward_imports_stay_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "late_output.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Any\n"
        "from transformers.utils import ModelOutput\n"
        "@dataclass\n"
        "class LateOutput(ModelOutput):\n"
        "    logits: Any = None\n"
        "    loss: Any = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Late(Net):
        def forward(self, x: Tensor) -> Any:
            from late_output import LateOutput

            return LateOutput(logits=self.linear(x))

    eager = Late()
    net = sw.parallelize(eager, sw.plan(eager, (X,), devices=1), copy=True)
    # Previously the eager call failed, as the capture had registered the class.
    result, wanted = net(X), eager(X)
    assert type(result) is type(wanted) and list(result) == ["logits"]
    torch.testing.assert_close(result.logits, wanted.logits)
