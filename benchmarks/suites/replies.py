"""Scripted replies with a tool call: every form and published template × schemas × arguments.

A reply is read whole, character by character and in two pieces at every place, and has to give the
same arguments. The grammars of `required` and `auto` have to allow it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suites.conversations import calling, reply, user
from benchmarks.suites.folders import END, VOCABULARY, write_tokenizer
from benchmarks.suites.reply_schemas import CASES, Case
from benchmarks.suites.report import WRONG, Report
from benchmarks.suites.templates import template_files
from spd.conversation.tools.call_check import checked_form
from spd.conversation.tools.call_forms import CALL_MARKS, FALLBACK_FORM, FORMS, Form, call_form
from spd.conversation.tools.call_grammar import Tools
from spd.errors import SpdError
from spd.formats.chat_template import ChatTemplate
from spd.formats.tokenizer import Tokenizer
from spd.runtime.engine.grammar import GrammarCompiler, GrammarError
from spd.runtime.engine.request import GrammarSpec
from tests.every_template import SPECIAL, render_with_spd, split_reply

NAME = "lookup_word"
READ = "read"
NOT_CONSTRAINED = "read, not held"
REFUSED = "refused by name"
REFUSAL = "required: refused: "
CUTS = 24
"""Places at which a template's reply is cut; the form's own is cut at every place, with `auto`."""
BY_TEMPLATE = 3
"""Arguments of a schema, or one more, that each template writes; the forms' own marks write all."""
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Scripted:
    """A reply with one call, and the arguments that it has to give."""

    row: str
    form: Form
    case: Case
    arguments: Mapping[str, Any]
    text: str

    @property
    def functions(self) -> dict[str, Any]:
        """Return the functions that the model may call."""
        return {NAME: {"type": "object", **self.case.schema}, "clock": {"type": "object"}}


# -- texts -------------------------------------------------------------------------------------------


