"""What a request has said so far, and the logits that its sampling fields leave of the model's.

In this order, which shows only where a token has several of them; SGLang scales behind 2, vLLM behind 3 and 4:
1.  `repetition_penalty` r, over the prompt and what was generated (Keskar et al. 2019, as `transformers` has it): a token that
    was said has its logit divided by r if that is positive, and multiplied by r if not.
2.  OpenAI's two, over what was generated: less `frequency_penalty` for each time that a token was said, and less
    `presence_penalty` once if it was said at all.
3.  `logit_bias` is added.
4.  Before `min_tokens` tokens none of `stops` can come.
"""

import torch
from torch import Tensor

from services.worker.engine.continuation import Past
from services.worker.engine.protocol import Sampling


class Said:
    """One request's tokens as its penalties count them, (V) in host memory, as logits are."""

    def __init__(self, sampling: Sampling, past: Past, vocab: int) -> None:
        self._sampling = sampling
        self._produced = 0
        self._times_V = torch.bincount(_ids(past.generated), minlength=vocab).double()
        self._said_V = self._times_V > 0
        self._said_V[_ids(past.prompt)] = True
        self._bias_tokens = _ids(tuple(token for token, _ in sampling.logit_bias))
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float64, device="cpu")
        self._stops = _ids(sampling.stops)

    @classmethod
    def by(cls, sampling: Sampling, past: Past, vocab: int) -> "Said | None":
        """None where these fields leave every logit as it is, which is what nearly all requests ask for."""
        if (
            sampling.repetition_penalty == 1
            and not sampling.frequency_penalty
            and not sampling.presence_penalty
            and not sampling.logit_bias
            and not (sampling.min_tokens and sampling.stops)
        ):
            return None
        return cls(sampling, past, vocab)

    def say(self, token: int) -> None:
        """It was chosen."""
        self._produced += 1
        self._times_V[token] += 1
        self._said_V[token] = True

    def adjusted(self, logits_V: Tensor) -> Tensor:
        """For the next token. float64, and finite but for the stop tokens that may not come yet."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            scaled_V = torch.where(
                logits_V > 0, logits_V / sampling.repetition_penalty, logits_V * sampling.repetition_penalty
            )
            logits_V = torch.where(self._said_V, scaled_V, logits_V)
        presence_V = sampling.presence_penalty * (self._times_V > 0).double()
        logits_V = logits_V - sampling.frequency_penalty * self._times_V - presence_V
        logits_V.index_add_(0, self._bias_tokens, self._bias)
        if self._produced < sampling.min_tokens:
            logits_V[self._stops] = -torch.inf
        return logits_V


def _ids(tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")
