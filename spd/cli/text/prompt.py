"""What is asked, from arguments, files, stdin and chats: UTF-8 text passed on as it is, not yet tokens."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.options import GenerateOptions, ReplyOptions
from spd.cli.text import channels
from spd.cli.text.messages import read_message
from spd.cli.text.output import Console, is_terminal
from spd.errors import IncompatibleError, UsageError
from spd.formats.files import read_input_text
from spd.formats.thinking import KNOWN, SWITCHES, MarkPair, ThinkingMarks
from spd.runtime.engine.request import GrammarText, ThinkingBudget, tail_of

if TYPE_CHECKING:
    from spd.cli.text.job import Vocabulary

RESERVED_ARGS = frozenset({"messages", "add_generation_prompt"})
CHAT = '[{"role": "user", "content": "Hello"}]'


@dataclass(frozen=True)
class Asked:
    """One of: token ids, raw text, or the messages of a chat with the template's variables."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    suffix: str | None = None
    """What follows the reply to a raw text, which is to be filled in between."""
    continues: bool = False
    """Whether the reply continues the last message, which the assistant has begun."""


def gather(options: GenerateOptions) -> Asked:
    """Read everything the options name. Raises UsageError and NotFoundError."""
    if options.prompt_ids is not None:
        return Asked(ids=_parse_ids(options.prompt_ids))
    shared = gather_shared(options)
    if options.messages is not None:
        return shared
    text = _gather_text(options)
    if options.raw:
        return Asked(text=text)
    return replace(shared, messages=(*shared.messages, {"role": "user", "content": text}))


def gather_shared(options: GenerateOptions) -> Asked:
    """What stands before a prompt: a whole chat or the system message, and the template's variables."""
    variables = template_variables(options)
    messages = () if options.messages is None else read_messages(options.messages)
    if (system := system_text(options.system)) is not None:
        messages = ({"role": "system", "content": system},)
    return Asked(messages=messages, variables=variables)


def _gather_text(options: GenerateOptions) -> str:
    """Stdin, files, the argument, with blank lines between; only what --raw continues keeps its newline."""
    files, stdin = options.file or [], sys.stdin
    parts = [read_text(name) for name in files]
    is_piped = stdin is not None and not stdin.closed and not is_terminal(stdin)
    if is_piped and "-" not in files and options.system != "@-" and (piped := read_text("-")):
        parts.insert(0, piped)
    if options.prompt is not None:
        parts.append(check_text(options.prompt, "the prompt"))
    if not parts:
        why = "stdin is a terminal" if is_terminal(sys.stdin) else "stdin is empty"
        why = f"No PROMPT argument and {why}."
        fix = ['spd generate "your prompt"', 'echo "your prompt" | spd generate']
        raise UsageError("nothing to generate from", reason=[why], fix=fix, code="no_prompt")
    files_end = len(parts) - (options.prompt is not None or options.raw)
    cut = [part.removesuffix("\n").removesuffix("\r") for part in parts[:files_end]]
    return "\n\n".join([*cut, *parts[files_end:]])


def read_text(name: str) -> str:
    """A file's or stdin's text (-), at most 64 MiB of UTF-8; a byte order mark is dropped."""
    if not name:
        raise UsageError("the name of a file is empty", fix=["name a file, or - for stdin"])
    if name != "-" and os.path.isdir(name):
        raise UsageError(
            f"{name} is a folder, not a text file", fix=[f"-f {name.rstrip('/')}/FILE"]
        )
    return read_input_text(name, "check the path; - reads stdin")


def system_text(given: str | None) -> str | None:
    """What -s gives: a text, or with @ the text of a file. Raises UsageError and NotFoundError."""
    if given is None:
        return None
    return check_text(
        read_text(given[1:]) if given.startswith("@") else given, "the system message"
    )


