"""What a request asks for: the fields of its body as one table, and a prompt with parameters made of them."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.serve import body as read
from spd.cli.serve.body import FLAG, OBJECT, TEXT, fields, listed, refuse, some, whole
from spd.cli.serve.chat_reply import ChatReply
from spd.cli.serve.forms import MARKS, Tools, form_of
from spd.cli.serve.replies import Reply
from spd.cli.text.messages import (
    ROLES,
    in_template_order,
    read_arguments,
    with_system_first,
)
from spd.cli.text.prompt import RESERVED_ARGS, SWITCH, Asked
from spd.errors import UsageError
from spd.runtime.engine.request import SEED_BITS, GrammarText
from spd.runtime.plan.config import MAX_DRAFT
from spd.runtime.round.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS

if TYPE_CHECKING:
    from spd.cli.serve.http import Service
    from spd.cli.text.job import Settings
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import SamplingParams

MAX_REPLIES = 128
"""Of one prompt."""
IDS = listed(whole(0, 2**31 - 1), 1 << 20)
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""What chat templates are told of an effort that they do not know."""


def name_of(value: Any, name: str) -> str:
    """A name as the API allows it for functions and schemas."""
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", TEXT(value, name)):
        refuse(name, "expected 1 to 64 of a-z, A-Z, 0-9, _, . and -")
    return str(value)


def _stops(value: Any, name: str) -> tuple[str, ...]:
    texts = listed(TEXT, MAX_STOP_STRINGS)([value] if isinstance(value, str) else value, name)
    return tuple(text for text in texts if text)


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if len(OBJECT(value, name)) > 1024:
        refuse(name, f"expected at most 1024 token ids, but got {len(value):,}")
    return tuple(_bias(token, bias, name) for token, bias in value.items())


def _bias(token: str, bias: Any, name: str) -> tuple[int, float]:
    if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):
        refuse(name, f"its key {token[:40]!r} is not a token id")
    return int(token), read.number(bias, f"{name}.{token}")


def past_arguments(value: Any, name: str) -> Any:
    """Return the arguments of an earlier call, whatever they are: see `read_arguments`."""
    return read_arguments(value)


def _message(value: Any, name: str) -> dict[str, Any]:
    """Return a message with text in `content`. Raises ApiError."""
    fields_of = _MESSAGE(value, name)
    message = {key: one for key, one in fields_of.items() if one or key == "content"}
    refusal = message.pop("refusal", "")
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "type": "function"} for call in message["tool_calls"]]
    elif "content" not in message and message["role"] not in ("assistant", "tool"):
        refuse(f"{name}.content", "expected a string", "missing_required_parameter")
    return {"content": refusal, **message, "role": ROLES[message["role"]]}


_called = some({"name": TEXT, "arguments": past_arguments}, "name")
_refusal = some({"refusal": TEXT}, "refusal", refusal="text")
_MESSAGE = some(
    {
        "role": read.one_of(*ROLES),
        "content": read.texts("text", refusal=_refusal),
        "tool_calls": listed(some({"id": TEXT, "function": _called}, "function"), 1024),
        **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "reasoning"), TEXT),
        "refusal": TEXT,
        **dict.fromkeys(("function_call", "audio")),
    },
    "role",
    reasoning="reasoning_content",
)
FUNCTION = {"name": name_of, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
_TOOL = some(
    {"type": read.one_of("function"), "function": some(FUNCTION, "name")}, "type", "function"
)
_CHOICE = some({"name": TEXT, "function": some({"name": TEXT})})
"""A choice of a function as chat completions write it, or flat as Responses do."""
FORMAT = {"type": read.one_of("text", "json_object", "json_schema"), "schema": OBJECT}
FORMAT["json_schema"] = some({"schema": OBJECT})
"""Likewise."""

SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), read.number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), read.number),
    "top_k": whole(-1, 2**31 - 1),
    "max_tokens": whole(1, MAX_TOKENS),
    "min_tokens": whole(0, MAX_TOKENS),
    "ignore_eos": FLAG,
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": _stops,
    "stop_token_ids": listed(whole(0, 2**31 - 1), 16),
    "logit_bias": _logit_bias,
}
"""Those that `SamplingParams` knows by the same names; it checks their ranges."""
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
"""Fields of chat completions and completions that change no text."""
STREAM_OPTIONS = {
    "include_usage": FLAG,
    "continuous_usage_stats": FLAG,
    "include_obfuscation": read.anything,
}
SHARED = {
    **SAMPLING,
    **dict.fromkeys(PASSED_OVER, read.anything),
    "model": TEXT,
    "n": whole(1, MAX_REPLIES),
    "stream": FLAG,
    "stream_options": fields(STREAM_OPTIONS),
    "speculative": fields({"spec": read.one_of("auto", "off"), "draft_max": whole(0, MAX_DRAFT)}),
}
CHAT = {
    **SHARED,
    "messages": listed(_message, 100_000),
    "max_completion_tokens": whole(1, MAX_TOKENS),
    "logprobs": FLAG,
    "top_logprobs": whole(0, MAX_LOGPROBS),
    "response_format": some(FORMAT, "type"),
    "reasoning_effort": TEXT,
    "chat_template_kwargs": OBJECT,
    "tools": listed(_TOOL, 128),
    "tool_choice": read.anything,
    "parallel_tool_calls": FLAG,
    "continue_final_message": FLAG,
    "add_generation_prompt": FLAG,
}
_chat = fields(CHAT)


