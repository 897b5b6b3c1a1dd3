"""Which matrices of a checkpoint are stored in few bits, and how: what `config.json` says.

`weight_schemes` describes the layouts; nothing is computed here (`spd.runtime.load.packed_weights`
unpacks). The header decides whether a matrix is quantized: lists of modules that are not quantized
often miss those of an MTP head, or name fused ones, and are not read. The configuration decides how
a matrix is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from spd.errors import CheckpointError
from spd.formats.checkpoint import FLOAT_DTYPES, Shape, Shapes, TensorMetas
from spd.formats.json_file import Fields, display_text
from spd.formats.names import CONFIG_FILE
from spd.formats.pattern import Pattern, PatternError, StepBudget, Subject
from spd.formats.tensor_names import text_name
from spd.formats.weight_schemes import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    PACKED_NAMES,
    SPD_GROUP,
    SPD_KINDS,
    Scheme,
)

MAX_GROUP = 1 << 16
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of older tools, which hold what `config.json` lacks, and their methods."""
SUPPORTED_METHODS = "compressed-tensors, gptq, awq, modelopt, mxfp4, and fp8 with weight_block_size"
UNUSED_SUFFIXES = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_shape",
    ".weight_g_idx",
)
"""Names of scales of activations and caches, which have the run's dtype here, and of shapes."""
MAX_PATTERN_CHARACTERS = 200_000
"""Characters of all patterns of a file; published files have below 2,000."""


class ModuleName:
    """The name of a module, in the forms that rules compare."""

    def __init__(self, name: str, budget: StepBudget) -> None:
        self.name = name
        self.budget = budget

    @cached_property
    def parents(self) -> tuple[str, ...]:
        """Return the names of the modules around it, its own included."""
        return tuple(accumulate(self.name.split("."), "{}.{}".format))

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Return its name in a text model, and inside models that see images too."""
        inner = self.name.removeprefix("model.")
        names = (self.name, f"model.language_model.{inner}", f"language_model.{self.name}")
        return tuple(Subject(name, self.budget) for name in names)


class Rule(NamedTuple):
    """How matrices are stored: all, or those of modules that are named, lie below one, or match."""

    scheme: Scheme
    names: frozenset[str] = frozenset()
    patterns: tuple[Pattern, ...] = ()
    is_default: bool = False

    def applies_to(self, module: ModuleName) -> bool:
        """True if the rule is for a module."""
        if self.is_default or (self.names and not self.names.isdisjoint(module.parents)):
            return True
        return any(
            pattern.matches(subject) for pattern in self.patterns for subject in module.subjects
        )


@dataclass(frozen=True)
class Quantization:
    """The rules for quantized matrices: the first one that applies to a module counts."""

    method: str
    rules: tuple[Rule, ...]
    where: str = CONFIG_FILE
    """For messages."""
    _budget: StepBudget = field(default_factory=StepBudget, repr=False, compare=False)
    _schemes: dict[str, Scheme | None] = field(default_factory=dict, repr=False, compare=False)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return how a module's matrix is stored, by the first rule for it; None without one."""
        if module not in self._schemes:
            self._schemes[module] = self._first_scheme(ModuleName(module, self._budget))
        return self._schemes[module]

    def _first_scheme(self, module: ModuleName) -> Scheme | None:
        """Return the scheme of the first rule for a module.

        Raises CheckpointError: no steps left.
        """
        try:
            for rule in self.rules:
                self._budget.spend(1)
                if rule.applies_to(module):
                    return rule.scheme
        except PatternError:
            name = display_text(module.name)
            reason = f"{len(self.rules):,} rules take too long to compare with {name}"
            raise CheckpointError(f"{self.where}: {reason}") from None
        return None

    def module_scheme(
        self, name: str, shape: Shape, tensors: TensorMetas
    ) -> tuple[str, Scheme] | None:
        """Return the module and the scheme of a matrix `name`; None where it is stored as floats.

        tensors: the checkpoint's headers. Raises CheckpointError where they contradict the scheme.
        """
        module = name.removesuffix(".weight")
        stored = tensors.get(name)
        is_float = stored is not None and stored.dtype in FLOAT_DTYPES
        if module == name or len(shape) != 2 or is_float:
            return None
        scheme = self.scheme_of(module)
        if scheme is None:
            reason = "holds codes, but quantization_config has no scheme for it"
            for last in dict.fromkeys(PACKED_NAMES.values()):
                _refuse_tensor(tensors, f"{module}.{last}", reason)
            return None
        if scheme.symmetric:
            reason = "a zero point, but quantization_config calls the weights symmetric"
            _refuse_tensor(tensors, f"{module}.weight_zero_point", reason)
        if scheme.group_size and shape[1] % scheme.group_size and scheme.block_rows is None:
            reason = f"groups of {scheme.group_size} do not divide {shape[1]} columns"
            _refuse_tensor(tensors, f"{module}.{scheme.codes_name}", reason)
        return module, scheme

    def stored_tensors(
        self, expected: Shapes, tensors: TensorMetas
    ) -> tuple[dict[str, Shape], dict[str, tuple[str, ...]]]:
        """Return shapes of the tensors that store the expected ones, and dtypes of quantized ones.

        tensors: the checkpoint's headers.
        """
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, tuple[str, ...]] = {}
        for name, shape in expected.items():
            quantized = self.module_scheme(name, shape, tensors)
            if quantized is None:
                shapes[name] = shape
                continue
            module, scheme = quantized
            for last, (allowed_shapes, allowed_dtypes) in scheme.tensors(shape).items():
                stored_name = f"{module}.{last}"
                meta = tensors.get(stored_name)
                shapes[stored_name] = allowed_shapes[0]
                if meta is not None and meta.shape in allowed_shapes:
                    shapes[stored_name] = meta.shape
                dtypes[stored_name] = allowed_dtypes
        return shapes, dtypes


