"""Everything about a run but its prompts, checked, and prompts as token ids that fit. No torch here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.options import EngineOptions, GenerateOptions, ReplyOptions, SamplingOptions
from spd.cli.text.fill_in import fill_in_form, fill_in_ids
from spd.cli.text.messages import for_template
from spd.cli.text.prompt import (
    TAIL,
    Asked,
    continues_thinking,
    opens_thinking,
    read_grammar,
    thinking_budget,
)
from spd.cli.text.thinking import behind_thinking
from spd.errors import IncompatibleError, UsageError
from spd.formats.hub import is_repository_name
from spd.formats.names import GENERATION_FILE
from spd.formats.thinking import KNOWN, ThinkingMarks, mark_tokens, thinking_marks
from spd.runtime.engine.request import SEED_BITS, GrammarText, Request
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.folder import ModelFolder
    from spd.formats.model_config import GenerationConfig, ModelConfig
    from spd.formats.tokenizer import Tokenizer

BUILT_IN = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What holds where neither an option nor the model says anything."""
SAME = ("presence_penalty", "frequency_penalty", "min_tokens", "max_tokens", "ignore_eos")
"""Options that are parameters by the same names."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


@dataclass(frozen=True)
class Resolved:
    """Sampling parameters, and where each of the model-dependent ones came from."""

    params: SamplingParams
    sources: dict[str, str]

    def words(self) -> dict[str, Any]:
        """Each parameter, and where it comes from."""
        told = {
            name: f"{getattr(self.params, name)} ({source})"
            for name, source in self.sources.items()
        }
        return vars(self.params) | told


def resolve_sampling(
    options: SamplingOptions,
    model: GenerationConfig,
    vocab_size: int,
    *,
    logprobs: int | None = None,
) -> Resolved:
    """Flags, then generation_config.json, then built-in values. Raises UsageError."""
    import secrets

    suggested = {name: getattr(model, name) for name in BUILT_IN}
    if model.do_sample is False:
        suggested["temperature"] = 0.0
    values: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    sources = {"seed": "given" if options.seed is not None else "drawn"}
    for name, built_in in BUILT_IN.items():
        asked = ("given", getattr(options, name)), (GENERATION_FILE, suggested[name])
        found = (each for each in (*asked, ("default", built_in)) if each[1] is not None)
        sources[name], values[name] = next(found)
    stop_ids = tuple(options.stop_token_id or ())
    bias = tuple(parse_logit_bias(text) for text in options.logit_bias or ())
    check_ids(stop_ids, vocab_size, "stop_token_id")
    check_ids([token_id for token_id, _ in bias], vocab_size, "logit_bias")
    try:
        params = SamplingParams(
            **values,
            logit_bias=bias,
            stop_token_ids=stop_ids,
            stop=tuple(unescape(text) for text in options.stop or ()),
            seed=secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
            logprobs=logprobs,
        )
    except UsageError as error:
        if sources.get(error.message.partition(" ")[0]) == GENERATION_FILE:
            why = "The value comes from the model's generation_config.json; an option overrides it."
            error.reason = (*error.reason, why)
        raise
    return Resolved(params, sources)


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`ID=VALUE` as a token id and a bias. Raises UsageError."""
    left, _, right = text.partition("=")
    try:
        return int(left), float(right)
    except ValueError:
        raise UsageError(
            f"logit_bias {text} is not ID=VALUE", fix=["--set logit_bias=42=-5"]
        ) from None


def check_ids(ids: Sequence[int], vocab_size: int, flag: str) -> None:
    """Raise UsageError for a token id that the vocabulary does not have."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            words = f"{flag}: token id {token_id} is not in the vocabulary"
            raise UsageError(words, reason=[f"valid: 0 to {vocab_size - 1}"])


def unescape(text: str) -> str:
    r"""Text with \n, \t, \r, \0 and \\ read as in Python; other backslashes stay."""
    return re.sub(r"\\([ntr0\\])", lambda match: ESCAPES[match[1]], text)


WISHES = (
    *("device", "dtype", "quantize", "spec", "draft_max", "adaptive", "verify", "kernels"),
    *("ctx", "memory_fraction", "threads", "tp", "draft_tp", "rendezvous"),
)
"""Options that are the engine's own, by the same names."""


