"""Timers of `gated-delta bench`, and its records."""

from types import SimpleNamespace

import pytest
import torch

from gated_delta import bench, reference
from gated_delta.replaced import replaced
from gated_delta.testing.inputs import make

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")


def case(op="decode", axis="channel", lengths=(3, 3), **others):
    dtypes = dict(dtype=torch.bfloat16, g_dtype=torch.bfloat16, state_dtype=torch.float32)
    return bench.typical(
        op=op, axis=axis, heads=(1, 2), D=16, gate="softplus", lengths=lengths, **dtypes, **others
    )


@pytest.fixture
def short(monkeypatch):
    """Few single calls."""
    monkeypatch.setattr(bench, "TURN", 0.0)
    monkeypatch.setattr(bench, "HOST_CALLS", 2)


def test_an_attribute_is_restored_after_an_error():
    owner = SimpleNamespace(x=1)
    with pytest.raises(RuntimeError, match="2"), replaced(owner, "x", 2):
        raise RuntimeError(owner.x)
    with pytest.raises(KeyError), replaced(owner, "y", 2):
        pass
    assert vars(owner) == dict(x=1)


# ---------------------------------------------------------------- clock


def test_runners_take_turns_and_medians():
    played = []

    def replay(name, times):
        it = iter(times * 100)

        def play():
            played.append(name)
            return next(it)

        return play

    taken = bench.in_turns({"a": replay("a", [1.0, 1.0, 9.0]), "b": replay("b", [2.0])})
    assert taken == {"a": 1.0, "b": 2.0}
    assert played == (["a"] * bench.REPLAYS + ["b"] * bench.REPLAYS) * bench.ROUNDS


def test_host_clock_counts_one_call(monkeypatch):
    calls, ticks = [], iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    assert bench.host_us(lambda: calls.append(1), CPU) == pytest.approx(1e6 / bench.HOST_CALLS)
    assert len(calls) == bench.HOST_BATCHES * bench.HOST_CALLS == 2000


def test_eager_calls_rotate_and_give_a_median(monkeypatch):
    calls, ticks = [], iter([0, 0, 1, 1, 2, 3, 3, 3, 6, 9])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    replay = bench.eager([lambda i=i: calls.append(i) for i in range(2)], CPU, seconds=4)
    assert replay() == 1e6  # calls of 1, 1 and 3 seconds
    assert calls == [0, 1, 0]


@needs_gpu
def test_a_replay_runs_each_call_as_often_as_it_counts():
    sums = [torch.zeros(2**24, device="cuda") for _ in range(3)]
    replay = bench.capture([lambda x=x: x.add_(1) for x in sums], passes=4)
    assert [x[0].item() for x in sums] == [1.0] * 3  # capturing runs nothing
    assert 5 < replay() < 500  # 128 MB read and written
    assert [x[0].item() for x in sums] == [1.0 + 2 * 4] * 3


@needs_gpu
def test_eager_calls_count_the_host():
    sums = [torch.zeros(2**24, device="cuda") for _ in range(3)]
    replay = bench.eager([lambda x=x: x.add_(1) for x in sums], sums[0].device)
    times = [replay() for _ in range(6)]
    assert [x[0].item() for x in sums] == [2.0] * 3
    assert 5 < min(times) < 5000


def test_copies_move_what_is_asked():
    moved = bench.copies(2 * bench.COPY_BYTES + 200, 2, CPU)
    assert len(moved) == 2
    (written, read), last = moved[0].__closure__[0].cell_contents
    assert written.numel() == read.numel() == bench.COPY_BYTES
    assert last[0].numel() == 100
    for target, source in ((written, read), last):
        target.copy_(~source)
        moved[0]()
        assert torch.equal(target, source)


# ---------------------------------------------------------------- one operation


def test_bytes_are_of_inputs_outputs_and_states():
    tokens = 2 * 3 * (2 * 16 + 3 * 2 * 16 + 2) * 2  # q, k of one head; v, g, o of two; beta
    state = 2 * 2 * 16 * 16 * 4
    buffer = 4 * 3 * (2 * 16 + 16 + 2 * 16) * 4  # the case's buffer has two spare rows
    for op, moved in (
        ("prefill", tokens + 2 * state),
        ("decode", tokens + 2 * state),
        ("verify", tokens + state + buffer),
    ):
        assert bench.least_bytes(make(case(op))) == moved, op
    assert bench.least_bytes(make(case("flush"))) == 2 * state + buffer


@pytest.mark.usefixtures("short")
def test_host_time_excludes_the_reference_backend(monkeypatch):
    done = []
    right = reference.decode
    monkeypatch.setattr(
        reference, "decode", lambda *tokens, **states: done.append(1) or right(*tokens, **states)
    )
    call = make(case())
    bench._host_us(call, "reference", CPU, compiled=False)
    assert not done
    bench.run(call, "reference")
    assert done


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("op", ["decode", "flush"])
def test_kernels_are_replayed_over_cold_buffers(monkeypatch, op):
    """The reference backend stands in for the kernels."""
    one, captured, ran = case(op, lengths=(2,)), [], []
    monkeypatch.setattr(bench, "COLD", 4.5 * bench.least_bytes(make(one)))
    monkeypatch.setattr(bench, "run_case", lambda *_: SimpleNamespace(passed=True, backend="cute"))
    right = bench.run
    monkeypatch.setattr(
        bench, "run", lambda call, backend: ran.append(call) or right(call, backend)
    )

    def capture(calls, passes=1):
        for call in calls:
            call()
        captured.append(len(calls))
        return lambda: 7.0

    monkeypatch.setattr(bench, "capture", capture)
    record = bench.time_case(one, "reference", CPU)
    assert (record["us"], record["copy_us"], captured) == (7.0, 7.0, [5, 5])
    calls = ran[:5]
    assert len({call.case.seed for call in calls}) == 5
    assert {call.case.problem for call in calls} == {one.problem}
    assert len({call.tokens[0].scale for call in calls}) == 1
    assert len({call.tokens[0].gate.dt_bias is None for call in calls}) == 1
    if op == "flush":
        assert all(bool(call.states["buffer"].u.isfinite().any()) for call in calls)
