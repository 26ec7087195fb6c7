"""Every operator in every form against the case files."""

from dataclasses import replace

import pytest
import torch
from mixer_cases import INDEX, PATHS, load

from experiments.mixer_cases import TOLERANCE, compare_case
from kernels import gated_linear_attention, selective_scan

# Error in float32 against that of a plain loop over time in float32, which the case files give for `o` and
# gradients.
LOOP_MULTIPLE = 8
EPS = torch.finfo(torch.float32).eps


def test_cases_cover_every_operator():
    assert len(PATHS) == len(INDEX) >= 60
    assert len({entry["operator"] for entry in INDEX.values()}) == 12


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_float64(path):
    found = compare_case(load(path.stem))
    assert {c.form for c in found} >= {"parallel", "chunked", "recurrent"}
    worst = max(found, key=lambda c: c.error)
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_float32(path):
    loop = INDEX[path.stem]["float32_loop_error"]
    case = load(path.stem)
    # Weights made again from a stored logsumexp carry its rounding, as in any FlashAttention.
    largest = float(case.tensors["out.lse"].abs().max()) if "out.lse" in case.tensors else 1.0
    for c in compare_case(case, torch.float32):
        if c.tensor in loop and not c.form.startswith("pieces"):
            name = c.tensor if c.tensor.startswith("grad.") else f"out.{c.tensor}"
            reference = case.tensors[name]
            rounding = 4 * EPS * max(1.0, float(reference.abs().max())) * max(1.0, largest)
            assert c.absolute <= LOOP_MULTIPLE * loop[c.tensor] + rounding, c


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("softmax_window4_t33", "in.q"),
        ("linear_elu_eps_split_t33", "split.6.z"),
        ("gla_state_split_t33", "grad.state0"),
        ("mamba1_state_split_t33", "in.A_log"),
        ("mamba2_state_split_t33", "out.A"),
        ("delta_t7", "out.write"),
    ],
)
def test_a_wrong_file_is_found_out(name, tensor):
    case = load(name)
    wrong = case.tensors[tensor].clone()
    wrong.view(-1)[-1] += 1e-6
    case = replace(case, tensors={**case.tensors, tensor: wrong})
    assert max(c.error for c in compare_case(case)) > 1e-8


def test_a_wrong_flag_is_found_out():
    case = load("linear_elu_eps_split_t33")
    assert max(c.error for c in compare_case(replace(case, flags=case.flags | {"eps": 1e-3}))) > 1e-5


@torch.no_grad()
def test_pattern_and_state_rebuild_the_output():
    """The identities of the case files: o = A v + o_from_state0, and o = silu(z) (A u + D u) +
    o_from_state0.
    """
    x = load("gla_state_split_t33").tensors
    scale = load("gla_state_split_t33").flags["scale"]
    A = gated_linear_attention.pattern(x["in.q"], x["in.k"], log_decay=x["in.log_decay"], scale=scale)
    rebuilt = torch.einsum("bhij,bjhv->bihv", A, x["in.v"]) + x["out.o_from_state0"]
    torch.testing.assert_close(rebuilt, x["out.o"], rtol=0, atol=1e-12)
    x = load("mamba1_t7_gate_state").tensors
    dt = selective_scan.softplus_dt(x["in.dt_raw"], x["in.dt_bias"])
    A = selective_scan.pattern(dt, x["in.A_log"], x["in.B"], x["in.C"])
    y = torch.einsum("bcij,bjc->bic", A, x["in.u"]) + x["in.D"] * x["in.u"]
    rebuilt = torch.nn.functional.silu(x["in.z"]) * y + x["out.o_from_state0"]
    torch.testing.assert_close(rebuilt, x["out.o"], rtol=0, atol=1e-12)
