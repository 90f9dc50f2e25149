"""Communication within one machine, which no other host can reach."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def loopback_interfaces() -> dict[str, str]:
    """The environment in which backends listen on the loopback interface only."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {f"{backend}_SOCKET_IFNAME": name for backend in ("GLOO", "NCCL") for name in loopback}
