"""Texts by Triton's kernels, in its interpreter, against torch's: tokens, drafts and acceptance."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spd import kernels
from spd.errors import ResourceError
from spd.kernels.capabilities import CAPABILITIES
from spd.kernels.linear.skinny_config import LinearConfig, config_for
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.layers import skinny_linear
from spd.runtime.plan import memory
from spd.runtime.proposers.base import ModelProposer
from spd.runtime.round.round import Round
from tests import helpers
from tests.helpers import (
    INTERPRETER_MARKS,
    Patch,
    Tiny,
    collect_drafts,
    collect_outputs,
    count_accepted,
    count_drafted,
    random_prompts,
)
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny import write_tiny
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_block import write_tiny_block
from tests.recipes.tiny_dense import write_dense
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_gguf import write_tiny_gguf
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.host_watch import HostWatch

Methods = dict[str, dict[str, Any]]
skinny_linear_triton = pytest.importorskip("spd.kernels.linear.skinny_linear_triton")
pytestmark = [*INTERPRETER_MARKS, pytest.mark.usefixtures("untried")]
SHAPE: dict[str, Any] = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 48,
}
SHAPE |= {"vocab": 97, "tokenizer": False, "seed": 5}
damped_gain = helpers.DampedLayers(full_layers=1, damped_gain=0.15)
# Tests of this file and kernels, in this process.
TESTS_RUN = set[str]()
KERNELS_LAUNCHED = set[tuple[str, str]]()
PROMPT = random_prompts(1, 14, 97, seed=2)
SLOW = pytest.mark.slow
LONG = [pytest.param(method, 16, marks=SLOW) for method in ("off", "ngram", "draft", "draft+ngram")]
Made = tuple[Path, dict[str, Any]]  # A target, and what asks for drafts for it.
LATENT: dict[str, Any] = {"family": "deepseek", "variant": "deepseek_v3", **SHAPE, "kv_heads": 4}
MAMBA: dict[str, Any] = {
    name: SHAPE[name] for name in ("vocab", "tokenizer", "seed", "intermediate")
}
MAMBA["config"] = {"shared_intermediate_size": 48, "layer_types": ["mamba", "attention"]}
NORMED_HEAD = {"fc_norm": True, "norm_output": True, "own_embedding": True}
EAGLE3_HEADS: dict[str, dict[str, Any]] = {
    "few": {"aux": (0, 1), "layout": "speculators", "draft_vocab": 40, "kind": "random"},
    "some": {"aux": (1, 3), "draft_vocab": 80},
    "all": {"aux": (0, 2), "layout": "speculators", "draft_vocab": None, **NORMED_HEAD},
}


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Path:
    return tiny("qwen3", layers=2, residual_gain=damped_gain, **SHAPE)


@pytest.fixture(scope="module")
def methods(tiny: Tiny) -> Methods:
    """Return the options of every proposer, by name."""
    draft = {
        "draft_model": tiny("qwen3", layers=1, residual_gain=damped_gain, **SHAPE),
        "draft_max": 3,
    }
    spec_options: Methods = {
        "off": {},
        "ngram": {"ngram_min": 1, "draft_max": 3, "pool_tokens": 256},
        "draft": draft,
        "draft+ngram": {**draft, "ngram_min": 1},
    }
    return {spec: {"spec": spec, **options} for spec, options in spec_options.items()}


@pytest.fixture(autouse=True)
def _counted(monkeypatch: Patch, request: pytest.FixtureRequest) -> None:
    """Record tests and kernels that run; use small chunks and a GPU of one processor, for speed."""
    from triton.runtime.interpreter import InterpretedFunction

    TESTS_RUN.add(request.node.name)
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        KERNELS_LAUNCHED.add((self.fn.__module__, self.fn.__name__))
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    small = {name: facts._replace(chunk=16) for name, facts in CAPABILITIES.items()}
    monkeypatch.setattr(memory, "CAPABILITIES", small)
    helpers.limit_programs(monkeypatch)


@pytest.fixture(autouse=True)
def no_host_reads(monkeypatch: Patch) -> HostWatch:
    """Let every round of Triton's kernels fail where the host would wait."""
    watch = HostWatch("triton")
    watch.install(monkeypatch)
    return watch


