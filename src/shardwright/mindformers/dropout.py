"""Read the dropout probability of a MindFormers model."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.mindformers.keys import Keys


def read_dropout(config: Keys, names: Sequence[str], default: float) -> float:
    """Read the dropout probability; all dropout keys in the section must have the same value.

    Args:
        config: the section `model.model_config`.
        names: keys of dropout probabilities.
        default: probability if no key is set.

    Raises:
        ConfigError: if a value is not a probability below 1, or the values differ.
    """
    rates = {name: config.number(name, minimum=0, below=1) for name in names if config.has(name)}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
        raise config.error(
            next(iter(rates)), f"dropout rates differ: {listed}\nset all dropout rates to one value"
        )
    return next(iter(rates.values()), default)
