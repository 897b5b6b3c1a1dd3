"""Tokenizers of GGUF files: ids as of `tokenizer.json`, ends of turns, hostile files."""

from __future__ import annotations

import json
import os
import random
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import tokenizers

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.chat_template import ChatTemplate
from spd.formats.folder import ModelFolder
from spd.formats.gguf import tokenizer as module
from spd.formats.gguf.container import GgufFile, GgufValue
from spd.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_of
from spd.formats.gguf.sampling import read_sampling
from spd.formats.gguf.template import read_template
from spd.formats.gguf.tokenizer import open_tokenizer, tokenizer_config
from spd.formats.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)
from spd.formats.tokenizer import Tokenizer
from spd.formats.tokenizer_config import TokenizerConfig
from tests.formats.gguf.every_vocabulary import file_of, metadata_of, random_texts
from tests.formats.gguf.gguf_helpers import write_gguf

ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
PUBLISHED = os.environ.get("SPD_TEST_VOCABULARIES", "")
needs_published = pytest.mark.skipif(
    not PUBLISHED, reason="SPD_TEST_VOCABULARIES names no folder of published vocabularies"
)


def byte_level(
    added: Iterable[tuple[str, int]] = (),
    merges: tuple[str, ...] = (),
    pre: str = "gpt-2",
    **keys: GgufValue,
) -> dict[str, GgufValue]:
    """Return metadata of a byte-level vocabulary: bytes, merged tokens, added ones of any type."""
    merged = [(merge.replace(" ", ""), NORMAL) for merge in merges]
    tokens = [*((letter, NORMAL) for letter in ALPHABET), *merged, *added]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(text for text, _ in tokens),
        "tokenizer.ggml.token_type": tuple(kind for _, kind in tokens),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentence_piece(
    pieces: Iterable[tuple[str, float, int]], **keys: GgufValue
) -> dict[str, GgufValue]:
    """Return metadata of a SentencePiece vocabulary: unknown, begin, end, bytes, pieces."""
    tokens = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    tokens += pieces
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(text for text, _, _ in tokens),
        "tokenizer.ggml.scores": tuple(score for _, score, _ in tokens),
        "tokenizer.ggml.token_type": tuple(kind for _, _, kind in tokens),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def tokenizer_of(metadata: dict[str, GgufValue]) -> Tokenizer:
    return open_tokenizer(file_of(metadata))


