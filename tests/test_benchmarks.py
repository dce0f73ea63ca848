"""benchmarks/ without a GPU: cells, peers, judging, records, plots, the command.

Our kernels are the reference backend; times are invented.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.__main__ as command
import gated_delta as gd
from benchmark_runs import CPU, STAND_INS, fake_runner, small
from benchmarks import cells, measure, peers, plot, record
from benchmarks.cells import BF16, CELLS, FP32, Pooled, decode, prefill, speculation
from benchmarks.measure import Runner
from benchmarks.peers import NotOffered, Peer
from gated_delta import compile, reference
from gated_delta.dispatch import schedule_of
from gated_delta.integrations import fla, flashinfer
from stand_ins import modules as stand_in

ROOT = Path(__file__).parents[1]
COMMIT = STAND_INS / Path(peers.COMMIT[1]).name
GDN, KDA = ("gdn", (1, 2)), ("kda", (2, 2))
DECODES = [
    decode(*GDN, BF16, 1, 3),
    decode(*KDA, BF16, 4, 2),
    decode(*GDN, FP32, 1, 2),
    decode(*KDA, BF16, 1, 2),
]
CHAINS = [
    speculation(*some)
    for some in ((*KDA, FP32, 3, 3), (*GDN, BF16, 2, 2), (*KDA, BF16, 4, 3), (*GDN, FP32, 3, 3))
]
ALONE = [speculation("kda", (2, 2), FP32, 3, 5, op) for op in ("verify", "all", "random")]
SLOW, FAST = ("slow", "3 tiny", (70, 1, 9)), ("fast", "1 tiny", (66,))
PREFILLS = [
    prefill(*some)
    for some in ((*KDA, *SLOW), ("kda", (1, 2), *FAST), (*GDN, *SLOW), ("gdn", (2, 2), *FAST))
]


def named(x):
    return getattr(x, "label", x)


def each(some):
    return pytest.mark.parametrize("cell", some, ids=named)


def other(b, **tensors):
    return type(b)(**{**vars(b), **tensors})


def ours(cell, b):
    """A peer that makes our call, with a second output."""
    return b.ours("reference")


@pytest.fixture
def runner(monkeypatch):
    return fake_runner(monkeypatch)


# ------------------------------------------------------------------------------------- the tables


def test_rotations_are_cold_and_fit():
    for cell in [*itertools.chain(*cells.TABLES.values()), *cells.PREFILL_TP, *cells.BUFFERED]:
        states = cells.state_bytes(cell.heads, cell.state_dtype, cell.sequences) * cell.facts.get(
            "layers", 1
        )
        held = cell.sets * (states if cell in cells.SPECULATE else cell.bytes)
        assert held >= 400e6 or cell.sets in (48, 160), cell.label
        assert held > (2 if cell in cells.SPECULATE else 1) * 60e6  # an L2
        assert cell.sets >= 2 or held > 6e8, cell.label
        assert 2 * held <= 40e9, cell.label
    assert decode("gdn", (16, 64), FP32, 1, 4096).sets == 1  # memory limits the sets


@pytest.mark.parametrize("op", ["decode", "speculate"])
def test_checks_have_the_cells_schedule_on_few_sequences(op):
    for cell in CELLS[op].values():
        for case in cell.cases(cell):
            layers, launched = (
                (3, 48) if case.layout == "layers" else (1, 1)
            )  # the case list's layers
            schedule = schedule_of(case.problem, launched * cell.sequences)
            assert schedule_of(case.problem, layers * len(case.lengths)) == schedule, cell.label
            assert len(case.lengths) <= 64
            gate = {"gdn": "softplus", "kda": "lower_bound"}[cell.model]
            assert (case.heads, case.gate) == (cell.heads, gate)
            assert case.problem.T in (
                (cell.T, 2 * cell.T) if op == "speculate" else (cell.T,)
            )  # 2 T: two rounds at once
            assert case.problem.state_dtype == cell.state_dtype
    kinds = [
        [(case.op, case.layout) for case in cell.cases(cell)]
        for cell in (*DECODES[:2], CHAINS[0], *ALONE[:2])
    ]
    assert kinds[:2] == [[("decode", "pool")], [("decode", "intermediates"), ("decode", "frozen")]]
    assert kinds[2:] == [
        [("verify", "pool"), ("flush", "pool")] * 2,
        [("verify", "pool")],
        [("flush", "layers")],
    ]


@each(PREFILLS)
def test_checks_of_prefill_are_small_and_pass(monkeypatch, runner, cell):
    cases = cell.cases(cell)
    assert {(case.heads, case.family, case.dtype, case.state_dtype) for case in cases} == {
        (cell.heads, "typical" if cell.facts["gates"] == "fast" else "slow", BF16, FP32)
    }
    assert max(sum(case.lengths) for case in cases) < 600
    monkeypatch.setattr(cells, "CHECKED", ((40, 1, 3), (70,)))
    assert runner().check(cell) == []


def test_shapes_match_their_names():
    assert len(cells.SHAPES) == 6 + 2 + 3 * 2 * 2
    for name, lengths in cells.SHAPES.items():
        n, total = int(re.split("[x-]", name)[0]), int(re.split("[x-]", name)[-1])
        assert (
            lengths == (total,) * n if "x" in name else (len(lengths), sum(lengths)) == (n, total)
        )
    assert cells.SHAPES["10-uniform-4096"] == (409,) * 9 + (415,)
    assert cells.SHAPES["20-skewed-8192"] == (215,) * 10 + (4107,) + (215,) * 9
    assert max(cells.scattered(10, 4096)) > 2 * 409 > 409 > 2 * min(cells.scattered(10, 4096))
    assert cells.scattered(5, 5) == (1,) * 5


def test_tensor_parallel_heads_have_all_gates_and_shapes():
    table = command.TABLES["prefill_tp"]
    series = {
        name: len(members)
        for name, members in record.grouped(map(measure.facts, table.values()), "series").items()
    }
    heads = [f"KDA {H}/{H}" for H in (96, 64, 48, 32, 24, 16, 12, 8)]
    gdn = {16: (64, 48, 32), 8: (32, 24, 16), 4: (16, 12, 8), 2: (8, 6, 4)}
    heads += [f"GDN {H}/{HV}" for H, groups in gdn.items() for HV in groups]
    assert series == {
        f"{x} {gates}": len(cells.SHAPES) for x in heads for gates in ("fast", "slow")
    }
    assert len(table) == len(cells.PREFILL_TP)  # a label names one cell
    assert command.KNOWN["prefill_tp"] is peers.PEERS["prefill"]
    assert "KDA 96/96 fast 1x512" not in CELLS["prefill"]  # `measure prefill` leaves them out


# ---------------------------------------------------------------------------------------- tensors


@each(DECODES)
def test_pools_are_valid_arguments_in_scattered_slots(cell):
    b, other = cell.make(cell, CPU, 0), cell.make(cell, CPU, 1)
    assert sorted(b.state_indices.tolist()) == list(range(1, cell.sequences + 1))
    assert (b.state_indices.dtype, b.state.shape[0]) == (torch.int32, cell.sequences + 1)
    assert not torch.equal(b.q, other.q)
    before = b.state.clone()
    o, states = b.results(ours(cell, b))
    assert torch.equal(b.state, before)
    assert bool(o.isfinite().all())
    assert states.shape == (b.state[1:].shape if cell.T == 1 else b.intermediate_states.shape)
    assert not torch.equal(
        states, before[b.state_indices.long()] if cell.T == 1 else torch.zeros_like(states)
    )


@each(PREFILLS)
def test_prompts_are_packed_and_one_in_ten_gates_may_be_slow(cell):
    b, again, other = cell.make(cell, CPU, 0), cell.make(cell, CPU, 0), cell.make(cell, CPU, 1)
    assert b.cu_seqlens.tolist() == [0, *itertools.accumulate(cell.lengths)]
    assert b.cu_seqlens is other.cu_seqlens  # some peers know it again by that
    assert b.ours("reference").keywords["max_seqlen"] == max(cell.lengths)
    assert torch.equal(b.q, again.q)
    assert not torch.equal(b.q, other.q)
    assert b.initial_state.std() == pytest.approx(0.05, rel=0.05)
    shifted = (b.gate.dt_bias.view(-1) < -5).nonzero().flatten().tolist()
    assert shifted == (
        list(range(0, b.gate.dt_bias.numel(), 10)) if cell.facts["gates"] == "slow" else []
    )
    before = b.initial_state.clone()
    o, states = b.results(ours(cell, b))
    assert torch.equal(b.initial_state, before)
    assert (o.shape, states.shape) == (b.v.shape, before.shape)


@each(CHAINS)
def test_one_to_all_drafts_are_accepted_and_states_stay_bounded(cell):
    many = [cell.make(cell, CPU, seed).num_accepted for seed in range(20)]
    assert {x for m in many for x in m.tolist()} == set(range(1, cell.T + 1))
    assert {
        x for s in range(20) for x in cells.counts(0, cell.T, cell.sequences, s).tolist()
    } == set(range(cell.T + 1))
    assert all(cells.counts(0, cell.T, cell.sequences, s).any() for s in range(20))
    b = cell.make(cell, CPU, 0)
    assert bool(b.buffer.u.isnan().all())
    call, before = ours(cell, b), b.state.float().norm()
    for _ in range(40):
        o, states = call()
    assert states is b.state
    assert bool(o.isfinite().all())
    assert b.state.float().norm() < 2 * before


@pytest.mark.parametrize("op", ["all", "random"])
def test_a_flush_of_layers_changes_states_with_accepted_drafts(monkeypatch, op):
    monkeypatch.setattr(cells, "FLUSHED", 2)
    cell = speculation("gdn", (1, 2), FP32, 3, 5, op)
    flush = cell.make(cell, CPU, 0).ours("reference")
    state, slots, m = (flush.keywords[name] for name in ("state", "state_indices", "num_accepted"))
    before = state.clone()
    flush()
    touched = (state != before).flatten(2).any(2)
    assert touched[:, slots.long()].tolist() == [(m > 0).tolist()] * 2
    assert cell.bytes == 2 * 2 * 128 * 128 * 4 * int(touched.sum())
    assert bool((m < 3).any()) == (op == "random")
    for _ in range(30):
        flush()
    assert state.float().norm() < 4 * before.float().norm()


# ----------------------------------------------------------------------------- ours and the peers


def test_a_right_kernel_passes_and_a_wrong_one_is_named(monkeypatch, runner):
    assert runner().check(DECODES[0]) == []
    right = reference.decode
    monkeypatch.setattr(
        reference,
        "decode",
        lambda tokens, **states: right(tokens._replace(beta_logits=False), **states),
    )
    assert any("o: error" in line for line in runner().check(DECODES[0]))
    monkeypatch.setattr(Runner, "backend", "cute")
    lines = runner().check(DECODES[1])
    assert len(lines) == 2
    assert "tensors on a CUDA device" in lines[0]


@each([*DECODES, *PREFILLS])
def test_every_peer_that_agrees_is_timed(runner, cell):
    run = runner(
        {"twin": ours, "other": ours, "other raw": ours}, twin=6.0, other=5.0, **{"other raw": 9.0}
    )
    results = run.measure(small(cell), host=True)
    assert (results["us"], results["copy_us"], results["eager_us"], results["best_peer"]) == (
        4.0,
        3.0,
        104.0,
        "other",
    )
    assert results["peers"]["twin"] == dict(
        us=6.0, error=0.0, agrees=True, reason=None, eager_us=106.0, ours_us=4.0
    )
    assert (results["ratio"], results["raw_ratio"]) == (1.25, 1.5)
    assert run.captured == [2] * 5  # ours, the copy and three peers, each on every set
    assert run.run["copy_tb_s"] == pytest.approx(cell.bytes / 3e6)
    assert (set(run.run["host_us"]), run.run["host_us_of"]) == (
        {"ours", "twin", "other", "other raw"},
        cell.label,
    )


def then(call, change):
    """The call, with its o and states changed."""
    return lambda: change(*call())


WRONG = {
    # a peer's wrong preparation, and its cells
    "does nothing": (lambda cell, b: lambda: (b.blank(), b.written), DECODES),
    "writes no states": (
        lambda cell, b: then(partial(tuple, b.results(ours(cell, b))), lambda o, _: (o, b.written)),
        DECODES,
    ),
    "in another order": (
        lambda cell, b: ours(cell, other(b, state_indices=b.state_indices.flip(0))),
        [*DECODES, *CHAINS],
    ),
    "has no output": (
        lambda cell, b: then(ours(cell, b), lambda _, states: (b.blank(), states)),
        PREFILLS[::2],
    ),
    "gives the initial states back": (
        lambda cell, b: then(ours(cell, b), lambda o, _: (o, b.initial_state)),
        PREFILLS[::2],
    ),
    "gives transposed states": (
        lambda cell, b: then(ours(cell, b), lambda o, states: (o, states.mT)),
        PREFILLS[::2],
    ),
    "commits nothing": (
        lambda cell, b: then(Pooled.ours(b, "reference"), lambda o, _: (o, b.state)),
        CHAINS,
    ),
    "with every draft": (
        lambda cell, b: ours(cell, other(b, num_accepted=torch.full_like(b.num_accepted, cell.T))),
        CHAINS,
    ),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("cell", "wrong"), [(cell, how) for how, (_, some) in WRONG.items() for cell in some], ids=named
)
def test_a_peer_that_disagrees_is_not_timed(runner, cell, wrong):
    run = runner({"wrong": WRONG[wrong][0], "right": ours}, wrong=1.0, right=5.0)
    records = run.measure(small(cell))
    results = records["peers"]["wrong"]
    assert (results["us"], results["eager_us"], results["agrees"]) == (None, None, False)
    assert "disagrees by" in results["reason"]
    assert (records["best_peer"], records["ratio"]) == ("right", 1.25)
    assert len(run.said) == 1
    assert "wrong disagrees" in run.said[0]


def test_peers_that_fail_are_reported_once_and_the_run_goes_on(runner):
    def missing(cell, b):
        raise ModuleNotFoundError("No module named 'nowhere'\nand more")

    def late(cell, b):
        """Fails while its graph is captured."""
        calls, call = iter([True]), ours(cell, b)
        return lambda: (next(calls), call())[1]

    run = runner({"missing": missing, "late": late, "right": ours}, right=5.0)
    for cell in DECODES[:2]:
        results = run.measure(small(cell))
        reason = "ModuleNotFoundError: No module named 'nowhere'"
        assert results["peers"]["missing"] == dict(
            us=None, error=None, agrees=None, reason=reason, eager_us=None, ours_us=None
        )
        assert (results["peers"]["late"]["us"], results["peers"]["late"]["agrees"]) == (None, True)
        assert (results["peers"]["late"]["reason"], results["best_peer"]) == (
            "StopIteration",
            "right",
        )
    assert run.said == [
        f"missing does not run some cells: {reason}",
        "late does not run some cells: StopIteration",
    ]


def test_our_own_failure_is_not_swallowed(monkeypatch, runner):
    monkeypatch.setattr(reference, "decode", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner().measure(small(DECODES[0]))


def test_kernels_loaded_after_the_checks_are_counted(monkeypatch, runner):
    run, loaded, right = runner(), dict(compile._loaded), reference.decode
    monkeypatch.setattr(compile, "_loaded", loaded)

    def loading(tokens, **states):
        loaded[tokens.q.shape] = None  # a kernel for every shape
        return right(tokens, **states)

    monkeypatch.setattr(reference, "decode", loading)
    run.check(DECODES[0])
    run.measure(small(DECODES[1]))
    run.measure(small(DECODES[2]))
    assert (run.run["loaded_by_checks"], run.run["loaded_while_timing"]) == (1, 2)


@pytest.mark.usefixtures("stand_ins")
@each(CHAINS)
def test_our_own_cached_states_agree_and_are_no_peer(runner, cell):
    run = runner({"cached": peers.OWN["cached"].prepare, "twin": ours}, cached=3.5, twin=6.0)
    results = run.measure(small(cell))
    assert (results["peers"]["cached"]["us"], results["best_peer"], results["ratio"]) == (
        3.5,
        "twin",
        1.5,
    )
    assert results["peers"]["cached"]["error"] < 5e-3
    assert results["parts"] == {"verify": 2.5, "flush": 1.75, "two_rounds": 6.0}
    assert run.captured == [2] * 7  # ours, the copy, its parts, cached and the peer


@pytest.mark.usefixtures("stand_ins")
@each([*CHAINS, speculation(*GDN, FP32, 5, 2)])
def test_replayssm_is_compared_with_two_rounds_if_it_skips_folds(runner, cell):
    lazy = cell in CHAINS and (cell.model, cell.state_dtype) == (
        "gdn",
        FP32,
    )  # 10 tokens are too many for two rounds of ours
    run = runner(
        {"replayssm": peers.CACHING["replayssm"].prepare, "twin": ours}, replayssm=4.5, twin=4.4
    )
    results = run.measure(small(cell))
    assert [results["peers"][name]["ours_us"] for name in ("replayssm", "twin")] == [
        6.0 / 2 if lazy else 4.0,
        4.0,
    ]
    assert (results["best_peer"], results["ratio"]) == ("twin", 1.1)  # 1.5 or 1.125 of the other
    assert record.over_ours(results, "replayssm") == (1.5 if lazy else 1.125)


@each([cell for cell in CHAINS if cell.state_dtype == FP32])
def test_two_rounds_with_one_flush_leave_the_states_of_two(cell):
    """As after decoding the tokens that both accepted, one by one."""
    b, twin = (cell.make(cell, CPU, 3) for _ in range(2))
    b.parts("reference")["two_rounds"]()
    for n, accepted in enumerate((2 * b.num_accepted).tolist()):
        for t in range(accepted):
            where = slice(n, n + 1), slice(t % cell.T, t % cell.T + 1)
            tokens = {name: getattr(twin, name)[where] for name in ("q", "k", "v", "g", "beta")}
            slot = twin.state_indices[n : n + 1]
            gd.decode(
                **tokens,
                gate=twin.gate,
                beta_logits=True,
                state=twin.state,
                state_indices=slot,
                backend="reference",
            )
    torch.testing.assert_close(b.state, twin.state, rtol=1e-4, atol=1e-5)


def test_two_rounds_are_timed_up_to_8_tokens():
    for T in (4, 5):
        cell = speculation("gdn", (1, 2), BF16, T, 2)
        assert ("two_rounds" in cell.make(cell, CPU, 0).parts("reference")) == (T == 4)
        assert len(cell.cases(cell)) == (4 if T == 4 else 2)


@each(ALONE)
def test_verify_and_flush_alone_have_no_peers(monkeypatch, runner, cell):
    monkeypatch.setattr(cells, "FLUSHED", 2)
    results = runner({"twin": ours}, twin=1.0).measure(small(cell))
    assert (results["peers"], results["parts"], results["ratio"], results["share"]) == (
        {},
        {},
        None,
        0.75,
    )


# ------------------------------------------------------------------------------- the peers' calls
# FLA's and FlashInfer's calls run our adapters, with the same signatures; the stand-ins follow the
# peers' documentation.

MODULES = {
    "flashinfer": stand_in,
    "flashinfer.gdn_decode": flashinfer,
    "flashinfer.gdn_prefill": flashinfer,
    "fla.ops.gated_delta_rule": fla,
    "fla.ops.kda": fla,
    "flash_qla": fla,
    "cudnn.linear_attention": stand_in,
}


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Every peer, SGLang's kernels as files; yields the directory of these files."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("kda_replayssm_spec_decode", "gdn_replayssm_spec_decode"):
        shutil.copy(STAND_INS / f"{name}.py", tmp_path)
    monkeypatch.setenv(
        "GATED_DELTA_SGLANG_KERNEL",
        str(shutil.copy(STAND_INS / Path(peers.GATING).name, tmp_path / "a_kernel.py")),
    )
    monkeypatch.delenv("GATED_DELTA_SGLANG_COMMIT", raising=False)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    monkeypatch.setattr(torch.ops, "_flashkda_C", stand_in.FlashKda, raising=False)
    peers.sglang.cache_clear()
    yield tmp_path
    peers.sglang.cache_clear()


NOT_OFFERED = [
    ("decode", "fla", [cell for cell in DECODES if cell.T > 1], "final state alone"),
    ("decode", "flashinfer", [FP32_KDA := decode("kda", (2, 2), FP32, 1, 2)], "fp32"),
    ("speculate", "flashinfer", CHAINS[:1], "fp32"),
    *(("prefill", name, PREFILLS[:2], "KDA on Hopper") for name in ("flashinfer", "flashqla")),
    *(
        ("prefill", name, PREFILLS[2:], "GDN on Hopper")
        for name in ("cudnn", "cudnn_cute", "flashkda")
    ),
    *(("prefill", name, PREFILLS[1:2], "equal heads") for name in ("cudnn_cute", "flashkda")),
]
REFUSED = {(op, name, cell): why for op, name, some, why in NOT_OFFERED for cell in some}
ASKED = [
    (op, name, cell)
    for op, some in dict(decode=[*DECODES, FP32_KDA], prefill=PREFILLS, speculate=CHAINS).items()
    for name in peers.PEERS[op]
    for cell in some
]


@pytest.mark.parametrize(("op", "name", "cell"), ASKED, ids=named)
def test_peers_agree_or_refuse(runner, stand_ins, op, name, cell):
    shutil.copy(COMMIT, stand_ins)
    forms = peers.PEERS[op][name].forms(name)
    raw = op == "prefill" and name not in ("fla", "flashkda")
    assert list(forms) == ([name, f"{name} raw"] if raw else [name])
    if why := REFUSED.get((op, name, cell)):
        for prepare in forms.values():
            with pytest.raises(NotOffered, match=why):
                prepare(cell, cell.make(cell, CPU, 0))
        return
    results = runner(forms, **dict(zip(forms, (7.0, 8.0)))).measure(small(cell))
    for peer in results["peers"].values():
        assert peer["reason"] is None
        assert peer["error"] < (measure.AGREEMENT / 2 if op == "prefill" else 5e-3)
    assert results["best_peer"] == name
    if (op, name) == ("prefill", "fla"):
        assert os.environ["FLA_FLASH_KDA"] == os.environ["FLA_FLASH_QLA"] == "0"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "cell"),
    [("flashinfer", PREFILLS[2]), ("flashqla", PREFILLS[2]), ("cudnn_cute", PREFILLS[0])],
    ids=named,
)
def test_only_the_raw_form_converts_inputs_in_every_call(name, cell):
    for form, prepare in peers.PEERS["prefill"][name].forms(name).items():
        b = cell.make(cell, CPU, 0)
        call = prepare(cell, b)
        before, _ = b.results(call)
        b.g.add_(3)
        after, _ = b.results(call)
        assert torch.equal(before, after) != form.endswith(" raw")


@each(CHAINS)
def test_a_commit_takes_the_state_after_the_last_accepted_draft(stand_ins, cell):
    for version in ("torch indexing", "sglang fused_mamba_state_scatter_with_mask, file "):
        if "sglang" in version:
            shutil.copy(COMMIT, stand_ins)
        assert peers.commit_version().startswith(version)
        b = cell.make(cell, CPU, 1)
        b.intermediate_states.normal_()
        before = b.state.clone()
        peers.committed(b)()
        for n, (slot, m) in enumerate(zip(b.state_indices.tolist(), b.num_accepted.tolist())):
            assert torch.equal(b.state[slot], b.intermediate_states[n, m - 1])
        assert torch.equal(b.state[0], before[0])


def test_sglangs_files_are_found_and_leave_no_modules_behind(monkeypatch, stand_ins):
    installed = types.ModuleType("sglang.srt.utils")
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", installed)
    shutil.copy(COMMIT, stand_ins)
    assert peers.sglang(peers.KERNEL).__name__ == "fused_sigmoid_gating_delta_rule_update"
    assert peers.sglang(peers.COMMIT).__name__ == "fused_mamba_state_scatter_with_mask"
    assert {name for name in sys.modules if name.split(".")[0] == "sglang"} == {installed.__name__}
    assert sys.modules["sglang.srt.utils"] is installed
    assert peers.DECODE["sglang"].version.startswith("file ")
    monkeypatch.delenv("GATED_DELTA_SGLANG_KERNEL")
    for wanted in (peers.KERNEL, peers.COMMIT):
        assert peers.lone_file(wanted) is None
        file = stand_ins / "site/sglang/kernels/ops" / wanted[1]
        file.parent.mkdir(parents=True)
        file.touch()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(stand_ins / "site")
            assert peers.lone_file(wanted) == file
            patch.setenv(wanted[0], str(stand_ins / "nowhere.py"))
            peers.sglang.cache_clear()
            with pytest.raises(ImportError, match=r"nowhere\.py"):
                peers.sglang(wanted)


# ---------------------------------------------------------------------------------------- records


def one(name="KDA 32/32 bf16 T=1 B=8", us=10.0, copy_us=8.0, flops=0, **times):
    """A record of invented times; times: peers' by name."""
    measured = {
        peer: dict(us=time, error=1e-3, agrees=True, reason=None, eager_us=None)
        for peer, time in times.items()
    }
    cell = dict(
        measure.facts(CELLS["decode"][name]),
        us=us,
        eager_us=None,
        copy_us=copy_us,
        parts={},
        peers=measured,
        flops=flops,
    )
    return record.derived(cell, dict(gemm_tflops=800.0))


