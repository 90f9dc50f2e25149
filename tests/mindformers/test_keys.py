"""Values as people write them, and keys that nobody reads."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.errors import ConfigError
from shardwright.mindformers.keys import Keys


def keys(**content: Any) -> Keys:
    return Keys(content, "optimizer", "run.yaml")


@pytest.mark.parametrize("given", [1e-8, "1e-8", "1.e-8", " 0.00000001 "])
def test_a_number_may_be_text(given: Any) -> None:
    assert keys(eps=given).number("eps") == 1e-8


@pytest.mark.parametrize("given", ["one", True, [1], "nan", "inf"])
def test_what_is_no_number_is_an_error_with_its_path(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^run\.yaml: optimizer\.eps: .* is not a number\n"):
        keys(eps=given).number("eps")


@pytest.mark.parametrize(("given", "number"), [(8, 8), ("8", 8), (8.0, 8)])
def test_a_whole_number_may_be_text_or_end_in_zero(given: Any, number: int) -> None:
    assert keys(heads=given).integer("heads") == number


@pytest.mark.parametrize(
    ("given", "message"), [(7.5, "7.5 is not an integer"), (0, "0 is out of range\nset")]
)
def test_a_part_or_too_little_is_an_error(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keys(heads=given).integer("heads")


@pytest.mark.parametrize(("given", "flag"), [(True, True), ("False", False), ("true", True)])
def test_a_flag_may_be_text(given: Any, flag: bool) -> None:
    assert keys(on=given).flag("on", not flag) == flag


@pytest.mark.parametrize(
    ("given", "size"), [("58GB", 58 * 2**30), ("0.5 gb", 2**29), ("64MB", 2**26)]
)
def test_a_size_has_a_unit(given: str, size: int) -> None:
    assert keys(memory=given).size("memory") == size


@pytest.mark.parametrize("given", ["58", 58, "GB", "0GB", "-1GB"])
def test_a_size_without_a_unit_or_a_number_is_an_error(given: Any) -> None:
    with pytest.raises(ConfigError, match="is not a memory size"):
        keys(memory=given).size("memory")


@pytest.mark.parametrize("given", [None, "None", ""])
def test_none_and_nothing_are_as_if_the_key_were_not_there(given: Any) -> None:
    assert keys(method=given).string("method", "plain") == "plain"
    with pytest.raises(ConfigError, match=r"optimizer\.method: the key is missing"):
        keys(method=given).number("method")


def test_text_for_a_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'on' is not a mapping"):
        keys(schedule="on").section("schedule")


def test_unread_keys_are_named_once_a_whole_section_as_one() -> None:
    given = keys(lr=1.0, momentum=2.0, inner={"a": 1, "b": 2}, other={"c": 3})
    given.number("lr")
    given.section("inner").number("a")
    assert list(given.unread()) == ["optimizer.momentum", "optimizer.inner.b", "optimizer.other"]


def test_a_key_that_is_probably_misspelt_says_what_is_meant() -> None:
    given = keys(learning_rte=1.0)
    given.number("learning_rate", 0.1)
    assert list(given.unread()) == ["optimizer.learning_rte (did you mean learning_rate?)"]
