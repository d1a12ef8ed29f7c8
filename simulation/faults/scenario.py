"""What a seed stands for: a pool, its requests, what is asked of it and what befalls it. Drawn as a whole before anything runs,
so that a smaller scenario is the same one with parts left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from shared.contracts.envelope import Stored
from shared.model.lattice import Composition

FaultKind = Literal[
    "kill", "stop", "cut", "outage", "loss", "repetition", "disorder", "delay", "unacknowledged", "late", "straggler",
    "engine-death", "lost-copy", "database-away",
]  # fmt: skip
AskKind = Literal["reconfigure", "drain", "freeze", "cordon", "parameters", "tenants"]

AT_ANY_TIME: tuple[AskKind, ...] = ("reconfigure", "drain", "freeze", "cordon", "parameters")

STRENGTHS: dict[FaultKind, tuple[float, float]] = {
    "loss": (0.02, 0.5),
    "repetition": (0.05, 0.5),
    "disorder": (0.1, 0.9),
    "delay": (0.05, 1.5),
    "unacknowledged": (0.1, 0.8),
    "late": (0.05, 0.5),
    "straggler": (3.0, 60.0),
}
"""Chances, seconds or a factor: what `Fault.strength` means by kind, from weak to strong."""

WHOLE: tuple[FaultKind, ...] = ("outage", "database-away")
"""What befalls everybody or nobody."""

FAULT_S_MEAN, FAULT_S_MAX = 4.0, 15.0
"""How long a fault lasts: the limits that services wait for are 1 to 10 s."""

FAULTS_FROM_S = 2.0
"""A pool comes up undisturbed in most scenarios, or little would ever run."""


TENANTS = ("many", "many", "many", "few", "other")
TENANTS_SHARE = 0.25
"""Of all scenarios, those in which the requests are several tenants', and an operator gives them limits and shares."""

OLDER_SHARE = 0.4
"""Of all scenarios, those whose pool was not opened with what is recommended now."""


class Fault(NamedTuple):
    """`target` is a role's name; empty for everybody at once."""

    at_s: float
    kind: FaultKind
    target: str
    lasts_s: float
    strength: float = 0.0


class Ask(NamedTuple):
    """What an operator or a policy asks for. `choice` in [0, 1) picks among what is possible then."""

    at_s: float
    kind: AskKind
    node: int
    choice: float


