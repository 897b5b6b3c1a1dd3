"""The memory plan: its counts, refusals and advice, and what happens when memory runs out."""

import errno
import itertools
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spd.errors import ResourceError
from spd.formats.checkpoint import Checkpoint
from spd.formats.eagle3 import Eagle3Config
from spd.formats.model_config import ModelConfig
from spd.formats.rope_config import RopeConfig
from spd.kernels.native.packed import LARGE_PAGE
from spd.runtime import Engine, EngineConfig, Request, SamplingParams, make_plan
from spd.runtime.engine import assembly
from spd.runtime.models import family_layout
from spd.runtime.models.weight_forms import WeightForm, int4_form
from spd.runtime.models.weights import expected_tensors
from spd.runtime.plan import machine, memory, memory_fit
from spd.runtime.plan.config import format_size
from spd.runtime.plan.memory import (
    EngineShape,
    measure_memory,
    tensor_bytes,
)
from spd.runtime.plan.memory_fit import memory_error, with_context
from spd.runtime.proposers.block import BlockProposer
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.proposers.head import HeadProposer
from spd.runtime.proposers.ngram import LookupPool
from spd.runtime.round.graphs import CapturedRounds
from spd.runtime.round.kv_cache import KvCache, lazy_zeros
from spd.runtime.round.limits import NUM_RESERVED_PAGES
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.out_of_memory import is_out_of_memory
from spd.runtime.round.round import Round
from tests.helpers import (
    Patch,
    Tiny,
    collect_outputs,
    get_local_queue,
    make_engine,
    random_prompts,
    read_model_config,
    run_all,
)
from tests.recipes.tiny import VARIANTS
from tests.recipes.tiny_block import write_tiny_block_pair
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_mtp import write_tiny_mtp

GIB = 2**30
NO_MEMORY: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
PROMPTS = random_prompts(3, 90, 256)
RUNNING = [("prefill", ModelRunner, "write_prompt_parts", 1), ("first round", Round, "run", 0)]
RUNNING += [("after commit", Round, "_commit_and_emit", 3), ("after a round", Round, "run", 3)]
RUNNING += [("pages", Engine, "_allocate_pages", 2), ("later round", Round, "run", 4)]


