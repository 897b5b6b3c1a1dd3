"""`spd inspect` on folders with real headers and empty weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.formats.demo import demo_draft_folder, demo_folder
from spd.runtime import EngineConfig
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from spd.runtime.plan import machine
from spd.runtime.plan.plan import make_plan
from tests.cli.conftest import SPECIALS, assert_refused, edit_json, write_model, write_tokenizer
from tests.helpers import read_model_config
from tests.json_schema import faults
from tests.recipes.mtp_folders import write_hollow
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_dense import write_dense


def expected_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that the folder's configuration needs."""
    config = read_model_config(folder)
    return expected_tensors(config, family_layout(config))


def write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bfloat16 zeros whose data is a hole."""
    write_hollow(path, [(name, "BF16", shape) for name, shape in shapes.items()])


@pytest.fixture
def weighted_model(model: Path) -> Path:
    """Return a model folder with weights."""
    write_shard(model / "model.safetensors", expected_shapes(model))
    return model


def joined_output(ran: Any) -> str:
    """Return standard output as one line."""
    return " ".join(ran.text.split())


def test_lines_and_json_agree_and_name_the_method(spd_run, weighted_model) -> None:
    ran = spd_run("inspect", "-m", weighted_model)
    assert ran.code == 0 and ran.err == ""
    lines = {line[:16].strip(): line[18:] for line in ran.facts.splitlines()}
    assert " · architecture LlamaForCausalLM · parameters " in lines["target"]
    assert " · kv bytes per token 32 B · kv int8 bytes per token 24 B · " in lines["target"]
    assert "unexpected tensors" not in lines["target"]
    assert lines["vocabulary"].startswith("size 264 · used 259 · sha256 ")
    assert lines["contexts"].startswith("ctx 128 · total ") and lines["contexts"].endswith(
        " · fits kv int8 yes"
    )
    report = spd_run("inspect", weighted_model, "--json").json
    target = report["target"]
    sizes = expected_shapes(weighted_model).values()
    assert report["schema"] == "spd.inspect/1" and "draft" not in report
    count = sum(a * (b[0] if b else 1) for a, *b in sizes)
    assert (target["parameters"], target["weight_bytes"], target["tensors"]) == (
        count,
        2 * count,
        len(sizes),
    )
    assert target["kv_bytes_per_token"] == 2 * 2 * 1 * 4 * 2
    assert len(target["vocabulary"]["sha256"]) == 64 and target["vocabulary"]["used"] == 259
    text = joined_output(spd_run("inspect", weighted_model))
    assert "speculation method ngram · reason no draft model is known" in text
    assert (
        " mtp possible no · why " in text and ": holds no MTP layers draft possible no · " in text
    )
    assert "why --spec draft needs a draft model" in text
    text = joined_output(spd_run("inspect", weighted_model, "--draft", weighted_model))
    assert "speculation method draft · reason it is given with --draft · draft max 4" in text
    assert " draft possible yes ngram possible yes " in text


def test_missing_and_unexpected_tensors_are_reported(spd_run: Callable, model: Path) -> None:
    shapes = expected_shapes(model)
    write_shard(model / "model.safetensors", shapes | {"mtp.fc.weight": (8, 16), "odd": (1,)})
    ran = spd_run("inspect", model)
    assert (
        " · unexpected tensors odd · " in ran.facts
        and "layout mtp layout, 1 module at mtp." in ran.facts
    )
    assert re.search(r" · error .* missing", joined_output(ran))
    del shapes["model.norm.weight"]
    write_shard(model / "model.safetensors", shapes)
    assert_refused(spd_run("inspect", model), 4, "model.norm.weight")


def test_a_pair_with_two_vocabularies_is_refused(
    spd_run: Callable, weighted_model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other")
    write_tokenizer(other, (*SPECIALS[1:], SPECIALS[0]))  # the same words, other ids
    write_shard(other / "model.safetensors", expected_shapes(other))
    ran = spd_run("inspect", weighted_model, "--draft", other)
    assert ran.code == 4 and "\ncompatible        no\nspeculation       reason " in ran.text
    assert "does not share the target's vocabulary" in ran.err
    ran = spd_run("inspect", weighted_model, "--draft", other, "--json")
    assert ran.code == 4 and ran.json["error"]["code"] == "vocab_mismatch"


def test_what_would_run_is_what_the_plan_says(spd_run: Callable) -> None:
    """Method, reason, context and each part of the memory are predicted without torch."""
    draft = demo_draft_folder()
    for arguments, config in (
        ((), EngineConfig(model=demo_folder(), device="cpu")),
        (("--draft", draft), EngineConfig(model=demo_folder(), device="cpu", draft_model=draft)),
    ):
        report = spd_run("inspect", "demo", arguments, "--json").json
        plan = make_plan(config)
        assert faults(report, "inspect") == [] and faults(report | {"more": 1}, "inspect") != []
        speculation = report["speculation"]
        need = report["needs"]
        assert (speculation["method"], speculation["draft_max"]) == (
            plan.spec,
            plan.shape.draft_max,
        )
        assert speculation["reason"] == (
            "it is given with --draft" if arguments else plan.drafter.reason
        )
        if need["device"] != "cpu":
            continue
        assert (need["ctx"], need["dtype"], need["fits"]) == (
            plan.shape.ctx,
            plan.shape.dtype,
            True,
        )
        parts = need["parts"]
        assert (parts["weights"], parts["draft_weights"]) == (
            plan.need.weights,
            plan.need.draft_weights,
        )
        assert parts["cache"] + parts["draft_cache"] + parts["states"] == plan.need.caches
        assert parts["workspace"] == plan.need.workspace


def test_a_context_beyond_the_memory_does_not_fit(
    spd_run: Callable, weighted_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs() -> dict[str, Any]:
        return spd_run("inspect", weighted_model, "--json").json["needs"]

    monkeypatch.setattr(machine, "NVML_LIBRARY", "none of that name")
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 2**16)
    ran = spd_run("inspect", weighted_model)
    assert ran.code == 0 and " · free 64.00 KiB · " in ran.text and " · fits no" in ran.text
    assert needs()["fits"] is False
    edit_json(weighted_model / "config.json", max_position_embeddings=8192)
    totals = [row["total"] for row in needs()["contexts"]]
    monkeypatch.setattr(
        machine, "free_memory_bytes", lambda device: (totals[0] + totals[-1]) * 5 // 9
    )
    report = needs()
    fits = [row["fits"] for row in report["contexts"]]
    assert fits == [row["total"] <= report["usable"] for row in report["contexts"]]
    assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    assert re.search(
        "ctx 8,192 · total .* · fits no · total kv int8 .* · fits kv int8 no\n",
        spd_run("inspect", weighted_model).text,
    )


def test_a_gpu_is_foreseen_by_its_driver() -> None:
    def memory(device: object, memory: Any) -> int:
        memory._obj[1] = 7 * 2**30
        return 0

    calls = {
        name: lambda *arguments: 0 for name in ("nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2")
    }
    calls["nvmlDeviceGetCudaComputeCapability"] = lambda *arguments: 0
    gpu_machine = machine.machine_from_driver(
        lambda name: SimpleNamespace(**calls, nvmlDeviceGetMemoryInfo=memory)
    )
    assert (gpu_machine.device, gpu_machine.free_bytes) == ("cuda", 7 * 2**30)
    assert machine.machine_from_driver(lambda name: object()).device == "cpu"


def test_a_folder_without_a_tokenizer_or_a_working_template_is_described(
    spd_run: Callable, weighted_model: Path
) -> None:
    (weighted_model / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ raise_exception(1) }}{% if"}'
    )
    ran = spd_run("inspect", weighted_model)
    assert ran.code == 0 and " · template does not render: " in ran.facts
    (weighted_model / "tokenizer_config.json").unlink()
    assert " · template none: use --raw\n" in spd_run("inspect", weighted_model).facts
    (weighted_model / "tokenizer.json").unlink()
    assert "  vocabulary      size 264\n" in spd_run("inspect", weighted_model).text


def test_an_assistant_in_the_cache_is_found_and_named(spd_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    target, drafter = (
        tmp_path / f"models--org--it{end}/snapshots/{'a' * 40}" for end in ("", "-assistant")
    )
    write_dense(target, "gemma4")
    assert spd_run("inspect", "org/it", "--json").json["speculation"]["method"] == "ngram"
    write_assistant(drafter, target, clusters=4, selected=3)
    report = spd_run("inspect", "org/it", "--json").json
    assert report["speculation"]["reason"] == "the model's own assistant, org/it-assistant"
    assert report["needs"]["parts"]["draft_weights"] > 2**16
    ran = spd_run("generate", "-m", "org/it", "--raw", "Hi", "-n", 4, "--json")
    assert ran.json["plan"]["spec"] == "assistant" and ran.json["plan"]["draft_model"] == str(
        drafter
    )
