"""Promises common to all adapters of a peer's functions.

tests/tables has each peer's calls, the tensors they copy, the refused arguments, the signatures.
"""

import functools
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from adapters import (
    INT32,
    INT64,
    NAN,
    UNTOUCHED,
    each,
    label,
    padded,
    refusals,
    refused,
    tensors_of,
    unwritten,
)
from gated_delta import Gate, KVBuffer, UnsupportedProblem
from gated_delta.integrations import cula, fla, flashinfer
from tables import cula as cula_calls
from tables import fla as fla_calls
from tables import flashinfer as flashinfer_calls

MODULES = {
    "FLA": (fla_calls, fla),
    "FlashInfer": (flashinfer_calls, flashinfer),
    "cuLA": (cula_calls, cula),
}


class Call(NamedTuple):
    """A valid call of an adapter."""

    library: str
    label: str

    @property
    def name(self) -> str:
        return self.label.split(", ")[0]

    @property
    def function(self) -> Any:
        return getattr(MODULES[self.library][1], self.name)

    def fresh(self) -> dict[str, Any]:
        """New arguments, in their own memory."""
        return MODULES[self.library][0].CALLS[self.label]()

    def run(self, **changes: Any) -> tuple[list[Tensor], dict[str, Any]]:
        """The results, and the arguments after the call."""
        arguments = self.fresh() | changes
        return results(self.function(**arguments)), arguments


def results(returned: Any) -> list[Tensor]:
    return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(got, want)
    )


@functools.cache
def written(call: Call) -> list[str]:
    """The arguments that the call writes, except a tensor passed twice."""
    before, (_, after) = call.fresh(), call.run()
    return [
        name
        for name, x in tensors_of(before).items()
        if not equal([x], [after[name]]) and name not in passed_twice(call)
    ]


@functools.cache
def passed_twice(call: Call) -> list[str]:
    """Arguments that are one tensor: a pool to read and to write."""
    tensors = tensors_of(call.fresh())
    return [n for n, x in tensors.items() if sum(x is y for y in tensors.values()) > 1]


def slots_read(call: Call) -> str | None:
    """The argument that names the slot of each row of q."""
    arguments = call.fresh()
    for name in ("initial_state_indices", "ssm_state_indices"):
        x = arguments.get(name)
        if x is not None and "q" in arguments and x.shape == arguments["q"].shape[:1]:
            return name
    return None


CALLS = [Call(library, label) for library, (table, _) in MODULES.items() for label in table.CALLS]
TENSORS = [
    (call, name)
    for call in CALLS
    for name in tensors_of(call.fresh())
    if name not in passed_twice(call)
]
WRITES = [(call, name) for call in CALLS for name in written(call)]


