"""State that `forward` changes, on two real processes: trained as on one device, or refused."""

from features.state_ranks import CHECKS
from torchrun import checks_on_ranks

test_what_forward_changes_is_trained_as_on_one_device_or_refused_on_each_rank = checks_on_ranks(
    CHECKS, 2
)
