"""Stands in for `vllm` where its tests of tool parsers are imported: each parser is spd's
`CallParser`.

A pytest plugin (`-p vllm_stub`), copied beside the tests. Names that it does not know are records
that keep what they are made with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spd.conversation.tools.call_forms import FORMS, Form
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_parser import CallParser

PARSERS: Mapping[str, str] = {
    "hermes": "Hermes, Qwen3",
    "granite4": "Hermes, Qwen3",
    "granite": "Granite 3",
    "llama3_json": "Llama 3",
    "llama": "Llama 3",
    "llama3": "Llama 3",
    "kimi_k2": "Kimi K2",
    "deepseek_v3": "DeepSeek V3",
    "deepseekv3": "DeepSeek V3",
    "deepseek_v31": "DeepSeek V3.1",
    "deepseekv31": "DeepSeek V3.1",
    "qwen3": "Qwen3-Coder, Qwen3.5",
    "qwen3_coder": "Qwen3-Coder, Qwen3.5",
    "qwen3_xml": "Qwen3-Coder, Qwen3.5",
    "step3p5": "Qwen3-Coder, Qwen3.5",
    "glm4_moe": "GLM-4.5, GLM-4.7",
    "glm45": "GLM-4.5, GLM-4.7",
    "glm47_moe": "GLM-4.5, GLM-4.7",
    "glm47": "GLM-4.5, GLM-4.7",
    "gemma4": "Gemma 4",
    "gigachat3": "GigaChat 3.1",
    "lfm2": "LFM2",
    "minimax_m2": "MiniMax M2",
    "minimaxm2": "MiniMax M2",
    "mistral": "Mistral",
    "seed_oss": "Seed-OSS",
}
"""Names of vLLM's parsers, without their endings, and the forms of spd that are meant."""


class Record:
    """A value with any fields; a field that it was not made with is None."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        self.__dict__.update({name: _record(value) for name, value in fields.items()})
        self.parts = parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def _record(value: Any) -> Any:
    is_function = isinstance(value, dict) and {"name", "arguments", "parameters"} & value.keys()
    return Record(**value) if is_function and "name" in value else value


class ToolCall(Record):
    """A call as vLLM's parsers return it."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        super().__init__(*parts, **{"type": "function", **fields})


