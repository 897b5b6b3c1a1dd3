"""Hybrids of recurrent and attention layers: the model, its drafts, and continuation from
snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spd.errors import CheckpointError, ResourceError
from spd.formats import checkpoint
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.kernels.native.build import unavailable_reason
from spd.runtime import Engine, Event, Request, SamplingParams
from spd.runtime.engine import scheduler
from spd.runtime.plan import memory
from spd.runtime.plan import plan as plans
from spd.runtime.plan.memory import checkpoint_bytes
from spd.runtime.round.snapshot_store import SnapshotStore
from tests import helpers
from tests.helpers import (
    Run,
    assert_same_runs,
    get_local_queue,
    make_engine,
    make_next_turn,
    random_prompts,
    run_all,
    run_requests,
)
from tests.page_checks import check_pages
from tests.pairs import Pairs
from tests.recipes.tiny_eagle3 import write_tiny_eagle3
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.runtime.eagle3_reference import LibraryTarget, PlainEagle3
from tests.runtime.mtp_reference import LibraryMtp
from tests.runtime.test_runtime_mtp import compare_drafts

PROMPTS = [*random_prompts(3, 20, 256), *random_prompts(1, 75, 256, seed=1), (5,), (7, 9)]
FORMS: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32", "kernels": "torch"},
    "native": {"dtype": "bfloat16", "kernels": "native"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "three value heads a key head": {},
    "odd": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "tie_word_embeddings": True,
    },
    "attention first": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", *["linear_attention"] * 2],
    },
}
Shelf = Callable[..., Path]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Return a function that writes tiny hybrids."""
    return lambda **options: write_tiny_hybrid(
        tmp_path_factory.mktemp("hybrid") / "model", **options
    )


needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C kernels here: {unavailable_reason()}"
)
NATIVE_FIRST = [
    pytest.param("native", marks=needs_native),
    pytest.param("torch", marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "wrapped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text_are_those_of_transformers(
    hybrid: Shelf, tmp_path: Path, shape: str, wrapped: bool, kernels: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = hybrid(**SHAPES[shape])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    assert ModelFolder(tmp_path).config == ModelFolder(folder).config
    engine = make_engine(hybrid(**SHAPES[shape], wrapped=wrapped), dtype="float32", kernels=kernels)
    # Both sum chunks in different orders.
    helpers.assert_matches_transformers(
        model, engine, random_prompts(1, 90, 256, seed=4)[0], 24, tolerance=5e-4
    )


SPARSE_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def pack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Store the experts of each layer in two tensors, as the published checkpoints do."""
    for stem in {
        name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name
    }:
        for packed, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            expert_parts = [
                [tensors.pop(f"{stem}{e}.{part}.weight") for part in parts] for e in range(8)
            ]
            tensors[f"{stem}{packed}"] = torch.stack([torch.cat(expert) for expert in expert_parts])


def write_sparse(folder: Path, name: str) -> Any:
    """Write a hybrid with experts by the library; return the model."""
    import transformers

    config_class = f"{name}TextConfig" if name == "Qwen3_5Moe" else f"{name}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, config_class)(**SPARSE_SIZES)
    ).eval()
    for parameter_name, tensor in model.named_parameters():
        is_vector = parameter_name.endswith(("A_log", "dt_bias")) or "norm" in parameter_name
        torch.nn.init.normal_(tensor.data, std=0.3 if is_vector else 0.12)
    model.save_pretrained(folder)
    return model


@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1)
@pytest.mark.parametrize("stored", ["by expert", "packed"])
@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_sparse_hybrids_equal_transformers(tmp_path: Path, name: str, stored: str) -> None:
    """The two generations store projections differently."""
    model = write_sparse(tmp_path, name)
    if stored == "packed":
        helpers.edit_weights(tmp_path, pack_experts)
    helpers.assert_matches_transformers(
        model, make_engine(tmp_path, kernels="torch"), random_prompts(1, 70, 300, seed=4)[0], 24
    )


def test_too_many_packed_experts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small header may state any number: experts are counted before anything is allocated."""
    save_file(
        {"model.layers.0.mlp.experts.down_proj": torch.zeros(9, 2, 2)},
        tmp_path / "model.safetensors",
    )
    assert len(Checkpoint.open(tmp_path).tensors) == 9
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 8)
    with pytest.raises(CheckpointError, match="holds more than 8 tensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("k", "kernels"),
    [(4, "auto"), *(pytest.param(k, "torch", marks=pytest.mark.slow) for k in (1, 2))],
)
def test_drafts_of_its_mtp_layer_are_the_reference_s(
    hybrid: Shelf, tmp_path: Path, k: int, kernels: str
) -> None:
    total = 0
    for agreeing in (True,) if k < 4 else (False, True):
        folder = hybrid(mtp=True, agreeing=agreeing)
        prompts = random_prompts(2, 20, 256)
        params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
        runs = run_all(
            make_engine(folder, kernels=kernels, spec="mtp", draft_max=k), prompts, params
        )
        plain = LibraryMtp(folder, "mtp", 1, tmp_path / f"{agreeing}")
        wrong, num_compared, _ = compare_drafts(
            plain, list(zip(prompts, runs, strict=True)), max_rounds=6
        )
        assert wrong == 0
        total += num_compared
    assert total > (6 if k < 4 else 12)


@pytest.mark.parametrize("form", NATIVE_FIRST)
@pytest.mark.parametrize("k", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_drafts_of_an_eagle3_head_are_right(
    hybrid: Shelf, tmp_path: Path, form: str, k: int
) -> None:
    """The head reads streams that enter recurrent and attention layers.

    The text is plain decoding's.
    """
    target = hybrid(num_hidden_layers=7)
    head = write_tiny_eagle3(tmp_path / "head", target, aux=(1, 3, 6))
    options = {"dtype": "float32", "kernels": form, "ctx": 320}
    engine = make_engine(target, **options, spec="eagle3", draft_model=head, draft_max=k)
    prompts = PROMPTS[:: 2 if form == "native" else 4]  # torch's recurrence is slow
    params = [SamplingParams(max_tokens=24 if form == "native" else 10, ignore_eos=True)] * len(
        prompts
    )
    runs = run_all(engine, prompts, params)
    plain = PlainEagle3(target, head, LibraryTarget(target))
    wrong, num_compared, _ = compare_drafts(
        plain, list(zip(prompts, runs, strict=True)), max_rounds=6
    )
    assert wrong == 0 and num_compared >= (12 if form == "native" else 8)
    plain_runs = run_all(make_engine(target, **options), prompts, params)
    assert [run.tokens for run in runs] == [run.tokens for run in plain_runs]


@pytest.mark.parametrize("form", NATIVE_FIRST)
def test_a_model_that_drafts_for_itself_is_always_right(hybrid: Shelf, form: str) -> None:
    """A recurrent draft model catches up and is rolled back: every draft is the target's token."""
    folder = hybrid(dtype=FORMS[form]["dtype"])
    cases: list[dict[str, Any]] = [{"draft_max": 4, "lag": 2, "slots": 4}]
    if form == "native":
        cases += [{"draft_max": 1}, {"draft_max": 3, "adaptive": True}]
    for options in cases:
        engine = make_engine(folder, spec="draft", draft_model=folder, **FORMS[form], **options)
        params = [
            SamplingParams(max_tokens=20, ignore_eos=True, seed=i) for i in range(len(PROMPTS))
        ]
        runs = run_all(engine, PROMPTS, params)
        assert helpers.count_drafted(runs) == sum(run.metrics.draft_n_accepted for run in runs)
        assert helpers.count_drafted(runs) > 50 or "adaptive" in options


# -- snapshots: a hit equals a miss, bit for bit and draft for draft, at every position ---------------

LENGTHS = (2, 65, 128, 150)
"""Lengths of prompts, whose ends are within pages, at the ends of pages, and after chunks."""
FASTEST_FORM = "native" if unavailable_reason() is None else "torch"
"""The fastest kernels here."""
Spans = tuple[tuple[str, int], ...]


def make_pair_engine(pairs: Pairs, form: str, method: str, **options: Any) -> Engine:
    pair = pairs.get(f"hybrid/{method}")
    return make_engine(
        pair.model, **{"ctx": 512, **FORMS[form], **pair.speculation_options, **options}
    )


def make_sharing_pair(pairs: Pairs, form: str, method: str, **options: Any) -> list[Engine]:
    """Return an engine that shares prefixes, and one that does not."""
    return [
        make_pair_engine(pairs, form, method, prefix_sharing=shares, **options)
        for shares in (True, False)
    ]


def assert_equal_to_misses(runs: list[Run], fresh_runs: list[Run]) -> None:
    assert_same_runs(runs, fresh_runs)
    assert [run.drafts for run in runs] == [run.drafts for run in fresh_runs]
    assert all(run.metrics.cached_tokens == 0 for run in fresh_runs)


def poison(engine: Engine) -> None:
    """Fill the states of an idle engine with NaN: no value of a former request may be read."""
    proposer = get_local_queue(engine).proposer
    for runner in (engine.round_queue.runner, *getattr(proposer, "runners", ())):
        for layer, paged in zip(runner.cache.layers, runner.cache.paged, strict=True):
            for pool in () if paged else layer.pools:
                pool.fill_(float("nan"))


def check_hits(
    pairs: Pairs, form: str, method: str, temperature: float, *lengths: int, **options: Any
) -> None:
    """Assert that hits equal misses for a prompt again, continued, and as a part of next turns."""
    engines = make_sharing_pair(pairs, form, method, **options)
    plain = SamplingParams(max_tokens=9, ignore_eos=True)
    for length in lengths:
        prompt = random_prompts(1, length, 256, seed=length)[0]
        params = replace(plain, temperature=temperature, seed=length, logprobs=0)
        shared_runs, fresh_runs = ([run_all(engine, [prompt], [params])[0]] for engine in engines)
        repeated = Request("x", prompt, params)
        longer = (("prompt", length), ("prompt", 3))
        next_turn = make_next_turn(prompt, shared_runs[0].tokens, params, (7, 8))
        for request in (
            repeated,
            next_turn,
            repeated,
            Request("x", (*prompt, 3, 4, 5), params, longer),
        ):
            for engine, runs in zip(engines, (shared_runs, fresh_runs), strict=True):
                poison(engine)
                runs += run_requests(engine, [request])
        assert_equal_to_misses(shared_runs, fresh_runs)
        cached = [0, length - 1, length + 8, length - 1, length - 1]
        assert [run.metrics.cached_tokens for run in shared_runs] == cached
        check_pages(engines[0].scheduler)


@pytest.mark.parametrize("method", ["ngram", "mtp", "draft", "mtp+ngram"])
@pytest.mark.parametrize("form", NATIVE_FIRST)
def test_a_prefix_hit_equals_a_miss(pairs: Pairs, form: str, method: str) -> None:
    if (form, method) == ("native", "mtp"):
        check_hits(pairs, form, method, 0.0, *LENGTHS, lag=2, draft_max=4)
    lengths = LENGTHS[:3] if form == "native" else LENGTHS[1:2]
    check_hits(pairs, form, method, 1.0, *lengths, lag=1, draft_max=3)


@pytest.mark.parametrize(
    ("form", "method", "lag"),
    [
        *(pytest.param("native", *case, marks=needs_native) for case in (("mtp", 1), ("draft", 2))),
        pytest.param("torch", "ngram", 0, marks=pytest.mark.slow),
    ],
)
def test_a_chat_prefills_only_new_tokens(pairs: Pairs, form: str, method: str, lag: int) -> None:
    """Ten turns, which end at a stop id or at a limit, take constant memory."""
    engine, unshared = make_sharing_pair(pairs, form, method, lag=lag, draft_max=3)
    count = 10 if form == "native" else 4
    stops = SamplingParams(max_tokens=14, ignore_eos=True, stop_token_ids=tuple(range(0, 320, 20)))
    ids = random_prompts(1, 70, 256, seed=3)[0]
    runs = list[Run]()
    expected_cached = [0]
    spans: Spans = (("prompt", 70),)
    for turn in range(count):
        request = Request(f"t{turn}", ids, replace(stops, temperature=1.0, seed=turn), spans)
        runs += run_requests(engine, [request])
        reply = runs[-1].tokens
        user_message = random_prompts(1, 5 + turn, 256, seed=50 + turn)[0]
        expected_cached.append(len(ids) + len(reply) - 1)
        ids = (*ids, *reply, *user_message)
        spans = (*spans, ("generated", len(reply)), ("prompt", len(user_message)))
    assert_equal_to_misses(runs[-1:], run_requests(unshared, [request]))
    assert {run.finish_reason for run in runs} == {"stop", "length"} or count < 10
    assert [run.metrics.cached_tokens for run in runs] == expected_cached[:-1]
    store = get_local_queue(engine).snapshots
    plan = engine.plan
    assert 1 < len(store.places) <= plan.shape.checkpoints
    for place in store.places.values():
        assert sum(copy.nbytes for copy in place) == checkpoint_bytes(plan.shape)
    assert plan.need.checkpoints == plan.shape.checkpoints * checkpoint_bytes(plan.shape)
    assert plan.as_dict()["checkpoint_bytes"] == plan.need.checkpoints and plan.shares_prefixes


def test_the_least_recently_used_snapshot_is_evicted(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "CHECKPOINTS", 3)
    engine = make_pair_engine(pairs, "torch", "off")
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    store = get_local_queue(engine).snapshots
    where = set[int]()
    assert (
        engine.plan.shape.checkpoints == 5
    )  # two a slot; and each text keeps two, one of them of its reply
    a, b, c, d = random_prompts(4, 30, 256, seed=8)
    cached = []
    for prompt in (a, b, a, c, a, d, a, b):
        cached.append(run_all(engine, [prompt], [params])[0].metrics.cached_tokens)
        where |= {place[0].data_ptr() for place in store.places.values()}
    assert cached == [0, 0, 29, 0, 29, 0, 29, 0] and len(where) == 5, "and memory stays as it is"


def test_without_memory_for_snapshots_no_prefix_is_shared(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARE_OF_CHECKPOINTS", 2**50)
    engine = make_pair_engine(pairs, "torch", "off")
    assert engine.plan.shape.checkpoints == 0 and not engine.plan.shares_prefixes
    prompt = random_prompts(1, 70, 256)
    params = [SamplingParams(max_tokens=2)]
    assert [run_all(engine, prompt, params)[0].metrics.cached_tokens for _ in range(2)] == [0, 0]


TEXT = random_prompts(1, 300, 256, seed=6)[0]
USERS = random_prompts(3, 90, 256, seed=7)
SYSTEM_AND_USER = (("prompt", 100), ("prompt", 10))
SNAPSHOT_CASES: dict[str, tuple[list[tuple[int, ...]], Spans, list[int]]] = {
    # Prompts one after another, the spans of each, and how many of its tokens are found.
    "a span's end": ([(*TEXT[:100], *user[:10]) for user in USERS], SYSTEM_AND_USER, [0, 100, 100]),
    # The second finds pages and no state; the third goes on where these pages end.
    "pages that none followed": ([(*TEXT[:140], *user) for user in USERS], (), [0, 0, 128]),
    # As a conversation over HTTP does: its reply is a part of the next prompt.
    "the last whole chunk": ([TEXT[:end] for end in (140, 210, 300)], (), [0, 128, 192]),
    "a long prompt's way": ([TEXT, (*TEXT[:200], 1, 2, 3)], (), [0, 128]),
    # More than there are checkpoints end in one chunk; the next chunk's has only its beginning.
    "what a longer one goes on from": (
        [TEXT[:end] for end in (*range(130, 190, 4), 200)],
        (),
        [0, *range(129, 185, 4), 128],
    ),
}


@pytest.mark.parametrize("name", SNAPSHOT_CASES)
def test_snapshots_are_taken_where_texts_part(
    pairs: Pairs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "a long prompt's way":
        monkeypatch.setattr(scheduler, "SNAPSHOT_INTERVAL", 128)
    prompts, spans, cached = SNAPSHOT_CASES[name]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine, fresh = make_sharing_pair(pairs, "torch", "off")
    runs = [run_requests(engine, [Request("x", prompt, params, spans)])[0] for prompt in prompts]
    assert [run.metrics.cached_tokens for run in runs] == cached
    assert runs[-1].output == run_all(fresh, prompts[-1:], [params])[0].output
    assert engine.plan.shape.checkpoints < 15


def test_a_recurrent_draft_model_goes_on_where_its_target_keeps_no_states(pairs: Pairs) -> None:
    options = {
        **FORMS[FASTEST_FORM],
        **pairs.get("hybrid/draft").speculation_options,
        "draft_max": 3,
    }
    engines = [
        make_engine(pairs.get("off").model, **options, prefix_sharing=shares)
        for shares in (True, False)
    ]
    system = random_prompts(1, 20, 256, seed=6)[0]
    users = random_prompts(3, 15, 256, seed=7)
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=3, ignore_eos=True, logprobs=0)
    requests = [
        Request("x", (*system, *user), params, (("prompt", 20), ("prompt", 15))) for user in users
    ]
    shared_runs, fresh_runs = (
        [run_requests(engine, [request])[0] for request in requests] for engine in engines
    )
    assert_equal_to_misses(shared_runs, fresh_runs)
    assert [run.metrics.cached_tokens for run in shared_runs] == [0, 20, 20]


@pytest.mark.parametrize(
    ("form", "method"),
    [
        *(pytest.param("native", method, marks=needs_native) for method in ("mtp", "draft")),
        pytest.param("torch", "off", marks=pytest.mark.slow),
    ],
)
def test_preempted_texts_continue_from_snapshots(
    pairs: Pairs, form: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompts(1, n, 256, seed=n)[0] for n in (100, 90, 64)]
    plain = SamplingParams(logprobs=0)
    params = [
        replace(plain, temperature=0.8, max_tokens=70, seed=i, ignore_eos=True) for i in range(3)
    ]
    options: dict[str, Any] = {"ctx": 256, "draft_max": 3 if method != "off" else None}
    alone = make_pair_engine(pairs, form, method, prefix_sharing=False, **options)
    fresh = [run_all(alone, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    starts = list[int]()
    load = SnapshotStore.load

    def record_start(*operands: Any) -> None:
        starts.append(operands[3])
        load(*operands)

    monkeypatch.setattr(SnapshotStore, "load", record_start)
    engine = make_pair_engine(
        pairs, form, method, slots=3, lag=2 * (method == "mtp"), cache_pages=5, **options
    )
    runs = run_all(engine, prompts, params)
    assert_same_runs(runs, fresh)
    assert sum(run.metrics.preemptions for run in runs) == len(starts) > 0
    assert all(start > 60 for start in starts)
    check_pages(engine.scheduler)


@pytest.mark.covers(1)
@pytest.mark.parametrize("ended", ["string", "abort"])
@pytest.mark.parametrize("lag", [0, 2])
def test_tokens_that_the_host_cuts_are_not_cached(pairs: Pairs, lag: int, ended: str) -> None:
    """After a cut no tokens are cached; the prompt's snapshot is."""
    prompt = random_prompts(1, 70, 256, seed=5)[0]
    for method in ("mtp", "draft"):
        engines = make_sharing_pair(pairs, FASTEST_FORM, method, lag=lag, draft_max=4, slots=2)
        params = SamplingParams(temperature=1.0, max_tokens=60, seed=1, ignore_eos=True)
        full_run = run_all(engines[1], [prompt], [params])[0]
        for cut in (11, 14):
            if ended == "string":
                stop = (full_run.text[cut : cut + 2],)
                run_all(engines[0], [prompt], [replace(params, stop=stop)])
                reply = full_run.tokens[: cut + 2]
            else:
                engines[0].add(Request("gone", prompt, params))
                received = list[int]()
                while len(received) < cut:
                    received += [token for event in engines[0].step() for token in event.token_ids]
                engines[0].abort("gone")
                engines[0].step()
                assert received == full_run.tokens[: len(received)]
                reply = received
            turn = make_next_turn(prompt, reply, replace(params, max_tokens=9, logprobs=0), (7, 8))
            run, fresh_run = (run_requests(engine, [turn])[0] for engine in engines)
            assert_equal_to_misses([run], [fresh_run])
            assert run.metrics.cached_tokens >= len(prompt) - 1
            if ended == "abort" and lag == 0:
                assert run.metrics.cached_tokens == 70 + len(reply) - 1


def test_a_copy_that_broke_off_is_never_found(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's copy, or the one of the full text; a request ends once."""
    prompt = random_prompts(1, 80, 256)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    save = SnapshotStore.save
    for limit, expected_reasons in ((0, ["error"]), (79, [None, None, "error"])):
        engine = make_pair_engine(pairs, "torch", "off")
        events = list[Event]()

        def broken(self: SnapshotStore, *arguments: int, limit: int = limit) -> None:
            if arguments[2] > limit:
                raise MemoryError("no memory")
            save(self, *arguments)

        engine.add(Request("x", prompt[0], params))
        with monkeypatch.context() as patch:
            patch.setattr(SnapshotStore, "save", broken)
            with pytest.raises(ResourceError):
                while engine.has_work:
                    events += engine.step()
        while engine.has_work:
            events += engine.step()
        assert [event.finish_reason for event in events] == expected_reasons
        check_pages(engine.scheduler)
        runs = [run_all(engine, prompt, [params])[0] for _ in range(2)]
        assert [run.metrics.cached_tokens for run in runs] == [0, 79] and runs[0].output == runs[
            1
        ].output
