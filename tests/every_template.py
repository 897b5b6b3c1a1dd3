"""`python -m tests.every_template FOLDER…`: prompts of `*.jinja` by spd and by `transformers`.

Calls that a template writes are also read back.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spd.conversation.messages import for_template
from spd.conversation.thinking_splitter import ThinkingSplitter
from spd.conversation.tools.call_forms import FORMS, call_form
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_parser import CallParser, Piece
from spd.errors import SpdError
from spd.formats.chat_template import ChatTemplate
from spd.formats.thinking import make_past_turn
from spd.runtime.engine.json_schema import JsonObject
from spd.server.chat_completions import CHAT_FIELDS

SPECIAL = {"bos_token": "<B>", "eos_token": "<E>", "pad_token": "<P>", "unk_token": "<U>"}
PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
}
READ = {
    "name": "read",
    "description": "Läse <a> & b",
    "parameters": {**PARAMETERS, "required": ["path"]},
}
NOW = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (READ, NOW)]
ARGUMENTS = {"path": 'ä"b\\ <x>', "n": 3, "deep": {"a": [1, None, True, 0.5], "b": "x\ny"}}
Message = dict[str, Any]


def call(name: str, arguments: dict[str, Any], number: int) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"abcd{number:05}", "type": "function", "function": function}


def result(number: int, text: str, name: str) -> Message:
    return {"role": "tool", "tool_call_id": f"abcd{number:05}", "name": name, "content": text}


PLAIN = [call("read", {"path": ARGUMENTS["path"], "n": 3}, 0), call("now", {}, 1)]
SYSTEM = {"role": "system", "content": "Be exact.\n"}
ASKED = {"role": "user", "content": "Read a & b <x>"}
ONE = [{"role": "assistant", "content": "", "tool_calls": [call("read", ARGUMENTS, 0)]}]
ONE += [result(0, "A\n", "read")]
CALLS = [call("read", ARGUMENTS, 0), call("now", {}, 1)]
TWO = [{"role": "assistant", "content": "Yes.", "tool_calls": CALLS}]
TWO += [result(0, '{"a": "ä"}', "read"), result(1, "B", "now")]
THOUGHT = {"role": "assistant", "reasoning_content": "Hm.\nSo", "content": "Well"}
THINKS = [
    {**message, "reasoning_content": "Hm"} if "tool_calls" in message else message
    for message in ONE
]
SAID = {"role": "assistant", "content": "Well ä"}
CONVERSATIONS: dict[str, Sequence[Message]] = {
    "question": [ASKED],
    "instructions": [SYSTEM, ASKED],
    "a reply": [SYSTEM, ASKED, SAID, ASKED],
    "a thought": [SYSTEM, ASKED, THOUGHT, ASKED],
    "a call": [ASKED, *ONE],
    "calls": [SYSTEM, ASKED, *TWO],
    "calls, then a turn": [SYSTEM, ASKED, *TWO, SAID, ASKED],
    "a thought, a call": [ASKED, *THINKS],
    "a thought, a call, then a turn": [ASKED, *THINKS, THOUGHT, ASKED],
    "call after call": [ASKED, *THINKS, *ONE, *TWO],
}


def render_with_spd(
    template: ChatTemplate, messages: Sequence[Message], **variables: Any
) -> str | None:
    """Return the prompt of a request's messages; None where the template refuses them."""
    checked: Any = CHAT_FIELDS["messages"](list[Any](messages), "messages")
    rendered_messages = [for_template(message, template.default) for message in checked]
    try:
        return template.render(rendered_messages, **variables)
    except SpdError as error:
        return None if "faulty" not in error.message else error.message


def render_with_jinja(template: str, messages: Sequence[Message], **variables: Any) -> list[str]:
    """Return the library's prompts, with arguments as objects and as text.

    Mistral's templates read thinking from a list of parts, as a user of the library writes it.
    """
    # Imported here, for it takes seconds and who only collects tests has no use for it.
    from transformers.utils.chat_template_utils import render_jinja_template

    prompts: list[str] = []
    parts = [
        {**message, **make_past_turn(message["reasoning_content"], message["content"], template)}
        if "reasoning_content" in message
        else message
        for message in messages
    ]
    for written in (json.loads, str):
        plain_parts = json.loads(json.dumps(parts))
        for message in plain_parts:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = written(call["function"]["arguments"])
        arguments: dict[str, Any] = {
            "conversations": [plain_parts],
            "chat_template": template,
            "add_generation_prompt": True,
            **SPECIAL,
            **variables,
        }
        try:
            prompts += render_jinja_template(**arguments)[0]
        except Exception:  # whatever a template may raise
            continue
    return prompts


