"""SmolLM2-135M: zeroing the nine heads with the strongest causal score, against nine random heads of the same
    layers.

    python -m experiments.smollm2_ablation FILE.gguf --case shared/cases/real_models/smollm2.json --out
    result.md

The causal score of a head is what cutting its edges from i to the follower of i's earlier copy costs, minus
as many random edges. All heads are ranked by its first-order estimate (one forward and one backward pass); of
the best of them the exact cuts are made. Handed figures of the case file are checked on the way: losses, and
single heads zeroed.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from interp.ablation import zero_ablated
from interp.attribution import gradients
from interp.offset_cuts import offset_profile
from interp.offset_edges import Matches, probe_matches
from interp.sequences import RepeatedTokens
from interp.sites import Site
from interp.subject import LanguageModelSubject, LayerView
from models.form import Form

N_HEADS = 9
Head = tuple[int, int]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="GGUF", type=Path)
    parser.add_argument("--case", type=Path, required=True, help="smollm2.json: probes and handed figures")
    parser.add_argument("--out", type=Path, help="write the result as Markdown (default: print it)")
    parser.add_argument(
        "--candidates", type=int, default=24, help="heads whose cuts are made exactly (default 24)"
    )
    parser.add_argument(
        "--sequences", type=int, default=8, help="of the probe, for the exact cuts (default 8)"
    )
    parser.add_argument("--draws", type=int, default=10, help="draws of random heads (default 10)")
    options = parser.parse_args(arguments)
    from models.errors import CheckpointError, ConfigError

    try:
        text = run(options)
    except (ConfigError, CheckpointError, OSError) as error:
        print(f"smollm2_ablation: {error}", file=sys.stderr)
        return 1
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> str:
    """The measurement, as Markdown."""
    from models.pretrained import from_pretrained

    began = time.perf_counter()
    case = json.loads(options.case.read_text("utf-8"))
    subject = LanguageModelSubject(from_pretrained(options.model))
    subject.model.requires_grad_(False)
    given = case["probes"]["P2"]
    probe = RepeatedTokens(
        tokens=torch.tensor(given["input_ids"]), period=given["length"], repeats=given["repeats"], bos=0
    )
    estimates = first_order_cuts(subject, probe.take(slice(0, 4)))
    _say(began, "first-order estimates")
    order = sorted(estimates, key=lambda head: -estimates[head])[: options.candidates]
    exact = exact_cuts(subject, probe.take(slice(0, options.sequences)), order)
    _say(began, "exact cuts")
    top = sorted(exact, key=lambda head: -exact[head][0])[:N_HEADS]
    full = subject.losses(probe.tokens).double()
    zeroed = _change(subject, probe, top, full)
    _say(began, "top heads zeroed")
    random = [
        _change(subject, probe, random_heads(subject, top, seed), full) for seed in range(options.draws)
    ]
    _say(began, "random heads zeroed")
    handed = _handed(subject, probe, case, full, top)
    return _report(case, options, estimates, exact, top, zeroed, random, handed, time.perf_counter() - began)


def first_order_cuts(subject: LanguageModelSubject, probe: RepeatedTokens) -> dict[Head, float]:
    """First-order estimate of what cutting each head's induction edges costs, nats; softmax heads, offset
    1.
    """
    matches = probe_matches(probe)
    edges = matches.at(1)
    at = matches.scored

    def loss(logits: Float[Tensor, "batch seq d_vocab"]) -> Tensor:
        target = matches.tokens[:, 1:][at]
        return torch.nn.functional.cross_entropy(logits[:, :-1][at], target)

    sites = [Site(kind="z", layer=layer) for layer in range(subject.n_layers)]
    slopes = gradients(subject.model, matches.tokens, sites, loss, form=Form.CHUNKED)
    found: dict[Head, float] = {}

    def look(view: LayerView) -> None:
        removed = view.readings[0].z_edges(*edges)
        slope = slopes.grads[sites[view.layer].point][edges.batch, edges.dest]
        for head, value in enumerate(-(removed * slope).sum((0, 2))):
            found[view.layer, head] = float(value)

    with torch.no_grad():
        subject.visit(matches.tokens, look)
    return found


def exact_cuts(
    subject: LanguageModelSubject, probe: RepeatedTokens, heads: Sequence[Head]
) -> dict[Head, tuple[float, float]]:
    """Cut minus random control at offset 1, nats, with its standard error over sequences."""
    matches: Matches = probe_matches(probe)
    found: dict[Head, tuple[float, float]] = {}
    for layer in sorted({layer for layer, _ in heads}):
        units = [head for where, head in heads if where == layer]
        profile = offset_profile(
            subject.model, matches, offsets=[1], layers=[layer], units=units, controls=("random",)
        )
        for row, head in enumerate(units):
            found[layer, head] = profile.layers[0].effect(row, 1)
    return found


def random_heads(subject: LanguageModelSubject, heads: Sequence[Head], seed: int) -> list[Head]:
    """As many other heads of each layer (all of the layer's others where they are fewer)."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Head] = []
    for layer in sorted({layer for layer, _ in heads}):
        taken = {head for where, head in heads if where == layer}
        others = [head for head in range(subject.n_heads) if head not in taken]
        order = torch.randperm(len(others), generator=draw)[: len(taken)]
        found += [(layer, others[n]) for n in order.tolist()]
    return found


def _change(
    subject: LanguageModelSubject, probe: RepeatedTokens, heads: Sequence[Head], full: Tensor
) -> dict[str, float]:
    with zero_ablated(subject.model, heads, form=Form.CHUNKED):
        losses = subject.losses(probe.tokens).double()
    change = (losses - full).mean(0)
    return {
        "second_copy": float(change[probe.period + 1 :].mean()),
        "first_copy": float(change[: probe.period].mean()),
    }


def _handed(
    subject: LanguageModelSubject, probe: RepeatedTokens, case: dict, full: Tensor, top: Sequence[Head]
) -> list[tuple[str, float, float, float]]:
    """(what, handed, found, tolerance): losses, and the case's heads that are among the top nine."""
    tolerance = case["tolerance"]
    rows = [
        (
            "loss, first copy",
            case["loss"]["first_copy"],
            float(full[:, : probe.period].mean()),
            tolerance["mean_loss"],
        ),
        (
            "loss, second copy",
            case["loss"]["second_copy"],
            float(full[:, probe.period + 1 :].mean()),
            tolerance["mean_loss"],
        ),
    ]
    for head in case["heads"]:
        where = (head["layer"], head["head"])
        if where not in top:
            continue
        found = _change(subject, probe, [where], full)
        for part, value in found.items():
            name = f"{part.replace('_', ' ')} change, {where[0]}.{where[1]} zeroed"
            rows.append((name, head["ablation"][f"{part}_change"], value, tolerance["ablation_change"]))
    return rows


def _report(case, options, estimates, exact, top, zeroed, random, handed, seconds) -> str:
    second = torch.tensor([draw["second_copy"] for draw in random], dtype=torch.float64)
    first = torch.tensor([draw["first_copy"] for draw in random], dtype=torch.float64)
    rank = {head: n + 1 for n, head in enumerate(sorted(estimates, key=lambda h: -estimates[h]))}
    lines = [
        f"# SmolLM2-135M: the top {N_HEADS} heads by causal score",
        "",
        f"{datetime.date.today()} · {case['model']['name']} · probe P2 (16 x 50 tokens twice) · float32 on "
        f"CPU, {seconds:.0f} s · "
        "`python -m experiments.smollm2_ablation FILE.gguf --case CASE.json`",
        "",
        f"Heads {', '.join(f'{a}.{b}' for a, b in top)} zeroed together, loss change in nats:",
        "",
        "| zeroed | second copy | first copy |",
        "|---|---|---|",
        f"| top {N_HEADS} by causal score | {zeroed['second_copy']:+.3f} | {zeroed['first_copy']:+.3f} |",
        f"| {N_HEADS} random heads of the same layers, mean of {len(random)} draws (sd; largest) | "
        f"{second.mean():+.3f} ({second.std():.3f}; {second.max():+.3f}) | {first.mean():+.3f} "
        f"({first.std():.3f}; {first.max():+.3f}) |",
        "",
        "Causal score: cut of the edges to the follower of the earlier copy minus as many random edges, "
        f"{options.sequences} sequences, "
        f"of the {len(exact)} heads with the largest first-order estimates (4 sequences) of all "
        f"{len(estimates)}.",
        "",
        "| head | cut minus control (nats) | standard error | first-order estimate (rank) |",
        "|---|---|---|---|",
    ]
    for head in sorted(exact, key=lambda h: -exact[h][0]):
        effect, error = exact[head]
        lines.append(
            f"| {head[0]}.{head[1]} | {effect:.3f} | {error:.3f} | {estimates[head]:.3f} ({rank[head]}) |"
        )
    lines += ["", "Handed figures:", "", "| what | handed | found | within tolerance |", "|---|---|---|---|"]
    for name, expected, found, tolerance in handed:
        held = "yes" if abs(found - expected) <= tolerance else "**no**"
        lines.append(f"| {name} | {expected:.5f} | {found:.5f} | {held} ({tolerance:g}) |")
    return "\n".join(lines) + "\n"


def _say(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:.0f} s: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
