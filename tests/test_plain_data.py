"""What is read from JSON and YAML is plain data, or refused with its place."""

from __future__ import annotations

import json
import warnings

import pytest

from shardwright import plain_data
from shardwright.errors import ConfigError
from shardwright.plain_data import (
    EditedFileWarning,
    content_digest,
    parse_json,
    parse_yaml,
    warn_if_edited,
)


def test_numbers_with_an_exponent_are_numbers_and_anchors_are_followed() -> None:
    content = parse_yaml("a: &data {rate: 1e-8, other: 1.e-8}\nb: *data\n", "run.yaml", ConfigError)
    assert content["b"] == {"rate": 1e-8, "other": 1e-8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: *data\n", r"^run\.yaml: line 2, column 4: \*data has no anchor: write &data"),
        ("a: 1\na: 2\n", r"^run\.yaml: line 2, column 1: duplicate key 'a'"),
        (
            "a: &a {b: 1}\nc: {<<: *a}\n",
            r"^run\.yaml: line 2, column 5: the merge key << is not supported",
        ),
        ("a: !!int x\n", r"^run\.yaml: line 1, column 4: 'x' cannot be read as int"),
        *(
            (
                f"a: {number}\n",
                rf"^run\.yaml: line 1, column 4: '{number}' is one number in YAML 1\.1",
            )
            for number in ("010", "-00", "1:30", "1:30.5")
        ),
        ("a: [1\n", r"^run\.yaml: line 2, column 1: expected ',' or ']'"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "run.yaml", ConfigError)


def test_integers_beyond_64_bits_with_a_sign_are_refused() -> None:
    limits = {"a": 2**63 - 1, "b": -(2**63)}
    assert parse_yaml(f"a: {2**63 - 1}\nb: {-(2**63)}\n", "run.yaml", ConfigError) == limits
    for text in (f"a: [{2**63}]", f"a: [{-(2**63) - 1}]"):
        with pytest.raises(ConfigError, match=r"run\.yaml: a\[0\]: integers must be from -2\^63"):
            parse_yaml(text, "run.yaml", ConfigError)


def test_keys_of_several_lines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the key 'a\\nerror: forged' has control characters"):
        parse_yaml('x: {"a\\nerror: forged": 1}', "run.yaml", ConfigError)
    assert parse_yaml('x: "a\\nb"', "run.yaml", ConfigError) == {"x": "a\nb"}


def test_an_edit_is_noticed_and_another_layout_of_the_file_is_not() -> None:
    data = {"a": [1, 0.1, None], "b": {"c": "é"}}
    written = {**data, "digest": content_digest(data)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_edited(json.loads(json.dumps(written, indent=4)), "x.json")
        warn_if_edited(data, "x.json")
    with pytest.warns(EditedFileWarning, match=r"x\.json was edited or damaged"):
        warn_if_edited({**written, "a": [1, 0.1, 0]}, "x.json")


def test_many_values_are_refused_while_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MAX_VALUES", 100)
    # The text after the values is not parsed.
    with pytest.raises(ConfigError, match=r"^run\.yaml: more than 100 values; write fewer"):
        parse_yaml("- 1\n" * 100 + "*undefined", "run.yaml", ConfigError)


def test_an_integer_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan: integers must be from -2\^63"):
        parse_json("9" * 5000, "plan", ConfigError)
