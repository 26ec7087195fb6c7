"""Memory of reading a Mamba of the 130m shape at 512 tokens, beside TransformerLens's effective attention.

A random model of 24 layers, d_model 768 is written in Hugging Face's format and read by both, each in a
process of its
own: ours scores every layer (prefix matching, previous token, offsets) from contribution vectors;
    TransformerLens makes
the effective attention of one layer, which its memory allows at short sequences only.

    python -m experiments.benchmarks.mamba_memory [--seq 512] [--layers 24] [--peer-seqs 32 64 96]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from experiments.benchmarks.contest import _resident_mib, markdown_table, versions, write_results

D_MODEL, D_INNER, D_STATE, VOCAB = 768, 1536, 16, 50280
READING_OF_ALL_LAYERS = "ssm"
PEER_SEQS = [32, 64, 96]
MODULE = "experiments.benchmarks.mamba_memory"
NOTES = """\
Batch 1, float32, one thread. Memory: peak of the whole process above what it held once the model was
loaded. Time: processor time. Ours: `prefix_matching`, `previous_token` and the offset profile of every layer
from the norms of contribution vectors, all T x T weights of all {d_inner} channels, in blocks of rows;
"ssm" is the scan's own map (what `compute_ssm_effective_attention` shows), "block" the whole layer with
convolution, gate and skip, here for the first layer.

TransformerLens 4.3's `compute_ssm_effective_attention` is called on one layer, on a cache of that layer
alone, with `eager_scan` on and without Hugging Face's cache (its inner hooks do not fire otherwise). It holds
several tensors [batch, d_inner, d_state, T, T]: one of them is 4 * {d_inner} * {d_state} * T^2 bytes,
{one:.1f} GiB at T = {seq}; scaled with T^2 from the longest sequence measured, its peak at T = {seq} would be
{peer:.0f} GiB for one layer."""


def main(argv: list[str] | None = None) -> int:
    """Run both, each in processes of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=512, help="tokens, for ours (default 512)")
    parser.add_argument("--layers", type=int, default=24, help="layers of the model (default 24)")
    parser.add_argument("--peer-seqs", type=int, nargs="+", default=PEER_SEQS, help="tokens, TransformerLens")
    parser.add_argument("--child", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.child:
        {"ours": _ours, "peer": _peer}[options.child](options.model, options.seq)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), options.layers)
        records = [*_measured("ours", folder, options.seq)]
        for seq in options.peer_seqs:
            records += _measured("peer", folder, seq)
    for record in records:
        print(json.dumps(record), flush=True)
    longest = max((r for r in records if r["what"].startswith("TransformerLens")), key=lambda r: r["seq"])
    peer = longest["peak_mib"] / 1024 * (options.seq / longest["seq"]) ** 2
    rows = [
        [r["what"], str(r["layers"]), str(r["seq"]), f"{r['peak_mib']:,.0f}", f"{r['cpu_s']:.1f}"]
        for r in records
    ]
    header = ["what", "layers", "T", "peak memory above the model, MiB", "processor seconds"]
    table = markdown_table(header, rows)
    one = 4 * D_INNER * D_STATE * options.seq**2 / 2**30
    notes = NOTES.format(d_inner=D_INNER, d_state=D_STATE, seq=options.seq, one=one, peer=peer)
    title = f"Implied attention of a Mamba of the 130m shape ({options.layers} layers) at T = {options.seq}"
    print(table, notes, versions(), sep="\n\n")
    write_results("mamba-memory-cpu", title, table, notes)
    return 0


def _write_model(folder: Path, layers: int) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=D_MODEL, num_hidden_layers=layers, state_size=D_STATE)
    MambaForCausalLM(config).save_pretrained(folder)


def _measured(child: str, folder: str, seq: int) -> list[dict]:
    command = [sys.executable, "-m", MODULE, "--child", child, "--model", folder]
    done = subprocess.run([*command, "--seq", str(seq)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{child} at T = {seq} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _report(what: str, layers: int, seq: int, before_mib: float, cpu_s: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = {"what": what, "layers": layers, "seq": seq, "peak_mib": peak - before_mib, "cpu_s": cpu_s}
    print(json.dumps(record), flush=True)


def _ours(folder: Path, seq: int) -> None:
    from interp.head_scores import measure_reading
    from interp.sequences import repeated_tokens
    from interp.subject import LanguageModelSubject, LayerView
    from models.pretrained import from_pretrained

    subject = LanguageModelSubject(from_pretrained(folder))
    probe = repeated_tokens(1, seq // 4, 4, ids=torch.arange(1000, 40000), seed=0)
    spent = {READING_OF_ALL_LAYERS: 0.0}
    scores = []
    before = _resident_mib()

    def look(view: LayerView) -> None:
        for reading in view.readings:
            # The other reading costs as much again: one layer shows its memory.
            if reading.name != READING_OF_ALL_LAYERS and view.layer > 0:
                continue
            start = time.process_time()
            scores.append(float(measure_reading(reading, probe, None).rowsum.mean()))
            spent[reading.name] = spent.get(reading.name, 0.0) + time.process_time() - start

    with torch.inference_mode():
        subject.visit(probe.tokens, look)
    if not all(score >= 0 for score in scores):
        raise SystemExit(f"scores that are not weights: {scores}")
    for name, cpu_s in spent.items():
        layers = subject.n_layers if name == READING_OF_ALL_LAYERS else 1
        _report(f"ours, reading {name!r}", layers, seq, before, cpu_s)


def _peer(folder: Path, seq: int) -> None:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.use_cache = False
    name = type(model).__name__
    bridge = build_bridge_from_module(model, name, hf_config=model.config, dtype=torch.float32)
    bridge.blocks[0].mixer.eager_scan = True
    tokens = torch.randint(1000, 40000, (1, seq), generator=torch.Generator().manual_seed(0))
    names = [f"blocks.0.mixer.{part}.hook_out" for part in ("x_proj", "dt_proj")]
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name in names, use_cache=False)
        before, start = _resident_mib(), time.process_time()
        matrix = cache.compute_ssm_effective_attention(layer=0)
    if tuple(matrix.shape) != (1, D_INNER, seq, seq):
        raise SystemExit(f"effective attention has shape {tuple(matrix.shape)}")
    _report("TransformerLens, compute_ssm_effective_attention", 1, seq, before, time.process_time() - start)


if __name__ == "__main__":
    sys.exit(main())
