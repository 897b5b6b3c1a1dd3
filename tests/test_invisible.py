"""Speculation is invisible: the same tokens, text and end with it and without it, whatever else varies.

One matrix: each cell runs requests with a drafter, and without. The default lane has few cells of each table.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from spd.runtime import Engine, Request, SamplingParams
from tests.helpers import (
    Prompt,
    Run,
    assert_same_runs,
    count_accepted,
    count_drafted,
    get_local_queue,
    random_prompts,
    run_all,
)
from tests.lanes import covering
from tests.page_checks import check_table
from tests.pairs import MTP_FAMILIES, Pair, Pairs
from tests.recipes.tiny_dense import FAMILIES

VOCAB = 256
PROMPTS = random_prompts(4, 20, VOCAB) + random_prompts(2, 75, VOCAB, seed=1)
FEW = tuple(
    (token, 40.0) for token in (3, 50, 99, 120)
)  # A bias: text of few tokens is full of matches.
Work = list[tuple[Prompt, SamplingParams]]
PARAMETERS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "ignore_eos": {"ignore_eos": True, "temperature": 1.3},
    "all_truncations": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.8},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "bias": {"logit_bias": ((5, 4.0), (6, -100.0), (7, 3.5)), "temperature": 0.9},
    "min_tokens": {
        "min_tokens": 12,
        "stop_token_ids": tuple(range(0, 256, 16)),
        "logit_bias": ((32, 6.0),),
    },
    "stop_ids": {"temperature": 1.0, "stop_token_ids": tuple(range(5, 256, 16))},
    "stop_strings": {"temperature": 1.1, "stop": ("a", "e", "7", "Q")},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "max_tokens": {"max_tokens": 7},
}
METHODS = ("ngram", "draft", "self", "draft+ngram")
HEADS = ("one", "three", "deepseek", "eagle", "speculators")
WINDOWED = (
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3",
    "phi3",
)  # Whose layers slide or cap; prompts are longer.
SPARSE = (
    "deepseek_v3",
    "deepseek_v2_lite",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_moe",
    "ernie4_5_moe",
)
LOOKED_UP = (
    "olmo3",
    "ministral3",
    "exaone4",
    "cohere2",
    "hunyuan",
    "granite_moe",
    "gpt_oss",
    "gemma4",
    "gemma4_moe",
    "lfm2",
    "lfm2_moe",
    "granite_hybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "minimax_m2",
    "mimo_v2",
    "step3",
    "hunyuan_moe",
    "muse_glimmer",
)  # Families whose attention, norms or caches are their own.
QUANTIZED = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_moe")  # Their experts are rounded.
OTHERS = ("mimo", "ernie4_5", *sorted(FAMILIES.keys() - {*WINDOWED, *LOOKED_UP}))
OF_FAMILIES = (
    *(f"{family}/ngram" for family in (*WINDOWED, *SPARSE, *LOOKED_UP, *OTHERS)),
    *(f"{family}/mtp" for family in MTP_FAMILIES),
    "gemma4/assistant",
    "gemma4_moe/assistant",
)
RECURRENT = tuple(f"hybrid/{method}" for method in ("ngram", "draft", "mtp", "mtp+ngram"))
FORMS: dict[str, dict[str, Any]] = {
    **{bits: {"dtype": "bfloat16", "quantize": bits} for bits in ("int8", "int4")},
    **{dtype: {"dtype": dtype} for dtype in ("float32", "bfloat16")},
    "torch": {"dtype": "float32", "kernels": "torch"},
}  # By C kernels where there are any, which take a fifth of torch's time on tiny models; and by torch's.
LAGS = (0, 1, 2)
TYPES = ("float32", "bfloat16")


def crossed(prompts: list[Prompt], ts: Any = (0.0, 0.8, 1.3), seed: int = 100, **kind: Any) -> Work:
    every = itertools.product(enumerate(prompts), ts)
    return [
        (prompt, SamplingParams(temperature=t, seed=seed + i, **kind)) for (i, prompt), t in every
    ]


REPEATING: dict[str, Any] = {"logit_bias": FEW, "ignore_eos": True}
FOUR = crossed(PROMPTS, max_tokens=12)[::5]
WORKS: dict[str, Work] = {
    "temperatures": crossed(PROMPTS, max_tokens=24)[::4],
    "some": crossed(PROMPTS, max_tokens=16)[::4],
    "few": [*FOUR[:2], (FOUR[2][0], replace(FOUR[2][1], **REPEATING)), *FOUR[3:]],
    "repeating": crossed(PROMPTS[1:6:2], (0.0, 0.5, 1.3), 9, max_tokens=24, **REPEATING)[::4],
    "mixed": [
        (
            PROMPTS[i % 6],
            SamplingParams(**{"max_tokens": 10 + 4 * (i % 6), "seed": i, **PARAMETERS[kind]}),
        )
        for i, kind in enumerate(sorted(PARAMETERS))
    ],
    "demo": [
        (
            tuple(range(5 + n, 45 + n)),
            SamplingParams(max_tokens=24, temperature=0.8 * (i > 2), seed=i),
        )
        for i, n in enumerate((0, 40, 900) * 2)
    ],
    **{
        name: [(p, SamplingParams(**{"max_tokens": 28, "seed": 5, **kind})) for p in PROMPTS[1:4:2]]
        for name, kind in PARAMETERS.items()
    },
}


@dataclass(frozen=True)
class Cell:
    """A pair of `tests.pairs`, and how it is run."""

    work: str
    name: str
    k: int = 4
    lag: int = 0
    changing: bool = False  # Whether the number of drafts changes from round to round.
    form: str = "float32"
    wishes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f"-{value}" for value in self.wishes.values())
        name = f"{self.work}-{self.name}-k{self.k}-lag{self.lag}-{self.form}{more}"
        return name + "-changing" * self.changing

    def engine(self, pair: Pair) -> Engine:
        wishes = {"lag": self.lag, **FORMS[self.form], **self.wishes}
        if self.name == "draft+ngram" and self.work != "repeating":
            wishes["ngram_min"] = 1
        return (
            pair.make_varying_engine(**wishes)
            if self.changing
            else pair.make_engine(self.k, **wishes)
        )


def table(work: Sequence[str], strength: int, **factors: Sequence[Any]) -> list[Any]:
    """Every combination as a cell; slow are those that no `strength` values need to meet, with 0 all."""
    values = itertools.product(work, *factors.values())
    every = [dict(zip(("work", *factors), each, strict=True)) for each in values]
    few = set(covering(every, strength) if strength else ())
    cells = []
    for i, case in enumerate(every):
        own = {name: case.pop(name) for name in [*case] if name in Cell.__annotations__}
        cells.append(
            pytest.param(Cell(**own, wishes=case), marks=() if i in few else pytest.mark.slow)
        )
    return cells


def families(
    names: Sequence[str], methods: Sequence[str], strength: int = 1, **factors: Any
) -> list[Any]:
    """Every family with every method; the default lane has each family with one of them, with 0 none."""
    every = [f"{family}/{method}" for family in names for method in methods]
    first = [f"{family}/{methods[i % len(methods)]}" for i, family in enumerate(names)]
    others = [name for name in every if name not in first]
    return [
        *table(["few"], strength, name=first, lag=LAGS, form=TYPES, **factors),
        *table(["few"], 0, name=others, lag=LAGS, form=TYPES, **factors),
        *table(["few"], 0, name=every, lag=LAGS, form=("torch",), **factors),
    ]


BESIDE: dict[str, Sequence[Any]] = {"lag": LAGS, "slots": (4,), "form": TYPES}
ANY: dict[str, Sequence[Any]] = {
    "k": (1, 2, 3, 4),
    "lag": LAGS,
    "changing": (False, True),
    "form": TYPES,
}
ASSISTED: dict[str, Sequence[Any]] = {
    "k": (1, 4),
    "lag": LAGS,
    "form": ("float32", "torch"),
    "slots": (1, 4),
}
IN_FEW_BITS: dict[str, Sequence[Any]] = {"k": (2, 4), "lag": (0, 1), "form": ("int8", "int4")}
CELLS = [
    *table(["temperatures"], 1, name=METHODS, k=(1, 2, 4, 8), lag=LAGS),
    *table(["some"], 1, name=HEADS, k=(1, 4), lag=LAGS, form=TYPES),
    *table(["some"], 0, name=HEADS, k=(2, 3), lag=LAGS, form=TYPES),
    *table(["few"], 1, name=("draft+ngram", "eagle"), k=(1, 4), lag=LAGS, form=("torch",)),
    *table(["some"], 0, name=(*METHODS, *HEADS), k=(1, 2, 4), lag=LAGS, form=("torch",)),
    *table(
        ["some"], 1, name=("ngram", "draft", "draft+ngram"), k=(1, 4, 8), lag=LAGS, form=TYPES[1:]
    ),
    *families(WINDOWED, ("ngram", "draft"), k=(1, 3, 5), slots=(1, 3)),
    *families(SPARSE, ("ngram", "draft", "self"), k=(2, 4), slots=(1, 4)),
    *families(LOOKED_UP, ("ngram", "self"), k=(1, 3), slots=(1, 3)),
    *families(OTHERS, ("ngram",), 0, k=(3,), slots=(1, 3)),
    *families(sorted(MTP_FAMILIES), ("mtp",), k=(1, 3), slots=(1, 3)),
    *table(["some"], 1, name=RECURRENT, k=(1, 4, 8), lag=LAGS, form=TYPES, slots=(3, 16)),
    *table(
        ["some"], 1, name=RECURRENT, k=(4,), lag=(0,), form=TYPES[1:], slots=(4,), cache_pages=(6,)
    ),
    *table(
        ["few"], 1, name=("draft", "one", *(f"{each}/ngram" for each in QUANTIZED)), **IN_FEW_BITS
    ),
    *table(
        ["repeating"],
        1,
        name=[f"{name}+ngram" for name in ("draft", "one", "three", "eagle")],
        **ANY,
    ),
    *table(["repeating"], 1, name=("gemma4/assistant+ngram",), **ANY),
    *table(["temperatures"], 1, name=("draft", "ngram", "one"), lag=LAGS, changing=(True,)),
    *table(sorted(PARAMETERS), 1, name=(*METHODS, "one", "one+ngram"), lag=(0, 2), form=TYPES[1:]),
    *table(["mixed"], 1, name=("draft", "draft+ngram", "three", "eagle"), k=(3,), **BESIDE),
    *table(
        ["mixed"], 0, name=("ngram", "self", "one", "deepseek", "speculators"), k=(3,), **BESIDE
    ),
    *table(["repeating"], 1, name=("gemma4/assistant", "gemma4_moe/assistant"), **ASSISTED),
    *table(["demo"], 1, name=("demo",), k=(1, 4), lag=LAGS, form=TYPES, slots=(3,)),
]
Known = Callable[[Cell], list[Run]]


def outputs(engine: Engine, work: Work) -> list[Run]:
    return run_all(engine, [p for p, _ in work], [q for _, q in work])


def decided(runs: list[Run]) -> list[list[tuple[list[int], int, int]]]:
    return [[(r.draft, r.match, r.accepted) for r in run.rounds] for run in runs]


@pytest.fixture(scope="module")
def known(pairs: Pairs) -> Known:
    """Runs of a cell, each once; of one that drafts nothing (k = 0), those of the target alone."""
    found: dict[str, list[Run]] = {}

    def get(cell: Cell) -> list[Run]:
        pair = pairs.get(cell.name)
        key = str(cell) if cell.k else f"{pair.model} {cell.work} {cell.form}"
        if key not in found:
            engine = (
                cell.engine(pair)
                if cell.k
                else pair.make_plain_engine(graphs=False, **FORMS[cell.form])
            )
            found[key] = outputs(engine, WORKS[cell.work])
        return found[key]

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Thousands of cells of the slow lane are not even collected for another."""
    if "cell" in metafunc.fixturenames:
        few = metafunc.config.getoption("markexpr").startswith("not slow")
        metafunc.parametrize("cell", [cell for cell in CELLS if not (few and cell.marks)], ids=str)


