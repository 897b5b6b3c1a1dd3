"""The tokenizer: exact bytes, no special tokens out of plain text, and guards against hostile files."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.formats import encoder
from spd.formats import tokenizer as module
from spd.formats.chat_template import ChatTemplate
from spd.formats.tokenizer import Tokenizer
from spd.formats.tokenizer_config import read_tokenizer_config
from tests.formats import formats_helpers as make
from tests.formats.formats_helpers import (
    make_byte_level,
    make_sentencepiece,
    raises_spd_error,
    write_byte_level,
    write_json,
    write_tokenizer,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write both kinds of tokenizers."""
    writers = {"bytes": write_byte_level, "sentencepiece": make.write_sentencepiece}
    return {
        name: write_folder(tmp_path_factory.mktemp(name)) for name, write_folder in writers.items()
    }


@pytest.fixture(scope="session")
def opened(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """Open both kinds of tokenizers."""
    return {name: Tokenizer.open(folder) for name, folder in folders.items()}


def write_changed(folder: Path, change: Any, **config: object) -> Path:
    """Write a byte-level tokenizer whose tokenizer.json is changed by a function."""
    write_byte_level(folder, **config)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    write_json(folder, "tokenizer.json", content)
    return folder


# What is read


def test_special_tokens_and_sizes_are_read(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["bytes"]
    library = make_byte_level()
    assert tokenizer.special_tokens == {
        name: library.token_to_id(name) for name in (*make.SPECIAL, "※")
    }
    assert tokenizer.special_ids == frozenset(tokenizer.special_tokens.values())
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, library.token_to_id("<|im_end|>"))
    assert tokenizer.vocab_size == max(library.get_vocab().values()) + 1
    assert tokenizer.token_to_id("nothing") is None
    assert opened["sentencepiece"]._strips and not tokenizer._strips


ADD_EOS = {"add_eos_token": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ([1], [])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        (ADD_EOS, ([1], [2])),
        ({"add_bos_token": False, **ADD_EOS}, ([], [2])),
    ],
)
def test_flags_overrule_the_post_processor(tmp_path: Path, config: dict, expected: tuple) -> None:
    tokenizer = Tokenizer.open(make.write_sentencepiece(tmp_path, **config))
    plain = tokenizer.encode("hello")
    first, last = expected
    assert tokenizer.bos_id == 1 and plain[0] != 1
    assert tokenizer.encode("hello", add_special=True) == [*first, *plain, *last]
    assert tokenizer.encode("", add_special=True) == [*first, *last]


def test_bos_is_added_without_a_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(
        write_byte_level(tmp_path, bos_token="<|endoftext|>", add_bos_token=True)
    )
    assert tokenizer.encode("a", add_special=True)[0] == tokenizer.bos_id
    with raises_spd_error(CheckpointError, "add_bos_token", "bos_token"):
        Tokenizer.open(write_byte_level(tmp_path, bos_token=None, add_bos_token=True))


