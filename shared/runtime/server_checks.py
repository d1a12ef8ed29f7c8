"""Whether the servers we were pointed at can keep the log's promises.

An old NATS server takes a stream's configuration and silently ignores the fields it does not know: on 2.9.10 the second
message of an "atomic" batch was stored although the first was refused. So nothing is believed: the API level is read, and
the configuration that a server echoes is compared with what was asked for.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from shared.contracts.codec import EVENT_BYTES_MAX
from shared.runtime.clock import Clock
from shared.runtime.ports import Unavailable

API_LEVEL_MIN = 4
"""JetStream API level of NATS 2.14; measured: 2.9 and 2.10 report none, 2.11 reports 1, 2.12 reports 3, 2.15 reports 5."""

PAYLOAD_BYTES_MIN = EVENT_BYTES_MAX + 4_096
"""The largest event and its headers. Claims, with 256 KB of tokens, are smaller."""

PROBE_BYTES_MAX = 64 * 1024
PROBE_AGE_S = 60.0
REQUEST_LIMIT_S = 5.0
CONNECT_LIMIT_S = 5


class ServerUnfit(Exception):
    """A server that would lose or tear what it is given. The message names the server, what it has and what is needed."""


@dataclass(frozen=True, slots=True)
class NatsServer:
    """What a server says of itself. `api_level` 0 stands for a server from before levels, -1 for one without JetStream."""

    address: str
    version: str
    api_level: int
    payload_bytes_max: int


@dataclass(frozen=True, slots=True)
class Probe:
    """What a stream on the server turned out to be: `clock_skew_s` is the server's clock minus ours."""

    atomic_batches: bool
    clock_skew_s: float


async def inspect_nats(url: str, clock: Clock) -> tuple[NatsServer, Probe]:
    """Connect to a server, ask it, and probe it. Errors: ServerUnfit; Unavailable, which says why but not the password."""
    errors: list[str] = []

    async def remember(error: Exception) -> None:
        errors.append(str(error))

    try:
        # One repeat: to this client zero repeats means for ever.
        client = await nats.connect(
            url, connect_timeout=CONNECT_LIMIT_S, max_reconnect_attempts=1, reconnect_time_wait=0.1, error_cb=remember
        )
    except (nats.errors.Error, OSError) as failure:
        raise Unavailable("; ".join(dict.fromkeys([*errors, str(failure)]))) from failure
    try:
        return await require_nats(client), await probe_nats(client, clock)
    finally:
        await client.close()


async def require_nats(client: Client) -> NatsServer:
    """The connected server, if it is fit to hold the log. Errors: ServerUnfit; Unavailable when it does not answer."""
    server = await ask_nats(client)
    refuse_unfit(server)
    return server


async def ask_nats(client: Client) -> NatsServer:
    """What the connected server says of itself. Errors: Unavailable."""
    url = client.connected_url
    address = "unknown address" if url is None else f"{url.hostname}:{url.port}"
    try:
        answer = await client.request("$JS.API.INFO", b"", timeout=REQUEST_LIMIT_S)
        info = json.loads(answer.data)
    except nats.errors.NoRespondersError:
        info = {"error": {"description": "JetStream is not enabled"}}
    except nats.errors.Error as failure:
        raise Unavailable(f"NATS server at {address} does not answer: {failure}") from failure
    version = client.connected_server_version
    return NatsServer(
        address, f"{version.major}.{version.minor}.{version.patch}", api_level_in(info), client.max_payload
    )


def api_level_in(info: dict[str, Any]) -> int:
    """The API level in an answer to `$JS.API.INFO`: 0 when it names none, -1 when it is a refusal."""
    if "error" in info:
        return -1
    return int(info.get("api", {}).get("level", 0))


def refuse_unfit(server: NatsServer) -> None:
    """ServerUnfit if `server` may not hold the log."""
    name = f"NATS server {server.version} at {server.address}"
    if server.api_level < 0:
        raise ServerUnfit(f"{name} has no JetStream: start it with -js, or enable it for this account")
    if server.api_level < API_LEVEL_MIN:
        raise ServerUnfit(
            f"{name} has JetStream API level {server.api_level}; level {API_LEVEL_MIN} is needed, "
            "which NATS 2.14 and newer have"
        )
    if server.payload_bytes_max < PAYLOAD_BYTES_MIN:
        raise ServerUnfit(
            f"{name} takes messages of up to {server.payload_bytes_max} bytes; {PAYLOAD_BYTES_MIN} are needed (max_payload)"
        )


async def probe_nats(client: Client, clock: Clock) -> Probe:
    """Create a small stream in memory, write to it, read what became of it, and delete it. Errors: Unavailable."""
    stream = client.jetstream(timeout=REQUEST_LIMIT_S)
    name = f"VERTUMNUS_PROBE_{secrets.token_hex(4)}"
    subject = f"vertumnus.probe.{name}"
    config = StreamConfig(
        name=name,
        subjects=[subject],
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_bytes=PROBE_BYTES_MAX,
        # A probe that dies on the way leaves a stream that empties itself.
        max_age=PROBE_AGE_S,
        allow_atomic=True,
    )
    try:
        created = await stream.add_stream(config)
        try:
            before = clock.now_ns()
            await stream.publish(subject, b"")
            after = clock.now_ns()
            written = (await stream.get_last_msg(name, subject)).time
        finally:
            await stream.delete_stream(name)
    except (nats.errors.Error, nats.js.errors.Error) as failure:
        raise Unavailable(f"NATS server refused a test stream: {failure}") from failure
    skew = 0.0 if written is None else written.timestamp() - (before + after) / 2e9
    return Probe(atomic_batches=bool(created.config.allow_atomic), clock_skew_s=skew)
