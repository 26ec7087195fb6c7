"""The quick rows of Mamba-1's implied attention against the readable pattern."""

import pytest
import torch

from kernels import selective_scan
from models.mixers.scan_rows import scan_rows


@pytest.mark.parametrize(("seq", "start", "stop"), [(1, 0, 1), (7, 0, 7), (33, 5, 33), (65, 0, 65), (65, 60, 65), (20, 8, 16)])
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
