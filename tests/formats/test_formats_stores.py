"""Models that other programs keep: found by name, only read, and bounded where they are hostile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spd.errors import CheckpointError, NotFoundError, UsageError
from spd.formats import hub
from spd.formats.gguf.file_sets import choose, choose_one, file_sets, find_drafter
from spd.formats.hub import find_stored_model, list_models, resolve_model
from spd.formats.stores import HUB, LLAMA_CPP, LM_STUDIO, OLLAMA, Store, StoredModel

COMMIT = "c" * 40
DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, in which nothing may be written."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_OLLAMA_FOLDERS", ("~/.ollama/models", "~/service/models"))
    yield tmp_path


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_snapshot(root: Path, name: str, *files: str) -> Path:
    """Files in a cache as huggingface_hub lays it: links to blobs."""
    folder = root / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for number, file in enumerate(files):
        blob = put(folder / "blobs" / f"{number:040}", b"GGUF" + bytes(number))
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def put_manifest(root: Path, name: str, *layers: tuple[str, str]) -> Path:
    """A manifest of Ollama's, of layers with a kind and a digest each."""
    listed = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 4}
        for kind, digest in layers
    ]
    text = json.dumps({"schemaVersion": 2, "layers": listed})
    return put(root / "manifests" / name, text.encode())


def names(store: str) -> list[str]:
    return [each.name for each in list_models() if each.store == store]


# Which files are one model

SIZES = {
    "M-Q4_K_M.gguf": 40,
    "M-UD-Q4_K_XL.gguf": 44,
    "BF16/M-BF16-00002-of-00002.gguf": 90,
    "BF16/M-BF16-00001-of-00002.gguf": 80,
    "M-IQ3_XXS.gguf": 30,
    "odd.gguf": 5,
    "mmproj-F16.gguf": 9,
    "mtp-M-Q8_0.gguf": 3,
    "mtp-M-BF16.gguf": 6,
    "imatrix_unsloth.gguf": 1,
    "README.md": 1,
}


def test_files_are_grouped_by_quantization_and_split() -> None:
    sets = file_sets(SIZES)
    assert [(each.tag, each.nbytes) for each in sets] == [
        ("odd", 5),
        ("IQ3_XXS", 30),
        ("Q4_K_M", 40),
        ("UD-Q4_K_XL", 44),
        ("BF16", 170),
    ]
    whole = sets[-1]
    assert whole.files[0].endswith("00001-of-00002.gguf") and whole.expected == 2


