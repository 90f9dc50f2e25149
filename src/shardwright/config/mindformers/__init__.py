"""Configuration files of the MindFormers shape, accepted as they are."""

from shardwright.config.mindformers.language_run import (
    LanguageRun,
    has_this_shape,
    language_run,
)
from shardwright.config.mindformers.translated import translated

__all__ = ["LanguageRun", "has_this_shape", "language_run", "translated"]
