"""The judge: the list covers every factor, and a backend with any of these faults fails."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import gated_delta as gd
from gated_delta import reference
from gated_delta.problem import KVBuffer
from gated_delta.reference import gated_norm
from gated_delta.testing import cases, check, listed, quick_cases, run_case
from gated_delta.testing.cases import (
    AXES,
    BUFFERED,
    CONVOLVED,
    CONVOLVED_DRAFTS,
    DIMS,
    FAMILIES,
    GATES,
    HEADS,
    KEYS,
    LAYOUTS,
    OPS,
    RANK_HEADS,
    SPECIAL,
    TREES,
    UNEQUAL_DIMS,
)
from gated_delta.testing.compare import Error, error, rounding_unit, smallest_head
from gated_delta.testing.oracle import Expected

FACTORS = (
    "axis",
    "D",
    "heads",
    "gate",
    "family",
    "keys",
    "state_dtype",
    "layout",
    "dtype",
    "g_dtype",
    "qk_l2norm",
    "beta_logits",
)
FACTORS += ("norm", "deterministic", "state_size", "allow_neg_eigval")


@pytest.mark.parametrize("op", OPS)
def test_the_list_crosses_every_main_factor(op):
    crossed = {
        (c.axis, c.D, c.heads, c.gate, c.family, c.keys) for c in cases(op) if c.heads in HEADS
    }
    factors = (AXES, DIMS, HEADS, GATES, FAMILIES, KEYS)
    assert len(crossed) == math.prod(len(factor) for factor in factors)
    drawn = [c for c in cases(op) if c.layout not in SPECIAL]
    pairs = {(c.layout, c.gate, c.family) for c in drawn if c.family in FAMILIES}
    assert len(pairs) == len({*LAYOUTS[op]} - {*SPECIAL}) * len(GATES) * len(FAMILIES)
    added = {(c.axis, c.D, c.gate, c.layout) for c in cases(op) if c.layout in (*BUFFERED, *TREES)}
    factors = (AXES, DIMS, GATES, {*LAYOUTS[op]} & {*BUFFERED, *TREES})
    assert len(added) == math.prod(len(factor) for factor in factors)
    layouts = {*LAYOUTS[op]} & {*CONVOLVED, *CONVOLVED_DRAFTS}
    convolved = {(c.D, c.gate, c.layout) for c in cases(op) if c.layout in layouts}
    factors = ((*DIMS, *UNEQUAL_DIMS), GATES, layouts)
    assert len(convolved) == math.prod(len(factor) for factor in factors)
    assert len({c.label for c in cases(op)}) > 0.9 * len(cases(op))
    ranks = {(c.axis, c.D, c.heads) for c in cases(op) if c.heads in RANK_HEADS}
    assert len(ranks) == len(AXES) * len(DIMS) * len(RANK_HEADS)
    assert len(
        {(c.axis, c.gate, c.layout) for c in cases(op) if c.state_dtype == torch.float16}
    ) > 4 * len(GATES)


@pytest.mark.parametrize("op", OPS)
def test_the_quick_list_has_every_value_of_every_factor(op):
    for factor in FACTORS:
        have, want = (
            {getattr(c, factor) for c in listed} for listed in (quick_cases(op), cases(op))
        )
        assert have == want, factor


def fails(op, backend="reference", **wanted):
    """True if one of these cases fails."""
    chosen = [
        c for c in cases(op) if all(getattr(c, name) == value for name, value in wanted.items())
    ][:6]
    assert chosen
    return any(not run_case(c, backend).passed for c in chosen)


def broken(monkeypatch, op, wrap):
    original = getattr(reference, op)
    monkeypatch.setattr(
        reference, op, lambda *tokens, **arguments: wrap(original, *tokens, **arguments)
    )


def judge_as(backend, monkeypatch):
    """run_case with this backend runs the reference and applies the backend's tolerance."""
    run, alone = check.run, check._bit_failures
    monkeypatch.setattr(
        check, "run", lambda call, given: run(call, "reference" if given == backend else given)
    )
    monkeypatch.setattr(
        check, "_bit_failures", lambda call, results, _: alone(call, results, "reference")
    )


