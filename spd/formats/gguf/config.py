"""A GGUF file's metadata as Hugging Face's configuration says the same, for `model_config`.

Facts that no key says are read from the tensors: the vocabulary from the embedding, biases and a tied head
from what is there.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spd.errors import CheckpointError
from spd.formats.family_keys import CAUSAL
from spd.formats.gguf.architectures import ARCHITECTURES, KEYS, GgufArchitecture
from spd.formats.gguf.container import GgufFile, GgufScalar, GgufTensor, GgufValue
from spd.formats.json_file import Fields, listed, open_regular_file, os_errors, shown

MAX_FACTORS = 512
"""Numbers of a tensor of rotary factors: half a head."""
STILL = 1e29
"""Factors from here on divide an angle to nothing: its pair does not turn."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Return a file's architecture and how it is read. Raises CheckpointError for an unknown one, by name."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: general.architecture: is missing")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type: {shown(kind)} is not a model")
    if name not in ARCHITECTURES:
        why = f"{shown(name)} is not supported as GGUF ({', '.join(ARCHITECTURES)} are)"
        raise CheckpointError(f"{file.path}: general.architecture: {why}")
    return name, ARCHITECTURES[name]


def config_fields(file: GgufFile) -> Fields:
    """Return what the file says, in Hugging Face's keys; messages name the file's own."""
    name, row = architecture_of(file)
    keys = _Keys(file, name)
    values: dict[str, object] = {
        "architectures": [f"{row.model}ForCausalLM"],
        "model_type": CAUSAL[row.model].model_type,
        **row.facts,
    }
    called: dict[str, str] = {}
    for own, key in {**KEYS, **row.keys}.items():
        if (value := keys.plain(own)) is not None:
            values[key] = value
            called[key] = f"{name}.{own}"
    values |= _from_tensors(file, values)
    values |= _per_layer(keys, values)
    values |= _rotation(file, keys, row, values)
    values |= _tokens(file)
    values["dtype"] = _dtype(file)
    return Fields(str(file.path), values, called)


@dataclass(frozen=True)
class _Keys:
    """A file's keys of its architecture."""

    file: GgufFile
    architecture: str

    def get(self, key: str) -> GgufValue | None:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def plain(self, key: str) -> object:
        """Return a value as JSON would hold it; a number of 32 bits as the shortest decimal that means it."""
        value = self.get(key)
        if isinstance(value, tuple):
            return [_plain(each) for each in value if not isinstance(each, tuple)]
        return None if value is None else _plain(value)

    def whole(self, key: str) -> int | None:
        """Return a whole number; None without one."""
        value = self.get(key)
        return value if type(value) is int else None

    def number(self, key: str) -> float | None:
        """Return a number; None without one."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(_decimal(value))


def _plain(value: GgufScalar) -> GgufScalar:
    return _decimal(value) if isinstance(value, float) else value


def _decimal(value: float) -> float:
    """Return the shortest decimal whose nearest float32 is `value`: 1e-05 was stored as 9.99999974e-06."""
    for digits in range(6, 10):
        shorter = float(f"{value:.{digits}g}")
        if abs(shorter) < 3e38 and struct.unpack("<f", struct.pack("<f", shorter))[0] == value:
            return shorter
    return value


def _from_tensors(file: GgufFile, values: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that names and shapes of tensors say."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight': is missing")
    found: dict[str, object] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if "attention_bias" not in values:
        endings = (".attn_q.bias", ".attn_qkv.bias")
        found["attention_bias"] = any(name.endswith(endings) for name in file.tensors)
    if "mlp_bias" not in values:
        found["mlp_bias"] = any(name.endswith(".ffn_down.bias") for name in file.tensors)
    return found


def _per_layer(keys: _Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Return one number for what is listed by layers, their kinds, and how many stand before an MTP head."""
    found: dict[str, object] = {}
    heads = values.get("num_nextn_predict_layers", 0)
    blocks = values.get("num_hidden_layers")
    layers = blocks
    if type(heads) is int and type(blocks) is int and heads:
        found["num_hidden_layers"] = layers = blocks - heads
    if type(layers) is not int:
        return found
    slides = keys.get("attention.sliding_window_pattern")
    if isinstance(slides, tuple) and all(isinstance(each, bool | int) for each in slides):
        kinds = ("full_attention", "sliding_attention")
        found["layer_types"] = [kinds[bool(each)] for each in slides[:layers]]
    elif type(slides) is int:
        found["sliding_window_pattern"] = slides
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        each = values.get(key)
        if isinstance(each, list):
            found[key] = _usual(each[:layers])
    if values.get("sliding_window") == 0:
        found["sliding_window"] = None
    return found


