"""FlashInfer's interface against a token loop in float64; test_adapters.py has the rest."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import (
    BF16,
    EMPTY,
    ENDS,
    FP16,
    FP32,
    FP64,
    INT64,
    NAN,
    TOTAL,
    UNTOUCHED,
    accepted,
    check_pool,
    close,
    ints,
    normal,
    padded,
    prompt_loop,
    tensors_of,
    token_loop,
    untouched,
    unwritten,
)
from gated_delta.integrations import flashinfer
from tables.flashinfer import (
    COUNTED,
    DECODES,
    FROZEN,
    GDN,
    HV,
    KDA,
    MTP,
    PRETRANSPOSE,
    SPEC,
    B,
    H,
    K,
    N,
    T,
    V,
    in_order,
    inputs,
    packed,
    pool,
    prompts,
    raw_prompts,
    shared_heads,
    source,
    steps,
    valid,
)

# ------------------------------------------------------------------------------------------ decode


def gates(x: dict) -> tuple[Tensor, Tensor]:
    """The log decay [B, T, HV, 1 or K], and the write strength."""
    if "a" in x:
        decay = -x["A_log"].double().exp() * F.softplus(x["a"].double() + x["dt_bias"].double())
        return decay[..., None], x["b"].double().sigmoid()
    decay, beta = x["g"].double(), x["beta"].double()
    if x.get("use_gate_in_kernel"):
        query_head, bound = [hv // (HV // H) for hv in range(HV)], x.get("lower_bound")
        rate = x["A_log"].double().exp()[query_head][:, None]
        raw = decay + (
            0 if x.get("dt_bias") is None else x["dt_bias"].double().view(H, K)[query_head]
        )
        decay = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
    return decay, beta.sigmoid() if x.get("beta_is_logit") else beta


def slots_of(name: str, x: dict, n: int) -> tuple[list[int], list[list[int]]]:
    """Slots of n sequences: the one each reads; the ones it writes, one or one per token."""
    given = {
        key: y.tolist() for key, y in tensors_of(x).items() if key.endswith(("_indices", "_tokens"))
    }
    reads = given.get("initial_state_indices")
    if name != KDA:
        reads = reads or [*range(n)]
        if "ssm_state_indices" in given:
            return reads, given["ssm_state_indices"]
        writes = given.get("output_state_indices", reads)
        return reads, [[]] * n if x.get("disable_state_update", name == MTP) else [
            [slot] for slot in writes
        ]
    width = 1 + (x.get("num_spec_tokens") or 0)
    writes = given.get("ssm_state_indices") or torch.arange(n * width).view(n, width).tolist()
    writes = [slot if isinstance(slot, list) else [slot] for slot in writes]
    accepted = given.get("num_accepted_tokens", [1] * n)
    reads = reads or [slots[min(max(m, 1), width) - 1] for slots, m in zip(writes, accepted)]
    return reads, [[]] * n if x.get("disable_state_update") else writes


def truth(name: str, x: dict) -> tuple[Tensor, dict[int, Tensor], dict[tuple[int, int], Tensor]]:
    """FlashInfer's meaning of these arguments: o, the states written by slot, those by token."""
    starts = next(
        y for y in map(x.get, ("initial_state_source", "initial_state", "state")) if y is not None
    )
    (decay, beta), o = gates(x), torch.zeros(x["v"].shape, dtype=FP64)
    n = len(x["q"])
    spans = [(row, slice(None)) for row in range(n)]
    if (ends := x.get("cu_seqlens")) is not None:
        spans = [(0, slice(*span)) for span in itertools.pairwise(ends.tolist())]
    reads, writes = slots_of(name, x, len(spans))
    scale, l2norm = (
        x.get("scale") or K**-0.5,
        x.get("use_qk_l2norm", x.get("use_qk_l2norm_in_kernel", True)),
    )
    written, after = {}, {}
    for n, ((row, span), read, slots) in enumerate(zip(spans, reads, writes)):
        one = {key: x[key][[row], span] for key in ("q", "k", "v")}
        if read < 0 or not one["q"].numel():
            continue
        o[row, span], states = token_loop(
            one, decay[[row], span], beta[[row], span], starts[[read]], scale, l2norm
        )
        after |= {(n, t): state[0] for t, state in enumerate(states.transpose(0, 1))}
        each = zip(slots, states[0]) if len(slots) > 1 else zip(slots, states[0, -1:])
        written |= {slot: state for slot, state in each if slot >= 0}
    return o, written, after