def run_both(
    target: Path, prompts: list[helpers.Prompt], params: list[SamplingParams], **options: Any
) -> Any:
    """Return the runs by torch's and by Triton's kernels, whose outputs and drafts are equal."""
    options = {"ctx": 128, "device": "cpu", **options}
    engines = (helpers.make_engine(target, kernels=form, **options) for form in ("torch", "triton"))
    first, second = (helpers.run_all(engine, prompts, params) for engine in engines)
    assert collect_outputs(second) == collect_outputs(first) and collect_drafts(
        second
    ) == collect_drafts(first)
    return first, second


def greedy_and_drawn(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=count, temperature=temperature, seed=3)
        for temperature in (0.0, 0.8)
    ]


@pytest.mark.parametrize(("method", "count"), [("draft", 4), *LONG])
def test_every_method_gives_the_same_text_by_both_forms(
    target: Path, methods: Methods, no_host_reads: Any, method: str, count: int
) -> None:
    """Greedy and sampled requests run together, almost as fast as one of them."""
    first, _ = run_both(target, PROMPT * 2, greedy_and_drawn(count), slots=2, **methods[method])
    assert all(len(run.tokens) == count for run in first) and first[0].tokens != first[1].tokens
    assert no_host_reads.rounds > 1
    assert method != "draft" or 0 < count_accepted(first) < count_drafted(first)


@pytest.mark.parametrize(
    ("method", "rule", "count"),
    [
        pytest.param("ngram", "rejection", 4, marks=SLOW),
        ("draft+ngram", "block", 4),
        pytest.param("draft", "block", 5, marks=SLOW),
        pytest.param("ngram", "block", 16, marks=SLOW),
        pytest.param("draft", "rejection", 16, marks=SLOW),
    ],
)
def test_rules_that_test_a_draft_are_the_same_by_both_forms(
    target: Path, methods: Methods, method: str, rule: str, count: int
) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.9, seed=4, presence_penalty=0.2)]
    assert count_drafted(run_both(target, PROMPT, params, verify=rule, **methods[method])[0])


def test_every_step_of_sampling_is_the_same_by_both_forms(target: Path, methods: Methods) -> None:
    """Two slots with truncation, penalties, a bias, a minimum length, stops and log-probabilities."""
    stops = {"min_tokens": 3, "stop_token_ids": (5, 7, 11), "logit_bias": ((5, 3.0), (6, -50.0))}
    params = [
        SamplingParams(
            max_tokens=4, temperature=0.9, top_p=0.8, top_k=40, min_p=0.01, frequency_penalty=0.3
        ),
        SamplingParams(max_tokens=4, repetition_penalty=1.3, logprobs=2, **stops),  # type: ignore[arg-type]
    ]
    prompts = [PROMPT[0], random_prompts(1, 5, 97)[0]]
    first, second = run_both(target, prompts, params, slots=2, lag=1, **methods["draft"])
    assert len(second[1].logprobs) == len(second[1].tokens) >= 3
    assert second[1].logprobs == pytest.approx(first[1].logprobs, abs=1e-4)


def make_dense(folder: Path, family: str, **options: Any) -> Made:
    target = write_dense(folder, family, **{"layers": 2, "residual_gain": damped_gain, **options})
    return target, {"spec": "draft", "draft_model": target}


def make_mtp(folder: Path, **options: Any) -> Made:
    return write_tiny_mtp(folder, kind="copy", layers=2, **options), {"spec": "mtp"}


