"""Every operation in Triton. Importing this module imports triton."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.attention.paged_attention_triton import (
    paged_attention,
    plan_attention,
    rotary_attention,
)
from spd.kernels.attention.rotary_store_triton import rotary_store
from spd.kernels.capabilities import CAPABILITIES, Capabilities
from spd.kernels.experts.moe_triton import experts, route, router_logits
from spd.kernels.latent.head_linear_triton import head_linear
from spd.kernels.latent.mla_attention_triton import latent_store, mla_attention
from spd.kernels.linear import skinny_linear_triton
from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.head_input_triton import head_input, keep_states
from spd.kernels.linear.rows_triton import code_rows, embed, norm_residual, rms_norm_rows
from spd.kernels.linear.skinny_config import NARROW_TILES, TokenTileLimits
from spd.kernels.linear.skinny_linear import AnyWeight, Draw, LinearWorkspace, Norm
from spd.kernels.recurrent.delta_chunks_triton import delta_chunks
from spd.kernels.recurrent.delta_rule_triton import delta_rule
from spd.kernels.recurrent.gated_norm_triton import gated_norm
from spd.kernels.recurrent.short_conv_triton import short_conv
from spd.kernels.round.commit_triton import round_commit
from spd.kernels.round.ngram_lookup_triton import ngram_lookup
from spd.kernels.round.pool_lookup_triton import pool_lookup
from spd.kernels.round.window_triton import committed_window, draft_step, mark_time, round_window
from spd.kernels.sampling.draft_verify_triton import verify_drafts
from spd.kernels.sampling.sampling_triton import row_distributions, sample_rows


class TritonKernels:
    """The set "triton"; see `spd.kernels.interface.Kernels` for the contracts."""

    name: str = "triton"
    capabilities: Capabilities = CAPABILITIES["triton"]
    native: None = None

    def __init__(self, tile_limits: TokenTileLimits = NARROW_TILES) -> None:
        """tile_limits: the widest token tiles of products, by the dtype of weights."""
        self.tile_limits = tile_limits

    embed = staticmethod(embed)
    code_rows = staticmethod(code_rows)
    rms_norm_rows = staticmethod(rms_norm_rows)
    norm_residual = staticmethod(norm_residual)
    head_input = staticmethod(head_input)
    keep_states = staticmethod(keep_states)
    rotary_store = staticmethod(rotary_store)
    plan_attention = staticmethod(plan_attention)
    paged_attention = staticmethod(paged_attention)
    rotary_attention = staticmethod(rotary_attention)
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

    def linear(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        workspace: LinearWorkspace | None = None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        *,
        chunk: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch `Kernels.linear` with this set's token tiles."""
        return skinny_linear_triton.linear(
            x, weight, bias, workspace, norm, residual, chunk=chunk, tile_limits=self.tile_limits
        )

    def norm_gate_up(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        workspace: LinearWorkspace | None,
        norm: Norm,
        act: Activation = SILU,
    ) -> Tensor:
        """Launch `Kernels.norm_gate_up` with this set's token tiles."""
        return skinny_linear_triton.norm_gate_up(
            x=x,
            weight=weight,
            bias=bias,
            workspace=workspace,
            norm=norm,
            act=act,
            tile_limits=self.tile_limits,
        )

    def head_logits(self, x: Tensor, weight: AnyWeight) -> Tensor:
        """Launch `Kernels.head_logits` with this set's token tiles."""
        return skinny_linear_triton.head_logits(x, weight, tile_limits=self.tile_limits)

    def head_sample(
        self, x: Tensor, weight: AnyWeight, draw: Draw, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Launch `Kernels.head_sample` with this set's token tiles."""
        return skinny_linear_triton.head_sample(x, weight, draw, ids, tile_limits=self.tile_limits)
