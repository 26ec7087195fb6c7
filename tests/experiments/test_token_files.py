"""Token files and the record beside them."""

import numpy as np
import pytest

from experiments.data.config import TextConfig
from experiments.data.prepared import prepare_corpus
from models.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "no JSON object"), ("{}", "no JSON object"), ('{"train_tokens": 99}', "train_tokens 99")],
)
def test_a_damaged_record_is_named(tmp_path, text, told):
    np.arange(64, dtype="<u2").tofile(tmp_path / "text.bin")
    (tmp_path / "text.corpus.json").write_text(text)
    config = TextConfig(seq=4, d_vocab=512, path=str(tmp_path / "text.bin"), tokens="file")
    with pytest.raises(ConfigError, match=told):
        prepare_corpus(config, tmp_path / "run", split_seed=0)


def test_the_record_says_where_held_out_tokens_begin(tmp_path):
    np.arange(64, dtype="<u2").tofile(tmp_path / "text.bin")
    (tmp_path / "text.corpus.json").write_text('{"train_tokens": 40}')
    config = TextConfig(seq=4, d_vocab=512, path=str(tmp_path / "text.bin"), tokens="file")
    corpus = prepare_corpus(config, tmp_path / "run", split_seed=0)
    assert len(corpus.train) == 40 and corpus.held_out[0] == 40
