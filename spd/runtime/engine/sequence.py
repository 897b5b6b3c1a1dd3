"""The engine's record of one request, from its checks to its end, and its text as it grows. No torch here."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.formats.names import TOKENIZER_FILE
from spd.runtime.engine import clock
from spd.runtime.engine.draft_length import Acceptance
from spd.runtime.engine.grammar import Grammar, GrammarCompiler, GrammarError
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.request import Event, Request, TokenLogprob, partial_match_length
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.sampling_params import NUM_STOP_IDS, SamplingSteps
from spd.runtime.round.spans import Run, program_runs

if TYPE_CHECKING:
    from spd.runtime.round.prompt_scores import PromptScores
    from spd.runtime.round.round_queue import HostLogprobs

NO_SLOT = -1
NO_NUMBER = "the model gave no finite number"
DEAD_END = "grammar dead end: no token is allowed, or none has a finite number"
NEVER_BEGAN = "the model stopped before its thinking ended, so the grammar never began"
INCOMPLETE = "the text ended before the {} was complete"


class Detokenizer:
    """Turns tokens into text for one request: whole characters only, stop strings across tokens and rounds.

    `bytes_of` gives the exact bytes of some tokens (none for special ones). Bytes that are not UTF-8
    become U+FFFD once it is sure that no continuation follows.
    """

    __slots__ = (
        "_bytes_of",
        "_count",
        "_ignored",
        "_min_tokens",
        "_pending",
        "_rest",
        "_stops",
        "stop",
    )

    def __init__(
        self, bytes_of: Callable[[Listed[int]], bytes], stops: Listed[str], min_tokens: int
    ) -> None:
        self._bytes_of = bytes_of
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._rest = b""  # the beginning of a character, whose other bytes are to come
        self._pending = ""
        self._ignored = (
            0  # leading characters of `_pending` that came within the first min_tokens tokens
        )
        self._count = 0
        self.stop: str | None = None
        """The stop string whose text was cut away, with all behind it."""

    def push(self, token_id: int) -> bool:
        """Take one token; True when it completes a stop string, whose text is then cut away."""
        self._count += 1
        self._pending += self.pass_on((token_id,))
        if self._count <= self._min_tokens:
            self._ignored = len(self._pending)
        return self._look_for_stop()

    def pass_on(self, token_ids: Listed[int], *, final: bool = False) -> str:
        """Take several tokens and hand out the whole characters that there are: with `final` all.

        Enough where no text ends the request.
        """
        data = self._rest + self._bytes_of(token_ids)
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text

    def _look_for_stop(self) -> bool:
        if self._count <= self._min_tokens:
            return False
        # A stop counts when it is completed after the minimum, however tokens fall into rounds.
        places: list[tuple[int, int, str]] = []
        for stop in self._stops:
            place = self._pending.find(stop, max(0, self._ignored - len(stop) + 1))
            if place >= 0:
                places.append((place, len(stop), stop))
        if places:
            place, _, self.stop = min(places)  # of two that begin together the shorter one
            self._pending = self._pending[:place]
        return self.stop is not None

    def take(self, *, final: bool = False) -> str:
        """Text that no later token can change; everything that is left when `final`."""
        if final and self.stop is None:
            self._pending += self.pass_on((), final=True)
            self._look_for_stop()
        withheld = 0  # characters that may yet become a stop string
        if not final:
            partial_matches = (partial_match_length(stop, self._pending) for stop in self._stops)
            withheld = max(partial_matches, default=0)
        end = len(self._pending) - withheld
        text = self._pending[:end]
        self._pending = self._pending[end:]
        self._ignored = max(0, self._ignored - len(text))
        return text


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. With slots, for its fields are read and written in every round."""

    request: Request
    length_limit: int
    stop_ids: tuple[int, ...]
    detokenizer: Detokenizer
    needs: SamplingSteps
    grammar: Grammar | None = None
    """Keeps it out of the rounds between one it took part in and the arrival of its next masks."""
    waits: bool = False
    """Whether the grammar has to begin yet, behind the last of `stop_ids`: it keeps out of none before."""
    paused: bool = False
    """Whether that token, which silences the slot, was the last to come; in thinking nothing begins."""
    silent: int = (
        0  # rounds on their way that were enqueued before it stopped there: they do nothing for it
    )
    runs: list[Run] = field(default_factory=list)
    """Which program writes the prompt's positions; what follows is written by tiles."""
    slot: int = NO_SLOT
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the full pages that a prefill will have written; see `TextHashes`."""
    prefilled: int = (
        0  # positions whose cache is there; all but the last token's before it may decode
    )
    checkpoint: int | None = None
    """The place of the states as of `prefilled` that it begins with, where its model keeps some."""
    stops: tuple[int, ...] = ()  # positions at which its prefill pauses, for a checkpoint
    placed: bool = False  # whether the device knows of its stay in the slot
    active: bool = False  # whether it takes part in rounds: prefilled, and waiting for nothing
    generated: list[int] = field(default_factory=list)
    length: int = field(init=False)  # committed tokens the host knows of, the prompt included
    in_flight: int = 0
    """Widths (k + 1) of rounds enqueued and not yet read: what they commit is known late, see `bound`."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived_at: float = field(default_factory=clock.now)
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Scores of the prompt, once it is written; None before, and where none are asked for."""

    def __post_init__(self) -> None:
        self.length = self.metrics.prompt_tokens = len(self.request.prompt_ids)

    def take(
        self,
        tokens: list[int],
        drafts: int,
        matched: int,
        ended: str | None,
        now: float,
        scores: HostLogprobs | None = None,
    ) -> Event:
        """What a round brought, read at `now` in seconds: the tokens that it committed, and why it ended.

        Of so many drafts `matched` equal the target's tokens. The tokens are walked in order; the first stop
        cuts the rest away. At each token stop ids come first, then stop strings, then the length limit, so a
        stop on the last allowed token is a stop.
        """
        ended = self._begin_grammar(tokens, ended)
        reason = ended
        error = None
        spoken = tokens[:-1] if ended == "stop" else tokens  # a stop id has no text
        if self.grammar is None and not self.request.params.stop:
            text = self.detokenizer.pass_on(spoken, final=reason is not None)
        else:
            count, stopped, error = self._walk(spoken)
            if stopped is not None:
                tokens = tokens[:count]
                reason = stopped
            if reason in ("stop", "length") and self.grammar and not self.grammar.complete:
                reason, error = self._incomplete(tokens, reason)
            text = self.detokenizer.take(final=reason is not None)
        if ended == reason == "error" and error is None:
            error = NO_NUMBER if self.grammar is None else DEAD_END
        accepted = min(matched, len(tokens))
        prompt_scores = () if self.generated else self.prompt_logprobs or ()
        self.commit(tokens, drafts, accepted, now)
        self.metrics.draft_n_accepted_raw += matched
        logprobs = () if scores is None else self._logprobs(scores, tokens)
        marks = (True,) * accepted + (False,) * (len(tokens) - accepted)
        return Event(
            self.request.id,
            tuple(tokens),
            text,
            reason,
            marks,
            logprobs,
            error,
            self.detokenizer.stop if reason == "stop" else None,
            prompt_scores,
        )

    def _begin_grammar(self, tokens: list[int], ended: str | None) -> str | None:
        """Start a deferred grammar if its opening token came last; return why the sequence ended, if it did.

        The opening token is the last of `stop_ids`, so the round pauses there: that is no end.
        """
        self.paused = self.waits and ended == "stop" and tokens[-1] == self.stop_ids[-1]
        if not self.paused:
            return ended
        assert self.grammar is not None
        if self.grammar.begins_behind(tokens):
            self.waits = False
            self.stop_ids = self.stop_ids[:-1]
            self.needs = replace(self.needs, grammar=True)
        return "length" if self.length + len(tokens) >= self.length_limit else None

    def _incomplete(self, tokens: list[int], reason: str) -> tuple[str, str | None]:
        """Return the finish reason and the error of a text whose grammar is not complete."""
        shape = self.request.grammar
        if shape is None:
            return reason, None
        if reason == "stop" and shape.after not in (None, *self.generated, *tokens):
            return "error", NEVER_BEGAN
        return reason, INCOMPLETE.format("grammar" if shape.kind == "lark" else shape.kind)

    def _walk(self, tokens: list[int]) -> tuple[int, str | None, str | None]:
        """Follow tokens to a stop string, a grammar's end or fault: how many count, finish reason, error."""
        for i, token in enumerate(tokens, 1):
            if self.detokenizer.push(token):
                return i, "stop", None
            if self.grammar is not None:
                try:
                    self.grammar.accept(token)
                    if self.grammar.finished:
                        return i, "stop", None
                except GrammarError as failure:
                    return i, "error", str(failure)
        return len(tokens), None, None

    def _logprobs(self, scores: HostLogprobs, tokens: list[int]) -> tuple[TokenLogprob, ...]:
        """Of tokens, with as many of the likeliest as the request wants; none where it wants none."""
        wanted = self.request.params.logprobs
        if wanted is None:
            return ()
        own = scores.own[self.slot]
        values = scores.values[self.slot]
        ids = scores.ids[self.slot]
        return tuple(
            TokenLogprob(
                token, own[i], tuple(zip(ids[i][:wanted], values[i][:wanted], strict=True))
            )
            for i, token in enumerate(tokens)
        )

    @property
    def scores_prompt(self) -> bool:
        """True while the prompt has still to be scored: then all of it is written, cached or not."""
        return self.request.prompt_logprobs is not None and self.prompt_logprobs is None

    def take_prompt_scores(self, scores: PromptScores) -> None:
        """Keep the scores of the prompt's tokens but the first, in order."""
        tokens = self.request.prompt_ids[1:]
        rows = zip(tokens, scores.own, scores.values, scores.ids, strict=False)
        self.prompt_logprobs = tuple(
            TokenLogprob(token, own, tuple(zip(ids, values, strict=True)))
            for token, own, values, ids in rows
        )

    def commit(self, tokens: Listed[int], drafts: int, accepted: int, now: float) -> None:
        """Add a round's tokens, read at `now` in seconds; so many of its drafts are among them."""
        metrics = self.metrics
        outcome = (drafts, accepted)
        metrics.outcomes[outcome] = metrics.outcomes.get(outcome, 0) + 1
        if not tokens:
            return
        self.generated += tokens
        self.length += len(tokens)
        metrics.completion_tokens += len(tokens)
        since = 1000 * (now - self.arrived_at)
        if not metrics.first_tokens:
            metrics.first_tokens = len(tokens)
            metrics.first_token_ms = since
        metrics.predicted_ms = since - metrics.first_token_ms

    @property
    def bound(self) -> int:
        """At most this many tokens are committed once every enqueued round has run."""
        return min(self.length + self.in_flight, self.length_limit)

    @property
    def prefill_end(self) -> int:
        """Positions that a prefill writes: all but the last token's, which a round feeds."""
        return self.length - 1

    def tokens(self) -> list[int]:
        """Prompt and generated ids, in order."""
        return [*self.request.prompt_ids, *self.generated]


