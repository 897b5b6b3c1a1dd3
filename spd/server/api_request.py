"""Requests of all APIs in one typed form, and their prompts and sampling parameters."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import FLAG, TEXT, any_value, integer, object_of, one_of, refuse
from spd.conversation.messages import Message, in_template_order, with_system_first
from spd.conversation.prompt import RESERVED_ARGS, THINKING_SWITCH, Prompt
from spd.conversation.sampling_fields import SAMPLING_FIELDS
from spd.conversation.tool_choice import read_tools, without_strict
from spd.conversation.tools.call_grammar import Tools
from spd.errors import UsageError
from spd.runtime.engine.request import SEED_BITS, GrammarSpec
from spd.runtime.plan.config import MAX_DRAFT
from spd.server.errors import as_api_error

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.conversation.vocabulary import Vocabulary
    from spd.formats.chat_template import ChatTemplate
    from spd.runtime import SamplingParams

MAX_REPLIES = 128
"""Replies to one prompt."""
EFFORT_REPLACEMENTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know, and those that replace them."""
PASSED_OVER = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of chat completions and completions that change no text, and are ignored."""
STREAM_OPTIONS = {
    "include_usage": FLAG,
    "continuous_usage_stats": FLAG,
    "include_obfuscation": any_value,
}
check_speculative = object_of({"spec": one_of("auto", "off"), "draft_max": integer(0, MAX_DRAFT)})
SHARED_FIELDS = {
    **SAMPLING_FIELDS,
    **dict.fromkeys(PASSED_OVER, any_value),
    "model": TEXT,
    "n": integer(1, MAX_REPLIES),
    "stream": FLAG,
    "stream_options": object_of(STREAM_OPTIONS),
    "speculative": check_speculative,
}
"""Fields that chat completions and completions share."""


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """Fields that requests of every API have."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the body sets, by their names."""
    model: str | None = None
    n: int = 1
    """Replies to each prompt."""
    stream: bool = False
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    draft_max: int | None = None
    """Maximum of draft tokens in a round; None leaves it to the plan."""
    logprobs: int | None = None
    """Number of likeliest tokens for each token; None: no log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A request for the next turn of a chat, of any API."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions as chat completions write them."""
    tool_choice: object = "auto"
    parallel_tool_calls: bool = True
    response_format: GrammarSpec | None = None
    reasoning_effort: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool | None = None
    """True if the reply continues the last message; None: it does if that is the assistant's."""
    add_generation_prompt: bool | None = None
    thinking_budget: int | None = None
    """Maximum of tokens of thinking; None: no limit but the server's own."""


@dataclass(frozen=True)
class Generation:
    """The prompts of a request, and the sampling parameters and grammar of their replies."""

    request: ApiRequest
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    grammar: GrammarSpec | None = None
    """The format of replies without tools; tools have a grammar of their own."""
    tools: Tools | None = None
    thinking_budget: int | None = None
    prompt_logprobs: int | None = None
    """Number of likeliest tokens for each position of the prompts; None: prompts are not scored."""
    notes: tuple[str, ...] = ()
    """Notes for the client about how the replies were made."""


