"""Detection over a series of checkpoints against the same scores from TransformerLens's `run_with_cache`.

Both read the same weights (ours as checkpoints of this project, the peer's as Hugging Face folders of the
same numbers),
the same probe and the same text windows, and their scores are compared. The peer caches the activations of
TransformerBridge and reduces them layer by layer, all heads at once; it boots a bridge for every checkpoint,
as one does
for a series on the hub, or loads each checkpoint's weights into one bridge.

    python -m experiments.benchmarks.detection [--checkpoints N] [--rounds N]
"""

import argparse
import contextlib
import functools
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.contest import (
    interleaved_medians,
    markdown_table,
    peak_memory_mib,
    report_peak,
    write_results,
)
from interp.copying import sample_tokens
from interp.in_context_learning import bigram_hits, icl_positions
from interp.plan import Plan
from interp.records import SCORES as ALL_SCORES

D_MODEL, N_LAYERS, N_HEADS, D_VOCAB, SEQ, N_WINDOWS = 64, 2, 4, 64, 64, 64
GOAL = 3.0
CONTENDERS = ("ours", "peer, a bridge each", "peer, one bridge")
SCORES = ("prefix_matching", "previous_token", "copying", "copying_edge", "copying_eigenvalue")
LOSSES = ("order_gain_nats", "in_context_learning_nats", "hit_loss_nats")


def write_series(root: Path, n: int) -> None:
    """n checkpoints of the demo's softmax model, each in both formats, and the windows."""
    from safetensors.torch import save_file

    from experiments.recipes import attention_only
    from models import LanguageModel, SoftmaxAttentionConfig, save_model
    from models.pretrained import to_pretrained

    mixers = (SoftmaxAttentionConfig(n_heads=N_HEADS),) * N_LAYERS
    config = attention_only(
        mixers, d_model=D_MODEL, d_vocab=D_VOCAB, n_ctx=SEQ, positions="rope", init_std=0.2
    )
    draw = torch.Generator().manual_seed(0)
    (root / "ours").mkdir()
    for step in range(n):
        model = LanguageModel(config)
        model.reset_parameters(torch.Generator().manual_seed(step))
        save_model(root / "ours" / f"step_{step:08d}", model)
        to_pretrained(root / "peer" / f"{step:08d}", model)
    windows = torch.randint(0, D_VOCAB, (N_WINDOWS, SEQ), generator=draw, dtype=torch.int32)
    save_file({"tokens": windows}, root / "ours" / "eval.safetensors")


def ours(root: Path) -> list[dict[str, Any]]:
    """Our detection, one table of numbers for each checkpoint."""
    from interp import detect

    # Without the causal test: `run_with_cache` has no counterpart of it.
    wanted = [name for name in ALL_SCORES if name != "causal"]
    report = detect(root / "ours", n_maps=0, bos=None, scores=wanted)
    tables = []
    for checkpoint in report.checkpoints:
        table = {name: getattr(checkpoint, name) for name in LOSSES}
        table |= {name: [getattr(head, name) for head in checkpoint.heads] for name in SCORES}
        tables.append(table)
    return tables


@functools.cache
def plan_of(root: Path) -> Plan:
    """The probe and windows that `ours` used."""
    from interp.plan import make_plan
    from interp.sources import open_source

    source = open_source(root / "ours", bos=None)
    subject = source.checkpoints[0].open()
    return make_plan(subject, windows=source.windows, trained=SEQ)


def peer(root: Path, one_bridge: bool) -> list[dict[str, Any]]:
    """The same numbers through TransformerBridge and `run_with_cache`."""
    from safetensors.torch import load_file

    plan, bridge, tables = plan_of(root), None, []
    for folder in sorted((root / "peer").iterdir()):
        if bridge is None or not one_bridge:
            bridge = _boot(folder)
        elif one_bridge:
            bridge.original_model.load_state_dict(_renamed(bridge, load_file(folder / "model.safetensors")))
        with torch.no_grad():
            tables.append(_peer_scores(bridge, plan))
    return tables


def _boot(folder: Path) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return build_bridge_from_module(model.eval(), type(model).__name__, hf_config=model.config)


