"""`gated-delta check --engine`: what an engine would run for a model, without the engine."""

import dataclasses
import json
import logging
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from gated_delta import cli, compile, preflight, reference, testing
from gated_delta.cli import app
from gated_delta.gpus import GPUS, PRODUCTS, product
from gated_delta.integrations.engine import card_check, releases
from gated_delta.integrations.sglang import process as sglang_process
from gated_delta.integrations.sglang.records import kvbuffer as sglang_kvbuffer
from gated_delta.preflight import Asked, Sizes
from gpu import needs_compiler, pretend

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
GDN = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=128,
)
NEXT = dict(model_type="qwen3_next", dtype="bfloat16", num_hidden_layers=8, **GDN)
KIMI = dict(num_heads=24, head_dim=128, kda_layers=[1, 2, 3], full_attn_layers=[4])
KIMI_LINEAR = dict(model_type="kimi_linear", torch_dtype="bfloat16", linear_attn_config=KIMI)
TYPES = ["linear_attention", "linear_attention", "full_attention"]
SMALL = NEXT | dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_value_head_dim=64)
LING = dict(
    model_type="bailing_hybrid",
    dtype="bfloat16",
    num_hidden_layers=9,
    layer_group_size=4,
    num_attention_heads=4,
    head_dim=64,
    short_conv_kernel_size=4,
    kda_safe_gate=True,
    kda_lower_bound=-4.0,
)


def test_each_served_model_has_a_reader():
    served = {kind for release in preflight.RELEASES.values() for kind in release.models}
    assert served == preflight.READERS.keys()
    assert releases.VLLM["cpu"].models == releases.VLLM["cuda"].models


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    monkeypatch.setattr(releases, "installed", lambda engine: None)


@pytest.fixture
def compiled(monkeypatch):
    """All kernels are there, whatever is installed."""
    monkeypatch.setattr(compile, "missing", lambda variant, gpu: ())
    monkeypatch.setattr(preflight, "_look_for_kernels", lambda mode, served, gpu: None)


@pytest.fixture
def card(monkeypatch):
    """One of compute capability 9.0, whose kernels are the reference backend."""
    pretend(monkeypatch, 9, 0)
    right = testing.run_case
    monkeypatch.setattr(testing, "run_case", lambda case, *_: right(case, "reference", "cpu"))
    monkeypatch.setattr(cli, "_compile_ahead", lambda *_: None)
    monkeypatch.setattr(card_check, "cases_like", few)


@pytest.fixture
def plan(tmp_path):
    def make(engine, config, **asked):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return preflight.plan(Asked(engine, tmp_path, **asked), CPU)

    return make


