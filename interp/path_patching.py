"""Path patching: what one head's output does through chosen receivers, all other components held where they
were.

The sender's output is taken from the source run. Its change reaches the chosen receivers along the residual
stream alone (and through the MLPs between, if asked); everything else keeps the output of the base run. From
the receivers on, everything is computed anew. Norms are computed anew at each receiver; nothing is
linearised. With all receivers this is the full patch of the sender.

Source: Wang et al. 2022, arXiv:2211.00593; Goldowsky-Dill et al. 2023, arXiv:2304.05969.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.errors import InterventionError
from interp.patching import Metric, measured, record
from interp.sites import Site, check_head, check_layer, n_heads_of
from models.form import Form
from models.language_model import LanguageModel
from models.mixers.base import Mixer
from models.whole import is_whole

# What a mixer computes from its input, by kind: together they decide its output.
PARTS = {
    "softmax": ("q", "k", "v"),
    "linear": ("q", "k", "v"),
    "mamba1": ("q", "k", "v", "dt", "gate"),
    "mamba2": ("q", "k", "v", "dt", "gate"),
}
# The form in which parts are computed: they fire in all forms.
_FORM = Form.CHUNKED


@dataclass(frozen=True, kw_only=True)
class Sender:
    """A component whose output is patched: a head, a whole mixer (head None) or an MLP.

    A head of Mamba-1 is a channel. `HeadScore.unit_key` gives layer and head of a record.
    """

    layer: int
    head: int | None = None
    kind: Literal["mixer", "mlp"] = "mixer"


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """An input that sees the sender directly: a part of a mixer (of one head, or all), an MLP, or "logits".

    Heads are counted as in `sites.Site`: key heads for k and v, groups for Mamba-2's q and k. Mamba-1's parts
    have none.
    """

    kind: str
    layer: int | None = None
    head: int | None = None


def all_receivers(model: LanguageModel, sender: Sender) -> list[Receiver]:
    """Every input after the sender."""
    found = []
    for layer in range(sender.layer, model.config.n_layers):
        block = model.blocks[layer]
        if layer > sender.layer:
            found += [Receiver(kind=part, layer=layer) for part in PARTS[block.attn.kind]]
        if block.mlp is not None and (
            layer > sender.layer or (sender.kind == "mixer" and not block.parallel)
        ):
            found.append(Receiver(kind="mlp", layer=layer))
    return [*found, Receiver(kind="logits")]


@torch.no_grad()
def patch_paths(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    source_tokens: Int[Tensor, "batch seq"],
    sender: Sender,
    receivers: Sequence[Receiver] | None = None,
    *,
    through_mlps: bool = False,
) -> Float[Tensor, "batch seq d_vocab"]:
    """Logits of `tokens` where the receivers see the sender's output on `source_tokens`.

    Args:
        receivers: None is all of them.
        through_mlps: MLPs between sender and receivers pass the change on, seen by the receivers only.

    Raises:
        InterventionError: token shapes that differ; a layer, head or part that does not exist; a receiver
        that does not come after the sender.
    """
    receivers = all_receivers(model, sender) if receivers is None else list(receivers)
    _check(model, tokens, source_tokens, sender, receivers)
    run = _Run(model, tokens, sender, receivers, through_mlps)
    change = _output(model, source_tokens, sender) - _output(model, tokens, sender)
    return run(change)


def path_patching_scores(
    model: LanguageModel,
    tokens: Int[Tensor, "batch seq"],
    source_tokens: Int[Tensor, "batch seq"],
    senders: Sequence[Sender],
    receivers: Sequence[Receiver],
    metric: Metric,
    *,
    through_mlps: bool = False,
) -> Float[Tensor, "sender receiver"]:
    """The metric for each pair of a sender and one receiver; NaN where the receiver does not come after the
    sender.
    """
    nothing = measured(metric, model(tokens)).detach() * torch.nan
    rows = []
    for sender in senders:
        row = [
            metric(patch_paths(model, tokens, source_tokens, sender, [receiver], through_mlps=through_mlps))
            if _comes_after(model, sender, receiver)
            else nothing
            for receiver in receivers
        ]
        rows.append(torch.stack(row))
    return torch.stack(rows)


class _Run:
    """The base run's activations, and the pass above the sender."""

    def __init__(
        self,
        model: LanguageModel,
        tokens: Tensor,
        sender: Sender,
        receivers: list[Receiver],
        through_mlps: bool,
    ):
        self.model, self.sender, self.through_mlps = model, sender, through_mlps
        self.receivers = receivers
        layers = range(sender.layer, model.config.n_layers)
        kinds = {"resid_pre": layers, "mixer_out": layers, "resid_post": layers[-1:]}
        serial = [layer for layer in layers if model.blocks[layer].mlp is not None]
        kinds |= {
            "mlp_out": serial,
            "resid_mid": [layer for layer in serial if not model.blocks[layer].parallel],
        }
        sites = [Site(kind=kind, layer=layer) for kind, where in kinds.items() for layer in where]
        recording = record(model, tokens, sites, form=_FORM)
        self.base = {(site.kind, site.layer): recording.of(site) for site in sites}

    def __call__(self, change: Tensor) -> Tensor:
        """Logits. `free` is what everything sees, `direct` what the receivers see beside it."""
        free, direct = torch.zeros_like(change), torch.zeros_like(change)
        for layer in range(self.sender.layer, self.model.config.n_layers):
            before = (free, direct)
            if layer > self.sender.layer:
                free = free + self._mixer(layer, free, direct)
            elif self.sender.kind == "mixer":
                direct = direct + change
            if self.model.blocks[layer].mlp is None:
                continue
            if layer == self.sender.layer and self.sender.kind == "mlp":
                direct = direct + change
                continue
            seen = before if self.model.blocks[layer].parallel else (free, direct)
            to_all, to_receivers = self._mlp(layer, *seen)
            free, direct = free + to_all, direct + to_receivers
        last = self.base["resid_post", self.model.config.n_layers - 1] + free
        if Receiver(kind="logits") in self.receivers:
            last = last + direct
        return self.model.unembed(self.model.ln_final(last))

    def _mixer(self, layer: int, free: Tensor, direct: Tensor) -> Tensor:
        """Change of a mixer's output, where it sees `free` and its receivers `direct` too."""
        block = self.model.blocks[layer]
        resid = self.base["resid_pre", layer] + free
        replaced = self._replacements(layer, resid + direct)
        with self.model.hooks(fwd_hooks=replaced, form=_FORM):
            out = block.attn(block.ln1(resid), _FORM)
        return out - self.base["mixer_out", layer]

    def _replacements(self, layer: int, seen: Tensor) -> list[tuple[str, Callable]]:
        """Hooks that put the receivers' parts, computed from `seen`, into a mixer."""
        block = self.model.blocks[layer]
        wanted = [r for r in self.receivers if r.layer == layer and r.kind != "mlp"]
        if not wanted:
            return []
        at = f"blocks.{layer}.attn.hook_"
        kept: dict[str, Tensor] = {}

        def keep(part: str) -> Callable:
            return lambda fired, hook: kept.__setitem__(part, fired)

        with self.model.hooks([(at + part, keep(part)) for part in {r.kind for r in wanted}], form=_FORM):
            block.attn(block.ln1(seen), _FORM)
        return [(at + r.kind, _put(block.attn, r, kept[r.kind])) for r in wanted]

    def _mlp(self, layer: int, free: Tensor, direct: Tensor) -> tuple[Tensor, Tensor]:
        """Change of an MLP's output that everything sees, and what only receivers see of it."""
        block = self.model.blocks[layer]
        base = self.base["resid_pre" if block.parallel else "resid_mid", layer]

        def run(resid: Tensor) -> Tensor:
            return block.mlp(block.ln2(resid)) - self.base["mlp_out", layer]

        if Receiver(kind="mlp", layer=layer) in self.receivers:
            return run(base + free + direct), torch.zeros_like(free)
        to_all = run(base + free)
        return to_all, run(base + free + direct) - to_all if self.through_mlps else torch.zeros_like(free)


