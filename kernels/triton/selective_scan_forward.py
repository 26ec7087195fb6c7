"""Forward kernels of the selective scan: states of segments, their carry, outputs.

A program holds the states of a few channels in registers and walks through one segment of the sequence step
by step. The decay over a segment is exp2(A sum dt): what a segment adds and that sum are all that its
successor needs.

States are tiles [N_LANES, C_LANES, N_REPEAT],
one for each of C_REPEAT groups of channels: a thread holds the
N_REPEAT x C_REPEAT states of its lane,
so that sums over d_state and over channels take few shuffles. Outputs
of the N_LANES steps of a block are put together in a tile [N_LANES, C_LANES, 1], one row for each step.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _states(N_LANES: tl.constexpr, N_REPEAT: tl.constexpr):
    """State indices of a tile."""
    return tl.arange(0, N_LANES)[:, None, None] * N_REPEAT + tl.arange(0, N_REPEAT)[None, None, :]


@triton.jit
@typing.no_type_check
def _kept(N_LANES: tl.constexpr, C_LANES: tl.constexpr, N_REPEAT: tl.constexpr):
    """Places of a tile among the kept states."""
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    offs_l = tl.arange(0, N_LANES)[:, None, None]
    return (offs_l * C_LANES + offs_c) * N_REPEAT + tl.arange(0, N_REPEAT)[None, None, :]


@triton.jit
@typing.no_type_check
def _inside(offs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where an index is below a size; no comparison where blocks fill it."""
    if SIZE % BLOCK == 0:
        return offs >= 0
    return offs < SIZE


