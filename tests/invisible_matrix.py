"""List the cells of the matrix that shows speculation to be invisible (`tests/test_invisible.py`).

A cell names a workload, a drafter with its target (a pair of `tests/pairs.py`) and the settings of a run.
`CELLS` crosses them; the default lane runs few cells of each table, and the slow lane all of them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spd.runtime import Engine, SamplingParams
from spd.runtime.models.gguf_forms import FORMS as GGUF_TYPES
from tests.helpers import Prompt, random_prompts
from tests.lanes import covering
from tests.pairs import BLOCK_DRAFTERS, MTP_FAMILIES, Pair
from tests.recipes.tiny_dense import FAMILIES

VOCAB = 256
PROMPTS = random_prompts(4, 20, VOCAB) + random_prompts(2, 75, VOCAB, seed=1)
FEW_TOKENS_BIAS = ((3, 40.0), (50, 40.0), (99, 40.0), (120, 40.0))
"""A logit bias towards four tokens: a text of few tokens repeats itself, so that lookup finds matches."""
REPEATING: dict[str, Any] = {"logit_bias": FEW_TOKENS_BIAS, "ignore_eos": True}

# Workloads: the requests of a run.

Workload = list[tuple[Prompt, SamplingParams]]
SAMPLING_PARAMETERS: dict[str, dict[str, Any]] = {
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
"""Sampling parameters by the name of the workload that tests them."""


def prompts_at_temperatures(
    prompts: list[Prompt],
    temperatures: Sequence[float] = (0.0, 0.8, 1.3),
    first_seed: int = 100,
    **params: Any,
) -> Workload:
    """Return a request for each prompt at each temperature; `params` are equal in all of them."""
    return [
        (prompt, SamplingParams(temperature=temperature, seed=first_seed + i, **params))
        for i, prompt in enumerate(prompts)
        for temperature in temperatures
    ]


def few_requests() -> Workload:
    """Return four requests; the third one repeats itself."""
    requests = prompts_at_temperatures(PROMPTS, max_tokens=12)[::5]
    prompt, params = requests[2]
    requests[2] = (prompt, replace(params, **REPEATING))
    return requests


def mixed_requests() -> Workload:
    """Return a request for each entry of `SAMPLING_PARAMETERS`: prompts and lengths alternate."""
    requests = []
    for i, name in enumerate(sorted(SAMPLING_PARAMETERS)):
        defaults = {"max_tokens": 10 + 4 * (i % 6), "seed": i}
        params = SamplingParams(**{**defaults, **SAMPLING_PARAMETERS[name]})
        requests.append((PROMPTS[i % 6], params))
    return requests


def demo_requests() -> Workload:
    """Return six requests for the demo's vocabulary: three greedy ones, then three at temperature 0.8."""
    requests = []
    for i, first_token in enumerate((5, 45, 905) * 2):
        prompt = tuple(range(first_token, first_token + 40))
        temperature = 0.8 if i > 2 else 0.0
        requests.append((prompt, SamplingParams(max_tokens=24, temperature=temperature, seed=i)))
    return requests


def requests_with(params: dict[str, Any]) -> Workload:
    """Return two requests with the same sampling parameters."""
    defaults = {"max_tokens": 28, "seed": 5}
    return [(prompt, SamplingParams(**{**defaults, **params})) for prompt in PROMPTS[1:4:2]]


WORKLOADS: dict[str, Workload] = {
    "temperatures": prompts_at_temperatures(PROMPTS, max_tokens=24)[::4],
    "some": prompts_at_temperatures(PROMPTS, max_tokens=16)[::4],
    "few": few_requests(),
    "repeating": prompts_at_temperatures(
        PROMPTS[1:6:2],
        temperatures=(0.0, 0.5, 1.3),
        first_seed=9,
        max_tokens=24,
        **REPEATING,
    )[::4],
    "mixed": mixed_requests(),
    "demo": demo_requests(),
    **{name: requests_with(params) for name, params in SAMPLING_PARAMETERS.items()},
}

# Pairs: names of `tests/pairs.py`, as METHOD, METHOD+ngram or FAMILY/METHOD.

