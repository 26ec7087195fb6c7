"""Prepare a text corpus once for a run: tokens of training and held-out documents in files, and their
tokenizer.

```
OUT/corpus/train.bin  held_out.bin  tokenizer.json  corpus.json        uint16, little-endian; corpus.json
written last
```
A pretokenised corpus (`tokens="file"`) is read where it lies; `corpus.json` keeps its SHA-256 so that a
resumed run sees the same tokens.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from experiments.data.config import TextConfig
from experiments.data.text import load_tokens
from experiments.files import write_atomically
from experiments.tokenizer import (
    SEPARATOR,
    byte_tokenizer_json,
    encode_bpe,
    encode_bytes,
    tokenizer_beside,
    train_bpe,
)
from models.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to train on and held-out ones, with the text of their `tokenizer.json` (None where unknown)."""

    train: UInt16[np.ndarray, " train_tokens"]
    held_out: UInt16[np.ndarray, " held_out_tokens"]
    tokenizer_json: str | None


def prepare_corpus(config: TextConfig, folder: Path, *, split_seed: int) -> Corpus:
    """Read, split by document and tokenise; what `folder` already holds completely is reused.

    Raises:
        ConfigError: no text at `config.path`, or tokens outside the vocabulary.
        CheckpointError: the corpus is damaged, or not the one that this run began with.
    """
    if config.tokens == "file":
        return _from_token_file(config, folder)
    if not (folder / "corpus.json").is_file():
        _tokenise(config, folder, split_seed)
    return Corpus(
        train=_kept_tokens(folder, "train"),
        held_out=_kept_tokens(folder, "held_out"),
        tokenizer_json=_kept_text(folder / "tokenizer.json"),
    )


def _kept_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} of the prepared corpus cannot be read: {error}") from error


def _kept_tokens(folder: Path, name: str) -> UInt16[np.ndarray, " tokens"]:
    """Tokens of a prepared corpus, if they are still those it was made with."""
    tokens = load_tokens(folder / f"{name}.bin")
    try:
        record = json.loads(_kept_text(folder / "corpus.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / 'corpus.json'} is not JSON: {error}") from error
    digests = record.get("sha256") if isinstance(record, dict) else None
    # Corpora made before the digests were kept have none.
    old = digests.get(name) if isinstance(digests, dict) else None
    if old is not None and old != (digest := _sha256(tokens)):
        raise CheckpointError(
            f"{folder / name}.bin is not the corpus this run began with: SHA-256 {old[:12]} -> {digest[:12]}"
        )
    return tokens


def _sha256(tokens: UInt16[np.ndarray, " tokens"]) -> str:
    return hashlib.sha256(memoryview(np.ascontiguousarray(tokens)).cast("B")).hexdigest()


def split_texts(config: TextConfig, split_seed: int) -> tuple[list[str], list[str]]:
    """Texts of the training and of the held-out documents.

    Raises:
        ConfigError: no text at `config.path`.
    """
    from interp.corpus import documents, split_by_document
    from interp.errors import DetectionError

    try:
        found = documents(config.path)
        if config.max_bytes is not None:
            found = _limited(found, config.max_bytes)
        train, held_out = split_by_document(found, config.held_out, split_seed)
    except DetectionError as error:
        raise ConfigError(str(error)) from error
    return [d.text for d in train], [d.text for d in held_out]


def _limited(found: list, max_bytes: int) -> list:
    # A shuffled order, the same for every run: folders of one topic lie next to each other in the list.
    chosen, size = [], 0
    for place in np.random.default_rng(0).permutation(len(found)):
        size += len(found[place].text.encode("utf-8", errors="replace"))
        if size > max_bytes and len(chosen) >= 2:
            break
        chosen.append(place)
    return [found[place] for place in sorted(chosen)]


def _tokenise(config: TextConfig, folder: Path, split_seed: int) -> None:
    train, held_out = split_texts(config, split_seed)
    if config.tokens == "bytes":
        tokenizer_json, encode = byte_tokenizer_json(), encode_bytes
    else:
        tokenizer_json = train_bpe(train, config.d_vocab)

        def encode(texts: Iterable[str]):
            return encode_bpe(tokenizer_json, texts)

    folder.mkdir(parents=True, exist_ok=True)
    counts, digests = {}, {}
    for name, texts in (("train", train), ("held_out", held_out)):
        tokens = np.concatenate(list(encode(texts))).astype("<u2")
        write_atomically(folder / f"{name}.bin", tokens.tobytes())
        counts[name], digests[name] = len(tokens), _sha256(tokens)
    write_atomically(folder / "tokenizer.json", tokenizer_json.encode())
    record = {
        "format": 1,
        "train_documents": len(train),
        "held_out_documents": len(held_out),
        "train_tokens": counts["train"],
        "held_out_tokens": counts["held_out"],
        "separator": SEPARATOR,
        "sha256": digests,
    }
    write_atomically(folder / "corpus.json", (json.dumps(record, indent=2) + "\n").encode())


def _from_token_file(config: TextConfig, folder: Path) -> Corpus:
    path = Path(config.path)
    tokens = load_tokens(path)
    largest = int(tokens.max())
    if largest >= config.d_vocab:
        raise ConfigError(
            f"{str(path)!r} has token {largest}; accepted: below data.d_vocab = {config.d_vocab}"
        )
    digest = _sha256(tokens)
    kept = folder / "corpus.json"
    if kept.is_file() and (old := str(_entry(kept, "sha256"))) != digest:
        raise CheckpointError(
            f"{str(path)!r} is not the corpus this run began with: SHA-256 {old[:12]} -> {digest[:12]}"
        )
    cut = _cut(path, tokens, config.held_out)
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        record = {"format": 1, "sha256": digest, "train_tokens": cut, "held_out_tokens": len(tokens) - cut}
        write_atomically(kept, (json.dumps(record, indent=2) + "\n").encode())
    return Corpus(train=tokens[:cut], held_out=tokens[cut:], tokenizer_json=tokenizer_beside(path))


def _entry(path: Path, key: str) -> object:
    """One value of a JSON file beside a corpus."""
    try:
        return json.loads(path.read_text("utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no JSON object with {key!r}") from error


def _cut(path: Path, tokens: np.ndarray, share: float) -> int:
    """Where the held-out tokens begin: as `NAME.corpus.json` says, else the last share, from a document's
    start.
    """
    beside = path.with_name(f"{path.name.split('.')[0]}.corpus.json")
    if beside.is_file():
        cut = _entry(beside, "train_tokens")
        if not isinstance(cut, int) or not 0 < cut < len(tokens):
            raise ConfigError(f"{beside} has train_tokens {cut!r}; accepted: 1..{len(tokens) - 1}")
        return cut
    cut = int(len(tokens) * (1 - share))
    ends = np.flatnonzero(tokens[cut:] == SEPARATOR)
    # A separator in the first half of the share moves the cut to a document's start.
    return cut + int(ends[0]) + 1 if len(ends) and ends[0] < (len(tokens) - cut) // 2 else cut
