"""A turn of a chat from Python: the complete reply, or its parts as it grows."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from spd.conversation.fields import FieldError
from spd.conversation.messages import (
    Message,
    check_messages,
    in_template_order,
    with_system_first,
)
from spd.conversation.notes import UNCONSTRAINED_CALLS
from spd.conversation.prompt import THINKING_SWITCH, Prompt
from spd.conversation.reply import Part, ReplyBuilder
from spd.conversation.sampling import SamplingOptions, resolve_sampling
from spd.conversation.settings import REQUEST_ID, PreparedRequest, Settings
from spd.conversation.tool_choice import function_tool, read_tools
from spd.conversation.vocabulary import open_vocabulary
from spd.errors import EngineError, UsageError
from spd.formats.folder import ModelFolder
from spd.runtime import Engine, EngineConfig, RequestMetrics
from spd.runtime.engine.request import GrammarSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spd.conversation.tools.call_grammar import Tools

Messages = Sequence[Mapping[str, object]]
"""Messages as OpenAI's chat completions write them: `role`, `content` and further fields."""


@dataclass(frozen=True)
class ChatReply:
    """The assistant's turn."""

    text: str
    thinking: str
    calls: tuple[Part, ...]
    """Calls of tools: `name`, `id`, and their arguments as JSON in `text`."""
    finish_reason: str
    """stop or length."""
    message: Message
    """The turn as a message, to be appended to the others."""
    notes: tuple[str, ...]
    """Limits of the reply that a caller may not expect."""
    metrics: RequestMetrics


@dataclass(frozen=True)
class ChatDelta:
    """A piece that a reply has grown by."""

    part: Part
    """Thinking, text or a call, as far as it has been generated."""
    text: str
    """The new end of its text."""


class ChatOptions(TypedDict, total=False):
    """Options of a turn; one that is left out follows the model, then spd's own default."""

    tools: Sequence[Mapping[str, Any]]
    """Functions as chat completions write them; each may stand without its wrapper."""
    tool_choice: object
    """auto, none, required, or a function, as in chat completions."""
    schema: Mapping[str, Any]
    """A JSON schema that the answer fits."""
    think: bool
    """Switches thinking, where the chat template can."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    max_tokens: int
    ignore_eos: bool
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int


def chat(
    model: Engine | str | os.PathLike[str], messages: Messages, **options: Unpack[ChatOptions]
) -> ChatReply:
    """Return the assistant's next turn.

    model: an engine, which stays loaded, or a folder or name, which is loaded for this call.
    messages: as in OpenAI's chat completions. options: see `ChatOptions`.

    Raises UsageError for a wrong option or message, IncompatibleError for a model without a chat
    template, and EngineError where the engine fails.

    >>> import spd
    >>> reply = spd.chat("demo", [{"role": "user", "content": "Hi"}], max_tokens=4, temperature=0)
    >>> reply.message["role"], reply.finish_reason
    ('assistant', 'length')
    """
    with stream_chat(model, messages, **options) as stream:
        for _ in stream:
            pass
        return stream.reply


def stream_chat(
    model: Engine | str | os.PathLike[str], messages: Messages, **options: Unpack[ChatOptions]
) -> ChatStream:
    """Return the assistant's next turn while it grows; arguments and errors as in `chat`."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            valid_names = ", ".join(ChatOptions.__annotations__)
            raise UsageError(f"{name} is no option of a chat", fix=[valid_names])
    if isinstance(model, Engine):
        return ChatStream(model, messages, options, closes_engine=False)
    folder = ModelFolder.resolve(os.fspath(model))
    engine = Engine(EngineConfig(model=folder, slots=1))
    try:
        return ChatStream(engine, messages, options, closes_engine=True)
    except BaseException:
        engine.close()
        raise


