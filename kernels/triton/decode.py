"""One-token steps on a GPU: linear attention, selective scan and causal convolution, one launch each. No
gradients."""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.ops import operators, register


@triton.jit
@typing.no_type_check
def _linear_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, w_ptr, s_ptr, z_ptr, o_ptr, s_new_ptr, z_new_ptr,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_v_b, stride_v_h, stride_g_b, stride_g_h,
    stride_w_b, stride_w_h,
    n_head, scale, eps,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_S: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Next state and output of one head, one block of value columns."""
    lane = tl.program_id(0).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < D_K
    mask_v = offs_v < D_V
    mask = mask_k[:, None] & mask_v[None, :]
    b_q = tl.load(q_ptr + batch * stride_q_b + head // GROUP_Q * stride_q_h + offs_k, mask=mask_k,
        other=0.0).to(tl.float32)
    b_k = tl.load(k_ptr + batch * stride_k_b + head // GROUP_K * stride_k_h + offs_k, mask=mask_k,
        other=0.0).to(tl.float32)
    b_v = tl.load(v_ptr + batch * stride_v_b + head * stride_v_h + offs_v, mask=mask_v,
        other=0.0).to(tl.float32)
    keep = 1.0
    if HAS_W:
        b_k = b_k * tl.load(w_ptr + batch * stride_w_b + head * stride_w_h).to(tl.float32)
    if HAS_G:
        log_decay = tl.load(g_ptr + batch * stride_g_b + head * stride_g_h).to(tl.float32)
        keep = tl.exp2(log_decay * 1.4426950408889634)
    place = lane * (D_K * D_V) + offs_k[:, None] * D_V + offs_v[None, :]
    b_s = b_k[:, None] * b_v[None, :]
    if HAS_S:
        b_s += keep * tl.load(s_ptr + place, mask=mask, other=0.0)
    tl.store(s_new_ptr + place, b_s, mask=mask)
    b_o = tl.sum(b_q[:, None] * b_s, 0) * scale
    if NORMALISE:
        b_z = b_k
        if HAS_S:
            b_z += keep * tl.load(z_ptr + lane * D_K + offs_k, mask=mask_k, other=0.0)
        tl.store(z_new_ptr + lane * D_K + offs_k, b_z, mask=mask_k & (tl.program_id(1) == 0))
        b_o = b_o / (tl.sum(b_q * b_z, 0) * scale + eps)
    tl.store(o_ptr + lane * D_V + offs_v, b_o.to(o_ptr.dtype.element_ty), mask=mask_v)


def linear_step(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor | None = None, k_weight: Tensor | None = None,
    scale: float = 1.0,
    normalise: bool = False, eps: float = 0.0, s: Tensor | None = None, z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """One position of linear attention: q, k [batch group d_k]; v [batch head d_v]; log_decay, k_weight
    [batch head].

    Returns:
        (o [batch head d_v], next s [batch head d_k d_v], next z [batch head d_k] or None), states float32.
    """
    check_dtype("linear_step", v)
    check_width("linear_step", "d_k", q.shape[-1])
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(v.shape[:2])
    if s is not None and normalise and z is None:
        z = s.new_zeros(s.shape[:3])
    o, s, z = operators.linear_step(q, k, v, log_decay, k_weight, s, z, scale, normalise, eps)
    return o, s, z if normalise else None


def _linear_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, s: Tensor | None, z: Tensor | None,
    scale: float,
    normalise: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = rows(q), rows(k), rows(v)
    s, z = (None if x is None else x.float().contiguous() for x in (s, z))
    batch, heads, d_v = v.shape
    d_k = q.shape[2]
    o = torch.empty(batch, heads, d_v, dtype=v.dtype, device=v.device)
    s_new = torch.empty(batch, heads, d_k, d_v, dtype=torch.float32, device=v.device)
    z_new = torch.empty((batch, heads, d_k) if normalise else (0,), dtype=torch.float32, device=v.device)
    block_k = power_of_two(d_k)
    block_v = min(power_of_two(d_v), max(16, 4096 // block_k))
    launch(
        _linear_step_kernel, (batch * heads, -(-d_v // block_v)), q, k, v, g, w, s, z, o, s_new, z_new,
        *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *((0, 0) if g is None else g.stride()), *((0,
        0) if w is None else w.stride()),
        heads, scale, eps, GROUP_Q=heads // q.shape[1], GROUP_K=heads // k.shape[1], D_K=d_k, D_V=d_v,
        BLOCK_K=block_k,
        BLOCK_V=block_v, HAS_G=g is not None, HAS_W=w is not None, HAS_S=s is not None, NORMALISE=normalise,
        num_warps=4,
    )  # fmt: skip
    return o, s_new, z_new


@triton.jit
@typing.no_type_check
def _scan_step_kernel(
    u_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, d_ptr, z_ptr, h_ptr, y_ptr, h_new_ptr, n_channel,
    D_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_H: tl.constexpr,
):  # fmt: skip
    """Next state and output of one block of channels. rate is A_log."""
    batch = tl.program_id(1).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = tl.arange(0, BLOCK_N)
    mask_c = offs_c < n_channel
    mask_n = offs_n[None, :] < D_STATE
    mask = mask_c[:, None] & mask_n
    row = batch * n_channel + offs_c
    b_u = tl.load(u_ptr + row, mask=mask_c, other=0.0).to(tl.float32)
    b_dt = tl.load(dt_ptr + row, mask=mask_c, other=0.0).to(tl.float32)
    b_b = tl.load(b_ptr + batch * D_STATE + offs_n[None, :], mask=mask_n, other=0.0).to(tl.float32)
    b_c = tl.load(c_ptr + batch * D_STATE + offs_n[None, :], mask=mask_n, other=0.0).to(tl.float32)
    b_h = (b_dt * b_u)[:, None] * b_b
    place = row[:, None] * D_STATE + offs_n[None, :]
    if HAS_H:
        b_log = tl.load(rate_ptr + offs_c[:, None] * D_STATE + offs_n[None, :], mask=mask,
            other=0.0).to(tl.float32)
        b_rate = tl.exp2(b_log * 1.4426950408889634) * -1.4426950408889634
        b_h += tl.exp2(b_dt[:, None] * b_rate) * tl.load(h_ptr + place, mask=mask, other=0.0)
    tl.store(h_new_ptr + place, b_h, mask=mask)
    b_y = tl.sum(b_h * b_c, 1)
    if HAS_D:
        b_y += tl.load(d_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32) * b_u
    if HAS_Z:
        b_z = tl.load(z_ptr + row, mask=mask_c, other=0.0).to(tl.float32)
        b_y = b_y * b_z / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
    tl.store(y_ptr + row, b_y.to(y_ptr.dtype.element_ty), mask=mask_c)


def scan_step(
    u: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One position of the selective scan: u, dt, z [batch channel]; B, C [batch d_state]; state [batch
    channel d_state]."""
    check_dtype("scan_step", u)
    check_width("scan_step", "d_state", A_log.shape[1])
    return operators.scan_step(u, dt, A_log, B, C, D, z, state)


