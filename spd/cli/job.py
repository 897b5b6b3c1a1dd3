"""One generation, checked and ready: vocabulary, prompt ids, sampling, engine wishes.

Reads the small files of a model folder only; no torch here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.bench_options import VerifyOptions
from spd.cli.chat_options import ChatOptions
from spd.cli.encode import Vocabulary, fit
from spd.cli.options import GenerateOptions
from spd.cli.prompt import Asked, gather
from spd.cli.sampling import Resolved, resolve_sampling

if TYPE_CHECKING:
    from spd.runtime import EngineConfig, Request

REQUEST_ID = "0"


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

    def request(self) -> Request:
        """The order for the engine."""
        from spd.runtime import Request

        return Request(REQUEST_ID, tuple(self.ids), self.sampling.params)


def plan_job(options: GenerateOptions) -> Job:
    """Read the small files of the model and everything the options name, and check all of it."""
    from spd.formats.generation_config import read_generation_config
    from spd.formats.hub import resolve_model

    folder = resolve_model(options.model, options.revision)
    config = engine_config(options, folder)
    vocabulary = open_vocabulary(options.model, folder)
    model = vocabulary.config
    usable = model.vocab_size
    if vocabulary.tokenizer is not None:
        usable = min(usable, vocabulary.tokenizer.vocab_size)
    sampling = resolve_sampling(options, read_generation_config(folder), usable, logprobs=options.logprobs)
    asked = gather(options)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    truncate = options.overflow == "truncate-left"
    kept, ids, dropped = fit(
        asked, vocabulary, context=context, max_tokens=options.max_tokens, truncate=truncate
    )
    return Job(config, sampling, vocabulary, asked, kept, ids, dropped, context, truncate)


def open_vocabulary(name: str, folder: Path) -> Vocabulary:
    """Configuration, tokenizer and chat template of a model folder, the latter two where they exist."""
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.model_config import read_model_config
    from spd.formats.tokenizer import Tokenizer

    has_tokenizer = (folder / "tokenizer.json").exists()
    return Vocabulary(
        config=read_model_config(folder),
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
        device=options.device,
        dtype=options.dtype,
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
