"""An EAGLE-3 head's tensors to a running head, which shares what it can with the target beside it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.formats.eagle3 import EMBEDDING, HEAD, OFFSETS
from spd.formats.model_config import ModelConfig, read_model_config
from spd.kernels.dispatch import Kernels
from spd.kernels.paged_attention import AttentionHeads
from spd.runtime.dummy_weights import dummy_fill
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.loader import checkpoint_fill, rank_layout
from spd.runtime.models import eagle3, weights
from spd.runtime.models.decoder import Decoder
from spd.runtime.models.eagle3_head import AuxStates, Eagle3Head, HeadRules
from spd.runtime.models.layer_builder import LayerBuilder, share_workspace_of
from spd.runtime.models.shards import Shard
from spd.runtime.models.weight_form import WIDE, WeightForm
from spd.runtime.parallel.communicator import Communicator
from spd.runtime.progress import LoadMeter
from spd.runtime.weight_space import Fill, WeightSpace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a head runs: beside which target, in what form, on which of several ranks."""

    target: Decoder
    target_folder: Path
    usable_vocab: int
    """Ids below it can be drawn."""
    dtype: torch.dtype
    device: str
    kernels: Kernels
    ranks: Communicator | None
    apart: bool
    """Other ranks than the target's share the head, so that it has tables for itself."""

    def own(self, rows: int) -> tuple[int, int]:
        """Which of so many rows of a table are this rank's."""
        return (0, rows) if self.ranks is None else Shard(self.ranks.rank, self.ranks.size).ids(rows)

    def table(self, whole: Tensor) -> Tensor:
        """This rank's rows of a table."""
        first, end = self.own(whole.shape[0])
        return whole[first:end].to(self.device, self.dtype)


class HeadSource:
    """What of a head stands in its folder, and not in tensors of fixed shapes."""

    def __init__(self, config: ModelConfig, folder: Path, checkpoint: Checkpoint, place: Place) -> None:
        self.config, self.folder, self.checkpoint, self.place = config, folder, checkpoint, place
        self.prefix = eagle3.layer_prefix(checkpoint)
        self.shares_head = eagle3.shares_head(config, checkpoint)
        self.ids, self.order = self._vocabulary()

    def fill(self, meter: LoadMeter) -> Fill:
        """What writes the head's tensors, or this rank's parts of them."""
        cuts = dict(eagle3.cuts(self.config, rank_layout(self.config, self.place.ranks), self.prefix))
        return checkpoint_fill(self.checkpoint, self.config, self.place.device, meter, cuts)

    def embedding(self) -> Tensor | None:
        """A table of its own, of the target's size, where it is not the target's bit for bit."""
        place = self.place
        with Checkpoint.open(place.target_folder) as theirs:
            if EMBEDDING in self.checkpoint.tensors and not _same(
                self.checkpoint.read(EMBEDDING), theirs.read(weights.EMBEDDING)
            ):
                return place.table(self.checkpoint.read(EMBEDDING))
            return place.table(theirs.read(weights.EMBEDDING)) if place.apart else None

    def head(self) -> Tensor | None:
        """What makes logits where it is no tensor as stored: rows in another order, or the target's."""
        place = self.place
        if self.order is not None:
            return place.table(self.checkpoint.read(HEAD)[self.order])
        if not (self.shares_head and place.apart):
            return None
        tied = read_model_config(place.target_folder).tie_embeddings
        with Checkpoint.open(place.target_folder) as theirs:
            return place.table(theirs.read(weights.EMBEDDING if tied else weights.HEAD))

    def _vocabulary(self) -> tuple[Tensor | None, Tensor | None]:
        """The target's id of each of the head's, int64 and ascending, and the order in which they are stored.

        None where ids are the target's own, and where the order is this one.
        """
        if OFFSETS not in self.checkpoint.tensors:
            return None, None
        size, rows = self.config.vocab_size, eagle3.head_rows(self.config)
        stored = self.checkpoint.read(OFFSETS).long()
        found, order = (torch.arange(rows) + stored).sort()
        least, most = int(found[0]), int(found[-1])
        if least < 0 or most >= size or bool((found.diff() == 0).any()):
            raise CheckpointError(
                f"{self.folder}: tensor {OFFSETS}: does not lead to different token ids below {size:,}",
                reason=["Each of its numbers is added to its own index."],
            )
        if least >= self.place.usable_vocab:
            raise CheckpointError(
                f"{self.folder}: tensor {OFFSETS}: leads to no id that the tokenizer knows",
                reason=[f"The first is {least:,}; the tokenizer knows {self.place.usable_vocab:,}."],
            )
        ascending = torch.equal(order, torch.arange(rows))
        if self.shares_head and not ascending:
            raise CheckpointError(
                f"{self.folder}: tensor {OFFSETS}: gives other ids to the rows of {HEAD}, which is missing",
                reason=["Without it a head draws by its target's."],
            )
        return None if rows == size else found.to(self.place.device), None if ascending else order


