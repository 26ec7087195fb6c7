"""Interchange interventions on associative recall: which activation brings a lost answer back?

A clean sequence asks for a key whose value stood after it; in the corrupted one that key is another token, so
the answer cannot be found. Into the corrupted run one activation of the clean run is put back at chosen
places, and

    restored = (corrupted loss - patched loss) / (corrupted loss - clean loss)

of the answer is read: 1 where the patch brings everything back, 0 where it does nothing.

Places are counted from the key: `+0` the key itself, `+1` its value, ...; `after` all of +1 .. width - 1, the
places that a convolution of that width writes the key into; `query` where the answer is asked for. What
separates the mechanisms in a mixer with a convolution: `conv` restored at `+0` leaves the key to the scan's
own state, `conv` restored `after` leaves it to the convolution alone. `state` is the recurrent state after a
place (recurrent form).

Source: after Arora et al., arXiv:2505.15105. Differs: places and components are finer, and every mixer has
    them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from interp.edge_cuts import listening, zeroed_tap
from interp.errors import DetectionError
from models.form import Form
from models.language_model import LanguageModel

COMPONENTS = ("input", "conv", "q", "k", "v", "dt", "z", "output", "state")
WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Recall:
    """One question a sequence: the key at `key` and again at `query`; answers are the tokens after.

    `corrupted` is `tokens` with another token at `key`.
    """

    tokens: Int64[Tensor, "batch seq"]
    corrupted: Int64[Tensor, "batch seq"]
    key: Int64[Tensor, " batch"]
    query: Int64[Tensor, " batch"]

    def __post_init__(self) -> None:
        rows = torch.arange(len(self.tokens), device=self.tokens.device)
        seq = self.tokens.shape[1]
        if not len(rows):
            raise DetectionError("no recall question; accepted: at least one sequence")
        if int(self.query.max()) + 1 >= seq or int((self.query - self.key).min()) < 2:
            raise DetectionError(
                f"a question outside its window of {seq} tokens, or less than 2 after its key"
            )
        wrong = self.tokens[rows, self.key] != self.tokens[rows, self.query]
        wrong |= self.tokens[rows, self.key + 1] != self.tokens[rows, self.query + 1]
        if bool(wrong.any()):
            n = int(wrong.nonzero()[0])
            raise DetectionError(f"sequence {n} does not repeat its pair at key {int(self.key[n])}")
        if bool((self.corrupted[rows, self.key] == self.tokens[rows, self.key]).any()):
            raise DetectionError("the corrupted key equals the key")


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Share of the lost answer that one activation at one place brings back: mean and standard error."""

    layer: int
    component: str
    place: str
    restored: float
    standard_error: float


@torch.no_grad()
def interchange(
    model: LanguageModel,
    recall: Recall,
    *,
    components: Sequence[str] = COMPONENTS,
    layers: Sequence[int] | None = None,
    width: int = WIDTH,
) -> tuple[Restoration, ...]:
    """Every component of every layer at every place; components that a mixer does not have are left out.

    Raises:
        DetectionError: an unknown component, or a corruption that costs the answer nothing.
    """
    unknown = set(components) - set(COMPONENTS)
    if unknown:
        raise DetectionError(
            f"unknown components {', '.join(sorted(unknown))}; accepted: {', '.join(COMPONENTS)}"
        )
    run = _Interchange(model, recall, width)
    chosen = range(model.config.n_layers) if layers is None else layers
    return tuple(
        run.restoration(layer, component, place)
        for layer in chosen
        for component in components
        if run.point(layer, component) is not None
        for place in run.places(component)
    )


