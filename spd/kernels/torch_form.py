"""Every operation in plain torch: the reference that the other sets of kernels are tested
against."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.attention.paged_attention import (
    AttentionParams,
    AttentionPlan,
    paged_attention,
    plan_attention,
)
from spd.kernels.attention.rotary_store import Pools, RotatedRows, rotary_store
from spd.kernels.capabilities import CAPABILITIES, Capabilities
from spd.kernels.experts.moe import experts, route, router_logits
from spd.kernels.latent.mla_attention import head_linear, latent_store, mla_attention
from spd.kernels.linear.head_input import head_input, keep_states
from spd.kernels.linear.rows import code_rows, embed, norm_residual, rms_norm_rows
from spd.kernels.linear.skinny_linear import head_logits, head_sample, linear, norm_gate_up
from spd.kernels.native.packed import PackedProducts
from spd.kernels.recurrent.delta_rule import delta_chunks, delta_rule, gated_norm
from spd.kernels.recurrent.short_conv import short_conv
from spd.kernels.round.commit import round_commit
from spd.kernels.round.ngram_lookup import ngram_lookup
from spd.kernels.round.pool_lookup import pool_lookup
from spd.kernels.round.window import committed_window, draft_step, mark_time, round_window
from spd.kernels.sampling.draft_verify import verify_drafts
from spd.kernels.sampling.sampling import row_distributions, sample_rows


class TorchKernels:
    """The set "torch"; see `spd.kernels.interface.Kernels` for the contracts."""

    name: str = "torch"
    capabilities: Capabilities = CAPABILITIES["torch"]
    native: PackedProducts | None = None

    embed = staticmethod(embed)
    code_rows = staticmethod(code_rows)
    rms_norm_rows = staticmethod(rms_norm_rows)
    norm_residual = staticmethod(norm_residual)
    linear = staticmethod(linear)
    norm_gate_up = staticmethod(norm_gate_up)
    head_logits = staticmethod(head_logits)
    head_sample = staticmethod(head_sample)
    head_input = staticmethod(head_input)
    keep_states = staticmethod(keep_states)
    rotary_store = staticmethod(rotary_store)
    plan_attention = staticmethod(plan_attention)
    paged_attention = staticmethod(paged_attention)

    def rotary_attention(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        qk_weight: Tensor | None,
        epsilon: float,
        pools: Pools,
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> Tensor:
        """Compute `Kernels.rotary_attention` by two operations of the set."""
        slots, width, row_size = qkv.shape
        kv_heads, size = pools[0].shape[2:]
        num_heads = row_size // size - 2 * kv_heads
        query = self.rotary_store(qkv.flatten(0, 1), rows, qk_weight, epsilon, pools, num_heads)
        query = query.view(slots, width, num_heads, size)
        return self.paged_attention(query, pools, plan, params)

    latent_store = staticmethod(latent_store)
    head_linear = staticmethod(head_linear)
    mla_attention = staticmethod(mla_attention)
    router_logits = staticmethod(router_logits)
    route = staticmethod(route)
    experts = staticmethod(experts)
    short_conv = staticmethod(short_conv)
    delta_rule = staticmethod(delta_rule)
    delta_chunks = staticmethod(delta_chunks)
    gated_norm = staticmethod(gated_norm)
    sample_rows = staticmethod(sample_rows)
    row_distributions = staticmethod(row_distributions)
    verify_drafts = staticmethod(verify_drafts)
    round_window = staticmethod(round_window)
    committed_window = staticmethod(committed_window)
    draft_step = staticmethod(draft_step)
    mark_time = staticmethod(mark_time)
    round_commit = staticmethod(round_commit)
    ngram_lookup = staticmethod(ngram_lookup)
    pool_lookup = staticmethod(pool_lookup)