def make_hybrid(folder: Path) -> Made:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 16,
    }
    return write_tiny_hybrid(folder, mtp=True, agreeing=True, **sizes), {"spec": "mtp"}


def make_assisted(folder: Path) -> Made:
    """Write a target and its assistant."""
    target = write_dense(folder / "target", "gemma4", vocab=100, tokenizer=False)
    assistant = write_assistant(folder / "assistant", target, clusters=4, selected=3)
    return target, {"spec": "assistant", "draft_model": assistant}


def make_int8(folder: Path) -> Made:
    target = write_tiny(
        folder, architecture="Qwen3ForCausalLM", layers=2, residual_gain=damped_gain, **SHAPE
    )
    return target, {"spec": "draft", "draft_model": target, "quantize": "int8"}


def make_fp8_blocks(folder: Path) -> Made:
    target, options = make_mtp(folder / "plain", **LATENT)
    return write_twin(target, folder / "twin", ue8m0=True), options


def in_eight_bits(made: Made) -> Made:
    """Return a target and options with a cache in eight bits."""
    target, options = made
    return target, {**options, "kv": "int8"}


NEWER = ("gpt_oss", "gemma4_moe", "mimo_v2", "step3", "nemotron_h_moe", "nemotron_h_latent")
FAMILIES: dict[str, tuple[Callable[[Path], Made], int, int]] = {
    # What makes it, and how long prompt and text are; the former are longer than a chunk, and than a window.
    "windows and caps": (lambda folder: make_dense(folder, "gemma2", **SHAPE), 34, 3),
    "two modules": (lambda folder: make_mtp(folder, family="mimo", modules=2, **SHAPE), 18, 4),
    "latents, experts and a head": (lambda folder: make_mtp(folder, **LATENT), 18, 4),
    "recurrent layers and a head": (make_hybrid, 18, 6),
    "Mamba layers": (lambda folder: make_dense(folder, "granite_hybrid", **MAMBA), 18, 3),
    "short convolutions": (
        lambda folder: make_dense(
            folder, "lfm2", **SHAPE | {"layers": 3, "config": {"block_ff_dim": 72}}
        ),
        18,
        3,
    ),
    "int8": (make_int8, 18, 4),
    "FP8 in blocks": (make_fp8_blocks, 18, 4),
    "windows and caps in eight bits": (
        lambda folder: in_eight_bits(make_dense(folder, "gemma2", **SHAPE)),
        34,
        3,
    ),
    "latents and a head in eight bits": (
        lambda folder: in_eight_bits(make_mtp(folder, **LATENT)),
        18,
        4,
    ),
    "sinks in eight bits": (
        lambda folder: in_eight_bits(
            make_dense(folder, "gpt_oss", layers=4, vocab=97, tokenizer=False)
        ),
        34,
        3,
    ),
    "an assistant": (make_assisted, 34, 4),
    **{
        name: (
            partial(
                make_dense,
                family=name,
                layers=2 if name == "gpt_oss" else 4,
                vocab=97,
                tokenizer=False,
            ),
            34,
            3,
        )
        for name in NEWER
    },
}
SLOW_FAMILIES = (
    "windows and caps",
    "two modules",
    "Mamba layers",
    "int8",
    "latents and a head in eight bits",
    "sinks in eight bits",
    "FP8 in blocks",
    "an assistant",
    "short convolutions",
    *NEWER,
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n in SLOW_FAMILIES else ()) for n in FAMILIES]
)
def test_every_kind_of_layer_and_weight_is_the_same_by_both_forms(
    tmp_path: Path, name: str
) -> None:
    """A chunk of a prompt and its remainder, then rounds with drafts, which a repeated prompt
    gives.
    """
    make, length, count = FAMILIES[name]
    target, options = make(tmp_path / "model")
    prompt = [(random_prompts(1, length, 97, seed=length)[0] * 2)[3 : length + 3]]
    params = [SamplingParams(max_tokens=count, temperature=0.8, seed=3, ignore_eos=True)]
    first, _ = run_both(target, prompt, params, draft_max=2, **options)
    assert count_drafted(first) and (
        options["spec"] != "draft" or count_accepted(first) == count_drafted(first)
    )


