"""CuTe DSL kernels. `compile.py` alone imports them: a compiled kernel runs without them."""
