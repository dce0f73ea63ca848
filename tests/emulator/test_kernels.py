"""Kernels on the emulator: cases with few heads, values of any size, faults it must find."""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from calls import rollout
from gated_delta import dispatch
from gated_delta.kernels.prefill.arguments import SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from gated_delta.memory import extent
from gated_delta.ops import prefill as host
from gated_delta.ops.prefill_kinds import TILES
from gated_delta.problem import ACTIVATIONS
from gated_delta.testing.cases import BUFFERED
from gpu import (
    PERSISTENT,
    needs_compiler,
    prefill_path,
    relative_error,
    transition_norms,
    windows_of_segments,
    with_channels_of_any_size,
    workspace_after,
)

from . import Fault, device, emulated
from .calls import (
    DELAYS,
    FEW_HEADS,
    IGNORED,
    SMS,
    call,
    compare,
    decaying,
    judge,
    largest_head_error,
    sample,
)

pytestmark = needs_compiler


@pytest.fixture
def path(request):
    """The path that every prefill of the test takes, with few CTAs: gpu.prefill_path."""
    with prefill_path(request.param, sms=3 if request.param in PERSISTENT else SMS):
        yield request.param


BUFFERED_CASES = [
    *(
        case
        for axis, layout in itertools.product(FEW_HEADS, BUFFERED)
        for case in sample("decode", 1, axis=(axis,), D=(128,), layout=(layout,))
    ),
    *(
        case
        for axis in FEW_HEADS
        for case in sample("decode", 1, axis=(axis,), D=(64,), layout=BUFFERED)
    ),
    *sample("decode", 1, axis=("head",), norm=ACTIVATIONS, layout=BUFFERED),
]


@pytest.mark.parametrize(
    "case",
    [*(case for op in ("decode", "verify", "flush") for case in sample(op, 6)), *BUFFERED_CASES],
    ids=str,
)
def test_the_case_list_passes(case, kernels):
    judge(case, kernels)


COUNTS = {
    torch.int32: (2**31 - 1, 4, 3, 2, 1, 0, -1, -(2**31)),
    torch.int64: (2**63 - 1, 2**32 + 2, 2**31, 3, 2, 1, 0, -1, -(2**32), -(2**32) + 2, -(2**63)),
}


@pytest.mark.parametrize("dtype", COUNTS, ids=str)
def test_counts_of_any_size_are_clamped(dtype, kernels):
    """Counts beyond 32 bits too: num_accepted of decode's [N, W] slots and of flush."""
    counts, T = torch.tensor(COUNTS[dtype], dtype=dtype), 3
    N, rng = len(counts), torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(N, T, *shape, generator=rng).bfloat16()
    tokens = {name: normal(1, 32) for name in "qkv"}
    tokens |= dict(g=-normal(1).abs(), beta=normal(1).abs())
    pool, slots = torch.randn(T * N, 1, 32, 32, generator=rng), torch.arange(T * N).view(N, T)
    results = []
    buffer = gd.KVBuffer.empty(N, T, 1, 1, 32, 32)
    gd.verify(**tokens, state=pool, buffer=buffer)
    for backend, run in (("reference", contextlib.nullcontext()), ("cute", emulated(kernels))):
        decoded, flushed = pool.clone(), pool.clone()
        with run:
            accepted = dict(state_indices=slots, num_accepted=counts)
            o = gd.decode(**tokens, state=decoded, **accepted, backend=backend)
            gd.flush(flushed, buffer, counts, backend=backend)
        results.append((o, decoded, flushed))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_verify_skips_a_row_without_room(kernels):
    rng = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(2, *shape, generator=rng)
    tokens = {name: normal(2, 1, 32).bfloat16() for name in "qkv"}
    tokens |= dict(g=-normal(2, 1).abs(), beta=normal(2, 1).sigmoid())
    rows = gd.KVBuffer(normal(4, 1, 32), normal(4, 1, 32), -normal(4, 1).abs())
    before, states = [x.clone() for x in vars(rows).values()], normal(1, 32, 32)

    def verify(n, buffer, backend):
        lens = torch.tensor([2, 3])[n]
        mine = {name: x[n] for name, x in tokens.items()}
        call = dict(state=states[n], buffer=buffer, buffer_lens=lens, backend=backend)
        return gd.verify(**mine, **call)

    with emulated(kernels):
        o = verify(slice(2), rows, "cute")
    alone = gd.KVBuffer(*(x[:1].clone() for x in before))
    want = verify(slice(1), alone, "reference")
    assert relative_error(o[:1].double(), want) <= 3e-3
    assert not o[1].any()
    for x, y, was in zip(vars(rows).values(), vars(alone).values(), before, strict=True):
        assert relative_error(x[:1].double(), y) <= 3e-3
        assert torch.equal(x[1], was[1])
        assert torch.equal(x[0, :2], was[0, :2])


