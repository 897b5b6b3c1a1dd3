"""Tools of a request: what they are, which call form a model writes, and the grammar that holds a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.serve.body import ApiError, Body, check_name

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.runtime.engine.request import GrammarText

MAX_TOOLS = 128
HERMES, LLAMA3, MISTRAL, DEEPSEEK, GLM, QWEN_XML = (
    "hermes",
    "llama3",
    "mistral",
    "deepseek",
    "glm",
    "qwen-xml",
)
SIGNS = (
    (MISTRAL, "[TOOL_CALLS]"),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>"),
    (GLM, "<arg_key>"),
    (QWEN_XML, "<function="),
    (LLAMA3, "<|python_tag|>"),
    (LLAMA3, "<|start_header_id|>"),
)
"""What a chat template holds that has a model write calls in a form; hermes where it holds none of them."""
NAMED, REQUIRED = "named", "required"
"""Forms of replies that a grammar holds: the arguments alone, and a JSON array of calls."""


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may or has to call."""

    functions: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by name."""
    form: str
    """How calls are written."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """What the chat template gets."""
    named: str | None = None
    parallel: bool = True

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call that has to come."""
        from spd.runtime.engine.request import GrammarText

        if self.named is not None:
            return GrammarText("schema", json.dumps(self.functions[self.named]))
        if self.form != REQUIRED:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in self.functions
        ]
        schema = {
            "type": "array",
            "minItems": 1,
            "maxItems": 8 if self.parallel else 1,
            "items": {"anyOf": calls},
            "$defs": {name: _moved(schema, f"#/$defs/{name}") for name, schema in self.functions.items()},
        }
        return GrammarText("schema", json.dumps(schema))


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` in another one: its own references lead there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, place) for name, one in schema.items() if name not in ("$id", "$schema")}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def read_tools(body: Body, template: ChatTemplate | None) -> Tools | None:
    """The tools of a chat request and how they are chosen; None where none may be called. Raises ApiError."""
    given, choice = body.items("tools", MAX_TOOLS), body.raw("tool_choice")
    parallel = body.flag("parallel_tool_calls")
    if not given:
        if choice not in (None, "none", "auto"):
            body.refuse("tool_choice", "it is only allowed with `tools`")
        return None
    functions = _read_functions(given)
    named = _read_choice(body, choice, functions)
    if choice == "none":
        return None
    shown = tuple(given)
    source = "" if template is None else template.tool_use or template.default
    forced = named is not None or choice == "required"
    if "tools" not in source:
        if not forced:
            why = "this model's chat template has no place for tools, so the model cannot be told of them"
            body.refuse("tools", f"{why}; tool_choice `required` or a named function holds it to a call")
        shown = ()
    form = NAMED if named is not None else REQUIRED if forced else call_form(source)
    return Tools(functions, form, shown, named, parallel is not False)


def call_form(source: str) -> str:
    """How a model writes calls, by its chat template."""
    return next((form for form, sign in SIGNS if sign in source), HERMES)


def _read_functions(given: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    functions: dict[str, Mapping[str, Any]] = {}
    for number, one in enumerate(given):
        where = f"tools[{number}]"
        if not isinstance(one, dict):
            raise ApiError(400, f"Invalid type for '{where}': expected an object.", param=where)
        entry = Body(one, ("type", "function"), f"{where}.")
        if entry.text("type") != "function":
            entry.refuse("type", "only tools of type `function` are supported", "unsupported_value")
        fields = Body(entry.mapping("function") or {}, FUNCTION_FIELDS, f"{where}.function.")
        name = check_name(fields, "name", fields.text("name") or "")
        if name in functions:
            fields.refuse("name", f"{name} is given twice")
        fields.text("description"), fields.flag("strict")
        schema = fields.mapping("parameters") or {"type": "object", "properties": {}}
        if schema.setdefault("type", "object") != "object":
            fields.refuse("parameters", "expected a schema of type object", "invalid_function_parameters")
        functions[name] = schema
    return functions


FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def _read_choice(body: Body, choice: Any, functions: Mapping[str, Any]) -> str | None:
    """The function that has to be called, where the choice names one."""
    if choice in (None, "none", "auto", "required"):
        return None
    if not isinstance(choice, dict) or choice.get("type") != "function":
        body.refuse("tool_choice", "expected none, auto, required or a function by its name")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        body.refuse("tool_choice", "the function that it names is not among `tools`")
    return name
