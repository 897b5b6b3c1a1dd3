"""The never arrows, the size limits, and what may read the environment: read from the source itself."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPD = ROOT / "spd"
FILE_LIMIT, FUNCTION_LIMIT = 600, 70
TABLE = r"^\| (`.+`|all others) \| (\d+) \|"
SAID = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").replace(",", "")
CEILINGS = {
    tuple(re.findall(r"`([\w/]+?)/?`", rooms)): int(lines)
    for rooms, lines in re.findall(TABLE, SAID, re.MULTILINE)
}  # Lines of Python in each room, of the rest where there is no name, at most. They fall, or stay.
READ_ENVIRONMENT = {"spd.cli.app", "spd.formats.hub"}


@functools.cache
def modules(root: Path = SPD) -> list[tuple[str, ast.Module, str]]:
    """(dotted name, tree, text) of every module below `root`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        found.append((".".join(p for p in parts if p != "__init__"), ast.parse(text), text))
    return found


def imports(tree: ast.Module, *, top_level: bool = False) -> set[str]:
    """Absolute names of imported modules; with `top_level` only those run at import."""
    found: set[str] = set()
    nodes: list[ast.AST] = list(tree.body) if top_level else list(ast.walk(tree))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += node.orelse
        elif top_level and isinstance(node, ast.If | ast.Try):
            nodes += [*node.body, *node.orelse]
    return found


def names(module: str, roots: str | tuple[str, ...]) -> bool:
    """Whether `module` is one of `roots` or lies below one."""
    return any(
        module == r or module.startswith(r + ".") for r in ([roots] if isinstance(roots, str) else roots)
    )


def room(*names_below: str) -> tuple[str, ...]:
    """Full names of rooms and modules of the runtime."""
    return tuple(f"spd.runtime.{name}" for name in names_below)


TENSORS_ONLY = room("models", "layers")
ABOVE_TENSORS = room("engine", "round", "proposers", "ranks", "plan", "load", "lab")
TORCH_FREE = (
    *("spd.errors", "spd.formats", *room("plan", "engine", "lab", "round.sampling_params", "round.spans")),
    *room("models.weights", "models.layouts", "models.families", "models.eagle3"),
)
WITH_TORCH = room("engine.assembly", "engine.engine", "lab.replay", "lab.tile_questions")
"""Modules of these rooms that import torch at once."""
METHODS_SHARE = room("proposers.base", "proposers.head")
LIGHT = ("torch", "triton", "numpy", "spd.kernels")
"""What the command line may not import before it is asked for something that needs it."""


def violations(tree: list[tuple[str, ast.Module, str]]) -> list[str]:
    """Every broken arrow, as `importer -> imported: rule`."""
    proposers = {m for m, _, _ in tree if names(m, "spd.runtime.proposers")} - {"spd.runtime.proposers"}
    methods = proposers - set(METHODS_SHARE)
    broken = []
    for module, parsed, _ in tree:
        every, top = imports(parsed), imports(parsed, top_level=True)
        below = tuple(methods - {module})
        rules: list[tuple[bool, set[str], tuple[str, ...], str]] = [
            (
                names(module, "spd.formats"),
                every,
                ("spd.runtime", "spd.kernels", "spd.cli", "triton"),
                "formats",
            ),
            (names(module, "spd.runtime"), every, ("spd.cli", "typer", "rich"), "runtime never imports cli"),
            (names(module, "spd.cli"), top, LIGHT, "cli stays light"),
            (names(module, "spd.cli.text"), every, ("spd.cli.serve",), "text stands below serve"),
            (names(module, TENSORS_ONLY), every, ABOVE_TENSORS, "models and layers see tensors only"),
            (names(module, room("layers")), every, room("models"), "layers stand below models"),
            (names(module, room("round")), every, room("engine", "plan", "ranks", "lab", "load"), "round"),
            (
                names(module, room("load")),
                every,
                room("engine", "round", "proposers", "ranks", "lab"),
                "load",
            ),
            (names(module, room("plan")), every, room("engine", "proposers", "ranks", "lab"), "plan"),
            (names(module, room("engine", "proposers", "ranks")), every, room("lab"), "lab is the cli's"),
            (
                module in methods,
                every,
                (*below, *room("engine", "plan", "ranks")),
                "methods know the round only",
            ),
            (
                not names(module, room("proposers")),
                every,
                tuple(methods),
                "only proposers/__init__ names a method",
            ),
            (True, every, ("transformers", "click", "pydantic"), "never imported"),
            (
                module in ("spd.runtime", "spd.runtime.models")
                or (names(module, TORCH_FREE) and module not in WITH_TORCH),
                *(top, ("torch", "triton", "numpy"), "torch-free"),
            ),
        ]
        for applies, imported, forbidden, rule in rules:
            if applies:
                broken += [
                    f"{module} -> {name}: {rule}" for name in sorted(imported) if names(name, forbidden)
                ]
        if names(module, "spd.kernels"):
            allowed = ("torch", "triton", "spd.errors", "spd.kernels", "__future__", *sys.stdlib_module_names)
            broken += [f"{module} -> {name}: kernels" for name in sorted(every) if not names(name, allowed)]
    return broken