@dataclass(frozen=True)
class Wish:
    """One call: its prompts, how they are answered, what tells the replies, and its body as it was read.

    Beside the fields of `CHAT` the body may have `think`, the most tokens of thinking, and `asked`, what a
    reply repeats of another API's body.
    """

    prompts: tuple[Asked, ...]
    params: SamplingParams
    reply: type[Reply]
    body: Mapping[str, Any]
    grammar: GrammarText | None = None
    """What holds the replies where there are no tools, which have a grammar of their own."""
    tools: Tools | None = None
    prompt_logprobs: int | None = None
    """How many likeliest tokens to score at each place of the prompts; None: they are not scored."""
    notes: tuple[str, ...] = ()
    """What each reply says of how it was made."""


def read_chat(value: Any, service: Service) -> Wish:
    """The body of a chat completion. Raises ApiError."""
    body = _chat(value, "")
    check_stream(body)
    if body.get("top_logprobs") and not body.get("logprobs"):
        refuse("top_logprobs", "it needs `logprobs` to be true")
    return wish_of(with_one_limit(body, "max_completion_tokens"), service, ChatReply)


def with_one_limit(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the body with one limit of tokens, `max_tokens`: the smaller of two."""
    limits = [body[each] for each in ("max_tokens", name) if each in body]
    return {**body, "max_tokens": min(limits)} if limits else dict(body)


def check_stream(body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        refuse("stream_options", "it needs `stream` to be true")


def wish_of(body: Mapping[str, Any], service: Service, reply: type[Reply]) -> Wish:
    """The wish of a body: see `Wish.body`. Raises ApiError."""
    vocabulary = service.settings.vocabulary
    template = vocabulary.need_template()
    variables = _variables(body, service)
    source = template.for_tools
    tools = tools_of(body, template, vocabulary.need_tokenizer())
    grammar = response_format(body) if tools is None else None
    if tools is not None and template.takes_tools:
        variables["tools"] = list(body["tools"])
    messages = body.get("messages", ())
    if not messages:
        refuse("messages", "expected at least one message", "missing_required_parameter")
    messages = in_template_order(with_system_first(messages), source)
    continues = _continues(body, messages[-1], tools)
    logprobs = body.get("top_logprobs", 0) if body.get("logprobs") else None
    params = sampling_params(body, service.settings, logprobs)
    asked = Asked(messages=tuple(messages), variables=variables, continues=continues)
    return Wish((asked,), params, reply, body, grammar, tools)


def _continues(body: Mapping[str, Any], last: Mapping[str, Any], tools: Tools | None) -> bool:
    """True if the reply continues the last message. Raises ApiError where it cannot.

    It does so where the assistant has begun it, unless the body says otherwise.
    """
    is_begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    continues = bool(body.get("continue_final_message", is_begun))
    if body.get("add_generation_prompt", not continues) == continues:
        refuse("add_generation_prompt", "it is true where no message is continued, else false")
    if not continues:
        return False
    if not is_begun:
        refuse("continue_final_message", "the last message is no text of the assistant's")
    if (tools is not None and tools.required) or response_format(body) is not None:
        why = "the assistant has begun the reply, which then cannot be held to a format or to calls"
        refuse("messages", why)
    return True


def without_lines(wish: Wish, beginnings: tuple[str, ...]) -> Wish:
    """The same without the lines of its instructions that begin so: no cache would know its prompts."""
    line = f"(?:{'|'.join(map(re.escape, beginnings))})[^\n]*"
    lines = re.compile(rf"\A(?:{line}\n*)+|\n{line}")

    def kept(message: Mapping[str, Any]) -> Mapping[str, Any]:
        is_told = message["role"] == "system"
        return {**message, "content": lines.sub("", message["content"])} if is_told else message

    asked = (
        dataclasses.replace(one, messages=tuple(map(kept, one.messages))) for one in wish.prompts
    )
    return dataclasses.replace(wish, prompts=tuple(asked))


def sampling_params(
    body: Mapping[str, Any], settings: Settings, logprobs: int | None
) -> SamplingParams:
    """Sampling parameters: those given over the model's own."""
    values = {name: body[name] for name in SAMPLING if name in body} | {"logprobs": logprobs}
    values["top_k"] = max(0, values.get("top_k", settings.sampling.params.top_k))  # -1 is off, too
    values["seed"] = values.get("seed", secrets.randbits(SEED_BITS)) % 2**63
    try:
        return settings.params(**values)
    except UsageError as error:
        first = error.message.split()[0].rstrip(":")
        raise read.api_error(error, param=first if first in values else None) from None


def _variables(body: Mapping[str, Any], service: Service) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    variables = dict(body.get("chat_template_kwargs", {}))
    for name in variables:
        if name in RESERVED_ARGS or name in ("tools", "documents") or not name.isidentifier():
            refuse("chat_template_kwargs", f"{name[:64]!r} cannot be set")
    template, told = service.settings.vocabulary.need_template(), dict[str, Any]()
    effort = body.get("reasoning_effort")  # told as far as the template knows of it
    if effort is not None and template.switch is not None:
        told[SWITCH] = effort not in ("none", "minimal")
    if effort is not None and "reasoning_effort" in template.default:
        told["reasoning_effort"] = EFFORTS.get(effort, effort)
    return {**told, **variables}


def conversation(pieces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation of another API as chat templates read one: first instructions, then turns.

    A piece has a `role` with `content`, or is a thought (`reasoning_content`), a call (`id`, `name` and
    `arguments`) or a call's result (`tool_call_id`). Neighbours of one role are one message, and what the
    system says later is said in the user's turn: many templates refuse anything else.
    """
    messages: list[dict[str, Any]] = []
    for piece in pieces:
        text = piece.get("content", "")
        if "tool_call_id" in piece:
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": piece["tool_call_id"]}
            )
            continue
        is_call = "id" in piece and "name" in piece
        is_its_own = "reasoning_content" in piece or is_call
        role = "assistant" if is_its_own else ROLES[piece.get("role", "assistant")]
        if role == "system" and any(one["role"] != "system" for one in messages):
            role = "user"
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": ""})
        message = messages[-1]
        if thought := piece.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        if is_call:
            function = {"name": piece["name"], "arguments": piece.get("arguments")}
            call = {"id": piece["id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        message["content"] += "\n\n" * bool(message["content"] and text) + text
    return messages


def function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat completions write it."""
    return {"type": "function", "function": {name: tool[name] for name in FUNCTION if name in tool}}


def tools_of(body: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer) -> Tools | None:
    """The tools of a chat request without their `strict`, and their choice; None where none may be called."""
    choice, functions, strict = body.get("tool_choice", "auto"), dict[str, Any](), False
    for number_, tool in enumerate(body.get("tools", ())):
        function, where = tool["function"], f"tools[{number_}].function"
        if function["name"] in functions:
            refuse(f"{where}.name", f"{function['name']} is given twice")
        schema = {"type": "object", **function.get("parameters", {"properties": {}})}
        if schema["type"] != "object":
            refuse(
                f"{where}.parameters",
                "expected a schema of type object",
                "invalid_function_parameters",
            )
        functions[function["name"]] = schema
        strict = function.pop("strict", False) or strict
    named = None
    if isinstance(choice, dict):
        asked = _CHOICE(choice, "tool_choice")
        choice, named = "required", asked.get("function", asked).get("name", "")
    is_known = bool(functions) if named is None else named in functions
    if choice not in ("none", "auto", "required") or (choice == "required" and not is_known):
        refuse("tool_choice", "expected none, auto, required or a function that is among `tools`")
    if choice == "none" or not functions:
        return None
    if choice == "auto" and not template.takes_tools:
        why = (
            "this model's chat template has no place for tools, so the model cannot be told of them"
        )
        refuse(
            "tools", f"{why}: leave them out, or force a call by tool_choice `required` or by name"
        )
    tokens = {mark: number for mark in MARKS if (number := tokenizer.token_to_id(mark)) is not None}
    required, parallel = choice == "required", body.get("parallel_tool_calls", True)
    answer = response_format(body)
    return Tools(functions, form_of(template), named, required, parallel, strict, tokens, answer)


def response_format(body: Mapping[str, Any]) -> GrammarText | None:
    """The grammar of a body's format, if it has one; it may be flat. Raises ApiError."""
    form = body.get("response_format", {"type": "text"})
    if form["type"] == "text":
        if "schema" in form or "json_schema" in form:
            refuse("response_format", "a schema needs the type `json_schema` or `json_object`")
        return None
    schema = form.get("json_schema", form).get("schema")
    if schema is None and form["type"] == "json_object":
        schema = {"type": "object"}
    if schema is None:
        refuse("response_format", "its schema is missing", "missing_required_parameter")
    return GrammarText("schema", json.dumps(schema))
