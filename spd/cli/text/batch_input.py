"""Lines of a batch, read and checked: spd's own shape and OpenAI's, as prompts with parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions
from spd.cli.text.prompt import (
    Asked,
    check_messages,
    check_text,
    read_messages,
    system_text,
    template_variables,
)
from spd.errors import SpdError, UsageError
from spd.formats.files import INPUT_LIMIT, LINES_LIMIT, read_input
from spd.runtime.engine.request import derived_seed

Messages = tuple[Mapping[str, Any], ...]

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.runtime import SamplingParams
    from spd.runtime.engine.request import GrammarText

OWN_FIELDS = frozenset({"id", "prompt", "messages", "prompt_ids", "system", "params"})
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_DEPTH = 100
"""Lists and objects that lie in each other, of a line."""
NUMBERS = frozenset(
    {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
)
COUNTS = frozenset({"top_k", "min_tokens", "max_tokens", "seed", "logprobs"})
SHAPES = ("schema", "regex", "grammar")
IGNORED_IN_BODY = frozenset({"model", "user", "metadata", "store", "service_tier", "stream"})
"""Fields of an OpenAI body that change no text here; `stream` must be false."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input: its number in the file, and its JSON value or what is wrong with it."""

    number: int
    value: Mapping[str, Any]
    error: SpdError | None = None

    @property
    def id(self) -> Any:
        """What the line calls itself; its number where it has no name."""
        name = self.value.get("custom_id", self.value.get("id"))
        return self.number if name is None else name


def read_lines(name: str) -> list[BatchLine]:
    """Every line of a file, or of stdin (-), that is not blank. Raises UsageError and NotFoundError."""
    data = read_input(name, "check the path; without -f lines come from stdin", LINES_LIMIT)
    lines = [_read(n, raw) for n, raw in enumerate(data.split(b"\n"), 1) if raw.strip()]
    if not lines:
        raise UsageError(
            "no lines to answer",
            reason=["stdin is empty." if name == "-" else f"{name} is empty."],
            fix=["""echo '{"prompt": "Hello"}' | spd generate --jsonl"""],
            code="no_prompt",
        )
    return lines


def _read(number: int, raw: bytes) -> BatchLine:
    try:
        if len(raw) > INPUT_LIMIT:
            raise UsageError(f"longer than {INPUT_LIMIT >> 20} MiB")
        value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        if not isinstance(value, dict):
            raise UsageError("not a JSON object", fix=['{"prompt": "Hello"}'])
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value):
            value = {n: v for n, v in value.items() if n in ("custom_id", "id") and not _is_deep(v)}
            return BatchLine(number, value, UsageError(f"nested more than {MAX_DEPTH} deep"))
        return BatchLine(number, value)
    except UnicodeDecodeError as error:
        return BatchLine(number, {}, UsageError(f"not UTF-8 text: byte 0x{raw[error.start]:02x}"))
    except (ValueError, RecursionError) as error:
        return BatchLine(number, {}, UsageError(f"not JSON: {error}"))
    except UsageError as error:
        return BatchLine(number, {}, error)


def _is_deep(value: Any, left: int = MAX_DEPTH) -> bool:
    """Whether more than `left` lists and objects lie in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (left == 0 or any(_is_deep(one, left - 1) for one in inner))


@dataclass(frozen=True)
class Wanted:
    """A line's prompt and parameters, before tokens."""

    asked: Asked
    params: SamplingParams
    grammar: GrammarText | None


@dataclass(frozen=True)
class Shared:
    """What all prompts of a run have in common."""

    raw: bool
    messages: Messages
    variables: Mapping[str, Any]


def read_shared(options: GenerateOptions) -> Shared:
    """What the flags say about every prompt. Raises UsageError and NotFoundError."""
    messages: Messages = ()
    if options.messages is not None:
        messages = read_messages(options.messages)
    if (system := system_text(options.system)) is not None:
        messages = ({"role": "system", "content": system},)
    return Shared(options.raw, messages, template_variables(options))


