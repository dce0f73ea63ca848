"""The kernels without a GPU, by the emulator: the case list with fewer heads, values of any size, and faults it has to find."""

import contextlib
import itertools
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.kernels.arguments import SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from gated_delta.memory import extent
from gated_delta.ops import OPERATIONS
from gated_delta.ops import prefill as on_host
from gated_delta.testing import cases, run_case
from gpu import (
    force_segments,
    relative_error,
    transition_norms,
    windows_of_segments,
    with_channels_of_any_size,
    workspace_after,
)
from test_compile import needs_compiler

from . import Fault, device, emulated

pytestmark = needs_compiler

CUTS = (1, "persistent", "fused", "raw", "raw overlapped", "overlapped", 3, "joined")
DELAYS = (0.5, 0.0, 0.97)
SMS = 6
FEW_HEADS = {"head": (1, 2), "channel": (1, 1)}


@pytest.fixture
def kernels(run_directory):
    return run_directory / "emulated"


@pytest.fixture
def cut(request, monkeypatch):
    """As force_segments has it, with few blocks, since each is emulated."""
    monkeypatch.setattr(on_host, "sms_of", lambda _: SMS)
    monkeypatch.setattr(on_host, "MAX_PREPARE_BLOCKS", 44)
    force_segments(request.param, monkeypatch)
    return request.param


def sample(op, count, **wanted):
    """Cases that the kernels run, with few heads."""
    possible = [
        case
        for case in cases(op)
        if not case.reference_only and not OPERATIONS[op].missing(case.problem)
    ]
    possible = [
        case
        for case in possible
        if all(getattr(case, name) in values for name, values in wanted.items())
    ]
    return [
        replace(case, heads=FEW_HEADS[case.axis])
        for case in random.Random(0).sample(possible, count)
    ]


def judged(case, kernels):
    seed = case.seed
    with emulated(kernels, seed, DELAYS[seed % len(DELAYS)]):
        result = run_case(case, "cute")
    assert result.passed, result.failures


@pytest.mark.parametrize(
    "case", [case for op in ("decode", "verify", "flush") for case in sample(op, 6)], ids=str
)
def test_the_case_list_passes(case, kernels):
    judged(case, kernels)


COUNTS = {
    torch.int32: (2**31 - 1, 4, 3, 2, 1, 0, -1, -(2**31)),
    torch.int64: (2**63 - 1, 2**32 + 2, 2**31, 3, 2, 1, 0, -1, -(2**32), -(2**32) + 2, -(2**63)),
}


@pytest.mark.parametrize("dtype", COUNTS, ids=str)
def test_counts_of_any_size_are_clamped(dtype, kernels):
    """Whatever the low word of a count says: num_accepted of decode's [N, W] slots and of flush."""
    counts, T = torch.tensor(COUNTS[dtype], dtype=dtype), 3
    N, rng = len(counts), torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(N, T, *shape, generator=rng).bfloat16()
    tokens = {name: made(1, 32) for name in "qkv"} | dict(g=-made(1).abs(), beta=made(1).abs())
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


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_of_outputs_beyond_fp16_is_finite(op, kernels):
    """o of 480000, which fp16 would round to inf, and an ordinary one beside it."""
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


COMMON = dict(D=(128,), dtype=(torch.bfloat16,), deterministic=(False,))
PREFILLS = [
    (cut, case)
    for cut in CUTS
    for axis in FEW_HEADS
    for case in sample("prefill", 1, axis=(axis,), **COMMON)
]
PREFILLS += [
    ("raw", case)
    for case in sample(
        "prefill", 3, axis=("channel",), g_dtype=(torch.bfloat16, torch.float16), **COMMON
    )
]
PREFILLS += [(cut, case) for cut in (1, "persistent", 3) for case in sample("prefill", 1, D=(64,))]
PREFILLS += [
    (cut, case)
    for cut in (1, "overlapped")
    for case in sample("prefill", 1, D=(128,), deterministic=(True,))
]


@pytest.mark.parametrize(("cut", "case"), PREFILLS, ids=str, indirect=["cut"])
def test_prefill_passes_in_every_cut(cut, case, kernels):
    judged(case, kernels)


HARD = dict(keys=("collinear",), family=("none",), **COMMON)
COLLINEAR = [("fused", case) for case in sample("prefill", 2, axis=("head",), **HARD)]
COLLINEAR += [
    ("raw", case)
    for case in sample("prefill", 2, axis=("channel",), g_dtype=(torch.bfloat16,), **HARD)
]


