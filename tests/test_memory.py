"""Overlap in memory, tested with sets of bytes; calls refused for it; hits at other addresses."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gated_delta as gd
from calls import HV, H, K, N, P, T, V, buffer, buffered, call, pool, tokens, writable
from gated_delta import memory
from gated_delta.memory import Placement, extent, overlap, overlaps_itself

OPS = ("prefill", "decode", "verify", "flush")

BASE = torch.zeros(2000)


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(
        st.lists(
            st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 30, 60)),
            min_size=len(shape),
            max_size=len(shape),
        )
    )
    base = draw(st.sampled_from((BASE, BASE.view(torch.bfloat16), BASE.view(torch.int64))))
    return base.as_strided(shape, strides, draw(st.integers(0, 60)))


def elements(x):
    """The addresses of each element's bytes, as sets."""
    for where in itertools.product(*map(range, x.shape)):
        first = x.data_ptr() + sum(i * s for i, s in zip(where, x.stride())) * x.element_size()
        yield set(range(first, first + x.element_size()))


@given(views(), views())
@settings(max_examples=300, deadline=None)
def test_overlap_is_a_byte_in_common(x, y):
    of_x, of_y = set().union(*elements(x)), set().union(*elements(y))
    assert overlap(x, y) == bool(of_x & of_y)
    assert overlaps_itself(x) == (len(of_x) < x.numel() * x.element_size())
    assert extent(x) == (max(of_x) + 1 - x.data_ptr() if of_x else 0)


def test_views_of_one_allocation_take_few_steps(monkeypatch):
    monkeypatch.setattr(memory, "MOST_STEPS", 50)
    fused = torch.empty(2**12, 64, 128, dtype=torch.bfloat16)
    q, k, v = fused[:, :16], fused[:, 16:32], fused[:, 32:]
    assert not overlap(q, v)
    assert not overlap(k, v)
    assert overlap(fused[:, :33], v)
    padded = torch.empty(2**10, 5, 32, 32)
    slots = padded[:, :4]
    assert not overlaps_itself(slots)
    assert not overlap(slots, padded[:, 4:])
    assert overlaps_itself(padded.as_strided((2**9, 6, 32, 32), padded.stride()))


def test_memory_counts_as_shared_after_too_many_steps(monkeypatch):
    x, y = BASE.as_strided((3, 4), (10, 1)), BASE.as_strided((3, 2), (11, 1), 5)
    assert not overlap(x, y)
    monkeypatch.setattr(memory, "MOST_STEPS", 0)
    assert overlap(x, y)


# ---------------------------------------------------------------- what operations refuse


def inside(x, shape, dtype=None, offset=0):
    """A tensor of this shape within x's memory."""
    x = x.view(dtype or x.dtype)
    return x.as_strided(
        shape, torch.empty(shape, device="meta").stride(), x.storage_offset() + offset
    )


