"""Real text: split by document, tokens, token files."""

import lzma

import numpy as np
import pytest

from experiments.data.config import TextConfig
from experiments.data.prepared import prepare_corpus
from experiments.data.text import TextTask, bigram_hits, load_tokens
from experiments.data.tokenise import tokenise
from experiments.tokenizer import byte_tokenizer_json, encode_bpe, encode_bytes, train_bpe
from models.errors import CheckpointError, ConfigError

TEXT = "def répète(x):\n    return x  # naïve\0\n"


def word(n):
    """A word of letters only, of which no two share more than single letters at their place."""
    return "".join(chr(97 + (n * (k + 3) + k * k) % 23) for k in range(8)) + "xyz"[n % 3]


@pytest.fixture
def folder(tmp_path):
    """Twenty documents; each holds a word of its own, many times."""
    source = tmp_path / "source"
    source.mkdir()
    for n in range(20):
        (source / f"{n:02d}.txt").write_text(f"{word(n)} " * 60 + "\n", "utf-8")
    return source


def test_byte_tokenizer_file_agrees_with_the_bytes():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    ours = next(encode_bytes([TEXT]))
    assert ours[-1] == 0 and (ours[:-1] != 0).all()
    clean = TEXT.replace("\0", " ")
    assert tokenizer.encode(clean).ids == list(clean.encode()) == ours[:-1].tolist()
    assert tokenizer.decode(ours[:-1].tolist()) == clean
    assert tokenizer.get_vocab_size() == 256


def test_bpe_round_trip_and_separator():
    from tokenizers import Tokenizer

    text = "the cat sat on the mat, the cat " * 30
    trained = train_bpe([text], 280)
    tokens = next(encode_bpe(trained, [text + "<|endoftext|>"]))
    assert tokens[-1] == 0 and 0 not in tokens[:-1] and tokens.max() < 280
    assert Tokenizer.from_str(trained).decode(tokens[:-1].tolist()) == text + "<|endoftext|>"
    assert len(tokens) < len(text) / 2
    assert trained == train_bpe([text], 280)


def test_no_document_is_on_both_sides(folder, tmp_path):
    config = TextConfig(seq=16, path=str(folder), tokens="bytes", d_vocab=256, held_out=0.2)
    corpus = prepare_corpus(config, tmp_path / "corpus", split_seed=0)
    train, held_out = bytes(corpus.train.astype(np.uint8)), bytes(corpus.held_out.astype(np.uint8))
    words = [word(n).encode() for n in range(20)]
    assert sum(w in train for w in words) == 16 and sum(w in held_out for w in words) == 4
    assert not any(w in train and w in held_out for w in words)
    other = prepare_corpus(config, tmp_path / "other", split_seed=1)
    assert bytes(other.held_out.astype(np.uint8)) != held_out


def test_bpe_sees_training_documents_only(folder, tmp_path):
    config = TextConfig(seq=16, path=str(folder), tokens="bpe", d_vocab=700, held_out=0.2)
    corpus = prepare_corpus(config, tmp_path / "corpus", split_seed=0)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(corpus.tokenizer_json)
    held_out = {tokenizer.decode(d.tolist()).split()[0] for d in _documents(corpus.held_out)}
    train = {tokenizer.decode(d.tolist()).split()[0] for d in _documents(corpus.train)}
    assert len(held_out) == 4 and len(train) == 16
    # A word of a training document became one token, a held-out one did not.
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in train)
    assert all(len(tokenizer.encode(f" {word}").ids) > 1 for word in held_out)


def test_a_prepared_corpus_is_read_again_unchanged(folder, tmp_path):
    config = TextConfig(seq=16, path=str(folder), tokens="bytes", d_vocab=256, held_out=0.2)
    first = prepare_corpus(config, tmp_path / "corpus", split_seed=0).train.copy()
    for path in folder.iterdir():
        path.write_text("changed since", "utf-8")
    assert (prepare_corpus(config, tmp_path / "corpus", split_seed=0).train == first).all()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("corpus.json", b"{", "corpus.json is not JSON"),
        ("corpus.json", b"\xff", "corpus.json of the prepared corpus cannot be read"),
        ("tokenizer.json", b"\xff", "tokenizer.json of the prepared corpus cannot be read"),
        ("tokenizer.json", None, "tokenizer.json of the prepared corpus cannot be read"),
    ],
)
def test_a_damaged_corpus_is_named(folder, tmp_path, name, data, message):
    config = TextConfig(seq=16, path=str(folder), tokens="bytes", d_vocab=256)
    prepare_corpus(config, tmp_path / "corpus", split_seed=0)
    path = tmp_path / "corpus" / name
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        prepare_corpus(config, tmp_path / "corpus", split_seed=0)


