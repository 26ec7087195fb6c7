"""The language model: embedding, blocks with any mixers, final norm, unembedding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.blocks import Block, added, make_norm, normed_sum
from models.config import LanguageModelConfig
from models.embeddings import Embed, PosEmbed, Unembed
from models.errors import ConfigError
from models.form import Form
from models.known_tokens import KnownTokens
from models.lens import HookPoint, attached
from models.lens_config import LensConfig
from models.lens_surface import LensSurface
from models.mixers import make_mixer
from models.model_state import ModelState, check_state
from models.next_token import check_two, next_token_loss, next_tokens
from models.whole import is_whole

RETURN_TYPES = ("logits", "loss", "both", None)
TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


class LanguageModel(LensSurface):
    """A language model of which every mixer can be read.

    Attributes:
        config: what it was built from. `cfg`: the same under TransformerLens's names.
        tokenizer: an object with `encode` and `decode` (transformers or tokenizers), or None.
        folder: the checkpoint folder that its weights were last loaded from, or None; it stays when weights
            are changed in place.
        blocks: `blocks[l].attn` is layer l's mixer, whatever its kind; `blocks[l].mlp` its MLP or None.

    The weights are drawn from `config.seed` alone; the global random state is left as it was.
    Hook points: `models/README.md`.
    """

    def __init__(self, config: LanguageModelConfig, tokenizer: Any = None):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.folder: Path | None = None
        self._known_tokens = KnownTokens()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config)
            self.reset_parameters(torch.default_generator)
        self.cfg = LensConfig(self)
        self.setup()

    def _build(self, config: LanguageModelConfig) -> None:
        self.embed = Embed(config)
        self.hook_embed = HookPoint()
        if config.positions == "learned":
            self.pos_embed = PosEmbed(config)
            self.hook_pos_embed = HookPoint()
        self.blocks = nn.ModuleList(Block(config, make_mixer(mixer, config)) for mixer in config.mixers)
        self.ln_final = make_norm(config)
        self.unembed = Unembed(config, self.embed)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: normal, with less spread where they write to the residual stream."""
        std = self.config.init_std
        out_std = std * self.config.residual_scale
        nn.init.normal_(self.embed.W_E, std=std, generator=generator)
        if self.config.positions == "learned":
            nn.init.normal_(self.pos_embed.W_pos, std=std, generator=generator)
        for block in self.blocks:
            for part in (block.attn, block.mlp):
                if part is not None:
                    part.reset_parameters(std=std, out_std=out_std, generator=generator)
        if self.unembed.weight is not None:
            nn.init.normal_(self.unembed.weight, std=std, generator=generator)

    # Evaluation.

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"] | str | list[str],
        *,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        form: Form | str | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Logits, loss or both.

        Args:
            tokens: Ids in 0..d_vocab-1; text where the model has a tokenizer; the residual stream
                [batch seq d_model] with `start_at_layer` (then only "logits" can be returned).
            return_type: "logits" [batch seq d_vocab], "loss" (next-token cross entropy in nats, a mean),
                "both" as a pair, or None to run for the hooks alone. On a GPU, in CHUNKED and without a hook
                on `unembed`, "loss" is one operator (`kernels.linear_cross_entropy`).
            loss_per_token: Give the loss as [batch seq-1] instead of its mean.
            form: None is CHUNKED, and inside `hooks()` the form of the context.
            start_at_layer, stop_at_layer: Run these blocks only; with `stop_at_layer` the residual stream
                that enters that layer is returned. Negative numbers count from the end.

        Raises:
            ConfigError: tokens of a wrong rank, dtype or id; a sequence longer than learned positions; a
                form, layer or return type that does not exist.
        """
        form = self._form(form)
        if return_type not in RETURN_TYPES:
            raise ConfigError(f"return_type is {return_type!r}; accepted: 'logits', 'loss', 'both', None")
        for name, layer in (("start_at_layer", start_at_layer), ("stop_at_layer", stop_at_layer)):
            self._check_layer(name, layer)
        self._before_run(form)
        if start_at_layer is None:
            tokens = self._checked_tokens(
                self.to_tokens(tokens) if isinstance(tokens, (str, list)) else tokens
            )
            resid = self._embedded(tokens, 0)
        else:
            if return_type in ("loss", "both"):
                raise ConfigError("a run with start_at_layer has no tokens to compute a loss of")
            resid = self._checked_resid(tokens)
        layers = range(self.config.n_layers)[start_at_layer or 0 : stop_at_layer]
        delta = None
        for layer in layers:
            block = self.blocks[layer]
            if attached(block):
                # PyTorch's own hooks see the stream.
                resid, delta = block(added(resid, delta), lambda mixer, x: mixer(x, form)), None
            else:
                resid, delta = block(resid, lambda mixer, x: mixer(x, form), delta, defer=True)
        if stop_at_layer is not None:
            return added(resid, delta)
        final = normed_sum(self.ln_final, resid, delta)[1]
        # Other forms have second derivatives; on a CPU the numbers of earlier reports stay.
        if return_type == "loss" and final.is_cuda and form is Form.CHUNKED and not attached(self.unembed):
            losses = self._fused_losses(final, tokens)
            return losses if loss_per_token else losses.mean()
        return self._output(final, tokens, return_type, loss_per_token)

    def _fused_losses(self, final: Tensor, tokens: Tensor) -> Tensor:
        """Losses [batch seq-1] without logits that anything could look at."""
        check_two(tokens)
        return self.unembed.losses(final, next_tokens(tokens))[:, :-1]

    def _output(self, final: Tensor, tokens: Tensor, return_type: str | None, per_token: bool) -> Any:
        if return_type == "loss":
            # The last position predicts nothing that is known: its logits are not computed.
            return next_token_loss(self.unembed(final[:, :-1]), tokens, per_token=per_token)
        if return_type is None:
            return None
        logits = self.unembed(final)
        if return_type == "logits":
            return logits
        return logits, next_token_loss(logits[:, :-1], tokens, per_token=per_token)

    def _embedded(self, tokens: Tensor, position: int) -> Tensor:
        if attached(self.hook_embed):
            # For interventions that depend on the place in the text, token by token too.
            self.hook_embed.ctx |= {"position": position, "tokens": tokens}
        resid = self.hook_embed(self.embed(tokens))
        if self.config.positions == "learned":
            stop = position + tokens.shape[1]
            if stop > self.config.n_ctx:
                raise ConfigError(
                    f"position {stop - 1} is beyond the {self.config.n_ctx} learned positions (n_ctx)"
                )
            if attached(self.hook_pos_embed):
                resid = resid + self.hook_pos_embed(self.pos_embed(tokens.shape[0], position, stop))
            else:
                resid = resid + self.pos_embed.W_pos[position:stop]
        return resid.float() if self.config.residual_in_fp32 and resid.dtype.itemsize < 4 else resid

    def _check_layer(self, name: str, layer: int | None) -> None:
        n = self.config.n_layers
        if layer is not None and not (is_whole(layer) and -n <= layer <= n):
            raise ConfigError(f"{name} is {layer!r}; accepted: None or a whole number from {-n} to {n}")

    def _checked_resid(self, resid: Tensor) -> Tensor:
        """The residual stream that a run with `start_at_layer` begins with."""
        accepted = f"a floating-point tensor [batch seq {self.config.d_model}] with start_at_layer"
        if not isinstance(resid, Tensor):
            raise ConfigError(f"the residual stream is a {type(resid).__name__}; accepted: {accepted}")
        wide = resid.ndim == 3 and resid.shape[-1] == self.config.d_model
        if not wide or not resid.is_floating_point():
            raise ConfigError(
                f"the residual stream has shape {list(resid.shape)} and dtype {resid.dtype}; "
                f"accepted: {accepted}"
            )
        return resid

    def _checked_tokens(self, tokens: Tensor, n_axes: int = 2) -> Tensor:
        axes = "[batch seq]" if n_axes == 2 else "[batch]"
        if not isinstance(tokens, Tensor):
            raise ConfigError(f"tokens are a {type(tokens).__name__}; accepted: an integer tensor {axes}")
        if tokens.dtype not in TOKEN_DTYPES:
            raise ConfigError(f"tokens have dtype {tokens.dtype}; accepted: an integer tensor {axes}")
        if tokens.ndim != n_axes or 0 in tokens.shape:
            raise ConfigError(f"tokens have shape {list(tokens.shape)}; accepted: {axes}, neither empty")
        # In training on a GPU, reading ids back would wait for it at every step; there CUDA refuses them.
        readable = tokens.device.type == "cpu" or not self.training
        if readable and not torch.compiler.is_compiling() and tokens not in self._known_tokens:
            low, high = torch.stack(tokens.aminmax()).tolist()
            if low < 0 or high >= self.config.d_vocab:
                worst = low if low < 0 else high
                raise ConfigError(f"token id {worst} is out of range; accepted: 0..{self.config.d_vocab - 1}")
            self._known_tokens.add(tokens)
        return tokens.long()

    # Recurrent evaluation.

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """The state before the first token of `batch` sequences. Raises ConfigError for a batch below 1."""
        mixers = tuple(block.attn.init_state(batch, device=device, dtype=dtype) for block in self.blocks)
        return ModelState(mixers, 0)

    def state_size(self) -> int:
        """Numbers that the state of one sequence holds (softmax: at the full context length)."""
        return sum(block.attn.state_size() for block in self.blocks)

    def step(
        self, tokens: Int[Tensor, " batch"], state: ModelState
    ) -> tuple[Float[Tensor, "batch d_vocab"], ModelState]:
        """Logits after one more token of each sequence, in the recurrent form.

        Hooks that fire see a sequence of length 1. Raises ConfigError as `forward`, and for the state of
        another model.
        """
        tokens = self._checked_tokens(tokens, n_axes=1)[:, None]
        logits, state = self._advance(tokens, state, Form.RECURRENT, "all")
        return logits[:, 0], state

    def prefill(
        self,
        tokens: Int[Tensor, "batch seq"],
        state: ModelState | None = None,
        *,
        form: Form | str | None = None,
        logits: str = "all",
    ) -> tuple[Tensor | None, ModelState]:
        """Logits of a piece of text and the state that it leaves, to be continued by `prefill` or `step`.

        Args:
            state: None is the start of a sequence.
            form: CHUNKED (None, outside `hooks()`), or another.
            logits: "all" [batch seq d_vocab], "last" [batch d_vocab] (long prompts), or "none".
        """
        if logits not in ("all", "last", "none"):
            raise ConfigError(f"logits is {logits!r}; accepted: 'all', 'last', 'none'")
        tokens = self._checked_tokens(tokens)
        state = self.init_state(tokens.shape[0]) if state is None else state
        return self._advance(tokens, state, self._form(form), logits)

    def _advance(
        self, tokens: Tensor, state: ModelState, form: Form, wanted: str
    ) -> tuple[Tensor | None, ModelState]:
        check_state(state, self.blocks)
        self._before_run(form)
        resid = self._embedded(tokens, state.position)
        after = []

        def advance(old: Any) -> Callable[[nn.Module, Tensor], Tensor]:
            def mix(mixer: nn.Module, x: Tensor) -> Tensor:
                y, new = mixer.prefill(x, old, form)
                after.append(new)
                return y

            return mix

        for block, old in zip(self.blocks, state.mixers, strict=True):
            resid = block(resid, advance(old))
        state = ModelState(tuple(after), state.position + tokens.shape[1])
        if wanted == "none":
            return None, state
        final = self.ln_final(resid)
        return self.unembed(final if wanted == "all" else final[:, -1]), state

    def generate(self, tokens: Int[Tensor, "batch seq"], max_new_tokens: int, **options: Any) -> Tensor:
        """Tokens followed by `max_new_tokens` new ones; options and errors: `models.generation.generate`."""
        from models.generation import generate

        return generate(self, tokens, max_new_tokens, **options)
