"""Other projects' servers as processes, and what is common to asking them and ours over loopback."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

from cli.embedded.loopback import free_port

READY_S_MAX = 60.0


@contextmanager
def served(command: list[str], answers: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server that is told its port last, once it `answers` at its address."""
    port = free_port()
    process = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S_MAX
    try:
        while not _answers(answers, url):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"{command} does not answer")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def post(connection: HTTPConnection, path: str, body: bytes, kind: str = "json") -> tuple[int, bytes]:
    """Status and content."""
    connection.request("POST", path, body, {"content-type": f"application/{kind}"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def connected(url: str) -> HTTPConnection:
    return HTTPConnection(urlsplit(url).netloc)


def _answers(answers: Callable[[str], bool], url: str) -> bool:
    try:
        return answers(url)
    except OSError:
        return False
