"""Ports on this machine's own address, and whether something answers there."""

import http
import http.client
import socket

HOST = "127.0.0.1"
ANSWER_LIMIT_S = 1.0
SAID_BYTES_MAX = 2_000


def free_port() -> int:
    """A port that nobody listens on now. Somebody may before we do: who binds it must cope."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def answers_ok(port: int, path: str) -> bool:
    """Whether `GET path` is answered with 200."""
    return refusal(port, path) is None


def refusal(port: int, path: str) -> str | None:
    """What is said to `GET path` instead of 200; None for that."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return None
        return response.read(SAID_BYTES_MAX).decode(errors="replace").strip() or f"status {response.status}"
    except (http.client.HTTPException, OSError) as error:
        return f"no answer ({type(error).__name__})"
    finally:
        connection.close()
