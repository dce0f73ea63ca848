"""What holds of every operation on the GPU: of decode, of verify with flush, of prefill however it is segmented."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gated_delta as gd
from gpu import HV, D, captured, decode, force_segments, fused, index, needs_gpu, pool, same, slowly, tokens

pytestmark = needs_gpu


class Op(NamedTuple):
    """T: tokens of its calls. repeats: how often bits are compared. run: from a call and a pool, which it updates, to outputs."""

    T: int
    repeats: int
    run: Callable[..., Tensor]


def drafts(call, state, **slots):
    """verify, and flush of 0 to T drafts."""
    (N, T, H, K), (HV, V) = call["q"].shape, call["v"].shape[2:]
    gate = "channel" if call["g"].ndim == 4 else "head"
    buffer = gd.KVBuffer.empty(N, T, H, HV, K, V, gate=gate, device="cuda")
    o = gd.verify(**call, state=state, buffer=buffer, **slots, backend="cute")
    gd.flush(state, buffer, torch.arange(N, device="cuda") % (T + 1), **slots, backend="cute")
    return o


def prefill(call, state, **slots):
    return gd.prefill(**call, state=state, **slots, backend="cute")[0]


OPS = {
    "decode": Op(1, 50, decode),
    "decode of 4 tokens": Op(4, 50, decode),
    "verify and flush": Op(4, 1000, drafts),
    "verify and flush of 16 tokens": Op(16, 1000, drafts),
    **{f"prefill, segments {segments}": Op(300, 20, prefill) for segments in (1, "persistent", 4)},
}


@pytest.fixture(params=OPS)
def op(request, monkeypatch):
    name, _, segments = request.param.partition(", segments ")
    if name == "prefill":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
        force_segments(segments if segments == "persistent" else int(segments), monkeypatch)
    return OPS[request.param]


def differ(a, b):
    """Whether any bit differs, as a tensor on the device."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).any()


def test_bits_do_not_change_from_run_to_run(op, axis, state_dtype):
    """Launched one after the other, each before the previous one has ended."""
    call, start = slowly(tokens(17, op.T, axis=axis)), pool(17, state_dtype)
    first = start.clone()
    o = op.run(call, first)
    state, changed = torch.empty_like(start), torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(op.repeats):
        state.copy_(start)
        changed |= differ(op.run(call, state), o)
        changed |= differ(state, first)
    assert not changed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("null_index", [0, 2])
def test_slots_up_to_null_index_are_as_negative_ones(op, axis, null_index, dtype):
    """Several sequences may be on one of them; they are not read, and not written, whatever their tokens hold."""
    call, start = slowly(tokens(5, op.T, axis=axis)), pool(8)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][[1, 2, 4]] = math.nan
    start[: null_index + 1] = math.nan
    after, state = start.clone(), start.clone()
    o = op.run(call, after, state_indices=index(5, -1, -1, 3, -1, dtype=dtype))
    lowest = -1 if dtype == torch.int32 else -(2**40)  # an int64's low word may look valid
    got = op.run(call, state, state_indices=index(5, 0, null_index, 3, lowest, dtype=dtype), null_index=null_index)
    assert (got[[1, 2, 4]] == 0).all()
    same(got, o)
    same(state, after)
    assert not torch.equal(state[3], start[3])


def test_unused_slots_may_hold_anything(op):
    call, state = tokens(2, op.T), torch.full((5, HV, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    state[[1, 3]] = pool(2)
    assert torch.isfinite(op.run(call, state, state_indices=index(3, 1))).all()
    assert torch.isfinite(state[[1, 3]]).all()
    assert state[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pools_of_more_than_2_to_the_31_elements(op, dtype):
    """Both ends, read and written."""
    slots = 2**31 // (64 * D * D) + 3
    call, small = slowly(tokens(3, op.T, heads=(16, 64))), pool(3, HV=64)
    state = torch.empty(slots, 64, D, D, dtype=torch.bfloat16, device="cuda")
    where = index(slots - 1, 0, slots - 2, dtype=dtype)
    state[where] = small
    same(op.run(call, state, state_indices=where), op.run(call, small))
    same(state[where], small)


def test_launches_in_a_row_wait_for_each_other(op, axis):
    """Launched before the kernel in front has ended, in a graph and without one; each starts from the last one's states."""
    N = 64 if op.T <= 16 else 4
    call, start = slowly(tokens(N, op.T, axis=axis, heads=(16, 64))), pool(N, HV=64)
    serial, state, replayed = start.clone(), start.clone(), start.clone()
    outputs = []
    for _ in range(20):
        outputs.append(op.run(call, serial))
        torch.cuda.synchronize()
    row = [op.run(call, state) for _ in range(20)]
    same(torch.stack(row), torch.stack(outputs))
    same(state, serial)
    graph, row = captured(lambda: [op.run(call, replayed) for _ in range(20)])
    for _ in range(2):
        replayed.copy_(start)
        graph.replay()
        same(torch.stack(row), torch.stack(outputs))
        same(replayed, serial)


def test_the_current_stream_is_used(op):
    call, start = tokens(4, op.T), pool(4)
    want = start.clone()
    o = op.run(call, want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = start + 0  # ready only once the stream is through with its sleep
        got = op.run(call, late)
    side.synchronize()
    same(got, o)
    same(late, want)


def test_a_default_output_is_new_every_time(op):
    call, state = tokens(1, op.T), pool(1)
    first = op.run(call, state)
    kept = first.clone()
    assert op.run(call, state).data_ptr() != first.data_ptr()
    same(first, kept)


@pytest.mark.parametrize("shift", [0, 8, 1], ids=["aligned", "16 bytes on", "2 bytes on"])
def test_slices_of_a_fused_projection(op, axis, shift):
    """A misaligned one is loaded in 16-bit numbers and gives the same bits; prefill refuses it."""
    call, start = tokens(3, op.T, axis=axis), pool(3)
    plain, state = start.clone(), start.clone()
    if op.run is prefill and shift == 1:
        with pytest.raises(gd.UnsupportedProblem, match="rows of q and k"):
            op.run(fused(call, shift), state)
        return
    same(op.run(fused(call, shift), state), op.run(call, plain))
    same(state, plain)
