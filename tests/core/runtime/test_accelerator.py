"""What is said of accelerators in one place, and chosen there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright.core.runtime import accelerator
from shardwright.errors import ConfigError

SOURCES = Path(accelerator.__file__).parents[2]
PLACE = Path(accelerator.__file__)
KINDS = re.compile(r"cuda|nccl|hccl|xccl|rccl|gloo|npu|xpu|mps|hip", re.I)
CALLS = re.compile(r"Stream|accelerator|get_device_module|[gs]et_rng_state|pin_memory")
DATA = {
    "core/cost/cluster.py": "how a link's collectives go, a word of the cluster file",
    "core/cost/cluster_file.py": "the same word, where the file is read",
    "core/cost/collectives.py": "the same, in the time model",
    "core/cost/local_cluster.py": "the same, of this machine's assumed link",
    "core/cost/measure.py": "the same, of its measured link",
    "core/layout/collective_spec.py": "the same, of each collective",
    "core/capture/autocast.py": "whose autocast has which lists of operators",
    "core/capture/canonicalize.py": "arguments of captured operators",
    "core/deferred/tensor.py": "arguments of recorded operators",
    "core/graph/blockwise_attention.py": "on which devices PyTorch has a kernel",
    "core/graph/segment_matmul.py": "on which devices PyTorch has a kernel",
    "integrations/accelerate.py": "the object of Accelerate",
    "integrations/accelerate_loaders.py": "the object of Accelerate",
    "integrations/lightning.py": "an attribute of strategies",
    "integrations/transformers.py": "an attribute of `Trainer`",
}
"""What has such names as data, and chooses nothing by them."""


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts of names and strings, without the texts that document."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and not isinstance(node, ast.Expr):
                if isinstance(child.value, str):
                    yield child.lineno, child.value
            elif isinstance(child, ast.Attribute):
                yield child.lineno, child.attr
            elif isinstance(child, ast.Name):
                yield child.lineno, child.id


def kinds_named(source: str) -> list[str]:
    """The words of `source` that name a kind of accelerator or a backend, or what is asked of
    one."""
    return [
        f"line {line}: {text}"
        for line, text in words(ast.parse(source))
        if any(KINDS.fullmatch(part) for part in re.split(r"[\W_]", text)) or CALLS.fullmatch(text)
    ]


def test_only_one_file_names_kinds_of_accelerators_backends_and_streams() -> None:
    named = {}
    for path in SOURCES.rglob("*.py"):
        place = path.relative_to(SOURCES).as_posix()
        if path != PLACE and not place.startswith(tuple(DATA)):
            named[place] = kinds_named(path.read_text(encoding="utf-8"))
    assert len(named) > 200
    assert not {place: words for place, words in named.items() if words}


def test_such_names_are_seen() -> None:
    for source in (
        "torch.cuda.synchronize()",
        "x.to('cuda:0')",
        "dist.init_process_group('gloo')",
        "torch.Stream(device)",
        "torch.accelerator.device_count()",
        "x.pin_memory()",
    ):
        assert kinds_named(source)
    assert not kinds_named('"""Over NCCL."""\ndevices.synchronize(streams)')


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in accelerator.VISIBLE_DEVICES_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def has(machine: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Lets the machine have accelerators."""
    device = torch.device(kind)
    machine.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    machine.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_computes_on_the_accelerator_of_its_number(
    machine: pytest.MonkeyPatch, kind: str
) -> None:
    has(machine, kind, 8)
    assert accelerator.device_of_rank(3, 8) == torch.device(kind, 3)
    assert accelerator.device_of_rank(0, 1) == torch.device(kind, 0)


def test_without_accelerators_a_rank_computes_on_the_cpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert accelerator.device_of_rank(3, 8) == torch.device("cpu")
    assert accelerator.num_accelerators() == 0


def test_several_ranks_do_not_compute_on_accelerators_that_do_not_communicate(
    machine: pytest.MonkeyPatch,
) -> None:
    has(machine, "mps", 1)
    assert accelerator.device_of_rank(1, 2) == torch.device("cpu")
    assert accelerator.device_of_rank(0, 1) == torch.device("mps", 0)


def test_fewer_accelerators_than_ranks_are_an_error(machine: pytest.MonkeyPatch) -> None:
    has(machine, "cuda", 4)
    for local_rank in (0, 7):
        with pytest.raises(
            ConfigError, match="8 ranks were started on this machine, which has 4 cuda devices"
        ):
            accelerator.device_of_rank(local_rank, 8)


def test_a_rank_that_sees_only_its_own_accelerator_takes_it(machine: pytest.MonkeyPatch) -> None:
    has(machine, "cuda", 1)
    machine.setenv("CUDA_VISIBLE_DEVICES", "5")
    own = accelerator.device_of_rank(5, 8)
    assert own == torch.device("cuda", 0)
    first = accelerator.hardware_of(own)
    machine.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert accelerator.hardware_of(own) != first
    assert accelerator.hardware_of(torch.device("cpu")) is None


def test_the_loopback_interface_is_that_of_every_backend() -> None:
    names = accelerator.loopback_interfaces()
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"} <= names.keys()
    assert all(name.startswith("lo") for name in names.values())
