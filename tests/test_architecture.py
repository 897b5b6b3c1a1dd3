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
LIMITS: dict[str, dict[str, float]] = {
    "spd": {
        "long_functions": 0,
        "long_files": 0,
        "wide_functions": 4,
        "import_circles": 0,
        "untyped": 4.6,
        "tuple_assignments": 0.1,
        "starred_calls": 1.8,
        "long_lines": 4.0,
        "vague_bindings": 0.1,
        "packed_literals": 0,
        "noun_docstrings": 0,
        "undocumented": 0,
    },
    "tests": {
        "long_functions": 4,
        "wide_functions": 2,
        "import_circles": 0,
        "tuple_assignments": 0.3,
        "starred_calls": 2.4,
        "long_lines": 5.6,
        "vague_bindings": 0.1,
        "packed_literals": 0,
        "noun_docstrings": 0,
    },
    "benchmarks": {
        "long_functions": 3,
        "wide_functions": 4,
        "import_circles": 0,
        "tuple_assignments": 0.1,
        "starred_calls": 1.0,
        "long_lines": 11.4,
        "vague_bindings": 0.1,
        "packed_literals": 0,
        "noun_docstrings": 0,
    },
}
"""The most of each measure in each tree: they only fall.

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
def modules(root: str = "spd") -> Tree:
    """Return the modules below a folder of the project."""
    parsed_modules = []
    for path in sorted((ROOT / root).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        parsed_modules.append((name.removesuffix(".__init__"), ast.parse(text), text))
    return parsed_modules


@functools.cache
def imports(tree: ast.Module, *, top_level: bool = False) -> frozenset[str]:
    """Return absolute names of imported modules; with `top_level` only those run at import."""
    imported: set[str] = set()
    nodes: list[ast.AST] = list(tree.body) if top_level else list(ast.walk(tree))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += node.orelse
        elif top_level and isinstance(node, ast.If | ast.Try):
            nodes += [*node.body, *node.orelse]
    return frozenset(imported)


def is_below(module: str, roots: tuple[str, ...]) -> bool:
    """True if a module is one of `roots` or lies in one of them."""
    return any(module == root or module.startswith(root + ".") for root in roots)


def room(*names_below: str) -> tuple[str, ...]:
    """Return the full names of rooms of the runtime."""
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
    "engine.assembly",
    "engine.device",
    "engine.engine",
    "lab.activation_costs",
    "lab.replay",
    "lab.tile_checks",
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
    """List the broken arrows, as `importer -> imported`."""
    proposers = {m for m, _, _ in tree if is_below(m, room("proposers"))} - {*room("proposers")}
    methods = proposers - {*room("proposers.base", "proposers.head")}
    broken = []
    for module, parsed, _ in tree:
        all_imports = imports(parsed)
        top_imports = imports(parsed, top_level=True)
        nevers = tuple(name for below, never in NEVER if is_below(module, below) for name in never)
        wrong = {name for name in all_imports if is_below(name, nevers)}
        if module in methods:  # they know the round only
            forbidden = (*(methods - {module}), *room("engine", "plan", "ranks"))
            wrong |= {name for name in all_imports if is_below(name, forbidden)}
        if not is_below(module, room("proposers")):
            wrong |= {name for name in all_imports if is_below(name, tuple(methods))}
        if is_below(module, ABOVE):
            wrong |= {name for name in top_imports if is_below(name, (*HEAVY, "spd.kernels"))}
        is_torch_free = is_below(module, TORCH_FREE) and module not in WITH_TORCH
        if is_torch_free or module in ("spd.runtime", *room("models")):
            wrong |= {name for name in top_imports if is_below(name, HEAVY)}
        if is_below(module, ("spd.kernels",)):
            wrong |= {name for name in all_imports if not is_below(name, KERNELS_IMPORT)}
        broken += [f"{module} -> {name}" for name in sorted(wrong)]
    return broken


def test_no_arrow_is_broken_and_planted_ones_are_seen() -> None:
    assert violations(modules()) == []
    for module, names_of_bad in PLANTED.items():
        other_modules = [
            entry
            for entry in modules()
            if is_below(entry[0], room("proposers")) and entry[0] != module
        ]
        for bad in names_of_bad:
            source = ast.parse(f"import {bad}" if bad == "torch" else f"def f():\n    import {bad}")
            assert violations([*other_modules, (module, source, "")]) == [f"{module} -> {bad}"]


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
    module_names = {module for module, _, _ in modules()}
    imported = {
        n for module, tree, _ in modules() if is_below(module, ABOVE) for n in imports(tree)
    }
    seen = {name for name in imported & module_names if is_below(name, ("spd.runtime",))}
    assert len(seen) > 5 and seen <= FACADE and len(FACADE) <= 10


@functools.cache
def measured_modules(root: str) -> list[code_measures.Module]:
    """Return all modules of a tree as `code_measures` reads them."""
    return [
        code_measures.Module(name, tree, text, (ROOT / name.replace(".", "/")).is_dir())
        for name, tree, text in modules(root)
    ]


def figure(root: str, measure: str, count: int) -> float:
    """Return the figure of a measure's places in the unit of `LIMITS`."""
    if isinstance(LIMITS[root][measure], int):
        return count
    measured = measured_modules(root)
    if measure == "vague_bindings":
        return 100 * count / len(code_measures.bindings(measured))
    return 1000 * count / code_measures.filled_lines(measured)