CONV_FAULTS = {
    "": lambda conv, given: (conv, given),
    "taps reversed": lambda conv, given: (replace(conv, weight=conv.weight.flip(1)), given),
    "no bias": lambda conv, given: (replace(conv, bias=None), given),
    "windows not written": lambda conv, given: (
        conv,
        given | dict(windows=given["windows"].clone()),
    ),
    "no window read": lambda conv, given: (
        conv,
        given | dict(has_initial_state=torch.zeros_like(given["has_initial_state"])),
    ),
}


@pytest.mark.parametrize("fault", CONV_FAULTS)
def test_a_wrong_convolution_fails(monkeypatch, fault):
    original, short = reference.short_conv, listed("short_conv", quick=True)

    def run(q, k, v, conv, **given):
        conv, given = CONV_FAULTS[fault](conv, given)
        return original(q, k, v, conv, **given)

    monkeypatch.setattr(reference, "short_conv", run)
    results = [run_case(case, "reference") for case in short]
    assert all(x.passed for x in results) == (not fault)
    assert all(x.share <= 1 for x in results) == (fault in ("", "windows not written"))


@pytest.mark.parametrize("fault", [*CONV_FAULTS][:4])
def test_a_wrong_convolution_in_decode_fails(monkeypatch, fault):
    original = reference.decode_convolved

    def run(tokens, *, conv, **given):
        conv, given = CONV_FAULTS[fault](conv, given)
        original(tokens, conv=conv, **given)

    monkeypatch.setattr(reference, "decode_convolved", run)
    assert fails("decode", layout="conv_write", axis="head") == bool(fault)


TOKEN_FAULTS = {
    "no l2norm": lambda t: t._replace(qk_l2norm=False),
    "beta taken as a strength": lambda t: t._replace(beta_logits=False),
    "beta not doubled": lambda t: t._replace(allow_neg_eigval=False),
    "default scale": lambda t: t._replace(scale=None),
    "no dt_bias": lambda t: t._replace(
        gate=type(t.gate)(t.gate.kind, t.gate.A_log, None, t.gate.bound)
    ),
    "a gate per head, averaged": lambda t: t._replace(
        g=t.g.float().mean(-1, keepdim=True).expand_as(t.g).to(t.g.dtype)
    ),
    "keys of the wrong group": lambda t: t._replace(k=t.k.flip(2)),
}


@pytest.mark.parametrize("fault", TOKEN_FAULTS)
@pytest.mark.parametrize(
    ("op", "judged"),
    [("prefill", "reference"), ("prefill", "cute"), ("decode", None), ("verify", None)],
)
def test_wrong_mathematics_fails(monkeypatch, op, judged, fault):
    """judged: the backend whose tolerance applies to the reference's results."""
    judge_as(judged, monkeypatch)
    broken(
        monkeypatch, op, lambda run, tokens, **states: run(TOKEN_FAULTS[fault](tokens), **states)
    )
    wanted = {
        "no l2norm": dict(qk_l2norm=True, keys="random"),
        "beta taken as a strength": dict(beta_logits=True, family="typical"),
        "beta not doubled": dict(allow_neg_eigval=True, family="typical"),
        "default scale": dict(),
        "no dt_bias": dict(gate="softplus", family="typical"),
        "a gate per head, averaged": dict(axis="channel", gate="log", family="typical"),
        "keys of the wrong group": dict(keys="random", family="none"),
    }[fault]
    chosen = [
        c for c in cases(op) if all(getattr(c, name) == value for name, value in wanted.items())
    ]
    if fault == "default scale":
        chosen = [c for c in chosen if c.seed % 5 == 0]
    assert any(not run_case(c, judged or "reference").passed for c in chosen[:8])


NORM_FAULTS = {
    "none": lambda o, z, norm: o,
    "no mean": lambda o, z, norm: right_norm(o, z, norm) * o.shape[-1] ** -0.5,
    "no eps": lambda o, z, norm: right_norm(o * 1e6, z, norm),
    "the other activation": lambda o, z, norm: right_norm(
        o, z, norm, {"silu": "sigmoid", "sigmoid": "silu"}[norm.activation]
    ),
    "no gate": lambda o, z, norm: right_norm(o, torch.full_like(z, 1e4), norm, "sigmoid"),
    "gated before the norm": lambda o, z, norm: right_norm(
        o * reference.gated_norm(torch.ones_like(o), z, norm, torch.float32),
        torch.full_like(z, 1e4),
        norm,
        "sigmoid",
    ),
    "no weight": lambda o, z, norm: right_norm(o, z, norm) / norm.weight.float(),
    "over all heads": lambda o, z, norm: (
        right_norm(o, z, norm) * o.norm(dim=-1, keepdim=True) / o.norm(dim=-1).mean()
    ),
}


