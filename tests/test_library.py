"""torch.library: schemas, fakes, opcheck, torch.compile without graph breaks."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import gated_delta as gd
from calls import buffer, call, normed, pool, tokens, verified
from gated_delta import api

A_LOG = torch.linspace(-1, 1, 4)
OTHER = gd.KVBuffer(*(torch.ones_like(x) for x in vars(verified()).values()))
"""Its numbers differ from the ones written to it: a schema without the mutation fails."""

CHILDREN = torch.tensor([[-1, 0, 0], [-1, 0, 1]])
SAMPLES = [
    ("prefill", tokens()),
    ("prefill", tokens() | dict(gate=gd.Gate.softplus(A_LOG), output_final_state=True)),
    ("prefill", tokens(1, 4) | dict(cu_seqlens=torch.tensor([0, 3, 4]), max_seqlen=3)),
    ("prefill", tokens() | dict(state=pool(), state_indices=torch.tensor([3, -1]))),
    ("prefill", tokens() | dict(deterministic=64)),
    (
        "prefill",
        tokens()
        | dict(checkpoint_lens=torch.zeros(2, 1).int(), checkpoints=torch.ones(2, 1, 4, 6, 8)),
    ),
    (
        "prefill",
        tokens()
        | dict(
            state=pool(),
            checkpoint_lens=torch.zeros(2, 1).int(),
            checkpoint_indices=torch.tensor([[3], [-1]]),
        ),
    ),
    (
        "decode",
        tokens()
        | dict(gate=gd.Gate.lower_bound(A_LOG), state=pool(), state_indices=torch.tensor([3, -1])),
    ),
    (
        "decode",
        tokens()
        | dict(
            state=pool(),
            intermediate_states=torch.zeros(2, 3, 4, 6, 8),
            out=torch.zeros(2, 3, 4, 6),
        ),
    ),
    (
        "decode",
        tokens()
        | dict(
            state=pool(),
            intermediate_states=torch.zeros(1, 3, 4, 6, 8),
            intermediate_indices=torch.tensor([-1, 0]),
        )
        | dict(state_indices=torch.tensor([3, 0]), null_index=0),
    ),
    ("verify", tokens() | dict(state=pool(), state_indices=torch.tensor([3, -1]), buffer=OTHER)),
    (
        "decode",  # the first sequence folds its row, the second is appended to its own
        tokens() | dict(state=pool(), buffer=OTHER, buffer_lens=torch.tensor([1, 0])),
    ),
    ("prefill", tokens() | normed() | dict(state=pool(), state_indices=torch.tensor([4, -1]))),
    ("decode", tokens() | normed() | dict(state=pool(), state_indices=torch.tensor([3, -1]))),
    ("verify", tokens() | normed(activation="sigmoid") | dict(state=pool(), buffer=verified())),
    ("flush", dict(state=pool(), buffer=verified(), num_accepted=torch.tensor([1, 3]))),
    ("verify", tokens() | dict(state=pool(), buffer=OTHER, parents=CHILDREN)),
    ("flush", dict(state=pool(), buffer=verified(), num_accepted=2, path=CHILDREN + 1)),
    (
        "flush",
        dict(state=pool(), buffer=verified(), num_accepted=1, state_indices=torch.tensor([3, 1])),
    ),
    (
        "summarise",
        {name: x for name, x in tokens().items() if name != "q"}
        | dict(sequences=torch.tensor([1, -1, 0]), initial_state=torch.ones(3, 4, 6, 8)),
    ),
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
        given = {
            name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
        }
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


SLOTS, LENS = torch.tensor([4, 0]), torch.tensor([[64, 0], [-1, 64]])
STEPS, ROWS = torch.zeros(2, 3, 4, 6, 8), torch.tensor([-1, 0])


def prefill(a):
    return gd.prefill(
        **a, gate=gd.Gate.softplus(A_LOG), output_final_state=True, backend="reference"
    )


def pooled_prefill(a):
    return gd.prefill(**a, backend="reference")[0] * 2


def decode(a):
    return gd.decode(**a, backend="reference") * 2


def normed_call(op, a):
    norm = gd.GatedNorm(a["weight"], 1e-5, "sigmoid")
    rest = dict(state=a["state"]) | (
        dict(buffer=gd.KVBuffer(a["u"], a["k"], a["log_decay"])) if op == "verify" else {}
    )
    return getattr(gd, op)(**a["tokens"], **rest, norm=norm, z=a["z"], backend="reference") * 2


def verify_then_flush(a):
    made = gd.KVBuffer(a["u"], a["k"], a["log_decay"])
    o = gd.verify(**a["tokens"], state=a["state"], buffer=made, backend="reference")
    gd.flush(a["state"], made, a["counts"], backend="reference")
    gd.flush(a["state"], made, 1, state_indices=a["counts"], backend="reference")
    return o


def decode_with_buffer(a):
    """Two steps, of which each sequence folds its row in one."""
    parts = gd.KVBuffer(a["u"], a["k"], a["log_decay"])
    call = a["tokens"] | dict(buffer=parts, buffer_lens=a["lens"], backend="reference")
    outputs = []
    for _ in range(2):
        outputs.append(gd.decode(**call, state=a["state"]))
        parts.advance(a["lens"], 3)
    return outputs


NORM = dict(
    tokens=tokens(), state=pool(), z=normed()["z"], weight=normed()["norm"].weight, **vars(buffer())
)
WHOLE = {
    # what is compiled, its tensors, those of them that it writes
    "prefill": (prefill, tokens() | dict(initial_state=pool(2), out=None), ()),
    "prefill into out": (
        prefill,
        tokens() | dict(initial_state=pool(2), out=torch.zeros(2, 3, 4, 6)),
        ("out",),
    ),
    "prefill in a pool": (
        pooled_prefill,
        tokens()
        | dict(
            state=pool(),
            state_indices=torch.tensor([4, -1]),
            has_initial_state=torch.tensor([True, False]),
        ),
        ("state",),
    ),
    "checkpoints": (
        pooled_prefill,
        tokens(2, 70) | dict(checkpoint_lens=LENS, checkpoints=torch.zeros(2, 2, 4, 6, 8)),
        ("checkpoints",),
    ),
    "checkpoints in slots": (
        pooled_prefill,
        tokens(2, 70)
        | dict(
            checkpoint_lens=LENS, state=pool(8), checkpoint_indices=torch.tensor([[7, 5], [-1, 4]])
        ),
        ("state",),
    ),
    "decode": (
        decode,
        tokens() | dict(state=pool(), intermediate_states=STEPS, state_indices=SLOTS),
        ("state", "intermediate_states"),
    ),
    "a null index and rows of intermediate states": (
        lambda a: gd.decode(**a, null_index=0, backend="reference") * 2,
        tokens()
        | dict(
            state=pool(),
            intermediate_states=STEPS[:1],
            intermediate_indices=ROWS,
            state_indices=torch.tensor([0, 2]),
        ),
        ("state", "intermediate_states"),
    ),
    "decode with a buffer": (
        decode_with_buffer,
        dict(vars(verified()), state=pool(), lens=torch.tensor([0, 1]), tokens=tokens(seed=7)),
        ("state", "u", "k", "log_decay", "lens"),
    ),
    "decode with a norm": (functools.partial(normed_call, "decode"), NORM, ("state",)),
    "verify with a norm": (functools.partial(normed_call, "verify"), NORM, ("u", "k", "log_decay")),
    "verify, then flush": (
        verify_then_flush,
        dict(vars(buffer()), state=pool(), counts=torch.tensor([1, 3]), tokens=tokens()),
        ("state", "u", "k", "log_decay"),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_compiles_whole(name):
    """To one graph with the results and writes of the eager call."""
    run, arguments, written = WHOLE[name]
    (eager, seen), (compiled, seen_compiled) = both_ways(run, arguments)
    same(eager, compiled)
    same(seen, seen_compiled)
    tensors = {
        key: (x.nan_to_num(9.0), seen_compiled[key])
        for key, x in arguments.items()
        if isinstance(x, torch.Tensor)
    }
    assert {
        key for key, (x, after) in tensors.items() if not torch.equal(x, after.nan_to_num(9.0))
    } == set(written)


def test_a_null_index_may_vary_in_a_compiled_graph():
    torch._dynamo.reset()
    step = torch.compile(
        lambda t, s, slots, null: gd.decode(
            **t, state=s, state_indices=slots, null_index=null, backend="reference"
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    slots = torch.tensor([1, 3])
    for null in (-1, 0, 1, 2):
        o = step(tokens(), pool(), slots, null)
        assert torch.equal(o.abs().amax((1, 2, 3)) > 0, slots > null)


def graphs(function, values):
    """Number of compilations of a function for these values; checks its results."""
    from torch._dynamo.testing import CompileCounterWithBackend  # slow: not at collection

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(function, fullgraph=True, backend=counter)
    for x in values:
        same(step(x), function(x))
    return counter.frame_count


def test_varying_numbers_do_not_recompile():
    """None needs another graph, and the first number may."""
    packed = tokens(1, 9) | dict(cu_seqlens=torch.tensor([0, 4, 9]))
    step = tokens() | dict(state=pool(), state_indices=torch.tensor([1, 3]), update_state=False)
    assert (
        graphs(
            lambda n: gd.prefill(**packed, max_seqlen=n, backend="reference")[0],
            (None, *range(2, 20)),
        )
        <= 3
    )
    assert graphs(lambda n: gd.decode(**step, null_index=n, backend="reference"), range(2, 20)) <= 2


def test_inductor_compiles_a_decode_step():
    torch._dynamo.reset()
    step = torch.compile(
        lambda t, s: gd.decode(**t, state=s, backend="reference").sum(-1), fullgraph=True
    )
    compiled, eager = pool(), pool()
    got = step(tokens(), compiled)
    torch.testing.assert_close(got, gd.decode(**tokens(), state=eager, backend="reference").sum(-1))
    assert torch.equal(compiled, eager)


def test_fake_tensors_run_nothing():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in call("decode").items()
        }
        o = gd.decode(**fake, backend="reference")
    assert o.shape == (2, 3, 4, 6)


TRACERS = {
    "make_fx": lambda f, *xs: make_fx(f)(*xs),
    "torch.jit.trace": lambda f, *xs: torch.jit.trace(f, xs),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", TRACERS)
def test_a_traced_call_is_right_for_other_slots(trace):
    given = tokens()

    def decode(state, slots):
        return gd.decode(**given, state=state, state_indices=slots, backend="reference")

    traced, others = TRACERS[trace](decode, pool(), torch.tensor([0, 1])), torch.tensor([4, 2])
    eager, state = pool(), pool()
    same(traced(state, others), decode(eager, others))
    same(state, eager)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_transforms_of_functions_are_refused(transform):
    given = call("decode")

    def summed(q):
        return gd.decode(**given | dict(q=q)).sum()

    with pytest.raises(gd.UnsupportedProblem, match="q has no memory of its own"):
        transform(summed)(given["q"][None] if transform is torch.func.vmap else given["q"])


@pytest.mark.parametrize("name", ["v", "state"])
def test_a_fake_tensor_beside_others_is_refused(name):
    given = call("decode")
    with pytest.raises(gd.UnsupportedProblem, match=f"{name} has no memory of its own"):
        gd.decode(**given | {name: FakeTensorMode().from_tensor(given[name])})


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "flush"])
def test_a_compiled_call_refuses_to_lose_a_gradient(op, compiler, fullgraph):
    """Of a value computed in the graph; with fullgraph dynamo wraps the error.

    PyTorch 2.11's dynamo then loses its text, and names the function that raised it.
    """
    torch._dynamo.reset()
    given = call(op)
    first, x = next(iter(given.items()))

    @torch.compile(backend=compiler, fullgraph=fullgraph)
    def step(weight):
        return getattr(gd, op)(**given | {first: x * weight})

    refused = f"{first} requires grad, .* no backward"
    error = Exception if fullgraph else gd.UnsupportedProblem
    wrapped = fullgraph and torch.__version__.startswith("2.11.")
    with pytest.raises(error, match="in refuse_grad" if wrapped else refused):
        step(torch.ones((), requires_grad=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_compile_where_no_gradient_is_asked_for(mode):
    torch._dynamo.reset()
    gate = gd.Gate.softplus(torch.nn.Parameter(torch.zeros(4)))

    def doubled(t):
        return gd.prefill(**t, gate=gate, backend="reference")[0] * 2

    with mode():
        same(
            torch.compile(doubled, backend="aot_eager", fullgraph=True)(tokens()), doubled(tokens())
        )
    inside = torch.compile(mode()(doubled), backend="aot_eager", fullgraph=True)
    same(inside(tokens()), mode()(doubled)(tokens()))


def test_explain_in_a_whole_graph_says_where_to_call_it():
    torch._dynamo.reset()
    given = call("decode")
    ask = torch.compile(lambda q: gd.explain("decode", **given | dict(q=q)).backend, fullgraph=True)
    with pytest.raises(Exception, match=r"explain .*: call it outside torch\.compile"):
        ask(given["q"])


def test_an_eager_call_is_a_row_of_the_profiler():
    given = call("decode")
    with torch.profiler.profile() as profile:
        gd.decode(**given)
    assert [row.count for row in profile.key_averages() if row.key == "gated_delta::decode"] == [1]


def test_explain_looks_through_subclasses():
    class Labelled(torch.Tensor):
        pass

    route = gd.explain(
        "decode", **tokens() | dict(q=tokens()["q"].as_subclass(Labelled)), state=pool()
    )
    assert (route.backend, route.problem.op) == ("reference", "decode")


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("prefill", dict(output_final_state=1)),
        ("prefill", tokens(1, 4) | dict(cu_seqlens=torch.tensor([0, 4]), max_seqlen=True)),
        ("decode", dict(qk_l2norm=1)),
        ("decode", dict(update_state=0)),
        ("decode", dict(scale=True)),
        ("verify", dict(null_index=True, state_indices=torch.tensor([3, 2]))),
        ("flush", dict(num_accepted=True, state_indices=torch.tensor([3, 2]))),
        (
            "prefill",
            tokens(1, 4) | dict(cu_seqlens=torch.tensor([0, 4]), max_seqlen=torch.tensor(4)),
        ),
        ("decode", dict(scale=torch.tensor(0.5))),
        ("decode", dict(null_index=torch.tensor(0), state_indices=torch.tensor([3, 2]))),
    ],
)
def test_graphs_distinguish_flags_numbers_and_tensors(op, wrong):
    """Otherwise the traced call would keep a tensor's present value."""
    torch._dynamo.reset()
    given, function = call(op) | wrong, getattr(gd, op)
    first = next(iter(given))
    traced = lambda **call: make_fx(lambda x: function(**call | {first: x}))(call[first])
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager"), traced):
        with pytest.raises(Exception, match="expected") as caught:
            run(**given)
        assert "TypeError" in f"{type(caught.value).__name__} {caught.value}"


