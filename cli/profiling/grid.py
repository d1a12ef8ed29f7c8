"""Which prefills a profile measures: lengths × hit ratios at each degree, as far as a worker's memory reaches. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHORTEST = 64
"""Below this a prefill is its constant part."""

DEFAULT_HIT_RATIOS = (0.0, 0.5, 0.9)
POINTS_MAX = 10_000


class Cell(NamedTuple):
    """One point to measure."""

    degree: int
    uncached_tokens: int
    cached_tokens: int


class Limits(NamedTuple):
    """As an engine describes itself."""

    degrees: tuple[int, ...]
    prompt_tokens_max: int
    blocks_per_rank: int
    block_tokens: int

    def prompt_tokens(self, degree: int) -> int:
        """The longest prompt that fits the KV memory of a worker of this degree."""
        return min(self.prompt_tokens_max, degree * self.blocks_per_rank * self.block_tokens)


def check_degrees(limits: Limits, degrees: Sequence[int]) -> None:
    """Errors: ValueError names those that the engine lacks."""
    if unknown := set(degrees) - set(limits.degrees):
        raise ValueError(f"--degrees {sorted(unknown)}: this engine has {list(limits.degrees)}")


def default_lengths(limits: Limits, degrees: Sequence[int]) -> tuple[int, ...]:
    """Doubling from `SHORTEST` to what the widest of `degrees` takes; for a model with less context, all that it takes."""
    longest = max(map(limits.prompt_tokens, degrees))
    lengths = [SHORTEST]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    return tuple(min(length, longest) for length in lengths)


def rows(limits: Limits, degrees: Sequence[int], lengths: Iterable[int], hits: Sequence[float]) -> list[list[Cell]]:
    """The cells of each length, short lengths first, the degrees of a shape side by side.

    A hit is cut to whole blocks, and at least one token is computed; shapes that become equal are measured once.
    Errors: ValueError names the option and its limit.
    """
    check_degrees(limits, degrees)
    if bad := [hit for hit in hits if not 0 <= hit < 1]:
        raise ValueError(f"--hit-ratios {bad[0]}: must be in [0, 1)")
    lengths = sorted(set(lengths))
    longest = max(map(limits.prompt_tokens, degrees))
    if not lengths or not 1 <= lengths[0] <= lengths[-1] <= longest:
        raise ValueError(f"--lengths {lengths}: each must be in [1, {longest}]")
    found = [_row(limits, degrees, length, hits) for length in lengths]
    if (points := sum(map(len, found))) > POINTS_MAX:
        raise ValueError(f"--lengths, --hit-ratios: {points} points; {POINTS_MAX} at most")
    return found


def _row(limits: Limits, degrees: Sequence[int], length: int, hits: Sequence[float]) -> list[Cell]:
    whole = (length - 1) // limits.block_tokens
    cached = sorted({min(int(hit * length / limits.block_tokens), whole) * limits.block_tokens for hit in hits})
    fitting = [degree for degree in degrees if length <= limits.prompt_tokens(degree)]
    return [Cell(degree, length - tokens, tokens) for tokens in cached for degree in fitting]