def _renamed(bridge: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """File names to the names that the bridge's components gave the same parameters."""
    own = bridge.original_model.state_dict()
    plain = {name.replace("_original_component.", ""): name for name in own}
    found = {plain[name]: tensor for name, tensor in tensors.items() if name in plain}
    # What stands in no file (the tied unembedding, the causal mask) keeps its value.
    return own | found


def _peer_scores(bridge: Any, plan: Plan) -> dict[str, Any]:
    from transformer_lens.utilities import lm_cross_entropy_loss

    probe, period = plan.probe, plan.probe.period
    _, cache = bridge.run_with_cache(probe.tokens)
    table: dict[str, Any] = {name: [] for name in SCORES}
    same = probe.tokens[:, :, None] == probe.tokens[:, None, :]
    targets = same.tril(-1).roll(1, dims=-1)
    targets[:, :, 0] = False
    gain = bridge.ln_final.weight
    W_U = bridge.original_model.get_output_embeddings().weight
    W_E = bridge.original_model.get_input_embeddings().weight
    for layer in range(N_LAYERS):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        v = cache[f"blocks.{layer}.attn.hook_v"].view(*probe.tokens.shape, N_HEADS, -1)
        W_O, W_V = bridge.blocks[layer].attn.W_O, bridge.blocks[layer].attn.W_V
        rows = (pattern * targets[:, None]).sum(-1)[:, :, period:]
        table["prefix_matching"] += rows.mean((0, 2)).tolist()
        table["previous_token"] += pattern.diagonal(-1, -2, -1).mean((0, 2)).tolist()
        result = torch.einsum("bhij,bjhd,hdm->bihm", pattern[:, :, :period, :period], v[:, :period], W_O)
        raised = _logits(result, gain, W_U).gather(
            -1, sample_tokens(probe)[:, None, None].expand(-1, period, N_HEADS, -1)
        )
        table["copying"] += _raise_score(pattern[:, :, :period, :period], raised.relu()).tolist()
        moved = torch.einsum("bjhd,hdm->bjhm", v, W_O)
        table["copying_edge"] += _edge_scores(probe, targets, pattern, _logits(moved, gain, W_U))
        table["copying_eigenvalue"] += _eigenvalues(bridge, layer, W_E, W_V, W_O, W_U, gain)
    losses = [
        lm_cross_entropy_loss(bridge(tokens), tokens, per_token=True)
        for tokens in (plan.loss_in_order.tokens, plan.loss_shuffled.tokens, plan.windows)
    ]
    later = slice(plan.loss_in_order.period, None)
    late, early = icl_positions(SEQ)
    table["order_gain_nats"] = float((losses[1][:, later] - losses[0][:, later]).mean())
    table["in_context_learning_nats"] = float((losses[2][:, late - 1] - losses[2][:, early - 1]).mean())
    table["hit_loss_nats"] = float(losses[2][bigram_hits(plan.windows)].mean())
    return table


def _logits(vectors: Tensor, gain: Tensor, W_U: Tensor) -> Tensor:
    """Direct logits of what is written to the residual stream, the mean over the vocabulary taken out."""
    logits = (vectors * gain) @ W_U.T
    return logits - logits.mean(-1, keepdim=True)


def _raise_score(pattern: Tensor, raised: Tensor) -> Tensor:
    a = torch.einsum("bhij,bihj->bhi", pattern, raised)
    total = raised.sum(-1).transpose(1, 2)
    return (4 * a / (a + total) - 1).nanmean((0, 2))


def _edge_scores(probe: Any, targets: Tensor, pattern: Tensor, logits: Tensor) -> list[float]:
    batch, dest, src = targets.nonzero(as_tuple=True)
    sample = sample_tokens(probe)[batch]
    found = pattern[batch, :, dest, src, None] * logits[batch, src].gather(
        -1, sample[:, None].expand(-1, N_HEADS, -1)
    )
    raised = (found - found.mean(-1, keepdim=True)).relu()
    a = (raised * (sample == probe.tokens[batch, src, None])[:, None]).sum(-1)
    return (4 * a / (a + raised.sum(-1)) - 1).nanmean(0).tolist()


def _eigenvalues(
    bridge: Any, layer: int, W_E: Tensor, W_V: Tensor, W_O: Tensor, W_U: Tensor, gain: Tensor
) -> list[float]:
    from transformer_lens import FactoredMatrix

    left = (W_E * bridge.blocks[layer].ln1.weight) @ W_V
    values = FactoredMatrix(left, W_O @ (W_U * gain).T).eigenvalues
    return (values.real.sum(-1) / values.abs().sum(-1)).tolist()


def largest_difference(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    """Largest difference of any score or loss of any checkpoint."""
    pairs = [
        (torch.as_tensor(a[name]), torch.as_tensor(b[name]))
        for a, b in zip(left, right, strict=True)
        for name in (*SCORES, *LOSSES)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def contender(name: str, root: Path) -> Callable[[], list[dict[str, Any]]]:
    """The call of a contender on a series that `write_series` wrote."""
    if name == "ours":
        return lambda: ours(root)
    return lambda: peer(root, one_bridge=name == "peer, one bridge")


def _peak(name: str, n: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        write_series(Path(root), n)
        plan_of(Path(root))
        _boot(next((Path(root) / "peer").iterdir()))
        report_peak(lambda: contender(name, Path(root)))


def main(argv: list[str] | None = None) -> int:
    """Print the table and write `results/detection-cpu.md`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.detection", description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", metavar="CONTENDER", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peak:
        _peak(options.peak, options.checkpoints)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_series(root, options.checkpoints)
        calls = {name: contender(name, root) for name in CONTENDERS}
        found = {name: call() for name, call in calls.items()}
        seconds = interleaved_medians(calls, rounds=options.rounds, warm_up=0)
    rows = []
    for name in CONTENDERS:
        speed = "" if name == "ours" else f"{seconds[name] / seconds['ours']:.1f}x"
        difference = "" if name == "ours" else f"{largest_difference(found['ours'], found[name]):.1e}"
        peak = peak_memory_mib("experiments.benchmarks.detection", name)
        rows.append([name, f"{seconds[name]:.2f}", speed, difference, f"{peak:.0f}"])
    header = ["contender", "seconds", "ours is quicker by", "largest difference of a number", "peak MiB"]
    table = markdown_table(header, rows)
    notes = (
        f"{options.checkpoints} checkpoints of the demo's softmax model (as a Llama for the peer),  "
        f"{N_LAYERS} layers, {N_HEADS} heads, width "
        f"{D_MODEL}, vocabulary "
        f"{D_VOCAB}, context {SEQ}; goal {GOAL:.0f}x. Compared numbers: "
        f"{', '.join((*SCORES, *LOSSES))}. Ours computes "
        "more: other aggregations, offsets, standard errors, a null of the eigenvalue score, the phase "
        "transition. "
        f"Median of {options.rounds} interleaved rounds. Peak: memory above that of the imports, in a "
        "process of its own."
    )
    path = write_results("detection-cpu", "Detection over a series against run_with_cache, CPU", table, notes)
    print(table, f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
