"""Probes: does speculation, batching, capturing or reading late change a token on this device.

Every request is generated without speculation, alone; then with every drafter, k, lag, number of slots,
eager and captured, and each text must equal the first one. At fixed k the counts of drafted and accepted
tokens must not depend on lag or capturing either: a race would spoil them and never the text. On the
demo acceptance is natural. Matrices as small as the demo's can hide a fault of the larger ones, so other
probes repeat it on the 0.35 B recipe, and on an 8B shape that drafts for itself: bit-equal rows make it
accept every draft.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.round_times import random_prompt
from benchmarks.gpu_suite.shapes import QWEN3_8B, write_folder
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NAMES = ("os.path.join", "json.dumps", "str.split", "list.append", "dict.get", "open", "re.match", "sorted")
SNIPPETS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "import os\nimport sys\nimport os\nimport sys\nimport os\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "for i in range(10):\n",
)
KINDS = {
    "greedy": SamplingParams(ignore_eos=True),
    "noise": SamplingParams(temperature=0.8, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, ignore_eos=True
    ),
}
RUNS = {"greedy": ("greedy",), "noise": ("noise",), "mixed": ("greedy", "noise", "filtered")}
"""Kinds of parameters that the requests of one run take in turn; mixed ones share every round."""


@dataclass(frozen=True)
class Setting:
    """One way to generate; "off" is plain decoding, None is the plan's choice, of requests and tokens all."""

    method: str
    k: int = 0
    lag: int | None = None
    graphs: bool | None = None
    slots: int = 1
    requests: int | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """A label for the report."""
        graphs = {None: "", True: "_captured", False: "_eager"}[self.graphs]
        return (
            self.method
            + (f"_k{self.k}" if self.k else "")
            + ("" if self.lag is None else f"_lag{self.lag}")
            + graphs
            + (f"_b{self.slots}" if self.slots > 1 else "")
            + ("" if self.tokens is None else f"_{self.tokens}t")
        )

    @property
    def counted_with(self) -> tuple[Any, ...]:
        """Settings that must draft and accept the same share this."""
        return self.method, self.k, self.tokens


PLAIN = Setting("off")
_SHORT: dict[str, Any] = {"requests": 6, "tokens": 48}
SETTINGS = (
    Setting("draft", 4, slots=16),
    Setting("off", slots=16),
    Setting("ngram", 4, slots=16),
    Setting("draft", 4, lag=0, slots=16),
    Setting("draft", 4, lag=2, slots=16),
    Setting("draft", 4, **_SHORT),
    Setting("draft", 4, graphs=False, **_SHORT),
    Setting("draft", 4, lag=0, graphs=False, slots=16, **_SHORT),
    Setting("ngram", 4, **_SHORT),
    Setting("ngram", 4, graphs=False, **_SHORT),
    Setting("off", graphs=False, **_SHORT),
    Setting("draft", 1, slots=16),
    Setting("draft", 7, slots=16),
    Setting("draft", 7, lag=2, slots=16),
    Setting("ngram", 4, lag=0, slots=16),
    Setting("ngram", 8, lag=2, slots=16),
    Setting("off", lag=2, slots=16),
    Setting("draft", 4, requests=8),
    Setting("ngram", 1, requests=8),
)
"""For a GPU; eager rounds take many times as long as captured ones, so they get few tokens."""


@dataclass(frozen=True)
class Job:
    """One request: the index of its prompt, and its kind of parameters."""

    prompt: int
    kind: str


@dataclass(frozen=True)
class Outcome:
    """What a request gave: its text, and what was drafted and accepted, in all and by position."""

    ids: tuple[int, ...]
    counts: tuple[Any, ...]
    rejected: int


def jobs_of(run: str, count: int) -> list[Job]:
    """The requests of one run over the first `count` prompts."""
    kinds = RUNS[run]
    return [Job(index, kinds[index % len(kinds)]) for index in range(count)]


def limit_of(job: Job, tokens: int) -> int:
    """Tokens that a request may have: ends that differ keep its neighbours changing."""
    return max(1, tokens - 3 * (job.prompt % 4))


def build_engine(folder: Path, draft: Path | None, device: str, setting: Setting, **rest: Any) -> Engine:
    """An engine at the setting's fixed k."""
    speculation: dict[str, Any] = {"spec": setting.method}
    if setting.method != "off":
        speculation |= {"draft_max": setting.k, "adaptive": False}
    if setting.method == "draft":
        speculation["draft_model"] = draft
    fixed = {"lag": setting.lag, "graphs": setting.graphs, "slots": setting.slots}
    return Engine(EngineConfig(model=folder, device=device, **fixed, **speculation, **rest))


def generate(
    engine: Engine, jobs: Sequence[Job], prompts: Sequence[Sequence[int]], tokens: int
) -> dict[Job, Outcome]:
    """Run the jobs, all handed over at once; those beyond the slots are admitted as others end."""
    requests = {}
    for job in jobs:
        limit = limit_of(job, tokens)
        params = replace(KINDS[job.kind], max_tokens=limit, seed=7 + job.prompt)
        requests[job] = Request(f"{job.prompt} {job.kind}", tuple(prompts[job.prompt]), params)
    texts: dict[str, list[int]] = {request.id: [] for request in requests.values()}
    for event in engine.stream(requests.values()):
        texts[event.request_id] += event.token_ids
    found = {}
    for job, request in requests.items():
        m = engine.metrics(request.id)
        counts = (m.rounds, m.draft_n, m.draft_n_accepted_raw, tuple(m.accepted_per_position))
        found[job] = Outcome(tuple(texts[request.id]), counts, m.draft_n - m.draft_n_accepted_raw)
    return found