def check(name: str, x: dict) -> Tensor:
    """Checks a call against the token loop and its writes; returns its outputs."""
    x = {"state": None, **x} if name == PRETRANSPOSE else x
    o, written, after = truth(name, x)
    state = x["initial_state"] if x.get("initial_state") is not None else x.get("state")
    before, source = None if state is None else state.clone(), x.get("initial_state_source")
    with unwritten(
        {}
        if source is None or state is None or source.data_ptr() == state.data_ptr()
        else dict(source=source)
    ):
        got, returned = getattr(flashinfer, name)(**x)
    close(got, o)
    assert (got[(o == 0).all(-1)] == 0).all()
    assert got.dtype == x["v"].dtype
    if state is None and returned is not None:
        check_pool(returned, torch.zeros_like(returned), written)
    elif state is not None:
        check_pool(state, before, written)
        assert returned is (state if name != KDA or x.get("output_final_state") else None)
    if (steps := x.get("intermediate_states_buffer")) is not None:
        for n, t in itertools.product(*map(range, steps.shape[:2])):
            close(steps[n, t], after[n, t]) if (n, t) in after else torch.testing.assert_close(
                steps[n, t], untouched(HV, V, K)
            )
    return got


def plain(
    name: str, t: int = T, n: int = B, dtype: torch.dtype = FP32, state_dtype: torch.dtype = FP32
) -> dict:
    return (
        valid(name)
        | inputs(name, n, t, dtype)
        | dict(output=None, initial_state=pool(20, state_dtype))
    )


def shrunk(name: str) -> dict:
    flag = "use_qk_l2norm_in_kernel" if name == KDA else "use_qk_l2norm"
    return {n: 0.3 * y for n, y in inputs(name).items() if n in ("q", "k")} | {
        flag: False,
        "scale": 0.7,
    }


def nan_in(row: int, x: dict) -> dict:
    for y in tensors_of(x).values():
        if y.ndim > 2:
            y[row] = NAN
    return x


def raw(bound: float | None, bias: str | None, logit: bool) -> dict:
    """KDA's gates by query head."""
    dt_bias = None if bias is None else normal(H, K, seed=6).to(BF16 if "bf16" in bias else FP32)
    dt_bias = dt_bias.flatten() if bias == "[H * K]" else dt_bias
    beta = dict(beta=normal(B, T, HV, seed=9), beta_is_logit=True) if logit else {}
    parameters = dict(
        A_log=normal(H, seed=5), dt_bias=dt_bias, use_gate_in_kernel=True, lower_bound=bound
    )
    return dict(g=8 * normal(B, T, HV, K, seed=8)) | parameters | beta


