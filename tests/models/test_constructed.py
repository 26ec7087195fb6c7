"""Hand-wired models predict what their circuit says, in every form, and only with it."""

import math

import pytest
import torch
from constructed_cases import CASES, probe

from models.constructed import CONSTRUCTED_KINDS, D_CONV, constructed_model
from models.errors import ConfigError
from models.form import Form


@pytest.mark.parametrize("kind, offset", CASES)
def test_repeats_are_predicted_and_first_copies_are_not(kind, offset):
    model, _ = constructed_model(kind, offset=offset)
    tokens = probe().tokens
    loss = model(tokens, return_type="loss", loss_per_token=True)
    assert loss[:, 25:].max() < 1e-4
    assert loss[:, :24].mean() > math.log(32) - 0.01


@pytest.mark.parametrize("kind", CONSTRUCTED_KINDS)
def test_forms_agree(kind):
    model, _ = constructed_model(kind)
    tokens = probe(period=12, repeats=2).tokens[:2]
    logits = [model(tokens, form=form) for form in Form]
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=1e-4, atol=1e-3)


def test_the_convolution_gives_the_truth():
    for kind in CONSTRUCTED_KINDS[1:]:
        model, circuit = constructed_model(kind, offset=2)
        assert circuit.taps == {"q": 0, "k": 2, "v": 1}
        assert model.config.mixers[0].d_conv == D_CONV


def test_what_cannot_be_wired_is_refused():
    with pytest.raises(ConfigError, match="no constructed model of kind 'mamba3'.*mamba1"):
        constructed_model("mamba3")
    with pytest.raises(ConfigError, match="offset is 2; accepted for softmax: 1..1"):
        constructed_model("softmax", offset=2)
    with pytest.raises(ConfigError, match="offset is 4; accepted for mamba2: 1..3"):
        constructed_model("mamba2", offset=4)