@dataclass(frozen=True)
class Vocabulary:
    """What turns text into ids for one model; no tokenizer means that only --prompt-ids work."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    name: str

    @cached_property
    def marks(self) -> ThinkingMarks:
        """Return the marks of the model's thinking."""
        template = "" if self.template is None else self.template.default
        if self.tokenizer is None:
            return KNOWN
        return thinking_marks(
            template, self.tokenizer.added_tokens, self.tokenizer.special_tokens.keys()
        )

    @cached_property
    def thinking_tokens(self) -> tuple[int | None, int] | None:
        """Return the tokens that begin and end thinking; None where no token ends it."""
        pair, tokenizer = self.marks.thinking[0], self.need_tokenizer()
        end = tokenizer.token_to_id(pair.closing)
        return None if end is None else (tokenizer.token_to_id(pair.opening), end)

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the last words of a prompt, special tokens included."""
        return self.need_tokenizer().decode(ids[-TAIL:], skip_special=False)

    def thinks_at(self, ids: Sequence[int], asked: Asked) -> bool | None:
        """True if a prompt leaves thinking open; None where the reply is no turn of a chat."""
        if self.tokenizer is None or not asked.messages:
            return None
        if asked.messages[-1].get("role") == "assistant":  # the reply goes on with that turn
            return continues_thinking(self._turn_of(ids), self.marks)
        return opens_thinking(self.end_of(ids), self.marks)

    def _turn_of(self, ids: Sequence[int]) -> str:
        """Return what a prompt holds behind its last special token that marks no thinking."""
        tokenizer = self.need_tokenizer()
        marks = {tokenizer.token_to_id(mark) for mark in mark_tokens(tokenizer.special_tokens)}
        ends = tokenizer.special_ids - marks
        turn = takewhile(lambda token: token not in ends, reversed(ids))
        return tokenizer.decode([*turn][::-1], skip_special=False)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises IncompatibleError when the folder has none."""
        if self.tokenizer is None:
            pull = [f"spd pull {self.name}, if its download was not finished"] * is_repository_name(
                self.name
            )
            words, fix = (
                f"{self.name} has no tokenizer.json, so text cannot be read",
                "--prompt-ids 1,2,3",
            )
            raise IncompatibleError(words, fix=[*pull, fix], code="no_tokenizer")
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """The chat template. Raises IncompatibleError when the folder has none."""
        if self.template is None:
            words, fix = f"{self.name} has no chat template", ["spd generate --raw"]
            why = ["It is a base model: it continues text and does not answer."]
            raise IncompatibleError(words, reason=why, fix=fix, code="no_chat_template")
        return self.template


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

    def params(self, **values: Any) -> SamplingParams:
        """The run's sampling parameters with others in their place. Raises UsageError."""
        check_ids(values.get("stop_token_ids", ()), self.usable_vocab, "stop_token_ids")
        check_ids(
            [token for token, _ in values.get("logit_bias", ())], self.usable_vocab, "logit_bias"
        )
        return dataclasses.replace(self.sampling.params, **values)

    def request(
        self,
        name: str,
        asked: Asked,
        params: SamplingParams | None = None,
        shape: GrammarText | None = None,
    ) -> tuple[Request, bool | None]:
        """The order for the engine, and how its reply is parted: see `ThinkingSplitter`.

        Without `params` those of the run hold, and its grammar. Raises IncompatibleError without room for a
        reply, and what `encode_asked` raises.
        """
        if params is None:
            params, shape = self.sampling.params, self.grammar
        ids = encode_asked(asked, self.vocabulary, self.context)
        if len(ids) >= self.context:
            most = self.vocabulary.config.max_positions
            why = "A reply needs room too: at most one token less than the context."
            words = f"prompt is {len(ids):,} tokens but the context is {self.context:,}"
            fix = [*[f"--ctx N, up to {most:,}"] * (len(ids) < most), "a shorter prompt"]
            raise IncompatibleError(words, reason=[why], fix=fix, code="context_overflow")
        inside = self.vocabulary.thinks_at(ids, asked)
        thinking = thinking_budget(self.think, self.vocabulary, bool(inside))
        if shape is not None and inside is not None:
            end = self.vocabulary.end_of(ids)
            shape, inside = behind_thinking(shape, self.vocabulary, asked, end, inside)
        return Request(name, tuple(ids), params, grammar=shape, thinking=thinking), inside


