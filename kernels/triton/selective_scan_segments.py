"""Segments of the selective scan: the state that each adds by itself, the gradient that it sends back, and
their carry from segment to segment.

A program is one warp, holds the states of a few channels in registers and walks through one segment of the
sequence. The decay over a segment is exp2(A sum dt): what a segment adds and that sum are all that its
successor needs.

States are GROUPS tiles [BLOCK_C, WIDTH]; a thread holds 4 states of each tile, and all states of its channels
where WIDTH is 4, so that sums over d_state take no shuffle. B and C come as float32 rows [B C] padded to
GROUPS * WIDTH states and to whole blocks of STEPS steps. Blocks have no masks in time; the last steps of a
sequence are done one by one.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _inside(offs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where an index is below a size; no comparison where blocks fill it."""
    if SIZE % BLOCK == 0:
        return offs >= 0
    return offs < SIZE


@triton.jit
@typing.no_type_check
def _load_states(
    ptr, offs_c, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """Tiles of a [channel, d_state] array."""
    tiles = ()
    for g in tl.static_range(GROUPS):
        offs_n = g * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = (offs_c < N_CHANNEL) & (offs_n < D_STATE)
        tiles = tiles + (tl.load(ptr + offs_c * D_STATE + offs_n, mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
@typing.no_type_check
def _store_states(
    ptr, tiles, offs_c, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Tiles into a [channel, d_state] array."""
    for g in tl.static_range(GROUPS):
        offs_n = g * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = (offs_c < N_CHANNEL) & (offs_n < D_STATE)
        tl.store(ptr + offs_c * D_STATE + offs_n, tiles[g], mask=mask)


@triton.jit
@typing.no_type_check
def _rates(
    a_ptr, offs_c, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """A = -exp(A_log) for base-2 exponentials."""
    logs = _load_states(a_ptr, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    rates = ()
    for g in tl.static_range(GROUPS):
        rates = rates + (tl.exp2(logs[g] * 1.4426950408889634) * -1.4426950408889634,)
    return rates


@triton.jit
@typing.no_type_check
def _zeros(GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, WIDTH: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(GROUPS):
        tiles = tiles + (tl.zeros([BLOCK_C, WIDTH], tl.float32),)
    return tiles


@triton.jit
@typing.no_type_check
def _load_steps(ptr, offs_c, mask_c, STRIDE_T: tl.constexpr, STEPS: tl.constexpr):
    """The channels of a program at the steps of a block."""
    found = ()
    for step in tl.static_range(STEPS):
        found = found + (tl.load(ptr + step * STRIDE_T + offs_c, mask=mask_c, other=0.0),)
    return found


@triton.jit
@typing.no_type_check
def _gated(b_y, b_z):
    """y SiLU(z)."""
    b_z = b_z.to(tl.float32)
    return b_y * b_z / (1.0 + tl.exp2(-1.4426950408889634 * b_z))


@triton.jit
@typing.no_type_check
def _load_row(ptr, GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, WIDTH: tl.constexpr):
    """B or C of one step, for each channel, as the layout of the states wants it."""
    tiles = ()
    for g in tl.static_range(GROUPS):
        offs_n = tl.broadcast_to(g * WIDTH + tl.arange(0, WIDTH)[None, :], [BLOCK_C, WIDTH])
        tiles = tiles + (tl.load(ptr + offs_n),)
    return tiles


@triton.jit
@typing.no_type_check
def _advance(h, rates, b_dt, b_w, bs, GROUPS: tl.constexpr):
    """States after one step; b_w = u dt."""
    new_h = ()
    for g in tl.static_range(GROUPS):
        new_h = new_h + (tl.exp2(b_dt * rates[g]) * h[g] + b_w * bs[g],)
    return new_h


@triton.jit
@typing.no_type_check
def _scan_fwd_state_kernel(
    u_ptr, dt_ptr, a_ptr, bc_ptr, h_ptr, total_ptr, stride_u_b, stride_dt_b, seq, n_segment, segment,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """State that one segment adds by itself, and its sum of dt."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    mask_c = _inside(offs_c, N_CHANNEL, BLOCK_C)
    ROW: tl.constexpr = 2 * GROUPS * WIDTH
    rates = _rates(a_ptr, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    h = _zeros(GROUPS, BLOCK_C, WIDTH)
    b_total = tl.zeros([BLOCK_C, 1], tl.float32)
    first = batch * 0 + part * segment
    length = tl.minimum(seq - part * segment, segment)
    n_block = length // STEPS
    u_ptr += batch * stride_u_b + first * STRIDE_U_T
    dt_ptr += batch * stride_dt_b + first * STRIDE_DT_T
    bc_ptr += (batch * (tl.cdiv(seq, STEPS) * STEPS) + first) * ROW
    # Rows of B are loaded one step ahead, other inputs one block.
    bs = _load_row(bc_ptr, GROUPS, BLOCK_C, WIDTH)
    if n_block > 0:
        us = _load_steps(u_ptr, offs_c, mask_c, STRIDE_U_T, STEPS)
        dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
        for block in tl.range(n_block):
            ahead = tl.where(block + 1 < n_block, STEPS, 0)
            u_ptr += ahead * STRIDE_U_T
            dt_ptr += ahead * STRIDE_DT_T
            next_us = _load_steps(u_ptr, offs_c, mask_c, STRIDE_U_T, STEPS)
            next_dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
            # Keeps the loads here; the compiler would move them down to where they are used.
            tl.debug_barrier()
            for step in tl.static_range(STEPS):
                next_bs = _load_row(bc_ptr + (step + 1) * ROW, GROUPS, BLOCK_C, WIDTH)
                b_dt = dts[step].to(tl.float32)
                h = _advance(h, rates, b_dt, b_dt * us[step].to(tl.float32), bs, GROUPS)
                b_total += b_dt
                bs = next_bs
            us, dts = next_us, next_dts
            bc_ptr += STEPS * ROW
        u_ptr += STEPS * STRIDE_U_T
        dt_ptr += STEPS * STRIDE_DT_T
    for _ in tl.range(length - n_block * STEPS):
        b_dt = tl.load(dt_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_u = tl.load(u_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        h = _advance(h, rates, b_dt, b_dt * b_u, bs, GROUPS)
        b_total += b_dt
        u_ptr += STRIDE_U_T
        dt_ptr += STRIDE_DT_T
        bc_ptr += ROW
        bs = _load_row(bc_ptr, GROUPS, BLOCK_C, WIDTH)
    place = (batch * n_segment + part) * N_CHANNEL
    _store_states(h_ptr + place * D_STATE, h, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    tl.store(total_ptr + place + offs_c, b_total, mask=offs_c < N_CHANNEL)


@triton.jit
@typing.no_type_check
def _send_back(e, rates, b_dt, b_dy, cs, GROUPS: tl.constexpr):
    """Gradient of the states before one step, from that of the states after it."""
    new_e = ()
    for g in tl.static_range(GROUPS):
        new_e = new_e + (tl.exp2(b_dt * rates[g]) * (e[g] + b_dy * cs[g]),)
    return new_e


@triton.jit
@typing.no_type_check
def _scan_bwd_state_kernel(
    dt_ptr, a_ptr, bc_ptr, z_ptr, dy_ptr, e_ptr, stride_dt_b, stride_z_b, stride_dy_b, seq, n_segment,
    segment,
    STRIDE_DT_T: tl.constexpr, STRIDE_Z_T: tl.constexpr, STRIDE_DY_T: tl.constexpr, N_CHANNEL: tl.constexpr,
    D_STATE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Gradient that one segment by itself sends to the state that enters it."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    mask_c = _inside(offs_c, N_CHANNEL, BLOCK_C)
    N: tl.constexpr = GROUPS * WIDTH
    rates = _rates(a_ptr, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)
    e = _zeros(GROUPS, BLOCK_C, WIDTH)
    length = tl.minimum(seq - part * segment, segment)
    n_block = length // STEPS
    # The step after the last one; pointers go back from there.
    stop = batch * 0 + part * segment + length
    dt_ptr += batch * stride_dt_b + stop * STRIDE_DT_T
    dy_ptr += batch * stride_dy_b + stop * STRIDE_DY_T
    if HAS_Z:
        z_ptr += batch * stride_z_b + stop * STRIDE_Z_T
    c_ptr = bc_ptr + (batch * (tl.cdiv(seq, STEPS) * STEPS) + stop - 1) * (2 * N) + N
    cs = _load_row(c_ptr, GROUPS, BLOCK_C, WIDTH)
    for _ in tl.range(length - n_block * STEPS):
        dt_ptr -= STRIDE_DT_T
        dy_ptr -= STRIDE_DY_T
        b_dt = tl.load(dt_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        b_dy = tl.load(dy_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        if HAS_Z:
            z_ptr -= STRIDE_Z_T
            b_dy = _gated(b_dy, tl.load(z_ptr + offs_c, mask=mask_c, other=0.0))
        e = _send_back(e, rates, b_dt, b_dy, cs, GROUPS)
        c_ptr -= 2 * N
        cs = _load_row(c_ptr, GROUPS, BLOCK_C, WIDTH)
    if n_block > 0:
        dt_ptr -= STEPS * STRIDE_DT_T
        dy_ptr -= STEPS * STRIDE_DY_T
        dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
        dys = _load_steps(dy_ptr, offs_c, mask_c, STRIDE_DY_T, STEPS)
        zs = dys
        if HAS_Z:
            z_ptr -= STEPS * STRIDE_Z_T
            zs = _load_steps(z_ptr, offs_c, mask_c, STRIDE_Z_T, STEPS)
        for block in tl.range(n_block):
            ahead = tl.where(block + 1 < n_block, STEPS, 0)
            dt_ptr -= ahead * STRIDE_DT_T
            dy_ptr -= ahead * STRIDE_DY_T
            next_dts = _load_steps(dt_ptr, offs_c, mask_c, STRIDE_DT_T, STEPS)
            next_dys = _load_steps(dy_ptr, offs_c, mask_c, STRIDE_DY_T, STEPS)
            next_zs = next_dys
            if HAS_Z:
                z_ptr -= ahead * STRIDE_Z_T
                next_zs = _load_steps(z_ptr, offs_c, mask_c, STRIDE_Z_T, STEPS)
            tl.debug_barrier()
            for step in tl.static_range(STEPS - 1, -1, -1):
                next_cs = _load_row(c_ptr - (STEPS - step) * (2 * N), GROUPS, BLOCK_C, WIDTH)
                b_dy = dys[step].to(tl.float32)
                if HAS_Z:
                    b_dy = _gated(b_dy, zs[step])
                e = _send_back(e, rates, dts[step].to(tl.float32), b_dy, cs, GROUPS)
                cs = next_cs
            c_ptr -= STEPS * 2 * N
            dts, dys, zs = next_dts, next_dys, next_zs
    e_ptr += (batch * n_segment + part) * N_CHANNEL * D_STATE
    _store_states(e_ptr, e, offs_c, N_CHANNEL, D_STATE, GROUPS, WIDTH)


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