class _Interchange:
    """The clean and the corrupted run, and patched ones."""

    def __init__(self, model: LanguageModel, recall: Recall, width: int):
        self.model, self.recall, self.width = model, recall, width
        self.rows = torch.arange(len(recall.tokens), device=recall.tokens.device)
        self.target = recall.tokens[self.rows, recall.query + 1]
        self.kept: dict[tuple[int, str], Tensor] = {}
        clean, self.lost = self._loss(recall.tokens), self._loss(recall.corrupted)
        self.gap = float((self.lost - clean).mean())
        if self.gap <= 0.01:
            raise DetectionError(
                f"corrupting the key costs the answer {self.gap:.3f} nats, so there is nothing to restore: "
                f"the "
                "model does not recall"
            )

    def point(self, layer: int, component: str) -> nn.Module | None:
        """The module whose output a component is; None where the layer has none."""
        block = self.model.blocks[layer]
        if component == "input":
            return block.hook_resid_pre
        return block.attn if component == "output" else getattr(block.attn, f"hook_{component}", None)

    def places(self, component: str) -> tuple[str, ...]:
        """The places at which a component is restored."""
        single = tuple(f"+{n}" for n in range(self.width))
        # A state after the last of them holds all that came before.
        return single if component == "state" else (*single, "after", "query")

    def restoration(self, layer: int, component: str, place: str) -> Restoration:
        """One patch."""
        where = self._where(place)
        module = self.point(layer, component)
        state = component == "state"
        kept = self._clean(layer, component, module)
        patch = _patched_state(kept, where) if state else _patched(kept, where)
        with listening(module, patch):
            loss = self._loss(self.recall.corrupted, Form.RECURRENT if state else None)
        share = (self.lost - loss) / self.gap
        error = float(share.std() / len(share) ** 0.5) if len(share) > 1 else 0.0
        return Restoration(
            layer=layer, component=component, place=place, restored=float(share.mean()), standard_error=error
        )

    def _where(self, place: str) -> Tensor:
        """Which positions [batch seq] a place names."""
        at = torch.arange(self.recall.tokens.shape[1], device=self.rows.device)[None]
        key = self.recall.key[:, None]
        if place == "query":
            return at == self.recall.query[:, None]
        found = (at > key) & (at < key + self.width) if place == "after" else at == key + int(place)
        # Never the question itself: a patch there would not be about how the pair was stored.
        return found & (at < self.recall.query[:, None])

    def _clean(self, layer: int, component: str, module: nn.Module) -> Tensor:
        key = (layer, component)
        if key not in self.kept:
            state = component == "state"
            found: list[Tensor] = []
            with listening(module, lambda _, args, out: found.append(out) and None):
                self._loss(self.recall.tokens, Form.RECURRENT if state else None)
            self.kept[key] = torch.stack(found, 1) if state else found[0]
        return self.kept[key]

    def _loss(self, tokens: Tensor, form: Form | None = None) -> Float[Tensor, " batch"]:
        logits = self.model(tokens, form=form)[self.rows, self.recall.query]
        return torch.nn.functional.cross_entropy(logits.double(), self.target, reduction="none")


def _patched(kept: Tensor, where: Tensor) -> Callable:
    mask = where.view(*where.shape, *[1] * (kept.ndim - 2))
    return lambda _, args, out: torch.where(mask, kept, out)


def _patched_state(kept: Float[Tensor, "batch seq *state"], where: Tensor) -> Callable:
    """The point fires once for each position, in order."""
    position = iter(range(where.shape[1]))

    def patch(_, args, out: Tensor) -> Tensor:
        t = next(position)
        mask = where[:, t].view(-1, *[1] * (out.ndim - 1))
        return torch.where(mask, kept[:, t], out)

    return patch


@contextmanager
def only_current_tap(model: LanguageModel) -> Iterator[None]:
    """Every convolution without its taps at lags of 1 and more: no token reaches another's output."""
    with ExitStack() as stack:
        for block in model.blocks:
            if getattr(block.attn, "conv1d", None) is not None:
                weight = block.attn.conv1d.weight
                for lag in range(1, weight.shape[-1]):
                    stack.enter_context(zeroed_tap(weight, lag))
        yield
