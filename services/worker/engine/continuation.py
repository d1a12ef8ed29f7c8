"""What follows a prefill, as an engine may have to know it beforehand."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a request is to generate after its first token: at most `new_tokens_max` tokens in all, up to one of `stop_tokens`,
    on decode rank `decode_rank`."""

    new_tokens_max: int
    stop_tokens: frozenset[int]
    decode_rank: int
