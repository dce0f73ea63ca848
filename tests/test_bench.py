"""The grid benchmarks without a GPU: the grids, the arithmetic, the judging of peers, what is written. Times are made up here."""

import json
import math
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from importlib import metadata
from io import StringIO

import pytest
import torch
import typer
from typer.testing import CliRunner

import gated_delta as gd
from contests import CPU, fake_contest, play, same
from gated_delta import bench, cli, compile, reference
from gated_delta.bench import PEERS, Agenda, Decode, Outcome, Speculation, cells, clock, peers, report, speculate
from gated_delta.bench.decode import Pooled, grid
from gated_delta.bench.peers import BASELINES, SPECULATING, NotOffered, Peer
from gated_delta.bench.report import Rival
from gated_delta.bench.speculate import Flatness, FlushOfLayers
from gated_delta.dispatch import schedule_of

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = [
    Decode("gdn", (1, 2), BF16, 1, 3),
    Decode("kda", (2, 2), BF16, 3, 2),
    Decode("gdn", (1, 2), FP32, 1, 2),
    Decode("kda", (2, 2), BF16, 1, 2),
]


# ------------------------------------------------------------------------------------------------ the grid


def test_grid_is_the_agreed_one():
    chosen = grid()
    assert len(chosen) == len(set(chosen)) == 4 * 10 + 2 * 5 * 8 + 2 * 10
    assert {cell.family for cell in chosen} == {"T=1", "T>1", "fp32"}
    assert Decode("gdn", (16, 64), BF16, 1, 512) in chosen
    assert Decode("kda", (64, 64), BF16, 1, 1) in chosen
    assert Decode("kda", (32, 32), BF16, 8, 128) in chosen
    assert Decode("gdn", (16, 64), FP32, 1, 512) in chosen
    assert Decode("gdn", (16, 64), BF16, 4, 256) not in chosen
    assert {cell.sequences for cell in chosen if cell.tokens == 1} == {2**i for i in range(10)}


def test_grid_is_narrowed_by_what_is_given():
    chosen = grid(model=["kda"], heads=[(32, 32)], tokens=[1, 4], sequences=[8, 999])
    assert [cell.label for cell in chosen] == ["KDA 32/32 bf16 T=1 B=8", "KDA 32/32 bf16 T=4 B=8", "KDA 32/32 fp32 T=1 B=8"]
    assert [cell.family for cell in grid(state_dtype=[FP32], sequences=[1])] == ["fp32", "fp32"]


def test_bytes_are_the_states_read_and_written():
    one = 64 * 128 * 128 * 2
    assert Decode("gdn", (16, 64), BF16, 1, 64).bytes == 2 * 64 * one
    assert Decode("gdn", (16, 64), BF16, 4, 64).bytes == (1 + 4) * 64 * one
    assert Decode("gdn", (16, 64), FP32, 1, 64).bytes == 2 * 64 * 2 * one


@pytest.mark.parametrize("cell", grid(), ids=str)
def test_rotation_is_cold_and_fits(cell):
    assert cell.rotation >= 2
    assert cell.rotation == 48 or cell.rotation * cell.bytes >= 400e6
    assert 4 * cell.rotation * cell.bytes <= 40e9


def test_rotation_gives_up_sets_before_memory():
    assert Decode("gdn", (16, 64), FP32, 1, 4096).rotation == 1


def test_checks_take_the_cells_own_schedule_on_few_sequences():
    for cell in grid():
        for case in cell.checks():
            problem = case.problem
            assert len(case.lengths) <= max(3, cell.sequences)
            assert schedule_of(problem, len(case.lengths)) == schedule_of(problem, cell.sequences), cell
            assert (*cell.heads, cell.tokens) == (problem.H, problem.HV, problem.T)
            assert (problem.gate, problem.state_dtype) == (cells.GATES[cell.model], cell.state_dtype)
    assert {len(case.lengths) for cell in grid() if cell.sequences > 64 for case in cell.checks()} <= set(range(3, 65))
    assert {case.layout for case in Decode("gdn", (16, 64), BF16, 4, 8).checks()} == {"intermediates", "frozen"}


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_buffers_are_valid_arguments_in_scattered_slots(cell):
    b, other = cell.make(CPU, 0), cell.make(CPU, 1)
    assert sorted(b.state_indices.tolist()) == list(range(1, cell.sequences + 1))
    assert b.state_indices.dtype == torch.int32
    assert b.state.shape[0] == cell.sequences + 1
    assert not torch.equal(b.q, other.q)
    before = b.state.clone()
    o, states = b.results(same(cell, b))
    assert torch.equal(b.state, before)
    assert bool(o.isfinite().all())
    if cell.tokens == 1:
        assert states.shape == b.state[1:].shape
        assert not torch.equal(states, before[b.state_indices.long()])
    else:
        assert states.shape == b.intermediate_states.shape
        assert bool(states.ne(0).any())


# ------------------------------------------------------------------------------------------------ clocks


def test_clocks_take_turns_and_medians():
    played = []

    def replay(name, times):
        it = iter(times * 100)

        def play():
            played.append(name)
            return next(it)

        return play

    taken = clock.in_turns({"a": replay("a", [1.0, 1.0, 9.0]), "b": replay("b", [2.0])})
    assert taken == {"a": 1.0, "b": 2.0}
    assert played == (["a"] * clock.REPLAYS + ["b"] * clock.REPLAYS) * clock.ROUNDS


def test_host_clock_counts_one_call(monkeypatch):
    calls = []
    ticks = iter(range(1000))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    assert clock.host_us(lambda: calls.append(1), CPU) == pytest.approx(1e6 / clock.HOST_CALLS)
    assert len(calls) == clock.HOST_BATCHES * clock.HOST_CALLS == 2000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_replay_runs_every_call_as_often_as_it_counts():
    sums = [torch.zeros(2**24, device="cuda") for _ in range(3)]
    replay = clock.capture([lambda x=x: x.add_(1) for x in sums])
    assert [x[0].item() for x in sums] == [1.0] * 3  # capturing runs nothing
    assert 5 < replay() < 500  # 128 MB read and written
    assert [x[0].item() for x in sums] == [1.0 + 2 * clock.PASSES] * 3


