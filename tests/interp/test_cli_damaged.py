"""`detect-induction` on damaged files: one line that names the value and what is accepted."""

import json
import os

import pytest
import torch
from induction_circuit import induction_model
from safetensors.torch import load, save_file

from interp.cli import main
from models.checkpoint import save_model


@pytest.fixture
def checkpoint(tmp_path):
    return save_model(tmp_path / "model", induction_model())


@pytest.fixture
def run_folder(tmp_path):
    for step in (0, 10):
        save_model(tmp_path / f"run/step_{step:08d}", induction_model())
    return tmp_path / "run"


def _refused(capsys, *argv, match):
    """The command ends with status 1 and one line that holds `match`."""
    assert main([str(word) for word in argv]) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "checkpoint 1 of" not in line]
    assert out == "" and len(lines) == 1 and lines[0].startswith("detect-induction: error: "), (out, err)
    assert match in lines[0], lines[0]


@pytest.mark.parametrize("weight", ["embed.W_E", "unembed.weight", "blocks.1.attn.out_proj.weight"])
def test_outputs_that_are_not_finite(checkpoint, capsys, weight):
    file = checkpoint / "model.safetensors"
    tensors = load(file.read_bytes())
    tensors[weight].mul_(0).add_(3e38)
    save_file(tensors, file)
    _refused(capsys, checkpoint, match="step 0: the model's outputs are not finite (")


def test_paths_that_are_no_file(capsys):
    _refused(capsys, os.devnull, match="/dev/null is a device or a pipe; accepted: a checkpoint folder")
    _refused(capsys, "", match="path ''; accepted: a checkpoint folder")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.full((4, 40), -1), "the evaluation windows hold token -1, the model's vocabulary ends at 20"),
        (torch.full((4, 40), 21), "the evaluation windows hold token 21, the model's vocabulary ends at 20"),
        (torch.arange(20).view(5, 4), "context shorter than the probe: the evaluation windows hold 4 tokens"),
        (torch.zeros(4, 0, dtype=torch.int64), "must hold integers `tokens` [window seq]; it holds tokens"),
        (torch.zeros(4, 40, dtype=torch.bool), "it holds tokens torch.bool [4, 40]"),
    ],
)
def test_windows_that_cannot_be_read(run_folder, capsys, tokens, message):
    save_file({"tokens": tokens}, run_folder / "eval.safetensors")
    _refused(capsys, run_folder, match=message)


def test_a_log_that_is_no_text_gives_the_tokens_that_it_has(run_folder, tmp_path):
    lines = [f'{{"step": {step}, "tokens": {tokens}}}' for step, tokens in ((0, 0), ("[]", 3), (10, 7))]
    lines.insert(1, "\udcff\udcfe")
    (run_folder / "metrics.jsonl").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    file = tmp_path / "out.json"
    assert main([str(run_folder), "--quiet", "--scores", "repeats", "--json", str(file)]) == 0
    assert [one["tokens"] for one in json.loads(file.read_text())["checkpoints"]] == [0, 7]


def test_finished_scores_of_wrong_types_are_named(checkpoint, tmp_path, capsys):
    kept = tmp_path / "kept"
    words = [str(checkpoint), "--quiet", "--scores", "repeats", "--resume", str(kept)]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0 and capsys.readouterr().out == first
    (file,) = kept.iterdir()
    whole = json.loads(file.read_text())

    def changed(path, value):
        values = json.loads(json.dumps(whole))
        *parents, last = path
        node = values
        for part in parents:
            node = node[part]
        node[last] = value
        return values

    head = ("finished", "scores", "heads", 0)
    for values, message in (
        (changed(("finished",), []), "finished is [], not a Finished"),
        (changed(("finished", "scores"), 3), "scores is 3, not a CheckpointScores"),
        (changed(("finished", "scores", "heads"), "x"), "heads is 'x', not a list"),
        (changed((*head, "prefix_matching"), "high"), "prefix_matching is 'high', not float"),
        (changed((*head, "prefix_matching"), None), "prefix_matching is None, not float"),
        (changed((*head, "is_induction"), 1), "is_induction is 1, not bool"),
        (changed((*head, "layer"), True), "layer is True, not int"),
        (changed((*head, "weight_by_offset"), [[0.0]]), "weight_by_offset is [0.0], not float"),
        (changed((*head, "more"), 1), "heads is {"),
        (changed(("finished", "scores", "icl_positions"), [1]), "icl_positions is [1], not a list of its"),
        (changed(("finished", "scores", "step"), 7), "it holds step 7"),
        (changed(("finished", "facts", "mixers"), None), "mixers is None, not a list"),
        ([], "list indices"),
    ):
        file.write_text(json.dumps(values))
        _refused(capsys, *words, match=f"{file} cannot be used ({message}")


@pytest.mark.parametrize("name", ["run/run.json", "run/step_00000010/model.safetensors"])
def test_files_of_the_run_are_not_written_over(run_folder, tmp_path, capsys, name):
    (run_folder / "run.json").write_text("{}")
    before = (tmp_path / name).read_bytes()
    _refused(capsys, run_folder, "--csv", tmp_path / name, match="is a file of a run or a model, which --csv")
    assert (tmp_path / name).read_bytes() == before


def test_a_pipe_is_written_to(checkpoint, capsys):
    reader, writer = os.pipe()
    assert main([str(checkpoint), "--quiet", "--scores", "repeats", "--csv", f"/proc/self/fd/{writer}"]) == 0
    os.close(writer)
    with open(reader) as file:
        assert file.readline().startswith("step,")