class DeltaMessage(Record):
    """A piece of a streamed reply."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        super().__init__(*parts, **{"tool_calls": [], **fields})


class Vocabulary(dict[str, int]):
    """A vocabulary that has every token."""

    def __missing__(self, key: str) -> int:
        self[key] = 1_000_000 + len(self)
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True


class CharacterTokenizer:
    """A token is a character."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        self.vocabulary = Vocabulary()
        self.all_special_tokens: list[str] = []
        self.all_special_ids: list[int] = []
        self.eos_token_id = 0
        self.is_fast = True

    def get_vocab(self) -> Vocabulary:
        """Return every token."""
        return self.vocabulary

    def add_tokens(self, tokens: Any, **options: Any) -> None:
        """Add nothing: every token is there."""

    @property
    def vocab(self) -> Vocabulary:
        """Return the vocabulary, which has every token."""
        return self.vocabulary

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the characters' numbers."""
        return [*map(ord, text)]

    def __call__(self, text: str, **options: Any) -> Any:
        return types.SimpleNamespace(input_ids=self.encode(text))

    def decode(self, ids: Any, **options: Any) -> str:
        """Return the text of characters' numbers."""
        return "".join(map(chr, [ids] if isinstance(ids, int) else ids))

    def tokenize(self, text: str) -> list[str]:
        """Return the characters."""
        return [*text]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """Return the text of tokens."""
        return "".join(tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the ids of a token or of several."""
        single = isinstance(tokens, str)
        return self.vocabulary[tokens] if single else [self.vocabulary[token] for token in tokens]

    def convert_ids_to_tokens(self, ids: Iterable[int], **options: Any) -> list[str]:
        """Return the characters of ids."""
        return [*map(chr, ids)]


def _functions(tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return the schemas of a request's tools by their names."""
    functions: dict[str, Any] = {}
    for tool in tools or ():
        function = getattr(tool, "function", None)
        function = tool if function is None else function
        if isinstance(function, dict):
            function = Record(**function)
        schema = getattr(function, "parameters", None)
        functions[function.name] = schema if isinstance(schema, dict) else {}
    return functions


class FormParser:
    """A parser in vLLM's manner over spd's `CallParser`; subclasses have the form."""

    _form: Form

    def __init__(self, tokenizer: Any = None, tools: Any = None, **options: Any) -> None:
        self._tools = tools
        self._parser: CallParser | None = None
        self._count = 0
        self._ids = 0
        self.model_tokenizer = CharacterTokenizer()
        self.vocab = self.model_tokenizer.vocab
        self.prev_tool_call_arr: list[Any] = []
        self.streamed_args_for_tool: list[str] = []

    def adjust_request(self, request: Any) -> Any:
        """Return the request as it is."""
        return request

    def _new(self, request: Any, text: str = "") -> CallParser:
        """Return a parser of one reply. text: the reply, if it is complete."""
        tools = self._tools or getattr(request, "tools", None)
        functions = _functions(tools)
        if not functions and self._form.is_bare:  # it takes no function that it does not know
            functions = {name: {} for name in re.findall(r'"name":\s*"([^"]+)"', text)}
        return CallParser(Tools(functions, self._form))

    def extract_tool_calls(self, model_output: str, request: Any = None) -> Any:
        """Return the text and the calls of a complete reply."""
        parser = self._new(request, model_output)
        pieces = [*parser.feed(model_output), *parser.feed("", final=True)]
        text = "".join(piece.text for piece in pieces if piece.kind == "text")
        calls = [self._call(piece) for piece in pieces if piece.kind == "call"]
        return Record(tools_called=bool(calls), tool_calls=calls, content=text or None)

    def _call(self, piece: Any) -> Any:
        """Return a piece of a call as vLLM has it."""
        function = Record(name=piece.name, arguments=piece.text)
        self._ids += 1
        return ToolCall(id=piece.id or f"call_{self._ids}", function=function)

    def extract_tool_calls_streaming(
        self, previous_text: str = "", *parts: Any, **named: Any
    ) -> Any:
        """Return what the next piece of a reply adds; None if it adds nothing."""
        names = ("current_text", "delta_text", "previous_token_ids", "current_token_ids")
        fields = {**dict(zip(names, parts, strict=False)), **named}
        delta = fields["delta_text"]
        if self._parser is None or (not previous_text and fields.get("current_text") == delta):
            request = fields.get("request", parts[-1] if parts else None)
            self._parser = self._new(request)
            self._count = 0
        return self._delta(self._parser.feed(delta))

    def finish(self) -> Any:
        """Return what the end of a reply adds; None if it adds nothing."""
        return None if self._parser is None else self._delta(self._parser.feed("", final=True))

    def _delta(self, pieces: Sequence[Any]) -> Any:
        """Return pieces as a streamed message; None without text and calls."""
        text = "".join(piece.text for piece in pieces if piece.kind == "text")
        calls: list[Any] = []
        for piece in pieces:
            if piece.kind == "call":
                calls.append(self._call(piece))
                calls[-1].index = self._count
                self._count += 1
        return DeltaMessage(content=text or None, tool_calls=calls) if text or calls else None


def parser_of(form: Form) -> type:
    """Return a parser class in vLLM's manner for a form of spd."""
    return type("Parser", (FormParser,), {"_form": form})


def form_of(name: str) -> Form | None:
    """Return the form that a parser's name or its class's name means."""
    plain = name.lower().replace("_", "")
    for ending in ("toolparser", "modeltoolparser", "engine", "json", "2pro", "moe", "model"):
        plain = plain.removesuffix(ending)
    forms = {key.replace("_", ""): form for key, form in PARSERS.items()}
    for key in (plain, plain.removesuffix("engine"), plain.replace("moe", "")):
        if key in forms:
            return FORMS[forms[key]]
    return None


class Unknown:
    """A parser of a form that spd has not: its tests are skipped."""

    def __init__(self, *parts: Any, **fields: Any) -> None:
        import pytest

        pytest.skip("a form that spd has not")


class Manager:
    """Hands out parsers by their names."""

    @staticmethod
    def get_tool_parser(name: str) -> type:
        """Return the class of a parser."""
        form = form_of(name)
        return Unknown if form is None else parser_of(form)


def detokenize_incrementally(
    tokenizer: Any, all_input_ids: list[int], *parts: Any, **named: Any
) -> tuple[list[str], str, int, int]:
    """Return the last token, its text and the next offsets."""
    token = chr(all_input_ids[-1])
    return [token], token, len(all_input_ids) - 1, len(all_input_ids)


def pytest_configure(config: Any) -> None:
    """Finish parsers at the end of a stream, which vLLM's own do not need."""
    from tests.tool_parsers import utils  # vLLM's own, beside this file

    run = utils.run_tool_extraction_streaming

    def to_the_end(tool_parser: Any, *parts: Any, **named: Any) -> Any:
        reconstructor = run(tool_parser, *parts, **named)
        last = tool_parser.finish()
        if last is not None:
            reconstructor.append_delta(last)
        return reconstructor

    utils.run_tool_extraction_streaming = to_the_end


NAMES: Mapping[str, Any] = {
    "TOOL_CALL_START": "<|tool_call>",
    "TOOL_CALL_END": "<tool_call|>",
    "STRING_DELIM": '<|"|>',
    "detokenize_incrementally": detokenize_incrementally,
    "ToolParserManager": Manager,
    "ToolCall": ToolCall,
    "DeltaMessage": DeltaMessage,
    "get_tokenizer": lambda *parts, **fields: CharacterTokenizer(),
    "TokenizerLike": CharacterTokenizer,
    "MockTokenizer": CharacterTokenizer,
}


class Stub(types.ModuleType):
    """A module of vLLM's with every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = NAMES.get(name)
        if value is None and name.endswith("ToolParser") and name != "ToolParser":
            form = form_of(name)
            value = Unknown if form is None else parser_of(form)
        if value is None:
            value = type(name, (Record,), {})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM's."""

    ROOTS = (
        "vllm",
        "xgrammar",
        "openai",
        "mistral_common",
        "openai_harmony",
        "partial_json_parser",
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a stub for such a module."""
        if name.partition(".")[0] in self.ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Return the module."""
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module has no code."""


sys.meta_path.insert(0, Finder())
import transformers  # noqa: E402

_automatic: Any = transformers.AutoTokenizer
_automatic.from_pretrained = lambda *parts, **fields: CharacterTokenizer()
