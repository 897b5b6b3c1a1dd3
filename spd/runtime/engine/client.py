"""The interface of an engine, which may run in this process or in a server. No torch here."""

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


@dataclass(frozen=True, eq=False, repr=False)
class EngineInfo:
    """The parts of an engine's plan that users of the engine read."""

    spec: str
    """The method that proposes tokens, or `off`."""
    draft_max: int
    """Largest number of draft tokens of a slot in a round."""
    ctx: int
    """Context of a request in tokens."""
    slots: int
    """Requests that are decoded together."""
    verify: str
    """The rule by which drafts are accepted, a value of --verify."""
    adaptive: bool
    """True if the number of drafts follows the acceptance."""
    imposes_acceptance: bool
    """True if acceptance is synthetic, to measure speed."""
    kernels_reason: str
    plan: Mapping[str, Any]
    """The full plan as plain JSON values."""

    @classmethod
    def from_plan(cls, plan: EnginePlan) -> EngineInfo:
        """Return the parts of a plan that users of its engine read."""
        return cls.from_json(plan.as_dict())

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> EngineInfo:
        """Return the same parts of a plan in its JSON form, as `EnginePlan.as_dict` makes it."""
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
    """An engine, as the command line, the server and library users call it.

    Requests are added, and each step returns the events that have come since the last one.
    """

    info: EngineInfo
    """The engine's plan, for its users."""
    load_ms: float
    """Milliseconds that loading took; 0 where a server had loaded before."""
    prefilling: Callable[[int, int], None]
    """Called with the number of a prompt's positions that are written, and the number of all."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None where it has none."""

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer; the check does not load it."""

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or an event has not been returned."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UsageError and IncompatibleError where it is refused."""

    def abort(self, request_id: str) -> None:
        """End a running request within a round; do nothing for another one."""

    def step(self) -> list[Event]:
        """Run a step, a round at most, and return the events that have come since the last one.

        Raises EngineError and ResourceError.
        """

    def metrics(self, request_id: str) -> RequestMetrics:
        """Return the counters of a request. Raises KeyError for an unknown one."""

    def capture_ahead(
        self, params: Collection[SamplingParams], limit: int | None = None, concurrency: int = 1
    ) -> int:
        """Capture up to `limit` rounds that such requests will probably run; return how many.

        concurrency: how many of these requests will at least run together.
        """

    def close(self) -> None:
        """Abort all requests, and release the engine or the connection to it."""
