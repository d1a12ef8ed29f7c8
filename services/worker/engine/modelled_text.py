"""What a modelled engine says: each token is a hash of every token before it, as a real model's would be a function of them.

A request that goes on elsewhere, from its prompt and what it had generated, so gets the tokens it would have had; and one whose
KV is handed to another node, from the few bytes that stand for it.
"""

from hashlib import blake2b

import numpy as np

from services.worker.engine.protocol import Sampling, Token
from shared.model.blocks import Tokens

FIRST_TOKEN_ID = 1_000
"""Generated ids lie in [1000, vocabulary): tokenizers keep their special tokens outside."""


_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that no token is ever lost from the hash."""

_WRAP = (1 << 64) - 1


class Said:
    """Everything said so far in one request, as a running hash: Σ (token + 1) · factor^(tokens after it), modulo 2^64."""

    def __init__(self, said: int = 0) -> None:
        self.said = said

    @classmethod
    def of(cls, tokens: Tokens) -> "Said":
        powers = np.cumprod(np.full(len(tokens), _FACTOR, dtype=np.uint64))[::-1]
        return cls(int(((tokens.astype(np.uint64) + np.uint64(1)) * powers).sum(dtype=np.uint64)))

    def copy(self) -> "Said":
        return Said(self.said)

    def next(self, sampling: Sampling, vocabulary: int) -> Token:
        """Choose the next token; say it to make the choice after it another one."""
        chosen = blake2b(self.said.to_bytes(8, "little"), digest_size=8)
        chosen.update(b"seed %d" % sampling.seed if sampling.temperature > 0 else b"greedy")
        first = int.from_bytes(chosen.digest(), "little")
        ids = [FIRST_TOKEN_ID + (first + rank) % (vocabulary - FIRST_TOKEN_ID) for rank in range(sampling.logprobs + 1)]
        if not sampling.logprobs:
            return Token(ids[0])
        return Token(ids[0], tuple((token, -0.5 - rank) for rank, token in enumerate(ids)))

    def say(self, token: int) -> None:
        self.said = (self.said + token + 1) * _FACTOR & _WRAP