def differing_tokens(text: Sequence[int], other: Sequence[int]) -> int:
    """Count the positions at which two texts differ, those that only one has included."""
    return sum(a != b for a, b in zip(text, other, strict=False)) + abs(len(text) - len(other))


@dataclass
class Comparison:
    """What all settings are held against, and what came of it."""

    folder: Path
    draft: Path | None
    prompts: Sequence[Sequence[int]]
    tokens: int
    device: str
    runs: Sequence[str]
    config: dict[str, Any]

    def __post_init__(self) -> None:
        self.texts: dict[Job, Outcome] = {}
        self.counts: dict[tuple[Any, ...], dict[Job, Outcome]] = {}
        self.report: dict[str, Any] = {
            "acceptance": "natural",
            "compared_tokens": 0,
            "differing_tokens": 0,
            "differing_counts": 0,
            "settings": {},
        }

    def take_reference(self, setting: Setting) -> None:
        """Generate every request that any run will ask for."""
        wanted = {job: None for run in self.runs for job in jobs_of(run, len(self.prompts))}
        engine = build_engine(self.folder, self.draft, self.device, setting, **self.config)
        try:
            self.texts = generate(engine, list(wanted), self.prompts, self.tokens)
        finally:
            engine.close()

    def hold(self, setting: Setting) -> dict[str, Any]:
        """Generate every run in one setting and count what differs; adds to the report's sums."""
        free_memory()
        engine = build_engine(self.folder, self.draft, self.device, setting, **self.config)
        row = {"tokens": 0, "differing_tokens": 0, "requests": 0, "other_counts": 0, "rejected": 0}
        began, seconds, rounds = time.perf_counter(), 0.0, 0
        try:
            for run in self.runs:
                jobs = jobs_of(run, min(setting.requests or 2**30, len(self.prompts)))
                began = time.perf_counter()
                tokens = setting.tokens or self.tokens
                outcomes = generate(engine, jobs, self.prompts, tokens)
                seconds += time.perf_counter() - began
                first = self.counts.setdefault((*setting.counted_with, run), outcomes)
                for job, outcome in outcomes.items():
                    wanted = self.texts[job].ids[: limit_of(job, tokens)]
                    row["tokens"] += len(outcome.ids)
                    row["requests"] += 1
                    row["differing_tokens"] += differing_tokens(outcome.ids, wanted)
                    row["other_counts"] += job in first and first[job].counts != outcome.counts
                    row["rejected"] += outcome.rejected
                    rounds += outcome.counts[0]
        finally:
            engine.close()
        self.report["compared_tokens"] += row["tokens"]
        self.report["differing_tokens"] += row["differing_tokens"]
        self.report["differing_counts"] += row["other_counts"]
        return {
            **row,
            "tokens_per_second": row["tokens"] / seconds,
            "acceptance_length": row["tokens"] / rounds,
        }


def compare(
    folder: Path,
    draft: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    device: str = "cuda",
    settings: Sequence[Setting] = SETTINGS,
    reference: Setting = PLAIN,
    runs: Sequence[str] = tuple(RUNS),
    **config: Any,
) -> Iterator[dict[str, Any]]:
    """Hold every setting against the reference; yields the report after each. Speeds include admission."""
    comparison = Comparison(folder, draft, prompts, tokens, device, runs, config)
    comparison.take_reference(reference)
    for setting in settings:
        try:
            row = comparison.hold(setting)
        except Exception as error:  # one setting's fault must not hide the others'
            row = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        comparison.report["settings"][setting.name] = row
        yield comparison.report


def demo_prompts() -> list[list[int]]:
    """24 prompts of a few to several hundred tokens, two of them longer than a chunk of a prompt."""
    tokenizer = Tokenizer.open(demo_folder())
    texts = [QUESTION.format(f"What does {name} do?") for name in NAMES]
    texts += [QUESTION.format(f"Write an example of {name}.") for name in NAMES]
    texts += SNIPPETS + tuple(snippet * 2 for snippet in SNIPPETS[:2])
    texts += [SNIPPETS[0] * 25, SNIPPETS[2] * 25]
    return [tokenizer.encode(text, parse_special=True) for text in texts]


def run() -> Iterator[dict[str, Any]]:
    """Compare on the demo that ships with spd."""
    yield from compare(demo_folder(), demo_draft_folder(), demo_prompts(), tokens=192)


def run_medium() -> Iterator[dict[str, Any]]:
    """Compare on the 0.35 B recipe, written to a temporary folder."""
    from tests.recipes.medium import write_medium, write_medium_draft

    with tempfile.TemporaryDirectory() as place:
        folder = write_medium(Path(place) / "medium")
        draft = write_medium_draft(Path(place) / "draft", folder)
        prompts = [[300 + (37 * seed + 101 * i) % 7000 for i in range(40)] for seed in range(16)]
        yield from compare(folder, draft, prompts, tokens=128)


def run_self_draft() -> Iterator[dict[str, Any]]:
    """The 8B shape as its own drafter: equal random weights, so nothing may be rejected."""
    settings = (Setting("draft", 4, slots=16), Setting("off", requests=2), Setting("draft", 7, slots=16))
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(QWEN3_8B, Path(place))
        prompts = [random_prompt(40 + 20 * seed, QWEN3_8B.vocab, seed) for seed in range(16)]
        for report in compare(
            folder,
            folder,
            prompts,
            tokens=192,
            settings=settings,
            reference=Setting("off", slots=16),
            runs=("greedy", "noise"),
            load="dummy",
            ctx=640,
        ):
            yield {**report, "acceptance": "every draft must be accepted"}
