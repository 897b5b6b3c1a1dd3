"""The scheduler and its pages under arbitrary orders: no starvation, no leaks, one writer a page."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spd.runtime.engine.page_table import PageTable, SnapshotPool
from spd.runtime.engine.request import Request
from spd.runtime.engine.scheduler import EnqueuedRound, Scheduler
from spd.runtime.engine.sequence import Detokenizer, Sequence
from spd.runtime.round.limits import NUM_RESERVED_PAGES
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.spans import program_runs
from tests.page_checks import check_pages

PAGE = 4
CHUNK = 4
CTX = 40
BLOCK = 2
MAX_DRAFT = 3


def sequence_of(name: str, prompt: tuple[int, ...], limit: int) -> Sequence:
    request = Request(name, prompt, SamplingParams())
    runs = program_runs((("prompt", len(prompt)),), CHUNK)
    silent = Detokenizer(lambda _: b"", (), 0)
    return Sequence(
        request, min(CTX, limit), (), silent, needs=SamplingSteps(), draft_cap=0, runs=runs
    )


def scheduler_of(slots: int, pages: int, *, shares_prefixes: bool = True) -> Scheduler:
    return Scheduler(
        slots=slots,
        pages=PageTable(NUM_RESERVED_PAGES + pages),
        page_size=PAGE,
        block=BLOCK,
        ctx=CTX,
        shares_prefixes=shares_prefixes,
    )


class SchedulerModel(RuleBasedStateMachine):
    """Drives a scheduler as the engine does, with rounds that accept what hypothesis draws."""

    @initialize(
        slots=st.integers(1, 4),
        spare=st.integers(0, 12),
        lag=st.integers(0, 2),
        shares_prefixes=st.booleans(),
        places=st.integers(0, 5),
    )
    def start(self, slots: int, spare: int, lag: int, shares_prefixes: bool, places: int) -> None:
        self.table = PageTable(NUM_RESERVED_PAGES + CTX // PAGE + spare)
        snapshots = SnapshotPool(places) if places and shares_prefixes else None
        self.scheduler = Scheduler(
            slots=slots,
            pages=self.table,
            page_size=PAGE,
            block=BLOCK,
            ctx=CTX,
            shares_prefixes=shares_prefixes,
            snapshots=snapshots,
        )
        self.saved = dict[
            int, list[int]
        ]()  # of each checkpoint's place, the tokens that its states took in
        self.lag = lag
        self.added = 0
        self.ended = 0
        self.rounds: list[
            list[tuple[Sequence, int]]
        ] = []  # (who took part, its epoch) of each on its way
        self.arrivals = dict[Sequence, int]()
        self.widths = dict[Sequence, list[int]]()

    # Texts of two letters share prefixes often.
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CTX - 1),
        reply_limit=st.integers(1, CTX),
    )
    def add(self, prompt: list[int], reply_limit: int) -> None:
        sequence = sequence_of(f"r{self.added}", tuple(prompt), len(prompt) + reply_limit)
        self.scheduler.add(sequence)
        self.arrivals[sequence] = self.added
        self.added += 1

    @rule()
    def prefill(self) -> None:
        sequence = self.scheduler.take_next_to_prefill(2 * MAX_DRAFT + 1)
        if sequence is None:
            return
        runs = self.scheduler.prefill_runs(sequence)
        before = sequence.prefilled
        if self.scheduler.snapshots is not None and not sequence.is_admitted:
            snapshot_tokens = [] if sequence.snapshot is None else self.saved[sequence.snapshot]
            assert snapshot_tokens == sequence.tokens()[:before], "states of another text"
        sequence.is_admitted = True
        run = next((r for r in runs if r.start <= sequence.prefilled < r.end), None)
        if run is not None and run.kind == "chunk":
            assert sequence.prefilled == run.start, "a hit cut a chunk"
        stops = [end for end in sequence.snapshot_stops if end > before]
        end = sequence.prefill_end if run is None else min([run.end, before + 4, *stops])
        self.scheduler.mark_written(sequence, end)
        self.save(
            sequence, self.scheduler.reserve_due_snapshot(sequence, before), sequence.prefilled
        )
        sequence.is_active = sequence is not self.scheduler.prefilling

    def save(self, sequence: Sequence, place: int | None, end: int) -> None:
        if place is not None:
            self.saved[place] = sequence.tokens()[:end]

    def save_all(self, sequence: Sequence) -> None:
        """Save a snapshot at the last written position."""
        writing = sequence is self.scheduler.prefilling
        end = sequence.prefilled if writing else sequence.prefill_end
        self.save(sequence, self.scheduler.reserve_snapshot_place(sequence, end), end)

    def read(self, data: st.DataObject | None) -> None:
        took_part = self.rounds.pop(0)
        self.scheduler.release_oldest_round()
        for sequence, epoch in took_part:
            if sequence.epoch != epoch or sequence.finish_reason:
                continue
            width = self.widths[sequence].pop(0)
            sequence.in_flight -= width
            room = sequence.length_limit - sequence.length
            count = min(width if data is None else data.draw(st.integers(1, width)), room)
            if count:
                sequence.commit_tokens([0] * count, 0, 0, 0.0)
            if sequence.length == sequence.length_limit:
                self.end(sequence, "length")
            elif data is not None and data.draw(st.integers(0, 9)) == 0:
                self.end(sequence, data.draw(st.sampled_from(["stop", "error"])))

    def end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        if reason != "error" and not sequence.in_flight:
            self.save_all(sequence)
        self.scheduler.retire(sequence)
        self.ended += 1

    def make_room(self, k: int, data: st.DataObject | None) -> None:
        for sequence in sorted(self.scheduler.decoding(), key=lambda s: s.epoch):
            while sequence.is_active:
                if self.scheduler.grow(sequence, min(sequence.length_bound + 2 * k + 1, CTX)):
                    break
                if self.rounds:
                    self.read(data)
                    continue
                latest = max(self.scheduler.running(), key=lambda s: s.epoch)
                assert self.arrivals[latest] == max(
                    self.arrivals[s] for s in self.scheduler.running()
                )
                generated = list(latest.generated)
                self.save_all(latest)
                self.scheduler.preempt(latest)
                assert latest.generated == generated and self.scheduler.waiting[0] is latest

    @rule(k=st.integers(0, MAX_DRAFT), data=st.data())
    def round(self, k: int, data: st.DataObject | None) -> None:
        oldest = min(self.scheduler.decoding(), key=self.arrivals.__getitem__, default=None)
        self.make_room(k, data)
        live = self.scheduler.decoding()
        launched = any(s.length_bound < s.length_limit or not s.in_flight for s in live)
        if launched:
            assert oldest in live or oldest is None or oldest.finish_reason, (
                "who came first gave way"
            )
            for sequence in live:
                sequence.in_flight += k + 1
                self.widths.setdefault(sequence, []).append(k + 1)
            self.scheduler.in_flight.append(EnqueuedRound(None, (), []))
            self.rounds.append([(sequence, sequence.epoch) for sequence in live])
        while self.rounds and (len(self.rounds) > self.lag or not launched):
            self.read(data)

    @precondition(lambda self: self.scheduler.by_id)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = self.scheduler.by_id[data.draw(st.sampled_from(list(self.scheduler.by_id)))]
        if sequence in self.scheduler.waiting:
            self.scheduler.retire(sequence)
            self.ended += 1
        else:
            self.end(sequence, "abort")

    @invariant()
    def agree(self) -> None:
        check_pages(self.scheduler)
        line = [self.arrivals[sequence] for sequence in self.scheduler.waiting]
        assert line == sorted(line), "a later request came first"
        inside = [self.arrivals[sequence] for sequence in self.scheduler.running()]
        assert not line or not inside or max(inside) < line[0]
        assert self.added == self.ended + len(self.scheduler.by_id)
        # A page that a round on its way may write to belongs to no other sequence.
        for sequence, epoch in (entry for took_part in self.rounds for entry in took_part):
            assert sequence.epoch == epoch or sequence.finish_reason, (
                "preempted under a running round"
            )

    def teardown(self) -> None:
        """Run every request to its end, after which every page is available."""
        for _ in range(60 * (1 + len(self.scheduler.by_id))):
            if not self.scheduler.by_id and not self.rounds:
                break
            self.prefill()
            self.round(1, None)
        assert self.scheduler.by_id == {} and self.rounds == []
        assert self.table.num_available == self.table.num_pages - NUM_RESERVED_PAGES
        assert self.added == self.ended


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def prefilled(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
        assert scheduler.take_next_to_prefill(0) is sequence
        scheduler.mark_written(sequence, sequence.prefill_end)
        sequence.is_active = True


def test_pages_stay_until_no_round_can_touch_them() -> None:
    """The pages of a finished sequence become available once the rounds enqueued before its end have run."""
    scheduler = scheduler_of(2, 12, shares_prefixes=False)
    sequence = sequence_of("one", (1,) * 9, 30)
    prefilled(scheduler, sequence)
    free = scheduler.pages.num_available
    for _ in range(2):
        scheduler.in_flight.append(EnqueuedRound(None, (), []))
    scheduler.release_oldest_round()
    sequence.finish_reason = "stop"
    scheduler.retire(sequence)
    assert scheduler.pages.num_available == free, "a round on its way may still write there"
    scheduler.in_flight.append(
        EnqueuedRound(None, (), [])
    )  # enqueued after the end: its rows are masked
    scheduler.release_oldest_round()
    assert scheduler.pages.num_available == 12


def test_a_prompt_finds_what_the_one_before_it_wrote() -> None:
    """A prompt waits while another writes their common beginning, then shares it."""
    scheduler = scheduler_of(3, 30)
    first, second = (sequence_of(f"{last}", (*range(18), last), 30) for last in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.take_next_to_prefill(0) is first
    scheduler.mark_written(first, 8)
    assert scheduler.take_next_to_prefill(0) is first
    scheduler.mark_written(first, first.prefill_end)
    assert scheduler.take_next_to_prefill(0) is second
    assert second.prefilled == 16 and second.pages[:4] == first.pages[:4]
    check_pages(scheduler)


def test_a_replay_is_written_as_the_text_was() -> None:
    """Prompt chunks by the prefill program, generated tokens by tiles, and nothing beyond."""
    scheduler = scheduler_of(1, 10)
    sequence = sequence_of("one", (1,) * 11, 40)
    prefilled(scheduler, sequence)
    assert scheduler.grow(sequence, 20)
    sequence.commit_tokens([5] * 9, 8, 8, 0.0)
    scheduler.preempt(sequence)
    assert sequence.metrics.preemptions == 1
    runs: list[Any] = [tuple(run) for run in scheduler.prefill_runs(sequence)]
    assert runs == [(0, 4, "chunk"), (4, 8, "chunk"), (8, 19, "tile")]
    assert scheduler.take_next_to_prefill(0) is sequence
    assert sequence.prefilled == 19, "its own pages are found again, the last one too"


def ended(scheduler: Scheduler, prompt: tuple[int, ...], reply: list[int], reason: str) -> Sequence:
    """Return a sequence that has committed its reply and ended."""
    sequence = sequence_of("one", prompt, len(prompt) + len(reply))
    prefilled(scheduler, sequence)
    assert scheduler.grow(sequence, sequence.length + len(reply))
    sequence.commit_tokens(reply, 0, 0, 0.0)
    sequence.finish_reason = reason
    scheduler.retire(sequence)
    return sequence


def going_on(name: str, previous: Sequence, message: tuple[int, ...]) -> Sequence:
    """Return the sequence of the next turn, in which the reply is a generated span."""
    turn = sequence_of(name, (*previous.tokens(), *message), 40)
    spans = (("prompt", len(previous.request.prompt_ids)), ("generated", len(previous.generated)))
    turn.runs = program_runs((*spans, ("prompt", len(message))), CHUNK)
    return turn


def test_only_a_sequence_that_goes_on_takes_the_last_page_too() -> None:
    """All but the reply's last token is cached.

    Only one sequence takes the page that was not full.
    """
    scheduler = scheduler_of(3, 30)
    previous = ended(scheduler, tuple(range(9)), [5] * 6, "stop")
    turn = going_on("turn", previous, (7, 8, 9))
    other = going_on("other", previous, (8, 8, 8))
    for sequence, cached in ((turn, 14), (other, 12)):
        scheduler.add(sequence)
        assert scheduler.take_next_to_prefill(0) is sequence
        assert sequence.prefilled == cached
        check_pages(scheduler)
        scheduler.mark_written(sequence, sequence.prefill_end)
    assert turn.pages[:3] == other.pages[:3] and turn.pages[3] != other.pages[3]


@pytest.mark.parametrize("change", ["tokens", "spans", "error", "sharing", "shorter"])
def test_a_last_page_that_holds_something_else_is_left(change: str) -> None:
    """With other tokens, another program, or after an error only full pages are reused."""
    scheduler = scheduler_of(3, 30, shares_prefixes=change != "sharing")
    previous = ended(scheduler, tuple(range(9)), [5] * 6, "error" if change == "error" else "stop")
    if change == "tokens":
        previous.generated[-2] = 6
    if change == "shorter":
        del previous.generated[-2:]
    turn = going_on("turn", previous, () if change == "shorter" else (7, 8, 9))
    if change == "spans":
        turn.runs = program_runs([("prompt", 9), ("generated", 3), ("prompt", 6)], CHUNK)
    scheduler.add(turn)
    assert scheduler.take_next_to_prefill(0) is turn
    assert turn.prefilled == {"error": 8, "sharing": 0}.get(change, 12)
    check_pages(scheduler)


def test_a_last_page_waits_until_there_is_room_to_go_on() -> None:
    """A failed admission leaves the page stored; another allocation may take it."""
    scheduler = scheduler_of(2, 12)
    previous = ended(scheduler, tuple(range(9)), [5] * 6, "stop")
    full = sequence_of("full", (3,) * 24, 40)
    prefilled(scheduler, full)
    turn = going_on("turn", previous, (7,) * 12)
    scheduler.add(turn)
    assert scheduler.take_next_to_prefill(0) is None
    check_pages(scheduler)
    full.finish_reason = "error"
    scheduler.retire(full)
    assert scheduler.take_next_to_prefill(0) is turn and turn.prefilled == 14
    turn.finish_reason = "stop"
    scheduler.retire(turn)
    prefilled(scheduler, sequence_of("large", (4,) * 38, 40))
    check_pages(scheduler)


def test_without_room_for_whole_blocks_single_pages_do() -> None:
    scheduler = scheduler_of(2, 11, shares_prefixes=False)
    sequence = sequence_of("one", (1,), 40)
    prefilled(scheduler, sequence)
    assert len(sequence.pages) == BLOCK
    assert scheduler.grow(sequence, 33) and len(sequence.pages) == 10
    other = sequence_of("other", (1,), 9)
    prefilled(scheduler, other)
    assert len(other.pages) == 1
    assert not scheduler.grow(other, 5) and len(other.pages) == 1
