"""Where in a model an intervention acts: a kind of activation, a layer, and perhaps a head, positions or
channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interp.errors import InterventionError
from interp.heads import Head, Pair, pair_of
from interp.records import HeadScore
from models.errors import UnknownHook, closest
from models.form import Form
from models.language_model import LanguageModel
from models.mixers.base import RECURRENT_ONLY, Mixer
from models.whole import is_whole

# Kind -> hook point of a block. Axes of what fires: [batch seq ...], with heads third where there are heads;
# pattern and scores are [batch head dest src], the state [batch head ...] at one position.
_POINTS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "mixer_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "z": "attn.hook_z",
    "result": "attn.hook_result",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "pattern": "attn.hook_pattern",
    "conv": "attn.hook_conv",
    "gate": "attn.hook_gate",
    "dt": "attn.hook_dt",
    "state": "attn.hook_state",
    "write": "attn.hook_write",
}
# The share of one tap in the convolution's output: no point of its own, so `conv` is edited.
TAP = "tap"
KINDS = (*_POINTS, TAP)
_BY_HEAD = ("z", "result", "q", "k", "v", "pattern", "state", "write")
BY_POSITION = ("state", "write")


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place.

    Attributes:
        kind: One of `KINDS`. "mixer_out" is what the mixer writes to the residual stream, "z" a head's output
            before the output projection, "tap" what the convolution takes from `lag` positions before.
        head: None is all of them. Of k and v under grouped keys: a key head; of Mamba-2's q and k: a group;
            of Mamba-1's z, v, pattern and state: a channel.
        positions: Positions in the text (destinations, for a pattern); None is all.
        channels: (start, stop) of the last axis, for "conv" and "tap"; None is all.
        lag: For "tap": 0 is the current input.
    """

    kind: str
    layer: int
    head: int | None = None
    positions: tuple[int, ...] | None = None
    channels: tuple[int, int] | None = None
    lag: int | None = None

    @property
    def point(self) -> str:
        """The hook point's name."""
        return f"blocks.{self.layer}.{_POINTS['conv' if self.kind == TAP else self.kind]}"

    @property
    def label(self) -> str:
        """A short name, such as `z 1.2` (layer 1, head 2)."""
        where = f"{self.kind} {self.layer}" + ("" if self.head is None else f".{self.head}")
        where += "" if self.lag is None else f" lag {self.lag}"
        return where if self.positions is None else f"{where} @ {','.join(map(str, self.positions))}"

    def by_position(self, fired: Tensor) -> Tensor:
        """A view of what the point fires (or of a recording of it) as [batch position head ...]."""
        return fired.movedim(2, 1) if self.kind == "pattern" else fired


def head_sites(
    model: LanguageModel,
    kind: str = "z",
    layers: Iterable[int] | None = None,
    *,
    heads: Iterable[Head] | None = None,
) -> list[Site]:
    """Every head of every layer (those given), as sites; for Mamba-1 every channel.

    Args:
        heads: Pairs (layer, head) or `HeadScore` records: these alone, head None (a record of a whole layer)
            being the whole of the layer's activation.

    Raises:
        InterventionError: a layer or head out of range, or both `layers` and `heads`.
    """
    if heads is not None:
        if layers is not None:
            raise InterventionError("layers and heads are both given; accepted: one of them")
        return [
            Site(kind=kind, layer=layer, head=head) for layer, head in checked_pairs(model, heads, kind)
        ]
    chosen = range(model.config.n_layers) if layers is None else layers
    found = []
    for layer in chosen:
        check_layer(model, layer)
        found += [
            Site(kind=kind, layer=layer, head=h) for h in range(n_heads_of(model.blocks[layer].attn, kind))
        ]
    return found


def checked_pairs(model: LanguageModel, heads: Iterable[Head], kind: str = "z") -> list[Pair]:
    """The pairs (layer, head) that are meant, if the model has them.

    Raises:
        InterventionError: none given, as `heads.pair_of`, or a layer or head out of range.
    """
    if isinstance(heads, HeadScore):
        raise InterventionError("heads is one record; accepted: a list, like [record]")
    found = [pair_of(one) for one in heads]
    if not found:
        raise InterventionError("no heads are given; accepted: at least one (layer, head)")
    for layer, head in found:
        check_layer(model, layer)
        if head is not None:
            check_head(model.blocks[layer].attn, head, kind)
    return found


