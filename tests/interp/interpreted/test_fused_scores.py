"""Scores from the fused kernels, in Triton's interpreter, against the same from gathered edges.

Run by ../test_match_scores.py in a process of its own: the interpreter is chosen when a kernel is defined.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 at start", allow_module_level=True)

from language_models import build

from interp.edge_scores import edge_scores
from interp.sequences import repeated_tokens
from interp.subject import LanguageModelSubject
from kernels import KernelError

OFFSETS = (1, 2, 3)


def readings(name, probe):
    found = []
    LanguageModelSubject(build(name, dtype=torch.float32)).visit(
        probe.tokens, lambda view: found.extend(view.readings)
    )
    return found


@torch.no_grad()
@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("name", ["softmax", "llama", "linear"])
def test_fused_scores_are_those_of_gathered_edges(name, bos):
    probe = repeated_tokens(2, 5, 3, ids=torch.arange(1, 11), bos=bos, seed=3)
    compared = 0
    for reading in readings(name, probe):
        if reading.normalisation != "none":
            continue
        fused = edge_scores(reading, probe, offsets=OFFSETS, backend="triton")
        gathered = edge_scores(reading, probe, offsets=OFFSETS, backend="torch")
        for field in ("rowsum", "latest", "pairs", "previous", "first_position"):
            torch.testing.assert_close(getattr(fused, field), getattr(gathered, field), atol=1e-6, rtol=1e-5)
        assert (fused.rowsum[..., 0] - fused.rowsum[..., 1]).abs().max() > 1e-3
        compared += 1
    assert compared == 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_an_explicit_request_without_a_kernel_is_refused(name):
    probe = repeated_tokens(2, 5, 3, ids=torch.arange(1, 11), seed=3)
    with pytest.raises(KernelError, match="have no fused sums"):
        edge_scores(readings(name, probe)[0], probe, backend="triton")
