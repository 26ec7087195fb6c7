"""Block-level patching probes: does a block carry a token to the next position, match it, and at which lag?

The names are those of Cheng et al. (arXiv:2609.15545), whose text was not at hand: the definitions below are
this project's own, made from the one-line descriptions (carry token s into position s + 1's stream; use it to
match at i).

A probe is distinct tokens tiled twice, so i = s + period. A corrupted run has other tokens at some first-copy
positions, far enough apart that none touches another's window; everything is read at the i of those. Effects
are losses of x_{i+1} with something patched into the clean run, minus the clean loss, in nats; positive: the
block is used.

* Carrying: x_s corrupted; the block's output at s + 1 alone is taken from the corrupted run.
* Matching: x_s corrupted; the block's output at i alone is taken from the corrupted run.
* Lag(delta): x_{s+delta} corrupted; the block's input at s + delta alone is taken from the corrupted run, and
  of what that changes only the block's output at i is kept.
* Control of each: the same patch with the token at s + control corrupted, which induction at i does not need.

A block that carries and matches inside itself (a short convolution, then the match) reads Carrying 0 and
Matching
high: what it carries never enters the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp.edge_cuts import listening
from interp.errors import DetectionError
from interp.offset_cuts import mean, standard_error
from interp.offset_edges import probe_matches
from interp.sequences import RepeatedTokens
from models.language_model import LanguageModel

LAGS = (-1, 0, 1, 2, 3, 4)
# Where the control corrupts, from s: before everything that a window of four taps sees.
CONTROL = -4
# Distance of corrupted positions: the windows of two must not meet.
STRIDE = 10


@dataclass(frozen=True, kw_only=True)
class BlockProbe:
    """One block's probes, by sequence, nats."""

    layer: int
    mixer: str
    carrying: Float[Tensor, " sequence"]
    carrying_control: Float[Tensor, " sequence"]
    matching: Float[Tensor, " sequence"]
    matching_control: Float[Tensor, " sequence"]
    lags: tuple[int, ...]
    lag: Float[Tensor, "lag sequence"]

    def to_dict(self) -> dict[str, object]:
        """Means and standard errors over sequences."""
        found: dict[str, object] = {"layer": self.layer, "mixer": self.mixer, "lags": list(self.lags)}
        for name in ("carrying", "carrying_control", "matching", "matching_control", "lag"):
            values = getattr(self, name)
            found[f"{name}_nats"] = mean(values).tolist()
            found[f"{name}_se_nats"] = standard_error(values).tolist()
        return found


