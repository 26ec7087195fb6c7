"""Outputs of the selective scan's segments; tiles are those of `selective_scan_segments`."""

import typing

import triton
import triton.language as tl

from kernels.triton.selective_scan_segments import (
    _advance,
    _gated,
    _inside,
    _load_row,
    _load_states,
    _load_steps,
    _rates,
    _store_states,
    _zeros,
)


@triton.jit
@typing.no_type_check
def _read(h, cs, GROUPS: tl.constexpr):
    """<C, h> of one step, [BLOCK_C, 1]."""
    b_y = h[0] * cs[0]
    for g in tl.static_range(1, GROUPS):
        b_y += h[g] * cs[g]
    return tl.sum(b_y, 1, keep_dims=True)


@triton.jit
@typing.no_type_check
def _keep(ptr, h, offs_c, mask, N_CHANNEL: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Store states as [d_state / 4, channel, 4]."""
    for g in tl.static_range(GROUPS):
        offs_n = g * WIDTH + tl.arange(0, WIDTH)[None, :]
        places = offs_n // 4 * (N_CHANNEL * 4) + offs_c * 4 + offs_n % 4
        tl.store(ptr + places, h[g].to(ptr.dtype.element_ty), mask=mask & (offs_n >= 0))


@triton.jit
@typing.no_type_check
def _scan_fwd_output_kernel(
    u_ptr, dt_ptr, a_ptr, bc_ptr, d_ptr, z_ptr, h_ptr, y_ptr, kept_ptr, last_ptr, stride_u_b, stride_dt_b,
    stride_z_b, seq, n_segment, segment,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, STRIDE_Z_T: tl.constexpr, N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_FIRST: tl.constexpr,
    KEEP: tl.constexpr, SAVE_LAST: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment; before every block of steps the state is kept for the backward."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    mask_c = _inside(offs_c, N_CHANNEL, BLOCK_C)
    N: tl.constexpr = GROUPS * WIDTH
    rates = _rates(a_ptr, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    h = _zeros(GROUPS, BLOCK_C, WIDTH)
    if HAS_FIRST:
        place = (batch * n_segment + part) * N_CHANNEL * D_STATE
        h = _load_states(h_ptr + place, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    b_d = tl.zeros([BLOCK_C, 1], tl.float32)
    if HAS_D:
        b_d = tl.load(d_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    first = batch * 0 + part * segment
    length = tl.minimum(seq - part * segment, segment)
    n_block = length // STEPS
    u_ptr += batch * stride_u_b + first * STRIDE_U_T
    dt_ptr += batch * stride_dt_b + first * STRIDE_DT_T
    if HAS_Z:
        z_ptr += batch * stride_z_b + first * STRIDE_Z_T
    y_ptr += (batch * seq + first) * N_CHANNEL
    bc_ptr += (batch * (tl.cdiv(seq, STEPS) * STEPS) + first) * (2 * N)
    kept_ptr += (batch * tl.cdiv(seq, STEPS) + first // STEPS) * (N_CHANNEL * N)
    # Rows of B and C are loaded one step ahead, other inputs one block.
    bs = _load_row(bc_ptr, GROUPS, BLOCK_C, WIDTH)
    cs = _load_row(bc_ptr + N, GROUPS, BLOCK_C, WIDTH)
    if n_block > 0:
        us = _load_steps(u_ptr, offs_c, mask_c, STRIDE_U_T, STEPS)
        dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
        zs = dts
        if HAS_Z:
            zs = _load_steps(z_ptr, offs_c, mask_c, STRIDE_Z_T, STEPS)
        for block in tl.range(n_block):
            ahead = tl.where(block + 1 < n_block, STEPS, 0)
            u_ptr += ahead * STRIDE_U_T
            dt_ptr += ahead * STRIDE_DT_T
            next_us = _load_steps(u_ptr, offs_c, mask_c, STRIDE_U_T, STEPS)
            next_dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
            next_zs = next_dts
            if HAS_Z:
                z_ptr += ahead * STRIDE_Z_T
                next_zs = _load_steps(z_ptr, offs_c, mask_c, STRIDE_Z_T, STEPS)
            if KEEP:
                _keep(kept_ptr, h, offs_c, mask_c, N_CHANNEL, GROUPS, WIDTH)
                kept_ptr += N_CHANNEL * N
            for step in tl.static_range(STEPS):
                next_bs = _load_row(bc_ptr + (step + 1) * (2 * N), GROUPS, BLOCK_C, WIDTH)
                next_cs = _load_row(bc_ptr + (step + 1) * (2 * N) + N, GROUPS, BLOCK_C, WIDTH)
                b_dt, b_u = dts[step].to(tl.float32), us[step].to(tl.float32)
                h = _advance(h, rates, b_dt, b_dt * b_u, bs, GROUPS)
                b_y = _read(h, cs, GROUPS) + b_d * b_u
                bs, cs = next_bs, next_cs
                if HAS_Z:
                    b_y = _gated(b_y, zs[step])
                tl.store(y_ptr + step * N_CHANNEL + offs_c, b_y.to(y_ptr.dtype.element_ty), mask=mask_c)
            us, dts, zs = next_us, next_dts, next_zs
            bc_ptr += STEPS * 2 * N
            y_ptr += STEPS * N_CHANNEL
        u_ptr += STEPS * STRIDE_U_T
        dt_ptr += STEPS * STRIDE_DT_T
        if HAS_Z:
            z_ptr += STEPS * STRIDE_Z_T
    rest = length - n_block * STEPS
    if KEEP:
        _keep(kept_ptr, h, offs_c, mask_c & (rest > 0), N_CHANNEL, GROUPS, WIDTH)
    for _ in tl.range(rest):
        b_dt = tl.load(dt_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        h = _advance(h, rates, b_dt, b_dt * b_u, bs, GROUPS)
        b_y = _read(h, cs, GROUPS) + b_d * b_u
        if HAS_Z:
            b_y = _gated(b_y, tl.load(z_ptr + offs_c, mask=mask_c, other=0.0))
            z_ptr += STRIDE_Z_T
        tl.store(y_ptr + offs_c, b_y.to(y_ptr.dtype.element_ty), mask=mask_c)
        u_ptr += STRIDE_U_T
        dt_ptr += STRIDE_DT_T
        y_ptr += N_CHANNEL
        bc_ptr += 2 * N
        bs = _load_row(bc_ptr, GROUPS, BLOCK_C, WIDTH)
        cs = _load_row(bc_ptr + N, GROUPS, BLOCK_C, WIDTH)
    if SAVE_LAST:
        _store_states(last_ptr + batch * N_CHANNEL * D_STATE, h, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