# ------------------------------------------------------------------------------------------------ ours and the peers


def test_a_right_kernel_passes_and_a_wrong_one_is_named(monkeypatch):
    assert fake_contest(monkeypatch, {}).check(SMALL[0]) == []
    right = reference.decode
    monkeypatch.setattr(reference, "decode", lambda tokens, **states: right(tokens._replace(beta_logits=False), **states))
    wrong = fake_contest(monkeypatch, {}).check(SMALL[0])
    assert any("o: error" in line for line in wrong)


def test_a_backend_that_cannot_run_fails_its_check():
    lines = bench.Contest({}, CPU, print, backend="cute").check(SMALL[1])
    assert len(lines) == 2
    assert "tensors on a CUDA device" in lines[0]


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_measure_times_everybody_who_agrees(monkeypatch, cell):
    tried = []
    outcome = fake_contest(monkeypatch, {"twin": (same, 6.0), "other": (same, 5.0)}, tried).measure(cell)
    assert (outcome.us, outcome.copy_us, outcome.best) == (4.0, 3.0, ("other", 5.0))
    assert outcome.rivals["twin"] == Rival(6.0, 0.0, True)
    assert outcome.ratio == pytest.approx(1.25)
    assert outcome.share == pytest.approx(0.75)
    assert outcome.tb_s == pytest.approx(cell.bytes / 4e6)
    assert tried == [2] * 4  # ours, the copy and both peers, each on every set


def idle(cell, b):
    """Returns what it was given and does nothing."""
    return lambda: (cells.blank(b), b.state if b.intermediate_states is None else b.intermediate_states)


def forgetful(cell, b):
    """The right o, no state written."""
    o, states = b.results(same(cell, b))
    return lambda: (o, b.state if b.intermediate_states is None else b.intermediate_states)


def careless(cell, b):
    """Takes the states in another order."""
    call = same(cell, b)

    def wrong():
        held = b.state_indices.clone()
        b.state_indices.copy_(held.flip(0))
        made = call()
        b.state_indices.copy_(held)
        return made

    return wrong


@pytest.mark.parametrize("cell", SMALL, ids=str)
@pytest.mark.parametrize("wrong", [idle, forgetful, careless])
def test_a_peer_that_disagrees_is_not_timed(monkeypatch, cell, wrong):
    remarks = []
    outcome = fake_contest(monkeypatch, {"wrong": (wrong, 1.0), "right": (same, 5.0)}, remarks=remarks).measure(cell)
    assert outcome.rivals["wrong"].agrees is False
    assert outcome.rivals["wrong"].us is None
    assert outcome.rivals["wrong"].shown == "disagrees"
    assert outcome.best == ("right", 5.0)
    assert len(remarks) == 1
    assert "wrong disagrees" in remarks[0]


def test_a_missing_peer_is_reported_once_and_the_run_goes_on(monkeypatch):
    def missing(cell, b):
        raise ModuleNotFoundError("No module named 'nowhere'\nand more")

    remarks = []
    run = fake_contest(monkeypatch, {"missing": (missing, 1.0), "right": (same, 5.0)}, remarks=remarks)
    outcomes = [run.measure(cell) for cell in SMALL[:2]]
    assert [o.best for o in outcomes] == [("right", 5.0)] * 2
    assert outcomes[0].rivals["missing"] == Rival(None, None, None, "ModuleNotFoundError: No module named 'nowhere'")
    assert len(remarks) == 1
    assert remarks[0].startswith("missing does not run")


def test_a_peer_that_fails_in_the_graph_is_not_fatal(monkeypatch):
    def late(cell, b):
        calls = iter([True])
        call = same(cell, b)

        def once():
            next(calls)
            return call()

        return once

    outcome = fake_contest(monkeypatch, {"late": (late, 1.0)}).measure(SMALL[0])
    assert outcome.best is None
    assert outcome.ratio is None
    assert (outcome.rivals["late"].agrees, outcome.rivals["late"].reason) == (True, "StopIteration")


def test_our_own_failure_is_not_swallowed(monkeypatch):
    monkeypatch.setattr(reference, "decode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fake_contest(monkeypatch, {}).measure(SMALL[0])


def test_kernels_loaded_after_the_checks_are_counted(monkeypatch):
    run = fake_contest(monkeypatch, {})
    run.check(SMALL[0])
    run.measure(SMALL[0])
    assert run.kernels == {"loaded_by_checks": 0, "loaded_while_timing": 0}
    loaded = dict(compile._loaded)
    monkeypatch.setattr(compile, "_loaded", loaded)
    right = reference.decode

    def loading(tokens, **states):
        loaded[tokens.q.shape] = None  # a kernel for every shape
        return right(tokens, **states)

    monkeypatch.setattr(reference, "decode", loading)
    run.measure(SMALL[0])
    run.measure(SMALL[3])
    assert run.kernels["loaded_while_timing"] == 2


def test_host_cost_is_of_ours_and_every_peer_that_runs(monkeypatch):
    def missing(cell, b):
        raise ImportError("gone")

    monkeypatch.setattr(clock, "HOST_CALLS", 2)
    taken = fake_contest(monkeypatch, {"missing": (missing, 1.0), "right": (same, 5.0)}).host(SMALL[0])
    assert set(taken) == {"ours", "right"}
    assert all(us > 0 for us in taken.values())


# Stand-ins with the peers' own signatures, whose bodies say what the peers' documentation says.


def pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None,
    initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None, disable_state_update=False,
):  # fmt: skip
    assert (state, output_state_indices, use_qk_l2norm) == (None, None, True)
    assert disable_state_update == (q.shape[1] > 1)
    gd.decode(
        q, k, v, a, b, gate=gd.Gate.softplus(A_log, dt_bias), scale=scale, beta_logits=True, state=initial_state,
        state_indices=initial_state_indices, intermediate_states=intermediate_states_buffer,
        update_state=not disable_state_update, out=output, backend="reference",
    )  # fmt: skip
    return output, initial_state


def recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, ssm_state_indices=None,
    num_spec_tokens=None, num_accepted_tokens=None, output=None, initial_state_source=None, initial_state_indices=None,
    beta_is_logit=False,
):  # fmt: skip
    assert use_gate_in_kernel
    assert beta_is_logit
    assert cu_seqlens.dtype == torch.int32
    gate = gd.Gate.lower_bound(A_log, dt_bias.view(v.shape[2], -1), lower_bound)
    options = dict(gate=gate, scale=scale, beta_logits=True, cu_seqlens=cu_seqlens, backend="reference")
    if num_spec_tokens is None:
        return gd.decode(q, k, v, g, beta, **options, state=initial_state, state_indices=ssm_state_indices, out=output), None
    N, W = ssm_state_indices.shape
    assert num_spec_tokens + 1 == W
    steps = torch.empty(N, W, *initial_state.shape[1:], dtype=initial_state.dtype)
    source = dict(state=initial_state_source, state_indices=initial_state_indices, update_state=False)
    gd.decode(q, k, v, g, beta, **options, **source, intermediate_states=steps, out=output)
    initial_state[ssm_state_indices.view(-1).long()] = steps.flatten(0, 1)
    return output, None


def fla_gdn(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    return fla_step(q, k, v, g, beta, gd.Gate.softplus(A_log, dt_bias), scale, initial_state, state_v_first)


def fla_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    return fla_step(q, k, v, g, beta, gd.Gate.lower_bound(A_log, dt_bias, lower_bound), scale, initial_state, state_v_first)


def fla_step(q, k, v, g, beta, gate, scale, initial_state, state_v_first):
    assert state_v_first
    states = initial_state.float()
    return gd.decode(q, k, v, g, beta, gate=gate, scale=scale, beta_logits=True, state=states, backend="reference"), states


SGLANG = """
from sglang.kernels.jit.utils import is_arch_support_pdl
from sglang.srt.utils import get_device_sm, is_cuda, is_gfx95_supported, is_hip, is_sm90_supported

import torch
import gated_delta as gd

assert not (is_arch_support_pdl() or is_cuda() or is_gfx95_supported() or is_hip() or is_sm90_supported())
assert get_device_sm() == 0


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale=None,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False, lower_bound=None, disable_state_update=False,
    intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None,
):
    assert (softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel) == (1.0, 20.0, True)
    assert (lower_bound is not None) == is_kda
    assert cache_steps is None or cache_steps == intermediate_states_buffer.shape[1]
    a = a.view(1, a.shape[0], v.shape[2], -1)
    a = a if is_kda else a[..., 0]
    gate = gd.Gate.lower_bound(A_log, dt_bias, lower_bound) if is_kda else gd.Gate.softplus(A_log, dt_bias)
    return gd.decode(
        q, k, v, a, b[None], gate=gate, scale=scale, beta_logits=True, cu_seqlens=cu_seqlens, state=initial_state_source,
        state_indices=initial_state_indices, intermediate_states=intermediate_states_buffer,
        update_state=not disable_state_update, backend="reference",
    )
"""


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    modules = {
        "flashinfer": {},
        "flashinfer.gdn_decode": dict(gated_delta_rule_decode_pretranspose=pretranspose),
        "flashinfer.kda_decode": dict(recurrent_kda=recurrent_kda),
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": dict(fused_recurrent_gated_delta_rule=fla_gdn),
        "fla.ops.kda": dict(fused_recurrent_kda=fla_kda),
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    file = tmp_path / "a_kernel.py"
    file.write_text(SGLANG)
    monkeypatch.setenv(peers.SGLANG_KERNEL, str(file))
    monkeypatch.delenv(peers.SGLANG_COMMIT, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = peers._sglang_kernel, peers._sglang_commit
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", SMALL, ids=str)
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_are_asked_for_the_same(monkeypatch, name, cell):
    if name == "fla" and cell.tokens > 1:
        with pytest.raises(NotOffered, match="final state alone"):
            PEERS[name].prepare(cell, cell.make(CPU, 0))
        return
    outcome = fake_contest(monkeypatch, {name: (PEERS[name].prepare, 7.0)}).measure(cell)
    assert outcome.rivals[name].reason is None
    assert outcome.best == (name, 7.0)
    assert outcome.rivals[name].error < 5e-3


@pytest.mark.usefixtures("stand_ins")
def test_flashinfer_has_no_kda_with_fp32_states():
    cell = Decode("kda", (2, 2), FP32, 1, 2)
    with pytest.raises(NotOffered, match="fp32"):
        PEERS["flashinfer"].prepare(cell, cell.make(CPU, 0))


@pytest.mark.usefixtures("stand_ins")
def test_sglang_is_found_by_name_and_leaves_no_modules_behind(monkeypatch, tmp_path):
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    peers._sglang_kernel()
    assert {name for name in sys.modules if name.split(".")[0] == "sglang"} == before
    assert Peer("sglang", "no-such-package", same).version.startswith("file ")
    monkeypatch.delenv(peers.SGLANG_KERNEL)
    (tmp_path / peers.SGLANG_FILE).write_text(SGLANG)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert peers.sglang_file() == tmp_path / peers.SGLANG_FILE
    monkeypatch.setenv(peers.SGLANG_KERNEL, str(tmp_path / "nowhere.py"))
    peers._sglang_kernel.cache_clear()
    with pytest.raises(ImportError, match=r"nowhere\.py"):
        peers._sglang_kernel()


# ------------------------------------------------------------------------------------------------ speculative decoding

SPECULATIONS = [
    Speculation("kda", (2, 2), FP32, 3, 3),
    Speculation("gdn", (1, 2), BF16, 2, 2),
    Speculation("kda", (2, 2), BF16, 4, 3),
    Speculation("gdn", (1, 2), FP32, 3, 3),
]


def test_speculation_grid_is_the_agreed_one():
    chosen = speculate.grid()
    assert len(chosen) == len(set(chosen)) == 3 * 2 * 4 * 8 == 192
    assert list(dict.fromkeys(cell.family for cell in chosen)) == ["KDA fp32", "KDA bf16", "GDN fp32", "GDN bf16"]
    assert {(cell.model, cell.heads) for cell in chosen} == {("kda", (32, 32)), ("kda", (64, 64)), ("gdn", (16, 64))}
    assert {cell.tokens for cell in chosen} == {2, 3, 4, 6}
    assert {cell.sequences for cell in chosen} == {2**i for i in range(8)}
    narrowed = speculate.grid(model=["kda"], heads=[(64, 64)], state_dtype=[BF16], tokens=[3, 5], sequences=[128])
    assert [cell.label for cell in narrowed] == ["KDA 64/64 bf16 T=3 B=128"]


@pytest.mark.parametrize("cell", speculate.grid(), ids=str)
def test_speculation_is_cold_and_fits(cell):
    held = cell.rotation * cell.state_bytes
    assert held >= 600e6 or (cell.rotation == 160 and held > 2 * 60e6)
    assert cell.rotation * cell.memory <= 40e9
    assert cell.bytes == 3 * cell.sequences * cell.heads[1] * 128 * 128 * cell.state_dtype.itemsize


def test_speculation_checks_verify_and_flush_under_the_cells_own_schedules():
    for cell in speculate.grid():
        checks = cell.checks()
        assert [case.op for case in checks] == ["verify", "flush"]
        for case in checks:
            problem = case.problem
            assert schedule_of(problem, len(case.lengths)) == schedule_of(problem, cell.sequences), (cell, case)
            assert (problem.T, problem.state_dtype, case.gate) == (cell.tokens, cell.state_dtype, cells.GATES[cell.model])
    assert max(len(case.lengths) for cell in speculate.grid() for case in cell.checks()) <= 64


def test_probes_are_checked_narrowed_and_fit():
    probes = speculate.probes()
    flat = [probe for probe in probes if isinstance(probe, Flatness)]
    flushes = [probe for probe in probes if isinstance(probe, FlushOfLayers)]
    assert (len(flat), len(flushes)) == (3 * 2, 3 * 2 * 6)
    assert [[case.lengths[0] for case in probe.checks()] for probe in flat] == [[2, 4, 8, 16]] * 6
    assert {case.op for probe in flat for case in probe.checks()} == {"verify"}
    assert all(probe.memory <= 40e9 for probe in flushes)
    for probe in flushes:
        (case,) = probe.checks()
        assert (case.op, case.layout) == ("flush", "layers")
        launched = 3 * len(case.lengths)  # the case list's layers
        assert schedule_of(case.problem, launched) == schedule_of(case.problem, 48 * probe.cell.sequences)
    narrowed = speculate.probes(model=["gdn"], state_dtype=[FP32], sequences=[8], tokens=[2])
    assert [str(probe) for probe in narrowed] == ["flush of 48 layers, GDN 16/64 fp32 T=4 B=8"]
    assert not [p for p in speculate.probes(model=["gdn"], state_dtype=[FP32]) if str(p).endswith("B=128")]


def test_flushes_over_the_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(speculate, "MOST_MEMORY", 5e9)
    left = [
        probe.cell.sequences for probe in speculate.probes(heads=[(64, 64)], state_dtype=[FP32]) if isinstance(probe, FlushOfLayers)
    ]
    assert left == [1, 2, 4]


def test_memory_is_of_one_requests_drafts():
    for tokens, sequences in ((2, 1), (4, 8)):
        kda = Speculation("kda", (32, 32), FP32, tokens, sequences)
        assert kda.memory_ratio == pytest.approx(128 * 128 / (3 * 128))
        assert kda.facts()["buffer_bytes_per_request"] == tokens * 32 * 3 * 128 * 4
        assert kda.facts()["cached_bytes_per_request"] == tokens * 32 * 128 * 128 * 4
    gdn = Speculation("gdn", (16, 64), BF16, 4, 8)
    assert gdn.memory_ratio == pytest.approx(64 * 128 * 128 * 2 / ((64 * 128 + 16 * 128 + 64) * 4))


@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
def test_drafts_are_accepted_from_one_to_all(cell):
    many = [cell.make(CPU, seed).num_accepted for seed in range(20)]
    assert {m.dtype for m in many} == {torch.int32}
    assert {x for m in many for x in m.tolist()} == set(range(1, cell.tokens + 1))
    assert {x for seed in range(20) for x in speculate.counts(0, cell, CPU, seed).tolist()} == set(range(cell.tokens + 1))
    assert all(speculate.counts(0, cell, CPU, seed).any() for seed in range(20))
    b = cell.make(CPU, 0)
    assert bool(b.buffer.u.isnan().all())
    assert cell.make(CPU, 0, steps=False).intermediate_states is None


@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
def test_chains_leave_the_states_bounded(cell):
    b = cell.make(CPU, 0)
    call, before = same(cell, b), b.state.float().norm()
    for _ in range(40):
        o, states = call()
    assert states is b.state
    assert bool(o.isfinite().all())
    assert b.state.float().norm() < 2 * before


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
def test_commit_without_sglangs_takes_the_state_after_the_last_accepted_draft(cell):
    assert peers.commit_version() == "torch indexing"
    b = cell.make(CPU, 1)
    b.intermediate_states.normal_()
    before = b.state.clone()
    peers.committed(b)()
    for n, (slot, m) in enumerate(zip(b.state_indices.tolist(), b.num_accepted.tolist())):
        assert torch.equal(b.state[slot], b.intermediate_states[n, m - 1])
    assert torch.equal(b.state[0], before[0])


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
def test_our_own_cached_states_agree_and_are_nobodys_best(monkeypatch, cell):
    tried = []
    rivals = {"cached": (BASELINES["cached"].prepare, 3.5), "twin": (same, 6.0)}
    outcome = fake_contest(monkeypatch, rivals, tried).measure(cell)
    assert outcome.rivals["cached"].us == 3.5
    assert outcome.rivals["cached"].error < 5e-3
    assert outcome.best == ("twin", 6.0)
    assert outcome.parts == {"verify": 2.5, "flush": 1.75}
    assert tried == [2] * 6  # ours, the copy, its two parts and both rivals


def uncommitted(cell, b):
    step = Pooled.ours(b, "reference")
    return lambda: (step()[0], b.state)


def eager(cell, b):
    """Accepts every draft."""
    b = replace(b, num_accepted=torch.full_like(b.num_accepted, cell.tokens))
    return same(cell, b)


def elsewhere(cell, b):
    """Commits into other sequences' slots."""
    return BASELINES["cached"].prepare(cell, replace(b, state_indices=b.state_indices.flip(0)))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
@pytest.mark.parametrize("wrong", [uncommitted, eager, elsewhere])
def test_a_rival_that_commits_something_else_is_not_timed(monkeypatch, wrong, cell):
    assert bool((cell.make(CPU, 0).num_accepted < cell.tokens).any())
    outcome = fake_contest(monkeypatch, {"wrong": (wrong, 1.0), "right": (same, 5.0)}).measure(cell)
    assert (outcome.rivals["wrong"].us, outcome.rivals["wrong"].agrees) == (None, False)
    assert "disagrees by" in outcome.rivals["wrong"].reason
    assert outcome.best == ("right", 5.0)


SGLANG_COMMIT = """
from sglang.kernels.ops.memory.ptr_table import make_ptr_table
from sglang.srt.utils.common import get_device_core_count

import torch

assert make_ptr_table is not None
assert get_device_core_count(0) == 0


def fused_mamba_state_scatter_with_mask(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None):
    assert {x.dtype for x in (dst_indices_raw, step_indices_raw, src_indices_raw)} == {torch.int32}
    assert dst.shape[0] == src.shape[0] and dst.shape[2:] == src.shape[3:] and src.is_contiguous()
    for slot, step, row in zip(dst_indices_raw.tolist(), step_indices_raw.tolist(), src_indices_raw.tolist()):
        if step >= 0:
            dst[:, slot] = src[:, row, step]
"""


@pytest.fixture
def sglang_commit(stand_ins, tmp_path):
    """SGLang's commit beside its kernel."""
    file = tmp_path / peers.SGLANG_COMMIT_FILE
    file.write_text(SGLANG_COMMIT)
    return file


@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
@pytest.mark.parametrize("name", list(SPECULATING))
def test_peers_speculate_the_same(monkeypatch, sglang_commit, name, cell):
    committed = []
    scatter = peers._sglang_commit()
    monkeypatch.setattr(peers, "_sglang_commit", lambda: lambda *arguments: committed.append(1) or scatter(*arguments))
    rivals = {name: (SPECULATING[name].prepare, 7.0), "cached": (BASELINES["cached"].prepare, 6.0)}
    outcome = fake_contest(monkeypatch, rivals).measure(cell)
    if (name, cell.model, cell.state_dtype) == ("flashinfer", "kda", FP32):
        assert outcome.rivals[name].reason == "NotOffered: recurrent_kda takes no fp32 state"
        assert outcome.best is None
    else:
        assert outcome.rivals[name].reason is None
        assert outcome.best == (name, 7.0)
        assert outcome.rivals[name].error < 5e-3
    assert outcome.rivals["cached"].us == 6.0
    assert committed


def test_a_peer_whose_call_raises_is_recorded_with_the_reason(monkeypatch, sglang_commit):
    def raising(*_, **__):
        raise RuntimeError("no fp32 states with intermediate ones")

    monkeypatch.setattr(sys.modules["flashinfer.gdn_decode"], "gated_delta_rule_decode_pretranspose", raising)
    outcome = fake_contest(monkeypatch, {"flashinfer": (SPECULATING["flashinfer"].prepare, 7.0)}).measure(SPECULATIONS[3])
    assert outcome.rivals["flashinfer"] == Rival(None, None, None, "RuntimeError: no fp32 states with intermediate ones")


def test_sglangs_commit_is_found_beside_its_kernel_by_name_or_on_the_path(monkeypatch, tmp_path, sglang_commit):
    before = {name for name in sys.modules if name.split(".")[0] == "sglang"}
    assert peers._sglang_commit().__name__ == "fused_mamba_state_scatter_with_mask"
    assert {name for name in sys.modules if name.split(".")[0] == "sglang"} == before
    assert peers.commit_version().startswith("sglang fused_mamba_state_scatter_with_mask, file ")

    inside = tmp_path / "site" / "sglang" / "kernels" / "ops" / "mamba" / peers.SGLANG_COMMIT_FILE
    inside.parent.mkdir(parents=True)
    sglang_commit.rename(inside)
    assert peers.sglang_commit_file() is None
    assert peers.commit_version() == "torch indexing"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert peers.sglang_commit_file() == inside

    monkeypatch.setenv(peers.SGLANG_COMMIT, str(tmp_path / "nowhere.py"))
    peers._sglang_commit.cache_clear()
    with pytest.raises(ImportError, match=r"nowhere\.py"):
        peers._sglang_commit()


def test_flatness_times_verify_over_the_drafts(monkeypatch):
    monkeypatch.setattr(Speculation, "rotation", 2)
    probe = Flatness(SPECULATIONS[0])
    calls = probe.calls(CPU, "reference")
    assert {name: len(prepared) for name, prepared in calls.items()} == {"T2": 2, "T4": 2, "T8": 2, "T16": 2}
    assert [prepared[0]().shape[1] for prepared in calls.values()] == [2, 4, 8, 16]
    found = probe.record({"T2": 2.0, "T4": 2.1, "T8": 2.5, "T16": 4.0})
    assert (found["cell"], found["T16_us"], found["T8_over_T2"]) == ("KDA 2/2 fp32", 4.0, 1.25)


@pytest.mark.parametrize("cell", SPECULATIONS, ids=str)
def test_a_flush_of_layers_moves_the_states_of_those_who_accept(monkeypatch, cell):
    monkeypatch.setattr(speculate, "cold_sets", lambda _: 1)
    probe = FlushOfLayers(replace(cell, sequences=5), layers=2)
    state, buffer, slots = made = probe.make(CPU, 0)
    monkeypatch.setattr(FlushOfLayers, "make", lambda *_: made)
    calls = probe.calls(CPU, "reference")
    assert list(calls) == ["all", "all_copy", "random", "random_copy"]
    one = cell.heads[1] * 128 * 128 * cell.state_dtype.itemsize
    for name, m in probe.accepted(CPU).items():
        before = state.clone()
        calls[name][0]()
        touched = (state != before).flatten(2).any(2)
        assert touched[:, slots.long()].tolist() == [(m > 0).tolist()] * 2
        assert probe.moved(m) == 2 * one * int(touched.sum())
        for _ in range(30):
            calls[name][0]()
        assert state.isfinite().all()
        assert state.float().norm() < 4 * before.float().norm()
    assert probe.moved(probe.accepted(CPU)["all"]) == 2 * one * 2 * 5
    assert 0 < probe.moved(probe.accepted(CPU)["random"]) < 2 * one * 2 * 5
    found = probe.record({"all": 8.0, "all_copy": 6.0, "random": 5.0, "random_copy": 4.0})
    assert (found["layers"], found["sequences"], found["all_share"], found["random_share"]) == (2, 5, 0.75, 0.8)


def test_probes_are_timed_in_turns(monkeypatch):
    tried = []
    contest = fake_contest(monkeypatch, {}, tried)
    monkeypatch.setattr(clock, "in_turns", lambda replays: {name: float(i + 1) for i, name in enumerate(replays)})
    assert contest.probe(Flatness(SPECULATIONS[0]))["T8_over_T2"] == 3.0
    assert tried == [2] * 4


def chain(us, cell, **times):
    rivals = {name: Rival(time, 1e-3, True) for name, time in times.items()}
    return Outcome(cell, us, us / 2, rivals, {"verify": us / 4, "flush": us / 3})


def test_speculation_is_summed_up_against_the_peers_and_each_alone():
    kda, gdn = partial(Speculation, "kda", (32, 32), FP32), partial(Speculation, "gdn", (16, 64), BF16)
    made = [
        chain(10.0, kda(4, 1), cached=9.0, sglang=20.0),
        chain(10.0, kda(4, 2), cached=16.0, sglang=5.0, flashinfer=4.0),
        chain(10.0, gdn(2, 1), cached=30.0, flashinfer=12.0),
    ]
    found = report.summary(made)
    assert list(found) == ["KDA fp32", "GDN bf16"]
    first = found["KDA fp32"]
    assert (first["ratio_geomean"], first["ratio_minimum"]) == (pytest.approx(math.sqrt(0.8)), pytest.approx(0.4))
    assert first["ratio_minimum_at"] == "KDA 32/32 fp32 T=4 B=2"
    assert first["rivals"]["sglang"]["ratio_geomean"] == pytest.approx(1.0)
    assert first["rivals"]["sglang"]["ratio_minimum"] == pytest.approx(0.5)
    assert first["rivals"]["cached"]["ratio_geomean"] == pytest.approx(1.2)
    assert first["rivals"]["cached"]["ratio_minimum_at"] == "KDA 32/32 fp32 T=4 B=1"
    assert first["rivals"]["flashinfer"]["compared"] == 1
    assert first["memory_ratio_minimum"] == pytest.approx(128 / 3)
    assert "memory_ratio_minimum" not in found["GDN bf16"]  # no cell with four drafts
    cell = made[1].record()
    assert (cell["parts"], cell["best_peer"]) == ({"verify": 2.5, "flush": pytest.approx(10 / 3)}, "flashinfer")
    assert (cell["model"], cell["tokens"], cell["memory_ratio"]) == ("kda", 4, pytest.approx(128 / 3))


def test_tables_of_speculation(tmp_path):
    from rich.console import Console

    made = [chain(10.0, cell, cached=9.0, sglang=20.0) for cell in speculate.grid(tokens=[4], sequences=[1, 64])]
    console = Console(width=160, record=True, file=StringIO())
    for table in [*bench.tables(made), *bench.summary_tables(made)]:
        console.print(table)
    moves = FlushOfLayers(speculate.grid(tokens=[4], sequences=[32])[0])
    times = {"all": 8.0, "all_copy": 6.0, "random": 5.0, "random_copy": 4.0}
    console.print(bench.probe_table("flush_of_layers", [moves.record(times)]))
    text = console.export_text()
    for word in ("verify", "KDA 64/64 fp32 T=4 B=64", "GDN bf16", "2.000", "0.900", "42.667", "flush_of_layers", "random_copy_us"):
        assert word in text
    file = tmp_path / "speculate.png"
    bench.plot_outcomes(made, "made up", file)
    assert file.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ results


def outcome(us, copy_us, cell=SMALL[0], **times):
    return Outcome(cell, us, copy_us, {name: Rival(time, 1e-3, True) for name, time in times.items()})


GDN = partial(Decode, "gdn", (16, 64), BF16)
MADE_UP = [
    outcome(10.0, 8.0, GDN(1, 32), a=20.0, b=40.0),  # ratio 2, not a full chip
    outcome(10.0, 9.0, GDN(1, 64), a=5.0, b=7.0),  # ratio 0.5, share 0.9
    outcome(10.0, 9.5, GDN(1, 128)),  # nobody to compare with, share 0.95
    outcome(10.0, 9.8, GDN(4, 64), a=15.0),
    outcome(10.0, 7.0, Decode("kda", (32, 32), FP32, 1, 64), a=11.0),  # 2048 states: full for fp32
]


def test_summary_by_family():
    found = report.summary(MADE_UP)
    assert list(found) == ["T=1", "T>1", "fp32"]
    assert (found["T=1"]["cells"], found["T=1"]["compared"]) == (3, 2)
    assert found["T=1"]["ratio_geomean"] == pytest.approx(1.0)
    assert found["T=1"]["ratio_minimum"] == pytest.approx(0.5)
    assert found["T=1"]["ratio_minimum_at"] == "GDN 16/64 bf16 T=1 B=64"
    assert found["T=1"]["share_minimum"] == pytest.approx(0.9)
    assert found["T>1"]["ratio_geomean"] == found["T>1"]["ratio_minimum"] == pytest.approx(1.5)
    assert found["fp32"]["share_minimum"] == pytest.approx(0.7)
    alone = report.summary(MADE_UP[2:3])["T=1"]
    assert (alone["ratio_geomean"], alone["ratio_minimum"], alone["ratio_minimum_at"]) == (None, None, None)
    assert report.geomean([2.0, 8.0]) == pytest.approx(4.0)


def test_record_has_what_a_claim_needs():
    made = {"a": Peer("a", "torch", same), "b": Peer("b", "no-such-package", same)}
    run = bench.run_facts(CPU, made, {"more": 1})
    written = json.loads(json.dumps(bench.record([replace(o, run=run) for o in MADE_UP], run), allow_nan=False))
    (ran,) = written["runs"]
    assert ran["torch"] == torch.__version__
    assert ran["peers"] == {"a": metadata.version("torch"), "b": None}
    assert ran["kernel_sources"] == compile.all_sources()
    assert ran["more"] == 1
    assert {cell["run"] for cell in written["cells"]} == {0}
    assert written["summary"]["T=1"]["kernel_sources"] == [compile.all_sources()]
    assert written["summary"]["T=1"]["ratio_minimum"] == pytest.approx(0.5)
    cell = written["cells"][1]
    assert (cell["model"], cell["heads"], cell["state_dtype"], cell["tokens"], cell["sequences"]) == (
        "gdn",
        [16, 64],
        "bfloat16",
        1,
        64,
    )
    assert (cell["us"], cell["copy_us"], cell["best_peer"], cell["ratio"]) == (10.0, 9.0, "a", 0.5)
    assert cell["bytes"] == 2 * 64 * 64 * 128 * 128 * 2
    assert cell["tb_s"] == pytest.approx(cell["bytes"] / 10e-6 / 1e12)
    assert cell["peers"]["b"] == {"us": 7.0, "error": 1e-3, "agrees": True, "reason": None, "eager_us": None}


def test_record_names_the_commit_only_inside_the_packages_own_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("GATED_DELTA_COMMIT", "copied")
    assert report.checkout() == {"commit": "copied", "dirty": False}
    monkeypatch.delenv("GATED_DELTA_COMMIT")
    root = report.Path(report.__file__).parents[3]
    found = report.checkout()
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        assert found["commit"] == head
        assert isinstance(found["dirty"], bool)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / "site-packages" / "gated_delta" / "bench"
    installed.mkdir(parents=True)
    (installed.parent / "__init__.py").touch()
    monkeypatch.setattr(report, "__file__", str(installed / "report.py"))
    assert report.checkout() == {"commit": None, "dirty": None}
    for command in (["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    assert report.checkout()["dirty"] is False
    (installed.parent / "__init__.py").write_text("changed")
    assert report.checkout()["dirty"] is True


def test_tables_and_picture(tmp_path):
    from rich.console import Console

    console = Console(width=200, record=True, file=StringIO())
    disagreeing = Outcome(GDN(1, 1), 2.0, 1.0, {"a": Rival(None, 0.5, False, "disagrees"), "b": Rival(None, None, None, "gone")})
    for table in [*bench.tables([*MADE_UP, disagreeing]), *bench.summary_tables(MADE_UP)]:
        console.print(table)
    text = console.export_text()
    for word in ("GDN 16/64 bf16 T=1 B=64", "disagrees", "0.500", "0.900", "2 of 3", "KDA 32/32 fp32 T=1 B=64"):
        assert word in text
    file = tmp_path / "decode.png"
    bench.plot_outcomes([*MADE_UP, disagreeing], "made up", file)
    assert file.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ the command


def test_bench_runs_the_grid_and_writes_what_it_found(monkeypatch, tmp_path):
    def missing(cell, b):
        raise ModuleNotFoundError("No module named 'flashinfer'")

    run = fake_contest(monkeypatch, {"flashinfer": (missing, 1.0), "fla": (same, 8.0)})
    play(monkeypatch, run)
    monkeypatch.setattr(clock, "HOST_CALLS", 1)
    files = tmp_path / "results" / "decode.json", tmp_path / "results" / "decode.png"
    agenda = Agenda(SMALL[:2], {name: run.peers[name] for name in ("flashinfer", "fla")})
    cli._bench_grid(agenda, "flashinfer,fla", CPU, cli.console, files[0], True, files[1])
    written = json.loads(files[0].read_text())
    assert [cell["series"] for cell in written["cells"]] == ["GDN 1/2 bf16 T=1", "KDA 2/2 bf16 T=3"]
    assert written["summary"]["T=1"]["ratio_geomean"] == pytest.approx(2.0)
    assert "ours" in written["runs"][0]["host_us"]
    assert written["runs"][0]["host_us_of"] == "GDN 1/2 bf16 T=1 B=3"
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_bench_does_not_time_what_fails_its_check(monkeypatch, tmp_path):
    run = fake_contest(monkeypatch, {})
    play(monkeypatch, run)
    monkeypatch.setattr(clock, "HOST_CALLS", 1)
    right = reference.decode

    def wrong(tokens, **states):
        right(tokens._replace(beta_logits=tokens.beta_logits and states["state"].dtype == BF16), **states)

    monkeypatch.setattr(reference, "decode", wrong)
    file = tmp_path / "decode.json"
    with pytest.raises(typer.Exit):
        cli._bench_grid(Agenda([SMALL[0], SMALL[2]], PEERS), "", CPU, cli.console, file, True, None)
    assert [cell["series"] for cell in json.loads(file.read_text())["cells"]] == ["GDN 1/2 bf16 T=1"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--peers", "fla", "--device", "cpu"], "CUDA device"),
        (["--grid", "--device", "cpu"], "CUDA device"),
        (["--peers", "fla", "--op", "verify"], "decode or speculate"),
        (["--op", "speculate", "--device", "cpu"], "CUDA device"),
        (["--op", "speculate", "--backend", "reference"], "reference"),
        (["--op", "speculate", "--dim", "64"], "--dim"),
        (["--peers", "fla", "--backend", "reference"], "reference"),
        (["--grid", "--dim", "64"], "--dim"),
        (["--grid", "--gate", "log"], "--gate"),
    ],
)
def test_bench_refuses_a_grid_it_cannot_run(arguments, word):
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    assert word in " ".join(result.output.replace("│", " ").split())


def test_bench_refuses_unknown_peers_and_an_empty_grid(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(cli, "_device", lambda _: device)
    for arguments, word in (
        (["--peers", "fla,nobody"], "nobody"),
        (["--grid", "--batch", "7"], "no cell"),
        (["--grid", "--heads", "8/8"], "no cell"),
        (["--op", "speculate", "--peers", "fla"], "sglang,flashinfer"),
        (["--op", "speculate", "--tokens", "8"], "no cell"),
    ):
        result = CliRunner().invoke(cli.app, ["bench", *arguments])
        assert result.exit_code == 2, result.output
        assert word in result.output


def test_options_given_narrow_the_grid(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(cli, "_bench_grid", lambda agenda, peers, *_: seen.append((agenda, peers)))
    for arguments in (
        ["--grid"],
        ["--grid", "--batch", "1,8"],
        ["--peers", "fla", "--model", "kda", "--heads", "32/32", "--tokens", "1", "--state-dtype", "fp32"],
        ["--op", "speculate"],
        ["--op", "speculate", "--peers", "sglang", "--model", "gdn", "--tokens", "4", "--state-dtype", "bf16", "--batch", "2,64"],
    ):
        assert CliRunner().invoke(cli.app, ["bench", *arguments]).exit_code == 0
    assert (seen[0][0].cells, seen[0][1]) == (grid(), "")
    assert (seen[0][0].baselines, seen[0][0].probes) == ({}, ())
    assert {cell.sequences for cell in seen[1][0].cells} == {1, 8}
    assert (seen[2][0].cells, seen[2][1]) == ([Decode("kda", (32, 32), FP32, 1, 2**i) for i in range(10)], "fla")
    assert (seen[3][0].cells, seen[3][0].probes) == (speculate.grid(), speculate.probes())
    assert list(seen[3][0].baselines) == ["cached"]
    assert seen[4][0].cells == [Speculation("gdn", (16, 64), BF16, 4, B) for B in (2, 64)]
    assert [str(probe) for probe in seen[4][0].probes] == [
        "verify, GDN 16/64 bf16 B=64",
        "flush of 48 layers, GDN 16/64 bf16 T=4 B=2",
    ]
    assert seen[4][1] == "sglang"


@pytest.mark.usefixtures("stand_ins")
def test_speculation_is_run_beside_its_baseline_and_followed_by_the_probes(monkeypatch, tmp_path):
    contest = fake_contest(monkeypatch, {"cached": (BASELINES["cached"].prepare, 6.0), "sglang": (same, 8.0)})
    play(monkeypatch, contest)
    monkeypatch.setattr(clock, "HOST_CALLS", 1)
    flat = {"T2": 2.0, "T4": 2.0, "T8": 3.0, "T16": 4.0}
    probes = [Flatness(SPECULATIONS[0])]
    turns = clock.in_turns
    monkeypatch.setattr(clock, "in_turns", lambda replays: flat if "T2" in replays else turns(replays))
    agenda = Agenda(
        SPECULATIONS[:2], {"sglang": contest.peers["sglang"]}, BASELINES, probes, 1, facts=lambda _: {"committed": "so"}
    )
    file, picture = tmp_path / "speculate.json", tmp_path / "speculate.png"
    cli._bench_grid(agenda, "sglang", CPU, cli.console, file, True, picture)
    written = json.loads(file.read_text())
    (ran,) = written["runs"]
    assert list(ran["peers"]) == ["cached", "sglang"]
    assert ran["committed"] == "so"
    assert [cell["parts"]["verify"] for cell in written["cells"]] == [2.5, 2.5]
    assert written["summary"]["KDA fp32"]["ratio_geomean"] == pytest.approx(2.0)
    assert written["summary"]["KDA fp32"]["rivals"]["cached"]["ratio_geomean"] == pytest.approx(1.5)
    assert [row["T8_over_T2"] for row in ran["flatness"]] == [1.5]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_cut_short_leaves_what_it_has(monkeypatch, tmp_path):
    contest = fake_contest(monkeypatch, {})
    play(monkeypatch, contest)

    def cut(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(contest, "probe", cut)
    file = tmp_path / "speculate.json"
    with pytest.raises(typer.Exit) as left:
        cli._bench_grid(Agenda(SPECULATIONS[:1], {}, {}, [Flatness(SPECULATIONS[0])]), "", CPU, cli.console, file, True, None)
    assert left.value.exit_code == 130
    assert [cell["us"] for cell in json.loads(file.read_text())["cells"]] == [4.0]


def test_the_package_does_not_bring_the_benchmark_along():
    code = "import sys, gated_delta; assert not [n for n in sys.modules if n.startswith('gated_delta.bench')]"
    subprocess.run([sys.executable, "-c", code], check=True)
