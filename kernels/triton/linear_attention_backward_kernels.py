"""Backward kernels of linear attention: keys and values at once, sums over heads of a group, log decays."""

import typing

import triton
import triton.language as tl

from kernels.triton.linear_attention_kernels import _chunk_decay


@triton.jit
@typing.no_type_check
def _linear_key_value_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, w_ptr, u_ptr, high_ptr, low_ptr, d_ptr, delta_ptr, s_ptr, z_ptr,
    s_last_ptr, z_last_ptr, dk_ptr, dv_ptr, dot_ptr, dd_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h, stride_do_b, stride_do_t, stride_do_h, stride_w_b, stride_w_t, stride_w_h,
    stride_u_b, stride_u_t, stride_u_h, n_head, seq, n_segment, segment, stride_s, stride_z,
    scale, gain_first, gain_last,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_G: tl.constexpr,
    HAS_W: tl.constexpr, HAS_U: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr,
    HAS_DOT: tl.constexpr, HAS_FIRST: tl.constexpr, SAVE_LAST: tl.constexpr,
):  # fmt: skip
    """The calls dv and dk at once, for widths that fit: queries, keys, values and output gradients are read
    once. The state is kept twice, as it is and transposed: no dot is fed a transposed dot result."""
    pid = tl.program_id(0)
    part = pid % n_segment
    lane = (pid // n_segment).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    q_ptr += batch * stride_q_b + head // GROUP_Q * stride_q_h
    k_ptr += batch * stride_k_b + head // GROUP_K * stride_k_h
    v_ptr += batch * stride_v_b + head * stride_v_h
    do_ptr += batch * stride_do_b + head * stride_do_h
    place = lane * n_segment + part
    b_s = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    b_r = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    b_z = tl.zeros([BLOCK_K], tl.float32)
    mask_s = (offs_k < D_K)[:, None] & (offs_v < D_V)[None, :]
    mask_r = (offs_v < D_V)[:, None] & (offs_k < D_K)[None, :]
    if HAS_FIRST:
        s_ptr += place * stride_s
        b_s = tl.load(s_ptr + offs_k[:, None] * D_V + offs_v[None, :], mask=mask_s, other=0.0) * gain_first
        b_r = tl.load(s_ptr + offs_k[None, :] * D_V + offs_v[:, None], mask=mask_r, other=0.0) * gain_first
        if NORMALISE:
            b_z = tl.load(z_ptr + place * stride_z + offs_k, mask=offs_k < D_K, other=0.0) * gain_first
    skip = 0.0
    if HAS_D:
        skip = tl.load(d_ptr + head).to(tl.float32)
    b_dd = tl.zeros([BLOCK_T], tl.float32)
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for chunk in tl.range(n_chunk):
        start = lane * 0 + first + (n_chunk - 1 - chunk) * BLOCK_T
        mask_t = start + offs_t < stop
        mask_k = mask_t[:, None] & (offs_k[None, :] < D_K)
        mask_v = mask_t[:, None] & (offs_v[None, :] < D_V)
        row = (batch * seq + start + offs_t) * n_head + head
        b_k = tl.load(k_ptr + start * stride_k_t + offs_t[:, None] * stride_k_t + offs_k[None, :],
            mask=mask_k, other=0.0)
        b_q = tl.load(q_ptr + start * stride_q_t + offs_t[:, None] * stride_q_t + offs_k[None, :],
            mask=mask_k, other=0.0)
        b_v = tl.load(v_ptr + start * stride_v_t + offs_t[:, None] * stride_v_t + offs_v[None, :],
            mask=mask_v, other=0.0)
        b_do = tl.load(do_ptr + start * stride_do_t + offs_t[:, None] * stride_do_t + offs_v[None, :],
            mask=mask_v, other=0.0)
        b_f = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_U:
            u_ptrs = u_ptr + batch * stride_u_b + head * stride_u_h + (start + offs_t) * stride_u_t
            b_f = b_f * tl.load(u_ptrs, mask=mask_t, other=0.0).to(tl.float32)
        seen = offs_t[:, None] <= offs_t[None, :]
        b_update = b_f
        b_dv = tl.dot(b_k, b_s.to(b_k.dtype))
        b_dk = tl.dot(b_v, b_r.to(b_v.dtype))
        if NORMALISE:
            b_dk += b_z[None, :]
        if HAS_G:
            b_high, b_low, b_rest, total = _chunk_decay(
                high_ptr + lane * seq, low_ptr + lane * seq, start, stop, offs_t, BLOCK_T, False
            )
            b_gap = tl.minimum(b_high[None, :] - b_high[:, None], 0.0)
            b_decay = tl.exp2(tl.where(seen, b_gap, float("-inf")))
            b_out = tl.exp2(b_rest)[:, None]
            b_dv = b_dv * b_out
            b_dk = b_dk * b_out
            b_update = b_f * tl.exp2(b_high)
            keep = tl.exp2(total)
            b_s, b_r, b_z = b_s * keep, b_r * keep, b_z * keep
        else:
            b_decay = tl.where(seen, 1.0, 0.0)
        if HAS_U:
            b_decay = b_decay * b_f[None, :]
        b_p = tl.dot(b_k, tl.trans(b_q)) * b_decay
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv) * scale
        b_p = tl.dot(b_v, tl.trans(b_do))
        if NORMALISE:
            b_delta = tl.load(delta_ptr + row, mask=mask_t, other=0.0)
            b_p -= b_delta[None, :]
        b_dk = tl.dot((b_p * b_decay).to(b_q.dtype), b_q, b_dk) * scale
        b_out = b_do
        if HAS_G or HAS_U:
            b_out = (b_do.to(tl.float32) * b_update[:, None]).to(b_do.dtype)
        b_s = tl.dot(tl.trans(b_q), b_out, b_s)
        b_r = tl.dot(tl.trans(b_out), b_q, b_r)
        if NORMALISE:
            b_z -= tl.sum(b_q.to(tl.float32) * (b_update * b_delta)[:, None], 0)
        if HAS_DOT:
            tl.store(dot_ptr + row, tl.sum(b_k.to(tl.float32) * b_dk, 1), mask=mask_t)
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + head * stride_w_h + (start + offs_t) * stride_w_t
            b_w = tl.load(w_ptrs, mask=mask_t, other=0.0).to(tl.float32)
            b_dv = b_dv * b_w[:, None]
            b_dk = b_dk * b_w[:, None]
        if HAS_D:
            b_dd += tl.sum(b_v.to(tl.float32) * b_do.to(tl.float32), 1)
            b_dv += skip * b_do.to(tl.float32)
        tl.store(dv_ptr + row[:, None] * D_V + offs_v[None, :], b_dv.to(dv_ptr.dtype.element_ty), mask=mask_v)
        tl.store(dk_ptr + row[:, None] * D_K + offs_k[None, :], b_dk.to(dk_ptr.dtype.element_ty), mask=mask_k)
    if SAVE_LAST:
        s_ptrs = s_last_ptr + lane * (D_K * D_V) + offs_k[:, None] * D_V + offs_v[None, :]
        tl.store(s_ptrs, b_s * gain_last, mask=mask_s)
        if NORMALISE:
            tl.store(z_last_ptr + lane * D_K + offs_k, b_z * gain_last, mask=offs_k < D_K)
    if HAS_D:
        tl.store(dd_ptr + place, tl.sum(b_dd, 0))


