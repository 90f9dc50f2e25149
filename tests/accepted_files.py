"""Count the MindFormers files of a folder that are accepted: `python tests/accepted_files.py DIR`.

Prints the error of each file that is not, and at the end accepted / all. Files of one content
count once; those without a training (`run_mode: predict`) do not count. `pretrained_model_dir`
must exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from shardwright.errors import ConfigError
from shardwright.mindformers import language_run, translate_run
from shardwright.mindformers.config_format import recognizes
from shardwright.plain_data import parse_yaml
from shardwright.text_files import read_text


def training_files(folder: Path) -> Iterator[Path]:
    """Yield one file of each content that describes a training."""
    contents = set[str]()
    for file in sorted(folder.rglob("*.y*ml")):
        text = read_text(file, ConfigError)
        content = parse_yaml(text, str(file), ConfigError)
        if text not in contents and recognizes(content) and content.get("run_mode") != "predict":
            contents.add(text)
            yield file


def error_of(file: Path) -> str | None:
    """Return the error of a file; None if it is accepted."""
    try:
        content = parse_yaml(read_text(file, ConfigError), str(file), ConfigError)
        run = language_run(content, str(file))
        translate_run(run, run.parallelism.devices if run.parallelism.shards_by_degrees else 8)
    except ConfigError as error:
        return str(error)
    return None


def main(folder: str) -> None:
    """Print the errors and the number of accepted files."""
    errors = {file: error_of(file) for file in training_files(Path(folder))}
    for error in filter(None, errors.values()):
        print(error)
    print(f"{list(errors.values()).count(None)} of {len(errors)} files are accepted")


if __name__ == "__main__":
    main(sys.argv[1])
