"""Whose turn it is among the requests that wait at a router, and which of them have waited too long. Pure.

Of each tenant the most urgent waits at the head, of equals the oldest. Heads go by urgency, then by what their tenants were
given of late: uncached tokens of the last ten seconds over the weight, least first. Sums over a window, and not tags
that each start adds to, so that routers that see events in another order agree (ADR 0028).
"""

from collections.abc import Iterator, Mapping
from functools import partial

from services.router import admission, decider
from services.router.admission import Books
from services.router.decider import Moment, Place, State
from services.router.placement import Placement, Question
from services.router.usage import Waiting
from shared.contracts.events import Exclusion, LimitMet, RequestAssigned, RequestRejected
from shared.contracts.ids import Source, TenantId, WorkerId
from shared.model.calibration import PPM
from shared.model.cost import US_PER_S

HERE = "router"
"""The scope of a limit on waiting."""


Turn = RequestAssigned | RequestRejected


def next_turn(state: State, source: Source, moment: Moment, by: Place = decider.weigh) -> list[Turn]:
    """The next of a router's waiting requests that may go, assigned, or rejected if it would miss its hard objective; [] if
    none may go."""
    books = Books(state.usage, state.parameters, state.pool, state.loads)
    for tenant, head in _in_order(state, source, moment.now_ns):
        share = admission.share_of(books, tenant, moment.now_ns)
        rule = by
        if share is not None and share.is_passed(head.service_us):
            if not admission.has_idle(books):
                continue
            rule = partial(_on_idle, by)
        for each in _went(state, head, moment, rule):
            late = _late(head, each.queue_us + each.service_us, each.worker, moment)
            if late is None:
                return [each]
            in_time = partial(_in_time, rule, late.allowed - late.used)
            return [*_went(state, head, moment, in_time)] or [_rejected(state, head, moment, late)]
    return []


def _went(state: State, waiting: Waiting, moment: Moment, by: Place) -> Iterator[RequestAssigned]:
    for each in decider.assign_again(state, waiting.request, 0, moment, by):
        assert isinstance(each, RequestAssigned), "whoever waits has had no attempt"
        yield each


def overdue(state: State, source: Source, moment: Moment) -> list[Turn]:
    """`request-rejected` for each that has waited for `held_s_max`, or so long that its hard objective cannot be met."""
    held_us_max = round(state.parameters.held_s_max * US_PER_S)
    facts: list[Turn] = []
    for line in state.usage.held.get(source, {}).values():
        for each in line:
            met = _late(each, each.service_us, HERE, moment)
            if met is None and (waited_us := _waited_us(each, moment)) > held_us_max:
                met = LimitMet(name="held-us", scope=HERE, allowed=held_us_max, used=waited_us, added=0)
            if met is not None:
                facts.append(_rejected(state, each, moment, met))
    return facts


def _waited_us(waiting: Waiting, moment: Moment) -> int:
    return (moment.now_ns - waiting.since_ns) // 1_000


def _late(waiting: Waiting, more_us: int, where: str, moment: Moment) -> LimitMet | None:
    """Whether so much more than it has waited is beyond a hard objective."""
    if waiting.slo_us is None or (waited_us := _waited_us(waiting, moment)) + more_us <= waiting.slo_us:
        return None
    return LimitMet(name="ttft-us", scope=where, allowed=waiting.slo_us, used=waited_us, added=more_us)


def _on_idle(by: Place, state: State, question: Question) -> tuple[Placement | None, Mapping[WorkerId, Exclusion]]:
    return by(state, question._replace(idle_only=True))


def _in_time(
    by: Place, within_us: int, state: State, question: Question
) -> tuple[Placement | None, Mapping[WorkerId, Exclusion]]:
    return by(state, question._replace(within_us=within_us))


def _in_order(state: State, source: Source, now_ns: int) -> Iterator[tuple[TenantId, Waiting]]:
    usage = state.usage
    heads = [(tenant, line[0]) for tenant, line in usage.held.get(source, {}).items()]
    if len(heads) < 2:
        yield from heads
        return

    def given_ppm(tenant: TenantId) -> int:
        return admission.given_tokens(usage, tenant, now_ns) * PPM // usage.shares.of(tenant).weight

    yield from sorted(heads, key=lambda head: (head[1].urgency, given_ppm(head[0]), head[1].since_ns, head[0]))


def _rejected(state: State, waiting: Waiting, moment: Moment, met: LimitMet) -> RequestRejected:
    """Asking again at once would put it at the end of the same line: a client waits as long as it has waited."""
    waited_s = _waited_us(waiting, moment) // US_PER_S
    return RequestRejected(
        request=waiting.request,
        reason="slo" if met.name == "ttft-us" else "overloaded",
        retry_after_s=min(max(1, waited_s), admission.RETRY_S_MAX),
        limit=met,
        parameters_version=state.parameters.version,
        seen_seq=moment.seen_seq,
        now_ns=moment.now_ns,
    )
