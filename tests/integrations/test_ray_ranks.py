"""Workers of Ray Train train planned models as one process does, and resume from one folder."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("pyarrow", reason="Ray Train stores results with pyarrow")

SCRIPT = Path(__file__).with_name("ray_ranks.py")


@pytest.mark.distributed
def test_lost_workers_resume_under_another_plan_and_train_as_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    # Otherwise Ray writes a token into the home folder, and reports its use.
    own = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **own},
    )
    assert ended.stdout.endswith("passed\n"), ended.stdout + ended.stderr[-6000:]
