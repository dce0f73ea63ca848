"""Tests of every operation on the GPU: decode, verify with flush, prefill on every path."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gated_delta as gd
from gated_delta import problem
from gated_delta.ops import OPERATIONS, launch
from gpu import (
    HV,
    PATHS,
    PER_TOKEN,
    D,
    captured,
    decode,
    fused,
    index,
    needs_gpu,
    no_waits,
    paths_here,
    pool,
    prefill_path,
    same,
    slow_gates,
    spread,
    tokens,
)

pytestmark = needs_gpu


class Op(NamedTuple):
    """T: tokens per sequence. repeats: comparisons. run(call, pool) returns o and buffers."""

    T: int
    repeats: int
    run: Callable[..., tuple[Tensor, ...]]


def steps(call, state, **given):
    return (decode(call, state, **given),)


def drafts(call, state, num_accepted=None, buffer_indices=None, out=None, **slots):
    """verify, then flush of num_accepted drafts (default: 0 to T), one more if o is positive."""
    (N, T, H, K), (HV, V) = call["q"].shape, call["v"].shape[2:]
    rows = N if buffer_indices is None else len(state)
    gate = "channel" if call["g"].ndim == 4 else "head"
    buffer = gd.KVBuffer.empty(rows, T, H, HV, K, V, gate=gate, device="cuda")
    filled = buffer.u, buffer.k, buffer.log_decay
    for x in filled:
        x.fill_(math.nan)
    o = gd.verify(
        **call,
        state=state,
        buffer=buffer,
        buffer_indices=buffer_indices,
        out=out,
        **slots,
        backend="cute",
    )
    counts = torch.arange(N, device="cuda") % (T + 1) if num_accepted is None else num_accepted
    counts = counts + (o[:, 0, 0, 0] > 0)
    gd.flush(state, buffer, counts, buffer_indices=buffer_indices, **slots, backend="cute")
    return o, *filled


def prefill(call, state, **given):
    return gd.prefill(**call, state=state, **given, backend="cute")[:1]


OPS = {
    "decode": Op(1, 50, steps),
    "decode of 4 tokens": Op(4, 50, steps),
    "verify and flush": Op(4, 1000, drafts),
    "verify and flush of 16 tokens": Op(16, 1000, drafts),
    **{f"prefill, {path}": Op(300, 20, prefill) for path in paths_here(*PATHS)},
}


@pytest.fixture(params=OPS)
def op(request):
    name, _, path = request.param.partition(", ")
    if name != "prefill":
        yield OPS[request.param]
    else:
        with prefill_path(int(path) if path.isdigit() else path):
            yield OPS[request.param]


def call_of(op, N, axis="head", **options):
    """A call of N sequences. Prompts decay slowly: initial states still matter at their ends."""
    if op.run is prefill:
        return slow_gates(tokens(N, op.T, axis=axis, **options))
    gate = "lower_bound" if (op.run, axis) == (drafts, "channel") else "softplus"
    return tokens(N, op.T, axis=axis, gate=gate, **options)


def all_same(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        same(x, y)


def test_bits_do_not_change_from_run_to_run(op, axis, state_dtype):
    """Every launch starts before the previous one has ended."""
    call, start = call_of(op, 17, axis), pool(17, state_dtype)
    first = start.clone()
    results, state = (*op.run(call, first), first), torch.empty_like(start)
    changed = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(op.repeats):
        state.copy_(start)
        for x, y in zip((*op.run(call, state), state), results):
            changed |= (x.view(torch.uint8) != y.view(torch.uint8)).any()
    assert not changed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("null_index", [0, 2])
def test_slots_up_to_null_index_are_like_negative_ones(op, axis, null_index, dtype):
    """Bug 10: padding may share a slot, which is neither read nor written."""
    call, start = call_of(op, 5, axis), pool(8)
    for name in PER_TOKEN:
        call[name][[1, 2, 4]] = math.nan
    start[: null_index + 1] = math.nan
    after, state = start.clone(), start.clone()
    results = op.run(call, after, state_indices=index(5, -1, -1, 3, -1, dtype=dtype))
    lowest = -1 if dtype == torch.int32 else -(2**40)  # an int64's low word may look valid
    got = op.run(
        call,
        state,
        state_indices=index(5, 0, null_index, 3, lowest, dtype=dtype),
        null_index=null_index,
    )
    assert (got[0][[1, 2, 4]] == 0).all()
    all_same(got, results)
    same(state, after)
    assert not torch.equal(state[3], start[3])


def test_unused_slots_may_hold_anything(op):
    call, state = (
        call_of(op, 2),
        torch.full((5, HV, D, D), math.nan, dtype=torch.bfloat16, device="cuda"),
    )
    state[[1, 3]] = pool(2)
    assert all(torch.isfinite(x).all() for x in op.run(call, state, state_indices=index(3, 1)))
    assert torch.isfinite(state[[1, 3]]).all()
    assert state[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pools_of_more_than_2_to_the_31_elements(op, dtype):
    """Both ends, read and written."""
    slots = 2**31 // (64 * D * D) + 3
    call, small = call_of(op, 3, heads=(16, 64)), pool(3, HV=64)
    state = torch.empty(slots, 64, D, D, dtype=torch.bfloat16, device="cuda")
    where = index(slots - 1, 0, slots - 2, dtype=dtype)
    state[where] = small
    all_same(op.run(call, state, state_indices=where), op.run(call, small))
    same(state[where], small)


def test_launches_in_a_row_wait_for_each_other(op, axis):
    """Launched before the previous kernel has ended, eagerly and in a graph; states chain."""
    N = 64 if op.T <= 4 else 4
    call, start = call_of(op, N, axis, heads=(16, 64)), pool(N, HV=64)
    serial, state, replayed = start.clone(), start.clone(), start.clone()
    results = []
    for _ in range(20):
        results += op.run(call, serial)
        torch.cuda.synchronize()
    all_same([x for _ in range(20) for x in op.run(call, state)], results)
    same(state, serial)
    graph, row = captured(lambda: [x for _ in range(20) for x in op.run(call, replayed)])
    for _ in range(2):
        replayed.copy_(start)
        graph.replay()
        all_same(row, results)
        same(replayed, serial)


N, P = 6, 25


def drawn(op, seed, axis="head"):
    """A random call of N sequences with its index tensors: slots, one inactive, counts, lengths."""
    rng, T = torch.Generator("cuda").manual_seed(seed), op.T

    def order(n):
        return torch.randperm(P, generator=rng, device="cuda")[:n].int()

    def below(end, low=-1):
        return torch.randint(low, end, (N,), generator=rng, device="cuda").int()

    if op.run is prefill:
        ends = torch.cat([index(0), below(T, 0).cumsum(0).int()])
        ends[1 + seed % N :] = ends[seed % N : -1].clone()  # one sequence without tokens
        given = dict(cu_seqlens=ends, state_indices=order(N), has_initial_state=below(1) < 0)
    elif op.run is steps:
        given = dict(state_indices=order(N * T).view(N, T), num_accepted=below(T + 3))
    else:
        given = dict(state_indices=order(N), buffer_indices=order(N), num_accepted=below(T + 2))
    given["state_indices"][seed % N] = -1
    if op.run is prefill:
        return tokens(1, N * T, axis=axis, seed=seed), given
    return call_of(op, N, axis, seed=seed), given


def test_a_captured_graph_follows_its_inputs(op, axis):
    """Captured after one warm call. Replays see new tokens, parameters, states and indices."""
    (call, given), state = drawn(op, 0, axis), pool(P)
    out = torch.empty_like(call["v"])
    op.run(call, state, **given, out=out)
    graph, results = captured(lambda: op.run(call, state, **given, out=out))
    for seed in range(1, 6):
        (fresh, inputs), start = drawn(op, seed, axis), pool(P, seed=seed)
        for name in PER_TOKEN:
            call[name].copy_(fresh[name])
        for name in ("A_log", "dt_bias"):
            getattr(call["gate"], name).copy_(getattr(fresh["gate"], name))
        for name, x in inputs.items():
            given[name].copy_(x)
        state.copy_(start)
        out.fill_(math.nan)
        graph.replay()
        all_same((*results, state), (*op.run(fresh, start, **inputs), start))


@pytest.mark.parametrize("run", [steps, drafts, prefill], ids=lambda run: run.__name__)
def test_the_first_call_of_a_process_can_be_captured(run, axis):
    """Its kernels are loaded during the capture."""
    code = f"import test_cute_calls as calls; calls.capture_first(calls.{run.__name__}, {axis!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


def capture_first(run, axis):
    op = next(op for op in OPS.values() if op.run is run)
    call, start = call_of(op, 5, axis), pool(5)
    state = start.clone()
    torch.cuda.synchronize()
    graph, results = captured(lambda: op.run(call, state))
    same(state, start)
    graph.replay()
    all_same((*results, state), (*op.run(call, start), start))


def test_results_of_the_previous_kernel_are_read(op):
    """A torch kernel writes tokens and indices right before the launch, which may prefetch."""
    turns = [drawn(op, seed)[1] for seed in range(20)]

    def rounds(state, wait):
        call, given = drawn(op, 0)
        results = []
        for inputs in turns:
            for name, x in inputs.items():
                given[name].copy_(x)
            wait()
            o, *filled = op.run(call, state, **given)
            results += [o, *filled]
            wait()
            call["v"].copy_(o)
            wait()
        return results

    start = pool(P)
    state, serial = start.clone(), start.clone()
    all_same(rounds(state, lambda: None), rounds(serial, torch.cuda.synchronize))
    same(state, serial)
    assert not torch.equal(state, start)


def test_nothing_waits_for_the_gpu(op):
    """The first call and cached ones: indices, lengths and counts stay on the device."""
    (call, given), state = drawn(op, 0), pool(P)
    op.run(call, state, **given)  # kernels are loaded
    for operation in OPERATIONS.values():
        operation.calls.clear()
    with no_waits():
        for _ in range(2):
            op.run(call, state, **given)


def test_indices_are_checked_on_request(op, monkeypatch):
    """They are copied to the host; its other checks: test_launch.py, test_memory.py."""
    monkeypatch.setattr(launch, "CHECK", True)
    call, state = call_of(op, 2), pool(4)
    before = state.clone()
    for slots, kind in (((0, 4), IndexError), ((1, 1), ValueError)):
        with pytest.raises(kind, match="state_indices: expected"):
            op.run(call, state, state_indices=index(*slots))
    same(state, before)


def test_torch_compile_makes_it_one_graph(op):
    torch._dynamo.reset()
    (call, given), state = drawn(op, 0), pool(P)
    eager = state.clone()
    results = torch.compile(op.run, fullgraph=True, backend="aot_eager")(call, state, **given)
    all_same(results, op.run(call, eager, **given))
    same(state, eager)


def test_the_current_stream_is_used(op):
    call, start = call_of(op, 4), pool(4)
    want = start.clone()
    results = op.run(call, want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = start + 0  # ready after the stream's sleep
        got = op.run(call, late)
    side.synchronize()
    all_same(got, results)
    same(late, want)


def test_a_default_output_is_new_every_time(op):
    call, state = call_of(op, 1), pool(1)
    first, *_ = op.run(call, state)
    copy = first.clone()
    assert op.run(call, state)[0].data_ptr() != first.data_ptr()
    same(first, copy)


@pytest.mark.parametrize("shift", [0, 8, 1], ids=["aligned", "16 bytes on", "2 bytes on"])
def test_slices_of_a_fused_projection(op, axis, shift):
    """Misaligned slices are loaded by single elements, to the same bits; prefill refuses them."""
    call, start = call_of(op, 3, axis), pool(3)
    plain, state = start.clone(), start.clone()
    if op.run is prefill and shift == 1:
        with pytest.raises(gd.UnsupportedProblem, match="rows of q and k"):
            op.run(fused(call, shift), state)
        return
    all_same(op.run(fused(call, shift), state), op.run(call, plain))
    same(state, plain)


def test_strided_gates_betas_and_parameters(op, axis):
    """Channels of g and dt_bias too, except in prefill, which loads them in vectors."""
    call = tokens(3, op.T, axis=axis) if op.run is prefill else call_of(op, 3, axis)
    gate, start, channels = call["gate"], pool(3), 0 if op.run is prefill else call["g"].ndim - 3
    plain, state = start.clone(), start.clone()
    contiguous = replace(gate, dt_bias=gate.dt_bias.bfloat16())
    wide = replace(
        gate,
        A_log=torch.stack([gate.A_log, gate.A_log.neg()], 1)[:, 0],
        dt_bias=spread(contiguous.dt_bias, dim=channels, by=3),
    )
    strided = dict(
        g=spread(call["g"], dim=2 + channels, by=3),
        beta=spread(call["beta"], dim=1, by=3),
        gate=wide,
    )
    assert strided["g"].stride(2) != call["g"].stride(2)
    all_same(op.run(call | strided, state), op.run({**call, "gate": contiguous}, plain))
    same(state, plain)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_advance_waits_only_to_check_its_tokens(monkeypatch, dtype):
    """Without the check any number is clamped, in a graph too; with it, nothing is written."""
    rows, lens = gd.KVBuffer.empty(4, 3, 1, 1, 8, 8, device="cuda"), index(0, 2, 1, ~1, dtype=dtype)
    one, other = index(1, 0, 1, 1), index(-5, -(2**31), 2**31 - 1, -1)
    with no_waits():
        rows.advance(lens, other)
    assert lens.tolist() == [0, 2, 0, ~1]
    graph, _ = captured(lambda: rows.advance(lens, one))
    graph.replay()
    assert lens.tolist() == [1, 2, 1, 0]
    monkeypatch.setattr(problem, "CHECK", True)
    with pytest.raises(ValueError, match="tokens: expected 0 to 16, got -5 at sequence 0"):
        rows.advance(lens, other)
    assert lens.tolist() == [1, 2, 1, 0]
