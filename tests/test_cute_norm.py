"""prefill, decode and verify with a gated norm on the GPU: the norm of their outputs."""

import math

import pytest
import torch

import gated_delta as gd
from gated_delta import reference
from gated_delta.call_cache import CallCache
from gated_delta.ops import OPERATIONS
from gated_delta.ops.launch import Schedule
from gpu import (
    AXES,
    GPU,
    PATHS,
    STATES,
    captured,
    decode,
    index,
    needs_gpu,
    packed,
    part,
    paths_here,
    pool,
    prefill_path,
    same,
    tokens,
)

pytestmark = needs_gpu

HEADS, D = (4, 8), 128
SIZES = [  # state, K, V
    *((state_dtype, 128, 128) for state_dtype in STATES),
    *((state_dtype, 96, 192) for state_dtype in STATES[:2]),
    (torch.float16, 64, 64),
]


def normed(
    N,
    T,
    *,
    heads=HEADS,
    V=D,
    dtype=torch.bfloat16,
    weight_dtype=torch.float32,
    activation="silu",
    seed=7,
):
    """norm and a strided z."""
    rng = torch.Generator("cuda").manual_seed(seed)
    z = 2 * torch.randn(N, T, heads[1], 3, V, generator=rng, device="cuda").to(dtype)
    weight = (1 + torch.randn(V, generator=rng, device="cuda") / 2).to(weight_dtype)
    return dict(norm=gd.GatedNorm(weight, 1e-5, activation), z=z[..., 1, :])


def check_norm(fused, bare, norm, z):
    """`fused` is the norm of `bare`, up to its own rounding to 16 bits."""
    want = reference.gated_norm(bare, z, norm, torch.float64)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[fused.dtype]
    assert ((fused.double() - want).abs() <= unit * 1.02 * want.abs() + 1e-7).all()


def of_tokens(call, *where):
    """The call and its z with only the indexed sequences or tokens."""
    return {**part(call, *where), "z": call["z"][where]}


def buffer_for(call, rows, C):
    (H, K), (HV, V) = call["q"].shape[2:], call["v"].shape[2:]
    gate = "channel" if call["g"].ndim == 4 else "head"
    buffer = gd.KVBuffer.empty(rows, C, H, HV, K, V, gate=gate, device="cuda")
    for x in vars(buffer).values():
        x.fill_(math.nan)
    return buffer


def run(op, call, state, **options):
    """o, and the states and buffers after the call."""
    if op == "verify":
        options = dict(buffer=buffer_for(call, len(state), 16)) | options
    o = getattr(gd, op)(**call, state=state, backend="cute", **options)
    return o, [state, *(vars(options["buffer"]).values() if op == "verify" else ())]


