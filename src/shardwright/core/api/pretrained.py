"""Save and load model folders in the format of Hugging Face's `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.core.agreement.collective import is_rank_0, value_of_rank
from shardwright.core.api.parallelize import parallelize
from shardwright.core.checkpoint.file_checksum import write_checksum
from shardwright.core.checkpoint.state_dict_file import load_state_dict
from shardwright.core.deferred import no_init_parameters
from shardwright.core.parallel.whole import whole
from shardwright.core.plan import Plan
from shardwright.errors import CheckpointError, needs_extra


def save_pretrained(net: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write a planned model by its method `save_pretrained`, as on one device. Collective.

    Models of `transformers` are written with their configuration, models of `peft` as adapters
    only. Rank 0 needs CPU memory for the full model. Each weight file gets a file with its
    checksums, `NAME.checksum`, which loading verifies.

    Args:
        net: the planned model.
        folder: the folder to write to.
        options: options of the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        CheckpointError: on all ranks, if the model has no `save_pretrained`, or if it raises.
    """
    error_text = ""
    with whole(net, rank0_only=True, device="cpu") as model:
        save: Any = getattr(model, "save_pretrained", None)
        if save is None:
            raise CheckpointError(
                f"{type(model).__name__} has no method `save_pretrained`, which models of "
                "`transformers` and `peft` have\nwrite the model with `sw.save_state_dict(net, "
                "path)`"
            )
        # The other ranks have no full model to write.
        if is_rank_0():
            try:
                earlier = _get_weight_file_states(folder)
                with unchanged_configurations(model):
                    save(str(folder), **options)
                for file, status in _get_weight_file_states(folder).items():
                    # Only files that were written now: the checksum of an earlier, damaged file
                    # would confirm the damage.
                    if status != earlier.get(file):
                        write_checksum(file)
            except Exception as error:  # Any error must reach the other ranks, which wait below.
                error_text = f"{folder}: {type(error).__name__}: {error}"
    # All ranks raise the error of rank 0.
    error_text = value_of_rank(error_text)
    if error_text:
        raise CheckpointError(error_text)


def _get_weight_file_states(folder: str | Path) -> dict[Path, tuple[int, int, int]]:
    """Return (inode, modification time in ns, size in bytes) of each weight file in `folder`."""
    files = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    statuses = {file: file.stat() for file in files if file.suffix in (".safetensors", ".bin")}
    return {file: (s.st_ino, s.st_mtime_ns, s.st_size) for file, s in statuses.items()}


@contextmanager
def unchanged_configurations(net: nn.Module) -> Iterator[None]:
    """Context manager that restores the configurations of a `transformers` model on exit.

    `save_pretrained` changes attributes of configurations, and it runs on rank 0 only. Without the
    context, models would then differ between ranks.
    """
    # By id, as submodules often share one configuration.
    configurations = {
        id(module.config): module.config for module in net.modules() if hasattr(module, "config")
    }
    # The attribute dicts are restored in place, which also removes added attributes.
    before = [(vars(config), dict(vars(config))) for config in configurations.values()]
    try:
        yield
    finally:
        for attributes, saved in before:
            attributes.clear()
            attributes.update(saved)


def from_pretrained(
    cls: Any,
    folder: str | Path,
    plan: Plan,
    *,
    device: str | torch.device | None = None,
    **options: Any,
) -> nn.Module:
    """Load a model from a folder of `save_pretrained`, sharded as planned. Collective.

    Each rank reads its own shards only.

    Args:
        cls: a model class of `transformers`, or one of its `AutoModelFor...` classes.
        folder: the folder of the model.
        plan: a plan of a model with the same configuration.
        device: device of this rank; by default its accelerator, or the CPU without one.
        options: keyword arguments of the class's `from_config`, such as `attn_implementation` or
            `dtype`.

    Raises:
        CheckpointError: if a file is missing, the configuration is of another class, or its tensors
            do not match the model.
        PlanError: if the plan is for another model.
    """
    # Each rank then allocates only its shards; loading overwrites their initial values.
    with no_init_parameters():
        net = _build_model(cls, Path(folder), options)
    parallel = parallelize(net, plan, device)
    load_state_dict(parallel, folder)
    return parallel


def _build_model(cls: Any, folder: Path, options: dict[str, Any]) -> nn.Module:
    with needs_extra("transformers", "a pretrained model needs transformers", CheckpointError):
        from transformers import AutoConfig

    if not hasattr(cls, "from_pretrained") or not isclass(cls):
        raise CheckpointError(
            f"{cls!r} is not a model class of `transformers`\n"
            "pass a class such as `transformers.AutoModelForCausalLM`"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder\n"
            "download the model with `huggingface_hub.snapshot_download`, and pass its folder"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no `config.json`\npass a folder that `save_pretrained` has written"
        )
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder}/config.json cannot be loaded: {error}\ndownload the folder again"
        ) from None
    config_class = getattr(cls, "config_class", None)
    # The `AutoModelFor...` classes have none, and take any configuration.
    if config_class is not None and not isinstance(config, config_class):
        raise CheckpointError(
            f"{folder} contains another model: {cls.__name__} needs a {config_class.__name__}, but "
            f"its config.json is a {type(config).__name__}\npass the class of the folder's model, "
            "or another folder"
        )
    # Only `AutoModelFor...` classes have a public `from_config`.
    build: Any = getattr(cls, "from_config" if hasattr(cls, "from_config") else "_from_config")
    net: nn.Module = build(config, **options)
    return net
