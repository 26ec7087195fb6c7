"""Linear attention of queries, keys and values that lie side by side, behind elu + 1, on a GPU: the feature
map of queries and keys in one pass, and all gradients written into one tensor, those of values by the kernel
that computes them."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import gated_linear_attention as linear
from kernels.triton.feature_maps import _elu_plus_one
from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "packed_linear_attention"


@triton.jit
@typing.no_type_check
def _packed_elu_plus_one_fwd_kernel(
    qkv_ptr, q_ptr, k_ptr, stride_qkv_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of queries and the same of keys."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    at = offs_r[:, None] * width + offs_c[None, :]
    qkv_ptrs = qkv_ptr + offs_r[:, None] * stride_qkv_row + offs_c[None, :]
    b_q = tl.load(qkv_ptrs, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(qkv_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(q_ptr + at, _elu_plus_one(b_q), mask=mask)
    tl.store(k_ptr + at, _elu_plus_one(b_k), mask=mask)


@triton.jit
@typing.no_type_check
def _packed_elu_plus_one_bwd_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, dqkv_ptr, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of the first two thirds of the gradient."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    at = offs_r[:, None] * width + offs_c[None, :]
    b_q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_dq = tl.load(dq_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b_dk = tl.load(dk_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dqkv_ptrs = dqkv_ptr + offs_r[:, None] * (3 * width) + offs_c[None, :]
    tl.store(dqkv_ptrs, b_dq * tl.minimum(b_q, 1.0), mask=mask)
    tl.store(dqkv_ptrs + width, b_dk * tl.minimum(b_k, 1.0), mask=mask)


def packed_linear_attention(
    qkv: Tensor, n_heads: int, *, normalise: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Linear attention of the thirds of [batch seq 3*head*d_head], queries and keys behind elu + 1.

    Returns:
        (o [batch seq head d_head], last s, last z or None), all differentiable.
    """
    check_dtype(OPERATOR, qkv)
    check_width(OPERATOR, "d_head", qkv.shape[-1] // (3 * n_heads))
    o, s, z, *_ = operators.packed_linear_attention(qkv, n_heads, normalise, eps)
    return o, s, z if normalise else None


def _heads(qkv: Tensor, features: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys behind their feature map, and values, [batch seq head d_head]: views."""
    q, k = features.unflatten(-1, (heads, -1)).unbind()
    return q, k, qkv[..., 2 * features.shape[-1] :].unflatten(-1, (heads, -1))


def _tiles(n_row: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_c = min(power_of_two(width), 256)
    block_r = max(1, 1024 // block_c)
    grid = -(-n_row // block_r), -(-width // block_c)
    return grid, {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": 4}


def _forward(qkv: Tensor, heads: int, normalise: bool, eps: float) -> tuple[Tensor, ...]:
    """What `linear._forward` gives, and the features of queries and keys [2 batch seq head*d_head]."""
    qkv = rows(qkv)
    batch, seq, channels = qkv.shape
    features = torch.empty(2, batch, seq, channels // 3, dtype=qkv.dtype, device=qkv.device)
    q, k, v = _heads(qkv, features, heads)
    flat = qkv.flatten(0, 1)
    n_row, width = batch * seq, channels // 3
    grid, block = _tiles(n_row, width)
    launch(_packed_elu_plus_one_fwd_kernel, grid, flat, q, k, flat.stride(0), n_row, width, **block)
    return *linear._forward(q, k, v, None, None, None, None, None, 1.0, normalise, eps), features


def _backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, qkv: Tensor, o: Tensor, last: Tensor, last_z: Tensor,
    den: Tensor, parts: Tensor, sums: Tensor, features: Tensor, normalise: bool,
) -> Tensor:  # fmt: skip
    q, k, v = _heads(rows(qkv), features, o.shape[2])
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    n_row, width = qkv.shape[0] * qkv.shape[1], qkv.shape[2] // 3
    dv = dqkv[..., 2 * width :].unflatten(-1, v.shape[2:])
    none = (None,) * 5
    saved = o, last, last_z, den, parts, sums
    dq, dk, *_ = linear._backward(
        do, ds, dz, q, k, v, *none, *saved, 1.0, normalise, into=(None, None, dv)
    )
    grid, block = _tiles(n_row, width)
    launch(_packed_elu_plus_one_bwd_kernel, grid, dq, dk, q, k, dqkv, n_row, width, **block)
    return dqkv


def _fake(qkv: Tensor, heads: int, normalise: bool, eps: float) -> tuple[Tensor, ...]:
    batch, seq, channels = qkv.shape
    features = qkv.new_empty(2, batch, seq, channels // 3)
    q, k, v = _heads(qkv, features, heads)
    return *linear._fake(q, k, v, None, None, None, None, None, 1.0, normalise, eps), features


def _fake_backward(
    do: Tensor, ds: Tensor | None, dz: Tensor | None, qkv: Tensor, o: Tensor, last: Tensor, last_z: Tensor,
    den: Tensor, parts: Tensor, sums: Tensor, features: Tensor, normalise: bool,
) -> Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    qkv, _, ctx.normalise, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output)


def _gradient(ctx: Any, do: Tensor | None, ds: Tensor | None, dz: Tensor | None, *unused: Any) -> tuple:
    qkv, o, *saved = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dz = dz if ctx.normalise else None
    dqkv = operators.packed_linear_attention_backward(do, ds, dz, qkv, o, *saved, ctx.normalise)
    return dqkv, None, None, None


register(
    "packed_linear_attention(Tensor qkv, int heads, bool normalise, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
register(
    "packed_linear_attention_backward(Tensor do, Tensor? ds, Tensor? dz, Tensor qkv, Tensor o, Tensor last, "
    "Tensor last_z, Tensor den, Tensor parts, Tensor sums, Tensor features, bool normalise) -> Tensor",
    _backward,
    _fake_backward,
)
differentiable("packed_linear_attention", _setup, _gradient)
differentiable_once("packed_linear_attention_backward")