def config_8b(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32}
    sizes |= {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_positions": 40960}
    other = {
        "architecture": "Qwen3ForCausalLM",
        "rope": RopeConfig("default", 1e6),
        "rms_norm_eps": 1e-6,
    }
    other |= {
        "tie_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
    return ModelConfig(**{**sizes, **other, "bos_token_id": None, "eos_token_ids": (), **changes})


SMALL = config_8b(
    hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
)
HEAD = Eagle3Config(
    target_hidden_size=4096,
    draft_vocab_size=32000,
    configured_layers=None,
    num_aux_layers=3,
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
)
EAGLE = config_8b(num_layers=1, architecture="LlamaForCausalLMEagle3", eagle3=HEAD)


def shape_8b(**changes: Any) -> EngineShape:
    options: dict[str, Any] = {
        "target": config_8b(),
        "draft": None,
        "dtype": "bfloat16",
        "slots": 1,
    }
    options |= {
        "ctx": 32768,
        "draft_ctx": 32768,
        "draft_max": 4,
        "kernels": "triton",
        "graphs": True,
    }
    return EngineShape(**{**options, "on_cpu": False, **changes})


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_counted_to_the_byte(variant: str, tiny: Tiny) -> None:
    config = read_model_config(tiny(variant))
    expected = expected_tensors(config, family_layout(config))
    with Checkpoint.open(tiny(variant)) as checkpoint:
        stored = sum(checkpoint.tensors[name].nbytes for name in expected)
        # Routers stay float32 whatever the rest is.
        routers = [
            name for name in expected if name.endswith((".mlp.gate.weight", "correction_bias"))
        ]
        exact = sum(checkpoint.tensors[name].nbytes for name in routers)
    assert (exact > 0) == (config.experts is not None)
    assert tensor_bytes(config, "float32") == stored == 2 * tensor_bytes(config, "bfloat16") - exact


def test_an_engine_holds_what_its_plan_counts(tiny: Tiny) -> None:
    engine = make_engine(
        tiny("tied"), spec="draft", draft_model=tiny("tied", layers=1), slots=3, ctx=500
    )
    runner = engine.round_queue.runner
    proposer = get_local_queue(engine).proposer
    assert isinstance(proposer, DraftModelProposer)
    caches = [runner.cache, proposer.runners[0].cache]
    pool_bytes = sum(t.nbytes for cache in caches for layer in cache.layers for t in layer.pools)
    assert engine.plan.need.caches == pool_bytes
    assert engine.plan.shape.num_pages == NUM_RESERVED_PAGES + 3 * memory.pages_per_slot(500)
    config = read_model_config(tiny("tied"))
    packed_head = config.vocab_size * config.hidden_size * 4
    assert engine.plan.need.weights == tensor_bytes(config, "float32") + packed_head
    assert engine.plan.need.workspace > 0 and engine.plan.need.graphs == 0


@pytest.mark.parametrize("tokens", [1, 5, 20, 4096, 100_000])
def test_a_pool_holds_what_its_plan_counts(tokens: int) -> None:
    pool = LookupPool(tokens, 3, "cpu")
    tensors = [*pool.texts, *(value for value in vars(pool).values() if isinstance(value, Tensor))]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    plain = memory.measure_memory(shape_8b())
    assert memory.measure_memory(shape_8b(pool_tokens=tokens)).total - plain.total == nbytes


@pytest.mark.parametrize("lookup", ["ngram", "off"])
def test_a_pool_is_counted_where_lookup_drafts(tiny: Tiny, lookup: str) -> None:
    config = EngineConfig(model=tiny("tied"), spec=lookup, pool_tokens=512, threads=1)
    assert make_plan(config).shape.pool_tokens == (512 if lookup == "ngram" else 0)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_head_holds_what_its_plan_counts(method: str, tmp_path: Path) -> None:
    """To the byte: its tensors, its cache, and its states, one a page and a ring a slot."""
    target = tmp_path / "target"
    options: dict[str, Any] = {"spec": method, "slots": 3, "ctx": 500}
    if method == "mtp":
        write_tiny_mtp(target, modules=2)
    else:
        options["draft_model"] = write_tiny_pair(
            target, tmp_path / "head", hidden_size=96, norm_before_fc=True
        )
    engine = make_engine(target, **options)
    proposer = get_local_queue(engine).proposer
    plan = engine.plan
    assert isinstance(proposer, HeadProposer)
    caches = [runner.cache for runner in (engine.round_queue.runner, *proposer.runners)]
    pools = sum(t.nbytes for cache in caches for layer in cache.layers for t in layer.pools)
    states = sum(t.nbytes for t in (*proposer.rings, *proposer.page_states))
    shape = plan.shape
    assert plan.need.caches == pools + states * (method == "mtp")
    if method == "mtp":
        return
    with Checkpoint.open(options["draft_model"]) as checkpoint:
        stored = [t.nbytes for name, t in checkpoint.tensors.items() if name not in ("d2t", "t2d")]
    assert plan.need.draft_weights == sum(stored)
    assert shape.draft is not None
    read = (
        2 * shape.chunk * 3 * read_model_config(target).hidden_size * 4
    )  # streams, and side by side
    assert memory._eagle3_bytes(shape, shape.draft) == states + read


def test_a_block_drafter_holds_what_its_plan_counts(tmp_path: Path) -> None:
    """To the byte: its tensors, the matrices of keys and values twice, and its cache."""
    target = tmp_path / "target"
    drafter = write_tiny_block_pair(target, tmp_path / "drafter")
    engine = make_engine(target, spec="block", draft_model=drafter, slots=3, ctx=500)
    proposer = get_local_queue(engine).proposer
    assert isinstance(proposer, BlockProposer)
    caches = [engine.round_queue.runner.cache, proposer.runner.cache]
    pools = sum(t.nbytes for cache in caches for layer in cache.layers for t in layer.pools)
    assert engine.plan.need.caches == pools
    with Checkpoint.open(drafter) as checkpoint:
        tensors = checkpoint.tensors
        stored = sum(t.nbytes for t in tensors.values())
        again = sum(
            t.nbytes
            for name, t in tensors.items()
            if name.endswith(("k_proj.weight", "v_proj.weight"))
        )
    assert engine.plan.need.draft_weights == stored + again


def test_the_largest_that_fits_is_found() -> None:
    bounds = (-1, 0, 1, 5, 63, 64, 65, 130, 500)
    for step, limit, bound in itertools.product((1, 7, 64), range(1, 200, 3), bounds):
        sizes = [*range(step, limit, step), limit]
        expected = max((size for size in sizes if size <= bound), default=0)
        assert memory_fit.find_largest(bound.__ge__, limit, step) == expected


def test_an_automatic_context_is_the_longest_that_fits(tiny: Tiny, monkeypatch: Patch) -> None:
    config = EngineConfig(model=tiny("qwen3", max_positions=8192), dtype="float32")
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**40)
    full_plan = make_plan(config)
    assert full_plan.shape.ctx == 8192 and full_plan.need.total < 2**30
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: full_plan.need.total)
    cut = make_plan(config)
    assert 64 <= cut.shape.ctx < 8192 and cut.need.total <= cut.memory_budget_bytes
    longer = replace(cut.shape, ctx=cut.shape.ctx + 64)
    assert measure_memory(longer).total > cut.memory_budget_bytes == int(full_plan.need.total * 0.9)


