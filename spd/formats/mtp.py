"""MTP heads: which tensors a family's multi-token-prediction modules are made of, and how they are read.

A module m holds, for each slot t (the position of token t), the pair (token t, state at slot t - 1) and
predicts token t + 1. Its state stream is made of stream m: stream 0 is the target's hidden states after
the final norm, stream m + 1 what module m puts out. One decoder layer lies between:

    x = projection([norm(embedding of token t) ; norm(state at t - 1)])      either may come first
    y = layer(x)                     as the target's last layer; rotary position t - 1 - m
    logits = head(final norm(y))     what goes on is y before that norm, or after it

Heads are found by the names of their tensors: configurations of quantized copies often say otherwise.
Nothing is ever made up: a head is complete, or it is refused with the names of what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import Checkpoint, check_tensors
from spd.formats.json_file import Fields, listed, read_json_object
from spd.formats.model_config import FILE_NAME, MAX_LAYERS

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of `config.json` that say how many modules a head has."""


@dataclass(frozen=True)
class MtpFamily:
    """One family's names and conventions. In names, {i} counts modules, {l} layers after the target's."""

    name: str
    architectures: tuple[str, ...]
    token_norm: str
    hidden_norm: str
    projection: str  # [hidden, 2 * hidden]
    final_norm: str | None  # None: the head reads the layer's output as it is
    layer: str  # what stands before the decoder layer's own names
    embedding: str | None = None  # the head's own copies, where the family writes them
    head: str | None = None
    hidden_first: bool = False  # in the projection's columns; else the embedding comes first
    masks_first: bool = True  # the embedding is zero where the rotary position is 0
    recycles_normed: bool = True  # what goes on: after the final norm, or before it
    centred_norms: bool = False  # scales are stored as their distance from 1
    like_layer: int = -1  # which of the target's layers a module's layer is like

    @property
    def numbers_layers(self) -> bool:
        """Whether modules are numbered on from the target's layers."""
        return "{l}" in self.layer

    def masked(self, position: int, module: int) -> bool:
        """Whether a module's embedding is zero in the row at this rotary position; alike in all modules."""
        return self.masks_first and position == 0


def _deepseek(name: str, architectures: tuple[str, ...], *, recycles_normed: bool) -> MtpFamily:
    prefix = "model.layers.{l}."
    return MtpFamily(
        name,
        architectures,
        token_norm=prefix + "enorm.weight",
        hidden_norm=prefix + "hnorm.weight",
        projection=prefix + "eh_proj.weight",
        final_norm=prefix + "shared_head.norm.weight",
        layer=prefix,
        embedding=prefix + "embed_tokens.weight",
        head=prefix + "shared_head.head.weight",
        recycles_normed=recycles_normed,
    )


def _qwen3_next(name: str, architectures: tuple[str, ...], *, centred_norms: bool) -> MtpFamily:
    return MtpFamily(
        name,
        architectures,
        token_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        final_norm="mtp.norm.weight",
        layer="mtp.layers.{i}.",
        masks_first=False,
        centred_norms=centred_norms,
    )


FAMILIES = (
    _deepseek("deepseek", ("DeepseekV3ForCausalLM",), recycles_normed=True),
    _deepseek("glm4", ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), recycles_normed=False),
    MtpFamily(
        "mimo",
        ("MiMoForCausalLM",),
        token_norm="model.mtp_layers.{i}.token_layernorm.weight",
        hidden_norm="model.mtp_layers.{i}.hidden_layernorm.weight",
        projection="model.mtp_layers.{i}.input_proj.weight",
        final_norm="model.mtp_layers.{i}.final_layernorm.weight",
        layer="model.mtp_layers.{i}.",
        hidden_first=True,
    ),
    MtpFamily(
        "ernie",
        ("Ernie4_5_MoeForCausalLM", "Ernie4_5_ForCausalLM"),
        token_norm="model.mtp_emb_norm.{i}.weight",
        hidden_norm="model.mtp_hidden_norm.{i}.weight",
        projection="model.mtp_linear_proj.{i}.weight",
        final_norm=None,
        layer="model.mtp_block.{i}.",
        recycles_normed=False,
        like_layer=0,
    ),
    _qwen3_next("mtp", (), centred_norms=False),
    _qwen3_next(
        "qwen3_next",
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        centred_norms=True,
    ),
)
"""Families that write the same names differ in conventions: the target's architecture decides among them,
and the first one stands for architectures that none lists. Source: the published checkpoints' indices and
the forward passes of vLLM and SGLang."""

