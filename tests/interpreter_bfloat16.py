"""bfloat16 in Triton's interpreter, which keeps such numbers as 16-bit integers: it cuts off what does not
fit where a GPU rounds to the nearest, and does its arithmetic and its products with the integers.

Importing this mends that for the process: conversions are those of torch, and operators work on the float32
numbers that the integers stand for. Products of matrices of bfloat16 are exact, their sums float32, as on a
GPU.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float
_Builder = interpreter.InterpreterBuilder
_binary, _dot, _cast = _Builder.binary_op, _Builder.create_dot, _Builder.cast_impl


def decoded(data: np.ndarray) -> np.ndarray:
    """float32 numbers of bfloat16 bits."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def encoded(data: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers, rounded to the nearest, ties to even."""
    values = torch.from_numpy(np.array(data, dtype=np.float32, order="C"))
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))


def _is_bf16(handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _convert_float(data, source, target, rounding):
    if source == tl.bfloat16 and target == tl.float32:
        return decoded(data)
    if source == tl.float32 and target == tl.bfloat16:
        return encoded(data)
    return _convert(data, source, target, rounding)


def _cast_impl(self, source, target):
    kinds = source.dtype.scalar, target.scalar
    if tl.bfloat16 not in kinds or kinds[0] == kinds[1] or tl.float32 in kinds:
        return _cast(self, source, target)
    data = decoded(source.data) if kinds[0] == tl.bfloat16 else source.data
    if kinds[1] == tl.bfloat16:
        return interpreter.TensorHandle(encoded(data), tl.bfloat16)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), target.scalar)


def _binary_op(self, left, right, op):
    if not _is_bf16(left):
        return _binary(self, left, right, op)
    found = op(decoded(left.data), decoded(right.data))
    if found.dtype == bool:
        return interpreter.TensorHandle(found, tl.int1)
    return interpreter.TensorHandle(encoded(found), tl.bfloat16)


def _create_dot(self, a, b, d, *options):
    if not _is_bf16(a):
        return _dot(self, a, b, d, *options)
    wide = [interpreter.TensorHandle(decoded(x.data), tl.float32) for x in (a, b)]
    return _dot(self, *wide, d, *options)


interpreter._convert_float = _convert_float
_Builder.cast_impl = _cast_impl
_Builder.binary_op = _binary_op
_Builder.create_dot = _create_dot
_Builder.get_bf16 = lambda self, value: interpreter.TensorHandle(encoded(np.array([value])), tl.bfloat16)