def overlapping():
    """Calls with overlapping tensors, by description, and the argument that the error names."""
    state, large, drafts, parts = pool(), pool(9), tokens(), buffer()
    v, lens = drafts["v"], torch.zeros(N, 1).int()
    long, many = torch.randn(v.numel() + 16), torch.zeros(N, T, HV, V, K)
    low, high, g = long[:-16].view(v.shape), long[16:].view(v.shape), tokens(axis="channel")["g"]
    in_pool = gd.KVBuffer(inside(state, v.shape), parts.k, parts.log_decay)
    counts = torch.ones(N).int()
    first = {
        "prefill": drafts,
        "decode": dict(drafts, state=state),
        "verify": dict(drafts, state=state, buffer=parts),
        "flush": dict(state=state, buffer=parts, num_accepted=counts),
    }
    kept = dict(checkpoint_lens=lens)
    rows = {
        "decode: out is v": (dict(out=v), "out"),
        "decode: out in the pool": (dict(out=inside(state, v.shape)), "out"),
        "decode: out at the end of v": (dict(v=low, out=high), "out"),
        "decode: out in front of v": (dict(v=high, out=low), "out"),
        "decode: out in intermediate states": (
            dict(intermediate_states=many, out=inside(many, v.shape)),
            "out",
        ),
        "decode: out of a frozen pool": (
            dict(update_state=False, out=inside(state, v.shape)),
            "out",
        ),
        "decode: intermediate states in the pool": (
            dict(
                state=large, intermediate_states=large[2:8].unflatten(0, (N, T)), update_state=False
            ),
            "intermediate_states",
        ),
        "decode: the pool over its indices": (
            dict(state_indices=inside(state, (N,), torch.int32)),
            "state",
        ),
        "decode: the pool over its buffer": (
            dict(buffer=in_pool, buffer_lens=torch.zeros(N).int()),
            "state",
        ),
        "decode: slots that overlap": (dict(state=inside_slots(state)), "state"),
        "flush: slots that overlap": (dict(state=inside_slots(state)), "state"),
        "decode: out that overlaps itself": (
            dict(out=BASE.as_strided(v.shape, (7, 24, 6, 1))),
            "out",
        ),
        "prefill: out in the pool": (dict(state=state, out=inside(state, v.shape)), "out"),
        "prefill: out in the initial states": (
            dict(initial_state=state[:N], out=inside(state, v.shape)),
            "out",
        ),
        "prefill: out at the end of v": (dict(v=low, out=high), "out"),
        "prefill: checkpoints in the pool": (
            kept | dict(state=large, checkpoints=large[4:6].unsqueeze(1)),
            "state",
        ),
        "prefill: checkpoints over their lengths": (
            dict(
                checkpoint_lens=inside(state, (N, 1), torch.int32),
                checkpoints=state[:N].unsqueeze(1),
            ),
            "checkpoints",
        ),
        "prefill: checkpoints in the initial states": (
            kept | dict(initial_state=state[:N], checkpoints=state[1:3].unsqueeze(1)),
            "checkpoints",
        ),
        "prefill: the pool over its checkpoints' indices": (
            kept | dict(state=state, checkpoint_indices=inside(state, (N, 1), torch.int32)),
            "state",
        ),
        "prefill: out is g": (dict(v=torch.randn(N, T, HV, K), g=g, out=g), "out"),
        "prefill: out over A_log": (
            dict(gate=gd.Gate.softplus(inside(long, (HV,), offset=16)), out=low),
            "out",
        ),
        "verify: out in the buffer": (dict(out=parts.u), "out"),
        "verify: out in the pool": (dict(out=inside(state, v.shape)), "out"),
        "verify: the buffer in the pool": (dict(buffer=in_pool), "buffer.u"),
        "verify: parts of the buffer in each other": (
            dict(buffer=gd.KVBuffer(parts.u, inside(parts.u, parts.k.shape), parts.log_decay)),
            "buffer.u",
        ),
        "flush: the pool over its buffer": (dict(buffer=in_pool), "state"),
        "flush: the pool over its counts": (
            dict(num_accepted=inside(state, (N,), torch.int32)),
            "state",
        ),
    }
    return {
        way: (op := way.partition(":")[0], first[op] | changes, name)
        for way, (changes, name) in rows.items()
    }


def inside_slots(state):
    """A pool whose slots begin one row too early."""
    return state.as_strided((P - 1, HV, V, K), (HV * V * K - K, V * K, K, 1))


@pytest.mark.parametrize("way", overlapping())
def test_calls_with_overlapping_tensors_are_refused(way):
    """On misses, and on hits at other addresses; nothing is written."""
    op, arguments, name = overlapping()[way]
    apart = {
        key: x.clone() if isinstance(x, torch.Tensor) and x.is_contiguous() else x
        for key, x in arguments.items()
    }
    buffers = arguments.get("buffer")
    if buffers is not None:
        apart["buffer"] = gd.KVBuffer(*(x.clone() for x in vars(buffers).values()))
    known = not any(overlaps_itself(x) for x in arguments.values() if isinstance(x, torch.Tensor))
    if known and "indices" not in way and "counts" not in way:
        getattr(gd, op)(**apart, backend="reference")
    watched = {key: (x, x.clone()) for key, x in writable(arguments).items()}
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: expected memory (apart|of its own)"):
            getattr(gd, op)(**arguments, backend="reference")
    with pytest.raises(ValueError, match=f"^{name}: expected memory"):
        gd.explain(op, **arguments)
    for key, (x, before) in watched.items():
        assert torch.equal(x.nan_to_num(3), before.nan_to_num(3)), f"{key} was written"


