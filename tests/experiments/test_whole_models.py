"""Whole models compared where no GPU is needed: peers with our weights compute our loss; the table."""

import math

import pytest
import torch

pytest.importorskip("triton")

from experiments.benchmarks.whole_models import contenders  # noqa: E402
from experiments.benchmarks.whole_models.__main__ import main  # noqa: E402
from experiments.benchmarks.whole_models.contenders import PlainTransformer, Shape, ours  # noqa: E402
from experiments.benchmarks.whole_models.same_weights import ENTRIES, copy_weights  # noqa: E402
from experiments.benchmarks.whole_models.table import CURVE_NOTES, curve_steps, curve_table  # noqa: E402
from models.errors import ConfigError  # noqa: E402

SHAPE = Shape(n_layers=2, d_model=128, batch=3)
VOCAB, SEQ = 61, 20


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(contenders, "D_VOCAB", VOCAB)
    monkeypatch.setattr(contenders, "SEQ", SEQ)


def hugging_face(kind: str):
    """The layers of which fla's Mamba models have the parameters' names."""
    import transformers

    values = {
        "hidden_size": SHAPE.d_model,
        "num_hidden_layers": SHAPE.n_layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    if kind == "mamba1":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**values, state_size=16))
    heads = {"num_heads": 4, "head_dim": 64, "n_groups": 1, "state_size": 128, "chunk_size": 8}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**values, **heads))


def made(kind: str):
    """Ours with gains and biases that are not 1 and 0, the peer, and the peer's loss."""
    own = ours(kind, SHAPE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in own.model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    if kind == "softmax":
        model = PlainTransformer(SHAPE)
        return own, model, model
    model = hugging_face(kind)
    return own, model, lambda x: model(input_ids=x, labels=x).loss


@pytest.mark.parametrize("kind", ["softmax", "mamba1", "mamba2"])
def test_a_peer_with_our_weights_has_our_loss_and_our_gradients(kind):
    own, model, peer_loss = made(kind)
    own.model.double()
    model.double()
    tokens = torch.randint(0, VOCAB, (SHAPE.batch, SEQ), generator=torch.Generator().manual_seed(2))
    # The initial weights differ, and that is seen.
    with torch.no_grad():
        assert abs(float(own.loss(tokens)) - float(peer_loss(tokens))) > 1e-3
    copy_weights(kind, own.model, model)
    losses = own.loss(tokens), peer_loss(tokens)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    table = ENTRIES[kind](own.model.config)
    ours_grad = {name: p.grad for name, p in own.model.named_parameters()}
    theirs_grad = {name: p.grad for name, p in model.named_parameters()}
    for entry in table:
        back = entry.read(*(theirs_grad[name] for name in entry.theirs))
        for name, grad in zip(entry.ours, back, strict=True):
            assert grad.norm() > 0, name
            assert (ours_grad[name] - grad).norm() < 2e-5 * grad.norm(), name


def test_a_parameter_that_is_not_accounted_for_is_refused_and_nothing_written():
    own = ours("softmax", SHAPE).model
    model = PlainTransformer(SHAPE)
    before = model.embed.weight.detach().clone()
    model.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="softmax: the peer has parameters .* no place for: extra"):
        copy_weights("softmax", own, model)
    del model.extra
    own.blocks[1].attn.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"ours has parameters .* no place for: blocks\.1\.attn\.extra"):
        copy_weights("softmax", own, model)
    del own.blocks[1].attn.extra
    narrow = PlainTransformer(Shape(n_layers=2, d_model=64, batch=3))
    with pytest.raises(ConfigError, match=r"has shape \[61, 64\]; ours gives \[61, 128\]"):
        copy_weights("softmax", own, narrow)
    with pytest.raises(ConfigError, match=r"the peer lacks parameters .* blocks\.1\.down\.weight"):
        copy_weights("softmax", own, PlainTransformer(Shape(n_layers=1, d_model=128, batch=3)))
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("kind", ["linear", "mamba1", "mamba2"])
def test_every_parameter_of_flash_linear_attention_is_ours(kind):
    pytest.importorskip("fla", reason="flash-linear-attention is not a dependency")
    own, model = ours(kind, SHAPE).model, contenders._fla(kind, SHAPE, like_ours=True)
    copy_weights(kind, own, model)
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in model.parameters())
    if kind == "linear":
        # The peer that is timed has a norm that ours has not.
        with pytest.raises(ConfigError, match=r"no place for: model\.layers\.0\.attn\.norm\.weight"):
            copy_weights(kind, own, contenders._fla(kind, SHAPE, like_ours=False))


def test_the_curves_are_shown_with_their_largest_gap():
    n = 200
    own = [4.0 + 1 / (1 + step) for step in range(n)]
    other = list(own)
    other[90] *= 1.03
    line = {"shape": "small", "kind": "linear", "batch": 128}
    lines = [line | {"who": "ours", "curve": own}, line | {"who": "fla", "curve": other}]
    ours_row, peer_row = (_cells(row) for row in curve_table(lines).splitlines()[2:])
    assert curve_steps(n) == [1, 25, 50, 100, 150, 200]
    assert ours_row[4:11] == ["200", "5.0000", "4.0400", "4.0200", "4.0100", "4.0067", "4.0050"]
    mean = math.fsum(own[-16:]) / 16
    assert ours_row[11].startswith(f"{mean:.4f} ± 0.0001") and ours_row[12:] == ["", ""]
    assert peer_row[12:] == ["3.00% (91)", "0.00%"]
    assert peer_row[2] == "fla: denominators, no output norm" and ours_row[2] == "ours"
    # Where the peer stopped early, the steps that both have are shown; the changed one is among the last 16.
    lines[1]["curve"] = other[:95]
    ours_row, peer_row = (_cells(row) for row in curve_table(lines).splitlines()[2:])
    assert ours_row[4] == peer_row[4] == "95" and ours_row[10] == peer_row[10] == "4.0105"
    assert peer_row[12:] == ["3.00% (91)", "0.19%"]
    lines[1]["batch"] = 64
    assert _cells(curve_table(lines).splitlines()[3])[12] == "other batches"
    lines[1]["curve"] = None
    assert _cells(curve_table(lines).splitlines()[3])[4] == "out of memory"
    assert curve_table([line | {"who": "ours"}]) == ""
    assert "no output norm" in CURVE_NOTES


def test_same_weights_needs_the_number_of_losses(capsys):
    with pytest.raises(SystemExit):
        main(["--same-weights"])
    assert "--same-weights needs --losses N" in capsys.readouterr().err


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]
