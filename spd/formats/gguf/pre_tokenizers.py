"""Pre-tokenizers of byte-level vocabularies, by the names in `tokenizer.ggml.pre`.

A GGUF file has the name of the rule only. Each rule is written here as in the `tokenizer.json` of
the models that it was named after, so that ids equal theirs. Where llama.cpp only approximates one,
its ids differ from these in rare cases. Names that are not listed are refused: a wrong rule gives
wrong ids without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
Step = Mapping[str, JsonValue]
"""A pre-tokenizer or normalizer of `tokenizer.json`."""


@dataclass(frozen=True)
class PreTokenizer:
    """The steps from a text to words; merges run within a word."""

    steps: tuple[Step, ...]
    normalizer: Step | None = None
    ignores_merges: bool = False
    """True if a word that is a token stays one, whatever its merges would make of it.

    The library calls it `ignore_merges`.
    """
    names: str = field(default="", compare=False)
    """Values of `tokenizer.ggml.pre`, a blank between them."""


def _cutting_steps(*patterns: str) -> tuple[Step, ...]:
    """Return steps that cut at the matches of each pattern in turn, then spell bytes.

    The last step, which spells bytes as characters, cuts nothing.
    """
    cuts: list[Step] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return *cuts, _byte_level_step(use_regex=False)


def _byte_level_step(*, use_regex: bool) -> Step:
    """Return the step that spells bytes as characters, with or without GPT-2's pattern."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


def _digits_step(*, single: bool) -> Step:
    """Return the step that cuts digits off: each one alone, or a run of them in one piece."""
    return {"type": "Digits", "individual_digits": single}


_NFC: Step = {"type": "NFC"}
"""The normalizer that composes characters."""
_GPT2 = (_byte_level_step(use_regex=True),)
_DIGITS_GPT2 = (_digits_step(single=True), *_GPT2)
_FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    *_GPT2,
    _digits_step(single=False),
    *_cutting_steps("[0-9][0-9][0-9]")[:1],
)

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""English contractions."""
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
"""Line ends with the blanks before them, then blanks without the one before a word."""


def _words_pattern(letters: str, digits: str, marks: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Return the pattern of tiktoken's cl100k with these letters, digits and marks.

    letters, digits, marks: the patterns of a word's letters, of a number and of punctuation.
    """
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{marks}|{_LINES}"