def read_wishes(line: BatchLine, settings: Settings, shared: Shared) -> Wanted:
    """What a line asks for, over what the flags say. Raises SpdError for what is wrong with it."""
    if line.error is not None:
        raise line.error
    value = line.value
    if "body" in value or "custom_id" in value:
        prompt, given = _openai(value)
        shared = dataclasses.replace(shared, raw=shared.raw or "prompt" in prompt)
    else:
        _known(value, OWN_FIELDS, "the line")
        prompt, given = value, value.get("params", {})
        if not isinstance(given, dict):
            raise UsageError("`params` is not an object")
    wishes = {name: wish for name, wish in given.items() if wish is not None}
    shapes = [name for name in wishes if name in SHAPES]
    if len(shapes) > 1:
        raise UsageError(
            f"params.{shapes[0]} and params.{shapes[1]} each say what the whole reply looks like"
        )
    grammar = _grammar(shapes[0], wishes.pop(shapes[0])) if shapes else settings.grammar
    values = {name: _parameter(name, wish) for name, wish in wishes.items()}
    from spd.cli.text.sampling import check_ids

    values.setdefault("seed", derived_seed(settings.sampling.params.seed, line.number))
    check_ids(values.get("stop_token_ids", ()), settings.usable_vocab, "stop_token_ids")
    check_ids([token for token, _ in values.get("logit_bias", ())], settings.usable_vocab, "logit_bias")
    params = dataclasses.replace(settings.sampling.params, **values)
    asked = _asked(prompt, shared)
    check_ids(asked.ids or (), settings.vocabulary.config.vocab_size, "prompt_ids")
    return Wanted(asked, params, grammar)


def _asked(prompt: Mapping[str, Any], shared: Shared) -> Asked:
    """The prompt of a line behind what every line begins with; its own system message replaces theirs."""
    kinds = [kind for kind in ("prompt", "messages", "prompt_ids") if prompt.get(kind) is not None]
    if len(kinds) != 1:
        raise UsageError("one of prompt, messages and prompt_ids is needed", fix=['{"prompt": "Hello"}'])
    kind, system, found = kinds[0], prompt.get("system"), prompt[kinds[0]]
    if kind == "messages":
        messages = check_messages(found, "the line")
        if shared.raw:
            raise UsageError("--raw uses no chat template, which `messages` need")
    elif kind == "prompt" and isinstance(found, str):
        messages = ({"role": "user", "content": check_text(found, "`prompt`")},)
    elif kind == "prompt" and not isinstance(found, list):
        raise UsageError("`prompt` is not a text")
    elif not isinstance(found, list) or not found or not all(map(_is_int, found)):
        raise UsageError(f"`{kind}` is not a list of token ids")
    if kind != "messages" and (shared.raw or isinstance(found, list)):
        if system is not None or shared.messages:
            raise UsageError(f"`{kind}` is the whole prompt here: nothing of a chat can stand before it")
        if shared.variables:
            raise UsageError(f"`{kind}` uses no chat template: --template-arg and --think would do nothing")
        if isinstance(found, list):
            return Asked(ids=tuple(found))
        return Asked(text=found)
    own, turns = _parted(messages)
    common, before = _parted(shared.messages)
    if system is not None:
        if not isinstance(system, str):
            raise UsageError("`system` is not a text")
        if own:
            raise UsageError("the system message is given twice: `system` and the first of `messages`")
        own = ({"role": "system", "content": check_text(system, "`system`")},)
    return Asked(messages=(*(own or common), *before, *turns), variables=shared.variables)


def _parted(messages: Messages) -> tuple[Messages, Messages]:
    """The system message that a chat begins with, if it does, and its turns."""
    count = int(bool(messages) and messages[0]["role"] == "system")
    return messages[:count], messages[count:]


