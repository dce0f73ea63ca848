"""The CuTe backend's host code on a CPU: tests record launches and follow every address in them."""

import itertools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

import gated_delta as gd
import kernel_calls as calls
from gated_delta import api, compile, dispatch
from gated_delta.call_cache import CallCache
from gated_delta.kernels import arguments
from gated_delta.kernels.arguments import (
    ABSENT,
    BF16,
    CHUNK,
    FP16,
    FP32,
    SCALE_BYTES,
    TILE_BYTES,
    TRIANGLE_BYTES,
)
from gated_delta.ops import OPERATIONS
from gated_delta.ops import launch as shared
from gated_delta.ops import prefill as on_host
from gated_delta.problem import BUFFER, Problem
from kernel_calls import (
    OPS,
    SLOTS,
    bf16,
    buffer,
    f32,
    fp16,
    i32,
    i64,
    ints,
    packed_prompts,
    pool,
    prompt_states,
    prompts,
    tokens,
    valid_call,
)

N, H, HV, P = calls.N, calls.H, calls.HV, calls.P
T, K, V, D = calls.T, calls.K, calls.V, calls.D

pytestmark = pytest.mark.skipif(compile.missing_packages() != (), reason="needs apache-tvm-ffi")


class Launches(list):
    """(pointers, scale, bound, strides, sizes) of each launch; flush has no scale and bound."""

    def __init__(self):
        self.kernels = []
        """The launched variants."""

    def clear(self):
        super().clear()
        self.kernels.clear()


