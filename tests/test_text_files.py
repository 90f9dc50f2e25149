"""What is read from text files is plain data, or refused with its place."""

from __future__ import annotations

import pytest

from shardwright.errors import ConfigError
from shardwright.text_files import parse_yaml


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
        (f"a: {':'.join(['59'] * 999)}.5\n", r"^run\.yaml: line 1, column 4: .* cannot be read as"),
        ("a: [1\n", r"^run\.yaml: line 2, column 1: expected ',' or ']'"),
    ],
)
def test_mistakes_are_named_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "run.yaml", ConfigError)
