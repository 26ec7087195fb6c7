"""Prompts: what becomes which tokens, and one sentence for what does not."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from interp.dashboard.desk import Desk
from interp.dashboard.prompt import MOST_TOKENS, Prompt, PromptError, PromptSpec, make_prompt, shared_ids
from interp.dashboard.run import Run
from interp.dashboard.selection import Selection
from interp.dashboard.token_pieces import spelling


@pytest.fixture(scope="module")
def wired(wired_run):
    return Run(str(wired_run))


@pytest.fixture(scope="module")
def bytes_run(text_run):
    return Run(str(text_run))


def made(run: Run, **spec) -> Prompt:
    return make_prompt(run, run.load(len(run.steps) - 1).subject, PromptSpec(**spec))


def refused(run: Run, message: str, **spec) -> None:
    with pytest.raises(PromptError, match=message):
        made(run, **spec)


def test_probe_repeats_distinct_tokens(wired):
    prompt = made(wired, period=7, repeats=3, seed=2)
    assert prompt.ids == prompt.ids[:7] * 3 and len(set(prompt.ids)) == 7
    assert prompt.tokens == tuple(map(str, prompt.ids)) and prompt.notes == ()
    assert made(wired, period=7, repeats=3, seed=3).ids != prompt.ids


def test_probe_has_as_many_tokens_as_the_vocabulary(wired):
    prompt = made(wired, period=40, repeats=2)
    assert len(prompt) == 64 and prompt.notes == ("only 32 different tokens are there to draw from",)


def test_probe_longer_than_learned_positions(wired):
    refused(wired, "has 129 tokens; this model takes 128", period=43, repeats=3)
    assert len(made(wired, period=32, repeats=4)) == 128


def test_two_models_draw_the_same_probe(wired_run, mamba_run, text_run):
    desk = Desk([str(wired_run), str(mamba_run)])
    spec = PromptSpec(period=9, repeats=2, seed=4)
    one, other = (desk.prompt(Selection(run=n, reading="pattern"), spec) for n in (0, 1))
    assert one.ids == other.ids and one.tokens == other.tokens and max(one.ids) < 13
    assert one.notes == ("drawn from the 13 tokens that both models have",) and other.notes == ()
    # Alone the larger vocabulary is drawn from whole: 18 tokens, other ones.
    assert Desk([str(wired_run)]).prompt(Selection(reading="pattern"), spec).ids != one.ids
    # The ids of bytes mean something else.
    mixed = Desk([str(wired_run), str(text_run)])
    assert mixed.drawable is None
    assert mixed.prompt(Selection(run=1, reading="pattern"), spec).notes == ()


def test_ids_are_shared_where_they_are_spelt_alike(bytes_run):
    subject = bytes_run.load(0).subject
    assert shared_ids(subject, subject) == tuple(range(256))
    twin = Run(bytes_run.path).load(0).subject
    twin.tokenizer = words("[UNK]")
    assert shared_ids(subject, twin) is None


def test_typed_ids(wired):
    assert made(wired, kind="typed", text=" 3, 1\n31 ").ids == (3, 1, 31)
    refused(wired, r"Unknown token 32, 77: the vocabulary has ids 0 to 31\.", kind="typed", text="1 32 77")
    refused(wired, "not '-1', 'x', '²'", kind="typed", text="-1 x ²")
    refused(wired, r"empty: type ids from 0 to 31\.", kind="typed", text="  \n")


def test_typed_text_is_bytes_where_the_vocabulary_is(bytes_run):
    prompt = made(bytes_run, kind="typed", text="a\né")
    assert prompt.ids == (97, 10, 0xC3, 0xA9)
    assert prompt.tokens == ("a", "\n", b"\xc3", b"\xa9")
    refused(
        bytes_run, r"49 tokens; the positions that the model has learned: 48\.", kind="typed", text="x" * 49
    )
    refused(bytes_run, r"empty: type some text\.", kind="typed", text="")
    refused(bytes_run, "more than 131,072 characters", kind="typed", text="x" * (65 * MOST_TOKENS))


def test_longer_than_the_context_is_said_where_positions_are_not_learned(mamba_run):
    run = Run(str(mamba_run))
    long = made(run, period=13, repeats=6)
    assert len(long) == 78 and "longer than the context of 64 tokens" in long.notes[0]
    refused(run, f"limit of this page: {MOST_TOKENS:,}", kind="typed", text="1 " * (MOST_TOKENS + 1))


def test_samples_of_the_standard_library_for_a_model_with_a_tokenizer(bytes_run, wired):
    one, two = made(bytes_run, kind="sample"), made(bytes_run, kind="sample", sample=1)
    assert len(one) == len(two) == 48 and one.ids != two.ids
    refused(bytes_run, "Sample 16: bytes has samples 0 to 15", kind="sample", sample=16)
    refused(wired, "neither held-out windows nor a tokenizer", kind="sample")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"kind": "file"}, "'file'; accepted: probe, sample, typed"),
        ({"period": 0}, "period is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"repeats": 2.5}, "repeats is 2.5"),
        ({"sample": "3"}, "sample is '3'"),
    ],
)
def test_what_a_page_sends_is_checked(values, message):
    with pytest.raises(PromptError, match=message):
        PromptSpec.of(values)


def test_empty_fields_take_the_defaults():
    assert PromptSpec.of({"period": None, "text": "x", "other": 1}) == PromptSpec(text="x")
    assert PromptSpec.of(None) == PromptSpec()


def words(unk: str | None) -> Tokenizer:
    vocabulary = {word: n for n, word in enumerate(["the", "cat", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_unknown_words_are_counted(text_run):
    run = Run(str(text_run))
    run.load(0).subject.tokenizer = words("[UNK]")
    prompt = made(run, kind="typed", text="the dog the cat ran")
    assert prompt.ids == (0, 2, 0, 1, 2) and prompt.notes == ("2 unknown to the vocabulary, shown as [UNK]",)


def test_characters_that_a_tokenizer_drops_are_named(text_run):
    run = Run(str(text_run))
    run.load(0).subject.tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    prompt = made(run, kind="typed", text="aζb ζ")
    assert prompt.ids == (0, 1) and prompt.notes == ("left out, unknown to the vocabulary: 'ζ'",)


class Pieces:
    """A vocabulary of given pieces whose decoder is SentencePiece's."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def id_to_token(self, token):
        return self.pieces[token]

    def decode(self, ids):
        return "".join(self.pieces[n] for n in ids).replace("\u2581", " ").strip()


def test_spelling_of_pieces():
    vocabulary = Pieces("\u2581cat", "<0xE2>", "s", "<s>")
    assert [spelling(vocabulary, n) for n in range(4)] == [" cat", b"\xe2", "s", "<s>"]
    assert spelling(None, 7) == "7"
