"""Second derivatives and the transforms of `torch.func`: right in the readable form, else refused by name."""

import language_models
import pytest
import torch
from torch.testing import assert_close

from kernels import KernelError

TOKENS = language_models.tokens()


@pytest.mark.parametrize("name", ["softmax", "linear", "mamba1", "mamba2", "gpt2"])
def test_second_derivatives_of_the_readable_form(name):
    """Against a difference of first derivatives along one direction."""
    model = language_models.build(name)
    weight = model.blocks[0].ln1.w
    direction = torch.linspace(-1, 1, 16, dtype=torch.float64)

    def slope() -> torch.Tensor:
        loss = model(TOKENS, return_type="loss", form="parallel")
        return torch.autograd.grad(loss, weight, create_graph=True)[0]

    found = torch.autograd.grad(slope() @ direction, weight)[0]
    ends = []
    for side in (1, -1):
        with torch.no_grad():
            weight += side * 1e-5 * direction
        ends.append(slope().detach())
        with torch.no_grad():
            weight -= side * 1e-5 * direction
    assert_close(found, (ends[0] - ends[1]) / 2e-5, rtol=1e-5, atol=1e-7)
    assert found.abs().max() > 1e-3


def test_a_second_derivative_of_the_chunked_form_is_refused():
    model = language_models.build("softmax")
    weight = model.blocks[0].ln1.w
    slope = torch.autograd.grad(model(TOKENS, return_type="loss"), weight, create_graph=True)[0]
    with pytest.raises(KernelError, match="softmax_attention: no second derivative in form 'chunked'"):
        torch.autograd.grad(slope.sum(), weight)


@pytest.mark.parametrize(
    ("name", "form"), [("softmax", "parallel"), ("softmax", "chunked"), ("linear", "recurrent")]
)
def test_functional_gradients(name, form):
    model = language_models.build(name)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], tokens: torch.Tensor = TOKENS) -> torch.Tensor:
        options = {"return_type": "loss", "form": form}
        return torch.func.functional_call(model, weights, (tokens,), options)

    found = torch.func.grad(loss)(weights)
    expected = torch.autograd.grad(loss(weights), list(weights.values()))
    for mine, reference in zip(found.values(), expected, strict=True):
        assert_close(mine, reference)


def test_functional_gradients_that_do_not_exist_are_refused():
    model = language_models.build("linear")
    with pytest.raises(KernelError, match="form 'chunked' has no transforms of torch.func"):
        torch.func.grad(lambda w: torch.func.functional_call(model, w, (TOKENS,)).sum())(
            dict(model.named_parameters())
        )