def encode_asked(asked: Asked, vocabulary: Vocabulary, context: int) -> list[int]:
    """Token ids of what is asked. Raises UsageError, and IncompatibleError far beyond `context` of them."""
    if asked.ids is not None:
        check_ids(asked.ids, vocabulary.config.vocab_size, "--prompt-ids")
        return list(asked.ids)
    tokenizer = vocabulary.need_tokenizer()
    if asked.text is not None:
        return _encode_raw(asked.text, asked.suffix, vocabulary, context)
    from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat

    template = vocabulary.need_template()
    messages = _templated(asked, template)
    variables = asked.variables or {}
    chat = render_chat(tokenizer, template, messages, continues=asked.continues, **variables)
    text = tokenizer.bounded(chat.marked, context)
    return encode_rendered(tokenizer, RenderedChat(text, chat.mark))


def _encode_raw(text: str, suffix: str | None, vocabulary: Vocabulary, context: int) -> list[int]:
    """Return the ids of a raw prompt, whose control tokens are read as such, as transformers does.

    suffix: what is to follow the reply. Raises IncompatibleError where the vocabulary has no tokens for it.
    """
    tokenizer = vocabulary.need_tokenizer()
    text = tokenizer.bounded(text, context)
    if suffix is None:
        ids = tokenizer.encode(text, parse_special=True, add_special=True)
        return ids or [_first_token(vocabulary)]
    form = fill_in_form(tokenizer)
    if form is None:
        words = f"the vocabulary of {vocabulary.name} has no tokens for filling in before a suffix"
        raise IncompatibleError(words, code="no_fill_in")
    behind = tokenizer.bounded(suffix, context)
    texts = (tokenizer.encode(one, parse_special=True) for one in (text, behind))
    return fill_in_ids(tokenizer, form, *texts)