def test_nothing_of_a_text_depends_on_speculation(known: Known, cell: Cell, request: Any) -> None:
    runs = known(cell)
    assert_same_runs(runs, known(Cell(cell.work, cell.name, 0, form=cell.form)))
    own_kind = "/" in cell.name and not cell.name.startswith("hybrid/")
    if cell.lag and not cell.changing and not (own_kind and "slow" not in request.keywords):
        # At fixed k the drafts and acceptances are those of the synchronous run, round by round.
        assert decided(runs) == decided(known(replace(cell, lag=0)))
    method = cell.name.rpartition("/")[2]
    if cell.work not in PARAMETERS:
        least = 0 if method == "ngram" and cell.work != "temperatures" else 1
        assert count_drafted(runs) > 0 and count_accepted(runs) >= least, "the test saw nothing"
    if cell.work in ("temperatures", "some", "few") and (method == "draft" or method in HEADS):
        assert count_accepted(runs) < count_drafted(runs), "nothing was rejected"
        if cell.k > 1 and "/" not in cell.name:
            assert max(record.accepted for run in runs for record in run.rounds) > 1
    if cell.name.endswith("+ngram") and not cell.changing and cell.work == "repeating":
        rounds = [record for run in runs for record in run.rounds if record.accepted]
        matched = sum(r.match > 0 for r in rounds)
        assert matched > 1 and sum(not r.match for r in rounds) > 1, "one alone drafted"


