"""How an SGLang engine is set up: which servers there are, what they serve, and how they are changed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.worker.engine.sglang.model_facts import ModelFacts
from shared.contracts.geometry import DEGREES

SERVERS_MAX = 64

RESERVED_TOKENS = 6
"""SGLang 0.5.23 takes prompts that are so many tokens shorter than the context (`max_req_input_len` of 4090 for 4096)."""

_ADDRESS = re.compile(r"https?://[^\s/?#@]+/?")


def _http_url(value: str) -> str:
    """An address and nothing else: it is in logs and in the record, where no password may be. ValueError says what is
    needed."""
    parts = urlsplit(value)
    if not _ADDRESS.fullmatch(value) or not parts.hostname or parts.port == 0:
        raise ValueError("http://HOST:PORT is needed, without a path or a password")
    return value.rstrip("/")


class ServerAddress(BaseModel):
    """A prefill server. `degree` is how many GPUs it has for each request: of a server with our plug-in, at most.
    `bootstrap_port` is its `--disaggregation-bootstrap-port`, None if it decodes what it prefills."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    degree: int
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)

    _url = field_validator("url")(_http_url)

    @field_validator("degree")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in DEGREES:
            raise ValueError(f"{value} is none of {list(DEGREES)}")
        return value

    @property
    def host(self) -> str:
        """Where it is reached."""
        host = urlsplit(self.url).hostname
        assert host is not None, "the address was checked"
        return host


class DecodeAddress(BaseModel):
    """A decode server that prefill servers of this node may send KV to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    _url = field_validator("url")(_http_url)


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """`servers` are of one degree, so a node of fixed degree has no other composition that anybody could propose; with
    `adaptive` it is one server with our plug-in, whose units are grouped as the pool decides.

    Where `decode` names no server, each server decodes what it prefills. `silence_s`: see `health`. `launch` is the command of
    a server that lives and dies with each engine; None if it runs by itself.
    """

    model_dir: Path
    servers: tuple[ServerAddress, ...]
    decode: tuple[DecodeAddress, ...]
    adaptive: bool
    block_tokens: int
    blocks_per_rank: int
    context_tokens_max: int
    silence_s: float
    start_limit_s: float
    key: str | None = field(default=None, repr=False)
    launch: tuple[str, ...] | None = None
    drain_s: float = 1.5
    """For units to become idle when their geometry changes. The agent has let steps end before, so only answers that a unit
    decodes itself are waited for. The controller allows a switch 2 s, and is to hear why there was none."""
    vote_s: float = 3.0
    """From the first unit's vote to the last: only a unit that hangs or has died takes it."""

    @property
    def prefill_ranks(self) -> int:
        """GPUs of all servers together."""
        return sum(server.degree for server in self.servers)

    @property
    def degree(self) -> int:
        """The degree of every server."""
        return self.servers[0].degree

    @property
    def units(self) -> int:
        """How many independent caches there are: a server of fixed degree has one, and one with our plug-in one per rank."""
        return self.prefill_ranks if self.adaptive else len(self.servers)

    @property
    def degrees(self) -> tuple[int, ...]:
        """What workers may have."""
        return tuple(each for each in DEGREES if each <= self.degree) if self.adaptive else (self.degree,)

    def prompt_tokens_max(self, model: ModelFacts) -> int:
        """The longest prompt that every worker takes."""
        context_tokens = min(self.context_tokens_max, model.positions_max)
        return max(1, min(context_tokens - RESERVED_TOKENS, self.blocks_per_rank * self.block_tokens - 1))

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode are different servers."""
        return bool(self.decode)


def why_not(servers: tuple[ServerAddress, ...], decode: tuple[DecodeAddress, ...], *, adaptive: bool) -> str | None:
    """What is wrong with a set of servers, field first, or None."""
    if not 1 <= len(servers) <= SERVERS_MAX:
        return f"sglang_servers: {len(servers)} servers; a node has 1 to {SERVERS_MAX}"
    if adaptive and len(servers) > 1:
        return f"sglang_servers: {len(servers)} servers; a node with the plug-in is one server over all its GPUs"
    if len(degrees := {server.degree for server in servers}) > 1:
        return f"sglang_servers: degrees {sorted(degrees)}; the servers of one node have one degree, so give each degree a node"
    if len(decode) > SERVERS_MAX:
        return f"sglang_decode: {len(decode)} servers; a node has at most {SERVERS_MAX}"
    if decode and any(server.bootstrap_port is None for server in servers):
        return "sglang_servers: bootstrap_port is missing where sglang_decode names decode servers"
    if not decode and any(server.bootstrap_port is not None for server in servers):
        return "sglang_decode: no decode server is named, but sglang_servers have bootstrap ports"
    if len({server.url for server in servers}) < len(servers) or len({each.url for each in decode}) < len(decode):
        return "sglang_servers, sglang_decode: a server is named twice"
    return None
