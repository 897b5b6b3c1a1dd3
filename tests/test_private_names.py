"""Private names of other libraries: every one that `spd` uses is listed here, and exists."""

from __future__ import annotations

import ast
import asyncio
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTED = {"_exit", "_make", "_replace"}
"""Of `os` and of named tuples: their underscore is no sign of a private name."""


@dataclass(frozen=True)
class PrivateName:
    """A name of a library, the module of `spd` that uses it, and how it is looked up."""

    library: str
    name: str
    user: str
    look_up: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.library} {self.name}"


def imported(path: str) -> Callable[[], object]:
    """Return a look-up of `module:name.attribute`."""
    module, _, names = path.partition(":")
    return lambda: reduce(getattr, names.split("."), importlib.import_module(module))


def typer_parser() -> Any:
    """Return the parser of an empty command."""
    from typer.core import TyperCommand

    command = TyperCommand("empty")
    return command.make_parser(command.make_context("empty", []))


def uvicorn_server() -> Any:
    """Return a server that does not run."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app=lambda scope: None, http="h11"))


def uvicorn_connection() -> Any:
    """Return a connection of a server as uvicorn makes it."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    server = uvicorn_server()
    server.config.load()
    loop = asyncio.new_event_loop()
    try:
        return H11Protocol(
            config=server.config, server_state=server.server_state, app_state={}, _loop=loop
        )
    finally:
        loop.close()


def response_complete() -> None:
    """Raise AttributeError if a cycle of request and response does not set `response_complete`."""
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    if "response_complete" not in RequestResponseCycle.__init__.__code__.co_names:
        raise AttributeError("response_complete")


def gloo_group() -> object:
    """Return the method of a process group that gathers one tensor from all ranks."""
    from spd.runtime.ranks.c10d import c10d

    return c10d.ProcessGroup._allgather_base


HUB = "spd/formats/hub_download.py"
SERVE = "spd/server/run.py"
LINEAR = "spd/runtime/layers/torch_linear.py"
RANKS = "spd/runtime/ranks/communicator.py"
SEEDED = "spd/kernels/seeded.py"
RECORDING = "spd/kernels/native/recording.py"
GLOO = "torch._C._distributed_c10d:ProcessGroupGloo"
PRIVATE_NAMES = (
    PrivateName(
        "huggingface_hub",
        "default_client_factory",
        HUB,
        imported("huggingface_hub.utils._http:default_client_factory"),
    ),
    PrivateName(
        "huggingface_hub",
        "compute_file_hash",
        HUB,
        imported("huggingface_hub.utils._verification:compute_file_hash"),
    ),
    PrivateName("typer", "_long_opt", "spd/cli/typer_app.py", lambda: typer_parser()._long_opt),
    PrivateName("uvicorn", "on_tick", SERVE, imported("uvicorn:Server.on_tick")),
    PrivateName("uvicorn", "handle_exit", SERVE, imported("uvicorn:Server.handle_exit")),
    PrivateName(
        "uvicorn", "server_state", SERVE, lambda: uvicorn_server().server_state.connections
    ),
    PrivateName("uvicorn", "cycle", SERVE, lambda: uvicorn_connection().cycle),
    PrivateName("uvicorn", "response_complete", SERVE, response_complete),
    PrivateName(
        "torch",
        "_distributed_c10d",
        "spd/runtime/ranks/c10d.py",
        imported("torch._C._distributed_c10d:FileStore"),
    ),
    PrivateName("torch", "_Options", RANKS, imported(f"{GLOO}._Options")),
    PrivateName("torch", "_devices", RANKS, imported(f"{GLOO}._Options._devices")),
    PrivateName("torch", "_timeout", RANKS, imported(f"{GLOO}._Options._timeout")),
    PrivateName("torch", "_allgather_base", RANKS, gloo_group),
    PrivateName(
        "torch",
        "_python_dispatch",
        RECORDING,
        imported("torch.utils._python_dispatch:TorchDispatchMode"),
    ),
    PrivateName("torch", "_pytree", RECORDING, imported("torch.utils._pytree:tree_leaves")),
    PrivateName("torch", "_prims", SEEDED, imported("torch._prims.rng_prims:register_rng_prims")),
    PrivateName(
        "torch",
        "torch._meta_registrations",
        "spd/__main__.py",
        imported("torch._meta_registrations:activate_meta"),
    ),
    PrivateName("torch", "_schema", RECORDING, lambda: torch.ops.aten.add.out._schema.is_mutable),
    PrivateName("torch", "_has_mkldnn", LINEAR, imported("torch._C:_has_mkldnn")),
    PrivateName(
        "torch",
        "_is_mkldnn_bf16_supported",
        LINEAR,
        lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    ),
    PrivateName(
        "torch", "_reorder_linear_weight", LINEAR, lambda: torch.ops.mkldnn._reorder_linear_weight
    ),
    PrivateName(
        "torch",
        "_linear_pointwise",
        LINEAR,
        lambda: (
            torch.ops.mkldnn._linear_pointwise.default,
            torch.ops.mkldnn._linear_pointwise.binary,
        ),
    ),
)


@pytest.mark.parametrize("private", PRIVATE_NAMES, ids=str)
def test_a_private_name_exists(private: PrivateName) -> None:
    try:
        private.look_up()
    except (AttributeError, ImportError, TypeError) as error:
        release = version(private.library)
        pytest.fail(
            f"{private.library} {release} has no {private.name} for {private.user}: {error}"
        )


def is_private(name: str) -> bool:
    """True if a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables, attributes and modules that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module takes from others: attributes and parts of imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from alias.name.split(".")


def test_no_other_private_name_is_used() -> None:
    """Names without an underscore in front are found by reading only: uvicorn's, a deferred module."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "spd").rglob("*.py")}
    ours = {name for tree in trees.values() for name in assigned_names(tree)}
    ours |= {path.stem for path in trees}
    users_by_name: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in filter(is_private, private_uses(tree)):
            if name not in ours and name not in DOCUMENTED:
                users_by_name.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    listed_names = {private.name for private in PRIVATE_NAMES}
    parts = {"_C", "_http", "_verification"}  # modules on the way to a listed name
    unlisted = {
        name: users for name, users in users_by_name.items() if name not in listed_names | parts
    }
    assert unlisted == {}, "add them to PRIVATE_NAMES, or do without"
    unused = {name for name in listed_names if is_private(name)} - set(users_by_name)
    assert unused == set(), "remove them from PRIVATE_NAMES"
    for private in PRIVATE_NAMES:
        assert private.name in (ROOT / private.user).read_text("utf-8"), private
