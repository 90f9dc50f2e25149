"""What is not installed is one error that says what to install."""

import errno
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright import errors
from shardwright.errors import system_remedy
from shardwright.models import LoRA, build, build_hf
from shardwright.models.lora import adapt
from shardwright.run.data.data import digits

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("transformers", "transformers", lambda: build("llama2_7b_tiny")),
        ("transformers", "transformers", lambda: build_hf({"model_type": "gpt2"})),
        ("peft", "transformers", lambda: adapt(build("pangualpha_2_6b_tiny"), LoRA())),
        ("sklearn.datasets", "run", lambda: digits(8)),
    ],
)
def test_a_missing_package_is_one_error_that_names_its_extra(
    module: str, extra: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.ShardwrightError, match=rf"pip install 'shardwright\[{extra}\]'"):
        use()


@pytest.mark.parametrize(
    "message",
    [
        "x" * 5_000,
        "words " * 1_000,
        "no such keys: " + ", ".join(f"key_{number}" for number in range(900)),
        "\n".join(f"line {number} has a problem" for number in range(900)),
        "no such key\nvalid are " + ", ".join(f"key_{number}" for number in range(900)),
    ],
)
def test_a_long_message_loses_its_middle(message: str) -> None:
    error = errors.PlanError(message)
    assert len(str(error)) <= errors.MAX_MESSAGE < len(error.args[0])
    head, tail = str(error).split("… and more")
    assert message.startswith(head) and message.endswith(tail)
    assert "x" in message or (head[-1] in " \n" and tail[0] in ", \n")


def test_a_long_list_of_the_problem_leaves_the_remedy() -> None:
    keys = ", ".join(f"key_{number}" for number in range(900))
    problem, remedy = str(errors.ConfigError(f"no such keys: {keys}\nremove them")).split("\n")
    assert problem.endswith("key_899") and remedy == "remove them"


def test_a_note_is_at_the_end_of_the_problem() -> None:
    error = errors.PlanError("no such key\nremove it")
    assert errors.with_note(error, " in a.yaml") == "no such key in a.yaml\nremove it"
    assert errors.one_line(error) == "no such key; remove it"
    assert errors.with_note(errors.PlanError("no"), " way") == "no way"


def test_every_extra_that_an_error_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = {part.split('"')[0] for part in sources.split('needs_extra("')[1:]}
    assert {"transformers", "tools"} <= named <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "free some space"), (errno.EACCES, "")],
)
def test_limits_of_the_system_have_a_remedy(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    assert (remedy in system_remedy(error)) and bool(remedy) == bool(system_remedy(error))
