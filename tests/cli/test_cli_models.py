"""`spd pull`, `ls` and `rm` against a hub on loopback: downloads, refusals and removals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.hf_api import BlobLfsInfo, RepoSibling
from huggingface_hub.utils import _http

from spd.cli.commands import models
from spd.cli.signals import Interrupted
from spd.errors import NetworkError, UsageError
from spd.formats import hub_download
from spd.formats.private_texts import PrivateTexts, find_text_files
from spd.server import run
from tests.cli.conftest import assert_refused, make_failing
from tests.cli.hub_server import COMMIT, NAME, Hub, serve
from tests.test_hostile import CONTROLS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache."""
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(tiny: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub with one tiny model that runs."""
    folder = tiny()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    offered = Hub(
        files | {"README.md": b"# hi", "pytorch_model.bin": b"pickle", "run.py": b"import os"}
    )
    server = serve(offered)
    monkeypatch.setattr(constants, "ENDPOINT", offered.url)
    template = offered.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http, "_GLOBAL_CLIENT", None)  # which knows whether it is offline
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(hub_download, "get_token", lambda: None)
    yield offered
    server.shutdown()
    server.server_close()


def snapshot(cache: Path) -> Path:
    return cache / "models--org--Tiny" / "snapshots" / COMMIT


def test_only_what_spd_reads_is_fetched(hub: Hub, cache: Path, spd_run: Callable) -> None:
    """Nothing is fetched twice, and nothing by a dry run."""
    hub.files["hf_quant_config.json"] = b'{"quantization": {}}'
    ran = spd_run("pull", NAME, "--dry-run", "--json")
    assert (
        ran.json["missing_bytes"] == ran.json["bytes"] == sum(f["size"] for f in ran.json["files"])
    )
    assert hub.fetched_files() == [] and not snapshot(cache).exists()
    ran = spd_run("pull", NAME)
    assert ran.code == 0 and ran.text == f"{snapshot(cache)}\n", ran
    expected = {
        name for name in hub.files if name not in ("README.md", "pytorch_model.bin", "run.py")
    }
    assert {path.name for path in snapshot(cache).iterdir()} <= expected
    assert (
        {"config.json", "model.safetensors", "hf_quant_config.json"}
        <= set(hub.fetched_files())
        <= expected
    )
    before = len(hub.fetched_files())
    assert spd_run("pull", NAME).code == 0 and len(hub.fetched_files()) == before
    assert spd_run("inspect", NAME).code == 0


def test_what_a_hub_says_steers_no_terminal(hub: Hub, cache: Path) -> None:
    hub.headers["X-HF-Warning"] = "topic; \x1b]0;own\x07 moved\x1b[2J"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    argv = [sys.executable, "-m", "spd", "pull", NAME]
    ran = subprocess.run(argv, env=env, capture_output=True, timeout=120)
    assert ran.returncode == 0 and b" moved" in ran.stderr and not CONTROLS.search(ran.stderr), ran


def test_shards_are_those_that_the_index_names(hub: Hub, cache: Path, spd_run: Callable) -> None:
    """Hostile names in the listing are never requested."""
    weights = hub.files.pop("model.safetensors")
    hub.files |= {"model-1.safetensors": weights, "consolidated.safetensors": b"x" * 99}
    index = {"weight_map": {"a": "model-1.safetensors"}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.extra = [f"{folder}evil.safetensors" for folder in ("../../", "/tmp/", "..\\")]
    hub.extra.append("sub/model.safetensors")
    assert spd_run("pull", NAME).code == 0
    assert (
        "model-1.safetensors" in hub.fetched_files()
        and "consolidated.safetensors" not in hub.fetched_files()
    )
    assert not any("evil" in path or "sub/" in path for _, path, _ in hub.log)


@pytest.mark.parametrize(
    "name", ["../../evil.safetensors", "/x.safetensors", r"a\b.safetensors", "x.bin", 3]
)
def test_hostile_names_in_the_index_are_refused(
    name: object, hub: Hub, cache: Path, spd_run: Callable
) -> None:
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    ran = spd_run("pull", NAME)
    assert ran.code == 4 and "index.json: weight_map: " in ran.err and ascii(name) in ran.err
    assert not list(cache.parent.rglob("*evil*"))


def test_a_broken_connection_goes_on_where_it_broke(hub, cache, spd_run, monkeypatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.break_after["model.safetensors"] = [1000]
    assert spd_run("pull", NAME).code == 0
    assert "bytes=1000-" in [
        range_header for _, path, range_header in hub.log if path.endswith("model.safetensors")
    ]
    assert (snapshot(cache) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_what_was_finished_is_kept(
    hub: Hub, cache: Path, spd_run: Callable, monkeypatch: Any
) -> None:
    hub.sent["model.safetensors"] = b"short"
    ran = spd_run("pull", NAME)
    assert ran.code == 8 and not (snapshot(cache) / "model.safetensors").exists()
    hub.sent.clear()
    with pytest.raises(Interrupted):
        hub_download.download_model(hub_download.look_up_model(NAME), make_failing(Interrupted(2)))
    assert not list(cache.rglob("*.incomplete"))
    hub.log.clear()
    assert spd_run("pull", NAME).code == 0
    assert hub.fetched_files() == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_file_with_another_hash_is_removed(
    name: str, hub: Hub, cache: Path, spd_run: Callable
) -> None:
    """An index is read first: a wrong one from a proxy must not be reported as a damaged model."""
    if "index" in name:
        del hub.files["model.safetensors"]
    data = hub.files.setdefault(name, b'{"weight_map": {"a": "m.safetensors"}}')
    hub.sent[name] = bytes([data[0] ^ 1]) + data[1:]
    assert_refused(
        spd_run("pull", NAME), 8, f"{name} is not the file that the hub lists", "hash wanted"
    )
    assert not (snapshot(cache) / name).exists()
    assert all(
        hub.sent[name] != blob.read_bytes()
        for blob in (cache / "models--org--Tiny/blobs").iterdir()
    )


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.covers(2)
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("name", ["../../../precious", "/PRECIOUS", "..", '"../../../new"'])
@pytest.mark.parametrize("missing", ["", "config.json"])
def test_no_answer_leads_out_of_the_cache(header, name, missing, hub, cache, spd_run) -> None:
    """The library makes paths of these headers; existing files are kept, and none is made."""
    folder = cache.parent
    precious = folder / "precious"
    precious.write_text("all there is")
    before = {path: data for path, data in read_files(folder).items() if "tiny" not in path}
    hub.headers[header] = name.replace("/PRECIOUS", str(precious))
    hub.missing = missing
    message = f"cannot download {NAME}: the hub gave a wrong answer: no name to go by"
    assert_refused(spd_run("pull", NAME), 8, message)
    outside = {p: d for p, d in read_files(folder).items() if not p.startswith(str(cache))}
    assert outside == before


def test_a_link_that_leads_out_of_the_cache_is_all_that_is_removed(hub, cache, tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all there is")
    link = snapshot(cache) / "config.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    file = RepoSibling(
        "config.json", size=5, lfs=BlobLfsInfo(size=5, sha256="0" * 64, pointer_size=1)
    )
    with pytest.raises(NetworkError, match="is not the file that the hub lists"):
        hub_download._check_hash(NAME, file, link)
    assert precious.read_text() == "all there is" and not link.is_symlink()


SIBLING = {"rfilename": "config.json", "size": 1, "blobId": "0", "lfs": {"sha256": "x"}}
ANSWERS = [
    b"<html>Please log in</html>",
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[1]",
    b"null",
    json.dumps({"id": NAME, "sha": "../../x"}).encode(),
    json.dumps({"id": NAME, "sha": COMMIT, "siblings": "text"}).encode(),
    json.dumps({"id": NAME, "sha": COMMIT, "siblings": [{}]}).encode(),
    json.dumps({"id": NAME, "sha": COMMIT, "siblings": [SIBLING]}).encode(),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[:60].decode("latin-1"))
def test_a_wrong_answer_of_the_hub_is_refused(answer: bytes, hub: Hub, spd_run: Callable) -> None:
    hub.answer = answer
    assert_refused(
        spd_run("pull", NAME), 8, f"cannot download {NAME}: the hub gave a wrong answer", hub.url
    )


GATED = ["is gated, and no token is set", f"/{NAME}, then: hf auth login", "HF_TOKEN"]
NOWHERE = "http://127.0.0.1:9"
FULL = make_failing(OSError(28, "No space left on device"))


def disk_of_1000(path: str) -> SimpleNamespace:
    return SimpleNamespace(free=1000)


NO_SAFETENSORS = ["no model.safetensors", ".bin files, which spd"]
BINARY = {"config.json": b"{}", "pytorch_model.bin": b""}
REFUSALS: dict[str, tuple[Any, int, list[str]]] = {
    "gated": ({"status": 403, "error_code": "GatedRepo"}, 8, GATED),
    "no token": (
        {"status": 401, "error_code": "RepoNotFound"},
        3,
        ["no such model", "no token is set"],
    ),
    "unknown": ({"status": 404, "error_code": "RepoNotFound"}, 3, ["no such model"]),
    "no revision": ({"status": 404, "error_code": "RevisionNotFound"}, 3, ["no such revision"]),
    "broken": ({"status": 500}, 8, ["500"]),
    "no network": (
        (constants, "ENDPOINT", "http://nowhere.invalid"),
        8,
        [f"cannot download {NAME}: no network: the hub's host name cannot be looked up"],
    ),
    "no hub": ((constants, "ENDPOINT", NOWHERE), 8, [f"cannot download {NAME}", "127.0.0.1:9"]),
    "offline": ((constants, "HF_HUB_OFFLINE", True), 8, ["HF_HUB_OFFLINE"]),
    "no room": ((shutil, "disk_usage", disk_of_1000), 5, ["not enough disk space", "1,000 free"]),
    "full": ((hub_download, "hf_hub_download", FULL), 5, ["the disk is full"]),
    "no safetensors": ({"files": BINARY}, 4, NO_SAFETENSORS),
}
"""A fault of the hub or the machine, the exit code, and texts of the error."""


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_cannot_be_fetched_is_refused_with_the_reason(
    name, hub, spd_run, monkeypatch
) -> None:
    change, code, expected_texts = REFUSALS[name]
    vars(hub).update(change) if isinstance(change, dict) else monkeypatch.setattr(*change)
    assert_refused(spd_run("pull", NAME), code, *expected_texts)
    assert hub.fetched_files() == []


@pytest.mark.parametrize("typed", ["generate --prompt-ids 1,2 -m", "generate --jsonl -m"])
def test_a_script_downloads_nothing_before_the_command_that_is_named(
    typed, hub, cache, spd_run, script, monkeypatch
) -> None:
    monkeypatch.setattr(run, "load_engine_thread", make_failing(UsageError("no lines to answer")))
    ran = spd_run(typed.split(), NAME, stdin=b"")
    assert_refused(ran, 3, f"fix: spd pull {NAME}\n")
    assert hub.log == [] and not cache.exists()
    assert spd_run("pull", NAME).code == 0
    ran = spd_run(typed.split(), NAME, stdin=b"")
    assert ran.code == 0 or "no lines to answer" in ran.err, ran


def test_serve_downloads_nothing_by_itself(hub, cache, spd_run) -> None:
    assert_refused(spd_run("serve", "--port", "0", NAME), 3, f"spd pull {NAME}")
    assert hub.log == [] and not cache.exists()


@pytest.mark.usefixtures("cache", "script")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 3), ("\n", 3), ("", 3)])
def test_a_person_is_asked(answer, code, hub, spd_run, monkeypatch) -> None:
    monkeypatch.setattr(models, "is_terminal", lambda stream: True)
    ran = spd_run("generate", "-m", NAME, "--prompt-ids", "1,2", stdin=answer.encode())
    assert f"download {NAME} from the hub? [y/N]" in ran.err and ran.code == code
    done = ("model.safetensors" in hub.fetched_files(), bool(hub.log), "iB to download" in ran.err)
    assert done == (not code,) * 3, "the hub hears of nothing before the yes"


def test_ls_says_what_runs_and_why_not(hub: Hub, cache: Path, spd_run: Callable) -> None:
    assert "no model is in the cache" in spd_run("ls").err
    spd_run("pull", NAME)
    other = cache / "models--org--Odd" / "snapshots" / COMMIT
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"architectures": ["OddForCausalLM"], "model_type": "odd"}')
    (cache / "models--org--Empty" / "snapshots" / COMMIT).mkdir(parents=True)
    models_by_name = {model["model"]: model for model in spd_run("ls", "--json").json["models"]}
    assert set(models_by_name) == {NAME, "org/Odd", "org/Empty"}
    assert (
        models_by_name[NAME]["supported"]
        and models_by_name[NAME]["bytes"] > 1000
        and models_by_name[NAME]["dtype"]
    )
    assert (
        not models_by_name["org/Odd"]["supported"] and "Odd" in models_by_name["org/Odd"]["reason"]
    )
    assert "config.json" in models_by_name["org/Empty"]["reason"]
    text = spd_run("ls").text
    assert text.splitlines()[0].split() == [
        "MODEL",
        "SIZE",
        "DTYPE",
        "ARCHITECTURE",
        "MTP",
        "STORE",
        "RUNS",
    ]
    assert "no: " in text and "yes" in text
    assert spd_run("ls", "-q").text.split() == ["org/Empty", "org/Odd", NAME]


def test_rm_frees_and_touches_nothing_else(
    hub: Hub, cache: Path, tmp_path: Path, spd_run: Callable
) -> None:
    spd_run("pull", NAME)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"precious")
    (snapshot(cache) / "link").symlink_to(outside)
    (cache / "models--org--Other" / "snapshots").mkdir(parents=True)
    ran = spd_run("rm", NAME, stdin=b"y\n")
    assert ran.code == 2 and "-y" in ran.err and snapshot(cache).exists(), "a script must say -y"
    assert spd_run("rm", "-y", NAME).code == 0
    assert not (cache / "models--org--Tiny").exists() and outside.read_bytes() == b"precious"
    assert (cache / "models--org--Other").exists()
    assert spd_run("rm", "-y", NAME).code == 3
    (cache / "models--org--Tiny").symlink_to(cache / "models--org--Other")
    ran = spd_run("rm", "-y", NAME)
    assert ran.code == 5 and "symbolic link" in ran.err
    assert (cache / "models--org--Other").exists()


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("", True), ("Y\n", False)])
def test_rm_asks(
    answer: str, stays: bool, cache: Path, spd_run: Callable, monkeypatch: Any
) -> None:
    (cache / "models--org--Tiny" / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setattr(models, "is_terminal", lambda stream: True)
    ran = spd_run("rm", NAME, stdin=answer.encode())
    assert ran.code == 0 and "[y/N]" in ran.err and (cache / "models--org--Tiny").exists() == stays


def test_rm_removes_the_texts_of_earlier_sessions(
    tmp_path: Path, spd_run: Callable, cache: Path
) -> None:
    """And nothing else of their folder; a folder without any is taken for a model's name."""
    folder = tmp_path / "texts"
    for fingerprint in ("a", "b"):
        PrivateTexts(folder, fingerprint, 100).append_text([1, 2, 3])
    other = folder / "notes.md"
    other.write_text("precious")
    ran = spd_run("rm", folder, stdin=b"y\n")
    assert ran.code == 2 and "32 B" in ran.err and len(find_text_files(folder)) == 2
    ran = spd_run("rm", "-y", folder)
    assert ran.code == 0 and f"removed the texts in {folder}" in ran.err
    assert find_text_files(folder) == [] and other.read_text() == "precious"
    assert spd_run("rm", "-y", folder).code == 2


# GGUF files, and what other programs keep

QUANTIZED = {
    "T-Q4_K_M.gguf": b"GGUF" + bytes(400),
    "T-Q8_0.gguf": b"GGUF" + bytes(800),
    "BF16/T-BF16-00001-of-00002.gguf": b"GGUF" + bytes(700),
    "BF16/T-BF16-00002-of-00002.gguf": b"GGUF" + bytes(900),
    "mtp-T-Q8_0.gguf": b"GGUF" + bytes(80),
    "mmproj-F16.gguf": b"GGUF",
    "config.json": b"{}",
}


def test_one_of_several_gguf_files_has_to_be_chosen(
    hub: Hub, cache: Path, spd_run: Callable
) -> None:
    hub.files = dict(QUANTIZED)
    ran = spd_run("pull", NAME)
    assert ran.code == 2 and "holds 3 models as GGUF, one of which is to be chosen" in ran.err
    for tag in ("Q4_K_M", "Q8_0", "BF16"):
        assert re.search(rf"GiB +fits +{tag}\n", ran.err)
    assert f"fix: spd pull {NAME}:BF16" in ran.err, "the largest that fits"
    assert hub.fetched_files() == [] and not cache.exists()
    assert "has no GGUF file 'Q2_K'" in spd_run("pull", f"{NAME}:Q2_K").err


@pytest.mark.parametrize(
    ("tag", "first", "fetched"),
    [
        ("q4_k_m", "T-Q4_K_M.gguf", ["T-Q4_K_M.gguf", "mtp-T-Q8_0.gguf"]),
        (
            "BF16",
            "BF16/T-BF16-00001-of-00002.gguf",
            ["T-BF16-00001-of-00002.gguf", "T-BF16-00002-of-00002.gguf", "mtp-T-Q8_0.gguf"],
        ),
    ],
)
def test_the_files_that_a_tag_means_are_fetched(
    tag: str, first: str, fetched: list[str], hub: Hub, cache: Path, spd_run: Callable
) -> None:
    """These are the files of the model, and that of its MTP layers if they have their own."""
    hub.files = dict(QUANTIZED)
    ran = spd_run("pull", f"{NAME}:{tag}", "--json")
    assert hub.fetched_files() == fetched
    assert ran.json["file"] == str(snapshot(cache) / first) and Path(ran.json["file"]).exists()
    assert spd_run("ls", "-q").text.split() == [f"{NAME}:{tag.upper()}"]
    assert spd_run("pull", f"{NAME}:{tag}").text.strip() == ran.json["file"]
    assert hub.fetched_files() == fetched, "not twice"


def test_a_single_gguf_file_needs_no_choice(hub: Hub, cache: Path, spd_run: Callable) -> None:
    hub.files = {"T-Q8_0.gguf": b"GGUF"}
    assert spd_run("pull", NAME).text.strip() == str(snapshot(cache) / "T-Q8_0.gguf")
    hub.files = {"T-Q8_0-00001-of-00003.gguf": b"GGUF"}
    assert "has 1 of the 3 files of Q8_0" in spd_run("pull", NAME).err


@pytest.mark.parametrize(
    "name", ["../T-Q8_0.gguf", "/T-Q8_0.gguf", "a/../../T-Q8_0.gguf", ".a/T-Q8_0.gguf"]
)
def test_no_name_of_a_gguf_file_leads_out_of_the_cache(
    name: str, hub: Hub, spd_run: Callable
) -> None:
    hub.files = {name: b"GGUF"}
    ran = spd_run("pull", f"{NAME}:Q8_0")
    assert ran.code == 2 and "has no GGUF file 'Q8_0'" in ran.err and hub.fetched_files() == []


def test_a_person_is_asked_for_a_gguf_file_that_is_not_here(
    hub, cache, spd_run, monkeypatch
) -> None:
    hub.files = dict(QUANTIZED)
    monkeypatch.setattr(models, "is_terminal", lambda stream: True)
    ran = spd_run("inspect", f"{NAME}:Q4_K_M")
    assert "no store on this machine has it" in ran.err and f"spd pull {NAME}:Q4_K_M" in ran.err
    spd_run("generate", "-m", f"{NAME}:Q4_K_M", "Hi", stdin=b"y\n")
    assert hub.fetched_files() == ["T-Q4_K_M.gguf", "mtp-T-Q8_0.gguf"]


def test_what_other_programs_keep_is_listed_and_never_removed(
    cache: Path, tmp_path: Path, spd_run: Callable, monkeypatch: Any
) -> None:
    root = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'a' * 64}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    blob = root / "blobs" / f"sha256-{'a' * 64}"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "old.gguf").write_bytes(b"GGUF" + bytes(20))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    models_by_name = {model["model"]: model for model in spd_run("ls", "--json").json["models"]}
    assert {name: model["store"] for name, model in models_by_name.items()} == {
        "tiny:1b": "Ollama",
        "old": "llama.cpp",
    }
    assert "GGUF version 0" in models_by_name["tiny:1b"]["reason"]
    ran = spd_run("rm", "-y", "tiny:1b")
    assert ran.code == 2 and "is kept by Ollama" in ran.err and "fix: ollama rm tiny:1b" in ran.err
    ran = spd_run("rm", "-y", "old")
    assert ran.code == 2 and f"fix: delete {tmp_path / 'llama' / 'old.gguf'}" in ran.err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_one_file_of_a_repository_is_not_removed_alone(hub, cache, spd_run) -> None:
    hub.files = dict(QUANTIZED)
    spd_run("pull", f"{NAME}:Q8_0")
    ran = spd_run("rm", "-y", f"{NAME}:Q8_0")
    assert ran.code == 2 and f"fix: spd rm {NAME}" in ran.err and snapshot(cache).exists()
    assert spd_run("rm", "-y", NAME).code == 0 and not snapshot(cache).exists()