def _refuse_tensor(tensors: TensorMetas, name: str, reason: str) -> None:
    """Raise CheckpointError with a reason if a checkpoint has a tensor."""
    meta = tensors.get(name)
    if meta is not None:
        raise CheckpointError(f"{meta.shard}: tensor {display_text(meta.name)}: {reason}")


def read_quantization(fields: Fields) -> Quantization | None:
    """Return the quantization in `config.json`; None without. Raises CheckpointError."""
    config = fields.optional_nested("quantization_config")
    if config is None:
        return None
    method = config.text("quant_method", "None")
    supported = f"({display_text(method)}) are not supported ({SUPPORTED_METHODS} are)"
    advice = "use a copy in one of those, or the original with --quantize int8"
    is_known = method in _RULE_READERS and (method != "fp8" or "weight_block_size" in config)
    reason = f"quantized weights {supported}: {advice}"
    fields.require(is_known, "quantization_config", reason)
    return Quantization(method, tuple(_RULE_READERS[method](config)), config.where)


def with_quantization(fields: Fields, folder: Path) -> Fields:
    """Return `config.json` with the quantization that older tools wrote into a separate file."""
    if "quantization_config" in fields or "compression_config" in fields:
        return fields
    name = next((name for name in QUANTIZATION_FILES if (folder / name).is_file()), None)
    if name is None:
        return fields
    file_fields = Fields.read(folder / name)
    inner = file_fields.optional_nested("quantization") or file_fields
    values = {"quant_method": QUANTIZATION_FILES[name], **inner.values}
    if values["quant_method"] == "modelopt" and values.get("quant_algo") is None:
        return fields
    return fields.with_values({"quantization_config": values})


def _check_pattern_size(fields: Fields, key: str, size: int) -> None:
    """Refuse patterns of so many characters that reading them alone takes long."""
    limit = f"at most {MAX_PATTERN_CHARACTERS:,} are supported"
    reason = f"its patterns have {size:,} characters, {limit}"
    fields.require(size <= MAX_PATTERN_CHARACTERS, key, reason)


def _module_name(name: str) -> str:
    """Return a module's name in a text model."""
    return text_name(f"{name}.").rstrip(".")