def test_pages_give_way_before_an_automatic_context(tiny: Tiny, monkeypatch: Patch) -> None:
    """Several slots get as many pages as fit, at least one request's; then the context shrinks."""
    config = EngineConfig(
        model=tiny("qwen3", max_positions=8192), dtype="float32", kernels="torch", slots=4
    )
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**40)
    full_plan = make_plan(config)
    assert (full_plan.shape.ctx, full_plan.shape.num_pages) == (
        8192,
        NUM_RESERVED_PAGES + 4 * memory.pages_per_slot(8192),
    )
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: full_plan.need.total)
    fewer = make_plan(config)
    assert fewer.shape.ctx == 8192 and 130 <= fewer.shape.num_pages < full_plan.shape.num_pages
    assert fewer.need.total <= fewer.memory_budget_bytes
    more_pages = replace(fewer.shape, pages=fewer.shape.num_pages + 8)
    assert measure_memory(more_pages).total > fewer.memory_budget_bytes
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: full_plan.need.total // 2)
    shorter = make_plan(config)
    assert shorter.shape.ctx < 8192 and shorter.shape.num_pages - 2 >= shorter.shape.ctx // 64


def refused(shape: EngineShape, free: int, **options: Any) -> list[str]:
    error = memory_error(shape, "cuda:0", free, options.pop("fraction", 0.9), **options)
    assert error.exit_code == 5 and error.code == "resources"
    assert "cuda:0" in error.message and f"{shape.ctx:,}" in error.message
    assert (
        error.reason[1] == measure_memory(shape).summary()
        and format_size(measure_memory(shape).total) in error.reason[0]
    )
    return list(error.fix)


def test_a_refusal_names_every_part_and_what_would_fit() -> None:
    shape = shape_8b(draft=SMALL)
    fix = refused(shape, 24 * GIB)
    words = measure_memory(shape).summary()
    for part in ("weights", "draft weights", "cache", "draft cache", "workspace", "graphs"):
        assert re.search(rf"(^|\+ ){part} \d", words), words
    context, cache, ngram, *_ = fix
    options = [line.partition("  ")[0] for line in (cache, ngram)]
    assert context.startswith("--ctx ") and options == ["--kv int8", "--spec ngram"], (
        "the smallest sacrifice first"
    )
    scarce = refused(shape_8b(draft=SMALL, slots=2, dtype="float32"), 24 * GIB)
    enough = ["not enough alone" not in line for line in scarce]
    assert enough == sorted(enough, reverse=True) and not all(enough), "what suffices comes first"
    ctx = int(context.split()[1])
    assert ctx % 1024 == 0 and "not enough" not in context
    assert measure_memory(with_context(shape, ctx)).total <= 24 * GIB * 0.9
    assert measure_memory(with_context(shape, ctx + 1024)).total > 24 * GIB * 0.9
    frees = measure_memory(shape).total - measure_memory(with_context(shape, ctx)).total
    assert f"(frees {format_size(frees)})" in context


@pytest.mark.parametrize("draft", [SMALL, EAGLE], ids=["draft", "eagle3"])
@pytest.mark.parametrize("free", [17, 20, 24, 30, 40])
def test_every_figure_in_the_advice_is_true(free: int, draft: ModelConfig) -> None:
    shape = shape_8b(draft=draft, slots=4, dtype="float32", draft_max=8)
    int8 = WeightForm("int8")
    int4, draft_int4 = (
        int4_form(model, shape.kernels, shape.dtype, shape.tp) for model in (shape.target, draft)
    )
    forms = {"int8": (int8, int8), "int4": (int4, draft_int4)}
    for remedy in memory_fit.memory_remedies(shape, free * GIB, draft_flag=True):
        option = remedy.partition("  ")[0]
        flag, value = option.split(",")[0].rsplit(" ", 1)
        form, draft_form = forms[value] if flag == "--quantize" else (None, None)
        changes: dict[str, dict[str, Any]] = {
            "--dtype": {"dtype": value},
            "--graphs": {"graphs": False},
            "--kv": {"rounds_cache": True},
        }
        changes["--spec"] = {"draft": None, "draft_max": {"ngram": 8, "off": 0}.get(value)}
        changes["--quantize"] = {"form": form, "draft_form": draft_form}
        other = changes[flag] if flag in changes else {"slots": int(value)}
        changed = with_context(shape, int(value)) if flag == "--ctx" else replace(shape, **other)
        frees = measure_memory(shape).total - measure_memory(changed).total
        alone = "" if measure_memory(changed).total <= free * GIB else ", not enough alone"
        assert remedy == f"{option}  (frees {format_size(frees)}{alone})" and frees > 0


