"""torch.library: schemas, fakes, opcheck, torch.compile without graph breaks."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import gated_delta as gd
from calls import buffer, call, normed, pool, tokens, verified
from gated_delta import api

A_LOG = torch.linspace(-1, 1, 4)


SAMPLES = [
    ("prefill", tokens()),
    ("prefill", tokens() | dict(gate=gd.Gate.softplus(A_LOG), output_final_state=True)),
    ("prefill", tokens() | dict(state=pool(), state_indices=torch.tensor([3, -1]))),
    ("prefill", tokens() | dict(checkpoint_lens=torch.zeros(2, 1).int(), checkpoints=torch.zeros(2, 1, 4, 6, 8))),
    (
        "prefill",
        tokens() | dict(state=pool(), checkpoint_lens=torch.zeros(2, 1).int(), checkpoint_indices=torch.tensor([[3], [-1]])),
    ),
    ("decode", tokens() | dict(gate=gd.Gate.lower_bound(A_LOG), state=pool(), state_indices=torch.tensor([3, -1]))),
    ("decode", tokens() | dict(state=pool(), intermediate_states=torch.zeros(2, 3, 4, 6, 8), out=torch.zeros(2, 3, 4, 6))),
    (
        "decode",
        tokens()
        | dict(state=pool(), intermediate_states=torch.zeros(1, 3, 4, 6, 8), intermediate_indices=torch.tensor([-1, 0]))
        | dict(state_indices=torch.tensor([3, 0]), null_index=0),
    ),
    ("verify", tokens() | dict(state=pool(), state_indices=torch.tensor([3, -1]), buffer=verified())),
    ("decode", tokens() | normed() | dict(state=pool(), state_indices=torch.tensor([3, -1]))),
    ("verify", tokens() | normed(activation="sigmoid") | dict(state=pool(), buffer=verified())),
    ("flush", dict(state=pool(), buffer=verified(), num_accepted=torch.tensor([1, 3]))),
    ("flush", dict(state=pool(), buffer=verified(), num_accepted=1, state_indices=torch.tensor([3, 1]))),
]


@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_opcheck(sample, monkeypatch):
    name, call = SAMPLES[sample]
    seen = []
    monkeypatch.setattr(api, "run", lambda op, *a: seen.append(op.allocated(op.arguments(*a))))
    getattr(gd, name)(**call, backend="reference")
    monkeypatch.undo()
    torch.library.opcheck(getattr(torch.ops.gated_delta, name).default, tuple(seen[0]))


def both_ways(function, arguments):
    """Results and every tensor argument, eager and compiled into one graph."""
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch._dynamo.reset()
        given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        results.append((run(given), given))
    return results


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
    elif isinstance(a, (tuple, list)):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        for name in a:
            same(a[name], b[name])
    else:
        assert a == b


@pytest.mark.parametrize("given_out", [False, True])
def test_prefill_compiles_whole(given_out):
    arguments = {**tokens(), "initial_state": pool(2), "out": torch.zeros(2, 3, 4, 6) if given_out else None}
    run = lambda a: gd.prefill(**a, gate=gd.Gate.softplus(A_LOG), output_final_state=True, backend="reference")
    (eager, seen), (compiled, seen_compiled) = both_ways(run, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)


def test_pooled_prefill_compiles_whole():
    arguments = {
        **tokens(),
        "state": pool(),
        "state_indices": torch.tensor([4, -1]),
        "has_initial_state": torch.tensor([True, False]),
    }
    (eager, seen), (compiled, seen_compiled) = both_ways(lambda a: gd.prefill(**a, backend="reference"), arguments)
    same(eager, compiled)
    same(seen, seen_compiled)


@pytest.mark.parametrize("pooled", [False, True])
def test_checkpoints_compile_whole_and_are_written(pooled):
    arguments = {**tokens(2, 70), "checkpoint_lens": torch.tensor([[64, 0], [-1, 64]])}
    places = dict(state=pool(8), checkpoint_indices=torch.tensor([[7, 5], [-1, 4]]))
    arguments |= places if pooled else dict(checkpoints=torch.zeros(2, 2, 4, 6, 8))
    (eager, seen), (compiled, seen_compiled) = both_ways(lambda a: gd.prefill(**a, backend="reference")[0] * 2, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)
    name = "state" if pooled else "checkpoints"
    assert not torch.equal(seen_compiled[name], arguments[name])


def test_decode_compiles_whole_and_mutates_its_pool():
    arguments = {
        **tokens(),
        "state": pool(),
        "intermediate_states": torch.zeros(2, 3, 4, 6, 8),
        "state_indices": torch.tensor([4, 0]),
    }
    (eager, seen), (compiled, seen_compiled) = both_ways(lambda a: gd.decode(**a, backend="reference") * 2, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)
    assert not torch.equal(seen_compiled["state"], pool())


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_norm_compiles_whole(op):
    def run(a):
        norm = gd.GatedNorm(a["weight"], 1e-5, "sigmoid")
        rest = dict(state=a["state"]) | (dict(buffer=gd.KVBuffer(a["u"], a["k"], a["log_decay"])) if op == "verify" else {})
        return getattr(gd, op)(**a["tokens"], **rest, norm=norm, z=a["z"], backend="reference") * 2

    given = normed()
    arguments = dict(tokens=tokens(), state=pool(), z=given["z"], weight=given["norm"].weight, **vars(verified()))
    (eager, seen), (compiled, seen_compiled) = both_ways(run, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)


def test_verify_then_flush_compile_whole():
    def chain(a):
        made = gd.KVBuffer(a["u"], a["k"], a["log_decay"])
        o = gd.verify(**a["tokens"], state=a["state"], buffer=made, backend="reference")
        gd.flush(a["state"], made, a["counts"], backend="reference")
        gd.flush(a["state"], made, 1, state_indices=a["counts"], backend="reference")
        return o

    arguments = {**vars(buffer()), "state": pool(), "counts": torch.tensor([1, 3]), "tokens": tokens()}
    (eager, seen), (compiled, seen_compiled) = both_ways(chain, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)


def test_a_null_index_and_rows_of_intermediate_states_compile_whole():
    arguments = {
        **tokens(),
        "state": pool(),
        "intermediate_states": torch.zeros(1, 3, 4, 6, 8),
        "intermediate_indices": torch.tensor([-1, 0]),
        "state_indices": torch.tensor([0, 2]),
    }
    run = lambda a: gd.decode(**a, null_index=0, backend="reference") * 2
    (eager, seen), (compiled, seen_compiled) = both_ways(run, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)
    assert torch.equal(seen_compiled["state"][0], pool()[0])


def test_a_null_index_may_vary_in_a_compiled_graph():
    torch._dynamo.reset()
    step = torch.compile(
        lambda t, s, slots, null: gd.decode(**t, state=s, state_indices=slots, null_index=null, backend="reference"),
        fullgraph=True,
        backend="aot_eager",
    )
    slots = torch.tensor([1, 3])
    for null in (-1, 0, 1, 2):
        o = step(tokens(), pool(), slots, null)
        assert torch.equal(o.abs().amax((1, 2, 3)) > 0, slots > null)


def test_inductor_compiles_a_decode_step():
    torch._dynamo.reset()
    step = torch.compile(lambda t, s: gd.decode(**t, state=s, backend="reference").sum(-1), fullgraph=True)
    compiled, eager = pool(), pool()
    got = step(tokens(), compiled)
    torch.testing.assert_close(got, gd.decode(**tokens(), state=eager, backend="reference").sum(-1))
    assert torch.equal(compiled, eager)


def test_fake_tensors_run_nothing():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call("decode").items()}
        o = gd.decode(**fake, backend="reference")
    assert o.shape == (2, 3, 4, 6)


def test_explain_looks_through_subclasses():
    class Labelled(torch.Tensor):
        pass

    route = gd.explain("decode", **tokens() | dict(q=tokens()["q"].as_subclass(Labelled)), state=pool())
    assert (route.backend, route.problem.op) == ("reference", "decode")


def test_a_bad_call_raises_in_a_compiled_graph_too():
    torch._dynamo.reset()
    step = torch.compile(lambda t, s: gd.decode(**t, state=s, backend="reference"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="state: expected shape"):
        step(tokens(), torch.zeros(5, 4, 8, 6))
