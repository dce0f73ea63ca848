"""The SGLang plug-in without SGLang; tests/engines/test_sglang.py runs the engine."""

import gc
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from gated_delta.integrations import checks
from gated_delta.integrations import sglang as plugin
from gated_delta.integrations.sglang import graphs as sglang_graphs
from gated_delta.integrations.sglang import kernels as sglang_kernels
from gated_delta.integrations.sglang import process as sglang_process

ROOT = Path(__file__).parents[1]


@pytest.fixture
def process(monkeypatch):
    """The plug-in's state, as in a new process."""
    monkeypatch.setattr(sglang_process, "state", sglang_process.State())
    return sglang_process.state


def test_importing_the_plug_in_imports_no_engine():
    """Its own name does not shadow the engine's, even from its own directory."""
    code = (
        "import sys, gated_delta.integrations.sglang as plugin; "
        "print('sglang' in sys.modules, plugin.report())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == ["False", "[]"]
    assert "from __future__" in Path(plugin.__file__).read_text()


def test_the_entry_point_exists():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["sglang.srt.plugins"]
    module, _, name = points["gated_delta"].partition(":")
    assert module == plugin.__name__
    assert getattr(plugin, name) is plugin.register


def test_tracked_states_come_from_those_of_all_chunks():
    """The engine's kernel returns the state before every chunk; an empty sequence has none."""
    lengths, chunks = [70, 0, 64, 130], [1, -1, 0, 2]
    states = torch.arange(6.0).view(1, 6, 1, 1, 1).expand(1, 6, 2, 3, 3)
    track = torch.full((4, 2, 3, 3), -1.0)
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    sglang_kernels._copy_tracked(
        states,
        dict(query_start_loc=bounds, track_chunk_idx=torch.tensor(chunks), track_state=track),
    )
    assert track[[0, 2, 3], 0, 0, 0].tolist() == [1, 2, 5]


def test_another_value_of_the_kvbuffer_variable(monkeypatch):
    monkeypatch.setenv("GATED_DELTA_SGLANG_KVBUFFER", "yes")
    with pytest.raises(ValueError, match="GATED_DELTA_SGLANG_KVBUFFER: expected 0 or 1, got 'yes'"):
        plugin.register()


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gate_converts_the_weights_of_a_layer(dtype, bound):
    gate = checks.layer_gate(
        torch.full((2,), 0.5, dtype=dtype), torch.full((2, 3), 0.25, dtype=dtype), bound
    )
    assert (gate.A_log.dtype, gate.A_log.tolist()) == (torch.float32, [0.5] * 2)
    assert gate.dt_bias.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert gate.dt_bias.tolist() == [[0.25] * 3] * 2
    assert gate.kind == ("softplus" if bound is None else "lower_bound")


# ------------------------------------------------------------------------------------ max_seqlen


def bounds_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def describe(bounds, lengths):
    """The hook behind the engine's init_forward_metadata, for a batch of these lengths."""
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(query_start_loc=bounds))
    plugin._record_longest(None, backend, SimpleNamespace(extend_seq_lens_cpu=lengths))


def extend(bounds, monkeypatch):
    """The max_seqlen and deterministic that a GDN prefill with these bounds gets."""
    H, D, T = 2, 8, int(bounds[-1])
    calls, prefill = [], sglang_kernels.api.prefill

    def noting(**call):
        calls.append((call["max_seqlen"], call["deterministic"]))
        return prefill(**call)

    x = torch.randn(1, T, H, D)
    kernel = sglang_kernels.kernel_class(type("TritonGDNKernel", (), {}))()
    gate = sglang_kernels.RawGate(tuple, torch.randn(T, H), torch.randn(H), torch.randn(H))
    pool = dict(ssm_states=torch.zeros(8, H, D, D), cache_indices=torch.arange(1, len(bounds)))
    with monkeypatch.context() as patch:
        patch.setattr(sglang_kernels.api, "prefill", noting)
        kernel.extend(x, x, x, gate, gate.a, **pool, query_start_loc=bounds)
    (call,) = calls
    return call


def test_a_prefill_gets_its_own_longest_prompt(process, monkeypatch):
    """Two batches are known at once, as with overlapped micro-batches."""
    first, second = bounds_of([70, 3]), bounds_of([5, 9])
    describe(first, [70, 3])
    describe(second, [5, 9])
    assert extend(second, monkeypatch) == (64, False)
    assert extend(first, monkeypatch) == (128, False)


def test_a_prefill_reads_no_stale_longest_prompt(process):
    known = process.max_seqlen
    bounds = bounds_of([70, 3])
    describe(bounds, [70, 3])
    assert known.get(bounds) == 128
    assert known.get(bounds.clone()) is None  # a CUDA graph's buffer, a view or another batch
    assert known.get(bounds[:]) is None
    for lengths in ([73], None, [70, 3, 9]):  # one prompt; lengths not on the host; others
        describe(bounds, [70, 3])
        describe(bounds, lengths)
        assert known.get(bounds) is None


def test_a_longest_prompt_goes_with_its_batch(process):
    """Nothing leaks, and a new tensor at the address of an old one is another batch."""
    for _ in range(3):
        bounds = bounds_of([70, 3])
        assert process.max_seqlen.get(bounds) is None
        describe(bounds, [70, 3])
        assert len(process.max_seqlen) == 1
        del bounds
        gc.collect()
        assert len(process.max_seqlen) == 0


