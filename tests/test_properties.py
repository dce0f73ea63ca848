"""Properties over random shapes, index patterns and gates."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gated_delta as gd
from gated_delta import reference
from gated_delta.problem import Tokens

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")

AXES = st.sampled_from(["head", "channel"])


@st.composite
def problems(draw, longest=40, most=4, group=3):
    """Ragged sequences of random sizes, gates from none to -60 a token, beta from 0 to 2."""
    H = draw(st.integers(1, 3))
    HV = H * draw(st.integers(1, group))
    K, V = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    total = sum(lengths)
    channels = (K,) if draw(AXES) == "channel" else ()
    strength = draw(st.sampled_from([0.0, 1e-3, 1.0, 60.0]))
    t = Tokens(
        q=torch.randn(1, total, H, K, generator=rng),
        k=torch.randn(1, total, H, K, generator=rng),
        v=torch.randn(1, total, HV, V, generator=rng),
        g=-strength * torch.rand(1, total, HV, *channels, generator=rng),
        beta=2 * torch.rand(1, total, HV, generator=rng),
        qk_l2norm=True,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )
    slots = draw(st.permutations(range(2 * len(lengths))))[: len(lengths)]
    slots = [-1 if draw(st.integers(0, 3)) == 0 else s for s in slots]
    state = torch.randn(2 * len(lengths), HV, V, K, generator=rng)
    return t, lengths, torch.tensor(slots), state


def sequence(t, n):
    first, last = t.cu_seqlens[n : n + 2].tolist()
    return t.map(lambda x: x[:, first:last])._replace(cu_seqlens=None)


def truth(t, n, state):
    outputs = [torch.zeros(0, *t.v.shape[2:], dtype=torch.float64)]
    state = state.double()
    for o, state in reference.recurrent(sequence(t, n), state):
        outputs.append(o[None])
    return torch.cat(outputs), state


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=2e-4, atol=2e-4)


@given(problems(longest=100))
def test_prefill_is_the_recurrence(problem):
    t, lengths, slots, pool = problem
    before = pool.clone()
    o, _ = gd.prefill(**t._asdict(), state=pool, state_indices=slots, backend="reference")
    for n, slot in enumerate(slots.tolist()):
        part = o[0, t.cu_seqlens[n] : t.cu_seqlens[n + 1]]
        if slot < 0:
            assert (part == 0).all()
            continue
        want, state = truth(t, n, before[slot])
        close(part, want)
        close(pool[slot], state)
    others = [s for s in range(pool.shape[0]) if s not in slots]
    assert torch.equal(pool[others], before[others])


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = (None, "silu", "sigmoid")
GATES = {"log": None, "softplus": gd.Gate.softplus, "lower_bound": gd.Gate.lower_bound}


@given(
    problems(longest=200, most=3),
    st.sampled_from(list(GATES)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(ACTIVATIONS),
    st.data(),
)
def test_bits_of_a_deterministic_prefill_are_per_head(problem, kind, dtype, activation, data):
    """Bits are the same for one sequence, for fewer heads, and for calls split at multiples of 64
    tokens, with a norm or without; checkpoints are the states between these calls."""
    t, lengths, slots, pool = problem
    t = t.map(lambda x: x.to(dtype))._replace(beta_logits=True)
    rng = torch.Generator().manual_seed(len(pool))
    parameters = [torch.randn(shape, generator=rng) for shape in (t.v.shape[2], t.g.shape[2:])]

    def gate(heads):
        return (
            gd.Gate.log() if kind == "log" else GATES[kind](*(x[heads].clone() for x in parameters))
        )

    weight = torch.randn(t.v.shape[3], generator=rng)
    gates = torch.randn(t.v.shape, generator=rng).to(dtype)

    def run(t, z, heads=slice(None), **states):
        norm = dict(norm=gd.GatedNorm(weight, activation=activation), z=z) if activation else {}
        return gd.prefill(
            **t._replace(gate=gate(heads))._asdict(),
            **states,
            **norm,
            deterministic=True,
            backend="reference",
        )

    H, group = t.q.shape[2], t.v.shape[2] // t.q.shape[2]
    h = data.draw(st.integers(0, H - 1))
    heads = slice(h * group, h * group + group)
    splits = [
        sorted({0, *data.draw(st.lists(st.sampled_from(range(0, n + 1, 64)), max_size=2))})
        for n in lengths
    ]
    lens = torch.tensor([[*split, *[-1] * (3 - len(split))] for split in splits])
    after, stored = pool.clone(), pool.new_empty(len(lengths), 3, *pool.shape[1:])
    o, _ = run(t, gates, state=after, state_indices=slots, checkpoint_lens=lens, checkpoints=stored)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        alone, state = sequence(t, n), pool[slot : slot + 1, heads]
        rows = slice(*t.cu_seqlens[n : n + 2].tolist())
        whole, z = o[0, rows], gates[:, rows, heads]
        for i, (first, last) in enumerate(itertools.pairwise([*splits[n], lengths[n]])):
            assert torch.equal(stored[n, i, heads], state[0])
            part = alone.map(lambda x: x[:, first:last])
            part = part._replace(q=part.q[:, :, h : h + 1], k=part.k[:, :, h : h + 1])
            part = part._replace(
                v=part.v[:, :, heads], g=part.g[:, :, heads], beta=part.beta[:, :, heads]
            )
            states = dict(initial_state=state, output_final_state=True)
            results, state = run(part, z[:, first:last], heads, **states)
            assert torch.equal(results[0], whole[first:last, heads])
        assert torch.equal(state[0], after[slot, heads])


@settings(max_examples=80)
@given(
    problems(longest=16, group=16),
    st.sampled_from(list(GATES)),
    st.sampled_from(DTYPES),
    st.sampled_from(ACTIVATIONS),
    st.data(),
)
def test_bits_of_a_sequence_do_not_depend_on_the_batch(problem, kind, dtype, activation, data):
    """decode, verify and flush: packed with others, alone and dense, decode token by token."""
    t, lengths, slots, pool = problem
    (H, K), (HV, V), total = t.q.shape[2:], t.v.shape[2:], t.q.shape[1]
    t = t.map(lambda x: x.to(dtype))._replace(beta_logits=True, qk_l2norm=data.draw(st.booleans()))
    rng = torch.Generator().manual_seed(len(pool))
    A_log, dt_bias, weight = (torch.randn(shape, generator=rng) for shape in (HV, t.g.shape[2:], V))
    t = t._replace(gate=gd.Gate.log() if kind == "log" else GATES[kind](A_log, dt_bias))
    z = torch.randn(1, total, HV, V, generator=rng).to(dtype)
    pool = pool.to(data.draw(st.sampled_from(DTYPES)))
    norm = dict(norm=gd.GatedNorm(weight, activation=activation)) if activation else {}

    def run(t, z, state, slots, counts):
        gates = dict(norm, z=z) if norm else {}
        buffer = gd.KVBuffer.empty(
            len(slots), 16, H, HV, K, V, gate="head" if t.g.ndim == 3 else "channel"
        )
        rest = dict(state_indices=slots, backend="reference")
        decoded, flushed = state.clone(), state.clone()
        o = gd.decode(**t._asdict(), **gates, state=decoded, **rest)
        drafts = gd.verify(**t._asdict(), **gates, state=flushed, buffer=buffer, **rest)
        gd.flush(flushed, buffer, counts, **rest)
        return o, drafts, decoded, flushed

    counts = torch.tensor([data.draw(st.integers(0, 17)) for _ in lengths])
    o, drafts, decoded, flushed = run(t, z, pool, slots, counts)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0 or not lengths[n]:
            continue
        rows = slice(*t.cu_seqlens[n : n + 2].tolist())
        alone = run(
            sequence(t, n), z[:, rows], pool[slot : slot + 1], torch.tensor([0]), counts[n : n + 1]
        )
        for results, want in zip(
            alone, (o[:, rows], drafts[:, rows], decoded[slot : slot + 1], flushed[slot : slot + 1])
        ):
            assert torch.equal(results, want)
        state, t_n = pool[slot : slot + 1].clone(), sequence(t, n)
        for i in range(lengths[n]):
            gates = dict(norm, z=z[:, rows][:, i : i + 1]) if norm else {}
            one = gd.decode(
                **t_n.map(lambda x: x[:, i : i + 1])._asdict(),
                **gates,
                state=state,
                backend="reference",
            )
            assert torch.equal(one, o[:, rows][:, i : i + 1])
        assert torch.equal(state, decoded[slot : slot + 1])


@given(problems(longest=16))
def test_decode_verify_and_flush_agree(problem):
    t, lengths, slots, pool = problem
    HV, V = t.v.shape[2:]
    decoded, flushed = pool.clone(), pool.clone()
    o = gd.decode(**t._asdict(), state=decoded, state_indices=slots, backend="reference")
    gate = "head" if t.g.ndim == 3 else "channel"
    buffer = gd.KVBuffer.empty(len(lengths), 16, t.q.shape[2], HV, t.q.shape[3], V, gate=gate)
    verified = gd.verify(
        **t._asdict(), state=flushed, state_indices=slots, buffer=buffer, backend="reference"
    )
    assert torch.equal(flushed, pool)
    close(verified, o)
    gd.flush(flushed, buffer, torch.tensor(lengths), state_indices=slots, backend="reference")
    close(flushed, decoded)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want, state = truth(t, n, pool[slot])
            close(o[0, t.cu_seqlens[n] : t.cu_seqlens[n + 1]], want)
            close(decoded[slot], state)


@given(problems(longest=16), st.integers(0, 17))
def test_flush_then_decode_the_rest_is_decode(problem, accepted):
    """Flush a prefix, then decode the rest: the state equals that of decoding all."""
    t, lengths, slots, pool = problem
    HV, V = t.v.shape[2:]
    whole, state = pool.clone(), pool.clone()
    gd.decode(**t._asdict(), state=whole, state_indices=slots, backend="reference")
    gate = "head" if t.g.ndim == 3 else "channel"
    buffer = gd.KVBuffer.empty(len(lengths), 16, t.q.shape[2], HV, t.q.shape[3], V, gate=gate)
    gd.verify(**t._asdict(), state=state, state_indices=slots, buffer=buffer, backend="reference")
    gd.flush(state, buffer, accepted, state_indices=slots, backend="reference")
    flushed = [min(accepted, n) for n in lengths]
    starts = t.cu_seqlens[:-1].tolist()
    rest = [s + i for s, m, n in zip(starts, flushed, lengths) for i in range(m, n)]
    tail = t.map(lambda x: x[:, rest])._replace(
        cu_seqlens=torch.tensor([0, *(n - m for m, n in zip(flushed, lengths))]).cumsum(0)
    )
    gd.decode(**tail._asdict(), state=state, state_indices=slots, backend="reference")
    close(state, whole)


@given(problems(longest=80), st.integers(0, 80))
def test_prefill_splits_anywhere(problem, cut):
    t, lengths, _, pool = problem
    start = pool[: len(lengths)]
    o, final = gd.prefill(
        **t._asdict(), initial_state=start, output_final_state=True, backend="reference"
    )
    firsts = [min(cut, n) for n in lengths]
    starts = t.cu_seqlens[:-1].tolist()
    state, got = start, torch.zeros_like(o)
    for part in (lambda m, n: range(m), lambda m, n: range(m, n)):
        rows = [s + i for s, m, n in zip(starts, firsts, lengths) for i in part(m, n)]
        counts = [len(part(m, n)) for m, n in zip(firsts, lengths)]
        piece = t.map(lambda x: x[:, rows])._replace(
            cu_seqlens=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        )
        got[:, rows], state = gd.prefill(
            **piece._asdict(), initial_state=state, output_final_state=True, backend="reference"
        )
    close(got, o)
    close(state, final)
