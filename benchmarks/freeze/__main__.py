"""Show that two trees of spd answer alike: their command lines run side by side, all they say is compared.

OLD and NEW are commits; without NEW it is the working tree as it is. Exits 0 where nothing differs, 6 where
something does, 7 where --minutes left cells to a later call. Both trees are unpacked elsewhere. What a tree
answered is kept in --store by tree, processor and this program, so that a later call goes on where this one
ended. Times, free memory and the places of the trees are left out. The interpreter must not have spd
installed: children that a tree starts would import that one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.freeze.cells import SHELF, Run, demo_cells, family_cells, make_prompts, other_cells

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ADDED = """reasoning plan.token_tiles plan.token_tiles_reason plan.threads_follow plan.checkpoint_bytes
plan.state_bytes target.gguf draft.gguf target.state_bytes_per_slot needs.parts.states needs.parts.checkpoints
needs.checkpoint_bytes prompt_ids versions.triton plan.draft_tp_reason
usage.completion_tokens_details"""
RENAMED: dict[str, str | None] = dict.fromkeys((*ADDED.split(), "plan.kernels_reason"))
"""What the new tree calls a dotted path of the old one's JSON, and what lies under it; None where it is not
compared, such as one that only one of them has."""
VARIABLE = re.compile(r"(ms|.*_ms|.*_per_second|free|usable|memory_budget_bytes)$")
Cells = dict[str, list[Run]]
Answer = dict[str, list[Any]]


def git(*arguments: str, **environment: str) -> str:
    """Return the output of git in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    settings = os.environ | environment
    return subprocess.run(
        command, env=settings, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def tree_of(commit: str | None) -> str:
    """Return the git tree of a commit, or of the working tree with uncommitted changes."""
    if commit is not None:
        return git("rev-parse", "--verify", f"{commit}^{{tree}}")
    with tempfile.TemporaryDirectory() as folder:
        git("add", "--all", GIT_INDEX_FILE=f"{folder}/index")
        return git("write-tree", GIT_INDEX_FILE=f"{folder}/index")


def documents(text: str) -> list[Any]:
    """Return the values of lines of JSON without those that vary; other lines as they are."""
    values: list[Any] = []
    for line in text.splitlines():
        try:
            values.append(
                json.loads(
                    line, object_hook=lambda o: {k: o[k] for k in o if not VARIABLE.match(k)}
                )
            )
        except ValueError:
            values.append(line)
    return values


class Tree:
    """One tree unpacked, a process that runs its command line, and the answers so far."""

    def __init__(self, tree: str, place: Path, store: Path) -> None:
        self.place = place
        self.store = store / f"{place.name}-{tree[:12]}"
        self.home = store.parent / "home"
        self.process: subprocess.Popen[str] | None = None
        for folder in (place / "tree", place / "cwd", self.store, self.home):
            folder.mkdir(parents=True, exist_ok=True)
        git("archive", "-o", f"{place}/tree.tar", tree)
        subprocess.run(["tar", "-xf", "../tree.tar"], cwd=place / "tree", check=True)

    def python(self, *arguments: str, folder: str = "cwd") -> subprocess.Popen[str]:
        """Start Python with this tree first on its path, and little else of the environment."""
        settings = "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive LANG=C.UTF-8 TERM=dumb COLUMNS=100 "
        settings += f"HF_HUB_OFFLINE=1 HOME={self.home} PYTHONPATH={self.place / 'tree'} "
        settings += f"XDG_CACHE_HOME={Path('~/.cache').expanduser()}"  # of compiled C kernels
        environment = {
            "PATH": os.environ["PATH"],
            **dict(setting.split("=") for setting in settings.split()),
        }
        options: Any = {
            "env": environment,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
        }
        return subprocess.Popen([sys.executable, *arguments], cwd=self.place / folder, **options)

    def ask(self, run: Run) -> Answer:
        """Return the tree's answer to a command line; that its process died is an answer too."""
        process = self.process = self.process or self.python(str(HERE / "worker.py"))
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(run._asdict()), file=process.stdin, flush=True)
        line = process.stdout.readline().replace(str(self.place), "")
        if not line:
            self.close()
            return {"status": [f"died: {process.returncode}"], "err": [], "out": [], "trace": []}
        return {part: documents(text) for part, text in json.loads(line).items()}

    def answers(self, name: str, runs: list[Run]) -> list[Answer]:
        """Return the tree's answers to every run of a cell, stored earlier or run now."""
        path = self.store / f"{name.replace('/', '~')}.json"
        if not path.exists():
            path.with_suffix(".new").write_text(json.dumps([self.ask(run) for run in runs]))
            path.with_suffix(".new").rename(path)
        stored: list[Answer] = json.loads(path.read_text())
        return stored

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()
        self.process = None


def plain_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in one of JSON by dotted path."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        yield from plain_values(item, f"{path}.{key}")
    if not inner:
        yield path[1:], value


