"""RMSNorm over the last axis, of x, of gated values x SiLU(gate) or of a sum, in float32 whatever the inputs'
dtype."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_number,
    check_present,
    check_shape,
    resolve_backend,
    triton_unfit,
    without_autocast,
)

OPERATOR = "rms_norm"
LARGEST_WIDTH = 8192

Rows = Float[Tensor, "row width"]


@without_autocast
def reference(
    x: Rows,
    w: Float[Tensor, " width"],
    *,
    eps: float,
    gate: Rows | None = None,
    dtype: torch.dtype | None = None,
) -> Rows:
    """Readable form: y = w v / sqrt(mean(v^2) + eps), v = x or x SiLU(gate)."""
    _check(x, w, gate, eps)
    values = x.to(accumulation_dtype(x, w))
    if gate is not None:
        values = values * F.silu(gate.to(values.dtype))
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * w).to(dtype or x.dtype)


def rms_norm(
    x: Float[Tensor, "*batch width"],
    w: Float[Tensor, " width"],
    *,
    eps: float,
    gate: Float[Tensor, "*batch width"] | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Float[Tensor, "*batch width"]:
    """Values over their root mean square, times a gain.

    Args:
        gate: Multiplies x as SiLU(gate) before the norm (Mamba-2's gated norm).
        dtype: Of the output; default that of x.
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: shapes that disagree, a backend that is not available.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; gated: Dao and Gu 2024, arXiv:2405.21060.
    """
    _check(x, w, gate, eps)
    flat, flat_gate = _rows(x), None if gate is None else _rows(gate)
    unfit = triton_unfit("chunked", {"width": x.shape[-1]}, x, w, gate, limit=LARGEST_WIDTH)
    if resolve_backend(OPERATOR, backend, x, unfit) == "triton":
        from kernels.triton import rms_norm as fused

        y = fused.rms_norm(flat, w, eps, gate=flat_gate, dtype=dtype or x.dtype)
    else:
        y = reference(flat, w, eps=eps, gate=flat_gate, dtype=dtype)
    return y.view(x.shape)


def add_rms_norm(
    x: Float[Tensor, "*batch width"],
    delta: Float[Tensor, "*batch width"],
    w: Float[Tensor, " width"],
    *,
    eps: float,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Float[Tensor, "*batch width"], Float[Tensor, "*batch width"]]:
    """A residual stream with what a layer adds to it, and that sum's norm, in one pass over memory.

    Args:
        dtype: Of the norm; default that of the sum.

    Returns:
        (x + delta, `rms_norm` of it).

    Raises:
        KernelError: shapes that disagree, a backend that is not available.
    """
    check_present(OPERATOR, delta=delta)
    _check(x, w, None, eps, delta)
    unfit = triton_unfit("chunked", {"width": x.shape[-1]}, x, w, delta, limit=LARGEST_WIDTH)
    if resolve_backend(OPERATOR, backend, x, unfit) == "triton":
        from kernels.triton import rms_norm as fused

        wanted = dtype or torch.promote_types(x.dtype, delta.dtype)
        total, y = fused.add_rms_norm(_rows(x), _rows(delta), w, eps, dtype=wanted)
        return total.view(x.shape), y.view(x.shape)
    total = x + delta
    return total, rms_norm(total, w, eps=eps, dtype=dtype, backend="torch")


def _rows(x: Tensor) -> Rows:
    return x[None] if x.ndim == 1 else x.flatten(0, -2)


def _check(x: Tensor, w: Tensor, gate: Tensor | None, eps: float, delta: Tensor | None = None) -> None:
    axes = check_shape(OPERATOR, "x", x, last="width")
    check_present(OPERATOR, w=w)
    check_number(OPERATOR, "eps", eps, least=0)
    check_axes(
        OPERATOR, {"x": (x, axes), "w": (w, "width"), "gate": (gate, axes), "delta": (delta, axes)}
    )
