"""Objects named by "module:callable"."""

from collections.abc import Callable
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.errors import ConfigError
from shardwright.run.config import Run
from shardwright.run.config.objects import call_target

MODULE = """
constant = 3
class Outer:
    @staticmethod
    def make(width, depth=2):
        return ("made", width, depth)
def make(width):
    return width
def fail():
    return 1 / 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "a_module_of_targets.py").write_text(MODULE)
    (tmp_path / "a_module_that_needs_more.py").write_text("import surely_not_installed\n")
    return tmp_path


def test_a_target_in_the_folder_is_called_with_the_arguments(folder: Path) -> None:
    target = "a_module_of_targets:Outer.make"
    assert call_target("model.target", target, {"width": 5}, folder) == ("made", 5, 2)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("no_such_module:f", {}, "no module 'no_such_module' in .* or among the installed"),
        (
            "a_module_of_targets:mkae",
            {},
            "module a_module_of_targets has no attribute mkae; did you mean make?",
        ),
        ("a_module_of_targets:constant", {}, "is 3, which is not callable"),
        ("a_module_of_targets:make", {"widht": 1}, r"make\(width\) cannot be called: missing a"),
    ],
)
def test_a_target_that_cannot_be_called_is_a_config_error(
    folder: Path, target: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^model.target: .*{message}"):
        call_target("model.target", target, arguments, folder)


def test_an_error_inside_the_users_module_is_named_with_its_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No module named 'surely_not_installed'") as caught:
        call_target("model.target", "a_module_that_needs_more:f", {}, folder)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ConfigError, match=r"^model.target: ZeroDivisionError: .*\(a_module.*py:\d"):
        call_target("model.target", "a_module_of_targets:fail", {}, folder)
    with pytest.raises(ConfigError, match=r"^model.target: "):
        call_target("model.target", "builtins:dict.fromkeys", {}, folder)
    with pytest.raises(ConfigError, match=r"^model.target: "):
        call_target("model.target", "..:x", {}, folder)


NETWORKS = """
import torch
from torch import nn

def data():
    return torch.ones(16, 8), torch.zeros(16, dtype=torch.long)

class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.register_buffer("scale", torch.arange(8.0))
        self.offset = torch.ones(8)
        self.norm = float(self.linear.weight.detach().norm()) if width < 100 else 1.0

    def forward(self, x):
        return self.linear(x * self.scale + self.offset) / self.norm

def drawn_in_place(width):
    net, weight = Scaled(width), torch.tensor([[1.0] * 8] * width)
    net.linear.weight = nn.Parameter(weight.normal_())
    return net
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], sw.Plan]:
    """The plan of a network of this width."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "networks_of_targets.py").write_text(NETWORKS)

    def plan(name: str, width: int) -> sw.Plan:
        model = f"{{target: 'networks_of_targets:{name}', arguments: {{width: {width}}}}}"
        data = "{target: 'networks_of_targets:data', batch_size: 8}"
        (tmp_path / "run.yaml").write_text(f"model: {model}\ndata: {data}\n")
        return Run.from_file(tmp_path / "run.yaml").plan(devices=2)

    return plan


def test_planning_needs_no_memory_for_the_parameters_of_a_target(
    planned: Callable[[str, int], sw.Plan],
) -> None:
    assert "1000000000000" in planned("Scaled", 10**12).to_json()
    with pytest.raises(ConfigError, match=r"run\.yaml: model\.target: .*overflow"):
        planned("Scaled", 10**18)


def test_a_target_whose_code_needs_values_is_planned_as_it_is(
    planned: Callable[[str, int], sw.Plan],
) -> None:
    assert planned("drawn_in_place", 4).cuts == planned("Scaled", 4).cuts