def test_ratios_are_those_of_the_best_peer():
    both = one(a=20.0, b=15.0, cached=2.0, **{"a raw": 21.0, "b raw": 30.0})
    assert (both["best_peer"], both["ratio"], both["raw_ratio"]) == ("b", 1.5, 2.1)
    both["peers"]["b raw"]["us"] = None  # b's raw form failed
    assert record.derived(both, {})["raw_ratio"] == 2.1
    alone = one(cached=2.0)
    assert (alone["best_peer"], alone["ratio"], alone["raw_ratio"]) == (None, None, None)
    assert (alone["floor_us"], alone["share"], alone["tb_s"], alone["tflops"]) == (
        8.0,
        0.8,
        alone["bytes"] / 10.0 / 1e6,
        None,
    )
    gemm = one(flops=16_000_000_000)  # 20 us at 800 TFLOP/s
    assert (gemm["floor_us"], gemm["share"], gemm["tflops"]) == (20.0, 2.0, 1600.0)
    assert record.derived(dict(alone, copy_us=None), {})["floor_us"] is None


def test_a_summary_has_means_and_losing_cells():
    names = [f"KDA 32/32 bf16 T=1 B={B}" for B in (1, 2, 4)]
    rows = record.summary([one(names[0], a=20.0, b=40.0), one(names[1], a=5.0), one(names[2])])
    assert rows == [
        ["T=1", "a", "2 of 3", "1.000", "0.500", names[1], "1"],
        ["T=1", "b", "1 of 3", "4.000", "4.000", names[0], "0"],
        ["T=1", "best", "2 of 3", "1.000", "0.500", names[1], "1"],
    ]
    assert record.summary([one(names[0])]) == [["T=1", "best", "0 of 1"]]


