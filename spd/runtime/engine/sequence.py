"""The engine's record of one request, the validation of requests, and their detokenizer.

No torch here.
"""

from __future__ import annotations

import codecs
from collections import abc
from collections.abc import Callable, Collection
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
from spd.runtime.round.spans import ProgramRun, program_runs

if TYPE_CHECKING:
    from spd.runtime.round.prompt_scores import PromptScores
    from spd.runtime.round.round_queue import HostLogprobs

NO_SLOT = -1
FINISH_REASONS = (None, "stop", "length", "error")
"""Finish reasons by the code that a round emits: GOING_ON, STOPPED, FULL, FAILED."""
NO_NUMBER = "the model gave no finite number"
DEAD_END = "grammar dead end: no token is allowed, or none has a finite number"
NEVER_BEGAN = "the model stopped before its thinking ended, so the grammar never began"
INCOMPLETE = "the text ended before the {} was complete"


class Detokenizer:
    """Turns tokens into text for one request: complete characters, cut at stop strings.

    A stop string may span tokens and rounds. `decode_bytes` returns the exact bytes of some tokens
    (none for special ones). Bytes that are not UTF-8 become U+FFFD once no continuation can follow.
    """

    __slots__ = (
        "_count",
        "_decode_bytes",
        "_ignored",
        "_min_tokens",
        "_pending",
        "_stops",
        "_undecoded",
        "stop",
    )

    def __init__(
        self,
        decode_bytes: Callable[[abc.Sequence[int]], bytes],
        stops: abc.Sequence[str],
        min_tokens: int,
    ) -> None:
        self._decode_bytes = decode_bytes
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._undecoded = b""  # the first bytes of a character whose other bytes are to come
        self._pending = ""  # decoded text that `take` has not returned
        self._ignored = 0
        """Leading characters of `_pending` that came within the first min_tokens tokens."""
        self._count = 0  # tokens pushed
        self.stop: str | None = None
        """The stop string that ended the text; the text is cut before it."""

    def push(self, token_id: int) -> bool:
        """Decode one token and append its text; True if that completes a stop string.

        The text is then cut before the stop string.
        """
        self._count += 1
        self._pending += self.decode_tokens((token_id,))
        if self._count <= self._min_tokens:
            self._ignored = len(self._pending)
        return self._look_for_stop()

    def decode_tokens(self, token_ids: abc.Sequence[int], *, final: bool = False) -> str:
        """Decode tokens behind those before, and return the complete characters; with `final` all.

        Stop strings are not looked for: this suffices for a request without stop strings.
        """
        data = self._undecoded + self._decode_bytes(token_ids)
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._undecoded = data[num_decoded:]
        return text

    def _look_for_stop(self) -> bool:
        """Cut the pending text before the completed stop string that begins first; True if any is."""
        if self._count <= self._min_tokens:
            return False
        # A stop counts if it is completed after the minimum, however tokens are split into rounds.
        matches: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = self._pending.find(stop, max(0, self._ignored - len(stop) + 1))
            if start >= 0:
                matches.append((start, len(stop), stop))
        if matches:
            start, _, self.stop = min(matches)  # of two with one start the shorter stop
            self._pending = self._pending[:start]
        return self.stop is not None

    def take_text(self, *, final: bool = False) -> str:
        """Return and remove the text that no later token can change; with `final` all text."""
        if final and self.stop is None:
            self._pending += self.decode_tokens((), final=True)
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
    """The engine's record of one request while it waits and runs.

    With `__slots__`, since its fields are read and written in every round.
    """

    request: Request
    length_limit: int
    """The length in tokens, prompt included, at which the text ends."""
    stop_ids: tuple[int, ...]
    """Token ids after which its slot stops."""
    detokenizer: Detokenizer
    needs: SamplingSteps
    draft_cap: int
    """Drafts of a round that are verified for it at most."""
    grammar: Grammar | None = None
    """With a grammar, the sequence sits out rounds until the masks for its next are written."""
    defers_grammar: bool = False
    """True until the grammar begins, after the last of `stop_ids`; it sits out no round before."""
    masked_drafts: int = 0
    """Leading drafts of the last round that its grammar's masks have chosen among."""
    forced_drafts: int = 0
    """Last drafts of the next round that its grammar has forced."""
    is_paused: bool = False
    """True if that token was the last one emitted, which deactivates the slot."""
    ignored_rounds: int = 0
    """Rounds in flight that were enqueued before the pause: they emit nothing for the sequence."""
    runs: list[ProgramRun] = field(default_factory=list)
    """The programs that write the prompt's positions; later positions are written by tiles."""
    slot: int = NO_SLOT
    epoch: int = 0
    """The number of its stay in a slot; later stays have larger numbers."""
    pages: list[int] = field(default_factory=list)
    """Its page numbers, in order of position."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full pages that a prefill will have written; see `TextHashes`."""
    prefilled: int = 0
    """Positions whose cache is written; it decodes once all but the last token's are."""
    snapshot: int | None = None
    """The place of the recurrent states as of `prefilled` that it starts from, where its model has some."""
    snapshot_stops: tuple[int, ...] = ()
    """Positions at which its prefill pauses for a snapshot."""
    is_admitted: bool = False
    """True once the slot's row is written on the device."""
    is_active: bool = False
    """True while it takes part in rounds: it is prefilled, and its masks are written."""
    generated: list[int] = field(default_factory=list)
    """The token ids that were committed behind the prompt."""
    length: int = field(init=False)
    """Committed tokens that the host has read, the prompt included."""
    in_flight: int = 0
    """Sum of the widths (k + 1) of its rounds that are enqueued and not yet read.

    See `length_bound`.
    """
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived_at: float = field(default_factory=clock.now)
    """Seconds of `clock.now` when the request arrived."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Scores of the prompt once it is written; None before, and where none are requested."""

    def __post_init__(self) -> None:
        self.length = self.metrics.prompt_tokens = len(self.request.prompt_ids)

    def apply_round(
        self,
        tokens: list[int],
        drafts: int,
        matched: int,
        round_reason: str | None,
        now: float,
        scores: HostLogprobs | None = None,
    ) -> Event:
        """Append the tokens that a round committed for this sequence; return their event.

        drafts: how many drafts the round verified, of which `matched` equal the target's tokens.
        round_reason: the finish reason that the round emitted, if any. now: when it was read, in
        seconds.

        The tokens are checked in order, and the text ends at the first stop. At each token stop ids
        come first, then stop strings, then the length limit, so a stop on the last allowed token is
        a stop.
        """
        grammar = self.grammar
        if grammar is not None:
            self.metrics.rounds_waited += self.needs.grammar
            round_reason = self._begin_grammar(tokens, round_reason)
        reason = round_reason
        error = None
        text_tokens = tokens[:-1] if round_reason == "stop" else tokens  # a stop id has no text
        if grammar is None and not self.request.params.stop:
            text = self.detokenizer.decode_tokens(text_tokens, final=reason is not None)
        else:
            count, host_reason, error = self._find_end(text_tokens)
            if host_reason is not None:
                tokens = tokens[:count]
                reason = host_reason
            if reason in ("stop", "length") and grammar and not grammar.is_complete:
                reason, error = self._incomplete_reason(tokens, reason)
            text = self.detokenizer.take_text(final=reason is not None)
        if round_reason == reason == "error" and error is None:
            error = NO_NUMBER if grammar is None else DEAD_END
        accepted = matched if matched < len(tokens) else len(tokens)  # cheaper than `min`
        self.commit_tokens(tokens, drafts, accepted, now)
        self.metrics.draft_n_accepted_raw += matched
        logprobs = () if scores is None else self._token_logprobs(scores, tokens)
        drafted = (True,) * accepted + (False,) * (len(tokens) - accepted)
        event = Event(self.request.id, tuple(tokens), text, reason, drafted, logprobs, error)
        if reason == "stop":
            event = event._replace(stop=self.detokenizer.stop)
        if self.prompt_logprobs is not None and len(self.generated) == len(tokens):
            event = event._replace(prompt_logprobs=self.prompt_logprobs)
        return event

    def force_drafts(
        self, drafts: abc.Sequence[int], limit: int, verify_rule: str
    ) -> abc.Sequence[int]:
        """Return the drafts that the grammar allows, and behind them what it forces; count both in
        the metrics.

        At most `limit`, and none before the first token. Rules other than "coupled" test the
        probability by which a draft was drawn, so these are left as they are. Raises GrammarError.
        """
        if self.grammar is None or self.defers_grammar or verify_rule != "coupled":
            return drafts
        limit = min(limit, self.draft_cap)
        forced_drafts = self.grammar.force_drafts(drafts, limit if self.generated else 0)
        num_alike = 0
        for draft, forced in zip(drafts, forced_drafts, strict=False):
            if draft != forced:
                break
            num_alike += 1
        self.forced_drafts = len(forced_drafts) - num_alike
        self.metrics.draft_n_masked += min(self.masked_drafts, num_alike) + self.forced_drafts
        self.masked_drafts = 0
        return forced_drafts

    def _begin_grammar(self, tokens: list[int], reason: str | None) -> str | None:
        """Start a deferred grammar if its opening token came last; return the text's finish reason,
        if any.

        The opening token is the last of `stop_ids`, so the round stops there, which does not end
        the text.
        """
        self.is_paused = (
            self.defers_grammar and reason == "stop" and tokens[-1] == self.stop_ids[-1]
        )
        if not self.is_paused:
            return reason
        assert self.grammar is not None
        if self.grammar.begins_after(tokens):
            self.defers_grammar = False
            self.stop_ids = self.stop_ids[:-1]
            self.needs = replace(self.needs, grammar=True)
        return "length" if self.length + len(tokens) >= self.length_limit else None

    def _incomplete_reason(self, tokens: list[int], reason: str) -> tuple[str, str | None]:
        """Return the finish reason and the error text of a text that ended before its grammar was
        complete.
        """
        spec = self.request.grammar
        if spec is None:
            return reason, None
        if reason == "stop" and spec.after not in (None, *self.generated, *tokens):
            return "error", NEVER_BEGAN
        return reason, INCOMPLETE.format("grammar" if spec.kind == "lark" else spec.kind)

    def _find_end(self, tokens: list[int]) -> tuple[int, str | None, str | None]:
        """Follow tokens to a stop string, or to the end or an error of the grammar.

        Returns how many tokens belong to the text, the finish reason and the error; None where it
        goes on.
        """
        for i, token in enumerate(tokens, 1):
            if self.detokenizer.push(token):
                return i, "stop", None
            if self.grammar is not None:
                try:
                    self.grammar.accept_token(token)
                    if self.grammar.is_finished:
                        return i, "stop", None
                except GrammarError as failure:
                    return i, "error", str(failure)
        return len(tokens), None, None

    def _token_logprobs(self, scores: HostLogprobs, tokens: list[int]) -> tuple[TokenLogprob, ...]:
        """Return the tokens' log-probabilities with those of the likeliest ones, if they are requested."""
        count = self.request.params.logprobs
        if count is None:
            return ()
        sampled = scores.sampled[self.slot]
        values = scores.values[self.slot]
        ids = scores.ids[self.slot]
        logprobs = []
        for i, token in enumerate(tokens):
            likeliest = tuple(zip(ids[i][:count], values[i][:count], strict=True))
            logprobs.append(TokenLogprob(token, sampled[i], likeliest))
        return tuple(logprobs)

    @property
    def scores_prompt(self) -> bool:
        """True while the prompt is to be scored: then all of it is written, cached or not."""
        return self.request.prompt_logprobs is not None and self.prompt_logprobs is None

    def set_prompt_scores(self, scores: PromptScores) -> None:
        """Set the scores of all the prompt's tokens but the first, in order."""
        tokens = self.request.prompt_ids[1:]
        rows = zip(tokens, scores.prompt, scores.values, scores.ids, strict=False)
        self.prompt_logprobs = tuple(
            TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
            for token, logprob, values, ids in rows
        )

    def commit_tokens(
        self, tokens: abc.Sequence[int], drafts: int, accepted: int, now: float
    ) -> None:
        """Append a round's tokens to the sequence, `accepted` of which are drafts, and update the
        metrics.

        drafts: how many the round verified. now: when it was read, in seconds.
        """
        metrics = self.metrics
        outcome = (drafts, accepted)
        metrics.outcomes[outcome] = metrics.outcomes.get(outcome, 0) + 1
        if not tokens:
            return
        count = len(tokens)
        self.generated += tokens
        self.length += count
        metrics.completion_tokens += count
        elapsed_ms = 1000 * (now - self.arrived_at)
        if not metrics.first_tokens:
            metrics.first_tokens = count
            metrics.first_token_ms = elapsed_ms
        metrics.predicted_ms = elapsed_ms - metrics.first_token_ms

    @property
    def length_bound(self) -> int:
        """Upper bound of the length once every enqueued round has run."""
        bound = self.length + self.in_flight
        return bound if bound < self.length_limit else self.length_limit  # cheaper than `min`

    @property
    def prefill_end(self) -> int:
        """Number of positions that a prefill writes: all but the last token's, which a round feeds."""
        return self.length - 1

    def tokens(self) -> list[int]:
        """Return the prompt's ids and the generated ids, in order."""
        return [*self.request.prompt_ids, *self.generated]


