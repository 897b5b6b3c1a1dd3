"""MTP drafts against plain references, their caches after rejections, prefix hits and late catching
up.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spd.runtime import Engine, SamplingParams
from spd.runtime.models.decoder import Decoder, HeadModel
from spd.runtime.proposers.head import HeadProposer
from tests.helpers import (
    Patch,
    Run,
    Tiny,
    get_local_queue,
    make_engine,
    make_fast_engine,
    random_prompts,
    replace_operations,
    run_all,
)
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.mtp_reference import LibraryMtp, NemotronMtp, PlainDrafter, PlainMtp

VOCAB = 256
MIN_GAP = 1e-4
"""Logits that differ by less may change places between float32 and float64."""
HEADS: dict[str, dict[str, Any]] = {
    "deepseek": {"family": "deepseek"},
    "deepseek2": {"family": "deepseek", "modules": 2},
    "mimo": {"family": "mimo", "variant": "biases"},
    "mimo3": {"family": "mimo", "modules": 3},
    "ernie": {"family": "ernie", "variant": "llama2"},
    "mtp": {"family": "mtp"},
    "deepseek_v3": {"family": "deepseek", "variant": "deepseek_v3"},
    "deepseek_v3_2": {"family": "deepseek", "variant": "deepseek_v3_lite", "modules": 2},
    "glm4": {"family": "glm4", "variant": "glm4_moe"},
    "glm4_lite": {"family": "glm4", "variant": "glm4_moe_lite"},
    "mimo_v2": {"family": "mimo_v2", "variant": "mimo_v2", "modules": 2},
    "step3": {"family": "step3", "variant": "step3", "modules": 3},
    "nemotron_h": {"family": "nemotron_h", "variant": "nemotron_h_latent"},
}
BY_LIBRARY = ("deepseek_v3", "deepseek_v3_2", "glm4", "glm4_lite", "mimo_v2", "step3")
SHORT = {("deepseek", 1), ("mimo3", 4), ("ernie", 2), ("deepseek_v3", 3), ("glm4_lite", 2)}
SHORT |= {("mimo_v2", 3), ("step3", 2), ("nemotron_h", 3)}
Fault = Callable[[Engine, pytest.MonkeyPatch], None]
Runs = list[tuple[tuple[int, ...], Run]]
ALL_CASES = list(itertools.product(HEADS, (1, 2, 3, 4)))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Tiny targets with MTP heads, by name and kind, written once."""
    shelf = tmp_path_factory.mktemp("heads")

    def get(name: str, kind: str, **options: Any) -> Path:
        """Return the folder of a target with a head of a kind; write it the first time."""
        folder = shelf / f"{name}-{kind}{''.join(map(str, options.values()))}"
        if not folder.exists():
            write_tiny_mtp(folder, kind=kind, **{**HEADS[name], **options})
        return folder

    return get


def generate_texts(engine: Engine, count: int = 24) -> Runs:
    """Generate greedy texts of `count` tokens for five prompts."""
    prompts = [*random_prompts(2, 20, VOCAB), *random_prompts(1, 75, VOCAB, seed=1), (7,), (3, 9)]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _ in prompts]
    return list(zip(prompts, run_all(engine, prompts, params), strict=True))


def compare_drafts(plain: PlainDrafter, runs: Runs, max_rounds: int = 1000) -> tuple[int, int, int]:
    """Compare drafts with the reference's, in at most `max_rounds` rounds of each run.

    Returns the numbers of rounds with other drafts, of rounds compared, and of those after a
    rejection.
    """
    wrong = num_compared = rejected = 0
    for prompt, run in runs:
        tokens = [*prompt, *run.tokens]
        hidden = plain.hidden(tokens)
        pairs = [pair for pair in zip(run.rounds, run.rounds[1:], strict=False) if pair[1].draft]
        for previous, record in pairs[:: -(-len(pairs) // max_rounds) or 1]:
            drafts, gap = plain.draft(tokens[: record.position], len(record.draft), hidden)
            if gap > MIN_GAP:
                num_compared += 1
                rejected += previous.accepted < len(previous.draft)
                wrong += drafts != record.draft
    return wrong, num_compared, rejected


@pytest.mark.covers(count=5)
@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(name, k, marks=() if (name, k) in SHORT else pytest.mark.slow)
        for name, k in ALL_CASES
    ],
)
def test_drafts_are_the_reference_s(heads: Tiny, tmp_path: Path, name: str, k: int) -> None:
    family = HEADS[name]["family"]
    modules = HEADS[name].get("modules", 1)
    total = 0
    is_short = (name, k) in SHORT
    for kind in ("copy",) if is_short else ("random", "copy"):
        folder = heads(name, kind)
        plain: PlainDrafter
        if name == "nemotron_h":
            plain = NemotronMtp(folder, tmp_path / kind)
        else:
            by_library = name in BY_LIBRARY
            plain = (
                LibraryMtp(folder, family, modules, tmp_path / kind)
                if by_library
                else PlainMtp(folder, family, modules)
            )
        engine = make_engine(folder, spec="mtp", draft_max=k, kernels="torch" if k == 1 else "auto")
        wrong, num_compared, rejected = compare_drafts(
            plain, generate_texts(engine, 24 if is_short else 60), 6 if is_short else 1000
        )
        assert wrong == 0, (kind, wrong, num_compared)
        assert rejected > (5 if is_short else 20)
        total += num_compared
    assert total > (12 if is_short else 200)


