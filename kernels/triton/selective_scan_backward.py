"""All gradients of the selective scan but those that segments send back (`selective_scan_segments`).

g_t = C_t dy_t + a_{t+1} g_{t+1} is the gradient of h_t, with a_t = exp2(A dt_t). Then
dC_t = sum_c dy_t h_t, dB_t = sum_c g_t dt_t u_t, du_t = dt_t <g_t, B_t> + D dy_t,
ddt_t = u_t <g_t, B_t> + <a_t g_t h_{t-1}, A>, dA = sum_t dt_t a_t g_t h_{t-1}; dy is taken before the gate.
States are computed again from those kept every N_LANES steps; sums over channels are per block of channels,
added up afterwards in a fixed order.

Tiles of states are [N_LANES, C_LANES, N_REPEAT], one for each of C_REPEAT groups of channels: a thread adds
up N_REPEAT states and C_REPEAT channels before sums go over lanes. What has no states is a tile
[N_LANES, C_LANES, 1], one row for each step of a block, so that every lane has a step of its own.
"""

import typing

import triton
import triton.language as tl

from kernels.triton.selective_scan_segments import _inside


@triton.jit
@typing.no_type_check
def _groups(b_x, C_REPEAT: tl.constexpr):
    """A tile [4, C_REPEAT * C_LANES, n] as one tile for each group of channels, no number changing its lane.

    Loads of all groups at once: Triton's time to compile grows with the square of their number.
    """
    ROWS: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1] // C_REPEAT
    N: tl.constexpr = b_x.shape[2]
    if C_REPEAT == 1:
        found = (b_x,)
    else:
        b_x = tl.permute(tl.reshape(b_x, [ROWS, C_REPEAT, C, N]), (0, 2, 3, 1))
        if C_REPEAT == 2:
            found = tl.split(b_x)
        else:
            b_even, b_odd = tl.split(tl.reshape(b_x, [ROWS, C, N, 2, 2]))
            x0, x2 = tl.split(b_even)
            x1, x3 = tl.split(b_odd)
            found = (x0, x1, x2, x3)
    return found


@triton.jit
@typing.no_type_check
def _joined(tiles, C_REPEAT: tl.constexpr):
    """The tile that `_groups` took apart."""
    if C_REPEAT == 1:
        b_x = tiles[0]
    else:
        ROWS: tl.constexpr = tiles[0].shape[0]
        C: tl.constexpr = tiles[0].shape[1]
        N: tl.constexpr = tiles[0].shape[2]
        if C_REPEAT == 2:
            b_x = tl.join(tiles[0], tiles[1])
        else:
            b_x = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
            b_x = tl.reshape(b_x, [ROWS, C, N, 4])
        b_x = tl.reshape(tl.permute(b_x, (0, 3, 1, 2)), [ROWS, C_REPEAT * C, N])
    return b_x


@triton.jit
@typing.no_type_check
def _row(b_x, step: tl.constexpr, C_LANES: tl.constexpr):
    """One row of a tile [N_LANES, C_LANES, 1], for all lanes."""
    return tl.gather(b_x, tl.full([1, C_LANES, 1], step, tl.int32), 0)


@triton.jit
@typing.no_type_check
def _halve(b_x, b_y, upper, partner, AXIS: tl.constexpr):
    """Sums of pairs of lanes: of x in lanes that are not upper, of y in upper ones."""
    b_keep = tl.where(upper, b_y, b_x)
    b_send = tl.where(upper, b_x, b_y)
    return b_keep + tl.gather(b_send, tl.broadcast_to(partner, b_send.shape), AXIS)


@triton.jit
@typing.no_type_check
def _over_rows(tiles, offs_s):
    """Sums over the rows of the tiles of 4 steps [4, C_LANES, 1], each in the row of its step."""
    b_even = _halve(tiles[0], tiles[2], offs_s >= 2, offs_s ^ 2, 0)
    b_odd = _halve(tiles[1], tiles[3], offs_s >= 2, offs_s ^ 2, 0)
    return _halve(b_even, b_odd, offs_s % 2 == 1, offs_s ^ 1, 0)


@triton.jit
@typing.no_type_check
def _flat(b_x):
    """A tile of states [4, 8, n] as [8 * 4, n], lanes in their order."""
    return tl.reshape(tl.permute(b_x, (1, 0, 2)), [32, b_x.shape[2]])


@triton.jit
@typing.no_type_check
def _spread(b_rows, first: tl.constexpr, C_LANES: tl.constexpr):
    """Four lanes of rows of B and C, for all channels: [4, C_LANES, n]."""
    lane = tl.arange(0, 4 * C_LANES)[:, None] % 4 + first
    b_x = tl.gather(b_rows, tl.broadcast_to(lane, [4 * C_LANES, b_rows.shape[1]]), 0)
    return tl.permute(tl.reshape(b_x, [C_LANES, 4, b_rows.shape[1]]), (1, 0, 2))


