"""The model of a block drafter: rows of a block in, their states out, over keys of its target's
states.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spd.formats.block import BlockConfig
from spd.kernels.attention.rotary_store import RotatedRows
from spd.runtime.layers.base import ForwardBatch, LayerCache, Residual
from spd.runtime.models.attention import Attention
from spd.runtime.models.attention_steps import RotateAndStore, select_rotary
from spd.runtime.models.block_refiners import CandidateSelector, MarkovHead, Refiner
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.decoder import Decoder, DecoderParts, spread_logits


class BlockModel(Decoder):
    """A decoder whose cache has entries of its target's states, and of the block that is run.

    Embedding and head are the target's; logits are over the target's ids.
    """

    def __init__(
        self, block: BlockConfig, parts: DecoderParts, build: LayerBuilder, ids: Tensor | None
    ) -> None:
        """parts.tables: `context`, the matrices of keys and values of all layers, in turn.

        ids: the target's id of each of the drafter's, int64 and ascending; None where they are the
        same.
        """
        super().__init__(parts, build)
        self.block = block
        self.ids = ids
        tables = parts.tables
        self.context = build.projection(tables.pop("context"), tables.get("context_bias"))
        self.refiner: Refiner | None = None
        """Changes the logits of drafts by the tokens before them, where the drafter does so."""
        if block.markov is not None:
            self.refiner = MarkovHead(block, tables, build, ids)
        elif block.selector is not None:
            self.refiner = CandidateSelector(block, tables)
        self.key_scales: list[Tensor] = []
        """The scales [K, D] of the norms of keys, by layer."""
        for layer in self.layers:
            assert isinstance(layer.attention, Attention)
            step = layer.attention.query_key_step
            assert isinstance(step, RotateAndStore) and step.scales is not None
            self.key_scales.append(step.scales[step.num_heads :].contiguous())

    def store_context(
        self, states: Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> None:
        """Write the entries of a batch's rows to the caches of all layers.

        states: the target's states [T, hidden] of the rows.
        """
        rows = self.context(Residual(states), batch)
        rotary = self.rotary_rows(batch)
        parts = rows.chunk(len(self.layers), 1)
        for layer, cache, part, scales in zip(
            self.layers, caches, parts, self.key_scales, strict=True
        ):
            assert isinstance(layer.attention, Attention)
            angles = select_rotary(rotary, layer.attention.layout.rotation)
            self.kernels.rotary_store(
                qkv=part.contiguous(),
                rows=RotatedRows(angles.cos, angles.sin, angles.positions, batch.kv_slots),
                qk_weight=scales,
                epsilon=self.epsilon,
                pools=cache.keys_and_values,
                num_heads=0,
            )

    def logits(self, hidden: Tensor, tile: int) -> Tensor:
        """Return float32 logits [T, V], minus infinity for ids that the drafter does not have."""
        return spread_logits(super().logits(hidden, tile), self.ids, self.vocab_size)
