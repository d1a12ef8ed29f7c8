"""Attention over SGLang's real context-parallel strategy, in torch: the FlashAttention backend without its kernels."""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.cp.base import CPAttentionBackendKind, get_cp_strategy
from sglang.srt.layers.cp.utils import is_cp_active
from torch.nn.functional import scaled_dot_product_attention


class ContextParallelNative(TorchNativeAttnBackend):
    """`--attention-backend vertumnus_cpu`."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """q_TE, k_TE, v_TE of this rank's tokens to o_TE."""
        if not is_cp_active(forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        strategy = get_cp_strategy()
        if save_kv_cache:
            strategy.materialize_full_kv(
                forward_batch,
                layer,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        slots_of = self.req_to_token_pool.req_to_token

        def attend(
            q_part: torch.Tensor, ends: torch.Tensor, kv_lengths: torch.Tensor, _longest: int, **_: Any
        ) -> torch.Tensor:
            q_THD = q_part.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            o_THD = torch.empty_like(q_THD)
            bounds = ends.tolist()
            for index, length in enumerate(kv_lengths.tolist()):
                first, last = bounds[index], bounds[index + 1]
                if last > first:
                    slots = slots_of[forward_batch.req_pool_indices[index], :length]
                    row = torch.arange(last - first)[:, None] + (length - (last - first))
                    o_THD[first:last] = scaled_dot_product_attention(
                        q_THD[first:last].movedim(0, 1),
                        keys[slots].movedim(0, 1),
                        values[slots].movedim(0, 1),
                        attn_mask=torch.arange(length)[None] <= row,
                        scale=layer.scaling,
                        enable_gqa=True,
                    ).movedim(1, 0)
            return o_THD

        q_THD = q.contiguous().view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o_THD = strategy.run_attention(
            q_THD, forward_batch, self.device, attend, attention_backend=CPAttentionBackendKind.FLASH_ATTENTION
        )
        return o_THD.reshape(o_THD.shape[0], -1)