def change_rules(**rules: Any) -> Fault:
    """Return a fault that changes rules of all modules."""

    def plant(engine: Engine, monkeypatch: Patch) -> None:
        for module in modules_of(engine):
            module.rules = replace(module.rules, **rules)

    return plant


def before_the_norm(engine: Engine, monkeypatch: Patch) -> None:
    """The target's states are captured before its final norm."""
    store = HeadProposer._store_stream
    scales = engine.round_queue.runner.model.final_norm

    def store_unnormed(self: HeadProposer, stream: int, states: Tensor, *operands: Any) -> Tensor:
        return store(self, stream, states / (1 if stream else scales), *operands)

    monkeypatch.setattr(HeadProposer, "_store_stream", store_unnormed)


def shifted(engine: Engine, monkeypatch: Patch) -> None:
    """A row's state is read in place of the one before it."""
    for module in modules_of(engine):
        head_input = module.kernels.head_input

        def later(*, batch: Any, **operands: Any) -> Any:
            positions = batch.positions + (batch.states.depth > 1)
            return head_input(batch=replace(batch, positions=positions), **operands)  # noqa: B023

        module.kernels = replace_operations(module.kernels, head_input=later)


def rotated_by_slots(engine: Engine, monkeypatch: Patch) -> None:
    """Later rows rotate further than the released heads were trained with."""
    for module in modules_of(engine):
        table = module.rotary
        table.cos, table.sin = table.cos[::2].contiguous(), table.sin[::2].contiguous()
        table.cos, table.sin = table.cos.repeat(2, 1), table.sin.repeat(2, 1)


def stale(engine: Engine, monkeypatch: Patch) -> None:
    """Entries made of recycled states stay in the cache: only the newest token is recomputed."""
    window = HeadProposer._committed_rows
    monkeypatch.setattr(
        HeadProposer, "_committed_rows", lambda self, _, ahead, slots: window(self, 1, ahead, slots)
    )


def modules_of(engine: Engine) -> list[HeadModel]:
    """Return the models of an engine's head."""
    proposer = get_local_queue(engine).proposer
    assert isinstance(proposer, HeadProposer) and isinstance(
        engine.round_queue.runner.model, Decoder
    )
    return [runner.model for runner in proposer.runners]  # type: ignore[misc]


FAULTS = {
    "the projection reads the state in place of the embedding": change_rules(hidden_first=True),
    "the embedding at position 0 is not masked": change_rules(masked_slot=-1),
    "a module's next state is the one before its final norm": change_rules(recycles_normed=False),
    **{fault.__name__: fault for fault in (before_the_norm, shifted, rotated_by_slots, stale)},
}


def generate_with_fault(target: Path, fault: Fault, monkeypatch: Patch, **options: Any) -> Runs:
    """Generate by an engine whose head has a fault; the text is the one without a drafter."""
    engine = make_fast_engine(target, draft_max=2, **options)
    fault(engine, monkeypatch)
    runs = generate_texts(engine, 16)
    plain = generate_texts(make_fast_engine(target), 16)
    assert [run.output for _, run in runs] == [run.output for _, run in plain], (
        "a drafter changed text"
    )
    return runs


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(heads: Tiny, monkeypatch: Patch, fault: str) -> None:
    folder = heads("deepseek", "random")
    runs = generate_with_fault(folder, FAULTS[fault], monkeypatch, spec="mtp")
    assert compare_drafts(PlainMtp(folder, "deepseek", 1), runs, max_rounds=8)[0] > 0
