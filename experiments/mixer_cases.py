"""Case files of sequence operators: read one, run it in every form, compare outputs, states, splits and
gradients.

A file holds inputs (in.NAME), results (out.NAME), a cotangent (cot.o), gradients (grad.NAME) and states at
cut points (split.N.NAME); its header's metadata says which operator it is for, its flags and the axes of
each tensor.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments.case_operators import OPERATORS, Inputs, Operator, State, UnsupportedCase

FORMAT_VERSION = "1"
# Largest error in float64, relative to max(1, largest absolute entry of the reference).
TOLERANCE = 1e-10


class CaseFileError(OSError):
    """The file cannot be read as a case."""


@dataclass(frozen=True, kw_only=True)
class MixerCase:
    """One case file: tensors under their names in the file, axes as "batch seq ..." by the same names."""

    name: str
    operator: str
    flags: dict
    axes: dict[str, str]
    tensors: dict[str, Tensor]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name begins with `prefix.`, without it."""
        return {
            name.removeprefix(f"{prefix}."): t
            for name, t in self.tensors.items()
            if name.startswith(f"{prefix}.")
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor against its reference. `error` is relative to max(1, largest reference), `absolute` is
    not.
    """

    tensor: str
    form: str
    error: float
    absolute: float


def load_case(path: Path) -> MixerCase:
    """Read a case file.

    Raises:
        CaseFileError: Not a safetensors file, or its header lacks what a case has.
        UnsupportedCase: Another format version.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if header.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise UnsupportedCase(f"format_version {header['format_version']}, accepted is {FORMAT_VERSION}")
        return MixerCase(
            name=header.get("case", path.stem),
            operator=header["operator"],
            flags=json.loads(header.get("flags", "{}")),
            axes=json.loads(header["axes"]),
            tensors=tensors,
        )
    except (SafetensorError, OSError) as error:
        raise CaseFileError(f"{path.name}: cannot be read: {error}") from error
    except (KeyError, json.JSONDecodeError) as error:
        raise CaseFileError(f"{path.name}: the header's metadata lacks {error}") from error


def operator_of(case: MixerCase) -> Operator:
    """How the case is run; raises UnsupportedCase for an operator, flag or feature map that the project
    lacks.
    """
    if case.operator not in OPERATORS:
        raise UnsupportedCase(f"operator {case.operator!r}")
    operator = OPERATORS[case.operator]
    unknown = sorted(set(case.flags) - operator.flags - {"cuts"})
    if unknown:
        raise UnsupportedCase(f"flag {unknown[0]!r} of {case.operator}")
    operator.check(case.named("in"), case.flags)
    return operator


def compare_case(case: MixerCase, dtype: torch.dtype = torch.float64) -> list[Comparison]:
    """Every form against the file: output, state, further results, gradients, and the sequence cut into
    pieces.

    Raises:
        UnsupportedCase: See `operator_of`.
    """
    operator = operator_of(case)
    inputs = {name: tensor.to(dtype) for name, tensor in case.named("in").items()}
    found = [
        _compared("others", name, actual, case.tensors[f"out.{name}"])
        for name, actual in _others(case, operator, inputs)
    ]
    for form in operator.forms:
        found += _compare_form(case, operator, inputs, form)
    for first in range(len(operator.forms) if case.flags.get("cuts") else 0):
        found += _compare_pieces(case, operator, inputs, operator.forms[first:] + operator.forms[:first])
    return found


def _others(case: MixerCase, operator: Operator, inputs: Inputs) -> list[tuple[str, Tensor]]:
    with torch.no_grad():
        results = list(operator.others(operator.leaves(inputs, case.flags), case.flags))
    return [(name, tensor) for name, tensor in results if f"out.{name}" in case.tensors]


def _compare_form(case: MixerCase, operator: Operator, inputs: Inputs, form: str) -> list[Comparison]:
    leaves = operator.leaves(inputs, case.flags)
    output, state = operator.run(leaves, case.flags, form, operator.start(leaves), 0)
    found = [_compared(form, "o", output, case.tensors["out.o"]), *_compare_state(case, form, "out", state)]
    expected = case.named("grad")
    loss = (output * case.tensors["cot.o"].to(output.dtype)).sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in expected], allow_unused=True)
    for (name, reference), gradient in zip(expected.items(), gradients, strict=True):
        gradient = torch.zeros_like(reference) if gradient is None else gradient.reshape(reference.shape)
        found.append(_compared(form, f"grad.{name}", gradient, reference))
    return found


def _compare_pieces(
    case: MixerCase, operator: Operator, inputs: Inputs, forms: tuple[str, ...]
) -> list[Comparison]:
    """Cut at every cut point; each piece runs in another form, from the state that the one before left."""
    bounds = [0, *case.flags["cuts"], case.tensors["out.o"].shape[1]]
    with torch.no_grad():
        leaves = operator.leaves(inputs, case.flags)
        state, outputs, found = operator.start(leaves), [], []
        for i, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            piece = {name: t[:, start:stop] if _has_seq(case, name) else t for name, t in leaves.items()}
            output, state = operator.run(piece, case.flags, forms[i % len(forms)], state, start)
            outputs.append(output)
            found += _compare_state(case, f"pieces from {forms[0]}", f"split.{stop}", state)
    return [
        *found,
        _compared(f"pieces from {forms[0]}", "o", torch.cat(outputs, dim=1), case.tensors["out.o"]),
    ]


def _has_seq(case: MixerCase, name: str) -> bool:
    return "seq" in case.axes[f"in.{name}"].split()


def _compare_state(case: MixerCase, form: str, prefix: str, state: State) -> list[Comparison]:
    names = [name for name in state if f"{prefix}.{name}" in case.tensors]
    return [
        _compared(form, f"{prefix}.{name}", state[name], case.tensors[f"{prefix}.{name}"]) for name in names
    ]


def _compared(form: str, tensor: str, actual: Tensor, expected: Tensor) -> Comparison:
    """NaN counts as an infinite error, and so does another shape."""
    if actual.shape != expected.shape:
        return Comparison(tensor=tensor, form=form, error=torch.inf, absolute=torch.inf)
    difference = (actual.detach().to(expected.dtype) - expected).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    largest = torch.inf if math.isnan(largest) else largest
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return Comparison(tensor=tensor, form=form, error=largest / scale, absolute=largest)