@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("T", [1, 2])
def test_decode_with_a_buffer_has_the_bits_of_each_alone(T, axis, kernels):
    """At several lens; alone, two tokens packed: three calls, which append twice, then fold."""
    rng = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(3, 3 * T, *shape, generator=rng).bfloat16()
    tokens = {name: normal(1, 32) for name in "qkv"}
    tokens |= dict(g=-normal(1, *[32] * (axis == "channel")).abs(), beta=normal(1).sigmoid())
    pool, filled = torch.randn(3, 1, 32, 32, generator=rng).bfloat16(), [0, 2 * T, 1]
    rows = gd.KVBuffer.empty(3, 2 * T, 1, 1, 32, 32, gate=axis)
    for x, factor in zip(vars(rows).values(), (1.0, 0.2, -0.1), strict=True):
        x.copy_(torch.rand(x.shape, generator=rng) * factor)

    def three_calls(n, backend="cute", **options):
        state, lens = pool[n].clone(), torch.tensor(filled[n])
        parts = gd.KVBuffer(*(x[n].clone() for x in vars(rows).values()))
        outputs = []
        for i in range(3):
            mine = {name: x[n, i * T : i * T + T] for name, x in tokens.items()}
            rest = dict(buffer=parts, buffer_lens=lens, backend=backend)
            outputs.append(gd.decode(**mine, state=state, **rest, **options))
            parts.advance(lens, T)
        return torch.cat(outputs, 1), state, *vars(parts).values()

    want = three_calls(slice(3), "reference")
    with emulated(kernels):
        batch = three_calls(slice(3))
        packed = dict(cu_seqlens=torch.tensor([0, T])) if T > 1 else {}
        alone = [three_calls(slice(n, n + 1), **packed) for n in range(3)]
    for x, y, *parts in zip(batch, want, *alone, strict=True):
        assert relative_error(x.double(), y) <= 3e-3
        assert torch.equal(x, torch.cat(parts))
    assert torch.equal(batch[1] == pool, want[1] == pool)


@pytest.mark.parametrize("axis", FEW_HEADS)
def test_a_rollout_is_replayed_bit_for_bit(axis, kernels):
    """Sampled token by token in a batch; replayed in others and in pieces, padded or packed."""
    rng = torch.Generator().manual_seed(2)

    def tokens(T):
        normal = lambda *shape: torch.randn(1, T, 1, *shape, generator=rng).bfloat16()
        g = -normal(*[64] * (axis == "channel")).abs()
        return {name: normal(64) for name in "qkv"} | dict(g=g, beta=normal().sigmoid())

    prompts, answers = [tokens(66), tokens(3)], [tokens(3), tokens(5)]

    def run(order, piece, **options):
        state = torch.full((3, 1, 64, 64), torch.nan, dtype=torch.bfloat16)
        given = [[x[n] for n in order] for x in (prompts, answers)]
        return rollout(*given, state, lambda: piece, backend="cute", **options), state

    with emulated(kernels):
        o, state = run((0, 1), 1, dense=True)
        padded, _ = run((1, 0), 16, dense=True)
        (alone,), its_state = run((1,), 4)
    for x, n in ((padded[1], 0), (padded[0], 1), (alone, 1)):
        assert torch.equal(x, o[n])
    assert torch.equal(its_state[1], state[2])


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_of_outputs_beyond_fp16_is_finite(op, kernels):
    """One sequence's o is 480000, inf in fp16; the other's is small."""
    q = torch.zeros(2, 1, 1, 128, dtype=torch.float16)
    q[..., 0] = 1
    v = torch.tensor([60000.0, 3.0]).half().view(2, 1, 1, 1).expand(2, 1, 2, 128).contiguous()
    call = dict(
        q=q,
        k=q.clone(),
        v=v,
        g=torch.zeros(2, 1, 2),
        beta=torch.ones(2, 1, 2),
        scale=8.0,
        qk_l2norm=False,
    )
    call |= dict(
        state=torch.zeros(2, 2, 128, 128), norm=gd.GatedNorm(torch.ones(128)), z=torch.ones_like(v)
    )
    call |= dict(buffer=gd.KVBuffer.empty(2, 1, 1, 2, 128, 128)) if op == "verify" else {}
    with emulated(kernels):
        o = getattr(gd, op)(**call, backend="cute")
    torch.testing.assert_close(
        o.float(), torch.nn.functional.silu(torch.ones_like(o).float()), rtol=1e-3, atol=0
    )


