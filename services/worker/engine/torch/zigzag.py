"""Which tokens of an uncached suffix each rank of a degree-C worker computes (paper, section 2, Figure 2).

The suffix is padded to a multiple of 2C and cut into 2C chunks; rank k gets chunks k and 2C - 1 - k. Under causal attention
an early, cheap chunk is so paired with a late, expensive one. Padding is never computed: it only fills buffers. A suffix of
fewer than 2C tokens is not worth cutting and runs on the worker's first rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part: `spans` are [start, end) token ranges of the suffix, cut off at its end, in ascending order."""

    chunk_tokens: int
    spans: tuple[tuple[int, int], tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def last_token(self) -> int:
        """The highest token of the share; -1 if it is empty."""
        return max((end - 1 for start, end in self.spans if start < end), default=-1)


def runs_alone(suffix_tokens: int, degree: int) -> bool:
    """Whether the suffix runs on the worker's first rank only."""
    return degree == 1 or suffix_tokens < 2 * degree


def share(suffix_tokens: int, degree: int, index: int) -> Share:
    """The part of rank `index` of `degree`."""
    chunk = -(-suffix_tokens // (2 * degree))

    def span(number: int) -> tuple[int, int]:
        return min(number * chunk, suffix_tokens), min((number + 1) * chunk, suffix_tokens)

    return Share(chunk, (span(index), span(2 * degree - 1 - index)))


def holder_of(chunk: int, degree: int) -> tuple[int, int]:
    """(rank index, which of its two chunks) of a chunk: how to restore the order after an all-gather."""
    return (chunk, 0) if chunk < degree else (2 * degree - 1 - chunk, 1)