def texts_of(metadata: dict[str, GgufValue], text: str, *, special: bool = False) -> list[str]:
    """Encode a text, and return the tokens as they are in the file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    ids = tokenizer_of(metadata).encode(text, parse_special=special)
    return [str(tokens[number]) for number in ids]


# How words are cut

CUT_WORDS = {
    "gpt-2": ["I", "'m", " at", "  ", " 12345", "!?", "\n", "\n", "x"],
    "smollm": ["I", "'m", " at", "   ", *"12345", "!?", "\n", "\n", "x"],
    "llama-bpe": ["I", "'m", " at", "  ", " ", "123", "45", "!?\n\n", "x"],
    "qwen2": ["I", "'m", " at", "  ", " ", "1", "2", "3", "4", "5", "!?\n\n", "x"],
    "tekken": ["I", "'m", " at", "  ", " ", "1", "2", "3", "4", "5", "!?\n\n", "x"],
    "gpt-4o": ["I'm", " at", "  ", " ", "123", "45", "!?\n\n", "x"],
    "seed-coder": ["I", "'m", " at", "  ", " ", "1", "2", "3", "4", "5", "!?", "\n\n", "x"],
    "deepseek-v3": ["I", "'m", " at", "   ", "123", "45", "!?\n\n", "x"],
    "deepseek-llm": ["I", "'", "m", " at", "   ", "1", "2", "3", "4", "5", "!?", "\n", "\n", "x"],
    "deepseek-coder": ["I", "'", "m", " at", "   ", *"12345", "!?", "\n", "\n", "x"],
    "falcon": ["I", "'", "m", " at", "  ", " ", "123", "45", "!?", "\n", "\n", "x"],
    "tiny_aya": ["I'm", " at", "   ", "12", "345", "!?\n\n", "x"],
}
"""Words of the same text, by a name of each rule that cuts it in another way."""


def cut_words(name: str, text: str) -> list[str]:
    pre_tokenizer = PRE_TOKENIZERS[name]
    steps = {"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)}
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    library = tokenizers.Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": steps}))
    pieces = library.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("name", CUT_WORDS)
def test_words_are_cut_by_the_named_rule(name: str) -> None:
    assert cut_words(name, "I'm at   12345!?\n\nx") == CUT_WORDS[name]


def test_marks_capitals_and_scripts_are_cut_as_their_models_do() -> None:
    assert cut_words("qwen35", "नमस्ते x") == ["नमस्ते", " x"]
    assert cut_words("qwen2", "नम्") == ["नम", "्"]
    assert cut_words("gpt-4o", "fooBarBAZ") == ["foo", "Bar", "BAZ"]
    assert cut_words("tekken", "fooBar's") == ["foo", "Bar", "'s"]
    assert cut_words("kimi-k2", "ab你好cd") == ["ab", "你好", "cd"]
    assert cut_words("deepseek-v3", "你好abc") == ["你好", "abc"]
    assert cut_words("youtu", "한국abc12") == ["한국", "abc", "1", "2"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_keeps_every_byte(name: str) -> None:
    tokenizer = tokenizer_of(byte_level(pre=name))
    for text in random_texts(40, ()):
        decoded = tokenizer.decode_bytes(tokenizer.encode(text)).decode()
        assert decoded == text or decoded == unicodedata.normalize("NFC", text)


def test_a_file_without_a_rule_has_its_architectures_or_is_refused() -> None:
    assert pre_tokenizer_of("default", "qwen3") == PRE_TOKENIZERS["qwen2"]
    assert pre_tokenizer_of("", "gptoss") == PRE_TOKENIZERS["gpt-4o"]
    for name, message in (
        ("default", "would be guessed"),
        ("mystery", "'mystery' is not supported"),
    ):
        with pytest.raises(CheckpointError, match=message):
            tokenizer_of(byte_level(pre=name))


def test_a_word_that_is_a_token_is_taken_whole_where_merges_do_not_count() -> None:
    for pre, expected in (("llama-bpe", ["abc"]), ("dbrx", ["a", "b", "c"])):
        assert texts_of(byte_level([("abc", NORMAL)], pre=pre), "abc") == expected


def test_text_is_composed_where_the_model_does_so() -> None:
    for pre, expected in (("qwen2", "\u00e9"), ("llama-bpe", "e\u0301")):
        tokenizer = tokenizer_of(byte_level(pre=pre))
        assert tokenizer.decode_bytes(tokenizer.encode("e\u0301")).decode() == expected


def test_a_merge_of_tokens_that_are_not_there_is_left_out() -> None:
    metadata = byte_level(merges=("a b",))
    metadata["tokenizer.ggml.merges"] = ("q zz", "a b")
    assert texts_of(metadata, "ab") == ["ab"]


# SentencePiece

PIECES = [(letter, -100.0, NORMAL) for letter in "\u2581abcd-"]


def test_the_highest_score_merges_first() -> None:
    pieces = [*PIECES, ("ab", -2.0, NORMAL), ("bc", -1.0, NORMAL), ("abc", -9.0, NORMAL)]
    assert texts_of(sentence_piece(pieces), "abc") == ["\u2581", "abc"]
    assert texts_of(sentence_piece(pieces[:-1]), "abc") == ["\u2581", "a", "bc"]
    pieces[-3] = ("ab", -0.5, NORMAL)
    assert texts_of(sentence_piece(pieces[:-1]), "abc") == ["\u2581", "ab", "c"]


def test_what_no_token_spells_becomes_bytes() -> None:
    metadata = sentence_piece(PIECES, add_space_prefix=False)
    assert texts_of(metadata, "a\u00e9\n") == ["a", "<0xC3>", "<0xA9>", "<0x0A>"]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.decode_bytes(tokenizer.encode("a\u00e9 \n")) == "a\u00e9 \n".encode()


def test_a_text_begins_with_a_blank_unless_the_file_says_otherwise() -> None:
    first = sentence_piece(PIECES)
    assert texts_of(first, "a b") == ["\u2581", "a", "\u2581", "b"]
    assert texts_of(first, "a</s>b", special=True) == ["\u2581", "a", "</s>", "\u2581", "b"]
    assert tokenizer_of(first).decode(tokenizer_of(first).encode("a b")) == "a b"
    plain = sentence_piece(PIECES, add_space_prefix=False)
    assert texts_of(plain, "a b") == ["a", "\u2581", "b"]
    assert tokenizer_of(plain).decode(tokenizer_of(plain).encode(" a b")) == " a b"


BLANK_RUNS = {length: ("\u2581" * length, -1e9, NORMAL) for length in (2, 3, 4)}


def test_merges_of_one_score_are_ordered_as_the_models_converter_did() -> None:
    """By ids, five blanks become four and one; runs that are added tokens grow from the left."""
    by_ids = sentence_piece(
        [*PIECES, BLANK_RUNS[2], BLANK_RUNS[4], BLANK_RUNS[3]], add_space_prefix=False
    )
    assert texts_of(by_ids, 5 * " ") == [4 * "\u2581", "\u2581"]
    added = [(length * " ", -1000.0, USER_DEFINED) for length in (2, 3)]
    from_left = sentence_piece([*PIECES, *added], add_space_prefix=False)
    assert texts_of(from_left, 5 * " ") == [3 * " ", 2 * " "]
    assert texts_of(from_left, 4 * " ") == [3 * " ", "\u2581"]


def test_runs_that_are_added_tokens_merge_before_all_others() -> None:
    """Their score, the highest, is not in the file."""
    pieces = [*PIECES, ("\u2581a", -5.0, NORMAL), ("  ", -1000.0, USER_DEFINED)]
    assert texts_of(sentence_piece(pieces, add_space_prefix=False), "  a") == ["  ", "a"]


NO_LIMIT = 10**9
"""Characters that are merged without the library's list of merges; -1 is none."""


