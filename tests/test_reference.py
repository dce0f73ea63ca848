"""The mathematics against independent code; the reference backend against oracle and contract."""

import itertools
import math
import random
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F

import gated_delta as gd
from calls import HV, H, K, N, T, V, buffer, call, normed, pool, rollout, tokens, verified, writable
from gated_delta import reference
from gated_delta.problem import Tokens
from gated_delta.testing import quick_cases, run_case

OPS = ("prefill", "decode", "verify", "flush")


@pytest.mark.parametrize("case", [c for op in OPS for c in quick_cases(op)], ids=str)
def test_case_list(case, device):
    result = run_case(case, "reference", device)
    assert result.passed, "\n".join(result.failures)


# --------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gated_norm_is_the_contracts(activation):
    """Against Python floats."""
    o, z, weight, eps = (
        torch.randn(3, V).double(),
        3 * torch.randn(3, V).double(),
        torch.randn(V),
        0.25,
    )
    o[1] = 0
    got = reference.gated_norm(o, z, gd.GatedNorm(weight, eps, activation), torch.float64)
    for row, gates, y in zip(o.tolist(), z.tolist(), got.tolist()):
        root = math.sqrt(sum(x * x for x in row) / V + eps)
        act = [1 / (1 + math.exp(-x)) * (x if activation == "silu" else 1) for x in gates]
        want = [x / root * w * a for x, w, a in zip(row, weight.tolist(), act)]
        assert y == pytest.approx(want, rel=1e-12, abs=0)


def outputs_of(op):
    """The operation, which returns o alone."""
    return (lambda **call: gd.prefill(**call)[0]) if op == "prefill" else getattr(gd, op)


def test_z_of_prefill_comes_by_value_head_or_by_group():
    """As in a fused projection, [N, T, H, HV/H, V]: the same bits, also in deterministic calls."""
    norm = normed()
    grouped = norm | dict(z=torch.stack([norm["z"]] * 2, 3).unflatten(2, (H, -1))[..., 1, :])
    for options in ({}, dict(deterministic=True)):
        one, other = (
            gd.prefill(**tokens(), **z, **options, backend="reference")[0] for z in (norm, grouped)
        )
        assert torch.equal(one, other)


