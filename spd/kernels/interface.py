"""The contracts of all kernels: what each operation computes, its shapes, units and writes in
place.

Three sets of kernels implement them: plain torch (`torch_form`), Triton (`triton_form`) and C
(`native.library`). Sizes: T rows of a pass, S slots, R = k + 1 rows of a verification window,
Q rows of an attention window, H query heads, K key and value heads, D elements of a head, V ids of
a vocabulary. The last dimension of every tensor has stride 1. Sums are float32. An operation's
result for a row never depends on other rows.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import (
    AttentionHeads,
    AttentionParams,
    AttentionPlan,
    Windows,
)
from spd.kernels.attention.rotary_store import Pools, RotatedRows
from spd.kernels.capabilities import Capabilities
from spd.kernels.experts.moe import ExpertWeights, RoutingRule
from spd.kernels.latent.mla_attention import HeadMatrices
from spd.kernels.linear.activation import SILU, Activation
from spd.kernels.linear.head_input import HeadRows, PairNorms
from spd.kernels.linear.skinny_linear import AnyWeight, Draw, LinearWorkspace, Norm
from spd.kernels.linear.tiled_weight import TiledWeight
from spd.kernels.native.packed import PackedProducts
from spd.kernels.recurrent.delta_rule import DeltaMemory, DeltaRule
from spd.kernels.recurrent.short_conv import Segments
from spd.kernels.round.interface import RoundOperations
from spd.kernels.round.window import Rows
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors


@runtime_checkable
class Kernels(RoundOperations, Protocol):
    """One set of kernels; see the module's docstring for the letters of shapes."""

    @property
    def name(self) -> str:
        """Return "torch", "triton" or "native"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Return what callers must do for this set of kernels."""
        ...

    @property
    def native(self) -> PackedProducts | None:
        """Return the C kernels, the only ones that multiply packed weights, or None."""
        ...

    # Rows of the residual stream. The stream x [T, H] travels with `squares` float32 [T, P]: parts
    # of the sum of each row's squares, however many. Source of the norms: Zhang & Sennrich 2019.

    def embed(
        self, token_ids: Tensor, table: Tensor, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rows of table [V, H] for token_ids int64 [T], times scale: (x [T, H], squares).

        Ids lie in [0, V). x is rounded once.
        """
        ...

    def code_rows(self, token_ids: Tensor, table: TiledWeight, dtype: torch.dtype) -> Tensor:
        """Return rows [T, H] of a table [V, H] in GGUF's blocks for token_ids int64 [T].

        Ids lie in [0, V). Values are float32, rounded once.
        """
        ...

    def rms_norm_rows(
        self, x: Tensor, squares: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        """Return x [T, H] * rsqrt(mean square + epsilon) * weight [H], rounded once: [T, H].

        The mean square is sum(squares) / H; without squares it is computed from x.
        """
        ...

    def norm_residual(
        self, y: Tensor, weight: Tensor, epsilon: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the stream residual [T, H] plus the RMS norm of y [T, H], and its squares.

        The norm has scales weight [H]. The sum is rounded once; nothing is written in place.
        """
        ...

    # Products. A weight is [N, K], as checkpoints store it, or a `TiledWeight` of codes and scales,
    # or several of different forms, whose rows follow each other.

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
        """Return x [T, K] Wᵀ + bias [N] as [T, N] in x's dtype, and its squares or None.

        norm: x is RMS-normed, with scales that are folded into W: the product is multiplied by
        rsqrt(sum(squares) / K + epsilon) before the bias. residual [T, N] is added before rounding,
        and the squares of the sum are returned. chunk: the rows are a full prompt chunk, which has
        a program of its own.
        """
        ...

    def norm_gate_up(
        self,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        workspace: LinearWorkspace | None,
        norm: Norm,
        act: Activation = SILU,
    ) -> Tensor:
        """Return the gated activation of a normed `linear` by weight [2 * I, K]: [T, I], rounded
        once.

        The first I rows of the weight are gates.
        """
        ...

    def head_logits(self, x: Tensor, weight: AnyWeight) -> Tensor:
        """Return logits float32 [T, V] of hidden states x [T, K] by weight [V, K]."""
        ...

    def head_sample(
        self, x: Tensor, weight: AnyWeight, draw: Draw, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw a draft token for every row of x [T, K]: (token int64 [T], finite bool [T]).

        Rows are windows of T / S rows of S slots. A draw is the argmax of logit / temperature +
        Gumbel noise, keyed by seed and position like the target's draw; the argmax of logits at
        temperature 0. Ties go to the lowest id. Only ids below `usable_vocab` are drawn. ids int64
        [V], ascending: row v of the weight stands for token ids[v]. finite: the token's logit is a
        finite number and no logit of the row is NaN.
        """
        ...

    # Inputs of a head that drafts (MTP, EAGLE-3): pairs of a token and the state one position
    # before.

    def head_input(
        self,
        token_ids: Tensor,
        table: Tensor,
        batch: HeadRows,
        norms: PairNorms,
        keeps_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norms of each row's embedding and previous state, concatenated: [T, 2 * H].

        token_ids int64 [T] in table [V, H]; states come from the rings of `batch`. The second
        result is the state itself [T, H] with keeps_state, else None.
        """
        ...

    def keep_states(
        self, hidden: Tensor, rows: Rows, rings: Tensor, page_states: Tensor, page_size: int
    ) -> None:
        """Write valid rows of hidden [S, W, H] into rings [S, depth + 1, H], in place.

        Valid positions of a slot lie less than depth apart. The row at the last position of a page
        is written to page_states [P, H]. Rows that are not valid may write a ring's last entry and
        page 0.
        """
        ...

    # Attention over pages.

    def rotary_store(
        self,
        qkv: Tensor,
        rows: RotatedRows,
        qk_weight: Tensor | None,
        epsilon: float,
        pools: Pools,
        num_heads: int,
    ) -> Tensor:
        """Rotate a fused projection, write keys and values to the pools, return queries [T, H, D].

        qkv [T, (H + 2K) * D], D even: queries, keys, values. qk_weight [H + K, D]: scales of a norm
        of every head before the rotation. Pools are written in place; values that are not finite
        are replaced (`replace_non_finite`), so that a faulty slot cannot affect another one. Pools
        of codes take each head's keys and values rounded (`cache_rows.round_entries`).
        """
        ...

    def plan_attention(
        self, windows: Windows, heads: AttentionHeads, page_size: int, dtype: torch.dtype
    ) -> AttentionPlan:
        """Prepare `paged_attention` of all layers of one pass; dtype is the model's.

        Raises ValueError where a set of kernels cannot use pages of page_size positions.
        """
        ...

    def paged_attention(
        self, query: Tensor, pools: Pools, plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        """Attend query [S, Q, H, D] to each slot's pages: [S, Q, H, D].

        pools [pages, page, K, D], H a multiple of K. Of codes the sums are those of their numbers
        (`cache_rows.widen_rows`) up to float32 rounding. The plan comes from this set's
        `plan_attention`. A row attends to the positions up to its own, or to `Windows.last`, that
        `causal_bias` does not mask; a slot without valid rows gives zeros. Q may be smaller than planned.
        """
        ...

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
        """Return `paged_attention` of what `rotary_store` makes of qkv [S, Q, (H + 2K) * D].

        The same bits as of both, for windows alone: rows whose positions in the plan are their own
        and whose last key is their own, and that read no entry which a row of another slot writes
        in this pass. See `Capabilities.rotates_in_attention`.
        """
        ...

    def latent_store(
        self,
        query: Tensor,
        latent: Tensor,
        rows: RotatedRows,
        norm: Tensor,
        epsilon: float,
        pages: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate latent [T, L + R] into the pages; return query [T, H, R] rotated.

        norm [L]: scales of the latent part's norm. pages [P, page, L + R] are written in place, as
        in `rotary_store`. Of rows that share a cache slot any one is stored. scales float16 [P,
        page, 2], written in place where pages are codes: of the latent part and of the rotated one.
        """
        ...

    def head_linear(self, x: Tensor, weight: HeadMatrices) -> Tensor:
        """Return x [T, H, A] multiplied head by head by weight [H, A, B]: [T, H, B]."""
        ...

    def mla_attention(
        self,
        query: Tensor,
        pages: Tensor,
        plan: AttentionPlan,
        rank: int,
        scale: float,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Attend query [S, Q, H, L + R] to pages [P, page, L + R]: [S, Q, H, L], L = rank.

        scales: of pages that are codes, as in `latent_store`. The plan is that of `plan_attention`
        for one key head of size L + R; a row attends to the positions up to its own. Source:
        DeepSeek-V2 (2405.04434), section 2.1.
        """
        ...

    # Mixture of experts.

    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x [T, K] times weight float32 [E, K] in float32, in parts of K: [T, P, E]."""
        ...

    def route(
        self, parts: Tensor, correction: Tensor | None, rule: RoutingRule
    ) -> tuple[Tensor, Tensor]:
        """Choose experts of each row by parts float32 [T, P, E]: (ids int64, weights float32) [T,
        k].

        AttentionParams are the sigmoid or the softmax of the sum of the parts. Experts are chosen
        by score + correction [E], best first, ties to the lowest id, from the `top_groups` groups
        of neighbours whose `experts_per_group_score` best experts have the largest sum. Weights are
        scores without correction, divided by their sum plus `weight_epsilon` if `normalised`, times
        `scale`. NaN counts as the largest value: ids are distinct and in range. Source: DeepSeek-V2
        (2405.04434), DeepSeek-V3 (2412.19437).
        """
        ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_weights: ExpertWeights,
        stream: Tensor | None = None,
        *,
        chunk: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sum of the experts' results of x [T, K]: [T, K], and None.

        ids int64 [T, k] in [0, E), weights float32 [T, k]. With stream [T, K] the sum is added to
        it before it is rounded, and the second result is its squares where this set of kernels
        carries them. The C kernels need a stream. chunk: as in `linear`.
        """
        ...

    # Recurrent layers. Rings hold the latest D positions of each slot, position p at p % D; states
    # are of borders (`recurrent/state_blocks.py`).

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ring: Tensor,
        rows: Segments,
        silu: bool = True,
    ) -> Tensor:
        """Return the causal convolution of each channel, float32 [T, C], through silu if `silu`.

        x [T, C], rows with any stride; weight float32 [K, C]: weight[j] times the input K - 1 - j
        positions before; bias float32 [C]. ring [S, D, C] in x's dtype, D >= K - 1 + the rows of
        two windows: earlier inputs are read from it and this pass's last D are written, in place.
        Inputs before position 0 are 0. Rows outside every segment give zeros.
        """
        ...

    def delta_rule(
        self, mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
    ) -> Tensor:
        """Return each row's query of its slot's state, float32 [T, H, dv]; writes memory in place.

        A run of over D - `BLOCK` rows is a prompt's (see `delta_chunks`), and alone. mixed float32
        [T, 2 * Hk * dk + H * dv]: queries, keys, values; value head h has key head h // (H / Hk).
        raw_gates, rows with any stride: [T, 2 * H], corrections before the sigmoid and then steps.
        Where the rule corrects nothing (Mamba-2), raw_gates [T, H] are steps, values are multiplied
        by softplus(step + bias) and keys are not normed. Rows of no segment give zeros. Sources:
        Yang et al. 2024 (2412.06464), as Qwen3-Next applies it; Dao and Gu 2024 (2405.21060).
        """
        ...

    def delta_chunks(
        self, mixed: Tensor, raw_gates: Tensor, rule: DeltaRule, memory: DeltaMemory, rows: Segments
    ) -> Tensor:
        """Return `delta_rule` up to rounding, for runs of a prompt that are never rolled back.

        Runs begin in the block behind the slot's state; `keep` is the last border up to their end.
        Rows from the first border to the last are computed in chunks. Source: Yang et al. 2024
        (2406.06484).
        """
        ...

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool = False
    ) -> Tensor:
        """Return the RMS norm of each head times silu(gate), rounded once: [T, H * dv].

        x float32 [T, H, dv]; gate [T, H * dv], rows with any stride, in the result's dtype; weight
        float32 [dv] or [H, dv]. gate_first: the gate is applied before the norm.
        """
        ...

    # Sampling and verification.

    def sample_rows(
        self,
        logits: Tensor,
        draft: Tensor,
        positions: Tensor,
        tensors: SamplingTensors,
        stream: int = STREAM_TARGET,
    ) -> tuple[Tensor, Tensor]:
        """Draw the token of every row: (sampled int64 [S, R], finite bool [S, R]).

        logits float32 [S, R, V]; draft int64 [S, k]; positions int64 [S, R]: absolute positions of
        the drawn tokens; stream: of the noise. Row r is processed as if the r drafts before it were
        accepted. finite: the drawn token's processed logit is finite and none of the row is NaN.
        """
        ...

    def row_distributions(self, logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
        """Return the distribution that `sample_rows` draws from: [S, R, V] in the logits' dtype.

        At temperature 0 the likeliest token has probability 1, ties to the lowest id. A row with a
        NaN, or whose likeliest token is not finite, is NaN throughout.
        """
        ...

    def verify_drafts(
        self,
        target: Tensor,
        draft_probs: Tensor | None,
        draft: Tensor,
        num_drafts: Tensor,
        seed: Tensor,
        positions: Tensor,
        by_block: bool,
    ) -> tuple[Tensor, Tensor]:
        """Accept drafts by rejection sampling: (tokens int64 [S, R], accepted int64 [S]).

        Each draft is accepted with probability min(1, p / q), or `by_block` the longest prefix that
        passes. target [S, R, V]: the target's processed distributions; draft_probs [S, k, V]:
        exactly those that the drafts were drawn from with STREAM_DRAFT, or None where the draft
        model is deterministic. num_drafts int64 [S]: valid drafts of each slot; positions int64 [S,
        R]: of the tokens decided. tokens holds the accepted drafts, the recovered or bonus token,
        and NO_TOKEN beyond. A draft of target probability 0 is never accepted. Source: Leviathan et
        al. 2023; Chen et al. 2023; Sun et al. 2024.
        """
        ...


OPERATION_NAMES = tuple(
    name
    for contracts in (Kernels, RoundOperations)
    for name, member in vars(contracts).items()
    if callable(member) and not name.startswith("_")
)
"""The names of all operations of a set of kernels."""