PATHS_OF_BETA = (("tiles", "channel"), ("fused", "head"))
"""Two of prefill's ways to load beta, which share its activation, and their axes."""


def with_doubled_betas(axis, T):
    """Logits of 100 and -100, then small ones, and NaN in the last token."""
    one = call(axis, T) | dict(beta_logits=True, allow_neg_eigval=True)
    logits = 4 * one["beta"] - 2
    logits[:, 0], logits[:, 1], logits[:, -1] = 100, -100, torch.nan
    return one | dict(beta=logits)


def check_doubled(o, want):
    assert o[:, -1].isnan().all()
    assert relative_error(o[:, :-1].double(), want[:, :-1]) <= 3e-3


@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("op", ["decode", "verify"])
def test_allow_neg_eigval_doubles_the_sigmoid(op, axis, kernels):
    one, (H, HV) = with_doubled_betas(axis, 4), FEW_HEADS[axis]
    del one["output_final_state"]
    state = torch.randn(1, HV, 128, 128, generator=torch.Generator().manual_seed(0))
    rows = gd.KVBuffer.empty(1, 4, H, HV, 128, 128, gate=axis)
    one |= dict(buffer=rows) if op == "verify" else {}
    want = getattr(gd, op)(**one, state=state.clone(), backend="reference")
    with emulated(kernels):
        check_doubled(getattr(gd, op)(**one, state=state, backend="cute"), want)


@pytest.mark.parametrize(("path", "axis"), PATHS_OF_BETA, indirect=["path"])
def test_allow_neg_eigval_in_prefill(path, axis, kernels):
    one = with_doubled_betas(axis, 65)
    want, _ = gd.prefill(**one, backend="reference")
    with emulated(kernels):
        check_doubled(gd.prefill(**one, backend="cute")[0], want)


COMMON = dict(D=(128,), dtype=(torch.bfloat16,), deterministic=(False,))
PATHS_AND_AXES = [
    ("tiles", "head"),
    ("tiles", "channel"),
    ("fused", "head"),
    ("raw", "channel"),
    ("raw overlapped", "channel"),
    ("overlapped", "head"),
    ("overlapped", "channel"),
    (4, "head"),
    (4, "channel"),
]
"""Without those that have no kernels and take tiles."""
PREFILLS = [
    # Passing states on takes the emulator seconds per head and sequence.
    (path, replace(case, heads=(1, 1)) if path == 4 else case)
    for path, axis in PATHS_AND_AXES
    for case in sample("prefill", 1, axis=(axis,), **COMMON)
]
PREFILLS += [
    ("raw", case)
    for case in sample(
        "prefill", 3, axis=("channel",), g_dtype=(torch.bfloat16, torch.float16), **COMMON
    )
]
PREFILLS += [(path, case) for path in ("tiles", 4) for case in sample("prefill", 1, D=(64,))]
PREFILLS += [
    (path, case)
    for path in ("tiles", "overlapped")
    for case in sample("prefill", 1, D=(128,), deterministic=(True,))
]


@pytest.mark.parametrize(("path", "case"), PREFILLS, ids=str, indirect=["path"])
def test_prefill_passes_on_every_path(path, case, kernels):
    judge(case, kernels)


HARD = dict(keys=("collinear",), family=("none",), **COMMON)
COLLINEAR = [("fused", case) for case in sample("prefill", 2, axis=("head",), **HARD)]
COLLINEAR += [
    ("raw", case)
    for case in sample("prefill", 2, axis=("channel",), g_dtype=(torch.bfloat16,), **HARD)
]


@pytest.mark.parametrize(("path", "case"), COLLINEAR, ids=str, indirect=["path"])
def test_collinear_keys_pass_with_fp16_accumulators(path, case, kernels):
    """Their inverse is the hardest: K K^T accumulated in fp16 would fail."""
    judge(case, kernels)


@pytest.mark.parametrize("path", ["tiles", "fused", "raw"], indirect=True)
@pytest.mark.parametrize(("power", "zeros"), [(-100, 0), (-14, 70), (100, 70)])
def test_values_of_any_size(path, power, zeros, kernels):
    """A state of zeros has no scale: the first values that are not 0 set it, in any chunk."""
    one, size = call("channel" if path == "raw" else "head", 140), 2.0**power
    one["v"][:, :zeros] = 0
    want = gd.prefill(**one, backend="reference")
    one["v"] = one["v"] * size
    with emulated(kernels):
        results = gd.prefill(**one, backend="cute")
    for x, y in zip(results, want, strict=True):
        assert relative_error(x.double() / size, y) <= 3e-3


