"""Hot prefixes that come and go, seeded: what a policy that only repeats what it learned must fail at.

Time is cut into epochs. Each has prompts of its own that many requests begin with, the k-th 1/k as often as the first; a
request adds a message to one of them, or goes on with the conversation of an earlier request of its epoch.
"""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, count
from random import Random
from typing import NamedTuple

from simulation.workloads.generating import Session, Spread, steady_s
from simulation.workloads.rows import BLOCK_TOKENS, Row

GOING_ON_MAX = 1_000
"""Conversations that may still go on; older ones are over."""


class Drift(NamedTuple):
    """Of the published study: 12 epochs of 30 fresh prompts of 20 blocks in the mean, a fifth of the requests goes on.

    The rest is ours, chosen so that 27 requests/s keep 40 GPUs as busy as in the study, 80 % under the paper's rule.
    """

    epochs: int = 12
    epoch_s: float = 50
    requests_per_s: float = 24
    prompts: int = 30
    prompt_tokens: Spread = Spread(8_600, 0.6)
    message: Spread = Spread(1_000, 0.9)
    output: Spread = Spread(200, 0.6)
    going_on: float = 0.2
    prompt_tokens_max: int = 128 * 1024


def drifting(chance: Random, drift: Drift = Drift()) -> Iterator[Row]:  # noqa: B008  (immutable)
    """Rows of `drift`. Memory: an epoch's prompts and the conversations that may go on."""
    ids = count()
    epoch, hot, earlier = -1, list[Session](), deque[Session](maxlen=GOING_ON_MAX)
    popularity = list(accumulate(1 / k for k in range(1, drift.prompts + 1)))
    seconds = drift.epochs * drift.epoch_s
    for now_s in steady_s(drift.requests_per_s, seconds, chance):
        if epoch != (epoch := int(now_s // drift.epoch_s)):
            hot = [_prompt(drift, ids, chance) for _ in range(drift.prompts)]
            earlier.clear()
        if earlier and chance.random() < drift.going_on:
            at = chance.randrange(len(earlier))
            session = earlier[at]
            del earlier[at]
        else:
            [session] = chance.choices(hot, cum_weights=popularity)
            session = Session(session.tokens, list(session.whole))
        session.tokens = min(session.tokens + drift.message.draw(chance), drift.prompt_tokens_max)
        row = Row(now_s * 1000, session.tokens, drift.output.draw(chance), session.prompt(ids))
        yield row
        session.tokens += row.output_tokens
        if session.tokens < drift.prompt_tokens_max:
            earlier.append(session)


def _prompt(drift: Drift, ids: "count[int]", chance: Random) -> Session:
    tokens = drift.prompt_tokens.draw(chance)
    return Session(tokens, [next(ids) for _ in range(tokens // BLOCK_TOKENS)])
