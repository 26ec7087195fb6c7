"""What each part contributes: attribution patching, direct logit attribution, logit lens; for every mixer.

Attribution patching is activation patching to first order: (source - base) . d metric / d activation, for all
sites from one forward and backward pass of the base run and one forward pass of the source run (Nanda 2023;
Syed et al. 2023, arXiv:2310.10348). Direct logit attribution and the logit lens freeze nothing but the final
norm's scale and are exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import InterventionError
from interp.heads import Head, pair_of
from interp.patching import Metric, Recording, measured, record
from interp.sites import BY_POSITION, TAP, Site, common_form, selected
from models.form import Form
from models.language_model import LanguageModel


def attribution_patching(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    source_tokens: Int[Tensor, "batch seq"],
    sites: Sequence[Site],
    metric: Metric,
    *,
    form: Form | str | None = None,
) -> Float[Tensor, " site"]:
    """First-order estimate of how much the metric changes when each site is taken from the source run.

    Args:
        metric: Of the logits, a scalar (a mean, say); tensors are summed.
        form: None is PARALLEL, or RECURRENT where a site (the recurrent state) fires in no other form.

    Raises:
        InterventionError: token shapes that differ, a site of kind "tap" (it has no activation of its own),
        or as `patching.record`.
    """
    if tokens.shape != source_tokens.shape:
        raise InterventionError(
            f"source_tokens have shape {list(source_tokens.shape)}; accepted: that of tokens, "
            f"{list(tokens.shape)}"
        )
    form = common_form(model, sites, form)
    if any(site.kind == TAP for site in sites):
        raise InterventionError(
            "a site of kind 'tap' has no activation of its own; accepted: conv, or activation patching"
        )
    source = record(model, source_tokens, sites, form=form)
    found = gradients(model, tokens, sites, metric, form=form)
    return torch.stack([found.change(site, source) for site in sites])


@dataclass(frozen=True)
class Gradients:
    """Activations of a run and the metric's gradients there: hook point -> tensor, as `Recording` has
    them.
    """

    values: dict[str, Tensor]
    grads: dict[str, Tensor]

    def change(self, site: Site, source: Recording) -> Float[Tensor, ""]:
        """First-order change of the metric with the site taken from a recording."""
        own, grad = self.values[site.point], self.grads[site.point]
        other = source.of(site)
        if other.shape != own.shape:
            raise InterventionError(
                f"{site.label}: the source has shape {list(other.shape)}, this run {list(own.shape)}; "
                "accepted: equal ones"
            )
        by_place = [x if site.kind in BY_POSITION else site.by_position(x) for x in (own, grad, other)]
        at = slice(None) if site.positions is None else list(site.positions)
        length = by_place[0].shape[1]
        if beyond := [position for position in site.positions or () if position >= length]:
            raise InterventionError(
                f"position {beyond[0]} is beyond the run's {length}; accepted: 0..{length - 1}"
            )
        a, g, b = (x[selected(site, at)] for x in by_place)
        return ((b - a) * g).sum()


def gradients(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    sites: Sequence[Site],
    metric: Metric,
    *,
    form: Form | str | None = None,
) -> Gradients:
    """One forward and one backward pass; parameters get no gradients."""
    form = common_form(model, sites, form)
    points = list(dict.fromkeys(site.point for site in sites))
    fired: dict[str, list[Tensor]] = {point: [] for point in points}

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        # Without this, nothing below the first trained parameter would have a gradient.
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        fired[hook.name].append(tensor)
        return tensor

    with torch.enable_grad(), model.hooks(fwd_hooks=[(point, keep) for point in points], form=form):
        value = measured(metric, model(tokens)).sum()
    flat = [tensor for tensors in fired.values() for tensor in tensors]
    slopes = iter(torch.autograd.grad(value, flat, allow_unused=True))

    def joined(point: str, tensors: list[Tensor]) -> Tensor:
        if model.hook_forms[point] == {Form.RECURRENT}:
            return torch.stack(tensors, 1)
        return torch.cat(tensors, model.pos_dim(point))

    values, grads = {}, {}
    for point, tensors in fired.items():
        found = [next(slopes) for _ in tensors]
        grads[point] = joined(
            point, [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]
        )
        values[point] = joined(point, [t.detach() for t in tensors])
    return Gradients(values, grads)


@dataclass(frozen=True, kw_only=True)
class LogitAttribution:
    """Contributions to chosen tokens' logits at each position, nats; over components they sum to those
    logits.

    `labels`: "embed", "pos_embed", "L0H1" (a head), "L0" (Mamba-1: the mixer), "L0 bias", "L0 MLP", "bias".
    """

    labels: tuple[str, ...]
    values: Float[Tensor, "component batch seq"]

    def of(self, label: str | Head) -> Float[Tensor, "batch seq"]:
        """One component's contribution, by label, pair (layer, head) or record; Mamba-1's mixers are
        (layer, None).
        """
        if not isinstance(label, str):
            layer, head = pair_of(label)
            label = f"L{layer}" if head is None else f"L{layer}H{head}"
        if label not in self.labels:
            raise InterventionError(f"no component {label!r}; accepted: {', '.join(self.labels)}")
        return self.values[self.labels.index(label)]


@torch.no_grad()
def direct_logit_attribution(
    model: LanguageModel, tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"] | None = None
) -> LogitAttribution:
    """What each component adds to the logit of each position's target token, the final norm's scale frozen.

    Args:
        targets: Default: the next token (at the last position, the last token itself).

    Raises:
        InterventionError: targets of another shape than tokens.
    """
    if targets is None:
        targets = torch.cat((tokens[:, 1:], tokens[:, -1:]), 1)
    if targets.shape != tokens.shape:
        raise InterventionError(
            f"targets have shape {list(targets.shape)}; accepted: that of tokens, {list(tokens.shape)}"
        )
    low, high = (int(end) for end in targets.aminmax())
    if low < 0 or high >= model.config.d_vocab:
        worst = low if low < 0 else high
        raise InterventionError(f"target {worst} is out of range; accepted: 0..{model.config.d_vocab - 1}")
    directions = model.tokens_to_residual_directions(targets)
    if getattr(model.ln_final, "kind", None) == "layer":
        directions = directions - directions.mean(-1, keepdim=True)
    names, labels = _components(model)
    _, cache = model.run_with_cache(tokens, names_filter=names, return_cache_object=False, return_type=None)
    if "ln_final.hook_scale" in cache:
        directions = directions / cache.pop("ln_final.hook_scale")
    found: dict[str, Tensor] = {}
    for name, label in labels.items():
        written = cache[name]
        if written.ndim == 4:
            by_head = torch.einsum("bthd,btd->hbt", written, directions)
            found |= {f"{label}H{head}": part for head, part in enumerate(by_head)}
            layer = int(label[1:])
            bias = model.blocks[layer].attn.b_O
            if bool(bias.any()):
                found[f"{label} bias"] = directions @ bias
        else:
            found[label] = (written * directions).sum(-1)
    found["bias"] = model.logit_bias[targets].to(directions.dtype)
    return LogitAttribution(labels=tuple(found), values=torch.stack(list(found.values())))


def _components(model: LanguageModel) -> tuple[list[str], dict[str, str]]:
    """Hook points that together write the final residual stream, and their labels."""
    labels = {"hook_embed": "embed"}
    if "hook_pos_embed" in model.hook_dict:
        labels["hook_pos_embed"] = "pos_embed"
    for layer, block in enumerate(model.blocks):
        # Mamba-1 has a head for each channel: the mixer as a whole is the unit.
        point = "hook_attn_out" if block.attn.kind == "mamba1" else "attn.hook_result"
        labels[f"blocks.{layer}.{point}"] = f"L{layer}"
        if block.mlp is not None:
            labels[f"blocks.{layer}.hook_mlp_out"] = f"L{layer} MLP"
    scale = ["ln_final.hook_scale"] if "ln_final.hook_scale" in model.hook_dict else []
    return [*labels, *scale], labels


@torch.no_grad()
def logit_lens(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    *,
    reduce: Callable[[Float[Tensor, "batch seq d_vocab"]], Tensor] | None = None,
) -> Float[Tensor, "depth batch seq d_vocab"]:
    """The logits that the final norm and the unembedding read from the residual stream after 0, 1, ..
    n_layers layers.

    Args:
        reduce: Applied to each depth's logits, so that they need not all be kept (a loss, an argmax).

    Returns:
        Entry n is read before layer n; the last entry is the model's own logits. Source: nostalgebraist 2020.
    """
    n_layers = model.config.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n_layers)]
    names.append(f"blocks.{n_layers - 1}.hook_resid_post")
    _, cache = model.run_with_cache(
        tokens, names_filter=names, return_cache_object=False, return_type=None, form=Form.CHUNKED
    )
    depths = []
    for name in names:
        logits = model.unembed(model.ln_final(cache[name]))
        depths.append(logits if reduce is None else reduce(logits))
    return torch.stack(depths)