def random_pieces(draw: random.Random) -> list[tuple[str, float, int]]:
    """Return pieces of few letters, many of one score, some of them added or unused tokens."""
    texts = {"".join(draw.choices("\u2581ab", k=draw.randint(2, 6))) for _ in range(40)}
    scores = [0.0, -1.0, -1.0, -2.0, -3.5, -1e9]
    kinds = [NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, UNUSED]
    pieces = [(text, draw.choice(scores), draw.choice(kinds)) for text in sorted(texts)]
    if draw.random() < 0.5:
        pieces = [piece for piece in pieces if set(piece[0]) != {"\u2581"}]
        pieces += [(length * " ", -1000.0, USER_DEFINED) for length in (2, 3)]
    draw.shuffle(pieces)
    return [*PIECES[:3], *pieces]


def test_few_texts_are_merged_as_the_library_merges_all() -> None:
    """The library's list takes long to build; before, neighbours are merged in the same order."""
    draw = random.Random(3)
    for _ in range(60):
        file = file_of(sentence_piece(random_pieces(draw), add_space_prefix=draw.random() < 0.5))
        quick, full = (
            open_tokenizer(file, max_merged_characters=limit) for limit in (NO_LIMIT, -1)
        )
        for _ in range(20):
            text = "".join(draw.choices(["a", "b", " ", "\u2581", "\u00e9", "</s>"], k=12))
            for special in (False, True):
                expected = full.encode(text, parse_special=special)
                assert quick.encode(text, parse_special=special) == expected, ascii(text)