class RequestValidator:
    """Everything about a model that decides whether a request can run: vocabulary, ends, context."""

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.model.config
        folder = plan.model
        self.plan = plan
        self.vocab_size = config.vocab_size
        self.tokenizer = folder.tokenizer
        if (
            self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size
        ):  # which may be padded
            why = f"{self.tokenizer.vocab_size} token ids, but vocab_size is {self.vocab_size}"
            path = folder.path / TOKENIZER_FILE if folder.gguf is None else folder.path
            reason = ["Some tokens would have no embedding."]
            raise CheckpointError(f"{path}: {why}", reason=reason)
        self.eos_ids = folder.generation.eos_token_ids or config.eos_token_ids
        self.usable_vocab = self.tokenizer.vocab_size if self.tokenizer else self.vocab_size
        """Ids that can be drawn; vocab_size of them have an embedding."""
        self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size)

    def sequence(self, request: Request) -> Sequence:
        """A request, checked and ready to wait. Raises UsageError or IncompatibleError."""
        self._check(request)
        params = request.params
        length = len(request.prompt_ids)
        ends = dict.fromkeys((*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids))
        stops = tuple(ends)[:NUM_STOP_IDS]
        limit = self.plan.shape.ctx if params.max_tokens is None else length + params.max_tokens
        grammar = self._grammars.compile(request.grammar, stops, request.thinking)
        after = None if request.grammar is None else request.grammar.after
        free = request.thinking is None and not params.min_tokens and after not in (None, *stops)
        waits = free and len(stops) < NUM_STOP_IDS
        bytes_of = self.tokenizer.decode_bytes if self.tokenizer else lambda _tokens: b""
        return Sequence(
            request=request,
            length_limit=min(self.plan.shape.ctx, limit),
            stop_ids=(*stops, after) if waits and after is not None else stops,
            detokenizer=Detokenizer(bytes_of, params.stop, params.min_tokens),
            needs=replace(
                SamplingSteps.from_params(params), grammar=grammar is not None and not waits
            ),
            grammar=grammar,
            waits=waits,
            runs=program_runs(request.spans or (("prompt", length),), self.plan.shape.chunk),
        )

    def _check(self, request: Request) -> None:
        params = request.params
        length = len(request.prompt_ids)
        if not length:
            raise UsageError(
                "the prompt has no tokens", reason=["a first token is needed to continue from"]
            )
        if length >= self.plan.shape.ctx:
            why = f"prompt is {length:,} tokens but the context is {self.plan.shape.ctx:,}"
            fix = [f"--ctx N above {length}", "a shorter prompt"]
            raise IncompatibleError(why, fix=fix, code="context_overflow")
        end = () if request.thinking is None else (request.thinking.end,)
        named = (*params.stop_token_ids, *(token for token, _ in params.logit_bias), *end)
        for what, ids, size in (
            ("prompt token id", request.prompt_ids, self.vocab_size),
            ("token id", named, self.usable_vocab),
        ):
            if (wrong := next((each for each in ids if not 0 <= each < size), None)) is not None:
                raise UsageError(
                    f"{what} {wrong} is out of range", reason=[f"valid: 0 to {size - 1}"]
                )
        for wanted, what in (
            (params.stop, "stop strings need"),
            (request.grammar, "a grammar needs"),
        ):
            if wanted and self.tokenizer is None:
                raise IncompatibleError(
                    f"{what} a tokenizer, and the model folder has no tokenizer.json"
                )
        if request.spans and sum(n for _, n in request.spans) != length:
            raise UsageError("the prompt's spans do not add up to its length")