ONE, PACKED = (lambda: inputs(KDA, t=1)), (lambda: packed([0, 1, 2, 3]))
ACCEPTED = [
    *((DECODES, functools.partial(plain, t=t)) for t in (1, T, 16)),
    *(
        (DECODES, functools.partial(plain, t=1, dtype=dtype, state_dtype=state))
        for dtype in (BF16, FP16)
        for state in (BF16, FP16)
    ),
    (DECODES, shrunk),
    *(
        (
            GDN,
            lambda name, t=t: (
                nan_in(1, inputs(name, t=t)) | dict(initial_state_indices=ints(0, -1, 3))
            ),
        )
        for t in (1, T)
    ),
    *(
        (
            KDA,
            lambda name, t=t: nan_in(1, inputs(name, t=t)) | dict(ssm_state_indices=ints(0, -1, 3)),
        )
        for t in (1, T)
    ),
    (GDN, lambda name: dict(a=50 * inputs(name)["a"])),
    (GDN, lambda name: dict(dt_bias=inputs(name)["dt_bias"].bfloat16())),
    ((PRETRANSPOSE, KDA), in_order),
    (GDN, dict(output_state_indices=ints(1, -1, 3, dtype=INT64))),
    *(
        (
            GDN,
            lambda _, frozen=frozen: dict(
                intermediate_states_buffer=steps(), initial_state_indices=ints(9, -1, 4), **frozen
            ),
        )
        for frozen in ({}, FROZEN)
    ),
    (GDN, FROZEN | dict(output_state_indices=ints(99, 99, 99))),
    # Sequence 0: the slot read keeps its state. 1: a token names it. 2: one write is dropped.
    *(
        (
            MTP,
            dict(
                initial_state_indices=ints(*reads),
                ssm_state_indices=ints([0, 1, 3], [5, 2, 6], [7, -1, 8]),
            ),
        )
        for reads in ((9, 2, 4), (9, -1, 9))
    ),
    (
        MTP,
        lambda name: (
            plain(name, 16, 1)
            | dict(initial_state_indices=ints(19), ssm_state_indices=torch.arange(16)[None])
        ),
    ),
    *(
        (KDA, raw(*how))
        for how in itertools.product(
            (None, -5.0, -2.5), (None, "[H * K]", "[H, K]", "[H, K] bf16"), (False, True)
        )
    ),
    (KDA, dict(A_log=normal(1, seed=5), dt_bias=normal(1, seed=6))),  # not read
    (KDA, dict(output_final_state=True)),
    *(
        (KDA, lambda _, state=state: packed([0, 1, 1, 17, 20]) | state)
        for state in (dict(ssm_state_indices=ints(3, 5, 0, 9)), in_order(KDA))
    ),
    # A slot per token.
    *(
        (
            KDA,
            lambda _, m=m, rest=rest: (
                SPEC | dict(num_accepted_tokens=m, output_final_state=True) | rest
            ),
        )
        for m in (None, ints(1, 2, 3), ints(3, 0, 99))
        for rest in ({}, packed([0, 3, 6, 9], 0))
    ),
    (KDA, COUNTED | dict(num_accepted_tokens=ints(1, 2, 3))),
    (  # lengths 2, 0 (padding), 3; a negative slot of one token drops that write alone
        KDA,
        lambda _: (
            packed([0, 2, 2, 5])
            | dict(
                num_spec_tokens=2,
                num_accepted_tokens=ints(2, 7, 1),
                ssm_state_indices=ints([0, 1, 2], [-1, -1, -1], [6, -1, 8]),
            )
        ),
    ),
    # A source of its own: the same pool, ...
    *(
        (
            KDA,
            lambda _, x=x, slots=slots: x() | source(True, 9, 5, 9) | dict(ssm_state_indices=slots),
        )
        for x in (ONE, PACKED)
        for slots in (None, ints(0, 1, -1))
    ),
    (
        KDA,
        lambda _: (
            packed([0, 1, 1, 2]) | source(True, 9, 5, 9) | dict(ssm_state_indices=ints(0, 1, 2))
        ),
    ),
    *(
        (
            KDA,
            lambda _, rest=rest: (
                source(True, 9, 11, 9) | dict(num_accepted_tokens=ints(3, 3, 3)) | rest
            ),
        )
        for rest in (
            COUNTED,
            SPEC | dict(ssm_state_indices=ints([3, 1, 2], [0, 4, 5], [6, -1, 8])),
            SPEC
            | packed([0, 3, 6, 9], 0)
            | dict(ssm_state_indices=ints([3, 1, 2], [0, 4, 5], [6, -1, 8])),
        )
    ),
    # ... or another, from which states go to slots in order; ...
    (
        KDA,
        lambda _: (
            ONE() | source(False, 9, -1, 9) | dict(ssm_state_indices=None, output_final_state=True)
        ),
    ),
    (KDA, lambda _: COUNTED | source(False, 9, -1, 9) | dict(output_final_state=True)),
    (
        KDA,
        lambda _: (
            packed([0, 1, 1, 2, 3]) | source(False, 9, 8, 7, 6) | dict(ssm_state_indices=None)
        ),
    ),
    # ... or nothing is written.
    *(
        (KDA, lambda _, x=x, more=more: x | FROZEN | more)
        for x in ({}, packed([0, 3, 6, 9]))
        for more in (
            in_order(KDA),
            dict(ssm_state_indices=ints(9, -1, 9)),
            dict(
                initial_state=None,
                ssm_state_indices=None,
                initial_state_source=pool(),
                initial_state_indices=ints(9, -1, 9),
            ),
            source(False, 9, -1, 9) | dict(ssm_state_indices=ints(1, 1, 1)),
        )
    ),
]


