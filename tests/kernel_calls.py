"""Calls that the CuTe backend accepts, in all their forms: for tests of its host code on a CPU."""

import functools
import math

import numpy
import torch

import gated_delta as gd
from gated_delta.gpus import H200
from gated_delta.kernels.prefill.arguments import CHUNK

N, H, HV, P = 3, 2, 4, 7
T, K, V = 3, 64, 96  # of drafts
D = 128  # K and V of prompts
i32, i64, bf16, fp16, f32 = torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32
OPS = ("decode", "verify", "flush", "prefill")
SLOTS = torch.arange(N, dtype=i32)
"""One slot per sequence."""


# ---------------------------------------------------------------- tensors


def ints(*values, dtype=i32):
    return torch.tensor(values, dtype=dtype)


def fp32_bits(x):
    return int(numpy.float32(x).view(numpy.int32))


def spaced_indices(values, dtype):
    """Indices with a stride of 2."""
    return torch.stack([torch.as_tensor(values), torch.full((len(values),), 9)], 1).to(dtype)[:, 0]


def tokens(lead=(N, T), axis="head", dtype=bf16, K=K, V=V):
    channels = (K,) if axis == "channel" else ()
    return dict(
        q=torch.randn(*lead, H, K).to(dtype),
        k=torch.randn(*lead, H, K).to(dtype),
        v=torch.randn(*lead, HV, V).to(dtype),
        g=-torch.randn(*lead, HV, *channels).abs().to(dtype),
        beta=torch.randn(*lead, HV).to(dtype),
    )


def prompts(lead=(N, 70), axis="head", dtype=bf16):
    return tokens(lead, axis, dtype, D, D)


def packed_prompts(*ends):
    return prompts((1, 9)) | dict(cu_seqlens=torch.tensor(ends))


def with_gate(call):
    """The call with A_log, dt_bias, a bound of -3 and a scale of 0.5."""
    dt_bias = torch.randn(call["g"].shape[2:]).bfloat16()
    return call | dict(gate=gd.Gate.lower_bound(torch.randn(HV), dt_bias, -3.0), scale=0.5)


def strided_tokens(T, K, V, axis="head", spread_channels=True):
    """Views: q and v of a fused projection, every other head of k and every other beta.

    out has heads in front of tokens. g and out are spread over channels, or over heads only.
    """
    channels = (K,) if axis == "channel" else ()
    q, v = torch.randn(N, T, H * K + HV * V).bfloat16().split([H * K, HV * V], -1)
    if spread_channels:
        g = torch.randn(N, T, HV, *channels, 3)[..., 1]
    else:
        g = torch.randn(N, T, 2 * HV, *channels)[:, :, ::2]
    wide = torch.zeros(N, HV, T, 2 * V).bfloat16().transpose(1, 2)
    return dict(
        q=q.unflatten(-1, (H, K)),
        k=torch.randn(N, T, 2 * H, K).bfloat16()[:, :, ::2],
        v=v.unflatten(-1, (HV, V)),
        g=g,
        beta=torch.randn(N, T, 2 * HV).half()[..., ::2],
        out=wide[..., ::2] if spread_channels else wide[..., :V],
    )


def norm_and_z(lead=(N, T), activation="silu", weight_dtype=fp16, eps=1e-5, V=V):
    """A norm and its gate z, as views of wider tensors."""
    weight = torch.randn(V, 2)[:, 1].to(weight_dtype)
    return dict(
        norm=gd.GatedNorm(weight, eps, activation),
        z=torch.randn(*lead, HV, 3, V).bfloat16()[:, :, :, 1],
    )


def pool(dtype=bf16):
    return torch.randn(P, HV, V, K).to(dtype)


def strided_pool():
    """Every other head of a larger pool."""
    return torch.randn(P, 2 * HV, V, K)[:, ::2]


