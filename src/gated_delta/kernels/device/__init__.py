"""Building blocks that kernels share."""
