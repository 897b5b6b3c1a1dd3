"""What a request asks for: the bodies of chat completions and completions as prompts with parameters."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.serve.body import ApiError, Body, api_error, check_name
from spd.cli.serve.tools import Tools, read_tools
from spd.cli.text.prompt import RESERVED_ARGS, Asked
from spd.cli.text.sampling import check_ids
from spd.cli.text.structured import SWITCH
from spd.errors import UsageError
from spd.runtime.engine.request import SEED_BITS, GrammarText, derived_seed
from spd.runtime.plan.config import MAX_DRAFT
from spd.runtime.round.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.runtime import SamplingParams

MAX_MESSAGES = 100_000
COMPLETION_TOKENS = 16
"""The API's own number for completions that do not say how long they may be."""
IGNORED = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier")
IGNORED_TOO = ("store", "user", "prediction")
"""Fields that change no text."""
SAMPLING = ("frequency_penalty", "logit_bias", "max_tokens", "min_p", "min_tokens", "presence_penalty")
SAMPLING_TOO = ("repetition_penalty", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p")
CALL = ("ignore_eos", "logprobs", "model", "n", "speculative", "stream", "stream_options")
SHARED = frozenset({*IGNORED, *IGNORED_TOO, *SAMPLING, *SAMPLING_TOO, *CALL})
CHAT = SHARED | {
    *("messages", "max_completion_tokens", "top_logprobs", "response_format", "reasoning_effort"),
    *("chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"),
}
COMPLETION = SHARED | {"prompt", "echo", "best_of"}
UNSUPPORTED = {
    "audio": "replies are text",
    "functions": "`tools` are its successor",
    "function_call": "`tool_choice` is its successor",
    "modalities": "replies are text",
    "suffix": "text can only be continued",
    "verbosity": "no model here can be asked for it",
    "web_search_options": "there is no search",
}
"""Fields of the API that cannot be honoured here."""


@dataclass(frozen=True)
class Wish:
    """One call: its prompts, and how each is answered `n` times."""

    prompts: tuple[Asked, ...]
    params: SamplingParams
    chat: bool
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    grammar: GrammarText | None = None
    tools: Tools | None = None
    draft_max: int | None = None
    echo: bool = False

    def params_of(self, choice: int) -> SamplingParams:
        """Those of one choice: each but the first has a seed derived from the first one's."""
        if not choice:
            return self.params
        return dataclasses.replace(self.params, seed=derived_seed(self.params.seed, choice))


def read_chat(value: Mapping[str, Any], settings: Settings, names: Sequence[str], spec: str) -> Wish:
    """The body of a chat completion. Raises ApiError."""
    _refuse_unsupported(value)
    body = Body(value, CHAT)
    _check_model(body, names)
    template = settings.vocabulary.need_template()
    tools = read_tools(body, template)
    variables = _variables(body, template.default)
    messages = _messages(body)
    if tools is not None and tools.shown:
        variables["tools"] = list(tools.shown)
    grammar = _response_format(body)
    if tools is not None:
        if grammar is not None:
            body.refuse("response_format", "a reply that may be a tool call cannot be held to a format")
        grammar = tools.grammar
    wanted = body.flag("logprobs")
    top = body.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        body.refuse("top_logprobs", "it needs `logprobs`: true")
    limits = body.whole("max_completion_tokens", 1, MAX_TOKENS), body.whole("max_tokens", 1, MAX_TOKENS)
    if None not in limits and limits[0] != limits[1]:
        body.refuse("max_tokens", "`max_completion_tokens` says otherwise")
    most = next((limit for limit in limits if limit is not None), None)
    params = _params(body, settings, max_tokens=most, logprobs=(top or 0) if wanted else None)
    asked = Asked(messages=messages, variables=variables)
    return Wish((asked,), params, True, grammar=grammar, tools=tools, **_call(body, spec))


def read_completion(value: Mapping[str, Any], settings: Settings, names: Sequence[str], spec: str) -> Wish:
    """The body of a completion. Raises ApiError."""
    _refuse_unsupported(value)
    body = Body(value, COMPLETION)
    _check_model(body, names)
    prompts = _prompts(body, settings)
    logprobs, echo = body.whole("logprobs", 0, MAX_LOGPROBS), body.flag("echo") or False
    if echo and logprobs is not None:
        body.refuse("echo", "the prompt's own log-probabilities are not computed")
    if body.whole("best_of", 1, 128) not in (None, body.whole("n", 1, 128) or 1):
        body.refuse("best_of", "replies are not ranked")
    most = body.whole("max_tokens", 1, MAX_TOKENS)
    params = _params(body, settings, max_tokens=most or COMPLETION_TOKENS, logprobs=logprobs)
    return Wish(prompts, params, False, echo=echo, **_call(body, spec))


def read_tokenize(value: Mapping[str, Any], settings: Settings, names: Sequence[str]) -> tuple[Asked, bool]:
    """What is to be encoded, and whether with what the tokenizer puts around a text. Raises ApiError."""
    known = ("model", "prompt", "content", "messages", "add_special_tokens", "chat_template_kwargs")
    body = Body(value, known)
    _check_model(body, names)
    special = body.flag("add_special_tokens") is not False
    if "messages" in body:
        variables = _variables(body, settings.vocabulary.need_template().default)
        return Asked(messages=_messages(body), variables=variables), special
    text = body.text("prompt" if "prompt" in body else "content")
    if text is None:
        body.refuse("prompt", "expected a text, or `messages`", "missing_required_parameter")
    return Asked(text=text), special


def _refuse_unsupported(value: Mapping[str, Any]) -> None:
    for name, why in UNSUPPORTED.items():
        plain = name == "modalities" and value.get(name) == ["text"]
        if value.get(name) is not None and not plain and value.get(name) != "":
            message = f"Unsupported parameter: '{name}': {why}."
            raise ApiError(400, message, param=name, code="unsupported_parameter")


def _check_model(body: Body, names: Sequence[str]) -> None:
    """Raise ApiError for another model than the one that is served."""
    name = body.text("model")
    if name is not None and name not in names:
        message = f"The model '{name[:200]}' does not exist: '{names[0]}' is served."
        raise ApiError(404, message, param="model", code="model_not_found")


def _call(body: Body, spec: str) -> dict[str, Any]:
    """How a reply is delivered and speculated for."""
    stream = body.flag("stream") or False
    options = body.mapping("stream_options")
    usage = False
    if options is not None:
        if not stream:
            body.refuse("stream_options", "it is only allowed with `stream`: true")
        fields = Body(options, ("include_usage", "include_obfuscation"), "stream_options.")
        usage = fields.flag("include_usage") or False
    n = body.whole("n", 1, 128) or 1
    return {"n": n, "stream": stream, "include_usage": usage, "draft_max": _draft_max(body, spec)}


def _draft_max(body: Body, spec: str) -> int | None:
    """How many drafts a round the request allows; the text does not depend on it."""
    given = body.raw("speculative")
    if isinstance(given, bool):
        return None if given else 0
    wish = body.mapping("speculative")
    if wish is None:
        return None
    fields = Body(wish, ("spec", "draft_max"), "speculative.")
    method = fields.text("spec")
    if method not in (None, "auto", "off", spec):
        fields.refuse("spec", f"this server drafts by {spec}; off and auto are known, too")
    most = fields.whole("draft_max", 0, MAX_DRAFT)
    return 0 if method == "off" else most


def _params(body: Body, settings: Settings, **values: Any) -> SamplingParams:
    """Sampling parameters: those given over the model's own."""
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        values[name] = body.number(name)
    values["frequency_penalty"] = body.number("frequency_penalty")
    values["top_k"] = body.whole("top_k", -1, 2**31 - 1)
    values["top_k"] = 0 if values["top_k"] == -1 else values["top_k"]
    values["min_tokens"] = body.whole("min_tokens", 0, MAX_TOKENS)
    values["ignore_eos"] = body.flag("ignore_eos")
    values["seed"] = body.whole("seed", -(2**63), 2**63 - 1)
    stop = body.raw("stop")
    stops = [stop] if isinstance(stop, str) else body.items("stop", MAX_STOP_STRINGS) or ()
    if not all(isinstance(text, str) for text in stops):
        body.refuse("stop", "expected strings", "invalid_type")
    values["stop"] = tuple(text for text in stops if text)
    ids = body.items("stop_token_ids", 16) or ()
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        body.refuse("stop_token_ids", "expected token ids", "invalid_type")
    values["stop_token_ids"] = tuple(ids)
    values["logit_bias"] = _logit_bias(body)
    values = {name: value for name, value in values.items() if value is not None}
    values["seed"] = secrets.randbits(SEED_BITS) if "seed" not in values else values["seed"] % 2**63
    try:
        check_ids(values["stop_token_ids"], settings.usable_vocab, "stop_token_ids")
        check_ids([token for token, _ in values["logit_bias"]], settings.usable_vocab, "logit_bias")
        return dataclasses.replace(settings.sampling.params, **values)
    except UsageError as error:
        first = error.message.split()[0].rstrip(":")
        raise api_error(error, param=first if first in values else None) from None


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    given = body.mapping("logit_bias") or {}
    if len(given) > 1024:
        body.refuse("logit_bias", "expected at most 1024 tokens")
    pairs: list[tuple[int, float]] = []
    for token, bias in given.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isascii() and token.isdigit() and len(token) < 10 and number and abs(bias) <= 1000):
            body.refuse("logit_bias", "expected token ids with numbers from -100 to 100", "invalid_type")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def _variables(body: Body, template: str) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    variables = dict(body.mapping("chat_template_kwargs") or {})
    for name in variables:
        if name in RESERVED_ARGS or name in ("tools", "documents") or not name.isidentifier():
            body.refuse("chat_template_kwargs", f"{name[:64]!r} cannot be set")
    effort = body.text("reasoning_effort") if "reasoning_effort" in body else None
    if effort is not None:
        if "reasoning_effort" in template:
            variables.setdefault("reasoning_effort", effort)
        elif SWITCH in template and effort in ("none", "minimal"):
            variables.setdefault(SWITCH, False)
        elif SWITCH in template:
            variables.setdefault(SWITCH, True)
        else:
            body.refuse("reasoning_effort", "this model's chat template cannot be asked for it")
    return variables


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
MESSAGE_TOO = ("refusal", "audio", "function_call", "annotations")


