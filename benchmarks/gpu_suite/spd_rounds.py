"""Probes: does speculation, batching, capturing or reading late change a token on this device.

Every request is generated without speculation; then with every drafter, k, lag, alone and among
others, eager and captured, and each text must equal the first one. At fixed k the counts of drafted
and accepted tokens must not depend on lag or capturing either: a race would spoil them and never
the text. On the demo acceptance is natural. Matrices as small as the demo's can hide a fault of the
larger ones, so other probes repeat it on the 0.35 B recipe, and on an 8B shape that drafts for
itself: bit-equal rows make it accept every draft.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_suite.graph_timer import free_memory
from benchmarks.gpu_suite.round_settings import DEMO, SELF_DRAFT, SELF_DRAFT_LONG, Setting
from benchmarks.gpu_suite.round_times import random_prompt
from benchmarks.gpu_suite.shapes import QWEN3_8B, Shape, write_folder
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What does {} do?", "Write an example of {}.", "How do I use {} in a loop?")
NAMES = (
    "os.path.join",
    "json.dumps",
    "str.split",
    "list.append",
    "dict.get",
    "open",
    "re.match",
    "sorted",
)
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
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        ignore_eos=True,
    ),
}
TOKENS = 192
RUNS = {"greedy": ("greedy",), "noise": ("noise",), "mixed": ("greedy", "noise", "filtered")}
"""Kinds of parameters that the requests of one run take in turn; mixed ones share every round."""


PLAIN = Setting("off")


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
    latencies: tuple[float, float] = (0.0, 0.0)
    """Milliseconds for a token after the first ones (TPOT), and from one emission to the next
    (ITL)."""


def jobs_of(run: str, count: int) -> list[Job]:
    """Return the requests of one run over the first `count` prompts."""
    kinds = RUNS[run]
    return [Job(index, kinds[index % len(kinds)]) for index in range(count)]


def limit_of(job: Job, tokens: int) -> int:
    """Return a request's token limit: different ends change the batch."""
    return max(1, tokens - 3 * (job.prompt % 4))


def build_engine(
    folder: Path, draft: Path | None, device: str, setting: Setting, **options: Any
) -> Engine:
    """Return an engine at the setting's fixed k."""
    speculation: dict[str, Any] = {"spec": setting.method}
    if setting.method != "off":
        speculation |= {"draft_max": setting.k, "adaptive": False}
    if setting.method == "draft":
        speculation["draft_model"] = draft
    fixed: dict[str, Any] = {"lag": setting.lag, "graphs": setting.graphs, "slots": setting.slots}
    return Engine(EngineConfig(model=folder, device=device, **fixed, **speculation, **options))


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
    outcomes = {}
    for job, request in requests.items():
        m = engine.metrics(request.id)
        counts = (m.rounds, m.draft_n, m.draft_n_accepted_raw, tuple(m.accepted_per_position))
        latencies = m.time_per_output_token_ms, m.inter_token_latency_ms
        rejected = m.draft_n - m.draft_n_accepted_raw
        outcomes[job] = Outcome(tuple(texts[request.id]), counts, rejected, latencies)
    return outcomes


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
        """Generate every request of all runs."""
        jobs = {job: None for run in self.runs for job in jobs_of(run, len(self.prompts))}
        engine = build_engine(self.folder, self.draft, self.device, setting, **self.config)
        try:
            self.texts = generate(engine, list(jobs), self.prompts, self.tokens)
        finally:
            engine.close()

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Generate every run in one setting and count differences.

        Add them to the report's sums.
        """
        free_memory()
        engine = build_engine(self.folder, self.draft, self.device, setting, **self.config)
        row = {"tokens": 0, "differing_tokens": 0, "requests": 0, "other_counts": 0, "rejected": 0}
        began = time.perf_counter()
        seconds = 0.0
        rounds = 0
        latencies: list[tuple[float, float]] = []
        try:
            for run in self.runs if setting.runs is None else setting.runs:
                jobs = jobs_of(run, min(setting.requests or 2**30, len(self.prompts)))
                began = time.perf_counter()
                tokens = setting.tokens or self.tokens
                outcomes = generate(engine, jobs, self.prompts, tokens)
                seconds += time.perf_counter() - began
                first = self.counts.setdefault((*setting.counted_with, run), outcomes)
                for job, outcome in outcomes.items():
                    expected = self.texts[job].ids[: limit_of(job, tokens)]
                    row["tokens"] += len(outcome.ids)
                    row["requests"] += 1
                    row["differing_tokens"] += differing_tokens(outcome.ids, expected)
                    row["other_counts"] += job in first and first[job].counts != outcome.counts
                    row["rejected"] += outcome.rejected
                    rounds += outcome.counts[0]
                    latencies.append(outcome.latencies)
        finally:
            engine.close()
        self.report["compared_tokens"] += row["tokens"]
        self.report["differing_tokens"] += row["differing_tokens"]
        self.report["differing_counts"] += row["other_counts"]
        return {
            **row,
            "tokens_per_second": row["tokens"] / seconds,
            "acceptance_length": row["tokens"] / rounds,
            "tpot_ms": median(latency for latency, _ in latencies),
            "itl_ms": median(latency for _, latency in latencies),
        }


def compare(
    folder: Path,
    draft: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    device: str = "cuda",
    settings: Sequence[Setting] = DEMO,
    reference: Setting = PLAIN,
    runs: Sequence[str] = tuple(RUNS),
    **config: Any,
) -> Iterator[dict[str, Any]]:
    """Compare every setting with the reference.

    Yield the report after each. Speeds include admission.
    """
    comparison = Comparison(
        folder=folder,
        draft=draft,
        prompts=prompts,
        tokens=tokens,
        device=device,
        runs=runs,
        config=config,
    )
    comparison.take_reference(reference)
    for setting in settings:
        try:
            row = comparison.measure(setting)
        except Exception as error:  # one setting's fault must not hide the others'
            row = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        comparison.report["settings"][setting.name] = row
        yield comparison.report


def assert_complete(settings: Mapping[str, Mapping[str, Any]], all_accepted: bool = False) -> None:
    """Raise AssertionError where a setting raised: it has no token that could differ.

    With `all_accepted` also where one rejected a draft of the model's own.
    """
    bad = [name for name, row in settings.items() if "error" in row]
    if all_accepted:
        bad += [
            name
            for name, row in settings.items()
            if name.startswith("draft") and row.get("rejected")
        ]
    if bad:
        raise AssertionError(f"failed, or rejected what it must not: {', '.join(bad)}")


def complete(
    reports: Iterator[dict[str, Any]], all_accepted: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the reports, then `assert_complete` of the last."""
    report: dict[str, Any] = {"settings": {}}
    for report in reports:
        yield report
    assert_complete(report["settings"], all_accepted)