@pytest.mark.parametrize("root", LIMITS)
def test_density(root: str) -> None:
    """No measure of density rises; where one has fallen, its limit follows."""
    above: dict[str, list[str]] = {}
    for measure, limit in LIMITS[root].items():
        measured = measured_modules(root)
        if measure == "wide_functions":
            measured = [module for module in measured if ".kernels" not in module.name]
        places = getattr(code_measures, measure)(measured)
        if figure(root, measure, len(places)) > limit:
            above[measure] = places
    assert above == {}


def test_room_sizes() -> None:
    """No room holds more statements than ARCHITECTURE.md allows it."""
    rooms = {
        tuple(f"spd.{name.replace('/', '.')}" for name in room): allowed
        for room, allowed in ROOM_STATEMENTS.items()
    }
    assert len(rooms) == 14
    statements = dict.fromkeys(rooms, 0)
    for module, tree, _ in modules():
        home = next((room for room in rooms if is_below(module, room)), ())
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
    """Return the modules that read environment variables."""
    attributes = {
        (module, getattr(node, "attr", ""))
        for module, parsed, _ in tree
        for node in ast.walk(parsed)
    }
    return {module for module, name in attributes if name in ("environ", "getenv", "environb")}


def test_environment_is_read_in_two_files() -> None:
    assert environment_readers(modules()) <= {"spd.cli.app", "spd.formats.hub"}
    planted = ast.parse("import os\nos.environ['X']")
    assert environment_readers([("spd.bad", planted, "")]) == {"spd.bad"}


def terminal_uses(tree: Tree) -> list[str]:
    """List calls of print and exit, and uses of argv, in the runtime."""
    places = []
    for module, parsed, _ in tree:
        for node in (
            ast.walk(parsed)
            if is_below(module, ("spd.runtime", "spd.formats", "spd.kernels"))
            else ()
        ):
            if not isinstance(node, ast.Call | ast.Attribute):
                continue
            function = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            if function in ("print", "exit") or attribute in ("argv", "_exit"):
                places.append(f"{module}:{node.lineno}")
    return places


def test_runtime_never_prints_or_exits() -> None:
    assert terminal_uses(modules()) == []
    assert terminal_uses([("spd.runtime.bad", ast.parse("print('hello')"), "")]) != []


def mutable_globals(tree: Tree) -> list[str]:
    """List lower-case module-level names bound to lists, dicts or sets: state without an owner."""
    places = []
    for module, parsed, _ in tree:
        for node in parsed.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, MUTABLE):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names_bound = [target.id for target in targets if isinstance(target, ast.Name)]
                places += [
                    f"{module}: {n}"
                    for n in names_bound
                    if not (n.strip("_").isupper() or n[:2] == "__")
                ]
    return places


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
