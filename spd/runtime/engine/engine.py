"""The engine: requests in, events out. The only owner of sequences.

`step` writes a piece of a prompt, enqueues a round and reads one that was enqueued `lag` rounds ago, so
the host never stands between two rounds; with lag 0 it reads at once. The text does not depend on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Listed
from functools import reduce
from itertools import islice, takewhile
from operator import attrgetter, or_

import torch

from spd.errors import UsageError
from spd.formats.tokenizer import Tokenizer
from spd.kernels.round.commit import EMISSION_HEAD, GOING_ON, read_emission
from spd.runtime.engine import clock
from spd.runtime.engine.client import EngineClient, EngineInfo
from spd.runtime.engine.device import open_device, out_of_memory_error
from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.engine.grammar import GrammarError
from spd.runtime.engine.metrics import RequestMetrics, RoundRecord
from spd.runtime.engine.page_table import Checkpoints, PageTable
from spd.runtime.engine.request import Completion, Event, Request
from spd.runtime.engine.scheduler import EnqueuedRound, Scheduler
from spd.runtime.engine.sequence import NO_SLOT, RequestValidator, Sequence
from spd.runtime.engine.trace import round_record
from spd.runtime.load.progress import Progress
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.plan import make_plan
from spd.runtime.round.limits import NUM_RESERVED, PAGE_SIZE, mask_width
from spd.runtime.round.out_of_memory import is_out_of_memory
from spd.runtime.round.round_queue import RoundQueue, RoundResult, SlotAdmission
from spd.runtime.round.rows import EMPTY_SLOT, SlotView
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps

IDLE_PASSES = 16
BUSY_PASSES = 4
"""Passes over prompts in a step: where none decoded at its beginning, and while more wait than decode."""
KEPT = 4096
REASONS = (None, "stop", "length", "error")
"""Why a request ends, by the reason that a round gives: GOING_ON, STOPPED, FULL, FAILED."""


class Engine(EngineClient):
    """Runs requests over one model; see `EngineConfig` for what can be asked.

    `progress` hears how far loading has come. Where memory runs out, while loading or later, the error is
    a ResourceError; requests that ran then end with an "error" event, and the engine can go on. Not for
    several threads at once.

    >>> from spd import Engine, EngineConfig, Request, SamplingParams, demo_folder
    >>> engine = Engine(EngineConfig(model=demo_folder(), slots=2, ctx=256, threads=1))
    >>> ids = tuple(engine.tokenizer.encode("def read_lines(path):"))
    >>> (done,) = engine.generate([Request("a", ids, SamplingParams(max_tokens=8))])
    >>> (done.request_id, len(done.token_ids), done.finish_reason)
    ('a', 8, 'length')
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        began = clock.now()
        self.config = config
        self.plan = plan = make_plan(config)
        self.info = EngineInfo.from_plan(plan)
        shape = plan.shape
        self._checks = RequestValidator(plan)
        self.eos_ids = self._checks.eos_ids
        self.usable_vocab = self._checks.usable_vocab
        self.round_queue = open_device(plan, self.usable_vocab, progress)
        self.page_table = PageTable(shape.num_pages)
        sizes = PAGE_SIZE, self.round_queue.runner.pages_per_block, shape.ctx
        kept = Checkpoints(shape.checkpoints) if shape.checkpoints else None
        share = plan.shares_prefixes
        self.scheduler = Scheduler(
            shape.slots, self.page_table, *sizes, sharing=share, checkpoints=kept
        )
        self._ready: list[Event] = []
        self.rounds = 0  # that have been read; one serves every slot
        self._finished: OrderedDict[str, RequestMetrics] = OrderedDict()
        """Counters of the latest `KEPT` requests that ended."""
        self.draft_length = DraftLength(
            shape.model_drafts, plan.adaptive, plan.draft_tiers, plan.copy_draft_max
        )
        self._gathered: list[Sequence] = []  # the latest round's; what follows from them:
        self._needs = SamplingSteps()
        self._logprobs: int | None = None  # the most that any request of the round wants
        self._k = 0
        self.trace: Callable[[RoundRecord], None] | None = None
        self.prefilling = lambda written, wanted: None
        self.load_ms = 1000 * (clock.now() - began)

    # -- orders ----------------------------------------------------------------------------------

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture rounds before they are run, the largest first, at most `limit`; return how many.

        These are the rounds that at least `concurrency` requests with such parameters will almost certainly
        run. All other rounds are captured when they first run. Returns 0 once all of them are captured,
        while anything runs, and where rounds are not captured.
        """
        captured = self.round_queue.captured
        if captured is None or self.has_work:
            return 0
        shapes = captured.likely_shapes(self.draft_length.likely_pairs, params, concurrency)[:limit]
        return sum(takewhile(bool, map(self.round_queue.capture, shapes)))

    def add(self, request: Request) -> None:
        """Queue a request. Whatever can be refused for one request alone is refused here."""
        sequence = self._checks.sequence(request)
        sequence.metrics.load_ms = self.load_ms
        self.scheduler.add(sequence)
        # What an earlier request of this id has left is not for this one.
        self._ready = [event for event in self._ready if event.request_id != request.id]

    def check(self, request: Request) -> None:
        """Refuse what `add` would refuse, from any thread: a grammar is compiled here, not between rounds."""
        self._checks.sequence(request)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._checks.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    @property
    def pages(self) -> tuple[int, int]:
        """Pages of the cache that requests hold, and all that they can hold."""
        free = self.page_table.num_available
        most = self.page_table.num_pages - NUM_RESERVED
        return most - free, most

    def abort(self, request_id: str) -> None:
        """Stop a request; its event with finish_reason "abort" comes with the next step."""
        sequence = self.scheduler.by_id.get(request_id)
        if sequence is not None:
            self._stop(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or has not been handed out."""
        return bool(self.scheduler.by_id or self.scheduler.in_flight or self._ready)

    def metrics(self, request_id: str) -> RequestMetrics:
        """Counters of a request that waits, runs or ended of late. Raises KeyError for an unknown id."""
        sequence = self.scheduler.by_id.get(request_id)
        return self._finished[request_id] if sequence is None else sequence.metrics

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests to their end, yielding events as they come; taken from `requests` as room appears.

        Nothing else may run meanwhile. What is not finished when the caller stops listening is aborted.
        Raises what `add` raises.
        """
        source = iter(requests)
        names = set[str]()
        try:
            while True:
                for request in islice(
                    source, max(0, self.plan.shape.slots - len(self.scheduler.waiting))
                ):
                    self.add(request)
                    names.add(request.id)
                if not self.has_work:
                    return
                yield from self.step()
        finally:
            for request_id in names:
                self.abort(request_id)
            self._ready = [event for event in self._ready if event.request_id not in names]

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end together; one completion each, in their order.

        Raises what `add` would refuse any of them with, before the first one runs.
        """
        asked = list(requests)
        for request in asked:
            self._checks.sequence(request)
        done = {request.id: Completion(request_id=request.id) for request in asked}
        if len(done) < len(asked):
            raise UsageError("a request id is given twice", fix=["an id of its own for each"])
        for event in self.stream(asked):
            completion = done[event.request_id]
            completion.take(event)
            if event.finish_reason is not None:
                completion.metrics = self.metrics(event.request_id)
        return list(done.values())

    def close(self) -> None:
        """Let go of everything that runs, and of the other ranks where there are several."""
        for request_id in list(self.scheduler.by_id):
            self.abort(request_id)
        self._ready.clear()
        self._drop_rounds()
        self.round_queue.close()

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit and prefill, enqueue one round, read those that are due."""
        scheduler = self.scheduler
        try:
            if scheduler.waiting or scheduler.prefilling:
                self._prefill()
            launched = self._enqueue()
            while scheduler.in_flight and (
                len(scheduler.in_flight) > self.plan.lag or not launched
            ):
                self.read_oldest_round()
        except Exception as error:
            if not is_out_of_memory(error):
                if self.round_queue.is_writing:
                    self._fail_running("writing a prompt broke off")
                raise
            refusal = out_of_memory_error(error, self.plan, "running")
            self._fail_running("memory ran out")
            raise refusal from None
        events = self._ready
        self._ready = []
        return events

    def _fail_running(self, why: str) -> None:
        """End every running request with an error: a round broke off, and where is not known."""
        self._drop_rounds()
        self.scheduler.forget()
        self.round_queue.restart()
        for sequence in self.scheduler.running():
            self._stop(sequence, "error", why)

    def _drop_rounds(self) -> None:
        """No round is on its way any more."""
        while self.scheduler.in_flight:
            self.scheduler.finish_round()

    def _prefill(self) -> None:
        """Write prompts: one pass, or a few where more wait."""
        scheduler = self.scheduler
        stalls = self.scheduler.busy
        began = clock.now()
        passes = 0.0
        most = BUSY_PASSES if stalls else IDLE_PASSES
        written: list[tuple[Sequence, int]] = []
        while (
            sequence := scheduler.next_to_prefill(2 * self.plan.shape.draft_max + 1)
        ) is not None:
            if not sequence.placed:
                self._place(sequence)
            written.append((sequence, rows := self.write_prompt_part(sequence)))
            self.prefilling(sequence.prefilled, sequence.prefill_end)
            if sequence is not scheduler.prefilling:
                self._arm(sequence)
            # A pass, or a part of one that others share.
            passes += rows / self.plan.shape.chunk if self.round_queue.runner.merges else rows > 0
            several = scheduler.busy and (scheduler.more_could_join or not stalls)
            if passes >= (most if several else 1):  # alone one: an abort waits for no whole prompt
                break
        for sequence, _ in written:
            if sequence.scores_prompt and sequence is not scheduler.prefilling:
                sequence.take_prompt_scores(self.round_queue.prompt_scores(sequence.slot))
        if rows := sum(count for _, count in written):
            self.round_queue.flush()
            each = 1000 * (clock.now() - began) / rows
            for sequence, count in written:
                sequence.metrics.prompt_ms += each * count

    def _place(self, sequence: Sequence) -> None:
        """Write the row of a sequence that was given a slot; it stays silent until it is prefilled."""
        request = sequence.request
        sequence.placed = True
        if not sequence.metrics.preemptions:
            sequence.metrics.queue_ms = 1000 * (clock.now() - sequence.arrived_at)
            sequence.metrics.cached_tokens = sequence.prefilled
        self.round_queue.admit(
            SlotAdmission(
                slot=sequence.slot,
                tokens=sequence.tokens(),
                prompt_length=len(request.prompt_ids),
                params=request.params,
                draft_max=request.draft_max,
                length_limit=sequence.length_limit,
                stop_ids=sequence.stop_ids,
                prefilled=sequence.prefilled,
                pages=sequence.pages,
                checkpoint=sequence.checkpoint,
            )
        )

    def write_prompt_part(self, sequence: Sequence) -> int:
        """Enqueue the next pass over a prompt, at most one chunk; returns how many positions it writes."""
        scheduler = self.scheduler
        start = sequence.prefilled
        end = sequence.prefill_end
        runs = scheduler.prefill_runs(sequence)
        run = next((run for run in runs if run.start <= start < run.end), None)
        if run is not None:
            runner = self.round_queue.runner
            chunked = run.kind == "chunk"
            rows = runner.chunk if chunked else runner.kernels.capabilities.tail_rows
            end = min(start + rows, run.end, *(stop for stop in sequence.stops if stop > start))
            scored = sequence.request.prompt_logprobs if sequence.scores_prompt else None
            self.round_queue.write(sequence.slot, sequence.pages, start, end, chunked, scored)
        scheduler.wrote(sequence, end)
        if (place := scheduler.due(sequence, start)) is not None:
            self.round_queue.save(place, sequence.slot, sequence.pages, end)
        return end - start

    def _arm(self, sequence: Sequence, drafts: Listed[int] = ()) -> None:
        try:
            arm(self.round_queue, sequence, drafts, self.plan.config.verify)
        except GrammarError as error:
            self._stop(sequence, "error", str(error))

    def _make_room(self, live: list[Sequence], rows: int) -> tuple[list[Sequence], list[int]]:
        """Pages for `rows` more positions of all that decode, oldest first; the last to come gives way.

        What is on its way is read first: it may end a sequence, and bounds become lengths. Returns those
        still there or ready meanwhile, and what the round may reach of each.
        """
        scheduler = self.scheduler
        ctx = self.plan.shape.ctx
        while True:
            reaches = [min(sequence.bound + rows, ctx) for sequence in live]
            short = [
                s
                for s, reach in zip(live, reaches, strict=True)
                if len(s.pages) * PAGE_SIZE < reach
            ]
            for sequence in sorted(short, key=attrgetter("epoch")):
                if not scheduler.grow(sequence, sequence.bound + rows):
                    break
                self.round_queue.upload_pages(sequence.slot, sequence.pages)
            else:
                return live, reaches
            if scheduler.in_flight:
                self.read_oldest_round()
            else:
                last = max(scheduler.running(), key=attrgetter("epoch"))  # epochs follow arrivals
                self._vacate(last, settled=True)
                scheduler.preempt(last)
            live = scheduler.decoding()

    def _gather(self, live: list[Sequence]) -> None:
        """Note what follows from the sequences of a round, where one came or went."""
        self._gathered = live
        most = self.plan.shape.draft_max
        self._needs = reduce(or_, (sequence.needs for sequence in live), SamplingSteps())
        wanted = (sequence.request.params.logprobs for sequence in live)
        self._logprobs = max((one for one in wanted if one is not None), default=None)
        caps = (most if (cap := s.request.draft_max) is None else min(cap, most) for s in live)
        self.draft_length.attend([(s.acceptance, cap) for s, cap in zip(live, caps, strict=True)])

    def _enqueue(self) -> bool:
        """Enqueue one round over all that decode; False when every one may already be at its limit."""
        decoding = self.scheduler.decoding()
        if not any(s.bound < s.length_limit or not s.in_flight for s in decoding):
            return False
        if decoding != self._gathered:
            self._gather(decoding)
        k = self._k
        next_k = self.draft_length.choose()
        rows = k + 1 + next_k  # fed at most, and drafted beyond what is committed
        live, reaches = self._make_room(decoding, rows)
        if not live:
            return False
        if live is not decoding:
            self._gather(live)
        views = [EMPTY_SLOT] * self.plan.shape.slots
        for sequence, reach in zip(live, reaches, strict=True):
            views[sequence.slot] = SlotView(reach, sequence.pages)
            sequence.in_flight += k + 1
        ticket = self.round_queue.launch(k, views, self._needs, self._logprobs, next_k)
        self.scheduler.in_flight.append(EnqueuedRound(ticket, live, []))
        for sequence in live:
            if sequence.needs.grammar:
                sequence.active = False
                self.round_queue.set_active(sequence.slot, False)
        self._k = next_k
        return True

    # -- reading what happened ---------------------------------------------------------------------

    def read_oldest_round(self) -> None:
        """Wait for the oldest enqueued round, and apply its result to the sequences it served."""
        scheduler = self.scheduler
        oldest = self.scheduler.in_flight[0]
        result = oldest.ticket.read()
        scheduler.finish_round()
        self.rounds += 1
        draft, verify, rest = result.seconds
        self.draft_length.observe_cost(
            result.k, verify + rest, draft, result.draft_forwards, result.gap
        )
        now = clock.now()
        for sequence in oldest.sequences:
            if (
                scheduler.slots[sequence.slot] is sequence
            ):  # none leaves its slot in between but for good
                self._apply(sequence, result.rows[sequence.slot], result, now)

    def _apply(self, sequence: Sequence, row: list[int], result: RoundResult, now: float) -> None:
        sequence.in_flight -= result.k + 1
        if sequence.silent:
            sequence.silent -= 1
            return
        # As in `read_emission`, whose lists only a trace needs.
        num_drafts, accepted, committed, reason, _, match = row[1:EMISSION_HEAD]
        sampled = row[EMISSION_HEAD : EMISSION_HEAD + committed]
        event = sequence.take(sampled, num_drafts, accepted, REASONS[reason], now, result.logprobs)
        # A request's first round could not have held drafts.
        if self.plan.adaptive and sequence.request.draft_max != 0 and sequence.metrics.rounds > 1:
            acceptance = sequence.acceptance
            self.draft_length.observe(result.k, num_drafts, accepted, acceptance, match)
        if self.trace is not None:
            emission = read_emission(row)
            self.trace(round_record(self.plan, sequence, emission, result, event.token_ids))
        if event.finish_reason is not None:
            is_whole = len(event.token_ids) == committed
            has_stopped = reason != GOING_ON or not sequence.in_flight
            self._end(
                sequence, event, has_stopped and (is_whole or not self.plan.drafter_is_recurrent)
            )
            return
        if event.token_ids:
            self._ready.append(event)
        if sequence.grammar is None or (sequence.waits and not sequence.paused):
            return
        if sequence.paused:  # it stopped where its grammar may begin
            sequence.silent = sum(sequence in each.sequences for each in self.scheduler.in_flight)
            self._gathered = []  # what a round needs has changed
            self.round_queue.resume(sequence.slot, sequence.stop_ids)
        self._arm(
            sequence,
            ()
            if sequence.paused or result.next_drafts is None
            else result.next_drafts[sequence.slot],
        )

    def _stop(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        text = sequence.detokenizer.take(final=True)
        self._end(
            sequence,
            Event(sequence.request.id, (), text, reason, error=error),
            not sequence.in_flight,
        )

    def _vacate(self, sequence: Sequence, settled: bool) -> None:
        """Silence its slot. Its states are kept if `settled`: none has taken in a token beyond its end."""
        scheduler = self.scheduler
        held = sequence.prefilled if sequence is scheduler.prefilling else sequence.prefill_end
        place = scheduler.checkpoint(sequence, held) if settled else None
        try:
            self.round_queue.retire(sequence.slot, sequence.pages, held, place)
        except BaseException:
            scheduler.forget()
            raise

    def _end(self, sequence: Sequence, event: Event, settled: bool) -> None:
        """Say that a request is over, and free what it holds; settled: see `_vacate`."""
        sequence.finish_reason = event.finish_reason
        if sequence.slot != NO_SLOT:
            self._vacate(sequence, settled and event.finish_reason != "error")
        if own := self.scheduler.retire(sequence):
            self.round_queue.zero_pages(own)
        self._ready.append(event)  # where freeing broke off it is not over yet
        self._finished[event.request_id] = sequence.metrics
        if len(self._finished) > KEPT:
            self._finished.popitem(last=False)


def arm(device: RoundQueue, sequence: Sequence, drafts: Listed[int], rule: str) -> None:
    """Let a sequence take part from the next round on, with masks for its drafts where a grammar wants them.

    rule: what decides about drafts. Raises GrammarError for a grammar that cannot go on.
    """
    if sequence.grammar is not None and not sequence.waits:
        words = mask_width(device.sampler.vocab_size)
        rows = torch.empty(len(drafts) + 1, words, dtype=torch.int32)
        legal = sequence.grammar.masks(drafts, rows)
        # Where drafts are tested by their probability the one that a mask forbids has to fail its test:
        # cut away unseen, it would count as a block that came to a fair end.
        legal = legal if rule == "coupled" else len(drafts)
        device.set_masks(sequence.slot, rows, list(drafts), legal)
    sequence.active = True
    device.set_active(sequence.slot, True)
