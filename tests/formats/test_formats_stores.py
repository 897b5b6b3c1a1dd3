"""Models in other programs' stores: found by name, only read, and bounded where they are hostile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from spd.errors import CheckpointError, NotFoundError, UsageError
from spd.formats import hub
from spd.formats.gguf.file_sets import choose_by_tag, choose_one_set, file_sets, find_drafter
from spd.formats.hub import find_stored_model, list_models, resolve_model
from spd.formats.stores import HUB, LLAMA_CPP, LM_STUDIO, OLLAMA, Store, StoredModel

COMMIT = "c" * 40
DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an empty home, without variables that name other folders."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "LLAMA_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_OLLAMA_FOLDERS", ("~/.ollama/models", "~/service/models"))
    yield tmp_path


def write_file(path: Path, content: bytes = b"GGUF") -> Path:
    """Write a file and its folders; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_snapshot(root: Path, name: str, files: Sequence[str]) -> Path:
    """Write files into a cache in the layout of huggingface_hub: links to blobs."""
    folder = root / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for number, file in enumerate(files):
        blob = write_file(folder / "blobs" / f"{number:040}", b"GGUF" + bytes(number))
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def write_manifest(root: Path, name: str, layers: Sequence[tuple[str, str]]) -> Path:
    """Write a manifest of Ollama's with a kind and a digest for each layer."""
    layer_fields = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 4}
        for kind, digest in layers
    ]
    text = json.dumps({"schemaVersion": 2, "layers": layer_fields})
    return write_file(root / "manifests" / name, text.encode())


def stored_names(store: str) -> list[str]:
    """Return the names of the models in a store."""
    return [model.name for model in list_models() if model.store == store]


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
"""The files of a repository, with their bytes."""


def test_files_are_grouped_by_quantization_and_split() -> None:
    sets = file_sets(SIZES)
    assert [(file_set.tag, file_set.nbytes) for file_set in sets] == [
        ("odd", 5),
        ("IQ3_XXS", 30),
        ("Q4_K_M", 40),
        ("UD-Q4_K_XL", 44),
        ("BF16", 170),
    ]
    split = sets[-1]
    assert split.files[0].endswith("00001-of-00002.gguf") and split.expected == 2


@pytest.mark.parametrize(
    "name", ["foo-mtp-bar.gguf", "folder-mtp-x/M-Q8_0.gguf", "MyEagle3-1B.gguf"]
)
def test_a_target_may_have_a_drafters_word_in_its_name(name: str) -> None:
    assert [file_set.files for file_set in file_sets({name: 1, "a/EAGLE3-M.gguf": 1})] == [(name,)]


def test_a_split_of_one_file_is_apart_from_a_file_of_its_name() -> None:
    sets = file_sets({"M-Q8_0.gguf": 2, "M-Q8_0-00001-of-00001.gguf": 1})
    assert [file_set.files for file_set in sets] == [
        ("M-Q8_0-00001-of-00001.gguf",),
        ("M-Q8_0.gguf",),
    ]
    assert all(file_set.expected == 1 for file_set in sets)


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
    assert [file_set.files[0] for file_set in choose_by_tag(file_sets(SIZES), tag)] == meant


def test_a_quantization_wins_over_a_makers_variant_of_it() -> None:
    sets = file_sets({"M-UD-Q8_0.gguf": 1, "M-Q8_0.gguf": 2})
    assert [file_set.files[0] for file_set in choose_by_tag(sets, "Q8_0")] == ["M-Q8_0.gguf"]


def test_mtp_layers_beside_a_model_are_of_its_quantization_or_the_default() -> None:
    sets = {file_set.tag: file_set for file_set in file_sets(SIZES)}
    for tag, file in (("BF16", "mtp-M-BF16.gguf"), ("Q4_K_M", "mtp-M-Q8_0.gguf")):
        drafter = find_drafter(SIZES, sets[tag])
        assert drafter is not None and drafter.files == (file,)
    assert find_drafter({"M-Q4_K_M.gguf": 1}, sets["Q4_K_M"]) is None


def test_without_a_choice_all_are_listed_with_what_fits() -> None:
    gib = 1 << 30
    sets = file_sets({"M-Q4_K_M.gguf": 4 * gib, "M-Q8_0.gguf": 8 * gib, "M-BF16.gguf": 16 * gib})
    with pytest.raises(UsageError, match="org/M: holds 3 models as GGUF") as no_choice:
        choose_one_set(sets, "org/M", None, 10 * gib)
    words = [" ".join(line.split()) for line in no_choice.value.reason]
    assert words == [
        "4.00 GiB fits Q4_K_M",
        "8.00 GiB fits Q8_0",
        "16.00 GiB does not fit BF16",
    ]
    assert no_choice.value.fix == ("spd pull org/M:Q8_0",)
    with pytest.raises(UsageError, match="has no GGUF file 'Q2_K'") as missing:
        choose_one_set(sets, "org/M", "Q2_K", gib)
    assert missing.value.fix == ("spd pull org/M:Q4_K_M",)
    assert choose_one_set(sets[:1], "org/M", None, 0) is sets[0]


