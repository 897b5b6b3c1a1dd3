"""The ways to generate that are held against each other; those that compare most tokens a second
come first.

A probe that is stopped has then compared as many as it could. Every way that reads late or runs
eager has one beside it that shares its drafter, k and tokens, so that what was drafted and accepted
is compared too: the long ones captured at lag 0, 1 and 2, the short ones eager at each and
captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One way to generate; "off" is plain decoding, None is the plan's choice; of `runs` and
    `tokens` all.

    `requests`: of each run only so many.
    """

    method: str
    k: int = 0
    lag: int | None = None
    graphs: bool | None = None
    slots: int = 1
    requests: int | None = None
    tokens: int | None = None
    runs: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Return a label for the report."""
        graphs = {None: "", True: "_captured", False: "_eager"}[self.graphs]
        return (
            self.method
            + (f"_k{self.k}" if self.k else "")
            + ("" if self.lag is None else f"_lag{self.lag}")
            + graphs
            + (f"_b{self.slots}" if self.slots > 1 else "")
            + ("" if self.tokens is None else f"_{self.tokens}t")
        )

    @property
    def counted_with(self) -> tuple[Any, ...]:
        """Return a key shared by settings that must draft and accept the same."""
        return self.method, self.k, self.tokens


USUAL_K = {"mtp": 3, "draft": 4, "ngram": 4}
LAGS = (0, 1, 2)
_FULL: dict[str, Any] = {"slots": 16}
_MIXED: dict[str, Any] = {"slots": 16, "requests": 16, "runs": ("mixed",)}
_ALONE: dict[str, Any] = {"requests": 9, "runs": ("mixed",)}
_SHORT: dict[str, Any] = {"slots": 16, "requests": 6, "tokens": 32, "runs": ("mixed",)}
"""For eager rounds, which take many times as long as captured ones."""
DEMO = (
    *(Setting(method, k, lag=1, **_FULL) for method, k in USUAL_K.items()),
    *(Setting(method, k, lag=0, **_FULL) for method, k in USUAL_K.items()),
    *(Setting(method, k, lag=2, **_MIXED) for method, k in USUAL_K.items()),
    *(Setting(method, k, **_ALONE) for method, k in USUAL_K.items()),
    *(Setting(method, k, lag=1, **_SHORT) for method, k in USUAL_K.items()),
    *(
        Setting(method, k, lag=lag, graphs=False, **_SHORT)
        for lag in LAGS
        for method, k in USUAL_K.items()
    ),
    *(Setting(method, 1, **_MIXED) for method in USUAL_K),
    *(Setting(method, 7, **_MIXED) for method in USUAL_K),
    Setting("off", **_ALONE),
    Setting("off", lag=0, **_MIXED),
    Setting("off", lag=2, **_MIXED),
    *(Setting(method, 2, **_MIXED) for method in USUAL_K),
    Setting("off", graphs=False, **_SHORT),
    *(
        Setting(method, k, graphs=False, requests=3, tokens=32, runs=("mixed",))
        for method, k in USUAL_K.items()
    ),
    *(Setting("eagle3", 3, lag=lag, **_MIXED) for lag in LAGS),
    Setting("eagle3", 3, **_ALONE),
    *(Setting("eagle3", 3, lag=1, graphs=graphs, **_SHORT) for graphs in (None, False)),
)
"""Beside plain decoding in batches of 16."""

_TWO: dict[str, Any] = {"requests": 2}
SELF_DRAFT = (
    Setting("draft", 4, lag=1, **_FULL),
    Setting("draft", 7, lag=1, **_FULL),
    Setting("draft", 4, lag=1, **_TWO),
)
SELF_DRAFT_LONG = (
    *(Setting("draft", k, lag=1, **_FULL) for k in (4, 7, 1)),
    *(Setting("draft", 4, lag=lag, **_FULL) for lag in (0, 2)),
    *(Setting("draft", k, lag=1, **_FULL) for k in (2, 3, 5, 6)),
    Setting("ngram", 4, lag=1, **_FULL),
    Setting("draft", 4, lag=1, **_TWO),
    Setting("draft", 1, lag=1, **_TWO),
    Setting("off", lag=1, **_TWO),
    *(Setting("draft", 4, lag=lag, tokens=48, graphs=False, **_FULL) for lag in LAGS),
    Setting("draft", 4, lag=1, tokens=48, **_FULL),
)
"""Beside plain decoding in batches of 16, of an 8B shape that drafts for itself."""