@pytest.mark.covers(count=6)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_prefix_hit_is_a_miss(pairs: Pairs, name: str) -> None:
    """Of every family: a text goes on, and another begins as it did, on pages that hold what both read."""
    pair = pairs.get(name)
    (prompt,) = random_prompts(1, 75, VOCAB, seed=1)
    params = SamplingParams(max_tokens=70, temperature=0.5, seed=2, ignore_eos=True)
    engine = pair.make_engine(3, lag=1, slots=2)
    (first,) = run_all(engine, [prompt], [params])
    later = (
        [(*prompt, *first.tokens, 5, 6), (*prompt[:70], 9, 8, 7)],
        [replace(params, max_tokens=24)] * 2,
    )
    runs = run_all(engine, *later)
    recurs = (
        engine.plan.model.config.recurrent is not None
    )  # whose states were kept behind the text alone
    assert (
        all(run.metrics.cached_tokens >= 64 for run in runs[: 2 - recurs])
        and count_drafted(runs) > 0
    )
    assert_same_runs(runs, run_all(pair.make_plain_engine(slots=2, prefix_sharing=False), *later))


def test_draft_context_limit(pairs: Pairs) -> None:
    """Prompts around the draft's own limit, and beyond: drafting ends there, the text goes on."""
    limit = 48
    k = 4
    pair = pairs.get("draft")
    lengths = (*range(limit - k, limit + 2), 3 * limit)
    prompts = [random_prompts(1, n, VOCAB, seed=n)[0] for n in lengths]
    params = [SamplingParams(temperature=0.8, max_tokens=12, seed=i) for i in range(len(prompts))]
    alone = run_all(pair.make_plain_engine(), prompts, params)
    for slots in (1, len(prompts)):
        runs = run_all(pair.make_engine(k, slots=slots, draft_ctx=limit), prompts, params)
        assert [run.output for run in runs] == [run.output for run in alone]
        for prompt, run in zip(prompts, runs, strict=True):
            for record in run.rounds[1:]:
                # Position p is drafted from p tokens; the draft model sees at most `limit`.
                assert len(record.draft) <= max(0, limit - record.position + 1)
                if record.position + k <= limit and record.position + k < len(prompt) + 12:
                    assert len(record.draft) == k
    assert any(record.draft for record in runs[0].rounds)
    assert not any(record.draft for record in runs[-1].rounds)