def test_a_batch_without_bounds_is_skipped(process):
    describe(None, [70, 3])
    assert len(process.max_seqlen) == 0


def test_prefills_are_deterministic_as_the_engine_says(process, monkeypatch):
    bounds = bounds_of([5, 9])
    assert extend(bounds, monkeypatch) == (None, False)
    sglang_process.state.deterministic = True
    assert extend(bounds, monkeypatch) == (None, True)


# ---------------------------------------------------------------------------------------- report


def test_the_report_counts_both_routes(process, monkeypatch, caplog):
    """The log has a line at 1, 10, ... calls of a route; its values parse as in a shell."""
    caplog.set_level(logging.INFO, sglang_process.LOG.name)
    process.left["GDN", "prefill"] = 'a "check" that passes'
    kernel = sglang_kernels.kernel_class(type("TritonGDNKernel", (), {}))()
    states = dict(ssm_states=torch.zeros(1, 1, 1, 1))
    for mode, calls in dict(prefill=3, decode=12).items():
        for _ in range(calls):
            kernel._run(mode, lambda backend: None, lambda: None, "", (torch.zeros(1),), states)
    lines = [line for line in caplog.messages if line.startswith("gated_delta health ")]
    values = [dict(x.split("=", 1) for x in shlex.split(line)[2:]) for line in lines]
    common = dict(family="gdn", engine="sglang")
    reason = dict(reason='a "check" that passes')
    expected = [dict(op="prefill", ours="0", engine_own="1", **reason, **common)]
    expected += [
        dict(op="decode", ours=n, engine_own="0", reason="", **common) for n in ("1", "10")
    ]
    assert values == expected
    assert plugin.report() == [
        lines[0].replace("engine_own=1", "engine_own=3"),
        lines[-1].replace("ours=10", "ours=12"),
    ]


# -------------------------------------------------------------------------------- prefill graphs


class Bucket(NamedTuple):
    size: int


@pytest.fixture
def tables_of(monkeypatch):
    """(bucket, prompts) -> the tables of its graph, by a backend whose engine allocates them."""
    monkeypatch.setattr(sglang_process, "hook", lambda *_: None)

    def allocate(batch):
        room = min(backend.prefill_graph_max_seqs, batch.extend_num_tokens)
        return SimpleNamespace(max_seqs=room, cu_seqlens=torch.zeros(room + 1))

    def of(bucket, prompts=1):
        eager.clear()
        batch = SimpleNamespace(extend_num_tokens=bucket, batch_size=prompts)
        tables = backend.init_prefill_graph_metadata(batch)
        assert eager == [batch] * (tables is None)
        return tables

    eager = []
    backend = SimpleNamespace(prefill_graph_max_seqs=128, init_prefill_graph_metadata=allocate)
    backend.init_forward_metadata = eager.append
    sglang_graphs.limit(backend)
    assert backend.prefill_graph_max_seqs == sys.maxsize  # until a graph is captured
    return of


@pytest.mark.parametrize(("bucket", "room"), [(4, 4), (512, 16), (2048, 16), (2304, None)])
def test_a_prefill_graph_has_the_schedule_of_one_prompt(process, tables_of, bucket, room):
    tables = tables_of(bucket)
    assert (tables and tables.max_seqs) == room
    if room:
        assert process.max_seqlen.get(tables.cu_seqlens) == bucket
    assert tables_of(bucket, prompts=17) is None  # short contexts: none fits


@pytest.mark.parametrize(
    ("prompts", "tokens", "replays"),
    [(16, 400, True), (17, 400, False), (16, 513, True), (17, 513, False), (99, 2500, True)],
)
def test_a_prefill_graph_takes_prompts_that_have_room(tables_of, prompts, tokens, replays):
    buckets = {x: tables_of(x) for x in (512, 2048, 4096)}
    keys = {Bucket(size): tables for size, tables in buckets.items()}
    runner = SimpleNamespace(attn_metadata_buffers=keys)
    call = dict(batch_size=prompts, num_tokens=tokens)
    assert sglang_graphs._replays(lambda *_, **__: True, runner, **call) == replays
    assert not sglang_graphs._replays(lambda *_, **__: False, runner, **call)
    runner.attn_metadata_buffers = None  # graphs without these layers
    assert sglang_graphs._replays(lambda *_, **__: True, runner, **call)


def test_windows_of_the_convolution_are_kept_for_cached_prefixes():
    """Three tokens before `start + 3`, of those in the batch; slot 0 may have anything."""
    pool, x = torch.zeros(5, 2, 3), torch.arange(20.0).view(10, 2)
    sglang_graphs.copy_windows(
        conv_pool=pool.mT,
        x=x,
        track_mode=torch.tensor([1, 0, 2, 2]),
        track_conv_start=torch.tensor([4, 0, -2, 5]),
        track_dst=torch.tensor([3, 1, 4, 2]),
        num_tokens=torch.tensor([7]),
    )
    assert not pool[1].any()
    for slot, tokens in ((3, [4, 5, 6]), (4, [0, 0, 0]), (2, [5, 6, 6])):
        assert torch.equal(pool[slot], x[tokens].T)
