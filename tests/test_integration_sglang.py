"""The SGLang plug-in without SGLang; tests/engines/test_sglang.py has the engine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gated_delta.integrations import checks
from gated_delta.integrations import sglang as plugin

ROOT = Path(__file__).parents[1]


def test_importing_the_plug_in_imports_no_engine():
    """And its own name does not stand in the engine's way, even from its own directory."""
    code = "import sys, gated_delta.integrations.sglang as plugin; print('sglang' in sys.modules, plugin.report())"
    directory = Path(plugin.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["False", "[]"]
    assert "from __future__" in (directory / "sglang.py").read_text()


def test_the_entry_point_is_there():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "sglang.srt.plugins"
    ]
    module, _, name = points["gated_delta"].partition(":")
    assert module == plugin.__name__
    assert getattr(plugin, name) is plugin.register


def test_tracked_states_are_found_among_those_of_all_chunks():
    """The engine's kernel returns the state in front of every chunk, one sequence after the other; an empty sequence has none."""
    lengths, chunks = [70, 0, 64, 130], [1, -1, 0, 2]
    states = torch.arange(6.0).view(1, 6, 1, 1, 1).expand(1, 6, 2, 3, 3)
    track = torch.full((4, 2, 3, 3), -1.0)
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    plugin._take_tracked(
        states,
        dict(query_start_loc=bounds, track_chunk_idx=torch.tensor(chunks), track_state=track),
    )
    assert track[[0, 2, 3], 0, 0, 0].tolist() == [1, 2, 5]


def test_another_value_of_the_switch_for_drafts(monkeypatch):
    monkeypatch.setenv("GATED_DELTA_SGLANG_KVBUFFER", "yes")
    with pytest.raises(ValueError, match="GATED_DELTA_SGLANG_KVBUFFER: expected 0 or 1, got 'yes'"):
        plugin.register()


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_layer_become_dtypes_that_a_gate_takes(dtype, bound):
    gate = checks.layer_gate(
        torch.full((2,), 0.5, dtype=dtype), torch.full((2, 3), 0.25, dtype=dtype), bound
    )
    assert (gate.A_log.dtype, gate.A_log.tolist()) == (torch.float32, [0.5] * 2)
    assert gate.dt_bias.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert gate.dt_bias.tolist() == [[0.25] * 3] * 2
    assert gate.kind == ("softplus" if bound is None else "lower_bound")
