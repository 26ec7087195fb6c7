"""One training step of our models against the Hugging Face module of the same shape, side by side on the CPU.

Forward, backward and AdamW step, float32, equal shapes and equal numbers of parameters (checked). The
Hugging Face
Mamba models run what they run where no CUDA kernel is installed: their slow path.

    python -m experiments.benchmarks.training [--rounds N]
"""

import argparse
from collections.abc import Callable

import torch

from experiments.benchmarks.contest import (
    interleaved_medians,
    markdown_table,
    peak_memory_mib,
    report_peak,
    write_results,
)

# The peer Mamba keeps a gradient of [batch d_inner seq d_state] for every position: 20 GB at d_model 256,
# seq 256, batch 8.
D_MODEL, N_LAYERS, D_VOCAB, SEQ, BATCH = 128, 2, 1024, 128, 8
GOALS = {"softmax": 1.0, "mamba1": 3.0, "mamba2": 1.0}
PEERS = {"softmax": "GPT-2", "mamba1": "Mamba (slow path)", "mamba2": "Mamba-2 (slow path)"}


def our_model(kind: str) -> torch.nn.Module:
    """Our language model in the shape of the Hugging Face one."""
    from models import LanguageModel, LanguageModelConfig
    from models.config import Mamba1Config, Mamba2Config, MLPConfig, SoftmaxAttentionConfig

    shape = {"d_model": D_MODEL, "n_layers": N_LAYERS, "d_vocab": D_VOCAB, "n_ctx": SEQ, "tied": True}
    if kind == "softmax":
        mixer = SoftmaxAttentionConfig(n_heads=4, qkv_bias=True, out_bias=True)
        shape |= {
            "mlp": MLPConfig(d_mlp=4 * D_MODEL, act="gelu_new"),
            "norm": "layer",
            "norm_bias": True,
            "positions": "learned",
        }
    elif kind == "mamba1":
        mixer = Mamba1Config(d_state=16)
    else:
        mixer = Mamba2Config(d_state=64, d_head=64)
    return LanguageModel(LanguageModelConfig(**shape, mixers=(mixer,) * N_LAYERS))


def peer_model(kind: str) -> torch.nn.Module:
    """The Hugging Face model."""
    import transformers

    transformers.logging.set_verbosity_error()
    shape = {"vocab_size": D_VOCAB, "tie_word_embeddings": True}
    if kind == "softmax":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            **shape,
            **no_dropout,
            n_positions=SEQ,
            n_embd=D_MODEL,
            n_layer=N_LAYERS,
            n_head=4,
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)
    shape |= {"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "use_cache": False}
    if kind == "mamba1":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**shape, state_size=16))
    config = transformers.Mamba2Config(
        **shape, state_size=64, head_dim=64, num_heads=2 * D_MODEL // 64, n_groups=1, chunk_size=64
    )
    return transformers.Mamba2ForCausalLM(config)


def stepper(kind: str, ours: bool) -> Callable[[], None]:
    """A call that makes one training step."""
    model = (our_model if ours else peer_model)(kind).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, D_VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        loss = model(tokens, return_type="loss") if ours else model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    step.n_parameters = sum(p.numel() for p in model.parameters())
    return step


def measure(kind: str, rounds: int) -> list[str]:
    """One row of the table."""
    ours, peer = stepper(kind, True), stepper(kind, False)
    if ours.n_parameters != peer.n_parameters:
        raise RuntimeError(
            f"{kind}: {ours.n_parameters} parameters against {peer.n_parameters}: not one shape"
        )
    seconds = interleaved_medians({"ours": ours, "peer": peer}, rounds=rounds, warm_up=2)
    peak = {
        who: peak_memory_mib("experiments.benchmarks.training", f"{kind}:{who}") for who in ("ours", "peer")
    }
    ratio = seconds["peer"] / seconds["ours"]
    return [
        kind,
        PEERS[kind],
        f"{ours.n_parameters:,}",
        f"{1e3 * seconds['ours']:.0f}",
        f"{1e3 * seconds['peer']:.0f}",
        f"{ratio:.2f}x",
        f"{GOALS[kind]:.0f}x",
        f"{peak['ours']:.0f}",
        f"{peak['peer']:.0f}",
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table and write `results/training-cpu.md`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", metavar="KIND:WHO", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peak:
        kind, who = options.peak.split(":")
        report_peak(lambda: stepper(kind, who == "ours"))
        return 0
    header = [
        "model",
        "peer",
        "parameters",
        "ours ms",
        "peer ms",
        "speed",
        "goal",
        "ours peak MiB",
        "peer peak MiB",
    ]
    table = markdown_table(header, [measure(kind, options.rounds) for kind in GOALS])
    notes = (
        f"One training step (forward, backward, AdamW), float32: {N_LAYERS} layers, d_model {D_MODEL}, "
        f"vocabulary "
        f"{D_VOCAB}, batch {BATCH} of {SEQ} tokens. Median of {options.rounds} interleaved rounds. "
        f"Speed: peer's time over "
        "ours. Peak: of two steps, above what the built model holds, in a process of its own."
    )
    path = write_results("training-cpu", "Training step against Hugging Face, CPU", table, notes)
    print(table, f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
