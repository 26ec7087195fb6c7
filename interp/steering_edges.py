"""Edges of the running text and their weights, whole sequences or token by token: what steering cuts and
moves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp.errors import InterventionError
from kernels import softmax_attention
from models.mixers.base import Mixer
from models.mixers.entries import LinearEntries, ScanEntries

# What decides a mixer's weights, by kind; softmax with rotary positions has rot_q and rot_k for q and k.
_INPUTS = {
    "softmax": ("q", "k", "v"),
    "linear": ("q", "k", "v"),
    "mamba1": ("q", "k", "v", "dt"),
    "mamba2": ("q", "k", "v", "dt", "decay"),
}


class Moves(NamedTuple):
    """Edges of a batch: dest reads src, and is to read `new` instead (None: the edge is only scaled)."""

    batch: Int64[Tensor, " n"]
    dest: Int64[Tensor, " n"]
    src: Int64[Tensor, " n"]
    new: Int64[Tensor, " n"] | None


class Text:
    """The tokens seen since the start of the text; the latest run began at `start`."""

    def __init__(self):
        self.tokens: Tensor | None = None
        self.start = 0

    def see(self, tensor: Tensor, hook: object) -> None:
        """The hook on `hook_embed`."""
        position, tokens = hook.ctx["position"], hook.ctx["tokens"]
        known = 0 if position == 0 or self.tokens is None else self.tokens.shape[1]
        if position != known:
            raise InterventionError(
                f"the text goes on at position {position}, steering has seen {known}; accepted: a text from "
                "its start on"
            )
        self.start = position
        self.tokens = tokens if position == 0 else torch.cat((self.tokens, tokens), 1)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def inside(self, start: int, stop: int | None) -> slice:
        """Positions start .. stop of the text, counted in the latest run."""
        last = self.length if stop is None else min(stop, self.length)
        return slice(max(start - self.start, 0), max(last - self.start, 0))

    def matches(self, offset: int, to: int | None, here: slice, ignored: frozenset[int]) -> Moves:
        """Edges s + offset -> i with x_s = x_i, s < i, of the latest run's positions `here`; self-edges left
        out.
        """
        place = torch.arange(self.length, device=self.tokens.device)
        dest = place[self.start :][here]
        own = self.tokens[:, dest]
        same = (own[:, :, None] == self.tokens[:, None]) & (place < dest[:, None])
        for token in ignored:
            same &= (own != token)[:, :, None]
        batch, row, s = same.nonzero(as_tuple=True)
        i, src = dest[row], s + offset
        kept = src < i
        if to is not None:
            kept &= s + to < i
        new = None if to is None else (s + to)[kept]
        return Moves(batch[kept], i[kept], src[kept], new)


class LayerMemory:
    """What one layer's weights and values are made of, at every position since the start of the text."""

    def __init__(self, mixer: Mixer, text: Text):
        self.mixer, self.text = mixer, text
        self.seen: dict[str, Tensor] = {}
        self.lse: Tensor | None = None

    def hooks(self) -> list[tuple[str, Callable]]:
        """Hooks that fill it; they have to fire before `change` is asked for."""
        rope = getattr(self.mixer, "rope", None) is not None
        points = {part: f"hook_{part}" for part in _INPUTS[self.mixer.kind]}
        if rope:
            points |= {"q": "hook_rot_q", "k": "hook_rot_k"}

        def keep(part: str) -> Callable:
            def see(fired: Tensor, hook: object) -> None:
                before = self.seen.get(part) if self.text.start else None
                self.seen[part] = fired if before is None else torch.cat((before, fired), 1)

            return see

        return [(point, keep(part)) for part, point in points.items()]

    def change(self, moves: Moves, head: int | None, scale: float) -> Float[Tensor, "batch seq head d_head"]:
        """Change of z in the latest run: each edge's A[i,j] v_j replaced by scale A[i,j] v_new."""
        v = self._by_head(self.seen["v"])
        weight = self._weights(moves)
        put = v[moves.batch, moves.src if moves.new is None else moves.new] * scale
        change = weight[..., None] * (put - v[moves.batch, moves.src]).to(weight.dtype)
        if head is not None:
            others = torch.arange(v.shape[2], device=v.device) != head
            change = change.masked_fill(others[:, None], 0)
        n_batch, seq = v.shape[0], self.text.length - self.text.start
        total = change.new_zeros(n_batch * seq, *v.shape[2:])
        total.index_add_(0, moves.batch * seq + moves.dest - self.text.start, change)
        return total.view(n_batch, seq, *v.shape[2:])

    def _by_head(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.mixer.n_heads // x.shape[2], 2)

    def _weights(self, moves: Moves) -> Float[Tensor, "n head"]:
        """A on the edges."""
        edges, seen, mixer = (moves.batch, moves.dest, moves.src), self.seen, self.mixer
        if mixer.kind == "softmax":
            return self._softmax(*edges)
        if mixer.kind == "mamba1":
            entries = ScanEntries(
                dt=seen["dt"], A_log=mixer.A_log, B=seen["k"][:, :, 0], C=seen["q"][:, :, 0], by_state=False
            )
            return entries.edges(*edges)[:, 0]
        if mixer.kind == "mamba2":
            options = {"log_decay": seen["decay"], "k_weight": seen["dt"]}
            q, k = seen["q"], seen["k"]
        else:
            options = {
                "normalise": mixer.config.normalise,
                "eps": mixer.config.eps if mixer.config.normalise else 0.0,
            }
            q, k = mixer.feature_map(seen["q"]), mixer.feature_map(seen["k"])
        return LinearEntries(q=q, k=k, n_units=mixer.n_heads, **options).edges(*edges)[..., 0]

    def _softmax(self, batch: Tensor, dest: Tensor, src: Tensor) -> Tensor:
        mixer, start = self.mixer, self.text.start
        q, k = self.seen["q"], self.seen["k"]
        options = {"scale": mixer.scale, "window": mixer.config.window, "sink": mixer.sink}
        lse = softmax_attention.logsumexp(q[:, start:], k, **options).transpose(1, 2)
        scores = (q[batch, dest] * self._by_head(k)[batch, src]).sum(-1) * mixer.scale
        weight = torch.exp(scores - lse[batch, dest - start])
        if mixer.config.window is not None:
            weight = weight * (src > dest - mixer.config.window)[:, None]
        return weight