def prompt_states(slots=P, dtype=bf16):
    return torch.randn(slots, HV, D, D).to(dtype)


def buffer(rows=N, C=T, axis="head", layers=None):
    new = gd.KVBuffer.empty(rows, C, H, HV, K, V, gate=axis, num_layers=layers)
    for x in vars(new).values():
        x.fill_(math.nan)
    return new


def strided_buffer(axis):
    """One layer of a buffer without its first token; every other head of k; GDN: heads strided."""
    layer = buffer(N + 1, T + 1, axis, layers=3).layer(1)
    k = torch.randn(N + 1, T, 2 * H, K)[:, :, ::2]
    log_decay = torch.randn(N + 1, HV, T).mT if axis == "head" else layer.log_decay[:, 1:]
    return gd.KVBuffer(layer.u[:, 1:], k, log_decay)


def strided_layers(axis):
    """A state with layers behind slots; a buffer with tokens in front, every other head of k."""
    channels = (K,) if axis == "channel" else ()
    shapes = (HV, V), (2 * H, K), (HV, *channels)
    u, k, log_decay = (
        torch.randn(T, N, 2, *rest).permute(2, 1, 0, 3, *range(4, 3 + len(rest))) for rest in shapes
    )
    return dict(
        state=torch.randn(P, 2, HV, V, K).transpose(0, 1),
        buffer=gd.KVBuffer(u, k[..., ::2, :], log_decay),
    )


def buffered(C=T, dtype=i32, axis="head"):
    """buffer and buffer_lens, for a decode."""
    return dict(buffer=buffer(C=C, axis=axis), buffer_lens=torch.zeros(N, dtype=dtype))


# ---------------------------------------------------------------- calls


def valid_call(op, axis="head"):
    """A plain call, for tests to change."""
    if op == "prefill":
        return dict(prompts(axis=axis), state=prompt_states())
    if op == "flush":
        indices = dict(num_accepted=1, state_indices=SLOTS)
        return dict(state=pool(), buffer=buffer(axis=axis), **indices)
    call = dict(tokens(axis=axis), state=pool())
    return call | (dict(buffer=buffer(axis=axis)) if op == "verify" else {})


def tensors_of(call):
    """A call's tensors, by their names among the operation's arguments."""
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    if (gate := call.get("gate")) is not None:
        tensors |= {name: x for name, x in vars(gate).items() if isinstance(x, torch.Tensor)}
    if (norm := call.get("norm")) is not None:
        tensors |= dict(norm_weight=norm.weight)
    if (parts := call.get("buffer")) is not None:
        tensors |= {f"buffer_{part}": x for part, x in vars(parts).items()}
    return tensors


def with_tensor(call, name, change):
    """The call with change(tensor) as the tensor of that name, also of its buffer."""
    argument, _, part = name.partition("_")
    if argument != "buffer" or name in call:
        return call | {name: change(call[name])}
    parts = vars(call["buffer"])
    return call | dict(buffer=gd.KVBuffer(**parts | {part: change(parts[part])}))


CALLS = {}
"""Functions from an axis to a call and the launch's sizes. The name's first word: the operation."""


def named(*parameters):
    """Adds a function to CALLS, once for each of its parameter sets."""

    def add(function):
        for values in parameters or [()]:
            name = " ".join([function.__name__, *map(str, values)])
            CALLS[name] = functools.partial(function, *values)
        return function

    return add


@named()
def decode_in_a_pool(axis):
    indices = dict(state_indices=ints(5, 1, -1), write_indices=ints(0, 2, 3, dtype=i64))
    sizes = dict(N=N, T=T, P=P, slots_per_sequence=0, update_state=1, beta_factor=fp32_bits(1))
    states = dict(state=pool(), beta_logits=True)
    return with_gate(tokens(axis=axis)) | states | indices, sizes


