"""From a request to a sequence; whatever can be refused for one request alone is refused here."""

from __future__ import annotations

from dataclasses import replace

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.runtime.engine.detokenizer import Detokenizer
from spd.runtime.engine.grammar import BudgetedThinking, Grammar, GrammarCompiler
from spd.runtime.engine.request import Request
from spd.runtime.engine.sequence import Sequence
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.sampling_params import SamplerClass
from spd.runtime.round.spans import program_runs
from spd.runtime.round.state import NUM_STOP_IDS


class RequestChecks:
    """Everything about a model that decides whether a request can run: vocabulary, ends, context."""

    def __init__(self, plan: EnginePlan) -> None:
        config, folder = plan.model.config, plan.model
        self.plan, self.vocab_size = plan, config.vocab_size
        self.tokenizer = folder.tokenizer
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size:  # which may be padded
            raise CheckpointError(
                f"{folder.path / 'tokenizer.json'}: {self.tokenizer.vocab_size} token ids, but config.json "
                f"says vocab_size {self.vocab_size}",
                reason=["Some tokens would have no embedding."],
            )
        self.eos_ids = folder.generation.eos_token_ids or config.eos_token_ids
        self.usable_vocab = self.tokenizer.vocab_size if self.tokenizer else self.vocab_size
        """Ids that can be drawn; vocab_size of them have an embedding."""
        self._grammars = GrammarCompiler(folder.path, self.vocab_size)

    def sequence(self, request: Request) -> Sequence:
        """A request, checked and ready to wait. Raises UsageError or IncompatibleError."""
        self._check(request)
        params, length = request.params, len(request.prompt_ids)
        ends = dict.fromkeys((*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids))
        stops = tuple(ends)[:NUM_STOP_IDS]
        limit = self.plan.shape.ctx if params.max_tokens is None else length + params.max_tokens
        grammar: Grammar | None = None
        if request.grammar is not None:
            grammar = self._grammars.compile(request.grammar, stops)
        if request.thinking is not None:
            grammar = BudgetedThinking(request.thinking, grammar)
        bytes_of = self.tokenizer.bytes_of if self.tokenizer else lambda _tokens: b""
        return Sequence(
            request=request,
            length_limit=min(self.plan.shape.ctx, limit),
            stop_ids=stops,
            detokenizer=Detokenizer(bytes_of, params.stop, params.min_tokens),
            needs=replace(SamplerClass.of(params), grammar=grammar is not None),
            grammar=grammar,
            runs=program_runs(request.spans or (("prompt", length),), self.plan.shape.chunk),
        )

    def _check(self, request: Request) -> None:
        params, length = request.params, len(request.prompt_ids)
        if not length:
            raise UsageError("the prompt has no tokens", reason=["a first token is needed to continue from"])
        wrong = next((t for t in request.prompt_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"prompt token id {wrong} is out of range", reason=[f"valid: 0 to {self.vocab_size - 1}"]
            )
        if length >= self.plan.shape.ctx:
            raise IncompatibleError(
                f"prompt is {length:,} tokens but the context is {self.plan.shape.ctx:,}",
                fix=[f"--ctx N above {length}", "--overflow truncate-left to drop the oldest tokens"],
                code="context_overflow",
            )
        end = () if request.thinking is None else (request.thinking.end,)
        for token_id in (*params.stop_token_ids, *(token for token, _ in params.logit_bias), *end):
            if token_id >= self.usable_vocab:
                raise UsageError(
                    f"token id {token_id} is out of range", reason=[f"valid: 0 to {self.usable_vocab - 1}"]
                )
        for wanted, what in ((params.stop, "stop strings need"), (request.grammar, "a grammar needs")):
            if wanted and self.tokenizer is None:
                raise IncompatibleError(f"{what} a tokenizer, and the model folder has no tokenizer.json")
        if request.spans and sum(n for _, n in request.spans) != length:
            raise UsageError("the prompt's spans do not add up to its length")
        if any(origin not in ("prompt", "generated") or n < 0 for origin, n in request.spans):
            raise UsageError("a span is neither prompt nor generated, or its length is negative")
