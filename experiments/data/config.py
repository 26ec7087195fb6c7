"""Configurations of the data: `kind` says which task; each names its sequence length and vocabulary.

| kind | what a sequence is |
| --- | --- |
| `periodic` | distinct random tokens, tiled with a random period |
| `segment_copy` | uniform noise in which one random segment occurs twice |
| `markov` | a chain whose transition matrix is drawn anew for every sequence |
| `recall` | key-value pairs, then queries (multi-query associative recall); only answers are scored |
| `iid` | independent tokens: nothing to learn in context |
| `text` | windows of real text |
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from models.errors import ConfigError
from models.plain_config import PlainConfig


class DataConfig(PlainConfig):
    """Base of the data configurations; `from_dict` dispatches on `kind`."""

    kind: str
    seq: int
    d_vocab: int

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        if cls is not DataConfig:
            return super().from_dict(values)
        kind = values.get("kind") if isinstance(values, dict) else values
        if not isinstance(kind, str) or kind not in DATA_CONFIGS:
            raise ConfigError(f"data.kind is {kind!r}; accepted: {', '.join(DATA_CONFIGS)}")
        return DATA_CONFIGS[kind].from_dict(values)

    def _check(self) -> None:
        self._require(self.seq >= 2, "seq", "at least 2")
        self._require(self.d_vocab >= 2, "d_vocab", "at least 2")


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(DataConfig):
    """`period` distinct tokens, period uniform in [period_min, period_max], tiled to `seq`."""

    kind: Literal["periodic"] = "periodic"
    seq: int
    d_vocab: int
    period_min: int = 8
    period_max: int = 24

    def _check(self) -> None:
        super()._check()
        self._require(1 <= self.period_min <= self.period_max, "period_min", f"1..{self.period_max}")
        self._require(self.period_max <= self.d_vocab, "period_max", f"at most d_vocab = {self.d_vocab}")
        self._require(self.period_max < self.seq, "period_max", f"below seq = {self.seq}")


@dataclass(frozen=True, kw_only=True)
class SegmentCopyConfig(DataConfig):
    """Uniform noise; a segment of uniform length in [segment_min, segment_max] occurs at two random
    places.
    """

    kind: Literal["segment_copy"] = "segment_copy"
    seq: int
    d_vocab: int
    segment_min: int = 14
    segment_max: int = 24

    def _check(self) -> None:
        super()._check()
        self._require(2 <= self.segment_min <= self.segment_max, "segment_min", f"2..{self.segment_max}")
        self._require(2 * self.segment_max <= self.seq, "segment_max", f"at most half of seq = {self.seq}")


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(DataConfig):
    """Each sequence has its own transition matrix; rows are Dirichlet with concentration `alpha`."""

    kind: Literal["markov"] = "markov"
    seq: int
    d_vocab: int
    alpha: float = 1.0

    def _check(self) -> None:
        super()._check()
        self._require(self.alpha > 0, "alpha", "a positive number")


@dataclass(frozen=True, kw_only=True)
class RecallConfig(DataConfig):
    """Multi-query associative recall. Keys are the lower half of the vocabulary, values the upper half.

    `n_pairs` pairs come first; each key is asked once later, its value right after it, the gaps drawn from a
    power law with exponent `gap_power` - 1 (small: early). The rest is filled with random tokens. Source:
    Zoology, arXiv:2312.04927.
    """

    kind: Literal["recall"] = "recall"
    seq: int
    d_vocab: int
    n_pairs: int = 8
    gap_power: float = 0.01

    def _check(self) -> None:
        super()._check()
        self._require(self.n_pairs >= 1, "n_pairs", "a positive number")
        self._require(4 * self.n_pairs <= self.seq, "n_pairs", f"at most a quarter of seq = {self.seq}")
        self._require(
            2 * self.n_pairs <= self.d_vocab, "n_pairs", f"at most half of d_vocab = {self.d_vocab}"
        )
        self._require(self.gap_power > 0, "gap_power", "a positive number")


@dataclass(frozen=True, kw_only=True)
class IIDConfig(DataConfig):
    """Independent tokens from a Zipf distribution, p(rank) ~ rank^-exponent (0 is uniform)."""

    kind: Literal["iid"] = "iid"
    seq: int
    d_vocab: int
    exponent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TextConfig(DataConfig):
    """Windows of `seq` tokens of real text, at random places; documents are joined with a separator (id 0).

    `path` None is the running Python's standard library; else a file, a folder, or tokens (`.bin` uint16,
    `.npy`, either also as `.xz`). `tokens` "bytes", "bpe" (byte-level, `d_vocab` entries, trained on training
    documents only) or "file" (`path` holds tokens). A share `held_out` of the documents is never trained on.
    `max_bytes` keeps only the first documents in a shuffled order, up to that many bytes.
    """

    kind: Literal["text"] = "text"
    seq: int
    d_vocab: int = 1024
    path: str | None = None
    tokens: Literal["bytes", "bpe", "file"] = "bpe"
    held_out: float = 0.05
    max_bytes: int | None = None

    def _check(self) -> None:
        super()._check()
        self._require(0 < self.held_out < 1, "held_out", "a share in (0, 1)")
        self._require(self.d_vocab <= 65536, "d_vocab", "at most 65536 (tokens are kept as uint16)")
        if self.tokens == "bytes":
            self._require(self.d_vocab == 256, "d_vocab", "256 with tokens 'bytes'")
        if self.tokens == "bpe":
            self._require(self.d_vocab > 257, "d_vocab", "more than 257 (the separator and 256 bytes)")
        if self.tokens == "file":
            self._require(self.path is not None, "path", "a token file with tokens 'file'")
        self._require(self.max_bytes is None or self.max_bytes > 0, "max_bytes", "a positive number or None")


DATA_CONFIGS: dict[str, type[DataConfig]] = {
    "periodic": PeriodicConfig,
    "segment_copy": SegmentCopyConfig,
    "markov": MarkovConfig,
    "recall": RecallConfig,
    "iid": IIDConfig,
    "text": TextConfig,
}
