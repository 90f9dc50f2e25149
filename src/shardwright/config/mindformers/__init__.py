"""MindFormers configuration files, accepted as they are."""

from shardwright.config.mindformers.run import LanguageRun, is_mindformers, language_run
from shardwright.config.mindformers.translate import translate_run

__all__ = ["LanguageRun", "is_mindformers", "language_run", "translate_run"]
