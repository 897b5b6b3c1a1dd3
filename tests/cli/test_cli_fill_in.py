"""Raw prompts are encoded as by transformers, and a suffix with the tokens of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spd.conversation.fill_in import FILL_IN_FORMS, FillInForm
from spd.conversation.prompt import Prompt, encode_prompt
from spd.conversation.vocabulary import Vocabulary
from spd.errors import IncompatibleError
from spd.formats import tokenizer as ours
from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder

BASE = ["<|endoftext|>", "<s>"]


def vocabulary_with(folder: Path, marks: tuple[str | None, ...]) -> Vocabulary:
    """Return a vocabulary of one token per byte and these marks, with <s> before each text."""
    tokens = [*BASE, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = [*BASE, *(mark for mark in marks if mark is not None)]
    library.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    library.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Vocabulary(ModelFolder(demo_folder()).config, ours.Tokenizer.open(folder), None, "x")


@pytest.mark.parametrize("form", FILL_IN_FORMS, ids=lambda form: form.prefix)
def test_a_suffix_stands_where_the_form_has_it(tmp_path: Path, form: FillInForm) -> None:
    vocabulary = vocabulary_with(tmp_path, (form.prefix, form.suffix, form.middle))
    ids = encode_prompt(Prompt(text="ab", suffix="cd"), vocabulary, 100)
    text = vocabulary.need_tokenizer().decode(ids, skip_special=False)
    parts = [f"{form.prefix}ab", f"{form.suffix}cd"]
    order = reversed(parts) if form.suffix_first else parts
    assert text == "<s>" + "".join(order) + (form.middle or "")


def test_without_such_tokens_it_is_refused_by_name(tmp_path: Path) -> None:
    vocabulary = vocabulary_with(tmp_path, ("<|fim_prefix|>",))
    with pytest.raises(IncompatibleError, match="no tokens for filling in"):
        encode_prompt(Prompt(text="ab", suffix="cd"), vocabulary, 100)


def test_raw_text_is_read_as_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    vocabulary = vocabulary_with(tmp_path, marks)
    text = "<|fim_prefix|>def f(<|fim_suffix|>)\n<|fim_middle|> <|endoftext|> <|fim_pad|>"
    library = AutoTokenizer.from_pretrained(tmp_path)
    expected = [vocabulary.need_tokenizer().bos_id, *library.encode(text, add_special_tokens=False)]
    assert encode_prompt(Prompt(text=text), vocabulary, 100) == expected
