"""torchtitan's `Trainer` trains planned models as one process does, and reads their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan imports triton, also on CPUs")

from torchrun import torchrun

SCRIPT = Path(__file__).with_name("torchtitan_ranks.py")
CHECKS = (
    "trains_as_one_process",
    "accumulates_and_divides_the_loss_into_chunks",
    "computes_in_bfloat16_and_recomputes_layers",
    "balances_experts",
    "exchanges_checkpoints_with_torchtitan",
    "refuses_what_a_plan_does_not_follow",
)


@pytest.fixture(scope="module", params=[2, 4])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the ranks print."""
    folder = tmp_path_factory.mktemp("torchtitan")
    return torchrun(SCRIPT, request.param, str(folder), timeout=600)


@pytest.mark.distributed
@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(printed: str, check: str) -> None:
    assert f"passed {check}\n" in printed, printed