def _messages(body: Body) -> tuple[Mapping[str, Any], ...]:
    """The messages as chat templates read them: text in `content`, arguments of calls as objects."""
    given = body.items("messages", MAX_MESSAGES)
    if not given:
        body.refuse("messages", "expected at least one message", "missing_required_parameter")
    return tuple(_message(one, f"messages[{number}]") for number, one in enumerate(given))


def _message(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(400, f"Invalid type for '{where}': expected an object.", param=where)
    fields = Body(given, (*MESSAGE, *MESSAGE_TOO), f"{where}.")
    role = fields.text("role") or ""
    if role not in ROLES:
        fields.refuse("role", f"expected one of {', '.join(ROLES)}")
    for name in ("audio", "function_call"):
        if name in fields:
            fields.refuse(name, "it is not supported", "unsupported_value")
    message: dict[str, Any] = {"role": ROLES[role], "content": _content(fields, where)}
    for name in ("name", "tool_call_id"):
        if (said := fields.text(name)) is not None:
            message[name] = said
    if (thought := fields.text("reasoning_content") or fields.text("reasoning")) is not None:
        message["reasoning_content"] = thought
    if calls := fields.items("tool_calls", 1024):
        if role != "assistant":
            fields.refuse("tool_calls", "only an assistant calls")
        message["tool_calls"] = [_past_call(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(calls)]
    elif "content" not in fields:
        fields.refuse("content", "expected a string", "missing_required_parameter")
    return message


def _content(fields: Body, where: str) -> str:
    parts = fields.raw("content")
    if parts is None or isinstance(parts, str):
        return parts or ""
    texts = []
    for number, part in enumerate(fields.items("content", 10_000) or ()):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            param = f"{where}.content[{number}]"
            why = "expected text; this server sees no images, audio or files"
            raise ApiError(400, f"Invalid '{param}': {why}.", param=param, code="unsupported_value")
        texts.append(text)
    return "".join(texts)


def _past_call(given: Any, where: str) -> Mapping[str, Any]:
    """A call of an earlier reply; its arguments become an object, which templates write in their own form."""
    if not isinstance(given, dict):
        raise ApiError(400, f"Invalid type for '{where}': expected an object.", param=where)
    call = Body(given, ("id", "type", "function", "index"), f"{where}.")
    function = Body(call.mapping("function") or {}, ("name", "arguments"), f"{where}.function.")
    name = check_name(function, "name", function.text("name") or "")
    arguments: Any = function.text("arguments") or "{}"
    try:
        loaded = json.loads(arguments)
        arguments = loaded if isinstance(loaded, dict) else arguments
    except (ValueError, RecursionError):
        pass  # cut short by a limit: the template gets the text
    return {"id": call.text("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _response_format(body: Body) -> GrammarText | None:
    wish = body.mapping("response_format")
    if wish is None:
        return None
    fields = Body(wish, ("type", "json_schema"), "response_format.")
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarText("schema", '{"type": "object"}')
    if kind != "json_schema":
        fields.refuse("type", "expected text, json_object or json_schema")
    known = ("name", "description", "schema", "strict")
    inner = Body(fields.mapping("json_schema") or {}, known, "response_format.json_schema.")
    check_name(inner, "name", inner.text("name") or "")
    inner.text("description"), inner.flag("strict")
    schema = inner.mapping("schema")
    if schema is None:
        inner.refuse("schema", "expected an object", "missing_required_parameter")
    return GrammarText("schema", json.dumps(schema))


def _prompts(body: Body, settings: Settings) -> tuple[Asked, ...]:
    """One prompt or several, as text or as token ids."""
    given = body.raw("prompt")
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(several) > 128:
        body.refuse("prompt", "expected at most 128 prompts")
    prompts = []
    for one in several:
        if isinstance(one, str):
            prompts.append(Asked(text=one))
        elif isinstance(one, list) and one and all(type(token) is int for token in one):
            try:
                check_ids(one, settings.vocabulary.config.vocab_size, "prompt")
            except UsageError as error:
                raise api_error(error, param="prompt") from None
            prompts.append(Asked(ids=tuple(one)))
        else:
            body.refuse("prompt", "expected a text, token ids, or a list of either", "invalid_type")
    return tuple(prompts)