_MODULE = re.compile(r"(?:language_model\.|model\.)*(?:mtp\.|mtp_[a-z_]+\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_QUANTIZED = (".weight_scale_inv", ".weight_scale", ".input_scale")


@dataclass(frozen=True)
class MtpLayout:
    """An MTP head as it stands in one checkpoint: its family, how many modules, and where they begin."""

    family: MtpFamily
    modules: int
    first_layer: int  # the {l} of module 0; of use where the family numbers layers
    own_embedding: bool = False  # whether the checkpoint holds copies beside the target's
    own_head: bool = False

    def named(self, template: str, module: int) -> str:
        """A name of the family's table for one module."""
        return template.format(i=module, l=self.first_layer + module)

    def layer_prefix(self, module: int) -> str:
        """What stands before the names of a module's decoder layer."""
        return self.named(self.family.layer, module)

    def owns(self, name: str) -> bool:
        """Whether a tensor lies inside this head, known or not."""
        layer = _LAYER.match(name) if self.family.numbers_layers else None
        return int(layer[1]) >= self.first_layer if layer else _MODULE.match(name) is not None

    def glue_tensors(self, module: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what surrounds a module's decoder layer."""
        family, vector = self.family, (hidden_size,)
        shapes = {
            self.named(family.token_norm, module): vector,
            self.named(family.hidden_norm, module): vector,
            self.named(family.projection, module): (hidden_size, 2 * hidden_size),
        }
        if family.final_norm is not None:
            shapes[self.named(family.final_norm, module)] = vector
        return shapes

    def copies(self, module: int, vocab_size: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the copies of embedding and head that a module's checkpoint may hold."""
        names = (self.family.embedding, self.family.head)
        return {self.named(name, module): (vocab_size, hidden_size) for name in names if name is not None}

    def words(self) -> str:
        """One line for people."""
        modules = f"{self.modules} module" + ("s" if self.modules > 1 else "")
        own = [
            name for name, is_own in (("embedding", self.own_embedding), ("head", self.own_head)) if is_own
        ]
        copies = f", copies of {' and '.join(own)}" if own else ""
        return f"{self.family.name} layout, {modules} at {self.layer_prefix(0)}*{copies}"


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor beside a target's `num_layers` layers belongs to an MTP head."""
    layer = _LAYER.match(name)
    return int(layer[1]) >= num_layers if layer else _MODULE.match(name) is not None


def find_mtp(architecture: str, names: Collection[str], num_layers: int | None) -> MtpLayout | None:
    """The MTP head among a checkpoint's tensor names, complete or not; None where there is no trace of one.

    num_layers: the target's; None in a folder that holds nothing but a head, where modules may be
    numbered from any layer on.
    """
    for family in _candidates(architecture):
        found = _modules(family, names, num_layers)
        if found:
            first = 0
            if family.numbers_layers:
                first = min(found) if num_layers is None else num_layers
            layout = MtpLayout(family, max(found) - first + 1, first)
            own = [
                copy is not None and layout.named(copy, 0) in names
                for copy in (family.embedding, family.head)
            ]
            return replace(layout, own_embedding=own[0], own_head=own[1])
    return None


def _candidates(architecture: str) -> list[MtpFamily]:
    """The families by likelihood: the architecture's own one first, of those with equal names one."""
    ordered = sorted(FAMILIES, key=lambda family: architecture not in family.architectures)
    return list({family.projection: family for family in reversed(ordered)}.values())[::-1]


def _modules(family: MtpFamily, names: Iterable[str], num_layers: int | None) -> set[int]:
    """Numbers of the modules that have any tensor; {l} where the family numbers layers, else {i}."""
    glue = [family.token_norm, family.hidden_norm, family.projection, family.layer]
    if num_layers is None:
        glue.pop()  # any layer would do
    sources = [re.escape(each).replace(r"\{l\}", r"(\d+)").replace(r"\{i\}", r"(\d+)") for each in glue]
    pattern = re.compile("|".join(sources))
    matches = [match for name in names if (match := pattern.match(name))]
    found = {int(match[match.lastindex]) if match.lastindex else 0 for match in matches}
    first = num_layers if family.numbers_layers and num_layers is not None else 0
    return {number for number in found if first <= number < MAX_LAYERS}


def declared_modules(folder: Path) -> int:
    """How many MTP modules `config.json` speaks of; 0 where it does not."""
    path = folder / FILE_NAME
    values = read_json_object(path)
    nested = values.get("text_config")
    for fields in (Fields(str(path), values), Fields(str(path), nested if isinstance(nested, dict) else {})):
        for key in COUNT_KEYS:
            if key in fields:
                return fields.integer(key, 0, MAX_LAYERS)
    return 0


def no_mtp(folder: Path, num_layers: int, declared: int) -> IncompatibleError:
    """The refusal of a checkpoint that has no MTP head, or lost the one that its configuration names."""
    reason = [f"no tensor such as model.layers.{num_layers}.eh_proj.weight, mtp.fc.weight or model.mtp_…"]
    if declared:
        reason.append(f"config.json speaks of {declared}: quantized copies are often written without them")
    return IncompatibleError(
        f"{folder}: holds no MTP layers",
        reason=reason,
        fix=_how_to_attach("--spec ngram"),
        code="no_mtp_head",
    )


def _how_to_attach(*others: str) -> list[str]:
    return [
        "--mtp HEAD with a folder that `spd convert-mtp ORIGINAL HEAD` made of the original checkpoint",
        *others,
    ]


def check_mtp(
    checkpoint: Checkpoint,
    layout: MtpLayout,
    hidden_size: int,
    vocab_size: int,
    layer_tensors: Mapping[str, tuple[int, ...]],
    dtypes: Collection[str],
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything that the head's modules need, seen to be there.

    layer_tensors: the shapes of one decoder layer by the names inside it. Raises `CheckpointError` that
    lists what is missing, of another shape or of another dtype, and tensors of the head nobody knows.
    """
    expected: dict[str, tuple[int, ...]] = {}
    ignored: set[str] = set()
    for module in range(layout.modules):
        prefix, copies = layout.layer_prefix(module), layout.copies(module, vocab_size, hidden_size)
        expected |= layout.glue_tensors(module, hidden_size)
        expected |= {prefix + name: shape for name, shape in layer_tensors.items()}
        expected |= {name: shape for name, shape in copies.items() if name in checkpoint.tensors}
        ignored.add(prefix + "self_attn.rotary_emb.inv_freq")
    fix = _how_to_attach("--spec ngram")
    check_tensors(checkpoint, expected, dtypes=tuple(dtypes), what="tensors of the MTP head", fix=fix)
    foreign = [
        name
        for name in checkpoint.tensors
        if layout.owns(name)
        and name not in expected
        and name not in ignored
        and not _is_scale(name, expected)
    ]
    if foreign:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(foreign)} tensors of the MTP head belong to none of its layers "
            f"as {layout.family.name} has them; first: {foreign[0]}",
            reason=listed(foreign),
            fix=["--spec ngram"],
        )
    return expected


def _is_scale(name: str, expected: Collection[str]) -> bool:
    """Whether a tensor holds the scales of a quantized one."""
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) + ".weight" in expected for suffix in _QUANTIZED
    )
