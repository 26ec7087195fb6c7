"""What surrounds the kernels of the selective scan: B and C side by side before, sums of gradients after."""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _scan_shared_kernel(
    b_ptr, c_ptr, out_ptr, stride_b_b, stride_b_t, stride_c_b, stride_c_t, seq, padded, D_STATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """B and C of every step side by side in float32, [batch padded 2 BLOCK_N]; padding is 0."""
    batch = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (t < seq) & (offs_n < D_STATE)
    wide = batch * 0 + t
    b_b = tl.load(b_ptr + batch * stride_b_b + wide * stride_b_t + offs_n, mask=mask, other=0.0)
    b_c = tl.load(c_ptr + batch * stride_c_b + wide * stride_c_t + offs_n, mask=mask, other=0.0)
    out_ptrs = out_ptr + (batch * padded + t) * (2 * BLOCK_N) + offs_n
    tl.store(out_ptrs, b_b.to(tl.float32), mask=t < padded)
    tl.store(out_ptrs + BLOCK_N, b_c.to(tl.float32), mask=t < padded)


@triton.jit
@typing.no_type_check
def _scan_bwd_shared_kernel(
    part_ptr, db_ptr, dc_ptr, seq, padded, size, n_part, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dB and dC: sums over the blocks of channels, first to last."""
    batch = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs_n = tl.arange(0, 2 * BLOCK_N)[None, :]
    part_ptr += batch * padded * (2 * BLOCK_N)
    offs = t * (2 * BLOCK_N) + offs_n
    b_sum = tl.zeros([BLOCK, 2 * BLOCK_N], tl.float32)
    for part in tl.range(n_part):
        b_sum += tl.load(part_ptr + (batch * 0 + part) * size + offs, mask=t < padded, other=0.0)
    place = (batch * seq + t) * D_STATE + offs_n % BLOCK_N
    mask = (t < seq) & (offs_n % BLOCK_N < D_STATE)
    tl.store(db_ptr + place, b_sum.to(db_ptr.dtype.element_ty), mask=mask & (offs_n < BLOCK_N))
    tl.store(dc_ptr + place, b_sum.to(dc_ptr.dtype.element_ty), mask=mask & (offs_n >= BLOCK_N))


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