def test_runs_are_merged_by_cell():
    names = [f"KDA 32/32 bf16 T=1 B={B}" for B in (1, 2, 4, 8)]
    first = record.merged({}, [one(name) for name in names[1:]], dict(commit="a"), names)
    assert [cell["run"] for cell in first["cells"]] == [0, 0, 0]
    second = record.merged(first, [one(names[2], us=5.0), one(names[0])], dict(commit="b"), names)
    assert [cell["label"] for cell in second["cells"]] == names
    assert [second["runs"][cell["run"]]["commit"] for cell in second["cells"]] == [
        "b",
        "a",
        "b",
        "a",
    ]
    assert second["cells"][2]["us"] == 5.0
    third = record.merged(second, [one(name) for name in names], dict(commit="c"), names)
    assert third["runs"] == [dict(commit="c")]  # of the others no cell is left
    gone = record.merged(
        third, [], dict(commit="d"), names[1:]
    )  # a cell missing from the table stays
    assert [cell["label"] for cell in gone["cells"]] == [*names[1:], names[0]]


def test_peers_not_measured_again_keep_run_and_our_time():
    name, times = "KDA 32/32 bf16 T=1 B=8", dict(b=12.0, **{"b raw": 16.0})
    old = record.merged(
        {}, [one(name, a=15.0, **times), one("KDA 32/32 bf16 T=1 B=1", a=1.0)], dict(commit="a"), []
    )
    new = record.merged(old, [one(name, us=5.0, a=15.0)], dict(commit="b"), [])
    cell = new["cells"][0]
    assert (cell["best_peer"], cell["ratio"], cell["raw_ratio"]) == ("b", 1.2, 1.6)  # a's is 3 now
    assert record.over_ours(cell, "a") == 3.0
    newest = record.merged(
        new, [one(name, us=4.0, c=2.0), one("KDA 32/32 bf16 T=1 B=1")], dict(commit="c"), []
    )
    peers, runs = newest["cells"][0]["peers"], newest["runs"]
    assert {peer: runs[results.get("run", 2)]["commit"] for peer, results in peers.items()} == {
        "c": "c",
        "a": "b",
        "b": "a",
        "b raw": "a",
    }
    assert [peers[peer]["ours_us"] for peer in ("a", "b")] == [5.0, 10.0]
    again = record.merged(
        newest,
        [one(name, a=1.0, c=1.0, **times), one("KDA 32/32 bf16 T=1 B=1", a=1.0)],
        dict(commit="d"),
        [],
    )
    assert again["runs"] == [dict(commit="d")]


