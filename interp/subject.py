"""One face for every model that the instruments read: our own LanguageModel, and TransformerLens's bridge."""

import abc
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.layer_inputs import Visited, layer_inputs, mixer_inputs
from models.mixers.reading import Reading

# Largest tensor of logits in one forward pass, in numbers, and most tokens in one.
_LOGITS_PER_PASS = {"cpu": 1 << 25, "cuda": 1 << 27}
_TOKENS_PER_PASS = {"cpu": 1 << 13, "cuda": 1 << 15}


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer on one batch: its readings, its OV circuits' factors, and in words what was put into
    those.
    """

    layer: int
    readings: tuple[Reading, ...]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    ov_form: str


Look = Callable[[LayerView], None]


class Subject(abc.ABC):
    """A model to read. Everything runs without gradients.

    Attributes:
        mixers: Kind of each layer's mixer.
        n_ctx: The most tokens that a sequence may have.
        bos: The id that sequences begin with where the model was trained so, else None.
        special: Ids that a probe leaves out.
        tokenizer: Object with `encode` and `decode`, or None.
        centred_norm: The norms are LayerNorms, which take the mean out of the residual stream.
        origin: For models of other projects: what their files say, and which reader read them.
    """

    origin: dict[str, Any] | None = None
    mixers: tuple[str, ...]
    n_heads: int
    n_ctx: int
    d_vocab: int
    bos: int | None
    special: frozenset[int]
    tokenizer: Any
    centred_norm: bool
    device: torch.device

    @property
    def n_layers(self) -> int:
        return len(self.mixers)

    @property
    @abc.abstractmethod
    def n_weights(self) -> int:
        """Number of weights; a tied one counts once."""

    @abc.abstractmethod
    def logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_vocab"]:
        """One forward pass."""

    @abc.abstractmethod
    def visit(
        self,
        tokens: Int[Tensor, "batch seq"],
        look: Look,
        *,
        units: str | None = None,
    ) -> None:
        """One pass through the layers; `look` is called for each of them, in order.

        `units` are those of Mamba-1 mixers (`state`, `cluster:K`, `layer`); other mixers have heads.
        """

    @property
    @abc.abstractmethod
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Token embedding."""

    @property
    @abc.abstractmethod
    def W_U(self) -> Float[Tensor, "d_vocab d_model"]:
        """Unembedding, a row for each token."""

    @property
    @abc.abstractmethod
    def final_gain(self) -> Float[Tensor, " d_model"]:
        """Gain of the norm before the unembedding; ones where there is none."""

    @abc.abstractmethod
    def input_gain(self, layer: int) -> Float[Tensor, " d_model"]:
        """Gain of the norm before a layer's mixer; ones where there is none."""

    def batches(self, n: int, seq: int) -> Iterator[slice]:
        """Slices of n sequences that go through one forward pass together, memory bounded."""
        kind = "cuda" if torch.device(self.device).type == "cuda" else "cpu"
        size = max(1, min(_LOGITS_PER_PASS[kind] // (seq * self.d_vocab), _TOKENS_PER_PASS[kind] // seq))
        return (slice(start, min(n, start + size)) for start in range(0, n, size))

    @torch.no_grad()
    def losses(
        self, tokens: Int[Tensor, "batch seq"], *, known: Float[Tensor, "first seq_minus_1"] | None = None
    ) -> Float[Tensor, "batch seq_minus_1"]:
        """-log p of every token after the first, nats.

        `known`: those of the first sequences; taken where they are all of a batch.
        """
        tokens = tokens.to(self.device)
        batches = list(self.batches(*tokens.shape))
        parts = [known] if known is not None and len(tokens[batches[0]]) == len(known) else []
        for batch in batches[len(parts) :]:
            parts.append(next_token_losses(self.logits(tokens[batch]), tokens[batch]))
        return torch.cat(parts)

    @torch.no_grad()
    def directions(
        self, tokens: Int[Tensor, "batch token"], *, centre: bool = True
    ) -> Float[Tensor, "batch token d_model"]:
        """For each token the direction whose product with a residual vector is its logit, up to the final
        norm's scale.

        The final gain is folded in, and the mean over the vocabulary taken out (`centre`).
        """
        rows = self.W_U[tokens]
        return self._through_final_norm(rows - self._mean_unembedding if centre else rows)

    @cached_property
    def _mean_unembedding(self) -> Float[Tensor, " d_model"]:
        return self.W_U.mean(0)

    def _through_final_norm(
        self, directions: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        folded = directions * self.final_gain
        return folded - folded.mean(-1, keepdim=True) if self.centred_norm else folded

    @cached_property
    def _unembed_embed(self) -> Float[Tensor, "d_model d_model"]:
        # sum over the vocabulary of W_U (column) W_E (row), in float64, by pieces of the vocabulary.
        pieces = range(0, self.d_vocab, 8192)
        return sum(self.W_U[n : n + 8192].T.double() @ self.W_E[n : n + 8192].double() for n in pieces)

    @torch.no_grad()
    def gram(
        self, layer: int, *, fold: bool = True, centre: bool = False
    ) -> Float[Tensor, "d_model d_model"]:
        """`W_U W_E` between a layer's output and its input, float64, for `copying.eigenvalue_copying`.

        Args:
            fold: Fold the gains of the final norm and of the layer's input norm (and LayerNorm's centring).
            centre: Take the mean over the vocabulary out of the unembedding.
        """
        gram = self._unembed_embed
        if centre:
            total = self.W_E.double().sum(0)
            gram = gram - self._mean_unembedding.double()[:, None] * total
        if not fold:
            return gram
        gram = self.final_gain.double()[:, None] * gram
        if self.centred_norm:
            gram = gram - gram.mean(0, keepdim=True)
            gram = gram - gram.mean(1, keepdim=True)
        return gram * self.input_gain(layer).double()

    def token_text(self, token: int) -> str:
        """A token as text, or its number where there is no tokenizer."""
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token])


class LanguageModelSubject(Subject):
    """Our own models: the readings are the mixers' own, of any kind."""

    def __init__(self, model: Any):
        config = model.config
        # Scores compare small differences: half precision is read in float32.
        narrow = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize < 4}
        self.narrow = min((str(dtype).removeprefix("torch.") for dtype in narrow), default=None)
        self.model = (copy.deepcopy(model).float() if narrow else model).eval()
        self.mixers = tuple(mixer.kind for mixer in config.mixers)
        self.n_heads = model.cfg.n_heads
        self.n_ctx, self.d_vocab, self.bos = config.n_ctx, config.d_vocab, config.bos
        self.tokenizer = model.tokenizer
        source = getattr(model, "source", None)
        self.origin = None if source is None else {"reader": "own", **source.to_dict()}
        self.special = frozenset([] if source is None else source.special) | ({config.bos} - {None})
        self.centred_norm = config.norm == "layer"
        self.device = model.cfg.device

    @property
    def n_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_vocab"]:
        return self.model(tokens)

    @torch.no_grad()
    def visit(
        self,
        tokens: Int[Tensor, "batch seq"],
        look: Look,
        *,
        units: str | None = None,
        visited: Visited | None = None,
    ) -> None:
        """See `Subject.visit`. `visited` takes what cuts of edges can start from."""
        if visited is None:
            inputs = mixer_inputs(self.model, tokens)
        else:
            visited.inputs = layer_inputs(self.model, tokens)
            inputs = visited.inputs[:-1]
        for layer, (_, x, _) in enumerate(inputs):
            mixer = self.model.blocks[layer].attn
            chosen = units if mixer.kind == "mamba1" else None
            readings, factors = mixer.read_all(x, units=chosen)
            if visited is not None:
                visited.readings[layer] = readings[0]
            look(
                LayerView(
                    layer=layer,
                    readings=readings,
                    W_V=factors.W_V,
                    W_O=factors.W_O,
                    ov_form=factors.approximation,
                )
            )

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.model.embed.W_E

    @property
    def W_U(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.model.unembed.W_U.T

    @property
    def final_gain(self) -> Float[Tensor, " d_model"]:
        return _gain(self.model.ln_final, self.W_E)

    def input_gain(self, layer: int) -> Float[Tensor, " d_model"]:
        return _gain(self.model.blocks[layer].ln1, self.W_E)


def next_token_losses(
    logits: Float[Tensor, "batch seq d_vocab"], tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq_minus_1"]:
    """-log p of every token after the first, nats, in float32 or better."""
    flat = logits[:, :-1].flatten(0, 1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    loss = torch.nn.functional.cross_entropy(flat, tokens[:, 1:].flatten().long(), reduction="none")
    return loss.view(tokens.shape[0], -1)


def _gain(norm: torch.nn.Module, like: Tensor) -> Float[Tensor, " d_model"]:
    return norm.w if hasattr(norm, "w") else torch.ones_like(like[0])