def _templated(asked: Asked, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the messages with their calls and their thinking in the form that the template reads."""
    source = template.tool_use or template.default
    return [for_template(message, source) for message in asked.messages]


def render_asked(asked: Asked, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The prompt as text, with the template's own tokens spelled out."""
    if asked.messages:
        template = vocabulary.need_template()
        return template.render(_templated(asked, template), **(asked.variables or {}))
    if asked.text:
        return asked.text
    return (
        "" if vocabulary.tokenizer is None else vocabulary.tokenizer.decode(ids, skip_special=False)
    )


def _first_token(vocabulary: Vocabulary) -> int:
    """What stands for an empty raw prompt: the first-token id, else one that ends a text."""
    tokenizer, config = vocabulary.need_tokenizer(), vocabulary.config
    known = (tokenizer.bos_id, config.bos_token_id, tokenizer.eos_id, *config.eos_token_ids)
    if (token := next((one for one in known if one is not None), None)) is None:
        words = "the prompt is empty, and there is no beginning-of-text token"
        raise UsageError(words, fix=['spd generate --raw "text"'])
    return token


def plan_settings(options: ReplyOptions, folder: ModelFolder | None = None) -> Settings:
    """Read the small files of the model, and check everything that concerns no prompt."""
    from spd.formats.folder import ModelFolder

    folder = folder or ModelFolder.named(options.model)
    config, vocabulary = engine_config(options, folder), open_vocabulary(options.model, folder)
    logprobs, grammar = None, None
    model, usable = vocabulary.config, vocabulary.config.vocab_size
    if vocabulary.tokenizer is not None:
        usable = min(usable, vocabulary.tokenizer.vocab_size)
    if isinstance(options, GenerateOptions):
        logprobs, grammar = options.logprobs, read_grammar(options)
        if options.jsonl:
            config = dataclasses.replace(config, slots=options.concurrency or 8)
    sampling = resolve_sampling(options, folder.generation, usable, logprobs=logprobs)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    if grammar is not None:
        tokenizer = vocabulary.need_tokenizer()
        from spd.runtime import GrammarCompiler

        GrammarCompiler(tokenizer, model.vocab_size).compile(grammar, ())
    thinking_budget(options.think, vocabulary, False)
    return Settings(config, sampling, vocabulary, usable, context, grammar, options.think)


def open_vocabulary(name: str, folder: ModelFolder) -> Vocabulary:
    """Configuration, tokenizer and chat template of a model folder, the latter two where they exist."""
    from spd.formats.model_config import refuse_head

    refuse_head(folder.config, folder.path)
    tokenizer = folder.tokenizer
    return Vocabulary(
        folder.config, tokenizer, None if tokenizer is None else folder.template, name
    )


def engine_config(options: EngineOptions, folder: Path | ModelFolder) -> EngineConfig:
    """The options as wishes for the engine. Raises what EngineConfig refuses."""
    heads: dict[str, Any] = {name: getattr(options, name) for name in ("draft_model", "mtp")}
    if heads := {name: given for name, given in heads.items() if given is not None}:
        from spd.formats.folder import ModelFolder

        heads = {name: ModelFolder.named(given) for name, given in heads.items()}
    return EngineConfig(
        model=folder,
        **heads,
        lag=None if options.lag == "auto" else int(options.lag),
        graphs=None if options.graphs == "auto" else options.graphs == "on",
        **{name: getattr(options, name) for name in WISHES if hasattr(options, name)},
    )


CONFLICTS = (
    ("raw", ["system", "messages", "template_arg", "think"], "--raw uses no chat template"),
    ("prompt_ids", ["prompt", "file", "messages"], "--prompt-ids is the whole prompt"),
    ("prompt_ids", ["system", "template_arg", "think"], "--prompt-ids is the whole prompt"),
    ("messages", ["system"], "--messages is the whole chat, with its system message"),
    ("schema", ["grammar"], "each says what the whole reply looks like"),
    ("dry_run", ["stats", "trace"], "--dry-run runs no model"),
    ("jsonl", ["prompt", "prompt_ids"], "--jsonl reads its prompts from lines"),
    ("jsonl", ["json", "dry_run", "trace"], "--jsonl prints an object for each of many prompts"),
)
"""An option, others, and why it does not go with any of them."""
NEEDS = (
    ("logprobs", ["json", "jsonl"], "--logprobs are printed in JSON only", "--json --logprobs N"),
    ("concurrency", ["jsonl"], "--concurrency is for many prompts", "--jsonl --concurrency N"),
    (
        "resume",
        ["jsonl"],
        "--resume goes on in the file of an earlier run",
        "--jsonl -o FILE --resume",
    ),
    (
        "resume",
        ["output"],
        "--resume goes on in the file of an earlier run",
        "--jsonl -o FILE --resume",
    ),
)
"""An option, others of which it needs one, why, and what to type."""


def check_conflicts(options: GenerateOptions) -> None:
    """Raise UsageError for the first combination that is refused."""
    for name, others, why in CONFLICTS:
        for other in others:
            if _is_given(options, name) and _is_given(options, other):
                raise _refusal(f"{_shown(name)} and {_shown(other)}: {why}")
    for name, others, why, fix in NEEDS:
        if _is_given(options, name) and not any(_is_given(options, other) for other in others):
            raise _refusal(why, fix)
    check_shared(options)
    if (
        options.messages is not None
        and not options.jsonl
        and (options.prompt is not None or options.file)
    ):
        fix = "put the prompt into the file as its last user message"
        raise _refusal("--messages is the whole chat; it cannot be joined with a prompt", fix)
    if options.jsonl and len(options.file or ()) > 1:
        fix = "cat FILE FILE | spd generate --jsonl"
        raise _refusal("--jsonl reads one file of lines, and several are named", fix)
    grammars = [(options.schema or "").removeprefix("@"), options.grammar]
    files = options.file or ["-"] * options.jsonl
    read = [*files, "-" if options.system == "@-" else "", options.messages, *grammars]
    if read.count("-") > 1:
        fix = "leave one - out; with --jsonl, -f FILE for the lines"
        raise _refusal("stdin (-) is named twice and can be read once", fix)
    if options.jsonl and options.output is not None and options.output.is_file():
        with suppress(OSError, ValueError):
            if os.path.samefile(0 if files[0] == "-" else files[0], options.output):
                words = "-o names the file of the lines, and its answers would take their place"
                raise _refusal(words, "another -o FILE")


def check_shared(options: ReplyOptions) -> None:
    """What all commands that generate refuse."""
    if options.adaptive and options.draft_max == 0:
        raise _refusal("--adaptive fits the number of drafts, and --draft-max 0 asks for none")
    thinking = any(words.startswith("enable_thinking=") for words in options.template_arg or ())
    if thinking and _is_given(options, "think"):
        raise _refusal("--think and --template-arg enable_thinking say the same thing twice")


def _is_given(options: Any, name: str) -> bool:
    """Whether it differs from its default: typed, in a file, or by --set."""
    value = getattr(options, name)
    return bool(value != getattr(type(options), name) and value != [])


def _shown(name: str) -> str:
    return "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"


def _refusal(words: str, fix: str = "leave one of them out") -> UsageError:
    return UsageError(words, fix=[fix], code="conflict")
