"""How checkpoints store matrices in few bits: which modules, in which tensors, in which order of bits.

A scheme describes a stored matrix W [out, in]; nothing is computed here (`spd.runtime.load.packed_weights`
unpacks). Codes are packed into words low first. The header decides whether a matrix is quantized: lists of
what is not quantized often miss modules of an MTP head, or name fused ones, and are not read. The
configuration says how a matrix is stored.

- pack: `weight_packed` I32 [out, in * bits / 32], codes along in, value + 2**(bits - 1); `weight_scale`
  [out, groups]; `weight_zero_point` I32 [out * bits / 32, groups], codes along out. W = (q - z) * s.
- gptq: `qweight` I32 [in * bits / 32, out], codes along in; `qzeros` I32 [groups, out * bits / 32], codes
  along out, of zero - `offset`; `scales` [groups, out]; `g_idx` I32 [in], the group of each column of W.
- awq: `qweight` I32 [in, out / 8], `qzeros` I32 [groups, out / 8], in `AWQ_ORDER`; `scales` [groups, out].
- int8: `weight` I8 [out, in]; `weight_scale` [out, 1] or [1].
- fp8: `weight` F8_E4M3 [out, in]; `weight_scale`, a multiplier: [1], [out, 1], or one a block, the last ones
  partial. DeepSeek calls it `weight_scale_inv`.
- nvfp4: `weight_packed` U8 [out, in / 2], E2M1, even columns low; `weight_scale` F8_E4M3 [out, in / 16];
  `weight_global_scale` [1]: W = e2m1 * (scale / global). As ModelOpt writes it: `weight`, `weight_scale_2` =
  1 / global. mxfp4: the same with groups of 32 and `weight_scale` U8, the exponent + 127. gpt-oss packs all
  experts' in two tensors, which `tensor_names.unpack_experts` takes apart.

Source: compressed-tensors 0.20, AutoAWQ 0.2, AutoGPTQ and gptqmodel 7, NVIDIA ModelOpt, and published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from spd.errors import CheckpointError
from spd.formats.checkpoint import FLOAT_DTYPES, Shape, Shapes, TensorMetas
from spd.formats.json_file import Fields, display_text, json_key
from spd.formats.names import CONFIG_FILE
from spd.formats.pattern import Pattern, PatternError, StepBudget, Subject
from spd.formats.tensor_names import text_name

AWQ_ORDER = (
    0,
    4,
    1,
    5,
    2,
    6,
    3,
    7,
)  # which nibble of a word holds each of eight neighbouring columns
NVFP4_GROUP = 16
MXFP4_GROUP = 32
MAX_GROUP = 1 << 16
FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Where older tools wrote what `config.json` lacks, and their methods."""
SUPPORTED = "compressed-tensors, gptq, awq, modelopt, mxfp4, and fp8 with weight_block_size"
UNUSED = (
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
"""Scales of activations and caches, which stay in the run's dtype here; a shape that the model knows."""
PACKED = dict.fromkeys(("pack", "nvfp4", "mxfp4"), "weight_packed")
PACKED |= dict.fromkeys(("gptq", "awq"), "qweight")
"""By layout the tensor that holds the codes, where it is not `weight`."""
CODES = frozenset({"weight", *PACKED.values()})
MAX_PATTERN_CHARACTERS = 200_000  # of all patterns of a file; published ones have below 2,000
StoredTensor = tuple[
    tuple[Shape, ...], tuple[str, ...]
]  # the shapes that a tensor may have, and dtypes


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored, by GPTQ's keys. group: columns that share a scale, None for all of a row."""

    layout: str
    bits: int = field(metadata=json_key("bits", 2, 8))
    group_size: int | None = None
    symmetric: bool = field(default=True, metadata=json_key("sym"))
    block_rows: int | None = None  # of FP8 blocks
    offset: int = 0  # what stored zero points lack
    reordered: bool = field(
        default=False, metadata=json_key("desc_act")
    )  # columns of a group lie apart

    @property
    def codes_name(self) -> str:
        """The tensor that holds the codes, by its last name."""
        return PACKED.get(self.layout, "weight")

    @property
    def code_kind(self) -> Literal["int4", "int8", "e2m1", "e4m3"]:
        """What a code is when it is kept in memory."""
        if self.layout == "fp8":
            return "e4m3"
        if "fp4" in self.layout:
            return "e2m1"
        return "int4" if self.bits <= 4 else "int8"

    def tensors(self, shape: Shape) -> dict[str, StoredTensor]:
        """What stores a matrix of a shape [out, in], by last names."""
        rows, columns = shape
        groups = -(-columns // (self.group_size or columns))
        layout = self.layout
        words = ("I32",)
        across = -(-rows * self.bits // 32)
        along = -(-columns * self.bits // 32)
        half = (rows, columns // 2)
        per_group = (rows, groups)
        one = ((1,), (), (1, 1))
        found: dict[str, StoredTensor]
        if layout == "pack":
            found = {
                "weight_packed": (((rows, along),), words),
                "weight_scale": ((per_group,), FLOAT_DTYPES),
            }
            return (
                found
                if self.symmetric
                else found | {"weight_zero_point": (((across, groups),), words)}
            )
        if layout in ("gptq", "awq"):
            codes = (along, rows) if layout == "gptq" else (columns, across)
            found = {"qweight": ((codes,), words), "qzeros": (((groups, across),), words)}
            found["scales"] = ((groups, rows),), FLOAT_DTYPES
            return found if layout == "awq" else found | {"g_idx": (((columns,),), words)}
        if layout in ("int8", "fp8"):
            scales: tuple[Shape, ...] = (*one, (rows, 1), (rows,))
            if self.block_rows is not None:
                scales = ((-(-rows // self.block_rows), groups),)
            dtype = "I8" if layout == "int8" else "F8_E4M3"
            return {
                "weight": ((shape,), (dtype,)),
                "weight_scale": (scales, (*FLOAT_DTYPES, "F8_E8M0")),
            }
        if layout == "mxfp4":
            return {"weight_packed": ((half,), ("U8",)), "weight_scale": ((per_group,), ("U8",))}
        last = "weight_global_scale" if layout == "nvfp4" else "weight_scale_2"
        found = {self.codes_name: ((half,), ("U8",)), "weight_scale": ((per_group,), ("F8_E4M3",))}
        return found | {last: (one, FLOAT_DTYPES)}


class ModuleName:
    """The name of a module, in the forms that rules compare."""

    def __init__(self, name: str, budget: StepBudget) -> None:
        self.name = name
        self.budget = budget

    @cached_property
    def parents(self) -> tuple[str, ...]:
        """The modules that it lies in, itself included."""
        return tuple(accumulate(self.name.split("."), "{}.{}".format))

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Its name in a text model, and inside models that see images too."""
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
    """What a folder says of its quantized matrices: the first rule that holds for a module counts."""

    method: str
    rules: tuple[Rule, ...]
    where: str = CONFIG_FILE  # for messages
    _budget: StepBudget = field(default_factory=StepBudget, repr=False, compare=False)
    _schemes: dict[str, Scheme | None] = field(default_factory=dict, repr=False, compare=False)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return how a module's matrix is stored, by the first rule for it; None without one."""
        if module not in self._schemes:
            self._schemes[module] = self._first(ModuleName(module, self._budget))
        return self._schemes[module]

    def _first(self, module: ModuleName) -> Scheme | None:
        try:
            for rule in self.rules:
                self._budget.spend(1)
                if rule.applies_to(module):
                    return rule.scheme
        except PatternError:
            why = f"{len(self.rules):,} rules take too long to compare with {display_text(module.name)}"
            raise CheckpointError(f"{self.where}: {why}") from None
        return None

    def module_scheme(
        self, name: str, shape: Shape, tensors: TensorMetas
    ) -> tuple[str, Scheme] | None:
        """The module and the scheme of a matrix `name` by a checkpoint's headers; None: stored as it is."""
        module = name.removesuffix(".weight")
        stored = tensors.get(name)
        if (
            module == name
            or len(shape) != 2
            or (stored is not None and stored.dtype in FLOAT_DTYPES)
        ):
            return None
        scheme = self.scheme_of(module)

        def refuse(last: str, why: str) -> None:
            if (meta := tensors.get(f"{module}.{last}")) is not None:
                raise CheckpointError(f"{meta.shard}: tensor {display_text(meta.name)}: {why}")

        if scheme is None:
            for last in dict.fromkeys(PACKED.values()):
                refuse(last, "holds codes, but quantization_config has no scheme for it")
            return None
        if scheme.symmetric:
            refuse(
                "weight_zero_point",
                "a zero point, but quantization_config calls the weights symmetric",
            )
        if scheme.group_size and shape[1] % scheme.group_size and scheme.block_rows is None:
            refuse(
                scheme.codes_name, f"groups of {scheme.group_size} do not divide {shape[1]} columns"
            )
        return module, scheme

    def stored_tensors(
        self, expected: Shapes, tensors: TensorMetas
    ) -> tuple[dict[str, Shape], dict[str, tuple[str, ...]]]:
        """Names and shapes of what stores the expected tensors, and dtypes of those that are no floats."""
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, tuple[str, ...]] = {}
        for name, shape in expected.items():
            quantized = self.module_scheme(name, shape, tensors)
            if quantized is None:
                shapes[name] = shape
                continue
            module, scheme = quantized
            for last, (allowed, kinds) in scheme.tensors(shape).items():
                meta = tensors.get(f"{module}.{last}")
                there = meta is not None and meta.shape in allowed
                shapes[f"{module}.{last}"] = (
                    meta.shape if meta is not None and there else allowed[0]
                )
                dtypes[f"{module}.{last}"] = kinds
        return shapes, dtypes


def read_quantization(fields: Fields) -> Quantization | None:
    """What `config.json` says; None where nothing is quantized."""
    inner = fields.optional_nested("quantization_config")
    if inner is None:
        return None
    method = inner.text("quant_method", "None")
    advice = "use a copy in one of those, or the original with --quantize int8"
    why = (
        f"quantized weights ({display_text(method)}) are not supported ({SUPPORTED} are): {advice}"
    )
    known = method in _READERS and (method != "fp8" or "weight_block_size" in inner)
    fields.require(known, "quantization_config", why)
    return Quantization(method, tuple(_READERS[method](inner)), inner.where)


def with_quantization(fields: Fields, folder: Path) -> Fields:
    """`config.json` with what older tools wrote into a file of its own."""
    if "quantization_config" in fields or "compression_config" in fields:
        return fields
    name = next((name for name in FILES if (folder / name).is_file()), None)
    if name is None:
        return fields
    found = Fields.read(folder / name)
    inner = {"quant_method": FILES[name], **(found.optional_nested("quantization") or found).values}
    if inner["quant_method"] == "modelopt" and inner.get("quant_algo") is None:
        return fields
    return fields.with_values({"quantization_config": inner})


def _check_size(fields: Fields, key: str, size: int) -> None:
    """Refuse patterns of so many characters that reading them alone takes long."""
    why = f"its patterns have {size:,} characters, at most {MAX_PATTERN_CHARACTERS:,} are supported"
    fields.require(size <= MAX_PATTERN_CHARACTERS, key, why)


def _module(name: str) -> str:
    """A module's name in a text model."""
    return text_name(f"{name}.").rstrip(".")


def _compressed(fields: Fields) -> Iterator[Rule]:
    for key, what in (
        ("transform_config", "rotations of weights"),
        ("sparsity_config", "sparse weights"),
    ):
        inner = fields.optional_nested(key) or Fields(fields.where, {})
        used = inner.get("config_groups") or inner.get("format") not in (None, "dense")
        fields.require(not used, key, f"{what} are not supported: use a copy without them")
    fields.refuse_unsupported_values({"quantization_status": ("compressed",)})
    groups = fields.nested("config_groups")
    rules: list[Rule] = []
    size = 0
    for name in groups.values:
        rules.append(_group(groups.nested(name), fields))
        size += sum(len(pattern.text) for pattern in rules[-1].patterns)
        _check_size(fields, "config_groups", size)
    yield from rules
    yield from (
        Rule(rule.scheme, is_default=True) for rule in rules if not _CLASSES.isdisjoint(rule.names)
    )


FORMATS = tuple(
    f"{name}-quantized" for name in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack")
)
_CLASSES = {"Linear", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"}
"""Classes of modules that mean all of them, for only matrices are asked for."""
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
"""What compressed-tensors calls its layouts, and which weights share a scale."""


def _group(group: Fields, whole: Fields) -> Rule:
    """One of `config_groups`, whose targets are names or classes of modules, or `re:` and a pattern."""
    weights = group.nested("weights")
    bits = weights.integer("num_bits", 1, 16, 8)
    kind = weights.choice("type", ("int", "float"), "int")
    kept = group.choice("format", FORMATS, whole.text("format", FORMATS[0]))
    strategy = weights.choice("strategy", STRATEGIES, STRATEGIES[0])
    size = weights.optional_integer("group_size", -1, MAX_GROUP)
    symmetric = weights.boolean("symmetric", True)
    if (activations := group.optional_nested("input_activations")) is not None and kind == "int":
        eight = activations.integer("num_bits", 1, 16, 8) >= 8
        why = "activations of fewer than 8 bits are not supported: use a W4A16 copy"
        activations.require(eight, "num_bits", why)
    ordered = weights.get("actorder") in ("group", True)
    scheme = Scheme(
        "pack", bits, size if strategy == "group" else None, symmetric, reordered=ordered
    )
    if kept in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        scheme = Scheme(kept[:5], 4, NVFP4_GROUP if kept[:5] == "nvfp4" else MXFP4_GROUP)
    elif kind == "float":
        weights.require(
            bits == 8, "num_bits", f"{bits}: floats of 8 bits are supported in this format"
        )
        scheme = Scheme("fp8", 8)
        if strategy == "block":
            rows, columns = weights.integers("block_structure", 1, MAX_GROUP, 2)
            scheme = Scheme("fp8", 8, columns, block_rows=rows)
    elif kept != "pack-quantized":
        weights.require(
            bits == 8 and symmetric, "num_bits", "int-quantized weights are symmetric, of 8 bits"
        )
        scheme = Scheme("int8", 8)
    weights.require(scheme.bits <= 8, "num_bits", f"{bits} is more than 8")
    names = group.strings("targets")
    texts = [name[3:] for name in names if name.startswith("re:")]
    _check_size(group, "targets", sum(map(len, texts)))
    patterns = tuple(Pattern(text, f"{group.where}: targets") for text in texts)
    return Rule(scheme, frozenset(map(_module, names)), patterns)


def _size(fields: Fields) -> int | None:
    """Columns that share a scale; None for all of a row, which files write as -1."""
    size = fields.integer("group_size", -1, MAX_GROUP, 128)
    fields.require(size != 0, "group_size", "0 columns share no scale")
    return None if size < 0 else size


def _gptq(fields: Fields) -> Iterator[Rule]:
    kept = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.refuse_unsupported_values({"bits": (2, 3, 4, 8)})
    scheme = fields.read_dataclass(
        Scheme, Scheme("gptq", 4, offset=int(kept == "gptq")), group_size=_size(fields)
    )
    changes = fields.optional_nested("dynamic") or Fields(fields.where, {})
    _check_size(fields, "dynamic", sum(map(len, changes.values)))
    for pattern in changes.values:
        if pattern.startswith("-:"):  # which are not quantized
            continue
        own = changes.nested(pattern)
        other = own.read_dataclass(
            Scheme, scheme, group_size=_size(own) if "group_size" in own else scheme.group_size
        )
        where = f"{fields.where}: dynamic"
        yield Rule(other, patterns=(Pattern(pattern.removeprefix("+:"), where),))
    yield Rule(scheme, is_default=True)


def _awq(fields: Fields) -> Iterator[Rule]:
    fields = fields.with_canonical_keys({"bits": ("w_bit",), "group_size": ("q_group_size",)})
    fields.refuse_unsupported_values(
        {"version": ("gemm", "GEMM"), "bits": (4,), "zero_point": (True,)}
    )
    yield Rule(Scheme("awq", 4, _size(fields), symmetric=False), is_default=True)


_ALGORITHMS = {"FP8": Scheme("fp8", 8)}
_ALGORITHMS |= dict.fromkeys(("NVFP4", "W4A16_NVFP4"), Scheme("modelopt-nvfp4", 4, NVFP4_GROUP))


def _modelopt(fields: Fields) -> Iterator[Rule]:
    algorithm = fields.choice("quant_algo", (*_ALGORITHMS, "MIXED_PRECISION"))
    if algorithm != "MIXED_PRECISION":
        yield Rule(_ALGORITHMS[algorithm], is_default=True)
        return
    layers = fields.nested("quantized_layers")
    own = {
        _module(name): layers.nested(name).choice("quant_algo", _ALGORITHMS)
        for name in layers.values
    }
    for algorithm, scheme in _ALGORITHMS.items():
        yield Rule(scheme, frozenset(name for name in own if own[name] == algorithm))


_EXPERTS = Pattern(r".*\.experts\.", "gpt-oss")
_MXFP4 = Rule(
    Scheme("mxfp4", 4, MXFP4_GROUP), patterns=(_EXPERTS,)
)  # gpt-oss's: see `unpack_experts`
_FP8 = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
}


def _fp8(fields: Fields) -> Iterator[Rule]:
    """DeepSeek's blocks of rows and columns that share a scale."""
    fields.refuse_unsupported_values(_FP8)
    rows, columns = fields.integers("weight_block_size", 1, MAX_GROUP, 2)
    yield Rule(Scheme("fp8", 8, columns, block_rows=rows), is_default=True)


_READERS: dict[str, Callable[[Fields], Iterable[Rule]]] = {"mxfp4": lambda _: [_MXFP4], "fp8": _fp8}
_READERS |= {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt}
