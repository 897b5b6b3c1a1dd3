"""The device against the CPU, a model that drafts for itself, and memory that runs out."""

from __future__ import annotations

import pytest
import torch

from spd.errors import ResourceError
from spd.formats.demo import demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import SamplingParams
from tests.gpu.gpu_helpers import Work, demo_prompts, gpu_engine, method_options, run_work
from tests.helpers import collect_outputs, run_one

PROMPT = "def read_lines(path):"


def test_sixty_four_tokens_are_those_of_the_cpu() -> None:
    prompt = tuple(Tokenizer.open(demo_folder()).encode(PROMPT))
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    on_cpu = run_one(demo_folder(), prompt, params, device="cpu", dtype="float32", ctx=512)
    for graphs in (False, True):
        with gpu_engine(demo_folder(), dtype="float32", graphs=graphs) as engine:
            assert run_work(engine, [(prompt, params)])[0].tokens == on_cpu.tokens


@pytest.mark.parametrize(
    ("dtype", "k", "slots"),
    [
        ("bfloat16", 1, 1),
        ("bfloat16", 4, 1),
        ("bfloat16", 1, 4),
        ("bfloat16", 4, 4),
        ("float32", 4, 1),
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(dtype: str, k: int, slots: int) -> None:
    """Greedy and sampled, alone and side by side: the same rows in windows of other widths."""
    work: Work = [
        (prompt, SamplingParams(max_tokens=30, temperature=0.8 * (i % 2), seed=i, ignore_eos=True))
        for i, prompt in enumerate(demo_prompts())
    ]
    options = {"dtype": dtype, **method_options("draft", k, demo_folder())}
    with gpu_engine(demo_folder(), slots=slots, **options) as engine:
        for run in run_work(engine, work, 1):
            assert run.metrics.draft_n_accepted == run.metrics.draft_n > 0


def fill_memory() -> list[torch.Tensor]:
    """Take what this process may still have, in smaller and smaller pieces."""
    blocks: list[torch.Tensor] = []
    for size in (2**24, 2**20, 2**16, 2**9):
        try:
            while len(blocks) < 200_000:
                blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    return blocks


def test_memory_that_runs_out_is_a_refusal_and_not_the_end() -> None:
    prompts = demo_prompts()
    work: Work = [(prompts[4], SamplingParams(max_tokens=12, temperature=0.8, logprobs=2))]
    with gpu_engine(demo_folder(), dtype="bfloat16", slots=2) as engine:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
        blocks = fill_memory()
        try:
            with pytest.raises(ResourceError) as caught:
                run_work(engine, work, 1)
        finally:
            blocks.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert caught.value.code == "out_of_memory" and caught.value.exit_code == 5
        assert caught.value.fix
        engine.step()  # hands out the end of the request that broke off
        assert not engine.has_work
        again = run_work(engine, work, 1)
    with gpu_engine(demo_folder(), dtype="bfloat16", slots=2, graphs=False) as engine:
        assert collect_outputs(run_work(engine, work, 0)) == collect_outputs(again)
