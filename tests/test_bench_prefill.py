"""Prefill's grid benchmark without a GPU: shapes, floors, peers, and the one file that runs over parts of the grid share."""

import json
import sys
import types
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import gated_delta as gd
from contests import CPU, FACTS, fake_contest, play, same
from gated_delta import bench, cli, reference
from gated_delta.bench import SHAPES, Agenda, Outcome, Prefill, clock, contest, prefill, report
from gated_delta.bench.peers import NotOffered, Peer
from gated_delta.bench.prefill_peers import PREFILLING
from gated_delta.bench.report import Rival

TINY = [
    Prefill("kda", (2, 2), "slow", "3 tiny", (70, 1, 9)),
    Prefill("kda", (1, 2), "fast", "1 tiny", (66,)),
    Prefill("gdn", (1, 2), "slow", "3 tiny", (70, 1, 9)),
    Prefill("gdn", (2, 2), "fast", "1 tiny", (66,)),
]
KDA, GDN = partial(Prefill, "kda", (64, 64)), partial(Prefill, "gdn", (16, 64))


# ------------------------------------------------------------------------------------------------ the grid


def test_shapes_hold_the_tokens_that_their_names_say():
    assert len(SHAPES) == 6 + 2 + 3 * 2 * 2
    for name, lengths in SHAPES.items():
        assert min(lengths) >= 1
        if "x" in name:
            n, each = map(int, name.split("x"))
            assert lengths == (each,) * n
        else:
            n, _, total = name.split("-")
            assert (len(lengths), sum(lengths)) == (int(n), int(total))
    assert {sum(SHAPES[f"1x{T}"]) for T in (512, 1024, 4096, 8192, 16384, 65536)} == {2**i for i in (9, 10, 12, 13, 14, 16)}


def test_packed_sets_are_uniform_random_or_skewed():
    assert SHAPES["10-uniform-4096"] == (409,) * 9 + (415,)
    assert SHAPES["20-skewed-8192"] == (215,) * 10 + (4107,) + (215,) * 9
    for n, total in ((10, 4096), (20, 8192)):
        found = prefill.scattered(n, total)
        assert found == prefill.scattered(n, total) == SHAPES[f"{n}-random-{total}"]
        assert max(found) > 2 * total / n > total / n > 2 * min(found)
        long = max(prefill.skewed(n, total))
        assert total / 2 <= long < total / 2 + n
    assert prefill.scattered(5, 5) == (1,) * 5


def test_grid_is_the_agreed_one():
    chosen = prefill.grid()
    assert len(chosen) == len(set(chosen)) == len({cell.label for cell in chosen}) == 2 * 4 * 2 * 20
    assert {cell.family for cell in chosen} == {"KDA fast", "KDA slow", "GDN fast", "GDN slow"}
    assert {cell.heads for cell in chosen if cell.model == "kda"} == {(64, 64), (16, 64), (32, 32), (8, 8)}
    assert {cell.heads for cell in chosen if cell.model == "gdn"} == {(16, 64), (16, 32), (32, 32), (4, 8)}
    narrowed = prefill.grid(model=["kda"], heads=[(8, 8)], gates=["slow"], shape=["1x512", "8x1024"])
    assert [cell.label for cell in narrowed] == ["KDA 8/8 slow 1x512", "KDA 8/8 slow 8x1024"]
    assert {cell.shape for cell in prefill.grid(sequences=[2, 8])} == {"2x4096", "8x1024"}


def test_bytes_and_flops_of_a_cell():
    T, states = 8192, 2 * 64 * 128 * 128 * 4
    assert KDA("fast", "1x8192", (T,)).bytes == T * 64 * (5 * 128 + 1) * 2 + states
    assert GDN("fast", "1x8192", (T,)).bytes == T * (2 * 16 * 128 + 2 * 64 * 128 + 2 * 64) * 2 + states
    assert GDN("fast", "8x1024", (1024,) * 8).bytes == GDN("fast", "1x8192", (T,)).bytes + 7 * states
    assert GDN("slow", "1x8192", (T,)).flops == KDA("slow", "1x8192", (T,)).flops == T * 64 * 163_840


