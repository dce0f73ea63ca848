"""A layer's benchmarks without a GPU: peers get their documented inputs and agree with ours."""

import hashlib
import sys

import pytest
import torch

import gated_delta as gd
from benchmark_runs import CPU, STAND_INS, fake_runner, small
from benchmarks import layer_prompts, layers, measure, peers, projections
from benchmarks.cells import BF16, FP32
from benchmarks.layers import layer
from benchmarks.peers import NotOffered
from benchmarks.projections import projected
from gated_delta.integrations import fla, flashinfer
from stand_ins import modules as stand_in

GDN, KDA = ("gdn", (1, 2)), ("kda", (2, 2))
STEPS = [layer("kda", (12, 12), FP32, 1, 2), layer("gdn", (1, 2), BF16, 1, 3)]
DRAFTS = [layer("gdn", (1, 2), dtype, 3, 2) for dtype in (BF16, FP32)]
PROMPTS = [layer_prompts.layer(*model, "slow", "2x70", (70, 70)) for model in (GDN, KDA)]
PROJECTED = [projected(layer(*model, FP32, 1, 3)) for model in (GDN, KDA)]
PROJECTED += [projected(cell) for cell in PROMPTS]


@pytest.fixture
def runner(monkeypatch):
    return fake_runner(monkeypatch)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr(layers, "vllm", lambda name: getattr(stand_in, name))
    peers.sglang.cache_clear()
    yield
    peers.sglang.cache_clear()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", layers.PEERS)
@pytest.mark.parametrize("cell", [*STEPS, *DRAFTS], ids=lambda cell: cell.label)
def test_peers_agree_or_refuse(runner, name, cell):
    prepare = layers.PEERS[name].prepare
    if name == "sglang" and cell in DRAFTS:
        with pytest.raises(NotOffered, match="one token"):
            prepare(cell, cell.make(cell, CPU, 0))
        return
    results = runner({name: prepare}, **{name: 7.0}, decode=1.0, decode_norm=1.5).measure(
        small(cell)
    )
    (peer,) = results["peers"].values()
    assert results["parts"] == dict(decode=1.0, decode_norm=1.5)
    assert peer["reason"] is None
    assert peer["error"] < 5e-3


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", STEPS, ids=lambda cell: cell.label)
def test_a_step_is_a_convolution_the_recurrence_and_a_norm(cell):
    """By definition, from the same tensors; a call updates the windows, `results` restores them."""
    b = cell.make(cell, CPU, 0)
    before, rows = b.windows.clone(), b.state_indices.long()
    seen = torch.cat([before[rows], b.mixed[..., None]], -1)
    tokens = b.arguments() | b.split(
        torch.nn.functional.silu((seen.float() * b.weight.float()).sum(-1)).bfloat16()
    )
    o = gd.decode(
        **tokens, state=b.state.clone(), state_indices=b.state_indices, backend="reference"
    ).float()
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[b.norm.activation]
    want = torch.nn.functional.rms_norm(o, (128,), b.norm.weight, b.norm.eps) * act(b.z.float())
    y, _ = b.results(b.ours("reference"))
    assert torch.linalg.vector_norm(y.float() - want) < 1e-2 * torch.linalg.vector_norm(want)
    assert torch.equal(b.windows, before)
    b.ours("reference")()
    assert torch.equal(b.windows[rows], seen[..., 1:])


@pytest.fixture
def engines(stand_ins, monkeypatch):
    """Both engines' functions, FLA and FlashInfer."""
    for name in ("fla.ops.gated_delta_rule", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, fla)
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", flashinfer)
    with peers.sglang_modules():
        import vllm_layers

    def function(module, name):
        of_vllm = module.startswith("vllm.")
        return getattr(vllm_layers, name) if of_vllm else peers.function(module, name)

    monkeypatch.setattr(projections, "function", function)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("cell", PROJECTED, ids=lambda cell: cell.label)
@pytest.mark.parametrize("flashinfer", [True, False])
def test_a_layer_with_projections_is_float64s_and_its_peers(runner, monkeypatch, cell, flashinfer):
    monkeypatch.setattr(projections.compile, "installed", lambda package: flashinfer)
    prepare = {name: peer.prepare for name, peer in projections.PEERS.items()}
    run = runner(prepare, vllm=7.0, sglang=6.0, projections=1.0)
    b = cell.make(cell, CPU, 0)
    assert measure.difference(b.results(b.ours("reference")), projections.truth(b)) < 3e-3
    results = run.measure(small(cell))
    assert {name: peer["reason"] for name, peer in results["peers"].items()} == {
        "vllm": None, "sglang": None
    }  # fmt: skip
    assert max(peer["error"] for peer in results["peers"].values()) < 6e-3
    assert (results["ratio"], results["parts"]) == (1.5, dict(projections=1.0))


@pytest.mark.parametrize("cell", [STEPS[1], PROMPTS[0]], ids=lambda cell: cell.label)
def test_a_peer_that_fails_leaves_what_the_next_one_reads(cell):
    b = cell.make(cell, CPU, 0)
    names = [name for name in ("state", "windows") if hasattr(b, name)]
    before = {name: getattr(b, name).clone() for name in names}

    def fail():
        for name in names:
            getattr(b, name).zero_()
        raise RuntimeError("after its convolution")

    with pytest.raises(RuntimeError, match="convolution"):
        b.results(fail)
    assert all(torch.equal(getattr(b, name), x) for name, x in before.items())


@pytest.mark.usefixtures("engines")
def test_a_layer_far_from_float64_is_not_timed(runner, monkeypatch):
    (cell, *_), run = PROJECTED, runner()
    assert run.check(small(cell, cases=lambda cell: [])) == []
    wrong = small(cell, cases=lambda cell: [], truth=lambda b: [2 * x for x in cell.truth(b)])
    assert "from float64" in run.check(wrong)[0]


def test_missing_kernels_of_vllm_are_named(monkeypatch):
    monkeypatch.delenv(peers.LIBRARY[0], raising=False)
    with pytest.raises(ImportError, match=peers.LIBRARY[0]):
        layers.vllm("fused_kda_decode")


def test_vllms_library_alone_is_named_by_its_digest(monkeypatch, tmp_path):
    monkeypatch.setattr(peers.compile, "installed", lambda package: None)
    monkeypatch.delenv(peers.LIBRARY[0], raising=False)
    assert layers.PEERS["vllm"].version is None
    library = tmp_path / "lone.so"
    library.write_bytes(b"kernels")
    monkeypatch.setenv(peers.LIBRARY[0], str(library))
    assert layers.PEERS["vllm"].version == "file " + hashlib.sha256(b"kernels").hexdigest()[:16]


def test_fused_kda_needs_fp32_states_and_certain_heads():
    for cell in (layer("kda", (12, 12), BF16, 1, 2), layer("kda", (32, 32), FP32, 1, 2)):
        with pytest.raises(NotOffered, match="12, 24, 48 or 96 heads"):
            layers.vllm_fused(cell, cell.make(cell, CPU, 0))


def test_every_cell_has_a_case_and_its_own_label():
    assert len(layers.CELLS) == len(layers.STEPS) + len(layers.DRAFTS)
    for cell in layers.CELLS.values():
        assert [(case.op, case.norm) for case in cell.cases(cell)] == [
            ("decode", {"gdn": "silu", "kda": "sigmoid"}[cell.model])
        ]
