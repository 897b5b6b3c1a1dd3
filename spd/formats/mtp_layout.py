"""MTP heads: which tensors a family's multi-token-prediction modules are made of.

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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spd.formats.model_config import MAX_LAYERS


@dataclass(frozen=True)
class MtpFamily:
    """One family's names and conventions. In names, {i} counts modules, {l} layers after the target's."""

    name: str
    architectures: tuple[str, ...]
    layer: str  # what stands before the decoder layer's own names
    glue: Mapping[str, str] = field(hash=False)
    """`token_norm`, `state_norm` [hidden], `projection` [hidden, 2 * hidden], and `final_norm`, without which
    the head reads the layer's output as it is."""
    tables: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The head's own copies of `embedding` and `head`, where the family writes them."""
    hidden_first: bool = False  # in the projection's columns; else the embedding comes first
    masks_first: bool = True  # the embedding is zero where the rotary position is 0
    recycles_normed: bool = True  # what goes on: after the final norm, or before it
    centred_norms: bool = False  # scales are stored as their distance from 1
    like_layer: int = -1  # which of the target's layers a module's layer is like
    slides: bool = False  # of those that slide, with a dense MLP, whatever the target's have there

    @property
    def numbers_layers(self) -> bool:
        """Whether modules are numbered on from the target's layers."""
        return "{l}" in self.layer


def _family(name: str, of: str, layer: str, glue: str, prefix: str = "", **own: Any) -> MtpFamily:
    """A family of classes, without ForCausalLM; prefix: of the glue's names, where it is not the layer's."""
    classes = tuple(f"{each}ForCausalLM" for each in of.split())
    names = (f"{prefix or layer}{each}.weight" for each in glue.split())
    keys = ("token_norm", "state_norm", "projection", "final_norm")
    return MtpFamily(name, classes, layer, dict(zip(keys, names, strict=False)), **own)


_NEXT = "model.layers.{l}."
_NORMS = "enorm hnorm eh_proj "
_COPIES = {"embedding": f"{_NEXT}embed_tokens.weight", "head": f"{_NEXT}shared_head.head.weight"}
_deepseek = partial(_family, layer=_NEXT, glue=_NORMS + "shared_head.norm", tables=_COPIES)
_OUTPUT = {"head": f"{_NEXT}transformer.shared_head.output.weight"}
_step3 = partial(_family, layer=_NEXT, glue=_NORMS + "transformer.shared_head.norm", tables=_OUTPUT)
_MIMO = "token_layernorm hidden_layernorm input_proj final_layernorm"
_ernie = partial(
    _family, glue="mtp_emb_norm.{i} mtp_hidden_norm.{i} mtp_linear_proj.{i}", prefix="model."
)
_NUMBERED = "mtp.layers.{i}."
_OUTER = "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"
_mtp = partial(_family, layer=_NUMBERED, glue=_OUTER, prefix="mtp.", masks_first=False)
_ends = partial(_family, glue=_NORMS + "final_layernorm", masks_first=False)

FAMILIES = (
    _deepseek("deepseek", "DeepseekV3"),
    _deepseek("glm4", "Glm4Moe Glm4MoeLite", recycles_normed=False),
    _family("mimo", "MiMo", "model.mtp_layers.{i}.", _MIMO, hidden_first=True),
    _ends("mimo_v2", "MiMoV2Flash", "model.mtp.layers.{i}.", slides=True),
    _step3("step3", "Step3p5", masks_first=False, centred_norms=True, slides=True),
    _ernie(
        "ernie",
        "Ernie4_5_Moe Ernie4_5_",
        "model.mtp_block.{i}.",
        recycles_normed=False,
        like_layer=0,
    ),
    _mtp("mtp", ""),
    _mtp("qwen3_next", "Qwen3Next Qwen3_5 Qwen3_5Moe", centred_norms=True),
    _ends("nemotron_h", "NemotronH", _NUMBERED),
)
"""Families that write the same names differ in conventions: the target's architecture decides among them,
and the first one stands for architectures that none lists. Source: the published checkpoints' indices and
the forward passes of vLLM and SGLang."""

_MODULE = re.compile(r"(?:language_model\.|model\.)*(?:mtp\.|mtp_[a-z_]+\.)")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


@dataclass(frozen=True)
class MtpLayout:
    """An MTP head as it stands in one checkpoint: its family, how many modules, and where they begin."""

    family: MtpFamily
    modules: int
    first_layer: int  # the {l} of module 0; of use where the family numbers layers

    def named(self, template: str, module: int) -> str:
        return template.format(i=module, l=self.first_layer + module)

    def layer_prefix(self, module: int) -> str:
        """What stands before the names of a module's decoder layer."""
        return self.named(self.family.layer, module)

    def owns(self, name: str) -> bool:
        """Whether a tensor lies inside this head, known or not."""
        if self.family.numbers_layers:
            return is_mtp_tensor(name, self.first_layer)
        return _MODULE.match(name) is not None

    def words(self) -> str:
        modules = f"{self.modules} module" + ("s" if self.modules > 1 else "")
        return f"{self.family.name} layout, {modules} at {self.layer_prefix(0)}*"


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Whether a tensor beside a target's `num_layers` layers belongs to an MTP head."""
    layer = _LAYER.match(name)
    return int(layer[1]) >= num_layers if layer else _MODULE.match(name) is not None


def find_mtp(architecture: str, names: Collection[str], num_layers: int) -> MtpLayout | None:
    """The MTP head among tensors beside a target's `num_layers`, complete or not; None: no trace of one."""
    own = [family for family in FAMILIES if architecture in family.architectures]
    by_names: dict[str, MtpFamily] = {}
    for family in (*own, *FAMILIES):
        by_names.setdefault(family.glue["projection"], family)
    for family in by_names.values():
        stems = (*family.glue.values(), family.layer)
        pattern = re.compile(
            "|".join(re.sub(r"\\\{[il]\\\}", r"([0-9]{1,9})", re.escape(stem)) for stem in stems)
        )
        matches = [match for name in names if (match := pattern.match(name))]
        numbers = {int(match[match.lastindex]) if match.lastindex else 0 for match in matches}
        first = num_layers if family.numbers_layers else 0
        if found := {number for number in numbers if first <= number < MAX_LAYERS}:
            return MtpLayout(family, max(found) - first + 1, first)
    return None
