"""Checks of the engines' plug-ins at the start; tests/engines run whole engines."""

import pytest
import torch

from gated_delta import Gate, KVBuffer, UnsupportedProblem, api, compile, dispatch
from gated_delta.gpus import GPUS, H200
from gated_delta.integrations.engine import load
from gated_delta.integrations.sglang.start import Layer
from gated_delta.integrations.vllm.calls import room

CPU = torch.device("cpu")


def decode(**changes):
    x, g = (
        torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16),
        torch.zeros(1, 1, 2, dtype=torch.bfloat16),
    )
    call = dict(
        q=x,
        k=x,
        v=x,
        g=g,
        beta=g,
        gate=Gate.softplus(torch.zeros(2), torch.zeros(2)),
        beta_logits=True,
    )
    return "decode", call | dict(
        state=torch.zeros(3, 2, 64, 64), state_indices=torch.tensor([1])
    ) | dict(backend="reference") | changes


def test_where_none_of_our_kernels_run_none_are_loaded(monkeypatch):
    monkeypatch.setattr(compile, "load", lambda *_: pytest.fail("loaded"))
    load.load([decode()], CPU)


def test_kernels_of_every_batch_size_are_loaded_once(monkeypatch):
    loaded = []
    monkeypatch.setattr(load, "gpu_of", lambda device: H200)
    monkeypatch.setattr(compile, "load", lambda *key: loaded.append(key))
    load.load([decode(), decode()], CPU)
    assert len(loaded) == len(set(loaded)) > 1
    assert {(variant.kernel, gpu) for variant, gpu in loaded} == {("decode", H200)}


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [2, 4, 8])
def test_rows_of_drafts_take_a_20th_of_their_states(drafts, states):
    """Of Qwen3-Next's layers; a row has room for two verifies or more."""
    tokens = load.room(drafts, states)
    row = KVBuffer.empty(1, tokens, 16, 32, 128, 128, device="meta").nbytes
    assert 2 * drafts <= tokens <= 32
    assert 20 * row <= drafts * 32 * 128 * 128 * states.itemsize


@pytest.mark.parametrize("drafts", [1, 3, 7, 15])
def test_rows_of_vllms_drafts(drafts):
    """vLLM has a state a draft. 16-bit states: a 20th has no room for two verifies."""
    layer = KVBuffer.empty(1, room(drafts, torch.float32), 16, 32, 128, 128, device="meta")
    assert 20 * layer.nbytes <= drafts * 32 * 128 * 128 * 4
    assert room(drafts, torch.bfloat16) == 2 * (1 + drafts)
    assert 2 * (1 + drafts) <= layer.u.shape[1] <= 32


def test_all_missing_kernels_are_named(monkeypatch, tmp_path):
    """Where one of several is there, as in a pack for other engines."""
    monkeypatch.setattr(load, "gpu_of", lambda device: H200)
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    load_one, present = compile.load, []
    monkeypatch.setattr(
        compile,
        "load",
        lambda variant, *x: load_one(variant, *x) if present else present.append(variant),
    )
    with pytest.raises(UnsupportedProblem) as raised:
        load.load([decode()], CPU)
    lines = str(raised.value).splitlines()
    assert (
        f"{len(lines) - 1} of the {len(lines)} kernels that this engine needs are missing: "
        "GATED_DELTA_JIT=0" in lines[0]
    )
    assert f"; `gated-delta compile --size 64x64 --out {tmp_path}` builds the kernels" in lines[0]
    assert all(line.startswith("  - decode axis=head K=64 V=64 ") for line in lines[1:])
    assert present[0].label not in str(raised.value)
    more = load.unbuildable([decode()], CPU)
    assert more.startswith(f"{len(lines)} more kernels: `gated-delta compile --size 64x64 --out ")
    monkeypatch.setenv("GATED_DELTA_JIT", "1")
    for version in ("4.9.0", None):  # the compiler's
        monkeypatch.setattr(compile, "installed", lambda *_, version=version: version)
        assert load.unbuildable([decode()], CPU) == ("" if version else more)


