"""What others offer for one-token steps and for matching sums: the peers of `kernels/reads.py`."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from experiments.benchmarks.kernels.peers import causal_mask, imported

# Entrants whose sum is another one than ours.
DIFFERENT = ("FA2, one offset",)
Call = Callable[[], object]


def linear_step(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Call | None:
    """fla's recurrent kernel on one token; q, k, v [batch head d], s [batch head d d]."""
    if not (fla := imported("fla.ops.linear_attn")):
        return None
    token = [x[:, None].contiguous() for x in (q, k, v)]
    return functools.partial(
        fla.fused_recurrent_linear_attn, *token, scale=1.0, initial_state=s, output_final_state=True
    )


def scan_step(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, h: Tensor
) -> Call | None:
    """mamba_ssm's step; h is overwritten. It wants a bias of dt, here zero."""
    if not (module := imported("mamba_ssm.ops.triton.selective_state_update")):
        return None
    a, bias = -torch.exp(a_log), torch.zeros_like(d)
    return functools.partial(module.selective_state_update, h, u, dt, a, b, c, D=d, dt_bias=bias)


def conv_step(x: Tensor, weight: Tensor, stored: Tensor) -> Call | None:
    """causal-conv1d's step; its own copy of the state, [batch channel width-1], is overwritten."""
    if not (module := imported("causal_conv1d")):
        return None
    state = stored.transpose(1, 2).contiguous()
    return functools.partial(module.causal_conv1d_update, x, state, weight, activation="silu")


def sdpa_step(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Attention of one query, the cache as it is kept: [batch head seq d]."""
    k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    return functools.partial(scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)


def softmax_matches(q: Tensor, k: Tensor, label_dest: Tensor, label_src: Tensor) -> dict[str, Call]:
    """FlashAttention-2's logsumexp for one source a row, and FlexAttention for all matches."""
    found: dict[str, Call] = {"FA2, one offset": functools.partial(one_offset, q, k, q.shape[1] // 4)}
    try:
        found["FlexAttention, two calls"] = flex_matches(q, k, label_dest, label_src)
    except Exception as problem:
        print(f"FlexAttention: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
    return found


def one_offset(q: Tensor, k: Tensor, period: int) -> Tensor:
    """Attention to one source a destination (period - 1 back), by FlashAttention-2's logsumexp."""
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    lse = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, True)[1]
    reads, sources = q[:, period - 1 :].float(), k[:, : k.shape[1] - period + 1].float()
    scores = (reads * sources).sum(-1) * q.shape[-1] ** -0.5
    return torch.exp(scores.transpose(1, 2) - lse[:, :, period - 1 :])


def flex_matches(
    q: Tensor, k: Tensor, label_dest: Tensor, label_src: Tensor, compiled: bool = True
) -> Callable[[], Tensor]:
    """The sums from two logsumexps: over the matching keys, and over all of them.

    The second call compares token ids in each pair of the same causal block mask: nearly every block holds a
    match, so a block mask of the matches would skip nothing and would have to be made for every text. The
    narrowest v is passed, since its product is not needed.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if compiled:
        torch._dynamo.reset()
        flex_attention = torch.compile(flex_attention, dynamic=False)
    mask = causal_mask(q.shape[1], None, q.device.type)
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, k[..., :16])]

    def matching(score: Tensor, batch: Tensor, head: Tensor, dest: Tensor, src: Tensor) -> Tensor:
        return torch.where(label_dest[batch, dest] == label_src[batch, src], score, -float("inf"))

    def call() -> Tensor:
        options = {"block_mask": mask, "return_aux": AuxRequest(lse=True)}
        whole = flex_attention(*inputs, **options)[1].lse
        matched = flex_attention(*inputs, score_mod=matching, **options)[1].lse
        return torch.exp(matched - whole)

    return call


def from_pattern(q: Tensor, k: Tensor, label_dest: Tensor, label_src: Tensor) -> Tensor:
    """The sums from all weights, in half precision."""
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    pattern = scores.masked_fill_(later, float("-inf")).softmax(-1)
    return pattern.masked_fill_((label_dest[:, :, None] != label_src[:, None, :])[:, None], 0).sum(-1)