@named()
def decode_strided(axis):
    steps = torch.randn(N + 1, T + 2, HV + 1, V, K)[:, 1:, :HV]
    states = dict(state=strided_pool(), update_state=False, intermediate_states=steps)
    return strided_tokens(T, K, V, axis) | states, dict(N=N, T=T, update_state=0)


@named()
def decode_strided_v(axis):
    v = torch.randn(N, HV, T, V).bfloat16().transpose(1, 2)
    return tokens(axis=axis) | dict(v=v, state=pool()), dict(N=N, T=T)


@named()
def decode_packed_with_a_slot_per_token(axis):
    """T is the number of slots per sequence, fewer than its tokens."""
    indices = dict(
        cu_seqlens=ints(0, 4, 8, dtype=i64),
        num_accepted=ints(1, 9),
        state_indices=torch.arange(P).int().expand(2, P)[:, :5].contiguous(),
    )
    call = with_gate(tokens((1, 9), axis, fp16)) | dict(beta=torch.randn(1, 9, HV), state=pool())
    return call | indices, dict(N=2, T=5, total=9, slots_per_sequence=5)


@named((i32,), (i64,))
def decode_with_intermediate_rows(dtype, axis):
    """Fewer rows than sequences."""
    rows = dict(
        intermediate_states=torch.randn(2, T + 1, HV, V, K).bfloat16(),
        intermediate_indices=spaced_indices([1, -1, 0], dtype),
    )
    return tokens(axis=axis) | dict(state=pool()) | rows, dict(N=N, T=T)


