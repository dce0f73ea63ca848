"""The CuTe backend's host code on a CPU: tests record launches and follow every address in them."""

import functools
import itertools
import random
import re

import numpy
import pytest
import torch

import gated_delta as gd
import kernel_calls as calls
from gated_delta import api, compile, dispatch
from gated_delta.call_cache import CallCache
from gated_delta.gpus import FORCED, H200
from gated_delta.kernels import arguments
from gated_delta.kernels.arguments import ABSENT, BF16, FP16, FP32
from gated_delta.kernels.prefill import arguments as prefill_arguments
from gated_delta.kernels.prefill.arguments import CHUNK
from gated_delta.ops import OPERATIONS, prefill_kinds
from gated_delta.ops import launch as shared
from gated_delta.ops import prefill as on_host
from gated_delta.ops.prefill_schedule import KINDS
from gated_delta.problem import BUFFER, Problem
from gpu import prefill_path
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

    def load(variant, gpu):
        operation = variant.kernel.partition("_")[0].title()
        source = prefill_arguments if operation == "Prefill" else arguments
        kinds = [getattr(source, operation + kind) for kind in ("Pointers", "Strides", "Sizes")]

        def launch(pointers, *rest):
            *numbers, strides, sizes, stream = rest
            recorded.append((kinds[0](*pointers), *numbers, kinds[1](*strides), kinds[2](*sizes)))
            recorded.kernels.append(variant)

        return launch

    for op in OPERATIONS.values():
        monkeypatch.setattr(op, "calls", CallCache())
    monkeypatch.setattr(compile, "load", load)
    monkeypatch.setattr(compile, "missing", lambda variant, gpu: ())
    monkeypatch.setattr(api, "gpu_of", lambda device: H200)
    monkeypatch.setattr(api, "_missing_for_cute", lambda op, problem, device: op.missing(problem))
    monkeypatch.setattr(shared, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return recorded


def run(op, **call):
    return getattr(gd, op)(**call, backend="cute")


def facts_of(problem, gpu=H200):
    """The compile-time constants of a problem's variants."""
    return [dict(variant.facts) for variant in dispatch.variants_of(problem, gpu)]


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
        if tensor == "grouped":  # of a decode with a convolution: emulator/
            assert not any(getattr(strides, f"grouped_{letter}") for letter in letters)
            continue
        assert letters == "".join(sorted(letters, key="njprthgcl".index)), tensor
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
            if name in ("beta", "dt_bias", "norm_weight", "conv_bias"):
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
            assert options == [None, "checkpoint_lens" in tensors] + [None] * ("norm" in call)
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
            assert V % operation.cta_rows(problem, plan.schedule) == 0
            assert plan.variants[0] in operation.variants(problem)


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_kernels_without_pdl_prefetch_nothing(op, axis):
    """At sm_80. The newer levels have the schedules of an H200."""
    operation = OPERATIONS[op]
    facts = dict(state_dtype=bf16, dtype=bf16, g_dtype=bf16, gate="log")
    for norm, T in itertools.product(((), ("norm",)), (1, 4)):
        problem = Problem(op, axis, 2, 4, 128, 128, T, options=frozenset(norm), **facts)
        for sequences in (1, 100, 1000, 5000):
            plans = [
                operation.plan(problem, sequences, sequences * T, gpu=gpu)
                for gpu in (H200, FORCED["sm_90"], FORCED["sm_80"])
            ]
            (hopper, newer, older), schedule = plans, plans[-1].schedule
            assert newer.variants == hopper.variants
            assert newer.schedule == hopper.schedule
            assert [schedule.prefetch, schedule.cluster, schedule.bulk] == [False] * 3
            assert "prefetch_chunks" not in dict(older.variants[0].facts)
            assert older.variants[0] in dispatch.variants_of(problem, FORCED["sm_80"])


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


@pytest.mark.parametrize("gpu", [H200, FORCED["sm_80"]], ids=str)
@pytest.mark.parametrize("K", [8, 64, 96, 128])
def test_a_norm_has_a_block_or_cluster_per_head(K, gpu):
    """For every V and schedule, within the limits of a block and a cluster. sm_80 has none."""
    facts = dict(gate="log", dtype=bf16, g_dtype=bf16, options=frozenset({"norm"}))
    for V, axis, state_dtype, T in itertools.product(
        range(32, 257, 32), ("head", "channel"), (f32, bf16), (1, 3, 16)
    ):
        sizes = (axis, 1, 1, K, V, T)
        for variant in facts_of(Problem("decode", *sizes, state_dtype=state_dtype, **facts), gpu):
            threads = variant["threads"]
            rows = variant["chunks"] * arguments.v_rows(K, variant["rows"], threads)
            blocks, rest = divmod(V, rows)
            assert (rest, rows % 32) == (0, 0)  # the norm's loops take 32 rows of a block at once
            most = 1 if gpu.level == "sm_80" else 8  # only some devices run larger clusters
            assert 1 <= blocks <= most
            assert threads >= 64  # one warp computes KDA's decays
            assert variant.get("ctas_per_sm", 1) * threads <= 1024  # CUDA's limit of a CTA
            assert variant.get("prefetch_chunks", 1) <= variant["chunks"]
        for variant in facts_of(Problem("verify", *sizes, state_dtype=state_dtype, **facts), gpu):
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

ROWS, QK, VALUES = "V rows", "rows of q and k", "rows of v, z and out"
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
    *(("decode", name, off, "decode: of u") for name in ("buffer_k", "buffer_u")),
    ("decode", "buffer_log_decay", off, None),
    *(("flush", name, off, None) for name in ("buffer_u", "buffer_k", "buffer_log_decay")),
    ("flush", "state", off, ROWS),
    *(("prefill", name, off, QK) for name in ("q", "k")),
    *(("prefill", name, off, VALUES) for name in ("v", "z", "out")),
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


def test_an_unaligned_buffer_goes_to_the_reference_backend(launches):
    """Also after a call with an aligned one."""
    call, first = valid_call("decode"), calls.buffered()
    for make, backend in ((lambda x: x, "cute"), (off, "reference")):
        parts = gd.KVBuffer(*(make(torch.zeros_like(x)) for x in vars(first["buffer"]).values()))
        given = call | first | dict(buffer=parts)
        assert gd.explain("decode", **given).backend == backend
        gd.decode(**given)
    assert len(launches) == 1
    assert (parts.k != 0).any()


def test_other_head_dims_are_refused(launches):
    for K, V, missing in (
        (32, 128, "K of 64, 96 or 128, got 32"),
        (128, 96, "V of 64, 128 or 192, got 96"),
    ):
        with pytest.raises(gd.UnsupportedProblem, match=missing):
            run("prefill", **tokens((N, 3), "head", bf16, K, V))
    assert launches == []
    dims = [
        *((K, 32, [f"K a multiple of 8 up to 128, got {K}"]) for K in (4, 12, 136)),
        *((8, V, [f"V a multiple of 32, got {V}"]) for V in (16, 48)),
        (8, 32, []),
        (128, 288, ["V up to 256 with a norm, got 288"]),
    ]
    for op, (K, V, missing) in itertools.product(("decode", "verify", "flush"), dims):
        problem = Problem(op, "head", 1, 1, K, V, 1, state_dtype=bf16, options=frozenset({"norm"}))
        assert OPERATIONS[op].missing(problem) == missing
        if V % 32:
            with pytest.raises(gd.UnsupportedProblem, match=missing[0]):
                dispatch.variants_of(problem)


def planned(op, call, **tensors):
    """The problem, plan and arguments of such a call with other tensors, also without memory."""
    route, operation = gd.explain(op, **call, backend="cute"), OPERATIONS[op]
    values = dict.fromkeys(operation.arguments._fields)
    values |= dict(gate="log", bound=0.0, norm_eps=0.0, qk_l2norm=True, beta_logits=False)
    values |= dict(allow_neg_eigval=False, null_index=-1)
    values |= dict(update_state=True, output_final_state=False)
    values |= calls.tensors_of(call) | tensors
    a = operation.arguments(*(values[field] for field in operation.arguments._fields))
    return route.problem, route.plan, a


def launch_of(op, call, **tensors):
    return OPERATIONS[op].launch(*planned(op, call, **tensors))


def limits_exceeded(op, call, **tensors):
    return OPERATIONS[op].exceeded(*planned(op, call, **tensors))


def refused_by_the_kernels(op, call, reason):
    """By `explain` as by the call; with backend="auto" both take the reference backend."""
    for ask in (getattr(gd, op), functools.partial(gd.explain, op)):
        with pytest.raises(gd.UnsupportedProblem, match=reason):
            ask(**call, backend="cute")
    route = gd.explain(op, **call)
    assert route.backend == "reference"
    assert re.search(reason, route.missing[0])
    for _ in range(2):  # the second one is in the call cache
        getattr(gd, op)(**call)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_of_one_slot_2_gib_wide(launches, op):
    """It needs no more memory than the slot."""
    call = valid_call(op)
    slot = call["state"][:1].clone()
    slots = torch.tensor([0] + [-1] * (N - 1)).int()
    wide = slot.as_strided(slot.shape, (2**31 // slot.element_size(), *slot.stride()[1:]))
    refused_by_the_kernels(op, call | dict(state=wide, state_indices=slots), "below 2 GiB")
    assert launches == []
    assert torch.equal(wide, call["state"][:1]) == (op == "verify")  # which only reads it
    run(op, **call | dict(state=slot, state_indices=slots))
    assert len(launches) > 0


LARGE_STRIDES = [
    *(("decode", name) for name in ("state", "v", "z", "out", "intermediate_states")),
    *((op, name) for op in ("decode", "verify") for name in BUFFER),
    *(("verify", name) for name in ("state", "z")),
    *(("flush", name) for name in ("state", *BUFFER)),
    *(("prefill", name) for name in ("state", "initial_state", "out", "checkpoints")),
]


@pytest.mark.parametrize(("op", "name"), LARGE_STRIDES)
def test_strides_of_2_gib_are_refused(launches, op, name):
    call = calls.with_argument(valid_call(op), name)
    x = calls.tensors_of(call)[name]
    limit = 2**31 // x.element_size()
    assert limits_exceeded(op, call, **{name: calls.without_memory(x, limit - 1)}) == []
    (reason,) = limits_exceeded(op, call, **{name: calls.without_memory(x, limit)})
    assert reason == "strides below 2 GiB, in every tensor"


def test_layers_and_a_single_prompt_may_have_larger_strides(launches):
    state, parts = pool(f32)[None].repeat(2, 1, 1, 1, 1), buffer(layers=2)
    call = dict(state=state, buffer=parts, num_accepted=torch.ones(N).int())
    tensors = {
        name: calls.without_memory(x, 2**30 + i)
        for i, (name, x) in enumerate(calls.tensors_of(dict(buffer=parts)).items())
    }
    tensors |= dict(state=calls.without_memory(state, 2**33))
    assert limits_exceeded("flush", call, **tensors) == []
    launch = launch_of("flush", call, **tensors)
    pointers = launch.operation.pointers(*launch.in_kernel_order((0,) * len(launch.given)))
    strides = [getattr(pointers, f"{name}_l") for name in ("state", *BUFFER)]
    assert strides == [2**35, 2**32, 2**32 + 4, 2**32 + 8]

    call = prompts((1, 70))
    wide = dict(v=calls.without_memory(call["v"], 2**30))
    checkpoints = calls.without_memory(torch.zeros(1, 2, HV, D, D), 2**30)
    kept = dict(checkpoint_lens=torch.zeros(1, 2, dtype=i64), checkpoints=checkpoints)
    assert (
        limits_exceeded("prefill", call, **wide) == limits_exceeded("prefill", call, **kept) == []
    )


def test_calls_of_no_sequences_launch_nothing(launches):
    state, parts, none, no_ends = pool(), buffer(), torch.arange(0), torch.zeros(1).int()
    assert run("decode", **tokens((0, T)), state=state).shape == (0, T, HV, V)
    empty = dict(buffer=parts, buffer_lens=none)
    assert run("decode", **tokens((0, T)), state=state, **empty).shape == (0, T, HV, V)
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


def trail_rows(*rows):
    """A convolution whose drafts leave their trails in rows of 2."""
    C, zeros = 2 * H * K + HV * V, lambda *shape: torch.zeros(shape).bfloat16()
    convolution = dict(conv=gd.ShortConv(zeros(C, 4)), windows=zeros(P, C, 3))
    return convolution | dict(trails=zeros(2, C, T + 2), trail_indices=ints(*rows))


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
    *(
        ("decode", calls.buffered() | {name: rows}, f"{error} {name}")
        for name in ("state_indices", "buffer_indices")
        for rows, error in ((PAST_THE_END, "IndexError"), (REPEATED, "ValueError"))
    ),
    ("decode", calls.buffered() | dict(buffer_indices=ints(-1, 0, -1)), None),
    ("decode", calls.buffered() | dict(buffer_lens=ints(-7, 0, 99)), None),
    ("verify", dict(state_indices=PAST_THE_END), "IndexError state_indices"),
    ("verify", dict(buffer_indices=PAST_THE_END), "IndexError buffer_indices"),
    ("verify", dict(buffer_indices=REPEATED), "ValueError buffer_indices"),
    ("verify", dict(parents=torch.full((N, T), 1)), "ValueError parents"),
    ("verify", dict(parents=torch.arange(T + 1).sub(1).clamp(min=0).expand(N, T + 1)), None),
    ("flush", dict(path=torch.ones(N, T).int(), num_accepted=2), "ValueError path"),
    ("flush", dict(path=torch.full((N, 1), T), num_accepted=1), "ValueError path"),
    ("flush", dict(path=torch.arange(T).expand(N, T), num_accepted=T), None),
    ("verify", trail_rows(0, 0, -1), "ValueError trail_indices"),
    ("verify", trail_rows(0, 2, -1), "IndexError trail_indices"),
    ("verify", trail_rows(1, -1, 0), None),
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


# ---------------------------------------------------------------- prefill's schedules and workspace

REGIONS = [region.name for region in prefill_arguments.WORKSPACE]


def kernels_of(launches):
    """Launched kernels of prefill, without their prefix."""
    return [variant.kernel.removeprefix("prefill_") for variant in launches.kernels]


def regions_of(launches):
    """Regions that the workspace has."""
    return {name for name in REGIONS if getattr(launches[0][0], name)}


TILES = {"k_tiles", "q_tiles", "tinv_aqk", "scales"}
RAW = {"tinv_aqk", "scales", "counters"}
SEGMENTED = {"segment_transitions", "segment_states"}
PATHS = [
    ("tiles", "prepare scan", TILES),
    (2, "prepare transitions state_passing scan", TILES | SEGMENTED | {"transition_norms"}),
    (7, "prepare transitions state_passing scan", TILES | SEGMENTED | {"transition_norms"}),
    ("overlapped", "rank overlapped", TILES | {"counters"}),
    ("fused", "fused", set()),
    ("raw", "prepare_raw scan_raw", RAW),
    ("raw overlapped", "rank prepare_raw scan_raw", RAW),
]


@pytest.mark.parametrize(
    ("path", "kernels", "regions"), PATHS, ids=[f"{path}" for path, *_ in PATHS]
)
def test_a_schedule_has_its_kernels_and_regions(launches, axis, path, kernels, regions):
    """All kernels of a call get the same arguments. Two sequences, fewer heads than SMs."""
    if path in ("fused", "raw", "raw overlapped") and (path == "fused") != (axis == "head"):
        pytest.skip("the other axis has no such kernel")
    with prefill_path(path, sms=132):
        run("prefill", **prompts((2, 640), axis))
    assert kernels_of(launches) == kernels.split()
    k_restored = {"k_restored"} if axis == "channel" and "k_tiles" in regions else set()
    assert regions_of(launches) == regions | k_restored
    assert all(launch == launches[0] for launch in launches)
    segments = path if isinstance(path, int) else 1
    assert launches[0][-1].segments == segments
    for variant in launches.kernels:
        assert dict(variant.facts).get("windows", segments > 1) == (segments > 1)


def test_an_item_of_overlapped_has_whole_qk_heads(launches, monkeypatch):
    monkeypatch.setattr(on_host, "prepare_heads", lambda *_: 1)
    with prefill_path("overlapped"), pytest.raises(AssertionError, match="1 of 2 value heads"):
        run("prefill", **prompts((1, 640)))


def test_segments_of_64_channels_have_no_windows(launches):
    call = prompts((1, 640))
    call |= {name: call[name][..., :64].contiguous() for name in "qk"}
    with prefill_path(4, sms=132):
        run("prefill", **call)
    assert kernels_of(launches) == ["prepare", "transitions", "state_passing", "scan"]
    assert "transition_norms" not in regions_of(launches)
    assert not any(dict(variant.facts).get("windows") for variant in launches.kernels)


@pytest.mark.parametrize(("N", "queued"), [(33, False), (34, True)])
def test_fused_has_a_queue_where_ctas_take_several_heads(launches, N, queued):
    """Four heads per sequence, 132 SMs. Packed sequences are ranked then, too."""
    run("prefill", **prompts((N, 70)))
    assert kernels_of(launches) == [*(["rank"] if queued else []), "fused"]
    assert regions_of(launches) == ({"counters"} if queued else set())
    launches.clear()
    lens = dict(cu_seqlens=torch.arange(N + 1) * 70, max_seqlen=70)
    run("prefill", **prompts((1, N * 70)), **lens)
    assert regions_of(launches) == ({"counters", "sequence_order"} if queued else set())


def test_a_scan_of_more_ctas_than_sms_ranks_packed_sequences(launches, axis):
    """Four heads of two CTAs each."""
    for N in (16, 17):
        launches.clear()
        lens = dict(cu_seqlens=torch.arange(N + 1) * 80, max_seqlen=80)
        run("prefill", **prompts((1, N * 80), axis), **lens, deterministic=True)
        assert kernels_of(launches) == ["prepare", "scan"]
        assert ("sequence_order" in regions_of(launches)) == (8 * N > 132)


def test_few_ctas_of_prepare_share_value_heads(launches, axis):
    """Halved while they are two per SM at most. KDA's have one head; overlapped has all."""
    for T, H, HV, heads in (
        (512, 16, 64, 2),
        (256, 16, 64, 1),
        (1024, 16, 64, 4),
        (64, 1, 12, 3),
        (64, 2, 2, 1),
        (64, 1, 7, 7),
    ):
        assert on_host.prepare_heads(H, HV, T // 64, prefill_kinds.TILES, 132) == heads
        assert on_host.prepare_heads(H, HV, T // 64, prefill_kinds.OVERLAPPED, 132) == HV // H
    run("prefill", **prompts((1, 100), axis))
    assert (launches[0][-1].cta_heads, launches[0][-1].chunk_ctas) == (1, 4)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_deterministic_prefill_has_one_scan_of_one_segment(launches, axis, keeps):
    """Other calls would have segments, or one kernel. Its variant always stores checkpoints."""
    packed = prompts((1, 200), axis) | dict(cu_seqlens=ints(0, 64, 200))
    for call, n, kernels in (
        (prompts((1, 8192), axis), 1, ["rank", "overlapped"]),
        (packed, 2, ["prepare", "scan"]),
        (prompts((40, 70), axis), 40, ["prepare", "scan"]),
    ):
        launches.clear()
        lens, rows = torch.zeros(n, 1, dtype=i32), torch.zeros(n, 1, HV, D, D)
        checkpoints = dict(checkpoint_lens=lens, checkpoints=rows) if keeps else {}
        run("prefill", **call, **checkpoints, deterministic=True)
        facts = dict(launches.kernels[-1].facts)
        assert kernels_of(launches) == kernels
        assert facts | dict(checkpoints=True, deterministic=True) == facts
        assert launches[0][-1].segments == 1
    route = gd.explain("prefill", **packed, deterministic=True, backend="cute")
    assert "deterministic" in str(route)


@pytest.mark.parametrize(
    ("ends", "slots", "whole"),
    [((0, 640), 5, 5), ((0, 100, 640), 7, 5), ((0, 70, 127), None, None)],
)
def test_a_grid_has_slots_for_any_packed_lengths(launches, axis, ends, slots, whole):
    """Segments of 128 tokens. Of fewer tokens there are none, and kernels are those of True."""
    call = prompts((1, ends[-1]), axis) | dict(cu_seqlens=ints(*ends))
    run("prefill", **call, deterministic=128)
    if slots is None:
        assert not launches[0][-1].grid_chunks
        assert dict(launches.kernels[-1].facts).get("deterministic")
        return
    sizes = launches[0][-1]
    assert kernels_of(launches) == ["prepare", "transitions", "state_passing", "scan"]
    assert regions_of(launches) == TILES | SEGMENTED | {"transition_norms"} | (
        {"k_restored"} if axis == "channel" else set()
    )
    assert (sizes.grid_chunks, sizes.scan_chunks) == (2, 2)
    assert (sizes.segments, sizes.whole_segments) == (slots, whole)
    assert all(dict(x.facts).get("grid") for x in launches.kernels[1:])


def test_calls_and_explain_pass_the_same_work(launches, monkeypatch):
    seen, plan = [], OPERATIONS["prefill"].plan
    monkeypatch.setattr(
        OPERATIONS["prefill"],
        "plan",
        lambda *work, gpu: seen.append((*work[1:], gpu)) or plan(*work, gpu=gpu),
    )
    for call in (prompts(), packed_prompts(0, 4, 8), packed_prompts(0, 4, 8) | dict(max_seqlen=5)):
        run("prefill", **call)
        gd.explain("prefill", **call, backend="cute")
    work = [(N, N * 70, None), (2, 9, None), (2, 9, 5)]
    assert seen == [(*one, H200) for one in work for _ in range(2)]


def test_the_schedule_reads_how_many_sms_the_gpu_has(launches, monkeypatch):
    """So do the kernels and the order of sequences."""
    lens = dict(cu_seqlens=torch.arange(61) * 65, max_seqlen=65)
    for sms, ranked in ((479, True), (480, False)):
        launches.clear()
        with prefill_path("tiles", sms):
            run("prefill", **prompts((1, 60 * 65)), **lens)
        assert {launch[-1].sms for launch in launches} == {sms}
        assert ("sequence_order" in regions_of(launches)) == ranked
    for sms, segments in ((132, 8), (60, 7), (16, 1)):
        monkeypatch.setattr(api, "gpu_of", lambda _, sms=sms: H200._replace(sms=sms))
        monkeypatch.setattr(OPERATIONS["prefill"], "calls", CallCache())
        call = prompts((1, 4096))
        route = gd.explain("prefill", **call, backend="cute")
        assert route.schedule.segments == segments
        launches.clear()
        run("prefill", **call)
        assert {(launch[-1].sms, launch[-1].segments) for launch in launches} == {(sms, segments)}


def test_calls_that_differ_in_max_seqlen_are_planned_apart(launches):
    """Repeated calls too. One that is too small or too large counts as the nearest possible."""
    many, fused, split = 34, ["rank", "fused"], ["prepare", "scan"]
    call = prompts((1, many * 65)) | dict(cu_seqlens=torch.arange(many + 1) * 65)
    for _ in range(2):
        for max_seqlen, kernels in (
            (65, fused),
            (0, fused),
            (numpy.int32(80), fused),
            (1000, split),
            (2**70, split),
            (None, split),
        ):
            launches.clear()
            run("prefill", **call, max_seqlen=max_seqlen)
            assert kernels_of(launches) == kernels
    assert len(OPERATIONS["prefill"].calls) == 6


def first_chunk_slot(starts, n):
    """The slot of a packed sequence's first chunk, as prefill/layout.py has it."""
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


@pytest.mark.parametrize(
    ("most", "tile"), [(None, 16), (0, 2), (1, 2), (3, 4), (4, 4), (5, 8), (16, 16), (99, 16)]
)
def test_the_longest_draft_picks_the_kernel(most, tile, launches):
    """Of packed drafts; rows of 16 tokens have room for more."""
    call = {name: torch.randn(1, 8, 2, 64).bfloat16() for name in "qkv"}
    call |= dict(g=-torch.rand(1, 8, 2), beta=torch.rand(1, 8, 2), state=torch.zeros(2, 2, 64, 64))
    rows = dict(buffer=gd.KVBuffer.empty(2, 16, 2, 2, 64, 64), buffer_lens=torch.zeros(2).int())
    run("verify", **call, **rows, cu_seqlens=torch.tensor([0, 4, 8]), max_seqlen=most)
    assert dict(launches.kernels[0].facts)["token_tile"] == tile


def test_the_variants_of_a_prefill_are_those_of_its_schedules(axis):
    problem = prompt_problem(axis=axis)
    variants = dispatch.variants_of(problem)
    for kind in KINDS:
        if kind.supports(problem):
            for queued, halved in itertools.product((False, True), repeat=2):
                halved = halved and kind.segmented
                assert set(kind.variants(problem, queued, H200, halved)) <= set(variants)
    scans = ["overlapped", "fused" if axis == "head" else "scan_raw", "scan", "scan"]
    others = ["prepare", "prepare", "state_passing", "transitions", "transitions", "rank"]
    others += ["rank" if axis == "head" else "prepare_raw"]
    names = [variant.kernel.removeprefix("prefill_") for variant in variants]
    assert sorted(names) == sorted([*scans, *others])
    with_checkpoints = prompt_problem(axis=axis, options=frozenset({"checkpoints"}))
    new = set(dispatch.variants_of(with_checkpoints)) - set(variants)
    assert sorted(x.kernel.removeprefix("prefill_") for x in new) == sorted(scans)


STAGES = {"sm_80": 2, "sm_90": 2, "sm_86": 1, "sm_120": 1}


@pytest.mark.parametrize("level", FORCED)
@pytest.mark.parametrize("options", [(), ("checkpoints",), ("deterministic",)], ids=str)
def test_levels_prefill_by_tiles_and_segments_alone(axis, options, level):
    """Their kernels have as many stages as the shared memory holds: transitions one more."""
    problem = prompt_problem(axis=axis, options=frozenset(options))
    split = ["prepare", "scan"]
    names = split if "deterministic" in options else [*split, *split, "transitions"]
    names = names if "deterministic" in options else [*names, "state_passing"]
    variants = dispatch.variants_of(problem, FORCED[level])
    kernels = [variant.kernel.removeprefix("prefill_") for variant in variants]
    assert sorted(kernels) == sorted(names)
    for variant in variants:
        prepares = variant.kernel == "prefill_prepare"
        stages = STAGES[level] + (variant.kernel == "prefill_transitions")
        assert dict(variant.facts).get("stages") == (None if prepares else stages)
    assert not any("stages" in dict(x.facts) for x in dispatch.variants_of(problem))


@pytest.mark.parametrize("level", FORCED)
def test_a_call_takes_the_kernels_of_its_gpu(launches, monkeypatch, axis, level):
    """Loaded for that GPU, on its SMs."""
    gpu, loaded, load = FORCED[level], [], compile.load
    monkeypatch.setattr(api, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(compile, "load", lambda *key: loaded.append(key) or load(*key))
    run("prefill", **prompts((40, 70), axis))
    run("decode", **valid_call("decode", axis))
    assert {of for _, of in loaded} == {gpu}
    assert launches.kernels == [variant for variant, _ in loaded]
    assert kernels_of(launches) == ["prepare", "scan", "decode"]
    assert launches[0][-1].sms == gpu.sms
    assert launches[-1][-1].prefetch_sequences == (0 if gpu.level == "sm_80" else N)


def test_a_buffer_beyond_a_ctas_shared_memory_is_refused(launches, monkeypatch):
    """Packed calls of KDA have memory for 16 tokens and, here, a row of 32."""
    call = prompts((1, 9), "channel") | dict(cu_seqlens=ints(0, 9), state=prompt_states())
    for C, gpu, fits in (
        (32, H200, True),
        (32, FORCED["sm_86"], False),
        (16, FORCED["sm_86"], True),
    ):
        parts = gd.KVBuffer.empty(1, C, H, HV, D, D, gate="channel")
        monkeypatch.setattr(api, "gpu_of", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(OPERATIONS["decode"], "calls", CallCache())
        given = call | dict(buffer=parts, buffer_lens=ints(0))
        if fits:
            run("decode", **given)
        else:
            refused_by_the_kernels("decode", given, "more than 101376 bytes of shared memory")
    assert len(launches) == 2


def test_drafts_beyond_a_ctas_shared_memory_are_refused(launches, monkeypatch):
    """With a norm a CTA has a whole head, here of 256 V rows."""
    monkeypatch.setattr(api, "gpu_of", lambda device: FORCED["sm_86"])
    for T in (8, 16):
        call = tokens((1, T), "channel", K=128, V=256)
        call |= dict(norm=gd.GatedNorm(torch.ones(256)), z=call["v"])
        call |= dict(state=torch.zeros(1, HV, 256, 128))
        call |= dict(buffer=gd.KVBuffer.empty(1, T, H, HV, 128, 256, gate="channel"))
        if T == 8:
            run("verify", **call)
        else:
            refused_by_the_kernels("verify", call, "CTA: take fewer tokens a call$")
    assert len(launches) == 1


def test_compile_time_facts_of_prefills_kernels():
    """Heads, index types and layouts are no facts; a fact is one of the kernels that use it."""

    def changed(**changes):
        return {
            some.kernel.removeprefix("prefill_")
            for some in set(dispatch.variants_of(prompt_problem(**changes))) - set(first)
        }

    first = dispatch.variants_of(prompt_problem())
    for same in (
        dict(H=8, HV=64),
        dict(beta_logits=True),
        dict(beta_logits=True, options=frozenset({"allow_neg_eigval"})),
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
    assert changed(K=96, V=192) == {"prepare", "scan"}


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
