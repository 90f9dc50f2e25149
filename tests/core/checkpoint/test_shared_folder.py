"""Ranks write a checkpoint into one folder."""

from core.checkpoint.shared_folder_ranks import CHECKS
from torchrun import checks_on_ranks

test_folders_on_two_ranks = checks_on_ranks(CHECKS, 2)
