"""Reference outputs of whole models: tiny Hugging Face folders, and the scores of SmolLM2-135M from its GGUF
file.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from interp import copying, prefix_matching, previous_token
from interp.errors import DetectionError
from interp.sequences import RepeatedTokens
from interp.subject import LayerView, Subject
from models.errors import CheckpointError, ConfigError


@dataclass(kw_only=True)
class Deviations:
    """Largest excess over the tolerance among the numbers of a case; at most 1 is a pass."""

    worst: float = 0.0
    name: str = ""
    n: int = 0
    error: float = 0.0

    def compare(self, name: str, found: Any, expected: Any, atol: float, rtol: float = 0.0) -> None:
        """Note one number or tensor."""
        found = torch.as_tensor(found, dtype=torch.float64)
        expected = torch.as_tensor(expected, dtype=torch.float64)
        if found.shape != expected.shape:
            raise ValueError(f"{name} has shape {list(found.shape)}, the case has {list(expected.shape)}")
        excess = ((found - expected).abs() / (atol + rtol * expected.abs())).nan_to_num(nan=torch.inf)
        self.n += excess.numel()
        if float(excess.max()) >= self.worst:
            self.worst, self.name = float(excess.max()), name
            self.error = float((found - expected).abs().max())


@dataclass(kw_only=True)
class Outcome:
    """A case's name, and what was compared; or the reason why it is not supported."""

    name: str
    deviations: Deviations = field(default_factory=Deviations)
    not_supported: str | None = None
    failure: str | None = None


def tiny_models(folder: Path) -> Iterator[Outcome]:
    """Logits and attention maps of every model that `cases.json` lists, by every way that reads it."""
    index = json.loads((folder / "cases.json").read_text())
    for case in index["cases"]:
        outcome, refusals = Outcome(name=f"tiny {case['architecture']}"), []
        tensors = load_file(folder / case["case"])
        for way, load in _WAYS.items():
            try:
                subject = load((folder / case["config"]).parent)
            except (_NotRead, ConfigError) as reason:
                refusals.append(f"{way}: {reason}")
            except (CheckpointError, DetectionError) as error:
                outcome.failure = f"{way}: {error}"
            else:
                _compare_tiny(subject, tensors, index["tolerance"], outcome.deviations)
        if len(refusals) == len(_WAYS):
            outcome.not_supported = "; ".join(refusals)
        yield outcome


class _NotRead(Exception):
    """This way of reading does not read this architecture."""


def _by_bridge(folder: Path) -> Subject:
    from interp.bridge_subject import open_bridge

    model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    if model_type.startswith("mamba"):
        raise _NotRead(f"{model_type} is read into our own mixers, not through TransformerBridge")
    return open_bridge(folder)


def _by_mixers(folder: Path) -> Subject:
    from interp.subject import LanguageModelSubject
    from models.pretrained import from_pretrained

    return LanguageModelSubject(from_pretrained(folder))


_WAYS: dict[str, Callable[[Path], Subject]] = {
    "through TransformerBridge": _by_bridge,
    "in our mixers": _by_mixers,
}


def _compare_tiny(
    subject: Subject, case: dict[str, Tensor], tolerance: dict[str, dict[str, float]], found: Deviations
) -> None:
    tokens = case["input_ids"]
    found.compare("logits", subject.logits(tokens), case["logits"], **tolerance["logits"])

    def look(view: LayerView) -> None:
        name = f"attentions.{view.layer}"
        if name in case:
            found.compare(name, view.readings[0].weights(), case[name], **tolerance["attentions"])

    subject.visit(tokens, look)


def smollm2(case_file: Path, gguf: Path) -> Iterator[Outcome]:
    """The scores, losses and ablations of the case file, by our own instruments and mixers on the file's
    probes.
    """
    case = json.loads(case_file.read_text())
    subject = _by_mixers(gguf)
    probes = {
        name: RepeatedTokens(
            tokens=torch.tensor(probe["input_ids"]), period=probe["length"], repeats=probe["repeats"], bos=0
        )
        for name, probe in case["probes"].items()
    }
    for name, probe in probes.items():
        yield _smollm2_attention(subject, case, name, probe)
    yield _smollm2_copying(subject, case, probes["P1"])
    yield _smollm2_eigenvalues(subject, case)
    losses, yielded = _smollm2_losses(subject, case, probes["P2"])
    yield yielded
    yield _smollm2_ablations(subject, case, probes["P2"], losses)