def check_text(text: str, what: str) -> str:
    """Text without lone surrogates, which is how undecodable bytes arrive. Raises UsageError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = f"a lone U+{ord(text[error.start]):04X} at character {error.start}"
        raise UsageError(f"{what} is not Unicode text: {lone}", fix=["give UTF-8 text"]) from None
    return text


def _parse_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or blanks. Raises UsageError."""
    with suppress(ValueError):
        if ids := tuple(int(word) for word in text.replace(",", " ").split()):
            return ids
    raise UsageError(
        f"--prompt-ids {text[:60]} is not a list of token ids", fix=["--prompt-ids 1,2,3"]
    )


def template_variables(options: ReplyOptions) -> dict[str, Any]:
    """What the options tell the chat template: JSON values (true, 3), else texts. Raises UsageError."""
    variables: dict[str, Any] = {}
    for word in options.template_arg or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or name in RESERVED_ARGS:
            words = f"--template-arg {word} is not NAME=VALUE"
            raise UsageError(words, fix=["--template-arg enable_thinking=false"])
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = check_text(value, "--template-arg")
    return (
        variables
        if options.think == "auto"
        else variables | {"enable_thinking": options.think != "off"}
    )


def read_json(name: str, example: str) -> Any:
    """The JSON of a file, or of stdin. Raises UsageError with an example."""
    try:
        return json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        shown = "stdin" if name == "-" else name
        raise UsageError(f"{shown} is not JSON: {error}", fix=[example]) from None


def read_messages(name: str) -> tuple[Mapping[str, Any], ...]:
    """A chat from a JSON file: a list of messages, or an object with `messages`. Raises UsageError."""
    loaded = read_json(name, CHAT)
    shown = "stdin" if name == "-" else name
    return check_messages(loaded.get("messages") if isinstance(loaded, dict) else loaded, shown)


def check_messages(loaded: Any, shown: str) -> tuple[Mapping[str, Any], ...]:
    """A JSON value as the messages of a chat. Raises UsageError naming where it was `shown`."""
    if not isinstance(loaded, list) or not loaded:
        raise UsageError(f"{shown} holds no list of messages", fix=[CHAT])
    messages: list[Mapping[str, Any]] = []
    for number, message in enumerate(loaded):
        where = f"{shown}: message {number}"
        messages.append(read_message(message, where, CHAT))
        check_text(json.dumps(messages[-1], ensure_ascii=False), where)
    return tuple(messages)


SWITCH = SWITCHES[0]
"""The variable that switches thinking, whatever name the template has for it."""
TAIL = 64
"""Tokens at the end of a prompt that can hold the marks of thinking it ends with."""


def read_grammar(options: GenerateOptions) -> GrammarText | None:
    """The schema, expression or grammar of the flags. Raises UsageError and NotFoundError."""
    if (schema := options.schema) is not None:
        is_file = schema.lstrip()[:1] not in ("{", "") and schema.strip() not in ("true", "false")
        text = read_text(schema.removeprefix("@")) if is_file else schema
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = ["""--schema '{"type": "object"}'""", "--schema FILE"]
            raise UsageError(f"--schema is not JSON: {error}", fix=fix) from None
        return GrammarText("schema", text)
    if (grammar := options.grammar) is not None:
        if len(grammar) > 1 and grammar[0] == grammar[-1] == "/":  # a file's name does not end so
            return GrammarText("regex", grammar[1:-1])
        inline = re.search(r"^\s*[?!]*start\b[^\n]*:", grammar, re.MULTILINE) is not None
        return GrammarText("lark", grammar if inline else read_text(grammar))
    return None


def opens_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a rendered prompt, or its end, leaves thinking open."""
    end = prompt.rstrip()
    return any(end.endswith((one.opening, one.opening + one.label)) for one in marks.thinking)


def closes_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a rendered prompt, or its end, has closed thinking: the reply is an answer."""
    return prompt.rstrip().endswith(tuple(one.closing for one in marks.thinking))


