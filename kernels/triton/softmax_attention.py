"""Causal softmax attention on a GPU: grouped heads, window, sink, logsumexp; forward and backward.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691. Differs: dq and dkv are separate kernels, so nothing is
added
atomically, and the query heads of a group are looped over inside dkv.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.triton.config_table import Config, config
from kernels.triton.launch import LOG2E, check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register
from kernels.triton.softmax_attention_backward import (
    _attention_bwd_key_kernel,
    _attention_bwd_query_kernel,
)
from kernels.triton.softmax_attention_forward import _attention_fwd_kernel
from kernels.triton.softmax_attention_tiles import grid

OPERATOR = "softmax_attention"


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None,
    sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the last n_dest of n_src positions.

    Args:
        q: [batch n_dest head d_head]; k: [batch n_src kv_head d_head]; v: [batch n_src kv_head d_v]; any
        strides.
        scale: Multiplies the logits; default 1 / sqrt(d_head).
        window: Positions that a query sees, itself included.
        sink: [head], a logit in the denominator only.

    Returns:
        (output [batch n_dest head d_v], logsumexp [batch head n_dest] float32), both differentiable.
    """
    check_dtype(OPERATOR, v)
    check_width(OPERATOR, "d_head", q.shape[-1])
    check_width(OPERATOR, "d_v", v.shape[-1])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    q, k = q.to(v.dtype), k.to(v.dtype)
    # A window that reaches past the first key changes nothing.
    window = 0 if window is None or window >= k.shape[1] else window
    return operators.softmax_attention(q, k, v, sink, max(scale, 1e-30), window)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What all kernels are compiled for."""
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D_K": q.shape[3],
        "D_V": v.shape[3],
        "BLOCK_K": power_of_two(q.shape[3]),
        "BLOCK_V": power_of_two(v.shape[3]),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def _tiles(n_dest: int, n_src: int, window: int, c: Config) -> dict[str, Any]:
    """How a kernel is cut into tiles. EVEN: none is ragged, so loads need no mask."""
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "HAS_WINDOW": window > 0,
        "EVEN": n_dest % c.block_m == 0 and n_src % c.block_n == 0,
        "num_warps": c.warps,
        "num_stages": c.stages,
        "maxnreg": c.registers,
    }


def _together(dtype: torch.dtype) -> bool:
    """The order of the products in the gradients of keys and values that needs fewest registers."""
    return dtype != torch.float32


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    q, k, v = rows(q), rows(k), rows(v)
    batch, n_dest, n_head, _ = q.shape
    n_src = k.shape[1]
    o = torch.empty(batch, n_dest, n_head, v.shape[3], dtype=v.dtype, device=v.device)
    lse = torch.empty(batch, n_head, n_dest, dtype=torch.float32, device=v.device)
    shapes = _shapes(q, k, v)
    c = config("attention_fwd", max(shapes["BLOCK_K"], shapes["BLOCK_V"]), q.dtype, q.device)
    at = grid(-(-n_dest // c.block_m), n_head, batch)
    launch(
        _attention_fwd_kernel, at, q, k, v, sink, o, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        n_head, n_dest, n_src, window, scale * LOG2E, HAS_SINK=sink is not None, SPREAD=len(at) == 3,
        **_tiles(n_dest, n_src, window, c), **shapes,
    )  # fmt: skip
    return o, lse


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    sink: Tensor | None,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    batch, n_dest, n_head, d_k = q.shape
    n_src, n_kv, d_v = k.shape[1], k.shape[2], v.shape[3]
    shapes = _shapes(q, k, v)
    width = max(shapes["BLOCK_K"], shapes["BLOCK_V"])
    dlse = None if dlse is None else dlse.contiguous()
    # Of each row: its logsumexp in base 2, its delta.
    kept = torch.empty(batch, n_head, n_dest, 2, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    sizes = (n_head, n_dest, n_src, window, scale, scale * LOG2E)
    dq = torch.empty(batch, n_dest, n_head, d_k, dtype=q.dtype, device=q.device)
    c = config("attention_bwd_query", width, q.dtype, q.device)
    at = grid(-(-n_dest // c.block_m), n_head, batch)
    launch(
        _attention_bwd_query_kernel, at, q, k, v, o, do, lse, dlse, kept, dq, *strides, *sizes,
        HAS_DLSE=dlse is not None, SPREAD=len(at) == 3, **_tiles(n_dest, n_src, window, c), **shapes,
    )  # fmt: skip
    dk = torch.empty(batch, n_src, n_kv, d_k, dtype=k.dtype, device=k.device)
    dv = torch.empty(batch, n_src, n_kv, d_v, dtype=v.dtype, device=v.device)
    c = config("attention_bwd_key", width, q.dtype, q.device)
    at = grid(-(-n_src // c.block_n), n_kv, batch)
    launch(
        _attention_bwd_key_kernel, at, q, k, v, do, kept, dk, dv, *strides, *sizes,
        TOGETHER=_together(q.dtype), SPREAD=len(at) == 3, **_tiles(n_dest, n_src, window, c), **shapes,
    )  # fmt: skip
    if sink is None:
        return dq, dk, dv, q.new_empty(0)
    share = torch.exp(sink.float()[None, :, None] - lse)
    return dq, dk, dv, -(share * kept[..., 1]).sum((0, 2)).to(sink.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, window: int) -> tuple[Tensor,
    Tensor]:
    batch, n_dest, n_head, _ = q.shape
    return v.new_empty(batch, n_dest, n_head, v.shape[3]), v.new_empty(batch, n_head, n_dest,
        dtype=torch.float32)


def _fake_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    sink: Tensor | None,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sink, ctx.scale, ctx.window = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sink)


def _gradient(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, o, lse, sink = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv, dsink = operators.softmax_attention_backward(
        do, dlse, q, k, v, o, lse, sink, ctx.scale, ctx.window
    )
    return dq, dk, dv, None if sink is None else dsink, None, None


register(
    "softmax_attention(Tensor q, Tensor k, Tensor v, Tensor? sink, float scale, int window) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
)
register(
    "softmax_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "Tensor? sink, float scale, int window) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("softmax_attention", _setup, _gradient)
differentiable_once("softmax_attention_backward")
