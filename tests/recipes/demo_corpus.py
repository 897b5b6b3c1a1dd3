"""The demo's corpus: the Python standard library's source and docstrings as text.

The selection of files, the removal of near-duplicates, the split into training and held-out
modules, question-and-answer pairs from docstrings, the tokenizer, batches of token ids, and figures
of a target and its MTP layer on the held-out side. All is a function of the running interpreter's
standard library, so the same Python gives the same hash.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import math
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.recipes.demo_checkpoint import load_decoder
from tests.recipes.demo_model import TARGET, Sizes
from tests.recipes.tiny import SPECIAL_TOKENS

VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 6
WINDOW = 512
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "_bundled",
    "lib-dynload",
    "turtledemo",
    "lib2to3",
    "config-3",  # build configuration, named by version and platform
}
PATCHED_BY_TORCH = {"inspect.getfile"}  # loses its docstring where torch was imported first
QUESTION_MODULES = """
os os.path json re math cmath itertools functools collections string pathlib shutil random statistics
datetime time textwrap glob fnmatch heapq bisect copy operator csv hashlib hmac base64 binascii
urllib.parse subprocess threading queue tempfile struct zlib gzip pickle shelve logging argparse getpass
platform sys inspect types typing contextlib dataclasses enum abc decimal fractions numbers secrets uuid
calendar locale html difflib unicodedata ast dis keyword token tokenize traceback warnings weakref gc
atexit signal socket select ssl asyncio zipfile tarfile configparser io codecs pprint reprlib timeit
cProfile linecache filecmp stat errno array colorsys bz2 lzma sched http.client ipaddress shlex
"""
QUESTION_TYPES = (
    str,
    bytes,
    list,
    dict,
    set,
    frozenset,
    tuple,
    int,
    float,
    bytearray,
    complex,
    range,
)
QUESTIONS = (
    "What does {name} do?",
    "what does {name} do",
    "What is {name} for?",
    "Explain {name}.",
    "Describe {name} in one sentence.",
    "What does {name} do in Python?",
)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out source texts, and the (name, answer) pairs of documented functions."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """Return the SHA-256 of all texts in order."""
        state = hashlib.sha256()
        for part in (
            *self.training,
            "\0",
            *self.held_out,
            "\0",
            *(f"{n}\0{a}" for n, a in self.answers),
        ):
            state.update(part.encode())
            state.update(b"\1")
        return state.hexdigest()


def _stable_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _shingles(text: str) -> set[int]:
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 3]
    hashes = (_stable_hash("\n".join(lines[i : i + 4])) for i in range(len(lines) - 3))
    return {shingle for shingle in hashes if shingle % 8 == 0}


def _source_files() -> list[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = {p.split(".")[0] if p.startswith("config-") else p for p in relative.parts}
        if SKIPPED_FOLDERS & parts or path.stat().st_size > 900_000:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 200:
            files.append((str(relative), text))
    return files


def _without_near_duplicates(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drop a file if over 40 % of its sampled 4-line shingles are in earlier files."""
    known_shingles: set[int] = set()
    unique_files = []
    for name, text in files:
        shingles = _shingles(text)
        if len(shingles) >= 3 and len(shingles & known_shingles) > 0.4 * len(shingles):
            continue
        if re.match(r"encodings/(cp|mac_|iso|koi)", name) or re.match(r"_?sysconfigdata", name):
            continue
        known_shingles |= shingles
        unique_files.append((name, text))
    return unique_files


def _first_paragraph(doc: str) -> str:
    paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(doc).split("\n\n")]
    only_signature = re.compile(r"^[\w.]+\([^)]*\)( *-+> .{0,60})?$")
    signature = re.compile(r"^[\w.]+\([^)]*\)( *-> *[\w\[\], .|]+)?( *--? *)?")
    paragraphs = [p for p in paragraphs if not only_signature.match(p)]
    texts = [t for p in paragraphs if (t := signature.sub("", p).strip(" ->\n"))]
    if not texts:
        return ""
    answer = texts[0]
    if len(answer) < 60 and len(texts) > 1 and not texts[1].startswith((">>>", ":")):
        answer = answer.rstrip(".:") + ". " + texts[1]
    if len(answer) > 240:
        cut = answer[:240].rfind(". ")
        answer = answer[: cut + 1] if cut > 40 else answer[:240].rsplit(" ", 1)[0]
    return answer[0].upper() + answer[1:] if answer else ""


def _documented(module_name: str) -> list[tuple[str, str]]:
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return []
    pairs = []
    for attribute in sorted(getattr(module, "__all__", None) or dir(module)):
        value = getattr(module, attribute, None)
        if module is sys and attribute.endswith("hook"):  # a test runner puts its own in its place
            value = getattr(sys, f"__{attribute}__", value)
        if attribute.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        doc = inspect.getdoc(value)
        owner = (getattr(value, "__module__", None) or module_name).lstrip("_").split(".")[0]
        if doc and owner in (module_name.split(".")[0], "posixpath", "posix", "genericpath"):
            pairs.append((f"{module_name}.{attribute}", doc))
    return pairs


