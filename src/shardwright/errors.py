"""The errors that Shardwright raises. All are raised before anything is communicated."""


class ShardwrightError(Exception):
    """Base of every error that Shardwright raises about its input."""


class LayoutError(ShardwrightError, ValueError):
    """A layout that cannot be: unknown or repeated axes, a dimension that does not divide."""


class StrategyError(ShardwrightError, ValueError):
    """A way of cutting an operator that cannot be: sizes that do not divide, too many parts."""


class CaptureError(ShardwrightError):
    """A model that cannot be captured as a graph, with the user's line and what to change."""


class PlanError(ShardwrightError):
    """A plan that does not fit: another model, another number of devices, an unknown version."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration file with a wrong type, an unknown key or a contradiction."""


class DataError(ShardwrightError):
    """Data that is missing or not what its format says."""


class CheckpointError(ShardwrightError):
    """A checkpoint that is missing, of another model, or of an unknown version."""


class DeferredError(ShardwrightError):
    """A parameter made inside `no_init_parameters` that has no values yet, or cannot get them."""


class IndivisibleError(StrategyError):
    """No size of the model is divisible by the number of devices."""


class MemoryLimitError(ShardwrightError):
    """A model that does not fit into the memory of its devices, whatever is done.

    Args:
        needed: the smallest limit, in bytes, that would work.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed
