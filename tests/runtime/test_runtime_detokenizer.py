"""Incremental text equals the decoded text, and stops do not depend on how tokens fall into rounds."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from spd.runtime.engine.sequence import Detokenizer


def run(
    tokens: Sequence[bytes],
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    rounds: Sequence[int] = (),
) -> tuple[list[str], int | None]:
    """Return the text of each round, and how many tokens were taken up to a stop.

    rounds: the tokens of each round, by default one.
    """
    detokenizer = Detokenizer(lambda ids: b"".join(map(tokens.__getitem__, ids)), stops, min_tokens)
    sizes = list(rounds or [1] * len(tokens))
    taken_count = 0
    texts: list[str] = []
    while taken_count < len(tokens):
        for _ in range(sizes.pop(0) if sizes else len(tokens)):
            if taken_count < len(tokens):
                taken_count += 1
                if detokenizer.push(taken_count - 1):
                    return [*texts, detokenizer.take_text(final=True)], taken_count
        texts.append(detokenizer.take_text())
    return [*texts, detokenizer.take_text(final=True)], None


def by_definition(
    tokens: Sequence[bytes], stops: Sequence[str], min_tokens: int
) -> tuple[str, int | None]:
    """Return the text of a request, and the token count at its stop, by the definition."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for count, token in enumerate(tokens, 1):
        length_before = len(text)
        text += decoder.decode(token)
        # Occurrences that this token's characters complete; the one that begins first wins.
        starts = [text.find(stop, max(0, length_before - len(stop) + 1)) for stop in stops]
        if count > min_tokens and max(starts, default=-1) >= 0:
            return text[: min(start for start in starts if start >= 0)], count
    return text + decoder.decode(b"", final=True), None


words = st.text("ab", max_size=3) | st.sampled_from("é€🎈ß ")
pieces = (
    words.map(str.encode) | st.sampled_from([b"\xc3", b"\xa9", b"\xe2\x82"]) | st.binary(max_size=3)
)


@settings(max_examples=800, deadline=None)
@given(
    tokens=st.lists(pieces, max_size=10),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 5),
    rounds=st.lists(st.integers(0, 4), max_size=12),
)
@example(tokens=[b"\xf0\x9f", b"\x8e", b"\x88\xff"], stops=[], min_tokens=0, rounds=[1, 2])
@example(tokens=[b"a", b"b", b"c"], stops=["ab"], min_tokens=2, rounds=[3])
@example(tokens=[b"a", b"b", b"c"], stops=["abc"], min_tokens=2, rounds=[1, 1, 1])
@example(tokens=[b"a", b"a", b"a"], stops=["aa"], min_tokens=2, rounds=[3])
def test_stops_are_found(
    tokens: list[bytes], stops: list[str], min_tokens: int, rounds: list[int]
) -> None:
    """A stop counts if a token after the first min_tokens completes it, in whichever round."""
    texts, stopped = run(tokens, stops, min_tokens, rounds)
    assert ("".join(texts), stopped) == by_definition(tokens, stops, min_tokens)
    assert stopped or "".join(texts) == b"".join(tokens).decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.text("ab", min_size=1, max_size=2).map(str.encode), max_size=10),
    stops=st.lists(st.text("ab", min_size=2, max_size=4), min_size=1, max_size=3),
)
def test_only_the_beginning_of_a_stop_is_held_back(tokens: list[bytes], stops: list[str]) -> None:
    """After each token, only text that may still become a stop is withheld."""
    texts, stopped = run(tokens, stops)
    returned = ""
    for count, text in enumerate(texts[: len(tokens) if stopped is None else stopped - 1], 1):
        returned += text
        withheld = b"".join(tokens[:count]).decode()[len(returned) :]
        assert not withheld or any(stop.startswith(withheld) and stop != withheld for stop in stops)
