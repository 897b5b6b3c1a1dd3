"""Tiny model folders with random weights for the suites: any chat template, any marks as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BYTES = 256
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = BYTES + 2
"""The id of <|im_end|>, which ends a reply."""
VOCABULARY = 448
"""Ids of the model; those that no token takes are filled up, so that every drawn id has a text."""
CONTEXT = 65_536
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)
"""A chat template with a place for tools, in the form of Hermes."""


def write_tokenizer(folder: Path, marks: Iterable[str] = ()) -> None:
    """Write a byte-level tokenizer: a token a byte, the special tokens, then `marks` as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(SPECIALS))
    added = [*dict.fromkeys(mark for mark in marks if mark not in SPECIALS)]
    fillers = [f"<|unused_{number}|>" for number in range(VOCABULARY)]
    added += fillers[: VOCABULARY - BYTES - len(SPECIALS) - len(added)]
    library.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in added])
    library.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, template: str, marks: Iterable[str] = ()) -> Path:
    """Write a random model of two layers that has this chat template; return its folder."""
    from safetensors.torch import load_file, save_file

    from tests.recipes.tiny import write_tiny

    write_tiny(folder, vocab=VOCABULARY, max_positions=CONTEXT, eos=(END,), tie=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][END] = 0  # hardly ever drawn, so that limits and grammars end replies
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, marks)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
