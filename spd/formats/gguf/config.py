"""A GGUF file's metadata in the keys of Hugging Face's configuration, for `model_config`.

Values without a key are read from the tensors: the size of the vocabulary from the embedding,
biases and a tied head from the names, the kind of a layer from its names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from spd.errors import CheckpointError
from spd.formats.assistant import ARCHITECTURES as ASSISTANTS
from spd.formats.family_keys import CAUSAL
from spd.formats.gguf.architectures import ARCHITECTURES, COMMON_KEYS, GgufArchitecture
from spd.formats.gguf.container import GgufFile
from spd.formats.gguf.derived import DERIVED_VALUES
from spd.formats.gguf.keys import FULL, SLIDING, Keys, most_common
from spd.formats.gguf.rotation import read_rotation
from spd.formats.json_file import Fields, abbreviate, display_text

_END_ID_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end a reply, behind `tokenizer.ggml.`."""


def read_architecture(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """Return the name of a file's architecture, and its row.

    Raises CheckpointError for an unknown one.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: general.architecture: is missing")
    file_type = file.metadata.get("general.type", "model")
    if file_type != "model":
        raise CheckpointError(
            f"{file.path}: general.type: {display_text(file_type)} is not a model"
        )
    if name not in ARCHITECTURES:
        reason = f"{display_text(name)} is not supported as GGUF ({', '.join(ARCHITECTURES)} are)"
        raise CheckpointError(f"{file.path}: general.architecture: {reason}")
    return name, ARCHITECTURES[name]


def read_config(file: GgufFile) -> Fields:
    """Return the configuration in Hugging Face's keys; messages name the keys of the file."""
    name, architecture = read_architecture(file)
    keys = Keys(file, name)
    model_class = _model_class(keys, architecture)
    values: dict[str, object] = {
        "architectures": [f"{model_class}ForCausalLM"],
        "model_type": CAUSAL[model_class].model_type,
        "sliding_window": None,
        **architecture.constants,
    }
    file_keys: dict[str, str] = {}
    for gguf_key, key in {**COMMON_KEYS, **architecture.keys}.items():
        value = keys.json_value(gguf_key)
        if key is not None and value is not None:
            values[key] = value
            file_keys[key] = f"{name}.{gguf_key}"
    values |= _tensor_values(keys, values)
    values |= _layer_values(keys, architecture, values)
    values |= read_rotation(keys, model_class, values)
    values |= _token_ids(file)
    values["dtype"] = _default_dtype(file)
    if name in DERIVED_VALUES:
        values |= DERIVED_VALUES[name](keys, values)
    if architecture.wrapper_class is not None:
        values = _wrap_in_assistant(keys, architecture.wrapper_class, values)
    return Fields(str(file.path), values, file_keys)


def _wrap_in_assistant(
    keys: Keys, wrapper_class: str, text_values: Mapping[str, object]
) -> dict[str, object]:
    """Return the configuration of an assistant (a Gemma 4 drafter) around that of its layers."""
    return {
        "architectures": [wrapper_class],
        "model_type": ASSISTANTS[wrapper_class],
        "backbone_hidden_size": keys.json_value("embedding_length_out"),
        "text_config": dict(text_values),
        "dtype": text_values["dtype"],
    }


def _model_class(keys: Keys, architecture: GgufArchitecture) -> str:
    """Return the class of Hugging Face of a file's model, without ForCausalLM."""
    for key, model_class in architecture.variants.items():
        suffixes = (f".{key}.weight", f".{key}")
        if keys.get(key) or any(name.endswith(suffixes) for name in keys.file.tensors):
            return model_class
    return architecture.model_class


def _tensor_values(keys: Keys, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that follow from names and shapes of tensors."""
    tensors = keys.file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{keys.file.path}: tensor 'token_embd.weight': is missing")
    tensor_values: dict[str, object] = {
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
            tensor_values[key] = any(name.endswith(endings) for name in tensors)
    return tensor_values


def _layer_values(
    keys: Keys, architecture: GgufArchitecture, values: Mapping[str, object]
) -> dict[str, object]:
    """Return one number for values that are listed by layer, the kinds of layers, and their number.

    The layers of an MTP head are not counted.
    """
    layer_values: dict[str, object] = {}
    mtp_layers = values.get("num_nextn_predict_layers", 0)
    layers = values.get("num_hidden_layers")
    if type(mtp_layers) is int and type(layers) is int and mtp_layers:
        layers -= mtp_layers
        layer_values["num_hidden_layers"] = layers
    if type(layers) is not int or not 0 < layers <= keys.MAX_LAYERS:
        return layer_values
    slides = keys.get("attention.sliding_window_pattern")
    if isinstance(slides, tuple) and all(
        isinstance(is_sliding, bool | int) for is_sliding in slides
    ):
        layer_values["layer_types"] = [
            SLIDING if is_sliding else FULL for is_sliding in slides[:layers]
        ]
    elif type(slides) is int:
        layer_values["sliding_window_pattern"] = slides
    if architecture.recurrent_kind is not None:
        layer_values["layer_types"] = [
            _layer_kind(keys, architecture, layer) for layer in range(layers)
        ]
    if "num_experts" in values:
        routed = [keys.has(layer, "ffn_gate_inp.weight") for layer in range(layers)]
        layer_values["mlp_layer_types"] = [
            "sparse" if is_routed else "dense" for is_routed in routed
        ]
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        by_layer = values.get(key)
        if isinstance(by_layer, list):
            layer_values[key] = most_common(by_layer[:layers])
    if values.get("sliding_window") == 0:
        layer_values["sliding_window"] = None
    return layer_values


def _layer_kind(keys: Keys, architecture: GgufArchitecture, layer: int) -> str:
    """Return a layer's kind in `layer_types`, by the tensors that it has."""
    assert architecture.recurrent_kind is not None
    if keys.has(layer, "ssm_conv1d.weight") or keys.has(layer, "shortconv.conv.weight"):
        return architecture.recurrent_kind
    if not architecture.is_single_block or keys.has(layer, "attn_output.weight"):
        return FULL
    return "moe" if keys.has(layer, "ffn_gate_inp.weight") else "mlp"


def _token_ids(file: GgufFile) -> dict[str, object]:
    """Return `bos_token_id` and `eos_token_id` as the file's keys give them, unchecked.

    Replies end at `Vocabulary.end_ids` where a file has any.
    """
    ids: dict[str, object] = {}
    end_ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_ID_KEYS]
    if present := [end_id for end_id in end_ids if end_id is not None]:
        ids["eos_token_id"] = list(dict.fromkeys(present))
    if (begin := file.metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        ids["bos_token_id"] = begin
    return ids


def _default_dtype(file: GgufFile) -> str:
    """Return the default dtype of a run: that of most bytes of matrices, or bfloat16."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] += tensor.nbytes
    main_type = sizes.most_common(1)[0][0] if sizes else "BF16"
    return {"F32": "float32", "F16": "float16"}.get(main_type, "bfloat16")


def count_types(file: GgufFile) -> dict[str, int]:
    """Return the number of tensors of each type, the type with most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.nbytes
    return {name: counts[name] for name, _ in sizes.most_common()}


def general_texts(file: GgufFile) -> dict[str, str]:
    """Return the texts of `general.*` by key without that prefix; of a list, its items joined."""
    texts: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key.startswith("general.") and isinstance(value, str):
            texts[key.removeprefix("general.")] = value
        elif key.startswith("general.") and isinstance(value, tuple):
            items = [str(item) for item in value if not isinstance(item, tuple)]
            if items:
                texts[key.removeprefix("general.")] = ", ".join(abbreviate(items))
    return texts
