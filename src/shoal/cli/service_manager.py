"""Tells a service manager that the server is ready, so that what waits for it is started then and not before.

The protocol is systemd's (sd_notify): a datagram to the socket that the variable NOTIFY_SOCKET names.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

_VARIABLE = "NOTIFY_SOCKET"


def tell_ready(environment: Mapping[str, str]) -> None:
    """Send READY=1, if anybody wants to know. Nobody listening is no error: the server serves."""
    address = environment.get(_VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)
    except OSError:
        return
