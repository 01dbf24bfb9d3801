"""A TCP port for a server that a child process opens later."""

from __future__ import annotations

import os
import random
import socket

# Below 32768, where Linux begins to take ports for outgoing connections and for servers that ask for any port.  One of
# those could take a port between our probe and the start of the child's server, which is seconds later.
PORTS = range(12000, 32000)

_random = random.Random(os.urandom(8))  # not seeded: the sessions of xdist run at the same time


def free_port() -> int:
    while True:
        port = _random.choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