def test_every_length_and_stop_position_in_the_window(pairs: Pairs) -> None:
    (long,) = run_all(
        pairs.get("self").make_plain_engine(), PROMPTS[1:2], [SamplingParams(max_tokens=24)]
    )
    for method in ("self", "draft"):
        engine = pairs.get(method).make_engine(7)
        for count in range(1, 18):
            run = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=count)])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:count], "length")
            stop = long.tokens[count - 1]
            first = long.tokens.index(stop) + 1
            # The stop on the last allowed token is a stop, not a length.
            params = SamplingParams(max_tokens=first, stop_token_ids=(stop,))
            run = run_all(engine, [PROMPTS[1]], [params])[0]
            assert (run.tokens, run.finish_reason) == (long.tokens[:first], "stop")


def test_context_ends_the_text(pairs: Pairs) -> None:
    for length in (126, 127):
        prompt = random_prompts(1, length, VOCAB, seed=2)[0]
        for method in ("off", "self", "ngram"):
            run = run_all(pairs.get(method).make_engine(7, ctx=128), [prompt], [SamplingParams()])[
                0
            ]
            assert len(run.tokens) == 128 - length and run.finish_reason == "length"


@pytest.mark.parametrize("kind", ["wrong", "out of range", "random length"])
def test_an_adversarial_drafter_changes_nothing(pairs: Pairs, known: Known, kind: str) -> None:
    engine = pairs.get("ngram").make_engine(4, lag=1)
    queue = get_local_queue(engine)
    source = random.Random(0)
    state = queue.state
    odd = [-1, -(2**40), engine.plan.model.config.vocab_size + 5, 3, 2**40]
    choices = odd if kind == "out of range" else list(range(VOCAB))

    def bad(k: int, window: object, views: object, needs: object) -> None:
        rows = [[source.choice(choices) for _ in range(k)] for _ in range(state.slots)]
        state.draft[:, :k] = torch.tensor(rows)
        state.num_drafts.fill_(source.randrange(k + 1) if kind == "random length" else k)

    queue.proposer.draft = bad  # type: ignore[method-assign]
    assert_same_runs(
        outputs(engine, WORKS["temperatures"]), known(Cell("temperatures", "ngram", 0))
    )


def test_abort_in_flight_frees_everything(pairs: Pairs) -> None:
    (alone,) = run_all(
        pairs.get("draft").make_plain_engine(), PROMPTS[:1], [SamplingParams(max_tokens=30)]
    )
    engine = pairs.get("draft").make_engine(3, slots=2, lag=2)
    available = engine.page_table.num_available
    engine.add(Request("a", PROMPTS[1], SamplingParams(max_tokens=200)))
    engine.add(Request("b", PROMPTS[0], SamplingParams(max_tokens=30)))
    events = [event for _ in range(4) for event in engine.step()]
    engine.abort("a")
    engine.add(Request("c", PROMPTS[0], SamplingParams(max_tokens=30)))
    while engine.has_work:
        events += engine.step()
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"a": "abort", "b": "length", "c": "length"}
    for name in "bc":
        assert [
            i for event in events if event.request_id == name for i in event.token_ids
        ] == alone.tokens
    assert engine.page_table.num_available == available
    check_table(engine.page_table)
