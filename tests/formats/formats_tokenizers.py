"""Small but true tokenizers of the two supported kinds, written as a model folder would hold them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. def main(): return os.path.join(a, b)",
    "häuser größe 中文 日本語 🙂🙃 naïve café\n\n\tif x == 1:\n        print('yes')",
    "user assistant system hello world im_start im_end",
] * 5
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level() -> tokenizers.Tokenizer:
    """A trained byte-level BPE; four special tokens, one a single character; <think> is a plain one."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens([AddedToken(name, normalized=False) for name in (*SPECIAL, "※")])
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return library


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's shape: BPE over ▁ with byte fallback, BOS put in front."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in (
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.",
        *["▁h", "▁he", "he", "ll", "llo", "▁hello", "▁w", "or", "ld"],
    ):
        vocabulary.setdefault(piece, len(vocabulary))
    pairs = ("▁ h", "▁h e", "h e", "l l", "ll o", "▁he llo", "▁ w", "o r", "l d")
    merges = [(first, second) for first, second in map(str.split, pairs)]
    library = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return library


def write(folder: Path, library: tokenizers.Tokenizer, **config: object) -> Path:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_byte_level(folder: Path, **config: object) -> Path:
    return write(folder, byte_level(), **{"eos_token": "<|im_end|>", "bos_token": None, **config})


def write_sentencepiece(folder: Path, **config: object) -> Path:
    return write(
        folder, sentencepiece(), **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    )
