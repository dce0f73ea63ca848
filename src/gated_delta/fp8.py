"""The numbers of an output in FP8, for the reference backend and the kernels."""

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""
LEAST_AMAX = 1e-10
"""Of a head, for its scale: a head of zeros has one, too."""
