"""What each tenant has of the pool, over all routers: a fold that follows `loads.py`, request by request.

Of a request in `Loads.open` it counts: 1 open, its prompt as queued until the prefill has completed, the work it reserves at
a worker as outstanding. Sums of what the loads say are as independent of the order of events as the loads are.

Besides, prompts by the second of their first assignment, for limits per minute and for whose turn it is; and which requests
wait at which router.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router.loads import Loads
from services.router.open_requests import OpenRequest
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
    RequestCompleted,
    RequestHeld,
    RequestReceived,
    RouterLost,
)
from shared.contracts.ids import RequestId, Source, TenantId
from shared.model.parameters import Parameters
from shared.model.tenants import OTHERS, Shares

MINUTE_S = 60
SECONDS_MAX = 16 * MINUTE_S
"""Seconds that are kept, the latest that something was first heard of: the minute that counts of sixteen routers no two of
whose clocks agree. What a clock that is wrong by two minutes assigns is not counted by others, and hides nobody's."""

_SECOND_NS = 10**9


class Taken(NamedTuple):
    """What open requests have now. Of the queued tokens, the held ones were never assigned."""

    requests: int = 0
    queued_tokens: int = 0
    held_tokens: int = 0
    outstanding_us: int = 0

    def changed(self, gone: "Taken", come: "Taken") -> "Taken":
        """With `come` in the place of `gone`."""
        return Taken(
            self.requests - gone.requests + come.requests,
            self.queued_tokens - gone.queued_tokens + come.queued_tokens,
            self.held_tokens - gone.held_tokens + come.held_tokens,
            self.outstanding_us - gone.outstanding_us + come.outstanding_us,
        )


NOTHING = Taken()


class Served(NamedTuple):
    """What was assigned for the first time in one second, or in several."""

    requests: int = 0
    tokens: int = 0
    uncached_tokens: int = 0

    def plus(self, other: "Served", times: int = 1) -> "Served":
        return Served(
            self.requests + times * other.requests,
            self.tokens + times * other.tokens,
            self.uncached_tokens + times * other.uncached_tokens,
        )


class Waiting(NamedTuple):
    """One held request; sorts as those of one tenant go on. `slo_us` is what it may not miss, if anything."""

    urgency: int
    since_ns: int
    request: RequestId
    service_us: int
    slo_us: int | None


@dataclass(slots=True)
class Usage:
    """State of the fold; `evolve` is its only writer. `held` are the waiting requests by router and tenant; of each second,
    None stands for everybody, so that no question adds up all tenants. `seconds` are in the order in which they were first
    heard of, `in_order` in that of time."""

    shares: Shares = field(default_factory=lambda: Shares(()))
    tenant_of: dict[RequestId, TenantId] = field(default_factory=dict)
    counted: dict[RequestId, Taken] = field(default_factory=dict)
    of_tenant: dict[TenantId, Taken] = field(default_factory=dict)
    everybody: Taken = field(default_factory=Taken)
    seconds: dict[int, dict[TenantId | None, Served]] = field(default_factory=dict)
    in_order: list[int] = field(default_factory=list)
    held: dict[Source, dict[TenantId, list[Waiting]]] = field(default_factory=dict)
    waits: dict[RequestId, tuple[Source, Waiting]] = field(default_factory=dict)

    def taken(self, tenant: TenantId) -> Taken:
        """By everybody who shares this tenant's entry."""
        if self.shares.of(tenant).tenant != OTHERS:
            return self.of_tenant.get(tenant, NOTHING)
        taken = self.everybody
        for listed in self.shares.listed & self.of_tenant.keys():
            taken = taken.changed(self.of_tenant[listed], NOTHING)
        return taken

    def served(self, tenant: TenantId | None, since_s: int) -> list[tuple[int, Served]]:
        """What was assigned second by second from `since_s` on, for two minutes, oldest first: to everybody who shares this
        tenant's entry, or to all."""
        found = []
        begin, end = (bisect_left(self.in_order, each) for each in (since_s, since_s + 2 * MINUTE_S))
        for second in self.in_order[begin:end]:
            served = self._part_of(self.seconds[second], tenant)
            if served.requests:
                found.append((second, served))
        return found

    def _part_of(self, by_tenant: Mapping[TenantId | None, Served], tenant: TenantId | None) -> Served:
        """What those had of one second who share this tenant's entry."""
        if tenant is None or self.shares.of(tenant).tenant != OTHERS:
            return by_tenant.get(tenant, Served())
        served = by_tenant[None]
        for listed in self.shares.listed & by_tenant.keys():
            served = served.plus(by_tenant[listed], -1)
        return served

    def ahead(self, tenant: TenantId) -> int:
        """How many of a tenant wait at routers."""
        return sum(len(lines.get(tenant, ())) for lines in self.held.values())

    def check(self, loads: Loads) -> None:
        """Everything is what the loads say."""
        assert self.counted.keys() == self.tenant_of.keys() == loads.open.keys(), "another set of requests is open"
        sums: dict[TenantId, Taken] = {}
        for request, opened in loads.open.items():
            assert self.counted[request] == _taken(opened), f"{request} is counted as something else"
            tenant = self.tenant_of[request]
            sums[tenant] = sums.get(tenant, NOTHING).changed(NOTHING, _taken(opened))
        assert sorted(self.seconds) == self.in_order, "the seconds in order are others"
        assert sums == self.of_tenant, "the sums are not those of the open requests"
        held = {each.request for of in self.held.values() for line in of.values() for each in line}
        assert held == self.waits.keys() <= loads.open.keys(), "the lines are not those that wait"