@pytest.mark.parametrize(("cut", "case"), COLLINEAR, ids=str, indirect=["cut"])
def test_collinear_keys_pass_with_fp16_sums(cut, case, kernels):
    """Whose inverse is the hardest: fp16 sums of K K^T would not do."""
    judged(case, kernels)


def call(axis, T, lengths=None, heads=None):
    """Raw inputs of two value heads, KDA: one."""
    generator, (H, HV) = torch.Generator().manual_seed(T), heads or FEW_HEADS[axis]
    made = lambda *shape: torch.randn(1, T, *shape, 128, generator=generator).bfloat16()
    q, k, v = made(H), made(H), made(HV)
    g = made(HV) if axis == "channel" else made(HV)[..., 0]
    beta, A_log = torch.rand(1, T, HV, generator=generator), torch.zeros(HV)
    bias = torch.full((HV, 128) if axis == "channel" else (HV,), -4.0)
    found = dict(
        q=q, k=k, v=v, g=g, beta=beta, gate=gd.Gate.softplus(A_log, bias), output_final_state=True
    )
    return (
        found
        if lengths is None
        else found | dict(cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]))
    )


def compared(one, kernels):
    """A call's results with the reference's."""
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels):
        made = gd.prefill(**one, backend="cute")
    for x, y in zip(made, want, strict=True):
        assert relative_error(x.double(), y) <= 3e-3


@pytest.mark.parametrize("cut", [1, "persistent", "fused", "raw"], indirect=True)
@pytest.mark.parametrize("power", [-100, -14, 100])
@pytest.mark.parametrize("zeros", [0, 70])
def test_values_of_any_size(cut, power, zeros, kernels):
    """A state of zeros has no size: the first values that are none decide, in whichever chunk they are."""
    one, size = call("channel" if cut == "raw" else "head", 140), 2.0**power
    one["v"][:, :zeros] = 0
    want = gd.prefill(**one, backend="reference")
    one["v"] = one["v"] * size
    with emulated(kernels):
        made = gd.prefill(**one, backend="cute")
    for x, y in zip(made, want, strict=True):
        assert relative_error(x.double() / size, y) <= 3e-3


@pytest.mark.parametrize(
    "cut", [1, "persistent", "raw", "raw overlapped", "overlapped", "joined"], indirect=True
)
def test_rows_without_tokens_are_zeros_or_not_read(cut, kernels):
    """Chunks with tokens in one to four of their sub-chunks. What KDA leaves unwritten of the workspace is poison."""
    one = call("channel", 330, (1, 80, 81, 60, 108))
    compared(one, kernels)


@pytest.mark.parametrize("cut", ["raw", "raw overlapped"], indirect=True)
@pytest.mark.parametrize("sms", [1, 2, 4])
def test_warpgroups_take_several_chunks(cut, sms, kernels, monkeypatch):
    """Three of each SM; beside a scan one round on all SMs, then on those where none walks. Of 32 sequences each lane has one."""
    monkeypatch.setattr(on_host, "sms_of", lambda _: sms)
    for lengths in ((0, 500, 0, 64, 466), (*[3, 0, 1, 0, 65] * 5, 9, 0, 130, 0, 70, 0, 64)):
        compared(call("channel", sum(lengths), lengths), kernels)


@pytest.mark.parametrize("cut", ["overlapped"], indirect=True)
@pytest.mark.parametrize(("axis", "heads", "sms"), [("channel", 2, 8), ("head", 1, 4)])
def test_prepare_waits_for_walks_that_are_far_behind(cut, axis, heads, sms, kernels, monkeypatch):
    """24 chunks of each head, of which 12 warpgroups take some; KDA's beside four walks, and all others first, as well."""
    monkeypatch.setattr(on_host, "sms_of", lambda _: sms)
    compared(call(axis, 1500, heads=(heads, heads)), kernels)


@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("cut", [1, "raw", "raw overlapped", "overlapped", "joined"], indirect=True)
@pytest.mark.parametrize("lengths", [(64,), (0, 128, 0, 64, 0)], ids=str)
def test_packed_sequences_of_whole_chunks_fill_the_workspace(axis, cut, lengths, kernels):
    """Which has no chunk to spare then."""
    one = call(axis, sum(lengths), lengths)
    compared(one, kernels)


