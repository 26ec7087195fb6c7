"""The notebooks run, find what they say they find, and are small, readable files as committed."""

import ast
import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from experiments.errors import TrainingError
from experiments.notebooks.finished_runs import VARIABLE, finished_runs, is_finished
from interp.display.page import STYLE

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NAMES = (
    "induction_in_softmax",
    "induction_without_attention",
    "phase_transition",
    "pretrained_model",
)
# The runs are trained once, by the first notebook that needs them.
pytestmark = [pytest.mark.xdist_group("notebooks")]


def committed(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Environment of the kernels: a folder for runs (one with finished runs may be given), no home."""
    home = tmp_path_factory.mktemp("jupyter")
    settings = {VARIABLE: os.environ.get(VARIABLE) or str(tmp_path_factory.mktemp("runs"))}
    settings |= {
        name: str(home / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    }
    return {**os.environ, **settings, "OMP_NUM_THREADS": "1", "SMOLLM2": ""}


def executed(name, runs, expression):
    """The notebook as run anew, and the value of an expression in its kernel at the end, through JSON."""
    notebook = committed(name)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({expression}))"))
    client = NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=runs)
    return notebook, json.loads(printed(notebook.cells[-1]))


def printed(cell):
    """What a cell wrote to stdout; the kernel may send one print in several pieces."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def outputs(notebook, kind):
    return [o.data[kind] for c in notebook.cells for o in c.get("outputs", []) if kind in o.get("data", {})]


def test_the_softmax_circuit_is_found(runs):
    notebook, found = executed(
        "induction_in_softmax",
        runs,
        "{'head': [head.layer, head.head, head.offset], 'cut': profile.layers[1].effect(0)[0],"
        " 'best': profile.layers[1].best(0), 'previous': list(previous.values()), 'copying': copying,"
        " 'excess': {kind: float(scores[kind].excess[0, 1]) for kind in 'qkv'},"
        " 'off': [off.change('repeat')[0], off.change('ordinary')[0]]}",
    )
    assert found["head"] == [1, 0, 1] and found["best"] == 1
    assert found["cut"] > 1.0
    # K-composition is above its nulls; queries and values, the controls, are not.
    assert found["excess"]["k"] > 5 and max(found["excess"][kind] for kind in "qv") < 5
    # The previous-token step lies in the first layer, and not in the second.
    assert found["previous"][0] > 0.5 and found["previous"][1] < 0.1
    assert found["copying"] > 0.8
    assert found["off"][0] > 1.0 and found["off"][0] > 3 * found["off"][1]
    html = outputs(notebook, "text/html")
    assert any("1 induction head among 2 scored units" in text for text in html)
    assert sum(text.count("data:image/svg+xml;base64,") for text in html) >= 8


def test_without_softmax_the_match_is_not_at_the_next_token(runs):
    _, found = executed(
        "induction_without_attention",
        runs,
        "{'best': best, 'effect': {name: layer.effect()[0] for name, layer in second.items()},"
        " 'steps': json.loads(steps.to_json(orient='index')),"
        " 'offsets': {n: sorted({(h.reading, h.offset) for h in r.induction_heads()})"
        " for n, r in reports.items()}}",
    )
    assert found["best"]["demo-softmax"] == 1
    assert found["best"]["demo-mamba2"] > 1 and found["best"]["demo-linear"] > 1
    assert min(found["effect"].values()) > 0.5
    cut = {name: row["cut (i, i−1), layer 0"] for name, row in found["steps"].items()}
    assert cut["demo-mamba2"] < cut["demo-softmax"] / 3
    assert found["steps"]["demo-softmax"]["tap 1, layer 1"] is None
    assert found["steps"]["demo-mamba2"]["tap 1, layer 1"] > 1.0
    # From the layer's input positions, convolution counted in, the match is at the next token again.
    mamba = dict(map(tuple, found["offsets"]["demo-mamba2"]))
    assert mamba["block"] == 1 and mamba["ssm"] > 1


def test_the_phase_transition_is_dated(runs):
    _, found = executed(
        "phase_transition",
        runs,
        "{'onset': transition.prefix_matching.onset_step, 'order': transition.order_gain.onset_step,"
        " 'steps': [c.step for c in report.checkpoints], 'n_maps': len(maps),"
        " 'head': [head.layer, head.head], 'scores': scores['prefix_matching']['L1H0'].tolist()}",
    )
    assert found["head"] == [1, 0] and found["n_maps"] == len(found["steps"]) > 20
    low, high = found["onset"]
    assert 50 < low < high < 700 and 50 < found["order"][0] < 700
    before = [s for step, s in zip(found["steps"], found["scores"], strict=True) if step < low]
    assert max(before) < 0.3 and found["scores"][-1] > 0.5


def test_the_pretrained_door_gives_the_same_head(runs):
    notebook, found = executed(
        "pretrained_model",
        runs,
        "{'head': [best.layer, best.head, best.prefix_matching], 'second': second, 'first': first,"
        " 'architecture': model.source.architecture}",
    )
    assert found["architecture"] == "llama"
    printed = [o.text for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "stream"]
    assert any(
        "demo-softmax-as-llama: the small model of the first notebook, 2 layers" in text for text in printed
    )
    assert found["head"][:2] == [1, 0] and found["head"][2] > 0.5
    second, first = found["second"], found["first"]
    assert second["strongest"] - second["none"] > 1.0
    assert second["strongest"] - second["none"] > 3 * (first["strongest"] - first["none"])


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_and_readable(name):
    path, notebook = FOLDER / f"{name}.ipynb", committed(name)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "see" in first.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 5, node.name
    # Outputs are kept, as pictures and tables that need no script: a code host shows them.
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    html = outputs(notebook, "text/html")
    assert len(html) >= 4 and not any("<script" in text or "http" in text for text in html)
    records = [text for text in html if 'class="bsx"' in text]
    assert all(STYLE in text for text in records), "shown as records were shown before: run it anew"
    kinds = {kind for c in code for o in c.outputs for kind in o.get("data", {})}
    assert kinds <= {"text/html", "text/plain"}
    text = path.read_text("utf-8")
    assert "/work" not in text and "/home/" not in text and "/tmp" not in text and "site-packages" not in text


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


def test_runs_that_are_there_are_taken(tmp_path, capsys):
    (tmp_path / "demo-softmax" / "step_00000750").mkdir(parents=True)
    found = finished_runs("demo-softmax", out=tmp_path)
    assert found["demo-softmax"].resolve() == tmp_path / "demo-softmax" and capsys.readouterr().out == ""
    assert not is_finished("demo-mamba2", tmp_path / "demo-softmax")


def test_a_run_that_cannot_be_trained_is_named(tmp_path, capfd):
    (tmp_path / "demo-softmax").mkdir()
    (tmp_path / "demo-softmax" / "run.json").write_text("not JSON", "utf-8")
    with pytest.raises(TrainingError, match="runs that could not be trained: demo-softmax"):
        finished_runs("demo-softmax", out=tmp_path)
    assert "training demo-softmax" in capfd.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_becomes_a_page_with_its_pictures_and_tables(name):
    page, _ = HTMLExporter(embed_images=True).from_notebook_node(committed(name))
    picture = 'src="data:image/svg+xml;base64,'
    assert page.count(picture) == sum(t.count(picture) for t in outputs(committed(name), "text/html")) >= 5
    assert page.count("<table") >= 1 and "Traceback" not in page
