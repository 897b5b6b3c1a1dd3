"""Measure how dense the code is: statements, sizes, import circles, and what hides the meaning of a line.

Each measure is a list of places, `module:line name`, so that a failing test says where to look. The number of
physical lines is no measure: it would reward squeezing several statements into one.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard, TypeVar, cast

FUNCTION_LINES = 60
FILE_LINES = 500
PARAMETERS = 6
LINE_WIDTH = 100
VAGUE_NAMES = frozenset(
    [
        "given",
        "found",
        "made",
        "own",
        "each",
        "one",
        "kept",
        "shown",
        "said",
        "told",
        "asked",
        "whole",
        "rest",
        "every",
        "others",
        "held",
        "known",
        "most",
        "many",
        "wanted",
        "why",
        "what",
        "fine",
        "more",
        "much",
        "few",
        "such",
        "used",
        "taken",
        "usual",
        "beside",
        "wish",
        "wishes",
        "lost",
        "still",
        "turned",
        "res",
        "tmp",
        "stuff",
        "thing",
        "things",
    ]
)
"""Names that do not say what is bound to them."""
NOUN_OPENINGS = re.compile(r"(What|Whether|How|Of|Which|For which|After which)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Module:
    """A parsed module; `name` is dotted, `is_package` is true of an `__init__`."""

    name: str
    tree: ast.Module
    text: str
    is_package: bool = False

    @functools.cached_property
    def nodes(self) -> dict[type[ast.AST], list[ast.AST]]:
        """Return the nodes of the tree by class: each measure reads a few classes of them."""
        by_class = defaultdict[type[ast.AST], list[ast.AST]](list)
        for node in ast.walk(self.tree):
            by_class[type(node)].append(node)
        return by_class

    def of_class(self, kind: type[Node]) -> list[Node]:
        """Return the nodes of one class."""
        return cast(list[Node], self.nodes[kind])

    def functions(self) -> list[Function]:
        """Return the functions and methods, nested ones included."""
        return [*self.of_class(ast.FunctionDef), *self.of_class(ast.AsyncFunctionDef)]


def statements(tree: ast.AST) -> int:
    """Count statements, docstrings left out; a tuple assignment counts one for each of its values."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or _is_docstring(node):
            continue
        count += 1
        if isinstance(node, ast.Assign) and _is_tuple(node.value) and _is_tuple(node.targets[0]):
            count += len(node.value.elts) - 1
    return count


def filled_lines(modules: list[Module]) -> int:
    """Count the lines that are not blank: the measure of the figures per 1,000 lines."""
    return sum(bool(line.strip()) for module in modules for line in module.text.split("\n"))


def tuple_assignments(modules: list[Module]) -> list[str]:
    """List assignments of several values to several names: `a, b = x, y`."""
    return [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in module.of_class(ast.Assign)
        if isinstance(node.value, ast.Tuple | ast.List)
        and any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)
    ]


def starred_calls(modules: list[Module]) -> list[str]:
    """List calls that spread a sequence into arguments: `f(*args)`."""
    return [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in module.of_class(ast.Call)
        if any(isinstance(argument, ast.Starred) for argument in node.args)
    ]


def packed_literals(modules: list[Module]) -> list[str]:
    """List literals spread into literals, as `[*(1, 2), 3]` and `{**{"a": 1}}`, which only save lines."""
    places = []
    for module in modules:
        for literal in module.of_class(ast.Dict):
            pairs = zip(literal.keys, literal.values, strict=True)
            if any(key is None and isinstance(value, ast.Dict) for key, value in pairs):
                places.append(f"{module.name}:{literal.lineno}")
        sequences: list[ast.Tuple | ast.List | ast.Set] = [
            *module.of_class(ast.Tuple),
            *module.of_class(ast.List),
            *module.of_class(ast.Set),
        ]
        for sequence in sequences:
            spread = (
                element.value for element in sequence.elts if isinstance(element, ast.Starred)
            )
            if any(isinstance(value, ast.Tuple | ast.List) for value in spread):
                places.append(f"{module.name}:{sequence.lineno}")
    return places


def untyped(modules: list[Module]) -> list[str]:
    """List the places that the type checker cannot follow: `Any`, `cast` and ignored errors."""
    pattern = re.compile(r"\bAny\b|\bcast\(|# type: ignore")
    return [
        f"{module.name}:{number}"
        for module in modules
        for number, line in enumerate(module.text.split("\n"), 1)
        for _ in pattern.findall(line)
    ]


