"""Windows of real text, from tokens that are kept in memory-mapped files."""

from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, UInt16

from experiments.data.batch import HELD_OUT, TRAINING, Batch
from experiments.data.config import TextConfig
from models.errors import ConfigError


class TextTask:
    """Random windows of the training tokens, fixed windows of the held-out ones."""

    def __init__(
        self,
        config: TextConfig,
        train: UInt16[np.ndarray, " tokens"],
        held_out: UInt16[np.ndarray, " tokens"],
        *,
        batch: int,
        data_seed: int,
        eval_seed: int,
    ):
        for name, tokens in (("training", train), ("held-out", held_out)):
            if len(tokens) < config.seq:
                raise ConfigError(
                    f"the {name} text has {len(tokens)} tokens; accepted: at least data.seq = {config.seq}"
                )
        self.config, self.batch_size = config, batch
        self._train, self._held_out = train, held_out
        self._data_seed, self._eval_seed = data_seed, eval_seed

    def batch(self, step: int) -> Batch:
        """The global training batch of the update that makes step `step` + 1: windows at uniform places."""
        rng = np.random.default_rng([self._data_seed, TRAINING, step])
        starts = rng.integers(0, len(self._train) - self.config.seq + 1, self.batch_size)
        return Batch(tokens=_windows(self._train, starts, self.config.seq))

    def held_out(self, n: int) -> Batch:
        """`n` held-out windows, not overlapping while there is room; `repeated` marks tokens of a repeated
        bigram.
        """
        seq = self.config.seq
        rng = np.random.default_rng([self._eval_seed, HELD_OUT])
        room = len(self._held_out) // seq
        if room >= n:
            starts = np.sort(rng.choice(room, n, replace=False)) * seq
        else:
            starts = rng.integers(0, len(self._held_out) - seq + 1, n)
        tokens = _windows(self._held_out, starts, seq)
        return Batch(tokens=tokens, repeated=bigram_hits(tokens))


def bigram_hits(tokens: Int[np.ndarray, "batch seq"]) -> Bool[np.ndarray, "batch seq"]:
    """Where the token and the one before it occurred next to each other earlier in the same window."""
    hits = np.zeros(tokens.shape, dtype=bool)
    for row, hit in zip(tokens.tolist(), hits, strict=True):
        seen = set()
        for place in range(1, len(row)):
            bigram = (row[place - 1], row[place])
            hit[place] = bigram in seen
            seen.add(bigram)
    return hits


def load_tokens(path: Path) -> UInt16[np.ndarray, " tokens"]:
    """Tokens of a `.bin` (raw little-endian uint16) or `.npy` file, memory-mapped; of `.bin.xz` and
    `.npy.xz`, read whole.

    Raises:
        ConfigError: no such file, another kind of file, or no tokens in it.
    """
    if not path.is_file():
        raise ConfigError(f"data.path is {str(path)!r}, which is not a file")
    name = path.name.removesuffix(".xz")
    packed = name != path.name
    try:
        if name.endswith(".npy"):
            tokens = _numpy_tokens(path, packed)
        elif name.endswith(".bin") or packed:
            tokens = (
                np.frombuffer(_unpacked(path), dtype="<u2")
                if packed
                else np.memmap(path, dtype="<u2", mode="r")
            )
        else:
            raise ConfigError(f"token file {str(path)!r}; accepted: .bin (uint16), .npy, and either as .xz")
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"token file {str(path)!r} cannot be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype != np.uint16 or not len(tokens):
        raise ConfigError(
            f"token file {str(path)!r} holds {tokens.dtype} {tokens.shape}; "
            "accepted: one axis of uint16, not empty"
        )
    return tokens


def _numpy_tokens(path: Path, packed: bool) -> np.ndarray:
    if not packed:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    import io

    return np.load(io.BytesIO(_unpacked(path)), allow_pickle=False)


def _unpacked(path: Path) -> bytes:
    import lzma

    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def _windows(tokens: np.ndarray, starts: np.ndarray, seq: int) -> Int[np.ndarray, "batch seq"]:
    return tokens[starts[:, None] + np.arange(seq)[None, :]].astype(np.int64)
