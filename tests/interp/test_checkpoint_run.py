"""The order in which checkpoints are begun and ended."""

from types import SimpleNamespace

import pytest

from interp.checkpoint_run import CheckpointRun, Work
from interp.finished import FinishedFolder
from interp.records import CheckpointScores, ProbeRecord
from interp.sources import Checkpoint
from models.errors import CheckpointError

NOTHING = dict.fromkeys(
    ("repeat_loss_nats", "first_copy_loss_nats", "repeat_gain_nats", "order_gain_nats", "loss_nats",
     "in_context_learning_nats", "icl_positions", "hit_loss_nats")
)  # fmt: skip
PROBE = ProbeRecord(
    period=2, repeats=2, n_sequences=1, seed=0, bos=None, loss_period=2, loss_repeats=2, d_candidates=2
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs checkpoints by the names of their weights ("-" cannot be opened); what was done, and the run."""
    subject = SimpleNamespace(mixers=("softmax",), n_layers=1, n_heads=1, origin=None)
    plan = SimpleNamespace(loss_tokens=None, record=PROBE, notes=(), windows_from=None)

    def started(weights, *, overlap, lenient=False):
        done = []

        def opened(step):
            if weights[step] == "-":
                raise CheckpointError(f"step {step} is damaged")
            return subject

        def measure(subject, plan, checkpoint):
            done.append(f"begun {checkpoint.step}")

            def end():
                done.append(f"ended {checkpoint.step}")
                return CheckpointScores(step=checkpoint.step, tokens=None, heads=(), **NOTHING)

            return end

        checkpoints = [
            Checkpoint(
                step=step,
                tokens=None,
                weight_files=(),
                open=lambda step=step: opened(step),
                identity=lambda name=name: name,
            )
            for step, name in enumerate(weights)
        ]
        work = Work(plan=lambda subject: plan, measure=measure, maps=lambda *args: (), overlap=overlap)
        finished = FinishedFolder(tmp_path / "kept", {})
        return CheckpointRun(work=work, finished=finished, lenient=lenient), checkpoints, done

    return started


def test_each_is_ended_when_the_next_one_has_begun(run):
    orders = {
        False: ["begun 0", "ended 0", "begun 1", "ended 1", "begun 2", "ended 2"],
        True: ["begun 0", "begun 1", "ended 0", "begun 2", "ended 1", "ended 2"],
    }
    for overlap, order in orders.items():
        started, checkpoints, done = run([f"a{overlap}", f"b{overlap}", f"c{overlap}"], overlap=overlap)
        assert [found.scores.step for found in started(checkpoints)] == [0, 1, 2]
        assert done == order


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_weights_are_scored_once(run, overlap):
    started, checkpoints, done = run(["a", "a", "b", "a", "b"], overlap=overlap)
    found = started(checkpoints)
    assert [one.scores.same_weights_as_step for one in found] == [None, 0, None, 0, 2]
    # The last one is measured for its maps.
    assert sorted(done) == [f"{what} {step}" for what in ("begun", "ended") for step in (0, 2, 4)]


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_cannot_be_opened_ends_the_run_and_the_one_before_it_is_kept(run, overlap, tmp_path):
    started, checkpoints, done = run(["a", "b", "-"], overlap=overlap)
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        started(checkpoints)
    assert done[-1] == "ended 1" and len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_cannot_be_opened_is_left_out_where_that_is_allowed(run, overlap):
    started, checkpoints, _ = run(["a", "-", "b"], overlap=overlap, lenient=True)
    assert [found.scores.step for found in started(checkpoints)] == [0, 2]
    assert started.left_out == ["step 1: step 1 is damaged"]
