"""Who takes part in a round, and what follows from that alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from spd.runtime.sampler_class import SamplerClass
from spd.runtime.sequence import Sequence


@dataclass(frozen=True)
class Party:
    """The sequences of one round; an engine keeps it for as long as nobody comes or goes."""

    epochs: tuple[int, ...] = ()
    """Of each slot; 0: it does not take part."""
    needs: SamplerClass = field(default_factory=SamplerClass)
    logprobs: int | None = None
    """The most log-probabilities that anybody wants; None where nobody wants any."""

    @staticmethod
    def of(sequences: Iterable[Sequence], epochs: tuple[int, ...]) -> Party:
        """What those sequences, whose epochs these are, come to."""
        sequences = list(sequences)
        wanted = [sequence.request.params.logprobs for sequence in sequences]
        return Party(
            epochs,
            reduce(or_, (sequence.needs for sequence in sequences), SamplerClass()),
            max((one for one in wanted if one is not None), default=None),
        )


def epochs_of(sequences: Iterable[Sequence], slots: int) -> tuple[int, ...]:
    """The epochs of that many slots, 0 for those of no given sequence."""
    epochs = [0] * slots
    for sequence in sequences:
        epochs[sequence.slot] = sequence.epoch
    return tuple(epochs)
