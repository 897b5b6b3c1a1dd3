"""Helpers of this folder's tests: small model files, real tokenizers, and the check of an error."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from spd.errors import SpdError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}


@contextmanager
def raises_spd_error(
    kind: type[SpdError], *words: str, exit_code: int = 4, seconds: float = 2.0
) -> Iterator[Any]:
    """Expect exactly `kind` from the block, with one printable line that holds all the words.

    It may take `seconds` of this process's CPU time: a busy machine must not fail a test.
    """
    start = time.process_time()
    with pytest.raises(SpdError) as caught:
        yield caught
    assert time.process_time() - start < seconds
    error = caught.value
    assert type(error) is kind, error
    assert error.exit_code == exit_code
    assert error.message.isprintable() and len(error.message) < 600
    for word in words:
        assert word in error.message, f"{word!r} is not in {error.message!r}"


def write_json(folder: Path, name: str, value: object) -> Path:
    """Write a value as JSON into a folder; return its path."""
    path = folder / name
    path.write_text(json.dumps(value))
    return path


def shard_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file of a header, as JSON or as bytes, and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def header_entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """Return a tensor's entry in a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shard(
    path: Path, shapes: Mapping[str, list[int]], dtype: str = "F32", size: int = 4
) -> Path:
    """Write a valid file; every element of tensor i has all bytes equal to i + 1."""
    header = {}
    data = b""
    for number, (name, shape) in enumerate(shapes.items()):
        nbytes = size * math.prod(shape)
        header[name] = header_entry(shape, len(data), len(data) + nbytes, dtype)
        data += bytes([number + 1]) * nbytes
    path.write_bytes(shard_bytes(header, data))
    return path


def write_sharded(folder: Path, shards: Mapping[str, Mapping[str, list[int]]]) -> dict[str, str]:
    """Write shards and their index; return the weight map."""
    weight_map = {}
    for shard, shapes in shards.items():
        write_shard(folder / shard, shapes)
        weight_map.update(dict.fromkeys(shapes, shard))
    write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return weight_map


TEXT = [
    "The quick brown fox jumps over the lazy dog. def main(): return os.path.join(a, b)",
    "häuser größe 中文 日本語 🙂🙃 naïve café\n\n\tif x == 1:\n        print('yes')",
    "user assistant system hello world im_start im_end",
] * 5
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_byte_level() -> tokenizers.Tokenizer:
    """Train a byte-level BPE with four special tokens, one a single character; <think> is plain."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXT, trainer)
    library.add_special_tokens([AddedToken(name, normalized=False) for name in (*SPECIAL, "※")])
    library.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    return library


def make_sentencepiece() -> tokenizers.Tokenizer:
    """Make a tokenizer like Llama 2's: BPE over ▁ with byte fallback, BOS put in front."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pairs = ("▁ h", "▁h e", "h e", "l l", "ll o", "▁he llo", "▁ w", "o r", "l d")
    merges = [(first, second) for first, second in map(str.split, pairs)]
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz.", *map("".join, merges)):
        vocabulary[piece] = len(vocabulary)
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return library


def write_tokenizer(folder: Path, library: tokenizers.Tokenizer, **config: object) -> Path:
    """Write a tokenizer's two files; return their folder."""
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_byte_level(folder: Path, **config: object) -> Path:
    """Write the byte-level tokenizer with keys of its configuration."""
    return write_tokenizer(
        folder, make_byte_level(), **{"eos_token": "<|im_end|>", "bos_token": None, **config}
    )


def write_sentencepiece(folder: Path, **config: object) -> Path:
    """Write the SentencePiece-style tokenizer with keys of its configuration."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_tokenizer(folder, make_sentencepiece(), **{**names, **config})
