"""All errors of a file are one error."""

from __future__ import annotations

import pytest

from mindformers.files import run_of
from shardwright.errors import ConfigError


def test_errors_of_all_sections_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(
            model__model_config__extend_method="DYNAMIC_NTK",
            model__model_config__param_init_type="int8",
            parallel__parallel_mode=3,
            parallel_config__data_parallel=0,
            optimizer__type="Lion",
            optimizer__betas=0.9,
            context__max_device_memory="58",
        )
    first, *lines = str(caught.value).splitlines()
    assert first == "small.yaml: 7 errors"
    assert [line.strip().split(": ")[0] for line in lines if not line.startswith("    ")] == [
        "model.model_config.extend_method",
        "model.model_config.param_init_type",
        "parallel.parallel_mode",
        "parallel_config.data_parallel",
        "optimizer.type",
        "optimizer.betas",
        "context.max_device_memory",
    ]


def test_what_follows_from_an_error_is_not_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(
            parallel_config__pipeline_stage=2,
            parallel_config__micro_batch_num=0,
        )
    assert str(caught.value) == (
        "small.yaml: parallel_config.micro_batch_num: 0 is out of range\nset a number at least 1"
    )


def test_one_error_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^small\.yaml: optimizer\.type: 'Lion' is not"):
        run_of(optimizer__type="Lion")


def test_beside_a_model_that_cannot_be_built_no_other_error_is_reported() -> None:
    for name in ("BertForPreTraining", "SwinForImageClassification", "TestModel"):
        with pytest.raises(ConfigError, match=f"small.yaml: model.arch.type: '?{name}") as caught:
            run_of(model__arch__type=name, optimizer__type="Lion")
        assert "optimizer" not in str(caught.value)
    with pytest.raises(ConfigError, match="2 errors"):
        run_of(model__arch__type="LamaForCausalLM", optimizer__type="Lion")