def _same(own: Tensor, other: Tensor) -> bool:
    """Whether two tables are equal bit for bit, read a part at a time."""
    step = 4096
    return own.shape == other.shape and all(
        torch.equal(own[i : i + step], other[i : i + step]) for i in range(0, own.shape[0], step)
    )


class DummySource:
    """The same made up: normal numbers, ids spread over the vocabulary."""

    prefix, shares_head = eagle3.DUMMY_PREFIX, False

    def __init__(self, config: ModelConfig, place: Place) -> None:
        self.config, self.place = config, place
        rows, size = eagle3.head_rows(config), config.vocab_size
        self.ids = None if rows == size else torch.arange(rows, device=place.device) * size // rows

    def fill(self, meter: LoadMeter) -> Fill:
        """See `HeadSource`."""
        return dummy_fill(self.place.device, False, meter)

    def embedding(self) -> Tensor | None:
        """See `HeadSource`; the target's where it is there."""
        if not self.place.apart:
            return None
        first, end = self.place.own(self.config.vocab_size)
        shape = (end - first, self.config.hidden_size)
        return torch.randn(shape, dtype=self.place.dtype, device=self.place.device)

    def head(self) -> None:
        """See `HeadSource`."""


def _built(
    config: ModelConfig,
    source: HeadSource | DummySource,
    place: Place,
    positions: int,
    meter: LoadMeter,
    form: WeightForm,
    rows: int,
) -> Eagle3Head:
    facts, kernels, target = config.eagle3, place.kernels, place.target
    assert facts is not None
    layout = rank_layout(config, place.ranks)
    folded, epsilon = kernels.name == "triton", config.rms_norm_eps
    builder = LayerBuilder(kernels, epsilon, place.dtype, fold_norms=folded, form=form, ranks=place.ranks)
    space = WeightSpace(place.dtype, place.device, form)
    destinations = weights.table_destinations(config, layout)
    if source.shares_head:
        del destinations["head"]
    tables = space.block(destinations)
    tensors = space.layer(layout.layers[0], source.prefix)
    source.fill(meter)(space.take())
    norms = tensors.attention["norm"], tensors.attention["state_norm"], tables["final_norm"]
    layer = builder.layer(layout.layers[0], tensors)
    table = tables["embedding"] if "embedding" in tables else source.embedding()
    scores = source.head()
    scores = tables.get("head") if scores is None else scores
    named = None if source.ids is None else (source.ids, config.vocab_size)
    each = tables["aux_norms"].chunk(facts.num_aux) if "aux_norms" in tables else ()
    reader = AuxStates(
        facts.aux_layers(len(target.layers)),
        builder.linear(tables["fuse"]),
        tables.get("aux_norm"),
        each,
        epsilon,
    )
    share_workspace_of((reader.projection, *layer.products()), rows)
    attention = layout.layers[0].attention
    exact = torch.float32 if kernels.name == "triton" else place.dtype
    head = Eagle3Head(
        HeadRules(facts.norm_before_residual, facts.norm_output),
        norms,
        layer,
        target.embedding if table is None else builder.embedding(table, config.vocab_size),
        target.head if scores is None else builder.head(scores, eagle3.head_rows(config), named),
        source.ids,
        RotaryTable(config.rope, attention.rotary, positions, exact, place.device, shift=1),
        AttentionHeads(*attention.heads, first_key=1),
        epsilon,
        kernels,
    )
    target.reader = reader
    return head


@torch.inference_mode()
def load_eagle3(
    folder: Path,
    place: Place,
    *,
    positions: int,
    load: str,
    meter: LoadMeter,
    rows: int,
    form: WeightForm = WIDE,
) -> Eagle3Head:
    """A folder's EAGLE-3 head, or a random one of its shapes when load is "dummy"; its target feeds it.

    rows: the most rows of a forward pass other than a prompt chunk. Raises CheckpointError with every
    missing or mis-shaped tensor in one message.
    """
    config = read_model_config(folder)
    if load == "dummy":
        return _built(config, DummySource(config, place), place, positions, meter, form, rows)
    with Checkpoint.open(folder) as checkpoint:
        unused = eagle3.check_eagle3(config, checkpoint)
        if unused:
            logger.warning("%d tensors of %s are not used, %s first", len(unused), folder, unused[0])
        source = HeadSource(config, folder, checkpoint, place)
        head = _built(config, source, place, positions, meter, form, rows)
        checkpoint.check_unchanged()
    return head
