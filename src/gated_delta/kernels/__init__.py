"""CuTe DSL kernels. Only `compile.py` imports them, and only to compile: running a compiled kernel needs none of this."""
