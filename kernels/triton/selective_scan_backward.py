"""Backward kernels of the selective scan: gradients that segments send back, all gradients, their sums.

g_t = C_t dy_t + a_{t+1} g_{t+1} is the gradient of h_t, with a_t = exp2(A dt_t). Then
dC_t = sum_c dy_t h_t, dB_t = sum_c g_t dt_t u_t, du_t = dt_t <g_t, B_t> + D dy_t,
ddt_t = u_t <g_t, B_t> + <a_t g_t h_{t-1}, A>, dA = sum_t dt_t a_t g_t h_{t-1}; dy is taken before the gate.
States are computed again from those kept every N_LANES steps; sums over channels are per block of channels,
added up afterwards in a fixed order. Tiles are those of `selective_scan_forward`.
"""

import typing

import triton
import triton.language as tl

from kernels.triton.selective_scan_forward import (
    _inside,
    _kept,
    _load_groups,
    _load_shared,
    _load_states,
    _load_steps,
    _rates,
    _states,
    _store_states,
    _zeros,
)


@triton.jit
@typing.no_type_check
def _scan_bwd_state_kernel(
    dt_ptr, a_ptr, c_ptr, z_ptr, dy_ptr, e_ptr, stride_dt_b, stride_c_b,
    stride_z_b, stride_dy_b, seq, n_segment, segment,
    STRIDE_DT_T: tl.constexpr, STRIDE_C_T: tl.constexpr, STRIDE_Z_T: tl.constexpr,
    STRIDE_DY_T: tl.constexpr, N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr, C_LANES: tl.constexpr,
    N_LANES: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Gradient that one segment by itself sends to the state that enters it."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * (C_REPEAT * C_LANES)
    offs_n = _states(N_LANES, N_REPEAT)
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    rates = _rates(a_ptr, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    e = _zeros(C_REPEAT, N_REPEAT, C_LANES, N_LANES)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    n_block = tl.cdiv(stop - first, N_LANES)
    dt_ptr += batch * stride_dt_b
    c_ptr += batch * stride_c_b
    dy_ptr += batch * stride_dy_b
    mask_n = _inside(offs_n, D_STATE, N_LANES * N_REPEAT)
    start = first + (n_block - 1) * N_LANES
    dts = _load_groups(dt_ptr, channel, offs_c, start, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT, C_LANES,
        N_LANES)
    dys = _load_groups(dy_ptr, channel, offs_c, start, first, stop, N_CHANNEL, STRIDE_DY_T, C_REPEAT, C_LANES,
        N_LANES)
    zs = dys
    if HAS_Z:
        z_ptr += batch * stride_z_b
        zs = _load_groups(z_ptr, channel, offs_c, start, first, stop, N_CHANNEL, STRIDE_Z_T, C_REPEAT,
            C_LANES, N_LANES)
    cs = _load_shared(c_ptr, start, first, stop, offs_n, mask_n, STRIDE_C_T, N_LANES)
    for count in tl.range(n_block):
        # Inputs are loaded one block ahead.
        ahead = first + (n_block - 2 - count) * N_LANES
        next_dts = _load_groups(dt_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT,
            C_LANES, N_LANES)
        next_dys = _load_groups(dy_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_DY_T, C_REPEAT,
            C_LANES, N_LANES)
        next_zs = next_dys
        if HAS_Z:
            next_zs = _load_groups(z_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_Z_T,
                C_REPEAT, C_LANES, N_LANES)
        next_cs = _load_shared(c_ptr, ahead, first, stop, offs_n, mask_n, STRIDE_C_T, N_LANES)
        for step in tl.static_range(N_LANES - 1, -1, -1):
            b_c = cs[step].to(tl.float32)
            new_e = ()
            for r in tl.static_range(C_REPEAT):
                b_dy = dys[r * N_LANES + step].to(tl.float32)
                if HAS_Z:
                    b_z = zs[r * N_LANES + step].to(tl.float32)
                    b_dy = b_dy * b_z / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
                b_a = tl.exp2(dts[r * N_LANES + step].to(tl.float32) * rates[r])
                new_e = new_e + (b_a * (e[r] + b_dy * b_c),)
            e = new_e
        dts, dys, zs, cs = next_dts, next_dys, next_zs, next_cs
    e_ptr += (batch * n_segment + part) * N_CHANNEL * D_STATE
    _store_states(e_ptr, e, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)


@triton.jit
@typing.no_type_check
def _wide(raw):
    """Numbers of the steps of a block in float32."""
    found = ()
    for step in tl.static_range(len(raw)):
        found = found + (raw[step].to(tl.float32),)
    return found


@triton.jit
@typing.no_type_check
def _store_steps(ptr, b_x, c, start, stop, offs_s, mask_c, N_CHANNEL: tl.constexpr):
    """A tile [N_LANES, C_LANES, 1] of one group of channels, its rows being steps."""
    ptr += start * N_CHANNEL
    b_x = b_x.to(ptr.dtype.element_ty)
    tl.store(ptr + offs_s * N_CHANNEL + c, b_x, mask=mask_c & (start + offs_s < stop))


@triton.jit
@typing.no_type_check
def _scan_bwd_kernel(
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, dy_ptr, kept_ptr, e_ptr,
    du_ptr, ddt_ptr, drate_ptr, db_ptr, dc_ptr, dd_ptr, dz_ptr, first_ptr,
    stride_u_b, stride_dt_b, stride_b_b, stride_c_b,
    stride_z_b, stride_dy_b, seq, n_segment, segment, n_kept,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, STRIDE_B_T: tl.constexpr,
    STRIDE_C_T: tl.constexpr, STRIDE_Z_T: tl.constexpr, STRIDE_DY_T: tl.constexpr,
    N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr, C_LANES: tl.constexpr,
    N_LANES: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_LAST: tl.constexpr,
    SAVE_FIRST: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment, blocks of N_LANES steps from the last to the first,
    one group of channels
    after the other."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * (C_REPEAT * C_LANES)
    offs_s = tl.arange(0, N_LANES)[:, None, None]
    offs_n = _states(N_LANES, N_REPEAT)
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    TILE: tl.constexpr = N_REPEAT * C_LANES * N_LANES
    offs_tile = _kept(N_LANES, C_LANES, N_REPEAT)
    place = batch * n_segment + part
    rates = _rates(a_ptr, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    e = _zeros(C_REPEAT, N_REPEAT, C_LANES, N_LANES)
    if HAS_LAST:
        e = _load_states(e_ptr + place * N_CHANNEL * D_STATE, channel, offs_c, offs_n, N_CHANNEL, D_STATE,
            C_REPEAT, C_LANES)
    drates = _zeros(C_REPEAT, N_REPEAT, C_LANES, N_LANES)
    dds = ()
    for _ in tl.static_range(C_REPEAT):
        dds = dds + (tl.zeros([1, C_LANES, 1], tl.float32),)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    n_block = tl.cdiv(stop - first, N_LANES)
    mask_n = _inside(offs_n, D_STATE, N_LANES * N_REPEAT)
    u_ptr += batch * stride_u_b
    dt_ptr += batch * stride_dt_b
    dy_ptr += batch * stride_dy_b
    if HAS_Z:
        z_ptr += batch * stride_z_b
        dz_ptr += batch * seq * N_CHANNEL
    du_ptr += batch * seq * N_CHANNEL
    ddt_ptr += batch * seq * N_CHANNEL
    # Sums over channels: one row of partial results for each block of channels.
    partial = (tl.program_id(0) * tl.num_programs(2) + batch) * seq
    b_ptr += batch * stride_b_b
    c_ptr += batch * stride_c_b
    row = (batch * n_kept + first // N_LANES + n_block - 1) * tl.num_programs(0) + tl.program_id(0)
    start = first + (n_block - 1) * N_LANES
    c = channel + offs_c
    mask_c = _inside(c, N_CHANNEL, C_REPEAT * C_LANES)
    next_h = tl.load(kept_ptr + row * (C_REPEAT * TILE) + offs_tile, mask=offs_tile >= 0, other=0.0)
    next_us = _load_steps(u_ptr, c, start, first, stop, mask_c, STRIDE_U_T, N_LANES)
    next_dts = _load_steps(dt_ptr, c, start, first, stop, mask_c, STRIDE_DT_T, N_LANES)
    next_dys = _load_steps(dy_ptr, c, start, first, stop, mask_c, STRIDE_DY_T, N_LANES)
    next_zs = next_dys
    if HAS_Z:
        next_zs = _load_steps(z_ptr, c, start, first, stop, mask_c, STRIDE_Z_T, N_LANES)
    for count in tl.range(n_block):
        start = first + (n_block - 1 - count) * N_LANES
        bs = _load_shared(b_ptr, start, first, stop, offs_n, mask_n, STRIDE_B_T, N_LANES)
        cs = _load_shared(c_ptr, start, first, stop, offs_n, mask_n, STRIDE_C_T, N_LANES)
        dbs = _zeros(N_LANES, N_REPEAT, C_LANES, N_LANES)
        dcs = _zeros(N_LANES, N_REPEAT, C_LANES, N_LANES)
        new_e, new_drates, new_dds = (), (), ()
        for r in tl.static_range(C_REPEAT):
            c = channel + r * C_LANES + offs_c
            mask_c = _inside(c, N_CHANNEL, C_REPEAT * C_LANES)
            b_h = next_h.to(tl.float32)
            us, dts, dys, zs = _wide(next_us), _wide(next_dts), _wide(next_dys), _wide(next_zs)
            # The next group, of this block or the one before it, is loaded while this one is computed.
            if r + 1 < C_REPEAT:
                ahead = start
                place_h = row * C_REPEAT + r + 1
                next_c = channel + (r + 1) * C_LANES + offs_c
            else:
                ahead = start - N_LANES
                place_h = (row - tl.num_programs(0)) * C_REPEAT
                next_c = channel + offs_c
            next_mask = _inside(next_c, N_CHANNEL, C_REPEAT * C_LANES)
            there = (offs_tile >= 0) & (ahead >= first)
            next_h = tl.load(kept_ptr + place_h * TILE + offs_tile, mask=there, other=0.0)
            next_us = _load_steps(u_ptr, next_c, ahead, first, stop, next_mask, STRIDE_U_T, N_LANES)
            next_dts = _load_steps(dt_ptr, next_c, ahead, first, stop, next_mask, STRIDE_DT_T, N_LANES)
            next_dys = _load_steps(dy_ptr, next_c, ahead, first, stop, next_mask, STRIDE_DY_T, N_LANES)
            next_zs = next_dys
            if HAS_Z:
                next_zs = _load_steps(z_ptr, next_c, ahead, first, stop, next_mask, STRIDE_Z_T, N_LANES)
            states, keeps = (b_h,), ()
            for step in tl.static_range(N_LANES):
                keeps = keeps + (tl.exp2(dts[step] * rates[r]),)
                b_h = keeps[step] * b_h + (dts[step] * us[step]) * bs[step].to(tl.float32)
                states = states + (b_h,)
            b_d = tl.zeros([1, C_LANES, 1], tl.float32)
            if HAS_D:
                b_d = tl.load(d_ptr + c, mask=mask_c, other=0.0).to(tl.float32)
            b_e, b_drate, b_dd = e[r], drates[r], dds[r]
            b_dus = tl.zeros([N_LANES, C_LANES, 1], tl.float32)
            b_ddts, b_dzs = b_dus, b_dus
            new_dbs, new_dcs = (), ()
            for step in tl.static_range(N_LANES - 1, -1, -1):
                b_dy, b_b, b_c = dys[step], bs[step].to(tl.float32), cs[step].to(tl.float32)
                if HAS_Z:
                    b_z = zs[step]
                    b_sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
                    b_y = tl.sum(tl.sum(states[step + 1] * b_c, 2, keep_dims=True), 0, keep_dims=True)
                    b_y += b_d * us[step]
                    b_dz = b_dy * b_y * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
                    b_dzs = tl.where(offs_s == step, b_dz, b_dzs)
                    b_dy = b_dy * b_z * b_sigmoid
                b_g = b_e + b_dy * b_c
                new_dcs = (dcs[step] + b_dy * states[step + 1],) + new_dcs
                new_dbs = (dbs[step] + b_g * (dts[step] * us[step]),) + new_dbs
                b_gb = tl.sum(tl.sum(b_g * b_b, 2, keep_dims=True), 0, keep_dims=True)
                b_e = keeps[step] * b_g
                b_x = b_e * states[step]
                b_drate += dts[step] * b_x
                b_xa = tl.sum(tl.sum(b_x * rates[r], 2, keep_dims=True), 0, keep_dims=True)
                b_ddts = tl.where(offs_s == step, us[step] * b_gb + b_xa * 0.6931471805599453, b_ddts)
                b_dus = tl.where(offs_s == step, dts[step] * b_gb + b_d * b_dy, b_dus)
                b_dd += b_dy * us[step]
            dbs, dcs = new_dbs, new_dcs
            _store_steps(du_ptr, b_dus, c, start, stop, offs_s, mask_c, N_CHANNEL)
            _store_steps(ddt_ptr, b_ddts, c, start, stop, offs_s, mask_c, N_CHANNEL)
            if HAS_Z:
                _store_steps(dz_ptr, b_dzs, c, start, stop, offs_s, mask_c, N_CHANNEL)
            new_e, new_drates, new_dds = new_e + (b_e,), new_drates + (b_drate,), new_dds + (b_dd,)
        e, drates, dds = new_e, new_drates, new_dds
        row -= tl.num_programs(0)
        for step in tl.static_range(N_LANES):
            out = (partial + start + step) * D_STATE + offs_n
            mask = mask_n & (start + step < stop)
            tl.store(db_ptr + out, tl.sum(dbs[step], 1, keep_dims=True), mask=mask)
            tl.store(dc_ptr + out, tl.sum(dcs[step], 1, keep_dims=True), mask=mask)
    drate_ptr += place * N_CHANNEL * D_STATE
    _store_states(drate_ptr, drates, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    if HAS_D:
        for r in tl.static_range(C_REPEAT):
            c = channel + r * C_LANES + offs_c
            tl.store(dd_ptr + place * N_CHANNEL + c, dds[r], mask=c < N_CHANNEL)
    if SAVE_FIRST:
        first_ptr += batch * N_CHANNEL * D_STATE
        _store_states(first_ptr, e, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)


@triton.jit
@typing.no_type_check
def _scan_bwd_shared_kernel(part_ptr, db_ptr, dc_ptr, size, n_part, BLOCK: tl.constexpr):
    """dB and dC: sums over the blocks of channels, first to last."""
    which = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    part_ptr += which * n_part * size
    b_sum = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(n_part):
        b_sum += tl.load(part_ptr + which * 0 + part * size + offs, mask=mask, other=0.0)
    if which == 0:
        tl.store(db_ptr + offs, b_sum.to(db_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(dc_ptr + offs, b_sum.to(dc_ptr.dtype.element_ty), mask=mask)


@triton.jit
@typing.no_type_check
def _scan_bwd_parameter_kernel(
    drate_ptr, dd_part_ptr, a_ptr, da_ptr, dd_ptr, size, n_channel, n_place,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """dA_log = -exp(A_log) dA and dD: sums over sequences and segments."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_p = tl.arange(0, ROWS)
    b_da = tl.zeros([BLOCK], tl.float32)
    b_dd = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n_place, ROWS):
        place = (start + offs_p).to(tl.int64)[:, None]
        mask = place < n_place
        b_da += tl.sum(tl.load(drate_ptr + place * size + offs[None, :], mask=mask & (offs < size)[None, :],
            other=0.0), 0)
        if HAS_D:
            b_dd += tl.sum(tl.load(dd_part_ptr + place * n_channel + offs[None, :],
                mask=mask & (offs < n_channel)[None, :], other=0.0), 0)
    b_a = tl.load(a_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
    b_da = b_da * -tl.exp2(b_a * 1.4426950408889634)
    tl.store(da_ptr + offs, b_da.to(da_ptr.dtype.element_ty), mask=offs < size)
    if HAS_D:
        tl.store(dd_ptr + offs, b_dd.to(dd_ptr.dtype.element_ty), mask=offs < n_channel)