def check_layer(model: LanguageModel, layer: int) -> None:
    """Raises InterventionError where the model has no such layer."""
    last = model.config.n_layers - 1
    if not is_whole(layer):
        raise InterventionError(f"layer {layer!r} is no whole number; accepted: 0..{last}")
    if not 0 <= layer <= last:
        raise InterventionError(f"layer index {layer} is out of range; accepted: 0..{last}")


def check_head(mixer: Mixer, head: int, kind: str = "z") -> None:
    """Raises InterventionError where a mixer has no such head."""
    n = n_heads_of(mixer, kind)
    if not is_whole(head):
        raise InterventionError(f"head {head!r} is no whole number; accepted: 0..{n - 1}")
    if not 0 <= head < n:
        raise InterventionError(
            f"head index {head} is out of range for {kind} of a {mixer.kind} mixer; accepted: 0..{n - 1}"
        )


def n_heads_of(mixer: Mixer, kind: str) -> int:
    """How many heads an activation of a mixer has."""
    if kind not in _BY_HEAD:
        raise InterventionError(f"{kind!r} has no heads; accepted with a head: {', '.join(_BY_HEAD)}")
    if kind in ("k", "v") and hasattr(mixer, "n_kv_heads"):
        return mixer.n_kv_heads
    if kind in ("q", "k") and mixer.kind.startswith("mamba"):
        return getattr(mixer, "n_groups", 1)
    return mixer.n_heads


def checked(model: LanguageModel, site: Site, form: Form | None = None) -> Site:
    """The site, if the model has it and it fires in `form`.

    Raises:
        InterventionError: a kind, layer, head, position, lag or range of channels that does not exist.
        UnknownHook: the layer has no such activation. HookNotFired: not in this form.
    """
    if site.kind not in KINDS:
        raise InterventionError(f"no kind of site {site.kind!r}{closest(site.kind, KINDS)}")
    check_layer(model, site.layer)
    mixer = model.blocks[site.layer].attn
    if site.kind == "state" and mixer.kind == "softmax":
        raise UnknownHook(
            f"layer {site.layer} is softmax attention, whose state is its cache: patch k and v, or use "
            "swapped_state"
        )
    model.resolve_hook(site.point, form)
    if site.head is not None:
        check_head(mixer, site.head, site.kind)
    if site.positions is not None and not site.positions:
        raise InterventionError("positions are (); accepted: None for all, or at least one")
    for position in site.positions or ():
        if not is_whole(position):
            raise InterventionError(f"position {position!r} is no whole number; accepted: 0 and up")
        if position < 0:
            raise InterventionError(f"position {position} is negative; accepted: 0 and up")
    _check_channels(mixer, site)
    return site


def _check_channels(mixer: Mixer, site: Site) -> None:
    if (site.lag is not None) != (site.kind == TAP):
        raise InterventionError(
            f"lag is {site.lag} for a site of kind {site.kind!r}; accepted: a lag exactly for {TAP!r}"
        )
    if site.kind == TAP:
        width = mixer.conv1d.weight.shape[-1]
        if not is_whole(site.lag) or not 0 <= site.lag < width:
            raise InterventionError(f"lag is {site.lag}; accepted: 0..{width - 1}")
    if site.channels is None:
        return
    if site.kind not in ("conv", TAP):
        raise InterventionError(
            f"channels are given for a site of kind {site.kind!r}; accepted for: conv, {TAP}"
        )
    n = mixer.conv1d.weight.shape[0]
    whole = len(site.channels) == 2 and all(map(is_whole, site.channels))
    if not whole or not 0 <= site.channels[0] < site.channels[1] <= n:
        raise InterventionError(f"channels are {site.channels}; accepted: 0 <= start < stop <= {n}")


def common_form(model: LanguageModel, sites: Iterable[Site], form: Form | str | None) -> Form:
    """The form asked for; None is RECURRENT where a site fires in no other, else PARALLEL. Every site is
    checked.
    """
    sites = list(sites)
    if not sites:
        raise InterventionError("no sites are given; accepted: at least one")
    if form is None:
        only = any(model.hook_forms[checked(model, site).point] == RECURRENT_ONLY for site in sites)
        form = Form.RECURRENT if only else Form.PARALLEL
    form = Form.of(form)
    for site in sites:
        checked(model, site, form)
    return form


def selected(site: Site, at: Any) -> tuple[Any, ...]:
    """Index of a site's share in its [batch position head ...] view, at these positions."""
    index: tuple[Any, ...] = (slice(None), at)
    if site.head is not None:
        index = (*index, site.head)
    if site.channels is not None:
        index = (*index, slice(*site.channels))
    return index
