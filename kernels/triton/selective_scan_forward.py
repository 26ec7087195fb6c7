"""Forward kernels of the selective scan: states of segments, their carry, outputs. Rates are in base 2.

A program holds the states of a few channels in registers and walks through one segment of the sequence step
by step.
The decay over a segment is exp2(A sum dt): what a segment adds and that sum are all that its successor needs.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _scan_fwd_state_kernel(
    u_ptr, dt_ptr, rate_ptr, b_ptr, h_ptr, total_ptr, stride_u_b, stride_u_t, stride_dt_b, stride_dt_t,
    stride_b_b,
    stride_b_t, n_channel, seq, n_segment, segment,
    D_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """State that one segment adds by itself, and its sum of dt."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = tl.arange(0, BLOCK_N)
    mask_c = offs_c < n_channel
    mask_n = offs_n[None, :] < D_STATE
    mask = mask_c[:, None] & mask_n
    b_rate = tl.load(rate_ptr + offs_c[:, None] * D_STATE + offs_n[None, :], mask=mask, other=0.0)
    start = batch * 0 + part * segment
    u_ptr += batch * stride_u_b + start * stride_u_t
    dt_ptr += batch * stride_dt_b + start * stride_dt_t
    b_ptr += batch * stride_b_b + start * stride_b_t
    b_h = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    b_total = tl.zeros([BLOCK_C], tl.float32)
    n_step = tl.minimum(segment, seq - part * segment)
    for _ in tl.range(n_step):
        b_u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_dt = tl.load(dt_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_b = tl.load(b_ptr + offs_n[None, :], mask=mask_n, other=0.0).to(tl.float32)
        b_h = tl.exp2(b_dt[:, None] * b_rate) * b_h + (b_dt * b_u)[:, None] * b_b
        b_total += b_dt
        u_ptr += stride_u_t
        dt_ptr += stride_dt_t
        b_ptr += stride_b_t
    place = (batch * n_segment + part) * n_channel
    tl.store(h_ptr + place * D_STATE + offs_c[:, None] * D_STATE + offs_n[None, :], b_h, mask=mask)
    tl.store(total_ptr + place + offs_c, b_total, mask=mask_c)


@triton.jit
@typing.no_type_check
def _scan_carry_kernel(
    h_ptr, total_ptr, rate_ptr, first_ptr, last_ptr, size, n_channel, n_segment,
    D_STATE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state that enters it; write the state that leaves the last
    one."""
    batch = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    b_rate = tl.load(rate_ptr + offs, mask=mask, other=0.0)
    b_h = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        b_h = tl.load(first_ptr + batch * size + offs, mask=mask, other=0.0)
    for count in tl.range(n_segment):
        place = batch * n_segment + (n_segment - 1 - count if REVERSE else count)
        b_own = tl.load(h_ptr + place * size + offs, mask=mask, other=0.0)
        b_total = tl.load(total_ptr + place * n_channel + offs // D_STATE, mask=mask, other=0.0)
        tl.store(h_ptr + place * size + offs, b_h, mask=mask)
        b_h = tl.exp2(b_rate * b_total) * b_h + b_own
    tl.store(last_ptr + batch * size + offs, b_h, mask=mask)


@triton.jit
@typing.no_type_check
def _scan_fwd_output_kernel(
    u_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, d_ptr, z_ptr, h_ptr, y_ptr, kept_ptr, last_ptr,
    stride_u_b, stride_u_t, stride_dt_b, stride_dt_t, stride_b_b, stride_b_t, stride_c_b, stride_c_t,
    stride_z_b,
    stride_z_t, n_channel, seq, n_segment, segment, n_kept,
    D_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_FIRST: tl.constexpr, KEEP: tl.constexpr, SAVE_LAST: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment; every STEPS steps the state is kept for the backward."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, STEPS)
    mask_c = offs_c < n_channel
    mask_n = offs_n[None, :] < D_STATE
    mask = mask_c[:, None] & mask_n
    state = offs_c[:, None] * D_STATE + offs_n[None, :]
    size = n_channel * D_STATE
    b_rate = tl.load(rate_ptr + state, mask=mask, other=0.0)
    b_h = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    if HAS_FIRST:
        b_h = tl.load(h_ptr + (batch * n_segment + part) * size + state, mask=mask, other=0.0)
    if HAS_D:
        b_d = tl.load(d_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    for block in tl.range(tl.cdiv(stop - first, STEPS)):
        start = first + block * STEPS
        if KEEP:
            tl.store(kept_ptr + (batch * n_kept + start // STEPS) * size + state,
                b_h.to(kept_ptr.dtype.element_ty), mask=mask)
        u_base = u_ptr + batch * stride_u_b + start * stride_u_t
        dt_base = dt_ptr + batch * stride_dt_b + start * stride_dt_t
        b_base = b_ptr + batch * stride_b_b + start * stride_b_t
        c_base = c_ptr + batch * stride_c_b + start * stride_c_t
        b_y = tl.zeros([STEPS, BLOCK_C], tl.float32)
        for step in tl.static_range(STEPS):
            inside = start + step < stop
            b_u = tl.load(u_base + step * stride_u_t + offs_c, mask=mask_c & inside, other=0.0).to(tl.float32)
            b_dt = tl.load(dt_base + step * stride_dt_t + offs_c, mask=mask_c & inside,
                other=0.0).to(tl.float32)
            b_b = tl.load(b_base + step * stride_b_t + offs_n[None, :], mask=mask_n & inside,
                other=0.0).to(tl.float32)
            b_c = tl.load(c_base + step * stride_c_t + offs_n[None, :], mask=mask_n & inside,
                other=0.0).to(tl.float32)
            b_h = tl.exp2(b_dt[:, None] * b_rate) * b_h + (b_dt * b_u)[:, None] * b_b
            b_y = tl.where(offs_s[:, None] == step, tl.sum(b_h * b_c, 1)[None, :], b_y)
        mask_y = (start + offs_s < stop)[:, None] & mask_c[None, :]
        if HAS_D:
            b_ut = tl.load(u_base + offs_s[:, None] * stride_u_t + offs_c[None, :], mask=mask_y,
                other=0.0).to(tl.float32)
            b_y += b_d[None, :] * b_ut
        if HAS_Z:
            z_base = z_ptr + batch * stride_z_b + start * stride_z_t
            b_z = tl.load(z_base + offs_s[:, None] * stride_z_t + offs_c[None, :], mask=mask_y,
                other=0.0).to(tl.float32)
            b_y = b_y * b_z / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
        y_base = y_ptr + (batch * seq + start) * n_channel
        tl.store(y_base + offs_s[:, None] * n_channel + offs_c[None, :], b_y.to(y_ptr.dtype.element_ty),
            mask=mask_y)
    if SAVE_LAST:
        tl.store(last_ptr + batch * size + state, b_h, mask=mask)