def _read_compressed_tensors(fields: Fields) -> Iterator[Rule]:
    """Yield the rules of compressed-tensors: its groups, then those of them for all modules."""
    for key, description in (
        ("transform_config", "rotations of weights"),
        ("sparsity_config", "sparse weights"),
    ):
        inner = fields.optional_nested(key) or Fields(fields.where, {})
        is_used = inner.get("config_groups") or inner.get("format") not in (None, "dense")
        reason = f"{description} are not supported: use a copy without them"
        fields.require(not is_used, key, reason)
    fields.refuse_unsupported_values({"quantization_status": ("compressed",)})
    groups = fields.nested("config_groups")
    rules: list[Rule] = []
    size = 0
    for name in groups.values:
        rules.append(_read_group(groups.nested(name), fields))
        size += sum(len(pattern.text) for pattern in rules[-1].patterns)
        _check_pattern_size(fields, "config_groups", size)
    yield from rules
    for rule in rules:
        if not _LINEAR_CLASSES.isdisjoint(rule.names):
            yield Rule(rule.scheme, is_default=True)


COMPRESSED_TENSORS_FORMATS = tuple(
    f"{name}-quantized" for name in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack")
)
"""Names of compressed-tensors' layouts."""
_LINEAR_CLASSES = {"Linear", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"}
"""Classes of modules that mean all modules: schemes are looked up for matrices only."""
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
"""Which weights share a scale."""


def _read_group(group: Fields, config: Fields) -> Rule:
    """Return the rule of one of `config_groups`.

    Its targets are names or classes of modules, or `re:` and a pattern. config: the fields around
    it.
    """
    weights = group.nested("weights")
    bits = weights.integer("num_bits", 1, 16, 8)
    number_type = weights.choice("type", ("int", "float"), "int")
    layout = group.choice(
        "format", COMPRESSED_TENSORS_FORMATS, config.text("format", COMPRESSED_TENSORS_FORMATS[0])
    )
    strategy = weights.choice("strategy", STRATEGIES, STRATEGIES[0])
    size = weights.optional_integer("group_size", -1, MAX_GROUP)
    symmetric = weights.boolean("symmetric", True)
    activations = group.optional_nested("input_activations")
    if activations is not None and number_type == "int":
        has_eight_bits = activations.integer("num_bits", 1, 16, 8) >= 8
        reason = "activations of fewer than 8 bits are not supported: use a W4A16 copy"
        activations.require(has_eight_bits, "num_bits", reason)
    scheme = Scheme(
        "pack",
        bits,
        size if strategy == "group" else None,
        symmetric,
        reordered=weights.get("actorder") in ("group", True),
    )
    if layout == "nvfp4-pack-quantized":
        scheme = Scheme("nvfp4", 4, NVFP4_GROUP)
    elif layout == "mxfp4-pack-quantized":
        scheme = Scheme("mxfp4", 4, MXFP4_GROUP)
    elif number_type == "float":
        reason = f"{bits}: floats of 8 bits are supported in this format"
        weights.require(bits == 8, "num_bits", reason)
        scheme = Scheme("fp8", 8)
        if strategy == "block":
            rows, columns = weights.integers("block_structure", 1, MAX_GROUP, 2)
            scheme = Scheme("fp8", 8, columns, block_rows=rows)
    elif layout != "pack-quantized":
        reason = "int-quantized weights are symmetric, of 8 bits"
        weights.require(bits == 8 and symmetric, "num_bits", reason)
        scheme = Scheme("int8", 8)
    weights.require(scheme.bits <= 8, "num_bits", f"{bits} is more than 8")
    return _make_rule(scheme, group.strings("targets"), group)


def _make_rule(scheme: Scheme, names: Sequence[str], fields: Fields) -> Rule:
    """Return the rule of modules by names, and by patterns behind `re:`."""
    texts = [name[3:] for name in names if name.startswith("re:")]
    _check_pattern_size(fields, "targets", sum(map(len, texts)))
    patterns = tuple(Pattern(text, f"{fields.where}: targets") for text in texts)
    return Rule(scheme, frozenset(map(_module_name, names)), patterns)


def _group_size(fields: Fields) -> int | None:
    """Return the columns that share a scale; None for all of a row, which files write as -1."""
    size = fields.integer("group_size", -1, MAX_GROUP, 128)
    fields.require(size != 0, "group_size", "0 columns share no scale")
    return None if size < 0 else size


def _read_gptq(fields: Fields) -> Iterator[Rule]:
    """Yield GPTQ's rules: those of `dynamic`, which change it for modules, then the default."""
    version = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.refuse_unsupported_values({"bits": (2, 3, 4, 8)})
    default = Scheme("gptq", 4, offset=int(version == "gptq"))
    default = fields.read_dataclass(Scheme, default, group_size=_group_size(fields))
    dynamic = fields.optional_nested("dynamic") or Fields(fields.where, {})
    _check_pattern_size(fields, "dynamic", sum(map(len, dynamic.values)))
    for pattern in dynamic.values:
        if pattern.startswith("-:"):  # modules that are not quantized
            continue
        changes = dynamic.nested(pattern)
        size = _group_size(changes) if "group_size" in changes else default.group_size
        scheme = changes.read_dataclass(Scheme, default, group_size=size)
        where = f"{fields.where}: dynamic"
        yield Rule(scheme, patterns=(Pattern(pattern.removeprefix("+:"), where),))
    yield Rule(default, is_default=True)


def _read_awq(fields: Fields) -> Iterator[Rule]:
    """Yield AWQ's rule for all modules."""
    fields = fields.with_canonical_keys({"bits": ("w_bit",), "group_size": ("q_group_size",)})
    fields.refuse_unsupported_values(
        {"version": ("gemm", "GEMM"), "bits": (4,), "zero_point": (True,)}
    )
    yield Rule(Scheme("awq", 4, _group_size(fields), symmetric=False), is_default=True)


_ALGO_SCHEMES = {"FP8": Scheme("fp8", 8)}
_ALGO_SCHEMES |= dict.fromkeys(("NVFP4", "W4A16_NVFP4"), Scheme("modelopt-nvfp4", 4, NVFP4_GROUP))


def _read_modelopt(fields: Fields) -> Iterator[Rule]:
    """Yield ModelOpt's rules: one for all modules, or one for the modules of each algorithm."""
    algorithm = fields.choice("quant_algo", (*_ALGO_SCHEMES, "MIXED_PRECISION"))
    if algorithm != "MIXED_PRECISION":
        yield Rule(_ALGO_SCHEMES[algorithm], is_default=True)
        return
    layers = fields.nested("quantized_layers")
    algorithms = {
        _module_name(name): layers.nested(name).choice("quant_algo", _ALGO_SCHEMES)
        for name in layers.values
    }
    for algorithm, scheme in _ALGO_SCHEMES.items():
        names = frozenset(name for name in algorithms if algorithms[name] == algorithm)
        yield Rule(scheme, names)


_GPT_OSS_EXPERTS = Pattern(r".*\.experts\.", "gpt-oss")
_MXFP4_RULE = Rule(Scheme("mxfp4", 4, MXFP4_GROUP), patterns=(_GPT_OSS_EXPERTS,))
_FP8_VALUES = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
}
"""Supported values of optional keys of DeepSeek's quantization."""


def _read_fp8(fields: Fields) -> Iterator[Rule]:
    """Yield DeepSeek's rule for all modules: blocks of rows and columns that share a scale."""
    fields.refuse_unsupported_values(_FP8_VALUES)
    rows, columns = fields.integers("weight_block_size", 1, MAX_GROUP, 2)
    yield Rule(Scheme("fp8", 8, columns, block_rows=rows), is_default=True)


def _read_mxfp4(fields: Fields) -> Iterator[Rule]:
    """Yield gpt-oss's rule for experts; see `unpack_experts`."""
    yield _MXFP4_RULE


def _read_spd(fields: Fields) -> Iterator[Rule]:
    """Yield a rule for each number of bits: names of modules, or `re:` and a pattern."""
    modules = fields.nested("modules")
    for bits in SPD_KINDS:
        yield _make_rule(Scheme("spd", bits, SPD_GROUP), modules.strings(f"{bits}"), modules)


_RULE_READERS: dict[str, Callable[[Fields], Iterable[Rule]]] = {
    "mxfp4": _read_mxfp4,
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "modelopt": _read_modelopt,
    "spd": _read_spd,
}
"""Functions that read the rules of a quantization, by its `quant_method`."""
