"""Each set of kernels keeps the contracts of `Kernels`: the type checker compares types, this the
names."""

import importlib
import inspect
from typing import Any

import pytest

from spd.kernels.interface import OPERATION_NAMES, Kernels
from spd.kernels.native.library import NativeKernels
from spd.kernels.torch_form import TorchKernels

SETS = [
    "spd.kernels.torch_form.TorchKernels",
    "spd.kernels.native.library.NativeKernels",
    "spd.kernels.triton_form.TritonKernels",
]


def parameters(owner: type, operation: str) -> list[inspect.Parameter]:
    """Return an operation's parameters without `self` and without annotations."""
    function = inspect.getattr_static(owner, operation)
    function = function.__func__ if isinstance(function, staticmethod) else function
    listed = inspect.signature(function).parameters.values()
    return [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in listed
        if parameter.name != "self"
    ]


@pytest.mark.parametrize("path", SETS)
def test_parameters_are_the_contracts(path: str) -> None:
    """Names, order, kinds and defaults are those of the contract; further parameters have
    defaults."""
    if "triton" in path:
        pytest.importorskip("triton")
    module, _, name = path.rpartition(".")
    kernels = getattr(importlib.import_module(module), name)
    assert len(OPERATION_NAMES) == 34
    for operation in OPERATION_NAMES:
        contract = parameters(Kernels, operation)
        form = parameters(kernels, operation)
        named = {parameter.name: parameter for parameter in form}
        assert [
            parameter.name for parameter in form if parameter.name in {c.name for c in contract}
        ] == [parameter.name for parameter in contract], operation
        for parameter in contract:
            assert named[parameter.name].kind == parameter.kind, (operation, parameter.name)
            if parameter.default is not inspect.Parameter.empty:
                assert named[parameter.name].default == parameter.default, (
                    operation,
                    parameter.name,
                )
        extra = [
            parameter for parameter in form if parameter.name not in {c.name for c in contract}
        ]
        assert all(parameter.default is not inspect.Parameter.empty for parameter in extra), (
            operation
        )


def test_the_c_kernels_fall_back_to_torch() -> None:
    """A kernel that the C library lacks is torch's own function."""
    # Any: of two functions that take other first arguments, mypy knows that they differ.
    plain: Any = TorchKernels
    assert NativeKernels.verify_drafts is plain.verify_drafts
    assert NativeKernels.sample_rows is not plain.sample_rows
