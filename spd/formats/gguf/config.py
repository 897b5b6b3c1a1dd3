"""A GGUF file's metadata as Hugging Face's configuration says the same, for `model_config`.

Facts that no key says are read from the tensors: the vocabulary from the embedding, biases and a tied head
from what is there, what a layer is from its names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from spd.errors import CheckpointError
from spd.formats.assistant import ARCHITECTURES as ASSISTANTS
from spd.formats.family_keys import CAUSAL
from spd.formats.gguf.architectures import ARCHITECTURES, KEYS, GgufArchitecture
from spd.formats.gguf.container import GgufFile
from spd.formats.gguf.derived import DERIVED
from spd.formats.gguf.keys import FULL, SLIDING, Keys, usual
from spd.formats.gguf.rotation import rotation
from spd.formats.json_file import Fields, abbreviate, display_text

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Return a file's architecture and how it is read. Raises CheckpointError for an unknown one, by name."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: general.architecture: is missing")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type: {display_text(kind)} is not a model")
    if name not in ARCHITECTURES:
        why = f"{display_text(name)} is not supported as GGUF ({', '.join(ARCHITECTURES)} are)"
        raise CheckpointError(f"{file.path}: general.architecture: {why}")
    return name, ARCHITECTURES[name]


def config_fields(file: GgufFile) -> Fields:
    """Return what the file says, in Hugging Face's keys; messages name the file's own."""
    name, row = architecture_of(file)
    keys = Keys(file, name)
    model = _class_of(keys, row)
    values: dict[str, object] = {
        "architectures": [f"{model}ForCausalLM"],
        "model_type": CAUSAL[model].model_type,
        "sliding_window": None,
        **row.facts,
    }
    called: dict[str, str] = {}
    for own, key in {**KEYS, **row.keys}.items():
        value = keys.plain(own)
        if key is not None and value is not None:
            values[key] = value
            called[key] = f"{name}.{own}"
    values |= _from_tensors(keys, values)
    values |= _per_layer(keys, row, values)
    values |= rotation(keys, model, values)
    values |= _tokens(file)
    values["dtype"] = _dtype(file)
    if name in DERIVED:
        values |= DERIVED[name](keys, values)
    if row.around is not None:
        values = _wrapped(keys, row.around, values)
    return Fields(str(file.path), values, called)


def _wrapped(keys: Keys, outer: str, text: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration of an assistant around that of its layers."""
    return {
        "architectures": [outer],
        "model_type": ASSISTANTS[outer],
        "backbone_hidden_size": keys.plain("embedding_length_out"),
        "text_config": dict(text),
        "dtype": text["dtype"],
    }


def _class_of(keys: Keys, row: GgufArchitecture) -> str:
    """Return the class of Hugging Face that a file's model is one of."""
    endings = {key: f".{key}" for key in row.variants}
    for key, model in row.variants.items():
        named = (f"{endings[key]}.weight", endings[key])
        if keys.get(key) or any(name.endswith(named) for name in keys.file.tensors):
            return model
    return row.model


def _from_tensors(keys: Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that names and shapes of tensors say."""
    tensors = keys.file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{keys.file.path}: tensor 'token_embd.weight': is missing")
    found: dict[str, object] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for key, endings in (
        ("attention_bias", (".attn_q.bias", ".attn_qkv.bias")),
        ("mlp_bias", (".ffn_down.bias",)),
        ("use_qk_norm", (".attn_q_norm.weight",)),
        ("mamba_conv_bias", (".ssm_conv1d.bias",)),
    ):
        if key not in values:
            found[key] = any(name.endswith(endings) for name in tensors)
    return found


def _per_layer(
    keys: Keys, row: GgufArchitecture, values: Mapping[str, object]
) -> dict[str, object]:
    """Return one number for what is listed by layers, their kinds, and how many stand before an MTP head."""
    found: dict[str, object] = {}
    heads = values.get("num_nextn_predict_layers", 0)
    layers = values.get("num_hidden_layers")
    if type(heads) is int and type(layers) is int and heads:
        found["num_hidden_layers"] = layers = layers - heads
    if type(layers) is not int or not 0 < layers <= keys.MAX_LAYERS:
        return found
    slides = keys.get("attention.sliding_window_pattern")
    if isinstance(slides, tuple) and all(isinstance(each, bool | int) for each in slides):
        found["layer_types"] = [SLIDING if each else FULL for each in slides[:layers]]
    elif type(slides) is int:
        found["sliding_window_pattern"] = slides
    if row.recurs is not None:
        found["layer_types"] = [_kind(keys, row, layer) for layer in range(layers)]
    if "num_experts" in values:
        routed = [keys.has(layer, "ffn_gate_inp.weight") for layer in range(layers)]
        found["mlp_layer_types"] = ["sparse" if each else "dense" for each in routed]
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        each = values.get(key)
        if isinstance(each, list):
            found[key] = usual(each[:layers])
    if values.get("sliding_window") == 0:
        found["sliding_window"] = None
    return found


def _kind(keys: Keys, row: GgufArchitecture, layer: int) -> str:
    """Return what `layer_types` calls a layer, by the tensors that it has."""
    assert row.recurs is not None
    if keys.has(layer, "ssm_conv1d.weight") or keys.has(layer, "shortconv.conv.weight"):
        return row.recurs
    if not row.single or keys.has(layer, "attn_output.weight"):
        return FULL
    return "moe" if keys.has(layer, "ffn_gate_inp.weight") else "mlp"


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
    """Return the dtype of a run without a chosen one: most matrices' own, bfloat16 of packed ones."""
    stored: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            stored[tensor.type.name] += tensor.nbytes
    most = stored.most_common(1)[0][0] if stored else "BF16"
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def stored_types(file: GgufFile) -> dict[str, int]:
    """Return how many tensors there are of each type, the one of most bytes first."""
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
            found[key.removeprefix("general.")] = ", ".join(abbreviate(texts))
    return found
