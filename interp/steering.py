"""Steering an induction head: off, on, scaled, or moved to another offset, while the model runs or generates.

    with steer(model, Steering(layer=1, head=2, scale=0.0), form=Form.RECURRENT):
        model.generate(prompt, 50)

Two levels:

output  What the head reads is changed, at each position for itself: z_i, or only its edges from earlier
copies. An edge
        s + offset -> i (x_s = x_i) is cut by taking A[i,j] v_j out; moved by putting A[i,j] v_j' in, j' = s +
        to. Exact in every form; token by token the weights come from the keys, steps and decays kept since
        the start of the text.
state   What the head writes is changed, and stays changed for all later tokens: values are scaled, or
        replaced by those `offset - to` positions before, as they enter the state (softmax: the cache).
        Constant memory. A move here moves whatever the head attends to, and Mamba's skip reads the changed
        value too.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.displayed import Displayed
from interp.errors import InterventionError
from interp.offset_cuts import mean, standard_error
from interp.offset_edges import probe_matches, window_matches
from interp.sequences import RepeatedTokens
from interp.sites import check_head, check_layer
from interp.steering_edges import LayerMemory, Text
from interp.subject import next_token_losses
from models.form import Form
from models.language_model import LanguageModel
from models.whole import is_whole


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What is done to one head.

    Attributes:
        head: None is the whole layer. Mamba-1: a channel; `HeadScore.unit_key` gives None for a scored layer.
        scale: Factor on what the head moves: 0 is off, 1 on.
        offset: Only the edges from `offset` places after earlier copies of the token (delta*); None is
            everything.
        to: The edges at `offset` lead to this offset instead, with the same weights. An edge whose new source
            would not come before its destination stays as it is.
        start, stop: Positions of the text at which it is done; stop None is no end.
        level: "output" or "state"; see the module.
        ignored: Ids that match nothing, such as BOS.
    """

    layer: int
    head: int | None = None
    scale: float = 1.0
    offset: int | None = None
    to: int | None = None
    start: int = 0
    stop: int | None = None
    level: Literal["output", "state"] = "output"
    ignored: frozenset[int] = field(default_factory=frozenset)


@contextmanager
def steer(
    model: LanguageModel, steering: Steering | Sequence[Steering], *, form: Form | str | None = None
) -> Iterator[LanguageModel]:
    """The model steered, in whole-sequence runs and token by token, for as long as the context is open.

    Args:
        form: Of the runs inside that name none; None is that of the context around this one, or PARALLEL.

    Raises:
        InterventionError: a layer, head, offset or level that does not exist; token by token, a text that was
        not seen from its start.
    """
    steerings = [steering] if isinstance(steering, Steering) else list(steering)
    if not steerings:
        raise InterventionError("no steering is given; accepted: at least one")
    for one in steerings:
        _check(model, one)
    text = Text()
    hooks = [("hook_embed", text.see)]
    for layer in dict.fromkeys(one.layer for one in steerings):
        own = [one for one in steerings if one.layer == layer]
        mixer = model.blocks[layer].attn
        points = []
        if any(one.level == "state" for one in own):
            points += [("hook_v", _Writes(own, text))]
        if any(one.offset is not None and one.level == "output" for one in own):
            memory = LayerMemory(mixer, text)
            points += memory.hooks()
        else:
            memory = None
        points.append(("hook_z", _Reads(own, text, memory)))
        hooks += [(f"blocks.{layer}.attn.{name}", hook) for name, hook in points]
    with model.hooks(fwd_hooks=hooks, form=form):
        yield model


class _Reads:
    """The hook on a layer's z: level "output"."""

    def __init__(self, steerings: list[Steering], text: Text, memory: LayerMemory | None):
        self.steerings = [one for one in steerings if one.level == "output"]
        self.text, self.memory = text, memory

    def __call__(self, z: Tensor, hook: object) -> Tensor:
        found = z.clone()
        for one in self.steerings:
            here = self.text.inside(one.start, one.stop)
            if one.offset is not None:
                pairs = self.text.matches(one.offset, one.to, here, one.ignored)
                found += self.memory.change(pairs, one.head, one.scale).to(z.dtype)
            elif one.scale != 1:
                chosen = slice(None) if one.head is None else one.head
                found[:, here, chosen] = found[:, here, chosen] * one.scale
        return found


class _Writes:
    """The hook on a layer's values: level "state"."""

    def __init__(self, steerings: list[Steering], text: Text):
        self.steerings = [one for one in steerings if one.level == "state"]
        self.text = text
        self.delays = [0 if one.to is None else one.offset - one.to for one in self.steerings]
        self.past: Tensor | None = None

    def __call__(self, v: Tensor, hook: object) -> Tensor:
        longest = max(self.delays)
        if self.text.start == 0 or self.past is None:
            self.past = torch.zeros_like(v[:, :1]).repeat(1, longest, *[1] * (v.ndim - 2))
        known = torch.cat((self.past, v), 1)
        found = v.clone()
        for one, delay in zip(self.steerings, self.delays, strict=True):
            here = self.text.inside(one.start, one.stop)
            chosen = slice(None) if one.head is None else one.head
            before = known[:, longest - delay : known.shape[1] - delay]
            found[:, here, chosen] = before[:, here, chosen] * one.scale
        self.past = known[:, known.shape[1] - longest :]
        return found