@triton.jit
@typing.no_type_check
def _zeros(C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr, C_LANES: tl.constexpr, N_LANES: tl.constexpr):
    """C_REPEAT tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(C_REPEAT):
        tiles = tiles + (tl.zeros([N_LANES, C_LANES, N_REPEAT], tl.float32),)
    return tiles


@triton.jit
@typing.no_type_check
def _rates(a_ptr, channel, offs_c, offs_n, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr,
    C_REPEAT: tl.constexpr, C_LANES: tl.constexpr):  # fmt: skip
    """A = -exp(A_log) for base-2 exponentials, one tile for each group of channels."""
    rates = ()
    for r in tl.static_range(C_REPEAT):
        c = channel + r * C_LANES + offs_c
        mask = _inside(c, N_CHANNEL, C_REPEAT * C_LANES) & (offs_n < D_STATE)
        b_a = tl.load(a_ptr + c * D_STATE + offs_n, mask=mask, other=0.0).to(tl.float32)
        rates = rates + (tl.exp2(b_a * 1.4426950408889634) * -1.4426950408889634,)
    return rates


@triton.jit
@typing.no_type_check
def _load_states(ptr, channel, offs_c, offs_n, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr,
    C_REPEAT: tl.constexpr, C_LANES: tl.constexpr):  # fmt: skip
    """Tiles of a [channel, d_state] array."""
    tiles = ()
    for r in tl.static_range(C_REPEAT):
        c = channel + r * C_LANES + offs_c
        mask = _inside(c, N_CHANNEL, C_REPEAT * C_LANES) & (offs_n < D_STATE)
        tiles = tiles + (tl.load(ptr + c * D_STATE + offs_n, mask=mask, other=0.0),)
    return tiles


@triton.jit
@typing.no_type_check
def _store_states(ptr, tiles, channel, offs_c, offs_n, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr,
    C_REPEAT: tl.constexpr, C_LANES: tl.constexpr):  # fmt: skip
    """Tiles into a [channel, d_state] array."""
    for r in tl.static_range(C_REPEAT):
        c = channel + r * C_LANES + offs_c
        mask = _inside(c, N_CHANNEL, C_REPEAT * C_LANES) & (offs_n < D_STATE)
        tl.store(ptr + c * D_STATE + offs_n, tiles[r], mask=mask)


@triton.jit
@typing.no_type_check
def _load_shared(ptr, start, first, stop, offs_n, mask_n, STRIDE_T: tl.constexpr, N_LANES: tl.constexpr):
    """B or C at the steps of a block."""
    found = ()
    ptr += start * STRIDE_T
    for step in tl.static_range(N_LANES):
        inside = (start + step < stop) & (start + step >= first)
        found = found + (tl.load(ptr + step * STRIDE_T + offs_n, mask=mask_n & inside, other=0.0),)
    return found


@triton.jit
@typing.no_type_check
def _load_steps(ptr, c, start, first, stop, mask_c, STRIDE_T: tl.constexpr, N_LANES: tl.constexpr):
    """One group of channels at the steps of a block."""
    found = ()
    ptr += start * STRIDE_T
    for step in tl.static_range(N_LANES):
        inside = (start + step < stop) & (start + step >= first)
        found = found + (tl.load(ptr + step * STRIDE_T + c, mask=mask_c & inside, other=0.0),)
    return found


@triton.jit
@typing.no_type_check
def _load_groups(ptr, channel, offs_c, start, first, stop, N_CHANNEL: tl.constexpr, STRIDE_T: tl.constexpr,
    C_REPEAT: tl.constexpr, C_LANES: tl.constexpr, N_LANES: tl.constexpr):  # fmt: skip
    """All groups of channels at the steps of a block, group after group."""
    found = ()
    for r in tl.static_range(C_REPEAT):
        c = channel + r * C_LANES + offs_c
        mask_c = _inside(c, N_CHANNEL, C_REPEAT * C_LANES)
        found = found + _load_steps(ptr, c, start, first, stop, mask_c, STRIDE_T, N_LANES)
    return found


@triton.jit
@typing.no_type_check
def _scan_fwd_state_kernel(
    u_ptr, dt_ptr, a_ptr, b_ptr, h_ptr, total_ptr, stride_u_b, stride_dt_b,
    stride_b_b, seq, n_segment, segment,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, STRIDE_B_T: tl.constexpr, N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr, C_LANES: tl.constexpr,
    N_LANES: tl.constexpr,
):  # fmt: skip
    """State that one segment adds by itself, and its sum of dt."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * (C_REPEAT * C_LANES)
    offs_n = _states(N_LANES, N_REPEAT)
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    rates = _rates(a_ptr, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    h = _zeros(C_REPEAT, N_REPEAT, C_LANES, N_LANES)
    totals = ()
    for _ in tl.static_range(C_REPEAT):
        totals = totals + (tl.zeros([1, C_LANES, 1], tl.float32),)
    mask_n = _inside(offs_n, D_STATE, N_LANES * N_REPEAT)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    u_ptr += batch * stride_u_b
    dt_ptr += batch * stride_dt_b
    b_ptr += batch * stride_b_b
    us = _load_groups(u_ptr, channel, offs_c, first, first, stop, N_CHANNEL, STRIDE_U_T, C_REPEAT, C_LANES,
        N_LANES)
    dts = _load_groups(dt_ptr, channel, offs_c, first, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT, C_LANES,
        N_LANES)
    bs = _load_shared(b_ptr, first, first, stop, offs_n, mask_n, STRIDE_B_T, N_LANES)
    for block in tl.range(tl.cdiv(stop - first, N_LANES)):
        # Inputs are loaded one block ahead.
        ahead = first + (block + 1) * N_LANES
        next_us = _load_groups(u_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_U_T, C_REPEAT,
            C_LANES, N_LANES)
        next_dts = _load_groups(dt_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT,
            C_LANES, N_LANES)
        next_bs = _load_shared(b_ptr, ahead, first, stop, offs_n, mask_n, STRIDE_B_T, N_LANES)
        for step in tl.static_range(N_LANES):
            b_b = bs[step].to(tl.float32)
            new_h, new_totals = (), ()
            for r in tl.static_range(C_REPEAT):
                b_u = us[r * N_LANES + step].to(tl.float32)
                b_dt = dts[r * N_LANES + step].to(tl.float32)
                new_h = new_h + (tl.exp2(b_dt * rates[r]) * h[r] + (b_dt * b_u) * b_b,)
                new_totals = new_totals + (totals[r] + b_dt,)
            h, totals = new_h, new_totals
        us, dts, bs = next_us, next_dts, next_bs
    place = (batch * n_segment + part) * N_CHANNEL
    _store_states(h_ptr + place * D_STATE, h, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT,
    C_LANES)
    for r in tl.static_range(C_REPEAT):
        c = channel + r * C_LANES + offs_c
        tl.store(total_ptr + place + c, totals[r], mask=c < N_CHANNEL)


@triton.jit
@typing.no_type_check
def _scan_carry_kernel(
    h_ptr, total_ptr, a_ptr, first_ptr, last_ptr, size, n_channel, n_segment,
    D_STATE: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state that enters it; write the state that leaves the last
    one."""
    batch = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    b_a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_rate = tl.exp2(b_a * 1.4426950408889634) * -1.4426950408889634
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
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, h_ptr, y_ptr, kept_ptr, last_ptr,
    stride_u_b, stride_dt_b, stride_b_b, stride_c_b,
    stride_z_b, seq, n_segment, segment, n_kept,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, STRIDE_B_T: tl.constexpr,
    STRIDE_C_T: tl.constexpr, STRIDE_Z_T: tl.constexpr, N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr, C_LANES: tl.constexpr,
    N_LANES: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_FIRST: tl.constexpr,
    KEEP: tl.constexpr, SAVE_LAST: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment; before every block of steps the state is kept for the backward."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * (C_REPEAT * C_LANES)
    offs_s = tl.arange(0, N_LANES)[:, None, None]
    offs_n = _states(N_LANES, N_REPEAT)
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    TILE: tl.constexpr = N_REPEAT * C_LANES * N_LANES
    offs_tile = _kept(N_LANES, C_LANES, N_REPEAT)
    rates = _rates(a_ptr, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    h = _zeros(C_REPEAT, N_REPEAT, C_LANES, N_LANES)
    if HAS_FIRST:
        place = (batch * n_segment + part) * N_CHANNEL * D_STATE
        h = _load_states(h_ptr + place, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
    mask_n = _inside(offs_n, D_STATE, N_LANES * N_REPEAT)
    first = batch * 0 + part * segment
    stop = tl.minimum(first + segment, seq)
    u_ptr += batch * stride_u_b
    dt_ptr += batch * stride_dt_b
    b_ptr += batch * stride_b_b
    c_ptr += batch * stride_c_b
    us = _load_groups(u_ptr, channel, offs_c, first, first, stop, N_CHANNEL, STRIDE_U_T, C_REPEAT, C_LANES,
        N_LANES)
    dts = _load_groups(dt_ptr, channel, offs_c, first, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT, C_LANES,
        N_LANES)
    bs = _load_shared(b_ptr, first, first, stop, offs_n, mask_n, STRIDE_B_T, N_LANES)
    cs = _load_shared(c_ptr, first, first, stop, offs_n, mask_n, STRIDE_C_T, N_LANES)
    for block in tl.range(tl.cdiv(stop - first, N_LANES)):
        start = first + block * N_LANES
        # Inputs are loaded one block ahead.
        ahead = start + N_LANES
        next_us = _load_groups(u_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_U_T, C_REPEAT,
            C_LANES, N_LANES)
        next_dts = _load_groups(dt_ptr, channel, offs_c, ahead, first, stop, N_CHANNEL, STRIDE_DT_T, C_REPEAT,
            C_LANES, N_LANES)
        next_bs = _load_shared(b_ptr, ahead, first, stop, offs_n, mask_n, STRIDE_B_T, N_LANES)
        next_cs = _load_shared(c_ptr, ahead, first, stop, offs_n, mask_n, STRIDE_C_T, N_LANES)
        if HAS_Z:
            zs = _load_groups(z_ptr + batch * stride_z_b, channel, offs_c, start, first, stop, N_CHANNEL,
                STRIDE_Z_T, C_REPEAT, C_LANES, N_LANES)
        if KEEP:
            row = (batch * n_kept + start // N_LANES) * tl.num_programs(0) + tl.program_id(0)
            for r in tl.static_range(C_REPEAT):
                tile_ptrs = kept_ptr + (row * C_REPEAT + r) * TILE + offs_tile
                tl.store(tile_ptrs, h[r].to(kept_ptr.dtype.element_ty))
        new_h = ()
        for r in tl.static_range(C_REPEAT):
            c = channel + r * C_LANES + offs_c
            mask_c = _inside(c, N_CHANNEL, C_REPEAT * C_LANES)
            b_h = h[r]
            b_ys = tl.zeros([N_LANES, C_LANES, 1], tl.float32)
            b_zs = b_ys
            b_d = tl.zeros([1, C_LANES, 1], tl.float32)
            if HAS_D:
                b_d = tl.load(d_ptr + c, mask=mask_c, other=0.0).to(tl.float32)
            for step in tl.static_range(N_LANES):
                b_u = us[r * N_LANES + step].to(tl.float32)
                b_dt = dts[r * N_LANES + step].to(tl.float32)
                b_h = tl.exp2(b_dt * rates[r]) * b_h + (b_dt * b_u) * bs[step].to(tl.float32)
                b_y = tl.sum(b_h * cs[step].to(tl.float32), 2, keep_dims=True)
                b_y = tl.sum(b_y, 0, keep_dims=True) + b_d * b_u
                b_ys = tl.where(offs_s == step, b_y, b_ys)
                if HAS_Z:
                    b_zs = tl.where(offs_s == step, zs[r * N_LANES + step].to(tl.float32), b_zs)
            if HAS_Z:
                b_ys = b_ys * b_zs / (1.0 + tl.exp2(-1.4426950408889634 * b_zs))
            y_ptrs = y_ptr + (batch * seq + start + offs_s) * N_CHANNEL + c
            tl.store(y_ptrs, b_ys.to(y_ptr.dtype.element_ty), mask=mask_c & (start + offs_s < stop))
            new_h = new_h + (b_h,)
        h = new_h
        us, dts, bs, cs = next_us, next_dts, next_bs, next_cs
    if SAVE_LAST:
        last_ptr += batch * N_CHANNEL * D_STATE
        _store_states(last_ptr, h, channel, offs_c, offs_n, N_CHANNEL, D_STATE, C_REPEAT, C_LANES)
