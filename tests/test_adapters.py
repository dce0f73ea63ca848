"""What every adapter of a peer's functions promises. Each module has its calls, what they copy, what is refused, the signatures."""

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
OURS = dict(
    a="g", b="beta", output="out", output_state="state", state_checkpoints="checkpoints", initial_state="state|intermediate_states", initial_state_source="state", num_accepted_tokens="num_accepted", accept_len="num_accepted",
    initial_state_indices="state_indices", ssm_state_indices="state_indices", output_state_indices="write_indices",
    intermediate_states_buffer="intermediate_states", d_buffer="buffer.u", k_buffer="buffer.k", g_buffer="buffer.log_decay",
)  # fmt: skip
"""Names of arguments as the operations' errors may have them."""


class Call(NamedTuple):
    """A valid call of an adapter. `fresh` makes its arguments, in memory of their own."""

    library: str
    label: str

    @property
    def name(self) -> str:
        return self.label.split(", ")[0]

    @property
    def function(self) -> Any:
        return getattr(MODULES[self.library][1], self.name)

    def fresh(self) -> dict[str, Any]:
        return MODULES[self.library][0].CALLS[self.label]()

    def run(self, **changes: Any) -> tuple[list[Tensor], dict[str, Any]]:
        """What it returns, and its arguments afterwards."""
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
    """The arguments that it writes, each of them given once."""
    before, (_, after) = call.fresh(), call.run()
    changed = [
        n
        for n, x in tensors_of(before).items()
        if not torch.equal(x.nan_to_num(), after[n].nan_to_num())
    ]
    return [n for n in changed if n not in given_twice(call)]


def given_twice(call: Call) -> list[str]:
    """Arguments that are one tensor: a pool to read and to write."""
    given = tensors_of(call.fresh())
    return [n for n, x in given.items() if sum(x is y for y in given.values()) > 1]


def rows_read(call: Call) -> str | None:
    """The argument that names the slot which each row of q starts from."""
    given = call.fresh()
    named = [
        n for n in ("initial_state_indices", "ssm_state_indices") if n in given and "q" in given
    ]
    return next(
        (n for n in named if given[n] is not None and given[n].shape == given["q"].shape[:1]), None
    )


CALLS = [Call(library, label) for library, (table, _) in MODULES.items() for label in table.CALLS]
FUNCTIONS = [
    Call(library, name) for library, (table, _) in MODULES.items() for name in table.SIGNATURES
]
TENSORS = [
    (call, name)
    for call in CALLS
    for name in tensors_of(call.fresh())
    if name not in given_twice(call)
]
WRITES = [call for call in CALLS if written(call)]


