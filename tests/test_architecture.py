"""Enforce the never arrows, the measures of density and who may read the environment."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import code_measures

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROOM_ROW = r"^\| (`.+`|all others) \| ([\d,]+) \|"
ROOM_STATEMENTS = {
    tuple(re.findall(r"`([\w/]+?)/?`", rooms)): int(count.replace(",", ""))
    for rooms, count in re.findall(ROOM_ROW, ARCHITECTURE, re.MULTILINE)
}
"""The statements that each room may hold; an empty name stands for all other modules."""
LIMITS = {
    "long_functions": 7,
    "long_files": 3,
    "wide_functions": 4,
    "import_circles": 0,
    "untyped": 13.2,
    "tuple_assignments": 0.3,
    "starred_calls": 5.0,
    "long_lines": 36.4,
    "vague_bindings": 5.3,
    "packed_literals": 0,
    "noun_docstrings": 219,
    "undocumented": 54,
}
"""The most of each measure in `spd`: they only fall.

A float is a figure per 1,000 lines that are not blank; for `vague_bindings` it is a share of all bindings in
per cent. An integer counts places.
"""
Tree = list[tuple[str, ast.Module, str]]  # Name, tree and text of modules.
PLANTED = {  # What is imported within a function, or where that is torch, at once.
    "spd.kernels.bad": ["spd.runtime.plan.plan"],
    "spd.formats.bad": ["spd.kernels.attention.rotary_store"],
    "spd.cli.bad": ["torch"],
    "spd.cli.terminal.bad": ["spd.cli.commands.chat"],
    "spd.conversation.bad": ["spd.cli.options", "spd.server.app", "torch"],
    "spd.server.bad": ["spd.cli.options", "torch"],
    "spd.runtime.bad": [
        "spd.cli",
        "spd.conversation.prompt",
        "spd.server",
        "spd.runtime.proposers.ngram",
        "transformers",
    ],
    "spd.runtime.models.bad": ["spd.runtime.engine.request", "spd.runtime.ranks.communicator"],
    "spd.runtime.layers.bad": ["spd.runtime.round.sampler", "spd.runtime.models.layouts"],
    "spd.runtime.round.bad": [
        "spd.runtime.engine.request",
        "spd.runtime.plan.plan",
        "spd.runtime.proposers.base",
    ],
    "spd.runtime.load.bad": ["spd.runtime.round.round"],
    "spd.runtime.plan.bad": ["spd.runtime.engine.engine", "torch"],
    "spd.runtime.engine.bad": ["spd.runtime.lab.prompt_set"],
    "spd.runtime.proposers.ngram": ["spd.runtime.proposers.draft_model"],
    "spd.runtime.proposers.draft_model": ["spd.runtime.engine.engine"],
    "spd.runtime.engine.scheduler": ["torch"],
}
MUTABLE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp


@functools.cache
def modules() -> Tree:
    found = []
    for path in sorted((ROOT / "spd").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found.append((name.removesuffix(".__init__"), ast.parse(text), text))
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


def names(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def room(*names_below: str) -> tuple[str, ...]:
    return tuple(f"spd.runtime.{name}" for name in names_below)


HEAVY = ("torch", "triton", "numpy")
ABOVE = ("spd.cli", "spd.server", "spd.conversation")
NEVER = [  # What is below the first never imports the second.
    (("spd.formats",), ("spd.runtime", "spd.kernels", *ABOVE, "triton")),
    (("spd.runtime",), (*ABOVE, "typer", "rich")),
    (("spd.conversation",), ("spd.cli", "spd.server")),
    (("spd.server",), ("spd.cli",)),
    (("spd.cli.terminal",), ("spd.cli.commands", "spd.cli.chat")),
    (
        room("models", "layers"),
        room("engine", "round", "proposers", "ranks", "plan", "load", "lab"),
    ),
    (room("layers"), room("models")),
    (room("round"), room("engine", "proposers", "plan", "ranks", "lab", "load")),
    (room("load"), room("engine", "round", "proposers", "ranks", "lab")),
    (room("plan"), room("engine", "proposers", "ranks", "lab")),
    (room("engine", "proposers", "ranks"), room("lab")),
    (("spd",), ("transformers", "click", "pydantic")),
]
TORCH_FREE = (
    "spd.errors",
    "spd.formats",
    *room("plan", "engine", "lab", "round.sampling_params", "round.spans"),
    *room("models.weights", "models.layouts", "models.families", "models.eagle3"),
)
WITH_TORCH = room(
    "engine.assembly", "engine.device", "engine.engine", "lab.replay", "lab.tile_checks"
)
KERNELS_IMPORT = (
    "torch",
    "triton",
    "spd.errors",
    "spd.kernels",
    "__future__",
    *sys.stdlib_module_names,
)


def violations(tree: Tree) -> list[str]:
    """Every broken arrow, as `importer -> imported`."""
    proposers = {m for m, _, _ in tree if names(m, room("proposers"))} - {*room("proposers")}
    methods = proposers - {*room("proposers.base", "proposers.head")}
    broken = []
    for module, parsed, _ in tree:
        every = imports(parsed)
        top = imports(parsed, top_level=True)
        nevers = tuple(name for below, never in NEVER if names(module, below) for name in never)
        wrong = {name for name in every if names(name, nevers)}
        if module in methods:  # they know the round only
            others = (*(methods - {module}), *room("engine", "plan", "ranks"))
            wrong |= {name for name in every if names(name, others)}
        if not names(module, room("proposers")):
            wrong |= {name for name in every if names(name, tuple(methods))}
        if names(module, ABOVE):
            wrong |= {name for name in top if names(name, (*HEAVY, "spd.kernels"))}
        free = names(module, TORCH_FREE) and module not in WITH_TORCH
        if free or module in ("spd.runtime", *room("models")):
            wrong |= {name for name in top if names(name, HEAVY)}
        if names(module, ("spd.kernels",)):
            wrong |= {name for name in every if not names(name, KERNELS_IMPORT)}
        broken += [f"{module} -> {name}" for name in sorted(wrong)]
    return broken


def test_no_arrow_is_broken_and_planted_ones_are_seen() -> None:
    assert violations(modules()) == []
    for module, names_of_bad in PLANTED.items():
        rest = [
            each for each in modules() if names(each[0], room("proposers")) and each[0] != module
        ]
        for bad in names_of_bad:
            source = ast.parse(f"import {bad}" if bad == "torch" else f"def f():\n    import {bad}")
            assert violations([*rest, (module, source, "")]) == [f"{module} -> {bad}"]


FACADE = {
    *room(
        "engine.clock",
        "engine.driver",
        "engine.request",
        "lab",
        "plan.config",
        "plan.memory",
        "ranks.follower",
    ),
    "spd.runtime",
    *room("ranks.rendezvous", "round.sampling_params"),
}  # All of the runtime that the rooms above it may import; ten modules at most.


def test_the_rooms_above_see_the_runtime_through_a_facade() -> None:
    known = {module for module, _, _ in modules()}
    imported = {n for module, tree, _ in modules() if names(module, ABOVE) for n in imports(tree)}
    seen = {name for name in imported & known if names(name, ("spd.runtime",))}
    assert len(seen) > 5 and seen <= FACADE and len(FACADE) <= 10


def measured_modules() -> list[code_measures.Module]:
    """Return all modules of `spd` as `code_measures` reads them."""
    return [
        code_measures.Module(name, tree, text, (ROOT / name.replace(".", "/")).is_dir())
        for name, tree, text in modules()
    ]


def figure(measure: str, tree: list[code_measures.Module]) -> float:
    """Return the figure of one measure in the unit of `LIMITS`."""
    if measure == "wide_functions":
        tree = [module for module in tree if not names(module.name, ("spd.kernels",))]
    count = len(getattr(code_measures, measure)(tree))
    if isinstance(LIMITS[measure], int):
        return count
    if measure == "vague_bindings":
        return 100 * count / len(code_measures.bindings(tree))
    return 1000 * count / code_measures.filled_lines(tree)


@pytest.mark.parametrize("measure", LIMITS)
def test_density(measure: str) -> None:
    """No measure of density rises; where one has fallen, its limit follows."""
    places = getattr(code_measures, measure)(measured_modules())
    assert figure(measure, measured_modules()) <= LIMITS[measure], places


def test_room_sizes() -> None:
    """No room holds more statements than ARCHITECTURE.md allows it."""
    rooms = {
        tuple(f"spd.{name.replace('/', '.')}" for name in room): allowed
        for room, allowed in ROOM_STATEMENTS.items()
    }
    assert len(rooms) == 14
    statements = dict.fromkeys(rooms, 0)
    for module, tree, _ in modules():
        home = next((room for room in rooms if names(module, room)), ())
        statements[home] += code_measures.statements(tree)
    full = [f"{room}: {count}" for room, count in statements.items() if count > rooms[room]]
    assert full == [], "more statements than ARCHITECTURE.md allows"


PLANTED_DENSITY = {
    "long_functions": "def f():\n" + "    pass\n" * 60,
    "long_files": "pass\n" * 501,
    "wide_functions": "def f(a, b, c, d, e, f, g): ...",
    "untyped": "x: Any",
    "tuple_assignments": "a, b = c, d",
    "starred_calls": "f(*g)",
    "long_lines": "x = 1  # " + "x" * 100,
    "vague_bindings": "given = 1",
    "packed_literals": "x = [*(1, 2), 3]",
    "noun_docstrings": 'def f():\n    """What it is."""',
    "undocumented": "def f():\n    a = 1\n    b = 2\n    return a",
}


@pytest.mark.parametrize(("measure", "source"), PLANTED_DENSITY.items())
def test_density_is_seen(measure: str, source: str) -> None:
    """Each measure counts one planted place, and none in code that is free of it."""
    count = getattr(code_measures, measure)
    planted = code_measures.Module("spd.bad", ast.parse(source), source)
    plain = code_measures.Module("spd.good", ast.parse("number = 1"), "number = 1")
    assert len(count([planted])) == 1
    assert count([plain]) == []


def test_circles_are_seen() -> None:
    """A circle is found through an import within a function, through a package and by a relative name."""
    sources = {
        "spd.a": "import spd.b",
        "spd.b": "def f():\n    from spd import c",
        "spd.c": "from .a import x",
    }
    circle = [code_measures.Module(name, ast.parse(text), text) for name, text in sources.items()]
    assert code_measures.import_circles(circle) == [["spd.a", "spd.b", "spd.c"]]
    assert code_measures.import_circles(circle[:2]) == []


def test_statements_are_counted() -> None:
    """Docstrings are no statements, and a tuple assignment is as many as it has values."""
    source = 'def f():\n    """Say."""\n    a, b = 1, 2\n    return a'
    assert code_measures.statements(ast.parse(source)) == 4


def environment_readers(tree: Tree) -> set[str]:
    found = {
        (module, getattr(node, "attr", ""))
        for module, parsed, _ in tree
        for node in ast.walk(parsed)
    }
    return {module for module, name in found if name in ("environ", "getenv", "environb")}


def test_environment_is_read_in_two_files() -> None:
    assert environment_readers(modules()) <= {"spd.cli.app", "spd.formats.hub"}
    planted = ast.parse("import os\nos.environ['X']")
    assert environment_readers([("spd.bad", planted, "")]) == {"spd.bad"}


def runtime_talk(tree: Tree) -> list[str]:
    """Calls of print, exit and uses of argv in the runtime."""
    found = []
    for module, parsed, _ in tree:
        for node in (
            ast.walk(parsed) if names(module, ("spd.runtime", "spd.formats", "spd.kernels")) else ()
        ):
            if not isinstance(node, ast.Call | ast.Attribute):
                continue
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            used = node.attr if isinstance(node, ast.Attribute) else ""
            if called in ("print", "exit") or used in ("argv", "_exit"):
                found.append(f"{module}:{node.lineno}")
    return found


def test_runtime_never_prints_or_exits() -> None:
    assert runtime_talk(modules()) == []
    assert runtime_talk([("spd.runtime.bad", ast.parse("print('hello')"), "")]) != []


def mutable_globals(tree: Tree) -> list[str]:
    """Lower-case module-level names bound to lists, dicts or sets: state without an owner."""
    found = []
    for module, parsed, _ in tree:
        for node in parsed.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                called = [target.id for target in targets if isinstance(target, ast.Name)]
                found += [
                    f"{module}: {n}"
                    for n in called
                    if not (n.strip("_").isupper() or n[:2] == "__")
                ]
    return found


def test_no_mutable_globals() -> None:
    assert mutable_globals(modules()) == []
    assert mutable_globals([("spd.bad", ast.parse("cache = {}"), "")]) == ["spd.bad: cache"]


def test_cli_loads_nothing_heavy() -> None:
    code = (
        "import sys; import spd.cli.app; "
        "heavy = {'torch', 'triton', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'jinja2'}; "
        "heavy |= {'starlette', 'uvicorn', 'h11', 'anyio', 'asyncio', 'llguidance'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
