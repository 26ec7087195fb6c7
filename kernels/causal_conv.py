"""Short causal depthwise convolution: each channel is a weighted sum of its last few inputs.

pre[t, c] = bias[c] + sum_l weight[c, width-1-l] x[t-l, c]; the last tap meets the current input. The output
is pre, or SiLU(pre). Inputs before the sequence come from the state (the last width - 1 inputs, oldest
first) or are zero.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError
from kernels.checks import (
    accumulation_dtype,
    check_axes,
    check_count,
    check_present,
    resolve_backend,
    resolve_form,
    step_unfit,
    triton_unfit,
    without_autocast,
)

Sequence = Float[Tensor, "batch seq channel"]
State = Float[Tensor, "batch width_1 channel"]


def pattern(weight: Float[Tensor, "channel width"], seq: int) -> Float[Tensor, "channel dest=seq src=seq"]:
    """The convolution as a banded lower-triangular matrix per channel: pre = pattern @ x + bias (no
    state).
    """
    check_present("causal_conv", weight=weight)
    width = check_axes("causal_conv", {"weight": (weight, "channel width")})["width"]
    if width < 1:
        raise KernelError(f"causal_conv: weight has shape {tuple(weight.shape)}, accepted is a width >= 1")
    check_count("causal_conv", "seq", seq)
    positions = torch.arange(seq, device=weight.device)
    lag = positions[:, None] - positions[None, :]
    inside = (lag >= 0) & (lag < width)
    taps = weight[:, (width - 1 - lag).clamp(0, width - 1)]
    return torch.where(inside, taps, taps.new_zeros(()))


@without_autocast
def parallel(
    x: Sequence,
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    state: State | None = None,
    silu: bool = False,
) -> tuple[Sequence, State]:
    """Readable form: the banded matrix over the stored inputs and the sequence, times them.

    Returns:
        (output [batch seq channel], state [batch width-1 channel]).
    """
    padded, acc = _padded(x, weight, bias, state)
    seq, width = x.shape[1], weight.shape[1]
    banded = pattern(weight.to(acc), padded.shape[1])[:, width - 1 :, :]
    pre = torch.einsum("cij,bjc->bic", banded, padded)
    return _finish(pre, bias, silu, x.dtype), padded[:, seq:].to(x.dtype)


@without_autocast
def chunked(
    x: Sequence,
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    state: State | None = None,
    silu: bool = False,
) -> tuple[Sequence, State]:
    """Linear-time form: one shifted product per tap. Arguments and results as in `parallel`."""
    padded, acc = _padded(x, weight, bias, state)
    seq, width = x.shape[1], weight.shape[1]
    taps = weight.to(acc)
    pre = padded[:, width - 1 :] * taps[:, width - 1]
    for tap in range(width - 1):
        pre = torch.addcmul(pre, padded[:, tap : tap + seq], taps[:, tap])
    return _finish(pre, bias, silu, x.dtype), padded[:, seq:].to(x.dtype)


@without_autocast
def step(
    x: Float[Tensor, "batch channel"],
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    state: State,
    silu: bool = False,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch channel"], State]:
    """One position from the stored inputs; constant time. Returns (output, next state).

    `backend` as in `causal_conv`; Triton's step has no gradient.
    """
    check_present("causal_conv", state=state)
    _check(x, weight, bias, state, one_step=True)
    unfit = step_unfit({}, x, weight, bias, state)
    if resolve_backend("causal_conv", backend, x, unfit) == "triton":
        from kernels.triton import decode

        return decode.conv_step(x, weight, bias, state=state, silu=silu)
    window, acc = _padded(x[:, None], weight, bias, state)
    pre = torch.einsum("bwc,cw->bc", window, weight.to(acc))
    return _finish(pre, bias, silu, x.dtype), window[:, 1:].to(x.dtype)


@without_autocast
def recurrent(
    x: Sequence,
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    state: State | None = None,
    silu: bool = False,
) -> tuple[Sequence, State]:
    """Token by token through `step`. Arguments and results as in `parallel`."""
    width = _check(x, weight, bias, state)
    if state is None:
        state = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    outputs = []
    for t in range(x.shape[1]):
        output, state = step(x[:, t], weight, bias, state=state, silu=silu, backend="torch")
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


def causal_conv(
    x: Sequence,
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
    *,
    state: State | None = None,
    silu: bool = False,
    form: str = "chunked",
    backend: str | None = None,
) -> tuple[Sequence, State]:
    """Causal depthwise convolution in a named form ("parallel", "chunked", "recurrent").

    Returns:
        (output [batch seq channel], state [batch width-1 channel], oldest input first).

    Raises:
        KernelError: Shapes that disagree, an unknown form, a backend that is not available.

    Source: Gu and Dao 2023, arXiv:2312.00752, the block's convolution.
    """
    width = _check(x, weight, bias, state)
    unfit = triton_unfit(form, {}, x, weight, bias, state)
    if unfit is None and width > 4:
        unfit = f"width {width}"
    if resolve_backend("causal_conv", backend, x, unfit) == "triton":
        from kernels.triton import causal_conv as fused

        return fused.causal_conv(x, weight, bias, state=state, silu=silu)
    function = resolve_form(
        "causal_conv", form, {"parallel": parallel, "chunked": chunked, "recurrent": recurrent}
    )
    return function(x, weight, bias, state=state, silu=silu)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *, one_step: bool = False
) -> int:
    """Raise KernelError for shapes that disagree; the width."""
    check_present("causal_conv", x=x, weight=weight)
    axes = "batch channel" if one_step else "batch seq channel"
    sizes = check_axes(
        "causal_conv", {"x": (x, axes), "weight": (weight, "channel width"), "bias": (bias, "channel")}
    )
    if sizes["width"] < 1 or sizes.get("seq", 1) < 1:
        raise KernelError(
            f"causal_conv: x {tuple(x.shape)} and weight {tuple(weight.shape)}: need seq, width >= 1"
        )
    if state is not None:
        check_axes(
            "causal_conv",
            {"x": (x, axes), "state": (state, "batch width-1 channel")},
            **{"width-1": sizes["width"] - 1},
        )
    return sizes["width"]


def _padded(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
) -> tuple[Tensor, torch.dtype]:
    """Stored inputs (or zeros) in front of the sequence, in the accumulation dtype."""
    width = _check(x, weight, bias, state)
    acc = accumulation_dtype(x, weight, state)
    if state is None:
        return F.pad(x.to(acc), (0, 0, width - 1, 0)), acc
    return torch.cat([state.to(acc), x.to(acc)], dim=1), acc


def _finish(pre: Tensor, bias: Tensor | None, silu: bool, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        pre = pre + bias.to(pre.dtype)
    return (F.silu(pre) if silu else pre).to(dtype)