@triton.jit
@typing.no_type_check
def _over_channels(dbs, dcs, lane):
    """Sums over 8 channels of the tiles of 4 steps, [8 * 4, n]: of dB in the first half and dC in the second,
    in each by step, then by the 4 rows of states."""
    x0 = _halve(_flat(dbs[0]), _flat(dcs[0]), lane >= 16, lane ^ 16, 0)
    x1 = _halve(_flat(dbs[1]), _flat(dcs[1]), lane >= 16, lane ^ 16, 0)
    x2 = _halve(_flat(dbs[2]), _flat(dcs[2]), lane >= 16, lane ^ 16, 0)
    x3 = _halve(_flat(dbs[3]), _flat(dcs[3]), lane >= 16, lane ^ 16, 0)
    b_even = _halve(x0, x2, lane % 16 >= 8, lane ^ 8, 0)
    b_odd = _halve(x1, x3, lane % 16 >= 8, lane ^ 8, 0)
    return _halve(b_even, b_odd, lane % 8 >= 4, lane ^ 4, 0)


@triton.jit
@typing.no_type_check
def _add_up(ptr, offs, b_x, mask, chunk):
    """Add what earlier chunks of states left, and leave the sum to the next one."""
    b_x += tl.load(ptr + offs, mask=mask & (chunk > 0), other=0.0)
    tl.store(ptr + offs, b_x, mask=mask)
    return b_x