def test_floor_is_a_copy_or_a_gemm_whichever_takes_longer():
    cell = GDN("fast", "1x8192", (8192,))
    gemm_us = 85_899_345_920 / 800e6
    by_products, by_bytes = (Outcome(cell, 214.0, copy_us, {}, run=FACTS) for copy_us in (80.0, 150.0))
    assert by_products.floor_us == pytest.approx(gemm_us)
    assert by_products.share == pytest.approx(gemm_us / 214)
    assert by_products.tflops == pytest.approx(85.899 / 0.214, rel=1e-4)
    assert (by_bytes.floor_us, by_bytes.share) == (150.0, pytest.approx(150 / 214))


@pytest.mark.parametrize("cell", prefill.grid(gates=["fast"]), ids=str)
def test_rotation_is_cold_and_fits(cell):
    assert cell.rotation * cell.bytes >= 400e6
    assert cell.rotation >= 2 or cell.bytes > 4e9
    assert 4 * cell.rotation * cell.bytes <= 40e9


@pytest.mark.parametrize("cell", TINY, ids=str)
def test_checks_are_small_and_pass(monkeypatch, cell):
    cases = cell.checks()
    assert {(*case.heads, case.problem.axis, case.problem.gate) for case in cases} == {
        (*cell.heads, *{"kda": ("channel", "lower_bound"), "gdn": ("head", "softplus")}[cell.model])
    }
    assert {case.family for case in cases} == {"typical" if cell.gates == "fast" else "slow"}
    assert {(case.problem.state_dtype, case.dtype) for case in cases} == {(torch.float32, torch.bfloat16)}
    assert max(sum(case.lengths) for case in cases) < 600
    monkeypatch.setattr(prefill, "CHECKED", ((40, 1, 3), (70,)))
    assert fake_contest(monkeypatch, {}).check(cell) == []
    right = reference.prefill
    monkeypatch.setattr(reference, "prefill", lambda tokens, **states: right(tokens._replace(beta_logits=False), **states))
    assert any("o: error" in line for line in fake_contest(monkeypatch, {}).check(cell))


@pytest.mark.parametrize("cell", TINY, ids=str)
def test_prompts_are_packed_and_one_in_ten_gates_may_be_slow(cell):
    b, again, other = cell.make(CPU, 0), cell.make(CPU, 0), cell.make(CPU, 1)
    assert b.cu_seqlens.tolist() == ([0, 70, 71, 80] if cell.sequences == 3 else [0, 66])
    assert b.cu_seqlens is other.cu_seqlens  # some peers know it again by that
    assert b.cu_seqlens.dtype == torch.int32
    assert {x.dtype for x in (b.q, b.k, b.v, b.g, b.beta)} == {torch.bfloat16}
    assert b.q.shape == (1, cell.total, cell.heads[0], 128)
    assert torch.equal(b.q, again.q)
    assert not torch.equal(b.q, other.q)
    assert b.initial_state.dtype == torch.float32
    assert b.initial_state.std() == pytest.approx(0.05, rel=0.05)
    shifted = (b.gate.dt_bias.view(-1) < -5).nonzero().flatten().tolist()
    assert shifted == (list(range(0, b.gate.dt_bias.numel(), 10)) if cell.gates == "slow" else [])
    before = b.initial_state.clone()
    o, states = b.results(same(cell, b))
    assert torch.equal(b.initial_state, before)
    assert o.shape == b.v.shape
    assert states.shape == before.shape
    assert not torch.equal(states, before)


# ------------------------------------------------------------------------------------------------ ours and the peers


def forms(name, peer, us, raw_us):
    """As a contest is told of them."""
    return {form: (made.prepare, {name: us}.get(form, raw_us)) for form, made in peer.forms.items()}