def test_no_arrow_is_broken() -> None:
    assert violations(modules()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spd.kernels.bad", "from spd.runtime.plan.plan import EnginePlan"),
        ("spd.formats.bad", "def f():\n    import spd.kernels.attention.rotary_store"),
        ("spd.runtime.bad", "from spd.cli import app"),
        ("spd.cli.bad", "import torch"),
        ("spd.cli.text.bad", "def f():\n    from spd.cli.serve.forms import FORMS"),
        ("spd.runtime.models.bad", "from spd.runtime.engine.request import Request"),
        ("spd.runtime.models.bad", "from spd.runtime.ranks.communicator import ProcessGroup"),
        ("spd.runtime.layers.bad", "from spd.runtime.round.sampler import Sampler"),
        ("spd.runtime.layers.bad", "from spd.runtime.models.layouts import LayerLayout"),
        ("spd.runtime.round.bad", "from spd.runtime.engine.request import Request"),
        ("spd.runtime.round.bad", "from spd.runtime.plan.plan import EnginePlan"),
        ("spd.runtime.load.bad", "from spd.runtime.round.round import Round"),
        ("spd.runtime.plan.bad", "from spd.runtime.engine.engine import Engine"),
        ("spd.runtime.plan.bad", "import torch"),
        ("spd.runtime.engine.bad", "from spd.runtime.lab.prompt_set import Question"),
        ("spd.runtime.proposers.ngram", "from spd.runtime.proposers.draft_model import DraftModelProposer"),
        ("spd.runtime.proposers.draft_model", "from spd.runtime.engine.engine import Engine"),
        ("spd.runtime.bad", "from spd.runtime.proposers.ngram import NgramProposer"),
        ("spd.runtime.bad", "import transformers"),
        ("spd.runtime.engine.scheduler", "import torch"),
    ],
)
def test_planted_violations_are_seen(module: str, source: str) -> None:
    methods = [each for each in modules() if names(each[0], "spd.runtime.proposers") and each[0] != module]
    planted = [*methods, (module, ast.parse(source), source)]
    assert any(line.startswith(module + " ") for line in violations(planted))


FACADE = {
    "spd.runtime",
    "spd.runtime.engine.driver",
    "spd.runtime.engine.request",
    "spd.runtime.lab",
    "spd.runtime.plan.config",
    "spd.runtime.plan.memory",
    "spd.runtime.ranks.follower",
    "spd.runtime.ranks.rendezvous",
    "spd.runtime.round.sampling_params",
}  # All of the runtime that the command line may import; ten modules at most.


def seen_by_cli(tree: list[tuple[str, ast.Module, str]]) -> set[str]:
    """Modules of the runtime that the command line imports, wherever and for whatever."""
    known = {module for module, _, _ in tree}
    return {
        name
        for module, parsed, _ in tree
        for name in imports(parsed)
        if names(module, "spd.cli") and names(name, "spd.runtime") and name in known
    }


