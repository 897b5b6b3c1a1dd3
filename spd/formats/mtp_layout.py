"""MTP heads: the tensors of the multi-token-prediction modules of each family.

A module m reads, for each slot t (the position of token t), the pair (token t, state at slot t - 1)
and predicts token t + 1. Its states are those of stream m: stream 0 is the target's hidden states
after the final norm, stream m + 1 is the output of module m. One decoder layer lies between:

    x = projection([norm(embedding of token t) ; norm(state at t - 1)])      either may come first
    y = layer(x)                     as the target's last layer; rotary position t - 1 - m
    logits = head(final norm(y))     the output stream is y before that norm, or after it

Heads are found by the names of their tensors: the number in the configuration of a quantized copy
is often wrong. No tensor is made up: a head is complete, or it is refused with the names of the
missing ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from spd.formats.model_config import MAX_LAYERS


@dataclass(frozen=True)
class MtpFamily:
    """One family's names and conventions.

    In names, {i} counts modules, {l} layers after the target's.
    """

    name: str
    architectures: tuple[str, ...]
    layer_prefix: str
    """The beginning of the names of a module's decoder layer."""
    module_tensors: Mapping[str, str] = field(hash=False)
    """Names of `token_norm`, `state_norm` [hidden], `projection` [hidden, 2 * hidden], and
    `final_norm`; a family without the last has heads that read the layer's output without a norm."""
    private_tables: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names of the head's copies of `embedding` and `head`, where the family writes them."""
    hidden_first: bool = False
    """True if the projection's first columns are the state's, else the embedding's."""
    masks_first_embedding: bool = True
    """True if the embedding is zero where the rotary position is 0."""
    feeds_back_normed: bool = True
    """True if the state for the next module is taken after the final norm, else before it."""
    zero_centered_norms: bool = False
    """True if the scales of norms are stored as their distance from 1."""
    template_layer: int = -1
    """The index of the target's layer that a module's layer is like."""
    uses_sliding_window: bool = False
    """True if a module's layer is one of the target's with a sliding window, and its MLP is dense,
    whatever the MLP of the target's layers is."""

    @property
    def continues_layer_numbers(self) -> bool:
        """True if the numbers of modules go on from those of the target's layers."""
        return "{l}" in self.layer_prefix


_MODULE_TENSORS = ("token_norm", "state_norm", "projection", "final_norm")
"""Roles of a module's tensors outside its layer; a family may lack the last."""


def _tensor_names(prefix: str, stems: str) -> dict[str, str]:
    """Return the names of a module's norms and projection by their roles, in the roles' order."""
    names = (f"{prefix}{stem}.weight" for stem in stems.split())
    return dict(zip(_MODULE_TENSORS, names, strict=False))


def _class_names(names: str) -> tuple[str, ...]:
    """Return classes of architectures from their names without ForCausalLM."""
    return tuple(f"{name}ForCausalLM" for name in names.split())