def _put(mixer: Mixer, receiver: Receiver, value: Tensor) -> Callable:
    def put(fired: Tensor, hook: object) -> Tensor:
        if receiver.head is None:
            return value
        found = fired.clone()
        if receiver.kind == "gate":
            width = mixer.d_head
            found[..., receiver.head * width : (receiver.head + 1) * width] = value[
                ..., receiver.head * width : (receiver.head + 1) * width
            ]
        else:
            found[:, :, receiver.head] = value[:, :, receiver.head]
        return found

    return put


def _output(model: LanguageModel, tokens: Tensor, sender: Sender) -> Float[Tensor, "batch seq d_model"]:
    kind = "mlp_out" if sender.kind == "mlp" else "mixer_out" if sender.head is None else "result"
    found = record(model, tokens, [Site(kind=kind, layer=sender.layer, head=sender.head)], form=_FORM)
    value = next(iter(found.values.values()))
    return value if sender.head is None else value[:, :, sender.head]


def _comes_after(model: LanguageModel, sender: Sender, receiver: Receiver) -> bool:
    if receiver.kind == "logits":
        return True
    same = receiver.layer == sender.layer and receiver.kind == "mlp" and sender.kind == "mixer"
    return receiver.layer > sender.layer or (same and not model.blocks[receiver.layer].parallel)


def _check(
    model: LanguageModel, tokens: Tensor, source_tokens: Tensor, sender: Sender, receivers: list[Receiver]
) -> None:
    if tokens.shape != source_tokens.shape:
        raise InterventionError(
            f"source_tokens have shape {list(source_tokens.shape)}; accepted: that of tokens, "
            f"{list(tokens.shape)}"
        )
    check_layer(model, sender.layer)
    block = model.blocks[sender.layer]
    if sender.kind == "mlp" and (block.mlp is None or sender.head is not None):
        raise InterventionError(f"{sender}: accepted for an MLP: a layer that has one, and no head")
    if sender.head is not None:
        check_head(block.attn, sender.head)
    for receiver in receivers:
        _check_receiver(model, receiver)
        if not _comes_after(model, sender, receiver):
            raise InterventionError(
                f"{receiver} does not come after {sender}; accepted: a later layer, or logits"
            )


def _check_receiver(model: LanguageModel, receiver: Receiver) -> None:
    if receiver.kind == "logits":
        return
    if receiver.layer is None:
        raise InterventionError(f"{receiver} has no layer; accepted without one: logits")
    check_layer(model, receiver.layer)
    block = model.blocks[receiver.layer]
    if receiver.kind == "mlp" and block.mlp is not None:
        return
    parts = PARTS[block.attn.kind]
    if receiver.kind not in parts:
        accepted = ", ".join((*parts, *(["mlp"] if block.mlp is not None else []), "logits"))
        raise InterventionError(f"layer {receiver.layer} has no part {receiver.kind!r}; accepted: {accepted}")
    if receiver.head is None:
        return
    if block.attn.kind == "mamba1":
        raise InterventionError(f"head {receiver.head} of a part of Mamba-1, which has none; accepted: None")
    kind = receiver.kind if receiver.kind in ("q", "k", "v") else "z"
    n = n_heads_of(block.attn, kind)
    if not is_whole(receiver.head) or not 0 <= receiver.head < n:
        raise InterventionError(
            f"head index {receiver.head} is out of range for {receiver.kind}; accepted: 0..{n - 1}"
        )