def test_the_command_line_sees_the_runtime_through_a_facade() -> None:
    tree = list(modules())
    assert seen_by_cli(tree) <= FACADE and len(FACADE) <= 10
    planted = "def f():\n    from spd.runtime.engine.scheduler import Scheduler"
    assert "spd.runtime.engine.scheduler" in seen_by_cli(
        [*tree, ("spd.cli.bad", ast.parse(planted), planted)]
    )


def oversized(tree: list[tuple[str, ast.Module, str]]) -> list[str]:
    """Files and functions above the limits."""
    found = []
    for module, parsed, text in tree:
        lines = text.count("\n")
        if lines > FILE_LIMIT:
            found.append(f"{module}: {lines} lines")
        for node in ast.walk(parsed):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > FUNCTION_LIMIT:
                    found.append(f"{module}.{node.name}: {size} lines")
    return found


def test_sizes() -> None:
    tree = modules()
    assert oversized(tree) == []
    rooms = {
        tuple(f"spd.{name.replace('/', '.')}" for name in rooms): most for rooms, most in CEILINGS.items()
    }
    assert len(rooms) == 13 and sum(rooms.values()) < int(re.findall(r"below (\d+) lines", SAID)[0])
    filled = dict.fromkeys(rooms, 0)
    for module, _, text in tree:
        filled[next((room for room in rooms if names(module, room)), ())] += text.count("\n")
    over = [
        f"{room}: {size} lines, {rooms[room]} allowed" for room, size in filled.items() if size > rooms[room]
    ]
    assert over == [], "ARCHITECTURE.md, Rooms: shorten something in the same room"


def test_planted_size_is_seen() -> None:
    long_file = "x = 1\n" * (FILE_LIMIT + 1)
    long_function = "def f():\n" + "    x = 1\n" * FUNCTION_LIMIT
    planted = [("a", ast.parse(long_file), long_file), ("b", ast.parse(long_function), long_function)]
    assert len(oversized(planted)) == 2


def environment_readers(tree: list[tuple[str, ast.Module, str]]) -> set[str]:
    """Modules that touch os.environ or os.getenv."""
    return {
        module
        for module, parsed, _ in tree
        for node in ast.walk(parsed)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }


def test_environment_is_read_in_two_files() -> None:
    assert environment_readers(modules()) <= READ_ENVIRONMENT
    planted = "import os\nos.environ['X']"
    assert environment_readers([("spd.bad", ast.parse(planted), planted)]) == {"spd.bad"}


def runtime_talk(tree: list[tuple[str, ast.Module, str]]) -> list[str]:
    """Calls of print, exit and uses of argv in the runtime."""
    found = []
    for module, parsed, _ in tree:
        if not names(module, ("spd.runtime", "spd.formats", "spd.kernels")):
            continue
        for node in ast.walk(parsed):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("print", "exit")
            ):
                found.append(f"{module}:{node.lineno} {node.func.id}")
            if isinstance(node, ast.Attribute) and node.attr in ("argv", "_exit"):
                found.append(f"{module}:{node.lineno} {node.attr}")
    return found


def test_runtime_never_prints_or_exits() -> None:
    assert runtime_talk(modules()) == []
    planted = "print('hello')"
    assert runtime_talk([("spd.runtime.bad", ast.parse(planted), planted)]) != []


def mutable_globals(tree: list[tuple[str, ast.Module, str]]) -> list[str]:
    """Lower-case module-level names bound to lists, dicts or sets: state without an owner."""
    found = []
    for module, parsed, _ in tree:
        for node in parsed.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [
                    f"{module}: {t.id}"
                    for t in targets
                    if isinstance(t, ast.Name) and not t.id.strip("_").isupper() and not t.id.startswith("__")
                ]
    return found


def test_no_mutable_globals() -> None:
    assert mutable_globals(modules()) == []
    assert mutable_globals([("spd.bad", ast.parse("cache = {}"), "")]) == ["spd.bad: cache"]


def test_cli_loads_nothing_heavy() -> None:
    code = (
        "import sys; import spd.cli.app; "
        "heavy = {'torch', 'triton', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'jinja2'}; "
        "heavy |= {'starlette', 'uvicorn', 'h11', 'anyio', 'asyncio'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
