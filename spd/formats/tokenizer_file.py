"""`tokenizer.json` loaded under guard, and the names beside it: which token begins and ends a sequence.

What takes much time or memory is refused before the library sees it. The file is untrusted: its merges may
make the library panic, its regular expressions may never end, its replacements may double a text again and
again. Panics become errors. Classes that `tokenizer_config.json` names are never imported.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from spd.errors import CheckpointError, SpdError
from spd.formats.json_file import Fields, names_in, one_line, parse_json, read_text, shown

FILE_NAME = "tokenizer.json"
MAP_NAME, CONFIG_NAME = "special_tokens_map.json", "tokenizer_config.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("add_bos_token", "add_eos_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
FILE_LIMIT = 64_000_000  # bytes; the largest published ones have about 35 million
# Of a vocabulary. Published ones have up to 262 thousand tokens of 2 million characters, the longest of some
# hundred, and 515 thousand merges. The library takes up to 250 bytes for a character.
MAX_TOKENS, MAX_CHARACTERS, MAX_TOKEN = 1_000_000, 4_000_000, 10_000
MAX_ADDED = 10_000_000  # bytes of all added tokens as the normalizer leaves them; published: 1 million
MAX_PART = 20_000  # characters of JSON of a normalizer and so on; published: 3,000
# What one byte may become. Published: T5's map of characters, a pattern and Metaspace, 33 x 4 x 5.
MAX_ENCODED, MAX_DECODED = 4000, 64
_GROWTH = {"BertNormalizer": 18, "ByteLevel": 3, "Lowercase": 2, "Metaspace": 5}
_GROWTH |= {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
_OTHERS = (
    "BPEDecoder BertPreTokenizer ByteFallback CTC CharDelimiterSplit Digits FixedLength Fuse Nmt Precompiled "
    "Prepend Punctuation Replace Sequence Split Strip StripAccents UnicodeScripts Whitespace WhitespaceSplit "
    "WordPiece"
)
PROBE_SECONDS = 3.0
MAX_AROUND = 1000  # tokens around a text; published post-processors put one or two there
# Runs of one kind of character ended by another: what makes a careless pattern backtrack.
_PROBES = tuple(
    unit * 192 + end for unit in ("a", "A", " ", "1", "\n", "é", "中", "a ", "!") for end in ("", "?", "x")
)
# Descriptor 2 belongs to the whole process: one thread at a time may borrow it.
_STDERR_LOCK = threading.Lock()

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenizerConfig:
    """Special tokens by role, further ones, and what is put around a text (`None`: not said)."""

    roles: Mapping[str, str]
    additional: tuple[str, ...]
    add_bos: bool | None
    add_eos: bool | None
    fields: Fields | None
    """All of `tokenizer_config.json`."""


class LibraryPanic(Exception):
    """The tokenizer library gave up where it did not expect to."""


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Special tokens and flags; empty when the folder says nothing. Raises `CheckpointError`."""
    names = names_in(folder)
    roles: dict[str, str] = {}
    additional: dict[str, None] = {}
    flags: dict[str, bool] = {}
    files = {name: Fields.of(folder / name) for name in (MAP_NAME, CONFIG_NAME) if name in names}
    for fields in files.values():  # the second wins
        roles |= {key: _content(fields, key, fields.get(key)) for key in _ROLES if key in fields}
        for key in _LISTS:
            value = fields.get(key)
            members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            additional.update((_content(fields, key, member), None) for member in members)
        flags |= {key: fields.boolean(key, False) for key in _FLAGS if key in fields}
    adds_bos, adds_eos = map(flags.get, _FLAGS)
    return TokenizerConfig(roles, tuple(additional), adds_bos, adds_eos, files.get(CONFIG_NAME))