def test_a_bad_call_raises_in_a_compiled_graph_too():
    torch._dynamo.reset()
    step = torch.compile(
        lambda t, s: gd.decode(**t, state=s, backend="reference"),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="state: expected shape"):
        step(tokens(), torch.zeros(5, 4, 8, 6))


def test_a_traced_advance_clamps_tokens():
    """A graph reads no values, as on a GPU without GATED_DELTA_CHECK; shapes are refused."""

    rows = buffer()

    def advance(lens, tokens):
        rows.advance(lens, tokens)
        return lens

    compiled = torch.compile(advance, backend="eager", fullgraph=True)
    for dtype in (torch.int32, torch.int64):
        lens = torch.tensor([0, 2, 1, ~1], dtype=dtype)
        compiled(lens, torch.tensor([-5, -(2**31), 2**31 - 1, -1]))
        assert lens.tolist() == [0, 2, 0, ~1]
        traced = make_fx(advance)(lens.clone(), torch.tensor([1, 1, 1, 1]))
        assert traced(lens, torch.tensor([1, 0, 1, 1])).tolist() == [1, 2, 1, 0]
    with pytest.raises(Exception, match=r"lens: expected shape \[N\]"):
        compiled(torch.tensor([[1], [2]]), 1)


@pytest.mark.parametrize("value", [False, True, 64])
def test_a_flag_or_an_int_reaches_the_operation_as_it_is(value, monkeypatch):
    """A bool in the schema would be True for 64, an int 1 for True."""
    seen, run = [], api.run
    monkeypatch.setattr(
        api, "run", lambda op, *rest: seen.append(op.arguments(*rest)) or run(op, *rest)
    )
    one = tokens()
    torch.compile(lambda: gd.prefill(**one, deterministic=value), backend="eager", fullgraph=True)()
    assert [(type(a.deterministic), a.deterministic) for a in seen] == [(type(value), value)]
