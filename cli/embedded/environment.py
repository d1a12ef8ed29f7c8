"""The environment of each embedded service: the one place where the command's choices become `VERTUMNUS_*` variables.

Variables that the user has set reach every service too, so `VERTUMNUS_…=… vertumnus up` changes any setting of any
service; only where the servers are, and what an option of `up` says, is decided here. Nothing secret goes by argument:
anybody on the machine may read those.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from cli.embedded.data_dir import DataDir
from cli.embedded.processes import StartFailed
from cli.embedded.supervisor import READY_LIMIT_S
from cli.terminal import reason
from shared.model.lattice import Composition

TORCH_BLOCK_TOKENS = 16
"""A small model's prompts are short: in blocks of 64 tokens a question asked twice would share nothing."""

DEFAULTS = {
    "torch": {
        "VERTUMNUS_COEFFICIENTS": "smollm2_135m_cpu",
        "VERTUMNUS_BLOCK_TOKENS": str(TORCH_BLOCK_TOKENS),
        "VERTUMNUS_BLOCKS_PER_RANK": "512",
        "VERTUMNUS_FIRST_TOKEN_SLACK_S": "60",
        "VERTUMNUS_NO_WORKER_WAIT_S": "30",
    },
    "sglang": {"VERTUMNUS_COEFFICIENTS": "qwen3_30b_a3b_h20", "VERTUMNUS_FIRST_TOKEN_SLACK_S": "60"},
    "modelled": {"VERTUMNUS_COEFFICIENTS": "qwen3_30b_a3b_h20"},
}
"""What the engines need here, unless the user says otherwise. Nine ranks share a few CPU cores with everything else on the
machine: a prefill may take many times what is predicted, as may the ranks' return after one of them has died, and a late
answer is better than a 504, or a 503."""


@dataclass(frozen=True, slots=True)
class SystemChoices:
    """What `vertumnus up` was asked for. Without `model_dir` only token ids are served; `router_port` 0 takes a free one;
    `settings` names more variables, by service and without their prefix."""

    engine: str
    model_dir: Path | None
    composition: Composition
    router_port: int
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the two servers are, credentials included."""

    nats_url: str
    database_url: str


def service_environment(name: str, choices: SystemChoices, servers: Servers, home: DataDir) -> dict[str, str]:
    """The whole environment of service `name`."""
    common = {
        "VERTUMNUS_NATS_URL": servers.nats_url,
        "VERTUMNUS_BLOCK_KEY_FILE": str(home.block_key_file()),
        "VERTUMNUS_OPERATOR_KEY_FILE": str(home.operator_key_file()),
    }
    if choices.model_dir is not None:
        common["VERTUMNUS_MODEL_DIR"] = str(choices.model_dir)
    composition = ",".join(map(str, choices.composition))
    own = {
        "ledger": {"VERTUMNUS_DATABASE_URL": servers.database_url},
        "controller": {"VERTUMNUS_COMPOSITION": composition},
        "worker": {"VERTUMNUS_ENGINE": choices.engine, "VERTUMNUS_PREFILL_RANKS": str(sum(choices.composition))},
    }
    more = {f"VERTUMNUS_{key.upper()}": value for key, value in choices.settings.get(name, {}).items()}
    return {**DEFAULTS[choices.engine], **os.environ, **common, **own.get(name, {}), **more}


def services_limit_s(choices: SystemChoices) -> float:
    """How long the services may take to become ready. SGLang's servers load weights, and how long they may is a setting of the
    worker that waits for them. Errors: StartFailed if the worker's settings are refused."""
    if choices.engine != "sglang":
        return READY_LIMIT_S
    from services.worker.settings import WorkerSettings

    try:
        worker = WorkerSettings(engine="sglang", model_dir=choices.model_dir)
    except ValidationError as error:
        raise StartFailed(f"worker: {reason(error)}") from None
    return READY_LIMIT_S + worker.sglang_start_s
