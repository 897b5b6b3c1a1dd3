"""Block drafters: configuration of a folder whose model drafts a block of tokens in one pass.

A block drafter reads its target's residual streams behind a few layers (`aux_layers`), side by
side. For each position P of the text that the target has read, they make the drafter's keys and
values of P in all of its layers:

    c = hidden_norm(fc(streams of P))
    k, v of layer i = k_norm(k_proj_i(c)), v_proj_i(c)             rotary position P

A pass runs a block of B rows at the positions behind that text: the embedding of the newest token,
then B - 1 times that of a mask token. They go through the layers of a Qwen3 model of the drafter's
numbers; each attends to those keys and to all rows of its block. The logits of row i > 0 are of the
token at that row's position; with `drafts_from_anchor` those of each row are of the token behind it.
Embedding and output head are the target's.

Layers that slide may attend to a block's earlier rows only (`sliding_sees_block`). Their window ends
at the row, or before the block for all of its rows (`window_precedes_block`).

The layers that are read are stated in the file and never guessed. In the dialect of the method's
authors an id is the index of the layer whose output is read; `aux_layers` counts the layers that a
stream has passed, which is one more. Source: the published drafters' configurations, and the forward
passes of the packages `dflash` and `speculators`.
"""

from __future__ import annotations

from dataclasses import dataclass

from spd.errors import CheckpointError
from spd.formats.json_file import Fields, display_text

ARCHITECTURE = "DFlashDraftModel"
KINDS = {ARCHITECTURE: "dflash"}
"""Kinds by the architectures that their authors' files name."""
UNSUPPORTED_ARCHITECTURES = ("DFlash2DraftModel",)
UNSUPPORTED_MODEL_TYPES = ("dflash", "dflash2", "dspark", "peagle", "xpress")
"""Values of speculators_model_type of drafters that are not supported."""
NAMES = {"dflash": "DFlash"}
"""The names of kinds in messages."""
MAX_BLOCK = 32
"""Rows of a block at most: those of one tile."""
MAX_AUX_LAYERS = 16
LAYER_PREFIX = "layers.{}."
CONTEXT_NORM = "hidden_norm.weight"


@dataclass(frozen=True)
class BlockConfig:
    """A block drafter's configuration beyond that of its layers."""

    kind: str
    block_size: int
    mask_token_id: int
    configured_layers: tuple[int, ...]
    """For each stream that is read, the number of layers that it has passed."""
    target_hidden_size: int
    target_layers: int | None
    """The number of the target's layers, where the file states it."""
    draft_vocab_size: int
    """The number of token ids that the drafter has logits for."""
    full_sees_block: bool = True
    """True if rows attend to all rows of their block in layers without a sliding window."""
    sliding_sees_block: bool = False
    """True if they do so in layers with a window."""
    drafts_from_anchor: bool = False
    """True if the first row, of the newest token, drafts too."""
    window_precedes_block: bool = False
    """True if a sliding window ends before the block for all of its rows."""
    may_read_last: bool = False
    """True if the stream behind the target's last layer may be read, without its final norm."""
    embedding_scale: float = 1.0
    """The factor of embeddings."""
    logit_scale: float = 1.0
    """The factor of logits, before they are capped."""
    logit_softcap: float | None = None

    @property
    def name(self) -> str:
        """Return the kind's name in messages."""
        return NAMES[self.kind]

    @property
    def max_drafts(self) -> int:
        """Return the tokens that a pass drafts."""
        return self.block_size - (not self.drafts_from_anchor)

    @property
    def num_aux_layers(self) -> int:
        """Return the number of streams that are read."""
        return len(self.configured_layers)

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        """Return, for each stream that is read, the number of layers that it has passed.

        Raises CheckpointError where the target has fewer layers.
        """
        last = target_layers - (not self.may_read_last)
        if max(self.configured_layers) > last:
            numbers = ", ".join(map(str, self.configured_layers))
            message = f"a {self.name} drafter that reads the streams behind {numbers} layers"
            message += " needs another target"
            reason = [f"the target has {target_layers} layers"]
            if not self.may_read_last:
                reason.append("behind the last one the authors' code reads the final norm's output")
            raise CheckpointError(message, reason=reason)
        return self.configured_layers


def read_block(fields: Fields) -> tuple[BlockConfig, Fields] | None:
    """Return a block drafter's configuration, and its layers' as a Qwen3's.

    None for another kind of model.
    """
    names = fields.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    speculators_type = fields.get("speculators_model_type")
    if speculators_type in UNSUPPORTED_MODEL_TYPES:
        reason = f"{display_text(speculators_type)}: drafters of this type are not supported"
        raise fields.field_error("speculators_model_type", reason)
    if name in UNSUPPORTED_ARCHITECTURES:
        reason = f"{display_text(name)}: drafters of this class are not supported"
        raise fields.field_error("architectures", reason)
    if name not in KINDS:
        return None
    return _read_authors_dialect(fields, KINDS[name])


def _read_authors_dialect(fields: Fields, kind: str) -> tuple[BlockConfig, Fields]:
    """Return the configuration in the keys of the method's authors."""
    nested = fields.optional_nested("dflash_config") or Fields(f"{fields.where}: dflash_config", {})

    def source(key: str) -> Fields:
        """Return the object that states a key: the nested one, or the outer one of older files."""
        return nested if key in nested or key not in fields else fields

    def number(key: str, default: float) -> float:
        """Return a factor; 0 where it may mean that there is none."""
        low = 1e-6 if default else 0.0
        return source(key).number(key, low, 1e6, default)

    target_layers = fields.optional_integer("num_target_layers", 1, 1024)
    layers = source("target_layer_ids")
    counts = tuple(layer + 1 for layer in _read_layers(layers, "target_layer_ids"))
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    is_causal = None
    if "is_causal" in fields:
        is_causal = fields.boolean("is_causal")
    config = BlockConfig(
        kind=kind,
        block_size=source("block_size").integer("block_size", 2, MAX_BLOCK, 16),
        mask_token_id=source("mask_token_id").integer("mask_token_id", 0, vocab_size - 1),
        configured_layers=counts,
        target_hidden_size=fields.integer("hidden_size", 1, 1 << 20),
        target_layers=target_layers,
        draft_vocab_size=vocab_size,
        full_sees_block=not is_causal,
        sliding_sees_block=is_causal is False,
        embedding_scale=number("input_embedding_scale", 1.0),
        logit_scale=number("output_multiplier", 1.0),
        logit_softcap=number("final_logit_softcapping", 0.0) or None,
    )
    return config, _qwen3_fields(fields)


def _read_layers(fields: Fields, key: str) -> list[int]:
    """Return a list of different layers."""
    reason = "is missing: it names the target's layers that the drafter reads, which vary"
    fields.require(bool(fields.get(key)), key, reason)
    layers = fields.integers(key, 0, 1024)
    reason = f"names more than {MAX_AUX_LAYERS} layers"
    fields.require(len(layers) <= MAX_AUX_LAYERS, key, reason)
    fields.require(
        len(set(layers)) == len(layers), key, f"{display_text(layers)} names a layer twice"
    )
    return layers


def _qwen3_fields(fields: Fields) -> Fields:
    """Return a drafter's layers as a Qwen3's configuration."""
    return fields.with_values(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": False,
            "bos_token_id": None,  # these ids are the target's
            "eos_token_id": None,
        }
    )