@pytest.mark.parametrize(
    ("ids", "layers", "count"),
    [
        ("few", 1, 4),
        pytest.param("some", 3, 16, marks=SLOW),
        pytest.param("all", 2, 16, marks=SLOW),
    ],
)
def test_an_eagle3_head_drafts_the_same_by_both_forms(
    tmp_path: Path, no_host_reads: HostWatch, monkeypatch: Patch, ids: str, layers: int, count: int
) -> None:
    """Greedy and sampled requests together, by a head with a fused draw over some ids, or without."""
    from spd.kernels.linear import skinny_linear_triton

    head_kernel = skinny_linear_triton._head
    drawn = list[bool]()

    def record_draw(**operands: Any) -> Any:
        drawn.append(operands["draw"][-2] is not None)
        return head_kernel(**operands)

    monkeypatch.setattr(skinny_linear_triton, "_head", record_draw)
    head_options = {
        "kind": "copy",
        **EAGLE3_HEADS[ids],
        "target_options": {"layers": layers, **SHAPE},
    }
    head = write_tiny_pair(tmp_path / "target", tmp_path / "head", **head_options)
    options = {"spec": "eagle3", "draft_model": head, "draft_max": 2, "slots": 2}
    first, _ = run_both(tmp_path / "target", PROMPT * 2, greedy_and_drawn(count), **options)
    assert any(drawn) == (ids != "all") and no_host_reads.rounds > 1
    assert count_accepted(first) < count_drafted(first) and (count_accepted(first) or ids == "few")


@pytest.mark.covers(count=1)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"is_causal": False}, marks=SLOW),
        {"dialect": "speculators", "markov": "rnn", "markov_rank": 16, "draft_vocab": 48},
        {"selector_top_k": 4, "selector_rank": 16},
    ],
    ids=["dflash", "dspark", "dflash2"],
)
def test_a_block_drafter_drafts_the_same_by_both_forms(
    target: Path, tmp_path: Path, no_host_reads: HostWatch, options: dict[str, Any]
) -> None:
    """Its full and sliding layers attend to all rows of the block, or to earlier ones."""
    drafter = write_tiny_block(
        tmp_path / "drafter",
        target,
        taps=(0,),
        kinds="fs",
        window=12,
        block_size=4,
        mask_token=3,
        **options,
    )
    engine_options = {"spec": "block", "draft_model": drafter, "draft_max": 3, "slots": 2}
    first, _ = run_both(target, PROMPT * 2, greedy_and_drawn(4), **engine_options)
    assert count_drafted(first) and no_host_reads.rounds > 1


def test_a_lookup_by_several_programs_drafts_the_same(
    target: Path, methods: Methods, monkeypatch: Patch
) -> None:
    """As in a context of more than 5120 positions, several programs search a row, and one chooses."""
    from spd.kernels.round import ngram_lookup_triton

    monkeypatch.setattr(ngram_lookup_triton, "ONE_PROGRAM", 0)
    monkeypatch.setattr(ngram_lookup_triton, "BLOCK", 4)
    assert count_drafted(
        run_both(target, PROMPT, [SamplingParams(max_tokens=4)], **methods["ngram"])[0]
    )


def test_rows_of_a_packed_embedding_are_the_same_by_both_forms(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "a.gguf", "Q8_0", layers=1, vocab=96)
    greedy = [SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)]
    run_both(file, random_prompts(1, 5, 90, seed=1), greedy, dtype="float32", spec="off")


