"""A two-layer softmax model whose induction circuit is wired by hand: a previous-token head, then a matching
head.
"""

import torch

from models.config import LanguageModelConfig, SoftmaxAttentionConfig

# Id 0 is BOS: position 0 has no previous token, attends to itself, and must not look like a match.
D_VOCAB, N_CTX, BOS = 21, 41, 0
# Head 0 of each layer is wired; head 1 is left at zero: uniform attention that writes nothing.
SHARP = 60.0


def induction_config() -> LanguageModelConfig:
    """Residual stream: token, previous token, output (a slot for each token), position."""
    mixer = SoftmaxAttentionConfig(n_heads=2, d_head=N_CTX, scale=1.0)
    return LanguageModelConfig(
        d_model=3 * D_VOCAB + N_CTX,
        n_layers=2,
        d_vocab=D_VOCAB,
        n_ctx=N_CTX,
        mixers=(mixer, mixer),
        positions="learned",
        norm="none",
        bos=BOS,
    )


def induction_model():
    """The model: L0H0 attends to the previous token, L1H0 to what followed earlier copies and copies it."""
    from models.language_model import LanguageModel

    model = LanguageModel(induction_config())
    token, before, out, place = (n * D_VOCAB for n in range(4))
    eye = torch.eye(D_VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, token:before] = eye
        model.unembed.weight[:, out:place] = 8 * eye
        model.pos_embed.W_pos[:, place:] = torch.eye(N_CTX)
        q, k, v, o = _head_0(model.blocks[0].attn)
        q[:, place:] = SHARP * torch.eye(N_CTX)
        # The key of position j answers to position j + 1.
        k[1:, place : place + N_CTX - 1] = torch.eye(N_CTX - 1)
        v[:D_VOCAB, token:before] = eye
        o[before:out, :D_VOCAB] = eye
        q, k, v, o = _head_0(model.blocks[1].attn)
        q[:D_VOCAB, token:before] = SHARP * eye
        k[:D_VOCAB, before:out] = eye
        v[:D_VOCAB, token:before] = eye
        o[out:place, :D_VOCAB] = eye
    return model.eval()


def _head_0(mixer):
    """Views of head 0's maps: q, k, v [d_head d_model] and output [d_model d_head]."""
    q, k, v = mixer.in_proj.weight.split(2 * N_CTX)
    return q[:N_CTX], k[:N_CTX], v[:N_CTX], mixer.out_proj.weight[:, :N_CTX]