def call_text(form: Form, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return a call in a form's own marks."""
    pairs = form.pairs
    if pairs is None:
        body = json.dumps(arguments, ensure_ascii=False)
    else:
        lines = [
            pairs.text.replace("KEY", name).replace("VALUE", _value(form, value))
            for name, value in _in_order(form, arguments)
        ]
        body = pairs.comma.join(lines)
    call = form.call.replace("NAME", NAME).replace("#", "0").replace("ARGUMENTS", body)
    text = form.opening + (f"[{call}]" if form.is_array else call) + form.closing
    if form.channels is not None:
        text = form.channels.call_header.replace("NAME", NAME) + text
    return text


def _in_order(form: Form, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return keys and values in the order in which a form's templates write them."""
    is_sorted = form.pairs is not None and form.pairs.is_sorted
    items = values.items()
    return sorted(items, key=lambda item: item[0].lower()) if is_sorted else [*items]


def _value(form: Form, value: Any) -> str:
    """Return a value as a form of pairs writes it: texts raw or between its quotes."""
    quote = form.pairs.quote if form.pairs else None
    if quote is None or (quote == "" and not isinstance(value, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        inner = (f"{name}:{_value(form, item)}" for name, item in _in_order(form, value))
        return f"{{{','.join(inner)}}}"
    if isinstance(value, list):
        return f"[{','.join(_value(form, item) for item in value)}]"
    return json.dumps(value)


@dataclass(frozen=True)
class Frame:
    """The text that a template writes around an assistant's turn, for one schema."""

    template: ChatTemplate
    tools: list[dict[str, Any]]
    prompt: str
    tail: str
    """The text that ends a turn."""

    @classmethod
    def of(cls, template: ChatTemplate, schema: Mapping[str, Any]) -> Frame | None:
        """Return a schema's frame; None where the template refuses such a conversation."""
        tools = [{"type": "function", "function": {"name": NAME, "parameters": dict(schema)}}]
        prompt = render_with_spd(template, [user()], tools=tools)
        messages = [user(), reply("XYZ")]
        plain = render_with_spd(template, messages, tools=tools, add_generation_prompt=False)
        if prompt is None or plain is None:
            return None
        return cls(template, tools, prompt, plain[plain.rfind("XYZ") + 3 :])

    def reply(self, arguments: Mapping[str, Any]) -> str | None:
        """Return a call as the template writes it into a history; None where it writes none."""
        messages = [user(), calling((NAME, dict(arguments)))]
        rendered = render_with_spd(
            self.template, messages, tools=self.tools, add_generation_prompt=False
        )
        if rendered is None:
            return None
        pairs = enumerate(zip(self.prompt, rendered, strict=False))
        shorter = min(len(self.prompt), len(rendered))
        begin = rendered[: next((at for at, (a, b) in pairs if a != b), shorter)]
        if begin.rfind("<") > begin.rfind(">"):
            begin = begin[: begin.rfind("<")]
        text = rendered[len(begin) :]
        return text.removesuffix(self.tail) if NAME in text else None


def own_replies() -> Iterator[Scripted]:
    """Yield a reply for each form, schema and arguments, in the form's own marks."""
    for name, form in FORMS.items():
        for case in CASES.values():
            for arguments in case.values:
                text = call_text(form, case.schema, arguments)
                yield Scripted(name, form, case, arguments, text)


def template_replies(path: Path) -> Iterator[Scripted]:
    """Yield the replies that a published template writes."""
    source = path.read_text(encoding="utf-8")
    form = call_form(source)
    template = ChatTemplate("", {"default": source}, SPECIAL)
    for case in CASES.values():
        frame = Frame.of(template, case.schema)
        if frame is None:
            continue
        step = max(1, len(case.values) // BY_TEMPLATE)
        for arguments in case.values[::step]:
            text = frame.reply(arguments)
            if text is None:
                return
            if form.closing and form.closing in text:  # what follows ends the turn
                text = text[: text.rindex(form.closing) + len(form.closing)]
            yield Scripted(path.stem, form, case, arguments, text)


# -- checks ------------------------------------------------------------------------------------------


class Checker:
    """Reads replies and checks them with grammars, with the marks of all forms as tokens."""

    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, sorted(CALL_MARKS))
        self._tokenizer = Tokenizer.open(folder)
        self._compiler = GrammarCompiler(self._tokenizer, VOCABULARY)
        self._tokens = {
            mark: number
            for mark in CALL_MARKS
            if (number := self._tokenizer.token_to_id(mark)) is not None
        }

    def fault(self, scripted: Scripted, cuts: int | None) -> tuple[str, bool]:
        """Return what is wrong with a reply, or nothing, and whether a grammar held it in both
        modes.
        """
        is_constrained = True
        for required in (True, False):
            tools = Tools(scripted.functions, scripted.form, required=required, tokens=self._tokens)
            if fault := self._read(scripted, tools, CUTS if required else cuts):
                return f"{'required' if required else 'auto'}: {fault}", is_constrained
            try:
                grammar = tools.grammar
                if grammar is None:
                    is_constrained = False
                elif fault := self._allowed(
                    scripted, grammar, bare=required and scripted.form.is_bare
                ):
                    return f"{'required' if required else 'auto'}: {fault}", is_constrained
            except SpdError as error:
                if required:
                    return REFUSAL + error.message, is_constrained
                is_constrained = False
        return "", is_constrained

    def _read(self, scripted: Scripted, tools: Tools, cuts: int | None) -> str:
        """Return what is wrong with the calls that are found, over all ways to cut the text."""
        text = scripted.text
        places: Sequence[int] = range(1, len(text))
        if cuts is not None and len(text) > cuts:
            places = sorted(random.Random(text).sample(places, cuts))
        ways = [[text], list(text), *([text[:at], text[at:]] for at in places)]
        expected = [(NAME, _exact(scripted.arguments))]
        for pieces in ways:
            calls: list[list[str]] = []
            for piece in split_reply(tools, pieces):
                if piece.kind == "call" and piece.name:
                    calls.append([piece.name, piece.text])
                elif piece.kind == "call":
                    calls[-1][1] += piece.text
            actual = [(name, _exact_of(arguments)) for name, arguments in calls]
            if actual != expected:
                difference = "lost" if not actual else f"read as {actual}"
                return f"{difference} in {len(pieces)} pieces"
        return ""

    def _allowed(self, scripted: Scripted, grammar: GrammarSpec, *, bare: bool) -> str:
        """Return where a grammar forbids a reply, or nothing; `bare` replies have no opening
        mark.
        """
        text = scripted.text
        if scripted.form.channels is None and scripted.form.opening in text:
            text = text[text.index(scripted.form.opening) :]
        if bare:
            text = text.removeprefix(scripted.form.opening)
        ids = self._tokenizer.encode(text, parse_special=True)
        matcher = self._compiler.compile(grammar, (END,))
        assert matcher is not None
        for at, token in enumerate(ids):
            try:
                matcher.accept_token(token)
            except GrammarError:
                remaining = self._tokenizer.decode(ids[at:], skip_special=False)
                return f"the grammar forbids {remaining[:60]!r}"
        return "" if matcher.is_complete else "the grammar wants more"


def _exact(value: object) -> str:
    """Return a text that differs for 1, true and 1.0, and not for orders of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _exact_of(text: str) -> str:
    with suppress(ValueError):
        return _exact(json.loads(text))
    return text


def run(llama: Path | None) -> Report:
    """Read every reply, of the forms' own marks and of the published templates."""
    report = Report("replies", "spd's forms and the templates in llama-cpp-python's sdist")
    with tempfile.TemporaryDirectory() as place:
        checker = Checker(Path(place))
        for scripted in own_replies():
            _count(report, checker, scripted, None)
        print(report.text(), flush=True)
        for path in template_files(llama) if llama else ():
            source = path.read_text(encoding="utf-8")
            if checked_form(ChatTemplate("", {"default": source}, SPECIAL)) is FALLBACK_FORM:
                report.reasons[path.stem] = "a form of calls that spd does not know"
                continue
            for scripted in template_replies(path):
                _count(report, checker, scripted, CUTS)
            print(f"  {path.stem}: {dict(report.rows.get(path.stem, {}))}", flush=True)
    return report


def _count(report: Report, checker: Checker, scripted: Scripted, cuts: int | None) -> None:
    try:
        fault, is_constrained = checker.fault(scripted, cuts)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        is_constrained = False
    if fault.startswith(REFUSAL) and "oneOf" in scripted.case.schema:
        report.add(scripted.row, REFUSED)
    elif fault:
        schema = next(name for name, case in CASES.items() if case is scripted.case)
        report.add(
            scripted.row,
            WRONG,
            f"{schema}: {_exact(scripted.arguments)}: {fault}: {scripted.text!r}",
        )
    else:
        report.add(scripted.row, READ if is_constrained else NOT_CONSTRAINED)
