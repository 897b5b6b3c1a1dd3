"""Published releases from their configurations and tensor lists: used tensors, MTP heads, memory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.folder import ModelFolder
from spd.formats.mtp import find_mtp_source
from spd.runtime import EngineConfig
from spd.runtime.models import family_layout
from spd.runtime.models.mtp_weights import check_mtp_source, count_module_bytes
from spd.runtime.models.weights import check_weights
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory import page_bytes, recurrent_slot_bytes, state_bytes, tensor_bytes
from spd.runtime.plan.plan import EnginePlan, possible_rank_counts, resolve_plan
from spd.runtime.round.limits import PAGE_SIZE, recurrent_ring_depth
from tests.recipes import published_hybrids
from tests.recipes import published_others as others
from tests.recipes.mtp_folders import SIZES, Entry
from tests.recipes.published_hybrids import (
    DELTA_HEAD,
    KEY_HEADS,
    RELEASES,
    TENSOR_COUNTS,
    Release,
    mtp_tensors,
)
from tests.recipes.published_quantized import QUANTIZED, parts_of, write_quantized
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.runtime.test_runtime_assistant import E2B_TARGET, E4B, PUBLISHED

CARD = Machine("cuda", 80 * 2**30, (9, 0), is_foreseen=True)
Shelf = Callable[[str], tuple[ModelFolder, Release]]
RANKS = {
    "Qwen3.5-0.8B": 8,
    "Qwen3.5-27B": 8,
    "Qwen3.5-397B-A17B": 16,
    "Qwen3-Next-80B-A3B-Instruct": 16,
}
OTHERS = {
    "a Nemotron 3 Super of 5 layers": (others.NEMOTRON_SUPER, others.nemotron, "mtp"),
    "gpt-oss-20b": (others.GPT_OSS, others.gpt_oss, "off"),
    "gpt-oss-120b": (others.GPT_OSS_120B, others.gpt_oss, "off"),
    "a MiniMax-M2 of 2 layers": (others.MINIMAX_M2, others.minimax_m2, "off"),
    "a Step-3.7-Flash of 5 layers": (others.STEP3, others.step3, "mtp"),
    "a Step-3.7-Flash-FP8 of 5 layers": (others.STEP3_FP8, others.step3, "mtp"),
    "a Step-3.7-Flash-NVFP4 of 5 layers": (others.STEP3_NVFP4, others.step3, "mtp"),
    "a MiMo-V2-Flash of 3 layers": (others.MIMO_V2, others.mimo_v2, "mtp"),
}
FILES = {"gpt-oss-20b": 13.76e9, "gpt-oss-120b": 65.25e9}  # Bytes of the published files.
MIMO_LAYERS = {
    "num_hidden_layers": 48,
    "hybrid_layer_pattern": [0, *[1] * 5] * 8,
    "moe_layer_freq": [0, *[1] * 47],
}
COMPLETE_RELEASES = {
    "MiniMax-M2": ({**others.MINIMAX_M2, "num_hidden_layers": 62}, others.minimax_m2, 229),
    "MiMo-V2-Flash": ({**others.MIMO_V2, **MIMO_LAYERS}, others.mimo_v2, 309),
    "Step-3.7-Flash": (others.STEP3_FULL, others.step3, 196.9 + 2.5),
}  # Releases with all of their layers, and billions of elements as published; Step's with its MTP.
BILLIONS = {"12B": 11.9e9, "26B-A4B": 25.2e9, "31B": 30.7e9}
GEMMA4S: dict[str, tuple[dict[str, Any], float]] = {
    "E2B": (E2B_TARGET, (10_246_621_918 - 0.95e9) / 2),
    "E4B": (E4B, (15.9e9 - 0.95e9) / 2),
    **{name: (PUBLISHED[name][0]["text_config"], size) for name, size in BILLIONS.items()},
}  # Configurations of google/gemma-4-*-it, and elements: files without what sees and hears, or as they say.


@pytest.fixture(scope="module", params=[8, pytest.param(None, marks=pytest.mark.slow)])
def shelf(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Shelf:
    """Return a function that writes and reads a release once, with its first layers or all."""

    @cache
    def get(name: str) -> tuple[ModelFolder, Release]:
        row = replace(RELEASES[name], layers=request.param or RELEASES[name].layers)
        return ModelFolder(
            published_hybrids.write_published(tmp_path_factory.mktemp("published"), row)
        ), row

    return get


def plan_on_card(folder: ModelFolder, **options: Any) -> EnginePlan:
    """Return the plan for a GPU of 80 GiB, without the choices that memory decides."""
    return resolve_plan(EngineConfig(model=folder, **options), CARD)


def count_elements(entries: Iterable[Entry]) -> int:
    return sum(math.prod(shape) for _, _, shape in entries)


@pytest.mark.covers(count=4)
@pytest.mark.parametrize("name", RELEASES)
def test_every_tensor_is_used_or_named_and_the_mtp_layer_drafts(name: str, shelf: Shelf) -> None:
    folder, row = shelf(name)
    vision_names = (
        []
        if row.fused_projections
        else [entry[0] for entry in published_hybrids.vision_tensors(row)]
    )
    assert (
        check_weights(folder.checkpoint, folder.config, family_layout(folder.config))
        == vision_names
    )
    layers = family_layout(folder.config)
    assert len(layers.attention_blocks) == row.layers // 4 and len(layers.layers) == row.layers
    source = find_mtp_source(folder)
    assert (
        source is not None
        and source.layout.family.name == "qwen3_next"
        and source.layout.modules == 1
    )
    assert source.layout.family.zero_centered_norms
    mtp_tensors_found = check_mtp_source(source, folder.checkpoint)
    names = {n for n, _, _ in mtp_tensors(row)}
    assert mtp_tensors_found and (
        row.experts[0] or mtp_tensors_found.keys() == {name.removesuffix("_inv") for name in names}
    )
    plan = plan_on_card(folder)
    assert plan.spec.split("+")[0] == "mtp" and plan.shape.mtp_modules == 1


@pytest.mark.covers(count=4)
@pytest.mark.parametrize("name", RELEASES)
def test_memory_is_planned(name: str, shelf: Shelf) -> None:
    folder, row = shelf(name)
    plan = plan_on_card(folder, slots=2)
    config = folder.config
    recurrent = row.layers * 3 // 4
    depth = recurrent_ring_depth(plan.shape.draft_max + 1)
    state = row.value_heads * DELTA_HEAD * DELTA_HEAD * 4
    channels = (2 * KEY_HEADS + row.value_heads) * DELTA_HEAD
    ring = channels * 2 + (KEY_HEADS + row.value_heads) * DELTA_HEAD * 4 + row.value_heads * 8
    assert state_bytes(config) == recurrent * state
    assert recurrent_slot_bytes(config, plan.shape, 1) == recurrent * (state + depth * ring)
    keys = 2 * row.key_value_heads * published_hybrids.HEAD * 2
    assert page_bytes(config, "bfloat16") == PAGE_SIZE * row.layers // 4 * keys
    # Stored A_log and norms widen to float32 wherever they are read; the rest stays as stored.
    model_bytes = tensor_bytes(config, "bfloat16", plan.shape.form)
    text = published_hybrids.text_tensors(row)
    stored = sum(SIZES[dtype] * torch.Size(shape).numel() for _, dtype, shape in text)
    assert (
        stored <= model_bytes < (1.04 if row.fp8 else 1.01) * stored
    )  # each row of a block has its scale
    assert plan.need.weights >= model_bytes and plan.need.total > plan.need.weights
    source = find_mtp_source(folder)
    assert source is not None
    head = count_module_bytes(source, 0, "bfloat16", plan.shape.draft_form)
    assert plan.need.draft_weights == head
    if not row.fp8:
        assert head == pytest.approx(2 * count_elements(mtp_tensors(row)), rel=1e-3)


@pytest.mark.parametrize("has_all_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_releases_in_few_bits_are_planned_for(
    name: str, has_all_layers: bool, tmp_path: Path
) -> None:
    """Tensors are as many as published, each used or named; the MTP layer is found.

    Codes are unchanged.
    """
    release = QUANTIZED[name]
    if not has_all_layers:
        release = replace(release, base=replace(release.base, layers=4), tensors=None)
    parts = parts_of(release)
    text, draft, vision = parts
    assert release.tensors in (None, sum(map(len, parts)))
    folder = ModelFolder(write_quantized(tmp_path, release))
    unused = check_weights(folder.checkpoint, folder.config, family_layout(folder.config))
    assert unused == [entry[0] for entry in vision]
    source = find_mtp_source(folder)
    assert source is not None and check_mtp_source(source, folder.checkpoint)
    plan = resolve_plan(EngineConfig(model=folder), replace(CARD, free_bytes=180 * 2**30))
    assert plan.spec == "mtp"
    stored = sum(SIZES[dtype] * torch.Size(shape).numel() for _, dtype, shape in text)
    # Scales of NVFP4 are kept in float32, one a group of 16: 6 bits a weight in place of 4.5.
    if has_all_layers or "NVFP4" not in name:  # a head in NVFP4 is multiplied out
        assert stored <= plan.need.weights < (1.34 if "NVFP4" in name else 1.03) * stored
    if not release.base.fp8:
        assert plan.need.draft_weights == pytest.approx(2 * count_elements(draft), rel=1e-3)
    if has_all_layers and "w4a16" in name:  # its two files have 10,952 and 486.58 million bytes
        assert stored + 2 * count_elements(vision) == pytest.approx(10_952e6, rel=3e-4)
        assert 2 * count_elements(draft) == pytest.approx(486_582_848, abs=4096)


@pytest.mark.parametrize("name", RANKS)
def test_a_release_can_be_divided_among_ranks(name: str, shelf: Shelf) -> None:
    folder, _ = shelf(name)
    config = folder.config
    assert possible_rank_counts(config, (1, 2, 4, 8, 16)) == [
        n for n in (1, 2, 4, 8, 16) if n <= RANKS[name]
    ]
    plan = plan_on_card(folder, tp=2, draft_tp=1)
    alone = plan_on_card(folder)
    assert (
        recurrent_slot_bytes(config, plan.shape, 2)
        == recurrent_slot_bytes(config, alone.shape, 1) // 2
    )
    assert plan.need.weights < 0.51 * alone.need.weights


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_tiny_families_is_used_and_counted(name: str, tmp_path: Path) -> None:
    """Names are those that `transformers` reads in `test_runtime_golden`."""
    folder = ModelFolder(write_dense(tmp_path, name))
    assert check_weights(folder.checkpoint, folder.config, family_layout(folder.config)) == []
    stored = sum(tensor.nbytes for tensor in folder.checkpoint.tensors.values())
    assert tensor_bytes(folder.config, "float32") == stored


@pytest.mark.parametrize("name", OTHERS)
def test_every_tensor_of_other_families_is_used(name: str, tmp_path: Path) -> None:
    config, tensors, spec = OTHERS[name]
    folder = ModelFolder(others.write_release(tmp_path, config, tensors))
    vision_names = [name for name in folder.checkpoint.tensors if "vision" in name]
    assert (
        check_weights(folder.checkpoint, folder.config, family_layout(folder.config))
        == vision_names
    )
    plan = plan_on_card(folder)
    assert plan.spec.split("+")[0] in (spec, "ngram")
    source = find_mtp_source(folder)
    assert (source is not None) == (spec == "mtp")
    if source is not None:
        assert folder.config.architecture in source.layout.family.architectures
        assert check_mtp_source(source, folder.checkpoint)
    stored = (tmp_path / "model.safetensors").stat().st_size
    if name in FILES:  # codes stay, and their scales widen from one byte to two
        assert stored == pytest.approx(FILES[name], rel=0.005)
        assert plan.shape.form.main_kind == "e2m1" and stored < plan.need.weights < 1.06 * stored
    else:  # scales of FP8 blocks stand at every row, those of NVFP4 in float32
        max_ratio = (
            1.15 if "NVFP4" in name else 1.01 if folder.config.quantization is None else 1.04
        )
        assert 0.975 * stored < plan.need.weights + plan.need.draft_weights < max_ratio * stored


@pytest.mark.parametrize("name", GEMMA4S)
def test_gemma_4_uses_all_but_keys_of_layers_that_share(name: str, tmp_path: Path) -> None:
    text, size = GEMMA4S[name]
    config = {**text, "architectures": ["Gemma4ForCausalLM"]}
    table = list(others.gemma4(config))
    folder = ModelFolder(others.write_release(tmp_path, config, others.gemma4))
    shares = range(
        config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]
    )
    key_names = ("k_proj", "v_proj", "k_norm")
    unused = {f"model.layers.{i}.self_attn.{name}.weight" for i in shares for name in key_names}
    assert (
        set(check_weights(folder.checkpoint, folder.config, family_layout(folder.config))) == unused
    )
    assert count_elements(table) == pytest.approx(size, rel=0.01)
    assert name != "E2B" or len(table) == 600, (
        "as its header at 9dbdf8a has below model.language_model"
    )
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert 0.98 * stored < plan_on_card(folder).need.weights < 1.001 * stored


def test_tables_have_the_published_numbers_of_tensors_and_elements() -> None:
    """Ultra's index with its MTP tensors, and the 804 tensors and 126 scales of Step's text."""
    names = [name for name, _, _ in others.nemotron(others.NEMOTRON_ULTRA)]
    assert (len(names), sum(name.startswith("mtp.") for name in names)) == (51_023, 1_040)
    names = [name for name, _, _ in others.step3(others.STEP3_FULL) if "vision" not in name]
    assert (len(names), sum(name.endswith("_inv") for name in names)) == (804 + 126, 126)
    for name, row in ((name, RELEASES[name]) for name in TENSOR_COUNTS):
        parts = (
            published_hybrids.text_tensors(row),
            mtp_tensors(row),
            published_hybrids.vision_tensors(row),
        )
        assert tuple(len(list(part)) for part in parts) == TENSOR_COUNTS[name], name
    for name, (config, tensors, size) in COMPLETE_RELEASES.items():
        text_entries = (
            entry
            for entry in tensors(config)
            if "scale" not in entry[0] and "vision" not in entry[0]
        )
        assert count_elements(text_entries) / 1e9 == pytest.approx(size, rel=0.005), name
