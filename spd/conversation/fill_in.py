"""Fill-in-the-middle prompts, by the tokens that a vocabulary has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class FillInForm:
    """The tokens before the prefix, before the suffix, and before the middle that the reply
    fills in.
    """

    prefix: str
    suffix: str
    middle: str | None
    """None: the reply follows the prefix without a token between."""
    suffix_first: bool = False


FILL_IN_FORMS = (
    FillInForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillInForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillInForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillInForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInForm("▁<PRE>", "▁<SUF>", "▁<MID>"),
    FillInForm("<PRE>", "<SUF>", "<MID>"),
    FillInForm("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FillInForm("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)
"""Qwen and Gemma, StarCoder and Granite, SantaCoder, GLM, DeepSeek, Code Llama, Seed-Coder,
Mistral."""
FILL_IN_END_TOKENS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|repo_name|>",
    "▁<EOT>",
    "<EOT>",
)
"""Tokens that end the middle, besides those that end every text."""


def find_fill_in_form(tokenizer: Tokenizer) -> FillInForm | None:
    """Return the first form whose tokens are all in the vocabulary; None where it has none."""
    for form in FILL_IN_FORMS:
        marks = (form.prefix, form.suffix, form.middle)
        if all(mark is None or tokenizer.token_to_id(mark) is not None for mark in marks):
            return form
    return None


def fill_in_ids(
    tokenizer: Tokenizer, form: FillInForm, text: Sequence[int], suffix: Sequence[int]
) -> list[int]:
    """Return the prompt, as token ids, for the middle between the tokens `text` and `suffix`."""
    before = _with_mark(tokenizer, form.prefix, text)
    behind = _with_mark(tokenizer, form.suffix, suffix)
    ids = [*behind, *before] if form.suffix_first else [*before, *behind]
    middle = [] if form.middle is None else _with_mark(tokenizer, form.middle, ())
    first = tokenizer.encode("", add_special=True)[:1]
    if first == [tokenizer.eos_id] != [tokenizer.bos_id]:
        first = []  # such a tokenizer puts this token behind a text
    return [*first, *ids, *middle]


def fill_in_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of tokens that end the middle."""
    ids = (tokenizer.token_to_id(mark) for mark in FILL_IN_END_TOKENS)
    return tuple(token for token in ids if token is not None)


def _with_mark(tokenizer: Tokenizer, mark: str, ids: Sequence[int]) -> list[int]:
    """Return the id of a mark's token, then `ids`."""
    token = tokenizer.token_to_id(mark)
    assert token is not None, "a form is chosen by its tokens"
    return [token, *ids]