@torch.no_grad()
def block_probes(
    model: LanguageModel,
    probe: RepeatedTokens,
    *,
    layers: Sequence[int] | None = None,
    lags: Sequence[int] = LAGS,
    seed: int = 0,
) -> tuple[BlockProbe, ...]:
    """Carrying, Matching and Lag of each block.

    Args:
        probe: Distinct tokens tiled twice; long enough for windows of 10 positions.
        seed: Of the tokens put in, drawn from those that the sequence does not hold.

    Raises:
        DetectionError: a probe of more than two copies, too short or with duplicates; a vocabulary without a
            token to put in; a layer that does not exist.
    """
    setting = _Setting(model, probe, seed)
    n_layers = model.config.n_layers
    chosen = range(n_layers) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < n_layers:
            raise DetectionError(f"layer index {layer} is out of range; accepted: 0..{n_layers - 1}")
    corrupted = {delta: setting.corrupted(delta) for delta in {0, CONTROL, *lags}}
    found = []
    for layer in chosen:
        carrying, matching = (
            [setting.output_patched(layer, corrupted[delta], setting.read[place]) for delta in (0, CONTROL)]
            for place in ("next", "dest")
        )
        lag = [setting.input_patched(layer, delta, corrupted[delta]) for delta in lags]
        found.append(
            BlockProbe(
                layer=layer,
                mixer=model.config.mixers[layer].kind,
                carrying=carrying[0],
                carrying_control=carrying[1],
                matching=matching[0],
                matching_control=matching[1],
                lags=tuple(lags),
                lag=torch.stack(lag),
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class _Run:
    """Input and output of every mixer on one set of sequences."""

    inputs: list[Float[Tensor, "batch seq d_model"]]
    outputs: list[Float[Tensor, "batch seq d_model"]]


class _Setting:
    """A probe in copies, each with its own corrupted positions, and the clean run of it."""

    def __init__(self, model: LanguageModel, probe: RepeatedTokens, seed: int):
        if probe.repeats != 2:
            raise DetectionError(
                f"a probe of {probe.repeats} copies; accepted: 2 (one earlier copy to corrupt)"
            )
        probe_matches(probe)
        self.model, self.seed = model, seed
        first, period = probe.first - CONTROL, probe.period
        last = probe.first + period - max(LAGS) - 1
        if last <= first:
            raise DetectionError(
                f"a period of {period} is too short for windows of {max(LAGS) - CONTROL + 1} positions; "
                f"accepted: {max(LAGS) - CONTROL + 2} or more"
            )
        starts = range(first, min(first + STRIDE, last))
        self.n_sequences, self.n_copies = len(probe.tokens), len(starts)
        device = next(model.parameters()).device
        self.tokens = probe.tokens.long().to(device).repeat(len(starts), 1)
        rows, places = [], []
        for copy, start in enumerate(starts):
            for s in range(start, last, STRIDE):
                rows.append(torch.arange(self.n_sequences) + copy * self.n_sequences)
                places.append(torch.full((self.n_sequences,), s))
        self.rows: Int64[Tensor, " n"] = torch.cat(rows).to(device)
        self.s: Int64[Tensor, " n"] = torch.cat(places).to(device)
        self.i = self.s + period
        self.read = {"next": self.s + 1, "dest": self.i}
        self.clean, loss = self._run(self.tokens)
        self.loss = self._by_sequence(loss)

    def corrupted(self, delta: int) -> _Run:
        """The run with another token at every s + delta."""
        draw = torch.Generator().manual_seed(self.seed)
        d_vocab = self.model.config.d_vocab
        held = torch.zeros(len(self.tokens), d_vocab, dtype=torch.bool).scatter_(1, self.tokens.cpu(), True)
        if bool(held.all(1).any()):
            raise DetectionError(
                f"a sequence holds all {d_vocab} tokens, so none is left to put in its place"
            )
        free = (~held).double()[self.rows.cpu()]
        put = torch.multinomial(free, 1, generator=draw)[:, 0].to(self.tokens.device)
        tokens = self.tokens.clone()
        tokens[self.rows, self.s + delta] = put
        return self._run(tokens)[0]

    def output_patched(self, layer: int, other: _Run, place: Tensor) -> Float[Tensor, " sequence"]:
        """Effect of the block's output at `place` taken from another run."""
        return self._effect(layer, other.outputs[layer][self.rows, place], place)

    def input_patched(self, layer: int, delta: int, other: _Run) -> Float[Tensor, " sequence"]:
        """Effect through the block's output at i of its input at s + delta taken from another run."""
        x = self.clean.inputs[layer].clone()
        x[self.rows, self.s + delta] = other.inputs[layer][self.rows, self.s + delta]
        y = self.model.blocks[layer].attn(x)
        return self._effect(layer, y[self.rows, self.i], self.i)

    def _effect(self, layer: int, value: Tensor, place: Tensor) -> Float[Tensor, " sequence"]:
        def patch(_, args, out: Tensor) -> Tensor:
            out = out.clone()
            out[self.rows, place] = value
            return out

        with listening(self.model.blocks[layer].attn, patch):
            loss = self.model(self.tokens, return_type="loss", loss_per_token=True)
        return (self._by_sequence(loss) - self.loss).cpu()

    def _by_sequence(self, loss: Float[Tensor, "batch seq_minus_1"]) -> Float[Tensor, " sequence"]:
        values = loss[self.rows, self.i].double()
        sequence = self.rows % self.n_sequences
        total = values.new_zeros(self.n_sequences).index_add_(0, sequence, values)
        return total / torch.bincount(sequence, minlength=self.n_sequences)

    def _run(self, tokens: Tensor) -> tuple[_Run, Tensor]:
        run = _Run([], [])
        handles = []
        for block in self.model.blocks:
            handles.append(
                block.attn.register_forward_hook(
                    lambda _, args, out: (run.inputs.append(args[0]), run.outputs.append(out)) and None
                )
            )
        try:
            loss = self.model(tokens, return_type="loss", loss_per_token=True)
        finally:
            for handle in handles:
                handle.remove()
        return run, loss
