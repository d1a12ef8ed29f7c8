"""Whether a request is taken at all, and whether its tenant's share lets it go to a worker now. Pure.

A request is refused, with the limit it met and the time after which asking again makes sense:

1.  when its tenant has `requests_max` open, `tokens_per_minute` assigned or about to be, or `queued_tokens_max` queued;
2.  when `queued_tokens_max` of the pool are queued;
3.  with a hard SLO, when no worker is predicted to give a first token in time.

Where tenants share the pool, one that has its part of `share_s` seconds of the workers' time outstanding on them waits at
its router, or goes to a worker that has nothing to do: nobody is held back for somebody who is not there (ADR 0028).

All counts are over all routers, as far as this one has heard of the others': N of them admit more than a limit by what the
others have admitted meanwhile, and by no more.
"""

from typing import NamedTuple

from services.router.loads import Loads
from services.router.usage import MINUTE_S, Served, Usage, total
from shared.contracts.events import (
    LimitMet,
    LimitName,
    PricedCandidate,
    RejectReason,
    RequestHeld,
    RequestReceived,
    RequestRejected,
)
from shared.contracts.ids import TenantId
from shared.model.cost import US_PER_S
from shared.model.parameters import Parameters
from shared.model.pool import Pool

RETRY_S_MAX = 60
"""Nobody is sent away for longer: what is known of the load is a minute old by then."""

FAIR_S = 10
"""What a tenant was given longer ago is forgotten: who was away has a claim to no more than that."""

AHEAD = 8
"""A tenant that was given more than its part of late has a share of this fraction. Measured: `bench.policies tenants`."""

POOL = "pool"
"""The scope of a limit that is everybody's."""

_SECOND_NS = 10**9


class Books(NamedTuple):
    """What is read of a router's state."""

    usage: Usage
    parameters: Parameters
    pool: Pool
    loads: Loads


class Share(NamedTuple):
    """A tenant's predicted work on workers, and how much it may have there."""

    outstanding_us: int
    share_us: int

    def is_passed(self, service_us: int) -> bool:
        """Whether so much more would be too much. One request never is."""
        return self.outstanding_us > 0 and self.outstanding_us + service_us > self.share_us


def refused(books: Books, received: RequestReceived, now_ns: int) -> RequestRejected | None:
    """That a request meets a limit of its tenant or of the pool; None if it meets none."""
    usage, prompt_tokens = books.usage, received.prompt_tokens
    if usage.shares and (rejected := _by_tenant(books, received, now_ns)) is not None:
        return rejected
    if not (allowed := books.parameters.queued_tokens_max):
        return None
    used = usage.everybody.queued_tokens
    met = LimitMet(name="queued-tokens", scope=POOL, allowed=allowed, used=used, added=prompt_tokens)
    if not _is_met(met):
        return None
    wait_s = retry_after_s(met, last_minute(usage, None, now_ns).tokens)
    return _rejected(books, received, now_ns, "overloaded", met, wait_s)


def _by_tenant(books: Books, received: RequestReceived, now_ns: int) -> RequestRejected | None:
    usage, tenant, tokens = books.usage, received.tenant, received.prompt_tokens
    limits, taken = usage.shares.of(tenant), usage.taken(tenant)
    minute_tokens = last_minute(usage, tenant, now_ns).tokens if limits.tokens_per_minute else 0
    counted: tuple[tuple[LimitName, int, int, int], ...] = (
        ("requests", limits.requests_max, taken.requests, 1),
        ("tokens-per-minute", limits.tokens_per_minute, minute_tokens + taken.held_tokens, tokens),
        ("queued-tokens", limits.queued_tokens_max, taken.queued_tokens, tokens),
    )
    for name, allowed, used, added in counted:
        met = LimitMet(name=name, scope=limits.tenant, allowed=allowed, used=used, added=added)
        if allowed and _is_met(met):
            if name == "tokens-per-minute":
                wait_s = _passes_s(usage, tenant, met, now_ns)
            else:
                minute = last_minute(usage, tenant, now_ns)
                wait_s = retry_after_s(met, minute.requests if name == "requests" else minute.tokens)
            return _rejected(books, received, now_ns, "rate-limited", met, wait_s)
    return None


