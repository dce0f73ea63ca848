"""The import is fast and loads neither CUDA nor a kernel compiler."""

import subprocess
import sys


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_fast():
    """In CPU time relative to torch's import in the same process: other load slows both alike."""
    code = (
        "from time import process_time as now; start = now(); import torch; middle = now(); "
        "import gated_delta; print((now() - middle) / (middle - start))"
    )
    assert any(float(run(code)) < 0.1 for _ in range(3))


def test_import_loads_no_heavy_package():
    code = (
        "import torch, sys; before = set(sys.modules); import gated_delta; "
        "print(torch.cuda.is_initialized(), *(set(sys.modules) - before))"
    )
    initialized, *new = run(code).split()
    assert initialized == "False"
    heavy = {"cutlass", "tvm_ffi", "triton", "transformers", "matplotlib", "typer", "rich"}
    assert not heavy & {name.partition(".")[0] for name in new}
    assert "gated_delta.api" in new
    assert "gated_delta.bench" not in new


def test_the_public_names():
    import gated_delta

    assert set(gated_delta.__all__) == {
        "prefill", "decode", "verify", "flush", "explain",
        "Gate", "GatedNorm", "KVBuffer", "Problem", "Route", "UnsupportedProblem",
    }  # fmt: skip
