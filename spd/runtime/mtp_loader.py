"""An MTP head's tensors to running modules, which share the target's embedding and head where they can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.mtp import MtpLayout
from spd.formats.mtp_folder import MtpSource
from spd.kernels.dispatch import Kernels
from spd.runtime.dummy_weights import dummy_fill
from spd.runtime.layers.linear import SkinnyLinear, share_workspace
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.loader import checkpoint_fill
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.layer_builder import LayerBuilder
from spd.runtime.models.mtp_head import ModuleGlue, MtpModule
from spd.runtime.models.mtp_weights import check_source, glue_destinations, module_layer
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.models.weights import EMBEDDING, HEAD
from spd.runtime.progress import LoadMeter
from spd.runtime.weight_space import Fill, WeightSpace


class ModuleLoader:
    """Builds the modules of one head beside its loaded target."""

    def __init__(
        self,
        source: MtpSource,
        target: Decoder,
        fill: Fill,
        positions: int,
        dtype: torch.dtype,
        device: str,
        kernels: Kernels,
        form: WeightForm = WIDE,
    ) -> None:
        self.source, self.target, self.fill, self.positions = source, target, fill, positions
        self.dtype, self.device, self.kernels, self.form = dtype, device, kernels, form
        self.builder = LayerBuilder(
            kernels, source.config.rms_norm_eps, dtype, fold_norms=kernels.name == "triton", form=form
        )

    def module(self, number: int, copies: Mapping[str, Tensor]) -> MtpModule:
        """One module; copies: tables of its own, by `embedding` and `head`."""
        source, target = self.source, self.target
        config, family = source.config, source.layout.family
        layout = module_layer(config, family)
        space = WeightSpace(self.dtype, self.device, self.form)
        glue = space.block(glue_destinations(source.layout, number, config.hidden_size))
        tensors = space.layer(layout, source.layout.layer_prefix(number))
        views = space.take()
        self.fill(views)
        if family.centred_norms:
            for name, view in views.items():
                if "norm" in name and view.dim() == 1:
                    view.add_(1)
        projection = self.builder.linear(glue.pop("projection"))
        head = self.builder.linear(copies["head"]) if "head" in copies else target.head
        exact = torch.float32 if self.kernels.name == "triton" else self.dtype
        rotary = RotaryTable(
            config.rope, layout.attention.rotary, self.positions, exact, self.device, shift=number + 1
        )
        return MtpModule(
            family,
            number,
            ModuleGlue(glue["token_norm"], glue["hidden_norm"], projection, glue.get("final_norm")),
            self.builder.layer(layout, tensors),
            copies.get("embedding", target.embedding),
            head,
            rotary,
            replace(target.heads, first_key=number + 1),
            config.rms_norm_eps,
            self.kernels,
        )


def own_copies(
    layout: MtpLayout, module: int, head: Checkpoint, target: Checkpoint, *, tied: bool
) -> dict[str, str]:
    """Names of the module's embedding and head that are there and not, bit for bit, the target's."""
    family, found = layout.family, dict[str, str]()
    for key, template, name in (
        ("embedding", family.embedding, EMBEDDING),
        ("head", family.head, EMBEDDING if tied else HEAD),
    ):
        if template is None or (copy := layout.named(template, module)) not in head.tensors:
            continue
        if not torch.equal(head.read(copy), target.read(name)):
            found[key] = copy
    return found


@torch.inference_mode()
def load_modules(
    source: MtpSource,
    modules: int,
    target: Decoder,
    target_folder: Path,
    *,
    dtype: str,
    device: str,
    positions: int,
    kernels: Kernels,
    load: str,
    meter: LoadMeter,
    rows: int,
    form: WeightForm = WIDE,
) -> list[MtpModule]:
    """The first `modules` modules of a head, or random ones of its shapes when load is "dummy".

    rows: the most rows of a forward pass other than a prompt chunk. Raises CheckpointError with every
    missing or mis-shaped tensor in one message.
    """
    config, kind = source.config, getattr(torch, dtype)
    with Checkpoint.open(source.folder) as checkpoint, Checkpoint.open(target_folder) as theirs:
        check_source(source, checkpoint)
        fill = checkpoint_fill(checkpoint, config, device, meter)
        if load == "dummy":
            fill = dummy_fill(device, config.tie_embeddings, meter)
        loader = ModuleLoader(source, target, fill, positions, kind, device, kernels, form)
        made = []
        for number in range(modules):
            names = {}
            if load != "dummy":
                names = own_copies(source.layout, number, checkpoint, theirs, tied=config.tie_embeddings)
            copies = {key: checkpoint.read(name).to(device, kind) for key, name in names.items()}
            made.append(loader.module(number, copies))
        checkpoint.check_unchanged()
    matrices = [p for m in made for p in (m.glue.projection, *m.layer.products())]
    products = [p for p in matrices if isinstance(p, SkinnyLinear)]
    if products:
        share_workspace(products, rows)
    return made