@pytest.fixture
def check(tmp_path):
    def run(engine, config, *options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        command = ["check", "--engine", engine, "--model", str(tmp_path), "--device", "cpu"]
        return CliRunner().invoke(app, [*command, *options])

    return run


def case_sizes(case):
    return case.problem.H, case.problem.HV, case.problem.K, case.problem.V


@pytest.mark.parametrize(
    ("engine", "config", "sizes", "states"),
    [
        ("sglang", NEXT, Sizes("GDN", 6, 4, 8, 64, 128), FP32),
        ("vllm", NEXT, Sizes("GDN", 6, 4, 8, 64, 128), BF16),
        (
            "vllm",
            dict(
                model_type="qwen3_5_moe",
                dtype="bfloat16",
                text_config=NEXT | dict(layer_types=TYPES, mamba_ssm_dtype="float32", dtype=None),
            ),
            Sizes("GDN", 2, 4, 8, 64, 128),
            FP32,
        ),
        (
            "sglang",
            NEXT | dict(model_type="gigachat3_5", full_attention_layers=[3]),
            Sizes("GDN", 7, 4, 8, 64, 128),
            FP32,
        ),
        ("vllm", KIMI_LINEAR, Sizes("KDA", 3, 24, 24, 128, 128), FP32),
        (
            "vllm",
            dict(
                model_type="glm5_next",
                dtype="bfloat16",
                layer_types=TYPES,
                linear_num_heads=4,
                linear_head_dim=64,
                linear_lower_bound=-5.0,
            ),
            Sizes("KDA", 2, 4, 4, 64, 64, -5.0),
            FP32,
        ),
        ("sglang", LING, Sizes("KDA", 7, 4, 4, 64, 64, -4.0), FP32),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_a_models_layers_are_read(engine, config, sizes, states, plan):
    result = plan(engine, config)
    assert (result.model.sizes, result.model.dtype, result.model.state_dtype) == (
        sizes,
        BF16,
        states,
    )
    assert [(mode.name, mode.ours) for mode in result.modes] == [
        ("decode", True),
        ("prefill", True),
    ]
    axis = "head" if sizes.family == "GDN" else "channel"
    facts = {(x.problem.axis, *case_sizes(x), x.problem.state_dtype) for x in result.cases}
    assert facts == {(axis, *sizes[2:6], states), ("", *sizes[2:6], None)}


@pytest.mark.usefixtures("compiled")
def test_drafts_and_heads_that_stay_the_engines(plan, monkeypatch):
    k3 = dict(model_type="kimi_k3", dtype="bfloat16", text_config=dict(linear_attn_config=KIMI))
    reasons = {mode.name: mode.reason for mode in plan("sglang", k3, tp=2, drafts=17).modes}
    assert "12 heads" in reasons.pop("decode")
    assert reasons == dict(prefill="", verify="ours needs at most 16 draft tokens")
    with monkeypatch.context() as patch:
        patch.setenv("GATED_DELTA_SGLANG_RING", "1")
        decode, _ = plan("sglang", k3, tp=2).modes  # 12 heads, too
        assert decode.ours
        assert [op for op, _ in decode.calls] == ["decode", "flush", "decode"]
        decode, *_ = plan("sglang", k3, tp=2, state_dtype=torch.bfloat16).modes
        assert "16-bit states of KDA have no ring" in decode.reason
        decode, *_ = plan("sglang", NEXT, drafts=4).modes
        assert "a ring takes no drafts" in decode.reason
    decode, prefill = plan("vllm", NEXT, drafts=16).modes
    assert (decode.ours, decode.reason, prefill.ours) == (False, "more than 15 draft tokens", True)
    for buffered in (False, True):
        monkeypatch.setenv("GATED_DELTA_SGLANG_KVBUFFER", str(int(buffered)))
        *_, verify = plan("sglang", NEXT, drafts=4).modes
        both = ["verify", "verify", "flush"]  # without its convolution, and with it
        assert [op for op, _ in verify.calls] == (both if buffered else ["decode"])
        monkeypatch.setenv("GATED_DELTA_VLLM_KVBUFFER", str(int(buffered)))
        decode, prefill = plan("vllm", NEXT, drafts=3).modes
        drafts = ["verify", "flush"] if buffered else ["decode"]
        assert [op for op, _ in decode.calls] == ["decode", *drafts]
        assert {op for op, _ in prefill.calls} == {"prefill", "short_conv"}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("gpu", "changed", "calls"),
    [
        ("H100", {}, 2),
        ("A100", {}, 1),
        ("H100", dict(linear_num_value_heads=36), 1),
        ("H100", dict(model_type="qwen3_5"), 2),
        ("H100", dict(model_type="qwen3_5", linear_num_value_heads=12), 1),
    ],
)
def test_a_step_with_its_convolution(gpu, changed, calls, plan):
    """Of Qwen3-Next, where a cluster has a q/k head's value heads; of Qwen3.5 with few of them.

    Else decode is ours, too.
    """
    for engine in ("sglang", "vllm"):
        decode, _ = plan(engine, NEXT | changed, gpu=gpu).modes
        assert (decode.ours, len(decode.calls)) == (True, calls)


@pytest.mark.usefixtures("compiled")
def test_drafts_that_form_a_tree(plan, monkeypatch):
    """The engine's, but in a KVBuffer; the cases are trees too."""
    *_, verify = plan("sglang", NEXT, drafts=4, tree=True).modes
    assert not verify.ours
    assert "needs a KVBuffer for drafts that form a tree (GATED_DELTA_SGLANG" in verify.reason
    monkeypatch.setenv("GATED_DELTA_SGLANG_KVBUFFER", "1")
    result = plan("sglang", NEXT, drafts=4, tree=True)
    *_, verify = result.modes
    assert verify.ours
    assert [("parents" in call, "path" in call) for _, call in verify.calls] == [
        (True, False),
        (False, True),
    ]
    layouts = {x.op: x.layout for x in result.cases if x.op != "short_conv"}
    assert (layouts["verify"], layouts["flush"]) == ("packed_tree", "tree")
    for engine, drafts in (("vllm", 4), ("sglang", 0)):
        with pytest.raises(ValueError, match="--tree with --engine sglang and --drafts above 0"):
            plan(engine, NEXT, drafts=drafts, tree=True)


@pytest.mark.parametrize(
    ("changed", "dtype", "in_ring", "reason"),
    [
        ({}, FP32, True, ""),
        ({}, BF16, False, "ours needs ReplaySSM's ring in fp32, of 2 to 33 tokens"),
        (dict(gate_lower_bound=-5.0), FP32, False, ""),  # SGLang's decode uses none
    ],
)
@pytest.mark.usefixtures("compiled")
def test_decode_in_replayssms_ring(changed, dtype, in_ring, reason, plan):
    kimi = dict(model_type="kimi_linear", dtype="bfloat16", linear_attn_config=KIMI | changed)
    (decode,) = plan("sglang", kimi, modes=("decode",), ring=True, state_dtype=dtype).modes
    assert (decode.ours, decode.reason) == (not reason, reason)
    assert ("buffer_lens" in decode.calls[0][1]) == in_ring
    with pytest.raises(ValueError, match="with --engine sglang; vLLM's is GATED_DELTA_VLLM_RING=1"):
        plan("vllm", kimi, ring=True)


def test_decode_in_vllms_ring(plan, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_VLLM_RING", "1")
    decode, _ = plan("vllm", NEXT).modes
    assert [op for op, _ in decode.calls] == ["decode", "flush"]
    assert "buffer_lens" in decode.calls[0][1]
    with pytest.raises(ValueError, match="--drafts 0 with GATED_DELTA_VLLM_RING=1"):
        plan("vllm", NEXT, drafts=3)


def test_memory_of_drafts_is_what_the_plug_in_logs(plan, monkeypatch, caplog):
    """At 8 requests; the engine has a row more."""
    caplog.set_level(logging.INFO, sglang_process.LOG.name)
    drafts = plan("sglang", NEXT, tp=2, drafts=4, requests=8).drafts
    sizes = dict(T=16, H=2, HV=4, K=64, V=128, gate="head", num_layers=6, device="meta")
    monkeypatch.setattr(sglang_kvbuffer, "sizes", lambda configurator: sizes)
    monkeypatch.setattr(sglang_process.state, "ring", None)

    @dataclasses.dataclass
    class Cache:
        intermediate_ssm: object
        temporal: object

    scratch = torch.empty(6, 9, 4, 4, 128, 64, device="meta")
    pool = SimpleNamespace(mamba_cache=Cache(scratch, scratch[:, :, 0]), mem_usage=0)
    sglang_kvbuffer._replace(SimpleNamespace(mamba_pool=pool, alloc_rows=None), None)
    states, buffer = (f"{drafts[name] / 2**30:.3f}" for name in ("states", "kvbuffer"))
    assert caplog.messages == [
        f"gated_delta keeps drafts in {buffer} GiB, in place of {states} GiB of states"
    ]
    assert drafts["states"] == scratch.nbytes
    buffer = 8 * 6 * 4 * 4 * (8 * 128 + 4 * 64 + 8)  # fp32: u, k, log decays of 4 tokens
    assert plan("vllm", NEXT, drafts=3, requests=8).drafts == dict(
        states=6 * 24 * 8 * 64 * 128 * 2, kvbuffer=buffer
    )


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.usefixtures("compiled", "card")
def test_a_model_that_passes(engine, check, tmp_path):
    file = tmp_path / "x.json"
    result = check(engine, SMALL, "--drafts", "2", "--device", "cuda", "--json", str(file))
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert {one["status"] for one in written["results"]} == {"passed"}
    assert written["engine"]["gpu"].startswith("A card, compute capability 9.0, level sm_90a")
    assert written["engine"]["name"] == engine
    assert [(x["name"], x["ours"]) for x in written["engine"]["modes"]] == [
        (name, True) for name in preflight.MODES[engine]
    ]
    assert "is not installed here" in result.output


@pytest.mark.usefixtures("compiled", "card")
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "for H100 (sm_90a), not for a GPU here: no kernel was run"),
        (["--gpu", "l40s", "--device", "cuda"], "for L40S (sm_80), not for a GPU here"),
        (["--gpu", "RTX PRO 6000"], "for RTX PRO 6000 (sm_120a, level sm_90), not for"),
    ],
)
def test_a_gpu_that_is_not_here(options, shown, check, monkeypatch):
    """No kernel is compared, on the reference backend neither."""
    monkeypatch.setattr(testing, "run_case", lambda *_: pytest.fail("ran"))
    result = check("sglang", NEXT, *options)
    assert result.exit_code == 0, result.output
    assert shown in result.output


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("engine", preflight.MODES)
@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({}, ["--dtype", "fp32"], "bf16 or fp16 inputs, got fp32"),
        (dict(linear_key_head_dim=256), [], "got 256"),
        (dict(linear_value_head_dim=512), [], "V of 64, 128 or 192, got 512"),
    ],
)
def test_what_no_kernel_runs_is_the_engines(engine, changed, options, reason, check):
    result = check(engine, NEXT | changed, "--op", "prefill", *options)
    assert result.exit_code == 1
    assert f"prefill │ {preflight.ENGINES[engine]} │" in " ".join(result.output.split())
    assert reason in result.output


