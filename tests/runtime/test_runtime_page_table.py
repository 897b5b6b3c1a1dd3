"""The page table against a model of dictionaries, text hashes, and the runs of programs."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spd.runtime.engine.page_table import PageTable, Tail, TextHashes
from spd.runtime.round.limits import NUM_RESERVED_PAGES
from spd.runtime.round.spans import ProgramRun, kinds_in, program_runs, reusable_prefix, runs_below
from tests.page_checks import check_table

digests = st.integers(0, 3).map(lambda n: b"digest %d" % n)
spans_lists = st.lists(
    st.tuples(st.sampled_from(["prompt", "generated"]), st.integers(0, 19)), max_size=5
)
Spans = list[tuple[str, int]]
Position = tuple[
    str, int
]  # how a position is written: ("tile", 0) or ("chunk", offset in its chunk)


class PageTableModel(RuleBasedStateMachine):
    """The state of each page: its uses, its digest or prefix, and the idle ones, the oldest first."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.everything = set(range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + size))
        self.table = PageTable(NUM_RESERVED_PAGES + size)
        self.users = Counter[int]()
        self.idle = list[int]()
        self.published = dict[int, bytes]()
        self.tails = dict[int, bytes]()

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

    @rule(prefix=st.lists(digests, max_size=4))
    def match(self, prefix: list[bytes]) -> None:
        page_of = {digest: page for page, digest in self.published.items()}
        expected = [page_of[digest] for digest in itertools.takewhile(page_of.__contains__, prefix)]
        assert self.table.match_prefix(prefix) == expected
        self.users.update(expected)
        self.idle = [page for page in self.idle if page not in expected]

    @rule(page=st.integers(NUM_RESERVED_PAGES, 14), digest=digests)
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
        self.table.store_tail(before, Tail(page, page, before))
        if page in self.published:
            return
        for older in [other for other, digest in self.tails.items() if digest == before]:
            del self.tails[older]
            self.idle = [other for other in self.idle if other != older]
        self.tails[page] = before

    @rule(before=digests)
    def take_tail(self, before: bytes) -> None:
        text: Any = SimpleNamespace(prefix_hash=lambda end: before)
        tail = self.table.take_tail(text, 0, 99)
        expected = [
            page for page, digest in self.tails.items() if digest == before and page in self.idle
        ]
        assert ([] if tail is None else [tail.page]) == expected
        if tail is not None:
            assert tail == (tail.page, tail.page, before)
            del self.tails[tail.page]
            self.idle.remove(tail.page)
            self.users[tail.page] = 1

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.everything)))
        self.table.unpublish(page)
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
TOKENS = list(range(100, 112))
RUNS = [ProgramRun(0, 12, "tile")]


def hashes(tokens: list[int] = TOKENS, runs: list[ProgramRun] = RUNS, end: int = 12) -> list[bytes]:
    return TextHashes(tokens, runs, 4).page_hashes(end)


def test_hashes_differ_from_the_first_changed_token_on() -> None:
    """Also for ids whose digits are equal when joined."""
    for at in range(12):
        changed = [*TOKENS[:at], 5, *TOKENS[at + 1 :]]
        equal = [a == b for a, b in zip(hashes(changed), hashes(), strict=True)]
        assert equal == [page < at // 4 for page in range(3)]
    texts = [[1, 23, 4, 5], [12, 3, 4, 5], [1, 2, 34, 5], [1, 2, 3, 45]]
    assert len({TextHashes(text, RUNS, 4).prefix_hash(4) for text in texts}) == 4


def test_hashes_depend_on_the_programs_that_wrote_the_page() -> None:
    cuts = [[ProgramRun(0, 12, "tile")], [ProgramRun(0, 8, "chunk"), ProgramRun(8, 12, "tile")]]
    cuts += [
        [ProgramRun(0, 4, "tile"), ProgramRun(4, 12, "chunk")],
        [ProgramRun(i, i + 4, "chunk") for i in (0, 4, 8)],
    ]
    cuts += [
        [ProgramRun(0, n, "tile"), ProgramRun(n, n + 8, "chunk"), ProgramRun(n + 8, 12, "tile")]
        for n in (2, 3)
    ]
    last = [hashes(runs=runs)[-1] for runs in cuts]
    assert len(set(last)) == len(cuts)
    # Which chunk a page lies in counts too: the second half of one is not the first half of another.
    halves = [ProgramRun(0, 8, "chunk")], [ProgramRun(0, 4, "chunk"), ProgramRun(4, 12, "chunk")]
    assert hashes([7] * 12, halves[0])[1] != hashes([7] * 12, halves[1])[1]


def positions_of(spans: Spans, chunk: int) -> list[Position]:
    """Return how each position is written: full chunks of a prompt span but its last token, else tiles."""
    written: list[Position] = []
    for origin, length in spans:
        chunked = (max(length, 1) - 1) // chunk * chunk if origin == "prompt" else 0
        written += [("chunk", i % chunk) if i < chunked else ("tile", 0) for i in range(length)]
    return written


def expand(runs: list[ProgramRun]) -> list[Position]:
    """Return how each position is written by runs.

    Assert that they are contiguous and tiles are merged.
    """
    written: list[Position] = []
    for i, run in enumerate(runs):
        assert run.start == len(written) < run.end
        assert i == 0 or not (run.kind == runs[i - 1].kind == "tile")
        written += [(run.kind, n if run.kind == "chunk" else 0) for n in range(run.end - run.start)]
    return written


@settings(max_examples=250, deadline=None)
@given(spans=spans_lists, chunk=st.integers(1, 6), data=st.data(), extension=st.integers(-3, 9))
def test_runs_follow_the_rule(
    spans: Spans, chunk: int, data: st.DataObject, extension: int
) -> None:
    """Also clipped to full chunks, and extended by tiles; a reusable prefix cuts no chunk."""
    runs = program_runs(spans, chunk)
    written = positions_of(spans, chunk)
    tile = ("tile", 0)
    assert expand(runs) == written
    assert all(run.end - run.start == chunk for run in runs if run.kind == "chunk")
    end = data.draw(st.integers(0, len(written)))
    uncut_ends = [
        n for n in range(end + 1) if [*written, tile][n][0] == "tile" or written[n][1] == 0
    ]
    assert reusable_prefix(program_runs(spans, chunk), end) == max(uncut_ends)
    expected = written[:end]
    while expected and expected[-1][0] == "chunk" and expected[-1][1] < chunk - 1:
        cut = expected[-1][1] + 1
        expected[-cut:] = [tile] * cut
    assert expand(runs_below(runs, end)) == expected
    end = len(written) + max(0, extension)
    assert expand(runs_below(runs, end)) == written + [tile] * (end - len(written))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_windows_look_alike_exactly_where_their_positions_do(width: int, chunk: int) -> None:
    """Kinds of two windows are equal if and only if all their positions are written the same way."""
    texts = [[("prompt", 14)], [("prompt", 3), ("generated", 4), ("prompt", 9)]]
    texts += [[("generated", 2), ("prompt", 1), ("prompt", 11)]]
    looks: dict[object, set[object]] = {}
    for spans in texts:
        positions = positions_of(spans, chunk)
        runs = program_runs(spans, chunk)
        for start in range(len(positions) - width + 1):
            view = kinds_in(runs, start, start + width)
            looks.setdefault(view, set()).add(tuple(positions[start : start + width]))
    assert all(len(written) == 1 for written in looks.values())
    assert len({text for written in looks.values() for text in written}) == len(looks)
