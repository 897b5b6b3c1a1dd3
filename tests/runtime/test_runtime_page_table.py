"""Pages against a model made of plain dictionaries, and what their hashes depend on."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spd.runtime.engine.page_table import PageTable, Tail, TextHashes
from spd.runtime.round.limits import NUM_RESERVED
from spd.runtime.round.spans import Run
from tests.page_checks import check_table

digests = st.integers(0, 3).map(lambda n: b"digest %d" % n)


class PageTableModel(RuleBasedStateMachine):
    """What each page is.

    users: uses of each; published: its digest; tails: what stands before it; idle: may be
    found and is used by no sequence, oldest first.
    """

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.everything = set(range(NUM_RESERVED, NUM_RESERVED + size))
        self.table = PageTable(NUM_RESERVED + size)
        self.users: Counter[int] = Counter()
        self.published: dict[int, bytes] = {}
        self.tails: dict[int, bytes] = {}
        self.idle: list[int] = []

    def free(self) -> set[int]:
        return self.everything - set(self.users) - set(self.idle)

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        if count > len(self.free()) + len(self.idle):
            with pytest.raises(MemoryError, match=f"{count} pages wanted"):
                self.table.allocate(count)
            return  # the invariants see that nothing was taken
        while len(self.free()) < count:
            page = self.idle.pop(0)  # the oldest, and no more than needed
            self.published.pop(page, None) or self.tails.pop(page)
        free = self.free()
        pages = self.table.allocate(count)
        assert pages == sorted(free)[:count]
        self.users.update(pages)

    @rule(wanted=st.lists(digests, max_size=4))
    def match(self, wanted: list[bytes]) -> None:
        page_of = {digest: page for page, digest in self.published.items()}
        expected = []
        for digest in wanted:
            if digest not in page_of:
                break
            expected.append(page_of[digest])
        assert self.table.match(wanted) == expected
        self.users.update(expected)
        self.idle = [page for page in self.idle if page not in expected]

    @rule(page=st.integers(NUM_RESERVED, 14), digest=digests)
    def publish(self, page: int, digest: bytes) -> None:
        if page not in self.users:
            return
        self.table.publish(page, digest)
        if page not in {**self.published, **self.tails} and digest not in self.published.values():
            self.published[page] = digest

    @rule(data=st.data(), before=digests)
    def keep_tail(self, data: st.DataObject, before: bytes) -> None:
        candidates = sorted(set(self.users) - set(self.tails))
        if not candidates:
            return
        page = data.draw(st.sampled_from(candidates))
        self.table.keep_tail(before, Tail(page, page, before))
        if page in self.published:
            return
        for older in [other for other, digest in self.tails.items() if digest == before]:
            del self.tails[older]
            self.idle = [other for other in self.idle if other != older]
        self.tails[page] = before

    @rule(before=digests)
    def take_tail(self, before: bytes) -> None:
        text: Any = SimpleNamespace(before=lambda end: before)
        found = self.table.take_tail(text, 0, 99)
        expected = [page for page, digest in self.tails.items() if digest == before and page in self.idle]
        assert ([] if found is None else [found.page]) == expected
        if found is not None:
            assert found == (found.page, found.page, before)
            del self.tails[found.page]
            self.idle.remove(found.page)
            self.users[found.page] = 1

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.everything)))
        self.table.forget(page)
        self.published.pop(page, None)
        self.tails.pop(page, None)
        self.idle = [other for other in self.idle if other != page]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.users:
            return
        uses = sorted(self.users.elements())
        picked = data.draw(st.lists(st.integers(0, len(uses) - 1), unique=True, max_size=len(uses)))
        pages = [uses[i] for i in picked]
        self.table.release(pages)
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                del self.users[page]
                if page in {**self.published, **self.tails}:
                    self.idle.append(page)

    @invariant()
    def agree(self) -> None:
        check_table(self.table)
        assert self.table.num_available == len(self.free()) + len(self.idle)
        for page in self.everything:
            assert self.table.is_published(page) == (page in {**self.published, **self.tails})


TestPageTable = PageTableModel.TestCase
TestPageTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- hashes ------------------------------------------------------------------------------------------

TOKENS = list(range(100, 112))
RUNS = [Run(0, 12, "tile")]


def hashes(tokens: list[int] = TOKENS, runs: list[Run] = RUNS, end: int = 12) -> list[bytes]:
    return TextHashes(tokens, runs, 4).pages(end)


def test_hashes_differ_from_the_first_changed_token_on() -> None:
    for at in range(12):
        changed = [*TOKENS[:at], 5, *TOKENS[at + 1 :]]
        equal = [a == b for a, b in zip(hashes(changed), hashes(), strict=True)]
        assert equal == [page < at // 4 for page in range(3)]


def test_hashes_tell_ids_apart_that_read_alike() -> None:
    texts = [[1, 23, 4, 5], [12, 3, 4, 5], [1, 2, 34, 5], [1, 2, 3, 45]]
    assert len({TextHashes(text, RUNS, 4).before(4) for text in texts}) == 4


def test_hashes_depend_on_the_programs_that_wrote_the_page() -> None:
    cuts = [
        [Run(0, 12, "tile")],
        [Run(0, 8, "chunk"), Run(8, 12, "tile")],
        [Run(0, 4, "tile"), Run(4, 12, "chunk")],
        [Run(0, 2, "tile"), Run(2, 10, "chunk"), Run(10, 12, "tile")],
        [Run(0, 3, "tile"), Run(3, 11, "chunk"), Run(11, 12, "tile")],
        [Run(0, 4, "chunk"), Run(4, 8, "chunk"), Run(8, 12, "chunk")],
    ]
    last = [hashes(runs=runs)[-1] for runs in cuts]
    assert len(set(last)) == len(cuts)
    # Which chunk a page lies in counts too: the second half of one is not the first half of another.
    second = [
        hashes([7] * 12, runs)[1]
        for runs in ([Run(0, 8, "chunk")], [Run(0, 4, "chunk"), Run(4, 12, "chunk")])
    ]
    assert second[0] != second[1]