def test_interleaved_views_of_one_allocation_work():
    """The pool's slots alternate with other memory, v's heads with out's; at two addresses."""
    for _ in range(2):
        drafts, wide = tokens(), torch.zeros(P, 3, HV, V, K)
        state, others = wide[:, 0].copy_(pool()), wide[:, 1:]
        fused = torch.zeros(N, T, 2 * HV, V)
        drafts["v"] = fused[:, :, ::2].copy_(drafts["v"])
        want_state = state.clone()
        want = gd.decode(**drafts, state=want_state, backend="reference")
        for _ in range(2):  # the second time around from the call cache
            state.copy_(pool())
            out = gd.decode(**drafts, state=state, out=fused[:, :, 1::2], backend="reference")
            assert torch.equal(out, want)
            assert torch.equal(state, want_state)
            assert (others == 0).all()


def test_placement_compares_ranges():
    x, y = torch.zeros(40), torch.zeros(8)
    apart = Placement([x, y], [x])
    assert apart((x.data_ptr(), y.data_ptr()))
    for start, fits in (
        (1000, True),
        (1159, False),
        (1160, True),
        (968, True),
        (969, False),
        (1080, False),
    ):
        assert apart((1000, start)) == ((1000, start) if fits and start != 1000 else None)
    assert Placement([x, y], [])((1000, 1000))
    empty = torch.zeros(0)
    assert Placement([x, empty], [x, empty])((1000, 1080))


def test_placement_computes_each_result_once():
    x, y, computed = torch.zeros(4), torch.zeros(4), []

    def result(addresses):
        computed.append(addresses)
        return len(computed)

    placement = Placement([x, y], [x], result=result)
    first, second, third = (x.data_ptr(), y.data_ptr()), (1600, 3200), (1600, 3216)
    calls = (first, second, third, second, first)
    assert [placement(addresses) for addresses in calls] == [1, 2, 3, 2, 1]
    assert computed == [first, second, third]


def test_the_number_of_cached_addresses_is_bounded():
    x = torch.zeros(4)
    apart = Placement([x], [x])
    for at in range(1, 2 * Placement.MOST):
        assert apart((at * 16,))
        assert len(apart.known) <= Placement.MOST


# ---------------------------------------------------------------- inference mode


def inference_tensors(op):
    """(arguments, name) of a call for each tensor that it writes, that one an inference tensor."""
    for name in (
        "out",
        "state",
        "intermediate_states",
        "checkpoints",
        "buffer.u",
        "buffer.k",
        "buffer.log_decay",
    ):
        arguments = call(op)
        if op != "flush":
            arguments["out"] = torch.zeros_like(arguments["v"])
        if op == "prefill":
            arguments |= dict(
                state=pool(),
                checkpoint_lens=torch.zeros(N, 1).int(),
                checkpoints=torch.zeros(N, 1, HV, V, K),
            )
        if op == "decode":
            steps = dict(intermediate_states=torch.zeros(N, T, HV, V, K))
            arguments |= buffered() if name.startswith("buffer") else steps
        names = writable(arguments)
        if (
            name not in names
            or (op, name) in (("verify", "state"),)
            or (op == "flush" and name != "state")
        ):
            continue
        with torch.inference_mode():
            inference = names[name].clone()
        if "." in name:
            parts = {**vars(arguments["buffer"]), name.split(".")[1]: inference}
            arguments["buffer"] = gd.KVBuffer(**parts)
        else:
            arguments[name] = inference
        yield arguments, name