def right_norm(o, z, norm, activation=None):
    return gated_norm(
        o, z, gd.GatedNorm(norm.weight, norm.eps, activation or norm.activation), torch.float32
    )


@pytest.mark.parametrize("fault", NORM_FAULTS)
@pytest.mark.parametrize("op", ["decode", "verify", "prefill"])
def test_a_wrong_norm_fails(monkeypatch, op, fault):
    def finished(o, dtype, norm, z):
        return (o if norm is None else NORM_FAULTS[fault](o.to(dtype).float(), z.float(), norm)).to(
            dtype
        )

    monkeypatch.setattr(reference, "_finished", finished)
    wanted = dict(gate="log", family="saturated") if fault == "no eps" else dict(family="typical")
    chosen = [
        c
        for c in cases(op)
        if c.norm and c.heads == (4, 8) and all(getattr(c, n) == x for n, x in wanted.items())
    ]
    assert not all(run_case(c, "reference").passed for c in chosen[:8])


def changed(**how):
    """The backend, with changed arguments."""
    return lambda run, *tokens, **states: run(
        *tokens, **states | {name: change(states[name]) for name, change in how.items()}
    )


def then(touch):
    """The backend, then `touch` on the call's tensors."""
    return lambda run, *tokens, **states: (run(*tokens, **states), touch(**states))


def keeps_the_last_output(run, tokens, *, out, **states):
    before = out.clone()
    run(tokens, out=out, **states)
    out[-1] = before[-1]


def indexed_with_T(run, tokens, *, intermediate_states, **states):
    R, C, T = *intermediate_states.shape[:2], tokens.q.shape[1]
    steps = intermediate_states.view(R * C, *intermediate_states.shape[2:])[: R * T].unflatten(
        0, (R, T)
    )
    run(tokens, intermediate_states=steps, **states)


def first_layer(run, *, state, buffer, **rest):
    run(state=state[0], buffer=buffer.layer(0), **rest)


def several(*layouts, **wanted):
    """Cases of such layouts with several sequences."""
    return lambda c: (
        c.layout in layouts
        and len(c.lengths) > 1
        and all(getattr(c, name) == x for name, x in wanted.items())
    )