class Request(NamedTuple):
    """One client's request: blocks of documents that its tenant shares, a tail of its own, and how much patience there is.

    `leaves_after` and `enough_after` count tokens; `patience_s` ends a wait for the next one.
    """

    at_s: float
    documents: tuple[int, ...]
    tail_tokens: int
    max_tokens: int
    router: float
    sampled: bool = False
    stops: bool = False
    leaves_after: int | None = None
    enough_after: int | None = None
    patience_s: float | None = None
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Shape:
    """The pool. Compositions are the nodes' first ones. An `older` pool was led before there was anything to open one with, and
    has the paper's policies until somebody asks for others."""

    routers: int
    standbys: bool
    compositions: tuple[Composition, ...]
    decode_ranks: int
    blocks_per_rank: int
    queue_max: int
    skews_ms: int
    older: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(len(self.compositions)))

    @property
    def roles(self) -> tuple[str, ...]:
        """Every process of the pool."""
        leaders = ("controller-a", "cachemgr-a", *(("controller-b", "cachemgr-b") if self.standbys else ()))
        routers = (f"router-{index}" for index in range(self.routers))
        return (*leaders, *routers, *(f"worker-{node}" for node in self.nodes), "ledger")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`checks_every` is after how many instants all states check themselves."""

    seed: int
    shape: Shape
    requests: tuple[Request, ...]
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    checks_every: int = 40

    def only(
        self,
        faults: tuple[int, ...] | None = None,
        requests: tuple[int, ...] | None = None,
        asks: tuple[int, ...] | None = None,
    ) -> "Scenario":
        """With nothing but these parts, by their numbers; None for all."""
        return replace(
            self,
            faults=_some(self.faults, faults),
            requests=_some(self.requests, requests),
            asks=_some(self.asks, asks),
        )


Story = Callable[[Sequence[Stored]], Scenario | None]
"""By the log so far, what comes next; None at the end."""


def _some(parts: tuple[Any, ...], which: tuple[int, ...] | None) -> tuple[Any, ...]:
    return parts if which is None else tuple(parts[number] for number in which)


COMPOSITIONS: tuple[Composition, ...] = (
    (4,), (2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1), (4, 4), (1, 1, 2, 4), (2, 2, 4), (8,), (4, 2, 2),
)  # fmt: skip


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = Random(f"scenario {seed}")
    shape = _shape(chance)
    lasts_s = chance.uniform(6, 14)
    small = seed % 10 == 0
    bursts = [chance.uniform(1, lasts_s) for _ in range(3)]
    requests = sorted(_request(chance, bursts, lasts_s) for _ in range(chance.randint(2, 5 if small else 20)))
    policies = [Ask(at_s, "parameters", 0, round(chance.random(), 6)) for at_s in (0.5, 1.5) if chance.random() < 0.5]
    asks = sorted([*policies, *(_ask(chance, shape, lasts_s) for _ in range(chance.choice((0, 0, 1, 2, 4))))])
    faults = sorted(_fault(chance, shape, lasts_s) for _ in range(chance.choice((0, 1, 2, 2, 3, 4, 6, 8))))
    shape = replace(shape, older=Random(f"older {seed}").random() < OLDER_SHARE)
    of_tenants = Random(f"tenants {seed}")
    if of_tenants.random() < TENANTS_SHARE:
        requests = [each._replace(tenant=of_tenants.choice(TENANTS)) for each in requests]
        asks = sorted([*asks, Ask(round(of_tenants.uniform(0.3, 2), 3), "tenants", 0, round(of_tenants.random(), 6))])
    return Scenario(
        seed=seed,
        shape=shape,
        requests=tuple(requests),
        asks=tuple(asks),
        faults=tuple(faults),
        checks_every=1 if small else 40,
    )


def _shape(chance: Random) -> Shape:
    ranks = chance.choice((4, 4, 8))
    fitting = [each for each in COMPOSITIONS if sum(each) == ranks]
    return Shape(
        routers=chance.choice((1, 2, 2, 3)),
        standbys=chance.random() < 0.7,
        compositions=tuple(chance.choice(fitting) for _ in range(chance.choice((1, 2, 2, 3)))),
        decode_ranks=chance.choice((0, 1, 1, 2)),
        blocks_per_rank=chance.choice((6, 12, 40)),
        queue_max=chance.choice((2, 8, 8)),
        skews_ms=chance.choice((0, 50, 1_500)),
    )


def _request(chance: Random, bursts: list[float], lasts_s: float) -> Request:
    """At any time, or in one of the bursts."""
    at_s = chance.uniform(0.5, lasts_s) if chance.random() < 0.4 else chance.choice(bursts) + chance.uniform(0, 0.3)
    ends: dict[str, Any] = {}
    match chance.choice(("all", "all", "all", "all", "leaves", "enough", "patience")):
        case "leaves":
            ends["leaves_after"] = chance.randint(0, 10)
        case "enough":
            ends["enough_after"] = chance.randint(1, 10)
        case "patience":
            ends["patience_s"] = chance.uniform(0.05, 3)
    return Request(
        at_s=round(at_s, 3),
        documents=tuple(chance.randint(0, 2) for _ in range(chance.randint(0, 3))),
        tail_tokens=chance.randint(1, 90),
        max_tokens=chance.choice((1, 2, 8, 20, 40)),
        router=chance.random(),
        sampled=chance.random() < 0.3,
        stops=chance.random() < 0.2,
        **ends,
    )


def _ask(chance: Random, shape: Shape, lasts_s: float) -> Ask:
    kind: AskKind = chance.choice((*("reconfigure",) * 6, *AT_ANY_TIME))
    return Ask(
        at_s=round(chance.uniform(2, lasts_s), 3),
        kind=kind,
        node=chance.randrange(len(shape.nodes)),
        choice=round(chance.random(), 6),
    )


def _fault(chance: Random, shape: Shape, lasts_s: float) -> Fault:
    kind: FaultKind = chance.choice(("kill", "kill", "cut", "cut", "stop", "unacknowledged", *get_args(FaultKind)))
    at_s = chance.uniform(FAULTS_FROM_S if chance.random() < 0.9 else 0.0, lasts_s)
    workers = [role for role in shape.roles if role.startswith("worker-")]
    if kind in ("straggler", "engine-death", "lost-copy"):
        target = chance.choice(workers)
    elif kind in ("kill", "stop", "cut") or (kind not in WHOLE and chance.random() < 0.5):
        target = chance.choice(shape.roles)
    else:
        target = ""
    strength = chance.uniform(*STRENGTHS[kind]) if kind in STRENGTHS else 0.0
    lasts_s = min(FAULT_S_MAX, chance.expovariate(1 / FAULT_S_MEAN))
    return Fault(round(at_s, 3), kind, target, round(lasts_s, 3), round(strength, 3))
