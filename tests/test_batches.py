"""Combinations of batch, lag, proposer, temperature, feature, pressure and prefix equal solo runs.

On a tiny model a pairwise covering array is run, with another feature in each request of a batch;
in the slow lane every combination on the demo. For a mixture with aborts, over hours, see
`benchmarks.soak`.
"""

import functools
import gc
import itertools
import json
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spd.formats.demo import demo_draft_folder, demo_eagle3_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.plan.memory import pages_per_slot
from tests.helpers import (
    PROPOSER_OPTIONS,
    Prompt,
    Run,
    collect_drafts,
    count_accepted,
    make_engine,
    random_prompts,
    run_requests,
)
from tests.lanes import covering
from tests.page_checks import check_pages
from tests.recipes.demo_corpus import question_answers
from tests.recipes.tiny import VARIANTS, write_tiny
from tests.recipes.tiny_block import write_tiny_block
from tests.recipes.tiny_eagle3 import write_tiny_eagle3
from tests.recipes.tiny_mtp import soft_gain, write_tiny_mtp
from tests.test_demo import ask

SCHEMA = {
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "type": "object",
    "required": ["a", "b"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logit bias": {"logit_bias": ((5, 40.0), (9, -100.0), (40, 40.0))},
    "min-p": {"min_p": 0.05},
    "top-p": {"top_p": 0.8, "top_k": 40},
    "logprobs": {"logprobs": 3},
    "stop strings": {"stop": ("e", "th"), "min_tokens": 4},
    "schema": {"grammar": GrammarSpec("schema", json.dumps(SCHEMA))},
    "regex": {"grammar": GrammarSpec("regex", "[a-z ]{3,30}[.]")},
}
FACTORS: dict[str, Sequence[Any]] = {
    "size": (1, 2, 8, 32),
    "lag": (0, 1, 2),
    "method": ("off", *PROPOSER_OPTIONS),
    "temperature": (0.0, 1.0),
    "pressure": (False, True),
    "prefix": ("hit", "miss"),
}
Case = dict[str, Any]
KINDS = 7  # Different requests; larger batches repeat them.


def combined(factors: dict[str, Sequence[Any]]) -> list[Case]:
    return [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]


@functools.cache
def pairwise(*sizes: int) -> list[Case]:
    """Return few combinations in which every two values of two factors meet, and batches of features."""
    cases = combined({**FACTORS, "size": sizes})
    names = tuple(FEATURES)
    keys: list[dict[str, Hashable]] = [dict(case) for case in cases]
    chosen = [cases[i] for i in covering(keys, 2)]
    return [
        {**case, "features": [names[(n + i) % 8] for i in range(8)]}
        for n, case in enumerate(chosen)
    ]


class Bench:
    """One model's solo runs, and batches of the same requests in any combination."""

    def __init__(
        self,
        target: Path,
        drafts: dict[str, Path],
        prompts: list[Prompt],
        tokens: int,
        **options: Any,
    ) -> None:
        """drafts: the folders of what drafts, by method."""
        self.target = target
        self.drafts = drafts
        self.prompts = prompts
        self.tokens = tokens
        self.options = options
        self.solo_engine = make_engine(target, prefix_sharing=False, **options)
        self.solo_runs: dict[tuple[Any, ...], Run] = {}
        self.at_lag_zero: dict[str, list[Any]] = {}
        self.small_pool = -(
            -options["ctx"] // 64
        )  # Pages under pressure: by default those of one request.
        self.parity = 32  # Batches up to this size are run at lag 0 too, for their drafts.

    def requests(self, case: Case) -> list[Request]:
        requests = []
        for i in range(case["size"]):
            feature = dict(FEATURES[case["features"][i % len(case["features"])]])
            grammar = feature.pop("grammar", None)
            defaults = {
                "max_tokens": self.tokens,
                "seed": i % KINDS,
                "temperature": case["temperature"],
            }
            params = SamplingParams(**{**defaults, **feature})
            requests.append(Request(f"{i}", self.prompts[i % KINDS], params, grammar=grammar))
        return requests

    def solo(self, request: Request) -> Run:
        key = (request.prompt_ids, request.params, request.grammar)
        if key not in self.solo_runs:
            self.solo_runs[key] = run_requests(self.solo_engine, [request])[0]
        return self.solo_runs[key]

    def engine(self, case: Case, lag: int) -> Engine:
        options: dict[str, Any] = {
            **self.options,
            **PROPOSER_OPTIONS.get(case["method"], {}),
            "slots": case["size"],
        }
        if case["method"] in self.drafts:
            options["draft_model"] = self.drafts[case["method"]]
        if case["pressure"]:
            options["cache_pages"] = self.small_pool
        elif case["prefix"] == "hit":  # room for what was kept, beside whole blocks for all who run
            options["cache_pages"] = pages_per_slot(self.options["ctx"]) * (case["size"] + KINDS)
        return make_engine(self.target, lag=lag, prefix_sharing=case["prefix"] == "hit", **options)

    def run(self, case: Case, lag: int) -> list[Run]:
        engine = self.engine(case, lag)
        requests = self.requests(case)
        if case["prefix"] == "hit":
            warm = SamplingParams(max_tokens=1)
            engine.generate(
                [Request(f"w{i}", prompt, warm) for i, prompt in enumerate(self.prompts)]
            )
        runs = run_requests(engine, requests)
        if case["prefix"] == "hit" and not case["pressure"]:
            long = [run for run in runs if run.metrics.prompt_tokens > 65]
            assert long and all(run.metrics.cached_tokens >= 64 for run in long)
        check_pages(engine.scheduler)
        assert engine.page_table.num_available == engine.plan.shape.num_pages - 2
        del engine
        gc.collect()  # a large checkpoint's engines would wait for it together
        return runs

    def check(self, case: Case) -> list[Run]:
        runs = self.run(case, case["lag"])
        for request, run in zip(self.requests(case), runs, strict=True):
            alone = self.solo(request)
            assert run.output == alone.output, case
            assert run.logprobs == pytest.approx(alone.logprobs, abs=1e-5), case
        if (
            case["lag"]
            and not case["pressure"]
            and case["method"] != "off"
            and case["size"] <= self.parity
        ):
            key = repr({**case, "lag": 0})
            if key not in self.at_lag_zero:
                self.at_lag_zero[key] = collect_drafts(self.run(case, 0))
            assert collect_drafts(runs) == self.at_lag_zero[key], case
        return runs


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    shelf = tmp_path_factory.mktemp("with_head")
    target = write_tiny_mtp(shelf / "target", kind="copy", layers=2, tie=False)
    draft = write_tiny(
        shelf / "draft", **{**VARIANTS["qwen3"], "layers": 1, "residual_gain": soft_gain}
    )
    head = write_tiny_eagle3(shelf / "head", target, kind="copy", draft_vocab=288, aux=(1, 2))
    block = write_tiny_block(shelf / "block", target, taps=(0,), block_size=5)
    lengths = (66, 50, 74, 51, 82, 52, 90)  # half of them grow into a second page
    prompts = [random_prompts(1, n, 256, seed=n)[0] for n in lengths]
    drafters = {"draft": draft, "eagle3": head, "block": block}
    shared_bench = Bench(target, drafters, prompts, 10, ctx=192, kernels="auto")
    shared_bench.parity = 2
    return shared_bench


@pytest.mark.parametrize(
    "sizes", [(1, 2, 8), pytest.param((1, 2, 8, 32), marks=pytest.mark.slow)], ids=str
)
def test_every_pair_equals_solo(bench: Bench, sizes: tuple[int, ...]) -> None:
    right = Counter[str]()
    interrupted = 0
    for case in pairwise(*sizes):
        runs = bench.check(case)
        right[case["method"]] += count_accepted(runs)
        interrupted += sum(run.metrics.preemptions for run in runs)
    assert min(right["draft"], right["mtp"]) > 20 and min(right["ngram"], right["eagle3"]) > 0, (
        right
    )
    assert interrupted > 3, "no request was interrupted"


def demo_prompts(count: int) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.open(demo_folder())
    prompts: list[tuple[int, ...]] = []
    names = [name for name, _ in question_answers()]
    for name in (names[i * 13 % len(names)] for i in range(count)):
        module, _, function = name.rpartition(".")
        code = f"import {module or 'os'}\n\n\ndef {function.lower()}(self, *args):\n    "
        prompts.append(ask(name) if len(prompts) % 2 else tuple(tokenizer.encode(code)))
    return prompts


def check_all(bench: Bench, cases: list[Case], request: pytest.FixtureRequest, name: str) -> None:
    """Check as many of the cases as --combinations says, the same ones in every run."""
    count = request.config.getoption("--combinations")
    chosen = random.Random(0).sample(cases, count) if 0 < count < len(cases) else cases
    tokens = sum(len(run.tokens) for case in chosen for run in bench.check(case))
    say = request.getfixturevalue("say")
    say(f"{name}: {len(chosen)} of {len(cases)} combinations, {tokens:,} tokens equal solo's")


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_every_combination_equals_solo_on_the_demo(
    feature: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    long = [
        tuple(itertools.islice(itertools.cycle(p), 70 + i))
        for i, p in enumerate(demo_prompts(KINDS))
    ]
    block = write_tiny_block(tmp_path / "block", demo_folder(), taps=(0,), block_size=5)
    drafters = {"draft": demo_draft_folder(), "eagle3": demo_eagle3_folder(), "block": block}
    bench = Bench(demo_folder(), drafters, long, 16, ctx=256)
    check_all(
        bench, [{**case, "features": [feature]} for case in combined(FACTORS)], request, feature
    )


@pytest.mark.slow
def test_pairs_equal_solo_on_the_0_35_b(medium: Path, request: pytest.FixtureRequest) -> None:
    """More than 32 rows a round: nine slots of four drafts, and 33 of any number."""
    prompts = [random_prompts(1, 66 + 9 * i, 8000, seed=i)[0] for i in range(KINDS)]
    bench = Bench(medium, {"draft": medium / "draft"}, prompts, 8, ctx=192)
    bench.parity = 9
    bench.small_pool = 9
    cases = [case for case in pairwise(9, 33) if case["method"] in ("off", "ngram", "draft")]
    check_all(bench, cases, request, "0.35 B")
