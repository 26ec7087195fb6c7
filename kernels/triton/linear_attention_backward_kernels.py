"""Backward kernels of linear attention: sums over the heads of a group, gradients of log decays."""

import typing

import triton
import triton.language as tl


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
