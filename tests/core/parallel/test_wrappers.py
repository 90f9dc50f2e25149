"""PyTorch's wrappers of planned models are refused, before they communicate."""

from core.parallel.wrappers_ranks import CHECKS
from torchrun import checks_on_ranks

test_on_two_ranks = checks_on_ranks(CHECKS, 2)
