"""The step sizes of Mamba: softplus(raw + bias), in float32 or better whatever the input's dtype.

A rounded step size would compound in the decay.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.checks import check_axes, check_present, check_shape, resolve_backend, triton_unfit
from kernels.selective_scan import softplus_dt

OPERATOR = "step_size"


def step_size(
    raw: Float[Tensor, "*lead step"], bias: Float[Tensor, " step"], *, backend: str | None = None
) -> Float[Tensor, "*lead step"]:
    """softplus(raw + bias); float32 (float64 for float64 input).

    Args:
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: shapes that disagree, a backend that is not available.

    Source: Gu and Dao 2023, arXiv:2312.00752, section 3.5.
    """
    axes = check_shape(OPERATOR, "raw", raw, last="step")
    check_present(OPERATOR, bias=bias)
    check_axes(OPERATOR, {"raw": (raw, axes), "bias": (bias, "step")})
    unfit = triton_unfit("chunked", {}, raw, bias)
    if resolve_backend(OPERATOR, backend, raw, unfit) == "triton":
        from kernels.triton import step_size as fused

        return fused.step_size(raw.reshape(-1, raw.shape[-1]), bias).view(raw.shape)
    return softplus_dt(raw.to(torch.promote_types(raw.dtype, torch.float32)), bias)
