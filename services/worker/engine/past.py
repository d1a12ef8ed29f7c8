"""What a request's sampling fields look back at, out of its tokens."""

import numpy as np

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.protocol import Sampling
from shared.model.blocks import Tokens


def looks_back(sampling: Sampling) -> bool:
    """Whether the choice of a token depends on those before it."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1


def past_of(tokens: Tokens, generated_tokens: int, sampling: Sampling) -> Past:
    """Of a prompt whose last `generated_tokens` were generated before. The prompt itself counts in the repetition penalty
    alone, and there it does not matter how often."""
    if not looks_back(sampling):
        return NO_PAST
    asked = len(tokens) - generated_tokens
    prompt = tuple(np.unique(tokens[:asked]).tolist()) if sampling.repetition_penalty != 1 else ()
    return Past(prompt, tuple(tokens[asked:].tolist()))
