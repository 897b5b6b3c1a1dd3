"""The engine's configuration as the user requested it, `auto` allowed; checked on construction.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spd.errors import IncompatibleError, SpdError, UsageError

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder


MAX_DRAFT = 31  # drafts a round at most: one tile of 32 rows holds the window


class Method(NamedTuple):
    """A way to propose tokens: a value of --spec."""

    draft_max: int
    """Drafts of a round at most, unless the user sets another number."""
    has_weights: bool = False  # True: a model or head drafts, which --draft-model can name
    drafts_at_once: bool = False  # True: one pass makes all drafts, so that more cost no more


METHODS = {
    "auto": Method(0, has_weights=True),
    "off": Method(0),
    "mtp": Method(3, has_weights=True),
    "draft": Method(4, has_weights=True),
    "ngram": Method(8),
    "eagle3": Method(4, has_weights=True),
    "assistant": Method(4, has_weights=True),
    "block": Method(MAX_DRAFT, has_weights=True, drafts_at_once=True),
}
"""Every method that --spec accepts; `auto` becomes another one."""
ARBITRATED_SPECS = tuple(f"{name}+ngram" for name, method in METHODS.items() if method.has_weights)
"""Two proposers: each slot verifies the drafts of one, of lookup where its match is long."""
DRAFTER_OPTIONS = ("draft_model", "draft_tp")
"""Options of a model or head that drafts."""
NGRAM_MIN = 3
"""Tokens of a match from which lookup drafts where it is the only proposer."""
LONG_MATCH = 5
"""Tokens of a match from which lookup drafts instead of a model."""
POOL_TOKENS = 131_072
"""Tokens of ended requests and earlier sessions that lookup drafts from, where it does."""
# The values of --verify, --dtype, --kernels, --quantize, --activations and --kv.
VERIFY_RULES = ("coupled", "rejection", "block")
DTYPES = ("auto", "bfloat16", "float16", "float32")
KERNELS = ("auto", "torch", "native", "triton")
QUANTIZE = ("none", "int8", "int4")
ACTIVATIONS = ("whole", "int8")
KV_FORMS = ("auto", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """Everything that can be requested of an engine; defaults are `auto` where possible.

    None means `auto` too. Raises UsageError or IncompatibleError for values that are not valid or
    exclude each other.
    """

    model: Path | ModelFolder
    draft_model: Path | ModelFolder | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    activations: str = "whole"
    kv: str = "auto"
    """The cache's entries: auto has them in the dtype, int8 rounds them when they are written."""
    spec: str = "auto"
    """The method that drafts, one of `METHODS`, with `+ngram` beside prompt lookup."""
    draft_max: int | None = None
    """Drafts of a round at most."""
    adaptive: bool | None = None
    """True: the drafts of a round follow measured times, up to `draft_max`."""
    draft_ctx: int | None = None
    """Positions of a text up to which a model or head drafts."""
    ngram_min: int | None = None
    """Tokens of the shortest match that prompt lookup drafts from."""
    ngram_max: int = 8
    """Tokens of the longest match that it looks for."""
    pool_tokens: int = 0
    """Tokens of ended requests that lookup drafts from besides a request's own text; 0: none."""
    lookup: Path | None = None
    """A folder for these texts, of which earlier sessions of the model are read."""
    verify: str = "coupled"
    synthetic_acceptance: float | None = None
    """Mean tokens that a round commits whatever was drafted, for measurements; None: natural."""
    lag: int | None = None
    """Rounds that the host reads behind the device."""
    graphs: bool | None = None
    """True: rounds are captured as CUDA graphs."""
    kernels: str = "auto"
    slots: int = 1  # requests that decode together
    cache_pages: int | None = None
    """Pages of 64 positions of keys and values. None: enough for every slot at full context, or as
    many as fit. With fewer, the latest request may wait and be prefilled again; no text changes."""
    ctx: int | None = None
    """Positions of the longest text, prompt included."""
    memory_fraction: float = 0.9
    """The part of the device's free memory that the engine may take."""
    prefix_sharing: bool = True
    threads: int | None = None
    """Threads of a CPU's kernels."""
    load: str = "auto"
    """`dummy` makes weights up instead of reading them."""
    tp: int = 1
    """Ranks that share the target by tensor parallelism."""
    draft_tp: int | None = None
    """Ranks that share the drafter; it must divide `tp`."""
    rendezvous: int | None = None
    """Ranks that torchrun has started; None: the engine starts its own."""

    @property
    def method(self) -> str:
        """Return the method of `spec` without `+ngram`, the prompt lookup beside it."""
        return split_spec(self.spec)[0]

    @property
    def allows_drafter_weights(self) -> bool:
        """True if the requested method drafts by a model or head, or may choose one."""
        return METHODS[self.method].has_weights

    def __post_init__(self) -> None:
        for flag, value, choices in (
            ("--spec", self.spec, (*METHODS, *ARBITRATED_SPECS)),
            ("--verify", self.verify, VERIFY_RULES),
            ("--dtype", self.dtype, DTYPES),
            ("--quantize", self.quantize, QUANTIZE),
            ("--activations", self.activations, ACTIVATIONS),
            ("--kv", self.kv, KV_FORMS),
            ("--kernels", self.kernels, KERNELS),
            ("--load", self.load, ("auto", "dummy")),
        ):
            if value not in choices:
                raise UsageError(
                    f"{flag} {value} is not known", fix=[f"{flag} {'|'.join(choices)}"]
                )
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device):
            raise UsageError(
                f"--device {self.device} is not known", fix=["--device auto|cpu|cuda|cuda:N"]
            )
        for flag, number, low, high in (
            ("--draft-max", self.draft_max, 0, MAX_DRAFT),
            ("--draft-ctx", self.draft_ctx, 1, 2**24),
            ("--ngram-min", self.ngram_min, 1, 64),
            ("--ngram-max", self.ngram_max, 1, 64),
            ("pool_tokens", self.pool_tokens, 0, 2**24),
            ("--lag", self.lag, 0, 2),
            ("--ctx", self.ctx, 2, 2**24),
            ("--memory-fraction", self.memory_fraction, 0.01, 1.0),
            ("--threads", self.threads, 1, 1024),
            ("slots", self.slots, 1, 1024),
            ("cache_pages", self.cache_pages, 1, 2**31 - 1),
            ("--tp", self.tp, 1, 64),
            ("--draft-tp", self.draft_tp, 1, 64),
        ):
            if number is not None and not low <= number <= high:
                raise UsageError(
                    f"{flag} {number} is out of range", reason=[f"valid: {low} to {high}"]
                )
        for clash in CLASHES:
            if clash.applies(self):
                raise clash.error_class(clash.message, reason=clash.reason, fix=clash.fix)


