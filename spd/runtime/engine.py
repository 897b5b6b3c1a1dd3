"""The engine: requests in, events out. The only owner of sequences.

`step` enqueues a round and reads one that was enqueued `lag` rounds ago, so the host never stands
between two rounds; with lag 0 it reads at once. The text does not depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.formats.generation_config import read_generation_config
from spd.formats.model_config import ModelConfig, read_model_config
from spd.formats.tokenizer import Tokenizer
from spd.runtime.assembly import Assembly, assemble
from spd.runtime.config import EngineConfig
from spd.runtime.detokenizer import Detokenizer
from spd.runtime.draft_length import DraftLength
from spd.runtime.metrics import RequestMetrics, RoundRecord
from spd.runtime.model_runner import EMPTY_SLOT, SlotView
from spd.runtime.out_of_memory import explained, is_out_of_memory
from spd.runtime.outcome import Outcome, read_outcomes, settle
from spd.runtime.page_table import PageTable, page_hashes
from spd.runtime.plan import EnginePlan, make_plan
from spd.runtime.progress import Progress
from spd.runtime.request import Event, Request
from spd.runtime.round_queue import RoundResult, Ticket
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.scheduler import Scheduler
from spd.runtime.sequence import Sequence
from spd.runtime.spans import clip_runs, extend_tile, program_runs, reusable_prefix
from spd.runtime.state import NUM_STOP_IDS
from spd.runtime.transfer import to_device


@dataclass(frozen=True)
class _InFlight:
    """A round enqueued and not yet read, with the epoch of each slot's occupant then (0: none)."""

    ticket: Ticket
    epochs: tuple[int, ...]