@triton.jit
@typing.no_type_check
def _scan_bwd_kernel(
    u_ptr, dt_ptr, a_ptr, bc_ptr, d_ptr, z_ptr, dy_ptr, kept_ptr, e_ptr, du_ptr, ddt_ptr, drate_ptr, dbc_ptr,
    dd_ptr, dz_ptr, first_ptr, sum_ptr, stride_u_b, stride_dt_b, stride_z_b, stride_dy_b, seq, n_segment,
    segment,
    STRIDE_U_T: tl.constexpr, STRIDE_DT_T: tl.constexpr, STRIDE_Z_T: tl.constexpr, STRIDE_DY_T: tl.constexpr,
    N_CHANNEL: tl.constexpr, D_STATE: tl.constexpr, C_REPEAT: tl.constexpr, N_REPEAT: tl.constexpr,
    CHUNKS: tl.constexpr, C_LANES: tl.constexpr, N_LANES: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_LAST: tl.constexpr, SAVE_FIRST: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment, blocks of N_LANES steps from the last to the first, one group of channels
    after the other; CHUNKS passes where the states are more than a tile holds."""
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * (C_REPEAT * C_LANES)
    place = batch * n_segment + part
    offs_s = tl.arange(0, N_LANES)[:, None, None]
    offs_c = tl.arange(0, C_LANES)[None, :, None]
    # The same channels, without the compiler seeing that they are neighbours: it would give the lanes another
    # order than those of the states have.
    lone_c = tl.where(offs_c < C_LANES, offs_c, 0)
    wide_c = tl.arange(0, C_REPEAT * C_LANES)[None, :, None]
    lone_w = tl.where(wide_c < C_REPEAT * C_LANES, wide_c, 0)
    mask_c = _inside(channel + wide_c, N_CHANNEL, C_REPEAT * C_LANES)
    d = _groups(tl.zeros([1, C_REPEAT * C_LANES, 1], tl.float32), C_REPEAT)
    if HAS_D:
        d = _groups(tl.load(d_ptr + channel + lone_w, mask=mask_c, other=0.0).to(tl.float32), C_REPEAT)
    lane = tl.arange(0, 32)[:, None]
    TILE: tl.constexpr = N_LANES * N_REPEAT
    N: tl.constexpr = TILE * CHUNKS
    offs_sum = lane // 4 % 4 * (2 * N) + lane // 16 * N + lane % 4 * N_REPEAT
    offs_sum = offs_sum + tl.arange(0, N_REPEAT)[None, :]
    length = tl.minimum(seq - part * segment, segment)
    n_block = tl.cdiv(length, N_LANES)
    n_kept = tl.cdiv(seq, N_LANES)
    # The first step of the last block; pointers go back from there.
    start = batch * 0 + part * segment + (n_block - 1) * N_LANES
    left = length - (n_block - 1) * N_LANES
    row = (batch * seq + start) * N_CHANNEL + channel
    for chunk in tl.range(CHUNKS):
        offs_n = chunk * TILE + offs_s * N_REPEAT + tl.arange(0, N_REPEAT)[None, None, :]
        offs_tile = offs_n // 4 * (N_CHANNEL * 4) + wide_c * 4 + offs_n % 4
        offs_a = (channel + wide_c) * D_STATE + offs_n
        mask_a = mask_c & (offs_n < D_STATE)
        logs = _groups(tl.load(a_ptr + offs_a, mask=mask_a, other=0.0).to(tl.float32), C_REPEAT)
        rates, e, drates, dds = (), (), (), ()
        for r in tl.static_range(C_REPEAT):
            rates = rates + (tl.exp2(logs[r] * 1.4426950408889634) * -1.4426950408889634,)
            e = e + (tl.zeros([N_LANES, C_LANES, N_REPEAT], tl.float32),)
            drates = drates + (tl.zeros([N_LANES, C_LANES, N_REPEAT], tl.float32),)
            dds = dds + (tl.zeros([N_LANES, C_LANES, 1], tl.float32),)
        if HAS_LAST:
            e_ptrs = e_ptr + place * N_CHANNEL * D_STATE + offs_a
            e = _groups(tl.load(e_ptrs, mask=mask_a, other=0.0), C_REPEAT)
        u_at = u_ptr + batch * stride_u_b + start * STRIDE_U_T + channel
        dt_at = dt_ptr + batch * stride_dt_b + start * STRIDE_DT_T + channel
        dy_at = dy_ptr + batch * stride_dy_b + start * STRIDE_DY_T + channel
        out = row
        bc_at = bc_ptr + (batch * (n_kept * N_LANES) + start) * (2 * N) + chunk * TILE
        # Sums over channels: one row of partial results for each block of channels.
        dbc_at = (dbc_ptr + ((tl.program_id(0) * tl.num_programs(2) + batch) * (n_kept * N_LANES) + start)
            * (2 * N) + chunk * TILE)  # fmt: skip
        kept_at = kept_ptr + (batch * n_kept + start // N_LANES) * (N_CHANNEL * N) + channel * 4
        mask_t = offs_s < left
        if HAS_Z:
            z_at = z_ptr + batch * stride_z_b + start * STRIDE_Z_T + channel
        next_h = tl.load(kept_at + offs_tile, mask=mask_c & (offs_n >= 0), other=0.0)
        next_u = tl.load(u_at + (offs_s * STRIDE_U_T + lone_w), mask=mask_t & mask_c, other=0.0)
        next_dt = tl.load(dt_at + (offs_s * STRIDE_DT_T + lone_w), mask=mask_t & mask_c, other=0.0)
        next_dy = tl.load(dy_at + (offs_s * STRIDE_DY_T + lone_w), mask=mask_t & mask_c, other=0.0)
        next_z = next_dy
        if HAS_Z:
            next_z = tl.load(z_at + (offs_s * STRIDE_Z_T + lone_w), mask=mask_t & mask_c, other=0.0)
        next_mask_t = mask_t
        next_rows = tl.load(bc_at + offs_sum)
        for count in tl.range(n_block):
            bs, cs, dbs, dcs = (), (), (), ()
            b_rows = next_rows.to(tl.float32)
            bc_at -= tl.where(count + 1 < n_block, N_LANES * 2 * N, 0)
            next_rows = tl.load(bc_at + offs_sum)
            for step in tl.static_range(N_LANES):
                bs = bs + (_spread(b_rows, step * 4, C_LANES),)
                cs = cs + (_spread(b_rows, 16 + step * 4, C_LANES),)
                dbs = dbs + (tl.zeros([N_LANES, C_LANES, N_REPEAT], tl.float32),)
                dcs = dcs + (tl.zeros([N_LANES, C_LANES, N_REPEAT], tl.float32),)
            new_e, new_drates, new_dds, dus, ddts, dzs = (), (), (), (), (), ()
            hs, us, dts = _groups(next_h, C_REPEAT), _groups(next_u, C_REPEAT), _groups(next_dt, C_REPEAT)
            dys, zs = _groups(next_dy, C_REPEAT), _groups(next_z, C_REPEAT)
            for r in tl.static_range(C_REPEAT):
                b_h, b_u, b_dt = hs[r].to(tl.float32), us[r].to(tl.float32), dts[r].to(tl.float32)
                b_dy, b_z = dys[r].to(tl.float32), zs[r].to(tl.float32)
                if r == C_REPEAT - 1:
                    # The block before this one: sooner, its numbers would need registers of their own.
                    more = tl.where(count + 1 < n_block, N_LANES, 0)
                    u_at -= more * STRIDE_U_T
                    dt_at -= more * STRIDE_DT_T
                    dy_at -= more * STRIDE_DY_T
                    kept_at -= more // N_LANES * (N_CHANNEL * N)
                    next_mask_t = offs_s < tl.where(count + 1 < n_block, N_LANES, left)
                    next_mask = next_mask_t & mask_c
                    next_h = tl.load(kept_at + offs_tile, mask=mask_c & (offs_n >= 0), other=0.0)
                    next_u = tl.load(u_at + (offs_s * STRIDE_U_T + lone_w), mask=next_mask, other=0.0)
                    next_dt = tl.load(dt_at + (offs_s * STRIDE_DT_T + lone_w), mask=next_mask, other=0.0)
                    next_dy = tl.load(dy_at + (offs_s * STRIDE_DY_T + lone_w), mask=next_mask, other=0.0)
                    next_z = next_dy
                    if HAS_Z:
                        z_at -= more * STRIDE_Z_T
                        next_z = tl.load(z_at + (offs_s * STRIDE_Z_T + lone_w), mask=next_mask, other=0.0)
                b_w = b_dt * b_u
                b_slope = b_dy
                if HAS_Z:
                    b_sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * b_z))
                    b_slope = b_dy * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
                    b_dy = b_dy * b_z * b_sigmoid
                states, keeps, ws, steps = (b_h,), (), (), ()
                for step in tl.static_range(N_LANES):
                    steps = steps + (_row(b_dt, step, C_LANES),)
                    ws = ws + (_row(b_w, step, C_LANES),)
                    keeps = keeps + (tl.exp2(steps[step] * rates[r]),)
                    b_h = keeps[step] * b_h + ws[step] * bs[step]
                    states = states + (b_h,)
                b_e, b_drate = e[r], drates[r]
                new_dbs, new_dcs, gbs, xas, ys = (), (), (), (), ()
                for step in tl.static_range(N_LANES - 1, -1, -1):
                    b_dys = _row(b_dy, step, C_LANES)
                    b_g = b_e + b_dys * cs[step]
                    new_dcs = (dcs[step] + b_dys * states[step + 1],) + new_dcs
                    new_dbs = (dbs[step] + b_g * ws[step],) + new_dbs
                    b_e = keeps[step] * b_g
                    b_x = b_e * states[step]
                    b_drate += steps[step] * b_x
                    gbs = (tl.sum(b_g * bs[step], 2, keep_dims=True),) + gbs
                    xas = (tl.sum(b_x * rates[r], 2, keep_dims=True),) + xas
                    ys = (tl.sum(states[step + 1] * cs[step], 2, keep_dims=True),) + ys
                dbs, dcs = new_dbs, new_dcs
                b_gb, b_xa = _over_rows(gbs, offs_s), _over_rows(xas, offs_s)
                b_d = d[r]
                if HAS_Z:
                    b_y = _over_rows(ys, offs_s)
                if CHUNKS > 1:
                    own = out + r * C_LANES + (offs_s * N_CHANNEL + lone_c)
                    mask = mask_t & _inside(channel + r * C_LANES + offs_c, N_CHANNEL, C_REPEAT * C_LANES)
                    plane = tl.num_programs(2).to(tl.int64) * seq * N_CHANNEL
                    b_gb = _add_up(sum_ptr, own, b_gb, mask, chunk)
                    b_xa = _add_up(sum_ptr + plane, own, b_xa, mask, chunk)
                    if HAS_Z:
                        b_y = _add_up(sum_ptr + 2 * plane, own, b_y, mask, chunk)
                dus = dus + (b_dt * b_gb + b_d * b_dy,)
                ddts = ddts + (b_u * b_gb + b_xa * 0.6931471805599453,)
                if HAS_Z:
                    dzs = dzs + (b_slope * (b_y + b_d * b_u),)
                new_e, new_drates = new_e + (b_e,), new_drates + (b_drate,)
                new_dds = new_dds + (dds[r] + b_dy * b_u,)
            e, drates, dds = new_e, new_drates, new_dds
            at = out + (offs_s * N_CHANNEL + lone_w)
            mask = mask_t & mask_c
            tl.store(du_ptr + at, _joined(dus, C_REPEAT).to(du_ptr.dtype.element_ty), mask=mask)
            tl.store(ddt_ptr + at, _joined(ddts, C_REPEAT).to(ddt_ptr.dtype.element_ty), mask=mask)
            if HAS_Z:
                tl.store(dz_ptr + at, _joined(dzs, C_REPEAT).to(dz_ptr.dtype.element_ty), mask=mask)
            mask_t = next_mask_t
            tl.store(dbc_at + offs_sum, _over_channels(dbs, dcs, lane))
            dbc_at -= N_LANES * 2 * N
            out -= N_LANES * N_CHANNEL
        tl.store(drate_ptr + place * N_CHANNEL * D_STATE + offs_a, _joined(drates, C_REPEAT), mask=mask_a)
        if HAS_D:
            b_dd = tl.sum(_joined(dds, C_REPEAT), 0, keep_dims=True)
            tl.store(dd_ptr + place * N_CHANNEL + channel + lone_w, b_dd, mask=mask_c)
        if SAVE_FIRST:
            tl.store(first_ptr + batch * N_CHANNEL * D_STATE + offs_a, _joined(e, C_REPEAT), mask=mask_a)
