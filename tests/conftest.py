"""Real servers, and a real model, for every test that needs one. Servers start within a second, on free ports."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import hypothesis
import pytest

from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from tests.support.records import record_maker

hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=4, help="how often a process is killed where any moment will do")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """More of them find rarer moments and take longer."""
    asked: int = request.config.getoption("--kills")
    return asked


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    """A NATS server with an empty JetStream store. `stop(kill=True)` then `start()` keeps port and store."""
    with EmbeddedNats(tmp_path / "nats", sync_always=False) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """One Postgres server for the session; nothing is forced to disk. Take `database_url`, unless you stop servers."""
    # Not tmp_path: its parents are closed to others, and as root the server runs under another user.
    directory = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    directory.chmod(0o711)
    try:
        with EmbeddedPostgres(directory / "postgres", durable=False) as server:
            yield server
    finally:
        shutil.rmtree(directory)


_databases = count(1)


@pytest.fixture
def database_url(postgres_server: EmbeddedPostgres) -> str:
    """The SQLAlchemy URL of an empty database of this test's own. It goes with the server."""
    return postgres_server.create_database(f"test_{next(_databases)}")


@pytest.fixture(scope="session")
def new_record(postgres_server: EmbeddedPostgres) -> Callable[[], str]:
    """Makes migrated, empty databases."""
    return record_maker(postgres_server)


@pytest.fixture
def record_url(new_record: Callable[[], str]) -> str:
    """The URL of a migrated, empty database of this test's own."""
    return new_record()


@pytest.fixture
def elsewhere(new_record: Callable[[], str]) -> str:
    """Another migrated, empty database."""
    return new_record()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted default model: the one that `make model` made, or one of this session."""
    made = Path(__file__).parents[1] / ".vertumnus" / "models" / "SmolLM2-135M-Instruct"
    if (made / "config.json").is_file():
        return made
    # Imported by this session only: it takes torch along.
    from services.worker.engine.torch.convert import convert

    directory = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    convert(directory)
    return directory