def shared_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ApiRequest`, but for `logprobs`, that a checked body sets.

    Raises FieldError where options of streams come without a stream.
    """
    if body.get("stream_options") and not body.get("stream"):
        refuse("stream_options", "it needs `stream` to be true")
    speculative = body.get("speculative", {})
    draft_max = 0 if speculative.get("spec") == "off" else speculative.get("draft_max")
    names = ("model", "n", "stream", "stream_options")
    shared = {name: body[name] for name in names if name in body}
    sampling = {name: body[name] for name in SAMPLING_FIELDS if name in body}
    return {**shared, "sampling": sampling, "draft_max": draft_max}


def with_one_token_limit(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the body with one limit of tokens, `max_tokens`: the smaller of that and field
    `name`.
    """
    limits = [body[key] for key in ("max_tokens", name) if key in body]
    return {**body, "max_tokens": min(limits)} if limits else dict(body)


def chat_generation(chat: ChatRequest, settings: Settings) -> Generation:
    """Return the generation of a request for the next turn. Raises FieldError and ApiError."""
    vocabulary = settings.vocabulary
    template = vocabulary.need_template()
    variables = _template_variables(chat, template)
    tools = _read_chat_tools(chat, template, vocabulary)
    if tools is not None and template.supports_tools:
        variables["tools"] = [without_strict(tool) for tool in chat.tools]
    if not chat.messages:
        refuse("messages", "expected at least one message", "missing_required_parameter")
    messages = in_template_order(with_system_first(chat.messages), template.tools_template)
    continues = _continues_last_message(chat, messages[-1], tools)
    params = sampling_params(chat.sampling, settings, chat.logprobs)
    prompt = Prompt(messages=tuple(messages), variables=variables, continues=continues)
    return Generation(
        chat,
        (prompt,),
        params,
        grammar=chat.response_format if tools is None else None,
        tools=tools,
        thinking_budget=chat.thinking_budget,
    )


def _read_chat_tools(
    chat: ChatRequest, template: ChatTemplate, vocabulary: Vocabulary
) -> Tools | None:
    """Return the tools of a chat; None where none may be called. Raises FieldError."""
    return read_tools(
        chat.tools,
        template,
        vocabulary.need_tokenizer(),
        choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        answer_grammar=chat.response_format,
    )


def _continues_last_message(chat: ChatRequest, last: Message, tools: Tools | None) -> bool:
    """Return True if the reply continues the last message. Raises FieldError where it cannot.

    It does so if the assistant has begun that message, unless the body says otherwise.
    """
    is_begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    continues = chat.continue_final_message
    if continues is None:
        continues = bool(is_begun)
    prompts = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
    if prompts == continues:
        refuse("add_generation_prompt", "it is true where no message is continued, else false")
    if not continues:
        return False
    if not is_begun:
        refuse("continue_final_message", "the last message is no text of the assistant's")
    if (tools is not None and tools.required) or chat.response_format is not None:
        reason = (
            "the assistant has begun the reply, which then cannot be held to a format or to calls"
        )
        refuse("messages", reason)
    return True


def without_lines(generation: Generation, beginnings: tuple[str, ...]) -> Generation:
    """Return a generation without the lines of its instructions that have one of these beginnings.

    Such lines change from one request to the next, so no prompt would be found in the cache.
    """
    line = f"(?:{'|'.join(map(re.escape, beginnings))})[^\n]*"
    lines = re.compile(rf"\A(?:{line}\n*)+|\n{line}")

    def without_changing_lines(message: Message) -> Message:
        """Return a system message without the lines; another message as it is."""
        if message["role"] != "system":
            return message
        return {**message, "content": lines.sub("", message["content"])}

    prompts = tuple(
        dataclasses.replace(prompt, messages=tuple(map(without_changing_lines, prompt.messages)))
        for prompt in generation.prompts
    )
    return dataclasses.replace(generation, prompts=prompts)


def sampling_params(
    sampling: Mapping[str, Any], settings: Settings, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a request over the model's own.

    Without a seed, one is drawn. Raises ApiError for values that are not valid.
    """
    values = {**sampling, "logprobs": logprobs}
    # A top_k of -1 is off, too.
    values["top_k"] = max(0, values.get("top_k", settings.sampling.params.top_k))
    values["seed"] = values.get("seed", secrets.randbits(SEED_BITS)) % 2**63
    try:
        return settings.params_with(**values)
    except UsageError as error:
        first = error.message.split()[0].rstrip(":")
        raise as_api_error(error, param=first if first in values else None) from None


def _template_variables(chat: ChatRequest, template: ChatTemplate) -> dict[str, object]:
    """Return the variables of the chat template besides the messages. Raises FieldError."""
    for name in chat.template_variables:
        if name in RESERVED_ARGS or name in ("tools", "documents") or not name.isidentifier():
            refuse("chat_template_kwargs", f"{name[:64]!r} cannot be set")
    variables: dict[str, object] = {}
    effort = chat.reasoning_effort
    if effort is not None and template.thinking_switch is not None:
        variables[THINKING_SWITCH] = effort not in ("none", "minimal")
    if effort is not None and "reasoning_effort" in template.default:
        variables["reasoning_effort"] = EFFORT_REPLACEMENTS.get(effort, effort)
    return {**variables, **chat.template_variables}