def _scan_step(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None
) -> tuple[Tensor, Tensor]:
    u, dt, a_log, b, c = (x.contiguous() for x in (u, dt, a_log, b, c))
    z, state = (None if x is None else x.contiguous() for x in (z, None if state is None else state.float()))
    batch, channels = u.shape
    d_state = a_log.shape[1]
    y = torch.empty(batch, channels, dtype=u.dtype, device=u.device)
    new = torch.empty(batch, channels, d_state, dtype=torch.float32, device=u.device)
    block_n = power_of_two(d_state, 4)
    block_c = max(4, 1024 // block_n)
    launch(
        _scan_step_kernel, (-(-channels // block_c), batch), u, dt, a_log, b, c, d, z, state, y, new,
        channels,
        D_STATE=d_state, BLOCK_C=block_c, BLOCK_N=block_n, HAS_D=d is not None, HAS_Z=z is not None,
        HAS_H=state is not None, num_warps=4,
    )  # fmt: skip
    return y, new


@triton.jit
@typing.no_type_check
def _conv_step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, new_ptr, stride_x_b, n_channel,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Output and next stored inputs of one block of channels."""
    batch = tl.program_id(1).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < n_channel
    b_x = tl.load(x_ptr + batch * stride_x_b + offs_c, mask=mask_c, other=0.0)
    b_w = tl.load(weight_ptr + offs_c * WIDTH + WIDTH - 1, mask=mask_c, other=0.0)
    b_y = b_x.to(tl.float32) * b_w.to(tl.float32)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    for slot in tl.static_range(WIDTH - 1):
        row = batch * (WIDTH - 1) + slot
        b_old = tl.load(state_ptr + row * n_channel + offs_c, mask=mask_c, other=0.0)
        b_w = tl.load(weight_ptr + offs_c * WIDTH + slot, mask=mask_c, other=0.0)
        b_y += b_old.to(tl.float32) * b_w.to(tl.float32)
        if slot > 0:
            tl.store(new_ptr + (row - 1) * n_channel + offs_c, b_old.to(new_ptr.dtype.element_ty),
                mask=mask_c)
    if WIDTH > 1:
        tl.store(new_ptr + (batch * (WIDTH - 1) + WIDTH - 2) * n_channel + offs_c, b_x, mask=mask_c)
    if SILU:
        b_y = b_y / (1.0 + tl.exp2(-1.4426950408889634 * b_y))
    tl.store(y_ptr + batch * n_channel + offs_c, b_y.to(y_ptr.dtype.element_ty), mask=mask_c)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, state: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """One position of the causal convolution: x [batch channel], state [batch width-1 channel]."""
    check_dtype("conv_step", x)
    return operators.conv_step(x, weight, bias, state, silu)


def _conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    x, weight, state = rows(x), weight.contiguous(), state.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new = torch.empty(state.shape, dtype=x.dtype, device=x.device)
    launch(
        _conv_step_kernel, (-(-x.shape[1] // 256), x.shape[0]), x, weight, bias, state, y, new, x.stride(0),
        x.shape[1], WIDTH=weight.shape[1], BLOCK_C=256, HAS_BIAS=bias is not None, SILU=silu, num_warps=2,
    )  # fmt: skip
    return y, new


def _fake_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(state.shape)


def _fake_linear_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, s: Tensor | None, z: Tensor | None,
    scale: float,
    normalise: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, d_v = v.shape
    z_shape = (batch, heads, q.shape[2]) if normalise else (0,)
    s_new = v.new_empty(batch, heads, q.shape[2], d_v, dtype=torch.float32)
    return v.new_empty(v.shape), s_new, v.new_empty(z_shape, dtype=torch.float32)


def _fake_scan_step(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None
) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(*u.shape, a_log.shape[1], dtype=torch.float32)


register(
    "linear_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? w, Tensor? s, Tensor? z, float scale, "
    "bool normalise, float eps) -> (Tensor, Tensor, Tensor)",
    _linear_step,
    _fake_linear_step,
)
register(
    "scan_step(Tensor u, Tensor dt, Tensor a_log, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? state) "
    "-> (Tensor, Tensor)",
    _scan_step,
    _fake_scan_step,
)
register(
    "conv_step(Tensor x, Tensor weight, Tensor? bias, Tensor state, bool silu) -> (Tensor, Tensor)",
    _conv_step,
    _fake_conv_step,
)
