"""Two hosts on one machine: Linux network namespaces that a pair of virtual interfaces joins."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEEDS = "network namespaces need Linux, root and `ip`"
"""Why there may be no hosts."""


def can_be_made() -> bool:
    """Whether this machine has what it takes to make hosts."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One of the two.

    Args:
        namespace: its name, which is that of its interface too.
        address: that at which the other reaches it.
    """

    namespace: str
    address: str

    def start(
        self, *command: str, output: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command, which writes both its outputs to a file."""
        here = {"GLOO_SOCKET_IFNAME": self.namespace, "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env={**os.environ, **here, **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """Kills all its processes at once, as a loss of power does."""
        for pid in map(int, _ip("netns", "pids", self.namespace).split()):
            os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Cuts the link to the other."""
        _ip("-n", self.namespace, "link", "set", self.namespace, "down")

    def mend(self) -> None:
        """Joins it again."""
        _ip("-n", self.namespace, "link", "set", self.namespace, "up")

    def shape(self, rate: str) -> None:
        """Bounds what it sends, to `100mbit` for example, by a token bucket."""
        bucket = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        device = ("dev", self.namespace)
        subprocess.run(
            ["tc", "-n", self.namespace, "qdisc", "replace", *device, *bucket], check=True
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, which are removed with all their processes."""
    hosts = tuple(Host(f"sw{os.getpid()}{name}", f"10.77.0.{i + 1}") for i, name in enumerate("ab"))
    first, second = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        pair = ("type", "veth", "peer", "name", second.namespace, "netns", second.namespace)
        _ip("link", "add", first.namespace, "netns", first.namespace, *pair)
        for host in hosts:
            here = ("-n", host.namespace)
            _ip(*here, "address", "add", f"{host.address}/24", "dev", host.namespace)
            _ip(*here, "link", "set", "lo", "up")
            _ip(*here, "link", "set", host.namespace, "up")
        yield first, second
    finally:
        present = _ip("netns", "list").split()
        for host in hosts:
            if host.namespace in present:
                host.kill()
                _ip("netns", "del", host.namespace)