_THREE_DIGITS = _words_pattern(r"\p{L}+", r"\p{N}{1,3}")
_ONE_DIGIT = _words_pattern(r"\p{L}+", r"\p{N}")
_WITH_MARKS = _words_pattern(r"[\p{L}\p{M}]+", r"\p{N}", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK_BEFORE = r"[^\r\n\p{L}\p{N}]?"
"""A blank or a mark that goes with the word behind it."""


def _cased_pattern(suffix: str, digits: str) -> str:
    """Return a pattern that begins a word where a capital follows a small letter, as in o200k.

    suffix, digits: the patterns of what may follow a word's letters, and of a number.
    """
    words = f"{_MARK_BEFORE}{_UPPER}*{_LOWER}+{suffix}|{_MARK_BEFORE}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_O200K = _cased_pattern(f"{_SUFFIX}?", r"\p{N}{1,3}")
_TEKKEN = _cased_pattern("", r"\p{N}")
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"[\p{Han}]+|" + _O200K.replace(_UPPER, f"[{_UPPER}{_NOT_HAN}").replace(
    _LOWER, f"[{_LOWER}{_NOT_HAN}"
).replace(r"[\r\n/]*", r"[\r\n]*")

_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CHINESE,
    _ASCII_MARKS
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES,
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""The letters with two cases that the first DeepSeek models know."""
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_DIGITS = (_digits_step(single=True), _byte_level_step(use_regex=False))
_DEEPSEEK_LLM = (
    *_cutting_steps(
        "[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$", _ASIAN
    )[:-1],
    *_DEEPSEEK_DIGITS,
)
_DEEPSEEK_CODER = (
    *_cutting_steps("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN)[:-1],
    *_DEEPSEEK_DIGITS,
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CHINESE,
    _cased_pattern(f"{_SUFFIX}?", r"\p{N}"),
)
_SEED = _words_pattern(r"\p{L}+", r"\p{N}", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_RULES = (
    PreTokenizer(
        _cutting_steps(_THREE_DIGITS),
        ignores_merges=True,
        names="llama3 llama-v3 llama-bpe smaug-bpe falcon3 falcon-h1 "
        "pixtral midm-2.0 lfm2 glm4 glm5",
    ),
    PreTokenizer(
        _cutting_steps(_THREE_DIGITS),
        names="dbrx chatglm-bpe",
    ),
    PreTokenizer(
        _cutting_steps(_ONE_DIGIT),
        _NFC,
        names="qwen2 deepseek-r1-qwen f2llmv2 stablelm2 hunyuan",
    ),
    PreTokenizer(
        _cutting_steps(_ONE_DIGIT),
        names="kormo megrez solar-open grok-2",
    ),
    PreTokenizer(
        _cutting_steps(_WITH_MARKS),
        _NFC,
        names="qwen35",
    ),
    PreTokenizer(
        _cutting_steps(_O200K),
        ignores_merges=True,
        names="gpt-4o llama4 kanana2",
    ),
    PreTokenizer(
        _cutting_steps(_O200K),
        names="minimax-m2",
    ),
    PreTokenizer(
        _cutting_steps(_TEKKEN),
        ignores_merges=True,
        names="tekken",
    ),
    PreTokenizer(
        _cutting_steps(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
        names="tiny_aya cohere2moe",
    ),
    PreTokenizer(
        _cutting_steps(_KIMI),
        names="kimi-k2",
    ),
    PreTokenizer(
        _cutting_steps(*_DEEPSEEK3),
        names="deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    PreTokenizer(
        _DEEPSEEK_LLM,
        names="deepseek-llm",
    ),
    PreTokenizer(
        _DEEPSEEK_CODER,
        names="deepseek-coder",
    ),
    PreTokenizer(
        _cutting_steps(*_YOUTU),
        ignores_merges=True,
        names="youtu",
    ),
    PreTokenizer(
        _cutting_steps(_SEED),
        names="seed-coder",
    ),
    PreTokenizer(
        _cutting_steps(_BAILING),
        names="bailingmoe bailingmoe2 llada-moe",
    ),
    PreTokenizer(
        _cutting_steps(r"\p{N}{1,3}", _words_pattern(r"\p{L}+", r"\p{N}+")),
        ignores_merges=True,
        names="minicpm5",
    ),
    PreTokenizer(
        _GPT2,
        names="gpt-2 phi-2 gigachat a.x-4.0 mellum trillion granite-docling exaone4",
    ),
    PreTokenizer(
        _GPT2,
        _NFC,
        names="mpt olmo",
    ),
    PreTokenizer(
        _DIGITS_GPT2,
        names="smollm starcoder refact codeshell exaone minerva-7b mellum2",
    ),
    PreTokenizer(
        _DIGITS_GPT2,
        _NFC,
        names="command-r",
    ),
    PreTokenizer(
        _FALCON,
        names="falcon",
    ),
)
PRE_TOKENIZERS = {name: rule for rule in _RULES for name in rule.names.split()}
"""Rules by their names in `tokenizer.ggml.pre`."""

_RULE_BY_ARCHITECTURE = {
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen3next": "qwen2",
    "mimo2": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "mistral3": "tekken",
    "gpt-oss": "gpt-4o",
    "gptoss": "gpt-4o",
    "lfm2": "lfm2",
    "command-r": "command-r",
    "cohere2": "command-r",
    "glm4": "glm4",
    "glm4moe": "glm4",
    "minimax-m2": "minimax-m2",
    "exaone4": "exaone4",
    "smollm3": "smaug-bpe",
}
"""Names of rules by architecture, for files without a name: those with one tokenizer alone.

Ollama writes such files.
"""


def pre_tokenizer_of(name: str, architecture: str) -> PreTokenizer | None:
    """Return the rule of a name in `tokenizer.ggml.pre`; None where it is not known.

    An empty name or `default` stands for the rule of the architecture.
    """
    if name in ("", "default"):
        name = _RULE_BY_ARCHITECTURE.get(architecture, "")
    return PRE_TOKENIZERS.get(name)
