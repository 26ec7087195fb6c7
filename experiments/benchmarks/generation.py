"""Memory and time of one generated token at contexts of 1k, 8k and 64k tokens, for every mixer.

Small random models of the same width read a prompt of that length and then generate. The state is what `step`
carries from token to token: every tensor in it is counted. The time is processor time of one thread.

    python -m experiments.benchmarks.generation [--contexts 1024 8192 65536] [--tokens N]
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import torch

from experiments.benchmarks.contest import markdown_table, write_results
from models import (
    LanguageModel,
    LanguageModelConfig,
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    RopeConfig,
    SoftmaxAttentionConfig,
)

CONTEXTS = (1024, 8192, 65536)
D_MODEL, N_LAYERS, D_VOCAB = 64, 2, 256
# Tokens of the prompt that are read at once.
PIECE = 1024
MIXERS = {
    "softmax": SoftmaxAttentionConfig(n_heads=2),
    "linear": LinearAttentionConfig(n_heads=2, d_conv=4),
    "mamba1": Mamba1Config(),
    "mamba2": Mamba2Config(d_head=32),
}
NOTES = f"""\
Random models of {N_LAYERS} layers, d_model {D_MODEL}, without MLP, float32, batch 1; the prompt is read in
pieces of {PIECE} tokens (CHUNKED), then tokens are generated one by one (RECURRENT). State: bytes of all
tensors that `step` carries. Time: median processor time of a token on one thread. What grows is softmax
attention's key/value cache and the time to read it; linear attention's and Mamba's state has a fixed size."""


def tensor_bytes(state: Any) -> int:
    """Bytes of every tensor inside nested tuples and dataclasses."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if dataclasses.is_dataclass(state):
        state = [getattr(state, field.name) for field in dataclasses.fields(state)]
    return sum(tensor_bytes(part) for part in state) if isinstance(state, (list, tuple)) else 0


def small_model(mixer: str, n_ctx: int) -> LanguageModel:
    """A random model of this mixer."""
    positions = {"positions": "rope", "rope": RopeConfig()} if mixer == "softmax" else {}
    config = LanguageModelConfig(
        d_model=D_MODEL,
        n_layers=N_LAYERS,
        d_vocab=D_VOCAB,
        n_ctx=n_ctx,
        mixers=(MIXERS[mixer],) * N_LAYERS,
        **positions,
    )
    return LanguageModel(config).eval()


@torch.no_grad()
def measure(mixer: str, context: int, n_tokens: int) -> tuple[int, float]:
    """Bytes of the state after `context` tokens, and median milliseconds of each token after them."""
    model = small_model(mixer, context + n_tokens)
    prompt = torch.randint(D_VOCAB, (1, context), generator=torch.Generator().manual_seed(0))
    state = None
    for piece in prompt.split(PIECE, 1):
        logits, state = model.prefill(piece, state, logits="last")
    size = tensor_bytes(state)
    milliseconds = []
    for _ in range(n_tokens):
        token = logits.argmax(-1)
        start = time.thread_time()
        logits, state = model.step(token, state)
        milliseconds.append((time.thread_time() - start) * 1e3)
    return size, statistics.median(milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated after each prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for mixer in MIXERS:
        cells = []
        for context in options.contexts:
            size, milliseconds = measure(mixer, context, options.tokens)
            cells.append(f"{size / 1024:,.1f} KiB, {milliseconds:.2f} ms")
            print(f"{mixer} {context}: {cells[-1]}", flush=True)
        rows.append([mixer, *cells])
    header = ["mixer", *(f"{context:,} tokens" for context in options.contexts)]
    path = write_results(
        "generation-cpu", "State and time of one generated token", markdown_table(header, rows), NOTES
    )
    print(path)


if __name__ == "__main__":
    main()