def test_special_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    write_byte_level(tmp_path, eos_token={"content": "<|im_end|>", "lstrip": False})
    names = {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    write_json(tmp_path, "special_tokens_map.json", names)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.eos_id == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.bos_id == tokenizer.token_to_id("<|im_start|>")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    assert Tokenizer.open(tmp_path).eos_id is None


@pytest.mark.parametrize("value", [3, [], {"content": 3}, {"x": "y"}, ""])
def test_invalid_special_tokens_are_refused(tmp_path: Path, value: object) -> None:
    with raises_spd_error(CheckpointError, "tokenizer_config.json", "eos_token"):
        Tokenizer.open(write_byte_level(tmp_path, eos_token=value))


def test_a_token_named_special_in_the_config_is_special(tmp_path: Path) -> None:
    extra = ["<think>", "<not in the vocabulary>"]
    plain = Tokenizer.open(write_byte_level(tmp_path))
    assert plain.encode("<think>") == [plain.token_to_id("<think>")]
    tokenizer = Tokenizer.open(write_byte_level(tmp_path, additional_special_tokens=extra))
    think = tokenizer.token_to_id("<think>")
    assert think in tokenizer.special_ids and think not in tokenizer.encode("<think>")
    assert tokenizer.encode("<think>", parse_special=True) == [think]
    assert tokenizer.vocab_size == plain.vocab_size and tokenizer.fingerprint == plain.fingerprint


def test_a_word_of_the_model_named_special_in_the_config_is_special(tmp_path: Path) -> None:
    add_word = lambda c: c["model"]["vocab"].update({"<word>": 5000})  # noqa: E731
    tokenizer = Tokenizer.open(write_changed(tmp_path, add_word, pad_token="<word>"))
    assert 5000 in tokenizer.special_ids and 5000 not in tokenizer.encode("a<word>")
    assert tokenizer.encode("<word>", parse_special=True) == [5000]


def test_the_fingerprint_follows_the_vocabulary(
    tmp_path: Path, opened: dict[str, Tokenizer]
) -> None:
    same = Tokenizer.open(write_byte_level(tmp_path, eos_token="<|endoftext|>"))
    assert same.fingerprint == opened["bytes"].fingerprint != opened["sentencepiece"].fingerprint
    assert len(same.fingerprint) == 64
    library = make_byte_level()
    library.add_tokens(["<new>"])
    assert Tokenizer.open(write_tokenizer(tmp_path, library)).fingerprint != same.fingerprint


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    library = make_byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


# Encoding


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_survives(opened: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = opened[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert raw.decode() == (" " + text if kind == "sentencepiece" and text else text)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decoding_equals_the_librarys(
    opened: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    library = {"bytes": make_byte_level, "sentencepiece": make_sentencepiece}[kind]()
    tokenizer = opened[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    for skip in (True, False):
        text = tokenizer.decode(ids, skip_special=skip)
        if (
            "\ufffd" not in text
        ):  # where bytes are no UTF-8 the library writes as many marks as bytes
            assert text == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff" * 1000])
def test_half_a_surrogate_pair_is_refused(opened: dict[str, Tokenizer], text: str) -> None:
    with raises_spd_error(UsageError, "surrogate", exit_code=2):
        opened["bytes"].encode(text)


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "※"])
def test_special_tokens_are_text_unless_requested(opened: dict[str, Tokenizer], name: str) -> None:
    tokenizer = opened["bytes"]
    text = f"a{name}\n{name}"
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(ids) and tokenizer.decode(ids) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed.count(tokenizer.special_tokens[name]) == 2 and tokenizer.decode(parsed) == "a\n"
    assert tokenizer.decode(parsed, skip_special=False) == text
    assert tokenizer.encode(text) == ids  # asking leaves nothing behind


def test_plain_text_that_becomes_a_special_token_is_refused(tmp_path: Path) -> None:
    library = make_byte_level()
    library.add_special_tokens(["a"])  # now the ordinary letter is the special token
    with raises_spd_error(IncompatibleError, "tokenizer.json", "special"):
        Tokenizer.open(write_tokenizer(tmp_path, library)).encode("banana split")


# The bytes of a token


def test_every_byte_has_a_token_and_every_token_its_bytes(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["bytes"]
    for character, byte in module._byte_alphabet().items():
        token_id = tokenizer.token_to_id(character)
        assert token_id is not None and tokenizer.token_bytes(token_id) == bytes([byte])
    sentence = opened["sentencepiece"]
    assert [sentence.token_bytes(3 + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.token_bytes(tokenizer.token_to_id("<think>")) == b"<think>"
    assert all(tokenizer.token_bytes(token_id) == b"" for token_id in tokenizer.special_ids)
    for absent in (tokenizer.vocab_size, 2**24, 2**40, -1):
        assert tokenizer.token_bytes(absent) == b"" and tokenizer.decode([absent]) == ""
    assert sentence.token_bytes(sentence.token_to_id("▁hello")) == b" hello"
    assert sentence.token_bytes(1) == b"" and sentence.decode([1], skip_special=False) == "<s>"


def test_added_tokens_may_lie_outside_the_alphabet(tmp_path: Path) -> None:
    library = make_byte_level()
    library.add_tokens(
        [AddedToken("two words", normalized=False), AddedToken("<｜x｜>", normalized=False)]
    )
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, library))
    for text in ("two words", "<｜x｜>"):
        (token_id,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(token_id) == text.encode()


SPACES = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([decoders.Metaspace()], "hello hello"),
        ([decoders.Metaspace(prepend_scheme="never")], " hello hello"),
        ([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")], "hello hello"),
        ([SPACES, decoders.ByteFallback(), decoders.Fuse()], " hello hello"),
        ([SPACES, decoders.Replace("llo", "y")], " hey hey"),
    ],
)
def test_sentencepiece_decoders_are_supported(tmp_path: Path, steps: list, expected: str) -> None:
    library = make_sentencepiece()
    library.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(steps)
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, library))
    ids = [tokenizer.token_to_id("▁hello")] * 2
    assert tokenizer.decode(ids) == expected == library.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Fuse(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([SPACES, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("▁+"), " ")]),
    ],
)
def test_unsupported_decoders_are_refused(tmp_path: Path, decoder: Any) -> None:
    library = make_sentencepiece()
    library.decoder = decoder
    write_tokenizer(tmp_path, library)
    with raises_spd_error(CheckpointError, "tokenizer.json", "decoder"):
        Tokenizer.open(tmp_path)


# Hostile files


def set_regex(pattern: str) -> Any:
    """Return a change of the pre-tokenizer to a pattern."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return lambda c: c.update(pre_tokenizer=split)


def set_merges(*merges: str) -> Any:
    """Return a change of the vocabulary to three tokens with merges."""
    return lambda c: c["model"].update(vocab={"a": 0, "b": 1, "ab": 2}, merges=list(merges))


SPECIAL_ITEM = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT_ITEM = {"Sequence": {"id": "A", "type_id": 0}}
BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [SPECIAL_ITEM, TEXT_ITEM],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [4_000_000_000], "tokens": ["<s>"]}},
}
NO_TOKENS = {**BOS_TEMPLATE, "special_tokens": {}}
TWICE = {**NO_TOKENS, "single": [TEXT_ITEM] * 2}
IN_SEQUENCE = {"type": "Sequence", "processors": [TWICE]}
MANY_IDS = {
    **BOS_TEMPLATE,
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 9999, "tokens": ["<s>"] * 9999}},
}
GROWING_STEP = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
"""It counts as a growth to three times the length: two bytes for one, and one that may stay."""


def grow_tokens(content: Any) -> None:
    """Add a long token, and a normalizer that makes it much longer."""
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": 999, "content": "a" * 20_000}
    )
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 900}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c.pop("model"), "model"),
        (lambda c: c.update(version="9.0"), "version"),
        (lambda c: c["model"].update(merges=[["a", "zz"]]), "zz"),
        (set_merges("a b", "ab a", "b ab"), "range"),
        (lambda c: c["model"].update(vocab={"a": 2**32}, merges=[]), "u32"),
        (lambda c: c["model"]["vocab"].update(far=2**31), str(2**31)),
        (lambda c: c["model"].update(dropout=0.1), "dropout"),
        (lambda c: c.update(decoder={"type": "Evil"}), ""),
        (lambda c: c.update(post_processor=BOS_TEMPLATE), "post_processor"),
        (lambda c: c.update(post_processor=NO_TOKENS), "cannot encode a letter"),
        (lambda c: c.update(post_processor=TWICE), "repeats"),
        (lambda c: c.update(post_processor=IN_SEQUENCE), "repeats"),
        (lambda c: c.update(post_processor=MANY_IDS), "post_processor"),
        (set_regex("("), ""),
        (set_regex("(" * 10_000), "depth"),
        # Parts that would need much time or memory.
        (set_regex("x" * 30_000), "pre_tokenizer"),
        (set_regex("(?<a>a)" + r"(?<b>\g<a>\g<a>)" * 8), "pre_tokenizer"),
        (lambda c: c.update(decoder={"type": "Sequence", "decoders": [GROWING_STEP] * 40}), "decoder"),
        (
            lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [GROWING_STEP] * 40}),
            "added_tokens",
        ),
        (lambda c: c.update(normalizer={"type": "Prepend", "prepend": "a" * 15_000}), "normalizer"),
        (lambda c: c["model"]["vocab"].update({"x" * 5_000_000: 1}), "vocab"),
        (grow_tokens, "added_tokens"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(tmp_path: Path, change: Any, word: str) -> None:
    write_changed(tmp_path, change)
    with raises_spd_error(CheckpointError, f"{tmp_path}/tokenizer.json: ", word, seconds=5):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b"\x80\x04cos\nsystem\n"])
def test_no_tokenizer_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with raises_spd_error(CheckpointError, "tokenizer.json"):
        Tokenizer.open(tmp_path)


def test_a_pattern_may_panic_on_some_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_changed(tmp_path, set_regex("(q+)+$")))
    with raises_spd_error(IncompatibleError, "tokenizer.json", "retry-limit"):
        tokenizer.encode("q" * 60 + "b")
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_a_template_processor_adds_its_tokens(tmp_path: Path) -> None:
    library = make_byte_level()
    name = "<|endoftext|>"
    end = library.token_to_id(name)
    single = f"{name} $A {name}"
    library.post_processor = processors.TemplateProcessing(single, special_tokens=[(name, end)])
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, library, bos_token="<|endoftext|>"))
    assert tokenizer.encode("x", add_special=True) == [end, *tokenizer.encode("x"), end]


def test_a_signal_is_no_fault_of_the_tokenizer() -> None:
    with pytest.raises(KeyboardInterrupt), module.convert_library_errors("tokenizer.json"):
        raise KeyboardInterrupt


SLOW_PATTERN = r"[a-z]*[a-z]*(?<=0)"
"""A pattern whose time grows with the cube of a text's length, below the library's limit."""


def test_patterns_that_take_too_long_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": SLOW_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    parts = lambda c: c.update(  # noqa: E731
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, c["pre_tokenizer"]]}
    )
    tokenizer = Tokenizer.open(write_changed(tmp_path, parts))
    assert tokenizer.decode(tokenizer.encode("letter" * 10)) == "letter" * 10
    monkeypatch.setattr(encoder, "BASE_SECONDS", 0.1)
    for _ in range(2):  # at once the second time: the thread is still busy
        with raises_spd_error(
            CheckpointError, "tokenizer.json", "take too long for this text", seconds=4
        ):
            tokenizer.encode("a" * 900)


def test_a_deleted_tokenizer_leaves_no_thread(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_byte_level(tmp_path))
    tokenizer.encode("a" * 100)
    thread = tokenizer._encoder._thread
    assert thread is not None and thread.is_alive()
    del tokenizer
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


TURN_TOKEN = {"content": "<|turn|>", "special": True, "normalized": False}


def test_tokens_of_other_files_are_added(tmp_path: Path) -> None:
    plain = Tokenizer.open(write_byte_level(tmp_path))
    number = plain.vocab_size
    assert len(plain.encode("<|turn|>", parse_special=True)) > 1
    declared = Tokenizer.open(
        write_byte_level(tmp_path, added_tokens_decoder={str(number): TURN_TOKEN})
    )
    assert declared.encode("<|turn|>", parse_special=True) == [number]
    assert number in declared.special_ids and number not in declared.encode("<|turn|>")
    write_byte_level(tmp_path)
    write_json(tmp_path, "added_tokens.json", {"<|turn|>": number, "word": number + 1})
    listed = Tokenizer.open(tmp_path)
    assert listed.encode("<|turn|>word") == [number, number + 1]
    assert number not in listed.special_ids and listed.vocab_size == number + 2
    assert not plain.is_same_file(tmp_path) and listed.is_same_file(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [{"x": TURN_TOKEN}, {"1": 3}, {"1": {}}, {"1": {"content": ""}}, {"-1": TURN_TOKEN}, []],
)
def test_invalid_declared_tokens_are_refused(tmp_path: Path, decoder: object) -> None:
    with raises_spd_error(CheckpointError, "tokenizer_config.json", "added_tokens_decoder"):
        Tokenizer.open(write_byte_level(tmp_path, added_tokens_decoder=decoder))


@pytest.mark.parametrize("key", ["extra_special_tokens", "model_specific_special_tokens"])
def test_named_special_tokens_reach_templates(tmp_path: Path, key: str) -> None:
    named = {"eot_token": "<think>", "messages": "<|im_end|>"}
    image_token = {"__type": "AddedToken", "content": "<|im_start|>"}
    write_byte_level(tmp_path, **{key: named, "image_token": image_token})
    (tmp_path / "chat_template.jinja").write_text(
        "{{ eot_token }}{{ image_token }}{{ messages[0].content }}"
    )
    config = read_tokenizer_config(tmp_path)
    assert config.named_tokens == {**named, "image_token": "<|im_start|>"}
    template = ChatTemplate.open(tmp_path)
    assert template is not None
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<think><|im_start|>hi"
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.token_to_id("<think>") in tokenizer.special_ids


def test_flags_of_named_tokens_stay(tmp_path: Path) -> None:
    wide = lambda c: [t.update(rstrip=True) for t in c["added_tokens"]]  # noqa: E731
    tokenizer = Tokenizer.open(write_changed(tmp_path, wide, eos_token="<|im_end|>"))
    ids = tokenizer.encode("<|im_end|>  a", parse_special=True)
    assert ids == [tokenizer.eos_id, *tokenizer.encode("a")]