@pytest.mark.parametrize("path", ["tiles", "raw", "raw overlapped", "overlapped", 4], indirect=True)
def test_rows_without_tokens_are_zeros_or_not_read(path, kernels):
    """One to four sub-chunks of a chunk have tokens. KDA leaves poison in the workspace's rest."""
    lengths = (1, 81, 108) if path == 4 else (1, 80, 81, 60, 108)
    compare(call("channel", sum(lengths), lengths), kernels)


@pytest.mark.parametrize(
    ("path", "sms"), [("raw", 1), ("raw", 4), *(("raw overlapped", sms) for sms in (1, 2, 4))]
)
def test_warpgroups_take_several_chunks(path, sms, kernels):
    """Three per SM; overlapped, later rounds only on SMs without a scan. One sequence per lane."""
    with prefill_path(path, sms):
        for lengths in ((0, 330, 0, 64, 296), (*[3, 0, 1, 0, 65] * 5, 9, 0, 130, 0, 70, 0, 64)):
            compare(call("channel", sum(lengths), lengths), kernels)


@pytest.mark.parametrize(("axis", "heads", "sms"), [("channel", 2, 8), ("head", 1, 4)])
def test_prepare_waits_for_scans_that_are_far_behind(axis, heads, sms, kernels):
    """24 chunks per head for 12 warpgroups; KDA's prepare during four scans and before them."""
    with prefill_path("overlapped", sms):
        compare(call(axis, 1500, heads=(heads, heads)), kernels)


@pytest.mark.parametrize(
    ("path", "axis"), [x for x in PATHS_AND_AXES if x[0] != "fused"], indirect=["path"]
)
def test_packed_sequences_of_whole_chunks_fill_the_workspace(axis, path, kernels):
    """No chunk is to spare then."""
    compare(call(axis, 192, (0, 128, 0, 64, 0), heads=(1, 1)), kernels)


@pytest.mark.parametrize(
    ("path", "HV", "ctas"), [("tiles", 4, (1, 2, 4)), ("tiles", 6, (1, 2)), (4, 2, (1, 2))]
)
def test_bits_do_not_depend_on_the_cta_of_a_value_head(path, HV, ctas, kernels):
    """The more SMs, the more CTAs of prepare share a k head's value heads."""
    one, results = call("head", 100, heads=(1, HV)), []
    for count in ctas:
        assert host.prepare_heads(1, HV, 2, TILES, sms=count) == HV // count
        with prefill_path(path, count), emulated(kernels):
            results.append(gd.prefill(**one, backend="cute"))
    want = gd.prefill(**one, backend="reference")
    for o, state in results:
        assert torch.equal(o, results[0][0])
        assert torch.equal(state, results[0][1])
        assert relative_error(o.double(), want[0]) <= 3e-3


@pytest.mark.parametrize(("path", "axis"), PATHS_AND_AXES[:5], indirect=["path"])
def test_bits_do_not_depend_on_the_order_of_events(axis, path, kernels):
    """The order of warps, and the end of asynchronous copies."""
    one, results = call(axis, 330, (200, 0, 130)), []
    for seed, delay in enumerate(DELAYS):
        with emulated(kernels, seed, delay):
            results.append(gd.prefill(**one, backend="cute"))
    for o, state in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(state, results[0][1])


@pytest.mark.parametrize("path", ["tiles", "raw"], indirect=True)
@pytest.mark.parametrize("logs", [(-5.0, -5.0625), (-24.0, -88.0)])
@pytest.mark.parametrize("every", [1, 3])
def test_diagonal_blocks_of_any_decays(path, logs, every, kernels):
    """Above and below the decays that split a sub-chunk, or count as 0. Keys of all sizes."""
    one = with_channels_of_any_size(decaying("channel", 100, logs))
    strong = (torch.arange(100) % every == 0)[None, :, None, None]
    one["g"] = torch.where(strong, one["g"], -0.01)
    compare(one, kernels)


@pytest.mark.parametrize("path", ["tiles", "raw"], indirect=True)
@pytest.mark.parametrize("bound", [-1e30, -88.0, -1e-45])
def test_a_gate_with_any_bound(path, bound, kernels):
    """prepare and a scan that repeats its sums clamp decays alike."""
    one = call("channel", 100)
    one |= dict(
        g=60 * one["g"], gate=gd.Gate.lower_bound(torch.zeros(1), torch.full((1, 128), -4.0), bound)
    )
    compare(one, kernels)


