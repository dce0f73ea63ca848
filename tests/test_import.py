"""Importing the package costs little and touches neither CUDA nor a kernel compiler."""

import subprocess
import sys


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_fast():
    """In CPU time, against torch's in the same process: neighbours slow both down, or neither."""
    code = (
        "from time import process_time as now; t = now(); import torch; t, torchs = now(), now() - t; "
        "import gated_delta; print((now() - t) / torchs)"
    )
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_import_touches_nothing_heavy():
    code = (
        "import torch, sys; before = set(sys.modules); import gated_delta; new = set(sys.modules) - before; "
        "print(torch.cuda.is_initialized(), sorted({n.split('.')[0] for n in new if not n.startswith(('gated_delta', 'torch'))}))"
    )
    initialized, new = run(code).split(" ", 1)
    assert initialized == "False"
    for heavy in ("cutlass", "tvm_ffi", "triton", "transformers", "matplotlib", "typer", "rich"):
        assert heavy not in new


def test_the_public_names():
    import gated_delta

    assert set(gated_delta.__all__) == {
        "prefill", "decode", "verify", "flush", "explain",
        "Gate", "GatedNorm", "KVBuffer", "Problem", "Route", "UnsupportedProblem",
    }  # fmt: skip