def long_lines(modules: list[Module]) -> list[str]:
    """List lines of more than `LINE_WIDTH` characters."""
    return [
        f"{module.name}:{number}"
        for module in modules
        for number, line in enumerate(module.text.split("\n"), 1)
        if len(line) > LINE_WIDTH
    ]


def bindings(modules: list[Module]) -> list[tuple[str, str]]:
    """List (place, name) of every variable, parameter, attribute and function that is bound."""
    places = []
    for module in modules:
        names: list[tuple[int, str]] = []
        for variable in module.of_class(ast.Name):
            if isinstance(variable.ctx, ast.Store):
                names.append((variable.lineno, variable.id))
        for attribute in module.of_class(ast.Attribute):
            if isinstance(attribute.ctx, ast.Store):
                names.append((attribute.lineno, attribute.attr))
        names += [(parameter.lineno, parameter.arg) for parameter in module.of_class(ast.arg)]
        names += [(function.lineno, function.name) for function in module.functions()]
        places += [(f"{module.name}:{line}", name) for line, name in names]
    return places


def vague_bindings(modules: list[Module]) -> list[str]:
    """List bindings whose name is one of `VAGUE_NAMES`."""
    return [f"{place} {name}" for place, name in bindings(modules) if name in VAGUE_NAMES]


def noun_docstrings(modules: list[Module]) -> list[str]:
    """List functions whose docstring begins with What, Whether, How, Of or Which instead of a verb."""
    return [
        place
        for place, function in _functions(modules)
        if NOUN_OPENINGS.match(ast.get_docstring(function) or "")
    ]


def undocumented(modules: list[Module]) -> list[str]:
    """List public functions of more than two statements without a docstring."""
    return [
        place
        for place, function in _functions(modules)
        if not function.name.startswith("_")
        and not ast.get_docstring(function)
        and len(function.body) > 2
    ]


def long_functions(modules: list[Module]) -> list[str]:
    """List functions of more than `FUNCTION_LINES` lines."""
    return [
        place
        for place, function in _functions(modules)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES
    ]


def long_files(modules: list[Module]) -> list[str]:
    """List files of more than `FILE_LINES` lines."""
    return [module.name for module in modules if module.text.count("\n") > FILE_LINES]


def wide_functions(modules: list[Module]) -> list[str]:
    """List functions of more than `PARAMETERS` parameters, `self` not counted."""
    places = []
    for place, function in _functions(modules):
        named = [*function.args.posonlyargs, *function.args.args]
        is_method = bool(named) and named[0].arg in ("self", "cls")
        if len(named) - is_method + len(function.args.kwonlyargs) > PARAMETERS:
            places.append(place)
    return places


def import_circles(modules: list[Module]) -> list[list[str]]:
    """List the groups of modules that import each other, imports for types and inside functions included.

    A group is a strongly connected component of the graph of imports (Tarjan, 1972).
    """
    graph = _import_graph(modules)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = len(order)
        lowest[module] = order[module]
        path.append(module)
        for imported in graph[module]:
            if imported not in order:
                visit(imported)
            if imported in path:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            start = path.index(module)
            if len(path) - start > 1:
                circles.append(sorted(path[start:]))
            del path[start:]

    for module in graph:
        if module not in order:
            visit(module)
    return circles


def _import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Return for each module those of `modules` that it imports anywhere."""
    module_names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        imported: set[str] = set()
        for plain in module.of_class(ast.Import):
            imported |= {alias.name for alias in plain.names}
        for node in module.of_class(ast.ImportFrom):
            package = _package_of(module, node)
            full_names = {alias.name: f"{package}.{alias.name}" for alias in node.names}
            imported |= {name if name in module_names else package for name in full_names.values()}
        graph[module.name] = (imported & module_names) - {module.name}
    return graph


def _package_of(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that `node` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    ascend = node.level - 1 if module.is_package else node.level
    base = parts[: len(parts) - ascend]
    return ".".join([*base, node.module] if node.module else base)


def _is_tuple(node: ast.expr) -> TypeGuard[ast.Tuple]:
    return isinstance(node, ast.Tuple)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _functions(modules: list[Module]) -> Iterator[tuple[str, Function]]:
    for module in modules:
        for function in module.functions():
            yield f"{module.name}:{function.lineno} {function.name}", function