def evolve(usage: Usage, stored: Stored, loads: Loads, parameters: Parameters) -> None:
    """Fold one event. `loads` and `parameters` are as of it."""
    match stored.data:
        case RequestReceived() as data:
            if data.request in loads.open:
                usage.tenant_of.setdefault(data.request, data.tenant)
                _follow(usage, data.request, loads)
        case RequestAssigned() as data:
            if data.attempt == 1 and data.request in usage.tenant_of:
                _serve(usage, data)
            _follow(usage, data.request, loads)
        case PrefillStarted() | BlocksStored() | BlocksEvicted():
            pass  # half of the log, and nobody has more or less by it
        case PrefillCompleted() | RequestCompleted() as data:
            _follow(usage, data.request, loads)
        case RequestHeld() as data:
            if data.request in loads.open and data.request not in usage.waits:
                _hold(usage, stored.event.source, data)
        case NodeRegistered() | NodeLost() | NodeDeclaredLost() | RouterLost():
            for request in tuple(usage.counted):
                _follow(usage, request, loads)
        case ParametersChanged():
            usage.shares = Shares(parameters.tenants)
        case data if (named := getattr(data, "request", None)) is not None:
            _follow(usage, named, loads)
        case _:
            pass


def _taken(opened: OpenRequest | None) -> Taken:
    if opened is None:
        return NOTHING
    assignment = opened.assignment
    if assignment is not None and assignment.prefilled:
        return Taken(1)
    held_tokens = 0 if opened.attempt else opened.prompt_tokens
    return Taken(1, opened.prompt_tokens, held_tokens, assignment.service_us if assignment is not None else 0)


def _follow(usage: Usage, request: RequestId, loads: Loads) -> None:
    """Count what the loads say of a request now, in the place of what was counted for it."""
    if (tenant := usage.tenant_of.get(request)) is None:
        return
    opened = loads.open.get(request)
    before, now = usage.counted.get(request, NOTHING), _taken(opened)
    if before != now:
        usage.everybody = usage.everybody.changed(before, now)
        sums = usage.of_tenant.get(tenant, NOTHING).changed(before, now)
        usage.of_tenant[tenant] = sums
        usage.counted[request] = now
        if not sums.requests:
            del usage.of_tenant[tenant]
    if opened is None:
        del usage.tenant_of[request]
        del usage.counted[request]
    if request in usage.waits and (opened is None or opened.attempt):
        _let_go(usage, request, tenant)


def _hold(usage: Usage, source: Source, data: RequestHeld) -> None:
    waiting = Waiting(-data.priority, data.now_ns, data.request, data.service_us, data.hard_slo_us)
    usage.waits[data.request] = source, waiting
    insort(usage.held.setdefault(source, {}).setdefault(data.tenant, []), waiting)


def _let_go(usage: Usage, request: RequestId, tenant: TenantId) -> None:
    source, waiting = usage.waits.pop(request)
    lines = usage.held[source]
    line = lines[tenant]
    del line[bisect_left(line, waiting)]
    if not line:
        del lines[tenant]
    if not lines:
        del usage.held[source]


def _serve(usage: Usage, data: RequestAssigned) -> None:
    second = data.now_ns // _SECOND_NS
    if second not in usage.seconds:
        usage.seconds[second] = {}
        insort(usage.in_order, second)
        if len(usage.seconds) > SECONDS_MAX:
            first_heard = next(iter(usage.seconds))
            del usage.seconds[first_heard]
            del usage.in_order[bisect_left(usage.in_order, first_heard)]
    by_tenant = usage.seconds[second]
    served = Served(1, data.uncached_tokens + data.cached_tokens, data.uncached_tokens)
    for each in (None, usage.tenant_of[data.request]):
        by_tenant[each] = by_tenant.get(each, Served()).plus(served)


def total(parts: Iterable[Served]) -> Served:
    """All of it."""
    return Served(*map(sum, zip(*parts, strict=True)))