def _usual(values: Sequence[object]) -> object:
    """Return the number of most layers that have one."""
    counts = Counter(value for value in values if type(value) is int and value > 0)
    return counts.most_common(1)[0][0] if counts else list(values)


def _rotation(
    file: GgufFile, keys: _Keys, row: GgufArchitecture, values: Mapping[str, object]
) -> dict[str, object]:
    """Return how positions turn: by factors of a tensor, or as keys say."""
    found: dict[str, object] = {}
    rotated = keys.whole("rope.dimension_count")
    width = values.get("head_dim")
    if "partial_rotary_factor" in CAUSAL[row.model].absent and rotated and type(width) is int:
        found["partial_rotary_factor"] = _share(rotated, width)
    scaling = _scaling(keys) | _factors(file, keys, values)
    if scaling:
        theta = values.get("rope_theta", 10_000.0)
        found["rope_parameters"] = {"rope_theta": theta, **scaling}
    return found


def _share(rotated: int, width: int) -> float:
    """Return the share of a head of so many elements that gives `rotated` again, rounded down."""
    share = rotated / width
    return share if int(width * share) == rotated else (rotated + 0.5) / width


def _scaling(keys: _Keys) -> dict[str, object]:
    """Return what keys say of stretched positions, in Hugging Face's words; empty without."""
    kind = keys.get("rope.scaling.type")
    factor = keys.number("rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        return {}
    found: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return found
    found["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for own, key in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),
    ):
        if (number := keys.number(f"rope.scaling.{own}")) is not None:
            found[key] = number
    return found


def _factors(file: GgufFile, keys: _Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Return what tensors of factors say, each of which divides an angle; empty without them."""
    context = values.get("max_position_embeddings")
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        numbers = read_numbers(file, tensor)
        if numbers[-1] > STILL and all(number == 1.0 or number > STILL for number in numbers):
            turned = sum(number == 1.0 for number in numbers)
            return {"rope_type": "proportional", "partial_rotary_factor": turned / len(numbers)}
        return {
            "rope_type": "longrope",
            "short_factor": numbers,
            "long_factor": numbers,
            "original_max_position_embeddings": context,
        }
    short = file.tensors.get("rope_factors_short.weight")
    long = file.tensors.get("rope_factors_long.weight")
    if short is None or long is None:
        return {}
    found: dict[str, object] = {
        "rope_type": "longrope",
        "short_factor": read_numbers(file, short),
        "long_factor": read_numbers(file, long),
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length")
        or context,
    }
    if (factor := keys.number("rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = factor
    return found


def read_numbers(file: GgufFile, tensor: GgufTensor) -> list[float]:
    """Return the numbers of a small tensor of float32."""
    if tensor.type.name != "F32" or tensor.nbytes > 4 * MAX_FACTORS:
        why = f"{tensor.type.name} {list(tensor.shape)} is not a list of up to {MAX_FACTORS} F32"
        raise CheckpointError(f"{tensor.path}: tensor {shown(tensor.name)}: {why}")
    with open_regular_file(tensor.path) as opened, os_errors(tensor.path):
        opened.seek(tensor.offset)
        data = opened.read(tensor.nbytes)
    if len(data) < tensor.nbytes:
        raise CheckpointError(f"{tensor.path}: changed while in use")
    return [_decimal(number) for number in struct.unpack(f"<{len(data) // 4}f", data)]


def _tokens(file: GgufFile) -> dict[str, object]:
    """Return the ids that begin and end a text."""
    found: dict[str, object] = {}
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS]
    if known := [each for each in ends if each is not None]:
        found["eos_token_id"] = list(dict.fromkeys(known))
    if (begin := file.metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        found["bos_token_id"] = begin
    return found


def _dtype(file: GgufFile) -> str:
    """Return the dtype of a run that nobody chose: as most matrices are stored, bfloat16 of packed ones."""
    stored: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            stored[tensor.type.name] += tensor.nbytes
    most = stored.most_common(1)[0][0] if stored else "BF16"
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def stored_types(file: GgufFile) -> dict[str, int]:
    """Return how many tensors there are of each type, most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.nbytes
    return {name: counts[name] for name, _ in sizes.most_common()}


def general_facts(file: GgufFile) -> dict[str, str]:
    """Return what `general.*` says in words of a person, a line each."""
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key.startswith("general.") and isinstance(value, str):
            found[key.removeprefix("general.")] = value
        elif key.startswith("general.") and isinstance(value, tuple):
            texts = [each for each in value if isinstance(each, str)]
            found[key.removeprefix("general.")] = ", ".join(listed(texts))
    return found