def demo_prompts() -> list[list[int]]:
    """Return 32 prompts of a few to several hundred tokens, two of them longer than a prompt
    chunk."""
    tokenizer = Tokenizer.open(demo_folder())
    texts = [QUESTION.format(words.format(name)) for words in QUESTIONS for name in NAMES]
    texts += SNIPPETS + tuple(snippet * 2 for snippet in SNIPPETS[:2])
    texts += [SNIPPETS[0] * 25, SNIPPETS[2] * 25]
    return [tokenizer.encode(text, parse_special=True) for text in texts]


def run() -> Iterator[dict[str, Any]]:
    """Compare on the demo that ships with spd."""
    reference = Setting("off", slots=16)
    yield from complete(
        compare(
            demo_folder(), demo_draft_folder(), demo_prompts(), tokens=TOKENS, reference=reference
        )
    )


def run_medium() -> Iterator[dict[str, Any]]:
    """Compare on the 0.35 B recipe, which has no heads, written to a temporary folder."""
    from tests.recipes.medium import write_medium, write_medium_draft

    settings = [setting for setting in DEMO if setting.method not in ("mtp", "eagle3")]
    with tempfile.TemporaryDirectory() as place:
        folder = write_medium(Path(place) / "medium")
        draft = write_medium_draft(Path(place) / "draft", folder)
        prompts = [[300 + (37 * seed + 101 * i) % 7000 for i in range(40)] for seed in range(16)]
        yield from complete(compare(folder, draft, prompts, tokens=128, settings=settings))


def run_self_draft(
    settings: Sequence[Setting] = SELF_DRAFT,
    tokens: int = 128,
    shape: Shape = QWEN3_8B,
    **config: Any,
) -> Iterator[dict[str, Any]]:
    """Compare on an 8B shape that drafts for itself: with equal weights no draft may be
    rejected."""
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(shape, Path(place))
        prompts = [random_prompt(40 + 20 * seed, shape.vocab, seed) for seed in range(16)]
        reports = compare(
            folder,
            folder,
            prompts,
            tokens=tokens,
            settings=settings,
            reference=Setting("off", slots=16),
            runs=("greedy", "noise"),
            load="dummy",
            ctx=384 + tokens,
            **config,
        )
        for report in complete(reports, all_accepted=True):
            yield {**report, "acceptance": "every draft of its own must be accepted"}


def run_self_draft_long() -> Iterator[dict[str, Any]]:
    """Run `run_self_draft` with more k, lags and tokens."""
    yield from run_self_draft(SELF_DRAFT_LONG, tokens=320)
