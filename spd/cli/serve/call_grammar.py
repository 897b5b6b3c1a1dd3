"""The grammar that holds tool calls to their schemas, in the form in which a model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spd.cli.serve.call_forms import FORMS, GUESSED, NUMBER, Form, Pairs
from spd.cli.serve.schema_arguments import (
    Argument,
    Arguments,
    FreeKeys,
    ObjectShape,
    TextShape,
    as_json,
)
from spd.cli.text.channels import json_of, literal
from spd.runtime import Json, JsonObject, whole_pattern
from spd.runtime.engine.request import JSON_STYLE, GrammarText

Schemas = Mapping[str, JsonObject]
"""JSON schemas of functions' arguments, by name."""
MAX_CALLS = 8
"""Calls in one reply that a grammar allows."""
LOOSELY: JsonObject = {"x-guidance": {**JSON_STYLE, "lenient": True, "coerce_one_of": True}}
"""In a schema: what no grammar can hold of it is passed over."""
MAX_LENGTH = 10_000
"""Characters: a longer bound of a text is not held."""
GAP = "GAP: /\\n{0,2}/"
TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to where it is `required`: any, or one `named`.

    A grammar holds calls to their schemas: those that have to come, and others from the form's
    opening mark on. A mark of several tokens is looked for from the reply's beginning; for messages
    and for calls without a mark that is done only where it is `strict`. `tokens` are the ids of
    marks that are tokens.
    """

    functions: Schemas
    form: Form = FORMS["Hermes, Qwen3"]
    named: str | None = None
    required: bool = False
    parallel: bool = True
    strict: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)
    answer: GrammarText | None = None
    """The schema of a reply that calls nothing."""

    @property
    def held(self) -> bool:
        """True if a grammar holds a reply from its beginning on."""
        return self.required or self.answer is not None or (self.strict and not self.form.is_bare)

    @property
    def grammar(self) -> GrammarText | None:
        """What holds a call, in the model's own form; None where nothing does."""
        form = self.form
        is_whole = self.required or self.answer is not None
        mark = None if is_whole else self.tokens.get(form.opening)
        is_unmarked = form.is_bare or form.channels is not None or form is GUESSED
        if mark is None and not self.held and is_unmarked:
            return None
        rules = [GAP, TEXT]
        calls = self._calls(rules)
        if form.channels is not None:
            start = self._messages(calls)
        elif is_whole:
            opening = "" if form.is_bare and self.required else self._literal(form.opening)
            answer = f"| {self._answer}" if self._answer else ""
            start = f"GAP ({opening} {calls} {answer})"
        else:
            start = self._calls_in_text(calls, rules, mark)
        return GrammarText("lark", "\n".join([f"start: {start}", *rules]), mark, not is_whole)

    @property
    def _answer(self) -> str:
        """The expression of a reply that calls nothing; empty where no schema holds that."""
        if self.answer is None or self.required:
            return ""
        return json_of(json.loads(self.answer.text))

    @property
    def _has_several(self) -> bool:
        return self.parallel and self.named is None and self.form.channels is None

    def _calls(self, rules: list[str]) -> str:
        """Return the expression of all calls behind the first opening mark, and add its rules."""
        form = self.form
        names = [self.named] if self.named is not None else [*self.functions]
        for number, name in enumerate(names):
            rules.append(f"call_{number}: {self._call(name, rules)}")
        call = f"({' | '.join(f'call_{number}' for number in range(len(names)))})"
        opening = "" if form.is_bare and self.required else form.opening
        closing = "" if form.channels is not None else self._literal(form.closing)
        if form.between is None:
            call = f"{call} {closing}"
            following = f"GAP {self._literal(opening)} {call}"
            closing = ""
        else:
            following = f"{self._literal(form.between)} {call}"
        calls = call
        if self._has_several:
            times = f"{{0,{MAX_CALLS - 1}}}" if self.required else "*"
            calls = f"{call} ({following}){times}"
        if form.is_array:
            calls = f'"[" {calls} "]"'
        return f"{calls} GAP {closing}" if closing else calls

    def _call(self, name: str, rules: list[str]) -> str:
        """Return the expression of a call of one function; in a message its header begins it."""
        head, tail = self.form.call.split("ARGUMENTS")
        if self.form.channels is not None:
            head = self.form.channels.call + self.form.opening + head
            tail += self.form.closing
        begin = self._literal(head.replace("NAME", name)).replace(NUMBER, '" /[0-9]+/ "')
        schema = self.functions[name]
        options = {} if self.required or self.strict else LOOSELY
        if self.form.pairs is None:
            arguments = json_of({**options, **schema})
        else:
            arguments = PairGrammar(self.form.pairs, self.tokens, options, rules).arguments(schema)
        return f"{begin} {arguments} {self._literal(tail)}"

    def _messages(self, calls: str) -> str:
        """Return the expression of a reply of messages, of which the last one calls or answers."""
        channels = self.form.channels
        assert channels is not None
        final = f"{self._literal(channels.answer)} {self._answer or 'TEXT'}"
        last = calls if self.required else f"({calls} | {final})"
        return f"{channels.thought(self.tokens)} {last}"

    def _calls_in_text(self, calls: str, rules: list[str], mark: int | None) -> str:
        """Return the expression of a reply in which calls may come between texts."""
        opening = self.form.opening
        rules.append(f"before[lazy]: /(.|\\n)*{re.escape(opening)}/")
        is_token = opening in self.tokens
        before = f"TEXT {self._literal(opening)}" if is_token else "before"
        start = f"TEXT | {before} {calls}" if mark is None else calls
        return f"{start} ({before} {calls})* TEXT" if self._has_several else start

    def _literal(self, text: str) -> str:
        return literal(text, self.tokens)


