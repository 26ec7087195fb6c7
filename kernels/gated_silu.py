"""SiLU(gate) times values: what a gated MLP puts between its projections."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels.checks import check_axes, check_present, check_shape, resolve_backend, triton_unfit

OPERATOR = "gated_silu"


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