class ChatStream(Iterator[ChatDelta]):
    """A reply while it grows. `close` it, or leave its `with` block, to end it early."""

    def __init__(
        self, engine: Engine, messages: Messages, options: ChatOptions, *, closes_engine: bool
    ) -> None:
        """Prepare the request. closes_engine: `close` closes the engine too.

        Raises UsageError for a wrong option or message, and IncompatibleError for a model without a
        chat template.
        """
        settings = _reply_settings(engine, options)
        vocabulary = settings.vocabulary
        template = vocabulary.need_template()
        tools = _tool_objects(options)
        try:
            choice = read_tools(
                tools,
                template,
                vocabulary.need_tokenizer(),
                choice=options.get("tool_choice", "auto"),
                answer_grammar=settings.grammar,
            )
        except FieldError as error:
            raise UsageError(error.message) from None
        variables: dict[str, object] = {}
        if choice is not None and template.supports_tools:
            variables["tools"] = tools
        if "think" in options:
            variables[THINKING_SWITCH] = options["think"]
        ordered = with_system_first(check_messages([*messages], "messages"))
        ordered = in_template_order(ordered, template.tools_template)
        prompt = Prompt(messages=tuple(ordered), variables=variables)
        prepared, notes = _prepare_request(engine, settings, prompt, choice)
        self._engine = engine
        self._closes = closes_engine
        self._builder = ReplyBuilder(
            0,
            prepared.inside_thinking,
            choice,
            vocabulary.need_tokenizer(),
            marks=vocabulary.marks,
            notes=notes,
        )
        self._metrics: RequestMetrics | None = None
        self._deltas = self._stream_deltas(prepared)

    def __next__(self) -> ChatDelta:
        """Return the next delta, once the engine has made it."""
        return next(self._deltas)

    def __enter__(self) -> ChatStream:
        """Return the stream itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the stream."""
        self.close()

    def _stream_deltas(self, prepared: PreparedRequest) -> Generator[ChatDelta]:
        """Run the request and yield the deltas of each event; set the metrics at its end.

        Raises EngineError where the engine gives the request up.
        """
        engine = self._engine
        for event in engine.stream([prepared.request]):
            if event.finish_reason == "error":
                raise EngineError(event.error or "the engine gave the request up")
            deltas = self._builder.add_event(event)
            if event.finish_reason is not None:
                self._metrics = engine.metrics(prepared.request.id)
            for part, text, _ in deltas:
                yield ChatDelta(part, text)

    def close(self) -> None:
        """End the reply at once, if it has not ended, and close an engine that was made for it."""
        self._deltas.close()
        if self._closes:
            self._engine.close()

    @property
    def reply(self) -> ChatReply:
        """Return the complete reply. Raises UsageError while it has not ended."""
        builder = self._builder
        if self._metrics is None or builder.finish_reason is None:
            raise UsageError("the reply has not ended", fix=["take all of its parts first"])
        return ChatReply(
            text=builder.text_of("text"),
            thinking=builder.text_of("thinking"),
            calls=tuple(builder.calls),
            finish_reason=builder.finish_reason,
            message=builder.message(),
            notes=tuple(builder.notes_field.get("notes", ())),
            metrics=self._metrics,
        )


def _reply_settings(engine: Engine, options: ChatOptions) -> Settings:
    """Return the settings of one reply. Raises UsageError for a parameter that is refused.

    Reads the tokenizer and the template from the model's folder.
    """
    folder = ModelFolder.from_path(engine.config.model)
    names = {field.name for field in dataclasses.fields(SamplingOptions)}
    values: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    schema = options.get("schema")
    return Settings(
        config=engine.config,
        sampling=resolve_sampling(
            SamplingOptions(**values), folder.generation, engine.usable_vocab
        ),
        vocabulary=open_vocabulary(str(folder), folder),
        usable_vocab=engine.usable_vocab,
        context=engine.info.ctx,
        grammar=None if schema is None else GrammarSpec("schema", json.dumps(schema)),
        think="auto",
    )


def _tool_objects(options: ChatOptions) -> list[Mapping[str, Any]]:
    """Return the tools of the options as chat completions write them."""
    tools = options.get("tools", ())
    return [tool if "function" in tool else function_tool(tool) for tool in tools]


def _prepare_request(
    engine: Engine, settings: Settings, prompt: Prompt, tools: Tools | None
) -> tuple[PreparedRequest, tuple[str, ...]]:
    """Return the request, with a note where no grammar can constrain its calls.

    Raises what `Engine.add` raises.
    """
    if tools is None:
        return settings.prepare_request(REQUEST_ID, prompt), ()
    params = settings.sampling.params
    try:
        prepared = settings.prepare_request(REQUEST_ID, prompt, params, tools.grammar)
        engine.check(prepared.request)
    except UsageError as error:
        if tools.is_constrained:
            raise
        note = f"{UNCONSTRAINED_CALLS}: {error.message}"
        return settings.prepare_request(REQUEST_ID, prompt, params), (note,)
    return prepared, ()
