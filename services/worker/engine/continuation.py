"""What follows a prefill, and what came before it. Engines whose decode side takes part from the prefill on need to know what
follows then; others learn it from `Engine.decode`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a request is to generate after its first token: at most `new_tokens_max` tokens in all, up to one of `stop_tokens`,
    on decode rank `decode_rank`."""

    new_tokens_max: int
    stop_tokens: frozenset[int]
    decode_rank: int


@dataclass(frozen=True, slots=True)
class Past:
    """What penalties look back at when an engine begins to choose a request's tokens: the different tokens of the prompt, and
    what earlier attempts had generated, in order. Empty where nothing looks back."""

    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()


NO_PAST = Past()