@pytest.mark.parametrize("compiled", [None, "eager", "inductor"])
@pytest.mark.parametrize("op", OPS)
def test_inference_tensors_are_written_only_in_that_mode(op, compiled):
    run = getattr(gd, op)
    if compiled:
        run = torch.compile(run, fullgraph=True, backend=compiled)
    cases = list(inference_tensors(op))
    assert cases
    for arguments, name in cases:
        torch._dynamo.reset()  # each case has two graphs, and torch keeps eight
        watched = {key: (x, x.clone()) for key, x in writable(arguments).items()}
        for mode in (torch.no_grad, torch.enable_grad):
            with (
                mode(),
                pytest.raises(
                    Exception, match=f"{name}: expected a tensor that may be written here"
                ) as caught,
            ):
                run(**arguments, backend="reference")
            assert compiled or type(caught.value) is ValueError
        for key, (x, before) in watched.items():
            assert torch.equal(x.nan_to_num(3), before.nan_to_num(3)), f"{key} was written"
        if compiled is None:
            with torch.inference_mode():
                run(**arguments, backend="reference")
            with torch.no_grad(), pytest.raises(ValueError, match="may be written here"):
                run(**arguments, backend="reference")  # no cache hit across modes


@pytest.mark.parametrize("op", OPS)
def test_inference_tensors_are_read_in_any_mode(op):
    arguments = call(op)
    with torch.inference_mode():
        read = {
            name: x.clone()
            for name, x in arguments.items()
            if isinstance(x, torch.Tensor) and name != "state"
        }
    getattr(gd, op)(**{**arguments, **read}, backend="reference")


# ---------------------------------------------------------------- odd tensors and numbers


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_memory_are_refused():
    meta = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in call("decode").items()
    }
    with pytest.raises(
        ValueError, match="q: expected a tensor with data, got one on the meta device"
    ):
        gd.decode(**meta)
    freed = call("decode")
    gd.decode(**freed)
    freed["state"].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="state: expected a tensor with data, got one whose storage was freed"
        ):
            gd.decode(**freed)
    negated = torch.randn(N, T, HV, V, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    nested = torch.nested.nested_tensor([torch.zeros(T, H, K)] * N)
    for name, x in (
        ("v", negated),
        ("q", torch.zeros(call("decode")["q"].shape).to_sparse()),
        ("q", nested),
    ):
        with pytest.raises(
            ValueError, match=f"{name}: expected a plain strided tensor"
        ):  # of a call that is known otherwise
            gd.decode(**{**call("decode"), name: x})


@pytest.mark.parametrize(
    "scale",
    [np.float64(0.25), np.float32(0.25), np.float16(0.25), np.int64(1), 1],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("op", ["prefill", "decode", "verify"])
def test_numbers_of_numpy_are_numbers(op, scale):
    results = [
        getattr(gd, op)(**call(op), scale=x, backend="reference") for x in (scale, float(scale))
    ]
    one, other = (x[0] if isinstance(x, tuple) else x for x in results)
    assert type(one) is torch.Tensor
    assert torch.equal(one, other)
    bound = gd.Gate.lower_bound(torch.zeros(HV), bound=-scale).bound
    assert (type(bound), bound) == (float, -float(scale))


@pytest.mark.parametrize(
    "scale", [10**400, -(10**400), np.float32("nan"), float("inf")], ids=lambda x: str(x)[:4]
)
def test_numbers_without_a_finite_value_are_refused(scale):
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        gd.decode(**call("decode"), scale=scale)


def test_integers_of_numpy_are_integers():
    arguments, want = call("flush"), call("flush")
    gd.flush(**{**arguments, "num_accepted": np.int64(2)}, state_indices=torch.arange(N))
    gd.flush(**want)
    assert torch.equal(arguments["state"], want["state"])
    layers = gd.KVBuffer.empty(*np.array([2, 3, H, HV, K, V]), num_layers=np.int32(4))
    assert layers.u.shape == (4, 2, 3, HV, V)
    with pytest.raises(TypeError, match="num_accepted: expected an int or an int tensor"):
        gd.flush(**{**arguments, "num_accepted": np.float32(2)}, state_indices=torch.arange(N))


@pytest.mark.parametrize("count", [16, 17, 2**40, 2**63, 10**30], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_counts_of_any_size_accept_every_draft(count, compiled):
    arguments, want = call("flush"), call("flush")
    gd.flush(**{**want, "num_accepted": torch.tensor([T] * N)}, backend="reference")
    flush = torch.compile(gd.flush, fullgraph=True, backend="eager") if compiled else gd.flush
    flush(
        **{**arguments, "num_accepted": count}, state_indices=torch.arange(N), backend="reference"
    )
    assert torch.equal(arguments["state"], want["state"])