def cells(template: str) -> Iterator[tuple[str, str, str | None, list[str]]]:
    """Yield names, spd's prompt and the library's, by conversation, tools and thinking switch."""
    chat_template = ChatTemplate("", {"default": template}, SPECIAL)
    switches = list[dict[str, Any]]([{}])
    switches += [{"enable_thinking": on} for on in (True, False) if "enable_thinking" in template]
    for (name, messages), tools, switch in itertools.product(
        CONVERSATIONS.items(), (None, TOOLS), switches
    ):
        variables = {"tools": tools, **switch}
        description = " ".join(["with tools" if tools else "without", *map(str, switch.values())])
        spd_prompt = render_with_spd(chat_template, messages, **variables)
        yield name, description, spd_prompt, render_with_jinja(template, messages, **variables)


def split_reply(tools: Tools, texts: Sequence[str]) -> list[Piece]:
    """Return the pieces of a reply that came in these texts, without its thinking."""
    splitter = ThinkingSplitter(False)
    parser = CallParser(tools)
    pieces = list[Piece]()
    for text in [*texts, None]:
        for thinking, part in splitter.feed(text or "", final=text is None):
            pieces += [] if thinking else parser.feed(part)
    return [*pieces, *parser.feed("", final=True)]


def read_back(template: str) -> str:
    """Compare the calls of a reply that the template writes with those that spd reads in it."""
    chat_template = ChatTemplate("", {"default": template}, SPECIAL)
    form = call_form(template)
    for tool_calls in (PLAIN[:2], PLAIN[:1]):
        reply_message = {"role": "assistant", "content": "Yes.", "tool_calls": tool_calls}
        written = render_with_spd(
            chat_template, [ASKED, reply_message], tools=TOOLS, add_generation_prompt=False
        )
        prompts = render_with_spd(chat_template, [ASKED], tools=TOOLS), written
        if None in prompts:
            continue
        pairs = enumerate(zip(*map(str, prompts), strict=False))
        same = str(prompts[1])[: next((at for at, (a, b) in pairs if a != b), len(str(prompts[0])))]
        same = same[: same.rfind("<")] if same.rfind("<") > same.rfind(">") else same
        if "read" not in (reply := str(prompts[1])[len(same) :]):
            continue
        called_functions = (
            call["function"] for call in tool_calls if call["function"]["name"] in reply
        )
        expected_calls = [
            (call["name"], json.loads(call["arguments"])) for call in called_functions
        ]
        cuts = [[reply[:cut], reply[cut:]] for cut in range(len(reply))]
        for pieces in [list(reply), *cuts]:
            tools = Tools({"read": PARAMETERS, "now": {}}, form)
            calls = [
                (piece.name, json.loads(piece.text))
                for piece in split_reply(tools, pieces)
                if piece.kind == "call"
            ]
            if calls != expected_calls:
                return f"NOT READ: {reply!r}"
        return f"{len(expected_calls)} calls read"
    return "no calls written"


def main() -> None:
    total: Counter[str] = Counter()
    names = {id(form): name for name, form in FORMS.items()}
    for path in sorted(path for folder in sys.argv[1:] for path in Path(folder).glob("**/*.jinja")):
        template = path.read_text("utf-8")
        counts = Counter[str]()
        for name, description, mine, other in cells(template):
            same = "equal" if mine in other else "DIFFERS"
            kind = "refused by both" if mine is None and not other else same
            counts[kind] += 1
            if kind == "DIFFERS":
                print(f"  {name}, {description}:\n    spd    {mine!r}\n    theirs {other[:1]!r}")
        form = names.get(id(call_form(template)), "guessed")
        print(f"{path.stem}: {form}: {dict(counts)}, {read_back(template)}", flush=True)
        total += counts
    print(dict(total))
    sys.exit(total["DIFFERS"] > 0)


if __name__ == "__main__":
    main()
