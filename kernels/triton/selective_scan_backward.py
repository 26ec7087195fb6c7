"""Backward kernels of the selective scan: gradients that segments send back, then all gradients.

g_t = C_t dy_t + a_{t+1} g_{t+1} is the gradient of h_t, with a_t = exp2(A dt_t). Then
dC_t = sum_c dy_t h_t, dB_t = sum_c g_t dt_t u_t, du_t = dt_t <g_t, B_t> + D dy_t,
ddt_t = u_t <g_t, B_t> + <a_t g_t h_{t-1}, A>, dA = sum_t dt_t a_t g_t h_{t-1}; dy is taken before the gate.
States are computed again from those kept every STEPS steps; sums over channels are per block, added up
afterwards.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _gate(b_dy, z_ptrs, mask):
    """dy before the gate."""
    b_z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    return b_dy * b_z / (1.0 + tl.exp2(-1.4426950408889634 * b_z))


@triton.jit
@typing.no_type_check
def _scan_bwd_state_kernel(
    dt_ptr, rate_ptr, c_ptr, z_ptr, dy_ptr, e_ptr, stride_dt_b, stride_dt_t, stride_c_b, stride_c_t,
    stride_z_b,
    stride_z_t, stride_dy_b, stride_dy_t, n_channel, seq, n_segment, segment,
    D_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Gradient that one segment by itself sends to the state that enters it."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = tl.arange(0, BLOCK_N)
    mask_c = offs_c < n_channel
    mask_n = offs_n[None, :] < D_STATE
    mask = mask_c[:, None] & mask_n
    b_rate = tl.load(rate_ptr + offs_c[:, None] * D_STATE + offs_n[None, :], mask=mask, other=0.0)
    b_e = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    first = batch * 0 + part * segment
    n_step = tl.minimum(segment, seq - part * segment)
    last = first + n_step - 1
    dt_ptr += batch * stride_dt_b + last * stride_dt_t
    c_ptr += batch * stride_c_b + last * stride_c_t
    dy_ptr += batch * stride_dy_b + last * stride_dy_t
    if HAS_Z:
        z_ptr += batch * stride_z_b + last * stride_z_t
    for _ in tl.range(n_step):
        b_dt = tl.load(dt_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_c = tl.load(c_ptr + offs_n[None, :], mask=mask_n, other=0.0).to(tl.float32)
        b_dy = tl.load(dy_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        if HAS_Z:
            b_dy = _gate(b_dy, z_ptr + offs_c, mask_c)
        b_e = tl.exp2(b_dt[:, None] * b_rate) * (b_e + b_dy[:, None] * b_c)
        dt_ptr -= stride_dt_t
        c_ptr -= stride_c_t
        dy_ptr -= stride_dy_t
        if HAS_Z:
            z_ptr -= stride_z_t
    place = (batch * n_segment + part) * n_channel * D_STATE
    tl.store(e_ptr + place + offs_c[:, None] * D_STATE + offs_n[None, :], b_e, mask=mask)


@triton.jit
@typing.no_type_check
def _scan_bwd_kernel(
    u_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, d_ptr, z_ptr, dy_ptr, kept_ptr, e_ptr,
    du_ptr, ddt_ptr, drate_ptr, db_ptr, dc_ptr, dd_ptr, dz_ptr, first_ptr,
    stride_u_b, stride_u_t, stride_dt_b, stride_dt_t, stride_b_b, stride_b_t, stride_c_b, stride_c_t,
    stride_z_b,
    stride_z_t, stride_dy_b, stride_dy_t, n_channel, seq, n_segment, segment, n_kept,
    D_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_LAST: tl.constexpr, SAVE_FIRST: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment, blocks of STEPS steps from the last to the first."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = tl.arange(0, BLOCK_N)
    mask_c = offs_c < n_channel
    mask_n = offs_n[None, :] < D_STATE
    mask = mask_c[:, None] & mask_n
    state = offs_c[:, None] * D_STATE + offs_n[None, :]
    size = n_channel * D_STATE
    place = batch * n_segment + part
    b_rate = tl.load(rate_ptr + state, mask=mask, other=0.0)
    b_e = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    if HAS_LAST:
        b_e = tl.load(e_ptr + place * size + state, mask=mask, other=0.0)
    b_drate = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    b_dd = tl.zeros([BLOCK_C], tl.float32)
    b_d = tl.zeros([BLOCK_C], tl.float32)
    if HAS_D:
        b_d = tl.load(d_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    n_block = tl.cdiv(stop - first, STEPS)
    # Sums over channels: one row of partial results for each block of channels.
    partial = (tl.program_id(0) * tl.num_programs(2) + batch) * seq
    for count in tl.range(n_block):
        start = first + (n_block - 1 - count) * STEPS
        u_base = u_ptr + batch * stride_u_b + start * stride_u_t + offs_c
        dt_base = dt_ptr + batch * stride_dt_b + start * stride_dt_t + offs_c
        b_base = b_ptr + batch * stride_b_b + start * stride_b_t + offs_n[None, :]
        c_base = c_ptr + batch * stride_c_b + start * stride_c_t + offs_n[None, :]
        dy_base = dy_ptr + batch * stride_dy_b + start * stride_dy_t + offs_c
        if HAS_Z:
            z_base = z_ptr + batch * stride_z_b + start * stride_z_t + offs_c
        out_base = (batch * seq + start) * n_channel + offs_c
        b_h = tl.load(kept_ptr + (batch * n_kept + start // STEPS) * size + state, mask=mask, other=0.0)
        b_h = b_h.to(tl.float32)
        states = (b_h,)
        for step in tl.static_range(STEPS):
            inside = start + step < stop
            b_u = tl.load(u_base + step * stride_u_t, mask=mask_c & inside, other=0.0).to(tl.float32)
            b_dt = tl.load(dt_base + step * stride_dt_t, mask=mask_c & inside, other=0.0).to(tl.float32)
            b_b = tl.load(b_base + step * stride_b_t, mask=mask_n & inside, other=0.0).to(tl.float32)
            b_h = tl.exp2(b_dt[:, None] * b_rate) * b_h + (b_dt * b_u)[:, None] * b_b
            states = states + (b_h,)
        for step in tl.static_range(STEPS - 1, -1, -1):
            inside = start + step < stop
            mask_t = mask_c & inside
            b_u = tl.load(u_base + step * stride_u_t, mask=mask_t, other=0.0).to(tl.float32)
            b_dt = tl.load(dt_base + step * stride_dt_t, mask=mask_t, other=0.0).to(tl.float32)
            b_b = tl.load(b_base + step * stride_b_t, mask=mask_n & inside, other=0.0).to(tl.float32)
            b_c = tl.load(c_base + step * stride_c_t, mask=mask_n & inside, other=0.0).to(tl.float32)
            b_dy = tl.load(dy_base + step * stride_dy_t, mask=mask_t, other=0.0).to(tl.float32)
            if HAS_Z:
                b_z = tl.load(z_base + step * stride_z_t, mask=mask_t, other=0.0).to(tl.float32)
                b_sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
                b_y = tl.sum(states[step + 1] * b_c, 1) + b_d * b_u
                b_dz = b_dy * b_y * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
                tl.store(dz_ptr + out_base + step * n_channel, b_dz.to(dz_ptr.dtype.element_ty), mask=mask_t)
                b_dy = b_dy * b_z * b_sigmoid
            b_g = b_e + b_dy[:, None] * b_c
            b_dc = tl.sum(b_dy[:, None] * states[step + 1], 0)
            b_db = tl.sum(b_g * (b_dt * b_u)[:, None], 0)
            b_gb = tl.sum(b_g * b_b, 1)
            b_e = tl.exp2(b_dt[:, None] * b_rate) * b_g
            b_x = b_e * states[step]
            b_drate += b_dt[:, None] * b_x
            b_ddt = b_u * b_gb + tl.sum(b_x * b_rate, 1) * 0.6931471805599453
            b_du = b_dt * b_gb + b_d * b_dy
            b_dd += b_dy * b_u
            tl.store(du_ptr + out_base + step * n_channel, b_du.to(du_ptr.dtype.element_ty), mask=mask_t)
            tl.store(ddt_ptr + out_base + step * n_channel, b_ddt.to(ddt_ptr.dtype.element_ty), mask=mask_t)
            row = (partial + start + step) * D_STATE + offs_n
            tl.store(db_ptr + row, b_db, mask=(offs_n < D_STATE) & inside)
            tl.store(dc_ptr + row, b_dc, mask=(offs_n < D_STATE) & inside)
    tl.store(drate_ptr + place * size + state, b_drate, mask=mask)
    if HAS_D:
        tl.store(dd_ptr + place * n_channel + offs_c, b_dd, mask=mask_c)
    if SAVE_FIRST:
        tl.store(first_ptr + batch * size + state, b_e, mask=mask)
