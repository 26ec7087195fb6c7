"""What lies between Mamba-2's two projections: convolution, step sizes, scan with its skip, gated norm.

    z, xBC, dt = projection        x, B, C = SiLU(conv(xBC))        dt = softplus(dt + dt_bias)
    y = gain RMSNorm((scan(x, dt, A, B, C) + D x) SiLU(z))

Source: Dao and Gu 2024, arXiv:2405.21060, and Hugging Face's Mamba2Mixer for the layout.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.causal_conv import causal_conv
from kernels.checks import (
    check_axes,
    check_count,
    check_number,
    check_present,
    resolve_backend,
    triton_unfit,
    without_autocast,
)
from kernels.rms_norm import rms_norm
from kernels.ssd import ssd
from kernels.step_size import step_size

OPERATOR = "ssd_block"
Packed = Float[Tensor, "batch seq d_projection"]
Heads = Float[Tensor, " head"]


@without_autocast
def ssd_block(
    packed: Packed,
    conv_weight: Float[Tensor, "channel width"],
    conv_bias: Float[Tensor, " channel"] | None,
    dt_bias: Heads,
    A_log: Heads,
    D: Heads,
    gain: Float[Tensor, " d_inner"],
    *,
    n_groups: int,
    eps: float,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[
    Float[Tensor, "batch seq d_inner"],
    Float[Tensor, "batch head d_head d_state"],
    Float[Tensor, "batch width_1 channel"],
]:
    """A sequence from its start, in one operator on a GPU.

    Args:
        packed: z (d_inner columns), x (d_inner), B and C (n_groups d_state each), dt (head) side by side; the
            channels are x, B and C.
        gain: Of the norm; d_inner = head d_head.
        dtype: Of the output; default that of `packed`.
        backend: "torch", "triton" (met or refused), or None: by the device.

    Returns:
        (output, the scan's last state, the convolution's last inputs).

    Raises:
        KernelError: Shapes that disagree, a backend that is not available.
    """
    d_state = _check(packed, conv_weight, conv_bias, dt_bias, A_log, D, gain, n_groups, eps)
    inner, channels, heads = gain.shape[0], conv_weight.shape[0], dt_bias.shape[0]
    given = (packed, conv_weight, conv_bias, dt_bias, A_log, D, gain)
    unfit = triton_unfit("chunked", {"d_state": d_state, "d_head": inner // heads}, *given)
    wide = {"width": (conv_weight.shape[1], 4), "d_inner": (inner, 8192)}
    unfit = unfit or next((f"{name} {size}" for name, (size, most) in wide.items() if size > most), None)
    if resolve_backend(OPERATOR, backend, packed, unfit) == "triton":
        from kernels.triton import ssd_block as fused

        options = {"n_groups": n_groups, "eps": eps, "dtype": dtype or packed.dtype}
        y, state, conv_state = fused.ssd_block(*given, **options)
        return y, state.transpose(-1, -2), conv_state
    z, convolved, steps = packed.split((inner, channels, heads), -1)
    convolved, conv_state = causal_conv(convolved, conv_weight, conv_bias, silu=True, backend="torch")
    x, B, C = convolved.split((inner, n_groups * d_state, n_groups * d_state), -1)
    B, C = (part.unflatten(-1, (n_groups, d_state)) for part in (B, C))
    dt = step_size(steps, dt_bias, backend="torch")
    y, state = ssd(x.unflatten(-1, (heads, -1)), dt, A_log, B, C, D=D, backend="torch")
    return rms_norm(y.flatten(2), gain, eps=eps, gate=z, dtype=dtype, backend="torch"), state, conv_state


def _check(
    packed: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, A_log: Tensor, D: Tensor,
    gain: Tensor, n_groups: int, eps: float,
) -> int:  # fmt: skip
    """Raise KernelError for what does not fit together; d_state."""
    check_present(
        OPERATOR, packed=packed, conv_weight=conv_weight, dt_bias=dt_bias, A_log=A_log, D=D, gain=gain
    )
    check_count(OPERATOR, "n_groups", n_groups)
    check_number(OPERATOR, "eps", eps, least=0)
    sizes = check_axes(
        OPERATOR,
        {
            "packed": (packed, "batch seq d_projection"),
            "conv_weight": (conv_weight, "channel width"),
            "conv_bias": (conv_bias, "channel"),
            "dt_bias": (dt_bias, "head"),
            "A_log": (A_log, "head"),
            "D": (D, "head"),
            "gain": (gain, "d_inner"),
        },
    )
    inner, channels, heads = sizes["d_inner"], sizes["channel"], sizes["head"]
    if sizes["seq"] < 1 or sizes["width"] < 1:
        raise KernelError(
            f"{OPERATOR}: packed has shape {tuple(packed.shape)} and conv_weight {tuple(conv_weight.shape)}, "
            "accepted are sequences and a width of at least 1"
        )
    if inner % heads or heads % n_groups or (channels - inner) % (2 * n_groups) or channels <= inner:
        raise KernelError(
            f"{OPERATOR}: gain of {inner}, {channels} channels, {heads} heads, n_groups {n_groups}; accepted "
            "are heads that divide the gain, groups that divide the heads, gain + 2 n_groups d_state channels"
        )
    if sizes["d_projection"] != inner + channels + heads:
        raise KernelError(
            f"{OPERATOR}: packed has shape {tuple(packed.shape)}, accepted is a last axis of "
            f"{inner + channels + heads} (gain, channels and heads side by side)"
        )
    return (channels - inner) // (2 * n_groups)
