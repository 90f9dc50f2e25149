"""What a configuration may say, and what is said about one that is wrong."""

from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.run.config import Config, load, parse

MODEL = "model: {target: 'digits:Classifier'}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    return str(caught.value).splitlines()


def test_only_the_model_has_no_default() -> None:
    config = parse(MODEL)
    assert config.model.target == "digits:Classifier"
    assert config.data.batch_size == 32
    assert config == Config.model_validate({"model": {"target": "digits:Classifier"}})
    assert problems("loss: mae") == ["c.yaml: model: the key is missing"]


@pytest.mark.parametrize("number", ["1e-3", "0.001", "1.0e-3", "1E-3"])
def test_numbers_are_read_as_people_write_them(number: str) -> None:
    config = parse(f"{MODEL}optimizer: {{learning_rate: {number}}}")
    assert config.optimizer.learning_rate == 0.001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {epoch: 3}", "train.epoch: unknown key; did you mean epochs?"),
        ("optimiser: {}", "optimiser: unknown key; did you mean optimizer?"),
        (
            "parallel: {xyz: 3}",
            "parallel.xyz: unknown key; valid keys: mem_coeff, cost_model, cluster, order, "
            "log_costs, stages, max_stages, suggest_stages, micro_batches, batch_norm, schedule, "
            "compute_dtype, memory_limit, save_graphs, mode, strategies, expert, hsdp, recompute, "
            "save_strategies",
        ),
        ("data: {batch_size: many}", "data.batch_size: expected an integer, got 'many' (a string)"),
        ("data: {batch_size: '32'}", "data.batch_size: expected an integer, got '32' (a string)"),
        ("data: {batch_size: 1.5}", "data.batch_size: expected an integer, got 1.5"),
        ("data: {batch_size: }", "data.batch_size: expected an integer, got nothing"),
        ("data: {batch_size: 0}", "data.batch_size: value should be greater than 0, got 0"),
        (
            "optimizer: {learning_rate: [1]}",
            "optimizer.learning_rate: expected a number, got [1] (a list)",
        ),
        (
            "optimizer: {learning_rate: .nan}",
            "optimizer.learning_rate: value should be a finite number, got nan",
        ),
        ("parallel: {log_costs: 1}", "parallel.log_costs: expected true or false, got 1"),
        ("parallel: 8", "parallel: expected a mapping, got 8"),
        ("loss: 3", "loss: expected 'cross_entropy', 'mae', 'mse' or 'none', got 3"),
        (
            "data: {name: mnits}",
            "data.name: expected 'digits', 'mnist', 'text' or 'tokens', got 'mnits' "
            "(a string); did you mean mnist?",
        ),
        (
            "data: {target: nonsense}",
            "data.target: expected 'module:callable', got 'nonsense' (a string)",
        ),
        (
            "data: {name: mnist, target: 'a:b'}",
            "data: the keys `name` and `target` conflict; remove one of them",
        ),
        (
            "data: {arguments: {a: 1}}",
            "data: the key `arguments` needs the key `target`, for example `target: data:images`",
        ),
        (
            "data: {path: here}",
            "data: the key `path` needs `name: mnist` or `name: text` or `name: tokens`; remove the"
            " key, or change `name`",
        ),
        (
            "data: {name: mnist, image_size: 28}",
            "data: the key `image_size` needs `name: digits`; remove the key, or change `name`",
        ),
        (
            "optimizer: {name: momentum}",
            "optimizer: `name: momentum` needs the key `momentum`; set for example `momentum: 0.9`",
        ),
        (
            "parallel: {expert: {model_parallel: 2}}",
            "parallel: `expert` conflicts with `mode: recursive_programming`; set "
            "`mode: semi_auto`",
        ),
        (
            "parallel: {mode: semi_auto, expert: {}}",
            "`parallel.expert` needs a language model; remove it, or set `model.name`",
        ),
        (
            "parallel: {recompute: {}}",
            "`parallel.recompute` needs module paths if `model.target` is set; set for example "
            "`modules: [encoder]`",
        ),
        (
            "data: {name: text}",
            "data: `name: text` needs the key `seq_length`, for example `seq_length: 64`",
        ),
        (
            "data: {seq_length: 8}",
            "data: the key `seq_length` needs `name: text` or `name: tokens`; remove the key, or"
            " change `name`",
        ),
        (
            "data: {name: tokens}",
            "data: `name: tokens` needs the key `path`, for example `path: train.bin`",
        ),
        (
            "data: {dtype: uint16}",
            "data: the key `dtype` needs `name: tokens`; remove the key, or change `name`",
        ),
        (
            "train: {evaluation: {every: 5}}",
            "`train.evaluation` has no data; set its key `path`",
        ),
        (
            "train: {evaluation: {path: val.bin}}",
            "train.evaluation: the key `path` needs `name: mnist` or `name: text` or "
            "`name: tokens`; remove the key, or change `name`",
        ),
        (
            "optimizer: {betas: [0.9, 0.95]}",
            "optimizer: the key `betas` has no effect with `name: sgd`; remove it, or set "
            "`name: adam` or `name: adamw` or `name: muon`",
        ),
        (
            "optimizer: {name: adam, betas: [0.9]}",
            "optimizer: `betas` must be two numbers below 1, not [0.9]; set for example "
            "[0.9, 0.95]",
        ),
        (
            "optimizer: {schedule: {warmup_steps: 2, warmup_ratio: 0.1}}",
            "optimizer.schedule: the keys `warmup_steps` and `warmup_ratio` conflict; remove one",
        ),
        (
            "optimizer: {name: adam, momentum: 0.9}",
            "optimizer: the key `momentum` has no effect with `name: adam`; remove it, or set "
            "`name: momentum` or `name: muon`",
        ),
    ],
)
def test_a_mistake_is_named_by_key_value_and_what_is_valid(text: str, expected: str) -> None:
    assert problems(MODEL + text) == [f"c.yaml: {expected}"]


