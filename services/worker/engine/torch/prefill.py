"""One rank's part in the prefill of one request: zigzag context parallelism over a cached prefix (paper, section 2).

Per layer: keys and values of the local tokens, all-gather, restore the order, write the blocks this rank owns, attend from
the local queries to the cached prefix and the visible suffix. The rank that has the last position chooses the first token.

The cached prefix is read from the pools of the ranks that hold it, layer by layer, so a rank needs memory for one layer's
context only. Shapes as in `kv_memory`.
"""

import torch
from torch import Tensor

from services.worker.engine.protocol import Token
from services.worker.engine.torch.attention import CausalMask, attend_causally
from services.worker.engine.torch.groups import Groups
from services.worker.engine.torch.kv_memory import KvMemory, plan_of
from services.worker.engine.torch.messages import Prefill
from services.worker.engine.torch.model import DTYPES, Model
from services.worker.engine.torch.sampling import choose
from services.worker.engine.torch.zigzag import Share, holder_of, runs_alone, share
from shared.model.lattice import Group


def prefill(command: Prefill, group: Group, rank: int, model: Model, memory: KvMemory, groups: Groups) -> Token | None:
    """Run this rank's share; every rank of the group must call it. The first token, on the rank that has the last position.

    Errors: StaleSlot if the cached prefix was overwritten, which a pinned prefix never is.
    """
    suffix_tokens = len(command.tokens)
    alone = runs_alone(suffix_tokens, group.degree)
    if alone and rank != group.first_rank:
        return None
    cut = share(suffix_tokens, 1, 0) if alone else share(suffix_tokens, group.degree, rank - group.first_rank)
    attend = _Attention(command, group, cut, None if alone else groups, _owner(alone, rank), memory)
    tokens_T = torch.cat([torch.tensor(command.tokens[start:end]) for start, end in cut.spans])
    positions_T = torch.cat([torch.arange(start, end) for start, end in cut.spans]) + attend.prefix_tokens
    hidden_TE = model.forward(tokens_T.long(), positions_T, attend)
    attend.finish()
    if cut.last_token != suffix_tokens - 1:
        return None
    return choose(model.logits(hidden_TE[-1:])[0], command.sampling, command.prompt_tokens)


def _owner(alone: bool, rank: int) -> int | None:
    """Whose blocks a rank writes: its own, or everybody's (None) when it is the only one that computes."""
    return None if alone else rank


class _Attention:
    """What `Model.forward` calls per layer. `groups` is None when this rank computes alone."""

    def __init__(
        self, command: Prefill, group: Group, cut: Share, groups: Groups | None, owner: int | None, memory: KvMemory
    ) -> None:
        self._group, self._share, self._groups, self._memory = group, cut, groups, memory
        layout, slots = memory.layout, list(enumerate(command.slots))
        self.prefix_tokens = command.reused_blocks * layout.block_tokens
        self._prefix = plan_of(slots[: command.reused_blocks])
        self._written = plan_of(
            (depth, ref) for depth, ref in slots[command.held_blocks :] if owner in (None, ref.rank)
        )
        memory.check(self._prefix)
        memory.begin_write(self._written)
        # Zeroed, because a partial last block is written whole and equal prompts leave equal bytes.
        padded_tokens = self.prefix_tokens + 2 * group.degree * cut.chunk_tokens
        context_tokens = max(padded_tokens, len(slots) * layout.block_tokens)
        shape = (2, context_tokens, layout.kv_heads, layout.head_dim)
        self._context_2SGD = torch.zeros(shape, dtype=DTYPES[layout.dtype])
        self._mask = CausalMask(self.prefix_tokens + len(command.tokens), DTYPES[layout.dtype])

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        context_2SGD = self._context_2SGD
        self._memory.read_layer(self._prefix, layer, context_2SGD)
        self._place_suffix(torch.stack((k_TGD, v_TGD)))
        self._memory.write_layer(self._written, layer, context_2SGD)
        outputs, local = [], 0
        for start, end in self._share.spans:
            queries_THD = q_THD[local : local + end - start]
            keys_SGD, values_SGD = context_2SGD[:, : self.prefix_tokens + end]
            outputs.append(attend_causally(queries_THD, keys_SGD, values_SGD, self._mask))
            local += end - start
        return torch.cat(outputs)

    def finish(self) -> None:
        """Publish what was written, and make sure that the prefix was what the command meant to the end."""
        self._memory.finish_write(self._written)
        self._memory.check(self._prefix)

    def _place_suffix(self, kv_2TGD: Tensor) -> None:
        """Bring the whole suffix's keys and values into the context, in the order of the sequence."""
        suffix_2SGD = self._context_2SGD[:, self.prefix_tokens :]
        if self._groups is None:
            suffix_2SGD[:, : kv_2TGD.shape[1]] = kv_2TGD
            return
        chunk, local = self._share.chunk_tokens, 0
        # Ranks at the end of the prompt have fewer tokens, but a collective needs equal shapes.
        padded_22CGD = kv_2TGD.new_zeros((2, 2, chunk, *kv_2TGD.shape[2:]))
        for half, (start, end) in enumerate(self._share.spans):
            padded_22CGD[half, :, : end - start] = kv_2TGD[:, local : local + end - start]
            local += end - start
        gathered = self._groups.all_gather(self._group, padded_22CGD)
        for number in range(2 * self._group.degree):
            index, half = holder_of(number, self._group.degree)
            suffix_2SGD[:, number * chunk : (number + 1) * chunk] = gathered[index, half]
