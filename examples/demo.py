"""From a model to eight devices: plan the digits classifier, train it, compare with one device.

python examples/demo.py [number of devices]
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).with_name("digits.yaml")
LOGS = Path("log_output")
# The runs add numbers in different orders; in float64 they may differ by no more than this.
TOLERANCE = 1e-9

console = Console()


def shardwright(title: str, *arguments: str) -> None:
    console.rule(f"[bold]{title}")
    console.print(f"[dim]$ shardwright {' '.join(arguments)}", highlight=False)
    started = time.perf_counter()
    command = [sys.executable, "-m", "shardwright", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        sys.exit(status)
    console.print(f"[dim]{time.perf_counter() - started:.1f} s", highlight=False)


def losses(folder: Path) -> list[float]:
    lines = (folder / "1" / "rank.0" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def compare(many: list[float], one: list[float], devices: int) -> float:
    """Print the losses side by side; the largest difference."""
    console.rule(f"[bold]{devices} devices vs. one, step by step")
    table = Table("step", f"loss on {devices} devices", "loss on one device", "difference")
    for step, (left, right) in enumerate(zip(many, one, strict=True)):
        if step % 10 == 0 or step == len(one) - 1:
            table.add_row(str(step), f"{left:.12f}", f"{right:.12f}", f"{abs(left - right):.1e}")
    console.print(table)
    return max(abs(left - right) for left, right in zip(many, one, strict=True))


def main(devices: int = 8) -> None:
    config = str(CONFIG)
    shardwright(f"A plan for {devices} devices", "plan", config, "--devices", str(devices))
    for title, count in ((f"Training on {devices} local processes", devices), ("On one device", 1)):
        logs = str(LOGS / f"devices_{count}")
        shardwright(title, "train", config, "--devices", str(count), "--log-dir", logs)
    many, one = (losses(LOGS / f"devices_{count}") for count in (devices, 1))
    difference = compare(many, one, devices)
    equal = difference <= TOLERANCE
    verdict = "[bold green]equal" if equal else "[bold red]NOT equal"
    console.print(f"{len(one)} steps, largest difference {difference:.1e}: {verdict}")
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