@pytest.mark.parametrize(("name", "changes"), accepted(ACCEPTED))
def test_accepted(name, changes):
    check(name, plain(name) | changes)


def test_kda_makes_a_pool_of_bf16():
    """Of zeros, or after another pool."""
    bf16 = dict(initial_state=None, ssm_state_indices=None)
    o, state = flashinfer.recurrent_kda(**inputs(KDA, t=1), output_final_state=True)
    want, _, after = truth(KDA, inputs(KDA, t=1) | dict(initial_state=torch.zeros(B, HV, V, K)))
    close(o, want)
    close(state, torch.stack([after[n, 0] for n in range(B)]))
    assert state.dtype == BF16
    assert flashinfer.recurrent_kda(**inputs(KDA))[1] is None
    o, new = flashinfer.recurrent_kda(**inputs(KDA), num_spec_tokens=2, output_final_state=True)
    assert new.shape == (B * T, HV, V, K)
    assert torch.equal(
        o,
        flashinfer.recurrent_kda(
            **inputs(KDA), initial_state=torch.zeros_like(new), num_spec_tokens=2
        )[0],
    )
    given = source(False, 9, 8, 9) | dict(initial_state_source=pool(dtype=BF16))
    check(KDA, inputs(KDA, t=1) | given | bf16 | dict(output_final_state=True))


