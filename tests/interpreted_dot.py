"""Products of Triton's interpreter, as position-blind as a GPU's, and three times as fast."""

import dataclasses
from typing import Any

import numpy as np


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Add the product of a [M, K] and b [K, N] to d [M, N], each element in the same order."""
    from triton.runtime.interpreter import TensorHandle

    kind = d.data.dtype
    product = np.einsum("...ik,...kj->...ij", a.data.astype(kind), b.data.astype(kind))
    return TensorHandle(product + d.data, d.dtype.scalar)


class Lasting:
    """A stand-in for the interpreter's replacement of `triton.language`; it stays installed."""

    def restore(self) -> None:
        return


def install() -> None:
    """Replace the interpreter's product: OpenBLAS sums a row by where it stands in its tile."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *remaining: Any) -> Any:
        narrow = any(t.dtype.is_floating() and t.dtype.primitive_bitwidth == 8 for t in (a, b))
        operation = original if narrow else dot
        return operation(self, a, b, *remaining)

    interpreter.InterpreterBuilder.create_dot = create_dot
    _hurry(interpreter)
    _hurry_operations(interpreter)


def _hurry(interpreter: Any) -> None:
    """Do once what the interpreter does in every launch, and skip its overflow checks."""
    core = interpreter.tl.core
    replace = interpreter._patch_lang
    numpy_type = interpreter._get_np_dtype
    make_block = core.block_type.__init__
    make_tensor = core.tensor.__init__
    replaced = set[int]()
    types = dict[str, Any]()
    blocks = dict[Any, dict[str, Any]]()

    def replace_once(fn: Any) -> Lasting:
        """Replace by the module of a function: each knows the language by names of its own."""
        if id(fn.__globals__) not in replaced:
            replaced.add(id(fn.__globals__))
            replace(fn)
        return Lasting()

    def known_type(kind: Any) -> Any:
        if kind.name not in types:
            types[kind.name] = numpy_type(kind)
        return types[kind.name]

    def known_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            make_block(self, element, shape)
            blocks[key] = self.__dict__

    def tensor_of_known(self: Any, handle: Any, type: Any) -> None:
        cached = type.__dict__.get("of_tensors")
        if cached is None:
            make_tensor(self, handle, type)
            type.of_tensors = {
                "shape": self.shape,
                "numel": self.numel,
                "type": type,
                "dtype": self.dtype,
            }
        else:
            self.__dict__.update(cached, handle=handle, type=type)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = known_type
    core.block_type.__init__ = known_block
    core.tensor.__init__ = tensor_of_known
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _hurry_operations(interpreter: Any) -> None:
    """Skip checks of operands that need none, and make each constant of a shape once."""
    core = interpreter.tl.core
    meaning = interpreter.interpreter_semantic
    check = type(meaning).binary_op_type_checking_impl
    constants = dict[Any, Any]()

    def constant_like(tensor: Any, value: Any) -> Any:
        """Return a number as a tensor like another one; None where their types would be promoted."""
        number = tensor.dtype
        same = number.is_fp32() or (number.is_int_signed() and not number.is_bool())
        if (
            not same
            or type(value) not in (int, float)
            or (number.is_int() and type(value) is float)
        ):
            return None
        key = tensor.type.name, type(value), value, str(value)
        if key not in constants:
            _, constants[key] = check(meaning, tensor, value)
            constants[
                key
            ].handle.data.flags.writeable = False  # An operation that wrote would fail.
        return constants[key]

    def check_operands(self: Any, lhs: Any, rhs: Any, *args: Any, **flags: Any) -> tuple[Any, Any]:
        """Return the operands of an operation in one type and shape."""
        if type(lhs) is core.tensor:
            if type(rhs) is core.tensor:
                number = lhs.dtype
                if lhs.type.name == rhs.type.name and (number.is_fp32() or number.is_int()):
                    return lhs, rhs
            elif (constant := constant_like(lhs, rhs)) is not None:
                return lhs, constant
        elif type(rhs) is core.tensor and (constant := constant_like(rhs, lhs)) is not None:
            return constant, rhs
        return check(self, lhs, rhs, *args, **flags)

    def bind(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Replace a function of the language by itself for the interpreter, without its checks."""
        checks = getattr(member, "__code__", None) is core.builtin(bind).__code__
        function = member.__wrapped__ if checks else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = meaning
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    type(meaning).binary_op_type_checking_impl = check_operands
    interpreter._patch_attr = bind
    interpreter.TensorHandle.__post_init__ = lambda handle: None
