"""The CuTe backend's host side on a CPU: what a launch hands over is recorded in place of launched, and every address followed."""

import itertools

import pytest
import torch

import gated_delta as gd
from gated_delta import api, compile, cute, dispatch
from gated_delta.kernels.arguments import ABSENT, BF16, FP16, FP32, DecodePointers, DecodeSizes, DecodeStrides

pytestmark = pytest.mark.skipif(compile.missing_packages() != (), reason="needs apache-tvm-ffi")

N, T, H, HV, K, V, P = 3, 2, 2, 4, 64, 96, 7


@pytest.fixture
def launches(monkeypatch):
    """Launches so far: pointers, scale, bound, strides, sizes of each."""
    made = []

    def launch(pointers, scale, bound, strides, sizes, stream):
        made.append((DecodePointers(*pointers), scale, bound, DecodeStrides(*strides), DecodeSizes(*sizes)))

    monkeypatch.setattr(api, "_decodes", api.Memo())
    monkeypatch.setattr(compile, "load", lambda variant, arch: launch)
    monkeypatch.setattr(compile, "missing", lambda variant, arch: ())
    monkeypatch.setattr(dispatch, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(dispatch, "_missing_for_cute", lambda problem, device: dispatch._missing_for_kernels(problem))
    monkeypatch.setattr(cute, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return made


def tokens(lead=(N, T), channels=(), dtype=torch.bfloat16):
    return dict(
        q=torch.randn(*lead, H, K).to(dtype),
        k=torch.randn(*lead, H, K).to(dtype),
        v=torch.randn(*lead, HV, V).to(dtype),
        g=torch.randn(*lead, HV, *channels).to(dtype),
        beta=torch.randn(*lead, HV).to(dtype),
    )


def pool(dtype=torch.bfloat16):
    return torch.randn(P, HV, V, K).to(dtype)


def decode(call, **options):
    return gd.decode(**call, **options, backend="cute")


def follow(base, x, *strides):
    """Every element's address by base and strides (in bytes) is the tensor's own."""
    for where in itertools.product(*(range(min(size, 3)) for size in x.shape[: len(strides)])):
        assert base + sum(i * s for i, s in zip(where, strides, strict=True)) == x[where].data_ptr(), where


def follow_tokens(launch, call, o, packed=False):
    pointers, _, _, s, _ = launch
    for name in ("q", "k", "v", "beta"):
        row = [getattr(s, f"{name}_{dim}") for dim in "nth"]
        assert not packed or row[0] == 0  # a packed sequence is found by its first token
        follow(getattr(pointers, name), call[name], *row)
    g = [s.g_n, s.g_t, s.g_h] + ([s.g_c] if call["g"].ndim == 4 else [])
    follow(pointers.g, call["g"], *g)
    follow(pointers.o, o, s.o_n, s.o_t, s.o_h, s.o_c)


@pytest.mark.parametrize("channels", [(), (K,)], ids=["gdn", "kda"])
def test_dense_tokens_and_a_pool(launches, channels):
    call, state = tokens(channels=channels), pool()
    slots, writes = torch.tensor([5, 1, -1], dtype=torch.int32), torch.tensor([0, 2, 3])
    A_log, dt_bias = torch.randn(HV), torch.randn(HV, *channels).bfloat16()
    gate = gd.Gate.lower_bound(A_log, dt_bias, -3.0)
    o = decode(call, gate=gate, scale=0.5, state=state, state_indices=slots, write_indices=writes)
    (launch,) = launches
    follow_tokens(launch, call, o)
    pointers, scale, bound, s, sizes = launch
    assert (scale, bound) == (0.5, -3.0)
    follow(pointers.state, state, s.state_p, s.state_h)
    follow(pointers.reads, slots, s.reads_n)
    follow(pointers.writes, writes, s.writes_n)
    follow(pointers.A_log, A_log, s.A_log_h)
    follow(pointers.dt_bias, dt_bias, *[s.dt_bias_h, s.dt_bias_c][: dt_bias.ndim])
    assert (pointers.cu_seqlens, pointers.accepted, pointers.steps) == (0, 0, 0)
    assert (sizes.N, sizes.T, sizes.HV, sizes.P, sizes.slots, sizes.update) == (N, T, HV, P, 0, 1)
    assert (sizes.reads_kind, sizes.writes_kind, sizes.cu_seqlens_kind, sizes.accepted_kind) == (1, 2, 0, 0)
    assert (sizes.beta_kind, sizes.dt_bias_kind) == (BF16, BF16)
    for hv in range(HV):
        assert hv * sizes.q_heads >> 30 == hv // (HV // H)


def test_value_heads_find_their_query_heads_without_a_division():
    for heads, group in ((1, 1), (64, 4), (48, 3), (1024, 1024), (210, 7)):
        magic = -(-(2**30) // group)
        assert all(hv * magic >> 30 == hv // group for hv in range(heads))


def test_every_tensor_at_strides_of_its_own(launches):
    fused = torch.randn(N, T, 2 * H * K + HV * V).bfloat16()
    q, k, v = (x.unflatten(-1, shape) for x, shape in zip(fused.split([H * K, H * K, HV * V], -1), [(H, K), (H, K), (HV, V)]))
    call = dict(q=q, k=k, v=v, g=torch.randn(N, T, HV, 3)[..., 1], beta=torch.randn(N, T, 2 * HV).half()[..., ::2])
    state = torch.randn(P, 2 * HV, V, K)[:, ::2]
    steps = torch.randn(N + 1, T + 2, HV + 1, V, K)[:, 1:, :HV]
    out = torch.zeros(N, HV, T, V).bfloat16().transpose(1, 2)
    made = decode(call, state=state, intermediate_states=steps, update_state=False, out=out)
    assert made is out
    (launch,) = launches
    follow_tokens(launch, call, out)
    pointers, scale, _, s, sizes = launch
    assert scale == K**-0.5
    follow(pointers.state, state, s.state_p, s.state_h)
    follow(pointers.steps, steps, s.steps_n, s.steps_t, s.steps_h)
    assert (sizes.update, sizes.beta_kind, sizes.dt_bias_kind, sizes.reads_kind) == (0, FP16, ABSENT, 0)


def test_packed_tokens_with_a_slot_for_each(launches):
    call = tokens((1, 9), dtype=torch.float16)
    call["beta"] = call["beta"].float()
    slots = torch.arange(P).int().expand(2, P)[:, :5].contiguous()
    ends, accepted = torch.tensor([0, 4, 8]), torch.tensor([1, 9], dtype=torch.int32)
    o = decode(call, cu_seqlens=ends, state=pool(), state_indices=slots, num_accepted=accepted)
    (launch,) = launches
    follow_tokens(launch, call, o, packed=True)
    pointers, _, _, s, sizes = launch
    follow(pointers.reads, slots, s.reads_n, s.reads_t)
    follow(pointers.cu_seqlens, ends, s.cu_seqlens_n)
    follow(pointers.accepted, accepted, s.accepted_n)
    assert (sizes.N, sizes.T, sizes.total, sizes.slots) == (2, 5, 9, 5)  # no more tokens than there are slots
    assert (sizes.cu_seqlens_kind, sizes.accepted_kind, sizes.beta_kind) == (2, 1, FP32)


def test_a_known_call_is_launched_with_its_own_addresses(launches, monkeypatch):
    decode(tokens(), state=pool())
    monkeypatch.setattr(api, "describe_decode", None)  # a known call is not described again
    call, state = tokens(), pool()
    o = decode(call, state=state)
    follow_tokens(launches[1], call, o)
    assert launches[1][0].state == state.data_ptr()
    assert launches[0][3:] == launches[1][3:]


def test_what_makes_a_call_another_one(launches):
    first = dict(tokens(), state=pool())
    decode(first)
    others = [
        dict(qk_l2norm=False),
        dict(beta_logits=True),
        dict(scale=1.0),
        dict(update_state=False),
        dict(gate=gd.Gate.softplus(torch.zeros(HV))),
        dict(gate=gd.Gate.lower_bound(torch.zeros(HV), bound=-4.0)),
        dict(state_indices=torch.arange(N)),
        dict(state=pool(torch.float32)),
        dict(beta=first["beta"].float()),
    ]
    for other in others:
        decode({**first, **other})
    assert len(launches) == 1 + len(others)
    assert sum(len(similar) for similar in api._decodes._calls.values()) == 1 + len(others)


def test_a_known_call_hides_no_mistake(launches):
    call, state = tokens(), pool()
    for _ in range(2):
        decode(call, state=state)
        for wrong, error in (
            (dict(qk_l2norm=1), TypeError),
            (dict(gate="softplus"), TypeError),
            (dict(out=call["v"]), ValueError),
            (dict(beta=call["beta"][:, :1]), ValueError),
            (dict(beta=call["beta"].clone().requires_grad_()), gd.UnsupportedProblem),
        ):
            with pytest.raises(error):
                decode({**call, "state": state, **wrong})
    assert len(launches) == 2


def test_rows_off_a_vectors_boundary(launches):
    call, state = tokens(), pool()
    decode(call, state=state)
    storage = torch.zeros(call["q"].numel() + 1).bfloat16()
    decode({**call, "q": storage[1:].view(call["q"].shape)}, state=state)
    assert len(launches) == 2
    shifted = torch.zeros(state.numel() + 1).bfloat16()[1:].view(state.shape)
    with pytest.raises(gd.UnsupportedProblem, match="V rows"):
        decode(call, state=shifted)


def test_strides_that_do_not_fit_are_refused(launches):
    call = tokens((2, 1))
    route = gd.explain("decode", **call, state=pool(), backend="cute")
    far = torch.empty(2, dtype=torch.bfloat16, device="meta").as_strided((2, HV, V, K), (2**31, V * K, K, 1))
    absent = dict.fromkeys(("state_indices", "write_indices", "num_accepted", "intermediate_states", "out"))
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        cute.DecodeLaunch(route, api.Tokens(**call), state=far, update_state=True, **absent)


def test_nobody_to_decode_for(launches):
    o = decode(tokens((0, T)), state=pool())
    assert o.shape == (0, T, HV, V)
    assert launches == []