def once(pairs: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    """Each argument of each function in one call."""
    return list(
        {(call.library, call.name, argument): (call, argument) for call, argument in pairs}.values()
    )


INDICES = [
    (call, name) for call, name in once(TENSORS) if call.fresh()[name].dtype in (INT32, INT64)
]
SLOTS = [(call, name) for call, name in INDICES if name.endswith("_indices")]
READ = [(call, name) for call, name in TENSORS if name == rows_read(call)]


def least_and_most() -> list[Call]:
    """The calls of each function with the fewest and the most tensors."""
    found = {}
    for call in sorted(CALLS, key=lambda call: len(tensors_of(call.fresh()))):
        first, _ = found.setdefault((call.library, call.name), (call, call))
        found[call.library, call.name] = first, call
    return list(dict.fromkeys(call for pair in found.values() for call in pair))


def ids(value: Any) -> str:
    return (
        value.label
        if isinstance(value, Call)
        else "-".join(value)
        if isinstance(value, dict)
        else getattr(value, "__name__", str(value))
    )


calls = pytest.mark.parametrize("call", CALLS, ids=ids)
writes = pytest.mark.parametrize("call", WRITES, ids=ids)
some_calls = pytest.mark.parametrize("call", least_and_most(), ids=ids)


def over(pairs: list) -> Any:
    return pytest.mark.parametrize(("call", "name"), pairs, ids=ids)


# ------------------------------------------------------------------------------------------------ what is taken


@pytest.mark.parametrize("call", FUNCTIONS, ids=ids)
def test_the_signature_is_the_peers(call):
    bare = [
        p.replace(annotation=p.empty) for p in inspect.signature(call.function).parameters.values()
    ]
    assert (
        str(inspect.Signature(bare)).replace("'", "")[1:-1]
        == MODULES[call.library][0].SIGNATURES[call.name]
    )


@calls
def test_any_strides_but_the_last(call):
    """Of all tensors at once. Of what is written, nothing but the view given is."""
    want, whole = call.run()
    given = {
        name: x for name, x in tensors_of(call.fresh()).items() if name not in given_twice(call)
    }
    views = {name: padded(x) for name, x in given.items()}
    before = {name: storage.clone() for name, (_, storage) in views.items()}
    got, _ = call.run(**{name: view for name, (view, _) in views.items()})
    for x, y in (*((view, whole[name]) for name, (view, _) in views.items()), *zip(got, want)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, (view, storage) in views.items():
        view.copy_(given[name])
        assert torch.equal(storage, before[name]), name


@over(INDICES)
def test_indices_of_either_dtype(call, name):
    x = call.fresh()[name]
    got, want = call.run(**{name: x.to(INT32 if x.dtype == INT64 else INT64)}), call.run()
    assert equal(got[0], want[0])
    assert all(
        torch.equal(got[1][n].nan_to_num(), x.nan_to_num()) for n, x in tensors_of(want[1]).items()
    )


HINTS = [
    (Call(library, name), hint)
    for library, (table, _) in MODULES.items()
    for row in table.HINTS
    for name, hint in each(*row)
]


@pytest.mark.parametrize(("call", "hint"), HINTS, ids=ids)
def test_hints_change_nothing(call, hint):
    """What chooses between the peer's kernels, and what the call beside it makes unread."""
    assert equal(call.run(**hint)[0], call.run()[0])


@over([(call, name) for call, name in TENSORS if name in ("out", "output")])
def test_an_output_given_is_returned_and_holds_what_a_new_one_would(call, name):
    got, arguments = call.run()
    assert got[0] is arguments[name]
    assert torch.equal(got[0], call.run(**{name: None})[0][0].to(got[0].dtype))


@writes
def test_what_is_written_may_be_made_under_inference_mode_and_written_there(call):
    for name in written(call):
        with torch.inference_mode():
            made = call.fresh()[name].clone()
        with unwritten({name: made}):
            refused(
                call.function, call.fresh() | {name: made}, ValueError, r"\w+: .*inference_mode"
            )
        with torch.inference_mode():
            got, want = call.run(**{name: made})[1], call.run()[1]
            assert torch.equal(got[name].nan_to_num(), want[name].nan_to_num())


@some_calls
def test_inputs_that_require_grad_are_fine_without_grad_mode(call):
    want, _ = call.run()
    changed = written(call)
    more = {
        n: x.requires_grad_()
        for n, x in tensors_of(call.fresh()).items()
        if x.is_floating_point() and n not in changed
    }
    with torch.no_grad():
        got, _ = call.run(**more)
    assert equal(got, want)
    assert not got[0].requires_grad


@some_calls
def test_compiles_without_a_graph_break(call):
    torch._dynamo.reset()  # a function has more calls here than it may have graphs
    want, after = call.run()
    arguments = call.fresh()
    got = results(torch.compile(call.function, fullgraph=True, backend="eager")(**arguments))
    assert equal(got, want)
    assert equal(list(tensors_of(arguments).values()), list(tensors_of(after).values()))


@some_calls
def test_fake_tensors_have_no_memory_to_compare(call):
    arguments = call.fresh()
    with FakeTensorMode() as mode:
        fake = {
            n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()
        }
        got = results(call.function(**fake))
    assert [x.shape for x in got] == [x.shape for x in call.run()[0]]


@calls
def test_nothing_is_copied_on_the_way_to_an_operation_but(call, monkeypatch):
    """States, buffers and the gate's parameters: what is copied is in the adapter's table."""
    passed, adapter = set(), MODULES[call.library][1]

    def note(x: object) -> None:
        if isinstance(x, Tensor):
            passed.add(x.data_ptr())
        elif isinstance(x, (Gate, KVBuffer)):
            for part in vars(x).values():
                note(part)

    for operation in ("prefill", "decode", "verify", "flush"):
        if (original := getattr(adapter, operation, None)) is not None:

            def noting(*args, original=original, **kwargs):
                for x in (*args, *kwargs.values()):
                    note(x)
                return original(*args, **kwargs)

            monkeypatch.setattr(adapter, operation, noting)
    _, arguments = call.run()
    copied = {
        n
        for n, x in tensors_of(arguments).items()
        if x.is_floating_point() and x.data_ptr() not in passed
    }
    assert copied == MODULES[call.library][0].COPIED.get(call.label, set())


@over(READ)
def test_a_negative_index_is_an_inactive_sequence(call, name):
    """Zero outputs, nothing written, whatever its tokens hold."""
    before, (want, after), arguments = call.fresh(), call.run(), call.fresh()
    arguments[name][1] = -1
    for x in tensors_of(arguments).values():
        if (
            x.is_floating_point()
            and len(x) == len(before["q"])
            and x.ndim > 2
            and x.shape[:2] == before["q"].shape[:2]
        ):
            x[1] = NAN if (x != UNTOUCHED).any() else x[1]
    got = results(call.function(**arguments))
    assert (got[0][1] == 0).all()
    assert equal([got[0][::2]], [want[0][::2]])
    for n in written(call):
        other = [i for i, (x, y) in enumerate(zip(arguments[n], after[n])) if not torch.equal(x, y)]
        assert 0 < len(other) <= before["q"].shape[1], n
        assert all(
            torch.equal(
                arguments[n][i], 0 * before[n][i] if n in ("out", "output") else before[n][i]
            )
            for i in other
        ), n


# ------------------------------------------------------------------------------------------------ what is refused

BENDS = {
    "nothing": (lambda x: None, TypeError, "{}: "),
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


def may_be_none(call: Call, name: str) -> bool:
    parameter = inspect.signature(call.function).parameters[name]
    return parameter.default is None or "None" in parameter.annotation or name == "dt_bias"


def bent() -> list[tuple[Call, str, str]]:
    """Every argument of a library with every bend, by turns in the calls that have it."""
    having: dict[tuple[str, str], list[Call]] = {}
    for call, name in TENSORS:
        having.setdefault((call.library, name), []).append(call)
    cases = []
    for (_, name), found in having.items():
        for turn, bend in enumerate(BENDS):
            able = [call for call in found if bend != "nothing" or not may_be_none(call, name)]
            if able and (bend != "requires grad" or able[0].fresh()[name].is_floating_point()):
                cases.append((able[turn * len(able) // len(BENDS)], name, bend))
    return cases


@pytest.mark.parametrize(("call", "name", "bend"), bent(), ids=ids)
def test_a_tensor_that_is_not_what_it_should_be(call, name, bend):
    """The error names it, as the peer or as the operation does, and nothing was written."""
    arguments, (change, kind, words) = call.fresh(), BENDS[bend]
    names = "|".join({name, OURS.get(name, name)})
    refused(
        call.function,
        arguments | {name: change(arguments[name])},
        kind,
        "^" + words.replace("{}", f"({names})"),
    )


REFUSED = [
    (Call(library, row[0]), *row[1:])
    for library, (table, _) in MODULES.items()
    for row in refusals(table.REFUSED)
]


@pytest.mark.parametrize(("call", "changes", "kind", "words"), REFUSED, ids=ids)
def test_refused(call, changes, kind, words):
    refused(call.function, MODULES[call.library][0].valid(call.name) | changes, kind, words)


@over(SLOTS)
def test_an_index_past_the_pool_writes_nothing(call, name):
    arguments = call.fresh()
    arguments[name].view(-1)[-1] = 99
    refused(call.function, arguments, IndexError, "indices")


COPIED_FIRST = {
    "gated_delta_rule_mtp, a slot each token": ("initial_state_indices", "ssm_state_indices"),
    "recurrent_kda, drafts": ("A_log", "dt_bias"),
}
"""Small tensors that are copied before decode gets the call: what shares their memory is not seen."""


@pytest.mark.parametrize(
    ("call", "target"), [(call, target) for call in WRITES for target in written(call)], ids=ids
)
def test_memory_that_is_written_and_used_otherwise_is_refused(call, target):
    for name in [name for other, name in TENSORS if other == call]:
        if name in (target, *COPIED_FIRST.get(call.label, ())):
            continue
        arguments = call.fresh()
        memory = torch.zeros(
            sum(arguments[n].nbytes for n in (target, name)) + 16, dtype=torch.uint8
        )
        for part, start in ((target, 0), (name, 16)):
            x = arguments[part]
            arguments[part] = memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        refused(call.function, arguments, ValueError, r"^[\w.]+: expected memory apart from")


@writes
def test_what_is_written_has_memory_of_its_own(call):
    for name in written(call):
        x = call.fresh()[name]
        shared = x.narrow(1 if len(x) == 1 else 0, 0, 1).expand_as(x)
        refused(
            call.function,
            call.fresh() | {name: shared},
            ValueError,
            r"^[\w.]+: expected memory of its own",
        )
        x.untyped_storage().resize_(0)
        with pytest.raises(
            (ValueError, RuntimeError), match=r"expected a tensor with data|storage of size 0"
        ):  # torch's, of a view
            call.function(**call.fresh() | {name: x})
