"""`torch.optim.Muon` orthogonalizes full matrices, whatever their shards."""

from core.runtime.muon_ranks import CHECKS
from torchrun import checks_on_ranks

test_muon_on_four_ranks = checks_on_ranks(CHECKS, 4)
