"""What lies between Mamba-2's two projections on a GPU, as one operator: convolution, steps and decays, scan,
gated norm.

The kernels are those of the single operators. As one operator they write the gradients of their parts of the
projection side by side, so that nothing is copied together afterwards.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.triton import causal_conv, gated_linear_attention, rms_norm, step_decay
from kernels.triton.launch import check_dtype, check_width, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "ssd_block"


class _Widths(NamedTuple):
    """Columns of the projection z | x | B | C | dt, and what they are cut into."""

    inner: int
    shared: int
    heads: int
    groups: int

    @property
    def convolved(self) -> slice:
        return slice(self.inner, 2 * self.inner + 2 * self.shared)

    @property
    def steps(self) -> slice:
        return slice(2 * self.inner + 2 * self.shared, None)

    def scanned(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views (C, B, x) by head of [batch seq channel], in the order of queries, keys and values."""
        x, b, c = convolved.split((self.inner, self.shared, self.shared), -1)
        shared = (self.groups, self.shared // self.groups)
        c, b = (t.unflatten(-1, shared) for t in (c, b))
        return c, b, x.unflatten(-1, (self.heads, self.inner // self.heads))


def _widths(conv_weight: Tensor, dt_bias: Tensor, gain: Tensor, groups: int) -> _Widths:
    inner = gain.shape[0]
    return _Widths(inner, (conv_weight.shape[0] - inner) // 2, dt_bias.shape[0], groups)


def ssd_block(
    packed: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, a_log: Tensor, d: Tensor,
    gain: Tensor, *, n_groups: int, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y [batch seq d_inner] as `dtype`, last state [batch head d_state d_head], last inputs of the
    convolution [batch width-1 channel]), all differentiable; arguments as in `kernels.ssd_block`."""
    widths = _widths(conv_weight, dt_bias, gain, n_groups)
    check_dtype(OPERATOR, packed)
    check_width(OPERATOR, "d_state", widths.shared // n_groups)
    check_width(OPERATOR, "d_head", widths.inner // widths.heads)
    check_width(OPERATOR, "d_inner", widths.inner, 8192)
    check_width(OPERATOR, "the convolution's width", conv_weight.shape[1], causal_conv.LARGEST_WIDTH)
    return operators.ssd_block(
        packed, conv_weight, conv_bias, dt_bias, a_log, d, gain, n_groups, eps, dtype
    )[:3]


def _forward(
    packed: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, a_log: Tensor, d: Tensor,
    gain: Tensor, n_groups: int, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y, last state, last inputs, and what the backward reads: convolution, steps, log decays, scan's
    output, entry states of segments, sums of decays, 1 / root mean square)."""
    packed = _flat(packed)
    widths = _widths(conv_weight, dt_bias, gain, n_groups)
    batch, seq = packed.shape[:2]
    conv, last_conv = causal_conv._forward(packed[..., widths.convolved], conv_weight, conv_bias, None, True)
    dt, g = step_decay._forward(packed[..., widths.steps].flatten(0, 1), dt_bias, a_log)
    dt, g = (t.view(batch, seq, widths.heads) for t in (dt, g))
    o, last, _, _, parts, sums = gated_linear_attention._forward(
        *widths.scanned(conv), g, dt, d, None, None, 1.0, False, 0.0
    )
    gate = packed[..., : widths.inner].flatten(0, 1)
    y, scale = rms_norm._forward(o.view(batch * seq, widths.inner), gate, gain, eps, dtype)
    return y.view(batch, seq, widths.inner), last, last_conv, conv, dt, g, o, parts, sums, scale


def _flat(packed: Tensor) -> Tensor:
    """The projection with rows of stride 1, evenly spaced over batch and sequence."""
    packed = rows(packed)
    even = packed.shape[0] == 1 or packed.stride(0) == packed.shape[1] * packed.stride(1)
    return packed if even else packed.contiguous()


def _backward(
    dy: Tensor, dlast: Tensor | None, dlast_conv: Tensor | None, packed: Tensor, conv_weight: Tensor,
    conv_bias: Tensor | None, dt_bias: Tensor, a_log: Tensor, d: Tensor, gain: Tensor, last: Tensor,
    conv: Tensor, dt: Tensor, g: Tensor, o: Tensor, parts: Tensor, sums: Tensor, scale: Tensor, n_groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the tensors of `_forward`, in their order; the bias's is empty where there is none."""
    packed = _flat(packed)
    widths = _widths(conv_weight, dt_bias, gain, n_groups)
    batch, seq = packed.shape[:2]
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    flat, flat_gradient = packed.flatten(0, 1), dpacked.view(batch * seq, packed.shape[2])
    do, _, dgain = rms_norm._backward(
        dy.flatten(0, 1), o.view(batch * seq, widths.inner), flat[:, : widths.inner], gain, scale,
        into=flat_gradient[:, : widths.inner],
    )  # fmt: skip
    none = scale.new_empty(0)
    dconv = torch.empty(conv.shape, dtype=conv.dtype, device=conv.device)
    _, _, _, dg, ddt, dd, _, _ = gated_linear_attention._backward(
        do.view(o.shape), dlast, None, *widths.scanned(conv), g, dt, d, None, None, o, last, none, none,
        parts, sums, 1.0, False, into=widths.scanned(dconv),
    )  # fmt: skip
    _, dconv_weight, dconv_bias, _ = causal_conv._backward(
        dconv, dlast_conv, packed[..., widths.convolved], conv_weight, conv_bias, None, True,
        into=dpacked[..., widths.convolved],
    )  # fmt: skip
    steps = (flat[:, widths.steps], dt_bias, a_log, g, flat_gradient[:, widths.steps])
    ddt_bias, da_log = step_decay._backward(ddt, dg, *steps)
    return dpacked, dconv_weight, dconv_bias, ddt_bias, da_log, dd, dgain


def _fake(
    packed: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, a_log: Tensor, d: Tensor,
    gain: Tensor, n_groups: int, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, seq, _ = packed.shape
    channels, width = conv_weight.shape
    widths = _widths(conv_weight, dt_bias, gain, n_groups)
    conv = packed.new_empty(batch, seq, channels)
    g = packed.new_empty(batch, seq, widths.heads, dtype=torch.float32)
    o, last, _, _, parts, sums = gated_linear_attention._fake(
        *widths.scanned(conv), g, g, d, None, None, 1.0, False, 0.0
    )
    y = packed.new_empty(batch, seq, widths.inner, dtype=dtype)
    last_conv = packed.new_empty(batch, width - 1, channels)
    return y, last, last_conv, conv, g.new_empty(g.shape), g, o, parts, sums, g.new_empty(batch * seq)


def _fake_backward(
    dy: Tensor, dlast: Tensor | None, dlast_conv: Tensor | None, packed: Tensor, conv_weight: Tensor,
    conv_bias: Tensor | None, dt_bias: Tensor, a_log: Tensor, d: Tensor, gain: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = (packed, conv_weight, conv_bias, dt_bias, a_log, d, gain)
    none = packed.new_empty(0, dtype=torch.float32)
    return tuple(none if x is None else x.new_empty(x.shape) for x in found)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.n_groups, _, ctx.dtype = inputs
    ctx.set_materialize_grads(False)
    _, last, _, *kept = output
    ctx.save_for_backward(*tensors, last, *kept)


def _gradient(
    ctx: Any, dy: Tensor | None, dlast: Tensor | None, dlast_conv: Tensor | None, *unused: Any
) -> tuple:
    saved = ctx.saved_tensors
    if dy is None:
        o = saved[11]
        dy = torch.zeros(*o.shape[:2], o.shape[2] * o.shape[3], dtype=ctx.dtype, device=o.device)
    found = operators.ssd_block_backward(dy, dlast, dlast_conv, *saved, ctx.n_groups)
    return *(None if x is None else dx for x, dx in zip(saved[:7], found, strict=True)), None, None, None


_INPUTS = (
    "Tensor packed, Tensor conv_weight, Tensor? conv_bias, Tensor dt_bias, Tensor a_log, Tensor d, "
    "Tensor gain"
)
register(
    f"ssd_block({_INPUTS}, int n_groups, float eps, ScalarType dtype) -> ({', '.join(['Tensor'] * 10)})",
    _forward,
    _fake,
)
register(
    f"ssd_block_backward(Tensor dy, Tensor? dlast, Tensor? dlast_conv, {_INPUTS}, Tensor last, Tensor conv, "
    "Tensor dt, Tensor g, Tensor o, Tensor parts, Tensor sums, Tensor scale, int n_groups) "
    f"-> ({', '.join(['Tensor'] * 7)})",
    _backward,
    _fake_backward,
)
differentiable("ssd_block", _setup, _gradient)
differentiable_once("ssd_block_backward")
