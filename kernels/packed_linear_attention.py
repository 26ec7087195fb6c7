"""Linear attention of queries, keys and values as one projection gives them, side by side, with the feature
map elu + 1 of queries and keys: what `gated_linear_attention` gives of its parts, in fewer passes over
memory on a GPU."""

from jaxtyping import Float
from torch import Tensor

from kernels import KernelError
from kernels.checks import check_axes, check_count, check_number, check_present, resolve_backend, triton_unfit
from kernels.feature_maps import elu_plus_one
from kernels.gated_linear_attention import LinearState, gated_linear_attention

OPERATOR = "packed_linear_attention"


def reference(
    qkv: Float[Tensor, "batch seq channel"],
    n_heads: int,
    *,
    normalise: bool = False,
    eps: float = 0.0,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch seq head d_head"], LinearState]:
    """Readable form: split into thirds and heads, elu + 1 of queries and keys, linear attention."""
    _check(qkv, n_heads, eps)
    q, k, v = (part.unflatten(-1, (n_heads, -1)) for part in qkv.chunk(3, -1))
    q, k = elu_plus_one(q, backend=backend), elu_plus_one(k, backend=backend)
    return gated_linear_attention(q, k, v, normalise=normalise, eps=eps, backend=backend)


def packed_linear_attention(
    qkv: Float[Tensor, "batch seq channel"],
    n_heads: int,
    *,
    normalise: bool = False,
    eps: float = 0.0,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch seq head d_head"], LinearState]:
    """phi(q_i).phi(k_j) v_j summed over j <= i, phi = elu + 1, from an empty state.

    Args:
        qkv: Queries, keys and values, each [head d_head] side by side: channel is 3 n_heads d_head.
        normalise: Divide by eps + the sum of phi(q_i).phi(k_j).
        backend: "torch", "triton" (met or refused), or None: by the device.

    Returns:
        (output, state after the last step), both differentiable.

    Raises:
        KernelError: channels that do not divide into 3 n_heads, an empty sequence, a backend that is not
            available.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236.
    """
    _check(qkv, n_heads, eps)
    unfit = triton_unfit("chunked", {"d_head": qkv.shape[-1] // (3 * n_heads)}, qkv)
    if resolve_backend(OPERATOR, backend, qkv, unfit) == "torch":
        return reference(qkv, n_heads, normalise=normalise, eps=eps, backend=backend)
    from kernels.triton import packed_linear_attention as fused

    o, s, z = fused.packed_linear_attention(qkv, n_heads, normalise=normalise, eps=eps)
    return o, LinearState(s=s, z=z)


def _check(qkv: Tensor, n_heads: int, eps: float) -> None:
    check_present(OPERATOR, qkv=qkv)
    sizes = check_axes(OPERATOR, {"qkv": (qkv, "batch seq channel")})
    check_count(OPERATOR, "n_heads", n_heads)
    check_number(OPERATOR, "eps", eps)
    if sizes["channel"] % (3 * n_heads):
        raise KernelError(
            f"{OPERATOR}: qkv has {sizes['channel']} channels, accepted are multiples of 3 n_heads = "
            f"{3 * n_heads}"
        )
    if sizes["seq"] < 1:
        raise KernelError(
            f"{OPERATOR}: qkv has shape {tuple(qkv.shape)}, accepted are sequences of at least 1"
        )
