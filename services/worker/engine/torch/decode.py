"""The decode rank: sequences that were handed off, one token of one sequence at a time, round robin.

A sequence's KV lies in memory of its own, (layers, 2, context_tokens, kv_heads, head_dim). The operating system commits a
page when it is first written, so a short sequence costs what it uses, and none ever has to move because it grew.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.engine.torch.attention import attend_last
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
    """Every open sequence of one decode rank. The frontend bounds how many there are."""

    def __init__(self, model: Model, memory: KvMemory, context_tokens: int) -> None:
        self._model, self._memory, self._context_tokens = model, memory, context_tokens
        self._sequences: dict[str, _Sequence] = {}
        self._turns: deque[str] = deque()

    @property
    def idle(self) -> bool:
        """Whether no sequence is waiting for its next token."""
        return not self._turns

    def hand_off(self, command: HandOff) -> None:
        """Open a sequence with the prompt's KV. StaleSlot if it was overwritten; then nothing is opened."""
        layout = self._memory.layout
        block_tokens = layout.block_tokens
        room = -(-self._context_tokens // block_tokens) * block_tokens  # the last block is copied whole
        shape = (layout.layers, 2, room, layout.kv_heads, layout.head_dim)
        context_L2SGD = torch.empty(shape, dtype=self._model.embedding_VE.dtype)
        self._memory.copy_out(command.slots, context_L2SGD)
        self._sequences[command.request] = _Sequence(context_L2SGD, command.prompt_tokens)

    def decode(self, command: Decode) -> None:
        """Let a handed-off sequence take part in the round."""
        sequence = self._sequences[command.request]
        sequence.command, sequence.next_token = command, command.first_token
        self._turns.append(command.request)

    def end(self, request: str) -> None:
        """Free a sequence. Unknown ones are ignored."""
        if self._sequences.pop(request, None) is not None and request in self._turns:
            self._turns.remove(request)

    def step(self) -> Decoded:
        """One token of the sequence whose turn it is. Not when `idle`."""
        request = self._turns.popleft()
        sequence = self._sequences[request]
        command = sequence.command
        assert command is not None, f"{request}: has a turn without a decode command"
        hidden_TE = self._model.forward(
            torch.tensor([sequence.next_token]), torch.tensor([sequence.tokens]), _Attention(sequence)
        )
        sequence.tokens += 1
        token = choose(self._model.logits(hidden_TE[0]), command.sampling, sequence.tokens)
        sequence.next_token, sequence.produced = token.token, sequence.produced + 1
        last = sequence.produced == command.new_tokens or token.token in command.stop_tokens
        if last:
            self.end(request)
        else:
            self._turns.append(request)
        return Decoded(command.n, token, last)


class _Attention:
    """One query per layer over the sequence so far, itself included."""

    def __init__(self, sequence: _Sequence) -> None:
        self._context_L2SGD, self._position = sequence.context_L2SGD, sequence.tokens

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        keys_SGD, values_SGD = self._context_L2SGD[layer, :, : self._position + 1]
        keys_SGD[self._position], values_SGD[self._position] = k_TGD[0], v_TGD[0]
        return attend_last(q_THD, keys_SGD, values_SGD)
