"""Everything about a run but its prompts, checked: vocabulary, sampling, engine wishes. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spd.cli.text.encode import Vocabulary, encode_asked, overflow
from spd.cli.text.prompt import Asked
from spd.cli.text.sampling import Resolved, resolve_sampling
from spd.cli.text.structured import TAIL, end_of_thinking, opens_thinking, read_grammar, thinking_budget
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.cli.options import EngineOptions, GenerateOptions
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig, Request, SamplingParams
    from spd.runtime.engine.request import GrammarText

CONCURRENCY = 8
"""Lines of a batch that decode together unless --concurrency says otherwise."""
WISHES = (
    *("device", "dtype", "quantize", "spec", "draft_max", "adaptive", "verify", "kernels"),
    *("ctx", "memory_fraction", "threads", "tp", "draft_tp", "rendezvous"),
)
"""Options that are the engine's own, by the same names."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run but its prompts."""

    config: EngineConfig
    sampling: Resolved
    vocabulary: Vocabulary
    usable_vocab: int
    context: int
    grammar: GrammarText | None
    think: str

    def fit(self, asked: Asked, params: SamplingParams) -> list[int]:
        """The ids of what is asked. Raises IncompatibleError if they leave no room for a reply."""
        ids = encode_asked(asked, self.vocabulary, self.context)
        if len(ids) >= self.context:
            raise overflow(len(ids), self.context, params.max_tokens, self.vocabulary.config.max_positions)
        return ids

    def request(
        self,
        name: str,
        asked: Asked,
        ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        shape: GrammarText | None = None,
    ) -> tuple[Request, bool | None]:
        """The order for the engine, and how its reply is parted: see `ThinkingSplitter`.

        Without `params` those of the run hold, and its grammar. Raises what `fit` raises.
        """
        from spd.runtime import Request

        if params is None:
            params, shape = self.sampling.params, self.grammar
        ids = self.fit(asked, params) if ids is None else ids
        tokenizer, inside = self.vocabulary.tokenizer, None
        if tokenizer is not None and asked.messages:  # else there is no text, or it is not a chat's
            inside = opens_thinking(tokenizer.decode(ids[-TAIL:], skip_special=False))
        thinking = thinking_budget(self.think, self.vocabulary, bool(inside))
        if shape is not None:
            shape = dataclasses.replace(shape, after=end_of_thinking(self.vocabulary, asked, ids))
            if shape.after is not None:
                inside = True  # the grammar begins behind thinking, with or without its first tag
        return Request(name, tuple(ids), params, grammar=shape, thinking=thinking), inside


def plan_settings(options: GenerateOptions) -> Settings:
    """Read the small files of the model, and check everything that concerns no prompt."""
    from spd.formats.folder import ModelFolder

    folder = ModelFolder.named(options.model)
    config = engine_config(options, folder)
    if options.jsonl:
        slots = CONCURRENCY if options.concurrency is None else options.concurrency
        if not 1 <= slots <= 1024:
            raise UsageError(f"--concurrency {slots} is out of range", reason=["valid: 1 to 1024"])
        config = dataclasses.replace(config, slots=slots)
    vocabulary = open_vocabulary(options.model, folder)
    model, usable = vocabulary.config, vocabulary.config.vocab_size
    if vocabulary.tokenizer is not None:
        usable = min(usable, vocabulary.tokenizer.vocab_size)
    sampling = resolve_sampling(options, folder.generation, usable, logprobs=options.logprobs)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    grammar = read_grammar(options)
    if grammar is not None:
        vocabulary.need_tokenizer()
        from spd.runtime import GrammarCompiler

        GrammarCompiler(folder.path, model.vocab_size).compile(grammar, ())
    thinking_budget(options.think, vocabulary, False)
    return Settings(config, sampling, vocabulary, usable, context, grammar, options.think)


def open_vocabulary(name: str, folder: ModelFolder) -> Vocabulary:
    """Configuration, tokenizer and chat template of a model folder, the latter two where they exist."""
    from spd.formats.model_config import refuse_head

    refuse_head(folder.config, folder.path)
    tokenizer = folder.tokenizer
    return Vocabulary(folder.config, tokenizer, None if tokenizer is None else folder.template, name)


def engine_config(options: EngineOptions, folder: ModelFolder) -> EngineConfig:
    """The options as wishes for the engine. Raises what EngineConfig refuses."""
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig

    return EngineConfig(
        model=folder,
        draft_model=None if options.draft_model is None else ModelFolder.named(options.draft_model),
        mtp=None if options.mtp is None else ModelFolder.named(options.mtp),
        lag=None if options.lag == "auto" else int(options.lag),
        graphs=None if options.graphs == "auto" else options.graphs == "on",
        **{name: getattr(options, name) for name in WISHES if hasattr(options, name)},
    )
