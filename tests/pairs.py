"""Targets with their drafters: the rows of the matrices that show speculation to be invisible."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.formats.demo import demo_folder
from spd.runtime import Engine
from spd.runtime.models.gguf_forms import FORMS as GGUF_TYPES
from tests.helpers import DampedLayers, TinyShelf, make_fast_engine
from tests.recipes.tiny import VARIANTS
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_block import write_tiny_block_pair
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_gguf import write_tiny_gguf
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.assistant_reference import LibraryAssistant
from tests.runtime.block_reference import PlainBlock
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.mtp_reference import PlainDrafter, PlainMtp

damped_gain = DampedLayers(full_layers=2)
"""A residual gain by which a draft model of the first two layers often agrees with the target."""
MTP_HEADS: dict[str, dict[str, Any]] = {
    "three": {"family": "mimo", "modules": 3, "hidden_share": 0.1},
    "one": {"family": "deepseek"},
    "deepseek": {"family": "deepseek", "variant": "deepseek_v3"},
}
ODD_LAYERS = {"residual_gain": lambda layer: 0.06 if layer % 2 else 0.012}
"""Options of a target whose odd layers count for more, so that an MTP module like them often
agrees.
"""
MTP_FAMILIES: dict[str, dict[str, Any]] = {
    "mimo_v2": {"family": "mimo_v2", "variant": "mimo_v2", "modules": 2},
    "step3": {"family": "step3", "variant": "step3", "modules": 3},
    "nemotron_h": {"family": "nemotron_h", "variant": "nemotron_h_latent", **ODD_LAYERS},
    "glm4_moe_lite": {"family": "glm4", "variant": "glm4_moe_lite"},
    "ernie4_5": {"family": "ernie", "variant": "ernie4_5"},
}
"""Families whose MTP modules are layers of their own kind."""
EAGLE3_HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"aux": (1, 2, 3), "hidden_share": 0.3, "target_options": {"layers": 3}},
    "speculators": {
        "layout": "speculators",
        "aux": (0, 2),
        "hidden_share": 0.4,
        "target_options": {"layers": 2},
        "norm_output": True,
        "fc_norm": True,
        "own_embedding": True,
    },
}
BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {"taps": (0, 2), "kinds": "fs", "window": 40, "is_causal": False, "block_size": 9},
    "dspark": {
        "dialect": "speculators",
        "markov": "gated",
        "draft_vocab": 300,
        "kinds": "sf",
        "window": 40,
        "block_size": 8,
    },
    "dflash2": {"selector_top_k": 6, "conv_kernel_size": 3, "block_size": 9},
}
LOOKUP_LENGTH = 7
"""Most drafts of prompt lookup in a round, where a model's drafts are fewer."""
DRAFT_LENGTHS = (
    3,
    LOOKUP_LENGTH,
    LOOKUP_LENGTH,
    1,
    LOOKUP_LENGTH,
    0,
    LOOKUP_LENGTH,
    LOOKUP_LENGTH,
    LOOKUP_LENGTH,
    LOOKUP_LENGTH,
    3,
    2,
    0,
    0,
    LOOKUP_LENGTH,
)
"""Drafts of the rounds, repeated: rounds of every kind follow every other."""

CHAINED = (0, 2, 1, 0, 3)
"""Drafts of a model that lookup continues in the rounds of `LOOKUP_LENGTH`, repeated; 0: lookup alone."""


@dataclass(frozen=True)
class Pair:
    """A target, and the engine options that give it a drafter."""

    model: Path
    speculation_options: dict[str, Any]
    reference: Callable[[], PlainDrafter] | None = None
    """Makes the plain form of a head, whose drafts are those of the definition."""

    def make_plain_engine(self, **options: Any) -> Engine:
        return make_fast_engine(self.model, **options)

    def make_engine(self, k: int, **options: Any) -> Engine:
        """Make an engine that drafts k tokens a round, or as `options` say."""
        drafts = {} if self.speculation_options["spec"] == "off" else {"draft_max": k}
        return self.make_plain_engine(**{**self.speculation_options, **drafts, **options})

    def make_varying_engine(self, lengths: Iterable[int] = DRAFT_LENGTHS, **options: Any) -> Engine:
        """Make an engine whose rounds draft `lengths` tokens, repeated."""
        engine = self.make_engine(LOOKUP_LENGTH, **{"adaptive": True, **options})
        length_cycle = itertools.cycle(lengths)
        chained_cycle = itertools.cycle(CHAINED)
        chooser = engine.draft_length

        def choose() -> int:
            """Return the next number of drafts, and set how many a model makes before lookup."""
            length = next(length_cycle)
            chains = chooser.lookup_k and length > chooser.maximum
            chooser.chained = min(next(chained_cycle), chooser.maximum) if chains else 0
            return length

        chooser.choose_k = choose  # type: ignore[method-assign]
        return engine


