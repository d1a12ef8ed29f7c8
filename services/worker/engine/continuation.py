"""What follows a prefill. Engines whose decode side takes part from the prefill on need to know it then; others learn it from
`Engine.decode`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a request is to generate after its first token: at most `new_tokens_max` tokens in all, up to one of `stop_tokens`,
    on decode rank `decode_rank`."""

    new_tokens_max: int
    stop_tokens: frozenset[int]
    decode_rank: int
