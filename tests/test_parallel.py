"""parallel.prefill over gloo: a process a rank, forked once for each number of ranks."""

import datetime
import functools
import importlib.util
import itertools
import multiprocessing
import re
import socket
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gated_delta as gd
from benchmarks import parallel as benchmark
from gated_delta import parallel, reference
from gated_delta.problem import Tokens
from gated_delta.testing.oracle import summary

H, HV, K, V = 1, 2, 16, 24
EXAMPLE = Path(__file__).parents[1] / "examples" / "context_parallel.py"
RANKS = (1, 2, 3)
GATES = ("fast", "slow", "reset", "reflect")


def batch(axis, gates, lengths, seed=0):
    """Tokens of a packed batch, and random initial states."""
    rng = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    k = torch.randn(1, T, H, K, generator=rng)
    g = -torch.rand(1, T, HV, *((K,) if axis == "channel" else ()), generator=rng)
    beta = torch.rand(1, T, HV, generator=rng)
    if gates == "slow":
        g = g * 0.002
    elif gates == "reset":  # decays of 0, and hardly any others
        g = torch.where(torch.rand(g.shape, generator=rng) < 0.004, -torch.inf, g * 1e-4)
    elif gates == "reflect":  # nearly equal keys, beta up to 2
        k, g, beta = k[:, :1] + 0.02 * k, g * 1e-3, 2 * beta
    q, v = torch.randn(1, T, H, K, generator=rng), torch.randn(1, T, HV, V, generator=rng)
    return dict(q=q, k=k, v=v, g=g, beta=beta), torch.randn(len(lengths), HV, V, K, generator=rng)


def ends_of(lengths):
    return [0, *itertools.accumulate(lengths)]


def rows(tokens, start, stop):
    return {name: x[:, start:stop].clone() for name, x in tokens.items()}


def shard(tokens, cuts):
    """The rank's tokens, and three rows of NaN behind them."""
    rank, ranks, last = dist.get_rank(), dist.get_world_size(), len(cuts) - 2
    own = [rank] if last == ranks - 1 else [rank, last - rank]
    parts = [rows(tokens, *cuts[f : f + 2]) for f in own]
    pad = {name: torch.full_like(x[:, :3], torch.nan) for name, x in tokens.items()}
    return {name: torch.cat([*(x[name] for x in parts), pad[name]], 1) for name in tokens}