def test_products_are_those_of_the_page():
    page = (Path(__file__).parents[1] / "docs/gpus.md").read_text()
    (table,) = re.findall(r"^\| GPUs \| compute.*?(?=\n\n)", page, re.M | re.S)
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:-1]]
    listed = {
        name.strip(): tuple(map(int, capability.strip().split(".")))
        for products, capabilities in rows
        for names, capability in zip(products.split(";"), capabilities.split(";"), strict=True)
        for name in names.replace(" 5090", " RTX 5090").split(",")
    }
    assert listed == PRODUCTS
    assert PRODUCTS.keys() == {product(name.lower()) for name in PRODUCTS}
    assert set(PRODUCTS.values()) == set(GPUS)


def few(problem, drafts, cases_like=card_check.cases_like):
    """The first of the cases, for the time that the others take."""
    return cases_like(problem, drafts)[:1]


@pytest.mark.usefixtures("compiled", "card")
def test_a_wrong_kernel_is_noticed(check, monkeypatch):
    right = reference.decode

    def wrong(tokens, **states):
        return right(tokens._replace(q=tokens.q * 1.1, qk_l2norm=False), **states)

    monkeypatch.setattr(reference, "decode", wrong)
    result = check("sglang", SMALL, "--op", "decode", "--device", "cuda")
    assert result.exit_code == 1
    assert "FAILED decode-gdn-h1x2-k64v64-" in result.output