def test_a_decode_with_a_buffer_is_timed_beside_a_bare_one(runner):
    cell = small(cells.buffered("gdn", (1, 2), FP32, 18))
    peers = dict(a=lambda _, b: ours(_, other(b, buffer_lens=b.steps % cells.RING)), b=ours)
    record = runner(peers, a=5.0).measure(cell)
    assert (record["us"], record["parts"]) == (4.0, {"decode": 3.5})
    assert [record["peers"][name]["agrees"] for name in "ab"] == [True, False]
    b = cells.ring(cell, CPU, 0)
    b.results(b.ours("reference"))
    assert b.buffer_lens.tolist() == [*range(17), 0]  # one in RING + 1 folds


def test_a_tree_is_timed_beside_a_chain(runner):
    cell = small(cells.tree("kda", (2, 2), BF16, 2))
    record = runner({}).measure(cell)
    assert (record["us"], record["parts"]) == (4.0, {"chain": 3.75})
    b = cells.trees(cell, CPU, 0)
    o = b.ours("reference")()
    assert torch.equal(o[:, :1], b.parts("reference")["chain"]()[:, :1])
    assert not torch.equal(o[:, 2], b.parts("reference")["chain"]()[:, 2])


def test_a_deterministic_prefill_is_timed_beside_the_default(runner):
    cell = cells.deterministic(small(cells.prefill("gdn", (2, 2), "fast", "1x70", (70,))))
    values = [case.deterministic for case in cell.cases(cell)]
    assert [(type(x), x) for x in values] == [
        (type(x), x) for x in (False, False, True, True, 64, 64)
    ]
    record = runner({}).measure(cell)
    assert record["us"] == 4.0
    assert record["parts"] == {"deterministic": 5.0, "deterministic=1024": 4.5}
    b = cell.make(cell, CPU, 0)
    parts = b.parts("reference")
    assert [part.keywords["deterministic"] for part in parts.values()] == [True, 1024]


