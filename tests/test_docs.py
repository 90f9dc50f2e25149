"""What the pages show is what happens.

A fence of `python` is executed: with `>>>` its output is compared, without it runs as one of eight
ranks of a process group that sends nothing; a first line `# name.py` makes it a file instead. A
fence of `console` holds commands after `$ ` with their output, which is compared (`...` stands for
any text). Commands in `sh` are only parsed. All fences of a page share one namespace and folder.
"""

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright
from forked import python
from markdown_fences import PAGES, ROOT, Fence, fences
from shardwright.cli import app
from shardwright.core.cost.cluster_file import read_cluster
from shardwright.core.rules import rule
from shardwright.run.config import parse

MODULES = [
    module.name
    for module in pkgutil.walk_packages(shardwright.__path__, "shardwright.")
    if not module.name.endswith("__main__")
    # The only integration whose package is no extra of the tests.
    and (not module.name.endswith(".torchtitan") or importlib.util.find_spec("torchtitan"))
]
CHECKER = doctest.OutputChecker()
ELLIPSIS = doctest.ELLIPSIS
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def of_language(page: Path, *languages: str) -> list[Fence]:
    return [each for each in fences(page.read_text(encoding="utf-8")) if each.language in languages]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fences of a page run: the examples and configurations are at hand."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    # What the text of a plan is as wide as.
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def no_new_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a page registers are forgotten."""
    monkeypatch.setattr(rule, "_RULES", dict(rule._RULES))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nx\n```\n", "line 1: ```: valid are python"),
        ("\n```pyton\n>>> 1\n```\n", "line 2: ```pyton: valid are python"),
        ("text\n>>> 1\n1\n", "line 2: '>>> 1' stands outside of a fence"),
        ("$ shardwright models\n", "line 1: '\\$ shardwright models' stands outside"),
        ("```python\n>>> 1\n", "line 1: a fence that does not end"),
    ],
)
def test_a_page_that_hides_an_example_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fences(text)


def test_a_console_is_commands_with_their_outputs() -> None:
    (fence,) = fences("```console slow\n$ a \\\n  b\n1\n\n2\n$ c\n```\n")
    assert fence.slow
    assert fence.commands() == [("a \\\n  b", "1\n\n2\n"), ("c", "")]
    assert fence.shell_lines() == [["a", "b"], ["c"]]


@every_page
def test_the_python_of_a_page_does_what_it_says(
    page: Path, folder: Path, no_new_rules: None
) -> None:
    write_files(page, folder)
    names: dict[str, Any] = {"__name__": page.stem}
    for fence in of_language(page, "python"):
        if fence.interactive:
            compare_output(fence, names, page)
        elif fence.file_name is None:
            run_as_one_of_eight_ranks(fence, names, page)


def write_files(page: Path, folder: Path) -> None:
    for fence in of_language(page, "python", "yaml"):
        if fence.file_name:
            (folder / fence.file_name).write_text(fence.text, encoding="utf-8")


def compare_output(fence: Fence, names: dict[str, Any], page: Path) -> None:
    name = f"{page.stem}_{fence.line}"
    shown = doctest.DocTestParser().get_doctest(fence.text, {}, name, str(page), fence.line - 1)
    shown.globs = names
    runner = doctest.DocTestRunner(optionflags=ELLIPSIS)
    assert not runner.run(shown, clear_globs=False).failed, f"{page.name}:{fence.line}"


def run_as_one_of_eight_ranks(fence: Fence, names: dict[str, Any], page: Path) -> None:
    """Executes a fence in a process group whose collectives send nothing."""
    code = compile("\n" * (fence.line - 1) + fence.text, str(page), "exec")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        exec(code, names)
    finally:
        dist.destroy_process_group()


def consoles() -> Iterator[Any]:
    for page in PAGES:
        for slow in (False, True):
            opening = "```console slow" if slow else "```console"
            if opening in page.read_text(encoding="utf-8").splitlines():
                marks = [pytest.mark.distributed, *([pytest.mark.slow] if slow else [])]
                name = f"{page.stem}-slow" if slow else page.stem
                yield pytest.param(page, slow, id=name, marks=marks)


@pytest.mark.parametrize(("page", "slow"), list(consoles()))
def test_the_commands_of_a_page_print_what_it_shows(page: Path, slow: bool, folder: Path) -> None:
    write_files(page, folder)
    for fence in of_language(page, "console"):
        for command, output in fence.commands() if fence.slow == slow else ():
            printed = shell(command)
            difference = CHECKER.output_difference(doctest.Example("", output), printed, ELLIPSIS)
            where = f"{page.name}:{fence.line}: {command}\n{difference}"
            assert CHECKER.check_output(output, printed, ELLIPSIS), where


def shell(command: str) -> str:
    """What a command prints on both its outputs, without spaces at the ends of lines."""
    program, *arguments = shlex.split(command)
    if program == "shardwright":
        ended = python("-m", program, *arguments)
        # On a busy machine a command takes long enough to report its progress.
        errors = re.sub(r"^ *\d+\.\d s  .*\n", "", ended.errors[0], flags=re.MULTILINE)
        return without_spaces_at_ends(errors + ended.printed[0])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    return without_spaces_at_ends(done.stdout)


def without_spaces_at_ends(text: str) -> str:
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


@every_page
def test_the_commands_of_a_page_are_spelled_right(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.cli.options.check_exists", lambda *_: None)
    files = {each.file_name for each in of_language(page, "python", "yaml")}
    for fence in of_language(page, "sh", "console"):
        for words in fence.shell_lines():
            check_spelling(words)
            for word in words:
                if re.match(r"(configs|examples)/", word):
                    assert (ROOT / word).exists(), f"{page.name}:{fence.line}: {word}"
    uses = "".join(
        each.text.removeprefix(f"# {each.file_name}")
        for each in of_language(page, "sh", "console", "python")
    )
    assert all(name in uses for name in files if name), f"{page.name}: a file that nothing uses"


def check_spelling(words: list[str]) -> None:
    """Raises:
    AssertionError: a target of make that does not exist.
    Exception: typer's, for a command or an option of `shardwright` that does not exist.
    """
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {each for each in words[1:] if "=" not in each} <= set(targets), words
    if words[0] == "shardwright" and words[1:] != ["--version"]:
        group: Any = typer.main.get_command(app)
        with group.make_context("shardwright", words[1:]) as context:
            name, command, rest = group.resolve_command(context, words[1:])
            command.make_context(name, list(rest), parent=context)


@every_page
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    hosted = re.findall(r"/shardwright/shardwright/blob/main/([^)#\s]+)", text)
    assert [link for link in hosted if not (ROOT / link).exists()] == []


@every_page
def test_the_scripts_of_a_page_parse(page: Path) -> None:
    for fence in of_language(page, "sh"):
        subprocess.run(["bash", "-n"], input=fence.text, text=True, check=True)


@every_page
def test_the_yaml_of_a_page_is_valid(page: Path) -> None:
    for fence in of_language(page, "yaml"):
        if fence.file_name:
            continue  # What reads it is checked, and may be there to show an error.
        keys = yaml.safe_load(fence.text).keys()
        where = f"{page.name}:{fence.line}"
        if "levels" in keys:
            read_cluster(fence.text, where)
        else:
            model = "" if "model" in keys else "model: {name: llama2_7b_tiny}\n"
            parse(model + fence.text, where)


def test_the_examples_of_docstrings_print_what_they_say() -> None:
    results = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.attempted for result in results) > 10
    assert sum(result.failed for result in results) == 0


def test_the_changelog_describes_the_version() -> None:
    releases = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == shardwright.__version__


@every_page
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(def {name}\(|{name} = )", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
