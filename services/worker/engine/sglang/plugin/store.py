"""The server's store: served by its main process on loopback, so that it outlives a stopped rank and ends with the
server."""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import TCPStore

from services.worker.engine.sglang.plugin import settings
from services.worker.engine.sglang.plugin.ballot import Store

LOOPBACK = "127.0.0.1"
CONNECT_LIMIT = timedelta(seconds=60)


def serve(tell: Callable[[str, int], None]) -> TCPStore:
    """Begin to serve, and tell where. To be kept alive."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    # By itself it would listen on every interface: whoever reaches it can decide for the units.
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_LIMIT,
        master_listen_fd=listening.detach(),
    )
    tell(LOOPBACK, port)
    return store


def connect() -> Store:
    """The store of this process's server. `RuntimeError` if it does not answer."""
    address = settings.store_address()
    assert address is not None, "the main process serves the store before it starts any other"
    host, port = address
    # Its stub wants text where the binding takes bytes.
    return cast(Store, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT_LIMIT))