@pytest.mark.parametrize("op", CELLS)
def test_results_have_one_form_and_one_cell_a_line(runner, op):
    file = record.RESULTS / f"{op}.json"
    content = record.read(file)
    assert len(CELLS[op]) == len(cells.TABLES[op])  # a label names one cell
    assert (content["command"], [cell["label"] for cell in content["cells"]]) == (
        f"benchmarks {op}",
        list(CELLS[op]),
    )
    assert file.read_text().count("\n") == len(content["cells"]) + len(content["runs"]) + 7
    measured = runner().measure(small(DECODES[0]))
    assert {tuple(cell) for cell in content["cells"]} == {(*measured, "run")}
    for cell in content["cells"]:
        facts = measure.facts(CELLS[op][cell["label"]])  # bytes and products too
        assert {name: cell[name] for name in facts} == facts
        assert record.derived(cell, content["runs"][cell["run"]]) == cell


def test_results_of_an_h100_are_of_the_same_cells():
    content = record.read(record.RESULTS / "h100" / "prefill.json")
    assert {run["device"] for run in content["runs"]} == {"NVIDIA H100 80GB HBM3"}
    for cell in content["cells"]:
        facts = measure.facts(CELLS["prefill"][cell["label"]])
        assert {name: cell[name] for name in facts} == facts
        assert record.derived(cell, content["runs"][cell["run"]]) == cell


