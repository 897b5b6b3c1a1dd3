"""Block drafters: configuration of a folder whose model drafts a block of tokens in one pass.

A block drafter reads its target's residual streams behind a few layers (`aux_layers`), side by
side. For each position P of the text that the target has read, they make the drafter's keys and
values of P in all of its layers:

    c = hidden_norm(fc(streams of P))
    k, v of layer i = k_norm(k_proj_i(c)), v_proj_i(c)             rotary position P

A pass runs a block of B rows at the positions behind that text: the embedding of the newest token,
then B - 1 times that of a mask token. They go through the layers of a Qwen3 model of the drafter's
numbers; each attends to those keys and to all rows of its block. The logits of row i > 0 are of the
token at that row's position; with `drafts_from_anchor` those of each row are of the token after it.
Embedding and output head are the target's; a drafter of fewer ids has a head of its own, or uses
the target's rows of these ids, and target id = i + d2t[i].

DSpark adds to the logits of each draft a bias of the token x before it (`markov_head`), with h the
row's output and r the size of its embeddings:

    vanilla  w2(w1[x])        gated  w2(sigmoid(gate_proj([h ; w1[x]])) * w1[x])
    rnn      g, c, o = joint_proj([s ; w1[x] ; h]);  s = s * sigmoid(g) + tanh(c) * (1 - sigmoid(g))
             w2(tanh(o))                             s is 0 before the block's first row

DFlash 2 chooses each draft among the likeliest ids of its row: with x the token before it, the
score of id y is its logit + sum(predecessor[x] * hidden_projection(h) * successor[y]). Its layers
have convolutions over the rows of the block around attention and around the MLP; see
`ConvolutionLayout`.

DSpark's confidence head says how likely a draft is accepted. It changes no draft and is not run
here: the number of drafts follows what was accepted.

Layers that slide may attend to a block's earlier rows only (`sliding_sees_block`). Their window
ends at the row, or before the block for all of its rows (`window_precedes_block`).

Two dialects. The method's authors write DFlashDraftModel and `target_layer_ids`, indices of the
layers whose output is read; `aux_layers` counts the layers that a stream has passed, which is one
more. `speculators` writes speculators_model_type, the layers' configuration in
transformer_layer_config, and `aux_hidden_state_layer_ids`, which are such counts. The layers that
are read are stated in the file and never guessed. Source: the published drafters' configurations,
and the forward passes of the packages `dflash` and `speculators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spd.errors import CheckpointError
from spd.formats.json_file import Fields, display_text

BLOCK_ARCHITECTURE = "DFlashDraftModel"
KINDS = {BLOCK_ARCHITECTURE: "dflash", "DFlash2DraftModel": "dflash2"}
"""Kinds by the architectures that their authors' files name."""
MODEL_TYPES = ("dflash", "dflash2", "dspark")
"""Kinds by speculators_model_type."""
UNSUPPORTED_MODEL_TYPES = ("peagle", "xpress")
"""Values of speculators_model_type of drafters that are not supported."""
KIND_NAMES = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}
"""The names of kinds in messages."""
SELECTOR_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
"""A DFlash 2's values that `speculators` leaves out."""
MARKOV_TYPES = ("vanilla", "gated", "rnn")
QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
}
"""Values that transformers leaves out of a Qwen3's configuration."""
MAX_BLOCK = 32
"""Rows of a block at most: those of one tile."""
MAX_AUX_LAYERS = 16
"""Streams that a drafter may read."""
LAYER_PREFIX = "layers.{}."
CONTEXT_NORM = "hidden_norm.weight"
"""The norm behind `fc`."""


@dataclass(frozen=True)
class MarkovConfig:
    """A DSpark's bias of each draft's logits by the token before it."""

    kind: str
    """One of `MARKOV_TYPES`."""
    rank: int
    """Elements of a token's embedding."""


@dataclass(frozen=True)
class ConvolutionConfig:
    """A DFlash 2's convolutions over the rows of a block."""

    kernel: int
    """Rows that a result is made of: its own and those before it."""
    group: int
    """Elements that share a row's own factor."""


@dataclass(frozen=True)
class SelectorConfig:
    """A DFlash 2's choice among the likeliest tokens of each row."""

    rank: int
    """Elements of a token's vectors."""
    top_k: int
    """Candidates of a row."""


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
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None
    has_confidence: bool = False
    """True if there is a confidence head."""
    confidence_reads_token: bool = False
    """True if it reads the embedding of the token before a draft too."""

    @property
    def name(self) -> str:
        """Return the kind's name in messages."""
        return KIND_NAMES[self.kind]

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
    if speculators_type in MODEL_TYPES:
        return _read_speculators_dialect(fields, str(speculators_type))
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

    fields = _with_defaults(fields)
    target_layers = fields.optional_integer("num_target_layers", 1, 1024)
    layers = source("target_layer_ids")
    counts = tuple(layer + 1 for layer in _read_layer_numbers(layers, "target_layer_ids"))
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
    if kind == "dflash2":
        config = _with_selector(config, source, {})
    return config, _qwen3_fields(fields)


