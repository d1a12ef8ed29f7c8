"""What a modelled engine says: each token is a hash of every token before it, as a real model's would be a function of them.

A request that goes on elsewhere, from its prompt and what it had generated, so gets the tokens it would have had.
"""

from hashlib import blake2b

from services.worker.engine.protocol import Sampling, Token

FIRST_TOKEN_ID = 1_000
"""Generated ids lie in [1000, vocabulary): tokenizers keep their special tokens outside."""


class Said:
    """Everything said so far in one request, as a running hash."""

    def __init__(self, said: bytes) -> None:
        self._said = blake2b(said, digest_size=8)

    def copy(self) -> "Said":
        copied = Said(b"")
        copied._said = self._said.copy()
        return copied

    def next(self, sampling: Sampling, vocabulary: int) -> Token:
        """Choose the next token; say it to make the choice after it another one."""
        chosen = self._said.copy()
        chosen.update(b"seed %d" % sampling.seed if sampling.temperature > 0 else b"greedy")
        first = int.from_bytes(chosen.digest(), "little")
        ids = [FIRST_TOKEN_ID + (first + rank) % (vocabulary - FIRST_TOKEN_ID) for rank in range(sampling.logprobs + 1)]
        if not sampling.logprobs:
            return Token(ids[0])
        return Token(ids[0], tuple((token, -0.5 - rank) for rank, token in enumerate(ids)))

    def say(self, token: int) -> None:
        self._said.update(token.to_bytes(4, "little"))
