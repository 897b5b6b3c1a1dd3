"""The engine: requests in, events out. It alone owns the sequences.

`step` writes a part of a prompt, enqueues a round and reads the one of `lag` rounds ago, so that
the device does not wait for the host. The text does not depend on the lag.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import reduce
from itertools import islice, takewhile
from operator import attrgetter, or_

from spd.errors import UsageError
from spd.formats.tokenizer import Tokenizer
from spd.kernels.round.commit import EMISSION_HEAD, GOING_ON, read_emission
from spd.runtime.engine import clock, device
from spd.runtime.engine.client import EngineClient, EngineInfo
from spd.runtime.engine.draft_fault import judge_drafts, observe_drafts
from spd.runtime.engine.draft_guide import guide_drafts
from spd.runtime.engine.draft_length import DraftLength
from spd.runtime.engine.grammar import GrammarError
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.page_table import ROOT, PageTable, SnapshotPool
from spd.runtime.engine.request import Completion, Event, Request
from spd.runtime.engine.scheduler import BUSY_PASSES, IDLE_PASSES, EnqueuedRound, Scheduler
from spd.runtime.engine.sequence import FINISH_REASONS, NO_SLOT, RequestValidator, Sequence
from spd.runtime.engine.text_memory import TextMemory
from spd.runtime.engine.trace import RoundRecord, round_record
from spd.runtime.load.progress import Progress
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.plan import make_plan
from spd.runtime.round.limits import PAGE_SIZE
from spd.runtime.round.out_of_memory import is_out_of_memory
from spd.runtime.round.round_queue import RoundResult
from spd.runtime.round.rows import EMPTY_SLOT, SlotView
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps

MAX_FINISHED = 4096
"""Ended requests whose metrics are retained."""


class Engine(EngineClient):
    """Runs requests over one model; see `EngineConfig` for the options.

    `progress` is called while loading. Where memory runs out, while loading or later, the error is
    a ResourceError; running requests then end with an "error" event, and the engine can continue.
    Not safe for several threads at once.

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
        self._validator = RequestValidator(plan)
        self.eos_ids = self._validator.eos_ids
        self.usable_vocab = self._validator.usable_vocab
        self.round_queue = device.open_device(plan, self.usable_vocab, progress)
        self.page_table = PageTable(shape.num_pages)
        self.scheduler = Scheduler(
            slots=shape.slots,
            pages=self.page_table,
            page_size=PAGE_SIZE,
            block=self.round_queue.runner.pages_per_block,
            ctx=shape.ctx,
            shares_prefixes=plan.shares_prefixes,
            snapshots=SnapshotPool(shape.num_snapshots) if shape.num_snapshots else None,
            root=ROOT + shape.kv.encode(),
        )
        guide_drafts(self.round_queue, plan, self.scheduler.slots)
        self.text_memory = TextMemory(plan, self.round_queue)
        self._ready: list[Event] = []
        """Events that the next step returns."""
        self.rounds = 0
        """Rounds that have been read; one round serves every slot."""
        self._finished: OrderedDict[str, RequestMetrics] = OrderedDict()
        """Metrics of the latest `MAX_FINISHED` requests that ended, by request id."""
        self.draft_length = DraftLength(
            maximum=shape.model_drafts,
            adaptive=plan.adaptive,
            tiers=plan.draft_tiers,
            lookup_k=plan.copy_draft_max,
            drafts_at_once=shape.block_drafts > 0,
        )
        self._batch: list[Sequence] = []
        """The sequences of the latest round, from which the next two fields follow."""
        self._needs = SamplingSteps()
        self._num_logprobs: int | None = None
        """The largest number of log-probabilities that a request of the batch asks for."""
        self._k = 0  # drafts a slot in the next round
        self._drafted_k = 0  # those of them that were drafted for all slots
        self.trace: Callable[[RoundRecord], None] | None = None
        """Called with a record of each round and request, where it is set."""
        self.prefilling = lambda written, total: None
        self.load_ms = 1000 * (clock.now() - began)

    # -- requests --------------------------------------------------------------------------------

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture rounds before they are run, the largest first, at most `limit`; return how many.

        These are the rounds that at least `concurrency` requests with such parameters will almost
        certainly run. All other rounds are captured when they first run. Returns 0 once all of them
        are captured, while anything runs, and where rounds are not captured.
        """
        captured = self.round_queue.captured
        if captured is None or self.has_work:
            return 0
        shapes = captured.likely_shapes(self.draft_length.likely_pairs, params, concurrency)[:limit]
        return sum(takewhile(bool, map(self.round_queue.capture, shapes)))

    def add(self, request: Request) -> None:
        """Queue a request. Every error that depends on this request alone is raised here."""
        sequence = self._validator.new_sequence(request)
        sequence.metrics.load_ms = self.load_ms
        self.scheduler.add(sequence)
        # Events that are left of an earlier request with this id do not belong to this one.
        self._ready = [event for event in self._ready if event.request_id != request.id]

    def check(self, request: Request) -> None:
        """Raise what `add` would, from any thread; compile the request's grammar, and cache it."""
        self._validator.new_sequence(request)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._validator.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    @property
    def page_counts(self) -> tuple[int, int]:
        """Return how many cache pages requests use, and how many they can use."""
        return self.page_table.num_used, self.page_table.num_usable

    def abort(self, request_id: str) -> None:
        """Stop a request; the next step returns its event with finish_reason "abort"."""
        sequence = self.scheduler.by_id.get(request_id)
        if sequence is not None:
            self._stop_sequence(sequence, "abort")

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or an event has not been returned yet."""
        return bool(self.scheduler.by_id or self.scheduler.in_flight or self._ready)

    def metrics(self, request_id: str) -> RequestMetrics:
        """Return the metrics of a request that waits, runs or has recently ended.

        Raises KeyError for an unknown id.
        """
        sequence = self.scheduler.by_id.get(request_id)
        return self._finished[request_id] if sequence is None else sequence.metrics

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests to their end, yielding events as they come.

        Requests are taken from `requests` as slots become free. Nothing else may run meanwhile.
        Requests that are unfinished when the caller closes the iterator are aborted. Raises what
        `add` raises.
        """
        source = iter(requests)
        request_ids = set[str]()
        try:
            while True:
                count = self.plan.shape.slots - len(self.scheduler.waiting)
                for request in islice(source, max(0, count)):
                    self.add(request)
                    request_ids.add(request.id)
                if not self.has_work:
                    return
                yield from self.step()
        finally:
            for request_id in request_ids:
                self.abort(request_id)
            self._ready = [event for event in self._ready if event.request_id not in request_ids]

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests together to their end; return a completion for each, in their order.

        Raises what `add` would raise for any of them, before the first one runs.
        """
        batch = list(requests)
        for request in batch:
            self._validator.new_sequence(request)
        completions = {request.id: Completion(request_id=request.id) for request in batch}
        if len(completions) < len(batch):
            raise UsageError("a request id is given twice", fix=["an id of its own for each"])
        for event in self.stream(batch):
            completion = completions[event.request_id]
            completion.add(event)
            if event.finish_reason is not None:
                completion.metrics = self.metrics(event.request_id)
        return list(completions.values())

    def close(self) -> None:
        """Abort everything that runs, and end the other ranks where there are several."""
        for request_id in list(self.scheduler.by_id):
            self.abort(request_id)
        self._ready.clear()
        self._drop_rounds()
        self.round_queue.close()

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit and prefill, enqueue a round, read the rounds that are due; return their events."""
        scheduler = self.scheduler
        try:
            if scheduler.waiting or scheduler.prefilling:
                self._prefill_prompts()
            launched = self._enqueue_round()
            in_flight = scheduler.in_flight
            while in_flight and (len(in_flight) > self.plan.lag or not launched):
                self.read_oldest_round()
        except Exception as error:
            if not is_out_of_memory(error):
                if self.round_queue.is_writing:
                    self._fail_running("writing a prompt broke off")
                raise
            refusal = device.out_of_memory_error(error, self.plan, "running")
            self._fail_running("memory ran out")
            raise refusal from None
        events = self._ready
        self._ready = []
        return events

    def _fail_running(self, message: str) -> None:
        """End every running request with an error, after a failure at an unknown place."""
        self._drop_rounds()
        self.scheduler.invalidate_cache()
        self.round_queue.drop_enqueued()
        for sequence in self.scheduler.running():
            self._stop_sequence(sequence, "error", message)

    def _drop_rounds(self) -> None:
        """Drop all rounds in flight without reading them, and release their pages."""
        while self.scheduler.in_flight:
            self.scheduler.release_oldest_round()

    def _prefill_prompts(self) -> None:
        """Admit sequences and write parts of their prompts, in one pass, or a few if more wait."""
        scheduler = self.scheduler
        lookahead = 2 * self.plan.shape.draft_max + 1
        delays_decoding = scheduler.has_decoding
        began = clock.now()
        passes = 0.0
        max_passes = BUSY_PASSES if delays_decoding else IDLE_PASSES
        parts: list[tuple[Sequence, int]] = []  # sequences, and the positions written for each
        while (sequence := scheduler.take_next_to_prefill(lookahead)) is not None:
            if not sequence.is_admitted:
                self._admit_sequence(sequence)
            rows = self.write_prompt_part(sequence)
            parts.append((sequence, rows))
            self.prefilling(sequence.prefilled, sequence.prefill_end)
            if sequence is not scheduler.prefilling:
                self._activate_sequence(sequence)
            # Where prompts share a pass, a part counts as its share of one.
            merges = self.round_queue.runner.merges_prompts
            passes += rows / self.plan.shape.chunk if merges else rows > 0
            fills_batch = scheduler.has_decoding and (
                scheduler.more_could_join or not delays_decoding
            )
            # Otherwise one pass, so that an abort does not wait for a long prompt.
            if passes >= (max_passes if fills_batch else 1):
                break
        for sequence, _ in parts:
            if sequence.scores_prompt and sequence is not scheduler.prefilling:
                sequence.set_prompt_scores(self.round_queue.take_prompt_scores(sequence.slot))
        total_rows = sum(rows for _, rows in parts)
        if total_rows:
            self.round_queue.flush()
            ms_per_row = 1000 * (clock.now() - began) / total_rows
            for sequence, rows in parts:
                sequence.metrics.prompt_ms += ms_per_row * rows

    def _admit_sequence(self, sequence: Sequence) -> None:
        """Write the slot's row on the device; the sequence stays inactive until it is prefilled."""
        sequence.is_admitted = True
        if not sequence.metrics.preemptions:
            sequence.metrics.queue_ms = 1000 * (clock.now() - sequence.arrived_at)
            sequence.metrics.cached_tokens = sequence.prefilled
        device.admit_sequence(self.round_queue, sequence)

    def write_prompt_part(self, sequence: Sequence) -> int:
        """Queue the next part of a prompt, and a snapshot if due; return the number of positions."""
        scheduler = self.scheduler
        start = sequence.prefilled
        end = sequence.prefill_end
        runs = scheduler.prefill_runs(sequence)
        run = next((run for run in runs if run.start <= start < run.end), None)
        if run is not None:
            runner = self.round_queue.runner
            chunked = run.kind == "chunk"
            rows = runner.chunk if chunked else runner.kernels.capabilities.tail_rows
            stops = (stop for stop in sequence.snapshot_stops if stop > start)
            end = min(start + rows, run.end, *stops)
            num_likeliest = sequence.request.prompt_logprobs if sequence.scores_prompt else None
            self.round_queue.queue_prompt_part(
                sequence.slot, sequence.pages, start, end, chunked, num_likeliest
            )
        scheduler.mark_written(sequence, end)
        place = scheduler.reserve_due_snapshot(sequence, start)
        if place is not None:
            self.round_queue.queue_snapshot(place, sequence.slot, sequence.pages, end)
        return end - start

    def _activate_sequence(self, sequence: Sequence, drafts: abc.Sequence[int] = ()) -> None:
        try:
            rule = self.plan.config.verify
            limit = self.draft_length.longest_k(self._k)
            forced_drafts = sequence.force_drafts(drafts, limit, rule)
            self._k = max(self._k, self.draft_length.round_up(len(forced_drafts)))
            device.activate_sequence(self.round_queue, sequence, forced_drafts, rule)
        except GrammarError as error:
            self._stop_sequence(sequence, "error", str(error))

    def _allocate_pages(self, batch: list[Sequence], rows: int) -> tuple[list[Sequence], list[int]]:
        """Allocate pages for `rows` more positions of each decoding sequence, the oldest first.

        Where pages run short, rounds in flight are read first: they may end a sequence, and their
        bounds become lengths. Then the latest to arrive is preempted. Returns the sequences that
        decode afterwards, some of which may have become ready meanwhile, and the end of each one's
        positions.
        """
        scheduler = self.scheduler
        ctx = self.plan.shape.ctx
        while True:
            ends = [min(sequence.length_bound + rows, ctx) for sequence in batch]
            short_of_pages = [
                sequence
                for sequence, end in zip(batch, ends, strict=True)
                if len(sequence.pages) * PAGE_SIZE < end
            ]
            for sequence in sorted(short_of_pages, key=attrgetter("epoch")):
                if not scheduler.grow(sequence, sequence.length_bound + rows):
                    break
                self.round_queue.upload_pages(sequence.slot, sequence.pages)
            else:
                return batch, ends
            if scheduler.in_flight:
                self.read_oldest_round()
            else:
                latest = max(scheduler.running(), key=attrgetter("epoch"))  # epochs follow arrivals
                self._vacate_slot(latest, settled=True)
                scheduler.preempt(latest)
            batch = scheduler.decoding()

    def _set_batch(self, batch: list[Sequence]) -> None:
        """Set the sequences of the next rounds, and all that depends on them."""
        self._batch = batch
        self._needs = reduce(or_, (sequence.needs for sequence in batch), SamplingSteps())
        logprobs = [sequence.request.params.logprobs for sequence in batch]
        self._num_logprobs = max((count for count in logprobs if count is not None), default=None)
        requests = [(sequence.acceptance, sequence.draft_cap) for sequence in batch]
        self.draft_length.set_requests(requests, is_constrained=self._needs.grammar)

    def _enqueue_round(self) -> bool:
        """Enqueue a round of all decoding sequences; False if each may be at its limit already."""
        decoding = self.scheduler.decoding()
        if not any(s.length_bound < s.length_limit or not s.in_flight for s in decoding):
            return False
        if decoding != self._batch:
            self._set_batch(decoding)
        k = self._k
        self.draft_length.set_positions(sum(s.length for s in decoding) // len(decoding))
        next_k = self.draft_length.choose_k()
        rows = k + 1 + self.plan.shape.rows_ahead(next_k)  # fed at most, and written by drafting
        batch, ends = self._allocate_pages(decoding, rows)
        if not batch:
            return False
        if batch is not decoding:
            self._set_batch(batch)
        views = [EMPTY_SLOT] * self.plan.shape.slots
        for sequence, end in zip(batch, ends, strict=True):
            views[sequence.slot] = SlotView(end, sequence.pages)
            sequence.in_flight += k + 1
        chained = self.draft_length.chained
        pending = self.round_queue.launch(
            k, views, self._needs, self._num_logprobs, next_k, chained
        )
        self.scheduler.in_flight.append(EnqueuedRound(pending, batch, [], self._drafted_k))
        for sequence in batch:
            if sequence.needs.grammar:
                sequence.is_active = False
                self.round_queue.set_active(sequence.slot, False)
        self._k = next_k
        self._drafted_k = next_k
        return True

    # -- reading rounds --------------------------------------------------------------------------

    def read_oldest_round(self) -> None:
        """Wait for the oldest enqueued round, and apply its result to the sequences it served."""
        scheduler = self.scheduler
        oldest = self.scheduler.in_flight[0]
        result = oldest.pending.read()
        scheduler.release_oldest_round()
        self.rounds += 1
        if all(sequence.generated for sequence in oldest.sequences):  # else a prompt went before
            draft_seconds, verify_seconds, other_seconds = result.seconds
            verify_seconds += other_seconds
            self.draft_length.observe_cost(
                result.k, verify_seconds, draft_seconds, result.draft_forwards, result.gap
            )
        now = clock.now()
        for sequence in oldest.sequences:
            if scheduler.slots[sequence.slot] is sequence:  # else it has ended meanwhile
                self._apply(sequence, oldest.drafted_k, result, now)

    def _apply(self, sequence: Sequence, drafted_k: int, result: RoundResult, now: float) -> None:
        """Apply a round's result to one of its sequences; drafted_k: see `EnqueuedRound`."""
        row = result.rows[sequence.slot]
        sequence.in_flight -= result.k + 1
        if sequence.ignored_rounds:
            sequence.ignored_rounds -= 1
            return
        # As `read_emission` does, without the lists that only a trace needs.
        num_drafts, accepted, committed, reason, _, match = row[1:EMISSION_HEAD]
        sampled = row[EMISSION_HEAD : EMISSION_HEAD + committed]
        # By position, as below and for the event: keywords cost a tenth of the host's time a round.
        finish_reason = FINISH_REASONS[reason]
        event = sequence.apply_round(
            sampled, num_drafts, accepted, finish_reason, now, result.logprobs
        )
        if self.plan.adaptive:
            observe_drafts(self.draft_length, sequence, drafted_k, num_drafts, accepted, match)
        if self.trace is not None:
            emission = read_emission(row)
            self.trace(round_record(self.plan, sequence, emission, result, event.token_ids))
        if event.finish_reason is not None:
            emits_all = len(event.token_ids) == committed
            has_stopped = reason != GOING_ON or not sequence.in_flight
            settled = has_stopped and (emits_all or not self.plan.drafter_is_recurrent)
            self._end_sequence(sequence, event, settled)
            return
        if event.token_ids:
            self._ready.append(event)
        if sequence.grammar is None or (sequence.defers_grammar and not sequence.is_paused):
            return
        drafts: abc.Sequence[int] = ()
        if sequence.is_paused:  # it stopped where its grammar may begin
            in_flight = self.scheduler.in_flight
            sequence.ignored_rounds = sum(sequence in entry.sequences for entry in in_flight)
            self._batch = []  # the sampling steps have changed
            self.round_queue.resume(sequence.slot, sequence.stop_ids)
        elif result.next_drafts is not None:
            drafts = result.next_drafts[sequence.slot]
        self._activate_sequence(sequence, drafts)

    def _stop_sequence(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a sequence between rounds, with the text that is complete."""
        text = sequence.detokenizer.take_text(final=True)
        event = Event(sequence.request.id, (), text, reason, error=error)
        self._end_sequence(sequence, event, not sequence.in_flight)

    def _vacate_slot(self, sequence: Sequence, settled: bool) -> None:
        """Deactivate a sequence's slot on the device, and save its states if they are `settled`.

        settled: no state has taken in a token beyond the sequence's end.
        """
        scheduler = self.scheduler
        end = sequence.prefilled if sequence is scheduler.prefilling else sequence.prefill_end
        place = scheduler.reserve_snapshot_place(sequence, end) if settled else None
        try:
            self.round_queue.retire(sequence.slot, sequence.pages, end, place)
        except BaseException:
            scheduler.invalidate_cache()
            raise

    def _end_sequence(self, sequence: Sequence, event: Event, settled: bool) -> None:
        """Free a sequence's slot and pages, and queue its last event; settled: see `_vacate_slot`."""
        sequence.finish_reason = event.finish_reason
        judge_drafts(sequence, self.plan, self.draft_length)
        if sequence.slot != NO_SLOT:
            self._vacate_slot(sequence, settled and event.finish_reason != "error")
            self.text_memory.add_sequence(sequence)
        private_pages = self.scheduler.retire(sequence)
        if private_pages:
            self.round_queue.zero_pages(private_pages)
        self._ready.append(event)  # last: where freeing fails the request has not ended
        self._finished[event.request_id] = sequence.metrics
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)