def test_a_peer_is_timed_with_and_without_what_it_makes_of_its_inputs(monkeypatch):
    makes, takes = Peer("makes", "", same, same), Peer("takes", "", same)
    tried = []
    us = forms("makes", makes, 5.0, 9.0) | forms("takes", takes, 6.0, None)
    run = fake_contest(monkeypatch, us, tried, eager_us=100.0)
    outcome = run.measure(TINY[0])
    assert outcome.run is run.run
    assert outcome.run["copy_tb_s"] == pytest.approx(TINY[0].bytes / 3e6)
    assert tried == [2] * 5  # ours, the copy and three forms
    assert {name: (rival.us, rival.eager_us) for name, rival in outcome.rivals.items()} == {
        "makes": (5.0, 105.0),
        "makes raw": (9.0, 109.0),
        "takes": (6.0, 106.0),
    }
    assert (outcome.us, outcome.eager_us, outcome.copy_us) == (4.0, 104.0, 3.0)
    assert outcome.best == ("makes", 5.0)
    assert (outcome.ratio, outcome.raw_ratio) == (1.25, 1.5)
    family = report.summary([outcome])["KDA slow"]
    assert (family["ratio_geomean"], family["raw_ratio_geomean"]) == (pytest.approx(1.25), pytest.approx(1.5))
    assert family["rivals"]["makes raw"]["ratio_minimum"] == 2.25


def test_a_form_that_fails_leaves_the_other():
    rivals = {"makes": Rival(5.0), "makes raw": Rival(reason="gone"), "takes": Rival(6.0)}
    outcome = Outcome(TINY[0], 4.0, 3.0, rivals)
    assert (outcome.ratio, outcome.raw_ratio) == (1.25, 1.5)


def forgetful(cell, b):
    o, _ = b.results(same(cell, b))
    return lambda: (o, b.initial_state)


def unaware_of_starts(cell, b):
    """Takes the packed sequences for one."""
    arguments = dict(gate=b.gate, beta_logits=True, initial_state=b.initial_state[:1], output_final_state=True, backend="reference")

    def call():
        o, state = gd.prefill(b.q, b.k, b.v, b.g, b.beta, **arguments)
        return o, state.expand_as(b.initial_state)

    return call


def key_first(cell, b):
    """Gives the right state, transposed."""

    def call():
        o, state = same(cell, b)()
        return o, state.transpose(-1, -2)

    return call


@pytest.mark.parametrize("wrong", [forgetful, unaware_of_starts, key_first])
@pytest.mark.parametrize("cell", [TINY[0], TINY[2]], ids=str)
def test_a_peer_that_disagrees_is_not_timed(monkeypatch, cell, wrong):
    outcome = fake_contest(monkeypatch, {"wrong": (wrong, 1.0), "right": (same, 5.0)}, eager_us=9.0).measure(cell)
    assert (outcome.rivals["wrong"].us, outcome.rivals["wrong"].eager_us, outcome.rivals["wrong"].agrees) == (None, None, False)
    assert "disagrees by" in outcome.rivals["wrong"].reason
    assert outcome.best == ("right", 5.0)


# Stand-ins with the peers' own signatures, whose bodies say what the peers' documentation says.


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    state_v_first=False, cu_seqlens=None, *, A_log=None, dt_bias=None,
):  # fmt: skip
    assert use_gate_in_kernel
    assert safe_gate
    gate = gd.Gate.lower_bound(A_log, dt_bias.view(v.shape[2], -1), lower_bound)
    return from_key_first(
        q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, cu_seqlens, gate
    )


def chunk_gdn(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, *, use_gate_in_kernel=False,
    A_log=None, dt_bias=None,
):  # fmt: skip
    gate = gd.Gate.softplus(A_log, dt_bias) if use_gate_in_kernel else gd.Gate.log()
    return from_key_first(
        q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, cu_seqlens, gate
    )


def chunk_qla(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    head_first=False, state_v_first=False, auto_cp=True,
):  # fmt: skip
    assert g.dtype == beta.dtype == torch.float32
    return from_key_first(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, False, cu_seqlens, gd.Gate.log())


