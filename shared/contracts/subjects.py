"""Every NATS subject, who publishes on it and who listens. Nothing else in the project spells a subject.

Logged subjects belong to the pool's one stream. The type of an event is in a header and in its body, never in its subject:
every distinct subject costs the server memory, and the fence of a leader needs all of its decisions on one subject.
"""

from typing import NamedTuple

from shared.contracts.envelope import Channel
from shared.contracts.ids import NodeId, RequestId, RouterId, check_token

PREFIX = "vertumnus"
TYPE_HEADER = "Vertumnus-Type"


class SubjectRule(NamedTuple):
    """One row of the table in `docs/events.md`."""

    pattern: str
    publishers: str
    listeners: str
    logged: bool
    carries: str


RULES = (
    SubjectRule(
        "events.requests.<source>", "router", "router, controller, cachemgr, ledger", True, "the life of requests"
    ),
    SubjectRule("events.cache.<node>", "worker", "router, cachemgr, ledger", True, "what workers hold"),
    SubjectRule("events.workers.<node>", "worker", "everybody", True, "nodes, prefills, drains, adoptions"),
    SubjectRule("events.control", "controller", "everybody", True, "epochs, windows, parameters; fenced"),
    SubjectRule(
        "events.cache-control", "cachemgr", "router, controller, cachemgr, ledger", True, "replication; fenced"
    ),
    SubjectRule("events.ledger", "ledger", "operators", True, "log identity and seals"),
    SubjectRule("load.<node>", "worker", "controller", False, "heartbeat, 1/s"),
    SubjectRule("alive.<router>", "router", "controller", False, "heartbeat, 1/s"),
    SubjectRule("claim.<router>", "worker", "router", False, "claim check: the tokens of a request"),
    SubjectRule("frames.<router>.<request>", "worker", "router", False, "generated tokens"),
    SubjectRule("agent.<node>", "router, controller, cachemgr", "worker", False, "commands, with reply"),
)


def channel_of(subject: str) -> str:
    """The channel in a logged subject; empty for any other."""
    match subject.split("."):
        case [_, _, "events", channel, *_]:
            return channel
        case _:
            return ""


class Subjects:
    """The subjects of one pool. ValueError if the pool's name may not stand in a subject."""

    def __init__(self, pool: str) -> None:
        self.root = f"{PREFIX}.{check_token('pool', pool)}"
        self.stream = f"{PREFIX}-{pool}-events"
        self.buckets_prefix = f"{PREFIX}-{pool}"
        self.all_events = f"{self.root}.events.>"
        self.control = f"{self.root}.events.control"
        self.cache_control = f"{self.root}.events.cache-control"
        self.loads = f"{self.root}.load.*"
        self.routers_alive = f"{self.root}.alive.*"

    def event(self, channel: Channel, sender: str) -> str:
        """Where `sender` (a source or a node) publishes events of `channel`."""
        match channel:
            case Channel.CONTROL | Channel.CACHE_CONTROL | Channel.LEDGER:
                return f"{self.root}.events.{channel}"
            case Channel.REQUESTS | Channel.CACHE | Channel.WORKERS:
                return f"{self.root}.events.{channel}.{sender}"

    def channel(self, channel: Channel) -> str:
        """The filter for every event of `channel`."""
        return self.event(channel, "*")

    def load(self, node: NodeId) -> str:
        return f"{self.root}.load.{node}"

    def alive(self, router: RouterId) -> str:
        return f"{self.root}.alive.{router}"

    def claim(self, router: RouterId) -> str:
        return f"{self.root}.claim.{router}"

    def frames(self, router: RouterId, request: RequestId) -> str:
        return f"{self.root}.frames.{router}.{request}"

    def all_frames(self, router: RouterId) -> str:
        return f"{self.root}.frames.{router}.*"

    def agent(self, node: NodeId) -> str:
        return f"{self.root}.agent.{node}"