def test_a_run_is_known_by_date_versions_commit_and_kernels(monkeypatch, runner):
    monkeypatch.setattr(measure, "gemm_tflops", lambda _: 700.0)
    run = runner().run | measure.run_facts(CPU, dict(a="1.0", b=None))
    for op in CELLS:
        assert all(
            set(one) == set(run) for one in record.read(record.RESULTS / f"{op}.json")["runs"]
        )
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]+\+00:00", run["date"])
    assert (run["kernels"]["decode"], run["versions"]["torch"]) == (
        compile.sources("decode"),
        torch.__version__,
    )
    assert {"verify", "flush", "prefill_scan"} < set(run["kernels"])
    assert (run["peers"], run["state_commit"]) == (dict(a="1.0", b=None), "torch indexing")
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert run["commit"] == head
        assert isinstance(run["dirty"], bool)
    monkeypatch.setenv("GATED_DELTA_COMMIT", "copied")
    assert measure.checkout() == {"commit": "copied", "dirty": False}
    monkeypatch.delenv("GATED_DELTA_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert measure.checkout() == {"commit": None, "dirty": None}


def test_pictures_have_titles_panels_and_notes(monkeypatch, tmp_path):
    """Lines do not join a prefill's shapes; ratios have panels, with losing cells below 1."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn, colors, right = [], set(), Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: drawn.append(figure) or right(figure, *_, **__)
    )
    for op in CELLS:
        content = record.read(record.RESULTS / f"{op}.json")
        series = list(
            record.grouped((cell for cell in content["cells"] if cell["peers"]), "series")
        )[:3]
        content["cells"] = [
            cell for cell in content["cells"] if cell["series"] in series or not cell["peers"]
        ]
        plot.draw(content, tmp_path / f"{op}.png")
        assert (tmp_path / f"{op}.png").read_bytes().startswith(b"\x89PNG")
        figure, panels = drawn[-1], [axis for axis in drawn[-1].axes if axis.axison]
        above, dates = (
            figure.get_suptitle().replace("\n", " "),
            [run["date"][:10] for run in content["runs"] if run["date"]],
        )
        for words in (op, "NVIDIA H200", "torch 2.11.0", content["runs"][0]["commit"][:7]):
            assert words in above
        assert re.findall(r"date ([\d-]+)", above) == dates[:1]
        said = [word for word in ("raw:", "fast gates:", "cached:") if word in above]
        assert said == dict(decode=[], prefill=["raw:", "fast gates:"], speculate=["cached:"])[op]
        assert ([panel.get_title() for panel in panels if panel.get_title()], len(panels)) == (
            series,
            2 * len(series),
        )
        lines = {
            line.get_linestyle()
            for panel in panels
            for line in panel.lines
            if line.get_marker() != "None"
        }
        assert lines == ({"None"} if op == "prefill" else {"-"})
        ratio = next(panel for panel in panels if panel.get_xticklabels() and not panel.get_title())
        assert ratio.get_yscale() == "linear"
        assert (panels[0].get_ylabel(), ratio.get_ylabel()) == ("us per call", "time over ours")
        shown = {line.get_label(): list(line.get_ydata()) for line in ratio.lines}
        peer = next(name for name in shown if name in content["cells"][0]["peers"])
        first = [cell for cell in content["cells"] if cell["series"] == series[0]]
        over = [cell["peers"][peer]["us"] / cell["us"] for cell in first]
        assert shown[peer] == [min(x, plot.HIGHEST) for x in over]
        names = record.peers_of(first)
        colors |= {
            (line.get_label().removesuffix(record.RAW), line.get_color())
            for line in ratio.lines
            if line.get_label() in names
        }
        ratios = [record.over_ours(cell, name) for cell in first for name in names]
        cut = sum(len(points.get_offsets()) for points in ratio.collections)
        assert cut == sum(x is not None and x >= plot.HIGHEST for x in ratios)
        assert (cut > 0) == (op == "prefill")
    assert (
        len(colors) == len({name for name, _ in colors}) == len({color for _, color in colors}) > 4
    ), "a colour a library"
    for some in ([dict(cell, peers={}) for cell in first], []):  # ours alone, or nothing
        plot.draw(dict(content, cells=some), tmp_path / "alone.png")


# ------------------------------------------------------------------------------------ the command


def run(*arguments):
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


@pytest.fixture
def gpu(monkeypatch, runner):
    """The command with a CUDA device and a few small cells."""
    tables = dict(decode=DECODES[:3], prefill=PREFILLS, speculate=[CHAINS[0], ALONE[0]])
    monkeypatch.setattr(
        command,
        "TABLES",
        {op: {cell.label: small(cell) for cell in some} for op, some in tables.items()},
    )
    known = {op: dict(a=Peer("torch", ours), b=Peer("no-such-package", ours)) for op in CELLS}
    monkeypatch.setattr(command, "KNOWN", known)
    monkeypatch.setattr(command, "device_option", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        command,
        "run_facts",
        lambda device, versions: dict(device="made up", peers=versions, gemm_tflops=800.0),
    )
    monkeypatch.setattr(
        command, "Runner", lambda prepare, device, facts, say: Runner(prepare, CPU, facts, say)
    )
    monkeypatch.setattr(cells, "CHECKED", ((5, 1),))
    runner(a=8.0, b=9.0, cached=6.0)


@pytest.mark.usefixtures("gpu")
def test_every_part_is_added_to_one_file(tmp_path):
    file, version = tmp_path / "decode.json", compile.installed("torch")
    first = run("measure", "decode", file, "--filter", "B=3")
    assert first.exit_code == 0, first.output
    assert f"{DECODES[0].label}, us: ours 4.00, copy 3.00, a 8.00" in first.output.replace(
        "\n", " "
    )
    assert run("measure", "decode", file, "--filter", "B=2", "--peers", "b, a").exit_code == 0
    content = record.read(file)
    assert [cell["label"] for cell in content["cells"]] == [cell.label for cell in DECODES[:3]]
    assert [cell["run"] for cell in content["cells"]] == [0, 1, 1]
    asked = [list(cell["peers"]) for cell in content["cells"]]
    assert asked == [["a"], ["b", "a"], ["b", "a"]]  # by default the installed ones
    assert [one["peers"] for one in content["runs"]] == [dict(a=version), dict(b=None, a=version)]
    assert [one["host_us_of"] for one in content["runs"]] == [
        DECODES[0].label,
        DECODES[2].label,
    ]  # of the least bytes
    assert not list(tmp_path.glob("*.unfinished"))
    assert run("measure", "decode", file, "--filter", "B=3", "--peers", "none").exit_code == 0
    content = record.read(file)
    assert {
        name: content["runs"][peer["run"]]["peers"]
        for name, peer in content["cells"][0]["peers"].items()
    } == dict(a=dict(a=version))


@pytest.mark.usefixtures("gpu", "stand_ins")
def test_speculation_is_measured_with_cached_states(tmp_path):
    assert run("measure", "speculate", tmp_path / "x.json").exit_code == 0
    chain, alone = record.read(tmp_path / "x.json")["cells"]
    assert (list(chain["peers"]), chain["ratio"], alone["peers"]) == (["cached", "a"], 2.0, {})


@pytest.mark.usefixtures("gpu")
def test_cells_that_fail_their_check_are_not_timed(monkeypatch, tmp_path):
    right = reference.decode

    def wrong(tokens, **states):
        right(
            tokens._replace(beta_logits=tokens.beta_logits and states["state"].dtype == BF16),
            **states,
        )

    monkeypatch.setattr(reference, "decode", wrong)
    result = run("measure", "decode", tmp_path / "x.json", "--filter", "GDN")
    assert result.exit_code == 1
    assert f"fails its check, not timed: {DECODES[2].label}" in result.output.replace("\n", " ")
    assert [cell["label"] for cell in record.read(tmp_path / "x.json")["cells"]] == [
        DECODES[0].label
    ]


@pytest.mark.usefixtures("gpu")
def test_an_interrupted_run_keeps_its_cells(monkeypatch, tmp_path):
    right, early = Runner.measure, []

    def cut(self, cell, host):
        if cell.label == DECODES[1].label:
            early.extend(cell["label"] for cell in record.read(tmp_path / "x.json")["cells"])
            os.kill(os.getpid(), signal.SIGINT)
        return right(self, cell, host)

    monkeypatch.setattr(Runner, "measure", cut)
    result = run("measure", "decode", tmp_path / "x.json")
    assert result.exit_code == 130, result.output
    assert (
        [cell["label"] for cell in record.read(tmp_path / "x.json")["cells"]]
        == early
        == [DECODES[0].label]
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (
            "measure decode --peers a,sglang",
            "expected peers of a,b,sm_80,sm_86,sm_90,sm_120, got sglang",
        ),
        (
            "measure decode --filter B=7",
            "no cell of decode matches 'B=7'; one is 'GDN 1/2 bf16 T=1 B=3'",
        ),
        ("measure decode --filter (", "expected a regular expression, got '('"),
        ("measure flush", "'flush'"),
        ("measure decode --grid", "--grid"),
        ("measure decode /nonexistent/x.json", "/nonexistent/x.json"),
        ("measure decode {0}/other.json", "something else"),
        ("measure decode {0}/broken.json", "expected results of a benchmark"),
        ("plot {0}/other.json", "expected results of a benchmark"),
        ("plot {0}/nowhere.json", "nowhere.json"),
    ],
)
def test_the_command_refuses_in_one_line(monkeypatch, tmp_path, arguments, word):
    monkeypatch.setattr(Runner, "check", None)
    (tmp_path / "other.json").write_text('{"command": "check", "results": []}')
    (tmp_path / "broken.json").write_text(
        '{"command": "benchmarks decode", "cells": [{"label": "x"}], "runs": []}'
    )
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    result = run(*arguments.format(tmp_path).split())
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert word in result.output
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_cpu_is_refused():
    result = run("measure", "decode", "--device", "cpu")
    assert result.exit_code == 2
    assert "--device: expected a CUDA device, got cpu" in result.output


def test_it_imports_without_peers_and_touches_no_gpu():
    peer_modules = ("flashinfer", "fla", "cudnn", "flash_qla", "sglang")
    code = (
        "import sys, benchmarks.__main__, torch;"
        f"heavy = {{*{(*peer_modules, 'triton', 'cutlass', 'matplotlib')!r}}};"
        "assert not heavy & {name.split('.')[0] for name in sys.modules};"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
def test_a_gemm_takes_its_time():
    assert 50 < measure.gemm_tflops(torch.device("cuda")) < 5000