def _wanted(case: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    layers: dict[int, list[dict[str, Any]]] = {}
    for head in case["heads"]:
        layers.setdefault(head["layer"], []).append(head)
    return layers


def _visit(subject: Subject, tokens: Tensor, look: Callable[[LayerView, slice], None]) -> None:
    for batch in subject.batches(*tokens.shape):
        subject.visit(tokens[batch], lambda view, batch=batch: look(view, batch))


@torch.no_grad()
def _smollm2_attention(subject: Subject, case: dict[str, Any], name: str, probe: RepeatedTokens) -> Outcome:
    layers, parts = _wanted(case), {}

    def look(view: LayerView, batch: slice) -> None:
        for head in layers.get(view.layer, []):
            pattern = view.readings[0].weights()[:, head["head"], None]
            parts.setdefault((view.layer, head["head"]), []).append(pattern)

    _visit(subject, probe.tokens, look)
    outcome = Outcome(name=f"SmolLM2 attention scores {name}")
    atol = case["tolerance"]["attention_scores"]
    for head in case["heads"]:
        pattern = torch.cat(parts[head["layer"], head["head"]])
        for key, value in _attention_scores(pattern, probe).items():
            label = f"{key} of {head['layer']}.{head['head']}"
            outcome.deviations.compare(label, value, head[name][key], atol)
    uniform = torch.ones(pattern.shape[-1], pattern.shape[-1], dtype=torch.float64).tril()
    uniform = (uniform / uniform.sum(-1, keepdim=True)).expand(len(probe.tokens), 1, -1, -1)
    scores = _attention_scores(uniform, probe)
    for key, expected in case["chance"][name].items():
        outcome.deviations.compare(f"chance of {key}", scores[key], expected, atol)
    chance = prefix_matching.uniform_chance(probe)
    outcome.deviations.compare("chance of rowsum", chance, case["chance"][name]["rowsum"], atol)
    return outcome


def _attention_scores(pattern: Tensor, probe: RepeatedTokens) -> dict[str, Any]:
    by_sequence = {
        name: prefix_matching.prefix_matching_by_sequence(pattern, probe, name)[:, 0]
        for name in prefix_matching.AGGREGATIONS
    }
    later = probe.first + probe.period
    sums = prefix_matching.target_weights(pattern, probe).sum(-1)[:, 0, later:].double()
    return {
        **{name: values.mean() for name, values in by_sequence.items()},
        "rowsum_se": prefix_matching.standard_error(by_sequence["rowsum"]),
        "rowsum_by_copy": sums.unflatten(-1, (-1, probe.period)).mean((0, 2)),
        "prev": previous_token.previous_token_score(pattern, first=2)[0],
        "prev_from_1": previous_token.previous_token_score(pattern, first=1)[0],
        "bos": pattern[:, 0, later:, 0].double().mean(),
    }


@torch.no_grad()
def _smollm2_copying(subject: Subject, case: dict[str, Any], probe: RepeatedTokens) -> Outcome:
    layers, parts = _wanted(case), {}
    tokens = probe.tokens[:, : probe.first + probe.period]

    def look(view: LayerView, batch: slice) -> None:
        if view.layer not in layers:
            return
        reading = view.readings[0]
        outputs, weights = copying.unit_outputs(reading), reading.weights()
        directions = subject.directions(tokens[batch])
        for name, options in _COPYING.items():
            score = copying.logit_copying(outputs, reading.W_out, weights, directions, bos=True, **options)
            parts.setdefault((view.layer, name), []).append(score)
        parts.setdefault((view.layer, "bos_weight"), []).append(weights[:, :, 1:, 0].double())

    _visit(subject, tokens, look)
    outcome = Outcome(name="SmolLM2 copying, logit")
    atol = case["tolerance"]["copy_logit"]
    for head in case["heads"]:
        layer, unit = head["layer"], head["head"]
        for name in _COPYING:
            scores = parts[layer, name]
            four = torch.cat([4 * score.ratio[:, unit] - 1 for score in scores]).nanmean()
            two = torch.cat([2 * score.two_ratio[:, unit] - 1 for score in scores]).nanmean()
            label = f"{name} of {layer}.{unit}"
            outcome.deviations.compare(label, four, head["copy_logit"][name], atol)
            outcome.deviations.compare(f"2r {label}", two, head["copy_logit"][f"{name}_2r"], atol)
        weight = torch.cat([part[:, unit] for part in parts[layer, "bos_weight"]]).mean()
        outcome.deviations.compare(
            f"bos_weight of {layer}.{unit}", weight, head["copy_logit"]["bos_weight"], atol
        )
    return outcome


_COPYING: dict[str, dict[str, Any]] = {
    "all": {"with_bos": True},
    "no_bos": {"with_bos": False},
    "argmax_all": {"with_bos": True, "attended": "argmax"},
    "argmax_no_bos": {"with_bos": False, "attended": "argmax"},
}
_FOLDING = {"folded": {}, "unfolded": {"fold": False}, "folded_centred": {"centre": True}}


@torch.no_grad()
def _smollm2_eigenvalues(subject: Subject, case: dict[str, Any]) -> Outcome:
    outcome = Outcome(name="SmolLM2 copying, eigenvalues")
    factors: dict[int, LayerView] = {}
    subject.visit(torch.tensor([[0, 1000]]), lambda view: factors.update({view.layer: view}))
    for layer, heads in _wanted(case).items():
        units = [head["head"] for head in heads]
        for name, options in _FOLDING.items():
            gram = subject.gram(layer, **options)
            scores = copying.eigenvalue_copying(factors[layer].W_V[units], factors[layer].W_O[units], gram)
            for head, score in zip(heads, scores, strict=True):
                label = f"{name} of {layer}.{head['head']}"
                expected = head["copy_eigen"][name]
                outcome.deviations.compare(label, score, expected, case["tolerance"]["copy_eigen"])
    return outcome


def _smollm2_losses(subject: Subject, case: dict[str, Any], probe: RepeatedTokens) -> tuple[Tensor, Outcome]:
    outcome, expected, tolerance = Outcome(name="SmolLM2 losses"), case["loss"], case["tolerance"]
    losses = subject.losses(probe.tokens).double()
    found = outcome.deviations
    found.compare(
        "loss by position", losses.mean(0), expected["per_position"], tolerance["per_position_loss"]
    )
    for name, part in _parts(losses, probe).items():
        found.compare(name, part.mean(), expected[name], tolerance["mean_loss"])
    edge = losses[:, probe.period].mean()
    found.compare("first token", edge, expected["second_copy_first_token"], tolerance["per_position_loss"])
    for name, part in _parts(_hits(subject, probe.tokens), probe).items():
        key = f"accuracy_{name}"
        found.compare(key, part.mean(), expected[key], tolerance["accuracy"])
    return losses, outcome


def _parts(values: Tensor, probe: RepeatedTokens) -> dict[str, Tensor]:
    return {"first_copy": values[:, : probe.period], "second_copy": values[:, probe.period + 1 :]}


@torch.no_grad()
def _hits(subject: Subject, tokens: Tensor) -> Tensor:
    parts = [
        subject.logits(tokens[batch])[:, :-1].argmax(-1) == tokens[batch][:, 1:]
        for batch in subject.batches(*tokens.shape)
    ]
    return torch.cat(parts).double()


def _smollm2_ablations(subject: Any, case: dict[str, Any], probe: RepeatedTokens, full: Tensor) -> Outcome:
    outcome = Outcome(name="SmolLM2 ablations")
    for head in case["heads"]:
        layer, unit = head["layer"], head["head"]

        def cut(z: Tensor, hook: Any, unit: int = unit) -> Tensor:
            z = z.clone()
            z.view(*z.shape[:2], subject.n_heads, -1)[:, :, unit] = 0
            return z

        with subject.model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", cut)]):
            ablated = subject.losses(probe.tokens).double()
        for name, part in _parts(ablated - full, probe).items():
            label, expected = f"{name} without {layer}.{unit}", head["ablation"][f"{name}_change"]
            outcome.deviations.compare(label, part.mean(), expected, case["tolerance"]["ablation_change"])
    return outcome
