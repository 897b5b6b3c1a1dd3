"""A model folder without weights, a fake engine, and the command line run in this process."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import spd.runtime
from spd.formats.folder import ModelFolder
from spd.runtime.engine.client import EngineInfo
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.engine.request import Event, Request, TokenLogprob
from spd.runtime.engine.trace import RoundRecord
from tests.json_schema import faults_by_name

ROOT = Path(__file__).resolve().parents[2]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
}
CONFIG |= {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIG |= {
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 264,
    "max_position_embeddings": 128,
}
CONFIG |= {
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 258,
}


def write_tokenizer(folder: Path, specials: Sequence[str] = SPECIALS) -> None:
    """Write a byte-level tokenizer: ids 0 to 255 are bytes, then come the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(specials))
    library.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, **changes: Any) -> Path:
    """Write the small files of a model folder; `changes` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_k": 20}))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_tokenizer(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model folder with tokenizer and template, and no weights."""
    return write_model(tmp_path / "model")


@dataclass(frozen=True)
class FakePlan:
    """The part of a plan that the command line reads."""

    ctx: int
    config: Any
    model: str = "folder"
    spec: str = "draft"
    adaptive: bool = True
    device: str = "cpu"
    kernels_reason: str = "asked for"
    drafter = SimpleNamespace(reason="asked for")
    need = SimpleNamespace(weights=2**20, draft_weights=0, caches=2**19)

    @property
    def shape(self) -> Any:
        """The sizes of the plan."""
        return SimpleNamespace(ctx=self.ctx, dtype="bfloat16", draft_max=4, slots=1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values = {
            "model": self.model,
            "spec": self.spec,
            "spec_reason": "asked for",
            "adaptive": self.adaptive,
        }
        values |= {
            "weight_bytes": 2**20,
            "draft_weight_bytes": 0,
            "cache_bytes": 2**19,
            "weights": "bfloat16",
        }
        values |= {"verify": self.config.verify, "device": self.device}
        values |= {"kernels_reason": self.kernels_reason, "synthetic_acceptance": None}
        return {**values, **vars(self.shape)}


@dataclass
class Script:
    """The text of the fake engine, one string per event (None: a step without one), and its engines."""

    pieces: Sequence[str | None] = ("Hello", " wörld", "!")
    finish: str = "stop"
    ctx: int | None = None
    fail: BaseException | None = None
    tokenizer: bool = True
    on_step: Callable[[int], None] | None = None
    on_load: Callable[[Any], None] | None = None
    load_ms: float = 0.0
    ids: tuple[int, int] | None = None
    """The token ids of every event; None: ids that go up."""
    captures: int = 0
    """How many rounds there are to be captured before they are run."""
    draft_fault: str = ""
    """Why the drafts of the requests did not help."""
    on_capture: Callable[[int], None] | None = None
    engines: list[FakeEngine] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        """The last engine that was built."""
        return self.engines[-1]

    @property
    def request(self) -> Request:
        """The last request that was added."""
        return self.engine.requests[-1]


class FakeEngine:
    """Emits its script, one piece per step, each counted as one accepted draft and one more token."""

    def __init__(self, config: Any, script: Script, progress: Any = None) -> None:
        self.config = config
        self.script = script
        self.load_ms = script.load_ms
        if script.on_load:
            script.on_load(progress)
        self.plan = FakePlan(script.ctx or config.ctx or 128, config=config)
        self.info = EngineInfo.from_json(self.plan.as_dict())
        self.tokenizer = ModelFolder.from_path(config.model).tokenizer if script.tokenizer else None
        self.has_tokenizer = self.tokenizer is not None
        self.requests: list[Request] = []
        self.trace: Callable[[RoundRecord], None] | None = None
        self.closed = self.aborted = False
        self._remaining_pieces: list[str | None] = []
        self._steps = 0
        self._metrics = RequestMetrics(load_ms=script.load_ms, prompt_ms=10.0, first_token_ms=12.0)
        self.captured: list[tuple[list[Any], dict[str, Any]]] = []
        """The parameters and options of each `capture_ahead`."""
        script.engines.append(self)

    def capture_ahead(self, params: Sequence[Any], **options: Any) -> int:
        self.captured.append((list(params), options))
        if self.script.on_capture:
            self.script.on_capture(len(self.captured))
        return int(len(self.captured) < self.script.captures)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._remaining_pieces = list(self.script.pieces)
        self.aborted = False
        self._metrics.prompt_tokens = len(request.prompt_ids)
        self._metrics.draft_fault = self.script.draft_fault

    @property
    def has_work(self) -> bool:
        return bool(self._remaining_pieces)

    def step(self) -> list[Event]:
        if not self.requests:
            return []
        name = self.requests[-1].id
        if self.aborted:
            self._remaining_pieces = []
            return [Event(name, (), "", "abort")]
        if self.script.on_step:
            self.script.on_step(self._steps)
        if self.script.fail is not None and self._steps == 1:
            raise self.script.fail
        self._steps += 1
        piece = self._remaining_pieces.pop(0)
        if piece is None:
            return []
        ids = self.script.ids or (self._steps, self._steps + 1)
        self._metrics.outcomes[4, 1] = self._metrics.outcomes.get((4, 1), 0) + 1
        self._metrics.draft_n_accepted_raw += 1
        self._metrics.completion_tokens += 2
        self._metrics.predicted_ms += 20.0
        self._metrics.first_tokens = 0
        if self.trace is not None:
            ms = {"draft": 1.0, "verify": 2.0, "rest": 0.5}
            self.trace(
                RoundRecord(
                    request="0",
                    round=self._steps,
                    position=9,
                    method="draft",
                    draft=[1],
                    sampled=[1, 2],
                    accepted=1,
                    committed=[1, 2],
                    ms=ms,
                    draft_forwards=4,
                    k=1,
                )
            )
        entries = tuple(TokenLogprob(i, -0.5, ((i, -0.5), (66, float("-inf")))) for i in ids)
        logprobs = () if self.requests[-1].params.logprobs is None else entries
        reason = None if self._remaining_pieces else self.script.finish
        return [Event(name, ids, piece, reason, drafted=(True, False), logprobs=logprobs)]

    def abort(self, request_id: str) -> None:
        self.aborted = True

    def metrics(self, request_id: str) -> RequestMetrics:
        return self._metrics

    def close(self) -> None:
        self.closed = True


def make_program(script: str, *, setup: str = "") -> str:
    """Return the code of a process that runs spd over a fake engine of `Script(script)`, after `setup`."""
    return f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import spd.errors, spd.runtime
from tests.cli.conftest import FakeEngine, Script
{setup}
vars(spd.runtime)["Engine"] = lambda config, progress=None: FakeEngine(config, Script({script}), progress)
from spd.__main__ import main
sys.exit(main())
"""


def read_saved_chat(folder: Path, name: str = "*") -> list[dict[str, Any]]:
    """Return the lines of the one saved chat of such a name; the first is its header."""
    (path,) = (folder / "state" / "spd" / "sessions").glob(f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replace the real engine, which is then never imported, by a fake one; return its script."""
    fake_script = Script()
    engine = lambda config, progress=None: FakeEngine(config, fake_script, progress)  # noqa: E731
    monkeypatch.setitem(vars(spd.runtime), "Engine", engine)
    return fake_script


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition of another thread or process holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass(frozen=True)
class RunResult:
    """The exit code and output of one run of the command line."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.out.decode()

    @property
    def facts(self) -> str:
        """Standard output as text, with the broken lines of facts joined."""
        return re.sub(r" ·\n +", " · ", self.text)

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as one JSON object, checked against the schema that it names."""
        loaded: dict[str, Any] = json.loads(self.out)
        assert faults_by_name(loaded) == []
        return loaded


class Stdin(io.TextIOWrapper):
    """Standard input of given bytes; None is a terminal."""

    def __init__(self, data: bytes | None) -> None:
        super().__init__(io.BytesIO(data or b""), encoding="utf-8")
        self._data = data

    def isatty(self) -> bool:
        return self._data is None


Run = Callable[..., RunResult]


def command_words(arguments: Iterable[object]) -> list[object]:
    """Return the words of a command line; an argument that is a list or a tuple holds several."""
    words: list[object] = []
    for argument in arguments:
        words.extend(argument if isinstance(argument, list | tuple) else [argument])
    return words


@pytest.fixture
def spd_run(monkeypatch, capfdbinary, tmp_path) -> Iterator[Run]:
    """Return a function that runs the command line in this process; without `stdin` it is a terminal.

    For example `spd_run("generate", "Hi", stdin=b"...")`; a list or a tuple stands for its words.
    """
    from spd.cli.app import main

    for name in ("SPD_MODEL", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "_SPD_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where logs of unexpected errors go
    saved = dict(os.environ)

    def run(*argv: object, stdin: bytes | None = None, closed: bool = False) -> RunResult:
        capfdbinary.readouterr()
        monkeypatch.setattr(sys, "stdin", None if closed else Stdin(stdin))
        code = main([str(word) for word in command_words(argv)])
        out, err = capfdbinary.readouterr()
        return RunResult(code, out, err.decode())

    yield run
    for name in set(os.environ) - set(saved):
        del os.environ[name]


@pytest.fixture
def ask(spd_run: Run, model: Path, script: Script) -> Run:
    """Return a function that runs `generate` with the prompt Hi over the fake engine."""
    return lambda *argv, **how: spd_run("generate", "-m", model, "Hi", command_words(argv), **how)


def assert_refused(ran: RunResult, code: int, *expected_texts: str) -> None:
    """Assert one well-formed refusal: status, empty stdout, an error line, a fix, and expected texts."""
    assert ran.code == code, ran
    assert ran.out == b""
    lines = ran.err.splitlines()
    assert lines[0].startswith("error: ") or lines[0].startswith("note: ")
    assert "Traceback" not in ran.err and "\x1b" not in ran.err
    assert any(line.startswith("  fix: ") for line in lines), ran.err
    for expected in expected_texts:
        assert expected in ran.err, (expected, ran.err)


def make_failing(error: BaseException, at: int | None = None) -> Callable[..., Any]:
    """Return a function that takes any arguments and raises the error: always, or at call number `at`."""
    calls = itertools.count()

    def fail(*_: object, **__: object) -> None:
        if at in (None, next(calls)):
            raise error

    return fail


@pytest.fixture
def random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines of `generate` and `verify` take random weights, so that config.json is a model."""
    from spd.cli import run_settings

    real_engine_config = run_settings.engine_config
    monkeypatch.setattr(
        run_settings,
        "engine_config",
        lambda *arguments: replace(real_engine_config(*arguments), load="dummy"),
    )
