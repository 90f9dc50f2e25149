"""State of the process that `forward` may change: default dtype, modes and flags of PyTorch, and
settings of Python and NumPy.

Capture runs the Python of `forward` once. Calls of the captured program would neither repeat a
change of this state nor depend on it.
"""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwright.core.torch_internals.dispatch import default_device
from shardwright.errors import CaptureError

_MISSING = "<missing>"


@dataclass(frozen=True)
class Setting:
    """A global setting of the Python process.

    Args:
        name: name in messages, as written in code that changes the setting.
        read: returns the current value, which is compared by `==`.
        write: sets the value.
        readers: for a setting that affects no operator, such as warning filters: names of the
            attributes and functions that read it. `forward` may change the setting unless its code
            uses one of them. Empty for other settings, which `forward` must not change.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    readers: tuple[str, ...] = ()


def _make_attribute_setting(owner: Any, name: str, label: str) -> Setting:
    """Return the setting that is an attribute of a module, such as `torch.backends.cudnn`."""
    return Setting(
        label,
        lambda: _read_flag(owner, name),
        lambda value: setattr(owner, name, value),
        # `benchmark` selects kernels by speed; streams and hooks of `sys` change no result.
        (name,) if name == "benchmark" or owner is sys else (),
    )


def _read_flag(owner: Any, name: str) -> Any:
    # PyTorch refuses to read flags of precision that were set by two interfaces.
    with suppress(RuntimeError, AssertionError, AttributeError):
        return getattr(owner, name, None)
    return None


def _write_cpu_autocast(value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled("cpu", value[0])
    torch.set_autocast_dtype("cpu", value[1])


_PRECISIONS = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


def _iterate_backend_settings() -> Iterator[Setting]:
    """Yield the flags in modules of `torch.backends`, set as attributes or by functions."""
    for backend, module in sorted(vars(torch.backends).items()):
        if not isinstance(module, ModuleType):
            continue
        label = f"torch.backends.{backend}"
        # Flags of `torch.backends.cudnn` are properties of a subclass of `ModuleType`, and `dir` of
        # a module does not list attributes of its class.
        names = {*dir(module), *vars(type(module))}
        for name in sorted(each for each in names if not each.startswith("_")):
            if type(_read_flag(module, name)) in (bool, int, str):
                yield _make_attribute_setting(module, name, f"{label}.{name}")
            # Flags with functions: `flash_sdp_enabled()` reads, and `enable_flash_sdp()` writes.
            setter = f"enable_{name.removesuffix('_enabled')}"
            if name.endswith("_enabled") and hasattr(module, setter):
                read, write = getattr(module, name), getattr(module, setter)
                yield Setting(f"{label}.{setter}", read, write)
        if (products := getattr(module, "matmul", None)) is not None:
            for name in _PRECISIONS:
                if isinstance(_read_flag(products, name), bool):
                    yield _make_attribute_setting(products, name, f"{label}.matmul.{name}")


_OF_LEVELS = ("level", "getEffectiveLevel", "isEnabledFor")


def _read_logger_levels() -> dict[str, Any]:
    loggers = logging.root.manager.loggerDict
    levels = {name: getattr(each, "level", None) for name, each in loggers.items()}
    # A logger without a level of its own is often created by the first call.
    return {"": logging.root.level, **{name: level for name, level in levels.items() if level}}


def _write_logger_levels(levels: Mapping[str, Any]) -> None:
    # Loggers that have a level only since the record get `NOTSET`.
    for name in {*_read_logger_levels(), *levels}:
        logging.getLogger(name or None).setLevel(levels.get(name, logging.NOTSET))


def _write_warning_filters(before: list[Any]) -> None:
    # In place, because the C module `_warnings` refers to the same list.
    warnings.filters[:] = before  # type: ignore[index]


SETTINGS: tuple[Setting, ...] = (
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    # Not `torch.get_default_device`, which returns the device of `with torch.device("cpu")` in a
    # capture.
    Setting("torch.set_default_device", default_device, torch.set_default_device),
    Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Setting(
        "torch.set_float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    Setting(
        "torch.set_num_threads", torch.get_num_threads, torch.set_num_threads, ("get_num_threads",)
    ),
    Setting(
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    Setting(
        "autocast of cpu",
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        _write_cpu_autocast,
    ),
    *_iterate_backend_settings(),
    _make_attribute_setting(
        torch.utils.deterministic,
        "fill_uninitialized_memory",
        "torch.utils.deterministic.fill_uninitialized_memory",
    ),
    *(
        _make_attribute_setting(sys, name, f"sys.{name}")
        for name in ("stdout", "stderr", "excepthook")
    ),
    Setting(
        "warnings.filters", lambda: list(warnings.filters), _write_warning_filters, ("filters",)
    ),
    Setting("np.seterr", np.geterr, lambda value: np.seterr(**value), ("geterr",)),
    Setting(
        "np.set_printoptions",
        np.get_printoptions,
        lambda value: np.set_printoptions(**value),
        ("get_printoptions",),
    ),
    Setting("levels of logging", _read_logger_levels, _write_logger_levels, _OF_LEVELS),
    Setting(
        "sys.setrecursionlimit",
        sys.getrecursionlimit,
        sys.setrecursionlimit,
        ("getrecursionlimit",),
    ),
    Setting(
        "gc.enable",
        gc.isenabled,
        lambda is_on: gc.enable() if is_on else gc.disable(),
        ("isenabled",),
    ),
    Setting(
        "decimal.getcontext()",
        # As text, since `getcontext` returns one mutable object; its `repr` is a call of its class.
        lambda: repr(decimal.getcontext()),
        lambda text: decimal.setcontext(eval(text, {**vars(decimal)})),
    ),
    Setting("os.chdir", os.getcwd, os.chdir),
    Setting(
        "locale.setlocale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
)


class ChangedSetting(NamedTuple):
    """A changed setting, with its earlier and its new value as text."""

    setting: Setting
    before: str
    now: str


class ProcessState:
    """Values of all settings of the process at construction, for comparison and restoration."""

    def __init__(self) -> None:
        self._before = [setting.read() for setting in SETTINGS]

    def changes(self) -> Iterator[ChangedSetting]:
        """Yield the settings whose values differ from the recorded ones."""
        for setting, before in zip(SETTINGS, self._before, strict=True):
            now = setting.read()
            if now != before:
                yield ChangedSetting(setting, *_format_changed_values(before, now))

    def restore(self) -> None:
        """Restore all settings to their recorded values."""
        for setting, before in zip(SETTINGS, self._before, strict=True):
            # Written only if changed, because some flags of backends can be read but not set.
            if setting.read() != before:
                setting.write(before)


def _format_changed_values(before: Any, now: Any) -> tuple[str, str]:
    """Format an earlier and a current value; for dicts, only the first entry that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in {**now, **before} if before.get(key) != now.get(key))
        name = getattr(key, "name", key)
        return tuple(f"{name}={each.get(key, _MISSING)!r}" for each in (before, now))  # type: ignore[return-value]
    if isinstance(before, list):
        before, now = f"{len(before)} entries", f"{len(now)} entries"
    return str(before)[:80], str(now)[:80]


def change_message(changed: ChangedSetting) -> str:
    """Return the error message for a setting that `forward` changes."""
    return (
        f"`forward` changes a setting of the process, `{changed.setting.name}` ({changed.before} to"
        f" {changed.now}), which a captured model would not in each call\n"
        "set it before `plan`, or restore it in `forward`"
    )


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Return a context that restores the settings of the process.

    Raises:
        CaptureError: on exit, if a setting that affects results has changed.
    """
    state = ProcessState()
    try:
        yield
    # The error of the trace is raised; a setting that it left changed may be its consequence.
    except BaseException:
        state.restore()
        raise
    changed = [change for change in state.changes() if not change.setting.readers]
    state.restore()
    if changed:
        raise CaptureError(change_message(changed[0]))
