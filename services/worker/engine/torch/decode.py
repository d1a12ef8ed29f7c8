"""The decode rank: continuous batching of the sequences that were handed off.

A step makes one token of every sequence that decodes; between two steps sequences join and leave. The linear layers take all
of them at once, because reading the weights is what a token costs and one reading serves them all; attention takes each
sequence by itself, over its own KV. So companions change a sequence's logits in their last bits only, where a matrix product
of more rows adds up in another order.

A sequence's KV lies in a context of its own (`contexts`), so none ever has to move because it grew. The mover has brought the
prompt's there before the sequence's first step, and the rank knows nothing of where it came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.engine.torch.attention import attend_last
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.devices import upload
from services.worker.engine.torch.messages import Decode, Decoded
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.penalties import Said
from services.worker.engine.torch.sampling import NotFinite, choose


@dataclass(slots=True)
class _Sequence:
    """`tokens` have their KV in the context; `next_token` is chosen but not yet fed to the model."""

    command: Decode
    context_L2SGD: Tensor  # noqa: N815 - shapes are in the names of tensors
    tokens: int
    next_token: int
    said: Said | None
    produced: int = 0


class DecodeRank:
    """Every sequence that one decode rank decodes. The frontend says which context is whose, and so bounds a step's batch."""

    def __init__(self, model: Model, contexts: Contexts) -> None:
        self._model, self._contexts = model, contexts
        self._decoding: dict[int, _Sequence] = {}

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting for its next token."""
        return not self._decoding

    def decode(self, command: Decode) -> None:
        """Let a sequence, whose prompt's KV is in its context, take part from the next step on."""
        context_L2SGD = self._contexts.context(command.sequence)
        said = Said.by(command.sampling, command.past, self._model.config.vocab)
        if said is not None:
            said.say(command.first_token)
        self._decoding[command.sequence] = _Sequence(
            command, context_L2SGD, command.prompt_tokens, command.first_token, said
        )

    def end(self, sequence: int) -> None:
        """Forget a sequence, whether it decodes or not."""
        self._decoding.pop(sequence, None)

    def step(self) -> list[Decoded]:
        """One token of every sequence that decodes. Not when `idle`."""
        batch = list(self._decoding.values())
        fed = [[sequence.next_token for sequence in batch], [sequence.tokens for sequence in batch]]
        tokens_T, positions_T = upload(torch.tensor(fed, dtype=torch.int64, device="cpu"), self._model.device)
        hidden_TE = self._model.forward(tokens_T, positions_T, _Attention(batch))
        logits_TV = self._model.logits(hidden_TE)
        return [self._advance(sequence, logits_V) for sequence, logits_V in zip(batch, logits_TV, strict=True)]

    def _advance(self, sequence: _Sequence, logits_V: Tensor) -> Decoded:
        command = sequence.command
        sequence.tokens += 1
        try:
            token = choose(logits_V, command.sampling, sequence.tokens, sequence.said)
        except NotFinite:
            del self._decoding[command.sequence]
            return Decoded(command.n, None, last=True)
        if sequence.said is not None:
            sequence.said.say(token.token)
        sequence.next_token, sequence.produced = token.token, sequence.produced + 1
        last = sequence.produced == command.new_tokens or token.token in command.stop_tokens
        if last:
            del self._decoding[command.sequence]
        return Decoded(command.n, token, last)


class _Attention:
    """One query of each sequence per layer, over the sequence so far, itself included."""

    def __init__(self, batch: Sequence[_Sequence]) -> None:
        self._batch = batch

    def __call__(self, layer: int, q_THD: Tensor, kv_2TGD: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        for row, sequence in enumerate(self._batch):
            context_2SGD = sequence.context_L2SGD[layer, :, : sequence.tokens + 1]
            context_2SGD[:, sequence.tokens] = kv_2TGD[:, row]
            out_THD[row] = attend_last(q_THD[row : row + 1], *context_2SGD)[0]
        return out_THD