@pytest.mark.parametrize(
    ("tag", "meant"),
    [
        ("q4_k_m", ["M-Q4_K_M.gguf"]),
        ("Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        ("M-IQ3_XXS.gguf", ["M-IQ3_XXS.gguf"]),
        ("M-BF16", ["BF16/M-BF16-00001-of-00002.gguf"]),
        ("Q4", []),
        ("F16", []),
    ],
)
def test_a_tag_means_a_quantization_or_a_name(tag: str, meant: list[str]) -> None:
    assert [each.files[0] for each in choose(file_sets(SIZES), tag)] == meant


def test_a_quantization_itself_goes_before_a_makers_own() -> None:
    sets = file_sets({"M-UD-Q8_0.gguf": 1, "M-Q8_0.gguf": 2})
    assert [each.files[0] for each in choose(sets, "Q8_0")] == ["M-Q8_0.gguf"]


def test_mtp_layers_beside_a_model_are_of_its_quantization_or_the_usual_one() -> None:
    sets = {each.tag: each for each in file_sets(SIZES)}
    for tag, file in (("BF16", "mtp-M-BF16.gguf"), ("Q4_K_M", "mtp-M-Q8_0.gguf")):
        found = find_drafter(SIZES, sets[tag])
        assert found is not None and found.files == (file,)
    assert find_drafter({"M-Q4_K_M.gguf": 1}, sets["Q4_K_M"]) is None


def test_without_a_choice_all_are_listed_with_what_fits() -> None:
    gib = 1 << 30
    sets = file_sets({"M-Q4_K_M.gguf": 4 * gib, "M-Q8_0.gguf": 8 * gib, "M-BF16.gguf": 16 * gib})
    with pytest.raises(UsageError, match="org/M: holds 3 models as GGUF") as asked:
        choose_one(sets, "org/M", None, 10 * gib)
    words = [" ".join(line.split()) for line in asked.value.reason]
    assert words == [
        "4.00 GiB fits Q4_K_M",
        "8.00 GiB fits Q8_0",
        "16.00 GiB does not fit BF16",
    ]
    assert asked.value.fix == ("spd pull org/M:Q8_0",)
    with pytest.raises(UsageError, match="has no GGUF file 'Q2_K'") as missing:
        choose_one(sets, "org/M", "Q2_K", gib)
    assert missing.value.fix == ("spd pull org/M:Q4_K_M",)
    assert choose_one(sets[:1], "org/M", None, 0) is sets[0]


# Stores


def test_the_hubs_cache_holds_gguf_files_by_tag(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    snapshot = put_snapshot(cache, "org/M-GGUF", "M-Q4_K_M.gguf", "M-Q8_0.gguf", "mmproj-F16.gguf")
    assert names(HUB) == ["org/M-GGUF:Q4_K_M", "org/M-GGUF:Q8_0"]
    assert resolve_model("org/M-GGUF:q8_0") == snapshot / "M-Q8_0.gguf"
    with pytest.raises(UsageError, match="org/M-GGUF: names 2 models") as asked:
        resolve_model("org/M-GGUF")
    assert asked.value.fix == ("-m org/M-GGUF:Q4_K_M", "-m org/M-GGUF:Q8_0")
    (snapshot / "M-Q8_0.gguf").unlink()
    (snapshot / "config.json").write_text("{}")  # which some such repositories have
    assert resolve_model("org/M-GGUF") == snapshot / "M-Q4_K_M.gguf"


def test_safetensors_go_before_gguf_files_beside_them(home: Path) -> None:
    snapshot = put_snapshot(home / ".cache/huggingface/hub", "org/M", "M-Q4_K_M.gguf")
    put(snapshot / "config.json", b"{}")
    put(snapshot / "model.safetensors")
    assert names(HUB) == ["org/M", "org/M:Q4_K_M"]
    assert resolve_model("org/M") == snapshot
    assert resolve_model("org/M:Q4_K_M") == snapshot / "M-Q4_K_M.gguf"


def test_split_files_are_one_model_and_must_all_be_there(home: Path) -> None:
    files = [f"Q8_0/M-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    snapshot = put_snapshot(home / ".cache/huggingface/hub", "org/M", *files)
    assert resolve_model("org/M:Q8_0") == snapshot / files[0]
    (snapshot / files[1]).unlink()
    with pytest.raises(CheckpointError, match=r"org/M:Q8_0: .* 1 of 2 files are there"):
        resolve_model("org/M")


def test_llama_cpp_keeps_files_in_one_folder_or_as_the_hub_does(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = home / ".cache/llama.cpp"
    named = {"ggufFile": {"rfilename": "sub/M-Q4_K_M.gguf"}}
    put(cache / "manifest=org=M-GGUF=latest.json", json.dumps(named).encode())
    put(cache / "manifest=org=bad=latest.json", b"[")
    stored = put(cache / "org_M-GGUF_sub_M-Q4_K_M.gguf")
    other = put(cache / "ai_smollm2_latest.gguf")
    assert names(LLAMA_CPP) == ["ai_smollm2_latest", "org/M-GGUF:Q4_K_M"]
    assert resolve_model("org/M-GGUF") == resolve_model("org/M-GGUF:Q4_K_M") == stored
    assert resolve_model("ai_smollm2_latest") == other
    monkeypatch.setenv("LLAMA_CACHE", str(home / "own"))
    snapshot = put_snapshot(home / "own", "org/N", "N-Q8_0.gguf")
    assert names(LLAMA_CPP) == ["org/N:Q8_0"]
    assert resolve_model("org/N") == snapshot / "N-Q8_0.gguf"


def test_lm_studio_keeps_a_folder_a_repository(home: Path) -> None:
    file = put(home / ".lmstudio/models/org/M-GGUF/M-Q4_K_M.gguf")
    put(home / ".lmstudio/models/org/M-GGUF/mmproj-F16.gguf")
    old = put(home / ".cache/lm-studio/models/org/Old/old-q8_0.gguf")
    folder = put(home / ".lmstudio/models/org/Plain/config.json", b"{}").parent
    put(folder / "model.safetensors")
    assert names(LM_STUDIO) == ["org/M-GGUF:Q4_K_M", "org/Plain", "org/Old:Q8_0"]
    assert resolve_model("org/M-GGUF") == file
    assert resolve_model("org/Old:old-q8_0") == old
    assert resolve_model("org/Plain") == folder
    put(folder / "plain-Q4_K_M.gguf")
    assert resolve_model("org/Plain") == folder, "whose very name it is"
    put(home / ".lmstudio-home-pointer", f"{home}/moved\n".encode())
    moved = put(home / "moved/models/org/New/new-Q6_K.gguf")
    assert resolve_model("org/New:Q6_K") == moved


def test_ollamas_tags_name_blobs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / ".ollama/models"
    blob = put(root / "blobs" / f"sha256-{DIGEST}")
    layers = (("model", f"sha256:{DIGEST}"), ("template", "x"), ("params", "y"))
    put_manifest(root, "registry.ollama.ai/library/qwen3/8b", *layers)
    put_manifest(root, "registry.ollama.ai/library/qwen3/latest", *layers)
    put_manifest(root, "registry.ollama.ai/me/mine/v1", *layers)
    put_manifest(root, "hf.co/org/M-GGUF/Q4_K_M", *layers)
    assert names(OLLAMA) == ["hf.co/org/M-GGUF:Q4_K_M", "me/mine:v1", "qwen3:8b", "qwen3:latest"]
    for reference in ("qwen3", "qwen3:8b", "me/mine:v1", "hf.co/org/M-GGUF:Q4_K_M"):
        assert resolve_model(reference) == blob
    assert resolve_model("registry.ollama.ai/library/qwen3:8b") == blob
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert names(OLLAMA) == []
    old = put(home / "elsewhere/blobs" / f"sha256:{DIGEST}")
    put_manifest(home / "elsewhere", "registry.ollama.ai/library/tiny/latest", *layers)
    assert resolve_model("tiny") == old


FAULTS = {
    "nothing": ((("model", f"sha256:{'cd' * 32}"),), "the blob that it names is not there"),
    "two": ((("model", f"sha256:{DIGEST}"),) * 2, "names 2 GGUF files, not one"),
    "none": ((("tensor", f"sha256:{DIGEST}"),), "names 0 GGUF files"),
    "adapter": ((("model", f"sha256:{DIGEST}"), ("adapter", "x")), "LoRA adapter"),
    "digest": ((("model", "sha256:../../../../etc/passwd"),), "is no SHA-256"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_manifest_says_why_and_hides_no_other(home: Path, name: str) -> None:
    root = home / ".ollama/models"
    put(root / "blobs" / f"sha256-{DIGEST}")
    layers, words = FAULTS[name]
    put_manifest(root, "registry.ollama.ai/library/bad/1", *layers)
    put_manifest(root, "registry.ollama.ai/library/good/1", ("model", f"sha256:{DIGEST}"))
    assert names(OLLAMA) == ["bad:1", "good:1"]
    with pytest.raises(CheckpointError, match=words):
        resolve_model("bad:1")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"layers": 3}', b"\xff", b"x" * 2_000_000])
def test_manifests_that_are_none(home: Path, content: bytes) -> None:
    put(home / ".ollama/models/manifests/registry.ollama.ai/library/bad/1", content)
    with pytest.raises(CheckpointError, match="bad:1: "):
        resolve_model("bad:1")


def test_one_model_in_two_stores_is_the_first_ones(home: Path) -> None:
    put(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    snapshot = put_snapshot(home / ".cache/huggingface/hub", "org/M", "M-Q4_K_M.gguf")
    assert resolve_model("org/M:Q4_K_M") == snapshot / "M-Q4_K_M.gguf"


def test_what_lies_at_a_path_goes_before_a_stored_name(home: Path) -> None:
    put(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    here = put(home / "org/M", b"GGUF here")
    assert resolve_model("org/M") == Path("org/M") and here.exists()


def test_a_name_that_no_store_has_is_met_with_a_near_one(home: Path) -> None:
    put(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    with pytest.raises(NotFoundError, match=r"did you mean org/M:Q4_K_M\?") as missing:
        resolve_model("org/M:Q4_K_S")
    assert missing.value.fix == ("-m org/M:Q4_K_M", "spd pull org/M:Q4_K_S", "spd ls")
    assert find_stored_model("org/N") is None


def test_folders_that_cannot_be_read_are_empty(home: Path) -> None:
    put(home / ".ollama/models/manifests", b"a file")
    put(home / ".lmstudio", b"a file")
    loop = home / ".cache/llama.cpp"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    assert list_models() == []

    def denied(root: Path) -> Iterator[StoredModel]:
        yield StoredModel("a", OLLAMA, root, 1)
        raise PermissionError(root)

    assert Store(OLLAMA, home, denied).models() == []
