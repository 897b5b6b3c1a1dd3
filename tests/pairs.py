"""Targets and what drafts for them: the rows of the matrices that show speculation to be invisible."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spd.formats.demo import demo_folder
from spd.runtime import Engine
from tests.helpers import Damped, TinyShelf, quick_engine
from tests.recipes.tiny import VARIANTS
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.recipes.tiny_mtp import write_tiny_mtp
from tests.runtime.assistant_reference import LibraryAssistant
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.mtp_reference import PlainDrafter, PlainMtp

damped = Damped(loud=2)  # So that a draft of the first two layers often agrees.
HEADS: dict[str, dict[str, Any]] = {"three": {"family": "mimo", "modules": 3, "hidden_share": 0.1}}
HEADS |= {
    "one": {"family": "deepseek"},
    "deepseek": {"family": "deepseek", "variant": "deepseek_v3"},
}
SOFT = {
    "residual_gain": lambda layer: 0.06 if layer % 2 else 0.012
}  # A module that is as the odd layers.
MTP_OF: dict[str, dict[str, Any]] = {
    "mimo_v2": {"family": "mimo_v2", "variant": "mimo_v2", "modules": 2},
    "step3": {"family": "step3", "variant": "step3", "modules": 3},
    "nemotron_h": {"family": "nemotron_h", "variant": "nemotron_h_latent", **SOFT},
    "glm4_moe_lite": {"family": "glm4", "variant": "glm4_moe_lite"},
    "ernie4_5": {"family": "ernie", "variant": "ernie4_5"},
}  # Families that ship layers of their own kind.
EAGLES: dict[str, dict[str, Any]] = {
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
COPYING = 7  # What lookup alone drafts at most, beside a model.
LENGTHS = (
    3,
    COPYING,
    COPYING,
    1,
    COPYING,
    0,
    COPYING,
    COPYING,
    COPYING,
    COPYING,
    3,
    2,
    0,
    0,
    COPYING,
)
"""Drafts of rounds, over and over: every kind follows every other."""


@dataclass(frozen=True)
class Pair:
    """A target, and what asks for drafts for it."""

    model: Path
    speculation: dict[str, Any]
    reference: Callable[[], PlainDrafter] | None = (
        None  # Of a head: what its drafts are by their definition.
    )

    def plain(self, **options: Any) -> Engine:
        return quick_engine(self.model, **options)

    def engine(self, k: int, **options: Any) -> Engine:
        """One that drafts k tokens a round, or as other options say."""
        drafts = {} if self.speculation["spec"] == "off" else {"draft_max": k}
        return self.plain(**{**self.speculation, **drafts, **options})

    def changing(self, lengths: Iterable[int] = LENGTHS, **options: Any) -> Engine:
        """An engine whose drafts are as many as the lengths say, over and over."""
        engine = self.engine(COPYING, **{"adaptive": True, **options})
        turns = itertools.cycle(lengths)
        engine.draft_length.choose = lambda: next(turns)  # type: ignore[method-assign]
        return engine


class Pairs:
    """Writes what a pair is made of once. Names are those of METHOD, METHOD+ngram, and FAMILY/METHOD."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny = TinyShelf(folder).get
        self.made = dict[str, Pair]()

    def get(self, name: str) -> Pair:
        if name not in self.made:
            self.made[name] = self._make(name)
        return self.made[name]

    def _make(self, name: str) -> Pair:
        method, _, lookup = name.partition("+")
        if lookup:
            pair = self.get(method)
            spec = f"{pair.speculation['spec']}+ngram"
            return Pair(
                pair.model, {**pair.speculation, "spec": spec, "ngram_min": 2}, pair.reference
            )
        folder = self.folder / name
        if name == "demo":
            return Pair(demo_folder(), {"spec": "mtp"})
        if name in EAGLES:
            target = folder / "target"
            head = folder / "head"
            write_tiny_pair(target, head, kind="copy", **EAGLES[name])
            return Pair(
                target, {"spec": "eagle3", "draft_model": head}, lambda: PlainEagle3(target, head)
            )
        if name in HEADS:
            write_tiny_mtp(folder, kind="copy", **HEADS[name])
            family = HEADS[name]["family"]
            modules = HEADS[name].get("modules", 1)
            return Pair(folder, {"spec": "mtp"}, lambda: PlainMtp(folder, family, modules))
        family, _, method = name.rpartition("/")
        if family == "hybrid":
            return self._hybrid(method)
        target = folder if method == "mtp" else self._layers(family or "qwen3", 4)
        if method in ("off", "ngram"):
            return Pair(target, {"spec": method, **({"ngram_min": 1} if method == "ngram" else {})})
        if method == "assistant":
            own = {
                "spec": "assistant",
                "draft_model": write_assistant(folder, target, clusters=4, kept=3),
            }
            return Pair(target, own, lambda: LibraryAssistant(target, folder))
        if method == "mtp":
            write_tiny_mtp(folder, kind="copy", **MTP_OF[family])
            return Pair(folder, {"spec": "mtp"})
        assert method in ("self", "draft"), name
        drafter = target if method == "self" else self._layers(family or "qwen3", 2)
        return Pair(target, {"spec": "draft", "draft_model": drafter})

    def _hybrid(self, method: str) -> Pair:
        """Of recurrent and attending layers and an MTP layer; its draft model has two such layers."""
        draft = self.folder / "hybrid-draft"
        folder = self.folder / "hybrid"
        if not folder.exists():
            write_tiny_hybrid(folder, mtp=True, agreeing=True)
            write_tiny_hybrid(draft, agreeing=True, num_hidden_layers=2, full_attention_interval=2)
        more: dict[str, dict[str, Any]] = {
            "draft": {"draft_model": draft},
            "ngram": {"ngram_min": 1},
        }
        return Pair(folder, {"spec": method, **more.get(method, {})})

    def _layers(self, family: str, layers: int) -> Path:
        options: dict[str, Any] = {"layers": layers, "residual_gain": damped, "seed": 3}
        if family in VARIANTS:
            return self.tiny(family, **options)
        assert family in FAMILIES
        folder = self.folder / f"{family}-{layers}"
        return (
            folder
            if folder.exists()
            else write_dense(folder, family, max_positions=1024, **options)
        )
