"""The routed experts of one layer, and the one that every row goes through."""

from __future__ import annotations

from torch import Tensor

from spd.formats.block_config import RouterConfig
from spd.kernels.dispatch import Kernels
from spd.kernels.rms_norm import rms_norm
from spd.kernels.silu_mul import silu_mul
from spd.runtime.layers.linear import AnyLinear, in_tiles
from spd.runtime.models.base import ForwardBatch, Residual


class MoeMlp:
    """stream + experts(norm(stream)) + shared(norm(stream)); gate_up [E, 2 I, K], down [E, K, I]."""

    def __init__(
        self,
        norm: Tensor,
        router: Tensor,
        correction: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        shared: tuple[AnyLinear, AnyLinear] | None,
        rule: RouterConfig,
        epsilon: float,
        kernels: Kernels,
    ) -> None:
        self.norm, self.router, self.correction = norm, router, correction
        self.gate_up, self.down, self.shared = gate_up, down, shared
        self.rule, self.epsilon, self.kernels = rule, epsilon, kernels

    def products(self) -> tuple[AnyLinear, ...]:
        """The block's matrices in the order in which they run, but for the experts'."""
        return self.shared or ()

    def __call__(self, stream: Residual, batch: ForwardBatch) -> Residual:
        """The stream [T, hidden] with this block added."""
        x = rms_norm(stream.x, self.norm, self.epsilon)
        chunk = batch.chunk_start is not None
        mixed = in_tiles(lambda rows: self._routed(rows, chunk), x, batch.tile)
        if self.shared is not None:
            gate_up, down = self.shared
            mixed = mixed + down.product(silu_mul(gate_up.product(x, batch)), batch)
        return Residual(stream.x + mixed)

    def _routed(self, x: Tensor, chunk: bool) -> Tensor:
        rule = self.rule
        ids, weights = self.kernels.route(
            x,
            self.router,
            self.correction,
            rule.per_token,
            rule.groups,
            rule.groups_kept,
            rule.group_best,
            rule.sigmoid,
            rule.normalised,
            rule.scale,
        )
        mixed: Tensor = self.kernels.experts(x, ids, weights, self.gate_up, self.down, chunk=chunk)
        return mixed