def test_when_a_draft_model_and_the_memory_fraction_are_advised() -> None:
    """A requested drafter must be left out; the fraction is advised where it would do."""
    fixes = refused(shape_8b(draft=SMALL), 24 * GIB, draft_flag=True)
    assert any(line.startswith("--spec ngram, without --draft-model ") for line in fixes)
    assert not any("--draft-model" in line for line in refused(shape_8b(draft=SMALL), 24 * GIB))
    assert not any("ngram" in line for line in refused(shape_8b(), 16 * GIB)), (
        "nothing is freed by it"
    )
    total = measure_memory(shape_8b()).total
    fix = refused(shape_8b(), int(total * 1.05))
    fraction = float(next(line for line in fix if line.startswith("--memory-fraction ")).split()[1])
    assert fraction <= 1 and total * 1.05 * fraction >= total
    assert not any("--memory-fraction" in line for line in refused(shape_8b(), total - 1))


def test_where_nothing_helps_it_says_so(tiny: Tiny, monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**16)
    config = EngineConfig(
        model=tiny("qwen3"), dtype="bfloat16", quantize="int8", kv="int8", spec="off"
    )
    with pytest.raises(ResourceError) as caught:
        make_plan(config)
    assert "64 tokens" in caught.value.message, "not even the smallest context fits"
    assert caught.value.fix == ("a smaller model, or a device with more memory",)
    least = shape_8b(ctx=2, graphs=False, draft_max=0, form=WeightForm("int8"))
    error = memory_error(least, "cuda", GIB // 2, 1.0)
    assert error.fix == ("a smaller model, or a device with more memory",)


def test_every_way_of_saying_it_is_understood() -> None:
    other_errors = [
        RuntimeError("illegal memory access"),
        OSError(errno.ENOSPC, "No space"),
        ValueError("memory"),
    ]
    assert all(map(is_out_of_memory, NO_MEMORY)) and not any(map(is_out_of_memory, other_errors))


def fail(
    error: BaseException, after: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap a function so that one call, after `after` good ones, raises; later ones succeed."""
    calls = iter([*[None] * after, error])

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if (raised := next(calls, None)) is not None:
                raise raised
            return real(*args, **kwargs)

        return wrapped

    return wrap


@pytest.mark.parametrize("name", ["load_model", "KvCache", "RoundState"])
def test_running_out_of_memory_while_loading_is_reported(
    name: str, tiny: Tiny, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(assembly, name, fail(NO_MEMORY[0])(getattr(assembly, name)))
    with pytest.raises(ResourceError) as caught:
        make_engine(tiny("qwen3"), spec="ngram")
    memory_error = caught.value
    assert (
        memory_error.message == "out of memory on cpu while loading" and memory_error.exit_code == 5
    )
    assert memory_error.code == "out_of_memory" and "weights" in memory_error.reason[-1]
    assert any(re.match(r"--ctx 128  \(frees \d", line) for line in memory_error.fix)
    assert any(line.startswith("--dtype bfloat16  (frees ") for line in memory_error.fix)
    assert not any("not enough" in line for line in memory_error.fix), (
        "it is not known what would be"
    )
    assert not any("ngram" in line for line in memory_error.fix)


def test_what_was_allocated_is_let_go(tiny: Tiny, monkeypatch: Patch) -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def hungry(*args: Any, **kwargs: Any) -> None:
        big = torch.zeros(1000)
        references.append(weakref.ref(big))
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(assembly, "KvCache", hungry)
    with pytest.raises(ResourceError) as caught:
        make_engine(tiny("qwen3"))
    assert references[0]() is None, "while the error is still at hand"
    assert caught.value.message


def test_running_out_of_memory_while_capturing_is_reported(tiny: Tiny) -> None:
    engine = make_engine(tiny("qwen3"), spec="off", ctx=128)
    queue = get_local_queue(engine)
    queue.captured = CapturedRounds(queue.round, Mock(side_effect=NO_MEMORY[0]))
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)))
    with pytest.raises(ResourceError, match="out of memory on cpu while running"):
        engine.step()
    assert [(e.request_id, e.finish_reason) for e in engine.step()] == [("a", "error")]
    queue.captured = None
    assert_still_right(engine, tiny("qwen3"), ctx=128)


def test_pages_are_cleared_where_no_memory_is_left() -> None:
    """Zeroed in place: an index of pages would be a tensor of its own on the device."""
    calls: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func.name())
            return func(*args, **(kwargs or {}))

    layers: list[Any] = [SimpleNamespace(cache=((2, 4),)), SimpleNamespace(cache=((3,),))]
    cache = KvCache(layers=layers, num_pages=6, page_size=8, dtype=torch.float32, device="cpu")
    pools = [pool.fill_(torch.nan) for layer in cache.layers for pool in layer.pools]
    with Watch():
        cache.zero_pages([3, 5])
    assert set(calls) <= {"aten::select.int", "aten::zero_"}, calls
    for pool in pools:
        assert not pool[[3, 5]].any() and pool[[2, 4]].isnan().all()


def test_a_large_pool_begins_a_large_page_and_a_small_one_takes_no_more_than_its_own() -> None:
    """A pool that fills none would take the memory of one with its first entry."""
    large = lazy_zeros((3, LARGE_PAGE), torch.int8, "cpu")
    assert large.data_ptr() % LARGE_PAGE == 0 and not large.any()
    assert large.untyped_storage().nbytes() == 4 * LARGE_PAGE
    small = lazy_zeros((LARGE_PAGE // 4,), torch.float32, "cpu")
    assert small.untyped_storage().nbytes() == small.nbytes and not small.any()


def assert_still_right(engine: Engine, folder: Path, **options: Any) -> None:
    params = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 0.9, 0.0)]
    fresh = make_engine(folder, **options)
    assert collect_outputs(run_all(engine, PROMPTS, params)) == collect_outputs(
        run_all(fresh, PROMPTS, params)
    )
    assert not engine.has_work


@pytest.mark.covers(1, count=3)
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("spec", ["off", "ngram", "draft"])
@pytest.mark.parametrize("place", RUNNING, ids=[entry[0] for entry in RUNNING])
def test_running_out_of_memory_while_running_is_reported(
    place: Any, spec: str, lag: int, tiny: Tiny, monkeypatch: Patch
) -> None:
    folder = tiny("qwen3")
    module_path, owner, name, after = place
    options: dict[str, Any] = {"spec": spec, "slots": 2, "lag": lag, "ctx": 256}
    options |= {"draft_model": folder} if spec == "draft" else {}
    engine = make_engine(folder, **options)
    real = getattr(owner, name)
    late = module_path.startswith("after")
    error = torch.OutOfMemoryError("CUDA out of memory")
    decode_tokens = fail(MemoryError(), after)(lambda result: result)

    def call_and_fail(*args: Any, **kwargs: Any) -> Any:
        return decode_tokens(real(*args, **kwargs))

    broken = call_and_fail if late else fail(error, after)(real)
    monkeypatch.setattr(owner, name, broken)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", prompt, long))
    ends = dict[str, str]()
    last = list[int]()
    failed = 0
    while engine.has_work:
        try:
            events = engine.step()
        except ResourceError as memory_error:
            assert memory_error.message == "out of memory on cpu while running"
            assert memory_error.exit_code == 5 and any(
                "--dtype bfloat16" in line for line in memory_error.fix
            )
            failed += 1
            assert not engine.scheduler.in_flight
            continue
        for event in events:
            assert event.request_id not in ends, "it has ended"
            ends |= {event.request_id: event.finish_reason} if event.finish_reason else {}
            last += event.token_ids if event.request_id == "r2" else ()
    assert failed == 1 and len(ends) == 3 and (ends["r0"], ends["r2"]) == ("error", "length"), ends
    monkeypatch.setattr(owner, name, real)
    assert last == run_all(make_engine(folder), PROMPTS[2:], [long])[0].tokens, (
        "what waited is not harmed"
    )
    assert_still_right(engine, folder, **options)
    engine.close()


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError()])
def test_an_engine_whose_round_failed_can_be_closed(
    error: Exception, tiny: Tiny, monkeypatch: Patch
) -> None:
    """Where memory ran out and for any other reason, which keeps its own error."""
    engine = make_engine(tiny("qwen3"), slots=2)
    monkeypatch.setattr(Round, "run", fail(error)(Round.run))
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", prompt, SamplingParams()))
    with pytest.raises(ResourceError if isinstance(error, MemoryError) else ZeroDivisionError):
        while True:  # passes over prompts come first
            engine.step()
    engine.close()
    assert not engine.has_work