def test_what_the_operations_refuse_is_said_of_each():
    refused = load.refused(
        [decode(backend="cute"), decode(state=torch.zeros(3, 2, 64, 64, dtype=torch.float64))]
    )
    assert list(refused) == ["decode"]
    assert refused["decode"].startswith("state: expected dtype")
    assert load.refused([decode(backend="cute")]) == dict(
        decode="tensors on a CUDA device, got cpu"
    )
    assert load.refused([decode()]) == {}


def test_a_switch_with_another_value_is_no_refusal(monkeypatch):
    monkeypatch.setenv("GATED_DELTA_JIT", "2")
    with pytest.raises(ValueError, match="GATED_DELTA_JIT: expected 0 or 1, got '2'"):
        load.refused([decode()])


@pytest.mark.parametrize("kind", ["GDN", "KDA"])
@pytest.mark.parametrize("scratch", [None, "states", "buffer"])
def test_calls_of_a_layer_of_sglang(kind, scratch):
    """Every one of them can run."""
    layer, state = Layer(kind, 2, 4, 32, 64, torch.float32), torch.zeros(2, 4, 64, 32)
    buffer = KVBuffer.empty(
        2, T=3, H=2, HV=4, K=32, V=64, gate="head" if kind == "GDN" else "channel", device="cpu"
    )
    given = {None: None, "states": torch.zeros(2, 3, 4, 64, 32), "buffer": buffer}[scratch]
    by_mode = layer.calls(state, True, given, 3)
    assert [op for op, _ in by_mode["decode"] + by_mode["prefill"]] == [
        "decode",
        "prefill",
        "prefill",
        "short_conv",
    ]
    assert [op for op, _ in by_mode.get("verify", ())] == {
        None: [],
        "states": ["decode"],
        "buffer": ["verify", "flush"],
    }[scratch]
    assert load.refused([call for calls in by_mode.values() for call in calls]) == {}


@pytest.mark.parametrize("states", ["fp32", "as the inputs"])
@pytest.mark.parametrize(
    ("scratch", "switches"),
    [("states", ""), ("buffer", ""), ("states", "--ring"), ("buffer", "--trees")],
)
@pytest.mark.parametrize(
    ("kind", "D", "dtype", "options"),
    [
        ("GDN", 64, torch.bfloat16, "--size 64x64"),  # the shipped model
        ("GDN", 64, torch.float16, "--dtype fp16 --size 64x64"),
        ("GDN", 128, torch.float16, "--dtype fp16"),
        ("KDA", 128, torch.float16, "--dtype fp16"),
        ("KDA", 128, torch.bfloat16, ""),
    ],
)
def test_the_command_of_an_error_builds_all_kernels(
    kind, D, dtype, options, scratch, switches, states, monkeypatch
):
    """Of an engine with these layers, on any GPU."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", "/a pack")
    size = tuple(map(int, options.split()[-1].split("x"))) if "size" in options else None
    state = torch.zeros(2, 4, D, D, dtype=torch.float32 if states == "fp32" else dtype)
    gate = "head" if kind == "GDN" else "channel"
    buffer = KVBuffer.empty(2, T=3, H=2, HV=4, K=D, V=D, gate=gate, device="cpu")
    drafts = buffer if scratch == "buffer" else torch.zeros(2, 3, *state.shape[1:]).to(state)
    ring, tree = buffer if "--ring" in switches else None, "--trees" in switches
    by_mode = Layer(kind, 2, 4, D, D, dtype).calls(state, True, drafts, 3, ring, tree)
    calls = [call for calls in by_mode.values() for call in calls]
    problems = [api.explain(op, **arguments).problem for op, arguments in calls]
    for gpu in GPUS.values():
        variants = {x for problem in problems for x in dispatch.variants_of(problem, gpu)}
        assert variants <= set(dispatch.shipped(gpu.arch, dtype, size, bool(ring), tree))
        arch = [] if gpu == H200 else ["--arch", gpu.arch]
        given = [*arch, *options.split(), *switches.split()]
        command = " ".join(["gated-delta compile", *given, "--out '/a pack'"])
        assert dispatch.how_to_build(variants, gpu) == (
            f"`{command}` builds the kernels ahead of time"
        )


def test_kernels_of_no_pack_need_a_run_with_the_compiler():
    op, arguments = decode(qk_l2norm=False)
    variants = dispatch.variants_of(api.explain(op, **arguments).problem)
    assert dispatch.how_to_build(variants, H200).startswith("a run without GATED_DELTA_JIT=0")