# ---------------------------------------------------------------------- repeated tokens, sizes, NaN


@pytest.mark.parametrize("path", ["tiles", "fused", "raw"], indirect=True)
def test_repeated_tokens_do_not_add_up_their_rounding(path, kernels):
    """One key and one beta per head, equal or random values: 0.021 if Tinv is rounded last."""
    axis = "channel" if path == "raw" else "head"
    one, T = call(axis, 64, heads=(4, 4)), 64
    one["k"], one["v"][:, :, :2] = (
        one["k"][:, :1].expand_as(one["k"]).contiguous(),
        one["v"][:, :1, :2].clone(),
    )
    one |= dict(g=torch.zeros_like(one["g"]), gate=gd.Gate.log())
    one["beta"] = torch.tensor([0.7, 0.98, 0.7, 0.98]).expand(1, T, 4).contiguous()
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels):
        results = gd.prefill(**one, backend="cute")
    assert largest_head_error(results[0].double(), want[0], 2) <= 5e-3
    assert largest_head_error(results[1], want[1], 1) <= 5e-3


@pytest.mark.parametrize("path", ["tiles", "fused", "raw", "overlapped"], indirect=True)
def test_states_far_larger_than_values_that_gates_wipe_out(path, kernels):
    """In the first or second chunk, in one token or several; one head keeps its state."""
    axis = "channel" if path == "raw" else "head"
    one, T = call(axis, 80, heads=(4, 4)), 80
    log = torch.full((T, 4), -1e-3)
    log[:, 0], log[20, 1], log[70, 2] = -5.0, -30.0, -30.0
    g = log[None] if axis == "head" else log[None, :, :, None].expand(1, T, 4, 128)
    one |= dict(g=g.to(one["g"].dtype).contiguous(), gate=gd.Gate.log())
    start = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(0)) * 2.0**20
    want = gd.prefill(**one, initial_state=start, backend="reference")
    with emulated(kernels):
        results = gd.prefill(**one, initial_state=start, backend="cute")
    assert largest_head_error(results[0].double(), want[0], 2) <= 3e-3
    assert largest_head_error(results[1], want[1], 1) <= 2.5e-3


@pytest.mark.parametrize("path", ["tiles", "fused", "raw", "overlapped", 4], indirect=True)
def test_a_nan_reaches_no_chunk_before_its_own(path, kernels):
    axis = "channel" if path == "raw" else "head"
    results = []
    for names in ((), ("g",), ("q", "k", "v", "beta")):
        one = call(axis, 100, heads=(1, 1))
        for name in names:
            one[name][:, 80] = torch.nan
        with emulated(kernels):
            results.append(gd.prefill(**one, backend="cute")[0])
    assert results[0].isfinite().all()
    for o in results[1:]:
        assert torch.equal(results[0][:, :64], o[:, :64])
        assert o[:, 80:].isnan().all()


# ----------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("path", [4], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize(
    ("logs", "windows"), [((-1.4, -0.7), (1, 2)), ((-1e-3, -0.7), (0, 2))], ids=str
)
def test_segments_begin_from_zeros_where_a_head_forgets(
    path, axis, logs, windows, kernels, monkeypatch
):
    """A NaN in the initial state reaches nothing else. KDA's windows may be a chunk longer."""
    T, chunks = 9 * 64 + 10, 3
    one, start = decaying(axis, T, logs), torch.randn(1, 2, 128, 128)
    want = gd.prefill(**one, initial_state=start, backend="reference")
    start[:, :, 5] = torch.nan
    results = []

    def run():
        results[:] = gd.prefill(**one, initial_state=start, backend="cute")
        return results[0]

    with emulated(kernels):
        actual = windows_of_segments(run, 4, monkeypatch)[0]
    for head, window in enumerate(windows):
        longest = window + (axis == "channel" and window > 0)
        assert all(window <= x <= longest for x in actual[head]), actual
        reached = results[0][0, :, head].isnan().any(1)
        assert reached.nonzero().max() < (chunks * 64 if window else T)
        assert window or reached[-1]
        assert bool(results[1][0, head].isnan().any()) == (window == 0)
        rows = slice(16, None)  # the NaN's warp has the first 16
        assert relative_error(results[0][:, :, head, rows], want[0][:, :, head, rows]) <= 3e-3
        assert relative_error(results[1][:, head, rows], want[1][:, head, rows]) <= 2e-3
        if window:
            later = (slice(None), slice(chunks * 64, None), head)
            assert relative_error(results[0][later], want[0][later]) <= 3e-3


