"""Attention of one layer: norm, project, rotate, store, attend, project back, add.

Grouped-query attention, and latent attention, which projects down, normalises, and projects up
again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import AttentionParams
from spd.kernels.attention.rotary_store import RotatedRows
from spd.kernels.latent.mla_attention import HeadMatrices
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual, attend_windows
from spd.runtime.layers.linear import Projection, apply_in_tiles, normalize_stream
from spd.runtime.layers.rotary import RotaryRows
from spd.runtime.models.allocator import BlockTensors
from spd.runtime.models.attention_layout import GqaLayout
from spd.runtime.models.attention_steps import (
    FusedGates,
    HeadGates,
    JointHeadNorms,
    NarrowValues,
    OutputGating,
    QkvStep,
    QueryGrowth,
    QueryKeyStep,
    QueryStep,
    RotateAndStore,
    RotatedNormScales,
    RotateQueries,
    WidenValues,
    head_norm_scales,
    select_rotary,
)
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.layouts import LatentLayout

LATENT_EPSILON = 1e-6
"""The epsilon of the two inner norms, whatever the configuration's is. Source: DeepSeek's code."""


class Attention:
    """One layer's attention over a paged cache of keys and values."""

    def __init__(self, layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        self.layout = layout
        self.epsilon = build.epsilon
        self.kernels = build.kernels
        scale = layout.head_dim**-0.5 if layout.scores.scale is None else layout.scores.scale
        self.scores = AttentionParams(
            scale, layout.scores.sliding, layout.scores.softcap, tensors.get("sinks")
        )
        _reorder_rows(layout, tensors, build)
        if layout.has_paired_input:
            self.qkv = build.unnormed_projection(tensors, "qkv")
        else:
            self.qkv = build.normed_projection(tensors, "qkv")
        self.gating = _make_gating(layout, tensors, build)
        self.output = build.output_projection(
            tensors, "output", layout.norms.after_epsilon, removes_mean=layout.removes_mean
        )
        self.pair_norms = (
            (tensors["norm"], tensors["state_norm"]) if layout.has_paired_input else None
        )
        """Scales of the norms of a token's embedding and of a state, where the input is both."""
        self.qkv_steps = _make_qkv_steps(layout, tensors, build)
        self.query_key_step = _make_query_key_step(layout, tensors, build)
        self.query_steps = _make_query_steps(layout, tensors, build)
        self.rotates_windows = (
            build.kernels.capabilities.rotates_in_attention
            and layout.cache_source is None
            and not self.query_steps
        )
        """True if one kernel rotates, stores and attends the rows of windows."""
        self.narrow_values: NarrowValues | None = None
        if layout.values.dim is not None:
            self.narrow_values = NarrowValues(
                layout.num_heads, layout.values.dim, layout.values.scale
            )

    def __call__(
        self,
        stream: Residual,
        rotary: RotaryRows,
        batch: ForwardBatch,
        cache: LayerCache,
        onto: Residual | None = None,
    ) -> Residual:
        """Return the stream [T, hidden], or `onto`, with this block of the stream added.

        Stores the keys and values of the T rows, then reads the pages.
        """
        angles = select_rotary(rotary, self.layout.rotation)
        rows = RotatedRows(angles.cos, angles.sin, angles.positions, batch.kv_slots)
        qkv = self.qkv(stream, batch)
        gates: Tensor | None = None
        if self.gating is not None:
            qkv, gates = self.gating.split_gates(qkv)
        for change_qkv in self.qkv_steps:
            qkv = change_qkv(qkv)
        mixed = self._attend(qkv, rows, batch, cache)
        if self.narrow_values is not None:
            mixed = self.narrow_values(mixed)
        if self.gating is not None:
            mixed = self.gating.apply_gates(mixed, gates, stream, batch)
        return self.output(mixed, batch, stream if onto is None else onto)

    def _attend(
        self, qkv: Tensor, rows: RotatedRows, batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """Return the attention of a projection [T, N] over the pages: [T, H * D].

        The rows' keys and values are stored first.
        """
        pools = cache.keys_and_values
        plans = batch.block_plan if self.layout.sees_block else batch.plan
        plan = plans[self.layout.heads]
        step = self.query_key_step
        if self.rotates_windows and batch.chunk_start is None and not batch.is_block:
            assert isinstance(step, RotateAndStore)
            return attend_windows(
                qkv,
                batch,
                lambda windows: self.kernels.rotary_attention(
                    windows, rows, step.scales, self.epsilon, pools, plan, self.scores
                ),
            )
        query = step(qkv, rows, cache)
        for change_query in self.query_steps:
            query = change_query(query, batch)
        return attend_windows(
            query,
            batch,
            lambda windows: self.kernels.paged_attention(windows, pools, plan, self.scores),
        )


def _reorder_rows(layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
    """Reorder the projection's rows in place for the kernels: gates last, rotated elements in
    halves.
    """
    if layout.gate == "after_queries":
        build.reorder(tensors, "qkv", _order_gates_last(layout))
    order = layout.rotary.order
    if order is not None:
        rotated = slice((layout.num_heads + layout.num_kv_heads) * layout.head_dim)
        for name in ("qkv", "q_norm", "k_norm"):
            build.reorder(tensors, name, order, rotated)


def _make_gating(
    layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder
) -> OutputGating | None:
    """Return the gates of the result, or None."""
    if layout.gate is None:
        return None
    if layout.gate == "per_head":
        return HeadGates(build.normed_projection(tensors, "gates"))
    return FusedGates(layout)


def _make_qkv_steps(layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder) -> list[QkvStep]:
    """Return the changes of queries, keys and values before the rotation."""
    steps: list[QkvStep] = []
    if layout.head_norms is not None and layout.head_norms.kind == "joint":
        steps.append(
            JointHeadNorms(tensors["q_norm"], tensors["k_norm"], build.epsilon, build.ranks)
        )
    if layout.cache_source is None and (layout.values.is_normed or layout.values.dim is not None):
        steps.append(WidenValues(layout, build.epsilon))
    return steps


def _make_query_key_step(
    layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder
) -> QueryKeyStep:
    """Return the step that rotates queries, and stores keys and values where the layer has them."""
    scales = head_norm_scales(layout, tensors, build)
    if layout.cache_source is not None:
        return RotateQueries(scales, build.epsilon, layout.num_heads)
    return RotateAndStore(build.kernels, scales, build.epsilon, layout.num_heads)


def _make_query_steps(
    layout: GqaLayout, tensors: BlockTensors, build: LayerBuilder
) -> list[QueryStep]:
    """Return the changes of rotated queries."""
    steps: list[QueryStep] = []
    if layout.head_norms is not None and layout.head_norms.kind == "rotated":
        steps.append(RotatedNormScales(tensors["q_norm"], tensors["k_norm"], build.dtype))
    if layout.rotation.query_growth is not None:
        steps.append(QueryGrowth(*layout.rotation.query_growth))
    return steps


class LatentAttention:
    """One layer's attention over a paged cache of latent vectors, in the absorbed form."""

    def __init__(self, layout: LatentLayout, tensors: BlockTensors, build: LayerBuilder) -> None:
        """The result of `down` is queries, or the input of `query`, followed by the latent part."""
        order = layout.rotary.order
        latent = layout.latent
        if order is not None:
            head_order = [*range(latent.nope_dim), *(latent.nope_dim + i for i in order)]
            query_matrix = "query" if "query" in tensors else "down"
            build.reorder(tensors, query_matrix, head_order, slice(layout.query_rows))
            build.reorder(tensors, "down", order, slice(-latent.rope_dim, None))
        self.latent = latent
        self.layout = layout
        self.scale = layout.scale
        native = build.kernels.native
        self.kernels = build.kernels
        self.query: tuple[Tensor, Projection] | None = None
        if "query" in tensors:
            self.query = tensors["query_norm"], build.unnormed_projection(tensors, "query")
        self.down = build.normed_projection(tensors, "down")
        self.latent_norm = tensors["latent_norm"]
        self.output = build.output_projection(tensors, "output")
        up = build.rounded_weight(tensors, "up")
        assert isinstance(up, Tensor)
        heads = up.view(layout.num_heads, latent.nope_dim + latent.value_dim, latent.rank)
        key_up = heads[:, : latent.nope_dim].contiguous()
        value_up = heads[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.key_up: HeadMatrices = key_up
        self.value_up: HeadMatrices = value_up
        if native is not None:
            self.key_up = native.pack(key_up.mT)
            self.value_up = native.pack(value_up.mT)

    def __call__(
        self, stream: Residual, rotary: RotaryRows, batch: ForwardBatch, cache: LayerCache
    ) -> Residual:
        """Return the stream [T, hidden] with this block added.

        The rows' latent vectors are stored first.
        """
        pages, *scales = cache.pools
        page_scales = scales[0] if scales else None
        query, latent = self._project_queries_and_latent(stream, batch)
        unrotated, rotated = torch.split(
            query, [self.latent.nope_dim, self.latent.rope_dim], dim=-1
        )
        rows = RotatedRows(rotary.cos, rotary.sin, rotary.positions, batch.kv_slots)
        rotated = self.kernels.latent_store(
            query=rotated,
            latent=latent,
            rows=rows,
            norm=self.latent_norm,
            epsilon=LATENT_EPSILON,
            pages=pages,
            scales=page_scales,
        )
        absorbed = apply_in_tiles(
            lambda rows: self.kernels.head_linear(rows, self.key_up), unrotated, batch.tile
        )
        plan = batch.plan[self.layout.heads]
        mixed = attend_windows(
            torch.cat((absorbed, rotated), dim=-1),
            batch,
            lambda rows: self.kernels.mla_attention(
                query=rows,
                pages=pages,
                plan=plan,
                rank=self.latent.rank,
                scale=self.scale,
                scales=page_scales,
            ),
        )
        mixed = mixed.view(-1, self.layout.num_heads, self.latent.rank)
        values = apply_in_tiles(
            lambda rows: self.kernels.head_linear(rows, self.value_up), mixed, batch.tile
        )
        return self.output(values.flatten(1), batch, stream)

    def _project_queries_and_latent(
        self, stream: Residual, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Return queries [T, H, N + R], neither rotated nor absorbed, and latent vectors and keys
        [T, L + R].
        """
        latent_width = self.latent.rank + self.latent.rope_dim
        down = self.down(stream, batch)
        query = down[:, :-latent_width]
        latent = down[:, -latent_width:]
        if self.query is not None:
            norm, product = self.query
            rows = normalize_stream(Residual(query), norm, LATENT_EPSILON, self.kernels)
            query = product(Residual(rows), batch)
        return query.reshape(query.shape[0], self.layout.num_heads, -1), latent


def _order_gates_last(layout: GqaLayout) -> list[int]:
    """Return the stored index of each row in the order queries, keys, values, gates.

    In the checkpoint each head's gates follow its queries.
    """
    size = layout.head_dim
    heads = layout.num_heads
    starts = [2 * size * head for head in range(heads)]
    end_of_queries = 2 * size * heads
    keys_and_values = range(end_of_queries, end_of_queries + 2 * layout.num_kv_heads * size)
    queries = [start + i for start in starts for i in range(size)]
    return [*queries, *keys_and_values, *(row + size for row in queries)]
