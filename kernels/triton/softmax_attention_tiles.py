"""What the kernels of softmax attention share: loads of rows, and which pairs of a tile attend.

Every kernel has one loop over tiles. A tile that the diagonal or the window cuts through is masked under a
branch, so that most tiles pay nothing for it and nothing is loaded twice.
"""

import typing

import triton
import triton.language as tl

# Most programs along the second or third axis of a grid.
AXIS = 65535


def grid(n_tile: int, n_head: int, batch: int) -> tuple[int, ...]:
    """The grid of `place`: a program for every tile of every head of every sequence."""
    return (batch, n_head, n_tile) if max(n_tile, n_head) <= AXIS else (batch * n_head * n_tile,)


@triton.jit
@typing.no_type_check
def place(n_tile, n_head, SPREAD: tl.constexpr):
    """(tile, batch, head) of a program. One tile of all heads and sequences, then the next, so that the
    programs with most to do start first.

    Args:
        SPREAD: The grid has three axes.
    """
    if SPREAD:
        tile = tl.program_id(2)
        head = tl.program_id(1)
        batch = tl.program_id(0)
    else:
        n_row = tl.num_programs(0) // n_tile
        tile = tl.program_id(0) // n_row
        head = tl.program_id(0) % n_row % n_head
        batch = tl.program_id(0) % n_row // n_head
    return tile, batch.to(tl.int64), head.to(tl.int64)


@triton.jit
@typing.no_type_check
def load_rows(ptrs, inside, offs_d, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """A tile [row, BLOCK_D] with zeros past the last row and past the width D.

    Args:
        ptrs: Pointers of the tile.
        inside: [row], false past the last row. Not read if EVEN.
        EVEN: No tile of the sequence is ragged.
    """
    if EVEN and D == BLOCK_D:
        return tl.load(ptrs)
    elif EVEN:
        return tl.load(ptrs, mask=offs_d[None, :] < D, other=0.0)
    elif D == BLOCK_D:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=inside[:, None] & (offs_d[None, :] < D), other=0.0)


@triton.jit
@typing.no_type_check
def attends(offs_i, offs_j, window, HAS_WINDOW: tl.constexpr):
    """Whether queries see keys, by position; rows past the last are masked where they are loaded or stored.

    Args:
        offs_i, offs_j: Positions of queries and keys, one of them [row, 1], the other [1, column].
    """
    seen = offs_j <= offs_i
    if HAS_WINDOW:
        seen = seen & (offs_j > offs_i - window)
    return seen


@triton.jit
@typing.no_type_check
def is_cut(first_i, first_j, window, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Whether some pair of a tile of ROWS queries and COLUMNS keys does not attend; True of small tiles, as
    their masks cost less than a branch."""
    if ROWS * COLUMNS <= 1024:
        return True
    cut = first_j + (COLUMNS - 1) > first_i
    if HAS_WINDOW:
        cut = cut | (first_j <= first_i + (ROWS - 1) - window)
    return cut