METHODS = ("ngram", "draft", "self", "draft+ngram")
HEADS = ("one", "three", "deepseek", "eagle", "speculators")
BLOCKS = tuple(BLOCK_DRAFTERS)
WINDOWED = ("mistral", "qwen2", "gemma2", "gemma3", "phi3")
"""Families with sliding layers or capped scores; their prompts are longer than the window."""
SPARSE = (
    "deepseek_v3",
    "deepseek_v2_lite",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_moe",
    "ernie4_5_moe",
)
"""Families with experts."""
SPECIAL = (
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
)
"""Families whose attention, norms or caches no other family has."""
QUANTIZED_EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_moe")
"""Families whose experts are rounded to few bits."""
OTHERS = ("mimo", "ernie4_5", *sorted(FAMILIES.keys() - {*WINDOWED, *SPECIAL}))
OF_FAMILIES = (
    *(f"{family}/ngram" for family in (*WINDOWED, *SPARSE, *SPECIAL, *OTHERS)),
    *(f"{family}/mtp" for family in MTP_FAMILIES),
    "gemma4/assistant",
    "gemma4_moe/assistant",
)
ROUNDED_CACHES = (
    "draft",
    "one",
    "eagle",
    BLOCKS[0],
    "hybrid/mtp",
    "gemma2/ngram",
    "gemma3/draft",
    "gemma4/assistant",
    "gpt_oss/ngram",
    "deepseek_v3/ngram",
)
"""Pairs for a cache in eight bits: windows, caps, shared layers, sinks and latents among them."""
RECURRENT = ("hybrid/ngram", "hybrid/draft", "hybrid/mtp", "hybrid/mtp+ngram")
SCANS = ("granite_hybrid/ngram", "granite_hybrid/self", "nemotron_h/self", "nemotron_h/mtp")
"""Pairs whose recurrent layers are Mamba-2's scans."""

# Settings of a run.

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "w8a8": {"dtype": "bfloat16", "quantize": "int8", "activations": "int8"},
    "w4a8": {"dtype": "bfloat16", "quantize": "int4", "activations": "int8"},
    "w4a8 float32": {"dtype": "float32", "quantize": "int4", "activations": "int8"},
    "w4a8 torch": {
        "dtype": "float32",
        "quantize": "int4",
        "activations": "int8",
        "kernels": "torch",
    },
    "kv8": {"dtype": "bfloat16", "kv": "int8"},
    "kv8 float32": {"dtype": "float32", "kv": "int8"},
    "kv8 torch": {"dtype": "float32", "kv": "int8", "kernels": "torch"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "torch": {"dtype": "float32", "kernels": "torch"},
}
"""Arithmetic of a run.

C kernels run all but torch's where there are any: on tiny models they take a fifth of torch's time.
"""
LAGS = (0, 1, 2)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    work: str
    """The name of the workload."""
    name: str
    """The name of the pair of target and drafter."""
    k: int = 4
    """Drafts per round, 0 for none."""
    lag: int = 0
    changing: bool = False
    """True where the number of drafts changes from round to round."""
    form: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of the engine's configuration."""

    def __str__(self) -> str:
        """Return the cell's name as pytest shows it."""
        parts = [self.work, self.name, f"k{self.k}", f"lag{self.lag}", self.form]
        parts += [str(value) for value in self.config.values()]
        if self.changing:
            parts.append("changing")
        return "-".join(parts)

    @property
    def method(self) -> str:
        """The pair's name without its family."""
        return self.name.rpartition("/")[2]

    @property
    def is_of_family(self) -> bool:
        """True of a pair FAMILY/METHOD, but for the hybrids, which are tested as the methods are."""
        return "/" in self.name and not self.name.startswith("hybrid/")

    def engine(self, pair: Pair) -> Engine:
        """Return an engine that runs this cell."""
        config = {"lag": self.lag, **FORMS[self.form], **self.config}
        if self.name == "draft+ngram" and self.work != "repeating":
            config["ngram_min"] = 1  # Else lookup would find no match in such a text.
        if self.changing:
            return pair.make_varying_engine(**config)
        return pair.make_engine(self.k, **config)


def table(workloads: Sequence[str], strength: int, **factors: Sequence[Any]) -> list[Any]:
    """Return a pytest parameter for each combination of a workload and one value of each factor.

    A factor is a field of `Cell`, or else of the engine's configuration. The default lane runs so many
    of them that any `strength` values meet; the others are slow. With 0 all are slow.
    """
    names = ["work", *factors]
    combinations = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(workloads, *factors.values())
    ]
    default_lane = set(covering(combinations, strength) if strength and combinations else ())
    parameters = []
    for i, combination in enumerate(combinations):
        fields = {name: combination.pop(name) for name in names if name in Cell.__annotations__}
        marks = () if i in default_lane else pytest.mark.slow
        parameters.append(pytest.param(Cell(**fields, config=combination), marks=marks))
    return parameters