def everyone(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


def in_order(o, cuts):
    """Outputs of all ranks in the order of the batch's tokens."""
    parts, ranks = everyone(o), dist.get_world_size()
    fragments = [None] * (len(cuts) - 1)
    for rank, x in enumerate(parts):
        own = [rank] if len(fragments) == ranks else [rank, len(fragments) - 1 - rank]
        sizes = [cuts[f + 1] - cuts[f] for f in own]
        assert not x[:, sum(sizes) :].any(), "rows past the rank's tokens"
        for f, y in zip(own, x[:, : sum(sizes)].split(sizes, 1), strict=True):
            fragments[f] = y
    return torch.cat(fragments, 1)


@functools.cache
def truth(axis, gates, lengths):
    """Outputs and final states of a batch in float64, token by token."""
    (tokens, initial), ends = batch(axis, gates, lengths), ends_of(lengths)
    o, final = torch.zeros_like(tokens["v"]).double(), initial.double()
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        steps = reference.recurrent(Tokens(**rows(tokens, a, b)), initial[n])
        for t, (o_t, state) in enumerate(steps, a):
            o[0, t], final[n] = o_t, state
    return o, final


def judge(x, plain, want):
    """At most twice the error of one call, and a rounding unit."""
    size = want.norm() + 1e-30
    error, allowed = ((y.double() - want).norm() / size for y in (x, plain))
    assert error <= 2 * allowed + 2**-20, (error, allowed)


def even(total, ranks, step=1):
    return [total * r // ranks // step * step for r in range(ranks)] + [total]


CUTS = {
    1: dict(uneven=[], crossed=[], tiny=[], empty=[], zigzag=[150]),
    2: dict(uneven=[37], crossed=[95], tiny=[2], empty=[300], zigzag=[2, 150, 151]),
    3: dict(
        uneven=[37, 211], crossed=[60, 240], tiny=[1, 3], empty=[160, 160],
        zigzag=[40, 95, 200, 200, 299],
    ),
}  # fmt: skip
LENGTHS = dict(crossed=(90, 0, 7, 150, 53, 0), zigzag=(0, 90, 210))


def results_are_right(axis, gates, name):
    """Of one prompt, or of a packed batch with initial and final states."""
    lengths = LENGTHS.get(name, (300,))
    tokens, initial = batch(axis, gates, lengths)
    ends, cuts = ends_of(lengths), [0, *CUTS[dist.get_world_size()][name], 300]
    call = dict(initial_state=initial, output_final_state=True)
    one, one_final = gd.prefill(**tokens, cu_seqlens=torch.tensor(ends), **call)
    o, final = parallel.prefill(**shard(tokens, cuts), cuts=cuts, cu_seqlens=ends, **call)
    o, final = in_order(o, cuts), sum(everyone(final))
    want, states = truth(axis, gates, lengths)
    judge(o, one, want)
    judge(final, one_final, states)


def pools_and_checkpoints_are_right(axis, dtype):
    """Slots of a padded pool, one of a sequence that starts anew, one inactive with NaN."""
    lengths, ranks = (128, 64, 256, 40), dist.get_world_size()
    tokens, _ = batch(axis, "slow", lengths)
    ends, cuts = ends_of(lengths), [0, *{1: [], 2: [320], 3: [64, 256]}[ranks], sum(lengths)]
    for x in tokens.values():
        x[:, ends[1] : ends[2]] = torch.nan
    rng = torch.Generator().manual_seed(1)
    pool = torch.randn(10, HV * V * K + 8, generator=rng).to(dtype)[:, : HV * V * K]
    pool = pool.unflatten(1, (HV, V, K))
    pool[4] = torch.nan
    lens = torch.tensor([[0, 128, -1], [64, -1, -1], [64, 256, 192], [-1, 0, -1]])
    slots = torch.tensor([[5, 6, 0], [7, 0, 0], [8, 0, 2], [0, 9, 0]])
    call = dict(state_indices=torch.tensor([3, 0, 1, 4]), null_index=0, checkpoint_lens=lens)
    call |= dict(
        has_initial_state=torch.tensor([True, True, True, False]), checkpoint_indices=slots
    )
    one = pool.clone()
    whole, _ = gd.prefill(**tokens, **call, cu_seqlens=torch.tensor(ends), state=one)
    before = pool.clone()
    o, _ = parallel.prefill(**shard(tokens, cuts), **call, cuts=cuts, cu_seqlens=ends, state=pool)
    torch.testing.assert_close(in_order(o, cuts), whole, rtol=1e-4, atol=1e-5)
    # A slot is the one of the rank that stores it.
    written = [
        (x.view(torch.uint8) != before.view(torch.uint8)).flatten(1).any(1) for x in everyone(pool)
    ]
    assert max(sum(x.int() for x in written)) <= 1, "two ranks wrote a slot"
    pools = everyone(pool)
    for slot in range(10):
        x = next((p[slot] for p, w in zip(pools, written, strict=True) if w[slot]), before[slot])
        tolerance = (
            dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
        )
        torch.testing.assert_close(x, one[slot], **tolerance, equal_nan=True)
    rest = {0, 7}
    assert not any(w[slot] for w in written for slot in rest), "a null or inactive slot"


def a_relay_has_the_bits_of_one_call(axis, name, deterministic):
    lengths = dict(one=(320,), packed=(64, 128, 0, 128))[name]
    tokens, initial = batch(axis, "slow", lengths)
    ends, ranks = ends_of(lengths), dist.get_world_size()
    cuts = even(320, ranks, 64)
    call = dict(initial_state=initial, output_final_state=True, deterministic=deterministic)
    o, final = parallel.prefill(**shard(tokens, cuts), cuts=cuts, cu_seqlens=ends, **call)
    whole, states = gd.prefill(**tokens, cu_seqlens=torch.tensor(ends), **call)
    assert torch.equal(in_order(o, cuts), whole)
    assert torch.equal(sum(everyone(final)), states)


def states_are_fp32_whatever_the_default_is():
    """Engines set the model's dtype as the process's default."""
    tokens, _ = batch("head", "slow", (300,))
    own, whole = shard(tokens, cuts := even(300, dist.get_world_size())), gd.prefill(**tokens)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        o, _ = parallel.prefill(**own, cuts=cuts)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(in_order(o, cuts), whole, rtol=1e-4, atol=1e-5)


def nan_of_a_sequence_reaches_no_other():
    tokens, _ = batch("head", "slow", (100, 200))
    tokens["v"][0, 50] = torch.nan
    cuts = [0, *{1: [], 2: [120], 3: [80, 200]}[dist.get_world_size()], 300]
    o, _ = parallel.prefill(**shard(tokens, cuts), cuts=cuts, cu_seqlens=[0, 100, 300])
    o = in_order(o, cuts)
    assert o[:, 99].isnan().all()
    assert o[:, 100:].isfinite().all()


def the_example_agrees():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()


def the_benchmark_times_what_it_checked():
    with mock.patch.object(benchmark, "slowest", lambda call: len(call())):
        assert benchmark.times("gdn", "slow", 200, torch.device("cpu")) == (2, 2)


def a_failing_rank_is_named_and_nothing_is_written():
    tokens, _ = batch("head", "slow", (300,))
    rank, ranks, pool = dist.get_rank(), dist.get_world_size(), torch.ones(1, HV, V, K)
    own = shard(tokens, cuts := even(300, ranks))
    if rank == ranks - 1:
        own["g"][0, 3] = 0.5
    expected = (
        (ValueError, "^g: expected")
        if rank == ranks - 1
        else (RuntimeError, f"rank {ranks - 1} failed.* g: ")
    )
    with pytest.raises(expected[0], match=expected[1]):
        parallel.prefill(**own, cuts=cuts, state=pool)
    assert (pool == 1).all()


def ranks_that_disagree_are_named():
    tokens, _ = batch("head", "slow", (300,))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return
    cuts = even(300, ranks) if rank < ranks - 1 else [0, *range(3, 3 * ranks, 3), 300]
    with pytest.raises(ValueError, match=f"cuts: expected the same.*on rank {ranks - 1}"):
        parallel.prefill(**shard(tokens, cuts), cuts=cuts)


BAD = (
    (dict(cuts=[0] * 7 + [300]), ValueError, "cuts: expected .* for . ranks"),
    (dict(cuts=3), TypeError, "cuts: expected ints or an int tensor, got int"),
    (dict(cuts=torch.zeros(2)), TypeError, "cuts: expected ints.*got torch.float32"),
    (dict(group="x"), ValueError, "group: expected a group of this process, got 'x'"),
    (dict(cu_seqlens=torch.empty(2, dtype=torch.int32, device="meta")), ValueError,
     "cu_seqlens: expected a tensor with data"),
    (dict(cuts=torch.zeros(2, 2).int().to_sparse()), ValueError, "cuts: expected a plain strided"),
    (dict(cu_seqlens=[0, 310]), ValueError, r"cuts: expected to end at cu_seqlens\[-1\] = 310"),
    (dict(cu_seqlens=[0, 200, 100]), ValueError, "cu_seqlens: expected ascending numbers"),
    (dict(state_indices=torch.tensor([0])), ValueError, "state_indices: expected None"),
    (dict(initial_state=torch.ones(2, HV, V, K)), ValueError, "initial_state: expected shape"),
    (dict(state=torch.ones(1, HV, V, K), state_indices=torch.tensor([1])), IndexError, "state_ind"),
    (dict(state=torch.ones(0, HV, V, K), state_indices=torch.tensor([0])), IndexError,
     "state_indices: expected indices below 0"),
    (dict(checkpoint_lens=torch.tensor([[32]]), checkpoints=torch.ones(1, 1, HV, V, K)),
     ValueError, "checkpoint_lens: expected multiples of 64"),
    (dict(deterministic=True), ValueError, "cuts: expected multiples of 64 .* with determ"),
    (dict(deterministic=128), ValueError, "cuts: expected multiples of 128 .* with determ"),
)  # fmt: skip


def bad_arguments_are_refused():
    """By each rank itself, or by those that see no more of it than that another refused."""
    tokens, _ = batch("head", "slow", (300,))
    own, ranks = shard(tokens, cuts := even(300, dist.get_world_size())), dist.get_world_size()
    for changes, error, text in BAD:
        if ranks == 1 and "deterministic" in changes:
            continue
        with pytest.raises((error, RuntimeError)) as caught:
            parallel.prefill(**own | dict(cuts=cuts) | changes)
        name = f"{error.__name__}: "
        messages = everyone(str(caught.value).partition(name)[2] or str(caught.value))
        assert all(re.search(text, message) for message in messages), (text, messages)


def a_lost_rank_ends_in_an_error():
    rank, ranks, pool = dist.get_rank(), dist.get_world_size(), torch.ones(1, HV, V, K)
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    if ranks == 1 or rank == ranks - 1:
        return
    tokens, _ = batch("head", "slow", (300,))
    cuts = even(300, ranks)
    with pytest.raises(RuntimeError, match=f"parallel.prefill: rank {rank} got no answer"):
        parallel.prefill(**shard(tokens, cuts), cuts=cuts, state=pool, group=group)
    assert (pool == 1).all()


CASES = {
    "-".join(x): (results_are_right, x)
    for x in (
        *itertools.product(("head", "channel"), GATES, ("uneven",)),
        *itertools.product(("head", "channel"), ("slow",), ("crossed", "tiny", "empty", "zigzag")),
    )
}
CASES |= {
    f"pool-{axis}-{dtype}": (pools_and_checkpoints_are_right, (axis, dtype))
    for axis, dtype in (("head", torch.float32), ("channel", torch.bfloat16))
}
CASES |= {
    f"relay-{axis}-{name}-{value}": (a_relay_has_the_bits_of_one_call, (axis, name, value))
    for axis, name, value in (
        ("head", "packed", True),
        ("channel", "one", True),
        ("head", "one", 64),
        ("channel", "packed", 64),
    )
}
CASES |= {
    f.__name__: (f, ())
    for f in (
        nan_of_a_sequence_reaches_no_other,
        states_are_fp32_whatever_the_default_is,
        the_example_agrees,
        the_benchmark_times_what_it_checked,
        a_failing_rank_is_named_and_nothing_is_written,
        bad_arguments_are_refused,
        ranks_that_disagree_are_named,
        a_lost_rank_ends_in_an_error,
    )
}


def run_rank(rank, ranks, port, pipe):
    """Run every case; sends a traceback of each that fails."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    failures = {}
    for name, (case, arguments) in CASES.items():
        dist.barrier()
        try:
            case(*arguments)
        except BaseException:
            failures[name] = traceback.format_exc()
    pipe.send(failures)
    dist.barrier()


@pytest.fixture(scope="module", params=RANKS)
def failures(request):
    """Tracebacks by case, of each rank."""
    ranks, context = request.param, multiprocessing.get_context("fork")
    for case, arguments in CASES.values():
        if case is results_are_right:  # once for all processes
            truth(*arguments[:2], LENGTHS.get(arguments[2], (300,)))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes, children = [], []
    for rank in range(ranks):
        pipe, end = context.Pipe(duplex=False)
        children.append(context.Process(target=run_rank, args=(rank, ranks, port, end)))
        pipes.append(pipe)
        children[-1].start()
        end.close()
    result = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * ranks
    return result


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_call_does(failures, case):
    for rank, of_rank in enumerate(failures):
        assert case not in of_rank, f"rank {rank}: {of_rank[case]}"


@pytest.mark.parametrize("axis", ["head", "channel"])
@pytest.mark.parametrize("gates", GATES)
def test_summaries_are_b_and_m(axis, gates):
    lengths, sequences = (130, 0, 3, 70), torch.tensor([3, -1, 0, 1])
    tokens, initial = batch(axis, gates, lengths)
    ends, call = ends_of(lengths), {name: tokens[name] for name in ("k", "v", "g", "beta")}
    x = gd.summarise(
        **call, cu_seqlens=torch.tensor(ends), sequences=sequences, initial_state=initial
    )
    assert not x[1].any()
    for row, n in ((0, 3), (2, 0), (3, 1)):
        sequence = Tokens(**rows(tokens, *ends[n : n + 2]))
        want, plain = (summary(sequence, initial[row], t) for t in (torch.float64, torch.float32))
        for part in (slice(V), slice(V, None)):
            judge(x[row, :, part], plain[:, part], want[:, part])


BAD_SUMMARIES = (
    (dict(k=torch.ones(1, 20, H, K).double()), TypeError, "^k: expected dtype"),
    (dict(k=torch.ones(2, 10, H, K)), ValueError, "^k: expected packed tokens"),
    (dict(sequences=torch.tensor([2])), IndexError, "sequences: expected indices below 2, got 2"),
    (dict(sequences=torch.tensor([1, 1])), ValueError, "sequences: expected at most one"),
    (dict(sequences=torch.tensor([1.0])), TypeError, "sequences: expected dtype"),
    (dict(initial_state=torch.ones(1, HV, V, K)), ValueError, "initial_state: expected shape"),
    (dict(g=torch.full((1, 20, HV), 0.5)), ValueError, "g: expected log decays of at most 0"),
    (dict(max_seqlen=-1), ValueError, "max_seqlen: expected 0 or more"),
    (dict(backend="cute"), gd.UnsupportedProblem, "K and V of 64 or 128, got 16 and 24"),
)


@pytest.mark.parametrize(("changes", "error", "text"), BAD_SUMMARIES)
def test_bad_summaries_are_refused(changes, error, text):
    tokens, _ = batch("head", "slow", (20,))
    del tokens["q"]
    with pytest.raises(error, match=text):
        gd.summarise(**tokens | dict(cu_seqlens=torch.tensor([0, 13, 20])) | changes)
    route = gd.explain("summarise", **tokens)
    assert (route.backend, route.kernel) == ("reference", "reference.summarise")


def test_the_benchmark_without_torchrun_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark.main()
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