class Pairs:
    """Writes the folders of each pair once.

    Names are METHOD, METHOD+ngram, and FAMILY/METHOD; a type of GGUF stands for a family.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny = TinyShelf(folder).get
        self.pairs = dict[str, Pair]()

    def get(self, name: str) -> Pair:
        if name not in self.pairs:
            self.pairs[name] = self._make(name)
        return self.pairs[name]

    def _make(self, name: str) -> Pair:
        method, _, lookup = name.partition("+")
        if lookup:
            pair = self.get(method)
            spec = f"{pair.speculation_options['spec']}+ngram"
            return Pair(
                pair.model,
                {**pair.speculation_options, "spec": spec, "ngram_min": 2},
                pair.reference,
            )
        folder = self.folder / name
        if name == "demo":
            return Pair(demo_folder(), {"spec": "mtp"})
        if name in EAGLE3_HEADS:
            target = folder / "target"
            head = folder / "head"
            write_tiny_pair(target, head, kind="copy", **EAGLE3_HEADS[name])
            return Pair(
                target, {"spec": "eagle3", "draft_model": head}, lambda: PlainEagle3(target, head)
            )
        if name in BLOCK_DRAFTERS:
            target = folder / "target"
            drafter = folder / "drafter"
            write_tiny_block_pair(target, drafter, **BLOCK_DRAFTERS[name])
            return Pair(
                target,
                {"spec": "block", "draft_model": drafter},
                lambda: PlainBlock(target, drafter),
            )
        if name in MTP_HEADS:
            write_tiny_mtp(folder, kind="copy", **MTP_HEADS[name])
            family = MTP_HEADS[name]["family"]
            modules = MTP_HEADS[name].get("modules", 1)
            return Pair(folder, {"spec": "mtp"}, lambda: PlainMtp(folder, family, modules))
        family, _, method = name.rpartition("/")
        if family == "hybrid":
            return self._hybrid(method)
        target = folder if method == "mtp" else self._layers(family or "qwen3", 4)
        if method in ("off", "ngram"):
            return Pair(target, {"spec": method, **({"ngram_min": 1} if method == "ngram" else {})})
        if method == "assistant":
            speculation_options = {
                "spec": "assistant",
                "draft_model": write_assistant(folder, target, clusters=4, selected=3),
            }
            return Pair(target, speculation_options, lambda: LibraryAssistant(target, folder))
        if method == "mtp":
            write_tiny_mtp(folder, kind="copy", **MTP_FAMILIES[family])
            return Pair(folder, {"spec": "mtp"})
        assert method in ("self", "draft"), name
        drafter = target if method == "self" else self._layers(family or "qwen3", 2)
        return Pair(target, {"spec": "draft", "draft_model": drafter})

    def _hybrid(self, method: str) -> Pair:
        """Return a pair of recurrent and attention layers and an MTP layer.

        The draft model has two such layers.
        """
        draft = self.folder / "hybrid-draft"
        folder = self.folder / "hybrid"
        if not folder.exists():
            write_tiny_hybrid(folder, mtp=True, agreeing=True)
            write_tiny_hybrid(draft, agreeing=True, num_hidden_layers=2, full_attention_interval=2)
        method_options: dict[str, dict[str, Any]] = {
            "draft": {"draft_model": draft},
            "ngram": {"ngram_min": 1},
        }
        return Pair(folder, {"spec": method, **method_options.get(method, {})})

    def _layers(self, family: str, layers: int) -> Path:
        if family in GGUF_TYPES:
            file = self.folder / f"{family}-{layers}.gguf"
            return write_tiny_gguf(file, family, layers=layers)
        options: dict[str, Any] = {"layers": layers, "residual_gain": damped_gain, "seed": 3}
        if family in VARIANTS:
            return self.tiny(family, **options)
        assert family in FAMILIES
        folder = self.folder / f"{family}-{layers}"
        return (
            folder
            if folder.exists()
            else write_dense(folder, family, max_positions=1024, **options)
        )
