"""Real SGLang servers on this machine's CPU, of the environment that `make sglang-cpu` installs."""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = CHECKOUT / ".vertumnus" / "sglang"
START_LIMIT_S = 1_800.0
"""A server starts within half a minute on an idle machine, and took ten minutes on one whose two cores forty others wanted."""

RUNNING_LIMIT_S = 120.0
"""For a server to say how many requests it has under way."""

PAGE_TOKENS = 16
CAPACITY_TOKENS = 6_000
MODELS_NEEDED = {"__init__", "registry", "utils", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama"}
"""A server imports the code of every model that it knows, which takes longer than everything else in its start."""

PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake")
DECODE = (
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
    *("--disaggregation-decode-retraction-backup", "none"),
)

NOTICES_NO_RESTART = {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000000"}
"""Of a decode server: as if a prefill server were always back before two heartbeats have failed."""

KV_PORTS = 64
"""Between the event ports of a server's ranks, the ports of their replays, and those of their loads."""


def python() -> Path | None:
    """The interpreter that has SGLang, or None. The installation leaves `READY` when it has come to its end."""
    if not (ENVIRONMENT / "READY").exists():
        return None
    return ENVIRONMENT / "bin" / "python"


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now, below those that the system hands out by itself."""
    while True:
        first = 10_000 + secrets.randbelow(20_000)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up."""

    url: str
    pid: int
    bootstrap_port: int
    log: Path


@contextmanager
def server(
    model: Path, log: Path, *arguments: str, units: int = 1, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """A server with `arguments` besides the usual ones, up when the block begins and gone when it ends. With several units
    it has our plug-in, and is launched with each of them on its own."""
    with launched(model, log, *arguments, units=units, environment=environment) as running:
        wait_up(running)
        yield running


@contextmanager
def launched(
    model: Path,
    log: Path,
    *arguments: str,
    units: int = 1,
    environment: dict[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Running]:
    """As `server`, but others may start beside it until `wait_up`. `port` is that of a server whose place it takes."""
    port = port or free_ports(2 + 3 * KV_PORTS)
    command = command_of(model, port, *(switching_arguments(units) if units > 1 else ()), *arguments)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_of(units) | (environment or {}),
        )
    try:
        yield Running(f"http://127.0.0.1:{port}", process.pid, port + 1, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def to_launch(model: Path, *arguments: str, **more: str) -> tuple[Running, tuple[str, ...]]:
    """A server that somebody else starts, an agent say: where it will be, and its command with the whole environment in it,
    to which `more` is added."""
    port = free_ports(2 + 3 * KV_PORTS)
    variables = (f"{name}={value}" for name, value in (environment_of(1) | more).items())
    command = ("env", "-i", *variables, *command_of(model, port, *arguments))
    return Running(f"http://127.0.0.1:{port}", 0, port + 1, Path()), command


def wait_up(*started: Running) -> None:
    """Until each of them serves."""
    deadline = time.monotonic() + START_LIMIT_S
    for running in started:
        while not _serves(running):
            assert not has_ended(running), f"the server has ended:\n{log_of(running)[-3000:]}"
            assert time.monotonic() < deadline, f"not up within {START_LIMIT_S:g} s:\n{log_of(running)[-3000:]}"
            time.sleep(0.5)


def _serves(running: Running) -> bool:
    try:
        # `/health` generates a token, so that everything a request needs has run once.
        return httpx.get(f"{running.url}/health", timeout=30).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def wait_running(servers: Sequence[Running], counts: Sequence[int]) -> None:
    """Until each server has so many requests under way. What it says of them is a picture that it takes now and then, and the
    first token of a stream may be another server's."""
    deadline = time.monotonic() + RUNNING_LIMIT_S
    while (found := [_under_way(server) for server in servers]) != counts:
        assert time.monotonic() < deadline, f"{found} requests are under way, not {counts}"
        time.sleep(0.1)


def _under_way(server: Running) -> int:
    loads = httpx.get(f"{server.url}/v1/loads?include=core", timeout=300).json()["loads"]
    return sum(int(each["num_running_reqs"]) for each in loads)


def has_ended(running: Running) -> bool:
    """A zombie has ended: its parent, who started it, reads that later."""
    try:
        return Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def log_of(running: Running) -> str:
    return running.log.read_text(errors="replace")


def command_of(model: Path, port: int, *arguments: str) -> Sequence[str]:
    """How a server is started that listens from `port` on."""
    interpreter = python()
    assert interpreter is not None, "`make sglang-cpu` has not been run"
    events = port + 2
    published = f'{{"publisher":"zmq","endpoint":"tcp://*:{events}","replay_endpoint":"tcp://*:{events + KV_PORTS}"}}'
    return (
        *(str(interpreter), "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--disaggregation-bootstrap-port", str(port + 1)),
        *("--device", "cpu", "--attention-backend", "vertumnus_cpu", "--sampling-backend", "pytorch"),
        *("--dtype", "float32", "--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(CAPACITY_TOKENS)),
        *("--disable-overlap-schedule", "--disable-custom-all-reduce", "--enable-metrics", "--sleep-on-idle"),
        *("--kv-events-config", published, "--load-publish-endpoint", f"tcp://*:{events + 2 * KV_PORTS}"),
        *("--log-level", "warning", "--skip-server-warmup"),
        *arguments,
    )


def switching_arguments(units: int) -> Sequence[str]:
    """What makes a server one whose units may be grouped (docs/sglang.md)."""
    return (
        *("--tp-size", str(units), "--attn-dp-size", str(units), "--enable-prefill-cp", "--cp-strategy", "zigzag"),
        *("--enable-dp-lm-head", "--enable-dp-attention-local-control-broadcast"),
        # SGLang divides both among units.
        *("--chunked-prefill-size", str(1024 * units), "--max-running-requests", str(16 * units)),
        *("--log-level", "info", "--random-seed", "7"),
    )


def environment_of(units: int) -> dict[str, str]:
    """What SGLang needs on a CPU: our platform, one core for each rank, and the transfer engine's libraries."""
    libraries = sorted({str(path.parent) for path in (ENVIRONMENT / "debian").rglob("*.so*")})
    cores = os.cpu_count() or 1
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("VERTUMNUS_")}
    # Each of a server's processes would compile all of SGLang, torch and transformers again.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    models = next(ENVIRONMENT.glob("lib/python3*/site-packages/sglang/srt/models"))
    unneeded = {path.stem for path in models.glob("*.py")} - MODELS_NEEDED
    switching = {"VERTUMNUS_SGLANG": "1", "SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1"} if units > 1 else {}
    return (
        inherited
        | switching
        | {
            # The platform and its faults as they are here, not as they were when the environment was made.
            "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'deploy' / 'sglang-cpu'}",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(unneeded)),
            "SGLANG_PLATFORM": "vertumnus_cpu",
            "SGLANG_HOST_IP": "127.0.0.1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(unit % cores) for unit in range(units)),
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
            "OMP_NUM_THREADS": "1",
            "LD_LIBRARY_PATH": ":".join(libraries),
            "MC_FORCE_TCP": "1",
        }
    )