def _openai(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(prompt fields, parameters by spd's names) of a line of an OpenAI batch."""
    body = value.get("body")
    if not isinstance(body, dict):
        raise UsageError("`body` is not an object")
    prompt = {name: body[name] for name in ("messages", "prompt") if body.get(name) is not None}
    url = value.get("url", OPENAI_PATHS["prompt" in prompt])
    if url not in OPENAI_PATHS:
        raise UsageError(f"url {url} is not answered", reason=[f"known: {', '.join(OPENAI_PATHS)}"])
    other = ("prompt", "messages")[OPENAI_PATHS.index(url)]
    if other in prompt:
        raise UsageError(f"url {url} takes no `{other}`")
    if body.get("stream"):
        raise UsageError("stream: a batch cannot stream")
    if body.get("n") not in (None, 1):
        raise UsageError(f"n {body['n']}: one reply a line", fix=["repeat the line with another seed"])
    if body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        raise UsageError("top_logprobs needs logprobs: true")
    given: dict[str, Any] = {}
    for name, wish in body.items():
        if wish is None or name in IGNORED_IN_BODY or name in ("prompt", "messages", "n", "top_logprobs"):
            continue
        said = {name: wish}
        if name == "max_completion_tokens":
            said = {"max_tokens": wish}
        elif name == "response_format":
            said = _response_format(wish)
        elif name == "logprobs":
            said = {name: body.get("top_logprobs") or 0 if wish is True else None if wish is False else wish}
        for ours, what in said.items():
            if given.setdefault(ours, what) != what:
                raise UsageError(f"the body says twice, and differently, what {ours} is")
    return prompt, given


def _response_format(wish: Any) -> dict[str, Any]:
    kind = wish.get("type") if isinstance(wish, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"schema": {"type": "object"}}
    schema = wish.get("json_schema") if isinstance(wish, dict) else None
    if kind == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        return {"schema": schema["schema"]}
    raise UsageError("response_format is none of text, json_object and json_schema")


def _parameter(name: str, wish: Any) -> Any:
    """A sampling parameter from JSON. Raises UsageError for another name or type."""
    if name in NUMBERS and _is_number(wish):
        return _float(wish)
    if name in COUNTS and _is_int(wish):
        return wish
    if name == "ignore_eos" and isinstance(wish, bool):
        return wish
    if name == "stop" and (isinstance(wish, str) or _all(wish, str)):
        return (wish,) if isinstance(wish, str) else tuple(wish)
    if name == "stop_token_ids" and isinstance(wish, list) and all(map(_is_int, wish)):
        return tuple(wish)
    if name == "logit_bias" and isinstance(wish, dict) and all(map(_is_number, wish.values())):
        try:
            return tuple((int(token), _float(bias)) for token, bias in wish.items())
        except ValueError:
            pass
    known = sorted(NUMBERS | COUNTS | {"ignore_eos", "stop", "stop_token_ids", "logit_bias"})
    if name in known:
        raise UsageError(f"params.{name}: {json.dumps(wish)[:60]} has the wrong type")
    known = sorted({*known, *SHAPES})
    raise UsageError(f"params.{name} is not known", reason=[f"known: {', '.join(known)}"])


def _grammar(name: str, wish: Any) -> GrammarText:
    from spd.runtime.engine.request import GrammarText

    if name == "schema" and isinstance(wish, (dict, bool)):
        return GrammarText("schema", json.dumps(wish))
    if not isinstance(wish, str):
        raise UsageError(f"params.{name} is not a text")
    return GrammarText({"schema": "schema", "regex": "regex", "grammar": "lark"}[name], wish)  # type: ignore[arg-type]


def _known(value: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(value) - known)
    if unknown:
        raise UsageError(
            f"{where} has an unknown field {unknown[0]!r}", reason=[f"known: {', '.join(sorted(known))}"]
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _float(value: Any) -> Any:
    """A number as a float; an integer beyond all floats stays, for its range to be refused."""
    try:
        return float(value)
    except OverflowError:
        return value


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def answer_error(line: BatchLine, error: SpdError) -> dict[str, Any]:
    """What is said in the place of an answer."""
    shown = {"code": error.code, "message": error.message}
    if error.reason:
        shown["reason"] = " ".join(error.reason)
    return {"id": line.id, "line": line.number, "error": shown}