@pytest.mark.parametrize("cut", [1, "joined"], indirect=True)
@pytest.mark.parametrize(("HV", "fewest"), [(4, 1), (6, 3)])
def test_bits_do_not_depend_on_which_block_prepares_a_value_head(
    cut, HV, fewest, kernels, monkeypatch
):
    one, made = call("head", 100, heads=(1, HV)), []
    for most in (0, HV // 2, on_host.MAX_PREPARE_BLOCKS):
        monkeypatch.setattr(on_host, "MAX_PREPARE_BLOCKS", most)
        with emulated(kernels):
            made.append(gd.prefill(**one, backend="cute"))
    assert on_host.prepare_heads(1, HV, 2, on_host.Segmentation(1), SMS) == fewest
    want = gd.prefill(**one, backend="reference")
    for o, state in made:
        assert torch.equal(o, made[0][0])
        assert torch.equal(state, made[0][1])
        assert relative_error(o.double(), want[0]) <= 3e-3


@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("cut", CUTS[1:5], indirect=True)
def test_bits_do_not_depend_on_the_order_of_events(axis, cut, kernels):
    """Which warp goes first, and when copies end."""
    one, made = call(axis, 330, (200, 0, 130)), []
    for seed, delay in enumerate(DELAYS):
        with emulated(kernels, seed, delay):
            made.append(gd.prefill(**one, backend="cute"))
    for o, state in made[1:]:
        assert torch.equal(o, made[0][0])
        assert torch.equal(state, made[0][1])


@pytest.mark.parametrize("cut", [1, "raw"], indirect=True)
@pytest.mark.parametrize("logs", [(-5.0, -5.0625), (-24.0, -88.0)])
@pytest.mark.parametrize("every", [1, 3])
def test_diagonal_blocks_of_any_decays(cut, logs, every, kernels):
    """On both sides of what a sub-chunk with one split holds, and beyond what counts of a token's decay. Keys of all sizes."""
    one = with_channels_of_any_size(decaying("channel", 100, logs))
    strong = (torch.arange(100) % every == 0)[None, :, None, None]
    one["g"] = torch.where(strong, one["g"], -0.01)
    compared(one, kernels)


@pytest.mark.parametrize("cut", [1, "raw"], indirect=True)
@pytest.mark.parametrize("bound", [-1e30, -88.0, -1e-45])
def test_a_gate_with_any_bound(cut, bound, kernels):
    """Sums of clamped decays are the same in prepare and where a scan makes them again."""
    one = call("channel", 100)
    one |= dict(
        g=60 * one["g"], gate=gd.Gate.lower_bound(torch.zeros(1), torch.full((1, 128), -4.0), bound)
    )
    compared(one, kernels)


# ------------------------------------------------------------------------------------------------ repeated tokens, sizes, NaN


def heads_apart(x, y, dim):
    return max(relative_error(x.select(dim, h), y.select(dim, h)) for h in range(x.shape[dim]))


@pytest.mark.parametrize("cut", [1, "fused", "raw"], indirect=True)
def test_repeated_tokens_do_not_add_up_their_rounding(cut, kernels):
    """One key over and over and one beta a head, for equal and other values: 0.021 if Tinv is rounded when it is done."""
    axis = "channel" if cut == "raw" else "head"
    one, T = call(axis, 64, heads=(4, 4)), 64
    one["k"], one["v"][:, :, :2] = (
        one["k"][:, :1].expand_as(one["k"]).contiguous(),
        one["v"][:, :1, :2].clone(),
    )
    one |= dict(g=torch.zeros_like(one["g"]), gate=gd.Gate.log())
    one["beta"] = torch.tensor([0.7, 0.98, 0.7, 0.98]).expand(1, T, 4).contiguous()
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels):
        made = gd.prefill(**one, backend="cute")
    assert heads_apart(made[0].double(), want[0], 2) <= 5e-3
    assert heads_apart(made[1], want[1], 1) <= 5e-3


@pytest.mark.parametrize("cut", [1, "persistent", "fused", "raw", "overlapped"], indirect=True)
def test_states_far_larger_than_values_that_gates_wipe_out(cut, kernels):
    """In the first chunk and in the second, at once or by and by; a head keeps its state."""
    axis = "channel" if cut == "raw" else "head"
    one, T = call(axis, 80, heads=(4, 4)), 80
    log = torch.full((T, 4), -1e-3)
    log[:, 0], log[20, 1], log[70, 2] = -5.0, -30.0, -30.0
    g = log[None] if axis == "head" else log[None, :, :, None].expand(1, T, 4, 128)
    one |= dict(g=g.to(one["g"].dtype).contiguous(), gate=gd.Gate.log())
    start = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(0)) * 2.0**20
    want = gd.prefill(**one, initial_state=start, backend="reference")
    with emulated(kernels):
        made = gd.prefill(**one, initial_state=start, backend="cute")
    assert heads_apart(made[0].double(), want[0], 2) <= 3e-3
    assert heads_apart(made[1], want[1], 1) <= 2.5e-3


