"""The language models that a configuration can name are listed with their sizes."""

import json

from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.models import MODELS


def test_the_published_models_are_listed_with_their_numbers_of_parameters() -> None:
    result = CliRunner().invoke(app, ["models"])
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if "llama2" in line}
    assert set(lines) == {"llama2_7b", "llama2_13b", "llama2_70b"}
    assert "68,976,648,192" in lines["llama2_70b"]


def test_the_list_of_tiny_models_as_json_has_all_sizes() -> None:
    found = json.loads(CliRunner().invoke(app, ["models", "--tiny", "--json"]).stdout)
    assert {each["name"] for each in found} == {name for name in MODELS if name.endswith("_tiny")}
    assert all(each["hidden_size"] == 64 and each["parameters"] > 0 for each in found)
