"""Causal attention of a run of queries that end at the last key: the shape every prefill and decode step has.

torch's own attention applies its causal flag from the upper left corner, which is wrong as soon as keys of a cached prefix
come first. So the queries go through in tiles, each over exactly the keys it may see, with a mask for the corner: as fast
as the causal kernel on a whole prompt (measured: 76 against 75 ms at 2048), and half the cost of one large mask.

Shapes: T queries · S keys · H query heads · G key/value heads · D head dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TILE = 256


class CausalMask:
    """The mask of every tile of a step, as a view of one tensor: column c of row i is open iff c ≤ keys + i."""

    def __init__(self, keys: int, dtype: torch.dtype) -> None:
        self._keys = keys
        closed = torch.ones(TILE, keys + TILE, dtype=torch.bool).triu(keys + 1)
        self._mask = torch.zeros(TILE, keys + TILE, dtype=dtype).masked_fill_(closed, float("-inf"))

    def corner(self, queries: int, keys: int) -> Tensor:
        """(queries, keys), the last query on the last key. At most TILE queries."""
        assert queries <= min(keys, TILE), f"{queries} queries on {keys} keys"
        assert keys <= self._keys, f"{keys} keys, but the mask was made for {self._keys}"
        return self._mask[:queries, self._keys - keys + queries : self._keys + queries]


def attend_causally(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, mask: CausalMask) -> Tensor:
    """(T, H, D): query t sees keys 0 … S - T + t."""
    queries, keys = q_THD.shape[0], k_SGD.shape[0]
    q_1HTD, k_1GSD, v_1GSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
    out_THD = torch.empty_like(q_THD)
    for start in range(0, queries, TILE):
        end = min(start + TILE, queries)
        seen = keys - queries + end
        out_1HTD = scaled_dot_product_attention(
            q_1HTD[:, :, start:end],
            k_1GSD[:, :, :seen],
            v_1GSD[:, :, :seen],
            attn_mask=mask.corner(end - start, seen),
            enable_gqa=True,
        )
        out_THD[start:end] = out_1HTD.squeeze(0).transpose(0, 1)
    return out_THD


def attend_last(q_1HD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """(1, H, D): one query that sees every key."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_1HD, k_SGD, v_SGD))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(0).transpose(0, 1)
