"""Tokenise a corpus for a machine that only trains: `python -m experiments.data.tokenise --out NAME.bin.xz`.

Writes NAME.bin.xz (uint16, training documents first, held-out ones last), NAME.tokenizer.json and
NAME.corpus.json (where the held-out tokens begin). Train on it with `--set data.tokens=file --set
data.path=NAME.bin.xz`.
"""

import argparse
import json
import sys
from pathlib import Path

from models.errors import ConfigError


def tokenise(
    path: str | None, out: Path, *, d_vocab: int, held_out: float, max_bytes: int | None
) -> dict[str, int]:
    """Write the three files; returns the counts of training and held-out tokens.

    Raises:
        ConfigError: no text at `path`, or `out` does not end in .bin or .bin.xz.
    """
    import lzma

    import numpy as np

    from experiments.data.config import TextConfig
    from experiments.data.prepared import split_texts
    from experiments.files import write_atomically
    from experiments.tokenizer import byte_tokenizer_json, encode_bpe, encode_bytes, train_bpe

    if not out.name.endswith((".bin", ".bin.xz")):
        raise ConfigError(f"--out is {str(out)!r}; accepted: a name that ends in .bin or .bin.xz")
    kind = "bytes" if d_vocab == 256 else "bpe"
    config = TextConfig(
        seq=2, path=path, tokens=kind, d_vocab=d_vocab, held_out=held_out, max_bytes=max_bytes
    )
    train, test = split_texts(config, 0)
    tokenizer = byte_tokenizer_json() if kind == "bytes" else train_bpe(train, d_vocab)
    parts = []
    for texts in (train, test):
        arrays = encode_bytes(texts) if kind == "bytes" else encode_bpe(tokenizer, texts)
        parts.append(np.concatenate(list(arrays)))
    data = np.concatenate(parts).astype("<u2").tobytes()
    stem = out.name.split(".")[0]
    write_atomically(out, lzma.compress(data) if out.name.endswith(".xz") else data)
    write_atomically(out.with_name(f"{stem}.tokenizer.json"), tokenizer.encode())
    counts = {"train_tokens": len(parts[0]), "held_out_tokens": len(parts[1])}
    record = json.dumps({"format": 1, **counts, "d_vocab": d_vocab}, indent=2) + "\n"
    write_atomically(out.with_name(f"{stem}.corpus.json"), record.encode())
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.data.tokenise", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "path", nargs="?", help="a file or a folder (default: this Python's standard library)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="NAME.bin.xz")
    parser.add_argument(
        "--d-vocab", type=int, default=8192, help="entries of the BPE; 256 is bytes (default 8192)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.05, help="share of held-out documents (default 0.05)"
    )
    parser.add_argument("--max-bytes", type=int, help="use only so much text")
    options = parser.parse_args(arguments)
    try:
        counts = tokenise(
            options.path,
            options.out,
            d_vocab=options.d_vocab,
            held_out=options.held_out,
            max_bytes=options.max_bytes,
        )
    except (ConfigError, OSError) as error:
        print(f"tokenise: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.out}: {counts['train_tokens']:,} training tokens, {counts['held_out_tokens']:,} held-out"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
