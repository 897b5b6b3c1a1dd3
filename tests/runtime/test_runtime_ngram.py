"""The proposer of prompt lookup against a plain search, on short alphabets where matches abound."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.kernels.dispatch import load_kernels
from spd.runtime.proposers.ngram import NgramLookup
from spd.runtime.round.rows import EMPTY_SLOT, SlotView
from spd.runtime.round.state import RoundState
from tests.prompt_lookup import search

MAX_LEN = 40
MAX_DRAFT = 8
texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
texts |= st.lists(st.integers(0, 1), min_size=1, max_size=12)


def propose(
    texts: Sequence[Any], k: int, shortest: int, longest: int, junk: int, slack: int
) -> Any:
    """Return the drafts of a batch, in which None is an inactive slot.

    junk: the token after the texts. slack: the excess of the host's bound.
    """
    state = RoundState(
        slots=len(texts), max_len=MAX_LEN, max_draft=MAX_DRAFT, pages=1, device="cpu"
    )
    state.tokens.fill_(junk)
    state.draft.fill_(-7)
    views = []
    for slot, text in enumerate(texts):
        row = [junk] if text is None else list(text)
        state.admit(slot, torch.tensor(row), MAX_LEN, 0, [], MAX_LEN)
        state.set_active(slot, text is not None)
        views.append(EMPTY_SLOT if text is None else SlotView(min(len(row) + slack, MAX_LEN), ()))
    state.num_drafts.fill_(3)
    NgramLookup(load_kernels("torch"), shortest, longest).draft(state, k, 0, views)
    assert (state.draft[:, k:] == -7).all()
    counts = state.num_drafts.tolist()
    assert all(0 <= count <= k for count in counts)
    return [drafts[:count] for drafts, count in zip(state.draft.tolist(), counts, strict=True)]


@settings(max_examples=400, deadline=None)
@given(
    **{
        "batch": st.lists(st.none() | texts, min_size=1, max_size=4),
        "k": st.integers(1, MAX_DRAFT),
    },
    **{"sizes": st.tuples(st.integers(1, 5), st.integers(0, 5)), "junk": st.integers(0, 2)},
    slack=st.integers(0, 9),
)
def test_drafts_equal_a_plain_search(
    batch: list[Any], k: int, sizes: Any, junk: int, slack: int
) -> None:
    shortest = sizes[0]
    longest = sizes[0] + sizes[1]
    expected = [[] if text is None else search(text, k, shortest, longest) for text in batch]
    assert (
        propose(texts=batch, k=k, shortest=shortest, longest=longest, junk=junk, slack=slack)
        == expected
    )
