"""Objects named by "module:callable"."""

from pathlib import Path

import pytest

from shardwright.config.objects import call_target
from shardwright.errors import ConfigError

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
        ("no_such_module:f", {}, "no module no_such_module in .* nor among the installed packages"),
        (
            "a_module_of_targets:mkae",
            {},
            "module a_module_of_targets has no mkae; did you mean make?",
        ),
        ("a_module_of_targets:constant", {}, "is 3, which cannot be called"),
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