def late(books: Books, received: RequestReceived, winner: PricedCandidate, now_ns: int) -> RequestRejected | None:
    """That the first token is predicted after a hard objective. A queue shortens by a second in a second."""
    slo_us = received.slo_us
    late_us = winner.queue_us + winner.service_us - slo_us
    if not received.hard_slo or late_us <= 0:
        return None
    met = LimitMet(name="ttft-us", scope=winner.worker, allowed=slo_us, used=winner.queue_us, added=winner.service_us)
    wait_s = None if winner.service_us > slo_us else _clipped_s(-(-late_us // US_PER_S))
    return _rejected(books, received, now_ns, "slo", met, wait_s)


def held(
    books: Books, received: RequestReceived, winner: PricedCandidate, now_ns: int
) -> RequestHeld | RequestRejected | None:
    """That a request waits for its tenant's turn; None if its share has room. Nobody overtakes those of his tenant who wait
    already. One that another gateway forwards cannot wait here, and is refused."""
    tenant = received.tenant
    if (share := share_of(books, tenant, now_ns)) is None:
        return None
    ahead = books.usage.ahead(tenant)
    if not ahead and not share.is_passed(winner.service_us):
        return None
    if received.placed_only:
        met = LimitMet(
            name="share-us",
            scope=books.usage.shares.of(tenant).tenant,
            allowed=share.share_us,
            used=share.outstanding_us,
            added=winner.service_us,
        )
        excess_us = share.outstanding_us + winner.service_us - share.share_us
        return _rejected(books, received, now_ns, "rate-limited", met, _clipped_s(-(-excess_us // US_PER_S)))
    return RequestHeld(
        request=received.request,
        tenant=tenant,
        priority=received.priority,
        outstanding_us=share.outstanding_us,
        share_us=share.share_us,
        service_us=winner.service_us,
        uncached_tokens=received.prompt_tokens - winner.cached_tokens,
        hard_slo_us=received.slo_us if received.hard_slo else None,
        ahead=ahead,
        parameters_version=books.parameters.version,
        seen_seq=received.seen_seq,
        now_ns=now_ns,
    )


def share_of(books: Books, tenant: TenantId, now_ns: int) -> Share | None:
    """What a tenant has and may have on workers; None where nobody shares."""
    usage = books.usage
    if not usage.shares.shared:
        return None
    workers = sum(len(node.workers) for node in books.pool.nodes.values() if node.alive and not node.cordoned)
    capacity_us = round(workers * books.parameters.share_s * US_PER_S)
    limits = usage.shares.of(tenant)
    whole_tokens = given_tokens(usage, None, now_ns)
    if given_tokens(usage, tenant, now_ns) > usage.shares.part(limits, whole_tokens):
        capacity_us //= AHEAD
    return Share(usage.taken(tenant).outstanding_us, usage.shares.part(limits, capacity_us))


def given_tokens(usage: Usage, tenant: TenantId | None, now_ns: int) -> int:
    """Uncached tokens of what was assigned of late, to a tenant or to all."""
    return total(served for _, served in usage.served(tenant, now_ns // _SECOND_NS - FAIR_S + 1)).uncached_tokens


def has_idle(books: Books) -> bool:
    """Whether any worker has nothing to do."""
    pool, busy = books.pool, books.loads.of_worker
    return any(each.id not in busy and pool.schedulable(each) for each in pool.workers.values())


def idle_in_s(books: Books, now_ns: int) -> int | None:
    """When the first worker is predicted to have done all that it has; None while none may be given anything."""
    loads = [books.loads.of_worker.get(each.id) for each in books.pool.workers.values() if books.pool.schedulable(each)]
    left_us = [0 if load is None else load.at(now_ns)[0] for load in loads]
    return _clipped_s(-(-min(left_us) // US_PER_S)) if left_us else None


def last_minute(usage: Usage, tenant: TenantId | None, now_ns: int) -> Served:
    """What was assigned in it, to a tenant or to all."""
    return total(served for _, served in usage.served(tenant, _minute_began_s(now_ns)))


def retry_after_s(met: LimitMet, per_minute: int) -> int | None:
    """When enough has gone, if as much goes as in the last minute."""
    if met.added > met.allowed:
        return None
    excess = met.used + met.added - met.allowed
    return _clipped_s(-(-excess * MINUTE_S // per_minute)) if per_minute else RETRY_S_MAX


def _rejected(
    books: Books, received: RequestReceived, now_ns: int, reason: RejectReason, met: LimitMet, wait_s: int | None
) -> RequestRejected:
    return RequestRejected(
        request=received.request,
        reason=reason,
        retry_after_s=wait_s,
        limit=met,
        parameters_version=books.parameters.version,
        seen_seq=received.seen_seq,
        now_ns=now_ns,
    )


def _is_met(met: LimitMet) -> bool:
    return met.used + met.added > met.allowed


def _minute_began_s(now_ns: int) -> int:
    """The current second is the minute's last."""
    return now_ns // _SECOND_NS - MINUTE_S + 1


def _passes_s(usage: Usage, tenant: TenantId, met: LimitMet, now_ns: int) -> int | None:
    """When enough of what the minute has is older than a minute."""
    if met.added > met.allowed:
        return None
    excess = met.used + met.added - met.allowed
    for second, served in usage.served(tenant, _minute_began_s(now_ns)):
        excess -= served.tokens
        if excess <= 0:
            return _clipped_s(second - _minute_began_s(now_ns) + 1)
    return RETRY_S_MAX


def _clipped_s(seconds: int) -> int:
    return min(max(1, seconds), RETRY_S_MAX)