def test_all_mistakes_are_named_at_once() -> None:
    found = problems("model: {target: 3}\ntrain: {epochs: x, stesp: 1}\n")
    assert found == [
        "c.yaml: model.target: expected a string, got 3",
        "c.yaml: train.epochs: expected an integer, got 'x' (a string)",
        "c.yaml: train.stesp: unknown key; did you mean steps?",
    ]


def test_text_that_is_no_yaml_is_named_by_its_line() -> None:
    broken = "model: {target: 'a:b'\nloss: mae\n"
    assert problems(broken)[0].startswith("c.yaml: line 2, column 1: expected ',' or '}'")
    assert problems("loss: mae\nloss: mse\n") == [
        "c.yaml: line 2, column 1: duplicate key 'loss'; remove one of the two"
    ]


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b\n"])
def test_a_file_without_keys_says_which_there_are(text: str) -> None:
    keys = "model, loss, data, optimizer, parallel, train"
    (problem,) = problems(text)
    assert problem.startswith("c.yaml: the configuration must be a mapping, not ")
    assert problem.endswith(f"; use the keys {keys}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(binary)


def test_a_file_is_read_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MODEL)
    assert load(path) == parse(MODEL)


def test_checkpoints_are_kept_where_the_section_is_given() -> None:
    assert parse(MODEL).train.checkpoint is None
    said = parse(f"{MODEL}train: {{checkpoint: {{async: true, every: 5}}}}").train.checkpoint
    assert said is not None
    assert (said.folder, said.every, said.keep, said.asynchronous) == ("checkpoints", 5, 3, True)
    assert problems(f"{MODEL}train: {{checkpoint: {{asynk: true, keep: 0}}}}") == [
        "c.yaml: train.checkpoint.keep: value should be greater than 0, got 0",
        "c.yaml: train.checkpoint.asynk: unknown key; did you mean async?",
    ]
