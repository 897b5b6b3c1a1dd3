"""Functions that a model may call, the choice among them, and the format of its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import FLAG, OBJECT, TEXT, one_of, open_object, refuse
from spd.conversation.messages import read_arguments
from spd.conversation.tools.call_check import checked_form
from spd.conversation.tools.call_forms import MARKS
from spd.conversation.tools.call_grammar import Tools
from spd.runtime.engine.request import GrammarSpec

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer


def function_name(value: Any, name: str) -> str:
    """A name as the API allows it for functions and schemas."""
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", TEXT(value, name)):
        refuse(name, "expected 1 to 64 of a-z, A-Z, 0-9, _, . and -")
    return str(value)


def past_arguments(value: Any, name: str) -> Any:
    """Return the arguments of an earlier call, whatever they are: see `read_arguments`."""
    return read_arguments(value)


FUNCTION_FIELDS = {"name": function_name, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
FORMAT_FIELDS = {
    "type": one_of("text", "json_object", "json_schema"),
    "schema": OBJECT,
    "json_schema": open_object({"schema": OBJECT}),
}
"""A format of answers as chat completions write it, or flat as Responses do."""
_choice = open_object({"name": TEXT, "function": open_object({"name": TEXT})})
"""Reads a choice of a function, in either way."""


def function_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat completions write it."""
    return {
        "type": "function",
        "function": {name: tool[name] for name in FUNCTION_FIELDS if name in tool},
    }


def without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool for a chat template, which need not know whether its schema is held."""
    shown = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": shown}


def read_tools(
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    choice: object = "auto",
    parallel: bool = True,
    answer: GrammarSpec | None = None,
) -> Tools | None:
    """Return tools and the choice among them; None where none may be called. Raises FieldError.

    tools: functions as chat completions write them. choice: as there. parallel: whether several may be
    called at once. answer: the format of an answer that is no call.
    """
    functions: dict[str, Any] = {}
    strict = False
    for at, tool in enumerate(tools):
        name, schema = _function_schema(tool["function"], f"tools[{at}].function")
        if name in functions:
            refuse(f"tools[{at}].function.name", f"{name} is given twice")
        functions[name] = schema
        strict = strict or tool["function"].get("strict", False)
    choice, named = _read_choice(choice, functions)
    if choice == "none" or not functions:
        return None
    if choice == "auto" and not template.supports_tools:
        why = (
            "this model's chat template has no place for tools, so the model cannot be told of them"
        )
        fix = "leave them out, or force a call by tool_choice `required` or by name"
        refuse("tools", f"{why}: {fix}")
    tokens = {mark: number for mark in MARKS if (number := tokenizer.token_to_id(mark)) is not None}
    return Tools(
        functions,
        checked_form(template),
        named,
        required=choice == "required",
        parallel=parallel,
        strict=strict,
        tokens=tokens,
        answer_grammar=answer,
    )


def _function_schema(function: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Return a function's name and the schema of its arguments. Raises FieldError."""
    schema = {"type": "object", **function.get("parameters", {"properties": {}})}
    if schema["type"] != "object":
        why = "expected a schema of type object"
        refuse(f"{where}.parameters", why, "invalid_function_parameters")
    return function["name"], schema


def _read_choice(choice: object, functions: Collection[str]) -> tuple[str, str | None]:
    """Return none, auto or required, and the function that has to be called. Raises FieldError."""
    named = None
    if isinstance(choice, dict):
        asked = _choice(choice, "tool_choice")
        named = asked.get("function", asked).get("name", "")
        choice = "required"
    is_known = bool(functions) if named is None else named in functions
    is_choice = choice in ("none", "auto", "required")
    if not is_choice or (choice == "required" and not is_known):
        refuse("tool_choice", "expected none, auto, required or a function that is among `tools`")
    return str(choice), named


def response_format(form: Mapping[str, Any]) -> GrammarSpec | None:
    """Return the grammar of a format of answers; None for any text. Raises FieldError."""
    kind = form["type"]
    if kind == "text":
        if "schema" in form or "json_schema" in form:
            refuse("response_format", "a schema needs the type `json_schema` or `json_object`")
        return None
    schema = form.get("json_schema", form).get("schema")
    if schema is None and kind == "json_object":
        schema = {"type": "object"}
    if schema is None:
        refuse("response_format", "its schema is missing", "missing_required_parameter")
    return GrammarSpec("schema", json.dumps(schema))
