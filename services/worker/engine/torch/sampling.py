"""The choice of a token: a function of (logits, sampling, position) and of what the request has said before, and of nothing
else, so any rank at any time chooses alike."""

from hashlib import blake2b

import torch
from torch import Tensor

from services.worker.engine.protocol import Sampling, Token
from services.worker.engine.torch.penalties import Said


class NotFinite(Exception):
    """The model has made no numbers of what it was given: some weight is none, or the sums overflowed."""


def choose(logits_V: Tensor, sampling: Sampling, position: int, said: Said | None = None) -> Token:
    """The token at `position`. Ties go to the lower id. NotFinite if there is nothing to choose by.

    Probabilities are float64: sums over a large vocabulary must not depend on how they are grouped. Log-probabilities are
    those of the model, before penalties, biases, temperature, top-k, top-p and min-p, as the OpenAI API reports them.
    """
    logits_V = logits_V.double()
    if not logits_V.sum().isfinite():
        raise NotFinite
    adjusted_V = logits_V if said is None else said.adjusted(logits_V)
    token = _greedy(adjusted_V) if sampling.temperature == 0 else _sampled(adjusted_V, sampling, position)
    if sampling.logprobs == 0:
        return Token(token)
    logprobs_V = torch.log_softmax(logits_V, dim=0)
    ranked = torch.sort(logprobs_V, descending=True, stable=True).indices[: sampling.logprobs + 1].tolist()
    others = [other for other in ranked if other != token][: sampling.logprobs]
    return Token(token, tuple((chosen, logprobs_V[chosen].item()) for chosen in (token, *others)))


def _greedy(logits_V: Tensor) -> int:
    return int((logits_V == logits_V.max()).nonzero()[0].item())


def _sampled(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """Inverse of the cumulated probabilities of the tokens that may be chosen."""
    probabilities_K, tokens_K = candidates(logits_V, sampling)
    cumulated_K = probabilities_K.cumsum(0)
    point = uniform(sampling.seed, position) * cumulated_K[-1]
    found = int(torch.searchsorted(cumulated_K, point, right=True))
    return int(tokens_K[min(found, len(tokens_K) - 1)].item())


def candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The model's probabilities at this temperature of the tokens that may be chosen, most likely first, and the tokens: of the
    `top_k` most likely the smallest set that reaches `top_p` of them, without those below `min_p` of the best."""
    # The best logit becomes 0 first: however low the temperature, no quotient of it overflows.
    probabilities_V = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=0)
    sorted_K, tokens_K = torch.sort(probabilities_V, descending=True, stable=True)
    if sampling.top_k:
        sorted_K = sorted_K[: sampling.top_k]
    cumulated_K = sorted_K.cumsum(0)
    # The part of all is 1 but for rounding, which must not be made again.
    whole = cumulated_K[-1] if sampling.top_k else 1.0
    kept = int((cumulated_K - sorted_K < sampling.top_p * whole).sum().item())
    kept = min(kept, int((sorted_K >= sampling.min_p * sorted_K[0]).sum().item()))
    return sorted_K[:kept], tokens_K[:kept]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
