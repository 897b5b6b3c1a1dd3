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
    """What git says in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    settings = os.environ | environment
    return subprocess.run(
        command, env=settings, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def tree_of(commit: str | None) -> str:
    """The git tree of a commit, or of the working tree with what is not committed."""
    if commit is not None:
        return git("rev-parse", "--verify", f"{commit}^{{tree}}")
    with tempfile.TemporaryDirectory() as folder:
        git("add", "--all", GIT_INDEX_FILE=f"{folder}/index")
        return git("write-tree", GIT_INDEX_FILE=f"{folder}/index")


def documents(text: str) -> list[Any]:
    """The values of lines of JSON without what differs from run to run; other lines as they are."""
    found: list[Any] = []
    for line in text.splitlines():
        try:
            found.append(
                json.loads(
                    line, object_hook=lambda o: {k: o[k] for k in o if not VARIABLE.match(k)}
                )
            )
        except ValueError:
            found.append(line)
    return found


class Tree:
    """One tree unpacked, a process that runs its command line, and the answers it gave so far."""

    def __init__(self, tree: str, place: Path, store: Path) -> None:
        self.place = place
        self.kept = store / f"{place.name}-{tree[:12]}"
        self.home = store.parent / "home"
        self.process: subprocess.Popen[str] | None = None
        for folder in (place / "tree", place / "cwd", self.kept, self.home):
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
            **dict(each.split("=") for each in settings.split()),
        }
        options: Any = {
            "env": environment,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
        }
        return subprocess.Popen([sys.executable, *arguments], cwd=self.place / folder, **options)

    def ask(self, run: Run) -> Answer:
        """What the tree answers to a command line; that its process died is an answer too."""
        process = self.process = self.process or self.python(str(HERE / "worker.py"))
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(run._asdict()), file=process.stdin, flush=True)
        line = process.stdout.readline().replace(str(self.place), "")
        if not line:
            self.close()
            return {"status": [f"died: {process.returncode}"], "err": [], "out": [], "trace": []}
        return {part: documents(said) for part, said in json.loads(line).items()}

    def answers(self, name: str, runs: list[Run]) -> list[Answer]:
        """What the tree answers to every run of a cell, kept from an earlier call or asked now."""
        path = self.kept / f"{name.replace('/', '~')}.json"
        if not path.exists():
            path.with_suffix(".new").write_text(json.dumps([self.ask(run) for run in runs]))
            path.with_suffix(".new").rename(path)
        found: list[Answer] = json.loads(path.read_text())
        return found

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()
        self.process = None


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The plain values in one of JSON by dotted path."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield from leaves(each, f"{path}.{key}")
    if not inner:
        yield path[1:], value


def called(path: str) -> str | None:
    """What the new tree calls a path of the old one; None where it is not compared."""
    for old, new in RENAMED.items():
        if f"{path}.".startswith(f"{old}."):
            return None if new is None else new + path[len(old) :]
    return path


def named(answer: Answer, is_old: bool) -> dict[str, Any]:
    """The values of an answer by part, line and dotted path, as the new tree calls it."""
    found = {}
    for part, lines in answer.items():
        for number, line in enumerate(lines):
            for path, value in leaves(line, ""):
                if (name := called(path)) is not None:
                    found[f"{part} {number} {name if is_old else path}"] = value
    return found


def differences(runs: list[Run], old: list[Answer], new: list[Answer]) -> Iterator[str]:
    """Every difference of two trees' answers to the runs of a cell, in words."""
    for run, before, after in zip(runs, old, new, strict=True):
        was = named(before, True)
        now = named(after, False)
        for name in (name for name in was | now if was.get(name, ...) != now.get(name, ...)):
            pair = [str(each.get(name, "nothing"))[:90] for each in (was, now)]
            yield f"{' '.join(run.argv)[-150:]!r}: {name}: {pair[0]} became {pair[1]}"


def compare(cells: Cells, old: Tree, new: Tree, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cell by cell until `end`, print a row each, and yield what was found."""
    print(f"{'cell':<44}{'tokens':>8}{'rounds':>8}{'failed':>8}{'seconds':>9}{'differences':>13}")
    for name, runs in cells.items():
        if (began := time.monotonic()) > end:
            return
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(Tree.answers, (old, new), (name,) * 2, (runs,) * 2)
        found = list(differences(runs, before, after))
        said = [each for answer in before for each in answer["out"] if isinstance(each, dict)]
        counts = {"tokens": sum(len(each.get("token_ids") or ()) for each in said)}
        counts["rounds"] = sum(len(answer["trace"][1:]) for answer in before)
        counts["failed"] = sum(answer["status"] != [0] for answer in before)
        shown = "".join(f"{count:>8,}" for count in counts.values())
        print(f"{name:<44}{shown}{time.monotonic() - began:>9.1f}{len(found):>13,}", flush=True)
        print("".join(f"  {line}\n" for line in found[:3]), end="", flush=True)
        yield name, {**counts, "differences": len(found), "first": found[:20]}


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
    asked = parser.parse_args(arguments)
    trees = tree_of(asked.old), tree_of(asked.new)
    processor = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    facts = {"processor": processor, "python": platform.python_version(), "torch": version("torch")}
    sources = "".join((HERE / name).read_text() for name in ("cells.py", "worker.py"))
    key = hashlib.sha256(f"{facts} {asked.prompts} {sources}".encode()).hexdigest()
    store = asked.store / f"{trees[0][:12]}-{key[:12]}"
    with tempfile.TemporaryDirectory() as place:
        old, new = (
            Tree(tree, Path(place) / name, store) for tree, name in zip(trees, "01", strict=True)
        )
        if not (listed := store / "shelf/shelf.json").exists():
            listed.parent.mkdir(exist_ok=True)
            old.python("-c", SHELF, str(listed.parent), folder="tree").communicate()
        shelf = json.loads(listed.read_text())
        prompts = make_prompts(old.place / "tree", asked.prompts)
        every = *other_cells(shelf), *family_cells(shelf, prompts), *demo_cells(prompts)
        cells = {name: runs for name, runs in every if fnmatch(name, asked.only)}
        if asked.list:
            print("\n".join(f"{name}: {len(runs)} runs" for name, runs in cells.items()))
            return 0
        rows = dict(compare(cells, old, new, time.monotonic() + 60 * asked.minutes))
        old.close()
        new.close()
    summed = ("tokens", "rounds", "failed", "differences")
    total = {name: sum(row[name] for row in rows.values()) for name in summed}
    total |= {"cells": len(rows), "left": len(cells) - len(rows)}
    print(", ".join(f"{count:,} {name}" for name, count in total.items()))
    if asked.output is not None:
        shown = {
            "old": [asked.old, trees[0]],
            "new": [asked.new, trees[1]],
            **facts,
            **total,
            "found": rows,
        }
        asked.output.write_text(json.dumps(shown, indent=1) + "\n")
    return 6 if total["differences"] else 7 if total["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
