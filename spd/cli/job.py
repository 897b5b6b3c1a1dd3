"""One generation, checked and ready: vocabulary, prompt ids, sampling, engine wishes.

Reads the small files of a model folder only; no torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.encode import Vocabulary, fit
from spd.cli.prompt import Asked, gather
from spd.cli.sampling import Resolved, resolve_sampling
from spd.cli.structured import end_of_thinking, read_grammar
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.cli.bench_options import VerifyOptions
    from spd.cli.chat_options import ChatOptions
    from spd.cli.options import GenerateOptions
    from spd.runtime import EngineConfig, Request, SamplingParams
    from spd.runtime.request import GrammarText

REQUEST_ID = "0"
CONCURRENCY = 8
"""Lines of a batch that decode together unless --concurrency says otherwise."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run but its prompts."""

    config: EngineConfig
    sampling: Resolved
    vocabulary: Vocabulary
    usable_vocab: int
    context: int
    truncate: bool
    grammar: GrammarText | None


@dataclass(frozen=True)
class Job:
    """What will run. `asked` is the whole prompt, `kept` what fits, `ids` its tokens."""

    config: EngineConfig
    sampling: Resolved
    vocabulary: Vocabulary
    asked: Asked
    kept: Asked
    ids: list[int]
    dropped: int
    context: int
    truncate: bool
    grammar: GrammarText | None

    def request(self) -> Request:
        """The order for the engine."""
        from spd.runtime import Request

        grammar = place_grammar(self.grammar, self.vocabulary, self.kept, self.ids)
        return Request(REQUEST_ID, tuple(self.ids), self.sampling.params, grammar=grammar)


def plan_settings(options: GenerateOptions) -> Settings:
    """Read the small files of the model, and check everything that concerns no prompt."""
    from spd.formats.generation_config import read_generation_config
    from spd.formats.hub import resolve_model

    folder = resolve_model(options.model, options.revision)
    config = engine_config(options, folder)
    if options.jsonl:
        slots = CONCURRENCY if options.concurrency is None else options.concurrency
        if not 1 <= slots <= 1024:
            raise UsageError(f"--concurrency {slots} is out of range", reason=["valid: 1 to 1024"])
        config = dataclasses.replace(config, slots=slots)
    vocabulary = open_vocabulary(options.model, folder)
    model = vocabulary.config
    usable = model.vocab_size
    if vocabulary.tokenizer is not None:
        usable = min(usable, vocabulary.tokenizer.vocab_size)
    sampling = resolve_sampling(options, read_generation_config(folder), usable, logprobs=options.logprobs)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    truncate = options.overflow == "truncate-left"
    grammar = read_grammar(options)
    if grammar is not None:
        vocabulary.need_tokenizer()
        from spd.runtime.grammar import GrammarCompiler

        GrammarCompiler(folder, model.vocab_size).compile(grammar, ())
    return Settings(config, sampling, vocabulary, usable, context, truncate, grammar)


def plan_job(options: GenerateOptions) -> Job:
    """Read the small files of the model and everything the options name, and check all of it."""
    run = plan_settings(options)
    asked = gather(options)
    kept, ids, dropped = fit(
        asked,
        run.vocabulary,
        context=run.context,
        max_tokens=options.max_tokens,
        truncate=run.truncate,
    )
    return Job(
        run.config,
        run.sampling,
        run.vocabulary,
        asked,
        kept,
        ids,
        dropped,
        run.context,
        run.truncate,
        run.grammar,
    )


def place_grammar(
    grammar: GrammarText | None, vocabulary: Vocabulary, asked: Asked, ids: Sequence[int]
) -> GrammarText | None:
    """A grammar for the reply to one prompt: behind its thinking, where it thinks."""
    if grammar is None:
        return None
    return dataclasses.replace(grammar, after=end_of_thinking(vocabulary, asked, ids))


def prepare_request(
    name: str, asked: Asked, params: SamplingParams, grammar: GrammarText | None, run: Settings
) -> tuple[Request, int]:
    """One of many orders for the engine, and how many tokens of its prompt were dropped."""
    from spd.runtime import Request

    kept, ids, dropped = fit(
        asked, run.vocabulary, context=run.context, max_tokens=params.max_tokens, truncate=run.truncate
    )
    placed = place_grammar(grammar, run.vocabulary, kept, ids)
    return Request(name, tuple(ids), params, grammar=placed), dropped


def open_vocabulary(name: str, folder: Path) -> Vocabulary:
    """Configuration, tokenizer and chat template of a model folder, the latter two where they exist."""
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.model_config import read_model_config
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.drafter import refuse_head

    config = read_model_config(folder)
    refuse_head(config, folder)
    has_tokenizer = (folder / "tokenizer.json").exists()
    return Vocabulary(
        config=config,
        tokenizer=Tokenizer.open(folder) if has_tokenizer else None,
        template=ChatTemplate.open(folder) if has_tokenizer else None,
        name=name,
    )


def engine_config(options: GenerateOptions | ChatOptions | VerifyOptions, folder: Path) -> EngineConfig:
    """The options as wishes for the engine. Raises what EngineConfig refuses."""
    from spd.formats.hub import resolve_model
    from spd.runtime import EngineConfig

    given = {
        name: value for name in ("ngram_min", "ngram_max") if (value := getattr(options, name)) is not None
    }
    return EngineConfig(
        model=folder,
        draft_model=None if options.draft_model is None else resolve_model(options.draft_model),
        mtp=None if options.mtp is None else resolve_model(options.mtp),
        device=options.device,
        dtype=options.dtype,
        quantize=options.quantize,
        spec=options.spec,
        draft_max=options.draft_max,
        adaptive=options.adaptive,
        draft_ctx=options.draft_ctx,
        verify=options.verify,
        synthetic_acceptance=options.synthetic_acceptance,
        lag=None if options.lag == "auto" else int(options.lag),
        graphs=None if options.graphs == "auto" else options.graphs == "on",
        kernels=options.kernels,
        ctx=options.ctx,
        memory_fraction=options.memory_fraction,
        threads=options.threads,
        load=options.load,
        tp=options.tp,
        draft_tp=options.draft_tp,
        rendezvous=options.rendezvous,
        **given,
    )


def fit_to_engine(job: Job, context: int) -> Job:
    """The job with the context that the engine has, which may be less than the model's."""
    if context == job.context:
        return job
    kept, ids, dropped = fit(
        job.asked,
        job.vocabulary,
        context=context,
        max_tokens=job.sampling.params.max_tokens,
        truncate=job.truncate,
    )
    return dataclasses.replace(job, kept=kept, ids=ids, dropped=dropped, context=context)