def question_answers() -> tuple[tuple[str, str], ...]:
    """Return pairs of a qualified name and its docstring's first paragraph, without duplicates."""
    import builtins

    raw = [pair for name in QUESTION_MODULES.split() for pair in _documented(name)]
    for attribute in sorted(dir(builtins)):
        value = getattr(builtins, attribute)
        error = inspect.isclass(value) and issubclass(value, BaseException)
        if (
            not attribute.startswith("_")
            and callable(value)
            and not error
            and inspect.getdoc(value)
        ):
            raw.append((attribute, inspect.getdoc(value) or ""))
    for kind in QUESTION_TYPES:
        for attribute in sorted(vars(kind)):
            doc = inspect.getdoc(getattr(kind, attribute))
            if not attribute.startswith("_") and doc:
                raw.append((f"{kind.__name__}.{attribute}", doc))
    pairs: dict[str, str] = {}
    for name, doc in raw:
        answer = _first_paragraph(doc)
        if name in PATCHED_BY_TORCH:
            continue
        if (
            len(answer) > 20
            and name not in pairs
            and re.search(r" at 0x[0-9a-f]{6,}", answer) is None
        ):
            pairs[name] = answer
    return tuple(pairs.items())


def _is_held_out(module: str) -> bool:
    """True if a top-level module is held out; C modules go with their Python twin."""
    names = (module, "_py" + module)
    return any(_stable_hash("held-out:" + name) % 100 < HELD_OUT_PERCENT for name in names)


def build_corpus() -> Corpus:
    """Read the running interpreter's standard library into a `Corpus`."""
    training: list[str] = []
    held_out: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = tuple(
            pair for pair in question_answers() if not _is_held_out(pair[0].split(".")[0])
        )
        for name, text in _without_near_duplicates(_source_files()):
            try:
                ast.parse(text)
            except SyntaxError:
                continue
            document = f"# {name}\n{text.rstrip()}\n"
            (held_out if _is_held_out(name.split("/")[0].removesuffix(".py")) else training).append(
                document
            )
    return Corpus(tuple(training), tuple(held_out), answers)


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Train a byte-level BPE with Qwen's split pattern on the training side only."""
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = "\n".join(answer for _, answer in corpus.answers)
    tokenizer.train_from_iterator((*corpus.training, answers), trainer)
    return tokenizer


class Batches:
    """Windows of tokens: source text, and questions with their answers packed end to end."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.corpus = corpus
        self.random = random.Random(seed)
        end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
        stream = []
        for encoding in tokenizer.encode_batch(list(corpus.training)):
            stream += [*encoding.ids, end]
        self.source = torch.tensor(stream)
        self.end = end
        self.queue: list[tuple[str, str]] = []
        self.source_starts: list[int] = []

    def _chat(self, name: str, answer: str) -> list[int]:
        question = self.random.choice(QUESTIONS).format(name=name)
        text = (
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        )
        return [*self.tokenizer.encode(text).ids, self.end]

    def _answers(self, length: int) -> Tensor:
        ids: list[int] = []
        while len(ids) < length + 1:
            if not self.queue:
                self.queue = self.random.sample(self.corpus.answers, len(self.corpus.answers))
            question, answer = self.queue.pop()
            ids += self._chat(question, answer)
        return torch.tensor(ids[: length + 1])

    def _source(self, length: int) -> Tensor:
        if not self.source_starts:
            offset = self.random.randrange(length)
            self.source_starts = list(range(offset, len(self.source) - length - 1, length))
            self.random.shuffle(self.source_starts)
        start = self.source_starts.pop()
        return self.source[start : start + length + 1]

    def next(self, rows: int, length: int, answer_rows: int) -> Tensor:
        """Return ids [rows, length + 1]; the first `answer_rows` rows are questions and answers."""
        windows = (
            self._answers(length) if r < answer_rows else self._source(length) for r in range(rows)
        )
        return torch.stack(list(windows))


def held_out_windows(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield the held-out texts' ids [1, T + 1] in windows of at most WINDOW predicted ones."""
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    for text in corpus.held_out:
        ids = torch.tensor([end, *tokenizer.encode(text).ids])
        for start in range(0, len(ids) - 1, WINDOW):
            yield ids[None, start : start + WINDOW + 1]


@torch.no_grad()
def measure_held_out(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, shape: Sizes = TARGET
) -> dict[str, Any]:
    """Measure a target on held-out text: bits per byte, and agreement of its MTP layer.

    Beside it, how often the most frequent successor of the last token is, counted on the training
    side.
    """
    target = load_decoder(folder, shape).eval()
    stream = Batches(corpus, tokenizer, 0).source
    pairs = torch.bincount(stream[:-1] * VOCAB_SIZE + stream[1:], minlength=VOCAB_SIZE**2)
    successor = pairs.view(VOCAB_SIZE, VOCAB_SIZE).argmax(-1)
    nats = 0.0
    tokens = 0
    guessed = 0.0
    depths = 4
    agreed = torch.zeros(depths)
    for window in held_out_windows(corpus, tokenizer):
        with target.autocast():
            hidden = target(window[:, :-1])
            logits = target.logits(hidden)[0]
            nats += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
            length = window.shape[1] - 1 - depths
            if length < 1:
                continue
            best = logits.argmax(-1)
            states = target.mtp_hidden(hidden[:, :length], window[:, 1 : length + depths], depths)
            for depth, state in enumerate(states):
                guess = target.logits(state[0]).argmax(-1)
                agreed[depth] += (guess == best[depth + 1 : depth + 1 + length]).sum()
            guessed += (successor[window[0, 1 : length + 1]] == best[1 : length + 1]).sum().item()
            tokens += length
    size = sum(len(text.encode()) for text in corpus.held_out)
    return {
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "mtp_acceptance": [round(share, 4) for share in (agreed / tokens).tolist()],
        "bigram_acceptance": round(guessed / tokens, 4),
        "tokens": tokens,
        "parameters": sum(p.numel() for p in target.parameters()),
    }
