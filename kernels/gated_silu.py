"""SiLU(gate) times values: what a gated MLP puts between its projections, of two tensors or of one."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import KernelError
from kernels.checks import check_axes, check_present, check_shape, resolve_backend, triton_unfit

OPERATOR = "gated_silu"
PACKED = "packed_gated_silu"


def gated_silu(
    gate: Float[Tensor, "*shape"], x: Float[Tensor, "*shape"], *, backend: str | None = None
) -> Float[Tensor, "*shape"]:
    """SiLU(gate) * x.

    Args:
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: shapes that disagree, a backend that is not available.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    axes = check_shape(OPERATOR, "gate", gate)
    check_present(OPERATOR, x=x)
    check_axes(OPERATOR, {"gate": (gate, axes), "x": (x, axes)})
    unfit = triton_unfit("chunked", {}, gate, x)
    if unfit is None and gate.dtype != x.dtype:
        unfit = f"a gate of {gate.dtype} for values of {x.dtype}"
    if resolve_backend(OPERATOR, backend, x, unfit) == "triton":
        from kernels.triton import gated_silu as fused

        return fused.gated_silu(gate, x)
    return F.silu(gate) * x


def packed_gated_silu(
    h: Float[Tensor, "*batch both"], *, backend: str | None = None
) -> Float[Tensor, "*batch width"]:
    """SiLU(h[..., :width]) * h[..., width:], both = 2 width: of what one projection gives.

    Args:
        backend: "torch", "triton" (met or refused), or None: by the device.

    Raises:
        KernelError: a last axis that is absent or odd, a backend that is not available.
    """
    check_shape(PACKED, "h", h, last="both")
    if h.shape[-1] % 2:
        raise KernelError(
            f"{PACKED}: h has shape {tuple(h.shape)}, accepted is an even number of entries, gates and values"
        )
    if resolve_backend(PACKED, backend, h, triton_unfit("chunked", {}, h)) == "triton":
        from kernels.triton import packed_gated_silu as fused

        flat = h[None] if h.ndim == 1 else h.flatten(0, -2)
        return fused.packed_gated_silu(flat).view(*h.shape[:-1], h.shape[-1] // 2)
    gate, x = h.chunk(2, -1)
    return F.silu(gate) * x
