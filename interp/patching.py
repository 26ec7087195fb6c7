"""Activation patching: activations of one run put into another, by context managers that leave nothing
behind.

    source = record(model, clean, sites)
    with patched(model, sites, source):
        logits = model(corrupt)

A patch acts in whole-sequence runs and token by token (`step`, `generate`), at positions counted from the
start of the text. What is put into a recurrent state stays in it: all later tokens read the patched state.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.conv_input import ConvInput
from interp.displayed import Displayed
from interp.errors import InterventionError
from interp.sites import BY_POSITION, TAP, Site, check_head, check_layer, common_form, selected
from models.form import Form
from models.language_model import LanguageModel, ModelState

Metric = Callable[[Float[Tensor, "batch seq d_vocab"]], Tensor]


@dataclass(frozen=True)
class Recording:
    """Activations of one run: hook point (or `blocks.l.attn.conv_input`) -> tensor."""

    values: dict[str, Tensor]

    def of(self, site: Site) -> Tensor:
        """What was recorded at a site: all heads, positions and channels of its point.

        Raises:
            InterventionError: the recording was made for other sites.
        """
        name = conv_input_name(site) if site.kind == TAP else site.point
        if name not in self.values:
            raise InterventionError(f"{name!r} was not recorded; recorded: {', '.join(self.values)}")
        return self.values[name]


def conv_input_name(site: Site) -> str:
    """Name under which the input of a layer's convolution is recorded."""
    return f"blocks.{site.layer}.attn.conv_input"


@torch.no_grad()
def record(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    sites: Sequence[Site],
    *,
    form: Form | str | None = None,
) -> Recording:
    """One run, and what it has at each site.

    Args:
        form: None is PARALLEL, or RECURRENT where a site (the recurrent state) fires in no other form.

    Raises:
        InterventionError, UnknownHook, HookNotFired: see `sites.checked`; before anything runs.
    """
    form = common_form(model, sites, form)
    names = list(dict.fromkeys(site.point for site in sites))
    layers = sorted({site.layer for site in sites if site.kind == TAP})
    with ExitStack() as stack:
        inputs = {layer: stack.enter_context(ConvInput(model.blocks[layer].attn)) for layer in layers}
        _, cache = model.run_with_cache(
            tokens, names_filter=names, form=form, return_cache_object=False, return_type=None
        )
        values = dict(cache)
        for layer, seen in inputs.items():
            values[f"blocks.{layer}.attn.conv_input"] = seen.last.clone()
    return Recording(values)


@contextmanager
def patched(
    model: LanguageModel, sites: Sequence[Site], source: Recording, *, form: Form | str | None = None
) -> Iterator[LanguageModel]:
    """The model with the source's activations at these sites, in every run inside the context.

    Raises:
        InterventionError: a site that does not exist or was not recorded, or shapes that differ (when the run
        meets them). UnknownHook, HookNotFired: before anything runs.
    """
    form = common_form(model, sites, form)
    for site in sites:
        source.of(site)
    clock = Clock()
    with ExitStack() as stack:
        hooks: list[tuple[str, Callable]] = [("hook_embed", clock)]
        for site in sites:
            if site.kind == TAP:
                seen = stack.enter_context(ConvInput(model.blocks[site.layer].attn))
                hooks.append((site.point, _tap_hook(site, source.of(site), seen)))
            else:
                hooks.append((site.point, _value_hook(site, source.of(site), clock)))
        stack.enter_context(model.hooks(fwd_hooks=hooks, form=form))
        yield model


class Clock:
    """A hook on `hook_embed` that knows the position of the first token of the current run."""

    def __init__(self):
        self.position = 0

    def __call__(self, tensor: Tensor, hook: Any) -> None:
        self.position = hook.ctx["position"]

    def reset(self) -> None:
        """For a run that starts above the embedding."""
        self.position = 0


def _value_hook(site: Site, source: Tensor, clock: Clock) -> Callable:
    def put(fired: Tensor, hook: Any) -> Tensor | None:
        one = site.kind in BY_POSITION
        start = hook.ctx["position"] if one else clock.position
        own = fired.clone()
        view = own[:, None] if one else site.by_position(own)
        local, at = _places(site, start, view.shape[1], source)
        if not local:
            return None
        value = _as_source(site, source)[selected(site, at)]
        target = view[selected(site, local)]
        if value.shape[1:] != target.shape[1:] or value.shape[0] not in (1, target.shape[0]):
            raise InterventionError(
                f"{site.label}: the source has shape {list(value.shape)}, this run {list(target.shape)}; "
                "accepted: equal ones"
            )
        view[selected(site, local)] = value.to(own.dtype)
        return own

    return put


def _as_source(site: Site, source: Tensor) -> Tensor:
    return source if site.kind in BY_POSITION else site.by_position(source)


def _places(site: Site, start: int, seq: int, source: Tensor) -> tuple[list[int], list[int]]:
    """Positions in this run that are patched, and where the source has them."""
    length = _as_source(site, source).shape[1]
    if site.positions is None:
        # A run that goes on beyond the source is left alone there.
        at = range(start, min(start + seq, length))
    else:
        if beyond := [p for p in site.positions if p >= length]:
            raise InterventionError(
                f"position {beyond[0]} is beyond the source's {length}; accepted: 0..{length - 1}"
            )
        at = [p for p in site.positions if start <= p < start + seq]
    return [p - start for p in at], list(at)


