"""References to folders: paths, the embedded demo, the local Hugging Face cache; never the network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from spd.errors import NotFoundError, SpdError, UsageError
from spd.formats import hub
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.hub import list_cached_models, resolve_model
from tests.formats.formats_helpers import raises_spd_error

FIRST = "a" * 40
SECOND = "ab" * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache with one model of two snapshots, and forbid the network."""

    def forbid_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", forbid_network)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "hub" / "models--org--Model-1.5B"
    for commit in (FIRST, SECOND):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(FIRST + "\n")
    (tmp_path / "hub" / "models--org--empty").mkdir()
    (tmp_path / "hub" / "datasets--org--data").mkdir()
    return tmp_path / "hub"


def snapshot(cache: Path, commit: str) -> Path:
    """Return the folder of a snapshot."""
    return cache / "models--org--Model-1.5B" / "snapshots" / commit


def test_cached_models_are_listed_and_resolved(cache: Path) -> None:
    assert resolve_model("org/Model-1.5B") == snapshot(cache, FIRST)
    (cache / "models--gpt2" / "snapshots" / FIRST).mkdir(parents=True)
    assert list_cached_models() == ["gpt2", "org/Model-1.5B"]


def test_a_missing_cache_has_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nowhere"))
    assert list_cached_models() == []
    with raises_spd_error(NotFoundError, "org/model", exit_code=3):
        resolve_model("org/model")


def test_the_environment_sets_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert hub.cache_folder() == Path("/home/me/.cache/huggingface/hub")
    for relative in ("", "cache", "./cache", "~/cache"):  # what is kept there is run
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert hub.spd_cache_folder() == Path("/home/me/.cache/spd")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.spd_cache_folder() == Path("/xdg/spd")
    assert hub.cache_folder() == Path("/xdg/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub.cache_folder() == Path("/home/me/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert hub.cache_folder() == Path("/cache")


def test_a_path_wins_over_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache.parent / "org" / "Model-1.5B"
    folder.mkdir(parents=True)
    for reference in (
        str(folder),
        "./org/Model-1.5B",
        "org/Model-1.5B",
    ):  # a folder wins over the cache
        assert resolve_model(reference).resolve() == folder
    monkeypatch.setenv("HOME", str(cache.parent))
    assert resolve_model("~/org/Model-1.5B") == folder


def test_the_demo_is_resolved_by_its_name_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_draft_folder().parent == demo_folder() and demo_folder().parent.name == "formats"
    monkeypatch.setattr(hub, "demo_folder", lambda name: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == tmp_path
    assert resolve_model("./demo") == Path("demo")


def test_an_unknown_model_is_answered_with_a_close_name(cache: Path) -> None:
    with raises_spd_error(NotFoundError, "org/Model-15B", exit_code=3) as caught:
        resolve_model("org/Model-15B")
    assert "not in the local cache: did you mean org/Model-1.5B?" in caught.value.message
    assert caught.value.fix == ("spd pull org/Model-15B",)


def test_without_main_the_only_snapshot_counts(cache: Path) -> None:
    model = cache / "models--org--Model-1.5B"
    (model / "refs" / "main").unlink()
    with raises_spd_error(NotFoundError, "'main'", exit_code=3) as caught:
        resolve_model("org/Model-1.5B")
    assert caught.value.reason[1:] == (f"in the cache: {FIRST}", f"in the cache: {SECOND}")
    assert caught.value.fix == ("spd pull org/Model-1.5B", f"-m {snapshot(cache, FIRST)}")
    (snapshot(cache, FIRST) / "config.json").unlink()
    snapshot(cache, FIRST).rmdir()
    assert resolve_model("org/Model-1.5B") == snapshot(cache, SECOND)


def test_a_ref_that_points_elsewhere_is_not_followed(cache: Path) -> None:
    (cache / "models--org--Model-1.5B" / "refs" / "main").write_text("../../../..")
    with raises_spd_error(NotFoundError, "main", exit_code=3):
        resolve_model("org/Model-1.5B")


ABSENT = [
    "./nothing",
    "/nothing/at/all",
    "../x",
    "a/b/c",
    "a--b/c",
    "o/..",
    "~daemon/x",
    "x" * 5000,
]


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        *((word, UsageError) for word in ("", "   ", "a\0b")),
        *((word, NotFoundError) for word in ABSENT),
    ],
)
def test_references_to_no_model_are_refused(
    cache: Path, reference: str, kind: type[SpdError]
) -> None:
    with pytest.raises(kind) as caught:
        resolve_model(reference)
    assert caught.value.exit_code == (2 if kind is UsageError else 3)
