"""Backward kernels of linear attention: gradients of queries, keys and values, their sums over the heads of a
group, gradients of log decays."""

import typing

import triton
import triton.language as tl

from kernels.triton.linear_attention_kernels import SIZES
from kernels.triton.linear_attention_key_value import _key_value
from kernels.triton.linear_attention_rows import _is_hard, _row_sum


@triton.jit(do_not_specialize=(*SIZES, "block_stride"))
@typing.no_type_check
def _linear_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, w_ptr, inverse_ptr, high_ptr, low_ptr, d_ptr, delta_ptr, s_ptr, z_ptr,
    ds_ptr, dz_ptr, ds_last_ptr, dz_last_ptr, dq_ptr, dk_ptr, dv_ptr, dot_ptr, dd_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h, stride_do_b, stride_do_t, stride_do_h, stride_w_b, stride_w_t, stride_w_h, n_head, seq,
    n_segment, segment, block_stride, stride_dv_b, stride_dv_t, stride_s, stride_z, stride_ds, stride_dz,
    scale, gain_first,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, COLUMNS_K: tl.constexpr,
    COLUMNS_V: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr, NORMALISE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, SAVE_LAST: tl.constexpr,
    LOAD_DELTA: tl.constexpr, TOGETHER: tl.constexpr, MILD: tl.constexpr, K_LIKE_Q: tl.constexpr,
    V_LIKE_Q: tl.constexpr, FLAT_Q: tl.constexpr, FLAT_V: tl.constexpr, FLAT_DO: tl.constexpr,
    FLAT_DV: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one segment of one head: a program for each block of columns of dq, dk and dv, or one for
    dq and one for dk and dv. They stand side by side, so that what they read comes from memory once."""
    N_K: tl.constexpr = (D_K + COLUMNS_K - 1) // COLUMNS_K
    N_V: tl.constexpr = (D_V + COLUMNS_V - 1) // COLUMNS_V
    N_KIND: tl.constexpr = 2 if TOGETHER else 2 * N_K + N_V
    # Tensors whose rows are at the same places share one set of offsets.
    if FLAT_Q:
        stride_q_t = n_head * D_K
    if FLAT_V:
        stride_v_t = n_head * D_V
    if FLAT_DO:
        stride_do_t = n_head * D_V
    if FLAT_DV:
        stride_dv_t = n_head * D_V
    if K_LIKE_Q:
        stride_k_t = stride_q_t
    if V_LIKE_Q:
        stride_v_t = stride_q_t
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    kind = pid % N_KIND
    part = pid // N_KIND % n_segment
    lane = (pid // N_KIND // n_segment).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    place = lane * n_segment + part
    row_first = batch * seq * n_head + head
    dv_row_ptr = dv_ptr + batch * stride_dv_b + head * D_V
    q_ptr += batch * stride_q_b + head // GROUP_Q * stride_q_h
    k_ptr += batch * stride_k_b + head // GROUP_K * stride_k_h
    v_ptr += batch * stride_v_b + head * stride_v_h
    do_ptr += batch * stride_do_b + head * stride_do_h
    if HAS_W:
        w_ptr += batch * stride_w_b + head * stride_w_h
    if HAS_G:
        high_ptr += lane * seq
        low_ptr += lane * seq
    if HAS_FIRST:
        s_ptr += place * stride_s
        if NORMALISE:
            z_ptr += place * stride_z
    if HAS_LAST:
        ds_ptr += place * stride_ds
        if NORMALISE:
            dz_ptr += place * stride_dz
    if SAVE_LAST:
        ds_last_ptr += lane * (D_K * D_V)
        if NORMALISE:
            dz_last_ptr += lane * D_K
    skip = 0.0
    if HAS_D:
        skip = tl.load(d_ptr + head).to(tl.float32)
        dd_ptr += place
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    if NORMALISE:
        inverse_ptr += row_first
    HAS_DOT: tl.constexpr = HAS_G or HAS_W
    # Row products of queries, of keys and of keys without their weights, one behind the other.
    q_dot_ptr, k_dot_ptr, dw_ptr = dot_ptr, dot_ptr, dot_ptr
    if HAS_DOT:
        q_dot_ptr += lane * 0 + kind % N_K * block_stride
        k_dot_ptr += lane * 0 + (N_K + kind % N_K) * block_stride
        dw_ptr += lane * 0 + (2 * N_K + kind % N_K) * block_stride
    column = kind % N_K * COLUMNS_K
    column_v = (kind - 2 * N_K) * COLUMNS_V
    is_dk = kind < 2 * N_K
    is_dv = kind >= 2 * N_K
    if TOGETHER:
        column_v = 0
        is_dv = is_dk
    hard = 0
    if HAS_G:
        hard = _is_hard(high_ptr, first, stop, MILD, BLOCK_T)
    for HARD in tl.static_range(2 if HAS_G else 1):
        if hard == HARD:
            if kind < N_K:
                _row_sum(
                    do_ptr, v_ptr, k_ptr, q_ptr, o_ptr, w_ptr, inverse_ptr, high_ptr, low_ptr, delta_ptr,
                    s_ptr, z_ptr, None, None, dq_ptr, None, q_dot_ptr, None, None, stride_do_t, stride_v_t,
                    stride_k_t, stride_q_t, stride_w_t, n_head, 0, 1, D_V, row_first, n_head, first, stop,
                    column, skip, scale, 1.0, 1.0, 0.0, D_V, D_K, BLOCK_T, BLOCK_V, COLUMNS_K, "dq", HAS_G,
                    HAS_W, NORMALISE, NORMALISE, False, HAS_G, HAS_FIRST, False, LOAD_DELTA, HARD, EXACT,
                    PRECISION,
                )
            elif TOGETHER and not HARD:
                _key_value(
                    q_ptr, k_ptr, v_ptr, do_ptr, high_ptr, low_ptr, ds_ptr, ds_last_ptr, dk_ptr, dv_ptr,
                    k_dot_ptr, stride_q_t, stride_k_t, stride_v_t, stride_do_t, row_first, n_head, first,
                    stop, scale, gain_first, scale, D_K, D_V, BLOCK_T, BLOCK_K, BLOCK_V, HAS_LAST, SAVE_LAST,
                    EXACT, PRECISION,
                )
            else:
                if is_dk:
                    _row_sum(
                        v_ptr, do_ptr, q_ptr, k_ptr, o_ptr, inverse_ptr, w_ptr, high_ptr, low_ptr, delta_ptr,
                        ds_ptr, dz_ptr, None, dz_last_ptr, dk_ptr, None, k_dot_ptr, dw_ptr, dd_ptr,
                        stride_v_t, stride_do_t, stride_q_t, stride_k_t, n_head, stride_w_t, 0, 1, D_V,
                        row_first, n_head, first, stop, column, skip, scale, gain_first, scale, 0.0, D_V, D_K,
                        BLOCK_T, BLOCK_V, COLUMNS_K, "dk", HAS_G, NORMALISE, HAS_W, NORMALISE, HAS_D, HAS_DOT,
                        HAS_LAST, SAVE_LAST, LOAD_DELTA, HARD, EXACT, PRECISION,
                    )
                if is_dv:
                    _row_sum(
                        k_ptr, q_ptr, do_ptr, None, None, inverse_ptr, w_ptr, high_ptr, low_ptr, None, ds_ptr,
                        None, ds_last_ptr, None, dv_row_ptr, None, None, None, None, stride_k_t, stride_q_t,
                        stride_do_t, 0, n_head, stride_w_t, stride_dv_t, D_V, 1, row_first, n_head, first,
                        stop, column_v, skip, scale, gain_first, scale, 0.0, D_K, D_V, BLOCK_T, BLOCK_K,
                        COLUMNS_V, "dv", HAS_G, NORMALISE, HAS_W, False, HAS_D, False, HAS_LAST, SAVE_LAST,
                        False, HARD, EXACT, PRECISION,
                    )


@triton.jit
@typing.no_type_check
def _linear_group_sum_kernel(
    q_part_ptr, k_part_ptr, dq_ptr, dk_ptr, stride_dq_row, stride_dk_row, size, width, n_head,
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
        place = row // (n_head // GROUP_Q) * stride_dq_row + row % (n_head // GROUP_Q) * width + column
        tl.store(dq_ptr + place, b_sum.to(dq_ptr.dtype.element_ty), mask=mask)
    else:
        mask = offs < size // GROUP_K
        for member in tl.static_range(GROUP_K):
            b_sum += tl.load(k_part_ptr + (row * GROUP_K + member) * width + column, mask=mask, other=0.0)
        place = row // (n_head // GROUP_K) * stride_dk_row + row % (n_head // GROUP_K) * width + column
        tl.store(dk_ptr + place, b_sum.to(dk_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*SIZES, "block_stride"))
@typing.no_type_check
def _linear_decay_gradient_kernel(
    dot_ptr, s_ptr, s_last_ptr, ds_ptr, z_ptr, z_last_ptr, dz_ptr, dg_ptr,
    n_head, seq, n_segment, segment, n_block, block_stride, stride_s, stride_ds, stride_z, stride_dz, gain,
    SIZE: tl.constexpr, Z_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_Z: tl.constexpr, HAS_Z: tl.constexpr, HAS_LATER: tl.constexpr,
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
        b_gap = tl.zeros([BLOCK_T], tl.float32)
        for block in tl.range(n_block):
            q_dot_ptrs = dot_ptr + lane * 0 + block * block_stride + row
            b_gap += tl.load(q_dot_ptrs, mask=mask_t, other=0.0)
            b_gap -= tl.load(q_dot_ptrs + n_block * block_stride, mask=mask_t, other=0.0)
        tl.store(dg_ptr + row, later + tl.cumsum(b_gap, 0, reverse=True), mask=mask_t)
        later += tl.sum(b_gap, 0)
