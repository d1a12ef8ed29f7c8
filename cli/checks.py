"""What `vertumnus doctor` looks at. Each check asks the real thing and says what it found and what is needed."""

import asyncio
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from cli.embedded.data_dir import DataDir
from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from cli.embedded.processes import StartFailed
from cli.settings import CommandSettings
from shared.runtime.clock import SystemClock
from shared.runtime.ports import Unavailable
from shared.runtime.server_checks import ServerUnfit, inspect_nats

PYTHON_MIN = (3, 11)
POSTGRES_MIN = 15
DISK_FREE_MIN_BYTES = 2 * 1024**3
"""Model (0.5 GB), both servers' first day on a laptop, and room to compact."""

CLOCK_SKEW_S_MAX = 1.0
"""Windows, rates and time limits compare times that different machines wrote down."""

CLOCK_YEAR_MIN = 2025
CONNECT_LIMIT_S = 5.0
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed` is what would make it pass, said also when it does."""

    name: str
    ok: bool
    found: str
    needed: str


def examine(settings: CommandSettings, home: DataDir, model_dir: Path) -> list[Check]:
    """Every check. Servers that neither the settings nor a running system name are started for the purpose."""
    running = home.running()
    nats_url = settings.nats_url or (running.nats_url if running else None)
    database_url = settings.database_url or (running.database_url if running else None)
    with tempfile.TemporaryDirectory(prefix="vertumnus-doctor-") as scratch:
        # As root, Postgres runs as another user, who has to get through.
        Path(scratch).chmod(0o711)
        return [
            *machine_checks(home.path),
            model_check(model_dir),
            *_examine_nats(nats_url, Path(scratch)),
            _examine_postgres(database_url, Path(scratch)),
        ]


def _examine_nats(url: str | None, scratch: Path) -> list[Check]:
    if url is not None:
        return asyncio.run(nats_checks(url))
    try:
        with EmbeddedNats(scratch / "nats") as server:
            return asyncio.run(nats_checks(server.url))
    except StartFailed as failure:
        return [Check("NATS", False, str(failure), "an embedded server that starts")]


def _examine_postgres(url: str | None, scratch: Path) -> Check:
    if url is not None:
        return asyncio.run(postgres_check(url))
    try:
        with EmbeddedPostgres(scratch / "postgres", durable=False) as server:
            return asyncio.run(postgres_check(server.url()))
    except StartFailed as failure:
        return Check("Postgres", False, str(failure), "an embedded server that starts")


def machine_checks(data_dir: Path) -> Iterator[Check]:
    """Python, disk and clock of this machine."""
    yield Check("Python", sys.version_info >= PYTHON_MIN, platform.python_version(), "3.11 or newer")
    existing = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    yield Check(
        "disk",
        free >= DISK_FREE_MIN_BYTES,
        f"{free / 1024**3:.1f} GiB free for {data_dir}",
        f"{DISK_FREE_MIN_BYTES // 1024**3} GiB",
    )
    now = datetime.fromtimestamp(SystemClock().now_ns() / 1e9, UTC)
    yield Check(
        "clock", now.year >= CLOCK_YEAR_MIN, now.isoformat(timespec="seconds"), f"a year from {CLOCK_YEAR_MIN} on"
    )


def model_check(model_dir: Path) -> Check:
    """Whether `model_dir` has the layout that the torch engine loads."""
    needed = "config, tokenizer and safetensors as Hugging Face lays them out (`make model`)"
    missing = [name for name in MODEL_FILES if not (model_dir / name).is_file()]
    weights = sorted(model_dir.glob("*.safetensors"))
    if missing or not weights:
        absent = ", ".join([*missing, *([] if weights else ["*.safetensors"])])
        return Check("model", False, f"{model_dir} lacks {absent}", needed)
    try:
        config = json.loads((model_dir / "config.json").read_text())
        kind = f"{config['model_type']}, {config['num_hidden_layers']} layers"
    except (ValueError, KeyError) as error:
        return Check("model", False, f"{model_dir}/config.json cannot be read: {error!r}", needed)
    size = sum(file.stat().st_size for file in weights)
    return Check("model", True, f"{model_dir.name}: {kind}, {size / 1024**2:.0f} MiB", needed)


async def nats_checks(url: str) -> list[Check]:
    """API level, payload size, honest stream configuration and clock of a NATS server."""
    needed = "2.14 or newer (JetStream API level 4), messages of 512 KiB"
    try:
        server, probe = await inspect_nats(url, SystemClock())
    except ServerUnfit as refusal:
        return [Check("NATS", False, str(refusal), needed)]
    except Unavailable as failure:
        return [Check("NATS", False, f"no answer from {without_password(url)}: {failure}", "a server that answers")]
    limits = f"API level {server.api_level}, {server.payload_bytes_max // 1024} KiB a message"
    return [
        Check("NATS", True, f"{server.version} at {server.address}, {limits}", needed),
        Check(
            "NATS atomic batches",
            probe.atomic_batches,
            f"allow_atomic is echoed as {str(probe.atomic_batches).lower()}",
            "the server keeps what a stream is configured with",
        ),
        Check(
            "NATS clock",
            abs(probe.clock_skew_s) <= CLOCK_SKEW_S_MAX,
            f"{probe.clock_skew_s:+.3f} s against this machine's",
            f"within {CLOCK_SKEW_S_MAX:.0f} s",
        ),
    ]


async def postgres_check(url: str) -> Check:
    """Version of the Postgres server behind a SQLAlchemy URL."""
    needed = f"{POSTGRES_MIN} or newer"
    try:
        connection = await asyncpg.connect(url.replace("+asyncpg", "", 1), timeout=CONNECT_LIMIT_S)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as failure:
        return Check("Postgres", False, f"no answer from {without_password(url)}: {failure or 'too slow'}", needed)
    try:
        version = connection.get_server_version()
    finally:
        await connection.close()
    found = f"{version.major}.{version.micro} at {without_password(url)}"
    return Check("Postgres", version.major >= POSTGRES_MIN, found, needed)


def without_password(url: str) -> str:
    """The server part of a URL: what may be printed of it."""
    return url.rpartition("@")[2].rpartition("//")[2]