@pytest.mark.parametrize(("gpu", "arch"), [("H200", ""), ("A10", "--arch sm_80 ")])
def test_kernels_that_a_pack_lacks_are_named(check, monkeypatch, tmp_path, gpu, arch):
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path / "pack"))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    result = check("vllm", NEXT, "--op", "decode", "--gpu", gpu)
    assert result.exit_code == 1
    assert "decode lacks decode axis=head K=64 V=128 " in result.output
    assert f"gated-delta compile {arch}--size 64x128" in " ".join(result.output.split())


@needs_compiler
def test_the_command_of_a_plan_builds_its_kernels(plan, monkeypatch, tmp_path):
    """Run as it stands, but for the time: it compiles one kernel of all that it lists."""
    built = []

    def build(builds, out, *_):
        monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(out))
        built.extend(builds)
        compile.build(*next(x for x in builds if x[0].label in flushes))

    monkeypatch.setattr(cli, "build_all", build)
    for name, value in dict(JIT="0", SGLANG_KVBUFFER="1", CACHE_DIR=tmp_path / "a pack").items():
        monkeypatch.setenv(f"GATED_DELTA_{name}", str(value))

    def missing():
        modes = plan("sglang", NEXT, drafts=4, tree=True, ring=True).modes
        return [mode.reason for mode in modes], {x for mode in modes for x in mode.unbuilt}

    reasons, before = missing()
    flushes = {x for x in before if x.startswith("flush") and x.endswith("path=True")}
    assert any(x.startswith("decode") and x.endswith("history=True") for x in before)
    assert any(x.startswith("verify") and x.endswith("tree=True") for x in before)
    (command,) = {re.search("`gated-delta (compile .*?)`", reason)[1] for reason in reasons}
    assert command.startswith("compile --size 64x128 --ring --trees --out ")
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0
    assert before <= {variant.label for variant, _ in built}
    _, after = missing()
    assert before - after == flushes != set()