@pytest.mark.parametrize("cut", [1, "fused", "raw", "overlapped", "joined"], indirect=True)
def test_a_nan_reaches_no_chunk_before_its_own(cut, kernels):
    axis = "channel" if cut == "raw" else "head"
    made = []
    for names in ((), ("g",), ("q", "k", "v", "beta")):
        one = call(axis, 100)
        for name in names:
            one[name][:, 80] = torch.nan
        with emulated(kernels):
            made.append(gd.prefill(**one, backend="cute")[0])
    assert made[0].isfinite().all()
    for o in made[1:]:
        assert torch.equal(made[0][:, :64], o[:, :64])
        assert o[:, 80:].isnan().all()


# ------------------------------------------------------------------------------------------------ joined segments

HEADS = {"head": (1, 2), "channel": (2, 2)}


def decaying(axis, T, logs, lengths=None):
    """A call of two heads whose every token decays by exp(logs[head])."""
    one = call(axis, T, lengths, HEADS[axis])
    g = torch.tensor(logs).view(2, *[1] * (axis == "channel")).expand(one["g"].shape)
    return one | dict(g=g.contiguous(), gate=gd.Gate.log())


@pytest.mark.parametrize("cut", ["joined", 4], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize(
    ("logs", "windows"), [((-1.4, -0.7), (1, 2)), ((-1e-3, -0.7), (0, 2))], ids=str
)
def test_segments_begin_from_zeros_where_a_head_forgets(
    cut, axis, logs, windows, kernels, monkeypatch
):
    """What a NaN in the initial state reaches, and numbers where it does not. KDA's bounds of M are larger: by a chunk at most."""
    T, chunks = 9 * 64 + 10, 3
    one, start = decaying(axis, T, logs), torch.randn(1, 2, 128, 128)
    want = gd.prefill(**one, initial_state=start, backend="reference")
    start[:, :, 5] = torch.nan
    made = []

    def run():
        made[:] = gd.prefill(**one, initial_state=start, backend="cute")
        return made[0]

    with emulated(kernels):
        found = windows_of_segments(run, 4, monkeypatch)[0]
    for head, window in enumerate(windows):
        assert all(
            window <= x <= window + (axis == "channel" and window > 0) for x in found[head]
        ), found
        reached = made[0][0, :, head].isnan().any(1)
        assert reached.nonzero().max() < (chunks * 64 if window else T)
        assert window or reached[-1]
        assert bool(made[1][0, head].isnan().any()) == (window == 0)
        rows = slice(16, None)  # of other warps than the NaN's
        assert relative_error(made[0][:, :, head, rows], want[0][:, :, head, rows]) <= 3e-3
        assert relative_error(made[1][:, head, rows], want[1][:, head, rows]) <= 2e-3
        if window:
            assert (
                relative_error(made[0][:, chunks * 64 :, head], want[0][:, chunks * 64 :, head])
                <= 3e-3
            )


@pytest.mark.parametrize("cut", [4], indirect=True)
@pytest.mark.parametrize("forgetful", [0, 1, 2])
@pytest.mark.parametrize("axis", FEW_HEADS)
def test_states_are_passed_on_around_a_segment_that_forgets(axis, forgetful, cut, kernels):
    """Of four, each of two chunks: from the first state, from what is forgotten, or to neither."""
    T = 8 * 64
    one, start = decaying(axis, T, (-1e-3, -1e-3)), torch.randn(1, 2, 128, 128)
    one["g"][:, forgetful * 128 : (forgetful + 1) * 128, 1] = -1.4
    want = gd.prefill(**one, initial_state=start, backend="reference")
    with emulated(kernels):
        made = gd.prefill(**one, initial_state=start, backend="cute")
    for head in range(2):
        assert relative_error(made[0][:, :, head], want[0][:, :, head]) <= 3e-3
        assert relative_error(made[1][:, head], want[1][:, head]) <= 2e-3


@pytest.mark.parametrize("cut", ["joined", 4], indirect=True)
def test_windows_are_longer_than_short_segments(cut, kernels, monkeypatch):
    """The second segment has one chunk in front of it, of which a head forgets nothing."""
    one, start, made = (
        decaying("head", 4 * 64, (-1.4, -0.7)),
        torch.full((1, 2, 128, 128), torch.nan),
        [],
    )

    def run():
        made[:] = gd.prefill(**one, initial_state=start, backend="cute")
        return made[0]

    with emulated(kernels):
        assert windows_of_segments(run, 4, monkeypatch).tolist() == [[[1, 1, 1], [0, 2, 2]]]
    want = gd.prefill(**one, initial_state=torch.zeros_like(start), backend="reference")
    for head, chunks in ((0, 1), (1, 2)):
        assert made[0][:, : chunks * 64, head].isnan().all()
        assert (
            relative_error(made[0][:, chunks * 64 :, head], want[0][:, chunks * 64 :, head]) <= 3e-3
        )
        assert relative_error(made[1][:, head], want[1][:, head]) <= 2e-3


@pytest.mark.parametrize("cut", ["joined", 4], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
def test_segments_of_packed_sequences_in_a_pool(cut, axis, kernels):
    """One head forgets, the other does not. Sequences have no tokens, are inactive, or shorter than a segment.

    Checkpoints lie in windows, in front of segments and at the end; a final state overwrites the initial one.
    """
    lengths = (5 * 64 + 10, 0, 70, 40, 4 * 64)
    one, made = decaying(axis, sum(lengths) + 3, (-1.4, -1e-3), lengths), []
    slots = torch.tensor([4, 0, -1, 1, 3])
    lens = torch.tensor([[64, 128, 320], [0, -1, -1], [64, -1, -1], [0, -1, -1], [64, 192, 256]])
    before = torch.randn(6, 2, 128, 128)
    del one["output_final_state"]

    def run(backend):
        state, kept = before.clone(), torch.zeros(5, 3, 2, 128, 128)
        o, _ = gd.prefill(
            **one,
            state=state,
            state_indices=slots,
            checkpoint_lens=lens,
            checkpoints=kept,
            backend=backend,
        )
        return o, state, kept

    for seed, delay in enumerate(DELAYS if cut == "joined" else DELAYS[-1:]):
        with emulated(kernels, seed, delay):
            made.append(run("cute"))
    want = run("reference")
    for x, y, dim in zip(made[0], want, (2, 1, 2), strict=True):
        for head in range(2):
            assert relative_error(x.select(dim, head), y.select(dim, head)) <= 3e-3
    for other in made[1:]:
        for x, y in zip(made[0], other, strict=True):
            assert torch.equal(x, y)


def transition(one, head, chunk):
    """A chunk's M, by definition, in float64: what it makes of an identity."""
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
    """KDA: a chunk's M as the scan computes it, from the tiles in the workspace."""
    from gated_delta.kernels.device.chunks import (
        KDA_SCALE_S_K,
        KDA_SCALE_STATE,
        tile_offset,
        triangle_offset,
    )

    def numbers(region, start, offset_of, columns):
        made = torch.zeros(64, columns, dtype=torch.float64)
        for row, vector in itertools.product(range(64), range(columns // 8)):
            if offset_of is tile_offset or vector // 2 <= row // 16:
                at = start + offset_of(row, vector)
                made[row, 8 * vector : 8 * vector + 8] = (
                    regions[region][at : at + 16].view(torch.float16).double()
                )
        return made

    number = chunk * heads + head
    k_decayed, k_restored = (
        numbers(name, number * TILE_BYTES, tile_offset, 128) for name in ("k_tiles", "k_restored")
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
    "what moves to another channel",
)


@pytest.mark.parametrize("cut", ["joined"], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_transition_is_larger_than_its_bound(cut, axis, kind, kernels, monkeypatch):
    """|M| by float64. KDA's decayed keys and Tinv are fp16: what they lose of M, below 2**-24, is lost in any cut."""
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
    elif kind == "what moves to another channel":
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
        if kind == "what moves to another channel":
            assert (bound > 0.1) == (axis == "channel")


@pytest.mark.parametrize("cut", ["joined"], indirect=True)
@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k", "beta"])
@pytest.mark.parametrize("token", [0, 63])
def test_a_chunk_with_numbers_that_are_none_forgets_nothing(
    cut, axis, value, name, token, kernels, monkeypatch
):
    one = decaying(axis, 64, (-20.0, -20.0))
    one[name][0, token, 0, ...] = value
    with emulated(kernels):
        bounds = transition_norms(
            *workspace_after(lambda: gd.prefill(**one, backend="cute")[0], monkeypatch)
        )
    assert not (bounds[0, 0] <= 2.0**-120).any()
    assert (bounds[0, 1] <= 2.0**-120).all() or (name == "k" and axis == "head")


# ------------------------------------------------------------------------------------------------ faults it finds

IGNORED = lambda *args, **options: None


@pytest.mark.parametrize(
    ("cut", "name", "message"),
    [
        ("fused", "fence_proxy", "no fence.proxy.async"),
        ("fused", "cp_async_bulk_wait_group", "overwrites what is being read"),
        ("fused", "mbarrier_init", "no mbarrier"),
        (1, "sync_threads", "no barrier between"),
        ("fused", "barrier", "no barrier between"),
        ("raw", "fence_proxy", "no fence.proxy.async"),
        ("raw", "mbarrier_init", "no mbarrier"),
    ],
    indirect=["cut"],
)
def test_a_kernel_without_it_is_a_fault(cut, name, message, tmp_path):
    with (
        mock.patch(f"cutlass.cute.arch.{name}", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call("channel" if cut == "raw" else "head", 140), backend="cute")


@pytest.mark.parametrize("cut", [1, "persistent", 3, "joined"], indirect=True)
def test_a_scan_that_does_not_wait_for_prepare_is_a_fault(cut, axis, tmp_path):
    from gated_delta.kernels.prefill_scan import PrefillScan

    message = "what the kernel in front leaves, in front of griddepcontrol.wait"
    with (
        mock.patch.object(PrefillScan, "wait_for_prepare", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call(axis, 140), backend="cute")


@pytest.mark.parametrize("cut", ["raw overlapped"], indirect=True)
def test_a_scan_that_does_not_wait_for_a_chunk_is_a_fault(cut, tmp_path):
    from gated_delta.kernels.prefill_scan_raw import PrefillScanRaw

    message = "what the kernel in front leaves, in front of griddepcontrol.wait"
    with (
        mock.patch.object(PrefillScanRaw, "wait_until_prepared", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call("channel", 140), backend="cute")


@pytest.mark.parametrize("cut", ["raw"], indirect=True)
def test_who_decays_tokens_waits_for_the_chunk_before_in_their_stage(cut, tmp_path):
    """Else it takes an earlier phase of the copies' barrier for its own."""
    from gated_delta.kernels.prefill_scan_raw import PrefillScanRaw

    with (
        mock.patch.object(PrefillScanRaw, "wait_until_empty", IGNORED),
        emulated(tmp_path),
        pytest.raises(Fault),
    ):
        gd.prefill(**call("channel", 500), backend="cute")


def mapped(part):
    """A class whose tensor maps bring rows of the next sequence, the name of what clears them, and its axis."""
    from gated_delta.kernels.prefill_fused import PrefillFused
    from gated_delta.kernels.prefill_prepare_raw import RawKdaChunk
    from gated_delta.kernels.prefill_scan_raw import PrefillScanRaw

    return {
        "fused": (PrefillFused, "clear_rows", "head"),
        "prepare": (RawKdaChunk, "clear_tokens", "channel"),
        "scan": (PrefillScanRaw, "clear_tokens", "channel"),
    }[part]


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("names", ["qk", "g"])
@pytest.mark.parametrize(
    ("cut", "part"), [("fused", "fused"), ("raw", "prepare"), ("raw", "scan")], indirect=["cut"]
)
def test_a_kernel_that_reads_on_into_the_next_sequence_is_wrong(
    cut, part, names, cleared, tmp_path
):
    kernel, name, axis = mapped(part)
    one = call(axis, 140, (70, 70))
    for tensor in names:
        one[tensor][:, 70:] = torch.nan
    want = gd.prefill(**one, backend="reference")
    with contextlib.ExitStack() as stack:
        if not cleared:
            stack.enter_context(mock.patch.object(kernel, name, IGNORED))
        stack.enter_context(emulated(tmp_path))
        made = gd.prefill(**one, backend="cute")
    reached = not cleared and (names == "qk" or axis == "channel")
    assert (relative_error(made[1][:1], want[1][:1]) <= 3e-3) != reached
    assert reached or not made[0][:, :70].isnan().any()


def test_memory_that_a_call_was_not_given_is_a_fault(kernels, monkeypatch):
    """The last element of each tensor is not the call's."""
    force_segments(1, monkeypatch)
    monkeypatch.setattr(device, "extent", lambda x: extent(x) - x.element_size())
    with emulated(kernels), pytest.raises(Fault, match="out of bounds"):
        gd.prefill(**call("head", 64), backend="cute")