def test_an_fp16_output_beyond_the_range_is_nan_behind_prefill():
    """Its norm reads o as stored, as a norm kernel does; other heads keep their values."""
    call = writing(60000.0) | dict(scale=8.0)
    call = {name: x.half() if name in ("q", "k", "v") else x for name, x in call.items()}
    call["v"][:, :, 1:] = 3
    z = torch.ones_like(call["v"])
    o, _ = gd.prefill(**call, norm=gd.GatedNorm(torch.ones(V)), z=z, backend="reference")
    assert o[:, :, 0].isnan().all()
    torch.testing.assert_close(o[:, :, 1:], F.silu(z[:, :, 1:].float()).half(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_a_fused_norm_is_the_norm_of_the_calls_own_outputs(op, indexed, dtype):
    """Bit for bit: o is rounded before the norm. The norm does not change the states."""
    run = outputs_of(op)
    given = tokens(dtype=dtype)
    slots = dict(state_indices=torch.tensor([3, 1])) if indexed else {}
    norm = normed(dtype=dtype, eps=1e-5)
    states, results = [], []
    for with_norm in ({}, norm):
        rest = dict(state=pool(dtype=torch.bfloat16)) | (
            dict(buffer=buffer()) if op == "verify" else {}
        )
        results.append(run(**given, **slots, **rest, **with_norm, backend="reference"))
        states.append([rest["state"], *(vars(rest["buffer"]).values() if op == "verify" else ())])
    bare, fused = results
    want = reference.gated_norm(bare, norm["z"], norm["norm"], torch.float32).to(dtype)
    assert torch.equal(fused, want)
    assert all(
        torch.equal(x.nan_to_num(5.0), y.nan_to_num(5.0)) for x, y in zip(*states, strict=True)
    )


@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_a_norm_of_packed_tokens(op):
    """Rows of no active sequence are zeros, even where z is NaN."""
    run = outputs_of(op)
    given, norm = tokens(1, 6), normed(1, 6)
    norm["z"][:, [2, 5]] = math.nan
    rest = dict(cu_seqlens=torch.tensor([0, 2, 3, 5]), state_indices=torch.tensor([3, -1, 0]))
    results = []
    for with_norm in ({}, norm):
        states = dict(state=pool()) | (dict(buffer=buffer(3, 4)) if op == "verify" else {})
        results.append(run(**given, **rest, **states, **with_norm, backend="reference"))
    bare, fused = (x[0] for x in results)
    want = reference.gated_norm(bare, norm["z"][0], norm["norm"], torch.float32)
    want[[2, 5]] = 0
    assert torch.equal(fused, want)
    assert fused[[0, 1, 3, 4]].abs().sum(-1).min() > 0


def scalar_recurrence(q, k, v, log_decay, beta, state):
    """The recurrence of one head and sequence, in Python floats."""
    S = [list(row) for row in state]
    outputs = []
    for t in range(len(q)):
        decay = [math.exp(x) for x in log_decay[t]]
        S = [[s * d for s, d in zip(row, decay)] for row in S]
        u = [
            beta[t] * (v[t][i] - sum(s * kk for s, kk in zip(row, k[t]))) for i, row in enumerate(S)
        ]
        S = [[s + u[i] * kk for s, kk in zip(row, k[t])] for i, row in enumerate(S)]
        outputs.append([sum(s * qq for s, qq in zip(row, q[t])) for row in S])
    return outputs, S


def test_recurrence_is_the_contracts(axis):
    t = tokens(axis=axis, dtype=torch.float32)
    start = pool(N)
    for n in range(N):
        got = list(
            reference.recurrent(
                Tokens(**{name: x[n : n + 1] for name, x in t.items()}, qk_l2norm=False), start[n]
            )
        )
        for hv in range(HV):
            q = t["q"][n, :, hv // (HV // H)].double() * K**-0.5
            k, v, g = (
                t["k"][n, :, hv // (HV // H)].double(),
                t["v"][n, :, hv].double(),
                t["g"][n, :, hv].double(),
            )
            g = g[:, None].expand(T, K) if axis == "head" else g
            beta = t["beta"][n, :, hv].double()
            want, S = scalar_recurrence(
                *(x.tolist() for x in (q, k, v, g, beta, start[n, hv].double()))
            )
            outputs = torch.stack([o[hv] for o, _ in got])
            for actual, expected in ((outputs, want), (got[-1][1][hv], S)):
                expected = torch.tensor(expected, dtype=torch.float64)
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gates_are_the_contracts():
    g = torch.tensor([[-30.0, -1.0, 0.0, 1.0, 25.0]]).double()
    A_log = torch.tensor([-1.0, 0.0, 1.0, 2.0, 0.5])
    dt_bias = torch.tensor([0.5, -0.5, 0.0, 1.0, 2.0])
    softplus = [x if x > 20 else math.log1p(math.exp(x)) for x in (g[0] + dt_bias).tolist()]
    want = [-math.exp(a) * s for a, s in zip(A_log.tolist(), softplus)]
    got = reference.log_decay(g, gd.Gate.softplus(A_log, dt_bias), torch.float64)[0, :, 0]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    want = [
        -3.0 / (1 + math.exp(-math.exp(a) * x))
        for a, x in zip(A_log.tolist(), (g[0] + dt_bias).tolist())
    ]
    got = reference.log_decay(g, gd.Gate.lower_bound(A_log, dt_bias, -3.0), torch.float64)[0, :, 0]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(reference.log_decay(g, gd.Gate.log(), torch.float64)[0, :, 0], g[0])


@pytest.mark.parametrize("kind", ["log", "softplus", "lower_bound"])
def test_no_finite_input_gives_nan(kind, axis):
    """exp(A_log) overflows, softplus underflows, log decays sum to -inf: select, never 0 * inf."""
    huge = torch.finfo(torch.float32).max
    worst = torch.tensor([-huge if kind == "log" else huge, -huge, 0.0, -1e4, -100.0, -1e-30])
    if kind != "log":
        worst = torch.cat([worst, torch.tensor([1e4, 100.0])])
    t = tokens(1, 70, axis=axis)
    t["g"] = worst[
        torch.randint(len(worst), t["g"].shape, generator=torch.Generator().manual_seed(0))
    ]
    A_log = torch.tensor([100.0, 0.0, -100.0, 1000.0])
    gate = {
        "log": gd.Gate.log(),
        "softplus": gd.Gate.softplus(A_log),
        "lower_bound": gd.Gate.lower_bound(A_log),
    }[kind]
    o, final = gd.prefill(
        **t, gate=gate, initial_state=pool(1), output_final_state=True, backend="reference"
    )
    assert o.isfinite().all()
    assert final.isfinite().all()
    first = {name: x[:, :16] for name, x in t.items()}
    state, kv = pool(1), gd.KVBuffer.empty(1, 16, H, HV, K, V, gate=axis)
    verified = gd.verify(**first, gate=gate, state=state, buffer=kv, backend="reference")
    gd.flush(state, kv, torch.tensor([16]), backend="reference")
    decoded_state = pool(1)
    decoded = gd.decode(**first, gate=gate, state=decoded_state, backend="reference")
    for x in (verified, decoded, state, decoded_state):
        assert x.isfinite().all()
    torch.testing.assert_close(verified, decoded)
    torch.testing.assert_close(state, decoded_state)


@pytest.mark.parametrize("axis", ["head", "channel"])
def test_a_preempted_answer_comes_back_within_the_bound(axis):
    """Its tokens went through decode; then prompt and answer are one prefill (docs/contract.md)."""
    prompt, n = 70, 150
    given = tokens(1, n, axis=axis)
    given["g"] /= 20  # so that the prompt still matters
    options = dict(gate=gd.Gate.log(), backend="reference")
    state, again = torch.zeros_like(pool(1)), torch.zeros_like(pool(1))

    def part(start, end):
        return {name: x[:, start:end] for name, x in given.items()}

    gd.prefill(**part(0, prompt), state=state, **options)
    steps = [gd.decode(**part(t, t + 1), state=state, **options) for t in range(prompt, n)]
    o, _ = gd.prefill(**given, state=again, **options)
    for got, want in (state, again), (torch.cat(steps, 1), o[:, prompt:]):
        assert (got - want).norm() <= 2e-4 * want.norm()


# ------------------------------------------------------------------------------ the chunk algebra


@pytest.mark.parametrize("C", [1, 2, 16, 64])
def test_pairwise_is_the_sum_over_channels_of_decayed_products(axis, C):
    rng = torch.Generator().manual_seed(C)
    k, q = torch.randn(2, 3, C, K, dtype=torch.float64, generator=rng)
    decay = torch.rand(3, C, K if axis == "channel" else 1, dtype=torch.float64, generator=rng)
    decay[:, C // 2] = 0.0  # a token that forgets everything
    M = reference.pairwise(torch.stack([k, q], 1), decay.clone())
    for t in range(C):
        for i in range(t + 1):
            between = decay[:, i + 1 : t + 1].prod(1)
            if i < t:
                torch.testing.assert_close(M[:, 0, t, i], (k[:, t] * k[:, i] * between).sum(-1))
            torch.testing.assert_close(M[:, 1, t, i], (q[:, t] * k[:, i] * between).sum(-1))
    assert (M.triu(1) == 0).all()


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunked_equals_recurrent_in_float64(axis, chunk):
    lengths = [0, 1, 15, 16, 63, 64, 65, 130]
    t = Tokens(**tokens(1, sum(lengths), axis=axis, seed=3))
    t = t._replace(g=t.g * 4)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    state = pool(len(lengths)).double()
    o = torch.full((sum(lengths), HV, V), math.nan, dtype=torch.float64)
    final = reference.chunked(reference.flatten(t), starts, lengths, state, o, chunk)
    for n, (start, length) in enumerate(zip(starts, lengths)):
        part = t.map(lambda x: x[:, start : start + length])
        last = state[n]
        for i, (want, last) in enumerate(reference.recurrent(part, state[n])):
            torch.testing.assert_close(o[start + i], want, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(final[n], last, rtol=1e-10, atol=1e-10)


def test_slow_decays_do_not_drift_over_a_long_prefill(axis):
    """A product of 32768 rounded decays of 1 - 1e-5 is off by 4e-4; summed logs are not."""
    length, decay = 32768, -1.03e-5
    shape = (1, length, 1, 8) if axis == "channel" else (1, length, 1)
    q, g, beta = torch.zeros(1, length, 1, 8), torch.full(shape, decay), torch.zeros(1, length, 1)
    start = torch.ones(1, 1, 8, 8)
    _, final = gd.prefill(
        q, q, q, g, beta, initial_state=start, output_final_state=True, backend="reference"
    )
    want = math.exp(length * torch.tensor(decay).double().item())
    torch.testing.assert_close(final.double(), want * start.double(), rtol=1e-5, atol=0)


def test_sums_after_each_token_survive_a_decay_of_zero():
    x = torch.tensor([[1.0, -math.inf, 2.0, 3.0]])
    assert reference.sum_after(x).tolist() == [[-math.inf, 5.0, 3.0, 0.0]]


def test_verify_buffers_u_k_and_log_decay(axis):
    t, state, kv = tokens(axis=axis), pool(), buffer(axis=axis)
    gd.verify(**t, state=state, buffer=kv, backend="reference")
    for n in range(N):
        before = state[n].double()
        one = Tokens(**{name: x[n : n + 1] for name, x in t.items()})
        x = reference.activate(reference.flatten(one), torch.float64)
        torch.testing.assert_close(kv.k[n].double(), x.k, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            kv.log_decay[n].double().reshape(x.log_decay.shape), x.log_decay, rtol=1e-6, atol=1e-6
        )
        for i, (_, after) in enumerate(reference.recurrent(one, before)):
            k = x.k[i].repeat_interleave(HV // H, 0)
            u = x.beta[i][:, None] * (
                x.v[i] - ((before * x.log_decay[i].exp()[:, None]) @ k[..., None])[..., 0]
            )
            torch.testing.assert_close(kv.u[n, i].double(), u, rtol=1e-5, atol=1e-5)
            before = after


def test_verify_only_reads_the_pool(axis):
    """A pool that it could not write: an inference tensor, and one slot seen N times."""
    with torch.inference_mode():
        frozen = pool()
    gd.verify(**tokens(axis=axis), state=frozen, buffer=buffer(axis=axis), backend="reference")
    shared = pool()[:1].expand(N, -1, -1, -1)
    version = shared._version
    gd.verify(**tokens(axis=axis), state=shared, buffer=buffer(axis=axis), backend="reference")
    assert shared._version == version


# ----------------------------------------------------------------------------- NaN and infinities


def poisoned(name, value, at, T, axis, device):
    """A call of two sequences, and a copy with one bad number in a token of sequence 0, head 0."""
    rng = torch.Generator().manual_seed(at)
    gate = gd.Gate.softplus(torch.randn(HV, generator=rng).to(device))
    clean = {key: x.to(device) for key, x in tokens(t=T, axis=axis).items()} | dict(gate=gate)
    bad = clean[name].clone()
    bad[(0, at, 0, 1)[: bad.ndim]] = value
    return clean, clean | {name: bad}


def only_what_follows(after, before, call, at, start):
    """Outputs differ only from the token on, in its heads, and are finite where the loop's are."""
    heads = HV // H
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[:, :, heads:], before[:, :, heads:])
    assert torch.equal(after[0, :at], before[0, :at])
    one = Tokens(**{key: x if key == "gate" else x[:1] for key, x in call.items()})
    loop = torch.stack([o for o, _ in reference.recurrent(one, start[0], torch.float32)])
    assert torch.equal(after[0].isfinite(), loop.isfinite())


VALUES = [(name, value) for name in ("q", "k", "v", "g", "beta") for value in (math.nan, math.inf)]


@pytest.mark.parametrize(("name", "value"), VALUES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_of_a_token_reaches_no_earlier_one_in_prefill(name, value, deterministic, axis, device):
    start = pool(N).to(device)
    for at in (0, 31, 40, 69):
        clean, call = poisoned(name, value, at, 70, axis, device)
        options = dict(initial_state=start, deterministic=deterministic, output_final_state=True)
        (before, want), (after, final) = (
            gd.prefill(**x, **options, backend="reference") for x in (clean, call)
        )
        only_what_follows(after, before, call, at, start)
        assert torch.equal(final[1], want[1])


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_nan_of_a_token_reaches_no_earlier_one_in_drafts(name, value, axis, device):
    """Nor the state, if a flush stops before it."""
    start = pool(N).to(device)
    for at in (0, 5, 15):
        clean, call = poisoned(name, value, at, 16, axis, device)
        results, decoded = [], []
        for x in (clean, call):
            decoded.append(gd.decode(**x, state=start.clone(), backend="reference"))
            kv = gd.KVBuffer.empty(N, 16, H, HV, K, V, gate=axis, device=device)
            verified = gd.verify(**x, state=start, buffer=kv, backend="reference")
            state = start.clone()
            gd.flush(state, kv, torch.tensor([at, 16], device=device), backend="reference")
            results.append((verified, kv.u, state))
        (before, u, want), (after, bad_u, state) = results
        only_what_follows(decoded[1], decoded[0], call, at, start)
        only_what_follows(after, before, call, at, start)
        assert torch.equal(bad_u[0, :at], u[0, :at])
        assert torch.equal(bad_u[1], u[1])
        assert torch.equal(state, want)


@pytest.mark.parametrize("name", ["k", "g", "beta"])
def test_nan_reaches_no_earlier_token_with_any_solver(name, axis, monkeypatch):
    """A library may solve by inverses and multiply their zeros by NaN."""

    def by_inverse(system, right, **_):
        inverse = torch.eye(16) - system  # (I - A)(I + A^2)(I + A^4)(I + A^8) = (I + A)^-1
        for _ in range(3):
            system = system @ system
            inverse = inverse @ (torch.eye(16) + system)
        return inverse @ right

    clean, call = poisoned(name, math.nan, 7, 16, axis, "cpu")
    monkeypatch.setattr(torch.linalg, "solve_triangular", by_inverse)
    options = dict(state=pool(N), buffer=buffer(t=16, axis=axis), backend="reference")
    before, after = (gd.verify(**x, **options) for x in (clean, call))
    only_what_follows(after, before, call, 7, pool(N))


def test_a_flush_reads_no_row_of_the_buffer_past_its_count(axis, device):
    kv, state = buffer(t=5, axis=axis), pool(N).to(device)
    kv = gd.KVBuffer(*(x.to(device) for x in vars(kv).values()))
    gd.verify(
        **{key: x.to(device) for key, x in tokens(t=5, axis=axis).items()},
        state=state,
        buffer=kv,
        backend="reference",
    )
    want = state.clone()
    gd.flush(want, kv, torch.tensor([2, 4], device=device), backend="reference")
    for x in vars(kv).values():
        x[0, 2], x[0, 3:], x[1, 4] = math.nan, math.inf, -math.inf
    gd.flush(state, kv, torch.tensor([2, 4], device=device), backend="reference")
    assert torch.equal(state, want)


def test_nan_and_infinite_decays_are_not_growth(axis):
    """A log decay of -inf forgets everything; an inactive sequence may have any log decay."""
    call = tokens(axis=axis)
    call["g"][0, 1] = -math.inf
    call["g"][1, 1] = math.nan
    o = gd.decode(**call, state=pool(), backend="reference")
    assert o[0].isfinite().all()
    assert torch.equal(o.isfinite()[1].flatten(1).all(1), torch.tensor([True, False, False]))
    call["g"][1] = 5.0
    for op, rest in (("prefill", {}), ("decode", {}), ("verify", dict(buffer=buffer(axis=axis)))):
        getattr(gd, op)(
            **call, **rest, state=pool(), state_indices=torch.tensor([0, -1]), backend="reference"
        )


# --------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("norm", [{}, normed(t=5)], ids=["bare", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_of_T_tokens_equals_T_calls_bit_for_bit(dtype, norm):
    t = tokens(t=5) | norm
    together, apart = pool(dtype=dtype), pool(dtype=dtype)
    o = gd.decode(**t, state=together, backend="reference")
    calls = [
        {name: x[:, i : i + 1] if isinstance(x, torch.Tensor) else x for name, x in t.items()}
        for i in range(5)
    ]
    steps = [gd.decode(**each, state=apart, backend="reference") for each in calls]
    assert torch.equal(o, torch.cat(steps, 1))
    assert torch.equal(together, apart)


@pytest.mark.parametrize(("heads", "V", "K"), [(1, 1, 64), (10, 5, 9), (9, 3, 9)])
def test_bits_of_drafts_do_not_depend_on_small_batches(heads, V, K):
    """A CPU has separate kernels for a batch of one and for matrices of odd sizes."""
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 16, heads, K, generator=rng)
    v, start = (
        torch.randn(5, 16, heads, V, generator=rng),
        torch.randn(5, heads, V, K, generator=rng),
    )
    beta = torch.rand(5, 16, heads, generator=rng)
    given, results = dict(q=q, k=k, v=v, g=-beta, beta=beta), []
    for rows in (slice(None), *(slice(n, n + 1) for n in range(5))):
        state = start[rows].clone()
        kv = gd.KVBuffer.empty(len(state), 16, heads, heads, K, V)
        call = {name: x[rows] for name, x in given.items()}
        o = gd.verify(**call, state=state, buffer=kv, backend="reference")
        gd.flush(state, kv, torch.full((len(state),), 16), backend="reference")
        results.append((o, kv.u, state))
    for whole, *alone in zip(*results, strict=True):
        assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("update_state", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t", [1, 3])
def test_decode_without_indices_has_the_bits_of_decode_with(t, axis, dtype, update_state):
    """With any strides of out, and more rows of the pool and intermediate states than sequences."""
    results = []
    for indices in (None, torch.arange(N)):
        state = pool(N + 2, dtype)
        steps = torch.full((N + 1, t + 1, HV, V, K), math.nan, dtype=dtype)
        out = torch.full((t, N, HV, V), math.nan, dtype=torch.bfloat16).transpose(0, 1)
        options = dict(
            intermediate_states=steps, update_state=update_state, out=out, backend="reference"
        )
        gd.decode(
            **tokens(t=t, axis=axis, dtype=torch.bfloat16),
            state=state,
            state_indices=indices,
            **options,
        )
        results.append((state, steps, out))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(results[0][0], pool(N + 2, dtype)) != update_state


@pytest.mark.parametrize("width", [None, 0, 2])
def test_flush_of_no_tokens_copies_the_state_bit_for_bit(width):
    """Also with a path of that width, where 0 counts none."""
    state, kv = pool(dtype=torch.bfloat16), buffer()
    before = state.clone()
    kv.u.fill_(math.nan)
    accepted = torch.tensor([0, 3 if width == 0 else 0])
    path = None if width is None else torch.full((N, width), 99)
    copies = dict(write_indices=torch.tensor([3, 1]), path=path)
    gd.flush(state, kv, accepted, **copies, backend="reference")
    assert torch.equal(state[3], before[0])
    assert torch.equal(state[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_two_rounds_with_one_flush_equal_two_with_one_each(axis):
    """Behind the first round's accepted tokens, or repeating them."""
    T, accepted = 3, torch.tensor([[1, 3], [2, 0]])  # first round, second round
    first, second = (tokens(t=T, axis=axis, seed=seed) for seed in (5, 6))
    apart, outputs, small = pool(), [], buffer(t=T, axis=axis)
    for given, count in zip((first, second), accepted):
        outputs.append(
            gd.verify(
                **given,
                state=apart,
                buffer=small,
                state_indices=torch.tensor([3, 1]),
                backend="reference",
            )
        )
        gd.flush(apart, small, count, state_indices=torch.tensor([3, 1]), backend="reference")
    both = tokens(t=2 * T, axis=axis, seed=7)
    for n, m in enumerate(accepted[0].tolist()):
        for name in ("q", "k", "v", "g", "beta"):
            both[name][n, : m + T] = torch.cat([first[name][n, :m], second[name][n]])
    together, wide = pool(), buffer(t=2 * T, axis=axis)
    o = gd.verify(
        **both, state=together, buffer=wide, state_indices=torch.tensor([3, 1]), backend="reference"
    )
    gd.flush(
        together, wide, accepted.sum(0), state_indices=torch.tensor([3, 1]), backend="reference"
    )
    for n, m in enumerate(accepted[0].tolist()):
        torch.testing.assert_close(o[n, m : m + T], outputs[1][n], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    behind, lens = pool(), torch.zeros(2, dtype=torch.int32)
    call = dict(state=behind, buffer=wide, state_indices=torch.tensor([3, 1]), backend="reference")
    for given, count, o in zip((first, second), accepted, outputs, strict=True):
        got = gd.verify(**given, **call, buffer_lens=lens)
        torch.testing.assert_close(got, o, rtol=1e-4, atol=1e-5)
        lens += count
    small = gd.KVBuffer(*(x[:, :5] for x in vars(wide).values()))
    with pytest.raises(ValueError, match="sequence 0 behind 3 tokens, got a buffer of 5: flush"):
        gd.verify(**second, **call | dict(buffer=small), buffer_lens=lens)
    gd.flush(num_accepted=lens, **call)
    torch.testing.assert_close(behind, apart, rtol=1e-4, atol=1e-5)


def test_trees_are_their_paths_and_chains_are_no_trees(axis):
    """A path is verified and flushed as it is alone, as a chain. A chain keeps its bits."""
    parents = torch.tensor([[0, -1, 0, 0, 1, 3, 9], [7, 0, -1, 2, 2, 4, -9]])
    call, state = tokens(t=6, axis=axis), pool(N)
    rest = dict(state=state, backend="reference")
    tree = buffer(t=6, axis=axis)
    o = gd.verify(**call, **rest, buffer=tree, parents=parents)
    path = torch.tensor([[0, 3, 5, 99], [2, 4, 5, -1]])
    flushed, alone, chain = pool(N), pool(N), buffer(t=3, axis=axis)
    rows = torch.arange(N)[:, None], path[:, :3]
    mine = {name: x[rows] for name, x in call.items()}
    torch.testing.assert_close(gd.verify(**mine, **rest, buffer=chain), o[rows])
    for m in (1, 3, 9):
        counts = torch.tensor([m, 0])
        # At most W count, and the fourth entry is none.
        gd.flush(flushed, tree, counts, path=path[:, :3], backend="reference")
        gd.flush(alone, chain, counts, backend="reference")
        torch.testing.assert_close(flushed, alone)
    both = []
    for options in ({}, dict(parents=torch.arange(-1, 5).expand(N, 6))):
        parts = buffer(t=6, axis=axis)
        o = gd.verify(**call, **rest, buffer=parts, **options)
        both.append((o, *vars(parts).values()))
    for x, y in zip(*both, strict=True):
        assert torch.equal(x, y)


CHECKPOINT_LENS = [[128, 0, -5], [-1, -1, -1], [0, 0, -(2**40)], [192, 64, 64]]
"""For sequences of 150, 150, 0 and 192 tokens; with a pool the second is inactive."""


def prefill_to(t, n, length, state):
    """State of a packed call's sequence n after `length` tokens, by a separate call."""
    first = int(t["cu_seqlens"][n])
    part = {name: x[:, first : first + length] for name, x in t.items() if name != "cu_seqlens"}
    return gd.prefill(**part, initial_state=state, output_final_state=True, backend="reference")[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slab", [1, 2**19])
def test_checkpoints_are_the_states_of_shorter_prefills(axis, dtype, slab, monkeypatch):
    """Bit for bit, in a tensor and in slots of the pool, with small and large slabs."""
    monkeypatch.setitem(reference.SLAB, "cpu", slab)
    ends = torch.tensor([0, 150, 300, 300, 492])
    t, start = tokens(1, 492, axis=axis) | dict(cu_seqlens=ends), pool(4, dtype)
    o, final = gd.prefill(**t, initial_state=start, output_final_state=True, backend="reference")
    lens = torch.tensor(CHECKPOINT_LENS)
    wide = torch.full((4, 6, HV, V, K), math.nan, dtype=dtype)
    stored = wide[:, ::2]
    same_o, same_final = gd.prefill(
        **t,
        initial_state=start,
        output_final_state=True,
        checkpoint_lens=lens,
        checkpoints=stored,
        backend="reference",
    )
    assert torch.equal(same_o, o)
    assert torch.equal(same_final, final)
    assert wide[:, 1::2].isnan().all()
    for n, j in itertools.product(range(4), range(3)):
        length = CHECKPOINT_LENS[n][j]
        if length < 0:
            assert stored[n, j].isnan().all()
        else:
            assert torch.equal(stored[n, j], prefill_to(t, n, length, start[n : n + 1])[0])
    assert torch.equal(stored[3, 0], final[3])
    assert torch.equal(stored[0, 1], start[0])

    state, lens_i32 = torch.full((20, HV, V, K), math.nan, dtype=dtype), lens.clamp(min=-9).int()
    slots, indices = torch.tensor([7, -1, 0, 3]), torch.arange(8, 20).view(4, 3).flip(0)
    indices[3, 1] = -2
    state[slots[[0, 2, 3]]] = start[[0, 2, 3]]
    pooled_o, _ = gd.prefill(
        **t,
        state=state,
        state_indices=slots,
        checkpoint_lens=lens_i32,
        checkpoint_indices=indices,
        backend="reference",
    )
    assert torch.equal(pooled_o[:, :150], o[:, :150])
    assert torch.equal(pooled_o[:, 300:], o[:, 300:])
    assert torch.equal(state[slots[[0, 2, 3]]], final[[0, 2, 3]])
    written = {
        int(indices[n, j]): stored[n, j]
        for n in (0, 2, 3)
        for j in range(3)
        if lens[n, j] >= 0 and indices[n, j] >= 0
    }
    assert len(written) == 6
    for slot in set(range(20)) - {7, 0, 3}:
        assert (
            torch.equal(state[slot], written[slot])
            if slot in written
            else state[slot].isnan().all()
        )


def test_unused_checkpoint_lengths_and_slots_may_be_anything():
    """Of inactive sequences; lengths without a slot; slots without a length."""
    state = pool(4)
    before, lens, slots = (
        state.clone(),
        torch.tensor([[65, 999], [-1, 63]]),
        torch.tensor([[0, 99], [99, -1]]),
    )
    indices = torch.tensor([-1, 2])
    gd.prefill(
        **tokens(),
        state=state,
        state_indices=indices,
        checkpoint_lens=lens,
        checkpoint_indices=slots,
        backend="reference",
    )
    assert torch.equal(state[[0, 1, 3]], before[[0, 1, 3]])


def test_checkpoints_up_to_null_index_are_none():
    state, lens = pool(6), torch.tensor([[64, 0], [0, 64]])
    before, slots = state.clone(), torch.tensor([[0, 4], [-3, 5]])
    keep = dict(checkpoint_lens=lens, checkpoint_indices=slots, null_index=0)
    gd.prefill(
        **tokens(t=64), state=state, state_indices=torch.tensor([2, 3]), **keep, backend="reference"
    )
    assert torch.equal(state[[0, 1]], before[[0, 1]])
    assert torch.equal(state[4], before[2])
    assert torch.equal(state[5], state[3])
    gd.prefill(**tokens(t=64), state=state, **keep, backend="reference")  # sequence 0: null slot 0
    assert torch.equal(state[[0, 4]], before[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_of_no_tokens_at_all_copies_states(dtype):
    """Slots in order are a view of the pool unless the dtype is converted."""
    state, out = pool(dtype=dtype), torch.full((1, 3, HV, V), 7.0)
    before, call = (
        state.clone(),
        dict(tokens(1, 3), cu_seqlens=torch.zeros(N + 1, dtype=torch.int32)),
    )
    slots = dict(state_indices=torch.tensor([0, 1]), write_indices=torch.tensor([3, 2]))
    gd.decode(**call, state=state, **slots, out=out, backend="reference")
    assert torch.equal(state, before[[0, 1, 1, 0, 4]])
    assert (out == 0).all()


def test_sequences_of_no_tokens_keep_and_copy_their_state():
    ends = torch.tensor([0, 0, 3])
    call = {**tokens(1, 3), "cu_seqlens": ends, "backend": "reference"}
    state, before = pool(), pool()
    gd.decode(
        **call, state=state, state_indices=torch.tensor([0, 1]), write_indices=torch.tensor([4, 3])
    )
    assert torch.equal(state[4], before[0])
    assert torch.equal(state[:3], before[:3])
    state[2] = math.nan
    o, _ = gd.prefill(
        **call,
        state=state,
        state_indices=torch.tensor([2, 0]),
        has_initial_state=torch.tensor([False, True]),
    )
    assert (state[2] == 0).all()
    assert o.isfinite().all()


def test_a_slot_may_be_read_by_many_and_written_by_one():
    state = pool()
    want = [state[:1].clone(), state[:1].clone()]
    both = tokens(2, 2)
    gd.decode(
        **both,
        state=state,
        state_indices=torch.tensor([0, 0]),
        write_indices=torch.tensor([3, 2]),
        backend="reference",
    )
    for n, alone in enumerate(want):
        gd.decode(
            **{name: x[n : n + 1] for name, x in both.items()}, state=alone, backend="reference"
        )
    torch.testing.assert_close(state[[3, 2]], torch.cat(want))
    assert torch.equal(state[:2], pool()[:2])


def test_an_inactive_batch_of_nothing_but_padding():
    for op in ("decode", "verify"):
        arguments = {**call(op), "state_indices": torch.full((N,), -1)}
        before = arguments["state"].clone()
        o = getattr(gd, op)(**arguments, backend="reference")
        assert (o == 0).all()
        assert torch.equal(arguments["state"], before)
    assert all(x.isnan().all() for x in vars(arguments["buffer"]).values())


# ---------------------------------------------------------------------------- rollouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rollout_is_replayed_bit_for_bit(dtype, axis):
    """Sampled token by token; replayed in other batches and pieces, packed, padded and alone."""
    lengths = dict(prompts=(5, 130, 64), answers=(19, 33, 2))
    given = {
        name: [tokens(1, t, axis=axis, seed=n + t) for n, t in enumerate(lengths[name])]
        for name in lengths
    }
    sampled = torch.full((4, HV, V, K), math.nan, dtype=dtype)
    o = rollout(**given, state=sampled, piece=lambda: 1, dense=True)
    sizes = random.Random(0)
    for order, dense in (((0, 1, 2), False), ((2, 1), False), ((1, 2, 0), True), ((1,), True)):
        chosen = {name: [given[name][n] for n in order] for name in given}
        piece = (lambda: 16) if dense else (lambda: sizes.randint(1, 16))
        state = torch.full((4, HV, V, K), math.nan, dtype=dtype)
        replayed = rollout(**chosen, state=state, piece=piece, dense=dense)
        for x, n in zip(replayed, order, strict=True):
            assert torch.equal(x, o[n])
        if not dense or len(order) == 1:  # padding goes into the states
            assert torch.equal(state[1 : len(order) + 1], sampled[[n + 1 for n in order]])


# ---------------------------------------------------------------------------- decode with a buffer


def buffered_steps(call, lens, state, parts, steps):
    """Outputs of decode with a buffer, step by step: the call's tokens, split at `steps`."""
    outputs = []
    for first, last in itertools.pairwise(itertools.accumulate(steps, initial=0)):
        step = {name: x[:, first:last] for name, x in call.items()}
        outputs.append(
            gd.decode(**step, state=state, buffer=parts, buffer_lens=lens, backend="reference")
        )
        parts.advance(lens, last - first)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("C", [1, 3, 16, 32])
def test_decode_with_a_buffer_and_a_flush_equal_decode(C, axis):
    """64 steps of 1 to 4 tokens, from rows of NaN. Bits of a sequence are those it has alone."""
    steps = random.Random(C).choices(range(1, 5), k=64)
    call, want = tokens(t=sum(steps), axis=axis), pool(N)
    o = torch.cat(
        [
            gd.decode(**{name: x[:, i : i + 1] for name, x in call.items()}, state=want)
            for i in range(sum(steps))
        ],
        1,
    )
    results = []
    for rows in (slice(N), slice(1), slice(1, 2)):
        state = pool(N)[rows].clone()
        parts, lens = buffer(len(state), C, axis), torch.zeros(len(state)).int()
        mine = {name: x[rows] for name, x in call.items()}
        got = buffered_steps(mine, lens, state, parts, steps)
        gd.flush(state, parts, lens, backend="reference")
        results.append((got, state))
    for got, expected in zip(results[0], (o, want), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    for whole, *alone in zip(*results, strict=True):
        assert torch.equal(whole, torch.cat(alone))


def test_packed_decode_with_a_buffer_has_the_bits_of_each_alone(axis):
    """Sequences of 0 to 5 tokens, in rows and slots of any order; the last two are inactive."""
    lengths, slots, rows = (2, 0, 5, 1, 3), [4, 1, 0, -1, 2], [3, 0, 5, 1, -1]
    call, lens = tokens(1, sum(lengths), axis=axis), torch.zeros(5, dtype=torch.int64)
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    state, parts = pool(), buffer(6, 6, axis)
    alone = {n: (pool()[slots[n]][None], buffer(1, 6, axis)) for n in range(3)}
    for step in range(5):
        options = dict(cu_seqlens=ends, state_indices=torch.tensor(slots), backend="reference")
        index = dict(buffer_indices=torch.tensor(rows), buffer_lens=lens)
        o = gd.decode(**call, state=state, buffer=parts, **options, **index)
        assert (o[:, ends[3] :] == 0).all()
        for n, (own_state, own_row) in alone.items():
            mine = {name: x[:, ends[n] : ends[n + 1]] for name, x in call.items()}
            if lengths[n]:
                one = gd.decode(
                    **mine, state=own_state, buffer=own_row, buffer_lens=lens[n : n + 1]
                )
                assert torch.equal(one, o[:, ends[n] : ends[n + 1]])
            assert torch.equal(own_state[0], state[slots[n]])
            for x, y in zip(vars(own_row).values(), vars(parts).values(), strict=True):
                torch.testing.assert_close(x[0], y[rows[n]], rtol=0, atol=0, equal_nan=True)
        parts.advance(lens, ends.diff())
    assert lens[:3].tolist() == [2, 0, 5]
    assert torch.equal(state[1:4], pool()[1:4])
    assert parts.u[[0, 1, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_buffer_lens_are_clamped(dtype):
    """Above C a row is full; entries past a row's tokens are not read."""
    filled, given = verified(), torch.tensor([0, torch.iinfo(dtype).max], dtype=dtype)
    results = []
    for lens in (given, given.clamp(0, T)):
        parts = gd.KVBuffer(*(x.clone() for x in vars(filled).values()))
        for x in vars(parts).values():
            x[0] = math.nan
        state, before = pool(N), lens.clone()
        o = gd.decode(**tokens(seed=5), state=state, buffer=parts, buffer_lens=lens)
        assert torch.equal(lens, before)
        results.append((o, state, *vars(parts).values()))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in results[0])
    assert torch.equal(results[0][1][0], pool()[0])
    assert torch.equal(results[0][2][1], filled.u[1])


def test_a_negative_length_folds_the_row_and_the_tokens(axis):
    """o as with the same row appended to, the state as after a flush of row and tokens."""
    lens = torch.tensor([2, 0], dtype=torch.int32)
    results = []
    for given in (lens, ~lens):
        parts, state = buffer(N, 8, axis), pool(N)
        gd.verify(**tokens(t=2, axis=axis), state=state, buffer=parts)
        o = gd.decode(**tokens(axis=axis), state=state, buffer=parts, buffer_lens=given)
        parts.advance(given, T)
        gd.flush(state, parts, given)
        results.append((o, state, given))
    (o, state, appended), (o_folded, state_folded, empty) = results
    assert torch.equal(o, o_folded)
    torch.testing.assert_close(state, state_folded, rtol=0, atol=2e-6)
    assert (appended.tolist(), empty.tolist()) == ([2 + T, T], [0, 0])
    with pytest.raises(ValueError, match="expected 0 or more in verify, which folds no row"):
        gd.verify(**tokens(axis=axis), state=state, buffer=parts, buffer_lens=~lens)


def test_a_negative_length_leaves_an_empty_sequence_alone():
    parts, state, lens = verified(), pool(2), torch.tensor([~1, ~1])
    gd.decode(
        **tokens(1, 1),
        state=state,
        cu_seqlens=torch.tensor([0, 0, 1]),
        buffer=parts,
        buffer_lens=lens,
    )
    assert torch.equal(state[0], pool()[0])
    assert not torch.equal(state[1], pool()[1])
    parts.advance(lens, torch.tensor([0, 1]))
    assert lens.tolist() == [~1, 0]


def test_flush_folds_a_length_due_to_be_folded(axis):
    """As m, of a path too: ~m tokens, past the row's end all of them; ~0 = -1 none."""
    parts, lens = buffer(3, axis=axis), torch.tensor([2, 0, 99])
    gd.verify(**tokens(3, axis=axis), state=pool(3), buffer=parts)
    for path in (None, torch.arange(T).expand(3, T)):
        folded, due = pool(3), pool(3)
        gd.flush(folded, parts, lens, path=path)
        gd.flush(due, parts, ~lens, path=path)
        assert torch.equal(folded, due)
        assert (folded != pool(3)).flatten(1).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_state_is_rounded_at_folds_only(dtype, axis):
    """Until then the outputs are those of its value in fp32, and it keeps its bits."""
    call, start = tokens(t=9, axis=axis), pool(N, dtype)
    results = []
    for state in (start.clone(), start.float()):
        parts, lens = buffer(t=8, axis=axis), torch.zeros(N).int()
        first = {name: x[:, :8] for name, x in call.items()}
        outputs = [buffered_steps(first, lens, state, parts, [1, 3, 4])]
        assert torch.equal(state, start.to(state.dtype))
        last = {name: x[:, 8:] for name, x in call.items()}
        outputs.append(buffered_steps(last, lens, state, parts, [1]))
        results.append((torch.cat(outputs, 1), state))
    (o, state), (exact, folded) = results
    assert torch.equal(o, exact)
    assert torch.equal(state, folded.to(dtype))
    assert not torch.equal(state, start)


def test_verify_fills_rows_of_32_tokens_that_flush_folds(axis):
    """16 drafts, the longest, and zeros behind them; flush clamps its counts to 32."""
    state, parts, want = pool(N), buffer(t=32, axis=axis), pool(N)
    drafts = tokens(t=16, axis=axis)
    gd.verify(**drafts, state=state, buffer=parts, backend="reference")
    assert all((x[:, 16:] == 0).all() and (x[:, 15] != 0).any() for x in vars(parts).values())
    gd.decode(**drafts, state=want, backend="reference")
    gd.flush(state, parts, torch.tensor([32, 99]), backend="reference")
    torch.testing.assert_close(state, want, rtol=0, atol=2e-6)
    start, row = pool(N), torch.randn(N, 32, HV, V)
    full = gd.KVBuffer(
        row, parts.k[:, :1].expand(-1, 32, -1, -1), torch.zeros(parts.log_decay.shape)
    )
    for count in (31, 32):
        after = start.clone()
        gd.flush(after, full, count, state_indices=torch.arange(N), backend="reference")
        k = full.k[:, 0].repeat_interleave(HV // H, 1)
        folded = start + row[:, :count].sum(1)[..., None] * k[:, :, None]
        torch.testing.assert_close(after, folded, rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------------ fp16 states


def writing(v, beta=1.0, T=1):
    """Calls without decay, with one unit vector as every key: S[:, 0] becomes v."""
    q = torch.zeros(N, T, H, K)
    q[..., 0] = 1
    values = torch.full((N, T, HV, V), float(v))
    return dict(
        q=q,
        k=q.clone(),
        v=values,
        g=torch.zeros(N, T, HV),
        beta=torch.full((N, T, HV), beta),
        scale=1.0,
        qk_l2norm=False,
    )


def stored(op, call, state):
    """The states stored by the call, or by a flush of its tokens, from these states."""
    T = call["q"].shape[1]
    call = {**call, "backend": "reference"}
    copies = torch.zeros(N, T, *state.shape[1:], dtype=state.dtype)
    if op == "prefill":
        gd.prefill(**call, state=state)
    elif op == "final state":
        return gd.prefill(**call, initial_state=state, output_final_state=True)[1]
    elif op == "checkpoints":
        gd.prefill(
            **call,
            initial_state=state,
            checkpoint_lens=torch.full((N, 1), T),
            checkpoints=copies[:, :1],
        )
        return copies[:, 0]
    elif op == "checkpoint slots":
        wide = torch.cat([state, copies[:, 0]])
        slots = torch.arange(N, 2 * N)[:, None]
        gd.prefill(
            **call, state=wide, checkpoint_lens=torch.full((N, 1), T), checkpoint_indices=slots
        )
        return wide[N:]
    elif op == "decode":
        gd.decode(**call, state=state)
    elif op == "decode by index":
        gd.decode(**call, state=state, state_indices=torch.arange(N))
    elif op.startswith("intermediate states"):
        gd.decode(
            **call,
            state=state,
            state_indices=torch.arange(N) if "index" in op else None,
            intermediate_states=copies,
        )
        return copies[:, -1]
    elif op == "token slots":
        pool = state.repeat_interleave(2, 0)
        gd.decode(**call, state=pool, state_indices=torch.arange(2 * N).view(N, 2))
        state.copy_(pool[T - 1 :: 2])
    else:
        kv = buffer(t=T)
        gd.verify(**call, state=state, buffer=kv)
        gd.flush(state, kv, torch.full((N,), 16), backend="reference")
    return state


STORED = [
    "prefill",
    "final state",
    "checkpoints",
    "checkpoint slots",
    "decode",
    "decode by index",
    "intermediate states",
]
STORED += ["intermediate states by index", "token slots", "flush"]


@pytest.mark.parametrize("op", STORED)
def test_fp16_states_saturate(op):
    """At +-65504, never inf; smaller ones round to nearest, 65519 too; NaN and other rows stay."""
    for v, want in (
        (1e5, 65504.0),
        (-1e9, -65504.0),
        (65519.0, 65504.0),
        (1000.3, 1000.5),
        (3e38, 65504.0),
    ):
        start = torch.zeros(N, HV, V, K, dtype=torch.float16)
        start[0, 0, 1, 1], start[1, 1, :, 2] = math.nan, -65504.0
        after = stored(op, writing(v, T=64 if "checkpoint" in op else 1), start.clone())
        assert after.dtype == torch.float16
        assert (after[1, :, :, 0] == want).all()
        assert after[0, 0, 1].isnan().any()
        assert after.isnan().sum() == after[0, 0, 1].isnan().sum()
        assert torch.equal(after[1, :, :, 1:], start[1, :, :, 1:])


def test_a_token_reads_the_saturated_fp16_state():
    """The second token's state of 73728 is stored, and read by the third, as 65504."""
    o = gd.decode(
        **writing(98304, beta=0.5, T=3),
        state=torch.zeros(N, HV, V, K, dtype=torch.float16),
        backend="reference",
    )
    for t, want in enumerate((49152, 73728, 81904)):
        assert (o[:, t] == want).all()


@pytest.mark.parametrize("op", ["prefill", "decode", "flush"])
def test_small_fp16_states_are_rounded_once(op):
    """fp32 states rounded to nearest: subnormal numbers, and zero below 2**-25."""
    small = torch.tensor(
        [2.0**-14, 2.0**-24, 3 * 2.0**-24, 1e-4, 5e-6, 0.0, -(2.0**-20), 65504]
    ).expand(N, HV, V, K)
    call = {
        **tokens(t=1),
        "v": torch.zeros(N, 1, HV, V),
        "beta": torch.zeros(N, 1, HV),
        "g": torch.full((N, 1, HV), -0.6),
    }
    want = stored(op, call, small.contiguous())
    got = stored(op, call, small.half())
    assert torch.equal(got, want.half())
    assert (got == 0).any()
    assert ((got.abs() < 2**-14) & (got != 0)).any()


# ------------------------------------------------------------------------------------- null_index


def padded(op, slots, dtype=torch.int32, **options):
    """Outputs and arguments of a call whose slots 0 to null_index are full of NaN."""
    arguments = {
        **call(op),
        "state": pool(),
        "state_indices": torch.tensor(slots, dtype=dtype),
        **options,
    }
    arguments["state"][: options.get("null_index", -1) + 1] = math.nan
    o = getattr(gd, op)(**arguments, backend="reference")
    return (o[0] if op == "prefill" else o), arguments


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("null_index", [0, 2, numpy.int32(0), 2**40], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_slots_up_to_null_index_count_as_negative(op, null_index, dtype):
    """Several sequences may share one; it is neither read nor written."""
    nulls = int(null_index) + 1
    for null in {0, min(int(null_index), 1), -1, -7}:
        o, after = padded(op, [null, 3], dtype, null_index=null_index)
        want, plain = padded(op, [-1, 3 if nulls <= 3 else -1], dtype)
        if op != "flush":
            assert torch.equal(o, want)
            assert (o[0] == 0).all()
            assert (o[1] != 0).any() == (nulls <= 3)
        assert after["state"][:nulls].isnan().all()
        assert torch.equal(after["state"][nulls:], plain["state"][nulls:])
    o, after = padded(op, [0, 0], dtype, null_index=null_index)
    assert o is None or (o == 0).all()
    assert torch.equal(after["state"][nulls:], pool()[nulls:])


def test_null_index_does_not_apply_to_buffer_rows():
    """Nor to rows of intermediate states."""
    slots, drafts, state = torch.tensor([3, 2]), buffer(), pool()
    gd.verify(
        **tokens(),
        state=state,
        state_indices=slots,
        buffer=drafts,
        buffer_indices=torch.tensor([0, 1]),
        null_index=0,
    )
    assert not drafts.u.isnan().any()
    rows = torch.tensor([0, 1])
    gd.flush(state, drafts, 2, state_indices=slots, buffer_indices=rows, null_index=1)
    assert not torch.equal(state[3], pool()[3])
    steps, rows = torch.zeros(N, T, HV, V, K), torch.tensor([1, 0])
    gd.decode(
        **tokens(),
        state=pool(),
        state_indices=slots,
        intermediate_states=steps,
        intermediate_indices=rows,
        null_index=1,
    )
    assert (steps.flatten(2) != 0).any(2).all()


def test_slots_in_order_are_compared_with_null_index_too():
    """Sequence n without an index has slot n; with write_indices that slot may be null."""
    state = pool()
    o = gd.decode(**tokens(), state=state, write_indices=torch.tensor([3, 4]), null_index=0)
    assert (o[0] == 0).all()
    assert torch.equal(state[:4], pool()[:4])
    assert not torch.equal(state[4], pool()[4])


def test_an_inactive_sequence_keeps_no_intermediate_states():
    """Nor does it conflict with another writer of the row."""
    steps = torch.full((1, T, HV, V, K), math.nan)
    options = dict(
        state_indices=torch.tensor([0, 2]), intermediate_indices=torch.tensor([0, 0]), null_index=0
    )
    gd.decode(**tokens(), state=pool(), intermediate_states=steps, **options)
    assert torch.isfinite(steps).all()


@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_empty_batches_run(op):
    arguments = {**call(op), **tokens(0, 3)}
    result = getattr(gd, op)(**arguments, backend="reference")
    o = result[0] if op == "prefill" else result
    assert o.shape == (0, 3, HV, V)


@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_default_outputs_are_never_shared_and_out_is_honoured(op):
    first = getattr(gd, op)(**call(op), backend="reference")
    second = getattr(gd, op)(**call(op), backend="reference")
    first, second = (x[0] if op == "prefill" else x for x in (first, second))
    assert first.data_ptr() != second.data_ptr()
    wide = torch.full((N, T, HV, 2 * V), math.nan)
    given = wide[..., ::2]  # not contiguous
    returned = getattr(gd, op)(**call(op), out=given, backend="reference")
    returned = returned[0] if op == "prefill" else returned
    assert returned.data_ptr() == given.data_ptr()
    assert torch.equal(given, first)
    assert wide[..., 1::2].isnan().all()


def test_final_states_have_the_dtype_of_the_initial_ones():
    for start, dtype in ((None, torch.float32), (pool(N, torch.bfloat16), torch.bfloat16)):
        _, final = gd.prefill(
            **tokens(), initial_state=start, output_final_state=True, backend="reference"
        )
        assert final.dtype == dtype


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("indexed", [True, False])
def test_fp32_stays_fp32_under_autocast_and_reduced_matmuls(op, indexed):
    t, slots = (
        tokens(t=70 if op == "prefill" else 4, dtype=torch.float32),
        torch.arange(N) if indexed else None,
    )

    def run():
        state = pool()
        o = getattr(gd, op)(**t, state=state, state_indices=slots, backend="reference")
        return (o[0] if op == "prefill" else o), state

    want = run()
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            got = run()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.fixture
def precisions():
    """torch's settings of fp32 matmuls; the last two follow the first."""
    backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)

    def unset():
        torch.set_float32_matmul_precision("highest")
        for backend in backends:
            backend.fp32_precision = "none"

    unset()
    yield backends
    unset()


def test_fp32_stays_fp32_where_another_threads_call_ends(monkeypatch, precisions):
    """The settings are per process."""
    torch.set_float32_matmul_precision("medium")
    activate, seen = reference.activate, []
    inside, ended = threading.Event(), threading.Event()

    def in_turns(*arguments):
        if threading.current_thread() is other:
            inside.set()
            ended.wait(60)
            seen.extend(x.fp32_precision for x in precisions[1:])
        else:
            other.start()
            inside.wait(60)
        return activate(*arguments)

    def run():
        gd.prefill(**tokens(), backend="reference")

    other = threading.Thread(target=run)
    monkeypatch.setattr(reference, "activate", in_turns)
    run()
    ended.set()
    other.join()
    assert seen == ["ieee", "ieee"]
    assert torch.get_float32_matmul_precision() == "medium"


def test_settings_still_follow_torchs_after_a_call(precisions):
    torch.backends.fp32_precision = "tf32"
    gd.prefill(**tokens(), backend="reference")
    assert [x.fp32_precision for x in precisions] == ["tf32"] * 3
    torch.backends.fp32_precision = "ieee"
    assert [x.fp32_precision for x in precisions] == ["ieee"] * 3


def test_scale_none_is_one_over_root_K():
    want = gd.decode(**call("decode"), scale=K**-0.5, backend="reference")
    assert torch.equal(gd.decode(**call("decode"), backend="reference"), want)
    assert not torch.allclose(gd.decode(**call("decode"), scale=1.0, backend="reference"), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_queries_of_any_size_normalise_to_1(dtype):
    """Of any finite size; other rows keep their bits."""
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(0)).sign()
    sizes = torch.tensor([1e-1, 1.0, 1e18, 1e19, 2e19, 1e20, 1e30, 1e38, 3e38])[:, None]
    want = F.normalize(x.double(), dim=-1)
    got = reference.l2norm((x * sizes).to(dtype), torch.float32)
    torch.testing.assert_close(got[1:].double(), want[1:], rtol=1e-6, atol=0)
    assert torch.equal(got[:4], reference.l2norm((x * sizes).to(dtype)[:4], torch.float32))
    torch.testing.assert_close(
        got.double(), reference.l2norm((x * sizes).to(dtype), torch.float64), rtol=1e-6, atol=0
    )
    call = tokens() | dict(scale=1.0)
    call = {name: y.to(dtype) if name in ("q", "k", "v") else y for name, y in call.items()}
    outputs = [
        gd.decode(
            **call | {name: call[name] * 2.0**n for name in "qk"}, state=pool(), backend="reference"
        )
        for n in (10, 120)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_of_outputs_that_overflow_is_finite(op):
    """Outputs in fp16, and squares in fp32; other rows keep their bits."""
    z = torch.full((N, 1, HV, V), 1.0)
    for dtype, v, scale in (
        (torch.float16, 60000.0, 8.0),
        (torch.bfloat16, 1e38, 2.0),
        (torch.float32, 1e19, 100.0),
    ):
        call = writing(v) | dict(scale=scale, z=z.to(dtype), norm=gd.GatedNorm(torch.ones(V)))
        call["v"][1] = 3
        call = {name: x.to(dtype) if name in ("q", "k", "v") else x for name, x in call.items()}
        rest = dict(buffer=buffer(t=1)) if op == "verify" else {}
        o = getattr(gd, op)(
            **call, **rest, state=torch.zeros(N, HV, V, K), backend="reference"
        ).float()
        torch.testing.assert_close(o[0], F.silu(z[0]).to(dtype).float(), rtol=1e-6, atol=0)
        call["v"][0] = 1
        ordinary = getattr(gd, op)(
            **call, **rest, state=torch.zeros(N, HV, V, K), backend="reference"
        ).float()
        assert torch.equal(o[1], ordinary[1])


def test_zero_rows_normalise_to_zero():
    assert torch.equal(reference.l2norm(torch.zeros(2, K), torch.float32), torch.zeros(2, K))
    x = torch.randn(3, K)
    torch.testing.assert_close(
        reference.l2norm(x, torch.float32), x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    )


def test_beta_logits_are_sigmoided():
    t = tokens()
    logits = {**t, "beta": torch.logit(t["beta"])}
    want, got = pool(), pool()
    torch.testing.assert_close(
        gd.decode(**logits, beta_logits=True, state=got, backend="reference"),
        gd.decode(**t, state=want, backend="reference"),
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_allow_neg_eigval_doubles_the_sigmoid(op):
    """Logits of any size; NaN in the last token."""
    logits = torch.linspace(-100, 100, N * T * HV).view(N, T, HV)
    logits[0, -1, 0] = math.nan
    double, strength = call(op), call(op)
    double |= dict(beta=logits, beta_logits=True, allow_neg_eigval=True)
    strength["beta"] = 2 * torch.sigmoid(logits)
    got, want = (getattr(gd, op)(**x, backend="reference") for x in (double, strength))
    torch.testing.assert_close(got, want, equal_nan=True)
    for x, y in zip(writable(double).values(), writable(strength).values(), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_memory_layouts_do_not_matter(op):
    """A padded pool with strided heads gives the bits of a contiguous one."""
    arguments = call(op)
    if op == "prefill":
        arguments["initial_state"] = pool(N)
    name = "initial_state" if op == "prefill" else "state"
    plain = {**arguments, name: arguments[name].clone()}
    wide = torch.full((arguments[name].shape[0], HV, V + 1, K + 4), math.nan)
    strided = wide[:, :, :V, :K]
    strided.copy_(arguments[name])
    bent = {**arguments, name: strided}
    want, got = (
        getattr(gd, op)(**plain, backend="reference"),
        getattr(gd, op)(**bent, backend="reference"),
    )
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (want, got))):
        assert a is b is None or torch.equal(a, b)
    assert torch.equal(strided, plain[name])
    assert wide[:, :, V:].isnan().all()
    assert wide[..., K:].isnan().all()


def test_pools_past_2_to_the_31_elements():
    """Offsets need 64 bits: 2.2e9 bf16 elements; only the touched pages exist."""
    slots = 2**31 // (HV * V * K) + 8
    state = torch.empty(slots, HV, V, K, dtype=torch.bfloat16)
    last = slots - 1
    state[last] = pool(1, torch.bfloat16)[0]
    small = state[last:].clone()
    index = torch.tensor([last], dtype=torch.int32)
    o = gd.decode(**tokens(1), state=state, state_indices=index, backend="reference")
    assert torch.equal(o, gd.decode(**tokens(1), state=small, backend="reference"))
    assert torch.equal(state[last], small[0])


def test_softplus_of_large_inputs_is_the_input():
    """x > 20 is x itself, on both sides of F.softplus's threshold."""
    x = torch.tensor([[19.9, 20.1, 90.0, 1e30]])
    got = -reference.log_decay(x, gd.Gate.softplus(torch.zeros(4)), torch.float32)[0, :, 0]
    torch.testing.assert_close(got, F.softplus(x[0].double()).float())
