"""Which tokens of an uncached suffix each rank of a degree-C worker computes (paper, section 2, Figure 2).

The suffix is padded to a multiple of 2C and cut into 2C chunks; rank k gets chunks k and 2C - 1 - k. Under causal attention
an early, cheap chunk is so paired with a late, expensive one. Padding is never computed: it only fills buffers. A suffix of
fewer than 2C tokens is not worth cutting and runs on one rank.

A packed step cuts each request's suffix by itself and not the row of all of them. The pairing balances ranks because the work
per token rises along a sequence; along a row it starts again with every request, and two chunks of the row can be two cheap
heads. It also keeps a request's arithmetic the same whatever it is packed with. The price is padding of less than 2C tokens per
request in the all-gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a suffix: `spans` are [start, end) token ranges of it, cut off at its end, in ascending order.
    A suffix that runs `alone` is wholly one rank's, and nothing of the others'."""

    chunk_tokens: int
    spans: tuple[tuple[int, int], tuple[int, int]]
    alone: bool = False

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def last_token(self) -> int:
        """The highest token of the share; -1 if it is empty."""
        return max((end - 1 for start, end in self.spans if start < end), default=-1)


NOTHING = Share(0, ((0, 0), (0, 0)), alone=True)


def runs_alone(suffix_tokens: int, degree: int) -> bool:
    """Whether the suffix runs on one rank only."""
    return degree == 1 or suffix_tokens < 2 * degree


def shares(suffixes_tokens: Sequence[int], degree: int, index: int) -> list[Share]:
    """The part of rank `index` of `degree` in each suffix of a step. Those that run alone are dealt out in turn."""
    found: list[Share] = []
    dealt = 0
    for tokens in suffixes_tokens:
        if not runs_alone(tokens, degree):
            found.append(share(tokens, degree, index))
        else:
            mine = dealt % degree == index
            found.append(Share(tokens, ((0, tokens), (tokens, tokens)), alone=True) if mine else NOTHING)
            dealt += 1
    return found


def share(suffix_tokens: int, degree: int, index: int) -> Share:
    """The part of rank `index` of `degree`."""
    chunk = -(-suffix_tokens // (2 * degree))

    def span(number: int) -> tuple[int, int]:
        return min(number * chunk, suffix_tokens), min((number + 1) * chunk, suffix_tokens)

    return Share(chunk, (span(index), span(2 * degree - 1 - index)))


def holder_of(chunk: int, degree: int) -> tuple[int, int]:
    """(rank index, which of its two chunks) of a chunk: how to restore the order after an all-gather."""
    return (chunk, 0) if chunk < degree else (2 * degree - 1 - chunk, 1)
