"""Attention over some of the keys, and merging such parts: the shape every prefill and decode step has.

torch's causal flag counts from the upper left corner, which is wrong as soon as keys of a cached prefix come first. So queries
attend to the keys before them without a mask, to their own causally, and the two results are merged by the log-sum-exp of
their scores, as flash attention does inside. A mask over all keys gives the same and takes 1.2 to 1.3 times as long at 8,192
keys (ADR 17).

Shapes: T queries · S keys · H query heads · G key/value heads · D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

COPIED_QUERIES_MIN = 1_024
"""From so many queries on copying the keys and values takes less time than it saves."""


class Partial(NamedTuple):
    """What T queries get from some of the keys. A query that saw none has output 0 and log-sum-exp -∞."""

    out_THD: Tensor  # noqa: N815 - shapes are in the names of tensors
    lse_TH: Tensor  # noqa: N815
    """float32: the logarithm of the sum of the exponentiated scores, this part's weight against others."""


def attend(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, *, causal: bool = False) -> Partial:
    """Every query sees every key; with `causal`, where S = T, query t sees keys 0 … t. At least one query."""
    queries, keys = q_THD.shape[0], k_SGD.shape[0]
    assert queries == keys or not causal, f"{queries} queries are causal on as many keys, not on {keys}"
    if not keys:
        return Partial(torch.zeros_like(q_THD), q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32))
    q_1HTD, k_1GSD, v_1GSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
    kernel = on_cpu if q_THD.device.type == "cpu" else on_cuda
    out_1HTD, lse_1HT = kernel(q_1HTD, k_1GSD, v_1GSD, causal)
    return Partial(out_1HTD.squeeze(0).transpose(0, 1), lse_1HT.squeeze(0).transpose(0, 1))


# The operators below `scaled_dot_product_attention`, which keeps the log-sum-exp to itself. Each returns the output and the
# log-sum-exp, (1, H, T), which every one of them has in natural logarithms.


def on_cpu(q_1HTD: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The kernel packs its operands block by block again and again: a head that lies in one piece is worth a copy, of keys and
    values only if there are many queries (`bench.attention`)."""
    q_1HTD = q_1HTD.contiguous()
    if q_1HTD.shape[2] >= COPIED_QUERIES_MIN:
        k_1GSD, v_1GSD = k_1GSD.contiguous(), v_1GSD.contiguous()
    out_1HTD, lse_1HT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_1HTD, k_1GSD, v_1GSD, is_causal=causal
    )
    return out_1HTD, lse_1HT


def on_cuda(q_1HTD: Tensor, k_1GSD: Tensor, v_1GSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention has no float32; the kernel that has wants a key head per query head, and pads its log-sum-exp."""
    if q_1HTD.dtype != torch.float32:
        out_1HTD, lse_1HT, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_1HTD, k_1GSD, v_1GSD, is_causal=causal
        )
        return out_1HTD, lse_1HT
    heads = q_1HTD.shape[1] // k_1GSD.shape[1]
    k_1HSD, v_1HSD = (x.repeat_interleave(heads, dim=1) for x in (k_1GSD, v_1GSD))
    out_1HTD, lse_1HT, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_1HTD, k_1HSD, v_1HSD, attn_bias=None, compute_log_sumexp=True, is_causal=causal
    )
    return out_1HTD, lse_1HT[:, :, : q_1HTD.shape[2]]


def attend_causally(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Partial:
    """Query t sees keys 0 … S - T + t: the last query is on the last key."""
    before = k_SGD.shape[0] - q_THD.shape[0]
    own = attend(q_THD, k_SGD[before:], v_SGD[before:], causal=True)
    return merge((attend(q_THD, k_SGD[:before], v_SGD[:before]), own)) if before else own


def merge(parts: Sequence[Partial]) -> Partial:
    """What the queries get from the keys of all parts. Every query saw a key in one of them. Rounded once, at the end."""
    lses_NTH = torch.stack([part.lse_TH for part in parts])
    lse_TH = lses_NTH.logsumexp(0)
    shares_NTH1 = (lses_NTH - lse_TH).exp_().unsqueeze(-1)
    out_THD = parts[0].out_THD * shares_NTH1[0]
    for part, share_TH1 in zip(parts[1:], shares_NTH1[1:], strict=True):
        out_THD.addcmul_(part.out_THD, share_TH1)
    return Partial(out_THD.to(parts[0].out_THD.dtype), lse_TH)


def attend_last(q_1HD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """(1, H, D): one query that sees every key."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_1HD, k_SGD, v_SGD))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(0).transpose(0, 1)