def test_after_some_text_the_library_has_all_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list is built once, after more than `max_merged_characters` characters."""
    calls: list[int] = []
    merges_of_scores = module._merges_of_scores

    def counted(
        vocab: Vocabulary, texts: Sequence[str], ids: Mapping[str, int]
    ) -> list[tuple[str, str]]:
        calls.append(1)
        return merges_of_scores(vocab, texts, ids)

    monkeypatch.setattr(module, "_merges_of_scores", counted)
    file = file_of(sentence_piece([*PIECES, ("ab", -1.0, NORMAL)], add_space_prefix=False))
    tokenizer = open_tokenizer(file, max_merged_characters=4)
    for expected_calls in (0, 0, 1, 1):
        assert tokenizer.encode("ab") == [tokenizer.token_to_id("ab")]
        assert len(calls) == expected_calls


def test_phi3_takes_blanks_behind_added_tokens() -> None:
    metadata = sentence_piece([*PIECES, ("<|end|>", -1000.0, CONTROL)])
    assert "\u2581" in texts_of(metadata, "<|end|> ", special=True)
    metadata["general.architecture"] = "phi3"
    assert texts_of(metadata, "<|end|> \n", special=True) == ["<|end|>"]


# Kinds of tokens and roles


def test_plain_text_spells_added_words_and_no_control_token() -> None:
    metadata = byte_level([("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED)])
    assert texts_of(metadata, "<tool>") == ["<tool>"]
    assert texts_of(metadata, "<|im_end|>") == list("<|im_end|>")
    assert texts_of(metadata, "<|im_end|>", special=True) == ["<|im_end|>"]


def test_places_without_a_token_are_no_tokens() -> None:
    metadata = byte_level([("[PAD256]", UNUSED), ("x", CONTROL), ("[PAD258]", UNUSED)])
    metadata["tokenizer.ggml.tokens"] = (*ALPHABET, "[PAD256]", "<|x|>", "[PAD258]")
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.vocab_size == 258 and tokenizer.token_to_id("[PAD256]") is None
    assert tokenizer.token_bytes(256) == b""


def test_an_ordinary_word_is_no_padding_token() -> None:
    """Converters write the id 0 where a model has none."""
    metadata = byte_level([("<s>", CONTROL)], padding_token_id=0, bos_token_id=256)
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode(ALPHABET[0]) == [0] and tokenizer.bos_id == 256


@pytest.mark.parametrize(
    ("pre", "keys", "begins"),
    [
        ("llama-bpe", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos_stands_before_a_text_where_file_or_rule_say_so(
    pre: str, keys: Mapping[str, bool], begins: bool
) -> None:
    metadata = byte_level([("<s>", CONTROL)], pre=pre, bos_token_id=256)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    ids = tokenizer_of(metadata).encode("a", add_special=True)
    assert ids == [256] * begins + [ALPHABET.index("a")]


def test_sentence_piece_files_need_no_ids_of_roles() -> None:
    tokenizer = tokenizer_of(sentence_piece(PIECES))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("a", add_special=True)[0] == 1


# Ends of turns


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        ({"<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}, {}, [0, 1]),
        ({"<|im_end|>": NORMAL, "<eos>": NORMAL}, {}, [0]),  # a kind forgotten; a word
        ({"</s>": NORMAL, "<x>": CONTROL}, {"eos_token_id": 257}, [1]),  # HTML's
        ({"</s>": CONTROL}, {}, [0]),
        ({"<a>": CONTROL, "<b>": CONTROL}, {"eot_token_id": 256, "eom_token_id": 257}, [0, 1]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {}, [1, 2]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL}, {}, [0, 1]),
        ({"<a>": CONTROL, "<b>": CONTROL}, {"eos_token_ids": (256, 257, 9999)}, [0, 1]),
        ({"<a>": CONTROL}, {"eos_token_id": 9999}, []),
        ({"<|file_sep|>": CONTROL, "<fim_pad>": CONTROL}, {}, [0, 1]),
    ],
)
def test_turns_end_at_the_tokens_that_llama_cpp_picks(
    tokens: dict[str, int], keys: dict[str, GgufValue], ends: list[int]
) -> None:
    metadata = byte_level(tokens.items())
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    end_ids = Vocabulary.of(file_of(metadata)).end_ids
    assert sorted(end_ids) == [256 + number for number in ends]


def test_the_ends_that_a_file_names_come_first() -> None:
    """As many as a request can have may end a text, and further ones are dropped."""
    tokens = [("<|im_end|>", CONTROL), ("<|eot_id|>", CONTROL), ("<x>", CONTROL), ("<y>", CONTROL)]
    metadata = byte_level(tokens, eos_token_id=259, eot_token_id=258)
    assert Vocabulary.of(file_of(metadata)).end_ids == (259, 258, 256, 257)


def test_an_end_of_a_turn_is_not_spelled_by_plain_text_whatever_its_kind() -> None:
    metadata = byte_level([("<|im_end|>", NORMAL)])
    assert texts_of(metadata, "<|im_end|>") == list("<|im_end|>")
    assert texts_of(metadata, "<|im_end|>", special=True) == ["<|im_end|>"]


# Template and sampling


def template_of(metadata: dict[str, GgufValue]) -> ChatTemplate:
    file = file_of(metadata)
    template = read_template(file, tokenizer_config(Vocabulary.of(file)))
    assert template is not None
    return template


def test_templates_and_special_words_are_the_files() -> None:
    metadata = byte_level([("<s>", CONTROL)], bos_token_id=256)
    assert (
        read_template(
            file_of(metadata),
            TokenizerConfig(
                roles={}, additional_tokens=(), add_bos=None, add_eos=None, fields=None
            ),
        )
        is None
    )
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ tools | length }}"
    template = template_of(metadata)
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages) == "<s>Hi"
    assert template.render(messages, tools=[{}, {}]) == "tools: 2"


@pytest.mark.parametrize("bomb", ["{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__ }}"])
def test_a_hostile_template_is_an_error(bomb: str) -> None:
    metadata = byte_level()
    metadata["tokenizer.chat_template"] = bomb
    template = template_of(metadata)
    with pytest.raises((CheckpointError, IncompatibleError), match=r"tokenizer\.chat_template"):
        template.render([{"role": "user", "content": "Hi"}])


def test_a_template_beyond_its_limit_is_refused() -> None:
    metadata = byte_level()
    for value, message in ((1_000_001 * "x", "more than 1,000,000"), (7, "7 is not a string")):
        metadata["tokenizer.chat_template"] = value
        with pytest.raises(CheckpointError, match=message):
            read_template(
                file_of(metadata),
                TokenizerConfig(
                    roles={}, additional_tokens=(), add_bos=None, add_eos=None, fields=None
                ),
            )


def test_sampling_is_as_the_file_says() -> None:
    metadata = byte_level()
    metadata |= {"general.sampling.temp": 0.6000000238418579, "general.sampling.top_k": 20}
    sampling = read_sampling(file_of(metadata), (3, 5))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, None)
    assert sampling.eos_token_ids == (3, 5)
    metadata["general.sampling.top_p"] = float("nan")
    with pytest.raises(CheckpointError, match=r"general\.sampling\.top_p: NaN is not a number"):
        read_sampling(file_of(metadata), ())


def test_a_model_opened_from_a_file_has_its_tokenizer_template_and_sampling(tmp_path: Path) -> None:
    metadata = byte_level([("<|im_end|>", CONTROL)], eos_token_id=256)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}{{ eos_token }}"
    metadata["general.sampling.temp"] = 0.5
    model = ModelFolder(write_gguf(tmp_path / "model.gguf", metadata, {}))
    assert model.tokenizer is not None and model.template is not None
    text = model.template.render([{"role": "user", "content": "a"}])
    ids = model.tokenizer.encode(text, parse_special=True)
    assert ids == [ALPHABET.index("a"), 256]
    assert model.generation.eos_token_ids == (256,) and model.generation.temperature == 0.5
    assert model.tokenizer_config.roles == {"eos_token": "<|im_end|>"}


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    """Drafters' files are such."""
    model = ModelFolder(write_gguf(tmp_path / "mtp.gguf", {"tokenizer.ggml.model": "none"}, {}))
    assert model.tokenizer is None and model.template is None
    assert model.generation.eos_token_ids == () and not model.tokenizer_config.roles


