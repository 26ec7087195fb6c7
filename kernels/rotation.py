"""Rotation of pairs of entries by position-dependent angles (RoPE), given tables of cos and sin."""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import check_axes, check_present, resolve_backend, triton_unfit

OPERATOR = "rotation"
LAYOUTS = ("half", "adjacent")
Heads = Float[Tensor, "batch seq head d_head"]
Table = Float[Tensor, "seq pair"]


def reference(x: Heads, cos: Table, sin: Table, layout: str) -> Heads:
    """Readable form: (a, b) -> (a cos - b sin, b cos + a sin) for each pair."""
    n_pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned = x[..., : 2 * n_pairs]
    if layout == "half":
        a, b = turned[..., :n_pairs], turned[..., n_pairs:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    first, second = a * cos - b * sin, b * cos + a * sin
    if layout == "adjacent":
        out = torch.stack((first, second), -1).flatten(-2)
        return out if 2 * n_pairs == x.shape[-1] else torch.cat((out, x[..., 2 * n_pairs :]), -1)
    if 2 * n_pairs == x.shape[-1]:
        return torch.cat((first, second), -1)
    return torch.cat((first, second, x[..., 2 * n_pairs :]), -1)


def rotate(x: Heads, cos: Table, sin: Table, layout: str, *, backend: str | None = None) -> Heads:
    """Turn the first 2 x pair entries of each head; the others pass unchanged.

    Args:
        cos, sin: Constants: they get no gradient on a GPU.
        layout: Pairs are (n, n + pairs), "half", or (2n, 2n + 1), "adjacent".
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: shapes that disagree, an unknown layout, a backend that is not available.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    if layout not in LAYOUTS:
        raise KernelError(f"{OPERATOR}: layout is {layout!r}, accepted are 'half' and 'adjacent'")
    check_present(OPERATOR, x=x, cos=cos, sin=sin)
    axes = {"x": (x, "batch seq head d_head"), "cos": (cos, "seq pair"), "sin": (sin, "seq pair")}
    sizes = check_axes(OPERATOR, axes)
    if 2 * sizes["pair"] > sizes["d_head"]:
        raise KernelError(
            f"{OPERATOR}: {sizes['pair']} pairs for d_head {sizes['d_head']}, accepted are as many as fit"
        )
    unfit = triton_unfit("chunked", {}, x, cos, sin)
    if resolve_backend(OPERATOR, backend, x, unfit) == "triton":
        from kernels.triton import rotation as fused

        return fused.rotation(x, cos, sin, adjacent=layout == "adjacent")
    return reference(x, cos, sin, layout)