@dataclass(frozen=True, kw_only=True)
class SteeringEffect(Displayed, display="steering"):
    """Losses with and without steering, by sequence, nats.

    `repeat` is over the positions of the probe that induction predicts, `ordinary` over the others: of the
    text given, or of the probe's first copy.
    """

    repeat: Float[Tensor, " sequence"]
    repeat_steered: Float[Tensor, " sequence"]
    ordinary: Float[Tensor, " window"]
    ordinary_steered: Float[Tensor, " window"]
    form: Form

    def change(self, which: Literal["repeat", "ordinary"]) -> tuple[float, float]:
        """Steered minus plain: mean and standard error over sequences."""
        values = getattr(self, f"{which}_steered") - getattr(self, which)
        return float(mean(values)), float(standard_error(values))

    def to_dict(self) -> dict[str, object]:
        """Means, and changes with their standard errors."""
        found: dict[str, object] = {"form": self.form.value}
        for which in ("repeat", "ordinary"):
            change, error = self.change(which)
            found |= {
                f"{which}_loss_nats": float(mean(getattr(self, which))),
                f"{which}_loss_steered_nats": float(mean(getattr(self, f"{which}_steered"))),
                f"{which}_change_nats": change,
                f"{which}_change_se_nats": error,
            }
        return found


@torch.no_grad()
def steering_effect(
    model: LanguageModel,
    steering: Steering | Sequence[Steering],
    probe: RepeatedTokens,
    *,
    windows: Int[Tensor, "window seq"] | None = None,
    form: Form | str = Form.PARALLEL,
) -> SteeringEffect:
    """What steering does to the loss at repeats and to the ordinary loss.

    Args:
        windows: Text whose positions that induction does not predict make the ordinary loss; None: the first
            copy.
        form: In which both are measured. RECURRENT runs token by token, on the state.

    Raises:
        InterventionError: as `steer`. DetectionError: a probe in which nothing comes again.
    """
    form = Form.of(form)
    matches = probe_matches(probe)
    matches.check()
    repeated = matches.scored
    if windows is None:
        first = torch.arange(repeated.shape[1], device=repeated.device) < probe.first + probe.period - 1
        texts = [(probe.tokens, repeated, first.expand_as(repeated) & ~repeated)]
    else:
        texts = [(probe.tokens, repeated, None), (windows, None, ~window_matches(windows).scored)]
    kept: dict[str, Tensor] = {}
    for tokens, at_repeat, at_ordinary in texts:
        plain = next_token_losses(model(tokens, form=form), tokens)
        with steer(model, steering, form=form):
            steered = next_token_losses(model(tokens), tokens)
        for name, at in (("repeat", at_repeat), ("ordinary", at_ordinary)):
            if at is not None:
                kept[name], kept[f"{name}_steered"] = _means(plain, at), _means(steered, at)
    return SteeringEffect(form=form, **kept)


def _means(losses: Tensor, at: Tensor) -> Tensor:
    return torch.where(at, losses.double(), torch.nan).nanmean(1)


def _check(model: LanguageModel, one: Steering) -> None:
    check_layer(model, one.layer)
    mixer = model.blocks[one.layer].attn
    if one.level not in ("output", "state"):
        raise InterventionError(f"level is {one.level!r}; accepted: 'output', 'state'")
    if not math.isfinite(one.scale):
        raise InterventionError(f"scale is {one.scale}; accepted: a finite number")
    if one.head is not None:
        check_head(mixer, one.head)
        if one.level == "state" and getattr(mixer, "n_kv_heads", mixer.n_heads) != mixer.n_heads:
            raise InterventionError(
                f"head {one.head} shares its values with others; accepted on the state: None"
            )
    if one.to is not None and one.offset is None:
        raise InterventionError(f"to is {one.to} without an offset; accepted: both, or neither")
    for name in ("offset", "to", "start", "stop"):
        value = getattr(one, name)
        if value is not None and not is_whole(value):
            raise InterventionError(f"{name} is {value!r}; accepted: a whole number")
    for name in ("offset", "to"):
        value = getattr(one, name)
        if value is not None and not 0 <= value < model.config.n_ctx:
            raise InterventionError(f"{name} is {value}; accepted: 0..{model.config.n_ctx - 1}")
    if one.start < 0 or (one.stop is not None and one.stop < one.start):
        raise InterventionError(f"positions {one.start}..{one.stop}; accepted: 0 <= start <= stop")
    if one.level == "state" and one.offset is not None and (one.to is None or one.to > one.offset):
        raise InterventionError(
            f"offset {one.offset} to {one.to} on the state; accepted: a move to an earlier offset (a later "
            "value is not "
            "there yet when the state is written), or level 'output'"
        )