# Hostile files


HOSTILE: dict[str, tuple[dict[str, GgufValue], str]] = {
    "another kind": ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
    "no tokens": ({"tokenizer.ggml.tokens": ()}, "are 0"),
    "numbers": ({"tokenizer.ggml.tokens": (1, 2)}, "is not a list of texts"),
    "twice": ({"tokenizer.ggml.tokens": ("a", "a"), "tokenizer.ggml.token_type": ()}, "are 0, but"),
    "kinds": ({"tokenizer.ggml.token_type": (1, 2)}, "are 2, but there are 259"),
    "merge": ({"tokenizer.ggml.merges": ("ab",)}, "'ab' is not two parts"),
    "long merges": ({"tokenizer.ggml.merges": (f"a {32_000_000 * 'b'}",)}, "more than 32,000,000"),
    "no merges": ({"tokenizer.ggml.merges": 5}, "is not a list of texts"),
    "id": ({"tokenizer.ggml.bos_token_id": "x"}, "is not a whole number"),
    "flag": ({"tokenizer.ggml.add_bos_token": 1}, "is not true or false"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_values_are_refused_by_key(name: str) -> None:
    wrong_metadata, message = HOSTILE[name]
    metadata = {**byte_level([("<s>", CONTROL)], merges=("a b", "ab c")), **wrong_metadata}
    with pytest.raises(CheckpointError, match=message) as refusal:
        tokenizer_of(metadata)
    assert "\n" not in refusal.value.message and "tokenizer.ggml." in refusal.value.message


def test_a_token_twice_is_refused_and_a_place_without_text_is_not() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = ("a", "a", *ALPHABET[2:])
    with pytest.raises(CheckpointError, match="a token is there twice"):
        tokenizer_of(metadata)
    metadata["tokenizer.ggml.tokens"] = ("", "", *ALPHABET[2:])
    assert tokenizer_of(metadata).token_bytes(0) == b""


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(1025 * "a", -1.0, NORMAL)], "more than 1024 characters"),
        ([(n * "a", -float(n), NORMAL) for n in range(1, 600)], "merges of over 32,000,000"),
        ([("a", float("nan"), NORMAL)], "one is not a number"),
        ([(200_000 * "x" + str(n), 0.0, CONTROL) for n in range(30)], "over 4,000,000 characters"),
    ],
)
def test_vocabularies_as_bombs_are_refused(
    pieces: list[tuple[str, float, int]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(sentence_piece(pieces))


# Published vocabularies


def llama_cpp_vectors(path: Path) -> list[tuple[str, list[int]]]:
    """Return the texts and ids that llama.cpp publishes with a vocabulary."""
    texts = path.with_name(f"{path.name}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text("utf-8").split("\n")
    return [
        (text, [int(word) for word in line.split()])
        for text, line in zip(texts, lines, strict=False)
    ]


@needs_published
@pytest.mark.parametrize("path", sorted(Path(PUBLISHED or ".").glob("ggml-vocab-*.gguf.inp")))
def test_ids_equal_llama_cpps_vectors(path: Path) -> None:
    """Qwen3.5 composes characters first; llama.cpp does not, in three of the vectors."""
    file = GgufFile.open(path.with_suffix(""))
    if file.metadata["tokenizer.ggml.model"] in ("bert", "t5"):
        pytest.skip("not a kind of vocabulary that is supported")
    tokenizer = open_tokenizer(file)
    composes = file.metadata.get("tokenizer.ggml.pre") == "qwen35"
    for text, ids in llama_cpp_vectors(path.with_suffix("")):
        if not composes or unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text) == ids, ascii(text)


JSON_FILES = {
    "deepseek_v3": "deepseek-v3",
    "gemma3": "default",
    "gpt4o": "gpt-4o",
    "gptoss": "gpt-4o",
    "llama2": "default",
    "llama3": "llama-bpe",
    "llama3_1": "llama-bpe",
    "qwen3": "qwen2",
}
"""Folders with a `tokenizer.json`, and the rule that llama.cpp's converter names for it."""


@needs_published
@pytest.mark.parametrize("name", JSON_FILES)
def test_ids_equal_those_of_the_models_own_file(name: str) -> None:
    folder = Path(PUBLISHED, name)
    file = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    library = tokenizers.Tokenizer.from_str(json.dumps(file))
    gguf_file = file_of(metadata_of(file, JSON_FILES[name], config))
    quick, full = (
        open_tokenizer(gguf_file, max_merged_characters=limit) for limit in (NO_LIMIT, -1)
    )
    names = [token["content"] for token in file["added_tokens"]][:300]
    for text in random_texts(20_000, names):
        expected = library.encode(text, add_special_tokens=False).ids
        assert quick.encode(text, parse_special=True) == expected, ascii(text)
        assert full.encode(text, parse_special=True) == expected, ascii(text)


PUBLISHED_PAIRS = {
    "gemma-3-270m-q4_k_m.gguf": "gemma3",
    "ggml-vocab-llama-bpe.gguf": "llama3",
    "ggml-vocab-qwen2.gguf": "qwen3",
}
"""Published GGUF files, and folders with a `tokenizer.json` of the same tokens."""


@needs_published
@pytest.mark.parametrize("name", PUBLISHED_PAIRS)
def test_ids_of_a_published_file_equal_those_of_the_models_own(name: str) -> None:
    """A newer `tokenizer.json` may have more added tokens: only those of both are encoded."""
    if not Path(PUBLISHED, name).exists():
        pytest.skip(f"{name} is not there")
    tokenizer = open_tokenizer(GgufFile.open(Path(PUBLISHED, name)))
    path = Path(PUBLISHED, PUBLISHED_PAIRS[name], "tokenizer.json")
    file = json.loads(path.read_text("utf-8"))
    library = tokenizers.Tokenizer.from_str(json.dumps(file))
    added = {token["content"]: token["id"] for token in file["added_tokens"]}
    names = [text for text, number in added.items() if tokenizer.token_to_id(text) == number]
    for text in random_texts(20_000, names[:300]):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == expected, ascii(text)
