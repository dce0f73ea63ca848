"""Our kernels against their peers on one GPU; nothing here touches CUDA or imports a peer before it is measured.

cells.py: each operation's table of cells, and their tensors; peers.py: how each peer makes the same call; measure.py: check, then
time in turns; record.py: the JSON; plot.py: the pictures. The clock is that of gated_delta.bench.
"""
