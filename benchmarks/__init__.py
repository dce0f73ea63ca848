"""Benchmarks of our kernels against their peers on one GPU.

cells.py: the cells of each operation and their tensors. peers.py: each peer's call. measure.py:
checks, then times in turns. record.py: the JSON. plot.py: the pictures. serve.py, tokens.py:
serving engines. Importing touches neither CUDA nor a peer; the clock is gated_delta.bench's.
"""