def _tap_hook(site: Site, source: Tensor, seen: ConvInput) -> Callable:
    def put(fired: Tensor, hook: Any) -> Tensor:
        own = seen.last
        if source.shape != own.shape:
            raise InterventionError(
                f"{site.label}: the source has shape {list(source.shape)}, this run {list(own.shape)}; "
                "accepted: equal ones, "
                "and whole sequences (a tap is not patched token by token)"
            )
        changed = seen.output(own, (source - own).to(own.dtype), site.lag)
        if site.positions is None and site.channels is None:
            return changed
        found = fired.clone()
        at = list(range(own.shape[1]) if site.positions is None else site.positions)
        index = selected(site, at)
        found[index] = changed[index]
        return found

    return put


@dataclass(frozen=True, kw_only=True)
class PatchingResult(Displayed, display="patching"):
    """A metric with each site patched, beside the two unpatched runs."""

    sites: tuple[Site, ...]
    values: Float[Tensor, "site *metric"]
    base: Float[Tensor, "*metric"]
    source: Float[Tensor, "*metric"]

    @property
    def recovered(self) -> Float[Tensor, "site *metric"]:
        """Share of the way from the base run to the source run: 0 changes nothing, 1 is the whole
        difference. NaN where the two runs have the same metric: there is no way to go.
        """
        way = self.source - self.base
        return torch.where(way == 0, torch.nan, (self.values - self.base) / way)


@torch.no_grad()
def activation_patching(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    source_tokens: Int[Tensor, "batch seq"],
    sites: Sequence[Site],
    metric: Metric,
    *,
    form: Form | str | None = None,
) -> PatchingResult:
    """The metric of the logits of `tokens` with one site at a time taken from the run on `source_tokens`.

    Only the layers from each site's on are run again.

    Raises:
        InterventionError: token shapes that differ, a metric that gives no tensor, or as `record`.
    """
    if tokens.shape != source_tokens.shape:
        raise InterventionError(
            f"source_tokens have shape {list(source_tokens.shape)}; accepted: that of tokens, "
            f"{list(tokens.shape)}"
        )
    form = common_form(model, sites, form)
    source = record(model, source_tokens, sites, form=form)
    starts = [Site(kind="resid_pre", layer=layer) for layer in sorted({site.layer for site in sites})]
    resid = {
        site.layer: value for site, value in zip(starts, _values(model, tokens, starts, form), strict=True)
    }
    found = []
    for site in sites:
        with patched(model, [site], source, form=form):
            found.append(measured(metric, model(resid[site.layer], start_at_layer=site.layer)))
    plain = [measured(metric, model(t, form=form)) for t in (tokens, source_tokens)]
    return PatchingResult(sites=tuple(sites), values=torch.stack(found), base=plain[0], source=plain[1])


def measured(metric: Metric, logits: Float[Tensor, "batch seq d_vocab"]) -> Tensor:
    """The metric of some logits.

    Raises:
        InterventionError: the metric gives no tensor.
    """
    value = metric(logits)
    if not isinstance(value, Tensor):
        raise InterventionError(f"the metric gave {value!r}; accepted: a tensor, such as a loss")
    return value


def _values(model: LanguageModel, tokens: Tensor, sites: Sequence[Site], form: Form) -> list[Tensor]:
    recording = record(model, tokens, sites, form=form)
    return [recording.of(site) for site in sites]


def swapped_state(
    model: LanguageModel,
    state: ModelState,
    source: ModelState,
    layer: int,
    *,
    head: int | None = None,
    conv: bool = True,
) -> ModelState:
    """`state` with one layer's memory taken from another sequence's, to be continued by `step` or `prefill`.

    Args:
        head: One head's part of the memory; None is the layer's. For softmax: a key head of the cache, for
            Mamba-1 a channel. The convolution's last inputs (and the last key of smeared keys) belong to no
            head.
        conv: Take them too, with `head` None.

    Raises:
        InterventionError: a layer or head out of range, or states after different numbers of tokens.
    """
    check_layer(model, layer)
    if state.position != source.position:
        raise InterventionError(
            f"the source state is after {source.position} tokens; accepted: as many as the other, "
            f"{state.position}"
        )
    mixer = model.blocks[layer].attn
    if head is not None:
        check_head(mixer, head, "k" if mixer.kind == "softmax" else "z")
    own, other = state.mixers[layer], source.mixers[layer]
    merged = _merged(mixer.kind, own, other, head)
    if head is None and conv:
        extras = {name: getattr(other, name) for name in ("conv", "smear") if hasattr(other, name)}
        merged = replace(merged, **extras)
    mixers = (*state.mixers[:layer], merged, *state.mixers[layer + 1 :])
    return ModelState(mixers, state.position)


def _merged(kind: str, own: Any, other: Any, head: int | None) -> Any:
    def take(a: Tensor | None, b: Tensor | None, axis: int = 1) -> Tensor | None:
        if a is None or head is None:
            return b
        index = (slice(None),) * axis + (head,)
        found = a.clone()
        found[index] = b[index]
        return found

    if kind == "softmax":
        kv = replace(own.kv, k=take(own.kv.k, other.kv.k, 2), v=take(own.kv.v, other.kv.v, 2))
        return replace(own, kv=kv)
    if kind == "linear":
        linear = replace(
            own.linear, s=take(own.linear.s, other.linear.s), z=take(own.linear.z, other.linear.z)
        )
        return replace(own, linear=linear)
    return replace(own, ssm=take(own.ssm, other.ssm))