def format_size(size: int) -> str:
    """Return a number of bytes as text, in the largest suitable unit with two decimals."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size) >= scale / 10:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.2f} KiB" if abs(size) >= 2**10 else f"{size} B"


def split_spec(spec: str) -> tuple[str, bool]:
    """Return the method of a value of --spec, and True if prompt lookup drafts beside it
    (`+ngram`).
    """
    method, _, other = spec.partition("+")
    return method, bool(other)


class Clash(NamedTuple):
    """A combination of options that is refused, and the error that says so."""

    applies: Callable[[EngineConfig], bool]
    message: str
    fix: Sequence[str]
    reason: Sequence[str] = ()
    error_class: type[SpdError] = UsageError


_MODEL_METHODS = ", ".join(name for name, method in METHODS.items() if method.has_weights)
LEAVE_ONE_OUT_FIX = ("leave one of them out",)
CLASHES = (
    Clash(
        lambda c: c.verify != "coupled" and (c.method == "off" or c.draft_max == 0),
        "--verify rejection and block are about drafts, and speculation is turned off",
        ["leave --verify out", "--spec auto and --draft-max K above 0"],
    ),
    Clash(
        lambda c: c.verify != "coupled" and bool(c.adaptive),
        "--adaptive fits K to measured times, which only --verify coupled keeps out of the text",
        ["leave --adaptive out", "--verify coupled"],
        ["--verify rejection and block draft a fixed number of tokens a round."],
    ),
    Clash(
        lambda c: c.verify != "coupled" and c.synthetic_acceptance is not None,
        "--synthetic-acceptance imposes what --verify rejection or block would decide",
        LEAVE_ONE_OUT_FIX,
    ),
    Clash(
        lambda c: c.draft_model is not None and not c.allows_drafter_weights,
        f"--draft-model is for --spec {_MODEL_METHODS}, and another method was asked for",
        ["--spec auto --draft-model FOLDER", "leave --draft-model out"],
    ),
    Clash(
        lambda c: (
            c.method == "off"
            and bool(c.draft_max or c.adaptive or c.synthetic_acceptance is not None)
        ),
        "--draft-max, --adaptive and --synthetic-acceptance are about drafts, and --spec off asks for none",
        LEAVE_ONE_OUT_FIX,
    ),
    Clash(
        lambda c: c.lookup is not None and c.method != "ngram" and not split_spec(c.spec)[1],
        "--lookup is about what lookup drafts from, and --spec asks for no lookup",
        ["--spec auto+ngram", "leave --lookup out"],
    ),
    Clash(
        lambda c: (NGRAM_MIN if c.ngram_min is None else c.ngram_min) > c.ngram_max,
        "--ngram-min is more than --ngram-max",
        ["give both"],
        ["Defaults: 3 and 8."],
    ),
    Clash(
        lambda c: (c.draft_tp or c.draft_ctx) is not None and not c.allows_drafter_weights,
        "--draft-tp and draft_ctx are about a model that drafts, and --spec says that none does",
        ["leave them out", "--spec draft", "--spec mtp"],
    ),
    Clash(
        lambda c: c.rendezvous is not None and c.tp == 1,
        "torchrun has started other ranks, and --tp 1 has no other rank",
        ["--tp N with as many processes", "spd without torchrun"],
    ),
    Clash(
        lambda c: bool(c.graphs) and (c.device == "cpu" or c.kernels in ("torch", "native")),
        "--graphs on captures Triton kernels, which --device cpu and --kernels torch or native rule out",
        ["--graphs auto"],
        error_class=IncompatibleError,
    ),
    Clash(
        lambda c: c.activations == "int8" and (c.device[:4] == "cuda" or c.kernels == "triton"),
        "--activations int8 is for a CPU, and --device cuda or --kernels triton asks for a GPU's kernels",
        ["leave --activations out", "--device cpu --kernels auto"],
        error_class=IncompatibleError,
    ),
    Clash(
        lambda c: c.draft_tp is not None and c.tp % c.draft_tp != 0,
        "--draft-tp must divide --tp",
        ["leave --draft-tp out", "--draft-tp 1"],
        ["Ranks form groups of one size that each run the drafter."],
    ),
)
"""Every combination of options that is refused, each with its own message."""
