"""The benchmark of the Triton kernels: comparisons with float64, times beside every peer, cold starts."""
