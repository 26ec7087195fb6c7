"""Ablations of heads, as context managers: zero, mean, resample; patterns held; a pattern replaced by an
ideal one.

`hook_z` is a head's output before the output projection. For Mamba it holds the skip D x beside A x:
`part="mixing"` takes out only what A moved between positions, `part="output"` the whole.

`heads` are pairs (layer, head), or the `HeadScore` records of a detection. In a pair a number is a head of
softmax or linear attention or of Mamba-2; Mamba-1 has no heads, and there it is one CHANNEL of d_inner. None
is the whole mixer. A record stands for what was scored: on Mamba-1 with unit "layer" that is (layer, None),
not (layer, 0).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import InterventionError
from interp.heads import Head, Pair
from interp.patching import Clock, record
from interp.sites import Site, checked_pairs
from models.form import Form
from models.language_model import LanguageModel

PARTS = ("output", "mixing")


@contextmanager
def zero_ablated(
    model: LanguageModel, heads: Sequence[Head], *, part: str = "output", form: Form | str | None = None
) -> Iterator[LanguageModel]:
    """Heads that write nothing, in every run inside the context.

    Args:
        heads: Pairs (layer, head) or records; a number is a channel of Mamba-1, None the whole mixer (see the
            module).
        part: "output", or "mixing": A set to 0, so that Mamba's skip stays (PARALLEL only).
        form: None is the form of the context around this one, or PARALLEL.

    Raises:
        InterventionError: a layer or head out of range, a record of a state index or cluster, or another
            part. HookNotFired: "mixing" in another form.
    """
    pairs = checked_pairs(model, heads)
    if part not in PARTS:
        raise InterventionError(f"part is {part!r}; accepted: {', '.join(PARTS)}")
    point, axis = ("hook_z", 2) if part == "output" else ("hook_pattern", 1)
    with model.hooks(fwd_hooks=_edits(pairs, point, axis, lambda own, *_: torch.zeros_like(own)), form=form):
        yield model


@contextmanager
def mean_ablated(
    model: LanguageModel,
    heads: Sequence[Head],
    tokens: Int[Tensor, "batch seq"],
    *,
    by_position: bool = False,
    form: Form | str | None = None,
) -> Iterator[LanguageModel]:
    """Heads that write their mean output over reference sequences.

    Args:
        heads: As `zero_ablated`.
        tokens: The reference. `by_position`: a mean for each position, for runs of at most its length; else
            one mean.

    Raises:
        InterventionError: as `zero_ablated`; when the model runs, positions beyond those that have a mean.
    """
    pairs = checked_pairs(model, heads)
    found = _recorded(model, tokens, pairs)
    means = {layer: z.mean(0 if by_position else (0, 1), keepdim=True) for layer, z in found.items()}
    shared = ("batch",) if by_position else ("batch", "seq")
    with _put_z(model, pairs, means, form, shared):
        yield model


@contextmanager
def resample_ablated(
    model: LanguageModel,
    heads: Sequence[Head],
    tokens: Int[Tensor, "batch seq"],
    *,
    form: Form | str | None = None,
) -> Iterator[LanguageModel]:
    """Heads that write what they write on other sequences of the same shape, position by position.

    Args:
        heads: As `zero_ablated`.
        tokens: As many sequences as each run inside has, and at least as many positions.

    Raises:
        InterventionError: as `zero_ablated`; when the model runs, another batch or too few positions.
    """
    pairs = checked_pairs(model, heads)
    with _put_z(model, pairs, _recorded(model, tokens, pairs), form, ()):
        yield model


@contextmanager
def patterns_held(
    model: LanguageModel, tokens: Int[Tensor, "batch seq"], *, heads: Sequence[Head] | None = None
) -> Iterator[LanguageModel]:
    """Implied attention as it is on `tokens`, in every layer or the given heads, whatever the values become.

    Inside it, an ablation takes out what a head's values carry and no later pattern moves with it: Olsson's
    pattern-preserving ablation, `with patterns_held(model, tokens), zero_ablated(model, heads):
    model(tokens)`.

    Args:
        heads: As `zero_ablated`.

    Raises:
        InterventionError: as `zero_ablated`; when the model runs, tokens of another shape.
    """
    chosen = [(layer, None) for layer in range(model.config.n_layers)] if heads is None else heads
    chosen = checked_pairs(model, chosen)
    sites = [Site(kind="pattern", layer=layer) for layer in dict.fromkeys(layer for layer, _ in chosen)]
    found = record(model, tokens, sites)
    held = {site.layer: found.of(site) for site in sites}

    def hold(own: Tensor, layer: int) -> Tensor:
        if held[layer].shape != own.shape:
            raise InterventionError(
                f"the patterns are held on tokens of shape {list(tokens.shape)}, this run has "
                f"{[own.shape[0], own.shape[-1]]}; accepted: equal ones"
            )
        return held[layer]

    with model.hooks(fwd_hooks=_edits(chosen, "hook_pattern", 1, hold), form=Form.PARALLEL):
        yield model


@contextmanager
def idealised_pattern(
    model: LanguageModel,
    layer: int,
    head: int | None,
    pattern: Float[Tensor, "*batch dest src"],
    *,
    keep_mass: bool = False,
) -> Iterator[LanguageModel]:
    """A head whose implied attention is replaced by a given one (see `ideal_patterns`).

    Args:
        layer, head: `*record.unit_key` gives them for a record; Mamba-1's numbers are channels, None is all.
        pattern: [dest src], or one for each sequence. Rows of zeros leave the head's own row.
        keep_mass: Each row multiplied by the sum of the head's own |A| there, for mixers whose rows do not
            sum to 1.

    Raises:
        InterventionError: a layer or head out of range; when the model runs, a pattern of another shape.
    """
    pairs = checked_pairs(model, [(layer, head)])

    def ideal(own: Tensor, _: int) -> Tensor:
        one, each = list(own.shape[-2:]), [own.shape[0], *own.shape[-2:]]
        if list(pattern.shape) not in (one, each):
            n_batch, dest, src = each
            raise InterventionError(
                f"the pattern has shape {list(pattern.shape)}; accepted: [.. {dest} {src}], the first axis "
                f"{n_batch} where there is one"
            )
        # A head axis for patterns by sequence.
        given = pattern if pattern.ndim == 2 else pattern[:, None]
        given = given.to(own).expand_as(own)
        placed = given * own.abs().sum(-1, keepdim=True) if keep_mass else given
        return torch.where(given.any(-1, keepdim=True), placed, own)

    with model.hooks(fwd_hooks=_edits(pairs, "hook_pattern", 1, ideal), form=Form.PARALLEL):
        yield model


def _edits(
    heads: Sequence[Pair], point: str, axis: int, value: Callable[[Tensor, int], Tensor]
) -> list[tuple[str, Callable]]:
    """One hook for each layer: `value(own, layer)` in place of the chosen heads."""
    by_layer: dict[int, list[int | None]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)

    def hook(layer: int, chosen: list[int | None]) -> Callable:
        def edit(own: Tensor, hook: Any) -> Tensor:
            new = value(own, layer)
            if None in chosen:
                return new.to(own.dtype)
            found = own.clone()
            index = (slice(None),) * axis + (chosen,)
            found[index] = new[index].to(own.dtype)
            return found

        return edit

    return [(f"blocks.{layer}.attn.{point}", hook(layer, chosen)) for layer, chosen in by_layer.items()]


def _recorded(model: LanguageModel, tokens: Tensor, heads: Sequence[Pair]) -> dict[int, Tensor]:
    sites = [Site(kind="z", layer=layer) for layer in dict.fromkeys(layer for layer, _ in heads)]
    found = record(model, tokens, sites, form=Form.CHUNKED)
    return {site.layer: found.of(site) for site in sites}


@contextmanager
def _put_z(
    model: LanguageModel,
    heads: Sequence[Pair],
    values: dict[int, Tensor],
    form: Form | str | None,
    shared: tuple[str, ...],
) -> Iterator[None]:
    """`values` in place of the heads' z; `shared` names the axes along which they are one for all."""
    clock = Clock()

    def put(own: Tensor, layer: int) -> Tensor:
        value = values[layer]
        if "seq" not in shared:
            value = value[:, clock.position : clock.position + own.shape[1]]
        wanted = [1 if name in shared else n for name, n in zip(("batch", "seq"), own.shape[:2], strict=True)]
        if list(value.shape[:2]) != wanted:
            raise InterventionError(
                f"the reference has shape {list(values[layer].shape)}, this run {list(own.shape)} from "
                f"position {clock.position}; accepted: equal batches and at least as many positions"
            )
        return value.expand_as(own)

    with model.hooks(fwd_hooks=[("hook_embed", clock), *_edits(heads, "hook_z", 2, put)], form=form):
        yield