# Stores


def test_the_hubs_cache_holds_gguf_files_by_tag(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    snapshot = write_snapshot(
        cache, "org/M-GGUF", ["M-Q4_K_M.gguf", "M-Q8_0.gguf", "mmproj-F16.gguf"]
    )
    assert stored_names(HUB) == ["org/M-GGUF:Q4_K_M", "org/M-GGUF:Q8_0"]
    assert resolve_model("org/M-GGUF:q8_0") == snapshot / "M-Q8_0.gguf"
    with pytest.raises(UsageError, match="org/M-GGUF: names 2 models") as ambiguous:
        resolve_model("org/M-GGUF")
    assert ambiguous.value.fix == ("-m org/M-GGUF:Q4_K_M", "-m org/M-GGUF:Q8_0")
    (snapshot / "M-Q8_0.gguf").unlink()
    (snapshot / "config.json").write_text("{}")  # some such repositories have one
    assert resolve_model("org/M-GGUF") == snapshot / "M-Q4_K_M.gguf"


def test_safetensors_win_over_gguf_files_beside_them(home: Path) -> None:
    snapshot = write_snapshot(home / ".cache/huggingface/hub", "org/M", ["M-Q4_K_M.gguf"])
    write_file(snapshot / "config.json", b"{}")
    write_file(snapshot / "model.safetensors")
    assert stored_names(HUB) == ["org/M", "org/M:Q4_K_M"]
    assert resolve_model("org/M") == snapshot
    assert resolve_model("org/M:Q4_K_M") == snapshot / "M-Q4_K_M.gguf"


def test_split_files_are_one_model_and_must_be_complete(home: Path) -> None:
    files = [f"Q8_0/M-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    snapshot = write_snapshot(home / ".cache/huggingface/hub", "org/M", files)
    assert resolve_model("org/M:Q8_0") == snapshot / files[0]
    (snapshot / files[1]).unlink()
    with pytest.raises(CheckpointError, match=r"org/M:Q8_0: .* 1 of 2 files are there"):
        resolve_model("org/M")


def test_llama_cpp_has_files_in_one_folder_or_as_the_hub(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = home / ".cache/llama.cpp"
    manifest = {"ggufFile": {"rfilename": "sub/M-Q4_K_M.gguf"}}
    write_file(cache / "manifest=org=M-GGUF=latest.json", json.dumps(manifest).encode())
    write_file(cache / "manifest=org=bad=latest.json", b"[")
    stored = write_file(cache / "org_M-GGUF_sub_M-Q4_K_M.gguf")
    other = write_file(cache / "ai_smollm2_latest.gguf")
    assert stored_names(LLAMA_CPP) == ["ai_smollm2_latest", "org/M-GGUF:Q4_K_M"]
    assert resolve_model("org/M-GGUF") == resolve_model("org/M-GGUF:Q4_K_M") == stored
    assert resolve_model("ai_smollm2_latest") == other
    monkeypatch.setenv("LLAMA_CACHE", str(home / "own"))
    snapshot = write_snapshot(home / "own", "org/N", ["N-Q8_0.gguf"])
    assert stored_names(LLAMA_CPP) == ["org/N:Q8_0"]
    assert resolve_model("org/N") == snapshot / "N-Q8_0.gguf"


def test_lm_studio_has_a_folder_for_each_repository(home: Path) -> None:
    file = write_file(home / ".lmstudio/models/org/M-GGUF/M-Q4_K_M.gguf")
    write_file(home / ".lmstudio/models/org/M-GGUF/mmproj-F16.gguf")
    old = write_file(home / ".cache/lm-studio/models/org/Old/old-q8_0.gguf")
    folder = write_file(home / ".lmstudio/models/org/Plain/config.json", b"{}").parent
    write_file(folder / "model.safetensors")
    assert stored_names(LM_STUDIO) == ["org/M-GGUF:Q4_K_M", "org/Plain", "org/Old:Q8_0"]
    assert resolve_model("org/M-GGUF") == file
    assert resolve_model("org/Old:old-q8_0") == old
    assert resolve_model("org/Plain") == folder
    write_file(folder / "plain-Q4_K_M.gguf")
    assert resolve_model("org/Plain") == folder, "whose very name it is"
    write_file(home / ".lmstudio-home-pointer", f"{home}/moved\n".encode())
    moved = write_file(home / "moved/models/org/New/new-Q6_K.gguf")
    assert resolve_model("org/New:Q6_K") == moved


def test_ollamas_tags_name_blobs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / ".ollama/models"
    blob = write_file(root / "blobs" / f"sha256-{DIGEST}")
    layers = (("model", f"sha256:{DIGEST}"), ("template", "x"), ("params", "y"))
    write_manifest(root, "registry.ollama.ai/library/qwen3/8b", layers)
    write_manifest(root, "registry.ollama.ai/library/qwen3/latest", layers)
    write_manifest(root, "registry.ollama.ai/me/mine/v1", layers)
    write_manifest(root, "hf.co/org/M-GGUF/Q4_K_M", layers)
    assert stored_names(OLLAMA) == [
        "hf.co/org/M-GGUF:Q4_K_M",
        "me/mine:v1",
        "qwen3:8b",
        "qwen3:latest",
    ]
    for reference in ("qwen3", "qwen3:8b", "me/mine:v1", "hf.co/org/M-GGUF:Q4_K_M"):
        assert resolve_model(reference) == blob
    assert resolve_model("registry.ollama.ai/library/qwen3:8b") == blob
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert stored_names(OLLAMA) == []
    old = write_file(home / "elsewhere/blobs" / f"sha256:{DIGEST}")
    write_manifest(home / "elsewhere", "registry.ollama.ai/library/tiny/latest", layers)
    assert resolve_model("tiny") == old


FAULTS = {
    "nothing": ((("model", f"sha256:{'cd' * 32}"),), "the blob that it names is not there"),
    "two": ((("model", f"sha256:{DIGEST}"),) * 2, "names 2 GGUF files, not one"),
    "none": ((("tensor", f"sha256:{DIGEST}"),), "names 0 GGUF files"),
    "adapter": ((("model", f"sha256:{DIGEST}"), ("adapter", "x")), "LoRA adapter"),
    "digest": ((("model", "sha256:../../../../etc/passwd"),), "is no SHA-256"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_manifest_has_a_reason_and_hides_no_other(home: Path, name: str) -> None:
    root = home / ".ollama/models"
    write_file(root / "blobs" / f"sha256-{DIGEST}")
    layers, words = FAULTS[name]
    write_manifest(root, "registry.ollama.ai/library/bad/1", layers)
    write_manifest(root, "registry.ollama.ai/library/good/1", [("model", f"sha256:{DIGEST}")])
    assert stored_names(OLLAMA) == ["bad:1", "good:1"]
    with pytest.raises(CheckpointError, match=words):
        resolve_model("bad:1")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"layers": 3}', b"\xff", b"x" * 2_000_000])
def test_invalid_manifests_are_refused(home: Path, content: bytes) -> None:
    write_file(home / ".ollama/models/manifests/registry.ollama.ai/library/bad/1", content)
    with pytest.raises(CheckpointError, match="bad:1: "):
        resolve_model("bad:1")


def test_a_model_in_two_stores_is_read_from_the_first(home: Path) -> None:
    write_file(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    snapshot = write_snapshot(home / ".cache/huggingface/hub", "org/M", ["M-Q4_K_M.gguf"])
    assert resolve_model("org/M:Q4_K_M") == snapshot / "M-Q4_K_M.gguf"


def test_a_path_wins_over_a_stored_name(home: Path) -> None:
    write_file(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    here = write_file(home / "org/M", b"GGUF here")
    assert resolve_model("org/M") == Path("org/M") and here.exists()


def test_an_unknown_name_is_answered_with_a_close_one(home: Path) -> None:
    write_file(home / ".lmstudio/models/org/M/M-Q4_K_M.gguf")
    with pytest.raises(NotFoundError, match=r"did you mean org/M:Q4_K_M\?") as missing:
        resolve_model("org/M:Q4_K_S")
    assert missing.value.fix == ("-m org/M:Q4_K_M", "spd pull org/M:Q4_K_S", "spd ls")
    assert find_stored_model("org/N") is None


def test_folders_that_cannot_be_read_are_empty(home: Path) -> None:
    write_file(home / ".ollama/models/manifests", b"a file")
    write_file(home / ".lmstudio", b"a file")
    loop = home / ".cache/llama.cpp"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    assert list_models() == []

    def denied(root: Path) -> Iterator[StoredModel]:
        yield StoredModel("a", OLLAMA, root, 1)
        raise PermissionError(root)

    assert Store(OLLAMA, home, denied).read_models() == []