def count_workspace(engine: Engine) -> list[torch.Tensor]:
    """Return the counters of the target's and the drafters' products."""
    queue = helpers.get_local_queue(engine)
    assert isinstance(queue.proposer, ModelProposer)
    decoders = [queue.runner.model, *(runner.model for runner in queue.proposer.runners)]
    products = [product for decoder in decoders for product in decoder.products]
    skinny = [p for p in products if isinstance(p, skinny_linear.SkinnyLinear)]
    return [product.workspace.counters for product in skinny if product.workspace is not None]


@pytest.mark.parametrize("place", [pytest.param("run", marks=SLOW), "draft"])
def test_counters_that_a_failed_round_left_are_zeroed(
    place: str, target: Path, methods: Methods, monkeypatch: Patch
) -> None:
    """The last program of a tile is known by its count: with a stale one none combines its parts."""

    def split(**sizes: Any) -> LinearConfig:
        return replace(config_for(**sizes), block_k=16, split_k=2)

    for module in (skinny_linear, skinny_linear_triton):
        monkeypatch.setattr(module, "config_for", split)
    options = {**methods["draft"], "kernels": "triton", "ctx": 64, "device": "cpu"}
    engine = helpers.make_engine(target, **options)
    params = [SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)]
    prompts = [PROMPT[0][:3]]
    before = collect_outputs(helpers.run_all(engine, prompts, params))
    counters = count_workspace(engine)
    assert counters and all(len(tensor) and not tensor.any() for tensor in counters)

    @torch.inference_mode()
    def break_off(*args: Any, **kwargs: Any) -> None:
        for tensor in counters:
            tensor.fill_(1)
        raise MemoryError

    with monkeypatch.context() as patch:
        where = Round if place == "run" else type(helpers.get_local_queue(engine).proposer)
        patch.setattr(where, place, break_off)
        engine.add(Request("broken", prompts[0], params[0]))
        with pytest.raises(ResourceError):
            while True:
                engine.step()
    assert not any(tensor.any() for tensor in counters)
    assert [event.finish_reason for event in engine.step()] == ["error"]
    assert collect_outputs(helpers.run_all(engine, prompts, params)) == before


def test_a_layer_is_five_launches(
    target: Path, no_host_reads: HostWatch, monkeypatch: Patch
) -> None:
    """Attention of the next layer is launched five kernels later, in a round."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: list[str] = []
    launch = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if no_host_reads.running:
            launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    engine = helpers.make_engine(target, kernels="triton", spec="off", ctx=64, device="cpu")
    helpers.run_all(engine, [PROMPT[0][:3]], [SamplingParams(max_tokens=1, temperature=0.0)])
    first, second = (at for at, name in enumerate(launched) if name == "attend_chunk_kernel")
    assert launched[first + 1 : second] == [
        "linear_kernel",
        "gate_up_kernel",
        *["linear_kernel"] * 2,
    ]


def list_triton_kernels() -> set[tuple[str, str]]:
    """Return the module and name of every Triton kernel in `spd.kernels`."""
    from triton.runtime.interpreter import InterpretedFunction

    kernel_names = set()
    folder = Path(kernels.__file__).parent
    for path in folder.rglob("*_triton.py"):
        stem = ".".join(path.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"spd.kernels.{stem}")
        functions = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, InterpretedFunction)
        }
        own_names = (
            name for name, value in functions.items() if value.fn.__module__ == module.__name__
        )
        kernel_names |= {(module.__name__, name) for name in own_names if name.endswith("_kernel")}
    return kernel_names


def test_every_kernel_has_run(request: pytest.FixtureRequest) -> None:
    """All kernels ran in the tests above; skipped where only some of these tests were selected."""
    items = [item for item in request.session.items if item.path == request.node.path]
    names = {name for name in vars(request.module) if name.startswith("test_")}
    if names - {getattr(item, "originalname", "") for item in items}:
        pytest.skip("counts what all tests of this file run")
    assert {item.name for item in items} <= TESTS_RUN
    assert len(KERNELS_LAUNCHED) > 40 and list_triton_kernels() == KERNELS_LAUNCHED
