"""One rank's part in a prefill step: zigzag context parallelism over a cached prefix (paper, section 2), for one request or a
packed batch of them, each with a prefix of its own.

Per layer: keys and values of the local tokens, all-gather, restore the order, write the blocks this rank owns, attend from
the local queries to the cached prefix and the visible suffix. The local tokens of all requests go through the linear layers
together and through one all-gather; attention takes each request by itself. The rank that has a request's last position
chooses its first token.

The cached prefix is read from the pools of the ranks that hold it, layer by layer, so a rank needs memory for one layer's
context only. Where that moves more bytes than the queries have (`movement`), each rank attends the queries of all ranks to
the part of the prefix in its own pool, and the partial results go back to be merged. Shapes as in `kv_memory`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from services.worker.engine.protocol import Token
from services.worker.engine.torch.attention import Partial, attend, attend_causally, merge
from services.worker.engine.torch.devices import upload
from services.worker.engine.torch.groups import Groups
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.messages import Part, Prefill
from services.worker.engine.torch.model import Model
from services.worker.engine.torch.penalties import Said
from services.worker.engine.torch.sampling import NotFinite, choose
from services.worker.engine.torch.weights import DTYPES
from services.worker.engine.torch.zigzag import Share, holder_of, shares
from shared.model.lattice import Group


def prefill(
    command: Prefill, group: Group, rank: int, model: Model, memory: KvMemory, groups: Groups
) -> tuple[tuple[int, Token | None], ...]:
    """Run this rank's share; every rank of the group must call it. Returns (number of the part, first token) for the parts
    that end their prompt and whose last position this rank has; None where the logits are no finite numbers.

    Errors: StaleSlot if a cached prefix was overwritten, which a pinned prefix never is.
    """
    cuts = shares([len(part.tokens) for part in command.parts], group.degree, rank - group.first_rank)
    parts = [
        _LocalPart(number, part, cut, group.degree, rank, memory)
        for number, (part, cut) in enumerate(zip(command.parts, cuts, strict=True))
        if cut.tokens
    ]
    if not parts:
        return ()  # and so no part is cut: each rank has tokens of a suffix that is
    tokens_T, positions_T = upload(torch.cat([part.inputs_2T for part in parts], dim=1), model.device)
    hidden_TE = model.forward(tokens_T, positions_T, _Attention(parts, group, groups))
    for part in parts:
        part.finish()
    ends = accumulate(part.tokens for part in parts)
    last = [(part, end - 1) for part, end in zip(parts, ends, strict=True) if part.chooses]
    if not last:
        return ()
    logits_TV = model.logits(hidden_TE[[row for _, row in last]])
    return tuple((part.number, part.choose(logits_V)) for (part, _), logits_V in zip(last, logits_TV, strict=True))


class _LocalPart:
    """This rank's share of one request, and one layer's context of it: cached prefix, then suffix."""

    def __init__(self, number: int, part: Part, cut: Share, degree: int, rank: int, memory: KvMemory) -> None:
        self.number, self.cut, self.tokens = number, cut, cut.tokens
        self._memory, self._sampling, self.moves_queries = memory, part.sampling, part.moves_queries
        self._past = part.past
        layout, slots = memory.layout, list(enumerate(part.slots))
        prefix_tokens = part.reused_blocks * layout.block_tokens
        self.end = prefix_tokens + len(part.tokens)
        self.chooses = part.sampling is not None and cut.last_token == len(part.tokens) - 1
        places = [place for start, end in cut.spans for place in range(start, end)]
        inputs = [[part.tokens[place] for place in places], [prefix_tokens + place for place in places]]
        self.inputs_2T = torch.tensor(inputs, dtype=torch.int64, device="cpu")
        """Tokens and their positions."""
        prefix = slots[: part.reused_blocks]
        if part.moves_queries:  # every query sees all of it, so its order does not matter
            prefix = list(enumerate(ref for _, ref in prefix if ref.rank == rank))
        self._prefix = memory.plan(prefix)
        # The context has the suffix alone if queries move: nothing is written before the reused blocks.
        first_block = part.reused_blocks if part.moves_queries else 0
        self._before_tokens = prefix_tokens - first_block * layout.block_tokens
        # A rank writes its own blocks, and everybody's when it is the only one that computes.
        self._written = memory.plan(
            (depth - first_block, ref) for depth, ref in slots[part.held_blocks :] if cut.alone or ref.rank == rank
        )
        memory.check(self._prefix)
        memory.begin_write(self._written)
        # Zeroed, because a partial last block is written whole and equal prompts leave equal bytes.
        suffix_tokens = len(part.tokens) if cut.alone else 2 * degree * cut.chunk_tokens
        context_tokens = max(self._before_tokens + suffix_tokens, (len(slots) - first_block) * layout.block_tokens)
        shape = (2, context_tokens, layout.kv_heads, layout.head_dim)
        self._context_2SGD = torch.zeros(shape, dtype=DTYPES[layout.dtype], device=memory.device)
        self.suffix_2SGD = self._context_2SGD[:, self._before_tokens :]
        own_shape = (2, len(prefix) * layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.prefix_2SGD = self._context_2SGD.new_empty(own_shape) if part.moves_queries else self._context_2SGD

    def read(self, layer: int) -> None:
        self._memory.read_layer(self._prefix, layer, self.prefix_2SGD)

    def write(self, layer: int) -> None:
        self._memory.write_layer(self._written, layer, self._context_2SGD)

    def attend(self, q_THD: Tensor) -> Partial:
        """To the context as far as each query sees it, which lacks the prefix if queries move."""
        found, local = [], 0
        for start, end in self.cut.spans:
            if start < end:
                keys_SGD, values_SGD = self._context_2SGD[:, : self._before_tokens + end]
                found.append(attend_causally(q_THD[local : local + end - start], keys_SGD, values_SGD))
                local += end - start
        if len(found) == 1:
            return found[0]
        return Partial(torch.cat([part.out_THD for part in found]), torch.cat([part.lse_TH for part in found]))

    def finish(self) -> None:
        """Publish what was written, and make sure that the prefix was what the command meant to the end."""
        self._memory.finish_write(self._written)
        self._memory.check(self._prefix)

    def choose(self, logits_V: Tensor) -> Token | None:
        assert self._sampling is not None, "a part without sampling chooses nothing"
        try:
            return choose(logits_V, self._sampling, self.end, Said.by(self._sampling, self._past, len(logits_V)))
        except NotFinite:
            return None


class _Attention:
    """What `Model.forward` calls per layer."""

    def __init__(self, parts: Sequence[_LocalPart], group: Group, groups: Groups) -> None:
        self._parts, self._group, self._groups = parts, group, groups
        self._lengths = [part.tokens for part in parts]
        self._gathered_tokens = sum(2 * part.cut.chunk_tokens for part in parts if not part.cut.alone)

    def __call__(self, layer: int, q_THD: Tensor, kv_2TGD: Tensor) -> Tensor:
        kvs = torch.split(kv_2TGD, self._lengths, dim=1)
        for part, kv_2TGD in zip(self._parts, kvs, strict=True):
            part.read(layer)
            if part.cut.alone:
                part.suffix_2SGD[:, : part.tokens] = kv_2TGD
        if self._gathered_tokens:
            self._exchange(kvs)
        for part in self._parts:
            part.write(layer)
        queries = torch.split(q_THD, self._lengths)
        attended = [self._attend(part, q) for part, q in zip(self._parts, queries, strict=True)]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend(self, part: _LocalPart, q_THD: Tensor) -> Tensor:
        return self._move_queries(part, q_THD) if part.moves_queries else part.attend(q_THD).out_THD

    def _move_queries(self, part: _LocalPart, q_THD: Tensor) -> Tensor:
        """Everybody's queries to this rank's part of the prefix, the partial results back, and the suffix here."""
        padded_THD = q_THD.new_zeros((2 * part.cut.chunk_tokens, *q_THD.shape[1:]))
        padded_THD[: part.tokens] = q_THD
        q_RTHD = self._groups.all_gather(self._group, padded_THD)
        keys_SGD, values_SGD = part.prefix_2SGD
        out_THD, lse_TH = attend(q_RTHD.flatten(0, 1), keys_SGD, values_SGD)
        outs_RTHD = self._groups.exchange(self._group, out_THD.reshape_as(q_RTHD))[:, : part.tokens]
        lses_RTH = self._groups.exchange(self._group, lse_TH.reshape(q_RTHD.shape[:3]))[:, : part.tokens]
        return merge([part.attend(q_THD), *map(Partial, outs_RTHD, lses_RTH)]).out_THD

    def _exchange(self, kvs: Sequence[Tensor]) -> None:
        """Bring the whole suffix of every part that was cut into its context, in the order of the sequence."""
        # Ranks at the end of a prompt have fewer tokens, but a collective needs equal shapes.
        local_2SGD = kvs[0].new_zeros((2, self._gathered_tokens, *kvs[0].shape[2:]))
        for part, kv_2TGD, offset in self._cut_parts(kvs):
            local = 0
            for half, (start, end) in enumerate(part.cut.spans):
                padded_2CGD = local_2SGD[:, offset + half * part.cut.chunk_tokens :]
                padded_2CGD[:, : end - start] = kv_2TGD[:, local : local + end - start]
                local += end - start
        gathered = self._groups.all_gather(self._group, local_2SGD)
        for part, _, offset in self._cut_parts(kvs):
            chunk = part.cut.chunk_tokens
            for number in range(2 * self._group.degree):
                index, half = holder_of(number, self._group.degree)
                chunk_2CGD = gathered[index, :, offset + half * chunk : offset + (half + 1) * chunk]
                part.suffix_2SGD[:, number * chunk : (number + 1) * chunk] = chunk_2CGD

    def _cut_parts(self, kvs: Sequence[Tensor]) -> Iterator[tuple[_LocalPart, Tensor, int]]:
        """(part, its local keys and values, where they begin in the exchange)."""
        offset = 0
        for part, kv_2TGD in zip(self._parts, kvs, strict=True):
            if not part.cut.alone:
                yield part, kv_2TGD, offset
                offset += 2 * part.cut.chunk_tokens