BLOCK_FP8 = dict(quant_method="fp8", weight_block_size=[128, 128])


@pytest.mark.parametrize(
    ("engine", "changes", "gpu", "switch", "asked"),
    [
        ("sglang", {}, "H200", "1", True),
        ("sglang", {}, "H200", "0", False),
        ("sglang", {}, "B200", "1", False),
        ("vllm", {}, "H200", "1", False),
        ("sglang", dict(linear_value_head_dim=64), "H200", "1", False),
        ("sglang", dict(dtype="float16"), "H200", "1", False),
        ("sglang", dict(quantization_config=dict(quant_method="fp8")), "H200", "1", False),
        ("sglang", dict(quantization_config=dict(BLOCK_FP8, quant_method="x")), "H200", "1", False),
    ],
)
def test_kernels_in_fp8_where_the_engine_takes_them(
    engine, changes, gpu, switch, asked, plan, monkeypatch, tmp_path
):
    monkeypatch.setattr(compile, "missing", lambda variant, gpu: ())
    settings = dict(JIT="0", SGLANG_QUANTISE=switch, CACHE_DIR=tmp_path / "pack")
    for name, value in settings.items():
        monkeypatch.setenv(f"GATED_DELTA_{name}", str(value))
    config = NEXT | dict(quantization_config=BLOCK_FP8) | changes
    drafts = dict(drafts=4) if engine == "sglang" else {}
    modes = plan(engine, config, gpu=gpu, **drafts).modes
    in_fp8 = {mode.name for mode in modes if any("fp8=True" in x for x in mode.unbuilt)}
    assert in_fp8 == ({mode.name for mode in modes} if asked else set())
    assert all(("--fp8 " in mode.reason) == asked for mode in modes)


def test_kernels_to_be_compiled_are_counted(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "missing", lambda variant, gpu: ())
    monkeypatch.setattr(preflight.compile, "installed", lambda package: "4.8.1")
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path / "pack"))
    (mode,) = plan("sglang", NEXT, modes=("decode",)).modes
    assert mode.ours
    assert mode.reason.startswith(f"its start compiles {len(mode.unbuilt)} kernels; ")
    assert all(label.startswith("decode axis=head K=64 V=128 ") for label in mode.unbuilt)
    monkeypatch.setenv("CC", "no-such-cc")
    (mode,) = plan("sglang", NEXT, modes=("decode",)).modes
    assert not mode.ours
    assert mode.reason.startswith(f"its start cannot compile {len(mode.unbuilt)} kernels: CC: ")