def from_key_first(q, k, v, g, beta, scale, initial_state, qk_l2norm, beta_logits, cu_seqlens, gate):
    assert initial_state.is_contiguous()
    assert len(initial_state) == len(cu_seqlens) - 1
    o, state = gd.prefill(
        q, k, v, g, beta, gate=gate, scale=scale, qk_l2norm=qk_l2norm, beta_logits=beta_logits, cu_seqlens=cu_seqlens,
        initial_state=initial_state.transpose(-1, -2).contiguous(), output_final_state=True, backend="reference",
    )  # fmt: skip
    return o, state.transpose(-1, -2).contiguous()


def chunk_flashinfer(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, output=None, output_state=None, use_cp="auto", state_indices=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.diff().max() == max_seqlen
    o, state = gd.prefill(
        q[None], k[None], v[None], g[None].log(), beta[None], scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        initial_state=initial_state, output_final_state=output_final_state, backend="reference",
    )  # fmt: skip
    output.copy_(o[0])
    output_state.copy_(state)
    return output, output_state


def kimi_delta_attention(
    q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, safe_gate=False, gate_lower_bound=None, gate_domain="log", a_log=None, dt_bias=None,
    plan_name=None,
):  # fmt: skip
    assert plan_name in ("kda_hopper_cuda", "kda_hopper")
    if plan_name == "kda_hopper":
        assert q.shape[1] == v.shape[1]
        assert {use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, safe_gate} == {False}
    if not safe_gate:
        assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int32
    o, state = gd.prefill(
        q[None], k[None], v[None], g[None], beta[None], scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        gate=gd.Gate.lower_bound(a_log, dt_bias, gate_lower_bound) if safe_gate else gd.Gate.log(),
        beta_logits=use_beta_sigmoid_in_kernel, initial_state=initial_state, output_final_state=True, backend="reference",
    )  # fmt: skip
    return o[0], state


@pytest.fixture
def stand_ins(monkeypatch):
    modules = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": dict(chunk_gated_delta_rule=chunk_gdn),
        "fla.ops.kda": dict(chunk_kda=chunk_kda),
        "flashinfer": {},
        "flashinfer.gdn_prefill": dict(chunk_gated_delta_rule=chunk_flashinfer),
        "flash_qla": dict(chunk_gated_delta_rule=chunk_qla),
        "cudnn": {},
        "cudnn.linear_attention": dict(kimi_delta_attention=kimi_delta_attention),
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("FLA_FLASH_KDA", "FLA_FLASH_QLA"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", TINY, ids=str)
@pytest.mark.parametrize("name", list(PREFILLING))
def test_peers_are_asked_for_the_same(monkeypatch, name, cell):
    peer = PREFILLING[name]
    offered = {"kda": ("fla", "cudnn", "cudnn_cute"), "gdn": ("fla", "flashinfer", "flashqla")}[cell.model]
    if name not in offered or (name == "cudnn_cute" and cell.heads == (1, 2)):
        for form in peer.forms.values():
            with pytest.raises(NotOffered):
                form.prepare(cell, cell.make(CPU, 0))
        return
    outcome = fake_contest(monkeypatch, forms(name, peer, 7.0, 8.0)).measure(cell)
    assert list(outcome.rivals) == ([name] if name == "fla" else [name, f"{name} raw"])
    for rival in outcome.rivals.values():
        assert rival.reason is None
        assert rival.error < contest.AGREEMENT / 2
    assert outcome.best == (name, 7.0)


@pytest.mark.usefixtures("stand_ins")
def test_only_the_raw_form_makes_its_inputs_in_every_call():
    cell = TINY[2]
    for name in ("flashinfer", "flashqla"):
        for form, peer in PREFILLING[name].forms.items():
            b = cell.make(CPU, 0)
            call = peer.prepare(cell, b)
            before, _ = b.results(call)
            b.g.add_(3)
            after, _ = b.results(call)
            assert torch.equal(before, after) != form.endswith(" raw")


# ------------------------------------------------------------------------------------------------ parts of the grid


def outcome(cell, run, us=10.0, **times):
    return Outcome(cell, us, 5.0, {name: Rival(time, 1e-3, True) for name, time in times.items()}, eager_us=us + 20, run=run)


def test_runs_are_put_together_by_cell():
    grid = prefill.grid(model=["kda"], gates=["slow"], shape=["1x8192", "8x1024"])
    first, second = dict(FACTS, commit="a"), dict(FACTS, commit="b", kernel_sources="cafe")
    earlier = [outcome(cell, first, fla=20.0) for cell in grid[1:4]]
    written = json.loads(json.dumps(bench.record(earlier, first)))
    kept = bench.restored(written, grid)
    assert [(o.cell, o.us, o.eager_us, o.rivals) for o in kept] == [(o.cell, o.us, o.eager_us, o.rivals) for o in earlier]
    together = bench.merged(kept, [outcome(cell, second, us=5.0, cudnn=20.0) for cell in (grid[0], grid[2])], grid)
    assert [o.cell for o in together] == grid[:4]
    written = json.loads(json.dumps(bench.record(together, second)))
    assert [written["runs"][cell["run"]]["commit"] for cell in written["cells"]] == ["b", "a", "b", "a"]
    assert [list(cell["peers"]) for cell in written["cells"]] == [["cudnn"], ["fla"], ["cudnn"], ["fla"]]
    found = written["summary"]["KDA slow"]
    assert (found["kernel_sources"], found["cells"]) == (["cafe", "f00d"], 4)
    assert found["ratio_geomean"] == pytest.approx((4 * 2 * 4 * 2) ** 0.25)
    assert found["rivals"]["fla"]["compared"] == 2
    again = bench.record(bench.restored(written, grid), second)
    assert again["cells"] == written["cells"]
    assert bench.restored(written, grid[:1])[0].cell == grid[0]


def test_summary_says_how_far_from_the_floor():
    run = dict(FACTS, gemm_tflops=1e9)  # bytes alone bound it
    cells = prefill.grid(model=["gdn"], gates=["fast"], shape=["1x8192", "8x1024", "1x512"])
    found = report.summary([outcome(cell, run, us=5.0 * (i + 1)) for i, cell in enumerate(cells)])["GDN fast"]
    assert found["over_floor_1x8192"] == {"16/64": pytest.approx(2), "16/32": 5, "32/32": 8, "4/8": 11}
    assert list(found["over_floor_8x1024"]) == ["16/64", "16/32", "32/32", "4/8"]
    assert found["ratio_geomean"] is None


def test_tables_and_picture(tmp_path):
    cells = prefill.grid(gates=["slow"], shape=["1x8192", "10-skewed-4096"])
    made = [outcome(cell, FACTS, cudnn=12.0, **{"cudnn raw": 30.0}) for cell in cells]
    made = [replace(o, rivals={**o.rivals, "flashqla": Rival(reason="NotOffered")}) for o in made]
    console = Console(width=160, record=True, file=StringIO())
    for table in [*bench.tables(made), *bench.summary_tables(made)]:
        console.print(table)
    text = console.export_text()
    words = (
        "KDA 64/64 slow 10-skewed-4096",
        "eager",
        "cudnn raw",
        "TFLOP/s",
        "1.200",
        "3.000",
        "over floor 1x8192",
        "GDN slow",
        "f00d",
    )
    for word in words:
        assert word in text
    assert "flashqla" not in text
    bench.plot_outcomes(made, "made up", tmp_path / "prefill.png")
    assert (tmp_path / "prefill.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def short_checks(monkeypatch):
    monkeypatch.setattr(prefill, "CHECKED", ((5, 1),))


@pytest.mark.usefixtures("stand_ins", "short_checks")
def test_bench_adds_every_part_to_one_file(monkeypatch, tmp_path):
    file, picture = tmp_path / "results" / "prefill.json", tmp_path / "prefill.png"
    peers = {name: PREFILLING[name] for name in ("fla", "cudnn", "flashinfer")}
    us = {form: (peer.prepare, 8.0) for one in peers.values() for form, peer in one.forms.items()}
    for part in (TINY[:2], TINY[2:], TINY[1:2]):
        made = fake_contest(monkeypatch, us, eager_us=50.0)
        play(monkeypatch, made)
        agenda = Agenda(part, peers, grid=TINY, eager=True)
        kept = cli._kept(file, agenda) if file.exists() else []
        cli._bench_grid(agenda, ",".join(peers), CPU, cli.console, file, True, picture, kept)
    written = json.loads(file.read_text())
    assert [cell["label"] for cell in written["cells"]] == [cell.label for cell in TINY]
    assert [cell["run"] for cell in written["cells"]] == [0, 1, 2, 2]
    assert {cell["eager_us"] for cell in written["cells"]} == {54.0}
    assert all("host_us" not in run for run in written["runs"])
    assert written["cells"][0]["peers"]["flashinfer"]["reason"] == "NotOffered: no prefill of KDA on Hopper"
    assert written["cells"][0]["best_peer"] in ("fla", "cudnn")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(file.parent.glob("*.unfinished"))


def test_bench_refuses_a_file_that_it_cannot_add_to(tmp_path):
    file = tmp_path / "old.json"
    for content in ("{", "[]", '{"cells": [{"label": "KDA 64/64 fast 1x512"}], "runs": []}'):
        file.write_text(content)
        with pytest.raises(typer.BadParameter, match="added to"):
            cli._kept(file, Agenda(TINY, {}, grid=prefill.grid()))


def test_options_given_narrow_the_grid(monkeypatch, tmp_path):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(cli, "_bench_grid", lambda *arguments: seen.append(arguments))
    for arguments in (
        ["--peers", "fla,flashinfer,cudnn,flashqla", "--gates", "fast,slow"],
        ["--gates", "slow", "--model", "kda", "--heads", "8/8", "--shapes", "1x8192,10-random-4096"],
        ["--grid", "--batch", "2,8", "--json", "out.json"],
        ["--grid", "--json"],
    ):
        result = CliRunner().invoke(cli.app, ["bench", "--op", "prefill", *arguments])
        assert result.exit_code == 0, result.output
    agendas = [arguments[0] for arguments in seen]
    assert agendas[0].cells == agendas[0].grid == prefill.grid()
    assert list(agendas[0].peers) == ["fla", "flashinfer", "cudnn", "cudnn_cute", "flashqla"]
    assert [cell.label for cell in agendas[1].cells] == ["KDA 8/8 slow 1x8192", "KDA 8/8 slow 10-random-4096"]
    assert {cell.shape for cell in agendas[2].cells} == {"2x4096", "8x1024"}
    files = [(str(arguments[4]), arguments[5]) for arguments in seen]
    default = "benchmarks/results/prefill.json"
    assert files == [(default, True), (default, True), ("out.json", True), ("None", True)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--op", "prefill", "--peers", "sglang"], "cudnn_cute"),
        (["--op", "prefill", "--gates", "fats"], "fast,slow"),
        (["--op", "prefill", "--shapes", "1x7"], "1x512"),
        (["--op", "prefill", "--grid", "--tokens", "8"], "--tokens"),
        (["--op", "prefill", "--grid", "--state-dtype", "bf16"], "--state-dtype"),
        (["--op", "prefill", "--grid", "--heads", "2/2"], "no cell"),
        (["--op", "decode", "--gates", "slow"], "--gates"),
        (["--op", "speculate", "--shapes", "1x512"], "--shapes"),
        (["--op", "prefill", "--gates", "slow", "--backend", "reference"], "reference"),
    ],
)
def test_bench_refuses_what_the_grid_has_not(monkeypatch, tmp_path, arguments, word):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_device", lambda _: torch.device("cuda"))
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    assert word in " ".join(result.output.replace("│", " ").split())


# ------------------------------------------------------------------------------------------------ clocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
def test_eager_calls_take_turns_and_count_the_host():
    sums = [torch.zeros(2**24, device="cuda") for _ in range(3)]
    play_one = clock.eager([lambda x=x: x.add_(1) for x in sums])
    times = [play_one() for _ in range(6)]
    assert [x[0].item() for x in sums] == [2.0] * 3
    assert 5 < min(times) < 5000
    assert 50 < clock.gemm_tflops(torch.device("cuda")) < 5000
