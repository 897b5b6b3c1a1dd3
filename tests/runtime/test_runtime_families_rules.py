"""Every family under every rule: greedy texts are the plain ones, sampled ones follow the target's law.

The law is `transformers`': what it gives each next token of the texts that were drawn. Which bin a token is
in follows from what stands before it; so the bins' counts less what is expected of them are sums of
martingale differences, and a chi-square tests them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.runtime import SamplingParams
from tests.helpers import Damped, make_engine, random_prompts, run_all
from tests.recipes.tiny_dense import write_dense
from tests.runtime import seeded_faults as fault
from tests.runtime.seeded_faults import Mutation

Pairs = Callable[[str], tuple[Path, Path]]
DENSE = ("mistral", "qwen2", "phi3", "gemma2", "gemma3")
OTHERS = ("llama3", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "mimo", "ernie4_5_moe")
RULES = ("rejection", "block")
FALSE_ALARM = 1e-6
"""Chance that one chi-square below fails on a right program, for seeds taken at random; a case has two."""
TEMPERATURE = 1.2
RANKS, RATIOS = (1, 4, 16), (0.5, 1.0, 2.0)
"""Where a bin of a token's rank under the target ends, and of the draft's probability over the target's."""
PROMPTS = random_prompts(16, 40, 256, seed=2)
SAMPLED = [
    SamplingParams(temperature=TEMPERATURE, max_tokens=150, seed=70 + i, ignore_eos=True) for i in range(14)
]
FAVOURED = dict.fromkeys(range(12), 5.0)
"""Logit biases under n-gram lookup, which is hardly ever right about a random model's text."""
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
METHODS: dict[str, dict[str, Any]] = {
    "draft": {"spec": "draft", "draft_max": 3},
    "ngram": {"spec": "ngram", "ngram_min": 1, "draft_max": 3},
}

damped = Damped(loud=1, soft=0.5)


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """A family's target and its draft model, the target's first layers."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        options: dict[str, Any] = {"residual_gain": damped, "seed": 3}
        if family in OTHERS:
            return tiny(family, layers=3, **options), tiny(family, layers=2, **options)
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            target, draft = (
                write_dense(folder / str(layers), family, layers=layers, **options) for layers in (3, 2)
            )
            made[family] = target, draft
        return made[family]

    return get


def logits_by_transformers(folder: Path, elsewhere: Path, texts: list[list[int]]) -> list[Tensor]:
    """Logits [T, V] at every position of each text."""
    transformers = pytest.importorskip("transformers")
    if json.loads((folder / "config.json").read_text())["model_type"] == "mimo":  # which it does not know
        folder = Path(shutil.copytree(folder, elsewhere / folder.name))
        names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **names}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def surprise(laws: Tensor, bins: Tensor, drawn: Tensor) -> float:
    """Chi-square probability of tokens [T] by the bins [T, V] of all tokens, given their laws [T, V]."""
    each = torch.nn.functional.one_hot(bins).double()
    expected = (laws[..., None] * each).sum(1)[:, :-1]  # the last bin follows from the others
    seen = each[torch.arange(len(drawn)), drawn][:, :-1]
    assert float(expected.sum(0).min()) > 20, "a bin that is hardly ever expected"
    distance = (seen - expected).sum(0)
    spread = torch.diag(expected.sum(0)) - expected.T @ expected
    statistic, half = distance @ torch.linalg.solve(spread, distance), torch.tensor(expected.shape[-1] / 2.0)
    return float(torch.special.gammaincc(half.double(), statistic / 2))


def check_family(target: Path, draft: Path, elsewhere: Path, rule: str, method: str) -> None:
    """Run both kinds of requests side by side under a rule, and assert what each must be."""
    wishes = {**METHODS[method], "verify": rule, "slots": len(PROMPTS), "adaptive": None}
    if method == "draft":
        wishes["draft_model"] = draft
    bias = tuple(FAVOURED.items()) if method == "ngram" else ()
    sampled = [dataclasses.replace(params, logit_bias=bias) for params in SAMPLED]
    runs = run_all(make_engine(target, **wishes), PROMPTS, [*sampled, GREEDY, GREEDY])
    texts = [[*prompt, *run.tokens] for prompt, run in zip(PROMPTS, runs, strict=True)]
    by_target, by_draft = (logits_by_transformers(folder, elsewhere, texts) for folder in (target, draft))
    for prompt, run, logits in list(zip(PROMPTS, runs, by_target, strict=True))[len(SAMPLED) :]:
        assert run.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), "not the greedy text"

    def laws_of(found: list[Tensor]) -> Tensor:
        rows = torch.cat([one[len(p) - 1 : -1] for one, p, _ in zip(found, PROMPTS, SAMPLED, strict=False)])
        for token, value in bias:
            rows[:, token] += value
        return (rows.double() / TEMPERATURE).softmax(-1)

    laws, draft_laws = laws_of(by_target), laws_of(by_draft)
    drawn = torch.tensor([token for run in runs[: len(SAMPLED)] for token in run.tokens])
    ranks = laws.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    for values, ends in ((ranks, RANKS), (draft_laws / laws, RATIOS)):
        bins = torch.bucketize(values, torch.tensor(ends), right=True)
        assert surprise(laws, bins, drawn) > FALSE_ALARM, "the law differs"
    drafted, accepted = (
        sum(getattr(run.metrics, name) for run in runs) for name in ("draft_n", "draft_n_accepted")
    )
    assert drafted > 1000 and 50 < accepted < 0.9 * drafted


@pytest.mark.covers(count=3)
@pytest.mark.parametrize(
    ("family", "rule"), [(family, RULES[i % 2]) for i, family in enumerate(DENSE + OTHERS)]
)
def test_a_draft_model_under_a_rule(pair: Pairs, tmp_path: Path, family: str, rule: str) -> None:
    check_family(*pair(family), tmp_path, rule, "draft")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rule"), [(family, RULES[1 - i % 2]) for i, family in enumerate(DENSE + OTHERS)]
)
def test_a_draft_model_under_the_other_rule(pair: Pairs, tmp_path: Path, family: str, rule: str) -> None:
    check_family(*pair(family), tmp_path, rule, "draft")


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", DENSE + OTHERS)
def test_certain_drafts_under_a_rule(pair: Pairs, tmp_path: Path, family: str, rule: str) -> None:
    check_family(*pair(family), tmp_path, rule, "ngram")


MUTANTS: dict[str, tuple[Mutation, str, str]] = {
    "what is kept is sharper than what was drawn": (
        fault.operation("verify_drafts", lambda a: {"draft_probs": a.draft_probs.square()}),
        "block",
        "draft",
    ),
    "a certain draft is taken for one in four": (
        fault.operation("verify_drafts", lambda a: {"draft_probs": torch.full_like(a.target[:, 1:], 0.25)}),
        "rejection",
        "ngram",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fault_is_caught(
    pair: Pairs, tmp_path: Path, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation, rule, method = MUTANTS[mutant]
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=r"the law differs|not the greedy text"):
        check_family(*pair("gemma3"), tmp_path, rule, method)
