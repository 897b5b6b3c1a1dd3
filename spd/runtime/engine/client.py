"""The door to an engine, whether it runs in this process or in a server. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.metrics import RequestMetrics
    from spd.runtime.engine.request import Event, Request
    from spd.runtime.plan.plan import EnginePlan
    from spd.runtime.round.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineInfo:
    """What an engine's plan says to those who use the engine."""

    spec: str
    """What proposes tokens: a method, or `off`."""
    draft_max: int
    """Most draft tokens in a round."""
    ctx: int
    """Context of a request in tokens."""
    slots: int
    """Requests that are decoded together."""
    verify: str
    adaptive: bool
    """Whether the number of drafts follows what is accepted."""
    imposes_acceptance: bool
    """Whether acceptance is made up, to measure speed."""
    kernels_reason: str
    plan: Mapping[str, Any]
    """The whole plan as plain JSON values."""

    @classmethod
    def from_plan(cls, plan: EnginePlan) -> EngineInfo:
        """Return what a plan says."""
        return cls.from_json(plan.as_dict())

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> EngineInfo:
        """Return what the JSON of a plan says."""
        return cls(
            spec=plan["spec"],
            draft_max=plan["draft_max"],
            ctx=plan["ctx"],
            slots=plan["slots"],
            verify=plan["verify"],
            adaptive=plan["adaptive"],
            imposes_acceptance=plan["synthetic_acceptance"] is not None,
            kernels_reason=plan["kernels_reason"],
            plan=plan,
        )


class EngineClient(Protocol):
    """An engine as the command line, the server and library users know it.

    Requests are added, and each step returns the events that have come since the last one.
    """

    info: EngineInfo
    """What its plan says."""
    load_ms: float
    """Milliseconds that loading took; 0 where a server had loaded before."""
    prefilling: Callable[[int, int], None]
    """Called with the positions of a prompt that are written, and how many it has."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What names tokens; None where the model has no tokenizer."""

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer, which is not opened for this."""

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or an event has not been taken."""

    def add(self, request: Request) -> None:
        """Begin a request. Raises UsageError and IncompatibleError where it is refused."""

    def abort(self, request_id: str) -> None:
        """End a request within a round, if it runs."""

    def step(self) -> list[Event]:
        """Return the events of a round. Raises EngineError and ResourceError."""

    def metrics(self, request_id: str) -> RequestMetrics:
        """Return the counters of a request. Raises KeyError for an unknown one."""

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture up to `limit` rounds that such requests will probably run; return how many.

        concurrency: how many of these requests will at least run together.
        """

    def close(self) -> None:
        """Let go of the engine."""
