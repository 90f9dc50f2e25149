"""Read MindFormers configuration files as they are published."""

from shardwright.mindformers.run import LanguageRun, language_run
from shardwright.mindformers.translate import translate_run

__all__ = ["LanguageRun", "language_run", "translate_run"]
