"""An explanation as a terminal shows it: one table per decision, and what came of it, in the order it happened."""

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.events.printing import values
from cli.invocation import command
from replay.explaining import Attempt, Explanation
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    LimitMet,
    PricedCandidate,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestHeld,
    RequestReceived,
    RequestRejected,
    RouterLost,
)

TITLE = "bold"
FAINT = "dim"


def tell(console: Console, told: Explanation) -> None:
    """Print all of it."""
    console.print(Text(f"request {told.request}", style=TITLE))
    for line in (*_received(told), *_held(told)):
        console.print(line, soft_wrap=True)
    for note in told.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for attempt in told.attempts:
        console.print()
        _tell_attempt(console, attempt)
    console.print()
    console.print(_end(told.end))
    console.print()
    _tell_course(console, told)


def seconds(us: int | None) -> str:
    """`12.3 ms`, `1.234 s`; empty for what was not measured."""
    if us is None:
        return ""
    return f"{us / 1e6:,.3f} s" if abs(us) >= 1_000_000 else f"{us / 1e3:,.1f} ms"


def _received(told: Explanation) -> Iterator[Text]:
    if told.received is None or not isinstance(told.received.data, RequestReceived):
        return
    data, stored = told.received.data, told.received
    at = datetime.fromtimestamp(stored.event.time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    kind = "hard " if data.hard_slo else ""
    slo = f"{kind}TTFT objective {seconds(data.slo_us)}" if data.slo_us else "no TTFT objective"
    yield Text(f"{data.prompt_tokens:,} prompt tokens, at most {data.max_tokens:,} more, {slo}, tenant {data.tenant}")
    yield Text(f"received {at} UTC by {stored.event.source} as {stored.log}:{stored.stream_seq}")


def price(data: RequestAssigned) -> str:
    """What the prices of a decision are sums of."""
    if data.policy == "least-work":
        return "queue"
    delay = " + delay" if data.policy == "vertumnus" else ""
    weighed = f"{data.beta:g} × service"
    if data.ratio_in_own_time:
        weighed = f"service + {data.beta - 1:g} × service without the ratio"
    return f"queue{delay} + {weighed} + occupancy (λ = {data.lam:g})"


def _tell_attempt(console: Console, attempt: Attempt) -> None:
    data, seq = attempt.assigned, attempt.stored.stream_seq
    head = f"attempt {data.attempt} → {data.worker} (degree {data.degree})"
    decode = f", decoding at {data.decode_worker}" if data.decode_worker else ""
    console.print(Text(head + decode, style=TITLE))
    behind = seq - 1 - data.seen_seq
    seen = (
        f"{data.seen_seq:,}, {behind:,} event{'s'[: behind != 1]} behind its own place"
        if behind
        else f"{data.seen_seq:,}"
    )
    priced = f"policy {data.policy}: price = {price(data)}"
    console.print(Text(f"{priced}; parameters {data.parameters_version}, coefficients {data.coefficients_version}"))
    console.print(
        Text(f"had seen the log up to {seen}; cheapest without queues would be degree {data.preferred_degree}")
    )
    console.print(_candidates(attempt))
    for each in attempt.weighed.candidates if attempt.weighed else data.candidates:
        if parts := how(each):
            console.print(Text(f"  {each.worker}: {parts}"), soft_wrap=True)
    for line in _excluded(attempt):
        console.print(line)
    console.print(_outcome(attempt))


def _candidates(attempt: Attempt) -> Table:
    data = attempt.assigned
    recorded = {each.worker for each in data.candidates}
    shown = attempt.weighed.candidates if attempt.weighed else data.candidates
    names = ("worker", "degree", "cache", "cached", "computed", "queue", "service", "occupancy", "price")
    # Narrow enough for 80 columns: a price without its unit, or in two lines, misleads.
    table = Table(*names, box=None, pad_edge=False, collapse_padding=True)
    for column in table.columns[3:]:
        column.justify, column.no_wrap = "right", True
    for each in shown:
        won = each.worker == data.worker
        style = "green" if won else FAINT if each.worker not in recorded else None
        table.add_row(
            ("» " if won else "  ") + each.worker, *_row(each, data.uncached_tokens + data.cached_tokens), style=style
        )
    return table


def how(each: PricedCandidate) -> str:
    """What lies behind a candidate's numbers: what it would have by then, and what its price was changed for; else empty."""
    parts = []
    if each.in_flight_tokens:
        parts.append(f"{each.in_flight_tokens:,} of the cached tokens are computed there now, for another request")
    if each.fetch_from is not None:
        parts.append(f"{each.fetched_tokens:,} are fetched from {each.fetch_from} in {seconds(each.fetch_us)}")
    if each.delayed_jobs:
        many = f"{each.delayed_jobs:,} waiting request{'s'[: each.delayed_jobs != 1]}"
        parts.append(f"it delays {many}, {seconds(each.delay_us)} in all")
    if each.ratio != 1:
        parts.append(f"its prefills take {each.ratio:.2f} × their prediction")
    return "; ".join(parts)


def _row(each: PricedCandidate, prompt_tokens: int) -> tuple[str, ...]:
    return (
        str(each.degree),
        each.trust,
        f"{each.cached_tokens:,}",
        f"{prompt_tokens - each.cached_tokens:,}",
        *map(seconds, (each.queue_us, each.service_us, each.occupancy_us, each.price_us)),
    )


def _excluded(attempt: Attempt) -> Iterator[Text]:
    data, weighed = attempt.assigned, attempt.weighed
    if weighed is None and not attempt.recorded_all:
        yield Text(
            f"more candidates were priced than recorded; `{command()} explain {data.request} --all` has them", FAINT
        )
    elif weighed is not None and len(weighed.candidates) > len(data.candidates):
        yield Text(
            f"faint: {len(weighed.candidates) - len(data.candidates)} not recorded, recomputed from the log", FAINT
        )
    if not data.excluded:
        yield Text("no worker was excluded", FAINT)
    elif weighed is not None and weighed.excluded is not None:
        for reason in sorted(set(weighed.excluded.values())):
            workers = sorted(worker for worker, why in weighed.excluded.items() if why == reason)
            more = f" and {len(workers) - 8} more" if len(workers) > 8 else ""
            yield Text(f"excluded, {reason}: {', '.join(workers[:8])}{more}")
    else:
        counts = ", ".join(f"{number} {reason}" for reason, number in sorted(data.excluded.items()))
        yield Text(f"excluded: {counts}")


def _outcome(attempt: Attempt) -> Table:
    """Predicted against measured. Service predicts fetch and prefill together."""
    data, done = attempt.assigned, attempt.completed
    queue_us = done.queue_us if done else attempt.started.queue_us if attempt.started else None
    cached = done.cached_own_tokens + done.cached_in_flight_tokens + done.cached_fetched_tokens if done else None
    table = Table("", "predicted", "measured", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("queue", seconds(data.queue_us), seconds(queue_us))
    table.add_row("service", seconds(data.service_us), seconds(done.fetch_us + done.prefill_us if done else None))
    if data.fetch_from is not None:
        winner = next((each for each in data.candidates if each.worker == data.worker), None)
        predicted = seconds(winner.fetch_us if winner else None)
        table.add_row(f"of it fetching from {data.fetch_from}", predicted, seconds(done.fetch_us if done else None))
    table.add_row("cached tokens", f"{data.cached_tokens:,}", "" if cached is None else f"{cached:,}")
    if attempt.handed_off:
        table.add_row("KV hand-off", "", seconds(attempt.handed_off.handoff_us))
    if attempt.aborted:
        table.add_row("aborted", "", attempt.aborted.reason, style="red")
    if attempt.redirected:
        table.add_row("redirected", "", attempt.redirected.reason, style="red")
    return table


def _end(end: Stored | None) -> Text:
    match end.data if end else None:
        case RequestCompleted() as data:
            parts = (
                ("held", data.held_us),
                ("queue", data.queue_us),
                ("fetch", data.fetch_us),
                ("prefill", data.prefill_us),
                ("hand-off and the rest", data.handoff_us),
            )
            split = ", ".join(f"{name} {seconds(us)}" for name, us in parts if us)
            return Text(
                f"completed ({data.finish}): first token after {seconds(data.ttft_us)} ({split}), "
                f"{data.output_tokens:,} tokens, {seconds(data.tpot_us)} for each after the first",
                style="green",
            )
        case RequestRejected(limit=LimitMet() as met) as data:
            again = f"asked to come again in {data.retry_after_s} s" if data.retry_after_s else "told not to come again"
            return Text(f"rejected: {data.reason}, {_met(met)}; {again}", style="red")
        case RequestFailed() | RequestCancelled() | RequestRejected() as data:
            return Text(f"{data.TYPE.removeprefix('request-')}: {data.reason}", style="red")
        case RouterLost() as data:
            return Text(f"its router {data.source} was declared lost", style="red")
        case _:
            return Text("it has not ended, as far as the record goes", style="yellow")


def _met(met: LimitMet) -> str:
    """A limit with its numbers."""
    if met.name.endswith("-us"):
        used, added, allowed = (seconds(each) for each in (met.used, met.added, met.allowed))
    else:
        used, added, allowed = (f"{each:,}" for each in (met.used, met.added, met.allowed))
    return f"{met.name.removesuffix('-us')} of {met.scope}: {used} and {added} more, of {allowed} allowed"


def _held(told: Explanation) -> Iterator[Text]:
    """Why it waited at its router, if it did."""
    for stored in told.events:
        if isinstance(data := stored.data, RequestHeld):
            yield Text(
                f"held for {data.tenant}'s turn: {seconds(data.outstanding_us)} of work outstanding and "
                f"{seconds(data.service_us)} more, of a share of {seconds(data.share_us)}; {data.ahead} of the tenant ahead"
            )


def _tell_course(console: Console, told: Explanation) -> None:
    """Every event of it, with the time since the first by their senders' clocks."""
    begin_ns = told.events[0].event.time_ns if told.events else 0
    for stored in told.events:
        offset = seconds((stored.event.time_ns - begin_ns) // 1_000)
        says = values(stored.data.model_dump(mode="json", exclude={"request"}))
        line = Text(f"{offset:>10}  {stored.stream_seq:>9}  {stored.event.type:<20} {says}")
        if console.is_terminal:
            console.print(line, overflow="ellipsis", no_wrap=True)
        else:
            console.print(line, soft_wrap=True)