@pytest.mark.parametrize(("state_dtype", "K", "V"), SIZES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("N", [2, 300])
@pytest.mark.parametrize("T", [1, 3, 16])
@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_fused_norm_is_the_norm_of_the_outputs(op, T, N, K, V, axis, state_dtype):
    """States and buffers have the bits of the call without it."""
    call = tokens(N, T, axis=axis, heads=HEADS, K=K, V=V)
    norm = normed(
        N,
        T,
        V=V,
        weight_dtype=torch.float32 if T > 1 else torch.bfloat16,
        activation="sigmoid" if T == 3 else "silu",
    )
    (bare, of_bare), (fused, of_fused) = (
        run(op, call | options, pool(N, state_dtype, HEADS[1], K, V)) for options in ({}, norm)
    )
    check_norm(fused, bare, **norm)
    for x, y in zip(of_bare, of_fused, strict=True):
        same(x, y)


def norm_by_decode(o, norm, z):
    """decode's norm of o: of one token each, from states of zeros, with o for v."""
    rows, (HV, V) = o.shape[:2].numel(), o.shape[2:]
    q = torch.zeros(rows, 1, 1, 8, device="cuda", dtype=o.dtype)
    q[..., 0] = 1
    v, z = (x.reshape(rows, 1, HV, V) for x in (o, z))
    gates = dict(g=torch.zeros(rows, 1, HV, device="cuda"), beta=v.new_ones(rows, 1, HV))
    exact = dict(scale=1.0, qk_l2norm=False, update_state=False)
    state = torch.zeros(rows, HV, V, 8, device="cuda")
    return decode(dict(q=q, k=q, v=v, **gates, norm=norm, z=z), state, **exact).view(o.shape)


@pytest.mark.parametrize("path", paths_here(*PATHS), ids=str)
@pytest.mark.parametrize(("axis", "V"), [("head", 128), ("channel", 128), ("head", 64)])
def test_prefill_has_the_bits_of_decodes_norm(path, axis, V):
    """Of hostile z, on every path, twice over a captured graph; final states have other's bits."""
    N, T = 3, 1100 if path == 4 else 200
    call = tokens(N, T, axis=axis, V=V) | dict(output_final_state=True, backend="cute")
    norm = normed(N, T, V=V, weight_dtype=torch.bfloat16)
    norm["z"][:, ::7] *= 2.0**20
    norm["z"][1, 5] = math.nan
    call["v"][2, :70] = 0
    with prefill_path(path):
        bare, state = gd.prefill(**call)
        want = norm_by_decode(bare, **norm)
        by_group = norm | dict(z=norm["z"].unflatten(2, (HEADS[0], -1)))
        out = torch.full_like(bare, math.nan)
        graph, (_, final) = captured(lambda: gd.prefill(**call, **by_group, out=out))
        for _ in range(2):
            out.fill_(math.nan)
            graph.replay()
            same(out, want)
            same(final, state)
    assert not out[2, :64].any()
    finite = dict(norm=norm["norm"], z=norm["z"].nan_to_num(0.0))
    check_norm(out[::2], bare[::2], finite["norm"], finite["z"][::2])


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_of_fp16(op):
    call = tokens(3, 2, dtype=torch.float16)
    norm = normed(3, 2, dtype=torch.float16, weight_dtype=torch.float16)
    (bare, _), (fused, _) = (run(op, call | options, pool(3)) for options in ({}, norm))
    check_norm(fused, bare, **norm)


@pytest.mark.parametrize("state_dtype", STATES[:2], ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("T", [2, 16])
def test_several_tokens_in_a_call_equal_as_many_calls(T, axis, state_dtype):
    call, start = tokens(3, T, axis=axis) | normed(3, T), pool(3, state_dtype)
    at_once, one_by_one = start.clone(), start.clone()
    o = decode(call, at_once)
    for t in range(T):
        same(decode(of_tokens(call, slice(None), slice(t, t + 1)), one_by_one), o[:, t : t + 1])
    same(at_once, one_by_one)


@pytest.mark.parametrize("state_dtype", STATES[:2], ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("op", ["decode", "verify"])
def test_bits_do_not_depend_on_the_batch(op, axis, state_dtype, T):
    """Every schedule of the tables is used."""
    largest = 512
    call, start = tokens(largest, T, axis=axis) | normed(largest, T), pool(largest, state_dtype)
    alone = [
        run(op, of_tokens(call, slice(n, n + 1)), start.clone(), state_indices=index(n))[0][0]
        for n in range(0, largest, 37)
    ]
    for N in (40, 200, 512):
        o, _ = run(op, of_tokens(call, slice(0, N)), start.clone())
        for n, want in zip(range(0, N, 37), alone, strict=False):
            same(o[n], want)


SCHEDULES = [  # a head in several CTAs of a cluster, in one CTA, in one CTA by chunks
    Schedule(4, 128, cluster=True),
    Schedule(4, 128, cluster=True, bulk=True),
    Schedule(4, 128, chunks=2, cluster=True),
    Schedule(8, 64, cluster=True),
    Schedule(8, 128, cluster=True),
    Schedule(8, 256),
    Schedule(4, 256),
    Schedule(4, 256, ctas_per_sm=3, prefetch_chunks=1),
    Schedule(4, 128),
]


@pytest.mark.parametrize(
    ("axis", "state_dtype", "K", "V"),
    [*((a, s, 128, 128) for a in AXES for s in STATES[:2]), ("head", STATES[0], 96, 192)],
)
@pytest.mark.parametrize("T", [1, 8])
def test_every_schedule_has_the_same_bits(monkeypatch, T, axis, state_dtype, K, V):
    """Also if a launch has more CTAs than run at once."""
    N = 170
    call, norm = tokens(N, T, axis=axis, heads=HEADS, K=K, V=V), normed(N, T, V=V)
    bare, of_bare = run("decode", call, pool(N, state_dtype, HEADS[1], K, V))
    first = None
    for schedule in SCHEDULES:
        monkeypatch.setattr(OPERATIONS["decode"], "calls", CallCache())
        monkeypatch.setattr(
            OPERATIONS["decode"], "schedules", lambda problem, schedule=schedule: ((0, schedule),)
        )
        fused, of_fused = run("decode", call | norm, pool(N, state_dtype, HEADS[1], K, V))
        if first is None:
            first = fused
            check_norm(fused, bare, **norm)
        for x, y in zip([first, *of_bare], [fused, *of_fused], strict=True):
            same(x, y)


@pytest.mark.parametrize("axis", AXES)
def test_intermediate_states_of_a_pool_that_is_left_alone(axis):
    """In inference mode, with a sequence in the null slot."""
    N, T = 3, 4
    call, norm, results = tokens(N, T, axis=axis), normed(N, T), []
    for extra in ({}, norm):
        state, steps = (
            pool(4),
            torch.full((N, T, HEADS[1], D, D), math.nan, device="cuda", dtype=torch.bfloat16),
        )
        options = dict(
            state_indices=index(3, 0, 1),
            null_index=0,
            update_state=False,
            intermediate_states=steps,
        )
        with torch.inference_mode():
            o, _ = run("decode", call | extra, state, **options)
        same(state, pool(4))
        assert steps[1].isnan().all()
        results.append((o, steps))
    (bare, bare_steps), (fused, fused_steps) = results
    same(bare_steps, fused_steps)
    assert (fused[1] == 0).all()
    check_norm(fused[::2], bare[::2], norm["norm"], norm["z"][::2])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("op", ["decode", "verify"])
def test_packed_and_inactive_sequences(op, axis):
    """Each token has its row of z. Rows without an active sequence are zeros, for any z."""
    lengths = (3, 0, 16, 1, 8)
    dense = tokens(len(lengths), 16, axis=axis) | normed(len(lengths), 16)
    call = packed(dense, lengths)
    spare = torch.full((1, 2, *dense["z"].shape[2:]), math.nan, device="cuda").to(dense["z"])
    call["z"] = torch.cat([dense["z"][n, :t] for n, t in enumerate(lengths)] + [spare[0]])[None]
    call |= {
        name: torch.cat([call[name], call[name][:, :2]], 1) for name in ("q", "k", "v", "g", "beta")
    }
    call["z"][:, 19] = math.nan
    o, _ = run(op, call, pool(6), state_indices=index(4, 1, 0, -1, 2))
    at = 0
    for n, length in enumerate(lengths):
        if n == 3:
            assert (o[0, at : at + length] == 0).all()
        elif length:
            one = of_tokens(dense, slice(n, n + 1), slice(0, length))
            alone, _ = run(op, one, pool(6), state_indices=index((4, 1, 0, -1, 2)[n]))
            same(alone[0], o[0, at : at + length].contiguous())
        at += length
    assert (o[0, at:] == 0).all()


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_token_slots_views_and_out_in_a_captured_graph(op):
    """Strides of all kinds; replays see a new z and weight."""
    N, T = 3, 2
    call, norm = tokens(N, T), normed(N, T)
    slots = {}
    if op == "decode":
        slots = dict(state_indices=torch.arange(N * T, device="cuda").int().view(N, T))
    out = torch.full((N, HEADS[1], T, D), math.nan, device="cuda", dtype=torch.bfloat16)
    out = out.transpose(1, 2)
    bare, _ = run(op, call, pool(N * T), **slots)
    state = pool(N * T)
    buffer = {} if op == "decode" else dict(buffer=buffer_for(call, N * T, 16))
    start = state.clone()
    run(op, call | norm, state, out=out, **slots, **buffer)
    check_norm(out, bare, **norm)
    state.copy_(start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(op, call | norm, state, out=out, **slots, **buffer)
    norm["z"].neg_()
    norm["norm"].weight.mul_(2)
    graph.replay()
    check_norm(out, bare, **norm)


def check_fp8(values, scales, bare):
    """Scales by their bits; values up to the division's 2 units. A tie may go either way."""
    given, numbers = scales.ndim < 2, ~bare.isnan()
    want, want_scales = torch.empty_like(values), scales.clone()
    reference.quantise(bare, want, want_scales)
    same(scales.contiguous(), want_scales.contiguous())
    largest = bare.abs().double().masked_fill(~numbers, 0).amax(-1, keepdim=True)
    product = bare.double() / (scales.double() if given else largest.clamp(min=1e-10) / 448)
    product = product.clamp(-448, 448)[numbers]
    unit = torch.exp2(product.abs().clamp(min=2.0**-6).log2().floor() - 3)
    error = (values.double()[numbers] - product).abs()
    assert (error <= unit / 2 + product.abs() * 2.0**-21).all()
    assert (values.float() != want.float())[numbers].double().mean() < 0.01
    same(values.float().isnan(), ~numbers)


QUANTISED = [(0, None), (20, None), (-20, 3e-8), (0, 0.03), (20, 0.03), (-20, None)]
"""Of the norm's weight, as a power of two, and the scale that is given."""


def hostile(call):
    """A zero head, NaN in z, and one key for all tokens."""
    call["z"][0, 0, 0], call["z"][-1, -1, -1, 3] = 0, math.nan
    call["k"][:] = call["k"][:1, :1].clone()
    return call


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("N", "T"), [(1, 1), (20, 1), (300, 1), (3, 4), (60, 16)])
@pytest.mark.parametrize("op", ["decode", "verify"])
@pytest.mark.skipif(GPU is None or GPU.level == "sm_80", reason="needs e4m3 conversions")
def test_fp8_is_the_quantiser_of_the_output(op, N, T, axis):
    """Call after call, in DeepGEMM's layout of scales or with one that is given."""
    call = hostile(tokens(N, T, axis=axis, heads=HEADS) | normed(N, T))
    out = torch.empty(N, T, HEADS[1], 2, D, device="cuda").to(torch.float8_e4m3fn)[..., 1, :]
    rows = torch.empty(HEADS[1], N * T + -(N * T) % 4, device="cuda")
    for size, given in QUANTISED:
        weight = normed(N, T)["norm"].weight * 2.0**size
        call["norm"] = gd.GatedNorm(weight, 1e-5)
        (bare, of_bare) = run(op, call, pool(N))
        out.fill_(math.nan)
        scales = rows.fill_(math.nan)[:, : N * T].T.unflatten(0, (N, T))
        if given is not None:
            scales = torch.tensor([given], device="cuda")
        values, of_fp8 = run(op, call, pool(N), out=out, out_scales=scales)
        check_fp8(values, scales, bare)
        for x, y in zip(of_bare, of_fp8, strict=True):
            same(x, y)


@pytest.mark.parametrize("path", paths_here(*PATHS), ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.skipif(GPU is None or GPU.level == "sm_80", reason="needs e4m3 conversions")
def test_prefill_in_fp8_is_its_quantiser(path, axis):
    """Packed, with an empty and an inactive sequence and rows behind the last; in a graph."""
    lengths, spare = (1100 if path == 4 else 200, 0, 65, 130), 70
    T = sum(lengths) + spare
    call = hostile(tokens(1, T, axis=axis, heads=HEADS) | normed(1, T))
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    call |= dict(cu_seqlens=bounds, state_indices=index(3, 2, -1, 0), backend="cute")
    inactive = torch.arange(T, device="cuda")
    inactive = ((inactive >= bounds[2]) & (inactive < bounds[3])) | (inactive >= bounds[4])
    out = torch.empty(1, T, HEADS[1], 2, D, device="cuda").to(torch.float8_e4m3fn)[..., 1, :]
    rows = torch.empty(HEADS[1], T + -T % 4, device="cuda")
    for size, given in QUANTISED:
        states = [pool(4), pool(4)]
        call["norm"] = gd.GatedNorm(normed(1, T)["norm"].weight * 2.0**size, 1e-5)
        scales = rows[:, :T].T[None] if given is None else torch.tensor([given], device="cuda")
        with prefill_path(path):
            bare, _ = gd.prefill(**call, state=states[0])
            fp8 = call | dict(state=states[1], out=out, out_scales=scales)
            graph, _ = captured(lambda: gd.prefill(**fp8))
            out.fill_(1)
            rows.fill_(math.nan)
            graph.replay()
        check_fp8(out, scales, bare)
        same(*states)
        assert not out.contiguous().view(torch.uint8)[:, inactive].any()
        assert out.float()[:, ~inactive].any()