@pytest.mark.parametrize("path", [4], indirect=True)
@pytest.mark.parametrize(("axis", "forgetful"), [("head", 0), ("channel", 1), ("head", 2)])
def test_states_are_passed_on_around_a_segment_that_forgets(axis, forgetful, path, kernels):
    """Four segments of two chunks: states pass from the first, from a window, or not at all."""
    T = 8 * 64
    one, start = decaying(axis, T, (-1e-3, -1e-3)), torch.randn(1, 2, 128, 128)
    one["g"][:, forgetful * 128 : (forgetful + 1) * 128, 1] = -1.4
    want = gd.prefill(**one, initial_state=start, backend="reference")
    with emulated(kernels):
        results = gd.prefill(**one, initial_state=start, backend="cute")
    for head in range(2):
        assert relative_error(results[0][:, :, head], want[0][:, :, head]) <= 3e-3
        assert relative_error(results[1][:, head], want[1][:, head]) <= 2e-3


@pytest.mark.parametrize("path", [4], indirect=True)
def test_windows_are_longer_than_short_segments(path, kernels, monkeypatch):
    """Before the second segment is one chunk, too short for a head to forget its state."""
    one, results = decaying("head", 4 * 64, (-1.4, -0.7)), []
    start = torch.full((1, 2, 128, 128), torch.nan)

    def run():
        results[:] = gd.prefill(**one, initial_state=start, backend="cute")
        return results[0]

    with emulated(kernels):
        assert windows_of_segments(run, 4, monkeypatch).tolist() == [[[1, 1, 1], [0, 2, 2]]]
    want = gd.prefill(**one, initial_state=torch.zeros_like(start), backend="reference")
    for head, chunks in ((0, 1), (1, 2)):
        assert results[0][:, : chunks * 64, head].isnan().all()
        later = (slice(None), slice(chunks * 64, None), head)
        assert relative_error(results[0][later], want[0][later]) <= 3e-3
        assert relative_error(results[1][:, head], want[1][:, head]) <= 2e-3