def test_a_prepared_corpus_that_was_changed_is_refused(folder, tmp_path):
    config = TextConfig(seq=16, path=str(folder), tokens="bytes", d_vocab=256)
    held_out = prepare_corpus(config, tmp_path / "corpus", split_seed=0).held_out.copy()
    held_out[3] += 1
    (tmp_path / "corpus" / "held_out.bin").write_bytes(held_out.tobytes())
    with pytest.raises(CheckpointError, match="held_out.bin is not the corpus this run began with"):
        prepare_corpus(config, tmp_path / "corpus", split_seed=0)


def test_windows_are_pieces_of_their_own_side():
    train, held_out = np.arange(1000, dtype=np.uint16), np.arange(2000, 2100, dtype=np.uint16)
    config = TextConfig(seq=10, d_vocab=4000)
    task = TextTask(config, train, held_out, batch=64, data_seed=0, eval_seed=0)
    tokens = task.batch(5).tokens
    assert (np.diff(tokens, axis=1) == 1).all() and tokens.max() < 1000
    assert (tokens == task.batch(5).tokens).all() and (tokens != task.batch(6).tokens).any()
    windows = task.held_out(10).tokens
    assert windows.min() == 2000 and windows.max() == 2099 and len(set(windows.ravel())) == 100
    with pytest.raises(ConfigError, match="held-out text has 100 tokens"):
        TextTask(TextConfig(seq=101), train, held_out, batch=1, data_seed=0, eval_seed=0)


def test_bigram_hits_by_hand():
    tokens = np.array([[1, 2, 3, 1, 2, 4, 1, 2], [5, 5, 5, 6, 7, 8, 9, 0]])
    expected = [[0, 0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert bigram_hits(tokens).astype(int).tolist() == expected


def test_token_files(tmp_path):
    tokens = np.arange(5000, dtype=np.uint16) % 300
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    np.save(tmp_path / "b.npy", tokens)
    (tmp_path / "c.bin.xz").write_bytes(lzma.compress(tokens.tobytes()))
    (tmp_path / "d.npy.xz").write_bytes(lzma.compress((tmp_path / "b.npy").read_bytes()))
    (tmp_path / "e.xz").write_bytes(lzma.compress(tokens.tobytes()))
    for name in ("a.bin", "b.npy", "c.bin.xz", "d.npy.xz", "e.xz"):
        assert (load_tokens(tmp_path / name) == tokens).all(), name
    np.save(tmp_path / "f.npy", tokens.astype(np.int64))
    (tmp_path / "g.bin.xz").write_bytes((tmp_path / "c.bin.xz").read_bytes()[:-40])
    (tmp_path / "h.bin").write_bytes(b"\1\2\3")
    (tmp_path / "i.txt").write_text("no tokens")
    for name in ("f.npy", "g.bin.xz", "h.bin", "i.txt", "none.bin"):
        with pytest.raises(ConfigError, match=name):
            load_tokens(tmp_path / name)


def test_tokenised_file_is_a_corpus(folder, tmp_path):
    out = tmp_path / "small.bin.xz"
    counts = tokenise(str(folder), out, d_vocab=300, held_out=0.2, max_bytes=None)
    config = TextConfig(seq=16, path=str(out), tokens="file", d_vocab=300)
    corpus = prepare_corpus(config, tmp_path / "corpus", split_seed=0)
    direct = prepare_corpus(
        TextConfig(seq=16, path=str(folder), d_vocab=300, held_out=0.2), tmp_path / "direct", split_seed=0
    )
    assert len(corpus.train) == counts["train_tokens"]
    assert (corpus.train == direct.train).all() and (corpus.held_out == direct.held_out).all()
    assert corpus.tokenizer_json == direct.tokenizer_json
    with pytest.raises(ConfigError, match="accepted: below data.d_vocab = 260"):
        prepare_corpus(config.replace(d_vocab=260), tmp_path / "small-vocabulary", split_seed=0)
    tokenise(str(folder), out, d_vocab=300, held_out=0.3, max_bytes=None)
    with pytest.raises(CheckpointError, match="not the corpus this run began with"):
        prepare_corpus(config, tmp_path / "corpus", split_seed=0)


def _documents(tokens):
    return [part for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1) if len(part)]
