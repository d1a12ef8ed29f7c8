"""What the plug-in reads from the environment, and what one process of a server tells its children through it."""

import os

ACTIVE = "VERTUMNUS_SGLANG"
"""`1` in the environment of a server's main process: this server's geometry may change."""

STORE = "VERTUMNUS_SGLANG_STORE"
"""Where the server's store listens. Written by the main process; whoever starts a server must not set it."""


def active() -> bool:
    """Whether this server was started to change its geometry. ValueError for anything but `1`, `0` and nothing."""
    value = os.environ.get(ACTIVE, "0")
    if value not in {"0", "1"}:
        raise ValueError(f"{ACTIVE}: {value!r} is neither 0 nor 1")
    return value == "1"


def store_address() -> tuple[str, int] | None:
    """Host and port of the store; None in the process that serves it."""
    if (value := os.environ.get(STORE)) is None:
        return None
    host, _, port = value.rpartition(":")
    return host, int(port)


def tell_children(host: str, port: int) -> None:
    """Processes that are started from now on find the store there."""
    os.environ[STORE] = f"{host}:{port}"