_NEXT_LAYER = "model.layers.{l}."
_NORMS = "enorm hnorm eh_proj "
"""Most families' stems of the names of the first three roles."""
_deepseek_family = partial(
    MtpFamily,
    layer_prefix=_NEXT_LAYER,
    module_tensors=_tensor_names(_NEXT_LAYER, _NORMS + "shared_head.norm"),
    private_tables={
        "embedding": f"{_NEXT_LAYER}embed_tokens.weight",
        "head": f"{_NEXT_LAYER}shared_head.head.weight",
    },
)
_MIMO_LAYER = "model.mtp_layers.{i}."
_MIMO_TENSORS = "token_layernorm hidden_layernorm input_proj final_layernorm"
_MIMO_V2_LAYER = "model.mtp.layers.{i}."
_ERNIE_TENSORS = "mtp_emb_norm.{i} mtp_hidden_norm.{i} mtp_linear_proj.{i}"
_NUMBERED_LAYER = "mtp.layers.{i}."
_mtp_family = partial(
    MtpFamily,
    layer_prefix=_NUMBERED_LAYER,
    module_tensors=_tensor_names("mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
    masks_first_embedding=False,
)

MTP_FAMILIES = (
    _deepseek_family("deepseek", _class_names("DeepseekV3")),
    _deepseek_family("glm4", _class_names("Glm4Moe Glm4MoeLite"), feeds_back_normed=False),
    MtpFamily(
        "mimo",
        _class_names("MiMo"),
        _MIMO_LAYER,
        _tensor_names(_MIMO_LAYER, _MIMO_TENSORS),
        hidden_first=True,
    ),
    MtpFamily(
        "mimo_v2",
        _class_names("MiMoV2Flash"),
        _MIMO_V2_LAYER,
        _tensor_names(_MIMO_V2_LAYER, _NORMS + "final_layernorm"),
        masks_first_embedding=False,
        uses_sliding_window=True,
    ),
    MtpFamily(
        "step3",
        _class_names("Step3p5"),
        _NEXT_LAYER,
        _tensor_names(_NEXT_LAYER, _NORMS + "transformer.shared_head.norm"),
        private_tables={"head": f"{_NEXT_LAYER}transformer.shared_head.output.weight"},
        masks_first_embedding=False,
        zero_centered_norms=True,
        uses_sliding_window=True,
    ),
    MtpFamily(
        "ernie",
        _class_names("Ernie4_5_Moe Ernie4_5_"),
        "model.mtp_block.{i}.",
        _tensor_names("model.", _ERNIE_TENSORS),
        feeds_back_normed=False,
        template_layer=0,
    ),
    _mtp_family("mtp", ()),
    _mtp_family(
        "qwen3_next", _class_names("Qwen3Next Qwen3_5 Qwen3_5Moe"), zero_centered_norms=True
    ),
    MtpFamily(
        "nemotron_h",
        _class_names("NemotronH"),
        _NUMBERED_LAYER,
        _tensor_names(_NUMBERED_LAYER, _NORMS + "final_layernorm"),
        masks_first_embedding=False,
    ),
)
"""Families that write the same names differ in conventions: the target's architecture decides among
them, and the first one stands for architectures that none lists. Source: the published checkpoints'
indices and the forward passes of vLLM and SGLang."""

_MODULE = re.compile(r"(?:language_model\.|model\.)*(?:mtp\.|mtp_[a-z_]+\.)")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
"""The beginning of names of tensors in a module of its own name, and in a numbered layer."""


@dataclass(frozen=True)
class MtpLayout:
    """An MTP head as it is stored in one checkpoint."""

    family: MtpFamily
    modules: int
    """The number of modules."""
    first_layer: int
    """The {l} of module 0; unused where the family does not continue the target's layer numbers."""

    def tensor_name(self, template: str, module: int) -> str:
        """Return the name of a module's tensor.

        template: one of the family's names, with {i}, {l} or neither.
        """
        return template.format(i=module, l=self.first_layer + module)

    def layer_prefix(self, module: int) -> str:
        """Return the beginning of the names of a module's decoder layer."""
        return self.tensor_name(self.family.layer_prefix, module)

    def contains(self, name: str) -> bool:
        """True if the tensor of this name lies inside the head, read by a module or not."""
        if self.family.continues_layer_numbers:
            return is_mtp_tensor(name, self.first_layer)
        return _MODULE.match(name) is not None

    @property
    def description(self) -> str:
        """Return the family, the number of modules and their place, as a text for people."""
        plural = "s" if self.modules > 1 else ""
        modules = f"{self.modules} module{plural}"
        return f"{self.family.name} layout, {modules} at {self.layer_prefix(0)}*"


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """True if the tensor of this name is an MTP head's, of a target with `num_layers` layers."""
    layer = _LAYER.match(name)
    return int(layer[1]) >= num_layers if layer else _MODULE.match(name) is not None


def find_mtp_layout(architecture: str, names: Collection[str], num_layers: int) -> MtpLayout | None:
    """Find the MTP head, complete or not, among the names of a checkpoint's tensors.

    architecture, num_layers: the target's. Returns None without any tensor of a head. Modules are
    counted up to the one with the highest number.
    """
    of_architecture = [family for family in MTP_FAMILIES if architecture in family.architectures]
    by_projection: dict[str, MtpFamily] = {}
    for family in (*of_architecture, *MTP_FAMILIES):
        by_projection.setdefault(family.module_tensors["projection"], family)
    for family in by_projection.values():
        pattern = _name_pattern((*family.module_tensors.values(), family.layer_prefix))
        matches = [match for name in names if (match := pattern.match(name))]
        numbers = {int(match[match.lastindex]) if match.lastindex else 0 for match in matches}
        first = num_layers if family.continues_layer_numbers else 0
        modules = {number for number in numbers if first <= number < MAX_LAYERS}
        if modules:
            return MtpLayout(family, max(modules) - first + 1, first)
    return None


def _name_pattern(templates: Collection[str]) -> re.Pattern[str]:
    """Return the pattern of names that begin as one of some templates with {i} or {l}.

    Its groups are the numbers in those places.
    """
    escaped = (re.escape(template) for template in templates)
    return re.compile("|".join(re.sub(r"\\\{[il]\\\}", r"([0-9]{1,9})", stem) for stem in escaped))