@triton.jit
@typing.no_type_check
def _linear_group_sum_kernel(
    q_part_ptr, k_part_ptr, dq_ptr, dk_ptr, size, width,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of queries (program axis 1 is 0) and keys that several heads share: sums over heads."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = offs // width
    column = offs % width
    b_sum = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(1) == 0:
        mask = offs < size // GROUP_Q
        for member in tl.static_range(GROUP_Q):
            b_sum += tl.load(q_part_ptr + (row * GROUP_Q + member) * width + column, mask=mask, other=0.0)
        tl.store(dq_ptr + offs, b_sum.to(dq_ptr.dtype.element_ty), mask=mask)
    else:
        mask = offs < size // GROUP_K
        for member in tl.static_range(GROUP_K):
            b_sum += tl.load(k_part_ptr + (row * GROUP_K + member) * width + column, mask=mask, other=0.0)
        tl.store(dk_ptr + offs, b_sum.to(dk_ptr.dtype.element_ty), mask=mask)


@triton.jit
@typing.no_type_check
def _linear_decay_gradient_kernel(
    q_dot_ptr, k_dot_ptr, w_ptr, u_ptr, s_ptr, s_last_ptr, ds_ptr, z_ptr, z_last_ptr, dz_ptr, dg_ptr,
    stride_w_b, stride_w_t, stride_w_h, n_head, seq, n_segment, segment, n_q_block, n_k_block, block_stride,
    stride_s, stride_ds, stride_z, stride_dz, gain,
    SIZE: tl.constexpr, Z_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    HAS_W: tl.constexpr, HAS_U: tl.constexpr, HAS_Z: tl.constexpr, HAS_LATER: tl.constexpr,
):  # fmt: skip
    """dlog_decay_r = sum_{i>=r} (<q_i, dq_i> - <k_i, dk_i>) inside a segment, plus <S, dS> (and <z, dz>) at
    its end."""
    pid = tl.program_id(0)
    part = pid % n_segment
    lane = (pid // n_segment).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    place = lane * n_segment + part
    offs = tl.arange(0, BLOCK)
    later = 0.0
    if HAS_LATER:
        is_last = part == n_segment - 1
        s_ptr = s_last_ptr + lane * SIZE if is_last else s_ptr + (place + 1) * stride_s
        b_later = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, SIZE, BLOCK):
            mask = start + offs < SIZE
            b_s = tl.load(s_ptr + start + offs, mask=mask, other=0.0)
            b_later += b_s * tl.load(ds_ptr + place * stride_ds + start + offs, mask=mask, other=0.0)
        later = tl.sum(b_later, 0) * gain
        if HAS_Z:
            offs_z = tl.arange(0, BLOCK_Z)
            z_ptr = z_last_ptr + lane * Z_SIZE if is_last else z_ptr + (place + 1) * stride_z
            b_z = tl.load(z_ptr + offs_z, mask=offs_z < Z_SIZE, other=0.0)
            b_dz = tl.load(dz_ptr + place * stride_dz + offs_z, mask=offs_z < Z_SIZE, other=0.0)
            later += tl.sum(b_z * b_dz, 0) * gain
    offs_t = tl.arange(0, BLOCK_T)
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for count in tl.range(n_chunk):
        start = first + (n_chunk - 1 - count) * BLOCK_T
        mask_t = start + offs_t < stop
        row = (batch * seq + start + offs_t) * n_head + head
        b_q = tl.zeros([BLOCK_T], tl.float32)
        b_k = tl.zeros([BLOCK_T], tl.float32)
        for block in tl.range(n_q_block):
            b_q += tl.load(q_dot_ptr + lane * 0 + block * block_stride + row, mask=mask_t, other=0.0)
        for block in tl.range(n_k_block):
            b_k += tl.load(k_dot_ptr + lane * 0 + block * block_stride + row, mask=mask_t, other=0.0)
        if HAS_U:
            b_q = b_q * tl.load(u_ptr + row, mask=mask_t, other=0.0)
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + head * stride_w_h + (start + offs_t) * stride_w_t
            b_k = b_k * tl.load(w_ptrs, mask=mask_t, other=0.0).to(tl.float32)
        b_gap = b_q - b_k
        tl.store(dg_ptr + row, later + tl.cumsum(b_gap, 0, reverse=True), mask=mask_t)
        later += tl.sum(b_gap, 0)