def once(pairs: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    """Each argument of each function in one call."""
    return list({(call.library, call.name, name): (call, name) for call, name in pairs}.values())


def calls_of(pairs: list[tuple[Call, str]]) -> list[Call]:
    return list(dict.fromkeys(call for call, _ in pairs))


INDICES = once([(call, x) for call, x in TENSORS if call.fresh()[x].dtype in (INT32, INT64)])
SLOTS = [(call, name) for call, name in INDICES if name.endswith("_indices")]
READ = [(call, name) for call, name in TENSORS if name == slots_read(call)]


def fewest_and_most() -> list[tuple[Call, Call]]:
    """The calls of each function with the fewest and the most tensors."""
    pairs: dict[tuple[str, str], tuple[Call, Call]] = {}
    for call in sorted(CALLS, key=lambda call: len(tensors_of(call.fresh()))):
        key = call.library, call.name
        pairs[key] = pairs.get(key, (call, call))[0], call
    return list(pairs.values())


MOST = [most for _, most in fewest_and_most()]
FEWEST_AND_MOST = list(dict.fromkeys(call for pair in fewest_and_most() for call in pair))


def ids(value: Any) -> str:
    if isinstance(value, Call):
        return value.label
    return label("", value) if isinstance(value, dict) else getattr(value, "__name__", str(value))


def over_calls(calls: list[Call]) -> Any:
    return pytest.mark.parametrize("call", calls, ids=ids)


def over(pairs: list[tuple[Call, str]]) -> Any:
    return pytest.mark.parametrize(("call", "name"), pairs, ids=ids)


over_libraries = pytest.mark.parametrize("library", MODULES)


# -------------------------------------------------------------------------------------- accepted


@over_libraries
def test_signatures_are_the_peers(library):
    table, adapter = MODULES[library]
    for name, want in table.SIGNATURES.items():
        parameters = inspect.signature(getattr(adapter, name)).parameters.values()
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        assert str(bare).replace("'", "")[1:-1] == want, name


@over_calls(CALLS)
def test_any_strides_but_the_last(call):
    """Of all tensors at once. Of written tensors, only the view passed in changes."""
    want, whole = call.run()
    tensors = {n: x for n, x in tensors_of(call.fresh()).items() if n not in passed_twice(call)}
    views = {name: padded(x) for name, x in tensors.items()}
    before = {name: storage.clone() for name, (_, storage) in views.items()}
    got, _ = call.run(**{name: view for name, (view, _) in views.items()})
    for x, y in (*((view, whole[name]) for name, (view, _) in views.items()), *zip(got, want)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, (view, storage) in views.items():
        view.copy_(tensors[name])
        assert torch.equal(storage, before[name]), name


@over_calls(calls_of(INDICES))
def test_indices_of_either_dtype(call):
    want, whole = call.run()
    for name in [name for other, name in INDICES if other == call]:
        x = call.fresh()[name]
        got, after = call.run(**{name: x.to(INT32 if x.dtype == INT64 else INT64)})
        assert equal(got, want), name
        for other, y in tensors_of(whole).items():
            assert torch.equal(after[other].nan_to_num(), y.nan_to_num()), (name, other)


HINTS = [
    (library, functions, hint)
    for library, (table, _) in MODULES.items()
    for functions, hint in table.HINTS
]


@pytest.mark.parametrize(("library", "functions", "hint"), HINTS, ids=ids)
def test_hints_change_nothing(library, functions, hint):
    """They choose between the peer's kernels, or another argument of the call makes them unread."""
    for name, changes in each(functions, hint):
        call = Call(library, name)
        assert equal(call.run(**changes)[0], call.run()[0]), name


@over(once([(call, name) for call, name in TENSORS if name in ("out", "output")]))
def test_an_output_passed_in_is_returned(call, name):
    got, arguments = call.run()
    assert got[0] is arguments[name]
    assert torch.equal(got[0], call.run(**{name: None})[0][0].to(got[0].dtype))


@over(once(WRITES))
def test_inference_tensors_are_written_under_inference_mode(call, name):
    with torch.inference_mode():
        tensor = call.fresh()[name].clone()
    with unwritten({name: tensor}):
        arguments = call.fresh() | {name: tensor}
        refused(call.function, arguments, ValueError, r"\w+: .*inference_mode")
    with torch.inference_mode():
        got, want = call.run(**{name: tensor})[1], call.run()[1]
        assert torch.equal(got[name].nan_to_num(), want[name].nan_to_num())


@over_calls(MOST)
def test_inputs_that_require_grad_run_without_grad_mode(call):
    want, _ = call.run()
    inputs = {
        name: x.requires_grad_()
        for name, x in tensors_of(call.fresh()).items()
        if x.is_floating_point() and name not in written(call)
    }
    with torch.no_grad():
        got, _ = call.run(**inputs)
    assert equal(got, want)
    assert not got[0].requires_grad


@over_calls(FEWEST_AND_MOST)
def test_compiles_without_a_graph_break(call):
    torch._dynamo.reset()  # there are more calls of a function than it may have graphs
    want, after = call.run()
    arguments = call.fresh()
    got = results(torch.compile(call.function, fullgraph=True, backend="eager")(**arguments))
    assert equal(got, want)
    assert equal(list(tensors_of(arguments).values()), list(tensors_of(after).values()))


@over_calls(MOST)
def test_fake_tensors_have_no_memory_to_compare(call):
    arguments = call.fresh()
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(x) if isinstance(x, Tensor) else x
            for name, x in arguments.items()
        }
        got = results(call.function(**fake))
    assert [x.shape for x in got] == [x.shape for x in call.run()[0]]


def copied(call: Call, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The float tensors that no operation gets in place: states, buffers and gates included."""
    passed, adapter = set(), MODULES[call.library][1]

    def note(x: object) -> None:
        if isinstance(x, Tensor):
            passed.add(x.data_ptr())
        elif isinstance(x, (Gate, KVBuffer)):
            for part in vars(x).values():
                note(part)

    with monkeypatch.context() as patch:
        for operation in ("prefill", "decode", "verify", "flush"):
            if (original := getattr(adapter, operation, None)) is not None:

                def noting(*args, original=original, **kwargs):
                    for x in (*args, *kwargs.values()):
                        note(x)
                    return original(*args, **kwargs)

                patch.setattr(adapter, operation, noting)
        _, arguments = call.run()
    return {
        name
        for name, x in tensors_of(arguments).items()
        if x.is_floating_point() and x.data_ptr() not in passed
    }


@over_libraries
def test_only_the_tensors_of_the_table_are_copied(library, monkeypatch):
    calls = [call for call in CALLS if call.library == library]
    names = {call.label: copied(call, monkeypatch) for call in calls}
    assert {label: x for label, x in names.items() if x} == MODULES[library][0].COPIED


@over(READ)
def test_a_negative_index_is_an_inactive_sequence(call, name):
    """Zero outputs, nothing written, whatever values its tokens have."""
    before, (want, after), arguments = call.fresh(), call.run(), call.fresh()
    arguments[name][1] = -1
    tokens = before["q"].shape[:2]
    for x in tensors_of(arguments).values():
        if x.is_floating_point() and x.ndim > 2 and x.shape[:2] == tokens:
            x[1] = NAN if (x != UNTOUCHED).any() else x[1]
    got = results(call.function(**arguments))
    assert (got[0][1] == 0).all()
    assert equal([got[0][::2]], [want[0][::2]])
    for target in written(call):
        x, y = arguments[target], after[target]
        rows = [i for i in range(len(x)) if not torch.equal(x[i], y[i])]
        assert 0 < len(rows) <= tokens[1], target
        for i in rows:
            old = before[target][i]
            assert torch.equal(x[i], 0 * old if target in ("out", "output") else old), target


# --------------------------------------------------------------------------------------- refused

KINDS = dict(
    tokens=("q", "k", "v"),
    gate=("g", "beta", "a", "b", "A_log", "dt_bias"),
    state=(
        "state",
        "initial_state",
        "initial_state_source",
        "output_state",
        "final_state",
        "intermediate_states_buffer",
        "state_checkpoints",
    ),
    index=(
        "state_indices",
        "initial_state_indices",
        "ssm_state_indices",
        "output_state_indices",
        "num_accepted_tokens",
        "accept_len",
        "checkpoint_cu_starts",
    ),
    bounds=("cu_seqlens", "cu_seqlens_cpu"),
    output=("out", "output"),
    buffer=("d_buffer", "k_buffer", "g_buffer"),
)
"""Tensor arguments, by their use in an adapter."""
BENDS = {
    "none": (lambda x: None, TypeError, "{}: "),
    "no tensor": (lambda x: [0.0], TypeError, "{}: "),
    "integers": (
        lambda x: x.long() if x.is_floating_point() else x.double(),
        (TypeError, ValueError),
        "{}: .*(dtype|floating)",
    ),
    "another dimension": (
        lambda x: torch.stack([x, x]),
        (ValueError, UnsupportedProblem),
        r"({}: |gated_delta .*\n.*\({} )",
    ),
    "another size": (
        lambda x: torch.cat([x, x[..., :1]], -1),
        (ValueError, IndexError),
        r"[\w., ]+: ",
    ),
    "no data": (lambda x: x.to("meta"), ValueError, ".*device"),
    "requires grad": (
        lambda x: x.requires_grad_(),
        UnsupportedProblem,
        "{} requires grad, and gated_delta has no backward",
    ),
}
OURS = dict(
    a="g",
    b="beta",
    output="out",
    output_state="state",
    state_checkpoints="checkpoints",
    initial_state="state|intermediate_states",
    initial_state_source="state",
    num_accepted_tokens="num_accepted",
    accept_len="num_accepted",
    initial_state_indices="state_indices",
    ssm_state_indices="state_indices",
    output_state_indices="write_indices",
    intermediate_states_buffer="intermediate_states",
    d_buffer="buffer.u",
    k_buffer="buffer.k",
    g_buffer="buffer.log_decay",
)
"""Names of arguments in the operations' errors."""


def applies(bend: str, call: Call, name: str) -> bool:
    if bend == "requires grad":
        return call.fresh()[name].is_floating_point()
    parameter = inspect.signature(call.function).parameters[name]
    optional = parameter.default is None or "None" in parameter.annotation or name == "dt_bias"
    return bend != "none" or not optional


def bent() -> list[tuple[Call, str, str]]:
    """One tensor of each kind and library for each bend. Names and calls take turns."""
    cases = []
    for library in MODULES:
        for names in KINDS.values():
            for turn, bend in enumerate(BENDS):
                pairs = [
                    (call, name)
                    for call, name in TENSORS
                    if call.library == library and name in names and applies(bend, call, name)
                ]
                if pairs:
                    able = list(dict.fromkeys(name for _, name in pairs))
                    name = able[turn % len(able)]
                    calls = [call for call, other in pairs if other == name]
                    cases.append((calls[turn * len(calls) // len(BENDS)], name, bend))
    return cases


def test_every_tensor_argument_has_a_kind():
    names = [name for kind in KINDS.values() for name in kind]
    assert sorted(names) == sorted({name for _, name in TENSORS})


@pytest.mark.parametrize(("call", "name", "bend"), bent(), ids=ids)
def test_a_bent_tensor_is_refused(call, name, bend):
    """The error has the peer's or the operation's name of it, and nothing is written."""
    arguments, (change, kind, words) = call.fresh(), BENDS[bend]
    names = "|".join({name, OURS.get(name, name)})
    arguments |= {name: change(arguments[name])}
    refused(call.function, arguments, kind, "^" + words.replace("{}", f"({names})"))


def refusals_of_functions() -> list[tuple[Call, type[Exception], list]]:
    """The rows of REFUSED, by function and error."""
    rows: dict[tuple[Call, type[Exception]], list] = {}
    for library, (table, _) in MODULES.items():
        for name, changes, kind, words in refusals(table.REFUSED):
            rows.setdefault((Call(library, name), kind), []).append((changes, words))
    return [(*key, cases) for key, cases in rows.items()]


@pytest.mark.parametrize(
    ("call", "kind", "cases"),
    [pytest.param(*row, id=f"{ids(row[0])}-{ids(row[1])}") for row in refusals_of_functions()],
)
def test_refused(call, kind, cases):
    table = MODULES[call.library][0]
    for changes, words in cases:
        print(label(call.name, changes), words)  # a failure shows the last row
        refused(call.function, table.valid(call.name) | changes, kind, words)


@over(SLOTS)
def test_an_index_past_the_pool_writes_nothing(call, name):
    arguments = call.fresh()
    arguments[name].view(-1)[-1] = 99
    refused(call.function, arguments, IndexError, "indices")


COPIED_FIRST = {
    "gated_delta_rule_mtp, a slot each token": ("initial_state_indices", "ssm_state_indices"),
    "recurrent_kda, drafts": ("A_log", "dt_bias"),
}
"""Small tensors that the adapter copies before it calls decode: shared memory goes unnoticed."""


@over_calls(calls_of(WRITES))
def test_written_memory_in_two_arguments_is_refused(call):
    names = [name for other, name in TENSORS if other == call]
    pairs = [
        (target, name)
        for target in written(call)
        for name in names
        if name not in (target, *COPIED_FIRST.get(call.label, ()))
    ]
    assert pairs
    for pair in pairs:
        arguments = call.fresh()
        size = sum(arguments[name].nbytes for name in pair) + 16
        memory = torch.zeros(size, dtype=torch.uint8)
        for name, start in zip(pair, (0, 16)):
            x = arguments[name]
            view = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            arguments[name] = view.copy_(x)
        refused(call.function, arguments, ValueError, r"^[\w.]+: expected memory apart from")


@over(once(WRITES))
def test_a_written_tensor_needs_its_own_memory(call, name):
    """No two elements may share memory, and a freed storage is refused."""
    x = call.fresh()[name]
    shared = x.narrow(1 if len(x) == 1 else 0, 0, 1).expand_as(x)
    arguments = call.fresh() | {name: shared}
    refused(call.function, arguments, ValueError, r"^[\w.]+: expected memory of its own")
    x.untyped_storage().resize_(0)
    # The second message is torch's, for a view.
    message = r"expected a tensor with data|storage of size 0"
    with pytest.raises((ValueError, RuntimeError), match=message):
        call.function(**call.fresh() | {name: x})