def test_mtp_updates_nothing_by_default_and_warns():
    x = plain(MTP)
    del x["disable_state_update"]
    with pytest.warns(DeprecationWarning, match="disable_state_update") as caught:
        check(MTP, x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for update in (True, False):
            check(MTP, x | dict(disable_state_update=update))


@pytest.mark.parametrize("name", DECODES)
def test_an_output_of_another_dtype_and_of_any_strides(name):
    for dtype, other in ((FP32, BF16), (BF16, FP32), (FP16, FP32)):
        room = untouched(B, T, HV, 2 * V, dtype=other)
        call = functools.partial(
            getattr(flashinfer, name),
            **{n: x for n, x in plain(name, dtype=dtype).items() if n != "output"},
        )
        o, want = (
            call(output=room[..., ::2])[0],
            getattr(flashinfer, name)(**plain(name, dtype=dtype))[0],
        )
        assert o.data_ptr() == room.data_ptr()
        assert torch.equal(o, want.to(other))
        assert (room[..., 1::2] == UNTOUCHED).all()


# ------------------------------------------------------------------------------------------ prefill


def prompts_truth(x: dict) -> tuple[Tensor, Tensor]:
    """FlashInfer's meaning of a prefill's arguments: o, and the final states."""
    g, beta = (
        torch.ones(TOTAL, HV, dtype=FP64) if x.get(n) is None else x[n].double()
        for n in ("g", "beta")
    )
    if x.get("use_gate_in_kernel"):
        g = (-x["A_log"].double().exp() * F.softplus(g + x["dt_bias"].double())).exp()
    elif x.get("gate_domain") == "log":
        g = torch.ones_like(g) if x["g"] is None else g.exp()
    beta = beta.sigmoid() if x.get("beta_is_logit") else beta
    starts, slots = x.get("initial_state"), x.get("state_indices")
    starts = starts if starts is None or slots is None else starts[slots.long()]
    one = {n: x[n][None] for n in ("q", "k", "v")}
    one["v"] = one["v"].repeat_interleave(HV // x["v"].shape[1], 2)
    how = x.get("scale") or K**-0.5, x.get("use_qk_l2norm_in_kernel", False), ENDS
    o, final = prompt_loop(one, g.log()[None, ..., None], beta[None], starts, *how)
    return o[0], final


def check_prefill(x: dict) -> None:
    """Checks a prefill, with and without final states, against the token loop and its writes."""
    want, final = prompts_truth(x)
    state, start = x.get("output_state"), x.get("initial_state")
    slots = range(N) if x.get("state_indices") is None else x["state_indices"].tolist()
    written = {slot: final[n] for n, slot in enumerate(slots) if slot >= 0 and n != EMPTY}
    apart = start is not None and (state is None or start.data_ptr() != state.data_ptr())
    for asked in (False, True) if state is not None or x.get("state_indices") is None else (False,):
        before, given = (None if y is None else y.clone() for y in (state, x.get("output")))
        with unwritten(dict(initial_state=start) if apart else {}):
            results = flashinfer.chunk_gated_delta_rule(**x, output_final_state=asked)
        o, new = results if asked else (results, None)
        assert given is None or o is x["output"]
        assert o.dtype == x["v"].dtype
        live = [row for n, slot in enumerate(slots) if slot >= 0 for row in range(*ENDS[n : n + 2])]
        close(o[live], want[live])
        assert all((o[row] == 0).all() for row in {*range(TOTAL)} - {*live})
        if state is not None:
            check_pool(state, before, written)
            assert not asked or new is state
            state.copy_(before)
        elif asked:
            assert new.dtype == FP32
            close(new, final)


def by_index(fresh: bool, dtype: torch.dtype, *slots: int) -> dict:
    """A padded pool as two views. Sequence 2 has no slot, and no finite values."""
    state = padded(pool(dtype=dtype))[0]
    x = prompts() | dict(
        output_state=state[:],
        initial_state=None if fresh else state[:],
        state_indices=ints(*slots, dtype=INT64),
    )
    for name in ("q", "k", "v", "g", "beta") if slots[2] < 0 else ():
        x[name][5:75] = NAN
    return x


def into(given: str, dtype: torch.dtype) -> dict:
    start, output = pool(N, dtype), padded(untouched(TOTAL, HV, V))[0]
    state = (
        start
        if given == "the same"
        else start[:]
        if "views" in given
        else torch.full_like(start, UNTOUCHED)
    )
    return dict(
        initial_state=None if given == "no initial state" else start,
        output=output,
        output_state=state,
    )


PROMPTS = [
    *(
        prompts(heads) | dict(initial_state=start)
        for heads in (1, H, HV)
        for start in (None, pool(N))
    ),
    *(
        prompts() | dict(g=prompts()["g"] * zero, initial_state=pool(N))
        for zero in (0, (torch.arange(TOTAL) % 7 > 0)[:, None])
    ),
    *(prompts() | dict.fromkeys(missing) for missing in (("g",), ("beta",), ("g", "beta"))),
    *(
        shared_heads(heads) | more
        for heads in (1, 2)
        for more in ({}, dict.fromkeys(("g", "beta")), dict(output=untouched(TOTAL, HV, V)))
    ),
    *(
        raw_prompts(dtype) | dict(gate_domain=domain)
        for dtype, domain in ((FP32, "linear"), (BF16, "log"), (FP16, "log"))
    ),
    *(
        prompts() | dict(g=g, gate_domain="log")
        for g in (None, prompts()["g"].log(), prompts()["g"].log().bfloat16())
    ),
    *(
        prompts() | dict(k=0.3 * prompts()["k"], use_qk_l2norm_in_kernel=l2norm, scale=scale)
        for l2norm in (False, True)
        for scale in (None, 0.0, 0.7, np.float32(0), np.float32(0.7), np.int64(2))
    ),
    *(
        prompts(dtype=dtype) | dict(initial_state=pool(N, state))
        for dtype in (BF16, FP16)
        for state in (BF16, FP16)
    ),
    *(
        prompts() | into(given, dtype)
        for given in ("no initial state", "another", "the same", "the same as two views")
        for dtype in (FP32, BF16, FP16)
    ),
    *(
        by_index(fresh, dtype, 9, 2, slot, 0)
        for fresh in (False, True)
        for dtype in (FP32, BF16)
        for slot in (4, -1)
    ),
    *(
        by_index(fresh, dtype, 9, 2, -1, 9) | dict(output_state=None)
        for fresh in (False, True)
        for dtype in (FP32, BF16)
    ),
]


@pytest.mark.parametrize("x", PROMPTS, ids=lambda x: "-".join(n for n in x if n not in prompts()))
def test_prefill(x):
    check_prefill(x)


def test_a_pool_to_read_gives_the_bits_of_packed_states():
    x = prompts()
    o = flashinfer.chunk_gated_delta_rule(**x, initial_state=pool(), state_indices=ints(9, 2, 4, 9))
    assert torch.equal(
        o, flashinfer.chunk_gated_delta_rule(**x, initial_state=pool()[[9, 2, 4, 9]])
    )


@pytest.mark.parametrize("given", ["no initial state", "another", "the same"])
def test_fp16_states_of_a_prefill_saturate(given):
    """Also where they are computed in fp32 and copied."""
    x = prompts() | dict(g=torch.ones(TOTAL, HV), v=torch.full((TOTAL, HV, V), 1e6))
    state = torch.zeros(N, HV, V, K, dtype=FP16)
    initial_state = {
        "no initial state": None,
        "another": torch.zeros_like(state),
        "the same": state,
    }[given]
    flashinfer.chunk_gated_delta_rule(**x, initial_state=initial_state, output_state=state)
    assert torch.isfinite(state).all()
    assert (state.abs() == 65504).any()


@pytest.mark.parametrize("max_seqlen", [None, 70])
def test_a_prefill_hands_its_longest_sequence_on(max_seqlen, monkeypatch):
    seen, prefill = [], flashinfer.prefill
    monkeypatch.setattr(
        flashinfer, "prefill", lambda **call: seen.append(call["max_seqlen"]) or prefill(**call)
    )
    flashinfer.chunk_gated_delta_rule(**prompts(), max_seqlen=max_seqlen)
    assert seen == [max_seqlen]


def test_prefill_of_no_sequences():
    x = prompts() | dict(cu_seqlens=ints(0))
    for more in (
        {},
        dict(initial_state=pool(0)),
        dict(output_state=pool(0)),
        dict(state_indices=ints(), initial_state=pool()),
    ):
        assert (flashinfer.chunk_gated_delta_rule(**x, **more) == 0).all()


@pytest.mark.parametrize("heads", [(4, 1, 1), (6, 2, 2)], ids=str)
def test_shared_heads_have_the_bits_of_repeated_ones(heads, device):
    """On a GPU, TMA reads a shared head by stride 0."""
    N, D = (80, 128) if device.type == "cuda" else (2, 16)
    q, k, v = (normal(N * 70, n, D, seed=i, dtype=BF16).to(device) for i, n in enumerate(heads))
    g, beta = (normal(N * 70, heads[0], seed=i).sigmoid().to(device) for i in (3, 4))
    call = dict(
        q=q,
        g=g,
        beta=beta,
        cu_seqlens=torch.arange(0, N * 70 + 1, 70, device=device),
        output_final_state=True,
    )
    got = flashinfer.chunk_gated_delta_rule(**call, k=k, v=v, use_qk_l2norm_in_kernel=True)
    k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    for x, y in zip(
        got, flashinfer.chunk_gated_delta_rule(**call, k=k, v=v, use_qk_l2norm_in_kernel=True)
    ):
        assert torch.equal(x, y)


def long_prompts(every: int) -> tuple[dict, dict[int, Tensor]]:
    """Prompts of 130, 0, 70 and 192 tokens, rows for checkpoints, and their states in float64."""
    ends, total = [0, 130, 130, 200, 392], 400
    x = dict(
        k=F.normalize(normal(total, H, K, seed=1), dim=-1),
        q=normal(total, H, K, seed=0),
        v=normal(total, HV, V, seed=2),
    )
    x |= dict(
        g=normal(total, HV, seed=3).sigmoid(),
        beta=normal(total, HV, seed=4).sigmoid(),
        initial_state=pool(N),
    )
    starts, states = [0], {}
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        for after in range(every, end - start + 1, every):
            one = {name: x[name][None, start : start + after] for name in ("q", "k", "v")}
            gate = (x[name][None, start : start + after].double() for name in ("g", "beta"))
            _, new = prompt_loop(
                one,
                next(gate).log()[..., None],
                next(gate),
                x["initial_state"][[n]],
                K**-0.5,
                False,
            )
            states[len(states)] = new[0]
        starts.append(len(states))
    x |= dict(
        cu_seqlens=ints(*ends), checkpoint_cu_starts=ints(*starts), checkpoint_every_n_tokens=every
    )
    return x, states


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("every", [64, 128])
def test_states_at_intervals(every, dtype):
    """States: only read, into another tensor, in place, in a pool. The rest as without them."""
    x, states = long_prompts(every)
    assert len(states) == {64: 6, 128: 2}[every]
    start, slots = x["initial_state"], ints(9, 2, 4, 0)
    whole = pool()
    whole[slots.long()] = start
    for more in (
        {},
        dict(output_state=untouched(N, HV, V, K)),
        dict.fromkeys(("initial_state", "output_state"), start.clone()),
        dict.fromkeys(("initial_state", "output_state"), whole.clone()) | dict(state_indices=slots),
        dict(initial_state=whole, state_indices=slots),
    ):
        rows = untouched(len(states) + 2, HV, V, K, dtype=dtype)
        given = {n: y.clone() if isinstance(y, Tensor) else y for n, y in more.items()}
        if "initial_state" in more and more["initial_state"] is more.get("output_state"):
            given["initial_state"] = given["output_state"]
        plain = {n: y for n, y in x.items() if "checkpoint" not in n}
        want = flashinfer.chunk_gated_delta_rule(**plain | more)
        got = flashinfer.chunk_gated_delta_rule(**x | given | dict(state_checkpoints=rows))
        assert torch.equal(got, want)
        assert "output_state" not in more or torch.equal(
            given["output_state"], more["output_state"]
        )
        check_pool(rows, untouched(len(rows), HV, V, K, dtype=dtype), states)


def test_states_at_intervals_that_no_sequence_reaches():
    x, _ = long_prompts(64)
    more = dict(
        checkpoint_every_n_tokens=448,
        checkpoint_cu_starts=ints(0, 0, 0, 0, 0),
        state_checkpoints=untouched(0, HV, V, K),
    )
    flashinfer.chunk_gated_delta_rule(**x | more)
    flashinfer.chunk_gated_delta_rule(
        **x | more | dict(state_checkpoints=(rows := untouched(1, HV, V, K)))
    )
    assert (rows == UNTOUCHED).all()
