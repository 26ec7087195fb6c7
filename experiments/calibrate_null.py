"""Thresholds of the causal induction test, from models that cannot have an induction head.

    python -m experiments.calibrate_null [--seeds 10 --trained-seeds 2] [--device cuda]

Null: untrained models of every mixer, depth and two init scales, and models trained on independent tokens.
Writes experiments/results/null_calibration.md and .jsonl: the distribution of the effect (cut minus random at
the best offset), of its standard errors, of copying, and how often the test of interp.induction_test passes
by mistake.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.data.config import IIDConfig
from experiments.offset_table import RESULTS
from experiments.recipes import LINEAR, LINEAR_CONV, MAMBA1, MAMBA2, MAMBA2_SLOW, SOFTMAX, SOFTMAX_CONV, toy
from experiments.trained_runs import available_device

MIXERS = {
    "softmax": SOFTMAX,
    "softmax-conv": SOFTMAX_CONV,
    "linear": LINEAR,
    "linear-conv": LINEAR_CONV,
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "mamba2-slow": MAMBA2_SLOW,
}
DEPTHS = (1, 2)
STDS = (0.02, 0.1)
# Zipf: there is something to learn, but nothing in context.
DATA = IIDConfig(seq=64, d_vocab=64, exponent=1.0)
QUANTILES = (0.5, 0.95, 0.99, 0.999, 1.0)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    device = available_device(options.device)
    rows: list[dict[str, Any]] = []
    options.results.mkdir(parents=True, exist_ok=True)
    with open(options.results / "null_calibration.jsonl", "w", encoding="utf-8") as file:
        for row in _null(options, device):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    text = report(rows)
    (options.results / "null_calibration.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.calibrate_null", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=sorted(MIXERS), help="some of the mixers")
    parser.add_argument("--seeds", type=int, default=10, help="untrained models of each shape")
    parser.add_argument("--trained-seeds", type=int, default=2, help="trained models of each shape")
    parser.add_argument("--steps", type=int, default=300, help="training steps on independent tokens")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def _null(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """A row for each unit of each null model."""
    from models.language_model import LanguageModel

    for name in options.only or MIXERS:
        for depth in DEPTHS:
            for std in STDS:
                config = toy("Null", DATA, *[MIXERS[name]] * depth, steps=options.steps, init_std=std)
                for seed in range(options.seeds):
                    model = LanguageModel(config.model.replace(seed=seed)).to(device)
                    yield from _rows(
                        model, {"mixer": name, "depth": depth, "std": std, "trained": False, "seed": seed}
                    )
            for seed in range(options.trained_seeds):
                label = {"mixer": name, "depth": depth, "std": 0.02, "trained": True, "seed": seed}
                yield from _rows(trained(name, depth, options.steps, seed, device), label)
            print(f"{name}, {depth} layers: done", file=sys.stderr, flush=True)


def trained(name: str, depth: int, steps: int, seed: int, device: str) -> Any:
    """A model trained on independent tokens, in memory."""
    import tempfile

    from experiments.config import with_settings
    from experiments.train import train
    from models.checkpoint import list_checkpoints, load_model

    config = toy("Null, trained", DATA, *[MIXERS[name]] * depth, steps=steps)
    settings = [
        f"seeds.init={seed}",
        f"seeds.data={seed}",
        "checkpoints.log_spaced=0",
        "checkpoints.windows=[]",
    ]
    if device == "cuda":
        settings += ["training.cuda_graph=true", "training.precision=fp32"]
    with tempfile.TemporaryDirectory() as folder:
        train(with_settings(config, settings), Path(folder) / "run", device=device)
        return load_model(list_checkpoints(Path(folder) / "run")[-1][1], device=device)


def _rows(model: Any, label: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from interp.induction_test import causal_scores
    from interp.plan import make_plan
    from interp.subject import LanguageModelSubject

    subject = LanguageModelSubject(model)
    for score in causal_scores(subject, make_plan(subject, seed=label["seed"], trained=DATA.seq).probe):
        yield {
            **label,
            "layer": score.layer,
            "unit": score.unit,
            "offset": score.offset,
            "effect_nats": score.effect_nats,
            "effect_se_nats": score.effect_se_nats,
            "copying": score.copying,
            "passes": score.is_induction,
        }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Distributions and the false-positive rate."""
    from interp.induction_test import MIN_COPYING, MIN_EFFECT_NATS, MIN_STANDARD_ERRORS

    n, passed = len(rows), sum(row["passes"] for row in rows)
    lines = [
        "# Null of the causal induction test",
        "",
        f"Written by `python -m experiments.calibrate_null` on {datetime.date.today():%Y-%m-%d}. {n} units "
        f"of models that cannot "
        "have an induction head.",
        "",
        f"Thresholds: effect at least {MIN_EFFECT_NATS} nats and {MIN_STANDARD_ERRORS} standard errors, "
        f"copying at least "
        f"{MIN_COPYING}. Passed by mistake: {passed} of {n}; the true rate is below {_upper(passed, n):.4f} "
        f"with 95% confidence.",
        "",
        "| null | units | effect (nats): "
        + ", ".join(f"{q:g}" for q in QUANTILES)
        + " quantile | effect / standard error | copying |",
        "| --- | --- | --- | --- | --- |",
    ]
    groups: dict[str, list[dict[str, Any]]] = {"all": list(rows)}
    for row in rows:
        kind = "i.i.d.-trained" if row["trained"] else f"untrained, std {row['std']}"
        groups.setdefault(kind, []).append(row)
        groups.setdefault(row["mixer"], []).append(row)
    for name, own in groups.items():
        ratio = [row["effect_nats"] / max(row["effect_se_nats"], 1e-9) for row in own]
        copying = [row["copying"] for row in own if row["copying"] is not None]
        cells = [name, str(len(own)), _quantiles([row["effect_nats"] for row in own], 4)]
        cells += [_quantiles(ratio, 1), _quantiles(copying, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _quantiles(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    ranked = torch.tensor(values, dtype=torch.float64)
    return ", ".join(f"{float(ranked.quantile(q)):.{digits}f}" for q in QUANTILES)


def _upper(passed: int, n: int) -> float:
    """Upper end of the one-sided 95% Clopper-Pearson interval."""
    from scipy.stats import beta

    return 1.0 if passed >= n else float(beta.ppf(0.95, passed + 1, n - passed))


if __name__ == "__main__":
    sys.exit(main())
