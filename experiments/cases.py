"""Check the project against a folder of case files: `python -m experiments.cases DIR [--smollm2 FILE.gguf]`.

DIR/mixers/*.safetensors are operator cases, DIR/real_models/ reference outputs of whole models. Prints one
line a case (passed, failed with the error size, or not supported) and the closing counts; exits 1 if a case
failed.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from experiments.case_operators import UnsupportedCase
from experiments.errors import in_one_line
from experiments.mixer_cases import TOLERANCE, CaseFileError, compare_case, load_case
from interp.standard_output import OutputError, say
from kernels import KernelError

if TYPE_CHECKING:
    from experiments.real_model_cases import Outcome

PASSED, FAILED, NOT_SUPPORTED = "passed", "failed", "not supported"


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One line of the report."""

    name: str
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name:<50} {self.outcome}" + (f" ({self.detail})" if self.detail else "")


def run_mixer_cases(folder: Path) -> Iterator[CaseResult]:
    """Every operator case of a folder, in order of name."""
    for path in sorted(folder.glob("*.safetensors")):
        yield run_mixer_case(path)


def run_mixer_case(path: Path) -> CaseResult:
    """One operator case in float64: every form, gradient, state and cut."""
    try:
        comparisons = compare_case(load_case(path))
    except UnsupportedCase as reason:
        return CaseResult(name=path.stem, outcome=NOT_SUPPORTED, detail=str(reason))
    except (CaseFileError, KernelError) as error:
        return CaseResult(name=path.stem, outcome=FAILED, detail=str(error))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        # Tensors or flags that the operator needs are missing, or their shapes do not fit.
        said = " ".join(repr(error).split())
        return CaseResult(name=path.stem, outcome=FAILED, detail=f"does not run: {said}")
    worst = max(comparisons, key=lambda found: found.error)
    if worst.error <= TOLERANCE:
        return CaseResult(name=path.stem, outcome=PASSED)
    return CaseResult(
        name=path.stem, outcome=FAILED, detail=f"{worst.error:.2e}, {worst.tensor}, {worst.form}"
    )


def run_real_models(folder: Path, smollm2: Path | None) -> Iterator[CaseResult]:
    """Reference outputs of whole models in DIR/real_models; SmolLM2's only where its GGUF file is given."""
    from experiments.real_model_cases import smollm2 as smollm2_outcomes
    from experiments.real_model_cases import tiny_models

    if (folder / "tiny" / "cases.json").exists():
        yield from map(_result, tiny_models(folder / "tiny"))
    scores = folder / "smollm2.json"
    if not scores.exists():
        return
    if smollm2 is None:
        yield CaseResult(name="SmolLM2", outcome=NOT_SUPPORTED, detail="give its GGUF file with --smollm2")
    else:
        yield from map(_result, smollm2_outcomes(scores, smollm2))


def _result(outcome: "Outcome") -> CaseResult:
    if outcome.not_supported:
        return CaseResult(name=outcome.name, outcome=NOT_SUPPORTED, detail=outcome.not_supported)
    found = outcome.deviations
    if outcome.failure:
        return CaseResult(name=outcome.name, outcome=FAILED, detail=outcome.failure)
    if found.n and found.worst <= 1:
        return CaseResult(name=outcome.name, outcome=PASSED)
    detail = f"{found.error:.2e}, {found.name}, {found.worst:.3g} times the tolerance"
    return CaseResult(name=outcome.name, outcome=FAILED, detail=detail)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="cases", description="Check the operators and models against case files."
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="holds mixers/ and, where wanted, real_models/"
    )
    parser.add_argument("--smollm2", type=Path, metavar="FILE", help="GGUF file of SmolLM2-135M")
    options = parser.parse_args(argv)
    mixers, real_models = options.folder / "mixers", options.folder / "real_models"
    if not mixers.is_dir() and not real_models.is_dir():
        print(f"cases: {options.folder} has neither mixers/ nor real_models/", file=sys.stderr)
        return 1
    counts: Counter[str] = Counter()
    try:
        for results in (run_mixer_cases(mixers), run_real_models(real_models, options.smollm2)):
            for result in results:
                counts[result.outcome] += 1
                say(result)
    except (OutputError, BrokenPipeError):
        raise
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        said = " ".join((str(error) if isinstance(error, OSError) else repr(error)).split())
        print(f"cases: the references in {real_models} cannot be used: {said}", file=sys.stderr)
        return 1
    if not counts:
        print(f"cases: {options.folder} holds no case; accepted: mixers/*.safetensors", file=sys.stderr)
        return 1
    say(", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_SUPPORTED)))
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
