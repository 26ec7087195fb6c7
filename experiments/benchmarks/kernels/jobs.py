"""Which cases are checked, at which lengths, dtypes and widths, and their run over processes.

Every entry of the configuration table is met: all widths and dtypes of this GPU's table, and of "sm_80".
"""

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Iterator

import torch

from experiments.benchmarks.kernels import block_cases, cases, read_cases
from experiments.benchmarks.kernels.checks import Check
from kernels.triton import config_table

LENGTHS = (1, 7, 63, 64, 65, 200, 2049, 70001)
OPERATORS = ("softmax", "linear", "scan", "conv", "block", "split", "tables", "decode", "edges")
CASES = {
    name: function
    for module in (cases, block_cases, read_cases)
    for name, function in vars(module).items()
    if name.startswith("check_")
}


def jobs(operators: tuple[str, ...]) -> list[tuple[str, tuple, dict[str, bool]]]:
    """All lengths, kinds, dtypes and widths as (function, arguments, kind)."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    found: list[tuple[str, tuple, dict[str, bool]]] = []
    if "softmax" in operators:
        for seq in LENGTHS:
            found.append(("check_softmax", (seq, bf16), {"window": seq == 200, "sink": seq in (65, 200)}))
            found.append(("check_softmax", (seq, f32), {"window": seq == 2049, "sink": seq == 7}))
        for d, dtype in itertools.product((16, 32, 80, 128, 256), (bf16, f16, f32)):
            found.append(("check_softmax", (200, dtype, d), {"tail": True}))
        found.append(("check_softmax", (2049, bf16), {"window": True, "sink": True}))
        found.append(("check_softmax", (2049, bf16), {"strided": True}))
        found += [("check_softmax", (200, dtype), {"large": True}) for dtype in (bf16, f32)]
    if "linear" in operators:
        kinds = ({}, {"decay": True, "state": True}, {"normalise": True, "state": True}, {"ssd": True,
            "state": True})
        for seq, kind in itertools.product(LENGTHS, kinds):
            found.append(("check_linear", (seq, bf16), kind))
            if seq < 10_000:
                found.append(("check_linear", (seq, f32), kind))
        for d, kind, dtype in itertools.product((16, 32, 80, 128, 256), kinds[1:], (bf16, f16, f32)):
            found.append(("check_linear", (200, dtype, d), kind))
        # State widths of Mamba-2 are rarely those of its heads.
        unequal = ((16, 64), (128, 64), (64, 32))
        for widths, kind, dtype in itertools.product(unequal, kinds, (bf16, f16, f32)):
            found.append(("check_linear", (200, dtype, *widths), kind))
        found += [("check_linear", (2049, bf16, 256), kind | {"strided": True}) for kind in kinds]
        found.append(("check_linear", (2049, f32, 128), kinds[1]))
        found.append(("check_linear", (200, f16), {"decay": True}))
        found += [("check_linear", (2049, t), {"decay": True, "extreme": True, "state": True}) for t in (bf16,
            f32)]
    if "scan" in operators:
        for seq in LENGTHS:
            found.append(("check_scan", (seq, bf16), {"full": True}))
            found.append(("check_scan", (seq, f32), {"full": seq != 65}))
        found += [("check_scan", (200, dtype, n), {"full": True}) for n in (4, 64, 100,
            256) for dtype in (bf16, f32)]
        found += [("check_scan", (2049, dtype), {"extreme": True}) for dtype in (bf16, f32)]
        found.append(("check_scan", (200, f16), {}))
    if "split" in operators:
        found += [("check_split", (seq, dtype), {}) for seq in (2, 65, 700) for dtype in (bf16, f32)]
    if "conv" in operators:
        for seq, dtype in itertools.product(LENGTHS, (bf16, f32)):
            found.append(("check_conv", (seq, dtype), {"full": True}))
        found += [("check_conv", (200, bf16, width), {"full": full}) for width in (1, 2, 3) for full in (True,
            False)]
    if "block" in operators:
        found += [("check_block", (seq, dtype), {}) for seq in LENGTHS for dtype in (bf16, f32)]
        found += [("check_block", (200, dtype, n), {}) for n in (16, 128) for dtype in (bf16, f16, f32)]
        found += [("check_block", (2049, dtype), {kind: True}) for kind in ("plain", "extreme") for dtype in (
            bf16, f32)]
        for rows, width in ((1, 64), (4097, 256), (3000, 768), (2049, 1000), (70_001, 512)):
            found += [("check_norm", (rows, dtype, width), {}) for dtype in (bf16, f16, f32)]
    if "tables" in operators:
        # What GPUs without an entry of their own run, on this one.
        for d, dtype in itertools.product((32, 64, 128, 256), (bf16, f32)):
            found.append(("check_softmax", (200, dtype, d), {"sm_80": True}))
            found.append(("check_linear", (200, dtype, d), {"decay": True, "state": True, "sm_80": True}))
    if "decode" in operators:
        found += [("check_decode", (70, dtype), {}) for dtype in (bf16, f32)]
        for d, dtype in itertools.product((16, 64, 80, 128, 256), (bf16, f16, f32)):
            found.append(("check_softmax_step", (777, dtype, d), {"sink": d == 80}))
        for seq in (1, 7, 63, 64, 65, 2049, 70001):
            found.append(("check_softmax_step", (seq, bf16), {"one_group": True}))
            found.append(("check_softmax_step", (seq, f32), {"window": True, "sink": True}))
    if "edges" in operators:
        found += [("check_edges", (seq, dtype), {}) for seq in (200, 777) for dtype in (bf16, f32)]
    return found


def run_job(job: tuple[str, tuple, dict[str, bool]]) -> list[Check]:
    """One job; a job that raises is a failed Check that names the error."""
    name, arguments, kind = job[0], job[1], dict(job[2])
    torch.manual_seed(0)
    try:
        table = kind.pop("sm_80", False)
        if table:
            config_table.overrides |= config_table.TABLES["sm_80"]
        return CASES[name](*arguments, **kind)
    except Exception as problem:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
        return [Check(case=f"{name} {arguments} {kind}", tensor=text, error=float("inf"), bound=1.0)]


def run_checks(operators: tuple[str, ...], workers: int = 14) -> Iterator[Check]:
    """Run all jobs over processes. Most of the time is compilation: jobs that compile something new run
    first, so that the others find it done."""
    seen: set[str] = set()
    first, later = [], []
    for job in jobs(operators):
        compiled = f"{job[0]} {job[1][1:]} {job[2]}"
        (later if compiled in seen else first).append(job)
        seen.add(compiled)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for found in pool.map(run_job, first + later):
            yield from found