def continues_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a prompt, or its end, has begun thinking, whatever words stand behind it."""
    last_opening = max(prompt.rfind(one.opening) for one in marks.thinking)
    last_closing = max(prompt.rfind(one.closing) for one in marks.thinking)
    return last_opening > last_closing


def thinking_budget(
    think: str, vocabulary: Vocabulary, inside: bool, spent: Sequence[int] = ()
) -> ThinkingBudget | None:
    """What --think N leaves behind `spent` tokens. Raises IncompatibleError where no token ends thinking."""
    if not think.isdigit() or (spent and not inside):
        return None
    if (pair := vocabulary.thinking_tokens) is None:
        closing = vocabulary.marks.thinking[0].closing
        words = f"at most {think} tokens of thinking: for models that end it with a token {closing}"
        why, fix = ["This vocabulary has none."], ["on, off or hide in place of the number"]
        raise IncompatibleError(words, reason=why, fix=fix, code="no_thinking")
    begin, end = pair
    left = int(think) - sum(token != begin for token in spent)
    return ThinkingBudget(max(0, left), end, begin, inside)


def note_thinking(console: Console, think: str, vocabulary: Vocabulary) -> None:
    """Say that a chat template cannot be asked for thinking or for none, where it is asked."""
    template = vocabulary.template
    if think in ("on", "off") and template is not None and template.switch is None:
        console.note(f"this chat template has no {SWITCH}: thinking cannot be switched on or off")


class ThinkingSplitter:
    """Cuts a growing reply into thinking and answer, without the marks between them.

    `inside` says that the prompt left thinking open; None that nothing is thinking. Marks of words
    count at the very beginning only, those that are tokens anywhere. The messages of gpt-oss and
    Muse-Glimmer, of which some are thinking, have headers. Line breaks next to a mark are dropped.
    """

    def __init__(self, inside: bool | None, marks: ThinkingMarks = KNOWN) -> None:
        self.part: Literal["beginning", "header", "thinking", "answer"]
        self.part = "answer" if inside is None else "beginning"
        self._inside = bool(inside)
        self._marks = marks if inside is not None else ThinkingMarks(())
        self._tokens = tuple(pair for pair in self._marks.thinking if pair.are_tokens)
        self._held = ""
        self._label = ""
        """A word that is dropped where it comes next."""
        self._is_fresh = False
        """Whether line breaks are dropped: nothing has come behind a mark yet."""
        self._ends: tuple[str, ...] = ()
        """The marks that end thinking, an answer between marks, or a message."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._inside if self.part == "beginning" else self.part == "thinking"

    @property
    def is_settled(self) -> bool:
        """True if nothing that comes can be thinking."""
        return self.part == "answer" and not self._tokens and self._ends is not channels.ENDS

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """Return (is thinking, text) in order; what may be a part of a mark is held back."""
        self._held += text
        parts: list[tuple[bool, str]] = []
        if self.part == "beginning" and not self._begin(final):
            return parts
        while self._header(parts, final) if self.part == "header" else self._body(parts, final):
            pass
        return parts

    def _begin(self, final: bool) -> bool:
        """Enter the part that a reply begins with; False while that may be a mark or not."""
        begun = self._held.lstrip()
        pairs = (*self._marks.thinking, *self._marks.answer)
        marks = [mark for pair in pairs for mark in (pair.opening, pair.closing)]
        heads = (*marks, channels.CHANNEL, channels.START)
        may_be = any(head.startswith(begun) and head != begun for head in heads)
        if not final and (may_be or channels.MAY_BEGIN.fullmatch(begun)):
            return False
        if channels.BEGINNING.match(begun):
            self.part, self._ends = "header", channels.ENDS
            return True
        opened = next((one for one in self._marks.thinking if begun.startswith(one.opening)), None)
        closed = next((one for one in self._marks.thinking if begun.startswith(one.closing)), None)
        if opened is not None:
            self._held = begun[len(opened.opening) :]
            self._think(opened)
        elif self._inside:
            self._think(*self._marks.thinking)
        elif closed is not None:  # of thinking that the prompt has closed already
            self._held = begun[len(closed.closing) :]
            self._answer()
        elif any(begun.startswith(pair.opening) for pair in self._marks.answer):
            self._answer()
        else:
            self.part = "answer"
        return True

    def _think(self, *pairs: MarkPair) -> None:
        """Go on with thinking, which the closing mark of any of the pairs ends."""
        self.part = "thinking"
        self._is_fresh = True
        self._label = pairs[0].label if len(pairs) == 1 else ""
        self._ends = tuple(pair.closing for pair in pairs)

    def _answer(self) -> None:
        """Go on with the answer behind thinking."""
        self.part = "answer"
        self._is_fresh = True
        self._label = ""
        self._ends = ()

    def _header(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Take a message's header; says whether it is whole."""
        head, mark, rest = self._held.partition(channels.MESSAGE)
        if mark or final:
            self.part = "thinking" if channels.THINKS.search(head) else "answer"
            self._held = rest if mark else head
            if mark and (called := channels.CALLED.search(head)):
                parts.append((False, f"{channels.CALL}{called[1]}{mark}"))
        return bool(mark or final)

    def _body(self, parts: list[tuple[bool, str]], final: bool) -> bool:
        """Take text up to the next mark; says whether that has come."""
        if self._is_fresh and not self._freshen(final):
            return False
        marks = self._ends
        if self.part == "answer" and marks is not channels.ENDS:
            stray = (mark for pair in self._tokens for mark in (pair.opening, pair.closing))
            marks = (*marks, *stray)
        places = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        at, _, end = min(places, default=(len(self._held), 0, ""))
        if not (end or final):
            at -= max((tail_of(mark, self._held) for mark in marks), default=0)
        said = self._held[:at]
        between_marks = bool(self._ends) and self._ends is not channels.ENDS
        if self.part == "thinking" or (between_marks and (end or not final)):
            # Line breaks are kept back until the next character shows that no mark follows.
            said = said.rstrip("\n")
        self._held = self._held[at + len(end) :] if end or final else self._held[len(said) :]
        parts.append((self.thinking, said))
        if end:
            self._cross(end)
        return bool(end)

    def _cross(self, mark: str) -> None:
        """Go on behind a mark that ended a part."""
        opened = next((pair for pair in self._tokens if pair.opening == mark), None)
        if self._ends is channels.ENDS:
            self.part = "header"
        elif self.part == "thinking":
            self._answer()
            self._ends = tuple(one.closing for one in self._marks.answer if one.opening == mark)
        elif mark in self._ends:  # of the answer
            self._ends = ()
        elif opened is not None:
            self._think(opened)

    def _freshen(self, final: bool) -> bool:
        """Drop what stands between a mark and the text behind it; False if more may come."""
        self._held = self._held.lstrip("\n")
        if self._label:
            if not final and self._label != self._held and self._label.startswith(self._held):
                return False
            self._held = self._held.removeprefix(self._label).lstrip("\n")
            self._label = ""
        if self.part == "answer" and not self._ends:
            for pair in self._marks.answer:
                if self._held.startswith(pair.opening):
                    self._held = self._held[len(pair.opening) :]
                    self._ends = (pair.closing,)
                    return self._freshen(final)
                if self._held and pair.opening.startswith(self._held) and not final:
                    return False
        if self._held:
            self._is_fresh = False
        return True


def parted(
    text: str, inside: bool | None = False, marks: ThinkingMarks = KNOWN
) -> tuple[str | None, str]:
    """The thinking of a whole reply, None where it has none, and its answer; `inside` as above."""
    parts = ThinkingSplitter(inside, marks).feed(text, final=True)
    thoughts = [part for thinking, part in parts if thinking]
    answer = "".join(part for thinking, part in parts if not thinking)
    return "".join(thoughts).strip("\n") if thoughts else None, answer
