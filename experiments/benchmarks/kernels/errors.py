"""Relative RMS errors against float64 of every entrant's output and gradients, at one small shape."""

import torch

from experiments.benchmarks.kernels.checks import error
from experiments.benchmarks.kernels.contests import SMALL, Contest, contests


def entrant_errors(contest: Contest, who: str) -> dict[str, float]:
    """Error of the output ("o") and of the gradient of each input, in the entrant's own layout.

    The readable form runs in float64 on the entrant's own inputs, so that what it rounds beforehand does not
    count; every entrant of a contest pulls the same cotangent back.
    """
    entrant = contest.entrants[who]
    mine = [x.detach().requires_grad_() for x in entrant.layout.own(contest.inputs)]
    wide = [x.detach().double().requires_grad_() for x in mine]
    with entrant.context():
        output = entrant.layout.output(entrant(*mine))
        generator = torch.Generator(output.device).manual_seed(1)
        random = torch.randn(output.shape, device=output.device, generator=generator)
        cotangent = random.to(output.dtype)
        found = torch.autograd.grad(output, mine, cotangent)
    expected = contest.reference(*entrant.layout.back(wide))
    gradients = torch.autograd.grad(expected, wide, cotangent.double())
    names = ["o", *(f"d{name}" for name in contest.names)]
    pairs = zip(names, (output, *found), (expected, *gradients), strict=True)
    return {name: error(x.detach(), reference.detach()) for name, x, reference in pairs}


def error_cells(operators: tuple[str, ...], peers: bool) -> dict[tuple[str, str], str]:
    """By operator and entrant, all errors in units of 1e-3; one that fails is a printed line."""
    cells = {}
    for contest in contests(operators, peers, SMALL):
        # "ours unnormalised" is a yardstick: it computes something else.
        for who in (w for w in contest.entrants if not w.startswith("ours ")):
            try:
                cells[contest.operator, who] = error_text(entrant_errors(contest, who))
            except Exception as problem:
                text = f"{type(problem).__name__} {str(problem)[:200]}"
                print(f"errors of {contest.operator} {who}: {text}", flush=True)
    return cells


def error_text(errors: dict[str, float]) -> str:
    """The largest first, then all: "max 2.9: o 1.6 dq 2.4 ...", in units of 1e-3."""
    listed = " ".join(f"{name} {1e3 * value:.2g}" for name, value in errors.items())
    return f"**{1e3 * max(errors.values()):.2g}**: {listed}"
