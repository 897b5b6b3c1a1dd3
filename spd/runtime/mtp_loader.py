"""An MTP head's tensors to running modules, which share the target's embedding and head where they can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.formats.mtp import MtpLayout
from spd.formats.mtp_folder import MtpSource
from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.runtime.dummy_weights import dummy_fill
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.loader import checkpoint_fill
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.layer_builder import LayerBuilder, share_workspace_of
from spd.runtime.models.mtp_head import ModuleGlue, MtpModule
from spd.runtime.models.mtp_weights import check_source, glue_destinations, module_cuts, module_layer
from spd.runtime.models.shards import Shard
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.models.weights import EMBEDDING, HEAD
from spd.runtime.parallel.communicator import Communicator
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
        ranks: Communicator | None = None,
    ) -> None:
        self.source, self.target, self.fill, self.positions = source, target, fill, positions
        self.dtype, self.device, self.kernels, self.form = dtype, device, kernels, form
        self.shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        folded, epsilon = kernels.name == "triton", source.config.rms_norm_eps
        self.builder = LayerBuilder(kernels, epsilon, dtype, fold_norms=folded, form=form, ranks=ranks)

    def module(self, number: int, copies: Mapping[str, Tensor]) -> MtpModule:
        """One module; copies: tables of its own, by `embedding` and `head`."""
        source, target = self.source, self.target
        config, family = source.config, source.layout.family
        layout = module_layer(config, family, self.shard)
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
        own, size = self.builder, config.vocab_size
        head = own.head(copies["head"], size) if "head" in copies else target.head
        exact = torch.float32 if self.kernels.name == "triton" else self.dtype
        rotary = RotaryTable(
            config.rope, layout.attention.rotary, self.positions, exact, self.device, shift=number + 1
        )
        return MtpModule(
            family,
            number,
            ModuleGlue(glue["token_norm"], glue["hidden_norm"], projection, glue.get("final_norm")),
            self.builder.layer(layout, tensors),
            own.embedding(copies["embedding"], size) if "embedding" in copies else target.embedding,
            head,
            rotary,
            AttentionHeads(*layout.attention.heads, sliding=target.heads.sliding, first_key=number + 1),
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
    ranks: Communicator | None = None,
    apart: bool = False,
) -> list[MtpModule]:
    """The first `modules` modules of a head, or random ones of its shapes when load is "dummy".

    rows: the most rows of a forward pass other than a prompt chunk. With `ranks` this is one rank's part;
    `apart`: other ranks than the target's share a module, so that what it takes from the target is read
    again. Raises CheckpointError with every missing or mis-shaped tensor in one message.
    """
    config, kind = source.config, getattr(torch, dtype)
    with Checkpoint.open(source.folder) as checkpoint, Checkpoint.open(target_folder) as theirs:
        check_source(source, checkpoint)
        shard = None if ranks is None else Shard(ranks.rank, ranks.size)
        cuts = module_cuts(source, modules, shard)
        fill = checkpoint_fill(checkpoint, config, device, meter, cuts)
        if load == "dummy":
            fill = dummy_fill(device, config.tie_embeddings, meter)
        loader = ModuleLoader(source, target, fill, positions, kind, device, kernels, form, ranks)
        first, end = (0, config.vocab_size) if shard is None else shard.ids(config.vocab_size)
        theirs_too: dict[str, Tensor] = {}
        if apart:
            names = {"embedding": EMBEDDING, "head": EMBEDDING if config.tie_embeddings else HEAD}
            theirs_too = {k: theirs.read(n)[first:end].to(device, kind) for k, n in names.items()}
        made = []
        for number in range(modules):
            names = {}
            if load != "dummy":
                names = own_copies(source.layout, number, checkpoint, theirs, tied=config.tie_embeddings)
            copies = {k: checkpoint.read(name)[first:end].to(device, kind) for k, name in names.items()}
            made.append(loader.module(number, theirs_too | copies))
        checkpoint.check_unchanged()
    share_workspace_of((p for m in made for p in (m.glue.projection, *m.layer.products())), rows)
    return made