def test_a_release_that_is_not_served(check, monkeypatch):
    monkeypatch.setattr(releases, "installed", lambda engine: "0.4.0")
    monkeypatch.setattr(releases.Release, "changes", lambda release: ["a_hook"])
    result = check("sglang", NEXT)
    assert result.exit_code == 1
    assert "SGLang 0.4.0 is not served" in result.output
    assert "which changes a_hook" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("engine", "config", "options", "word"),
    [
        ("sglang", NEXT, ["--tp", "3"], "expected --tp to divide H=4, got 3"),
        ("sglang", dict(model_type="llama"), [], "no model_type 'llama' in SGLang"),
        ("vllm", NEXT | dict(model_type="gigachat3_5"), [], "no model_type 'gigachat3_5' in vLLM"),
        ("vllm", dict(model_type="qwen3_next"), [], "expected linear_num_key_heads in config.json"),
        ("vllm", NEXT | dict(dtype="int8"), [], "float32, got 'int8'"),
        (
            "vllm",
            NEXT | dict(dtype="auto"),
            [],
            "expected dtype in config.json of a qwen3_next, or",
        ),
        ("vllm", NEXT | dict(dtype=None), [], "or --dtype"),
        ("sglang", NEXT | dict(mamba_ssm_dtype=16), [], "mamba_ssm_dtype in config.json of a qwen"),
        *(
            ("sglang", NEXT | {name: value}, [], f"expected {name} in config.json of a qwen3_next")
            for name, values in dict(
                linear_num_value_heads=(10**9, 10**30, True, "8", 8.0, 0, -8, [8]),
                linear_key_head_dim=(10**6, False),
                linear_value_head_dim=("x",),
                num_hidden_layers=(2**40, True),
                full_attention_interval=(-1, 0, "4"),
                layer_types=(3, "linear_attention", [1]),
            ).items()
            for value in values
        ),
        (
            "vllm",
            NEXT | dict(full_attention_interval=1),
            [],
            "expected linear layers in config.json",
        ),
        ("vllm", NEXT | dict(linear_num_value_heads=6), [], "to be a multiple of H=4, got 6"),
        (
            "vllm",
            NEXT | dict(linear_num_value_heads=1024, linear_value_head_dim=1024),
            [],
            "expected states of up to 16,777,216 numbers on a rank",
        ),
        *(
            ("vllm", KIMI_LINEAR | dict(gate_lower_bound=bound), [], "expected gate_lower_bound in")
            for bound in ("x", True, 5.0, 0, -math.inf, math.nan)
        ),
        (
            "vllm",
            dict(model_type="kimi_linear"),
            [],
            "expected linear_attn_config in config.json of a kimi_linear: an object",
        ),
        (
            "sglang",
            dict(model_type="kimi_k3", text_config=dict(linear_attn_config=dict(head_dim=128))),
            [],
            "expected num_heads in linear_attn_config of config.json of a kimi_k3",
        ),
        ("sglang", dict(model_type="glm5_next"), [], "expected linear_num_heads in config.json"),
        (
            "sglang",
            LING | dict(layer_group_size=-1),
            [],
            "expected layer_group_size in config.json",
        ),
        ("sglang", LING | dict(layer_group_size=[1, True]), [], "expected layer_group_size in"),
        (
            "sglang",
            LING | dict(kda_safe_gate="false"),
            [],
            "kda_safe_gate in config.json of a bail",
        ),
        ("vllm", dict(NEXT, model_type=["qwen3_next"]), [], "expected model_type in config.json"),
        ("vllm", {}, [], "expected model_type in config.json"),
        ("sglang", NEXT, ["--drafts", str(10**12)], "--drafts"),
        ("sglang", NEXT, ["--requests", str(10**18)], "--requests"),
        ("vllm", NEXT, ["--tp", str(10**30)], "expected --tp to divide H=4"),
        ("vllm", NEXT, ["--gpu", "V100"], "--gpu: expected one of A100, A30, "),
        ("vllm", NEXT, ["--gpu", "H100", "--level", "sm_80"], "--level"),
        ("vllm", NEXT, ["--backend", "reference"], "expected auto or cute with --engine"),
        ("vllm", [], [], "expected a JSON object"),
        ("vllm", NEXT, ["--op", "verify"], "expected --op to be of decode, prefill, got verify"),
        ("vllm", NEXT, ["--model", "/nowhere"], "expected --model, a directory with config.json"),
        ("vllm", NEXT, ["--quick"], "expected only without --engine"),
    ],
)
def test_refusals_have_one_line(engine, config, options, word, check):
    result = check(engine, config, *options)
    assert result.exit_code == 2
    assert word in result.output
    assert result.output.count("\n") == 1


def test_options_of_engines_need_one():
    result = CliRunner().invoke(app, ["check", "--tp", "2"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "expected only with --engine" in result.output
