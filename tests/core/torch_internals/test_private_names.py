"""All private names of PyTorch are in one table, exist, and are used in one room only."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed._local_tensor import LocalTensorMode

from core.torch_internals.private_names import ATEN_OPERATORS, OLDEST, PRIVATE_NAMES

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "shardwright"
ROOM = PACKAGE / "core" / "torch_internals"
LIBRARIES = PACKAGE / "integrations"
"""Overrides methods of other libraries."""
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent not in (ROOM, LIBRARIES))


class OwnTensor(torch.Tensor):
    """What `nn.Parameter` leaves of its class."""


MODULE = nn.Module()
nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(MODULE, ())

OBJECTS = {
    # A function hides this module.
    "torch.distributed._composable.replicate": importlib.import_module(
        "torch.distributed._composable.replicate"
    ),
    "torch.distributed._local_tensor.LocalTensorMode": LocalTensorMode(1),
    "torch._ops.OpOverload": torch.ops.aten.mean.dim,
    "torch.autocast": torch.autocast("cpu"),
    "torch.autograd.graph.Node": torch.zeros(1, requires_grad=True).exp().grad_fn,
    "torch.fx.Node": fx.Graph().placeholder("x"),
    "torch.nn.Module": MODULE,
    "torch.nn.RNNBase": nn.LSTM(1, 1),
    "torch.nn.Parameter": nn.Parameter(torch.zeros(1).as_subclass(OwnTensor)),
}
"""What has names that its class has not."""
OTHERS = {
    "_apply_gate",
    "_attn_implementation",
    "_exit",
    "_experts_implementation",
    "_from_config",
    "_getframe",
    "_current_frames",
    "_supports_sdpa",
}
"""Private names of transformers, and of `sys` and `os`."""


def resolve(path: str) -> Any:
    """What stands at a path; modules are imported.

    Raises:
        AttributeError: if nothing does.
    """
    thing, parts = importlib.import_module("torch"), path.split(".")
    for end, part in enumerate(parts[1:], start=2):
        name = ".".join(parts[:end])
        try:
            thing = getattr(thing, part)
        except AttributeError:
            try:
                thing = importlib.import_module(name)
            except ImportError:
                raise AttributeError(name) from None
        thing = OBJECTS.get(name, thing)
    return thing


def exists(path: str) -> bool:
    try:
        resolve(path)
    except AttributeError:
        return False
    return True


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


LISTED = {entry.path.rpartition(".")[2] for entry in PRIVATE_NAMES}


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a file gives to what it defines and to entries of `vars(thing)`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.slice, ast.Constant)
        ):
            found.add(str(node.slice.value))
    return {name for name in found if is_private(name)}


def dotted(node: ast.AST) -> str:
    """`torch.ops.aten` of the nested attributes; what is no name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, owner and name of everything that a file imports from torch, and of all attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                for part in (*str(node.module).split("."), alias.name):
                    yield node.lineno, str(node.module), part
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield from ((node.lineno, alias.name, part) for part in alias.name.split("."))
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node.value), node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("delattr", "getattr", "hasattr", "setattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, dotted(node.args[0]), str(node.args[1].value)


@cache
def trees() -> dict[str, ast.AST]:
    """Of the files outside of the room."""
    texts = {str(path): path.read_text(encoding="utf-8") for path in MODULES}
    return {path: ast.parse(text) for path, text in texts.items()}


def violations(tree: ast.AST, own: set[str]) -> list[str]:
    """Uses of private names of PyTorch, given those that this package defines for itself."""
    return [
        f"line {line}: {owner}.{name}"
        for line, owner, name in names_used(tree)
        if (is_private(name) or (name in LISTED and name.startswith("_")))
        and owner.removeprefix("torch.ops.") != "aten"
        and name not in OTHERS
        and (name not in own or owner.split(".")[0] == "torch")
    ]


def texts(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_the_installed_version_has_each_name_if_it_is_not_older_than_the_name() -> None:
    needed = {
        entry.path: release(torch.__version__) >= release(entry.since)
        for entry in PRIVATE_NAMES
        if not entry.before or release(torch.__version__) < release(entry.before)
    }
    assert {path: exists(path) for path in needed} == needed


def test_a_name_that_does_not_exist_is_not_resolved() -> None:
    for path in ("torch._no_such_name", "torch.nn.Module._no_such_name", "torch._no.such"):
        with pytest.raises(AttributeError):
            resolve(path)


def test_no_name_is_listed_twice_or_without_a_purpose() -> None:
    paths = [entry.path for entry in PRIVATE_NAMES]
    assert len(set(paths)) == len(paths)
    assert all(entry.purpose for entry in PRIVATE_NAMES)


def test_the_oldest_version_is_the_one_that_is_required() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"torch>=([^"]*)"', text) == [OLDEST]
    assert all(release(entry.since) >= release(OLDEST) for entry in PRIVATE_NAMES)


def test_the_room_uses_every_name_of_the_table_and_no_other() -> None:
    used: set[str] = set()
    for path in ROOM.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used.update(name for _, _, name in names_used(tree))
    # Methods of modes that others call.
    assert used >= LISTED - {"rank_map", "disable", "_should_skip_dynamo"}
    components = {part for entry in PRIVATE_NAMES for part in entry.path.split(".")}
    assert {name for name in used if is_private(name)} <= components


def test_no_file_outside_of_the_room_uses_a_private_name_of_torch() -> None:
    own = set().union(*map(own_names, trees().values())) - LISTED
    found = {path: violations(tree, own) for path, tree in trees().items()}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(found) > 100


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree as pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.testing._internal import common_utils",
        "import torch._ops",
        "isinstance(x, torch._ops.OpOverload)",
        "torch._foreach_mul_(tensors, 2.0)",
        "torch.ops._c10d_functional.wait_tensor",
        "parameter._local_tensor.add_(1)",
        "self._modules = module._modules",
        "schedule._no_such_name",
        "getattr(options, '_timeout', None)",
    ],
)
def test_a_private_name_of_torch_is_reported(source: str) -> None:
    assert violations(ast.parse(source), {"_own"})


@pytest.mark.parametrize(
    "source",
    [
        "from torch import nn",
        "self._own = other._own",
        "aten._to_copy.default",
        "torch.ops.aten._softmax",
        "module.__class__.__name__",
        "sys._getframe(1)",
    ],
)
def test_names_of_our_own_and_operators_are_allowed(source: str) -> None:
    assert violations(ast.parse(source), {"_own"}) == []


def test_every_operator_with_an_underscore_is_listed_and_exists() -> None:
    used = set()
    for tree in trees().values():
        used.update(name for _, owner, name in names_used(tree) if owner.endswith("aten"))
        used.update(text for text in texts(tree) if text.isidentifier())
    packets = {name for name in used if is_private(name) and hasattr(torch.ops.aten, name)}
    assert packets == set(ATEN_OPERATORS)
