"""Reading of MindFormers configuration files, without changes to the files."""

from shardwright.mindformers.run import LanguageRun, language_run
from shardwright.mindformers.translate import translate_run

__all__ = ["LanguageRun", "language_run", "translate_run"]
