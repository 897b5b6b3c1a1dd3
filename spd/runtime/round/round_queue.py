"""What the engine asks of the device: slots, prompts and rounds, enqueued in order and read later.

`LocalRoundQueue` does it on this process's device; `LeadingQueue` sends each call to the other ranks first.
Arguments are plain values that every rank can know, since all make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.prompt_scores import PromptScores
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps


class HostLogprobs(NamedTuple):
    """Log-probabilities in host values: of the samples [S][R]; the likeliest, values and ids [S][R][N]."""

    sampled: list[list[float]]
    values: list[list[list[float]]]
    ids: list[list[list[int]]]


class RoundResult(NamedTuple):
    """What one round emitted, in host values."""

    rows: list[list[int]]  # of the ring, one a slot; see `read_emission`
    logprobs: HostLogprobs | None
    k: int
    draft_forwards: int
    next_drafts: list[list[int]] | None
    """What each slot's drafter proposed for the round after, where that was asked for."""
    seconds: tuple[float, float, float]
    """Draft, verify, rest, by the device's clock; a GPU counts sampling as verification."""
    gap: float  # seconds without a round before it, by the same clock; 0 for the first


class PendingRound(Protocol):
    """A round enqueued and not yet read."""

    def read(self) -> RoundResult:
        """Wait until the round has run and return what it emitted. Rounds are read in order."""
        ...


@dataclass(frozen=True)
class SlotAdmission:
    """A sequence that takes a slot: its text so far, its limits, and what its pages hold already."""

    slot: int
    tokens: list[int]
    """The prompt, and behind it the tokens that were committed before a preemption."""
    prompt_length: int
    params: SamplingParams
    draft_max: int | None
    length_limit: int
    stop_ids: tuple[int, ...]
    prefilled: int
    """Positions that the pages hold, but for those that come from the checkpoint."""
    pages: list[int]
    snapshot: int | None
    """The place of the recurrent states as of `prefilled`, where the model has some."""


class RoundQueue(Protocol):
    """Writes slots and prompts, and runs rounds in order, with a ticket for each."""

    @property
    def runner(self) -> ModelRunner:
        """Return the target's runner."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def captured(self) -> CapturedRounds | None:
        """Return the captured or recorded rounds; None where every round is eager."""
        ...

    @property
    def is_writing(self) -> bool:
        """True while parts of prompts, or checkpoints behind them, wait to be written."""
        ...

    def admit(self, admission: SlotAdmission) -> None:
        """Write a slot's row; it stays inactive."""
        ...

    def upload_pages(self, slot: int, pages: list[int]) -> None:
        """Upload a slot's page numbers."""
        ...

    def set_masks(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        """Set masks int32 [R, words] for a slot's next round, and its drafts, `legal` of them allowed."""
        ...

    def resume(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Let a slot that a stop id ended go on; from now on it stops at these ids."""
        ...

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        ...

    def retire(self, slot: int, pages: list[int], held: int, place: int | None) -> None:
        """Deactivate a slot, once its pages hold what others may find there, up to position `held`.

        place: of the checkpoint that its recurrent states are copied to.
        """
        ...

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        ...

    def write(
        self,
        slot: int,
        pages: list[int],
        start: int,
        end: int,
        chunked: bool,
        scored: int | None = None,
    ) -> None:
        """Write the caches of positions start to end of the prompt that was placed last, by `flush`.

        scored: how many of the likeliest tokens to keep at each position, beside the prompt's own token.
        """
        ...

    def save(self, place: int, slot: int, pages: list[int], end: int) -> None:
        """Copy a slot's states as of position `end` to a checkpoint's place, by `flush`."""
        ...

    def flush(self) -> None:
        """Enqueue what is still to be written of prompts."""
        ...

    def prompt_scores(self, slot: int) -> PromptScores:
        """Return, and forget, the scores of a slot's prompt; waits until they are computed."""
        ...

    def launch(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
    ) -> PendingRound:
        """Enqueue one round; see `Round.run`."""
        ...

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs. False: memory ran out, and all captures were let go."""
        ...

    def restart(self) -> None:
        """Forget what was enqueued, after a round that broke off."""
        ...

    def close(self) -> None:
        """Let go of what is not this process's own."""
        ...
