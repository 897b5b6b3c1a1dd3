"""Chat messages to a prompt: the model's own Jinja2 template, rendered in a limited child process.

`encode_chat` keeps what people write plain text: a <|im_end|> typed into a message does not end it,
while the same string in the template does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.errors import CheckpointError, IncompatibleError, UsageError
from spd.formats.json_file import one_line
from spd.formats.template_process import TemplateProcess
from spd.formats.tokenizer import Tokenizer
from spd.formats.tokenizer_config import TemplateSource, read_template_source, read_tokenizer_config

# Noncharacters of Unicode, reserved for use inside a program; then the private use area.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


class ChatTemplate:
    """The chat template of one model folder."""

    def __init__(self, source: TemplateSource, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._process = TemplateProcess()

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate | None:
        """Read the template of a folder, `None` when it has none. Raises `CheckpointError`."""
        source = read_template_source(folder)
        if source is None:
            return None
        config = read_tokenizer_config(folder)
        special: dict[str, Any] = dict(config.roles)
        if config.additional:
            special["additional_special_tokens"] = list(config.additional)
        return cls(source, special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for messages; `variables` reach the template as they would in Hugging Face.

        Raises `IncompatibleError` when the template refuses the messages, `CheckpointError` naming file
        and line when it is faulty, unsafe or exceeds its limits (half a second of computing, 1 MiB beside the
        messages), `UsageError` for messages that are no JSON values.
        """
        has_tools = variables.get("tools") is not None and self.source.tool_use is not None
        known: dict[str, Any] = {"messages": list(messages), "tools": None, "documents": None}
        known["add_generation_prompt"] = add_generation_prompt
        try:
            reply = self._process.render(
                (self.source.tool_use if has_tools else None) or self.source.default,
                {**known, **self._special_tokens, **variables},
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the messages are not JSON: {error}") from None
        if "error" not in reply:
            return str(reply["text"])
        line = f": line {reply['line']}" if reply.get("line") else ""
        if reply["error"] == "refused":
            raise IncompatibleError(f"the chat template refuses these messages: {one_line(reply['message'])}")
        raise CheckpointError(f"{self.source.where}{line}: {one_line(reply['message'])}")


@dataclass(frozen=True)
class RenderedChat:
    """A chat as its template writes it; a `mark` stands inside special tokens' names that people wrote."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The prompt as text."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def after(self, beginning: str) -> RenderedChat | None:
        """What follows a beginning of the text; None where the text begins otherwise."""
        if not self.text.startswith(beginning):
            return None
        position = 0
        for _ in beginning if self.mark else ():
            while self.marked[position] == self.mark:
                position += 1
            position += 1
        return RenderedChat(self.marked[position if self.mark else len(beginning) :], self.mark)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> list[int]:
    """Token ids of a chat: special tokens of the template are parsed, those in messages stay text.

    Equal to Hugging Face's `apply_chat_template` whenever no message spells a special token.
    Raises what `ChatTemplate.render` and `Tokenizer.encode` raise.
    """
    return encode_rendered(tokenizer, render_chat(tokenizer, template, messages, **variables))


def render_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> RenderedChat:
    """The chat as text that `encode_rendered` can tell the template's tokens in from people's words."""
    special = _special_pattern(tokenizer)
    try:
        texts = _strings([list(messages), variables])
    except RecursionError:
        raise UsageError("the messages are nested too deeply") from None
    if not any(special.search(text) for text in texts):
        return RenderedChat(template.render(messages, **variables))
    # A mark inside keeps a string from being the special token through whatever the template does.
    mark = _unused_mark([*texts, template.source.default, template.source.tool_use or ""])
    hidden = _replaced(
        [list(messages), variables], lambda text: special.sub(lambda m: _broken(m[0], mark), text)
    )
    return RenderedChat(template.render(hidden[0], **hidden[1]), mark)


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
    """Token ids of a rendered chat or a part of one."""
    if not rendered.mark:
        return tokenizer.encode(rendered.marked, parse_special=True)
    return _encode_marked(tokenizer, rendered.marked, _special_pattern(tokenizer), rendered.mark)


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _encode_marked(tokenizer: Tokenizer, text: str, special: re.Pattern[str], mark: str) -> list[int]:
    """Encode parts without marks as the template's own text, and parts with marks as plain text."""
    ids: list[int] = []
    whole = ""  # text up to here holds only the template's special tokens
    position = 0
    real = re.compile(f"(?<!{mark})(?:{special.pattern})")
    for match in [*real.finditer(text), None]:
        part = text[position : match.start()] if match else text[position:]
        if mark in part:
            ids += tokenizer.encode(whole, parse_special=True) if whole else []
            ids += tokenizer.encode(part.replace(mark, ""), parse_special=False)
            whole = ""
        else:
            whole += part
        if match:
            whole += match[0]
            position = match.end()
    return ids + (tokenizer.encode(whole, parse_special=True) if whole else [])


def _broken(name: str, mark: str) -> str:
    return name[0] + mark + name[1:] if len(name) > 1 else mark + name


def _unused_mark(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise UsageError("the messages use every private character of Unicode")
    return mark


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.items() for text in _strings(list(item))]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []


def _replaced(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: _replaced(item, change)
            for key, item in value.items()
        }
    return [_replaced(item, change) for item in value] if isinstance(value, list | tuple) else value
