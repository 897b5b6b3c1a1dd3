"""Functions that a model may call, the choice among them, and the format of its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import FLAG, OBJECT, TEXT, one_of, open_object, refuse
from spd.conversation.messages import read_arguments
from spd.conversation.tools.call_check import checked_form
from spd.conversation.tools.call_forms import CALL_MARKS
from spd.conversation.tools.call_grammar import Tools
from spd.runtime.engine.request import GrammarSpec

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Json, JsonObject


def function_name(value: Json, name: str) -> str:
    """Return a name as the API allows it for functions and schemas. Raises FieldError."""
    text = TEXT(value, name)
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", text):
        refuse(name, "expected 1 to 64 of a-z, A-Z, 0-9, _, . and -")
    return text


def past_arguments(value: Json, name: str) -> object:
    """Return the arguments of an earlier call, of any type: see `read_arguments`."""
    return read_arguments(value)


FUNCTION_FIELDS = {"name": function_name, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
"""Checks of a function's fields, as all APIs write them."""
FORMAT_FIELDS = {
    "type": one_of("text", "json_object", "json_schema"),
    "schema": OBJECT,
    "json_schema": open_object({"schema": OBJECT}),
}
"""Checks of a format of answers as chat completions write it, or flat as Responses do."""
_check_choice = open_object({"name": TEXT, "function": open_object({"name": TEXT})})
"""The check of a choice of a function, in either API's form."""


def function_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a function as a tool of chat completions; other fields are left out."""
    return {
        "type": "function",
        "function": {name: tool[name] for name in FUNCTION_FIELDS if name in tool},
    }


def without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool for a chat template, without the flag that constrains calls to its schema."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def read_tools(
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    choice: object = "auto",
    parallel: bool = True,
    answer_grammar: GrammarSpec | None = None,
) -> Tools | None:
    """Return tools and the choice among them; None where none may be called. Raises FieldError.

    tools: functions as chat completions write them. choice: as there. parallel: whether several may
    be called at once. answer_grammar: the format of an answer that is no call.
    """
    functions: dict[str, JsonObject] = {}
    strict = False
    for index, tool in enumerate(tools):
        name, schema = _function_schema(tool["function"], f"tools[{index}].function")
        if name in functions:
            refuse(f"tools[{index}].function.name", f"{name} is given twice")
        functions[name] = schema
        strict = strict or tool["function"].get("strict", False)
    choice, named_function = _read_choice(choice, functions)
    if choice == "none" or not functions:
        return None
    if choice == "auto" and not template.supports_tools:
        reason = (
            "this model's chat template has no place for tools, so the model cannot be told of them"
        )
        fix = "leave them out, or force a call by tool_choice `required` or by name"
        refuse("tools", f"{reason}: {fix}")
    tokens = {
        mark: token_id
        for mark in CALL_MARKS
        if (token_id := tokenizer.token_to_id(mark)) is not None
    }
    return Tools(
        functions,
        checked_form(template),
        named_function,
        required=choice == "required",
        parallel=parallel,
        strict=strict,
        tokens=tokens,
        answer_grammar=answer_grammar,
    )


def _function_schema(function: Mapping[str, Any], location: str) -> tuple[str, JsonObject]:
    """Return a function's name and the schema of its arguments. Raises FieldError."""
    schema = {"type": "object", **function.get("parameters", {"properties": {}})}
    if schema["type"] != "object":
        reason = "expected a schema of type object"
        refuse(f"{location}.parameters", reason, "invalid_function_parameters")
    return function["name"], schema


def _read_choice(choice: object, functions: Collection[str]) -> tuple[str, str | None]:
    """Return "none", "auto" or "required", and the function that an object names, else None.

    A named function is required. Raises FieldError for another choice, an unknown function, or
    "required" without functions.
    """
    named_function = None
    if isinstance(choice, dict):
        requested = _check_choice(choice, "tool_choice")
        named_function = requested.get("function", requested).get("name", "")
        choice = "required"
    is_known = bool(functions) if named_function is None else named_function in functions
    is_choice = choice in ("none", "auto", "required")
    if not is_choice or (choice == "required" and not is_known):
        refuse("tool_choice", "expected none, auto, required or a function that is among `tools`")
    return str(choice), named_function


def response_format_grammar(format_fields: Mapping[str, Any]) -> GrammarSpec | None:
    """Return the grammar of a format of answers; None for any text. Raises FieldError."""
    kind = format_fields["type"]
    if kind == "text":
        if "schema" in format_fields or "json_schema" in format_fields:
            refuse("response_format", "a schema needs the type `json_schema` or `json_object`")
        return None
    schema = format_fields.get("json_schema", format_fields).get("schema")
    if schema is None and kind == "json_object":
        schema = {"type": "object"}
    if schema is None:
        refuse("response_format", "its schema is missing", "missing_required_parameter")
    return GrammarSpec("schema", json.dumps(schema))
