"""The CuTe backend's host side on a CPU: launches are recorded in place of run, and every address in them is followed."""

import itertools
import math
import random

import numpy
import pytest
import torch

import gated_delta as gd
from gated_delta import compile, dispatch
from gated_delta.call_cache import CallCache
from gated_delta.kernels import arguments
from gated_delta.kernels.arguments import ABSENT, BF16, CHUNK, FP16, FP32, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from gated_delta.ops import OPERATIONS
from gated_delta.ops import launch as shared
from gated_delta.ops import prefill as on_host
from gated_delta.problem import Problem

pytestmark = pytest.mark.skipif(compile.missing_packages() != (), reason="needs apache-tvm-ffi")

N, T, H, HV, K, V, P = 3, 2, 2, 4, 64, 96, 7
CHANNELS = pytest.mark.parametrize("channels", [(), (K,)], ids=["gdn", "kda"])
PREFILL_KERNELS = ("prefill_prepare", "prefill_scan", "prefill_state_passing")


class Launches(list):
    """Launches so far: pointers, strides and sizes of each; scale and bound after the pointers, but for flush."""

    def __init__(self):
        self.kernels = []
        """What was launched."""

    def clear(self):
        super().clear()
        self.kernels.clear()


@pytest.fixture
def launches(monkeypatch):
    made = Launches()

    def load(variant, arch):
        operation = "Prefill" if variant.kernel in PREFILL_KERNELS else variant.kernel.title()
        kinds = [getattr(arguments, operation + what) for what in ("Pointers", "Strides", "Sizes")]

        def launch(pointers, *rest):
            *numbers, strides, sizes, stream = rest
            made.append((kinds[0](*pointers), *numbers, kinds[1](*strides), kinds[2](*sizes)))
            made.kernels.append(variant)

        return launch

    for op in OPERATIONS.values():
        monkeypatch.setattr(op, "calls", CallCache())
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setattr(compile, "missing", lambda variant, arch: ())
    monkeypatch.setattr(compile, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(dispatch, "_missing_for_cute", lambda op, problem, device: op.missing(problem))
    monkeypatch.setattr(shared, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return made


def remembered(name):
    """What the call cache holds of an operation."""
    return OPERATIONS[name].calls


def launch_of(name, route, **given):
    """The launch for such a call, whatever its addresses."""
    facts = dict(
        gate="log", bound=0.0, qk_l2norm=True, beta_logits=False, update_state=True, output_final_state=False, null_index=-1
    )
    op = OPERATIONS[name]
    absent = dict.fromkeys(op.arguments._fields)
    a = op.arguments(**{field: (absent | facts | given)[field] for field in op.arguments._fields})
    return op.launch(route.problem, route.plan, a)


def parts_of(kept):
    return dict(buffer_u=kept.u, buffer_k=kept.k, buffer_log_decay=kept.log_decay)


def tokens(lead=(N, T), channels=(), dtype=torch.bfloat16, K=K, V=V):
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


@CHANNELS
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
    follow(pointers.state_indices, slots, s.state_indices_n)
    follow(pointers.write_indices, writes, s.write_indices_n)
    follow(pointers.A_log, A_log, s.A_log_h)
    follow(pointers.dt_bias, dt_bias, *[s.dt_bias_h, s.dt_bias_c][: dt_bias.ndim])
    assert (pointers.cu_seqlens, pointers.num_accepted, pointers.intermediate_states) == (0, 0, 0)
    assert (sizes.N, sizes.T, sizes.HV, sizes.P, sizes.slots_per_sequence, sizes.update_state) == (N, T, HV, P, 0, 1)
    assert (sizes.state_indices_kind, sizes.write_indices_kind, sizes.cu_seqlens_kind, sizes.num_accepted_kind) == (1, 2, 0, 0)
    assert (sizes.beta_kind, sizes.dt_bias_kind) == (BF16, BF16)
    for hv in range(HV):
        assert hv * sizes.qk_head_factor >> 30 == hv // (HV // H)


def test_qk_head_factor_replaces_a_division():
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
    follow(pointers.intermediate_states, steps, s.intermediate_states_n, s.intermediate_states_t, s.intermediate_states_h)
    assert (sizes.update_state, sizes.beta_kind, sizes.dt_bias_kind, sizes.state_indices_kind) == (0, FP16, ABSENT, 0)


def test_packed_tokens_with_a_slot_for_each(launches):
    call = tokens((1, 9), dtype=torch.float16)
    call["beta"] = call["beta"].float()
    slots = torch.arange(P).int().expand(2, P)[:, :5].contiguous()
    ends, accepted = torch.tensor([0, 4, 8]), torch.tensor([1, 9], dtype=torch.int32)
    o = decode(call, cu_seqlens=ends, state=pool(), state_indices=slots, num_accepted=accepted)
    (launch,) = launches
    follow_tokens(launch, call, o, packed=True)
    pointers, _, _, s, sizes = launch
    follow(pointers.state_indices, slots, s.state_indices_n, s.state_indices_t)
    follow(pointers.cu_seqlens, ends, s.cu_seqlens_n)
    follow(pointers.num_accepted, accepted, s.num_accepted_n)
    assert (sizes.N, sizes.T, sizes.total, sizes.slots_per_sequence) == (2, 5, 9, 5)  # no more tokens than there are slots
    assert (sizes.cu_seqlens_kind, sizes.num_accepted_kind, sizes.beta_kind) == (2, 1, FP32)


def test_a_known_call_is_launched_with_its_own_addresses(launches, monkeypatch):
    decode(tokens(), state=pool())
    monkeypatch.setattr(OPERATIONS["decode"], "describe", None)  # a known call is not described again
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
        dict(state_indices=torch.arange(N), null_index=0),
        dict(state_indices=torch.arange(N), null_index=1),
        dict(intermediate_states=(steps := pool()[:N, None].expand(-1, T, -1, -1, -1).clone())),
        dict(intermediate_states=steps, intermediate_indices=torch.arange(N)),
        dict(state=pool(torch.float32)),
        dict(beta=first["beta"].float()),
    ]
    for other in others:
        decode({**first, **other})
    assert len(launches) == 1 + len(others)
    assert len(remembered("decode")) == 1 + len(others)


def test_a_known_call_hides_no_mistake(launches):
    call, state = tokens(), pool()
    for _ in range(2):
        decode(call, state=state)
        for wrong, error in (
            (dict(qk_l2norm=1), TypeError),
            (dict(update_state=1), TypeError),
            (dict(null_index=False), TypeError),
            (dict(null_index=0), ValueError),
            (dict(scale=True), TypeError),
            (dict(beta=[1.0]), TypeError),
            (dict(g=None), TypeError),
            (dict(state=[0]), TypeError),
            (dict(gate="softplus"), TypeError),
            (dict(out=call["v"]), ValueError),
            (dict(beta=call["beta"][:, :1]), ValueError),
            (dict(beta=call["beta"].clone().requires_grad_()), gd.UnsupportedProblem),
        ):
            with pytest.raises(error):
                decode({**call, "state": state, **wrong})
    assert len(launches) == 2


def test_misaligned_rows(launches):
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
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        launch_of("decode", route, **call, state=far)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_intermediate_states_in_rows_of_their_own(launches, dtype):
    """Fewer rows than sequences, at indices of their own stride."""
    call, steps = tokens(), torch.randn(2, T + 1, HV, V, K).bfloat16()
    rows = torch.tensor([[1, 9], [-1, 9], [0, 9]], dtype=dtype)[:, 0]
    decode(call, state=pool(), intermediate_states=steps, intermediate_indices=rows)
    ((pointers, _, _, s, sizes),) = launches
    follow(pointers.intermediate_states, steps, s.intermediate_states_n, s.intermediate_states_t, s.intermediate_states_h)
    follow(pointers.intermediate_indices, rows, s.intermediate_indices_n)
    assert sizes.intermediate_indices_kind == rows.element_size() // 4
    decode(call, state=pool(), intermediate_states=torch.randn(N, T, HV, V, K).bfloat16())
    pointers, _, _, _, sizes = launches[1]
    assert (pointers.intermediate_indices, sizes.intermediate_indices_kind) == (0, 0)


@pytest.mark.parametrize(("given", "passed"), [(-1, -1), (0, 0), (5, 5), (2**40, 2**31 - 1), (numpy.int64(2), 2)], ids=str)
def test_null_index_is_a_number_of_the_launch(launches, given, passed):
    """Of every operation; it needs no other kernels."""
    slots, kept = torch.arange(N), buffer()
    decode(tokens(), state=pool(), state_indices=slots, null_index=given)
    verify(tokens(), state=pool(), buffer=kept, state_indices=slots, null_index=given)
    flush(pool(), kept, 1, state_indices=slots, null_index=given)
    gd.prefill(**tokens(V=128), state=torch.zeros(P, HV, 128, K), state_indices=slots, null_index=given, backend="cute")
    kernels = list(launches.kernels)
    assert {launch[-1].null_index for launch in launches} == {passed}
    launches.clear()
    decode(tokens(), state=pool(), state_indices=slots)
    verify(tokens(), state=pool(), buffer=kept, state_indices=slots)
    flush(pool(), kept, 1, state_indices=slots)
    gd.prefill(**tokens(V=128), state=torch.zeros(P, HV, 128, K), state_indices=slots, backend="cute")
    assert launches.kernels == kernels
    assert {launch[-1].null_index for launch in launches} == {-1}


def test_indices_of_decode_are_checked_on_request(launches, monkeypatch):
    """With null_index, and with rows for intermediate states; nothing is launched."""
    monkeypatch.setattr(shared, "CHECK", True)
    call, state, steps = tokens(), pool(), pool()[:2, None].expand(-1, T, -1, -1, -1).clone()
    padded = dict(state=state, state_indices=torch.tensor([0, 3, 0]))
    for _ in range(2):
        with pytest.raises(ValueError, match="state_indices: expected at most one sequence to write each row"):
            decode(call, **padded)
        for rows, error in (([0, 0, -1], ValueError), ([0, 2, -1], IndexError)):
            with pytest.raises(error, match="intermediate_indices"):
                decode(call, state=state, intermediate_states=steps, intermediate_indices=torch.tensor(rows))
    assert launches == []
    decode(call, **padded, null_index=0)
    decode(call, state=state, intermediate_states=steps, intermediate_indices=torch.tensor([1, -1, 0]))
    assert len(launches) == 2


def test_decode_of_no_sequences(launches):
    o = decode(tokens((0, T)), state=pool())
    assert o.shape == (0, T, HV, V)
    assert launches == []


# ------------------------------------------------------------------------------------------------ verify and flush


def buffer(rows=N, C=T, channels=(), layers=None):
    made = gd.KVBuffer.empty(rows, C, H, HV, K, V, gate="channel" if channels else "head", num_layers=layers)
    for x in (made.u, made.k, made.log_decay):
        x.fill_(math.nan)
    return made


def verify(call, **options):
    return gd.verify(**call, **options, backend="cute")


def flush(state, kept, num_accepted, **options):
    gd.flush(state, kept, num_accepted, **options, backend="cute")


def all_rows(kept):
    """A slot for each row of a buffer, which an int for num_accepted does not name."""
    return torch.arange(kept.u.shape[-4], dtype=torch.int32)


def follow_buffer(pointers, s, kept):
    follow(pointers.buffer_u, kept.u, s.buffer_u_r, s.buffer_u_t, s.buffer_u_h)
    follow(pointers.buffer_k, kept.k, s.buffer_k_r, s.buffer_k_t, s.buffer_k_h)
    follow(pointers.buffer_log_decay, kept.log_decay, s.buffer_log_decay_r, s.buffer_log_decay_t, s.buffer_log_decay_h)


def follow_layers(pointers, s, state, kept):
    follow(pointers.state, state, pointers.state_l, s.state_p, s.state_h)
    follow(pointers.buffer_u, kept.u, pointers.buffer_u_l, s.buffer_u_r, s.buffer_u_t, s.buffer_u_h)
    follow(pointers.buffer_k, kept.k, pointers.buffer_k_l, s.buffer_k_r, s.buffer_k_t, s.buffer_k_h)
    strides = [s.buffer_log_decay_r, s.buffer_log_decay_t, s.buffer_log_decay_h]
    strides += [s.buffer_log_decay_c] if kept.log_decay.ndim == 5 else []
    follow(pointers.buffer_log_decay, kept.log_decay, pointers.buffer_log_decay_l, *strides)


@CHANNELS
def test_verify_of_a_pool_into_rows_of_a_buffer(launches, channels):
    call, state, kept = tokens(channels=channels), pool(), buffer(5, 6, channels)
    slots, rows = torch.tensor([5, 1, -1], dtype=torch.int32), torch.tensor([4, -1, 0])
    A_log, dt_bias = torch.randn(HV), torch.randn(HV, *channels).bfloat16()
    gate = gd.Gate.lower_bound(A_log, dt_bias, -3.0)
    o = verify(call, gate=gate, scale=0.5, state=state, state_indices=slots, buffer=kept, buffer_indices=rows, beta_logits=True)
    (launch,) = launches
    follow_tokens(launch, call, o)
    pointers, scale, bound, s, sizes = launch
    assert (scale, bound) == (0.5, -3.0)
    follow(pointers.state, state, s.state_p, s.state_h)
    follow_buffer(pointers, s, kept)
    follow(pointers.state_indices, slots, s.state_indices_n)
    follow(pointers.buffer_indices, rows, s.buffer_indices_n)
    follow(pointers.A_log, A_log, s.A_log_h)
    follow(pointers.dt_bias, dt_bias, *[s.dt_bias_h, s.dt_bias_c][: dt_bias.ndim])
    assert pointers.cu_seqlens == 0
    assert (sizes.N, sizes.T, sizes.HV, sizes.group_size, sizes.P, sizes.C) == (N, T, HV, HV // H, P, 6)
    assert (sizes.state_indices_kind, sizes.buffer_indices_kind, sizes.cu_seqlens_kind) == (1, 2, 0)
    assert (sizes.beta_logits, sizes.beta_kind, sizes.dt_bias_kind) == (1, BF16, BF16)
    for hv in range(HV):
        assert hv * sizes.qk_head_factor >> 30 == hv // sizes.group_size


@CHANNELS
def test_verify_with_every_tensor_at_strides_of_its_own(launches, channels):
    """Slices of a fused projection, one layer of a buffer, and every other head of the buffer's k."""
    fused = torch.randn(N, T, 2 * H * K + HV * V).bfloat16()
    q, k, v = (x.unflatten(-1, shape) for x, shape in zip(fused.split([H * K, H * K, HV * V], -1), [(H, K), (H, K), (HV, V)]))
    g = torch.randn(N, T, HV, *channels, 3)[..., 1]
    call = dict(q=q, k=k, v=v, g=g, beta=torch.randn(N, T, 2 * HV).half()[..., ::2])
    state = torch.randn(P, 2 * HV, V, K)[:, ::2]
    layer = buffer(N + 1, T + 1, channels, layers=3).layer(1)
    kept = gd.KVBuffer(layer.u[:, 1:], torch.randn(N + 1, T, 2 * H, K)[:, :, ::2], layer.log_decay[:, 1:])
    out = torch.zeros(N, HV, T, V).bfloat16().transpose(1, 2)
    assert verify(call, state=state, buffer=kept, out=out) is out
    (launch,) = launches
    follow_tokens(launch, call, out)
    pointers, _, _, s, sizes = launch
    follow(pointers.state, state, s.state_p, s.state_h)
    follow_buffer(pointers, s, kept)
    assert (pointers.state_indices, pointers.buffer_indices) == (0, 0)
    assert (sizes.beta_logits, sizes.beta_kind, sizes.dt_bias_kind, sizes.state_indices_kind, sizes.buffer_indices_kind) == (
        0,
        FP16,
        ABSENT,
        0,
        0,
    )


def test_verify_of_packed_tokens(launches):
    call, kept, ends = tokens((1, 9), dtype=torch.float16), buffer(2, 5), torch.tensor([0, 4, 8])
    o = verify(call, cu_seqlens=ends, state=pool(), buffer=kept)
    (launch,) = launches
    follow_tokens(launch, call, o, packed=True)
    pointers, _, _, s, sizes = launch
    follow(pointers.cu_seqlens, ends, s.cu_seqlens_n)
    follow_buffer(pointers, s, kept)
    assert (sizes.N, sizes.T, sizes.total, sizes.C) == (2, 5, 9, 5)  # no more tokens than fit in a row of the buffer
    assert sizes.cu_seqlens_kind == 2


@CHANNELS
@pytest.mark.parametrize("count", [1, 2**40], ids=str)
def test_flush_of_one_layer_by_a_number(launches, channels, count):
    state, kept = pool(), buffer(N, 5, channels)
    slots = all_rows(kept)
    flush(state, kept, count, state_indices=slots)
    ((pointers, s, sizes),) = launches
    follow(pointers.state_indices, slots, s.state_indices_n)
    follow(pointers.state, state, s.state_p, s.state_h)
    follow_buffer(pointers, s, kept)
    assert s.buffer_log_decay_c == (kept.log_decay.element_size() if channels else 0)
    assert (pointers.num_accepted, *pointers[6:]) == (0,) * 7  # no counts, no other indices, no layers
    assert (sizes.layers, sizes.N, sizes.HV, sizes.P, sizes.C, sizes.num_accepted_all) == (1, N, HV, P, 5, min(count, 5))
    assert (sizes.num_accepted_kind, sizes.state_indices_kind, sizes.write_indices_kind, sizes.buffer_indices_kind) == (0, 1, 0, 0)
    for hv in range(HV):
        assert hv * sizes.qk_head_factor >> 30 == hv // (HV // H)


@CHANNELS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_flush_of_all_layers_by_numbers_on_the_device(launches, channels, dtype):
    """Fewer sequences than the buffer has rows, each index at a stride of its own."""
    state = torch.randn(2, P, HV + 1, V, K)[:, :, 1:]
    kept = buffer(N + 2, 4, channels, layers=2)
    other = torch.int64 if dtype == torch.int32 else torch.int32
    accepted, writes = torch.arange(2 * N, dtype=dtype)[::2], torch.arange(3 * N, dtype=dtype)[::3]
    slots, rows = torch.arange(2 * N, dtype=other).view(N, 2).unbind(1)
    flush(state, kept, accepted, state_indices=slots, write_indices=writes, buffer_indices=rows)
    ((pointers, s, sizes),) = launches
    follow_layers(pointers, s, state, kept)
    follow(pointers.num_accepted, accepted, s.num_accepted_n)
    follow(pointers.state_indices, slots, s.state_indices_n)
    follow(pointers.write_indices, writes, s.write_indices_n)
    follow(pointers.buffer_indices, rows, s.buffer_indices_n)
    assert (sizes.layers, sizes.N, sizes.HV, sizes.P, sizes.C) == (2, N, HV, P, 4)
    kind = accepted.element_size() // 4
    assert (sizes.num_accepted_kind, sizes.state_indices_kind, sizes.write_indices_kind, sizes.buffer_indices_kind) == (
        kind,
        3 - kind,
        kind,
        3 - kind,
    )


def test_layers_lie_anywhere(launches):
    """Layers of the state behind its slots; of the buffer in the other direction, and every other head of its k."""
    state = torch.randn(P, 2, HV, V, K).transpose(0, 1)
    u, k, log_decay = (
        torch.randn(T, N, 2, *rest).permute(2, 1, 0, 3, *range(4, 3 + len(rest))) for rest in ((HV, V), (2 * H, K), (HV,))
    )
    kept = gd.KVBuffer(u, k[..., ::2, :], log_decay)
    flush(state, kept, 1, state_indices=all_rows(kept))
    ((pointers, s, sizes),) = launches
    follow_layers(pointers, s, state, kept)
    assert (sizes.layers, sizes.N, sizes.C) == (2, N, T)


def test_a_known_verify_is_launched_with_its_own_addresses(launches, monkeypatch):
    verify(tokens(), state=pool(), buffer=buffer())
    monkeypatch.setattr(OPERATIONS["verify"], "describe", None)  # a known call is not described again
    call, state, kept = tokens(), pool(), buffer()
    o = verify(call, state=state, buffer=kept)
    pointers, _, _, s, _ = launches[1]
    follow_tokens(launches[1], call, o)
    follow_buffer(pointers, s, kept)
    assert pointers.state == state.data_ptr()
    assert launches[0][3:] == launches[1][3:]


@pytest.mark.parametrize("counted", [False, True], ids=["int", "tensor"])
def test_a_known_flush_is_launched_with_its_own_addresses(launches, monkeypatch, counted):
    def counts():
        return torch.ones(N, dtype=torch.int32) if counted else 1

    flush(pool(), buffer(), counts(), state_indices=all_rows(buffer()))
    monkeypatch.setattr(OPERATIONS["flush"], "describe", None)  # a known call is not described again
    state, kept, accepted = pool(), buffer(), counts()
    flush(state, kept, accepted, state_indices=all_rows(kept))
    pointers, s, _ = launches[1]
    follow_buffer(pointers, s, kept)
    assert pointers.state == state.data_ptr()
    assert pointers.num_accepted == (accepted.data_ptr() if counted else 0)
    assert launches[0][1:] == launches[1][1:]


def test_what_makes_a_verify_another_one(launches):
    first = dict(tokens(), state=pool(), buffer=buffer())
    verify(first)
    others = [
        dict(qk_l2norm=False),
        dict(beta_logits=True),
        dict(scale=1.0),
        dict(gate=gd.Gate.softplus(torch.zeros(HV))),
        dict(state_indices=torch.arange(N)),
        dict(buffer_indices=torch.arange(N)),
        dict(buffer=buffer(N + 1)),
        dict(buffer=buffer(C=T + 1)),
        dict(state=pool(torch.float32)),
    ]
    for other in others:
        verify({**first, **other})
    assert len(launches) == 1 + len(others)
    assert len(remembered("verify")) == 1 + len(others)


def test_what_makes_a_flush_another_one(launches):
    first = dict(state=pool(), kept=buffer(), num_accepted=1, state_indices=all_rows(buffer()))
    flush(**first)
    others = [
        dict(num_accepted=0),
        dict(num_accepted=2),
        dict(num_accepted=torch.ones(N, dtype=torch.int32)),
        dict(num_accepted=torch.ones(N, dtype=torch.int64)),
        dict(state_indices=torch.arange(N)),
        dict(write_indices=torch.arange(N)),
        dict(buffer_indices=torch.arange(N)),
        dict(buffer_indices=torch.arange(N - 1), state_indices=None),
        dict(state=pool(torch.float32)),
        dict(state=pool()[None], kept=buffer(layers=1)),
    ]
    for other in others:
        flush(**{**first, **other})
    assert len(launches) == 1 + len(others)
    assert len(remembered("flush")) == 1 + len(others)
    assert [sizes.num_accepted_all for _, _, sizes in launches[:3]] == [1, 0, 2]


def test_one_index_tensor_is_not_taken_for_another(launches):
    """Calls that differ only in which index tensor is given."""
    call, state, kept, indices = tokens(), pool(), buffer(), torch.arange(N)
    for name in ("state_indices", "buffer_indices"):
        verify(call, state=state, buffer=kept, **{name: indices})
    assert [(bool(made[0].state_indices), bool(made[0].buffer_indices)) for made in launches] == [(True, False), (False, True)]
    launches.clear()
    for name in ("num_accepted", "state_indices", "write_indices", "buffer_indices"):
        flush(state, kept, **{"num_accepted": 1, name: indices})
    given = [(made[0].num_accepted, made[0].state_indices, made[0].write_indices, made[0].buffer_indices) for made in launches]
    assert given == [tuple(indices.data_ptr() if i == j else 0 for j in range(4)) for i in range(4)]


def grad(x):
    return x.clone().requires_grad_()


def test_a_known_verify_hides_no_mistake(launches):
    call, state, kept = tokens(), pool(), buffer()
    for _ in range(2):
        verify(call, state=state, buffer=kept)
        for wrong, error in (
            (dict(qk_l2norm=1), TypeError),
            (dict(gate="softplus"), TypeError),
            (dict(out=call["v"]), ValueError),
            (dict(beta=call["beta"][:, :1]), ValueError),
            (dict(beta=grad(call["beta"])), gd.UnsupportedProblem),
            (dict(buffer=(kept.u, kept.k, kept.log_decay)), TypeError),
            (dict(buffer=gd.KVBuffer(kept.u.double(), kept.k, kept.log_decay)), TypeError),
            (dict(buffer=buffer(C=T - 1)), ValueError),
            (dict(buffer=gd.KVBuffer(grad(kept.u), kept.k, kept.log_decay)), gd.UnsupportedProblem),
            (dict(buffer_indices=torch.arange(N).short()), TypeError),
        ):
            with pytest.raises(error):
                verify({**call, "state": state, "buffer": kept, **wrong})
    assert len(launches) == 2


def test_a_known_flush_hides_no_mistake(launches):
    state, kept = pool(), buffer()
    for _ in range(2):
        flush(state, kept, 1, state_indices=all_rows(kept))
        for wrong, error in (
            (dict(num_accepted=1), ValueError),
            (dict(num_accepted=True), TypeError),
            (dict(num_accepted=1.0), TypeError),
            (dict(num_accepted=-1), ValueError),
            (dict(num_accepted=torch.ones(N)), TypeError),
            (dict(num_accepted=torch.ones(N, 1, dtype=torch.int32)), ValueError),
            (dict(state=state.double()), TypeError),
            (dict(state=grad(state)), gd.UnsupportedProblem),
            (dict(kept=(kept.u, kept.k, kept.log_decay)), TypeError),
            (dict(kept=gd.KVBuffer(kept.u, kept.k.bfloat16(), kept.log_decay)), TypeError),
            (dict(kept=buffer(N - 1), state_indices=torch.arange(N)), ValueError),
        ):
            with pytest.raises(error):
                flush(**{"state": state, "kept": kept, "num_accepted": 1, **wrong})
    assert len(launches) == 2


def test_misaligned_pools_are_refused(launches):
    """Also of a cached call, where only the address is new."""
    call, state, kept = tokens(), pool(), buffer()
    shifted = torch.zeros(state.numel() + 1).bfloat16()[1:].view(state.shape)
    for _ in range(2):
        with pytest.raises(gd.UnsupportedProblem, match="V rows"):
            verify(call, state=shifted, buffer=kept)
        with pytest.raises(gd.UnsupportedProblem, match="V rows"):
            flush(shifted, kept, 1, state_indices=all_rows(kept))
        verify(call, state=state, buffer=kept)
        flush(state, kept, 1, state_indices=all_rows(kept))
    assert len(launches) == 4


def test_misaligned_rows_of_a_buffers_k(launches):
    """verify, which stores vectors of k, refuses them; u and log decays may lie anywhere, and flush loads single numbers."""
    call, state, kept = tokens(), pool(), buffer()
    shifted = [torch.zeros(x.numel() + 1)[1:].view(x.shape) for x in (kept.u, kept.k, kept.log_decay)]
    for _ in range(2):
        with pytest.raises(gd.UnsupportedProblem, match="rows of k"):
            verify(call, state=state, buffer=gd.KVBuffer(kept.u, shifted[1], kept.log_decay))
        verify(call, state=state, buffer=kept)
    with pytest.raises(gd.UnsupportedProblem, match="rows of k"):
        verify(call, state=state, buffer=gd.KVBuffer(kept.u, torch.zeros(N, T, H, K + 1)[..., :K], kept.log_decay))
    verify(call, state=state, buffer=gd.KVBuffer(shifted[0], kept.k, shifted[2]))
    flush(state, gd.KVBuffer(*shifted), torch.ones(N).int())
    assert len(launches) == 4


def far(x, *strides):
    """A tensor of x's shape with such strides in front, and no memory."""
    return torch.empty(2, dtype=x.dtype, device="meta").as_strided(x.shape, (*strides, *x.stride()[len(strides) :]))


@pytest.mark.parametrize("which", ["state", "u", "k", "log_decay"])
def test_slots_and_rows_2_gib_apart_are_refused(launches, which):
    """Of states and of every tensor of a buffer, in both operations."""
    call, given = tokens(), dict(vars(buffer()), state=pool())
    routes = [
        gd.explain("verify", **call, state=given["state"], buffer=buffer(), backend="cute"),
        gd.explain("flush", given["state"], buffer(), torch.ones(N).int(), backend="cute"),
    ]
    given[which] = far(given[which], 2**31 // given[which].element_size())
    state, kept = given.pop("state"), gd.KVBuffer(**given)
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        launch_of("verify", routes[0], **call, state=state, **parts_of(kept))
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        launch_of("flush", routes[1], state=state, **parts_of(kept), num_accepted=torch.ones(N).int())


def test_layers_may_be_2_gib_apart(launches):
    state, kept = pool(torch.float32)[None].expand(2, P, HV, V, K), buffer(layers=2)
    counts = torch.ones(N).int()
    route = gd.explain("flush", state.clone(), kept, counts, backend="cute")
    apart = gd.KVBuffer(*(far(x, 2**30 + i) for i, x in enumerate((kept.u, kept.k, kept.log_decay))))
    made = launch_of("flush", route, state=far(state, 2**33), **parts_of(apart), num_accepted=counts)
    assert made.layer_strides == (2**35, 2**32, 2**32 + 4, 2**32 + 8)


def test_verify_and_flush_of_no_sequences(launches):
    state, kept, none = pool(), buffer(), torch.arange(0)
    assert verify(tokens((0, T)), state=state, buffer=kept).shape == (0, T, HV, V)
    assert (verify(tokens((1, 4)), cu_seqlens=torch.zeros(1).int(), state=state, buffer=kept) == 0).all()
    flush(state, kept, 1, state_indices=none)
    flush(state, kept, none)
    flush(state, buffer(0), 1, buffer_indices=none)
    flush(state[None][:0], buffer(layers=0), torch.ones(N).int())
    assert launches == []


def test_indices_of_drafts_are_checked_on_request(launches, monkeypatch):
    monkeypatch.setattr(shared, "CHECK", True)
    call, state, kept = tokens(), pool(), buffer()
    past, twice = torch.tensor([0, 1, P]), torch.tensor([0, 1, 1])
    for name, error in (("state_indices", IndexError), ("buffer_indices", IndexError)):
        with pytest.raises(error, match=name):
            verify(call, state=state, buffer=kept, **{name: past})
        with pytest.raises(error, match=name):
            flush(state, kept, 1, **{name: past})
    with pytest.raises(IndexError, match="write_indices"):
        flush(state, kept, torch.ones(N).int(), write_indices=past)
    with pytest.raises(ValueError, match="buffer_indices"):
        verify(call, state=state, buffer=kept, buffer_indices=twice)
    with pytest.raises(ValueError, match="state_indices"):
        flush(state, kept, 0, state_indices=twice)
    assert launches == []
    verify(call, state=state, buffer=kept, state_indices=twice)  # a slot may be read twice
    flush(state, kept, torch.ones(N).int())
    assert len(launches) == 2


# ------------------------------------------------------------------------------------------------ prefill

D = 128  # K and V
PROMPTS = pytest.mark.parametrize("channels", [(), (D,)], ids=["gdn", "kda"])
GDN_TILES = ["k_tiles", "q_tiles"]
KDA_TILES = [*GDN_TILES, "k_restored"]
WORKSPACE = [*KDA_TILES, "tinv_aqk", "scales", "sequence_order", "work_queue", "segment_transitions", "segment_states"]


def prompts(lead=(N, 70), channels=(), dtype=torch.bfloat16):
    return tokens(lead, channels, dtype, D, D)


def states(slots=P, dtype=torch.bfloat16):
    return torch.randn(slots, HV, D, D).to(dtype)


def prefill(call, **options):
    return gd.prefill(**call, **options, backend="cute")


def force_segments(segments, monkeypatch):
    """Prefills from here on split each sequence into that many segments."""
    monkeypatch.setattr(on_host, "segmentation_of", lambda problem, sequences, tokens: on_host.Segmentation(segments))
    remembered("prefill").clear()


def workspace_regions(pointers):
    """The workspace's regions that are present; they begin at multiples of 256 bytes from one another."""
    present = {name: at for name in WORKSPACE if (at := getattr(pointers, name))}
    assert all((at - pointers.k_tiles) % 256 == 0 for at in present.values())
    return list(present)


def first_chunk_slot(starts, n):
    """The slot of a packed sequence's first chunk, as device/chunk_layout.py has it."""
    return starts[n] // CHUNK + n


@PROMPTS
def test_prompts_of_one_length_from_states_of_their_own(launches, channels):
    """By the functional form, with a final state."""
    call, initial = prompts(channels=channels), states(N)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV, *channels).bfloat16()
    gate = gd.Gate.lower_bound(A_log, dt_bias, -3.0)
    o, final = prefill(call, gate=gate, scale=0.5, initial_state=initial, output_final_state=True, beta_logits=True)
    assert [some.kernel for some in launches.kernels] == ["prefill_prepare", "prefill_scan"]
    first, launch = launches
    assert first == launch  # one description for every kernel
    follow_tokens(launch, call, o)
    pointers, scale, bound, s, sizes = launch
    assert (scale, bound) == (0.5, -3.0)
    assert (final.dtype, final.shape) == (initial.dtype, initial.shape)
    follow(pointers.initial_state, initial, s.initial_state_p, s.initial_state_h)
    follow(pointers.final_state, final, s.final_state_p, s.final_state_h)
    follow(pointers.A_log, A_log, s.A_log_h)
    follow(pointers.dt_bias, dt_bias, *[s.dt_bias_h, s.dt_bias_c][: dt_bias.ndim])
    assert (pointers.cu_seqlens, pointers.state_indices, pointers.has_initial_state) == (0, 0, 0)
    assert workspace_regions(pointers) == [*(KDA_TILES if channels else GDN_TILES), "tinv_aqk", "scales", "work_queue"]
    assert (sizes.N, sizes.T, sizes.total, sizes.chunk_slots, sizes.H, sizes.HV, sizes.segments) == (N, 70, 0, 2 * N, H, HV, 1)
    assert (sizes.cu_seqlens_kind, sizes.state_indices_kind, sizes.beta_logits) == (0, 0, 1)
    assert (sizes.beta_kind, sizes.dt_bias_kind, sizes.max_blocks) == (BF16, BF16, on_host.MAX_BLOCKS)
    for hv in range(HV):
        assert hv * sizes.qk_head_factor >> 30 == hv // (HV // H)


@PROMPTS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_prompts_in_a_pool(launches, channels, dtype):
    """Indices at strides of their own, a pool with padding heads."""
    call = prompts((1, 150), channels, torch.float16)
    call["beta"] = call["beta"].float()
    other = torch.int64 if dtype == torch.int32 else torch.int32
    ends, slots = torch.tensor([0, 0, 5, 0, 140, 0], dtype=dtype)[::2], torch.tensor([[4, 9], [-1, 9]], dtype=other)[:, 0]
    resumed, state = torch.tensor([True, True, False])[::2], torch.randn(P, HV + 1, D, D)[:, 1:]
    o, final = prefill(call, cu_seqlens=ends, state=state, state_indices=slots, has_initial_state=resumed)
    assert final is None
    launch = launches[-1]
    follow_tokens(launch, call, o, packed=True)
    pointers, _, _, s, sizes = launch
    follow(pointers.cu_seqlens, ends, s.cu_seqlens_n)
    follow(pointers.state_indices, slots, s.state_indices_n)
    follow(pointers.has_initial_state, resumed, s.has_initial_state_n)
    for which in ("initial_state", "final_state"):
        follow(getattr(pointers, which), state, getattr(s, f"{which}_p"), getattr(s, f"{which}_h"))
    regions = [*(KDA_TILES if channels else GDN_TILES), "tinv_aqk", "scales", "sequence_order", "work_queue"]
    assert workspace_regions(pointers) == regions
    assert (sizes.N, sizes.T, sizes.total, sizes.chunk_slots) == (2, 0, 150, 150 // CHUNK + 2)
    kind = ends.element_size() // 4
    assert (sizes.cu_seqlens_kind, sizes.state_indices_kind, sizes.beta_kind, sizes.dt_bias_kind) == (kind, 3 - kind, FP32, ABSENT)


def test_prompts_at_strides_of_their_own(launches):
    """Slices of a fused projection, expanded beta, out in a wider tensor with heads in front of tokens."""
    fused = torch.randn(N, 70, 2 * H * D + HV * D).bfloat16()
    q, k, v = (x.unflatten(-1, shape) for x, shape in zip(fused.split([H * D, H * D, HV * D], -1), [(H, D), (H, D), (HV, D)]))
    call = dict(q=q, k=k, v=v, g=torch.randn(N, 70, HV, 3)[..., 1], beta=torch.randn(N, 70, 1).half().expand(N, 70, HV))
    out = torch.zeros(N, HV, 70, 2 * D).bfloat16()[..., :D].transpose(1, 2)
    made, final = prefill(call, out=out)
    assert made is out
    assert final is None
    follow_tokens(launches[-1], call, out)
    pointers, scale, _, s, sizes = launches[-1]
    assert scale == D**-0.5
    assert (pointers.initial_state, pointers.final_state) == (0, 0)
    assert sizes.beta_kind == FP16


def test_final_states_without_initial_states(launches):
    _, final = prefill(prompts(), output_final_state=True)
    assert (final.dtype, final.shape) == (torch.float32, (N, HV, D, D))
    pointers, _, _, s, _ = launches[-1]
    assert pointers.initial_state == 0
    follow(pointers.final_state, final, s.final_state_p, s.final_state_h)


def test_checkpoints_in_slots_of_a_pool(launches):
    """Lengths and slots at strides of their own, slots in a pool with padding heads."""
    call, state = prompts(), torch.randn(P, HV + 1, D, D)[:, 1:]
    lens, slots = torch.zeros(4, N).int()[::2].T, torch.full((N, 2), -1)
    prefill(call, state=state, checkpoint_lens=lens, checkpoint_indices=slots)
    assert [dict(some.facts).get("checkpoints") for some in launches.kernels] == [None, True]
    pointers, _, _, s, sizes = launches[-1]
    follow(pointers.checkpoint_lens, lens, s.checkpoint_lens_n, s.checkpoint_lens_j)
    follow(pointers.checkpoint_indices, slots, s.checkpoint_indices_n, s.checkpoint_indices_j)
    follow(pointers.checkpoints, state, s.checkpoints_p, s.checkpoints_h)
    assert (s.checkpoints_n, s.checkpoints_j) == (0, 0)
    assert (sizes.checkpoint_lens_kind, sizes.checkpoint_indices_kind, sizes.checkpoints_per_sequence) == (1, 2, 2)


@pytest.mark.parametrize("pooled", [False, True])
def test_checkpoints_in_a_tensor(launches, pooled):
    call, lens = prompts(), torch.zeros(N, 3, dtype=torch.int64)
    kept = torch.zeros(N, 6, HV + 1, D, D).bfloat16()[:, ::2, 1:]
    given = dict(state=states()) if pooled else dict(initial_state=states(N))
    for _ in range(2):
        prefill(call, **given, checkpoint_lens=lens, checkpoints=kept)
        pointers, _, _, s, sizes = launches[-1]
        follow(pointers.checkpoint_lens, lens, s.checkpoint_lens_n, s.checkpoint_lens_j)
        follow(pointers.checkpoints, kept, s.checkpoints_n, s.checkpoints_j, s.checkpoints_h)
        assert (pointers.checkpoint_indices, s.checkpoints_p) == (0, 0)
        assert (sizes.checkpoint_lens_kind, sizes.checkpoint_indices_kind, sizes.checkpoints_per_sequence) == (2, 0, 3)
        lens, kept = lens.clone(), torch.zeros(N, 6, HV + 1, D, D).bfloat16()[:, ::2, 1:]


@pytest.mark.parametrize("pooled", [False, True])
def test_checkpoints_in_rows_of_a_tensor(launches, pooled):
    call, lens = prompts(), torch.zeros(N, 3, dtype=torch.int64)
    kept, rows = torch.zeros(10, HV + 1, D, D).bfloat16()[::2, 1:], torch.full((3, N), -1).int().T
    given = dict(state=states()) if pooled else dict(initial_state=states(N))
    for _ in range(2):
        prefill(call, **given, checkpoint_lens=lens, checkpoint_indices=rows, checkpoints=kept)
        pointers, _, _, s, sizes = launches[-1]
        follow(pointers.checkpoint_indices, rows, s.checkpoint_indices_n, s.checkpoint_indices_j)
        follow(pointers.checkpoints, kept, s.checkpoints_p, s.checkpoints_h)
        assert (s.checkpoints_n, s.checkpoints_j) == (0, 0)
        assert (sizes.checkpoint_lens_kind, sizes.checkpoint_indices_kind, sizes.checkpoints_per_sequence) == (2, 1, 3)
        kept = torch.zeros(10, HV + 1, D, D).bfloat16()[::2, 1:]


def test_calls_without_checkpoints_have_none(launches):
    prefill(prompts(), state=states())
    pointers, *_, s, sizes = launches[-1]
    assert (pointers.checkpoint_lens, pointers.checkpoint_indices, pointers.checkpoints) == (0, 0, 0)
    assert sizes.checkpoints_per_sequence == 0
    assert [dict(some.facts).get("checkpoints") for some in launches.kernels] == [None, False]


def test_checkpoints_of_one_long_prompt_may_span_more_than_2_gib(launches):
    call, lens = prompts((1, 70)), torch.zeros(1, 2, dtype=torch.int64)
    route = gd.explain("prefill", **call, backend="cute")
    wide = torch.zeros(1, 2, HV, D, D).as_strided((1, 2, HV, D, D), (2**30, HV * D * D, D * D, D, 1))
    assert launch_of("prefill", route, **call, checkpoint_lens=lens, checkpoints=wide)


@PROMPTS
@pytest.mark.parametrize("segments", [2, 7])
def test_segments_launch_transitions_state_passing_and_scan(launches, monkeypatch, channels, segments):
    force_segments(segments, monkeypatch)
    call = prompts(channels=channels)
    prefill(call, state=states())
    kernels = ["prefill_prepare", "prefill_scan", "prefill_state_passing", "prefill_scan"]
    assert [some.kernel for some in launches.kernels] == kernels
    assert [dict(some.facts).get("transitions") for some in launches.kernels] == [None, True, None, False]
    assert all(launch == launches[0] for launch in launches)
    pointers, *_, sizes = launches[0]
    assert workspace_regions(pointers)[-2:] == ["segment_transitions", "segment_states"]
    assert sizes.segments == segments


def test_segmentation_depends_on_sequences_and_tokens(launches, monkeypatch):
    """Calls and explain pass the same numbers."""
    asked = []
    monkeypatch.setattr(on_host, "segmentation_of", lambda problem, *sizes: asked.append(sizes) or on_host.Segmentation(1))
    ends = torch.tensor([0, 4, 8], dtype=torch.int32)
    for call in (prompts(), {**prompts((1, 9)), "cu_seqlens": ends}):
        prefill(call)
        gd.explain("prefill", **call, backend="cute")
    assert asked == [(N, N * 70)] * 2 + [(2, 9)] * 2


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@PROMPTS
def test_workspace_regions_have_room_and_do_not_overlap(launches, monkeypatch, channels, packed, segments):
    """Every region up to the last byte of its last entry."""
    force_segments(segments, monkeypatch)
    made, measure = [], on_host._workspace
    monkeypatch.setattr(on_host, "_workspace", lambda *facts: made.append(measure(*facts)) or made[-1])
    prefill({**prompts((1, 200), channels), "cu_seqlens": torch.tensor([0, 5, 190])} if packed else prompts(channels=channels))
    ((size, offsets),) = made
    sizes = launches[0][-1]
    qk_chunks, v_chunks = sizes.chunk_slots * (sizes.HV if channels else sizes.H), sizes.chunk_slots * sizes.HV
    states = sizes.N * sizes.HV * segments * D * D * 4 if segments > 1 else 0
    ends = dict(
        k_tiles=qk_chunks * TILE_BYTES,
        q_tiles=qk_chunks * TILE_BYTES,
        k_restored=v_chunks * TILE_BYTES if channels else 0,
        tinv_aqk=v_chunks * 2 * TRIANGLE_BYTES,
        scales=v_chunks * SCALE_BYTES,
        sequence_order=4 * sizes.N if packed else 0,
        work_queue=4,
        segment_transitions=2 * states,
        segment_states=states,
    )
    assert [at < 0 for at in offsets] == [end == 0 for end in ends.values()]
    taken = [(at, at + end) for at, end in zip(offsets, ends.values(), strict=True) if end]
    assert all(at % 256 == 0 for at, _ in taken)
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(taken))
    assert taken[-1][1] <= size


def test_every_chunk_of_packed_prompts_has_a_slot(launches):
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.choice((0, 1, 63, 64, 65, rng.randrange(300))) for _ in range(rng.randrange(1, 9))]
        starts = [0, *itertools.accumulate(lengths)]
        total = starts[-1] + rng.choice((0, 1, 100))
        prefill({**prompts((1, total)), "cu_seqlens": torch.tensor(starts)})
        slots = [first_chunk_slot(starts, n) + c for n, length in enumerate(lengths) for c in range(-(-length // CHUNK))]
        assert slots == sorted(set(slots))
        assert max(slots, default=0) < launches[-1][-1].chunk_slots


def test_a_known_prefill_is_launched_with_its_own_addresses(launches, monkeypatch):
    prefill(prompts(), initial_state=states(N), output_final_state=True)
    monkeypatch.setattr(OPERATIONS["prefill"], "describe", None)  # a known call is not described again
    call, initial = prompts(), states(N)
    made = [prefill(call, initial_state=initial, output_final_state=True) for _ in range(2)]
    assert made[0][0].data_ptr() != made[1][0].data_ptr()
    for (o, final), launch in zip(made, launches[3::2]):
        pointers, _, _, s, _ = launch
        follow_tokens(launch, call, o)
        assert pointers.initial_state == initial.data_ptr()
        follow(pointers.final_state, final, s.final_state_p, s.final_state_h)
        assert launch[3:] == launches[0][3:]


def test_changes_that_need_another_launch(launches):
    first = dict(prompts(), state=states())
    prefill(first)
    others = [
        dict(qk_l2norm=False),
        dict(beta_logits=True),
        dict(scale=1.0),
        dict(gate=gd.Gate.softplus(torch.zeros(HV))),
        dict(gate=gd.Gate.lower_bound(torch.zeros(HV), bound=-4.0)),
        dict(state_indices=torch.arange(N)),
        dict(state_indices=torch.arange(N).int()),
        dict(has_initial_state=torch.ones(N, dtype=torch.bool)),
        dict(state=states(dtype=torch.float32)),
        dict(state=None),
        dict(state=None, output_final_state=True),
        dict(state=None, initial_state=states(N)),
        dict(state=None, initial_state=states(N), output_final_state=True),
        dict(state=None, initial_state=states(N, torch.float32)),
        dict(checkpoint_lens=torch.zeros(N, 1).int(), checkpoint_indices=torch.full((N, 1), -1)),
        dict(checkpoint_lens=torch.zeros(N, 1).int(), checkpoint_indices=torch.full((N, 1), -1).int()),
        dict(checkpoint_lens=torch.zeros(N, 1, dtype=torch.int64), checkpoint_indices=torch.full((N, 1), -1)),
        dict(checkpoint_lens=torch.zeros(N, 2).int(), checkpoint_indices=torch.full((N, 2), -1)),
        dict(checkpoint_lens=torch.zeros(N, 1).int(), checkpoints=states(N).unsqueeze(1)),
        dict(beta=first["beta"].float()),
        dict(out=torch.empty_like(first["v"])),
        dict(prompts((1, 70))),
        dict(prompts((1, 70)), cu_seqlens=torch.tensor([0, 70])),
        dict(prompts((1, 70)), cu_seqlens=torch.tensor([0, 7, 70])),
    ]
    for other in others:
        prefill({**first, **other})
    assert len(remembered("prefill")) == 1 + len(others)


def test_a_pool_is_not_taken_for_initial_states(launches):
    """Two calls with the same tensor, as another argument."""
    call, given = prompts(), states(N)
    prefill(call, state=given)
    prefill(call, initial_state=given)
    assert [(made[0].initial_state, made[0].final_state) for made in launches[1::2]] == [
        (given.data_ptr(),) * 2,
        (given.data_ptr(), 0),
    ]


def test_a_known_prefill_hides_no_mistake(launches):
    call, state = prompts(), states()
    for _ in range(2):
        prefill(call, state=state)
        for wrong, error in (
            (dict(qk_l2norm=1), TypeError),
            (dict(output_final_state=0), TypeError),
            (dict(scale=True), TypeError),
            (dict(beta=[1.0]), TypeError),
            (dict(state=[0]), TypeError),
            (dict(gate="softplus"), TypeError),
            (dict(out=call["v"]), ValueError),
            (dict(output_final_state=True), ValueError),
            (dict(initial_state=states(N)), ValueError),
            (dict(has_initial_state=torch.ones(N)), TypeError),
            (dict(beta=call["beta"][:, :1]), ValueError),
            (dict(beta=grad(call["beta"])), gd.UnsupportedProblem),
        ):
            with pytest.raises(error):
                prefill({**call, "state": state, **wrong})
    out = torch.empty_like(call["v"])
    for _ in range(2):
        prefill(call, out=out)
        for name in ("q", "k", "v"):
            aliased = call["v"] if name == "v" else out[:, :, :H]
            with pytest.raises(ValueError, match="memory apart"):
                prefill({**call, name: aliased}, out=aliased if name == "v" else out)
    assert len(launches) == 8


def off(x, by=1):
    """A copy of x that starts `by` elements off a 16-byte boundary."""
    storage = torch.zeros(x.numel() + 8, dtype=x.dtype)
    assert storage.data_ptr() % 16 == 0
    return storage[by : by + x.numel()].view(x.shape).copy_(x)


@PROMPTS
def test_misaligned_prompts_are_refused(launches, channels):
    """Also once the call is known, when only the address shows it. A head's g and beta are read number by number."""
    call, state, out = prompts(channels=channels), states(), torch.zeros(N, 70, HV, D).bfloat16()
    reasons = dict(q="rows of q and k", k="rows of q and k", v="rows of v and out", state="V rows", out="rows of v and out")
    reasons |= dict(g="KDA's g") if channels else {}
    given = dict(call, state=state, out=out)
    for _ in range(2):
        prefill(given)
        for name, reason in reasons.items():
            with pytest.raises(gd.UnsupportedProblem, match=reason):
                prefill({**given, name: off(given[name])})
    for name in {"g", "beta"} - set(reasons):
        prefill({**given, name: off(given[name])})
    wide = torch.zeros(N, 70, HV, 2 * D).bfloat16()
    with pytest.raises(gd.UnsupportedProblem, match="rows of v and out"):
        prefill({**given, "out": wide[..., ::2]})
    with pytest.raises(gd.UnsupportedProblem, match="V rows"):
        prefill({**given, "state": torch.zeros(P, HV, D, 2 * D).bfloat16()[..., :D]})
    with pytest.raises(gd.UnsupportedProblem, match="V rows"):
        prefill(call, initial_state=off(states(N)))
    kept, lens = states(N, torch.float32).unsqueeze(1), torch.zeros(N, 1).int()
    for bad in (off(kept), torch.zeros(N, 1, HV, D, D + 4)[..., :D], torch.zeros(N, 1, HV * D * D + 2)[..., 2:].view(kept.shape)):
        with pytest.raises(gd.UnsupportedProblem, match="V rows"):
            prefill(call, checkpoint_lens=lens, checkpoints=bad)
    assert len(launches) == 4 + 2 * len({"g", "beta"} - set(reasons))


def test_other_head_dims_are_refused(launches):
    for K, V in ((96, 192), (32, 128), (128, 96)):
        with pytest.raises(gd.UnsupportedProblem, match=f"got K={K}, V={V}"):
            prefill(tokens((N, 3), (), torch.bfloat16, K, V))
    assert launches == []


@pytest.mark.parametrize("which", ["initial_state", "state", "out"])
def test_prompts_2_gib_apart_are_refused(launches, which):
    call, optional = prompts((2, 1)), ["initial_state", "state", "state_indices", "has_initial_state", "final_state", "out"]
    given = dict.fromkeys(optional) | {which: far(call["v"] if which == "out" else states(2), 2**30)}
    route = gd.explain("prefill", **call, backend="cute")
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        launch_of("prefill", route, **call, **given)


def test_one_prompt_may_be_longer_than_2_gib(launches):
    call = prompts((1, 70))
    route = gd.explain("prefill", **call, backend="cute")
    call["v"] = far(call["v"], 2**30)
    assert launch_of("prefill", route, **call)


def test_prefill_of_no_sequences(launches):
    state = states()
    before = state.clone()
    o, final = prefill(prompts((0, 5)), output_final_state=True)
    assert (o.shape, final.shape) == ((0, 5, HV, D), (0, HV, D, D))
    o, _ = prefill(prompts((1, 4)), cu_seqlens=torch.zeros(1).int(), state=state)
    assert (o == 0).all()
    assert torch.equal(state, before)
    assert launches == []


def test_prompts_of_no_tokens_still_have_final_states(launches):
    prefill(prompts((N, 0)), initial_state=states(N), output_final_state=True)
    assert launches[0][-1].chunk_slots > 0


def test_gated_delta_check_covers_prefills_indices(launches, monkeypatch):
    monkeypatch.setattr(shared, "CHECK", True)
    call, state = prompts(), states()
    for _ in range(2):
        for slots, error in (([0, 1, P], IndexError), ([0, 1, 1], ValueError)):
            with pytest.raises(error, match="state_indices"):
                prefill(call, state=state, state_indices=torch.tensor(slots))
        for lens, slots, error in ((65, 3, ValueError), (128, 3, ValueError), (64, P, IndexError), (64, 2, ValueError)):
            lens, slots = (torch.tensor([[-1]] * (N - 1) + [[x]]) for x in (lens, slots))
            with pytest.raises(error, match=r"checkpoint_(lens|indices)"):
                prefill(call, state=state, checkpoint_lens=lens, checkpoint_indices=slots)
        for ends in ([0, 5, 4], [1, 5, 9], [0, 5, 10]):
            with pytest.raises(ValueError, match="cu_seqlens"):
                prefill(prompts((1, 9)), cu_seqlens=torch.tensor(ends), state=state)
        assert launches == []
        prefill(call, state=state, state_indices=torch.tensor([0, -1, -1]))
        prefill(prompts((1, 9)), cu_seqlens=torch.tensor([0, 5, 8]), state=state)
        assert len(launches) == 4
        launches.clear()


# ------------------------------------------------------------------------------------------------ prefill, dispatched


def prompt_problem(HV=8, **changes):
    dtypes = dict.fromkeys(("dtype", "g_dtype", "beta_dtype"), torch.bfloat16) | dict(state_dtype=torch.float32)
    return Problem("prefill", **{"axis": "head", "H": 1, "HV": HV, "K": D, "V": D, "gate": "softplus", **dtypes, **changes})


def test_few_long_prompts_are_segmented_and_others_are_not():
    """No more blocks than run at once, and no segment too short to pay for state passing."""
    found = set()
    for HV, N, T in itertools.product((1, 2, 4, 8, 16, 64), (1, 2, 3, 7, 33, 300), (0, 1, 512, 2048, 8191, 8192, 100_000)):
        made = on_host.segmentation_of(prompt_problem(HV), N, N * T)
        found.add(made.segments)
        assert made.segments >= 1
        if made.segments > 1:
            assert made.segments * 2 * HV * N <= on_host.MAX_BLOCKS
            assert made.segments * on_host.MIN_SEGMENT <= T
            assert made.segments >= 4 or (made.segments == 3 and T >= on_host.MIN_THREE_SEGMENTS)
        assert made.rows == (128 if 2 * HV * N > on_host.MAX_BLOCKS else 64)
        if made.segments == 1 and 2 * 3 * HV * N <= on_host.MAX_BLOCKS:
            assert T < on_host.MIN_THREE_SEGMENTS  # room for three, and tokens for them
    assert found > {1, 4, 16}
    assert on_host.segmentation_of(prompt_problem(), 0, 0) == on_host.Segmentation(1)


def test_blocks_of_states_with_64_v_rows_have_64():
    for N, HV in itertools.product((1, 300), (1, 64)):
        assert on_host.segmentation_of(prompt_problem(HV, V=64), N, N * 1000).rows == 64


def test_a_longer_prompt_has_no_fewer_segments():
    for HV, N in itertools.product((1, 2, 8, 16), (1, 2, 5)):
        segments = [on_host.segmentation_of(prompt_problem(HV), N, N * T).segments for T in range(0, 40_000, 100)]
        assert segments == sorted(segments)


@pytest.mark.parametrize("axis", ["head", "channel"])
def test_variants_of_a_prefill_are_those_of_every_segmentation(axis):
    problem = prompt_problem(axis=axis)
    listed = dispatch.variants_of(problem)
    several = [on_host.Segmentation(segments) for segments in (2, 3, 16)]
    for segmentation in (on_host.Segmentation(1), on_host.Segmentation(1, 128), *several):
        made = [some.kernel for some in on_host.variants_of(problem, segmentation)]
        passing = ["prefill_scan", "prefill_state_passing"] if segmentation in several else []
        assert made == ["prefill_prepare", *passing, "prefill_scan"]
        assert set(on_host.variants_of(problem, segmentation)) <= set(listed)
    assert sorted(some.kernel for some in listed) == ["prefill_prepare", *["prefill_scan"] * 3, "prefill_state_passing"]
    new = set(dispatch.variants_of(prompt_problem(axis=axis, options=frozenset({"checkpoints"})))) - set(listed)
    assert [(some.kernel, dict(some.facts)["transitions"]) for some in new] == [("prefill_scan", False)] * 2


def test_compile_time_facts_of_prefills_kernels():
    """Heads, index types and layouts are runtime arguments; each compile-time fact belongs to the kernels that use it."""

    def changed(**changes):
        return {some.kernel.removeprefix("prefill_") for some in set(dispatch.variants_of(prompt_problem(**changes))) - set(first)}

    first = dispatch.variants_of(prompt_problem())
    for same in (dict(H=8, HV=64), dict(beta_logits=True), dict(beta_dtype=torch.float32), dict(options=frozenset({"pool"}))):
        assert changed(**same) == set()
    assert changed(axis="channel") == changed(dtype=torch.float16) == {"prepare", "scan"}
    assert changed(g_dtype=torch.float32) == changed(gate="log") == changed(qk_l2norm=False) == {"prepare"}
    assert changed(state_dtype=torch.bfloat16) == {"scan"}
    assert changed(K=64) == {"prepare", "scan"}
    assert changed(V=64) == {"scan", "state_passing"}


def test_prefills_of_the_released_models_are_shipped():
    """Qwen3-Next and Qwen3.5, whose log decays may be fp32, and Kimi Linear; both state dtypes."""
    shipped = set(dispatch.shipped())
    wanted = [("head", "log"), ("head", "softplus"), ("channel", "log"), ("channel", "softplus"), ("channel", "lower_bound")]
    for (axis, gate), state in itertools.product(wanted, (torch.float32, torch.bfloat16)):
        for options in (frozenset(), frozenset({"checkpoints"})):
            assert set(dispatch.variants_of(prompt_problem(axis=axis, gate=gate, state_dtype=state, options=options))) <= shipped
    assert set(dispatch.variants_of(prompt_problem(gate="log", g_dtype=torch.float32))) <= shipped


# ------------------------------------------------------------------------------------------------ memory of known calls


def within(x, like, offset=0):
    """A tensor of like's shape and dtype in x's memory."""
    x = x.flatten().view(like.dtype)[offset : offset + like.numel()]
    return x.view(like.shape)


@pytest.mark.parametrize("op", ["decode", "verify", "flush", "prefill"])
def test_a_known_call_at_addresses_that_overlap_is_refused(launches, op):
    """The same shapes come first with tensors apart, then with out, the pool or the buffer overlapping another tensor."""
    call, state = tokens(V=64), torch.randn(P, HV, 64, K).bfloat16()
    out, kept, counts = torch.zeros_like(call["v"]), gd.KVBuffer.empty(N, T, H, HV, K, 64), torch.ones(N, dtype=torch.int32)
    both = torch.zeros(2 * out.numel()).bfloat16()
    in_the_pool = gd.KVBuffer(within(state, kept.u), kept.k, kept.log_decay)
    first, *overlapping = {
        "decode": (dict(call, state=state, out=out), dict(out=within(state, out, 128))),
        "prefill": (dict(call, state=state, out=out), dict(out=within(state, out, 128))),
        "verify": (dict(call, state=state, buffer=kept, out=out), dict(out=within(state, out, 128)), dict(buffer=in_the_pool)),
        "flush": (dict(state=state, buffer=kept, num_accepted=counts), dict(num_accepted=within(state, counts, 2))),
    }[op]
    if op != "flush":
        overlapping.append(dict(v=within(both, out), out=within(both, out, out.numel() - 16)))
    run = getattr(gd, op)
    run(**first, backend="cute")
    before = len(launches)
    for change in overlapping:
        with pytest.raises(ValueError, match="expected memory apart"):
            run(**{**first, **change}, backend="cute")
    assert len(launches) == before


def test_known_calls_on_interleaved_views_are_launched(launches):
    """Views of one allocation whose ranges overlap but which share no byte; each set of addresses is checked once."""
    call, wide = tokens(), torch.randn(P, 2, HV, V, K).bfloat16()
    fused = [torch.zeros(N, T, 2 * HV, V).bfloat16() for _ in range(2)]
    for both in fused:
        for _ in range(2):
            decode({**call, "v": both[:, :, ::2]}, state=wide[:, 0], out=both[:, :, 1::2])
    assert [launch[0].o for launch in launches] == [x[:, :, 1::2].data_ptr() for x in fused for _ in range(2)]
    ((_, known),) = remembered("decode")._calls.popitem()[1][1]
    assert len(known.placement.known) == 2


@pytest.mark.parametrize(("N", "prefetched"), [(1, 1), (40, 40), (112, 0), (200, 200), (260, 0)])
def test_small_launches_prefetch_their_states_but_where_it_was_measured_to_cost(launches, N, prefetched):
    """Of bf16 GDN with 128 KiB a sequence: not from 14 to 24 MiB, nor past 1024 heads."""
    decode(tokens((N, 1), K=128, V=128), state=torch.zeros(N, HV, 128, 128).bfloat16())
    assert launches[0][-1].prefetch_sequences == prefetched


@pytest.mark.parametrize("op", ["decode", "verify", "flush"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 32), (96, 192), (64, 256), (64, 96), (16, 64)], ids=str)
def test_blocks_share_a_heads_rows_evenly(op, K, V):
    operation = OPERATIONS[op]
    for axis, state_dtype, T in itertools.product(("head", "channel"), (torch.bfloat16, torch.float32), (1, 4)):
        problem = Problem(op, axis, 2, 4, K, V, T, state_dtype=state_dtype, dtype=torch.bfloat16, g_dtype=torch.bfloat16)
        for heads in (1, 8, 100, 150, 200, 300, 500, 1000, 5000):
            plan = operation.plan(problem, heads, heads * T)
            assert V % operation.block_rows(problem, plan.schedule) == 0
            assert plan.variants[0] in operation.variants(problem)


def test_a_check_that_is_neither_on_nor_off_is_an_error(launches, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_CHECK", "maybe")
    with pytest.raises(ValueError, match="GATED_DELTA_CHECK: expected 0 or 1"):
        decode(tokens(), state=pool())
    assert launches == []