@named((i32, i64), (i64, i32))
def decode_with_a_buffer(lens_dtype, rows_dtype, axis):
    """Of more rows and tokens than the call has."""
    indices = dict(
        state_indices=ints(5, 1, -1, dtype=rows_dtype),
        buffer_indices=spaced_indices([4, -1, 0], rows_dtype),
        buffer_lens=spaced_indices([2, 31, -1], lens_dtype),
    )
    call = with_gate(tokens(axis=axis)) | dict(state=pool(), buffer=buffer(5, 32, axis), **indices)
    return call, dict(N=N, T=T, P=P, C=32, group_size=HV // H)


@named()
def decode_with_a_strided_buffer(axis):
    states = dict(state=strided_pool(), buffer=strided_buffer(axis), buffer_lens=SLOTS.clone())
    return strided_tokens(T, K, V, axis) | states, dict(N=N, T=T, C=T)


@named()
def decode_packed_with_a_buffer(axis):
    """Longer sequences than rows."""
    call = tokens((1, 9), axis, fp16) | dict(cu_seqlens=ints(0, 4, 8, dtype=i64))
    call |= dict(state=pool(), buffer=buffer(2, 1, axis), buffer_lens=ints(0, 1))
    return call, dict(N=2, T=16, total=9, C=1)


@named()
def verify_in_a_pool(axis):
    indices = dict(state_indices=ints(5, 1, -1), buffer_indices=ints(4, -1, 0, dtype=i64))
    states = dict(state=pool(), buffer=buffer(5, 6, axis), beta_logits=True)
    sizes = dict(N=N, T=T, P=P, C=6, group_size=HV // H, beta_factor=fp32_bits(1))
    return with_gate(tokens(axis=axis)) | states | indices, sizes


@named()
def verify_strided(axis):
    states = dict(state=strided_pool(), buffer=strided_buffer(axis))
    return strided_tokens(T, K, V, axis) | states, dict(N=N, T=T, beta_factor=0)


@named()
def verify_packed(axis):
    """T is the number of tokens in a row of the buffer."""
    call = tokens((1, 9), axis, fp16) | dict(cu_seqlens=ints(0, 4, 8, dtype=i64))
    call |= dict(state=pool(), buffer=buffer(2, 5, axis))
    return call, dict(N=2, T=5, total=9, C=5)


@named((i32,), (i64,))
def verify_of_trees(dtype, axis):
    """In a table that is wider than the drafts and not dense."""
    call = tokens(axis=axis) | dict(state=pool(), buffer=buffer(axis=axis))
    parents = torch.arange(-1, 2 * T).expand(N, -1).to(dtype)[:, ::2]
    return call | dict(parents=parents), dict(N=N, T=T, parents_width=T + 1)


@named(("dense",), ("single",), ("packed",))
def decode_with_a_norm(form, axis, op="decode"):
    lead = dict(dense=(N, T), single=(1, T), packed=(1, 9))[form]
    call = valid_call(op, axis) | tokens(lead, axis) | norm_and_z(lead, "sigmoid")
    if form == "packed":
        call["cu_seqlens"] = ints(0, 3, 6, 9)
    return call, dict(norm_eps=fp32_bits(1e-5), norm_sigmoid=1)


@named(("dense",), ("single",), ("packed",))
def verify_with_a_norm(form, axis):
    return decode_with_a_norm(form, axis, "verify")


@named((0,), (1,), (2**40,))
def flush_by_a_number(count, axis):
    call = dict(state=pool(), buffer=buffer(N, 5, axis), num_accepted=count)
    sizes = dict(layers=1, N=N, P=P, C=5, num_accepted_all=min(count, 5))
    return call | dict(state_indices=SLOTS.clone()), sizes


@named((i32, i64), (i64, i32))
def flush_layers_by_a_tensor(counts_dtype, slots_dtype, axis):
    """Fewer sequences than rows of the buffer."""
    call = dict(
        state=torch.randn(2, P, HV + 1, V, K)[:, :, 1:],
        buffer=buffer(N + 2, 4, axis, layers=2),
        num_accepted=torch.arange(2 * N, dtype=counts_dtype)[::2],
        write_indices=torch.arange(3 * N, dtype=counts_dtype)[::3],
        state_indices=spaced_indices([0, 2, 4], slots_dtype),
        buffer_indices=spaced_indices([1, 3, 5], slots_dtype),
    )
    return call, dict(layers=2, N=N, P=P, C=4)


@named((i32,), (i64,))
def flush_of_a_path(dtype, axis):
    path = torch.arange(2 * T, dtype=dtype).expand(N, -1)[:, ::2]
    call = dict(state=pool(), buffer=buffer(N, 5, axis), num_accepted=2, path=path)
    return call, dict(N=N, C=5, path_width=T)


@named()
def flush_strided_layers(axis):
    indices = dict(num_accepted=1, state_indices=SLOTS.clone())
    return strided_layers(axis) | indices, dict(layers=2, N=N, C=T)


@named()
def prefill_from_initial_states(axis):
    states = dict(initial_state=prompt_states(N), output_final_state=True)
    states |= dict(beta_logits=True, allow_neg_eigval=True)
    sizes = dict(N=N, T=70, total=0, chunk_slots=2 * N, H=H, segments=1, beta_factor=fp32_bits(2))
    return with_gate(prompts(axis=axis)) | states, sizes | dict(sms=H200.sms)


@named((i32, i64), (i64, i32))
def prefill_packed_in_a_pool(lengths_dtype, slots_dtype, axis):
    """The pool has one head more."""
    call = prompts((1, 150), axis, fp16) | dict(
        beta=torch.randn(1, 150, HV),
        cu_seqlens=spaced_indices([0, 5, 140], lengths_dtype),
        state_indices=spaced_indices([4, -1], slots_dtype),
        state=torch.randn(P, HV + 1, D, D)[:, 1:],
        has_initial_state=torch.tensor([True, True, False])[::2],
    )
    return call, dict(N=2, T=0, total=150, chunk_slots=150 // CHUNK + 2)


@named()
def prefill_strided(axis):
    return strided_tokens(70, D, D, axis, spread_channels=False), dict(N=N, T=70)


@named()
def prefill_with_a_norm(axis):
    """z by q/k head, of a fused projection."""
    norm = norm_and_z((N, 70), "sigmoid", V=D)
    z = torch.randn(N, 70, H, 5, D).bfloat16()[:, :, :, -(HV // H) :]
    return prompts(axis=axis) | norm | dict(z=z), dict(norm_eps=fp32_bits(1e-5), norm_sigmoid=1)


@named()
def prefill_from_zeros_to_final_states(axis):
    return prompts(axis=axis) | dict(output_final_state=True), dict(N=N)


@named()
def prefill_with_checkpoints_in_slots(axis):
    checkpoints = dict(
        checkpoint_lens=torch.zeros(4, N).int()[::2].T, checkpoint_indices=torch.full((N, 2), -1)
    )
    state = torch.randn(P, 2 * HV, D, D)[:, ::2]
    call = prompts(axis=axis) | dict(state=state) | checkpoints
    return call, dict(checkpoints_per_sequence=2)


@named(("state",), ("initial_state",))
def prefill_with_checkpoints_per_sequence(states, axis):
    checkpoints = dict(
        checkpoint_lens=torch.zeros(N, 3, dtype=i64),
        checkpoints=torch.zeros(N, 6, HV + 1, D, D).bfloat16()[:, ::2, 1:],
    )
    call = prompts(axis=axis) | {states: prompt_states(N)} | checkpoints
    return call, dict(checkpoints_per_sequence=3)


@named(("state",), ("initial_state",))
def prefill_with_checkpoints_in_rows(states, axis):
    checkpoints = dict(
        checkpoint_lens=torch.zeros(N, 3, dtype=i64),
        checkpoints=torch.zeros(10, HV + 1, D, D).bfloat16()[::2, 1:],
        checkpoint_indices=torch.full((3, N), -1).int().T,
    )
    call = prompts(axis=axis) | {states: prompt_states(N)} | checkpoints
    return call, dict(checkpoints_per_sequence=3)


@named()
def prefill_without_checkpoints(axis):
    return prompts(axis=axis) | dict(state=prompt_states()), dict(checkpoints_per_sequence=0)


# ---------------------------------------------------------------- calls with other cache entries


def checkpoints(count=1, lens_dtype=i32, slots_dtype=i64):
    """Checkpoints of lengths 0 that go to no slot."""
    return dict(
        checkpoint_lens=torch.zeros(N, count, dtype=lens_dtype),
        checkpoint_indices=torch.full((N, count), -1, dtype=slots_dtype),
    )


def new_entries(op):
    """Changes of `valid_call(op)`, each of which needs another entry of the call cache."""
    if op == "flush":
        return [
            dict(num_accepted=0),
            dict(num_accepted=2),
            dict(num_accepted=torch.ones(N, dtype=i32)),
            dict(num_accepted=torch.ones(N, dtype=i64)),
            dict(state_indices=torch.arange(N)),
            dict(write_indices=torch.arange(N)),
            dict(buffer_indices=torch.arange(N)),
            dict(buffer_indices=torch.arange(N - 1), state_indices=None),
            dict(state=pool(f32)),
            dict(state=pool()[None], buffer=buffer(layers=1)),
        ]
    first = valid_call(op)
    changes = [
        dict(qk_l2norm=False),
        dict(beta_logits=True),
        dict(beta_logits=True, allow_neg_eigval=True),
        dict(scale=1.0),
        dict(gate=gd.Gate.softplus(torch.zeros(HV))),
        dict(gate=gd.Gate.lower_bound(torch.zeros(HV), bound=-4.0)),
        dict(state_indices=torch.arange(N)),
        dict(state_indices=SLOTS),
        dict(state_indices=torch.arange(N), null_index=0),
        dict(state=first["state"].float()),
        dict(beta=first["beta"].float()),
        dict(out=torch.empty_like(first["v"])),
    ]
    if op == "prefill":
        return changes + _new_entries_of_prefill()
    changes += [
        norm_and_z(),
        norm_and_z(weight_dtype=f32),
        norm_and_z(activation="sigmoid"),
        norm_and_z(eps=1e-6),
        dict(norm=gd.GatedNorm(torch.ones(V), 1e-5), z=first["v"]),
    ]
    if op == "verify":
        return [
            *changes,
            dict(buffer_indices=torch.arange(N)),
            dict(buffer=buffer(N + 1)),
            dict(buffer=buffer(C=T + 1)),
        ]
    steps = pool()[:N, None].expand(-1, T, -1, -1, -1).clone()
    return [
        *changes,
        buffered(),
        buffered(C=T + 1),
        buffered(dtype=i64),
        buffered() | dict(buffer_indices=torch.arange(N)),
        dict(update_state=False),
        dict(intermediate_states=steps),
        dict(intermediate_states=steps, intermediate_indices=torch.arange(N)),
    ]


def _new_entries_of_prefill():
    initial, packed, ends = prompt_states(N), prompts((1, 70)), torch.tensor([0, 7, 70])
    return [
        dict(has_initial_state=torch.ones(N, dtype=torch.bool)),
        dict(state=None),
        dict(state=None, output_final_state=True),
        dict(state=None, initial_state=initial),
        dict(state=None, initial_state=initial, output_final_state=True),
        dict(state=None, initial_state=initial.float()),
        checkpoints(),
        checkpoints(slots_dtype=i32),
        checkpoints(lens_dtype=i64),
        checkpoints(2),
        dict(checkpoint_lens=torch.zeros(N, 1).int(), checkpoints=initial.unsqueeze(1)),
        packed,
        packed | dict(cu_seqlens=torch.tensor([0, 70])),
        packed | dict(cu_seqlens=ends),
        packed | dict(cu_seqlens=ends, max_seqlen=63),
        packed | dict(cu_seqlens=ends, max_seqlen=64),
    ]


def with_argument(call, name):
    """The call with an argument of that name, if it lacks one."""
    if name == "intermediate_states":
        return call | dict(intermediate_states=torch.zeros(N, T, HV, V, K).bfloat16())
    if name == "initial_state":
        return call | dict(state=None, initial_state=prompt_states(N))
    if name == "checkpoints":
        states = prompt_states(N).unsqueeze(1)
        return call | dict(checkpoint_lens=torch.zeros(N, 1).int(), checkpoints=states)
    if name == "out":
        return call | dict(out=torch.zeros_like(call["v"]))
    if name.startswith("buffer") and "buffer" not in call:
        return call | buffered(axis="channel" if call["g"].ndim == 4 else "head")
    return call | (norm_and_z(call["v"].shape[:2], V=call["v"].shape[3]) if name == "z" else {})


# ---------------------------------------------------------------- tensors in odd memory


def overlay(x, like, offset=0):
    """A tensor of like's shape and dtype in x's memory."""
    return x.flatten().view(like.dtype)[offset : offset + like.numel()].view(like.shape)


def misaligned(x):
    """A copy of x that starts one element past a multiple of 16 bytes."""
    storage = torch.zeros(x.numel() + 8, dtype=x.dtype)
    assert storage.data_ptr() % 16 == 0
    return storage[1 : 1 + x.numel()].view(x.shape).copy_(x)


def padded_rows(x, padding=4):
    """A copy of x with rows that are `padding` elements apart."""
    shape = (*x.shape[:-1], x.shape[-1] + padding)
    return torch.zeros(shape, dtype=x.dtype)[..., : x.shape[-1]].copy_(x)


def spread_channels(x):
    """A copy of x with a last stride of 2."""
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2].copy_(x)


def without_memory(x, *strides):
    """A meta tensor of x's shape with these strides in front."""
    meta = torch.empty(2, dtype=x.dtype, device="meta")
    return meta.as_strided(x.shape, (*strides, *x.stride()[len(strides) :]))