def family_tables(
    families: Sequence[str], methods: Sequence[str], every: int = 1, **factors: Any
) -> list[Any]:
    """Return cells of every family with every method.

    The default lane has each `every`-th family with one of the methods, in turn; with 0 it has none.
    """
    pairs = [f"{family}/{method}" for family in families for method in methods]
    first_families = families[::every] if every else ()
    first_pairs = [
        f"{family}/{methods[i % len(methods)]}" for i, family in enumerate(first_families)
    ]
    other_pairs = [name for name in pairs if name not in first_pairs]
    return [
        *table(["few"], 1, name=first_pairs, lag=LAGS, form=DTYPES, **factors),
        *table(["few"], 0, name=other_pairs, lag=LAGS, form=DTYPES, **factors),
        *table(["few"], 0, name=pairs, lag=LAGS, form=("torch",), **factors),
    ]


CHANGING_DRAFTS: dict[str, Sequence[Any]] = {
    "k": (1, 2, 3, 4),
    "lag": LAGS,
    "changing": (False, True),
    "form": DTYPES,
}
MODEL_AND_LOOKUP = ("draft+ngram", "one+ngram", "three+ngram", "eagle+ngram")
CELLS = [
    # Every method and head.
    *table(["temperatures"], 1, name=METHODS, k=(1, 2, 4, 8), lag=LAGS),
    *table(["some"], 1, name=HEADS, k=(1, 4), lag=LAGS, form=DTYPES),
    *table(["some"], 0, name=HEADS, k=(2, 3), lag=LAGS, form=DTYPES),
    *table(["few"], 1, name=("draft+ngram", "eagle"), k=(1, 4), lag=LAGS, form=("torch",)),
    *table(["some"], 0, name=(*METHODS, *HEADS), k=(1, 2, 4), lag=LAGS, form=("torch",)),
    *table(
        ["some"],
        1,
        name=("ngram", "draft", "draft+ngram"),
        k=(1, 4, 8),
        lag=LAGS,
        form=("bfloat16",),
    ),
    # Every family.
    *family_tables(WINDOWED, ("ngram", "draft"), 3, k=(1, 3, 5), slots=(1, 3)),
    *family_tables(SPARSE, ("ngram", "draft", "self"), 4, k=(2, 4), slots=(1, 4)),
    *family_tables(SPECIAL, ("ngram", "self"), 4, k=(1, 3), slots=(1, 3)),
    *family_tables(OTHERS, ("ngram",), 0, k=(3,), slots=(1, 3)),
    *family_tables(sorted(MTP_FAMILIES), ("mtp",), 3, k=(1, 3), slots=(1, 3)),
    # Recurrent layers, with pages to spare and with few.
    *table(["some"], 1, name=RECURRENT, k=(1, 4, 8), lag=LAGS, form=DTYPES, slots=(3, 16)),
    *table(
        ["some"],
        1,
        name=RECURRENT,
        k=(4,),
        lag=(0,),
        form=("bfloat16",),
        slots=(4,),
        cache_pages=(6,),
    ),
    *table(["some"], 0, name=SCANS, k=(1, 4, 8), lag=LAGS, form=DTYPES, slots=(3, 16)),
    *table(["some"], 0, name=SCANS, k=(4,), lag=LAGS, form=DTYPES, slots=(4,), cache_pages=(6, 12)),
    # Weights in few bits.
    *table(
        ["few"],
        1,
        name=("draft", "one", *(f"{family}/ngram" for family in QUANTIZED_EXPERTS)),
        k=(2, 4),
        lag=(0, 1),
        form=("int8", "int4", "w8a8", "w4a8"),
    ),
    # Types of GGUF that are kept packed, each as a family.
    *family_tables(tuple(GGUF_TYPES), ("draft", "ngram", "self"), 5, k=(1, 2, 4, 8), slots=(1, 3)),
    # Rows rounded to eight bits.
    *table(["demo"], 1, name=("demo",), k=(1, 4), lag=LAGS, form=("w8a8", "w4a8"), slots=(1, 3)),
    *table(["some"], 0, name=(*METHODS, *HEADS), k=(1, 4), lag=LAGS, form=("w8a8", "w4a8")),
    *table(["repeating", "mixed"], 0, name=MODEL_AND_LOOKUP, k=(3,), lag=LAGS, form=("w4a8",)),
    *table(["some"], 0, name=RECURRENT, k=(4,), lag=LAGS, form=("w8a8", "w4a8"), slots=(3,)),
    *table(["few"], 0, name=("ngram", "draft"), k=(3,), form=("w4a8 float32", "w4a8 torch")),
    *table(
        ["few"],
        0,
        name=[f"{type_name}/ngram" for type_name in GGUF_TYPES],
        k=(4,),
        lag=(0, 1),
        form=("bfloat16",),
        activations=("int8",),
    ),
    # A cache in eight bits: of every kind of attention, and of every drafter that has one.
    *table(["few"], 1, name=ROUNDED_CACHES, k=(4,), lag=(0, 1), form=("kv8", "kv8 float32")),
    *table(["demo"], 0, name=("demo",), k=(1, 4), lag=LAGS, form=("kv8",), slots=(1, 3)),
    *table(
        ["some", "repeating"],
        0,
        name=tuple(dict.fromkeys(("ngram", "self", *HEADS, *ROUNDED_CACHES))),
        k=(1, 3, 8),
        lag=LAGS,
        form=("kv8", "kv8 float32"),
        slots=(1, 4),
    ),
    *table(
        ["repeating"],
        0,
        name=BLOCKS[1:],
        k=(1, 3, 8),
        lag=LAGS,
        form=("kv8", "kv8 float32"),
        slots=(1, 4),
    ),
    *table(
        ["some", "repeating"],
        0,
        name=("draft+ngram",),
        k=(1, 3),
        lag=LAGS,
        form=("kv8", "kv8 float32"),
        slots=(1, 4),
    ),
    *table(["few"], 0, name=ROUNDED_CACHES, k=(1, 4), lag=LAGS, form=("kv8 torch",), slots=(1, 3)),
    *table(
        ["mixed"],
        0,
        name=("draft", "one", "eagle", "hybrid/mtp", BLOCKS[0], "gemma4/assistant"),
        k=(3,),
        lag=LAGS,
        form=("kv8",),
        slots=(4,),
        cache_pages=(6, 40),
    ),
    # Lookup besides a model, and numbers of drafts that change.
    *table(["repeating"], 1, name=MODEL_AND_LOOKUP, **CHANGING_DRAFTS),
    *table(["repeating"], 1, name=("gemma4/assistant+ngram",), **CHANGING_DRAFTS),
    *table(["temperatures"], 1, name=("draft", "ngram", "one"), lag=LAGS, changing=(True,)),
    # Sampling parameters, alone and together.
    *table(
        sorted(SAMPLING_PARAMETERS),
        1,
        name=(*METHODS, "one", "one+ngram"),
        lag=(0, 2),
        form=("bfloat16",),
    ),
    *table(
        ["mixed"],
        1,
        name=("draft", "draft+ngram", "three", "eagle"),
        k=(3,),
        lag=LAGS,
        slots=(4,),
        form=DTYPES,
    ),
    *table(
        ["mixed"],
        0,
        name=("ngram", "self", "one", "deepseek", "speculators"),
        k=(3,),
        lag=LAGS,
        slots=(4,),
        form=DTYPES,
    ),
    # Block drafters, whose drafts are random, assistants, and the demo.
    *table(
        ["repeating"],
        1,
        name=BLOCKS,
        k=(1, 4, 8),
        lag=LAGS,
        form=(*DTYPES, "torch"),
        slots=(1, 4),
    ),
    *table(["repeating"], 1, name=(f"{BLOCKS[0]}+ngram",), **CHANGING_DRAFTS),
    *table(
        ["repeating"],
        1,
        name=BLOCKS,
        k=(8,),
        lag=(0, 2),
        form=("bfloat16",),
        slots=(4,),
        cache_pages=(6,),
    ),
    *table(["mixed"], 1, name=("dflash", "dspark"), k=(3,), lag=LAGS, slots=(4,), form=DTYPES),
    *table(
        ["repeating"],
        1,
        name=("gemma4/assistant", "gemma4_moe/assistant"),
        k=(1, 4),
        lag=LAGS,
        form=("float32", "torch"),
        slots=(1, 4),
    ),
    *table(["demo"], 0, name=("demo",), k=(1, 4), lag=LAGS, form=DTYPES, slots=(3,)),
]
