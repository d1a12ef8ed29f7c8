"""What deployment tests share."""

from collections.abc import Iterator

import pytest

from tests.support.pool_server import PoolServer, running_pool_server


@pytest.fixture(scope="module")
def pool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolServer]:
    """One server for the tests of a file."""
    with running_pool_server(tmp_path_factory.mktemp("pool-server")) as server:
        yield server
