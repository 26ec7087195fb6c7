"""Text from a model, one token at a time from its recurrent state."""

import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.errors import ConfigError
from models.form import Form
from models.whole import is_whole


def generate(
    model: Any,
    tokens: Int[Tensor, "batch seq"] | str | list[str],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop: int | Iterable[int] = (),
    form: Form | str | None = None,
) -> Int[Tensor, "batch longer"]:
    """The tokens and up to `max_new_tokens` that the model continues them with.

    Memory and time of a token do not grow with the context for linear attention and Mamba; for softmax
    attention the state is the cache of keys and values, which grows.

    Args:
        temperature: Divides the logits, at least 1e-30; 0 takes the likeliest token.
        top_k: Draw from the k likeliest only.
        seed: Of the draws; None takes torch's global random state.
        stop: Ids that end a sequence. Ended sequences are filled up with the id that ended them, and
            generation ends when all have.
        form: In which the prompt is read: CHUNKED (None) or another. Inside
            `model.hooks(form=Form.RECURRENT)` None is RECURRENT, and hooks act on the prompt's and on every
            new position.

    Raises:
        ConfigError: an option out of range, tokens that `forward` refuses, or more positions than were
        learned.
    """
    tokens = model.to_tokens(tokens)
    drawn = stream(model, tokens, max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, form=form)
    ends = torch.tensor(_ends(stop), device=tokens.device)
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    pieces = [tokens]
    for new in drawn:
        new = torch.where(done, pieces[-1][:, -1], new)
        pieces.append(new[:, None])
        done |= torch.isin(new, ends)
        if bool(done.all()):
            break
    return torch.cat(pieces, 1)


def stream(
    model: Any,
    tokens: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    form: Form | str | None = None,
) -> Iterator[Int[Tensor, " batch"]]:
    """The new tokens one after the other; arguments and errors as `generate`, raised at the call.

    Each sequence goes on whatever it draws; the caller stops iterating.
    """
    tokens = model._checked_tokens(tokens)
    _check(model, tokens, max_new_tokens)
    _check_draws(temperature, top_k)
    if seed is not None and not (is_whole(seed) and -(1 << 63) <= seed < 1 << 64):
        raise ConfigError(f"seed is {seed!r}; accepted: None or a whole number of 64 bits")
    form = None if form is None else Form.of(form)
    generator = None
    if seed is not None:
        generator = torch.Generator(tokens.device).manual_seed(int(seed))
    return _drawn(model, tokens, max_new_tokens, temperature, top_k, generator, form)


@torch.no_grad()
def _drawn(
    model: Any,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    form: Form | str | None,
) -> Iterator[Tensor]:
    if max_new_tokens == 0:
        return
    logits, state = model.prefill(tokens, form=form, logits="last")
    for i in range(max_new_tokens):
        new = sample(logits, temperature=temperature, top_k=top_k, generator=generator)
        yield new
        if i + 1 < max_new_tokens:
            logits, state = model.step(new, state)


def sample(
    logits: Float[Tensor, "batch d_vocab"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " batch"]:
    """One token for each row of logits; temperature 0 is the first of the likeliest.

    Raises:
        ConfigError: an option that `generate` refuses.
    """
    _check_draws(temperature, top_k)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        lowest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


# Logits divided by less than this overflow float32.
COLDEST = 1e-30


def _check_draws(temperature: float, top_k: int | None) -> None:
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not (number and (temperature == 0 or COLDEST <= temperature < float("inf"))):
        raise ConfigError(
            f"temperature is {temperature!r}; accepted: 0 or a finite number of at least {COLDEST:g}"
        )
    if top_k is not None and not (is_whole(top_k) and top_k >= 1):
        raise ConfigError(f"top_k is {top_k!r}; accepted: None or a positive whole number")


def _ends(stop: int | Iterable[int]) -> list[int]:
    try:
        ids = {stop} if is_whole(stop) else set(stop)
    except TypeError:
        ids = {None}
    if not all(is_whole(i) for i in ids):
        raise ConfigError(f"stop is {stop!r}; accepted: a token id or several")
    return sorted(int(i) for i in ids)


def _check(model: Any, tokens: Tensor, max_new_tokens: int) -> None:
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; accepted: a whole number of at least 0")
    # The last new token is never read, so it takes no position.
    longest = tokens.shape[-1] + max(max_new_tokens - 1, 0)
    if model.config.positions == "learned" and longest > model.config.n_ctx:
        raise ConfigError(
            f"a prompt of {tokens.shape[-1]} and {max_new_tokens} new tokens take {longest} positions; "
            f"this model has learned {model.config.n_ctx} (n_ctx)"
        )