def new_path(path: str) -> str | None:
    """Return the new tree's name of a path of the old one; None where it is not compared."""
    for old, new in RENAMED.items():
        if f"{path}.".startswith(f"{old}."):
            return None if new is None else new + path[len(old) :]
    return path


def flat_values(answer: Answer, is_old: bool) -> dict[str, Any]:
    """Return the values of an answer by part, line and dotted path, by the new tree's names."""
    values = {}
    for part, lines in answer.items():
        for number, line in enumerate(lines):
            for path, value in plain_values(line, ""):
                if (name := new_path(path)) is not None:
                    values[f"{part} {number} {name if is_old else path}"] = value
    return values


def differences(runs: list[Run], old: list[Answer], new: list[Answer]) -> Iterator[str]:
    """Yield every difference of two trees' answers to the runs of a cell, as text."""
    for run, before, after in zip(runs, old, new, strict=True):
        was = flat_values(before, True)
        now = flat_values(after, False)
        for name in (name for name in was | now if was.get(name, ...) != now.get(name, ...)):
            pair = [str(values.get(name, "nothing"))[:90] for values in (was, now)]
            yield f"{' '.join(run.argv)[-150:]!r}: {name}: {pair[0]} became {pair[1]}"


def compare(cells: Cells, old: Tree, new: Tree, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cell by cell until `end`, print a row each, and yield what was found."""
    print(f"{'cell':<44}{'tokens':>8}{'rounds':>8}{'failed':>8}{'seconds':>9}{'differences':>13}")
    for name, runs in cells.items():
        if (began := time.monotonic()) > end:
            return
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(Tree.answers, (old, new), (name,) * 2, (runs,) * 2)
        changes = list(differences(runs, before, after))
        printed = [value for answer in before for value in answer["out"] if isinstance(value, dict)]
        counts = {"tokens": sum(len(value.get("token_ids") or ()) for value in printed)}
        counts["rounds"] = sum(len(answer["trace"][1:]) for answer in before)
        counts["failed"] = sum(answer["status"] != [0] for answer in before)
        counts_text = "".join(f"{count:>8,}" for count in counts.values())
        print(
            f"{name:<44}{counts_text}{time.monotonic() - began:>9.1f}{len(changes):>13,}",
            flush=True,
        )
        print("".join(f"  {line}\n" for line in changes[:3]), end="", flush=True)
        yield name, {**counts, "differences": len(changes), "first": changes[:20]}


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freeze", description=__doc__)
    parser.add_argument("old", help="the commit whose answers are right")
    parser.add_argument("new", nargs="?", help="a commit (default: the working tree)")
    parser.add_argument("--only", default="*", help="cells by name: * stands for anything")
    parser.add_argument("--list", action="store_true", help="print the cells and run none")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell later")
    parser.add_argument("--prompts", type=int, default=200, help="prompts of the demo's cells")
    parser.add_argument("--store", type=Path, default=Path("~/.cache/spd-freeze").expanduser())
    parser.add_argument("-o", "--output", type=Path, help="a JSON file of what was found")
    options = parser.parse_args(arguments)
    trees = tree_of(options.old), tree_of(options.new)
    processor = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    environment = {
        "processor": processor,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    sources = "".join((HERE / name).read_text() for name in ("cells.py", "worker.py"))
    key = hashlib.sha256(f"{environment} {options.prompts} {sources}".encode()).hexdigest()
    store = options.store / f"{trees[0][:12]}-{key[:12]}"
    with tempfile.TemporaryDirectory() as place:
        old, new = (
            Tree(tree, Path(place) / name, store) for tree, name in zip(trees, "01", strict=True)
        )
        if not (shelf_file := store / "shelf/shelf.json").exists():
            shelf_file.parent.mkdir(exist_ok=True)
            old.python("-c", SHELF, str(shelf_file.parent), folder="tree").communicate()
        shelf = json.loads(shelf_file.read_text())
        prompts = make_prompts(old.place / "tree", options.prompts)
        all_cells = *other_cells(shelf), *family_cells(shelf, prompts), *demo_cells(prompts)
        cells = {name: runs for name, runs in all_cells if fnmatch(name, options.only)}
        if options.list:
            print("\n".join(f"{name}: {len(runs)} runs" for name, runs in cells.items()))
            return 0
        rows = dict(compare(cells, old, new, time.monotonic() + 60 * options.minutes))
        old.close()
        new.close()
    summed = ("tokens", "rounds", "failed", "differences")
    total = {name: sum(row[name] for row in rows.values()) for name in summed}
    total |= {"cells": len(rows), "left": len(cells) - len(rows)}
    print(", ".join(f"{count:,} {name}" for name, count in total.items()))
    if options.output is not None:
        figures = {
            "old": [options.old, trees[0]],
            "new": [options.new, trees[1]],
            **environment,
            **total,
            "found": rows,
        }
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 6 if total["differences"] else 7 if total["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