@pytest.mark.parametrize("path", [4], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
def test_segments_of_packed_sequences_in_a_pool(path, axis, kernels):
    """One head forgets, the other does not. Sequences: empty, inactive, shorter than a segment.

    Checkpoints lie in windows, before segments and at the end; final states overwrite initial ones.
    """
    lengths = (5 * 64 + 10, 0, 70, 40, 4 * 64)
    one = decaying(axis, sum(lengths) + 3, (-1.4, -1e-3), lengths)
    slots = torch.tensor([4, 0, -1, 1, 3])
    lens = torch.tensor([[64, 128, 320], [0, -1, -1], [64, -1, -1], [0, -1, -1], [64, 192, 256]])
    before = torch.randn(6, 2, 128, 128)
    del one["output_final_state"]

    def run(backend):
        state, checkpoints = before.clone(), torch.zeros(5, 3, 2, 128, 128)
        o, _ = gd.prefill(
            **one,
            state=state,
            state_indices=slots,
            checkpoint_lens=lens,
            checkpoints=checkpoints,
            backend=backend,
        )
        return o, state, checkpoints

    with emulated(kernels, delay=DELAYS[-1]):
        results = run("cute")
    for x, y, dim in zip(results, run("reference"), (2, 1, 2), strict=True):
        for head in range(2):
            assert relative_error(x.select(dim, head), y.select(dim, head)) <= 3e-3


def transition(one, head, chunk):
    """A chunk's transition M by definition, in float64: the image of the identity."""
    M, tokens = torch.eye(128, dtype=torch.float64), slice(chunk * 64, chunk * 64 + 64)
    k, log, beta = (
        one[name][0, tokens, min(head, one[name].shape[2] - 1)].double()
        for name in ("k", "g", "beta")
    )
    if one.get("qk_l2norm", True):
        k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
    for t in range(64):
        M = M * log[t].exp()
        M = M - beta[t] * (M @ k[t])[:, None] * k[t]
    return M


def stored_transition(regions, heads, head, chunk):
    """KDA: a chunk's M from the tiles in the workspace, as the scan computes it."""
    from gated_delta.kernels.prefill.layout import (
        KDA_SCALE_S_K,
        KDA_SCALE_STATE,
        TILE,
        triangle_offset,
    )

    def numbers(region, start, offset_of, columns):
        matrix = torch.zeros(64, columns, dtype=torch.float64)
        for row, vector in itertools.product(range(64), range(columns // 8)):
            if columns == 128 or vector // 2 <= row // 16:
                offset = start + offset_of(row, vector)
                halves = regions[region][offset : offset + 16].view(torch.float16)
                matrix[row, 8 * vector : 8 * vector + 8] = halves.double()
        return matrix

    number = chunk * heads + head
    k_decayed, k_restored = (
        numbers(name, number * TILE_BYTES, TILE.offset, 128) for name in ("k_tiles", "k_restored")
    )
    tinv = numbers("tinv_aqk", number * 2 * TRIANGLE_BYTES, triangle_offset, 64)
    scales = regions["scales"][number * SCALE_BYTES :][:SCALE_BYTES].view(torch.float32).double()
    norms, decays = scales[KDA_SCALE_S_K // 4 :][:64], scales[KDA_SCALE_STATE // 4 :][:128]
    return torch.diag(decays) - (k_decayed * norms[:, None]).T @ tinv.T @ k_restored


KINDS = (
    "random",
    "fast",
    "uneven",
    "collinear",
    "collinear and reflecting",
    "long keys",
    "moved to another channel",
)


@pytest.mark.parametrize("path", [2], indirect=True)
@pytest.mark.parametrize(
    ("axis", "kind"), [*(("channel", kind) for kind in KINDS), *(("head", x) for x in KINDS[::3])]
)
def test_no_transition_is_larger_than_its_bound(path, axis, kind, kernels, monkeypatch):
    """|M| in float64. KDA's decayed keys and Tinv are fp16: parts of M below 2**-24 are lost."""
    one, rng = decaying(axis, 128, (-0.05, -0.2)), torch.Generator().manual_seed(0)
    if kind == "random":
        one["g"] = one["g"] * torch.rand(one["g"].shape, generator=rng)
    elif kind == "fast":
        one["g"] = one["g"] * 10
    elif kind == "uneven":
        one["g"] = one["g"] * torch.randint(0, 2, one["g"].shape, generator=rng) * 60
    elif "collinear" in kind:
        one["k"] = one["k"][:, :1] + 0.02 * one["k"]
        one["g"] = one["g"] * 1e-2
        one["beta"] = torch.full_like(one["beta"], 2 if "reflecting" in kind else 1)
    elif kind == "long keys":
        one |= dict(
            k=torch.nn.functional.normalize(one["k"].float(), dim=-1).mul(2).bfloat16(),
            qk_l2norm=False,
        )
        one |= dict(beta=torch.full_like(one["beta"], 1.5))
    elif kind == "moved to another channel":
        one["g"], one["beta"] = torch.zeros_like(one["g"]), torch.zeros_like(one["beta"])
        one["g"][:, 10::64, :, ...], one["beta"][:, 20::64] = -88.0, 2
        if axis == "channel":
            one["g"][:, 10::64, :, 64:], one["g"][:, 30::64, :, 64:] = 0, -88.0
        one["k"][:, 20::64] = 0
        one["k"][:, 20::64, :, 3], one["k"][:, 20::64, :, 70] = 1, -1
    with emulated(kernels):
        o, regions = workspace_after(lambda: gd.prefill(**one, backend="cute")[0], monkeypatch)
    bounds = transition_norms(o, regions)[0].double()
    for head, chunk in itertools.product(range(2), range(2)):
        exact, bound = (
            torch.linalg.matrix_norm(transition(one, head, chunk), 2),
            bounds[head, chunk],
        )
        assert bound * (1 + 2.0**-20) >= exact - (2.0**-20 if axis == "channel" else 2.0**-126)
        if axis == "channel":
            assert bound >= torch.linalg.matrix_norm(stored_transition(regions, 2, head, chunk), 2)
        if kind == "fast":
            assert bound <= 2.0**-30
        if kind == "moved to another channel":
            assert (bound > 0.1) == (axis == "channel")


@pytest.mark.parametrize("path", [2], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "token"), [("k", 0), ("beta", 63)])
def test_a_chunk_with_nan_or_inf_forgets_nothing(
    path, axis, value, name, token, kernels, monkeypatch
):
    one = decaying(axis, 64, (-20.0, -20.0))
    one[name][0, token, 0, ...] = value
    with emulated(kernels):
        bounds = transition_norms(
            *workspace_after(lambda: gd.prefill(**one, backend="cute")[0], monkeypatch)
        )
    assert not (bounds[0, 0] <= 2.0**-120).any()
    assert (bounds[0, 1] <= 2.0**-120).all() or (name == "k" and axis == "head")


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("fused", "fence_proxy", "no fence.proxy.async"),
        ("fused", "cp_async_bulk_wait_group", "overwrites the source"),
        ("fused", "mbarrier_init", "no mbarrier"),
        ("tiles", "sync_threads", "no barrier between"),
        ("fused", "barrier", "no barrier between"),
        ("raw", "fence_proxy", "no fence.proxy.async"),
        ("raw", "mbarrier_init", "no mbarrier"),
    ],
    indirect=["path"],
)
def test_a_missing_instruction_is_a_fault(path, name, message, tmp_path):
    with (
        mock.patch(f"cutlass.cute.arch.{name}", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call("channel" if path == "raw" else "head", 140), backend="cute")


@pytest.mark.parametrize("kernel", ["prefill_overlapped", "prefill_prepare_raw"])
def test_counters_release_stores_to_bulk_copies_too(kernel, kernels):
    """A fence between the proxies stands in front of each increment."""
    kernels.mkdir(parents=True, exist_ok=True)
    for variant in {x.label[:40]: x for x in dispatch.shipped() if x.kernel == kernel}.values():
        code = device.build(variant, "sm_90a", kernels).with_suffix(".ptx").read_text()
        *before, _ = code.split("red.release.gpu")
        assert before
        for part in before:
            assert "fence.proxy.async.global" in part[-200:]


@pytest.mark.parametrize("path", ["tiles", 4], indirect=True)
def test_a_scan_that_does_not_wait_for_prepare_is_a_fault(path, axis, tmp_path):
    message = "the previous kernel's results before griddepcontrol.wait"
    with (
        mock.patch("gated_delta.kernels.device.hopper.wait_for_previous_kernel", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call(axis, 140), backend="cute")


@pytest.mark.parametrize("path", ["raw overlapped"], indirect=True)
def test_a_scan_that_does_not_wait_for_a_chunk_is_a_fault(path, tmp_path):
    from gated_delta.kernels.prefill.scan_raw import PrefillScanRaw

    message = "the previous kernel's results before griddepcontrol.wait"
    with (
        mock.patch.object(PrefillScanRaw, "wait_until_prepared", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call("channel", 140), backend="cute")


@pytest.mark.parametrize("path", ["raw"], indirect=True)
def test_decay_warps_without_their_wait_are_a_fault(path, tmp_path):
    """They take an earlier phase of the copies' mbarrier for their own."""
    from gated_delta.kernels.prefill.scan_raw import PrefillScanRaw

    with (
        mock.patch.object(PrefillScanRaw, "wait_until_empty", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault),
    ):
        gd.prefill(**call("channel", 500), backend="cute")


def clearing(part):
    """A class that loads the next sequence's rows by TMA, its method that clears them, its axis."""
    from gated_delta.kernels.prefill.fused import PrefillFused
    from gated_delta.kernels.prefill.scan_raw import PrefillScanRaw
    from gated_delta.kernels.prefill.terms.kda_inputs import RawInputs

    return {
        "fused": (PrefillFused, "clear_rows", "head"),
        "prepare": (RawInputs, "clear_tokens", "channel"),
        "scan": (PrefillScanRaw, "clear_tokens", "channel"),
    }[part]


@pytest.mark.parametrize(("cleared", "names"), [(True, "qkg"), (False, "qk"), (False, "g")])
@pytest.mark.parametrize(
    ("path", "part"), [("fused", "fused"), ("raw", "prepare"), ("raw", "scan")], indirect=["path"]
)
def test_rows_of_the_next_sequence_must_be_cleared(path, part, names, cleared, tmp_path):
    kernel, method, axis = clearing(part)
    one = call(axis, 140, (70, 70))
    for tensor in names:
        one[tensor][:, 70:] = torch.nan
    want = gd.prefill(**one, backend="reference")
    with contextlib.ExitStack() as stack:
        if not cleared:
            stack.enter_context(mock.patch.object(kernel, method, IGNORED))
        stack.enter_context(emulated(tmp_path))
        results = gd.prefill(**one, backend="cute")
    reached = not cleared and (names == "qk" or axis == "channel")
    assert (relative_error(results[1][:1], want[1][:1]) <= 3e-3) != reached
    assert reached or not results[0][:, :70].isnan().any()


def test_memory_of_no_argument_is_a_fault(kernels, monkeypatch):
    """The last element of each tensor is out of bounds."""
    monkeypatch.setattr(device, "extent", lambda x: extent(x) - x.element_size())
    tiles = prefill_path("tiles", SMS)
    with tiles, emulated(kernels), pytest.raises(Fault, match="out of bounds"):
        gd.prefill(**call("head", 64), backend="cute")