class Engine:
    """Runs requests over one model; see `EngineConfig` for what can be asked.

    `progress` hears how far loading has come. Where memory runs out, while loading or later, the error is
    a ResourceError; requests that ran then end with an "error" event, and the engine can go on.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        began = time.perf_counter()
        self.config = config
        self.plan: EnginePlan = make_plan(config)
        self.model_config: ModelConfig = read_model_config(config.model)
        vocab = self.model_config.vocab_size
        self.tokenizer: Tokenizer | None = _open_tokenizer(config.model, vocab)
        generation = read_generation_config(config.model, vocab_size=vocab)
        self.eos_ids = generation.eos_token_ids or self.model_config.eos_token_ids
        torch.set_num_threads(self.plan.threads)
        self.usable_vocab = self.tokenizer.vocab_size if self.tokenizer else vocab
        try:
            self._parts: Assembly = assemble(self.plan, self.model_config, self.usable_vocab, progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise explained(error, self.plan, "loading") from None
        self._pages = PageTable(self.plan.num_pages)
        self._scheduler = Scheduler(self.plan.slots)
        self._in_flight: deque[_InFlight] = deque()
        self._finished: dict[str, RequestMetrics] = {}
        self._ready: list[Event] = []
        self._draft_length = DraftLength(self.plan.draft_max, self.plan.adaptive, self.plan.draft_tiers)
        self._k = 0
        self.trace: Callable[[RoundRecord], None] | None = None
        self.load_ms = 1000 * (time.perf_counter() - began)

    # -- orders ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Whatever can be refused for one request alone is refused here."""
        params, length = request.params, len(request.prompt_ids)
        if not length:
            raise UsageError("the prompt has no tokens", reason=["a first token is needed to continue from"])
        wrong = next((t for t in request.prompt_ids if not 0 <= t < self.model_config.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"prompt token id {wrong} is out of range",
                reason=[f"valid: 0 to {self.model_config.vocab_size - 1}"],
            )
        if length >= self.plan.ctx:
            raise IncompatibleError(
                f"prompt is {length:,} tokens but the context is {self.plan.ctx:,}",
                fix=[f"--ctx N above {length}", "--overflow truncate-left to drop the oldest tokens"],
                code="context_overflow",
            )
        for token_id in (*params.stop_token_ids, *(token for token, _ in params.logit_bias)):
            if token_id >= self.usable_vocab:
                raise UsageError(
                    f"token id {token_id} is out of range", reason=[f"valid: 0 to {self.usable_vocab - 1}"]
                )
        if params.stop and self.tokenizer is None:
            raise IncompatibleError(
                "stop strings need a tokenizer, and the model folder has no tokenizer.json"
            )
        if request.spans and sum(n for _, n in request.spans) != length:
            raise UsageError("the prompt's spans do not add up to its length")
        if any(origin not in ("prompt", "generated") or n < 0 for origin, n in request.spans):
            raise UsageError("a span is neither prompt nor generated, or its length is negative")
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Stop a request; its event with finish_reason "abort" comes with the next step."""
        if self._scheduler.withdraw(request_id):
            self._finished[request_id] = RequestMetrics()
            self._ready.append(Event(request_id, (), "", "abort"))
            return
        for sequence in self._scheduler.running():
            if sequence.request.id == request_id:
                text = sequence.detokenizer.take(final=True)
                self._ready.append(Event(request_id, (), text, "abort"))
                sequence.finish_reason = "abort"
                self._retire(sequence)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or has not been handed out."""
        return bool(self._scheduler.waiting or self._scheduler.running() or self._in_flight or self._ready)

    def metrics(self, request_id: str) -> RequestMetrics:
        """Counters of a running or finished request. Raises KeyError for an unknown id."""
        for sequence in self._scheduler.running():
            if sequence.request.id == request_id:
                return sequence.metrics
        return self._finished[request_id]

    def generate(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests to their end, yielding events as they come."""
        for request in requests:
            self.add(request)
        while self.has_work:
            yield from self.step()

    def close(self) -> None:
        """Let go of everything that runs."""
        for request_id in self._scheduler.ids():
            self.abort(request_id)
        self._ready.clear()
        self._in_flight.clear()

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Admit, enqueue one round, read those that are due."""
        try:
            while (slot := self._scheduler.free_slot()) is not None:
                self._admit(self._scheduler.waiting.popleft(), slot)
            launched = self._enqueue()
            while self._in_flight and (len(self._in_flight) > self.plan.lag or not launched):
                self._read(self._in_flight.popleft())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            refusal = explained(error, self.plan, "running")
            self._fail_running()
            raise refusal from None
        events, self._ready = self._ready, []
        return events

    def _fail_running(self) -> None:
        """End every running request with an error: a round broke off, and nobody knows where."""
        self._in_flight.clear()
        self._parts.queue.restart()
        for sequence in self._scheduler.running():
            text = sequence.detokenizer.take(final=True)
            self._ready.append(Event(sequence.request.id, (), text, "error"))
            sequence.finish_reason = "error"
            self._retire(sequence)

    def _admit(self, request: Request, slot: int) -> None:
        began = time.perf_counter()
        params, prompt = request.params, request.prompt_ids
        limit = (
            self.plan.ctx
            if params.max_tokens is None
            else min(self.plan.ctx, len(prompt) + params.max_tokens)
        )
        token_bytes = self.tokenizer.token_bytes if self.tokenizer else lambda _token: b""
        sequence = Sequence(
            request=request,
            slot=slot,
            epoch=self._scheduler.next_epoch(),
            length_limit=limit,
            detokenizer=Detokenizer(token_bytes, params.stop, params.min_tokens),
            needs=SamplerClass.of(params),
            accepted_at=began,
        )
        self._scheduler.slots[slot] = sequence
        sequence.runs = program_runs(request.spans or (("prompt", len(prompt)),), self.plan.chunk)
        stops = list(dict.fromkeys((*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids)))
        ids = to_device(prompt, torch.long, self.plan.device)
        self._parts.state.admit(
            slot, ids, limit, len(prompt) + params.min_tokens, stops[:NUM_STOP_IDS], self.plan.draft_ctx
        )
        self._parts.sampler.admit(slot, params, ids)
        cached = self._prefill(sequence, ids)
        sequence.metrics.load_ms = self.load_ms
        sequence.metrics.prompt_tokens = len(prompt)
        sequence.metrics.cached_tokens = cached
        sequence.metrics.prompt_ms = 1000 * (time.perf_counter() - began)

    @torch.inference_mode()
    def _prefill(self, sequence: Sequence, ids: torch.Tensor) -> int:
        """Write the prompt's KV but for its last token; returns how many positions were shared."""
        prompt, size = sequence.request.prompt_ids, self.plan.page_size
        end = len(prompt) - 1
        runs = clip_runs(sequence.runs, end)
        hashes = page_hashes(prompt, runs, size, end) if self.plan.prefix_sharing else []
        shared = self._pages.match(hashes)
        cached = len(shared) * size
        # Back to where neither a page nor a chunk is cut: a later span's chunks may start inside a page.
        while (whole := reusable_prefix(runs, cached) // size * size) < cached:
            cached = whole
        keep = cached // size
        self._pages.release(shared[keep:])
        sequence.pages = shared[:keep]
        self._grow(sequence, len(prompt))
        view = SlotView(len(prompt), sequence.pages)
        self._parts.runner.prefill(ids[None], cached, end, runs, view)
        if self._parts.proposer is not None:
            self._parts.proposer.prefill(ids[None], cached, end, runs, view)
        for page, digest in list(zip(sequence.pages, hashes, strict=False))[keep:]:
            self._pages.publish(page, digest)
        return cached

    def _grow(self, sequence: Sequence, positions: int) -> None:
        """Give a sequence pages for `positions` positions, in whole attention blocks."""
        size, block = self.plan.page_size, self._parts.pages_per_block
        wanted = -(-min(positions, self.plan.ctx + size) // size)
        wanted = -(-wanted // block) * block
        missing = wanted - len(sequence.pages)
        if missing > 0:
            after = sequence.pages[-1] if sequence.pages else None
            sequence.pages += self._pages.allocate(missing, after)
            width = self._parts.state.page_table.shape[1]
            self._parts.state.page_table[sequence.slot] = self._parts.runner.page_row(sequence.pages, width)

    def _enqueue(self) -> bool:
        """Enqueue one round over all running slots; False when every one may already be at its limit."""
        live = self._scheduler.running()
        if not any(s.bound < s.length_limit or not s.in_flight for s in live):
            return False
        k, next_k = self._k, self._draft_length.choose()
        views = [EMPTY_SLOT] * self.plan.slots
        needs, logprobs = SamplerClass(), None
        for sequence in live:
            # The round feeds up to bound + k positions and drafts up to next_k beyond what it commits.
            reach = min(sequence.bound + k + 1 + next_k, self.plan.ctx)
            self._grow(sequence, reach)
            views[sequence.slot] = SlotView(reach, sequence.pages)
            needs = needs | sequence.needs
            wanted = sequence.request.params.logprobs
            logprobs = logprobs if wanted is None else max(wanted, logprobs or 0)
            sequence.in_flight.append(k + 1)
        ticket = self._parts.queue.launch(k, views, needs, logprobs, next_k)
        self._k = next_k
        epochs = [0] * self.plan.slots
        for sequence in live:
            epochs[sequence.slot] = sequence.epoch
        self._in_flight.append(_InFlight(ticket, tuple(epochs)))
        return True

    # -- reading what happened ---------------------------------------------------------------------

    def _read(self, entry: _InFlight) -> None:
        result = entry.ticket.read()
        outcomes = read_outcomes(result)
        draft_seconds, verify_seconds, _ = result.seconds
        self._draft_length.observe_cost(result.k, verify_seconds, draft_seconds, result.draft_forwards)
        for sequence in self._scheduler.running():
            if entry.epochs[sequence.slot] == sequence.epoch:
                self._apply(sequence, outcomes[sequence.slot], result)

    def _apply(self, sequence: Sequence, outcome: Outcome, result: RoundResult) -> None:
        sequence.in_flight.popleft()
        settled = settle(sequence, outcome)
        if sequence.rounds_read > 1:  # nothing could have been drafted for the first
            self._draft_length.observe(result.k, len(outcome.draft), outcome.accepted)
        if self.trace is not None:
            self.trace(self._record(sequence, outcome, result, settled.tokens))
        reason = settled.finish_reason
        if settled.tokens or reason:
            text = sequence.detokenizer.take(final=reason is not None)
            self._ready.append(
                Event(
                    sequence.request.id,
                    tuple(settled.tokens),
                    text,
                    reason,
                    settled.drafted,
                    settled.logprobs,
                )
            )
        if reason:
            sequence.finish_reason = reason
            self._retire(sequence)

    def _record(
        self, sequence: Sequence, outcome: Outcome, result: RoundResult, tokens: list[int]
    ) -> RoundRecord:
        draft, verify, rest = (round(1000 * s, 3) for s in result.seconds)
        return RoundRecord(
            request=sequence.request.id,
            round=sequence.rounds_read - 1,
            position=outcome.length,
            method=self.plan.spec,
            draft=outcome.draft,
            sampled=outcome.sampled[: len(outcome.draft) + 1],
            accepted=outcome.accepted,
            committed=tokens,
            ms={"draft": draft, "verify": verify, "rest": rest},
            draft_forwards=result.draft_forwards,
        )

    def _retire(self, sequence: Sequence) -> None:
        """Free a sequence's slot and pages; publish the pages that hold committed tokens only."""
        self._parts.state.retire(sequence.slot)
        if sequence.finish_reason == "error":
            own = [page for page in sequence.pages if not self._pages.is_published(page)]
            self._parts.runner.cache.clear(own)
            if self._parts.proposer is not None:
                self._parts.proposer.clear(own)
        elif self.plan.prefix_sharing:
            # Everything after the prompt was written by verify-class tiles.
            end = sequence.length - 1
            runs = extend_tile(sequence.runs, end)
            for page, digest in zip(
                sequence.pages, page_hashes(sequence.tokens(), runs, self.plan.page_size, end), strict=False
            ):
                self._pages.publish(page, digest)
        # Last page first: the end of a chain is of no use without its beginning.
        self._pages.release(sequence.pages[::-1])
        sequence.pages = []
        self._scheduler.slots[sequence.slot] = None
        self._finished[sequence.request.id] = sequence.metrics


def _open_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The folder's tokenizer if it has one; its ids must fit the embedding, which may be padded."""
    if not (folder / "tokenizer.json").exists():
        return None
    tokenizer = Tokenizer.open(folder)
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: {tokenizer.vocab_size} token ids, but config.json says "
            f"vocab_size {vocab_size}",
            reason=["Some tokens would have no embedding."],
        )
    return tokenizer
