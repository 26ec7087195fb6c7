"""The quick rows of Mamba-1's implied attention against the readable pattern."""

import pytest
import torch

from kernels import selective_scan
from models.mixers.scan_rows import scan_rows, walk_scan_rows


@pytest.mark.parametrize(
    ("seq", "start", "stop"), [(1, 0, 1), (7, 0, 7), (33, 5, 33), (65, 0, 65), (65, 60, 65), (20, 8, 16)]
)
def test_equals_the_readable_pattern(seq, start, stop):
    draw = torch.Generator().manual_seed(seq)
    dt = torch.rand(2, seq, 5, generator=draw, dtype=torch.float64)
    # A state that forgets everything at one position, and one that forgets almost nothing.
    dt[0, seq // 2] = 500.0
    dt[1] *= 1e-3
    A_log = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    B, C = torch.randn(2, 2, seq, 3, generator=draw, dtype=torch.float64)
    inputs = (dt[:, :stop], A_log, B[:, :stop], C[:, :stop])
    expected = selective_scan.pattern(*inputs, rows=slice(start, stop)).permute(0, 2, 3, 1)
    found = scan_rows(*inputs, start, stop)
    assert found.isfinite().all()
    assert (found - expected).abs().max() < 1e-10 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("blocks", [[(0, 70)], [(0, 3), (3, 50), (50, 51), (51, 70)], [(20, 60)]])
def test_walking_through_blocks_gives_their_rows(blocks):
    draw = torch.Generator().manual_seed(1)
    dt = torch.rand(2, 70, 5, generator=draw, dtype=torch.float64)
    dt[0, 35] = 500.0
    A_log = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    B, C = torch.randn(2, 2, 70, 3, generator=draw, dtype=torch.float64)
    for (start, stop), found in zip(blocks, walk_scan_rows(dt, A_log, B, C, blocks), strict=True):
        expected = scan_rows(dt[:, :stop], A_log, B[:, :stop], C[:, :stop], start, stop)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
