"""A Postgres server that tests may stop and kill."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.embedded.postgres import EmbeddedPostgres
from tests.support.records import record_maker


class OwnServer(NamedTuple):
    """The server, and what makes migrated, empty databases in it."""

    postgres: EmbeddedPostgres
    new_record: Callable[[], str]


@pytest.fixture(scope="module")
def own_server() -> Iterator[OwnServer]:
    """One for all tests of a file. Nothing is forced to disk: a kill takes the last commits with it, which is harder on whoever
    relies on them, and the next start need not sync every file."""
    directory = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    directory.chmod(0o711)
    try:
        with EmbeddedPostgres(directory / "postgres", durable=False) as server:
            yield OwnServer(server, record_maker(server))
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def own_postgres(own_server: OwnServer) -> EmbeddedPostgres:
    """It runs, whatever the test before has done to it."""
    if not own_server.postgres.ready():
        own_server.postgres.start()
    return own_server.postgres


@pytest.fixture
def own_record_url(own_server: OwnServer, own_postgres: EmbeddedPostgres) -> str:
    """The URL of a migrated, empty database of this test's own, in `own_postgres`."""
    return own_server.new_record()
