"""Libraries that are missing or too old are one clear line when an integration is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.integrations import versions
from shardwright.integrations.versions import OLDEST_VERSIONS, require_version

IMPORTS = """
from importlib import import_module
from shardwright.errors import ConfigError

for name in ("accelerate", "fabric", "lightning", "torchtitan", "transformers"):
    try:
        import_module(f"shardwright.integrations.{name}")
    except ConfigError as error:
        print(error)
"""


def test_old_versions_are_refused_before_anything_of_them_is_imported(tmp_path: Path) -> None:
    for package in OLDEST_VERSIONS:
        # First on the path, so that it hides the installed version; importing it fails.
        metadata = tmp_path / f"{package}-0.2.9rc1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.2.9rc1\n")
        (tmp_path / f"{package}.py").write_text("raise AssertionError('imported')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", IMPORTS]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    features = {
        "shardwright.integrations.accelerate": "accelerate",
        "shardwright.integrations.fabric": "lightning",
        "shardwright.integrations.lightning": "lightning",
        "shardwright.integrations.torchtitan": "torchtitan",
        "ShardwrightTrainer": "transformers",
    }
    assert ended.stdout.splitlines() == [
        line
        for feature, package in features.items()
        for line in (
            f"{feature} needs `{package}` {OLDEST_VERSIONS[package]} or newer, but 0.2.9rc1 is"
            " installed",
            f"pip install -U '{package}>={OLDEST_VERSIONS[package]}'",
        )
    ]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.OLDEST_VERSIONS, "no-such-package", "1.0")
    with pytest.raises(ConfigError, match="this needs `no-such-package`, which is not installed"):
        require_version("no-such-package", "this")


def test_a_pre_release_counts_as_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, oldest in OLDEST_VERSIONS.items():
        monkeypatch.setattr(versions, "version", lambda _, oldest=oldest: f"{oldest}rc1")
        require_version(package, "this")


def test_the_extras_need_the_same_versions() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for package, oldest in OLDEST_VERSIONS.items():
        required = [r for r in extras[package] if re.match(rf"{package}\b", r)]
        assert required == [f"{package}>={oldest}"]