@dataclass(frozen=True)
class PairGrammar:
    """Arguments that are written as pairs of a key and a value; it adds the rules that it needs."""

    pairs: Pairs
    tokens: Mapping[str, int]
    options: JsonObject
    """What is put into each schema of a value in JSON."""
    rules: list[str]

    def arguments(self, schema: JsonObject) -> str:
        """Return the expression of a function's arguments."""
        shapes = Arguments(schema).shapes
        if not shapes and self.options:
            shapes = Arguments({"type": "object"}).shapes
        if not shapes:  # the grammar is refused for this schema
            return self._json(schema)
        return f"({' | '.join(self._object(shape) for shape in shapes)})"

    def _object(self, shape: ObjectShape) -> str:
        """Return the expression of one alternative: its keys in their order, then others."""
        comma = self._literal(self.pairs.comma)
        first = ""
        more = ""  # what may come where a pair has come; before that the comma is missing
        if shape.free:
            free = " | ".join(self._free_pair(keys, shape) for keys in shape.free)
            other = self._rule("other", free)
            more = f"({comma} {other})*"
            first = f"({other} {more})?"
        for name, argument in reversed([*shape.listed.items()]):
            pair = self._rule("pair", self._pair(as_json(name), argument))
            rest = self._rule("rest", more)
            if name in shape.required:
                first = f"{pair} {rest}"
                more = f"{comma} {pair} {rest}"
            else:
                first = f"({pair} {rest} | {first})"
                more = f"({comma} {pair})? {rest}"
        return first if self.pairs.comma else more

    def _free_pair(self, keys: FreeKeys, shape: ObjectShape) -> str:
        """Return the expression of a pair with a key that the schema does not list."""
        expressions = [f"/{self.pairs.key}/"]
        if keys.pattern is not None and (pattern := whole_pattern(keys.pattern)) is not None:
            expressions.append(_regex(pattern))
        others = [] if keys.pattern is not None else [each.pattern for each in shape.free]
        patterns = (whole_pattern(other) for other in others if other is not None)
        expressions += [f"~{_regex(pattern)}" for pattern in patterns if pattern is not None]
        if shape.listed:
            names = "|".join(re.escape(name).replace("\\ ", " ") for name in shape.listed)
            expressions.append(f"~{_regex(names)}")
        return self._pair(self._terminal(" & ".join(expressions)), keys.argument)

    def _pair(self, key: str, argument: Argument) -> str:
        """Return the expression of a pair, with its key as an expression."""
        before, _, behind = self.pairs.text.partition("VALUE")
        begin, _, middle = before.partition("KEY")
        quote = self.pairs.quote
        if quote is None:
            value = f"{self._json(argument.schema)} {self._literal(behind)}"
            return f"{self._literal(begin)} {key} {self._literal(middle)} {value}"
        texts = [
            f"{self._literal(middle + quote)} {self._text(shape, quote + behind)}"
            for shape in argument.texts
        ]
        if any(shape.is_free for shape in argument.texts) and not quote:
            values = texts[:1]  # whatever is written; how it is read, the schema says
        elif argument.others is not False or not texts:
            other = argument.others if texts else argument.schema
            values = [
                *texts,
                f"{self._literal(middle)} {self._json(other)} {self._literal(behind)}",
            ]
        else:
            values = texts
        return f"{self._literal(begin)} {key} ({' | '.join(values)})"

    def _text(self, shape: TextShape, end: str) -> str:
        """Return the expression of a text that is no JSON, with what ends it."""
        if shape.values is not None:
            values = [as_json(value) for value in shape.values if value and _has(shape, value)]
            optional = "?" if "" in shape.values else ""
            return f"({' | '.join(values)}){optional} {self._literal(end)}"
        content = _content(shape)
        ending = self._literal(end)
        token = ending.find("<[")
        if token < 0:
            text = f"text_{len(self.rules)}"
            if " & " in content:
                content = self._terminal(content)
            self.rules.append(f"{text}[suffix={ending}]: {content}")
            return text
        if shape.is_free:  # blanks before the token are text
            return f"{self._rule('text', content)} {ending[token:]}"
        return f"{self._terminal(f'({content}) {ending[:token]}')} {ending[token:]}"

    def _json(self, schema: Json) -> str:
        return json_of({**self.options, **schema} if isinstance(schema, dict) else schema)

    def _literal(self, text: str) -> str:
        return literal(text, self.tokens)

    def _rule(self, kind: str, expression: str) -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        return self._rule("T", expression)


def _has(shape: TextShape, value: str) -> bool:
    """True if a listed text has the length and the patterns that its shape asks for."""
    is_long = len(value) >= shape.least
    is_short = shape.most is None or len(value) <= shape.most
    return is_long and is_short and all(re.search(pattern, value) for pattern in shape.patterns)


def _content(shape: TextShape) -> str:
    """Return the expression of a text's characters; what cannot be held of it is left out."""
    least = shape.least if shape.least < MAX_LENGTH else 0
    most = shape.most if shape.most is not None and shape.most < MAX_LENGTH else None
    times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    patterns = (whole_pattern(pattern) for pattern in shape.patterns)
    held = [_regex(pattern) for pattern in patterns if pattern is not None]
    return " & ".join([f"/(.|\\n){times}/", *held])


def _regex(expression: str) -> str:
    """Return an expression as Lark writes it, between slashes that are escaped within."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], expression)
    return "/" + escaped.replace("\n", "\\n") + "/"
