"""The environment of each embedded service: the one place where the command's choices become `VERTUMNUS_*` variables.

Variables that the user has set reach every service too, so `VERTUMNUS_…=… vertumnus up` changes any setting of any
service; only where the servers are, and what an option of `up` says, is decided here. Nothing secret goes by argument:
anybody on the machine may read those.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shared.model.lattice import Composition

STREAM_BYTES_MAX = 4 * 1024**3
"""Half of what the embedded NATS server may store, which leaves room for key-value buckets and for compaction."""


@dataclass(frozen=True, slots=True)
class SystemChoices:
    """What `vertumnus up` was asked for."""

    engine: str
    model_dir: Path
    composition: Composition


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the two servers are, credentials included."""

    nats_url: str
    database_url: str


def service_environment(
    name: str, choices: SystemChoices, servers: Servers, *, data_dir: Path, block_key_file: Path
) -> dict[str, str]:
    """The whole environment of service `name`."""
    common = {
        "VERTUMNUS_NATS_URL": servers.nats_url,
        "VERTUMNUS_STREAM_BYTES_MAX": str(STREAM_BYTES_MAX),
        "VERTUMNUS_BLOCK_KEY_FILE": str(block_key_file),
        "VERTUMNUS_MODEL_DIR": str(choices.model_dir),
        "VERTUMNUS_DATA_DIR": str(data_dir),
    }
    composition = ",".join(map(str, choices.composition))
    own = {
        "ledger": {"VERTUMNUS_DATABASE_URL": servers.database_url},
        "controller": {"VERTUMNUS_COMPOSITION": composition},
        "worker": {"VERTUMNUS_ENGINE": choices.engine, "VERTUMNUS_RANKS": str(sum(choices.composition))},
    }
    return {**os.environ, **common, **own.get(name, {})}
