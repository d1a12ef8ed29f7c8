"""What became of each request sent, and the report over all of them. Pure.

A client that waits for an answer before it sends the next request hides the time in which it should have sent
(coordinated omission). Here each request has a planned instant from the trace; TTFT counts from it, lateness is reported by
itself, and the TTFT from the instant of sending stands beside.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

OK = "ok"
REFUSALS = frozenset({"http-429", "http-503"})
"""Admission at work: counted, and a miss of the objective, but no fault."""


class Objective(Protocol):
    """The TTFT that a prompt should have, by its length."""

    def for_prompt(self, tokens: int) -> float:
        """Seconds."""
        ...


class LinearObjective(NamedTuple):
    """`base_s + per_1k_s · L / 1000` for a prompt of L tokens."""

    base_s: float
    per_1k_s: float = 0.0

    def for_prompt(self, tokens: int) -> float:
        """Seconds."""
        return self.base_s + self.per_1k_s * tokens / 1000


class Outcome(NamedTuple):
    """One request, measured at the client."""

    kind: str
    """`OK`, or what went wrong: http-<status>, connect, timeout, disconnected, truncated, stream-error."""
    message: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    late_s: float
    """Sent this long after its planned instant."""
    ttft_s: float
    """From sending to the first token; meaningless unless `OK`."""
    decode_s: float
    """From the first to the last token."""
    token_ids: tuple[int, ...] = ()
    """What was generated, from a server that tells."""


class Times(NamedTuple):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Problem(NamedTuple):
    """What went wrong with several requests, and what one of them was told."""

    requests: int
    example: str


class Report(NamedTuple):
    """What the clients of a run saw. Times are None when nothing was measured."""

    requests: int
    ok: int
    refused: int
    failed: int
    """Neither answered nor refused."""
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_share: float
    """Of the prompt tokens of answered requests."""
    ttft_s: Times | None
    """From the planned instant."""
    ttft_from_sending_s: Times | None
    tpot_s: Times | None
    """Time per output token after the first, mean of each request."""
    late_s: Times | None
    attainment_by_tokens: float | None
    """Σ L·1[TTFT ≤ objective] / Σ L over all requests, unanswered ones as misses; None without an objective."""
    attainment_by_requests: float | None
    problems: dict[str, Problem]


def report(outcomes: Sequence[Outcome], seconds: float, objective: Objective | None = None) -> Report:
    """Over the requests that were sent, in `seconds`."""
    answered = [outcome for outcome in outcomes if outcome.kind == OK]
    refused = sum(outcome.kind in REFUSALS for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
    weights = np.array([outcome.prompt_tokens for outcome in outcomes])
    met = np.array([_meets(outcome, objective) for outcome in outcomes])
    judged = objective is not None and len(outcomes) > 0
    return Report(
        requests=len(outcomes),
        ok=len(answered),
        refused=refused,
        failed=len(outcomes) - len(answered) - refused,
        seconds=seconds,
        requests_per_s=len(outcomes) / seconds if seconds > 0 else 0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(outcome.output_tokens for outcome in answered),
        cached_share=sum(outcome.cached_tokens for outcome in answered) / max(prompt_tokens, 1),
        ttft_s=_times([outcome.late_s + outcome.ttft_s for outcome in answered]),
        ttft_from_sending_s=_times([outcome.ttft_s for outcome in answered]),
        tpot_s=_times(
            [outcome.decode_s / (outcome.output_tokens - 1) for outcome in answered if outcome.output_tokens > 1]
        ),
        late_s=_times([outcome.late_s for outcome in outcomes]),
        attainment_by_tokens=float((weights * met).sum() / weights.sum()) if judged else None,
        attainment_by_requests=float(met.mean()) if judged else None,
        problems=_problems(outcomes),
    )


def _meets(outcome: Outcome, objective: Objective | None) -> bool:
    if objective is None or outcome.kind != OK:
        return False
    return outcome.late_s + outcome.ttft_s <= objective.for_prompt(outcome.prompt_tokens)


def _times(seconds: Sequence[float]) -> Times | None:
    if not seconds:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
    return Times(float(np.mean(seconds)), p50, p90, p99, max(seconds))


def _problems(outcomes: Sequence[Outcome]) -> dict[str, Problem]:
    counts = Counter(outcome.kind for outcome in outcomes if outcome.kind != OK)
    examples = {outcome.kind: outcome.message for outcome in reversed(outcomes)}
    return {kind: Problem(requests, examples[kind]) for kind, requests in counts.most_common()}
