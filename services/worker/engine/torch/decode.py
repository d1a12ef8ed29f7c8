"""The decode rank: continuous batching of the sequences that were handed off.

A step makes one token of every sequence that decodes; between two steps sequences join and leave. The linear layers take all
of them at once, because reading the weights is what a token costs and one reading serves them all; attention takes each
sequence by itself, over its own KV. So companions change a sequence's logits in their last bits only, where a matrix product
of more rows adds up in another order.

A sequence's KV lies in memory of its own, (layers, 2, context_tokens, kv_heads, head_dim). The operating system commits a
page when it is first written, so a short sequence costs what it uses, and none ever has to move because it grew. A GPU's
memory is taken whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.engine.torch.attention import attend_last
from services.worker.engine.torch.devices import upload
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.messages import Decode, Decoded, HandOff
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.sampling import choose


@dataclass(slots=True)
class _Sequence:
    """`tokens` have their KV in the context; `next_token` is chosen but not yet fed to the model."""

    context_L2SGD: Tensor  # noqa: N815 - shapes are in the names of tensors
    tokens: int
    next_token: int = 0
    command: Decode | None = None
    produced: int = 0


class DecodeRank:
    """Every open sequence of one decode rank. The frontend bounds how many there are, and so the batch of a step."""

    def __init__(self, model: Model, memory: KvMemory, context_tokens: int) -> None:
        self._model, self._memory, self._context_tokens = model, memory, context_tokens
        self._sequences: dict[str, _Sequence] = {}
        self._decoding: dict[str, _Sequence] = {}

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting for its next token."""
        return not self._decoding

    def hand_off(self, command: HandOff) -> None:
        """Open a sequence with the prompt's KV. StaleSlot if it was overwritten; then nothing is opened."""
        layout = self._memory.layout
        block_tokens = layout.block_tokens
        room = -(-self._context_tokens // block_tokens) * block_tokens  # the last block is copied whole
        shape = (layout.layers, 2, room, layout.kv_heads, layout.head_dim)
        context_L2SGD = torch.empty(shape, dtype=self._model.embedding_VE.dtype, device=self._model.device)
        self._memory.copy_out(command.slots, context_L2SGD)
        self._sequences[command.request] = _Sequence(context_L2SGD, command.prompt_tokens)

    def decode(self, command: Decode) -> None:
        """Let a handed-off sequence take part from the next step on."""
        sequence = self._sequences[command.request]
        sequence.command, sequence.next_token = command, command.first_token
        self._decoding[command.request] = sequence

    def end(self, request: str) -> None:
        """Free a sequence. Unknown ones are ignored."""
        self._sequences.pop(request, None)
        self._decoding.pop(request, None)

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
        assert command is not None, "a sequence decodes because of a command"
        sequence.tokens += 1
        token = choose(logits_V, command.sampling, sequence.tokens)
        sequence.next_token, sequence.produced = token.token, sequence.produced + 1
        last = sequence.produced == command.new_tokens or token.token in command.stop_tokens
        if last:
            self.end(command.request)
        return Decoded(command.n, token, last)


class _Attention:
    """One query of each sequence per layer, over the sequence so far, itself included."""

    def __init__(self, batch: Sequence[_Sequence]) -> None:
        self._batch = batch

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        for row, sequence in enumerate(self._batch):
            keys_SGD, values_SGD = sequence.context_L2SGD[layer, :, : sequence.tokens + 1]
            keys_SGD[sequence.tokens], values_SGD[sequence.tokens] = k_TGD[row], v_TGD[row]
            out_THD[row] = attend_last(q_THD[row : row + 1], keys_SGD, values_SGD)[0]
        return out_THD
