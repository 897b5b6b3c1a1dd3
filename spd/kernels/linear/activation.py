"""The activations of MLPs and experts. No torch here."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Activation(NamedTuple):
    """An activation of a first product's rows: gates g [I], then inputs u [I].

    silu    silu(g) * u; with a limit min(silu(g), limit) * clip(u)
    gelu    gelu(g) * u, gelu in its form with tanh
    swiglu  (clip(u) + 1) * h * sigmoid(alpha * h) of h = min(g, limit)
    relu2   relu(u) ** 2 of rows without gates

    clip is to -limit and limit. Sources: Shazeer 2020 (GLU variants); So et al. 2021 (Primer);
    gpt-oss and Step-3.5 of Hugging Face transformers 5 for limits.
    """

    kind: Literal["silu", "gelu", "swiglu", "relu2"]
    limit: float | None = None
    alpha: float = 1.0

    @property
    def gated(self) -> bool:
        """True if the first half of the rows are gates."""
        return self.kind != "relu2"


SILU = Activation("silu")
GELU = Activation("gelu")
RELU2 = Activation("relu2")