@pytest.fixture
def launches(monkeypatch):
    recorded = Launches()

    def load(variant, arch):
        operation = variant.kernel.partition("_")[0].title()
        kinds = [getattr(arguments, operation + kind) for kind in ("Pointers", "Strides", "Sizes")]

        def launch(pointers, *rest):
            *numbers, strides, sizes, stream = rest
            recorded.append((kinds[0](*pointers), *numbers, kinds[1](*strides), kinds[2](*sizes)))
            recorded.kernels.append(variant)

        return launch

    for op in OPERATIONS.values():
        monkeypatch.setattr(op, "calls", CallCache())
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setattr(compile, "missing", lambda variant, arch: ())
    monkeypatch.setattr(compile, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(api, "_missing_for_cute", lambda op, problem, device: op.missing(problem))
    monkeypatch.setattr(shared, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return recorded


def run(op, **call):
    return getattr(gd, op)(**call, backend="cute")


def facts_of(problem):
    """The compile-time constants of a problem's variants."""
    return [dict(variant.facts) for variant in dispatch.variants_of(problem)]


# ---------------------------------------------------------------- addresses


def check_addresses(base, x, strides):
    """base and strides (in bytes) give the address of every element of x."""
    assert not any(strides[x.ndim :])
    strides = strides[: x.ndim]
    for index in itertools.product(*(range(min(size, 3)) for size in x.shape[: len(strides)])):
        offset = sum(i * s for i, s in zip(index, strides, strict=True))
        assert base + offset == x[index].data_ptr(), index


def check_launch(launch, tensors, **sizes):
    """Every address, stride and kind belongs to its tensor, or is 0 without one; sizes: others."""
    pointers, *_, strides, passed = launch
    dims = {}
    for tensor, letters in type(strides).dims.items():
        assert letters == "".join(sorted(letters, key="njprthc".index)), tensor
        dims[tensor] = [getattr(strides, f"{tensor}_{letter}") for letter in letters]
    assert set(tensors) <= set(dims)
    for name, steps in dims.items():
        x, base = tensors.get(name), getattr(pointers, name)
        if x is None:
            assert (base, *steps) == (0,) * (1 + len(steps)), name
            continue
        if name in ("q", "k", "v", "g", "beta", "z", "o") and len(x) == 1:
            assert steps[0] == 0  # packed sequences start at their first token
        if name == "checkpoints":  # slots of a pool, or per sequence and checkpoint
            n, j, p, h = steps
            assert (n, j) == (0, 0) if x.ndim == 4 else p == 0
            steps = [p, h] if x.ndim == 4 else [n, j, h]
        if getattr(passed, "layers", 1) > 1 and hasattr(pointers, f"{name}_l"):
            steps = [getattr(pointers, f"{name}_l"), *steps]
        check_addresses(base, x, steps)
    for field in passed._fields:
        if (name := field.removesuffix("_kind")) != field:
            x = tensors.get(name)
            if name in ("beta", "dt_bias", "norm_weight"):
                kind = ABSENT if x is None else {bf16: BF16, fp16: FP16, f32: FP32}[x.dtype]
            else:
                kind = 0 if x is None else x.element_size() // 4
            assert getattr(passed, field) == kind, name
    assert all(hv * passed.qk_head_factor >> 30 == hv // (HV // H) for hv in range(HV))
    assert passed.HV == HV
    assert {name: getattr(passed, name) for name in sizes} == sizes


def test_qk_head_factor_replaces_a_division():
    for heads, group in ((1, 1), (64, 4), (48, 3), (1024, 1024), (210, 7)):
        magic = -(-(2**30) // group)
        assert all(hv * magic >> 30 == hv // group for hv in range(heads))


def tensors_of_prefill(call, result, o):
    """A prefill's tensors by the names of its strides; checks the type of a final state."""
    tensors, (_, final) = calls.tensors_of(call) | dict(o=o), result
    state, initial = tensors.pop("state", None), tensors.get("initial_state")
    assert (final is not None) == call.get("output_final_state", False)
    if final is not None:
        dtype = f32 if initial is None else initial.dtype
        assert (final.dtype, final.shape) == (dtype, (N, HV, D, D))
    if state is not None:
        initial = final = state
        if "checkpoint_indices" in tensors:
            tensors = dict(checkpoints=state) | tensors
    return tensors | dict(initial_state=initial, final_state=final)


@pytest.mark.parametrize("name", calls.CALLS)
def test_every_address_is_the_tensors_own(launches, monkeypatch, name, axis):
    """On a miss and on a hit with other tensors; all kernels of a call get the same arguments."""
    make, op = calls.CALLS[name], name.split("_")[0]
    recorded, alive = [], []
    for _ in range(2):
        launches.clear()
        call, sizes = make(axis)
        result = run(op, **call)
        tensors, o = calls.tensors_of(call), result
        if op == "prefill":
            o = result[0]
            tensors = tensors_of_prefill(call, result, o)
            options = [dict(some.facts).get("checkpoints") for some in launches.kernels]
            assert options == [None, "checkpoint_lens" in tensors]
        elif op != "flush":
            tensors |= dict(o=o)
        if (out := tensors.pop("out", None)) is not None:
            assert o is out
        assert all(launch == launches[0] for launch in launches)
        check_launch(launches[0], tensors, **sizes)
        if op != "flush":
            scale, bound = launches[0][1:3]
            assert scale == (0.5 if "scale" in call else call["q"].shape[-1] ** -0.5)
            assert "gate" not in call or bound == -3.0
        recorded.append(launches[0])
        alive.append((call, result))  # else the second call would reuse the memory
        monkeypatch.setattr(OPERATIONS[op], "describe", None)
    assert recorded[0][1:] == recorded[1][1:]


@pytest.mark.parametrize("name", calls.CALLS)
def test_explain_passes_the_arguments_of_the_call(monkeypatch, name, axis):
    """The call passes them by position, explain by name."""
    call, op = calls.CALLS[name](axis)[0], OPERATIONS[name.split("_")[0]]
    passed = []
    monkeypatch.setattr(api, "run", lambda op, *arguments: passed.append(op.arguments(*arguments)))
    monkeypatch.setattr(api, "_route", lambda op, a: passed.append(a))
    run(op.name, **call)
    gd.explain(op.name, **call, backend="cute")
    for field, by_position, by_name in zip(op.arguments._fields, *passed, strict=True):
        assert by_position is by_name, field


def test_hits_at_other_addresses_are_checked_once(launches):
    """v and out, and a pool's slots, are interleaved: only their ranges overlap."""
    call, wide = tokens(), torch.randn(P, 2, HV, V, K).bfloat16()
    fused = [torch.zeros(N, T, 2 * HV, V).bfloat16() for _ in range(2)]
    for both in fused:
        for _ in range(2):
            run("decode", **{**call, "v": both[:, :, ::2]}, state=wide[:, 0], out=both[:, :, 1::2])
    expected = [x[:, :, 1::2].data_ptr() for x in fused for _ in range(2)]
    assert [launch[0].o for launch in launches] == expected
    ((_, launch),) = OPERATIONS["decode"].calls._calls.popitem()[1].latest
    assert len(launch.placement.known) == 2


# ---------------------------------------------------------------- schedules without prefill


@pytest.mark.parametrize(("N", "prefetched"), [(1, 1), (40, 40), (112, 0), (200, 200), (260, 0)])
def test_launches_that_prefetch_their_states(launches, N, prefetched):
    """bf16 GDN, 128 KiB a sequence: up to 1024 heads, but not from 14 to 24 MiB."""
    run("decode", **tokens((N, 1), K=128, V=128), state=torch.zeros(N, HV, 128, 128).bfloat16())
    assert launches[0][-1].prefetch_sequences == prefetched


@pytest.mark.parametrize("op", ["decode", "verify", "flush"])
@pytest.mark.parametrize(
    ("K", "V"), [(128, 128), (128, 32), (96, 192), (64, 256), (64, 96), (16, 64)], ids=str
)
def test_blocks_divide_the_rows_of_a_head(op, K, V):
    operation = OPERATIONS[op]
    for axis, state_dtype, T in itertools.product(("head", "channel"), (bf16, f32), (1, 4)):
        dtypes = dict(state_dtype=state_dtype, dtype=bf16, g_dtype=bf16)
        problem = Problem(op, axis, 2, 4, K, V, T, **dtypes)
        for sequences in (1, 8, 100, 150, 200, 300, 500, 1000, 5000):
            plan = operation.plan(problem, sequences, sequences * T)
            assert V % operation.block_rows(problem, plan.schedule) == 0
            assert plan.variants[0] in operation.variants(problem)


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_needs_another_kernel(launches, op):
    """Its weight, eps and activation are run-time arguments."""
    norms = [calls.norm_and_z(**options) for options in NORMS]
    for norm in ({}, *norms):
        run(op, **valid_call(op) | norm)
    without, *fused = (dict(variant.facts) for variant in launches.kernels)
    assert "norm" not in without
    assert fused[0]["norm"] is True
    assert all(facts == fused[0] for facts in fused)


NORMS = [{}, dict(weight_dtype=bf16), dict(activation="sigmoid"), dict(eps=1e-3)]


@pytest.mark.parametrize("K", [8, 64, 96, 128])
def test_a_norm_has_a_block_or_cluster_per_head(K):
    """For every V and schedule, within the limits of a block and a cluster."""
    facts = dict(gate="log", dtype=bf16, g_dtype=bf16, options=frozenset({"norm"}))
    for V, axis, state_dtype, T in itertools.product(
        range(32, 257, 32), ("head", "channel"), (f32, bf16), (1, 3, 16)
    ):
        sizes = (axis, 1, 1, K, V, T)
        for variant in facts_of(Problem("decode", *sizes, state_dtype=state_dtype, **facts)):
            threads = variant["threads"]
            rows = variant["chunks"] * arguments.tile_rows(K, variant["rows"], threads)
            blocks, rest = divmod(V, rows)
            assert (rest, rows % 32) == (0, 0)  # the norm's loops take 32 rows of a block at once
            assert 1 <= blocks <= 8  # only some devices run larger clusters
            assert threads >= 64  # one warp computes KDA's decays
            assert variant.get("blocks_per_sm", 1) * threads <= 1024  # CUDA's limit of a block
            assert variant.get("prefetch_chunks", 1) <= variant["chunks"]
        for variant in facts_of(Problem("verify", *sizes, state_dtype=state_dtype, **facts)):
            assert variant["rows"] * variant["threads"] == 32 * V
            assert variant["threads"] <= 512
    for op in ("decode", "verify"):
        problem = Problem(op, "head", 1, 1, K, 288, 1, state_dtype=bf16, **facts)
        assert OPERATIONS[op].missing(problem) == ["V up to 256 with a norm, got 288"]


@pytest.mark.parametrize("options", [frozenset(), frozenset({"norm"})], ids=str)
def test_a_warp_of_verify_has_no_more_rows_than_lanes(options):
    """Each lane processes one row. A block's rows divide V; with a norm they are all of V."""
    facts = dict(gate="log", dtype=bf16, g_dtype=bf16, options=options)
    for V, axis, state_dtype, T in itertools.product(
        range(32, 257, 32), ("head", "channel"), (f32, bf16), (1, 3, 7, 16)
    ):
        problem = Problem("verify", axis, 1, 1, 128, V, T, state_dtype=state_dtype, **facts)
        for variant in facts_of(problem):
            assert variant["rows"] in (16, 32)
            assert V % (variant["rows"] * variant["threads"] // 32) == 0


@pytest.mark.parametrize("state_dtype", [bf16, torch.float16, f32], ids=str)
@pytest.mark.parametrize("norm", [frozenset(), frozenset({"norm"})], ids=str)
def test_verify_has_one_way_to_compute_pairs(norm, state_dtype):
    """For any batch and longest draft: the bits depend on it."""
    facts = dict(gate="log", dtype=bf16, g_dtype=bf16, options=norm, state_dtype=state_dtype)
    of_channel, of_head = (
        {
            variant.get("mma_pairs", False)
            for T in range(1, 17)
            for variant in facts_of(Problem("verify", axis, 1, 1, 128, 128, T, **facts))
        }
        for axis in ("channel", "head")
    )
    assert of_channel == {state_dtype != f32}
    assert of_head == {False}


@pytest.mark.parametrize(
    ("null_index", "passed"),
    [(-1, -1), (0, 0), (5, 5), (2**40, 2**31 - 1), (numpy.int64(2), 2)],
    ids=str,
)
def test_null_index_is_a_run_time_argument(launches, null_index, passed):
    """Of every operation; the kernels stay the same."""
    kernels = []
    for given, expected in ((null_index, passed), (-1, -1)):
        launches.clear()
        for op in OPS:
            run(op, **valid_call(op) | dict(state_indices=SLOTS), null_index=given)
        assert {launch[-1].null_index for launch in launches} == {expected}
        kernels.append(list(launches.kernels))
    assert kernels[0] == kernels[1]


# ---------------------------------------------------------------- the call cache


@pytest.mark.parametrize("op", OPS)
def test_calls_that_need_another_cache_entry(launches, op):
    first, changes = valid_call(op), calls.new_entries(op)
    for change in ({}, *changes, *changes):
        run(op, **first | change)
    assert len(OPERATIONS[op].calls) == 1 + len(changes)
    assert op == "prefill" or len(launches) == 1 + 2 * len(changes)


INDICES = dict(
    decode=["state_indices", "write_indices"], verify=["state_indices", "buffer_indices"]
)
INDICES |= dict(flush=["num_accepted", "state_indices", "write_indices", "buffer_indices"])


@pytest.mark.parametrize("op", INDICES)
def test_index_tensors_are_not_confused(launches, op):
    """Calls that differ only in the index tensor that they pass."""
    for name in INDICES[op]:
        run(op, **valid_call(op) | {"state_indices": None, name: torch.arange(N)})
    passed = [[bool(getattr(launch[0], name)) for name in INDICES[op]] for launch in launches]
    assert passed == [[name == other for other in INDICES[op]] for name in INDICES[op]]


def test_a_pool_is_not_confused_with_initial_states(launches):
    call, states = prompts(), prompt_states(N)
    for name in ("state", "initial_state"):
        run("prefill", **call, **{name: states})
    passed = [(launch[0].initial_state, launch[0].final_state) for launch in launches[1::2]]
    assert passed == [(states.data_ptr(), states.data_ptr()), (states.data_ptr(), 0)]


@pytest.mark.parametrize("op", OPS)
def test_a_hit_with_overlapping_tensors_is_refused(launches, op):
    """A first call has no overlap; then out, the pool or the buffer overlaps another tensor."""
    overlay = calls.overlay
    call, state = tokens(V=64), torch.randn(P, HV, 64, K).bfloat16()
    out, parts = torch.zeros_like(call["v"]), gd.KVBuffer.empty(N, T, H, HV, K, 64)
    if op == "flush":
        counts = torch.ones(N, dtype=i32)
        first = dict(state=state, buffer=parts, num_accepted=counts)
        overlapping = [dict(num_accepted=overlay(state, counts, 2))]
    else:
        both = torch.zeros(2 * out.numel()).bfloat16()
        first = dict(call, state=state, out=out)
        overlapping = [
            dict(out=overlay(state, out, 128)),
            dict(v=overlay(both, out), out=overlay(both, out, out.numel() - 16)),
        ]
    if op == "verify":
        first["buffer"] = parts
        in_pool = gd.KVBuffer(overlay(state, parts.u), parts.k, parts.log_decay)
        overlapping.append(dict(buffer=in_pool))
    run(op, **first)
    before = len(launches)
    for change in overlapping:
        with pytest.raises(ValueError, match="expected memory apart"):
            run(op, **{**first, **change})
    assert len(launches) == before


# ---------------------------------------------------------------- unsupported calls

ROWS, QK, VALUES = "V rows", "rows of q and k", "rows of v and out"
off, padded = calls.misaligned, calls.padded_rows
MISALIGNED = [
    # operation, tensor, change, the missing requirement or None
    *(("decode", name, off, None) for name in ("q", "k", "v", "g", "beta", "z", "out")),
    *(
        ("decode", name, change, ROWS)
        for name in ("state", "intermediate_states")
        for change in (off, padded)
    ),
    *(("verify", name, off, None) for name in ("q", "v", "g", "z", "buffer_u", "buffer_log_decay")),
    *(("verify", "state", change, ROWS) for change in (off, padded)),
    *(("verify", "buffer_k", change, "rows of k") for change in (off, lambda x: padded(x, 1))),
    *(("flush", name, off, None) for name in ("buffer_u", "buffer_k", "buffer_log_decay")),
    ("flush", "state", off, ROWS),
    *(("prefill", name, off, QK) for name in ("q", "k")),
    *(("prefill", name, off, VALUES) for name in ("v", "out")),
    ("prefill", "beta", off, None),
    *(("prefill", name, off, ROWS) for name in ("state", "initial_state", "checkpoints")),
    *(("prefill", name, padded, ROWS) for name in ("state", "checkpoints")),
    ("prefill", "out", calls.spread_channels, VALUES),
    ("prefill", "g", off, "KDA's g"),
]


@pytest.mark.parametrize(("op", "name", "change", "missing"), MISALIGNED)
def test_misaligned_rows(launches, op, name, change, missing, axis):
    """Refused, also on a hit, if a kernel reads them in vectors; otherwise launched."""
    missing = None if (name, axis) == ("g", "head") else missing
    call = calls.with_argument(valid_call(op, axis), name)
    for _ in range(2):
        run(op, **call)
        before = len(launches)
        if missing:
            with pytest.raises(gd.UnsupportedProblem, match=missing):
                run(op, **calls.with_tensor(call, name, change))
        else:
            run(op, **calls.with_tensor(call, name, change))
            aligned = dict(launches.kernels[-1].facts).get("aligned", True)
            assert aligned == (name not in ("q", "k"))
        assert (len(launches) > before) == (missing is None)


def test_other_head_dims_are_refused(launches):
    for K, V in ((96, 192), (32, 128), (128, 96)):
        with pytest.raises(gd.UnsupportedProblem, match=f"got K={K}, V={V}"):
            run("prefill", **tokens((N, 3), "head", bf16, K, V))
    assert launches == []
    dims = [
        *((K, 32, [f"K a multiple of 8 up to 128, got {K}"]) for K in (4, 12, 136)),
        *((8, V, [f"V a multiple of 32, got {V}"]) for V in (16, 48)),
        (8, 32, []),
        (128, 288, []),
    ]
    for op, (K, V, missing) in itertools.product(("decode", "verify", "flush"), dims):
        problem = Problem(op, "head", 1, 1, K, V, 1, state_dtype=bf16)
        assert OPERATIONS[op].missing(problem) == missing


def launch_of(op, call, **tensors):
    """The launch of such a call with other tensors, which may have no memory."""
    route, operation = gd.explain(op, **call, backend="cute"), OPERATIONS[op]
    values = dict.fromkeys(operation.arguments._fields)
    values |= dict(gate="log", bound=0.0, norm_eps=0.0, qk_l2norm=True, beta_logits=False)
    values |= dict(null_index=-1, update_state=True, output_final_state=False)
    values |= calls.tensors_of(call) | tensors
    a = operation.arguments(*(values[field] for field in operation.arguments._fields))
    return operation.launch(route.problem, route.plan, a)


LARGE_STRIDES = [
    *(("decode", name) for name in ("state", "v", "z", "out", "intermediate_states")),
    *(("verify", name) for name in ("state", "z", *BUFFER)),
    *(("flush", name) for name in ("state", *BUFFER)),
    *(("prefill", name) for name in ("state", "initial_state", "out", "checkpoints")),
]


@pytest.mark.parametrize(("op", "name"), LARGE_STRIDES)
def test_strides_of_2_gib_are_refused(launches, op, name):
    call = calls.with_argument(valid_call(op), name)
    x = calls.tensors_of(call)[name]
    limit = 2**31 // x.element_size()
    assert launch_of(op, call, **{name: calls.without_memory(x, limit - 1)})
    with pytest.raises(gd.UnsupportedProblem, match="2 GiB"):
        launch_of(op, call, **{name: calls.without_memory(x, limit)})


def test_layers_and_a_single_prompt_may_have_larger_strides(launches):
    state, parts = pool(f32)[None].repeat(2, 1, 1, 1, 1), buffer(layers=2)
    call = dict(state=state, buffer=parts, num_accepted=torch.ones(N).int())
    tensors = {
        name: calls.without_memory(x, 2**30 + i)
        for i, (name, x) in enumerate(calls.tensors_of(dict(buffer=parts)).items())
    }
    launch = launch_of("flush", call, state=calls.without_memory(state, 2**33), **tensors)
    pointers = launch.operation.pointers(*launch.in_kernel_order((0,) * len(launch.given)))
    strides = [getattr(pointers, f"{name}_l") for name in ("state", *BUFFER)]
    assert strides == [2**35, 2**32, 2**32 + 4, 2**32 + 8]

    call = prompts((1, 70))
    assert launch_of("prefill", call, v=calls.without_memory(call["v"], 2**30))
    checkpoints = calls.without_memory(torch.zeros(1, 2, HV, D, D), 2**30)
    lens = torch.zeros(1, 2, dtype=i64)
    assert launch_of("prefill", call, checkpoint_lens=lens, checkpoints=checkpoints)


def test_calls_of_no_sequences_launch_nothing(launches):
    state, parts, none, no_ends = pool(), buffer(), torch.arange(0), torch.zeros(1).int()
    assert run("decode", **tokens((0, T)), state=state).shape == (0, T, HV, V)
    assert run("verify", **tokens((0, T)), state=state, buffer=parts).shape == (0, T, HV, V)
    o = run("verify", **tokens((1, 4)), cu_seqlens=no_ends, state=state, buffer=parts)
    assert (o == 0).all()
    run("flush", state=state, buffer=parts, num_accepted=1, state_indices=none)
    run("flush", state=state, buffer=parts, num_accepted=none)
    run("flush", state=state, buffer=buffer(0), num_accepted=1, buffer_indices=none)
    run("flush", state=state[None][:0], buffer=buffer(layers=0), num_accepted=torch.ones(N).int())
    o, final = run("prefill", **prompts((0, 5)), output_final_state=True)
    assert (o.shape, final.shape) == ((0, 5, HV, D), (0, HV, D, D))
    start = prompt_states()
    before = start.clone()
    assert (run("prefill", **prompts((1, 4)), cu_seqlens=no_ends, state=start)[0] == 0).all()
    assert torch.equal(start, before)
    assert launches == []


def test_sequences_of_no_tokens_have_final_states(launches):
    run("prefill", **prompts((N, 0)), initial_state=prompt_states(N), output_final_state=True)
    assert launches[0][-1].chunk_slots > 0


# ---------------------------------------------------------------- GATED_DELTA_CHECK

COUNTS, PAST_THE_END, REPEATED = torch.ones(N).int(), ints(0, 1, P), ints(0, 1, 1)
TWO_ROWS = torch.zeros(2, T, HV, V, K).bfloat16()
WITH_TOKENS = ("prefill", "decode", "verify")


def last_checkpoint(length, slot):
    """Checkpoints of which the last sequence stores one."""
    lens, slots = (torch.tensor([[-1]] * (N - 1) + [[x]]) for x in (length, slot))
    return dict(checkpoint_lens=lens, checkpoint_indices=slots)


def positive_log_decay(op):
    """Log decays with one above 0, in sequence 1."""
    g = valid_call(op)["g"]
    g[1, -1, 0] = 0.25
    return g


def intermediate_rows(*rows):
    return dict(intermediate_states=TWO_ROWS, intermediate_indices=ints(*rows))


CHECKED = [
    # operation, changes, the error or None
    (
        "decode",
        dict(state_indices=ints(0, 3, 0)),
        "ValueError state_indices: expected at most one sequence to write each row",
    ),
    ("decode", dict(state_indices=ints(0, 3, 0), null_index=0), None),
    ("decode", intermediate_rows(0, 0, -1), "ValueError intermediate_indices"),
    ("decode", intermediate_rows(0, 2, -1), "IndexError intermediate_indices"),
    ("decode", intermediate_rows(1, -1, 0), None),
    ("verify", dict(state_indices=PAST_THE_END), "IndexError state_indices"),
    ("verify", dict(buffer_indices=PAST_THE_END), "IndexError buffer_indices"),
    ("verify", dict(buffer_indices=REPEATED), "ValueError buffer_indices"),
    ("verify", dict(state_indices=REPEATED), None),  # several sequences may read a slot
    ("flush", dict(state_indices=PAST_THE_END), "IndexError state_indices"),
    ("flush", dict(state_indices=None, buffer_indices=PAST_THE_END), "IndexError buffer_indices"),
    ("flush", dict(num_accepted=COUNTS, write_indices=PAST_THE_END), "IndexError write_indices"),
    ("flush", dict(num_accepted=0, state_indices=REPEATED), "ValueError state_indices"),
    ("flush", dict(num_accepted=COUNTS), None),
    ("prefill", dict(state_indices=PAST_THE_END), "IndexError state_indices"),
    ("prefill", dict(state_indices=REPEATED), "ValueError state_indices"),
    ("prefill", last_checkpoint(65, 3), "ValueError checkpoint_lens"),
    ("prefill", last_checkpoint(128, 3), "ValueError checkpoint_lens"),
    ("prefill", last_checkpoint(64, P), "IndexError checkpoint_indices"),
    ("prefill", last_checkpoint(64, 2), "ValueError checkpoint_indices"),
    *(
        ("prefill", packed_prompts(*ends), "ValueError cu_seqlens")
        for ends in ((0, 5, 4), (1, 5, 9), (0, 5, 10))
    ),
    ("prefill", packed_prompts(0, 5, 8), None),
    ("prefill", dict(state_indices=ints(0, -1, -1)), None),
    *(
        (op, dict(g=positive_log_decay(op)), "ValueError g: expected log decays")
        for op in WITH_TOKENS
    ),
    *(
        (op, dict(g=positive_log_decay(op), state_indices=ints(0, -1, 1)), None)
        for op in WITH_TOKENS
    ),
]


@pytest.mark.parametrize(("op", "changes", "error"), CHECKED)
def test_indices_are_checked_on_request(launches, monkeypatch, op, changes, error):
    """On misses and hits; a wrong call launches nothing."""
    call = valid_call(op) | changes
    if error:
        kind, _, words = error.partition(" ")
        error_type = dict(ValueError=ValueError, IndexError=IndexError)[kind]
        run(op, **call)  # without the check
        launches.clear()
    monkeypatch.setattr(shared, "CHECK", True)
    for _ in range(2):
        if error:
            with pytest.raises(error_type, match=words):
                run(op, **call)
        else:
            run(op, **call)
    assert bool(launches) == (error is None)


def test_a_bad_value_of_gated_delta_check_is_an_error(launches, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_CHECK", "maybe")
    with pytest.raises(ValueError, match="GATED_DELTA_CHECK: expected 0 or 1"):
        run("decode", **valid_call("decode"))
    assert launches == []


# ---------------------------------------------------------------- prefill's workspace and segments

WORKSPACE = [
    "k_tiles",
    "q_tiles",
    "k_restored",
    "tinv_aqk",
    "scales",
    "sequence_order",
    "work_queue",
]
WORKSPACE += ["segment_transitions", "segment_states", "transition_norms"]


def force_segments(segments, monkeypatch, joins=False):
    """Prefills from here on split each sequence into that many segments."""
    monkeypatch.setattr(
        on_host, "segmentation_of", lambda *_: on_host.Segmentation(segments, joins=joins)
    )


@pytest.mark.parametrize("segments", [1, 2, 7])
def test_segments_launch_transitions_state_passing_and_scan(launches, monkeypatch, axis, segments):
    force_segments(segments, monkeypatch)
    run("prefill", **valid_call("prefill", axis))
    passing = ["prefill_transitions", "prefill_state_passing"] if segments > 1 else []
    assert [some.kernel for some in launches.kernels] == [
        "prefill_prepare",
        *passing,
        "prefill_scan",
    ]
    windows = [
        dict(some.facts)[name]
        for some, name in ((launches.kernels[0], "segmented"), (launches.kernels[-1], "windows"))
    ]
    assert windows == [segments > 1] * 2
    assert all(launch == launches[0] for launch in launches)
    assert launches[0][-1].segments == segments


def test_joined_segments_are_two_kernels(launches, monkeypatch, axis):
    """Prepare and scan. There is memory for the norms of transitions, not for transitions or states."""
    force_segments(2, monkeypatch, joins=True)
    run("prefill", **valid_call("prefill", axis))
    assert [some.kernel for some in launches.kernels] == ["prefill_prepare", "prefill_scan"]
    assert [
        dict(some.facts).get(name) for some, name in zip(launches.kernels, ("segmented", "windows"))
    ] == [True, True]
    assert all(launch == launches[0] for launch in launches)
    assert (
        launches[0][0].segment_transitions
        == launches[0][0].segment_states
        == 0
        < launches[0][0].transition_norms
    )


def test_one_kernel_where_heads_fill_the_chip(launches):
    """And at most eight value heads share a k head. In the workspace is at most what uneven sequences need: ranks and a queue."""
    for many, heads, longest, more, kernels in (
        (33, 2, None, {}, ["prefill_fused"]),
        (34, 4, 65, {}, ["prefill_fused"]),
        (34, 4, 80, {}, ["prefill_schedule", "prefill_fused"]),
        (33, 4, 80, {}, ["prefill_fused"]),  # as many blocks as heads
        (33, 1, None, {}, ["prefill_fused"]),
        (33, 1, None, dict(deterministic=True), ["prefill_prepare", "prefill_scan"]),
    ):
        if longest:
            more = more | dict(cu_seqlens=torch.arange(many + 1) * 65, max_seqlen=longest)
        launches.clear()
        call = prompts((1, many * 65) if "cu_seqlens" in more else (many, 70))
        run(
            "prefill",
            **call | {name: call[name].repeat_interleave(2, 2)[:, :, :heads] for name in "qk"},
            **more,
        )
        assert [some.kernel for some in launches.kernels] == kernels
        assert all(launch == launches[0] for launch in launches)
        present = ["sequence_order", "work_queue"] if "prefill_schedule" in kernels else []
        if "prefill_fused" in kernels:
            assert sorted(name for name in WORKSPACE if getattr(launches[0][0], name)) == present


@pytest.mark.parametrize("longest", [100, 3200])
def test_packed_sequences_have_an_order_where_their_blocks_take_turns(launches, axis, longest):
    """Of four heads and two tiles of V rows, or one; what is uneven has two where the longest is known."""
    for N in (16, 40, 17):
        launches.clear()
        call = prompts((1, N * 80), axis) | dict(
            cu_seqlens=ints(*range(0, N * 80 + 1, 80)), max_seqlen=longest
        )
        run("prefill", **call, deterministic=True)
        rows = dict(launches.kernels[-1].facts)["rows"]
        assert launches.kernels[-1].kernel == "prefill_scan"
        assert bool(launches[0][0].sequence_order) == (4 * N * 128 // rows > 132)


def test_few_blocks_of_prepare_have_fewer_value_heads(launches, axis):
    """Halved while they are no more than 264 and the heads are even. KDA's have one, and what prepares beside the scan has all."""
    for T, H, HV, heads in (
        (512, 16, 64, 2),
        (256, 16, 64, 1),
        (1024, 16, 64, 4),
        (64, 1, 12, 3),
        (64, 2, 2, 1),
        (64, 1, 7, 7),
    ):
        assert (
            on_host.prepare_heads(H, HV, -(-T // 64), on_host.Segmentation(1), on_host.H200_SMS)
            == heads
        )
        assert (
            on_host.prepare_heads(
                H, HV, -(-T // 64), on_host.Segmentation(1, overlapped=True), on_host.H200_SMS
            )
            == HV // H
        )
    run("prefill", **prompts((1, 100), axis))
    assert (launches[0][-1].block_heads, launches[0][-1].chunk_blocks) == (1, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_prepare_beside_the_scan_has_a_counter_for_each_chunk(launches, monkeypatch, axis, packed):
    """Behind the queues of blocks and of items, and memory for what two kernels hand over."""
    monkeypatch.setattr(
        on_host, "segmentation_of", lambda *_: on_host.Segmentation(1, overlapped=True)
    )
    made, measure = [], on_host._workspace
    monkeypatch.setattr(
        on_host, "_workspace", lambda *facts: made.append(measure(*facts)) or made[-1]
    )
    run(
        "prefill",
        **prompts((1, 6400), axis),
        **(dict(cu_seqlens=torch.tensor([0, 6000])) if packed else {}),
    )
    assert [some.kernel for some in launches.kernels] == ["prefill_schedule", "prefill_overlapped"]
    ((size, offsets),), (pointers, *_, sizes) = made, launches[0]
    assert launches[0] == launches[1]
    present = {name for name in WORKSPACE if getattr(pointers, name)}
    more = ["k_restored"] if axis == "channel" else []
    assert present == {"k_tiles", "q_tiles", "tinv_aqk", "scales", "work_queue", *more}
    queue = offsets[WORKSPACE.index("work_queue")]
    assert queue == max(offsets)
    assert queue + 4 * (2 + sizes.chunk_slots) <= size
    assert sizes.chunk_slots >= 100


@pytest.mark.parametrize("keeps", [False, True])
def test_a_deterministic_prefill_has_one_scan_of_one_segment(launches, axis, keeps):
    """Where calls without the flag have segments, joined ones, or one kernel; rows, and prepare beside the scan, do not change bits."""
    packed, two = (
        prompts((1, 200), axis) | dict(cu_seqlens=ints(0, 64, 200)),
        ["prefill_prepare", "prefill_scan"],
    )
    beside = ["prefill_schedule", "prefill_overlapped"]
    for call, n, kernels, rows in (
        (prompts((1, 8192), axis), 1, beside, 64),
        (packed, 2, two, 64),
        (prompts((40, 70), axis), 40, two, 128),
    ):
        launches.clear()
        keep = (
            dict(
                checkpoint_lens=torch.zeros(n, 1, dtype=i32),
                checkpoints=torch.zeros(n, 1, HV, D, D),
            )
            if keeps
            else {}
        )
        run("prefill", **call, **keep, deterministic=True)
        facts = dict(launches.kernels[-1].facts)
        assert [some.kernel for some in launches.kernels] == kernels
        assert facts | dict(checkpoints=True, deterministic=True) == facts
        assert facts.get("rows", 64) == rows
        assert launches[0][-1].segments == 1
    assert "deterministic" in str(
        gd.explain("prefill", **packed, deterministic=True, backend="cute")
    )


def test_segmentation_depends_on_sequences_tokens_and_what_the_call_says_of_them(
    launches, monkeypatch
):
    """Calls and explain pass the same numbers."""
    asked = []
    monkeypatch.setattr(
        on_host,
        "segmentation_of",
        lambda problem, *sizes: asked.append(sizes) or on_host.Segmentation(1),
    )
    for call in (prompts(), packed_prompts(0, 4, 8), packed_prompts(0, 4, 8) | dict(max_seqlen=5)):
        run("prefill", **call)
        gd.explain("prefill", **call, backend="cute")
    sms = on_host.H200_SMS
    assert asked == [(N, N * 70, None, sms)] * 2 + [(2, 9, None, sms)] * 2 + [(2, 9, 5, sms)] * 2


def test_the_schedule_reads_how_many_sms_the_gpu_has(launches, monkeypatch):
    """So do the kernels, the order of sequences and the blocks of prepare."""
    gpu = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", {torch.device("cuda", 1): gpu}.__getitem__
    )
    assert on_host.sms_of(torch.device("cuda", 1)) == 78
    assert on_host.sms_of(torch.device("cpu")) == on_host.H200_SMS
    call = prompts((1, 60 * 65)) | dict(
        cu_seqlens=torch.arange(61) * 65, max_seqlen=65, deterministic=True
    )
    for sms, ordered in ((239, True), (240, False)):
        monkeypatch.setattr(on_host, "sms_of", lambda _, sms=sms: sms)
        OPERATIONS["prefill"].calls.clear()
        launches.clear()
        run("prefill", **call)
        assert {some[-1].sms for some in launches} == {sms}
        assert bool(launches[0][0].sequence_order) == ordered
    for sms, segments in ((132, 8), (60, 7), (16, 1)):
        monkeypatch.setattr(on_host, "sms_of", lambda _, sms=sms: sms)
        assert (
            gd.explain("prefill", **prompts((1, 4096)), backend="cute").schedule.segments
            == segments
        )


def test_calls_that_differ_in_max_seqlen_have_kernels_of_their_own(launches):
    """Known calls too, and whatever it says: one that is too small or too large is as the nearest that can be."""
    many, fused, split = 34, ["prefill_fused"], ["prefill_prepare", "prefill_scan"]
    call = prompts((1, many * 65)) | dict(cu_seqlens=torch.arange(many + 1) * 65)
    for _ in range(2):
        for max_seqlen, kernels, rows in (
            (65, fused, None),
            (0, fused, None),
            (80, ["prefill_schedule", *fused], None),
            (numpy.int32(65), fused, None),
            (1000, split, 64),
            (2**70, split, 64),
            (None, split, 64),
        ):
            launches.clear()
            run("prefill", **call, max_seqlen=max_seqlen)
            assert [some.kernel for some in launches.kernels] == kernels
            assert dict(launches.kernels[-1].facts).get("rows") == rows
    assert len(OPERATIONS["prefill"].calls) == 7


@pytest.mark.parametrize(("segments", "joins"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_workspace_regions_have_room_and_do_not_overlap(
    launches, monkeypatch, axis, packed, segments, joins
):
    """Every region up to the last byte of its last entry; they begin at multiples of 256 bytes from one another."""
    force_segments(segments, monkeypatch, joins)
    monkeypatch.setattr(on_host, "sms_of", lambda _: 3)
    made, measure = [], on_host._workspace
    monkeypatch.setattr(
        on_host, "_workspace", lambda *facts: made.append(measure(*facts)) or made[-1]
    )
    more = dict(cu_seqlens=torch.tensor([0, 5, 190])) if packed else {}
    run("prefill", **prompts((1, 200) if packed else (N, 70), axis), **more)
    ((size, offsets),), (pointers, *_, sizes) = made, launches[0]
    v_chunks, channel = sizes.chunk_slots * sizes.HV, axis == "channel"
    qk_bytes = TILE_BYTES * (v_chunks if channel else sizes.chunk_slots * sizes.H)
    cut = sizes.N * sizes.HV * segments if segments > 1 and not joins else 0
    queue = 4 * (1 + (sizes.N * sizes.HV * 2 if segments > 1 else 0))
    tiles = [
        qk_bytes,
        qk_bytes,
        v_chunks * TILE_BYTES if channel else 0,
        v_chunks * 2 * TRIANGLE_BYTES,
        v_chunks * SCALE_BYTES,
    ]
    ends = [*tiles, 4 * sizes.N if packed else 0, queue, 2 * cut * D * D * 4, cut * (D * D * 4 + 4)]
    ends.append(v_chunks * 4 if segments > 1 else 0)
    assert [at < 0 for at in offsets] == [end == 0 for end in ends]
    taken = [(at, at + end) for at, end in zip(offsets, ends, strict=True) if end]
    assert all(at % 256 == 0 for at, _ in taken)
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(taken))
    assert taken[-1][1] <= size
    start = pointers.work_queue - offsets[WORKSPACE.index("work_queue")]
    assert [getattr(pointers, name) for name in WORKSPACE] == [
        start + at if at >= 0 else 0 for at in offsets
    ]


def first_chunk_slot(starts, n):
    """The slot of a packed sequence's first chunk, as device/chunks.py has it."""
    return starts[n] // CHUNK + n


def test_every_chunk_of_packed_prompts_has_a_slot(launches):
    rng = random.Random(0)
    for _ in range(50):
        lengths = [
            rng.choice((0, 1, 63, 64, 65, rng.randrange(300))) for _ in range(rng.randrange(1, 9))
        ]
        starts = [0, *itertools.accumulate(lengths)]
        total = starts[-1] + rng.choice((0, 1, 100))
        run("prefill", **prompts((1, total)), cu_seqlens=torch.tensor(starts))
        slots = [
            first_chunk_slot(starts, n) + c
            for n, length in enumerate(lengths)
            for c in range(-(-length // CHUNK))
        ]
        assert slots == sorted(set(slots))
        assert max(slots, default=0) < launches[-1][-1].chunk_slots


def prompt_problem(HV=8, **changes):
    dtypes = dict.fromkeys(("dtype", "g_dtype", "beta_dtype"), torch.bfloat16) | dict(
        state_dtype=torch.float32
    )
    return Problem(
        "prefill",
        **{
            "axis": "head",
            "H": 1,
            "HV": HV,
            "K": D,
            "V": D,
            "gate": "softplus",
            **dtypes,
            **changes,
        },
    )


@pytest.mark.parametrize("sms", [132, 114, 78, 16])
def test_few_long_prompts_are_segmented_and_others_are_not(sms):
    """No more blocks than run at once, and no segment too short to pay for state passing."""
    found = set()
    sizes = (
        (1, 2, 4, 8, 16, 32, 64),
        (1, 2, 3, 7, 33, 300),
        (0, 1, 512, 2047, 2048, 8191, 8192, 100_000),
    )
    for axis, HV, N, T in itertools.product(("head", "channel"), *sizes):
        made = on_host.segmentation_of(prompt_problem(HV, axis=axis), N, N * T, sms=sms)
        found.add((made.segments, made.joins))
        assert made.segments >= 1
        if made.segments > 1:
            doubled = (
                axis == "head"
                and made.segments * on_host.MIN_DOUBLED <= 2 * T
                and made.segments >= 2 * on_host.FEW_SEGMENTS
            )
            assert made.segments * 2 * HV * N <= sms * (1 + doubled)
            if made.joins:
                assert on_host.MIN_JOINED <= T
                assert made.segments <= on_host.MAX_JOINED_SEGMENTS
                assert made.segments >= on_host.MIN_JOINED_SEGMENTS[axis]
            else:
                assert T >= on_host.MIN_CUT
                assert (
                    made.segments <= on_host.FEW_SEGMENTS
                    or made.segments * on_host.MIN_SEGMENT <= T
                )
                assert made.segments >= 4 or (
                    made.segments == 3 and T >= on_host.MIN_THREE_SEGMENTS
                )
        blocks = 2 * HV * N  # of 64 rows
        if made.raw and made.overlapped:
            assert (axis, made.rows) == ("channel", 128)
            assert (on_host.MIN_WALKED_RAW if blocks <= sms else on_host.MIN_TURNS_RAW) <= T
            assert sms / on_host.MAX_UNEVEN_RAW <= HV * N <= on_host.MAX_WALKING_RAW * sms
            continue
        if (
            blocks <= sms or axis == "channel" or sms == on_host.H200_SMS
        ):  # else some of GDN's heads would leave SMs idle
            assert made.rows == (64 if blocks <= sms else 128)
        assert not made.overlapped or (N == 1 and 16 * blocks <= 9 * sms)
        if made.segments == 1 and 3 * blocks <= sms:
            assert T < on_host.MIN_THREE_SEGMENTS  # room for three, and tokens for them
    assert found > {(1, False), (4, False), (2, True)} | ({(16, False)} if sms > 16 else set())
    assert on_host.segmentation_of(prompt_problem(), 0, 0) == on_host.Segmentation(1)


def test_where_there_is_no_room_for_eight_segments_scans_join_four_of_longer_prompts():
    for axis, fewest in on_host.MIN_CUT_IN_FEWER.items():
        joined = on_host.Segmentation(4, joins=True)
        for HV, N in ((16, 1), (8, 2), (9, 1)):
            room = 132 // (2 * HV * N)
            assert {
                on_host.segmentation_of(prompt_problem(HV, axis=axis), N, N * T)
                for T in (2048, fewest - 1)
            } == {joined}
            assert on_host.segmentation_of(
                prompt_problem(HV, axis=axis), N, N * fewest
            ) == on_host.Segmentation(room)
        for other in (
            dict(HV=8),
            dict(HV=16, V=64),
            dict(HV=16, K=64),
        ):  # room for eight; what scans do not join
            made = on_host.segmentation_of(prompt_problem(axis=axis, **other), 1, 2048)
            assert (made.segments >= 4, made.joins) == (True, False)


def test_very_long_prompts_of_gdn_have_twice_as_many_segments_as_fit_at_once():
    for HV, length, segments in (
        (8, 65_536, 16),
        (8, 65_535, 8),
        (4, 131_072, 32),
        (4, 131_071, 16),
        (16, 131_072, 4),
    ):
        assert on_host.segmentation_of(prompt_problem(HV), 1, length) == on_host.Segmentation(
            segments
        )
    assert on_host.segmentation_of(
        prompt_problem(8, axis="channel"), 1, 131_072
    ) == on_host.Segmentation(8)


def test_what_has_no_fused_kernel_is_not_fused():
    one, split = on_host.Segmentation(1, 128, True, even=True), on_host.Segmentation(1, 128)
    assert on_host.segmentation_of(prompt_problem(2), 64, 6400) == one
    assert on_host.segmentation_of(prompt_problem(1), 67, 6700) == one
    assert on_host.segmentation_of(prompt_problem(2, axis="channel"), 100, 10000) == split._replace(
        raw=True
    )
    for other in (
        dict(axis="channel", g_dtype=torch.float32),
        dict(axis="channel", options=frozenset({"deterministic"})),
        dict(dtype=torch.float16),
        dict(K=64),
        dict(HV=9),
        dict(options=frozenset({"deterministic"})),
    ):
        assert on_host.segmentation_of(prompt_problem(**dict(HV=2) | other), 100, 10000) == split
    assert on_host.segmentation_of(prompt_problem(2), 100, 6400) == split  # a chunk a sequence


def test_sequences_of_about_one_length_need_no_queue():
    """As many chunks as the longest on average, and at most a tenth less than it."""
    problem = prompt_problem(H=16, HV=32, options=frozenset({"cu_seqlens_i32"}))
    for lengths, even in (
        ((409,) * 9 + (415,), True),
        ((204,) * 19 + (220,), True),
        ((448,) * 7 + (447,), True),
        ((380,) * 9 + (390,), False),  # six chunks, and seven
        ((400,) * 9 + (448,), False),
        ((819,) * 8 + (820, 0), False),
    ):
        made = on_host.segmentation_of(problem, len(lengths), sum(lengths), max(lengths))
        assert made == on_host.Segmentation(1, 128, True, even=even)


def test_where_heads_leave_many_sms_idle_blocks_have_64_rows():
    """Three to eight value heads a k head: 132 at a time, which should fill three quarters of all rounds but a single one."""
    one, two = on_host.Segmentation(1, 128, True, even=True), on_host.Segmentation(1)
    for heads, made in (
        (84, one),
        (132, one),
        (144, two),
        (192, two),
        (204, one),
        (264, one),
        (276, two),
        (300, one),
        (372, one),
    ):
        for HV in (3, 4, 6):
            assert on_host.segmentation_of(prompt_problem(HV), heads // HV, 100 * heads) == made
        for HV in (1, 2):
            assert on_host.segmentation_of(prompt_problem(HV), heads // HV, 100 * heads) == one


def test_chunks_of_one_prompt_are_prepared_beside_the_scan_where_many_sms_are_idle():
    overlapped = on_host.Segmentation(1, overlapped=True)
    packed = dict(options=frozenset({"cu_seqlens_i32"}))
    kda = (dict(HV=some, axis="channel") for some in (17, 37))
    for sizes in (dict(H=16, HV=32), dict(HV=17), dict(HV=37), dict(H=32, HV=32, **packed), *kda):
        fewest = on_host.MIN_OVERLAPPED
        if "axis" in sizes:  # more chunks of heads than prepare has blocks at once
            fewest = on_host.PREPARED_AT_ONCE * on_host.H200_SMS // sizes["HV"] * 64 + 1
        assert on_host.segmentation_of(prompt_problem(**sizes), 1, fewest) == overlapped
        assert not on_host.segmentation_of(prompt_problem(**sizes), 1, fewest - 1).overlapped
        assert not on_host.segmentation_of(prompt_problem(**sizes), 1, 2**20).joins
    fp32 = dict(
        axis="channel", g_dtype=torch.float32
    )  # three chunks of which an SM has no shared memory for
    for other in (fp32, dict(dtype=torch.float16), dict(K=64), dict(V=64), dict(HV=38)):
        assert not on_host.segmentation_of(
            prompt_problem(**dict(H=1, HV=32) | other), 1, 8192
        ).overlapped
    assert not on_host.segmentation_of(prompt_problem(HV=16), 2, 8192).overlapped
    for sms, made in ((114, True), (113, False), (78, False)):
        assert (
            on_host.segmentation_of(prompt_problem(H=16, HV=32), 1, 8192, sms=sms).overlapped
            == made
        )


def test_of_kda_with_a_head_for_half_of_the_sms_raw_tokens_are_walked_beside_prepare():
    """A head of each sequence. Of at most 32 sequences, of which none is much longer than the others."""
    beside = on_host.Segmentation(1, 128, overlapped=True, raw=True)

    def made(HV, N, tokens, longest=None, **changes):
        return on_host.segmentation_of(
            prompt_problem(HV, axis="channel", **changes), N, tokens, longest
        )

    half = ((55, 1), (66, 1), (32, 2), (8, 8), (2, 32))
    for HV, N, fewest in (
        *((*some, on_host.MIN_WALKED_RAW) for some in half),
        (8, 9, 320),
        (80, 1, 320),
    ):
        assert made(HV, N, N * fewest) == beside
        assert made(HV, N, N * (fewest - 1)) != beside
    for HV, N in ((54, 1), (81, 1), (2, 33), (1, 64)):
        assert made(HV, N, N * 8192) != beside
    for other in (
        dict(options=frozenset({"deterministic"})),
        dict(g_dtype=torch.float32),
        dict(K=64),
    ):
        assert made(64, 1, 8192, **other) != beside
    packed = dict(options=frozenset({"cu_seqlens_i32"}))
    assert [
        made(32, 2, 8192, longest, **packed) == beside for longest in (4096, 4766, 4767, None)
    ] == [True, True, False, False]
    assert made(64, 1, 8192, **packed) == beside


def test_packed_prompts_have_64_rows_where_one_of_them_may_keep_few_sms_busy():
    """The fewer they are, the more of all tokens one may have; as long as each other they are where they are not packed."""
    packed = dict(options=frozenset({"cu_seqlens_i32"}))
    rows = {
        (16, 32): {3: 64, 4: 64, 5: 128, 20: 128},
        (4, 8): {9: 64, 20: 64},
        (16, 64): {2: 64, 4: 128},
        (32, 32): {3: 64, 5: 128},
    }
    for axis, (H, HV) in itertools.product(("head", "channel"), rows):
        for sequences, wanted in rows[H, HV].items():
            sizes, tokens = dict(H=H, HV=HV, axis=axis), sequences * 1024
            assert (
                on_host.segmentation_of(prompt_problem(**sizes, **packed), sequences, tokens).rows
                == wanted
            )
            assert on_host.segmentation_of(prompt_problem(**sizes), sequences, tokens).rows == 128
    assert on_host.segmentation_of(prompt_problem(HV=96, **packed), 1, 8192).rows == 128


def test_where_the_longest_packed_prompt_is_known_rows_depend_on_it():
    """Not on how many there are. More heads than SMs always have 128, whatever the call says."""
    packed = dict(options=frozenset({"cu_seqlens_i32"}))
    cells = [
        (axis, *some)
        for axis in ("head", "channel")
        for some in ((4, 8, 20, 992), (16, 32, 3, 3971))
    ]
    for axis, H, HV, sequences, longest in (
        *cells,
        ("head", 4, 8, 10, 992),
        ("head", 32, 32, 4, 4964),
        ("channel", 32, 32, 4, 3971),
    ):
        even, uneven = (
            on_host.segmentation_of(
                prompt_problem(H=H, HV=HV, axis=axis, **packed), sequences, 8192, known
            )
            for known in (longest, longest + 1)
        )
        assert (even.rows, uneven) == (128, on_host.Segmentation(1))
    rows = {
        on_host.segmentation_of(prompt_problem(HV=96, **packed), 10, 8192, known).rows
        for known in (0, 820, 8192, 2**40)
    }
    assert rows == {128}
    few = {
        on_host.segmentation_of(prompt_problem(HV=4, **packed), 10, 81920, known)
        for known in (None, 0, 8192, 2**40)
    }
    assert len(few) == 1


def test_blocks_of_states_with_64_v_rows_have_64():
    for N, HV in itertools.product((1, 300), (1, 64)):
        assert on_host.segmentation_of(prompt_problem(HV, V=64), N, N * 1000).rows == 64


def test_a_longer_prompt_has_no_fewer_segments():
    """Among short ones, whose segments are joined, and among those that are cut, longer than what is prepared beside the scan."""
    for HV, N in itertools.product((1, 2, 8, 16), (1, 2, 5)):
        for lengths in (range(0, on_host.MIN_OVERLAPPED, 50), range(on_host.MIN_CUT, 40_000, 100)):
            segments = [
                on_host.segmentation_of(prompt_problem(HV), N, N * T).segments for T in lengths
            ]
            assert segments == sorted(segments)


def test_variants_of_a_prefill_are_those_of_every_segmentation(axis):
    problem = prompt_problem(axis=axis)
    listed = dispatch.variants_of(problem)
    several = [on_host.Segmentation(segments) for segments in (2, 3, 16)]
    for segmentation in (
        on_host.Segmentation(1),
        on_host.Segmentation(1, 128),
        *several,
        on_host.Segmentation(2, joins=True),
    ):
        made = [some.kernel for some in on_host.variants_of(problem, segmentation)]
        between = (
            ["prefill_transitions", "prefill_state_passing"] if segmentation in several else []
        )
        assert made == ["prefill_prepare", *between, "prefill_scan"]
        assert set(on_host.variants_of(problem, segmentation)) <= set(listed)
    fused, overlapped = on_host.Segmentation(1, 128, True), on_host.Segmentation(1, overlapped=True)
    in_one, raw = (
        [(overlapped, ["prefill_schedule", "prefill_overlapped"])],
        on_host.Segmentation(1, 128, raw=True),
    )
    if axis == "channel":
        two = ["prefill_prepare_raw", "prefill_scan_raw"]
        for segmentation, kernels in (
            (raw, two),
            (raw._replace(overlapped=True), ["prefill_schedule", *two]),
        ):
            made = on_host.variants_of(problem, segmentation)
            assert ([some.kernel for some in made], set(made) <= set(listed)) == (kernels, True)
    if axis == "head":
        in_one += [
            (fused._replace(even=True), ["prefill_fused"]),
            (fused, ["prefill_schedule", "prefill_fused"]),
        ]
    for segmentation, kernels in in_one:
        made = on_host.variants_of(problem, segmentation)
        assert [some.kernel for some in made] == kernels
        assert all(
            dict(some.facts) == dict(overlapped=segmentation.overlapped) for some in made[:-1]
        )
        assert set(made) <= set(listed)
    walks = [
        "prefill_overlapped",
        "prefill_fused" if axis == "head" else "prefill_scan_raw",
        *["prefill_scan"] * 3,
    ]
    others = [
        *["prefill_prepare"] * 2,
        "prefill_state_passing",
        "prefill_transitions",
        "prefill_schedule",
    ]
    others += ["prefill_schedule" if axis == "head" else "prefill_prepare_raw"]
    assert sorted(some.kernel for some in listed) == sorted([*walks, *others])
    new = set(
        dispatch.variants_of(prompt_problem(axis=axis, options=frozenset({"checkpoints"})))
    ) - set(listed)
    assert sorted(some.kernel for some in new) == sorted(walks)


def test_a_scan_that_decays_raw_tokens_has_no_tiles_in_the_workspace(launches):
    """Many heads of KDA, bf16 with 16-bit g and 128 channels. Deterministic calls and others have tiles."""
    tiles, call = {"k_tiles", "q_tiles", "k_restored"}, prompts((34, 70), "channel")
    of_64_channels = {name: x[..., :64] for name, x in call.items() if name in "qkg"}
    half = {name: call[name].half() for name in "qkv"}
    for more, kernel in (
        ({}, "prefill_scan_raw"),
        (dict(g=call["g"].half()), "prefill_scan_raw"),
        (
            dict(
                checkpoint_lens=ints(*[64] * 34)[:, None],
                checkpoints=torch.empty(34, 1, 4, 128, 128),
            ),
            "prefill_scan_raw",
        ),
        (dict(deterministic=True), "prefill_scan"),
        (dict(g=call["g"].float()), "prefill_scan"),
        (half, "prefill_scan"),
        (of_64_channels, "prefill_scan"),
    ):
        launches.clear()
        run("prefill", **call | more)
        raw = kernel == "prefill_scan_raw"
        assert [some.kernel for some in launches.kernels] == [
            "prefill_prepare_raw" if raw else "prefill_prepare",
            kernel,
        ]
        assert {name for name in tiles if getattr(launches[0][0], name)} == (
            set() if raw else tiles
        )


def test_compile_time_facts_of_prefills_kernels():
    """Heads, index types and layouts are runtime arguments; each compile-time fact belongs to the kernels that use it."""

    def changed(**changes):
        return {
            some.kernel.removeprefix("prefill_")
            for some in set(dispatch.variants_of(prompt_problem(**changes))) - set(first)
        }

    first = dispatch.variants_of(prompt_problem())
    for same in (
        dict(H=8, HV=64),
        dict(beta_logits=True),
        dict(beta_dtype=torch.float32),
        dict(options=frozenset({"pool"})),
    ):
        assert changed(**same) == set()
    assert changed(axis="channel") == {
        "prepare",
        "prepare_raw",
        "scan",
        "scan_raw",
        "transitions",
        "overlapped",
    }
    assert changed(dtype=torch.float16) == {"prepare", "scan", "transitions"}
    assert (
        changed(g_dtype=torch.float32)
        == changed(gate="log")
        == changed(qk_l2norm=False)
        == {"prepare", "fused", "overlapped"}
    )
    assert changed(state_dtype=torch.bfloat16) == {"scan", "transitions", "fused", "overlapped"}
    assert changed(K=64) == {"prepare", "scan", "transitions"}
    assert changed(V=64) == {"scan", "transitions", "state_passing"}


def test_prefills_of_the_released_models_are_shipped():
    """Qwen3-Next and Qwen3.5, whose log decays may be fp32, and Kimi Linear; both state dtypes."""
    shipped = set(dispatch.shipped())
    wanted = [
        ("head", "log"),
        ("head", "softplus"),
        ("channel", "log"),
        ("channel", "softplus"),
        ("channel", "lower_bound"),
    ]
    for (axis, gate), state in itertools.product(wanted, (torch.float32, torch.bfloat16)):
        for options in (frozenset(), frozenset({"checkpoints"})):
            assert (
                set(
                    dispatch.variants_of(
                        prompt_problem(axis=axis, gate=gate, state_dtype=state, options=options)
                    )
                )
                <= shipped
            )
    assert set(dispatch.variants_of(prompt_problem(gate="log", g_dtype=torch.float32))) <= shipped
