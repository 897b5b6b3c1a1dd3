"""Every family, drafter and size of the drafting groups over gloo: the tokens of one rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spd.errors import IncompatibleError
from spd.runtime import SamplingParams
from tests.helpers import (
    DampedLayers,
    Run,
    collect_drafts,
    collect_outputs,
    make_engine,
    random_prompts,
    run_all,
)
from tests.pairs import MTP_FAMILIES
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny import VARIANTS, write_tiny
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_dense import FAMILIES, write_dense, write_mxfp4
from tests.recipes.tiny_eagle3 import RANDOM_HEAD_SHAPE, write_tiny_eagle3
from tests.recipes.tiny_mtp import write_tiny_mtp

pytestmark = pytest.mark.usefixtures("threads")
PROMPTS = [*random_prompts(2, 75, 256), *random_prompts(1, 20, 256, seed=1)]
LONG = SamplingParams(max_tokens=14, ignore_eos=True)
PARAMS = [replace(LONG, temperature=t, seed=i) for i, t in enumerate((0.0, 0.8, 1.2))]
HEADS = {
    **dict.fromkeys(("glm4_moe", "glm4_moe_air", "glm4_moe_lite"), "glm4"),
    "mimo": "mimo",
    "ernie4_5": "ernie",
    "qwen3_moe": "mtp",
}  # How a variant's MTP head is named; any other's as DeepSeek's. Families without heads are none of these.
loud, silent = (
    DampedLayers(full_layers=1),
    DampedLayers(full_layers=1, damped_gain=0.0),
)  # Such drafts often agree with a `loud` target.
WHOLE = (
    "granite_hybrid_moe"  # Its Mamba-2 heads are one group, whose outputs are normalised together.
)


def write_model(folder: Path, name: str, **options: Any) -> Path:
    if name == "fp8":  # heads and widths begin and end inside blocks of 24
        wide = write_tiny(folder / "wide", **{**VARIANTS["deepseek_v3"], "hidden": 72, **options})
        return write_twin(wide, folder / "fp8", block=24)
    if name in VARIANTS:
        return write_tiny(folder, **{**VARIANTS[name], "layers": 3, **options})
    return write_dense(folder, name, **options)


def drafters(name: str, folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    target = write_model(folder / "target", name, residual_gain=loud)
    yield target, {"spec": "off"}
    yield target, {"spec": "ngram", "ngram_min": 1, "draft_max": 4, "lag": 1}
    draft = write_model(folder / "draft", name, residual_gain=silent)
    yield target, {"spec": "draft", "draft_max": 3, "draft_model": draft}
    if name in VARIANTS:
        family = HEADS.get(name, "deepseek")
        headed = write_tiny_mtp(folder / "mtp", variant=name, family=family, modules=2, kind="copy")
        yield headed, {"spec": "off"}
        yield headed, {"spec": "mtp", "draft_max": 3}
    if name in VARIANTS or name == "gpt_oss":
        head = write_tiny_eagle3(folder / "head", target, aux=(1, 3))
        yield target, {"spec": "eagle3", "draft_max": 3, "draft_model": head}


def runs_of(folder: Path, **options: Any) -> list[Run]:
    engine = make_engine(folder, slots=len(PROMPTS), **options)
    runs = run_all(engine, PROMPTS, PARAMS)
    engine.close()
    return runs


def check_family(name: str, ranks: int, folder: Path, groups: list[int]) -> None:
    """Check the tokens of one rank in float32, of no speculation in bfloat16, and the drafts."""
    plain = dict[Path, Any]()
    rounded = dict[Path, Any]()
    for target, options in drafters(name, folder):
        if target not in plain:
            plain[target] = collect_outputs(runs_of(target))
            rounded[target] = collect_outputs(runs_of(target, tp=ranks, dtype="bfloat16"))
        neural = options["spec"] in ("draft", "mtp", "eagle3")
        accepted = None
        for group in groups if neural else [1]:
            if options["spec"] == "eagle3" and group > RANDOM_HEAD_SHAPE["num_attention_heads"]:
                continue
            sizes = {"draft_tp": group} if neural else {}
            runs = runs_of(target, tp=ranks, **sizes, **options)
            assert collect_outputs(runs) == plain[target], (options, group)
            accepted = accepted or collect_drafts(runs)
            assert collect_drafts(runs) == accepted, (options, group)
        if neural and options["spec"] != "eagle3":  # whose random head is hardly ever right
            counts = [count for run in runs for _, count in run.drafts]
            assert 0 < sum(counts) < 3 * len(counts), "some drafts are accepted and some are not"
        if options["spec"] != "off":
            divided = collect_outputs(
                runs_of(target, tp=ranks, **sizes, dtype="bfloat16", **options)
            )
            assert divided == rounded[target], (options, "bfloat16")


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
@pytest.mark.parametrize("clusters", [{"clusters": 4, "selected": 3}, {}])
def test_an_assistant_s_ranks_are_its_target_s(
    tmp_path: Path, family: str, clusters: dict[str, int]
) -> None:
    target = write_model(tmp_path / "target", family)
    folder = write_assistant(tmp_path / "assistant", target, **clusters)
    options: dict[str, Any] = {
        "spec": "assistant",
        "draft_model": folder,
        "draft_max": 3,
        "kernels": "auto",
    }
    alone = runs_of(target, **options)
    runs = runs_of(target, tp=2, lag=1, **options)
    assert collect_outputs(runs) == collect_outputs(runs_of(target, kernels="auto"))
    assert collect_drafts(runs) == collect_drafts(alone)
    with pytest.raises(IncompatibleError, match="reads its target's cache"):
        make_engine(target, tp=2, draft_tp=1, **options)


def test_only_parts_that_divide_evenly_are_divided(tmp_path: Path) -> None:
    """Experts in MXFP4 are divided; one group of recurrent heads by two, six by four, is not."""
    folder = write_mxfp4(tmp_path / "mxfp4", layers=2)
    assert collect_outputs(runs_of(folder, tp=2)) == collect_outputs(runs_of(folder))
    for name, ranks in ((WHOLE, 2), ("step3", 4)):
        with pytest.raises(IncompatibleError, match=f"--tp {ranks} does not divide"):
            make_engine(write_model(tmp_path / name, name), tp=ranks)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize(
    "name", ["step3", "nemotron_h", *sorted(MTP_FAMILIES.keys() - {"step3", "nemotron_h"})]
)
def test_a_family_s_own_mtp_layers_are_divided(tmp_path: Path, name: str) -> None:
    folder = write_tiny_mtp(tmp_path, kind="copy", **MTP_FAMILIES[name])
    options: dict[str, Any] = {"spec": "mtp", "draft_max": 3}
    alone = runs_of(folder, **options)
    runs = runs_of(folder, tp=2, lag=1, **options)
    assert collect_outputs(runs) == collect_outputs(alone) == collect_outputs(runs_of(folder))
    assert collect_drafts(runs) == collect_drafts(alone)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*VARIANTS, *sorted(FAMILIES.keys() - {WHOLE}), "fp8"])
def test_every_family_and_drafter_matches_one_rank(name: str, ranks: int, tmp_path: Path) -> None:
    if (name, ranks) == ("step3", 4):
        pytest.skip("six heads of layers that slide")
    check_family(name, ranks, tmp_path, [group for group in (1, 2, 4) if group <= ranks])