class RequestValidator:
    """Checks requests against a model: vocabulary, stop tokens, context. Makes their sequences."""

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.model.config
        folder = plan.model
        self.plan = plan
        self.vocab_size = config.vocab_size
        self.tokenizer = folder.tokenizer
        # vocab_size may be padded, so it may be the larger one.
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size:
            sizes = f"{self.tokenizer.vocab_size} token ids, but vocab_size is {self.vocab_size}"
            path = folder.path / TOKENIZER_FILE if folder.gguf is None else folder.path
            reason = ["Some tokens would have no embedding."]
            raise CheckpointError(f"{path}: {sizes}", reason=reason)
        self.eos_ids = folder.generation.eos_token_ids or config.eos_token_ids
        self.usable_vocab = self.tokenizer.vocab_size if self.tokenizer else self.vocab_size
        """Number of ids that can be drawn; the first vocab_size ids have an embedding."""
        self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size)

    def new_sequence(self, request: Request) -> Sequence:
        """Check a request, compile its grammar, and return its sequence.

        Raises UsageError or IncompatibleError where the request cannot run.
        """
        self._check_request(request)
        params = request.params
        length = len(request.prompt_ids)
        eos_ids = () if params.ignore_eos else self.eos_ids
        stops = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))[:NUM_STOP_IDS]
        limit = self.plan.shape.ctx if params.max_tokens is None else length + params.max_tokens
        grammar = self._grammars.compile(request.grammar, stops, request.thinking)
        after = None if request.grammar is None else request.grammar.after
        defers_grammar = (
            request.thinking is None
            and not params.min_tokens
            and after not in (None, *stops)
            and len(stops) < NUM_STOP_IDS
        )
        decode_bytes = self.tokenizer.decode_bytes if self.tokenizer else lambda _tokens: b""
        draft_max = self.plan.shape.draft_max
        return Sequence(
            request=request,
            draft_cap=min(draft_max if request.draft_max is None else request.draft_max, draft_max),
            length_limit=min(self.plan.shape.ctx, limit),
            stop_ids=(*stops, after) if defers_grammar and after is not None else stops,
            detokenizer=Detokenizer(decode_bytes, params.stop, params.min_tokens),
            needs=replace(
                SamplingSteps.from_params(params),
                grammar=grammar is not None and not defers_grammar,
            ),
            grammar=grammar,
            defers_grammar=defers_grammar,
            runs=program_runs(request.spans or (("prompt", length),), self.plan.shape.chunk),
        )

    def _check_request(self, request: Request) -> None:
        """Raise UsageError or IncompatibleError for a request that cannot run."""
        params = request.params
        length = len(request.prompt_ids)
        if not length:
            raise UsageError(
                "the prompt has no tokens", reason=["a first token is needed to continue from"]
            )
        if length >= self.plan.shape.ctx:
            raise IncompatibleError(
                f"prompt is {length:,} tokens but the context is {self.plan.shape.ctx:,}",
                fix=[f"--ctx N above {length}", "a shorter prompt"],
                code="context_overflow",
            )
        _check_token_ids("prompt token id", request.prompt_ids, self.vocab_size)
        option_ids = [*params.stop_token_ids, *(token for token, _ in params.logit_bias)]
        if request.thinking is not None:
            option_ids.append(request.thinking.end)
        _check_token_ids("token id", option_ids, self.usable_vocab)
        for option, clause in (
            (params.stop, "stop strings need"),
            (request.grammar, "a grammar needs"),
        ):
            if option and self.tokenizer is None:
                raise IncompatibleError(
                    f"{clause} a tokenizer, and the model folder has no tokenizer.json"
                )
        if request.spans and sum(n for _, n in request.spans) != length:
            raise UsageError("the prompt's spans do not add up to its length")


def _check_token_ids(name: str, ids: Collection[int], size: int) -> None:
    """Raise UsageError for the first id that is not from 0 to `size` - 1."""
    for token_id in ids:
        if not 0 <= token_id < size:
            raise UsageError(
                f"{name} {token_id} is out of range", reason=[f"valid: 0 to {size - 1}"]
            )