FAULTS = {
    # operation, its replacement, a filter of its cases, any or all of the first six must fail
    "a slot of no sequence is written": (
        "decode",
        then(lambda state, **_: state[0].zero_()),
        several("pool"),
        any,
    ),
    "padding clamped to slot 0": (
        "decode",
        changed(state_indices=lambda x: x.clamp(min=0)),
        several("pool"),
        any,
    ),
    "padded outputs left as they were": ("decode", keeps_the_last_output, several("pool"), all),
    "write_indices ignored": (
        "decode",
        changed(write_indices=lambda _: None),
        several("write"),
        any,
    ),
    "intermediate_indices ignored": (
        "decode",
        changed(intermediate_indices=lambda _: None),
        several("intermediates"),
        any,
    ),
    "no state written with intermediates": (
        "decode",
        changed(update_state=lambda _: False),
        several("intermediates"),
        any,
    ),
    "intermediates indexed with T": ("decode", indexed_with_T, several("intermediates"), all),
    "a start from a stale slot": (
        "prefill",
        changed(has_initial_state=lambda _: None),
        several("pool"),
        any,
    ),
    "values off by 0.004": (  # bf16 sums in a prefill of fp32
        "prefill",
        lambda run, tokens, **states: run(
            tokens._replace(v=(tokens.v.float() * 1.004).to(tokens.v.dtype)), **states
        ),
        lambda c: c.layout == "dense" and c.dtype == torch.float32,
        any,
    ),
    "the state moved by verify": (
        "verify",
        then(lambda state, **_: state[1].mul_(0.5)),
        several("pool"),
        any,
    ),
    "a token too many folded": (
        "flush",
        changed(num_accepted=lambda m: m + 1),
        lambda c: c.family == "typical",
        any,
    ),
    "a length of ~m taken for 0": (
        "flush",
        changed(num_accepted=lambda m: m.clamp(min=0) if isinstance(m, torch.Tensor) else m),
        lambda c: c.layout == "pool" and c.family == "typical",
        any,
    ),
    "only the first layer flushed": ("flush", first_layer, lambda c: c.layout == "layers", any),
    **{
        f"{op} on the null slot": (
            op,
            changed(null_index=lambda _: -1),
            several("pool", "layers", null_index=0),
            any,
        )
        for op in OPS
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_fails(monkeypatch, fault):
    op, wrong, exposes, enough = FAULTS[fault]
    broken(monkeypatch, op, wrong)
    chosen = [c for c in cases(op) if exposes(c)][:6]
    assert chosen
    assert enough(not run_case(c, "reference").passed for c in chosen)


BUFFER_FAULTS = {
    "a token of the row left out": changed(buffer_lens=lambda lens: lens.clamp(min=0) - 1),
    "the row of another sequence": changed(buffer_indices=lambda _: None),
    "tokens not appended": changed(
        buffer=lambda parts: KVBuffer(*(x.clone() for x in vars(parts).values()))
    ),
    "a slot written without need": then(lambda state, **_: state.mul_(0.75)),
    "the row written after its last token": then(lambda buffer, **_: buffer.u[:, -1].zero_()),
}


@pytest.mark.parametrize("fault", BUFFER_FAULTS)
def test_a_wrong_decode_with_a_buffer_fails(monkeypatch, fault):
    broken(monkeypatch, "decode_with_buffer", BUFFER_FAULTS[fault])
    layout = "packed_buffer" if "another" in fault else "buffer"
    assert fails("decode", layout=layout)


TREE_FAULTS = {
    "chains": lambda parents: torch.arange(-1, parents.shape[1] - 1).expand_as(parents),
    "children of the root": lambda parents: torch.full_like(parents, -1),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
@pytest.mark.parametrize("layout", TREES[:3])
def test_wrong_trees_fail(monkeypatch, layout, fault):
    broken(monkeypatch, "verify", changed(parents=TREE_FAULTS[fault]))
    assert fails("verify", layout=layout)


def test_a_wrong_path_fails(monkeypatch):
    prefix = changed(path=lambda path: torch.arange(path.shape[1]).expand_as(path))
    broken(monkeypatch, "flush", prefix)
    assert fails("flush", layout="tree")


CHECKPOINT_FAULTS = {
    "the last one for the initial state": lambda lens: torch.where(
        lens == 0, lens.amax(1, keepdim=True), lens
    ),
    "a chunk too early": lambda lens: torch.where(lens == 64, 0, lens),
    "none": lambda lens: torch.full_like(lens, -1),
    "some for empty entries": lambda lens: lens.clamp(min=0),
    "in the next entry's place": lambda lens: lens.roll(1, 1),
}


@pytest.mark.parametrize("layout", ["checkpoints", "pool_checkpoints", "pool_and_checkpoints"])
@pytest.mark.parametrize("judged", ["reference", "cute"])
@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_wrong_checkpoints_fail(monkeypatch, judged, layout, fault):
    def run_wrong(run, tokens, *, checkpoint_lens, **states):
        wrong = None if checkpoint_lens is None else CHECKPOINT_FAULTS[fault](checkpoint_lens)
        run(tokens, checkpoint_lens=wrong, **states)

    judge_as(judged, monkeypatch)
    broken(monkeypatch, "prefill", run_wrong)
    long = [
        c
        for c in cases("prefill")
        if c.layout == layout and c.family == "typical" and c.lengths[0] >= 64
    ]
    assert any(not run_case(c, judged).passed for c in long[:6])


HISTORIES = {
    # a final state's dependence, within any tolerance
    "the number of sequences": lambda tokens, state: tokens.num_sequences,
    "the number of heads": lambda tokens, state: state.shape[1],
    "the chunks of the call": lambda tokens, state: (tokens.q.shape[1] // 64 + 1) ** 2,
}


@pytest.mark.parametrize("history", HISTORIES)
def test_bits_that_a_deterministic_prefill_must_not_have_fail(monkeypatch, history):
    def run_wrong(run, tokens, *, final_state, **states):
        run(tokens, final_state=final_state, **states)
        final_state.mul_(1 + 2.0**-20 * HISTORIES[history](tokens, final_state))

    broken(monkeypatch, "prefill", run_wrong)
    dense = [
        c
        for c in cases("prefill")
        if c.layout == "dense" and c.state_dtype == torch.float32 and max(c.lengths) > 64
    ]
    several = [
        c for c in dense if len(c.lengths) > 1 and c.heads == (4, 8) and c.family != "saturated"
    ]
    deterministic, other = (
        [run_case(replace(c, deterministic=on), "reference") for c in several[:3]]
        for on in (True, False)
    )
    assert all(
        result.failures and all("other bits" in failure for failure in result.failures)
        for result in deterministic
    )
    assert all(result.passed for result in other)


# ------------------------------------------------------------------------------------- tolerances


def test_only_prefill_on_the_tensor_cores_has_a_wider_tolerance():
    for op, backend, keys in itertools.product(
        OPS, ("reference", "cute"), (*KEYS, "repeated", "reflecting")
    ):
        units = {
            dtype: rounding_unit(op, dtype, backend, keys)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }
        if (op, backend) != ("prefill", "cute"):
            assert list(units.values()) == [2**-8, 2**-10, 2**-20 if op == "decode" else 2**-13]
        else:
            wider = {
                "random": [2**-8, 2**-8.5, 2**-8],
                "collinear": [2**-6] * 3,
                "repeated": [2**-6] * 3,
                "reflecting": [2**-4.5] * 3,
            }
            assert list(units.values()) == wider[keys]


@pytest.mark.parametrize(
    ("asked", "ran"), [("reference", "reference"), ("auto", "reference"), ("cute", "cute")]
)
def test_the_backend_that_ran_is_judged_by_its_own_tolerance(monkeypatch, asked, ran):
    """Also where "auto" chose it; the widest one only where beta reaches 2 on collinear keys."""
    judge_as("cute", monkeypatch)
    given = set()
    monkeypatch.setattr(
        check, "rounding_unit", lambda *facts: given.add(facts) or rounding_unit(*facts)
    )
    for keys, logits in itertools.product(KEYS, (False, True)):
        case = next(
            c
            for c in cases("prefill")
            if (c.keys, c.beta_logits, c.dtype) == (keys, logits, torch.bfloat16)
        )
        given.clear()
        assert run_case(case, asked).passed
        assert {facts[2:] for facts in given} == {
            (ran, "reflecting" if keys == "collinear" and not logits else keys)
        }


ROUNDINGS = {
    "v off by 0.004": lambda t: t._replace(v=(t.v.float() * 1.004).to(t.v.dtype)),
    "bf16 operands": lambda t: t._replace(
        q=t.q.bfloat16().half(), k=t.k.bfloat16().half(), v=t.v.bfloat16().half()
    ),
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bf16_rounding_inside_an_fp16_prefill_fails(monkeypatch, rounding):
    """The wider tolerance is for fp16 operands alone."""
    judge_as("cute", monkeypatch)
    broken(
        monkeypatch,
        "prefill",
        lambda run, tokens, **states: run(ROUNDINGS[rounding](tokens), **states),
    )
    assert fails("prefill", "cute", dtype=torch.float16, keys="random", family="typical")


def test_a_reflection_that_is_off_by_a_twentieth_fails(monkeypatch):
    judge_as("cute", monkeypatch)
    broken(
        monkeypatch,
        "prefill",
        lambda run, tokens, **states: run(tokens._replace(v=tokens.v * 1.05), **states),
    )
    assert fails("prefill", "cute", keys="collinear", beta_logits=False)


def test_a_head_that_gates_wiped_out_is_judged_beside_the_others():
    """With fp16 operands an error of 2**-24 next to a head of size 1 passes, 2**-20 fails."""
    truth = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    truth[:, 1] *= 2**-40
    expected = Expected(truth, torch.ones(1, dtype=torch.bool))
    unit = rounding_unit("prefill", torch.float32, "cute")
    for size, passes in ((2**-24, True), (2**-20, False)):
        wrong = truth.clone()
        wrong[:, 1] += size
        for backend in ("cute", "reference"):
            results = error(wrong, expected, 1, smallest_head("prefill", backend))
            assert (results.share(Error(0.0, 0.0), unit) <= 1) == (passes and backend == "cute")