def _content(fields: Fields, key: str, value: object) -> str:
    """A token is written as its text, or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise fields.refused(key, f"{shown(value)} is not a token")
    return content


def load_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, int]:
    """The library's tokenizer and its model's highest id, probed with texts that expose bad patterns.

    Raises `CheckpointError` naming the file.
    """
    names = names_in(folder)
    path = folder / FILE_NAME
    if FILE_NAME not in names:
        for other in ("tokenizer.model", "tekken.json", "vocab.json"):
            if other in names:
                why = f"this tokenizer format is not supported, {FILE_NAME} is"
                raise CheckpointError(f"{folder / other}: {why}")
        raise CheckpointError(f"{path}: is missing")
    text = read_text(path, FILE_LIMIT)
    highest = _check_content(str(path), parse_json(text, str(path)))
    with quiet_library():
        tokenizer = _checked(str(path), partial(tokenizers.Tokenizer.from_str, text))
        # Truncation would cut prompts in silence, padding would lengthen them.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _checked(f"{path}: post_processor", partial(_check_post_processor, tokenizer))
        _checked(f"{path}: pre_tokenizer", partial(_probe, tokenizer), PROBE_SECONDS)
        _checked(f"{path}: post_processor", partial(tokenizer.encode, "a"))
    return tokenizer, highest


def _check_content(where: str, file: Any) -> int:
    """Refuse bombs by their keys; returns the highest id. Raises `CheckpointError`."""
    try:
        model, parts = file["model"], ("normalizer", "pre_tokenizer", "decoder", "post_processor")
        ids = model["vocab"]
        ids = ids if isinstance(ids, dict) else {pair[0]: at for at, pair in enumerate(ids)}
        sizes = [*map(len, ids), 0]
        normalized, split, decoded = (_growth(f"{where}: {key}", file.get(key)) for key in parts[:3])
        added = sum(len(token["content"].encode()) for token in file.get("added_tokens") or ())
        longer = normalized * split
        faults = [
            ("normalizer", longer > MAX_ENCODED, f"may make a text {MAX_ENCODED:,} times as long"),
            ("decoder", decoded > MAX_DECODED, f"may make a token {MAX_DECODED} times as long"),
            ("added_tokens", added * normalized > MAX_ADDED, f"come to more than {MAX_ADDED:,} bytes"),
            ("model: vocab", len(ids) > MAX_TOKENS, f"has more than {MAX_TOKENS:,} tokens"),
            ("model: vocab", sum(sizes) > MAX_CHARACTERS, f"has more than {MAX_CHARACTERS:,} characters"),
            ("model: vocab", max(sizes) > MAX_TOKEN, f"has a token of more than {MAX_TOKEN:,} characters"),
            ("model: merges", len(model.get("merges", ())) > MAX_TOKENS, f"are more than {MAX_TOKENS:,}"),
            ("model: dropout", bool(model.get("dropout")), "makes encoding random, null is expected"),
        ]
        texts = {key: json.dumps(file.get(key)) for key in parts}
        texts |= {f"model: {key}": value for key, value in model.items() if isinstance(value, str)}
        for key, text in texts.items():
            faults.append((key, len(text) > MAX_PART, f"has more than {MAX_PART:,} characters"))
            # Groups that call groups that call groups are compiled without end.
            faults.append((key, r"\g" in text, r"calls a group of its pattern by \g"))
        highest: int = max(ids.values(), default=-1)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: is no tokenizer: {one_line(repr(error))}") from None
    for key, is_one, words in faults:
        if is_one:
            raise CheckpointError(f"{where}: {key}: {words}")
    return highest


def _growth(where: str, step: Any) -> float:
    """How many times as long a step may make a text. Raises `CheckpointError` for one that is unknown."""
    if step is None:
        return 1.0
    kind = step["type"]
    if kind not in _GROWTH and kind not in _OTHERS.split():
        raise CheckpointError(f"{where}: {shown(kind)} is not supported here")
    growth = float(_GROWTH.get(kind, 1))
    if kind in ("Replace", "Prepend"):
        growth += len(step["content" if kind == "Replace" else "prepend"].encode())
    if kind == "Precompiled":  # the size of a trie, the trie, and texts that end with a zero
        data = base64.b64decode(step.pop("precompiled_charsmap"), validate=True)
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 0 < size <= len(data) - 4:
            # The library would abort.
            raise CheckpointError(f"{where}: precompiled_charsmap: has a wrong size")
        growth = float(max(map(len, data[4 + size :].split(bytes(1)))))
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(name, ()):
            growth *= _growth(where, inner)
    return growth


def _checked(where: str, call: Callable[[], Result], seconds: float | None = None) -> Result:
    try:
        return within(seconds, call)
    except TimeoutError:
        raise CheckpointError(f"{where}: needs more than {PROBE_SECONDS:g} s for a short text") from None
    except Exception as error:
        message = one_line(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise CheckpointError(f"{where}: {message}") from None


def _probe(tokenizer: tokenizers.Tokenizer) -> None:
    for probe in _PROBES:
        with suppress(Exception):  # a character outside the vocabulary is no fault of the file
            tokenizer.encode_batch_fast([probe], add_special_tokens=False)


def _check_post_processor(tokenizer: tokenizers.Tokenizer) -> None:
    """Refuse one that repeats a text, or puts so much around it that it would take all memory."""
    added = tokenizer.num_special_tokens_to_add(False)
    if added > MAX_AROUND:
        raise ValueError(f"adds {added:,} tokens to a text, at most {MAX_AROUND:,} are supported")
    steps = [] if tokenizer.post_processor is None else [json.loads(tokenizer.post_processor.__getstate__())]
    for step in steps:  # and those inside of it, which are put behind it
        steps += step.get("processors", ())
        if sum("Sequence" in piece for piece in step.get("single", ())) > 1:
            raise ValueError("repeats the text")


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises, in a thread of its own; a `TimeoutError` leaves that behind.

    A panic of the library, which is no `Exception`, becomes a `LibraryPanic`. The clock is of use only for
    calls that release the interpreter lock (of the library `encode_batch_fast` does, `encode` does not).
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        except BaseException as panic:
            future.set_exception(LibraryPanic(str(panic)))

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError
    return future.result()


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library from writing a panic's stack to the terminal: it becomes one line of ours instead.

    The library writes to descriptor 2 itself, so that is where it is caught; what else arrives there
    meanwhile is passed on afterwards unless there was an error.
    """
    with _STDERR_LOCK, tempfile.TemporaryFile() as caught:
        try:
            saved = os.dup(2)
        except OSError:  # there is no standard error
            yield
            return
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except (SpdError, LibraryPanic):
            caught.truncate(0)
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            while chunk := caught.read(65536):
                os.write(2, chunk)
