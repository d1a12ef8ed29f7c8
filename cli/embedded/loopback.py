"""Ports on this machine's own address, and whether something answers there."""

import http
import http.client
import socket

HOST = "127.0.0.1"
ANSWER_LIMIT_S = 1.0


def free_port() -> int:
    """A port that nobody listens on now. Somebody may before we do: who binds it must cope."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def answers_ok(port: int, path: str) -> bool:
    """Whether `GET path` is answered with 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()
