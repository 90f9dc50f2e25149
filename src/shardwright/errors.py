"""The errors that Shardwright raises, all but `CommunicationError` before any communication."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ShardwrightError(Exception):
    """Base class of all errors that Shardwright raises about its input."""


class LayoutError(ShardwrightError, ValueError):
    """An invalid layout: unknown or repeated axes, or a dimension that does not divide evenly."""


class StrategyError(ShardwrightError, ValueError):
    """An invalid sharding strategy: sizes that do not divide evenly, or too many shards."""


class CaptureError(ShardwrightError):
    """A model that cannot be captured; the message gives the line and what to change."""


class PlanError(ShardwrightError):
    """A plan of another model, another number of devices, or an unknown version."""


class MixedTensorsError(PlanError, RuntimeError):
    """A parameter of a planned model, a DTensor, meets an ordinary tensor; the message says what to
    do instead."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration file with a value of the wrong type, an unknown key, or conflicting keys."""


class DataError(ShardwrightError):
    """Training data that is missing or malformed."""


class NonFiniteError(ShardwrightError):
    """A loss, a gradient or a parameter that is not finite; the message names where it appeared."""


class CheckpointError(ShardwrightError):
    """A checkpoint that is missing, belongs to another model, or has an unknown version."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is damaged, truncated or missing; the message names it."""


class LockError(ShardwrightError):
    """A folder that another run is writing; the message says which process has locked it."""


class DeferredError(ShardwrightError):
    """A parameter created inside `no_init_parameters` has no values yet, or cannot be given any."""


class CommunicationError(RuntimeError):
    """A collective failed: another rank is gone, or did not come within the time-out."""


class IndivisibleError(StrategyError):
    """No dimension of the model is divisible by the number of devices."""


class MixedSamplesError(StrategyError):
    """Micro-batches of a loss that is not known to be a mean over samples."""


class MemoryLimitError(ShardwrightError):
    """A model that does not fit into the memory of its devices under any plan.

    Args:
        needed: the smallest memory limit that would suffice, in bytes per device.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class PlanInterrupted(KeyboardInterrupt):
    """Ctrl-C in a search under a memory limit, after something was known to fit.

    Args:
        plan: makes the fastest plan that was known to fit.
    """

    def __init__(self, plan: Callable[[], Any]) -> None:
        super().__init__()
        self.plan = plan


@contextmanager
def needs_extra(name: str, purpose: str, kind: type[ShardwrightError]) -> Iterator[None]:
    """Around imports of what an extra of the package installs.

    Raises: an error of this kind, which says how to install it, if an import fails.
    """
    try:
        yield
    except ImportError as error:
        raise kind(f"{purpose} ({error}): pip install 'shardwright[{name}]'") from error