def _with_selector(
    config: BlockConfig, source: Callable[[str], Fields], defaults: Mapping[str, int]
) -> BlockConfig:
    """Return a DFlash 2's configuration with its convolutions and its selector.

    source: returns the object that states a key.
    """

    def integer(key: str, high: int) -> int:
        """Return a number from 1 to `high`."""
        return source(key).integer(key, 1, high, defaults.get(key))

    hidden_size = config.target_hidden_size
    group = integer("conv_group_size", hidden_size)
    reason = f"{group} does not divide hidden_size {hidden_size}"
    source("conv_group_size").require(hidden_size % group == 0, "conv_group_size", reason)
    return replace(
        config,
        convolution=ConvolutionConfig(integer("conv_kernel_size", config.block_size), group),
        selector=SelectorConfig(
            integer("selector_rank", 1 << 16), integer("selector_top_k", config.draft_vocab_size)
        ),
    )


def _read_speculators_dialect(fields: Fields, kind: str) -> tuple[BlockConfig, Fields]:
    """Return the configuration in the keys of `speculators`."""
    layer = fields.nested("transformer_layer_config")
    layer.refuse_unsupported_values({"model_type": ("qwen3", "llama")})
    if layer.get("model_type") != "llama":
        layer = _with_defaults(layer)
    vocab_size = layer.integer("vocab_size", 1, 1 << 24)
    hidden_size = layer.integer("hidden_size", 1, 1 << 20)
    is_dspark = kind == "dspark"
    markov = None
    has_confidence = is_dspark and fields.boolean("enable_confidence_head", True)
    if is_dspark and (rank := fields.integer("markov_rank", 0, 1 << 16, 256)):
        markov = MarkovConfig(fields.choice("markov_head_type", MARKOV_TYPES, "vanilla"), rank)
    config = BlockConfig(
        kind=kind,
        block_size=fields.integer("block_size", 2, MAX_BLOCK, 8),
        mask_token_id=fields.integer("mask_token_id", 0, vocab_size - 1),
        configured_layers=tuple(_read_layer_numbers(fields, "aux_hidden_state_layer_ids")),
        target_hidden_size=fields.optional_integer("target_hidden_size", 1, 1 << 20) or hidden_size,
        target_layers=None,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, vocab_size, min(32000, vocab_size)),
        sliding_sees_block=fields.boolean("sliding_window_non_causal", kind == "dflash2"),
        drafts_from_anchor=fields.boolean("sample_from_anchor", is_dspark),
        window_precedes_block=True,
        may_read_last=True,
        markov=markov,
        has_confidence=has_confidence,
        confidence_reads_token=markov is not None
        and fields.boolean("confidence_head_with_markov", True),
    )
    if kind == "dflash2":
        reason = f"{config.draft_vocab_size} is not the vocabulary's size {vocab_size}"
        has_all = config.draft_vocab_size == vocab_size
        fields.require(has_all, "draft_vocab_size", reason)
        config = _with_selector(config, lambda _: fields, SELECTOR_DEFAULTS)
    reason = f"{config.target_hidden_size} is not the drafter's hidden_size {hidden_size}"
    fields.require(config.target_hidden_size == hidden_size, "target_hidden_size", reason)
    dtypes = [source.get(key) for source in (layer, fields) for key in ("dtype", "torch_dtype")]
    dtype = {"torch_dtype": None, "dtype": next((dtype for dtype in dtypes if dtype), None)}
    return config, _qwen3_fields(layer.with_values(dtype))


def _read_layer_numbers(fields: Fields, key: str) -> list[int]:
    """Return a list of different layers' numbers."""
    reason = "is missing: it names the target's layers that the drafter reads, which vary"
    fields.require(bool(fields.get(key)), key, reason)
    layers = fields.integers(key, 0, 1024)
    reason = f"names more than {MAX_AUX_LAYERS} layers"
    fields.require(len(layers) <= MAX_AUX_LAYERS, key, reason)
    fields.require(
        len(set(layers)) == len(layers), key, f"{display_text(layers)} names a layer twice"
    )
    return layers


def _with_defaults(fields: Fields) -> Fields:
    """Return a Qwen3's configuration with the values that transformers leaves out."""
    values = {key: value for key, value in QWEN3_DEFAULTS.items() if key not in fields}
    return fields.with_values(values)


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
