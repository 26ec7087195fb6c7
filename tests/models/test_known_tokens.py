"""Token ids that are read once: known while nothing is written to them."""

import copy

import torch

from models.known_tokens import KnownTokens


class _OnGPU(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cpu(self):
        return False


def _tokens():
    return torch.arange(12).view(3, 4).as_subclass(_OnGPU)


def test_known_until_written_to():
    known, tokens = KnownTokens(), _tokens()
    assert tokens not in known
    known.add(tokens)
    assert tokens in known and tokens[:] in known and tokens[1:] not in known
    assert _tokens() not in known
    tokens[0, 0] = 99
    assert tokens not in known


def test_tensors_on_the_cpu_and_of_inference_mode_are_always_read():
    known = KnownTokens()
    with torch.inference_mode():
        inference = _tokens() + 0
    for tokens in (torch.arange(3), inference):
        known.add(tokens)
        assert tokens not in known


def test_a_copy_knows_nothing_and_the_oldest_is_forgotten():
    known = KnownTokens()
    kept = [_tokens() for _ in range(KnownTokens.MOST + 1)]
    for tokens in kept:
        known.add(tokens)
    assert kept[0] not in known and all(tokens in known for tokens in kept[1:])
    assert kept[1] not in copy.deepcopy(known)
