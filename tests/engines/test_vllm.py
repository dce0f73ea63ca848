"""vLLM's engine on a CPU, with its layers on gated_delta: `make test-vllm`. A process a case."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import breakages
import pytest
import safetensors.torch
import torch
import transformers
import vllm_driver
import vllm_steps
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend

import gated_delta
from gated_delta import preflight
from gated_delta.gpus import H200
from gated_delta.integrations.engine import load, projection, releases
from gated_delta.integrations.engine.calls import Calls

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
TRAINED = SOURCES / "gated_delta" / "demo" / "tiny_qwen3_5"
PROMPTS = [
    list(b"The for statement is used to iterate over"),
    list(b"def f(x):\n    return x\n") * 12,
    list(b"for"),
    list(b"class A:\n    def g(self):\n        pass\n")
    * 20,  # longer than a chunk of prefill: max_num_batched_tokens
]
ONE_TOKEN = list(b"g")
STEPS = 24
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=1)


CHECKPOINTS = "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"


class Run(NamedTuple):
    rounds: list[dict[str, Any]]
    calls: dict[str, int]
    batches: list[str]
    report: list[dict[str, Any]]
    kernels: dict[str, list[str]]
    ranks: list[list[dict[str, Any]]]
    log: str

    @property
    def tokens(self) -> list[list[int]]:
        return self.rounds[0]["tokens"]


def run(
    tmp_path: Path,
    model: Path,
    *,
    plugin: str | None = "1",
    job: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **engine: Any,
) -> Run:
    options = dict(dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8, seed=0)
    # A prefill chunk must be a block of the cache, up to 256 tokens, plus decodes.
    options |= dict(max_num_batched_tokens=320)
    asked = dict(
        engine=options | dict(model=str(model)) | engine,
        prompts=PROMPTS,
        max_tokens=STEPS,
        rounds=1,
        result=str(tmp_path / "result.json"),
    )
    variables = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([str(HERE / "site"), str(SOURCES)]),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        # vLLM inspects a model class in a separate process, and caches the result.
        VLLM_CACHE_ROOT=str(Path(sys.prefix) / "cache"),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    variables.pop("GATED_DELTA_VLLM", None)
    variables |= {} if plugin is None else dict(GATED_DELTA_VLLM=plugin)
    done = subprocess.run(
        [sys.executable, HERE / "vllm_driver.py"],
        input=json.dumps(asked | (job or {})),
        text=True,
        capture_output=True,
        env=variables | (env or {}),
        timeout=900,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    return Run(**json.loads((tmp_path / "result.json").read_text()), log=log)


def expected(model: Any) -> list[list[int]]:
    """transformers' greedy tokens, in fp32, a prompt at a time."""
    tokens = []
    for prompt in (*PROMPTS, ONE_TOKEN):
        # transformers' cache needs a layer of full attention.
        cached = model.config.model_type != "kimi_linear"
        options = dict(
            max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, use_cache=cached
        )
        result = model.float().eval().generate(torch.tensor([prompt]), **options)
        tokens.append(result[0, len(prompt) :].tolist())
    return tokens


COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    max_position_embeddings=1024,
    initializer_range=0.2,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)
GDN: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=64,
)


def qwen3_5() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)


def qwen3_next() -> Any:
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**COMMON, **GDN, head_dim=32, mlp_only_layers=[0, 1, 2])
    )


def olmo_hybrid() -> Any:
    return transformers.OlmoHybridForCausalLM(
        transformers.OlmoHybridConfig(
            **COMMON | dict(hidden_size=64), **GDN, linear_allow_neg_eigval=True
        )
    )


def kimi_linear() -> Any:
    """KDA layers only: vLLM cannot build the others on a CPU."""
    common = COMMON | dict(layer_types=["linear_attention"] * 3, num_key_value_heads=2)
    mla = dict(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    config = transformers.KimiLinearConfig(
        **common, **mla, mlp_layer_types=["dense"] * 3, linear_num_heads=3, linear_head_dim=32
    )
    return transformers.KimiLinearForCausalLM(config)


def bounded() -> Any:
    """With GLM's gate of at least -5: Kimi Linear has all of a GLM-5.3 or Ling-3.0 layer else."""
    model = kimi_linear()
    for layer in model.model.layers:
        gate = layer.self_attn.forget_gate
        gate.__class__, gate.safe_gate_lower_bound = Glm5NextTextForgetGate, -5.0
    return model


def glm5_next() -> Any:
    return bounded()


def ling() -> Any:
    return bounded()


def kimi_k3() -> Any:
    return bounded()


def save_as(name: str, directory: Path) -> None:
    """Turns a saved `bounded` into GLM's or Ling's names and settings."""
    file, settings = directory / "model.safetensors", directory / "config.json"
    weights, config = safetensors.torch.load_file(file), json.loads(settings.read_text())
    if name == "glm5_next":  # without hyper-connections, which vLLM's class has as an option
        config |= dict(
            architectures=["Glm5NextForCausalLM"],
            linear_conv_kernel_dim=4,
            linear_lower_bound=-5.0,
            mla_use_nope=False,
            **dict.fromkeys(("mhc", "swiglu_limit", "index_topk", "n_routed_experts")),
        )
    elif name == "kimi_k3":  # vLLM's text model takes K3's layers for their gate of full rank
        config["linear_attn_config"] |= dict(use_full_rank_gate=True, gate_lower_bound=-5.0)
    else:
        config |= dict(
            architectures=["BailingMoeV3ForCausalLM"],
            head_dim=32,
            num_attention_heads=3,
            num_key_value_heads=3,
            short_conv_kernel_size=4,
            no_kda_lora=True,
            use_bias=False,
            layer_group_size=4,
            num_experts=4,
        )
        weights["model.word_embeddings.weight"] = weights.pop("model.embed_tokens.weight")
    for gate in dict(kimi_k3="g", ling="fg").get(name, ""):  # of full rank
        for layer in range(3):
            prefix = f"model.layers.{layer}.self_attn.{gate}"
            low, high = (weights.pop(f"{prefix}_{part}_proj.weight") for part in "ab")
            weights[f"{prefix}_proj.weight"] = high @ low
    safetensors.torch.save_file(weights, file, metadata=dict(format="pt"))
    settings.write_text(json.dumps(config))


def save(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)
    file, kind = directory / "model.safetensors", model.config.model_type
    if (
        kind == "olmo_hybrid"
    ):  # transformers saves its convolution in three equal parts, whatever their widths
        weights = model.state_dict()
        for name in [name for name in weights if "conv1d" in name]:
            for part, x in zip("qkv", weights.pop(name).split((64, 64, 256)), strict=True):
                weights[name.replace("conv1d", f"{part}_conv1d")] = x.contiguous()
    else:
        weights = {
            name.replace("block_sparse_moe", "mlp"): x
            for name, x in safetensors.torch.load_file(file).items()
        }
    safetensors.torch.save_file(weights, file, metadata=dict(format="pt"))
    if kind == "kimi_linear":
        layers = dict(
            kda_layers=[1, 2, 3],
            full_attn_layers=[],
            head_dim=32,
            num_heads=3,
            short_conv_kernel_size=4,
        )
        # With MLA vLLM has no chunked prefill and no prefixes.
        no_mla = dict.fromkeys(
            ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        config = json.loads((directory / "config.json").read_text())
        config |= dict(
            linear_attn_config=layers, num_experts=None, first_k_dense_replace=3, **no_mla
        )
        (directory / "config.json").write_text(json.dumps(config))


class Model(NamedTuple):
    """tokens: of PROMPTS. after_one: of ONE_TOKEN."""

    path: Path
    tokens: list[list[int]]
    after_one: list[int]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result: dict[str, Model] = {}

    def get(make: Any) -> Model:
        name = make.__name__
        if name not in result:
            torch.manual_seed(0)
            model, path = make(), tmp_path_factory.mktemp(name)
            *tokens, after_one = expected(model)
            result[name] = Model(path, tokens, after_one)
            save(model, path)
            if make in (glm5_next, ling, kimi_k3):
                save_as(name, path)
        return result[name]

    return get


KDA = (kimi_linear, glm5_next, ling, kimi_k3)
ON_GATED_DELTA = dict(decode="gated_delta", prefill="gated_delta")
# The only dtype of vLLM's CPU kernels.
BF16: dict[str, Any] = dict(dtype="bfloat16", enable_prefix_caching=True)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """vLLM without the plug-in, with the gaps between its two most likely tokens."""
    job = dict(logprobs=2)
    return run(tmp_path_factory.mktemp("own"), TRAINED, plugin=None, job=job, **BF16)


TIE = 0.0625
"""A gap of log probabilities that roundings of bf16 may close; CPUs round differently."""


def same_but_for_ties(result: Run, plain: Run) -> bool:
    """Whether each answer is the plain one, up to a token where the plain one nearly ties."""
    answers = zip(result.tokens, plain.tokens, plain.rounds[0]["gaps"], strict=True)
    parts = [
        next((gap for x, y, gap in zip(ours, theirs, gaps, strict=True) if x != y), 0.0)
        for ours, theirs, gaps in answers
    ]
    return max(parts) <= TIE


def test_plugin_not_chosen(plain: Run) -> None:
    assert plain.report == []
    assert plain.calls == {}
    assert "gated_delta " not in plain.log


@pytest.mark.parametrize("make", [qwen3_next, olmo_hybrid, kimi_linear])
def test_tokens_of_transformers(make: Any, models: Any, tmp_path: Path) -> None:
    """Prefills in chunks, beside decodes too; the second round starts from cached prefixes.

    test_checkpoints has the other models.
    """
    model = models(make)
    result = run(tmp_path, model.path, job=dict(rounds=2), enable_prefix_caching=True)
    assert result.tokens == model.tokens
    assert result.rounds[1]["tokens"] == model.tokens
    assert result.rounds[0]["cached"] == [0] * len(PROMPTS)
    assert result.rounds[1]["cached"][3] >= 256
    assert {"prefill", "decode", "prefill+decode"} <= set(result.batches)
    _all_on_gated_delta(result, "prefill", "decode")
    assert result.calls["prefill from a state"]
    # Short prompts keep vLLM's convolution.
    assert 0 < result.calls["short_conv"] < result.calls["prefill"]
    assert result.calls.get("longest")
    normed = result.calls["decode"] + result.calls["prefill"]
    assert result.calls["norm"] == (0 if make is olmo_hybrid else normed)
    raw, steps = result.calls["raw steps"], result.calls["decode"]
    # Those beside short prompts are convolved with them.
    assert steps / 2 < raw < steps if make is qwen3_next else raw == 0
    _as_planned(result, model.path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "block"), [(qwen3_5, 64), (qwen3_next, 64), (glm5_next, 64), (ling, 32)]
)
def test_checkpoints(make: Any, block: int, models: Any, tmp_path: Path) -> None:
    """Prefills past the end of a cached prefix keep its state, as in vLLM 0.33; 0.32 is patched.

    vLLM 0.33 makes blocks multiples of a chunk. Other block sizes allow no state inside a prefill,
    so vLLM ends prefills there.
    """
    model = models(make)
    engine: dict[str, Any] = dict(
        max_num_batched_tokens=1024, enable_prefix_caching=True, block_size=block
    )
    invariant = dict(VLLM_BATCH_INVARIANT=str(int(block == 64)))
    job = dict(rounds=2, grid=True) | (dict(prompts_alone=1) if make is qwen3_next else {})
    result = run(tmp_path, model.path, job=job, env=invariant, **engine)
    assert result.tokens == model.tokens
    assert result.rounds[1]["tokens"] == model.tokens
    assert result.rounds[1]["cached"][3] >= 256
    assert bool(result.calls["checkpoints"]) == (block == 64)
    assert result.calls.get("windows", 0) == result.calls["checkpoints"]
    if block == 64:
        assert result.calls["short_conv"] == result.calls["prefill"]
    assert result.calls["whole rows"] == (result.calls["prefill"] if make is qwen3_next else 0)
    assert bool(result.calls["raw steps"]) == (make is qwen3_5)
    assert result.calls["deterministic"] == (result.calls["prefill"] if block == 64 else 0)
    _all_on_gated_delta(result, "prefill", "decode")


@pytest.mark.parametrize(
    "of_vllm", [None, 64], ids=["vLLM's prefill keeps none", "vLLM's prefill keeps them"]
)
@pytest.mark.parametrize("refused", [(), ("decode",), ("prefill",), ("decode", "prefill")], ids=str)
def test_who_keeps_checkpoints(
    refused: tuple[str, ...], of_vllm: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has blocks for them if a layer names an alignment: then every prefill must keep them."""
    from gated_delta.integrations.vllm import layers as vllm_layers

    plain = "get_prefill_checkpoint_alignment"  # inherited in vLLM 0.32
    monkeypatch.setattr(
        vllm_layers.QwenGatedDeltaNetAttention, plain, lambda layer: of_vllm, raising=False
    )
    layer = object.__new__(vllm_layers.Qwen)
    vars(layer).update(aligned=True, refused=dict.fromkeys(refused, "a reason"))
    wanted = layer.get_prefill_checkpoint_alignment() is not None
    assert wanted == (not refused or of_vllm is not None)
    assert layer._exports() == (wanted and "prefill" not in refused)


def test_batch_invariance(models: Any, tmp_path: Path) -> None:
    """A prompt alone and among 64 requests, in parts; test_checkpoints has cached prefixes."""
    model, others = models(kimi_k3), 30
    result = run(
        tmp_path,
        model.path,
        job=dict(
            alone=4, rounds=2, prompts=[*PROMPTS, *[PROMPTS[0], PROMPTS[2]] * others], max_tokens=8
        ),
        env=dict(VLLM_BATCH_INVARIANT="1"),
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    alone, together = (one["tokens"] for one in result.rounds)
    assert alone == [tokens[:8] for tokens in model.tokens]
    assert together == [*alone, *[alone[0], alone[2]] * others]
    assert set(result.batches) == {"prefill", "decode", "prefill+decode"}
    _all_on_gated_delta(result, "prefill", "decode")
    assert result.calls["deterministic"] == result.calls["prefill"]
    assert result.calls["most sequences"] > 48
    assert result.calls["prefill from a state"]
    assert "gated_delta cuts prompts at multiples of 64 tokens" in result.log


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({}, []),
        (dict(refused=dict(decode="K=96")), ["decode and prefill on gated_delta"]),
        (dict(num_spec=1), ["no draft tokens"]),
        (dict(ring=15), ["GATED_DELTA_VLLM_RING=0"]),
        (dict(dtype=torch.bfloat16), ["--mamba-ssm-cache-dtype float32"]),
        (dict(block_size=96), ["--block-size 128, .*, got 96"]),
        (dict(mamba_block_size=32), ["--block-size 64, .*, got 32"]),
        (dict(prefix_match_unit=32), ["--prefix-match-unit 64, .*, got 32"]),
        (dict(mamba_cache_mode="all"), ["--mamba-cache-mode align"]),
        (dict(mamba_cache_mode="none", block_size=96, prefix_match_unit=32), []),
        (dict(max_num_scheduled_tokens=63), ["--max-num-batched-tokens 64 or more, got 63"]),
        (dict(long_prefill_token_threshold=63), ["--long-prefill-token-threshold 0, or 64 .* 63"]),
        (dict(kv_transfer_config="a connector's"), ["no KV connector"]),
        (dict(get_scheduler_cls=lambda: SimpleNamespace), ["vLLM's scheduler, got SimpleNames"]),
    ],
)
def test_what_batch_invariance_needs(
    changed: dict[str, Any], needed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gated_delta.integrations.vllm import cuts as vllm_cuts
    from gated_delta.integrations.vllm import layers as vllm_layers

    case: dict[str, Any] = dict(refused={}, num_spec=0, dtype=torch.float32)
    case |= dict(block_size=128, mamba_block_size=128, mamba_cache_mode="align")
    case |= dict(max_num_batched_tokens=64, max_num_scheduled_tokens=None)
    case |= dict(long_prefill_token_threshold=64, prefix_match_unit=None, kv_transfer_config=None)
    case |= dict(get_scheduler_cls=lambda: vllm_cuts.Scheduler) | changed
    config = SimpleNamespace(**case)
    config.cache_config = config.scheduler_config = config
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = object.__new__(vllm_layers.Kimi)
    vars(layer).update(
        prefix="model.layers.0",
        refused=case["refused"],
        vllm_config=config,
        num_spec=case["num_spec"],
        ring=case.get("ring", 0),
        get_state_dtype=lambda: (torch.float32, case["dtype"]),
    )
    if needed:
        with pytest.raises(RuntimeError, match=f"model.layers.0 needs {needed[0]}"):
            layer.get_attn_backend()
    else:
        assert layer.get_attn_backend().supports_batch_invariance()


@pytest.mark.parametrize(
    ("changed", "tokens"),
    [
        ({}, 1088),
        (dict(block_size=2112, mamba_block_size=2112), 704),
        (dict(block_size=4096, mamba_block_size=4096), 1024),
        (dict(block_size=128, mamba_block_size=128), None),
        (dict(prefix_match_unit=64), None),
        (dict(mamba_cache_mode="none", block_size=96, prefix_match_unit=None), 1024),
        (dict(max_num_scheduled_tokens=4096), None),
        (dict(long_prefill_token_threshold=1000), None),
    ],
)
def test_segments_of_which_all_cuts_are_multiples(
    changed: dict[str, Any], tokens: int | None
) -> None:
    from gated_delta.integrations.vllm import cuts as vllm_cuts

    case: dict[str, Any] = dict(block_size=1088, mamba_block_size=1088, mamba_cache_mode="align")
    case |= dict(max_num_batched_tokens=8192, max_num_scheduled_tokens=None, max_num_seqs=64)
    config = SimpleNamespace(**case | dict(long_prefill_token_threshold=0) | changed)
    config.cache_config = config.scheduler_config = config
    assert vllm_cuts.segment(config, changed.get("prefix_match_unit")) == tokens


@pytest.fixture
def aligned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in's hook, for one test."""
    from gated_delta.integrations.vllm import cuts as vllm_cuts

    for name in ("__init__", "_reserve_prefill_lookahead"):
        monkeypatch.setattr(vllm_cuts.Scheduler, name, getattr(vllm_cuts.Scheduler, name))
    vllm_cuts.align.__wrapped__()
    return vllm_cuts.Scheduler


@pytest.mark.parametrize(
    "settings",
    [
        dict(block=2112),
        dict(block=1088, long_prefill_token_threshold=1000),
        dict(block=1088, long_prefill_token_threshold=100),
        dict(block=128, unit=64, max_num_batched_tokens=1000),
        dict(block=64, max_num_batched_tokens=256),
        dict(block=96, enable_prefix_caching=False, max_num_batched_tokens=1000),
        dict(block=1088, max_num_batched_tokens=4480, max_num_seqs=128),
    ],
    ids=str,
)
def test_every_cut_is_on_the_grid(settings: dict[str, Any], aligned: Any) -> None:
    """By vLLM's own scheduler, beside decodes and other prompts; the second time from the cache."""
    steps, parts = vllm_steps.Steps(**settings), 0
    for tokens in (65, 1520, 2049, 3999):
        for decodes, prompts in (0, 0), (3, 0), (1, 2), (100, 0), (100, 3):
            for _ in range(2):
                cuts = steps.cuts(tokens, decodes, prompts)
                grid = steps.scheduler.gated_delta_grid
                assert [place for place in cuts if place % grid] == []
                parts = max(parts, len(cuts))
    assert parts > 1
    assert grid == (1088 if settings.get("max_num_seqs") else 64)


def test_a_scheduler_off_the_grid_does_not_start(aligned: Any) -> None:
    """By the sizes that vLLM resolves for the whole cache."""
    for sizes, needed in ((64, 32), "--prefix-match-unit 64, .* 32"), ((96,), "--block-size 128"):
        with pytest.raises(RuntimeError, match=f"the scheduler needs {needed}"):
            vllm_steps.Steps(*sizes)


def test_a_cut_in_front_of_an_image(aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves to the grid, or stays where it is, with a warning, if nothing would be computed."""
    from gated_delta.integrations.vllm import process as vllm_process

    log: list[str] = []
    monkeypatch.setattr(vllm_process, "logger", lambda: SimpleNamespace(warning=log.append))
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=100))
    request = SimpleNamespace(request_id="r", num_tokens=3000, mm_features=[image])
    grid = dict(gated_delta_grid=64, num_prefill_lookahead=0)
    scheduler = SimpleNamespace(has_mamba_layers=True, **grid)

    def cut(start: int, tokens: int) -> int:
        return start + aligned._reserve_prefill_lookahead(scheduler, request, start, tokens)

    assert (cut(0, 100), cut(64, 35), cut(64, 0), cut(64, 2936)) == (64, 64, 64, 3000)
    assert log == []
    assert cut(64, 36) == 100
    assert "r is cut at 100" in log[0]
    scheduler.has_mamba_layers = False
    assert cut(0, 99) == 99


@pytest.fixture
def poisoned() -> Any:
    """NaN in all memory that torch does not initialise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


BATCHES = dict(none=None, empty=(0, 0, 0), decodes=(0, 4, 0), prefill=(1, 0, 0), mixed=(1, 0, 1))
"""Of 4 tokens, in 6 rows: prefills, decodes and requests with drafts; none: no metadata."""


@pytest.mark.parametrize("refused", [(), ("prefill",)], ids=["ours", "vLLM's"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["Qwen", "Next", "Olmo", "Kimi", "Glm", "Ling"])
def test_rows_behind_the_batch_are_zeros(
    name: str, batch: str, refused: Any, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NaN in these rows of the norm's gate; eager, as in graphs that break at the layer."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.models import bailing_moe_v3  # has Ling's operator
    from vllm.third_party.flash_linear_attention.ops import kda

    from gated_delta.integrations.vllm import layers as vllm_layers

    (T, n, H, D), counts = (6, 4, 2, 4), BATCHES[batch]
    x, z = torch.ones(T, 4 * H * D), torch.ones(T, H, D)
    x[n:] = z[n:] = torch.nan

    def engine(layer: Any, *args: Any, core_attn_out: Any = None, **others: Any) -> None:
        """vLLM's kernel."""
        out = args[-1] if core_attn_out is None else core_attn_out
        out.view(T, H, D)[: n if counts else 0] = 1

    def write(m: Any, rows: Any, out: torch.Tensor) -> None:
        out.fill_(1) if any(counts) else None

    kind = getattr(vllm_layers, dict(Next="Qwen").get(name, name))
    if name in ("Glm", "Ling"):
        assert bailing_moe_v3
        monkeypatch.setattr(kda, "fused_kda_gate", lambda g, *_, **options: g)  # in Triton
        bases = kind, type("Engine", (), dict(_forward=engine))
        kind = type(name, bases, dict.fromkeys(kind.__abstractmethods__))
    else:
        method = "_forward" if name == "Kimi" else "_forward_core"
        monkeypatch.setattr(kind.__bases__[-1], method, engine)
    layer = object.__new__(kind)
    reasons = dict.fromkeys(refused, "a reason")
    vars(layer).update(
        prefix="layer", sizes=(H, H, D, D), refused=reasons, fuses_norm=name != "Olmo"
    )
    vars(layer).update(profiled=True, _drafts=write, _others=write, separate_b_proj=True)
    vars(layer).update(split_ba=lambda ba: ba.chunk(2, -1), f_b_proj=lambda _: (z,))
    vars(layer).update(g_b_proj=lambda _: (z,), f_proj=lambda _: (z,), g_proj=lambda _: (z,))
    vars(layer).update(in_proj_qkvbfg_a=lambda _: (torch.ones(T, 3 * H * D + H + 2 * D),))
    vars(layer).update(in_proj_qkvz=lambda _: (x,), in_proj_ba=lambda _: (x[:, : 2 * H],))
    vars(layer).update(gqa_interleaved_layout=name == "Next", out_proj=lambda y: (y,))
    vars(layer).update(whole_rows=name == "Next", one_launch=name == "Next")
    vars(layer).update(deterministic=True, order=projection.order((H, H, D, D), x.dtype, "cpu"))
    vars(layer).update(qkv_proj=lambda _: (x[:, : 3 * H * D],), b_proj=lambda _: (x[:, :H],))
    vars(layer).update(norm=torch.mul, o_norm=torch.mul, o_proj=lambda y: (y,))
    vars(layer).update(A_log=None, dt_bias=None, lower_bound=None, safe_gate=False, head_dim=D)
    rows = dict(spec_token_indx=torch.tensor([0, 2]), non_spec_token_indx=torch.tensor([1, 3]))
    names = ("num_prefills", "num_decodes", "num_spec_decodes")
    m = counts and SimpleNamespace(
        **dict(zip(names, counts, strict=True)), num_actual_tokens=n, num_prefill_tokens=n, **rows
    )
    context = SimpleNamespace(
        attn_metadata=m and dict(layer=m), no_compile_layers=dict(layer=layer)
    )
    out = torch.full((T, H, D), torch.nan)
    with override_forward_context(context):
        if name in ("Qwen", "Next"):
            out = layer.forward(x)
        elif name == "Olmo":
            layer._forward_core(x, x[:, :H], x[:, :H], out)
        elif name == "Kimi":
            layer._forward(x, z[None], z.flatten(1), x[None, :, :H], out[None])
        elif name == "Glm":
            out = layer.forward(x, x)
        else:
            layer.forward(x, x, out.view(T, -1))
    written = n if counts and any(counts) else 0
    assert (out.flatten(1)[:written] == 1).all()
    assert (out.flatten(1)[written:] == 0).all()


def test_layer_classes_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known ones get our base when vLLM builds one; an unknown one stays, with a warning."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from gated_delta.integrations.vllm import layers as vllm_layers
    from gated_delta.integrations.vllm import process as vllm_process

    log: list[str] = []
    monkeypatch.setattr(PluggableLayer, "__new__", PluggableLayer.__new__)
    monkeypatch.setattr(vllm_process, "logger", lambda: SimpleNamespace(warning_once=log.append))
    vllm_layers.replace_later.__wrapped__()
    base, contents = vllm_layers.GatedDeltaNetAttention, dict(get_state_shape=None)
    known, unknown = (type(name, (base,), contents) for name in ("KimiK3DeltaAttention", "Solar"))
    try:
        assert isinstance(known.__new__(known), vllm_layers.KDA)
    finally:
        op_registry_oot.pop("KimiK3DeltaAttention", None)
    assert log == []
    assert type(unknown.__new__(unknown)) is unknown
    assert log == ["gated_delta does not know Solar, which runs on vLLM's kernels"]


def test_checkpoints_that_only_vllm_would_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashKDA's of GLM-5.3-Flash and Kimi K3: its layers ask for blocks by themselves."""
    from dataclasses import dataclass

    from gated_delta.integrations.vllm import layers as vllm_layers

    @dataclass
    class Spec:
        num_prefill_checkpoint_blocks: int = 1
        prefill_checkpoint_alignment: int | None = 16

    monkeypatch.setattr(
        vllm_layers.abstract.MambaBase, "get_kv_cache_spec", lambda layer, config: Spec()
    )
    layer = object.__new__(vllm_layers.Kimi)
    for refused, spec in ((), Spec(0, None)), (("decode",), Spec(0, None)), (("prefill",), Spec()):
        reasons = dict.fromkeys(refused, "a reason")
        vars(layer).update(aligned=False, refused=reasons)
        assert layer.get_kv_cache_spec(None) == spec


def test_drafts_beside_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kimi K3's metadata may have them."""
    from gated_delta.integrations.vllm import layers as vllm_layers
    from gated_delta.integrations.vllm import process as vllm_process

    def fill(value: float) -> Any:
        return lambda m, rows, out: out.copy_(value + rows[0])

    layer = object.__new__(vllm_layers.Kimi)
    vars(layer).update(
        prefix="layer",
        refused={},
        fuses_norm=True,
        _drafts=fill(1),
        _others=fill(2),
    )
    metadata = SimpleNamespace(
        num_prefills=0,
        num_decodes=2,
        num_spec_decodes=1,
        num_actual_tokens=5,
        spec_sequence_masks=None,
        spec_token_indx=torch.tensor([1, 2, 3]),
        non_spec_token_indx=torch.tensor([0, 4]),
    )
    context = SimpleNamespace(attn_metadata=dict(layer=metadata))
    monkeypatch.setattr(vllm_layers, "get_forward_context", lambda: context)
    x, out = torch.arange(6.0)[:, None], torch.zeros(6, 1)
    assert layer._run(x, x, x, out, x)
    assert out.flatten().tolist() == [2, 2, 3, 4, 6, 0]
    calls = Calls("vllm", print)
    monkeypatch.setattr(vllm_process, "calls", calls)
    layer.refused["decode"] = "another dtype"
    assert not layer._run(x, x, x, out, x)
    assert calls.at("layer", False) == dict(decode=1, drafts=1)
    assert calls.lines() == [
        f'gated_delta health op={op} family=kda engine=vllm ours=0 engine_own=1 reason="{reason}"'
        for op, reason in dict.fromkeys(("decode", "drafts"), "another dtype").items()
    ]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["Next", "Kimi"])
def test_prompts_are_convolved_as_by_vllm(name: str, drafts: int) -> None:
    """Of whole rows, beside decodes, on vLLM's windows, whose other entries stay."""
    from gated_delta.integrations.vllm import layers as vllm_layers

    H, HV, V, K = sizes = (2, 4, 8, 8) if name == "Next" else (2, 2, 8, 8)
    C, lengths, n = projection.width(sizes), [1, 1, 2, 3, 70, 64, 1], 2
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(lengths), C + HV * V, generator=generator)
    if name == "Kimi":
        rows = rows[:, :C]  # before beta and the gate
    page = torch.randn(9, (3 + drafts) * C + 5, generator=generator)
    page[0] = torch.nan
    weight = torch.randn(C, 4, generator=generator)
    slots, starts = torch.tensor([7, 2, 5, 0, 1, 8, 4]), torch.tensor([0, *lengths]).cumsum(0)
    resumed = torch.tensor([True, True, True, True, False, True, False])
    theirs = page.clone()

    def windows(x: torch.Tensor) -> torch.Tensor:
        return x[:, : (3 + drafts) * C].view(len(x), 3 + drafts, C).mT

    layer = object.__new__(getattr(vllm_layers, dict(Next="Qwen").get(name, name)))
    vars(layer).update(sizes=sizes, order=projection.order(sizes, rows.dtype, "cpu"))
    vars(layer)["_convolution"] = lambda: (windows(page), weight, None, "silu")
    m = SimpleNamespace(prefill_state_indices=slots[n:], prefill_has_initial_state=resumed[n:])
    m.prefill_query_start_loc = starts[n:] - n
    x = layer._convolve(m, rows[n:])
    given = dict(query_start_loc=starts, cache_indices=slots, has_initial_state=resumed)
    given |= dict(conv_states=windows(theirs), activation="silu")
    y = vllm_steps.conv_prefill(layer._qkv(rows).T, weight, None, **given).T
    assert torch.allclose(x, y[n:], rtol=1e-5, atol=1e-6)
    theirs[slots[:n]] = page[slots[:n]]  # of the decodes
    assert torch.equal(page.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("prompt", [0, 70], ids=["padded", "beside a prompt"])
@pytest.mark.parametrize("by_head", [True, False], ids=["Next", "3.5"])
def test_a_step_in_one_launch(by_head: bool, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On raw rows, as after a split and vLLM's convolution, in pages of a window and a state."""
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    from gated_delta.integrations.vllm import layers as vllm_layers

    monkeypatch.setattr(causal_conv1d, "causal_conv1d_update", vllm_driver.conv_update)
    H, HV, V, K = sizes = (2, 4, 8, 16)
    C, generator = projection.width(sizes), torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator)
    slots, n = torch.tensor([5, 2, 3] if prompt else [5, 2, 0, 0]), 2
    tokens = n + prompt if prompt else len(slots)
    rows, ba, pages = normal(tokens, C + HV * V), normal(tokens, 2 * HV), normal(7, 3 * C + 512 + 5)
    if not prompt:
        rows[n:] = ba[n:] = torch.nan
    pages[0] = torch.nan
    weight, A_log, dt_bias = normal(C, 4), normal(HV), normal(HV)
    norm = SimpleNamespace(weight=normal(V), eps=1e-6, activation="silu")
    m = SimpleNamespace(num_prefills=int(prompt > 0), num_decodes=n, num_spec_decodes=0)
    m.num_actual_tokens, m.num_decode_tokens, m.num_prefill_tokens = tokens, n, prompt
    m.non_spec_state_indices_tensor, m.prefill_state_indices = slots, slots[n : n + 1]
    m.prefill_has_initial_state, m.checkpoint = torch.ones(1, dtype=torch.bool), None
    m.prefill_query_start_loc = torch.tensor([0, prompt])

    def run(one_launch: bool, x: torch.Tensor, ba: torch.Tensor) -> Any:
        memory, out = pages.clone(), torch.full((tokens, HV, V), torch.nan)
        windows = memory[:, : 3 * C].view(-1, 3, C).mT
        states = memory[:, 3 * C : 3 * C + 512].view(-1, HV, V, K)
        layer = object.__new__(vllm_layers.Qwen)
        vars(layer).update(prefix="layer", sizes=sizes, refused={}, fuses_norm=True, norm=norm)
        vars(layer).update(kv_cache=(None, states), A_log=A_log, dt_bias=dt_bias, num_spec=0)
        vars(layer).update(backend="reference", deterministic=False, aligned=False)
        vars(layer).update(whole_rows=one_launch and by_head, one_launch=one_launch)
        vars(layer).update(gqa_interleaved_layout=one_launch and by_head)
        vars(layer).update(split_ba=lambda ba: ba.chunk(2, -1))
        vars(layer).update(dict(_update=None) if one_launch else {})
        vars(layer)["_convolution"] = lambda: (windows, weight, None, "silu")
        with override_forward_context(SimpleNamespace(attn_metadata=dict(layer=m))):
            layer._forward_core_fused_norm_packed(x, ba, out)
        return out, memory

    of_heads = ba.view(tokens, H, 2, HV // H)
    split = projection.joined(projection.split_interleaved(rows, sizes))
    split_ba = torch.cat([of_heads[:, :, 0].flatten(1), of_heads[:, :, 1].flatten(1)], 1)
    raw = (rows, ba) if by_head else (split, split_ba)
    (theirs, theirs_memory), (ours, memory) = run(False, split, split_ba), run(True, *raw)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (ours[n:] == 0).all() or prompt
    assert torch.allclose(memory, theirs_memory, rtol=1e-4, atol=1e-5, equal_nan=True)
    moved = slots[slots > 0]
    windows = [x[moved, : 3 * C] for x in (memory, theirs_memory)]
    assert torch.equal(*windows)
    assert not torch.equal(windows[0], pages[moved, : 3 * C])
    unmoved = [row for row in range(len(pages)) if row not in moved]
    assert torch.equal(memory[unmoved].nan_to_num(9), pages[unmoved].nan_to_num(9))


def test_a_convolution_that_ours_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of another dtype: nothing is written, and vLLM's kernel runs from then on."""
    from gated_delta.integrations.vllm import layers as vllm_layers
    from gated_delta.integrations.vllm import process as vllm_process

    log: list[str] = []
    monkeypatch.setattr(vllm_process, "logger", lambda: SimpleNamespace(warning_once=log.append))
    layer, windows = object.__new__(vllm_layers.Kimi), torch.ones(2, 48, 3)
    vars(layer).update(sizes=(2, 2, 8, 8), prefix="layer", deterministic=True)
    vars(layer)["_convolution"] = lambda: (windows, torch.ones(48, 4), None, "silu")
    one = torch.ones(1, dtype=torch.int32)
    m = SimpleNamespace(prefill_state_indices=one, prefill_has_initial_state=one > 0)
    m.prefill_query_start_loc, m.num_prefill_tokens, m.num_prefills = one.new_tensor([0, 5]), 5, 1
    assert layer._convolves(m)
    assert layer._convolve(m, torch.ones(5, 48, dtype=torch.bfloat16)) is None
    assert not layer._convolves(m)
    assert (windows == 1).all()
    (line,) = log
    assert line.endswith("ours needs windows in torch.bfloat16, got torch.float32")


def test_accepted_drafts_are_clamped_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's metadata of a step stays; a CUDA graph's own run of the clamp does too."""
    from gated_delta.integrations.vllm import layers as vllm_layers

    step = SimpleNamespace(num_spec_decodes=3, num_accepted_tokens=torch.tensor([0, 2, 1, 7]))
    eager = vllm_layers._accepted(step, cuda=False)
    assert eager.tolist() == [1, 2, 1]
    assert step.num_accepted_tokens.tolist() == [0, 2, 1, 7]  # the runner's own
    assert vllm_layers._accepted(step, cuda=False) is eager
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        first, second = (vllm_layers._accepted(step, cuda=True) for _ in range(2))
        assert first is second
        assert (first is eager) == (not capturing)


def test_preempted_and_aborted(models: Any, tmp_path: Path) -> None:
    """Preempted requests start again, from zeros or a cached prefix, in slots used meanwhile.

    One leaves for good; the second round has all four, in slots that hold what was left there.
    """
    model = models(qwen3_5)
    result = run(
        tmp_path,
        model.path,
        job=dict(preempt_every=5, abort_at=12, rounds=2),
        enable_prefix_caching=True,
    )
    assert result.tokens == [tokens for n, tokens in enumerate(model.tokens) if n != 1]
    assert result.rounds[1]["tokens"] == model.tokens
    assert result.calls["preempted"] >= 3
    assert result.calls["aborted"] == 1
    _all_on_gated_delta(result, "prefill", "decode")


def test_tensor_parallel(models: Any, tmp_path: Path) -> None:
    """Two workers with half of the heads each: two value heads and one of keys."""
    model = models(qwen3_5)
    both = dict(
        tensor_parallel_size=2, distributed_executor_backend="mp", enable_prefix_caching=True
    )
    forked = dict(VLLM_WORKER_MULTIPROC_METHOD="fork")  # with the stand-ins of this process
    result = run(tmp_path, model.path, job=dict(ranks=True), env=forked, **both)
    assert result.tokens == model.tokens
    assert len(result.ranks) == 2
    for row in [row for rank in result.ranks for row in rank]:
        assert ON_GATED_DELTA.items() <= row.items()
        assert row["calls"].keys() == {"prefill", "decode"}
    assert result.ranks[0] == result.ranks[1]


def test_states_in_fp16(models: Any, tmp_path: Path) -> None:
    """And parts of prompts that end within a chunk of 64 tokens."""
    model = models(qwen3_5)
    result = run(
        tmp_path,
        model.path,
        mamba_ssm_cache_dtype="float16",
        long_prefill_token_threshold=96,
        enable_prefix_caching=True,
    )
    assert result.tokens == model.tokens
    _all_on_gated_delta(result, "prefill", "decode")


def test_an_engine_that_lacks_kernels_does_not_start(tmp_path: Path) -> None:
    """As on a GPU without the compiler, with a pack that lacks these layers' kernels."""
    strict = dict(GATED_DELTA_JIT="0", GATED_DELTA_CACHE_DIR=str(tmp_path))
    strict |= dict(GATED_DELTA_VLLM_KVBUFFER="1")
    drafts = BF16 | dict(speculative_config=NGRAM, enable_prefix_caching=False)
    with pytest.raises(AssertionError) as raised:
        run(tmp_path, TRAINED, job=dict(on_gpu=True), env=strict, **drafts)
    log = str(raised.value)
    assert re.search(
        r"(\d+) of the \1 kernels that this engine needs are missing: GATED_DELTA_JIT=0 or no "
        f"compiler.*; `gated-delta compile --size 64x64 --out {tmp_path}` builds",
        log,
    )
    kernels = {"prefill_prepare", "prefill_scan", "decode", "verify"}
    assert kernels <= set(re.findall(r"  - (\w+) axis", log))
    assert "  - flush" in log
    assert "gated_delta keeps drafts in " in log  # so vLLM's profile has counted the buffer
    # Before the first kernel is launched, in the profile run.
    assert "in profile\n" in log
    assert "in bind_kv_cache\n" not in log


def test_an_error_is_not_taken_for_a_refusal(tmp_path: Path) -> None:
    """It ends the engine with its own message; vLLM's kernels do not hide it."""
    with pytest.raises(AssertionError, match="decode: what a test says"):
        run(tmp_path, TRAINED, job=dict(fail="decode"), **BF16)


@pytest.mark.parametrize(
    ("make", "buffered"),
    [
        (qwen3_5, False),
        (qwen3_next, True),
        (kimi_linear, True),
        (glm5_next, True),
        (ling, False),
        (olmo_hybrid, True),
        (kimi_k3, False),
    ],
)
def test_drafts(make: Any, buffered: bool, models: Any, tmp_path: Path) -> None:
    """Speculative decoding, with prefills too. vLLM's prefix cache with drafts needs Triton.

    vLLM pads the last prompt with drafts; the states' memory has NaN before.
    """
    model = models(make)
    prompts, tokens = [*PROMPTS, ONE_TOKEN], [*model.tokens, model.after_one]
    answers = [prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)]
    job = dict(prompts=prompts, answers=answers, poison=True)
    result = run(
        tmp_path,
        model.path,
        job=job | (dict(preempt_every=5) if buffered else {}),
        env=dict(GATED_DELTA_VLLM_KVBUFFER=str(int(buffered))),
        speculative_config=NGRAM,
        enable_prefix_caching=False,
        max_num_seqs=len(PROMPTS),  # the last prompt starts beside decodes
    )
    assert result.tokens == tokens
    assert {"drafts", "prefill+drafts"} <= set(result.batches)
    assert {"accepted 0", "accepted 1", "accepted 2", "accepted 3"} <= result.calls.keys()
    _all_on_gated_delta(result, "prefill", "drafts")
    op = "verify" if buffered else "decode"
    assert result.calls["drafts"] == result.calls[op]
    normed = result.calls[op] + result.calls["prefill"]
    assert result.calls["norm"] == (0 if make is olmo_hybrid else normed)
    assert result.calls["blocks a request"] == (1 if buffered else 4)
    assert ("gated_delta keeps drafts in 0.000 GiB, in place of" in result.log) == buffered
    if buffered:  # a call for each block table, of three KDA layers or one GDN layer
        assert result.calls["flush"] * (3 if make in KDA else 1) == result.calls["verify"]
        assert result.calls["preempted"]


class Stack:
    """Three layers with one block table: their builder, states of 5 slots and buffers."""

    def __init__(self, even: bool):
        from gated_delta.integrations.vllm.records.builder import Builder

        L, P, HV, V, K = 3, 5, 2, 16, 32
        self.storage = torch.randn(20, HV, V, K)
        self.pools = [slice(row, row + P) for row in (0, 6, 12 if even else 13)]
        self.buffer = gated_delta.KVBuffer.empty(P, 3, 1, HV, K, V, num_layers=L)
        for x in (self.buffer.u, self.buffer.k, self.buffer.log_decay):
            x.copy_(-torch.rand_like(x))
        self.builder = object.__new__(Builder)
        self.builder.rows = None
        self.builder.layers = [
            SimpleNamespace(
                kv_cache=(self.storage[pool, 0, 0], self.storage[pool]),
                kvbuffer=self.buffer.layer(i),
                builder=None,
                ring=0,
                buffered=True,
                null_index=0,
                backend="reference",
            )
            for i, pool in enumerate(self.pools)
        ]
        assert len(self.builder.pools) == (1 if even else L)

    def flushed(self, counts: list[int], slots: list[int], **options: Any) -> torch.Tensor:
        """A copy of the storage with the first tokens of some rows folded."""
        storage = self.storage.clone()
        options |= dict(state_indices=torch.tensor(slots), backend="reference")
        for i, pool in enumerate(self.pools):
            layer = self.buffer.layer(i)
            gated_delta.flush(storage[pool], layer, torch.tensor(counts), **options)
        assert not torch.equal(storage, self.storage)
        return storage


@pytest.mark.parametrize("apart", ["", "states", "rows"])
def test_block_tables_in_one_pool(apart: str) -> None:
    """Layers 0, 3 have the first of three block tables, 1, 4 the second: as vLLM groups them."""
    from gated_delta.integrations.vllm.records.pools import Pool

    G, L, P, R, HV, V, K = 3, 2, 5, 4, 2, 16, 32
    states, windows = torch.zeros(G * L, P, HV, V, K), torch.zeros(L, P, 6, 7)
    buffer = gated_delta.KVBuffer.empty(R, 3, 1, HV, K, V, num_layers=G * L)
    buffer.u.copy_(torch.arange(G * L * R).view(G * L, R, 1, 1, 1))
    order = [*range(G * L)] if apart != "rows" else [0, 2, 1, 3, 4, 5]
    tables = [[], [], []]
    for n in range(G * L):
        pool = states[n if apart == "states" else n // G]
        layer = SimpleNamespace(kv_cache=(windows[n // G], pool), kvbuffer=buffer.layer(order[n]))
        tables[n % G].append(layer)
    pool = Pool.of(tables)
    assert (pool is None) == bool(apart)
    if pool is not None:
        shapes = pool.states.shape, pool.windows.shape
        assert shapes == ((L, *states.shape[1:]), windows.shape)
        assert pool.buffer.u[..., 0, 0, 0].tolist() == buffer.u[..., 0, 0, 0].view(L, -1).tolist()


@pytest.mark.parametrize("even", [True, False])
def test_folding_after_sampling(even: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first model runner; drafts beside a prompt; layers that lie unevenly in the cache."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from gated_delta.integrations.vllm import process as vllm_process
    from gated_delta.integrations.vllm.records.builder import fold_after_sampling

    stack = Stack(even)
    builder = stack.builder
    builder._keep(
        SimpleNamespace(
            num_spec_decodes=2,
            num_prefills=1,
            num_decodes=0,
            spec_sequence_masks_cpu=torch.tensor([True, False, True, False]),  # the last: padding
            spec_state_indices_tensor=torch.tensor([[3], [1]]),
            step=None,
        )
    )
    expected = stack.flushed([2, 1], [3, 1])
    monkeypatch.setattr(vllm_process, "layers", builder.layers)
    name = "_update_states_after_model_execute"
    monkeypatch.setattr(GPUModelRunner, name, lambda *_: None)
    fold_after_sampling.__wrapped__()
    sampled = torch.tensor([2, 3, 0])  # 3: no drafts; 0: a request inside its prompt
    counted = SimpleNamespace(num_accepted_tokens=SimpleNamespace(gpu=sampled))
    for _ in range(2):  # once
        getattr(GPUModelRunner, name)(counted, sampled, sampled)
        assert torch.equal(stack.storage, expected)


RING: dict[str, Any] = dict(ring=True, use_v2_model_runner=True)
CONNECTOR = SimpleNamespace(kv_connector_extra_config={})
BOTH_WAYS = SimpleNamespace(
    kv_connector_extra_config=dict(
        connectors=[dict(kv_connector_extra_config=dict(bidirectional_kv_xfer=True))]
    )
)


class Other(KimiK3KDAAttentionBackend):
    """Of another model's layers."""

    @staticmethod
    def get_name() -> str:
        return "OTHER"


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({}, ""),
        (dict(mamba_cache_mode="align", use_v2_model_runner=True), ""),
        (dict(mamba_cache_mode="align"), "--no-enable-.*, or VLLM_USE_V2_MODEL_RUNNER=1"),
        (dict(kv_transfer_config=CONNECTOR, use_v2_model_runner=True), ""),
        (dict(kv_transfer_config=CONNECTOR), "no KV connector, or VLLM_USE_V2_MODEL_RUNNER=1"),
        (
            dict(kv_transfer_config=BOTH_WAYS, use_v2_model_runner=True),
            "no bidirectional_kv_xfer of a KV connector",
        ),
        (dict(pipeline_parallel_size=2), "--pipeline-parallel-size 1"),
        (dict(refused=dict(flush="K=96")), "every operation on gated_delta.* lack K=96"),
        (dict(backend=Other), "vLLM's metadata for GDN or Kimi K3"),
        (dict(backend=KimiK3KDAAttentionBackend, use_v2_model_runner=True), ""),
        (dict(backend=KimiK3KDAAttentionBackend), "VLLM_USE_V2_MODEL_RUNNER=1 for Kimi K3"),
        (dict(use_ubatching=True), "no --enable-dbo, no --ubatch-size"),
        (dict(left=dict(decode="more than 15 draft tokens")), None),  # vLLM's states stay
        (dict(asked=False), None),  # 16 value heads
        (dict(asked=False, max_num_seqs=256), ""),
        (dict(asked=False, max_num_seqs=256, pipeline_parallel_size=2), None),
        (dict(asked=False, max_num_seqs=256, refused=dict(flush="K=96")), None),
        (dict(asked=False, max_num_seqs=256, unbuilt=["2 more kernels"]), None),
        (dict(unbuilt=["2 more kernels"]), ""),
        (RING, ""),
        (RING | dict(mamba_cache_mode="align", kv_transfer_config=CONNECTOR), ""),
        (RING | dict(use_v2_model_runner=False), "VLLM_USE_V2_MODEL_RUNNER=1"),
        (RING | dict(version="0.34.0"), "vLLM 0.3[23], not 0.34.0, which changes GPUModelRunner"),
        (RING | dict(num_spec=3), "no draft tokens"),
        (RING | dict(backend=KimiK3KDAAttentionBackend), "another model than Kimi K3"),
        (RING | dict(prefill_context_parallel_size=2), "--prefill-context-parallel-size 1"),
        (RING | dict(kv_transfer_config=CONNECTOR), "no KV connector, or --enable-prefix-caching"),
        (
            RING | dict(mamba_cache_mode="align", kv_transfer_config=BOTH_WAYS),
            "no bidirectional_kv_xfer of a KV connector",
        ),
        (RING | dict(num_spec=16, left=dict(decode="16 drafts")), "every .*lack 16 drafts; no"),
        (RING | dict(left=dict.fromkeys(("decode", "prefill"), "declined")), None),
    ],
)
def test_what_a_kvbuffer_needs(
    changed: dict[str, Any], needed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gated_delta.integrations.vllm import layers as vllm_layers
    from gated_delta.integrations.vllm.records import builder, kimi_k3, requirements

    case: dict[str, Any] = dict(
        mamba_cache_mode="none", pipeline_parallel_size=1, refused={}, left={}
    )
    case |= dict(backend=requirements.GDNAttentionBackend, max_num_seqs=4)
    case |= dict(use_ubatching=False, kv_transfer_config=None, replayssm_buffer_len=33, ring=False)
    case |= dict(prefill_context_parallel_size=1, max_num_batched_tokens=64, version="")
    case |= dict(unbuilt=[])
    case |= changed
    switch = requirements.RING if case["ring"] else requirements.DRAFTS
    case = dict(use_v2_model_runner=False) | case
    config = SimpleNamespace(enable_chunked_prefill=True, **case)
    config.scheduler_config = config.cache_config = config.parallel_config = config
    config.compilation_config = SimpleNamespace(static_forward_context={})

    class Layer(vllm_layers.Core):
        prefix, name, mamba_type = "model.layers.0", "Layer", None
        num_spec = case.get("num_spec", 0 if case["ring"] else 3)
        model_config = SimpleNamespace(dtype=torch.bfloat16)

        def get_state_shape(self) -> Any:
            return (3, 512), (4, 64, 64)

        def get_state_dtype(self) -> Any:
            return torch.float32, torch.float32

        def _key_heads(self) -> int:
            return 4

    base = vllm_layers.abstract.MambaBase
    if case["version"]:
        monkeypatch.setattr(requirements.vllm, "__version__", case["version"])
        monkeypatch.setattr(releases, "source", lambda *_: "")
    if case.get("asked", True):
        monkeypatch.setenv(switch, "1")
    monkeypatch.setattr(vllm_layers, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(vllm_layers.start, "left_to_vllm", lambda *_: case["left"])
    monkeypatch.setattr(vllm_layers.start, "missing", lambda *_: case["refused"])
    monkeypatch.setattr(vllm_layers.start, "unbuildable", lambda *_: case["unbuilt"])
    hooked: list[str] = []
    monkeypatch.setattr(builder, "fold_after_sampling", lambda: hooked.append("first"))
    monkeypatch.setattr(vllm_layers.commit, "at_recoverssm_seam", lambda: hooked.append("second"))
    monkeypatch.setattr(vllm_layers.ring, "follow_requests", lambda: hooked.append("rows"))
    monkeypatch.setattr(base, "get_attn_backend", lambda layer: case["backend"])
    if needed:
        reason = f"{switch}=1: model.layers.0 needs {needed}"
        with pytest.raises(RuntimeError, match=reason):
            Layer()
        if not case["ring"]:  # by default the start goes on, and the log has the reason
            monkeypatch.delenv(switch)
            log = MagicMock()
            monkeypatch.setattr(vllm_layers.process, "logger", lambda: log)
            config.max_num_seqs = 256
            layer = Layer()
            assert (layer.buffered, layer.room, layer.rows) == (False, 0, None)
            assert bool(layer.refused) == bool(case["refused"])
            said = " ".join(str(call) for call in log.info_once.mock_calls)
            assert re.search(f"leaves drafts in states: a KVBuffer needs {needed}", said)
    else:
        in_kvbuffer = needed is not None
        layer, runner = Layer(), ["second" if case["use_v2_model_runner"] else "first"]
        k3 = case["backend"] is KimiK3KDAAttentionBackend
        ours = kimi_k3.Backend if k3 else builder.Backend
        assert (layer.get_attn_backend() is ours) == in_kvbuffer
        rows = ["rows"] * (case["ring"] or case["mamba_cache_mode"] == "align")
        assert hooked == ([] if case["ring"] else runner) * in_kvbuffer + rows * in_kvbuffer
        assert layer.room == (12 if rows and in_kvbuffer and not case["ring"] else 0)
        if not layer.buffered:
            return
        # What vLLM's cache lacks ends the start only if a buffer was asked for.
        asked = case.get("asked", True)
        fields = "num_speculative_blocks", "block_size", "page_size_bytes", *CHECKPOINTS
        spec = dataclasses.make_dataclass("Spec", fields)(3, 4, 4096, 0, None)
        monkeypatch.setattr(base, "get_kv_cache_spec", lambda *_: spec)
        config.compilation_config.static_forward_context.update({"layers.0": layer})
        other = Layer()
        monkeypatch.setattr(requirements, "DEVICE", "cuda")  # as on a small GPU
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 16 << 20))
        lacks = [] if asked else requirements.default_lacks(layer, 4096 + 8)
        assert lacks == [] or lacks[0] == "--max-num-seqs 127 or less"
        assert lacks[1:] == ([] if asked else ["states at multiples of 16 bytes"])
        if asked:
            assert layer.get_kv_cache_spec(config).num_speculative_blocks == 0
            monkeypatch.setattr(requirements, "cache_lacks", lambda *_: ["--block-size 4 or more"])
            with pytest.raises(RuntimeError, match=r"layers\.0 needs --block-size 4 or more"):
                layer.get_kv_cache_spec(config)
        else:
            config.compilation_config.static_forward_context.update({"layers.1": other})
            enough_for_one = 24 * layer.buffer(case["max_num_seqs"], "meta").nbytes
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, enough_for_one))
            assert layer.get_kv_cache_spec(config).num_speculative_blocks == 3
            for x in (layer, other):
                assert (x.get_attn_backend(), x.room) == (case["backend"], 0)


def test_kernels_that_a_default_would_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM builds layers outside of no_grad, and their parameters want gradients."""
    from gated_delta.integrations.vllm import start
    from gated_delta.integrations.vllm.calls import Recurrence

    layer: Any = type("Layer", (Recurrence,), {})()
    weight = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    gate = torch.nn.Parameter(torch.zeros(4))
    norm = SimpleNamespace(weight=weight, eps=1e-6, activation="silu")
    vars(layer).update(sizes=(2, 4, 64, 64), num_spec=3, buffered=True, room=12, aligned=False)
    vars(layer).update(deterministic=False, inputs=torch.bfloat16, fuses_norm=True, backend="cute")
    vars(layer).update(A_log=gate, dt_bias=gate, _norm=lambda: norm)
    layer.get_state_dtype = lambda: (torch.bfloat16, torch.float32)
    monkeypatch.setattr(start.load, "gpu_of", lambda device: H200)
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    [missing] = start.unbuildable(layer)
    assert re.match(r"\d+ more kernels: `gated-delta compile ", missing)


def test_the_length_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    from gated_delta.integrations.vllm.records import requirements

    def tokens(L: int) -> int:
        config = SimpleNamespace(cache_config=SimpleNamespace(replayssm_buffer_len=L))
        return requirements.ring_tokens(config)

    assert tokens(16) == 0
    monkeypatch.setenv("GATED_DELTA_VLLM_RING", "1")
    assert (tokens(2), tokens(33)) == (1, 32)
    for L in (1, 34):
        with pytest.raises(ValueError, match=f"--replayssm-buffer-len: .*RING=1, got {L}"):
            tokens(L)


def test_drafts_and_convolution_of_vllm(plain: Run, tmp_path: Path) -> None:
    """vLLM's CPU convolution takes no num_accepted_tokens. One token: its kernels fail later."""
    engine = BF16 | dict(speculative_config=NGRAM, enable_prefix_caching=False)
    result = run(tmp_path, TRAINED, job=dict(own_convolution=True, max_tokens=1), **engine)
    assert result.tokens == [tokens[:1] for tokens in plain.tokens]
    assert result.calls == {}
    assert {(row["decode"], row["prefill"]) for row in result.report} == {
        ("vLLM: vLLM's short convolution ignores drafts",) * 2
    }


def _as_planned(result: Run, model: Path, **asked: Any) -> None:
    """`check --engine` asks about the kernels that the engine looked for."""
    # vLLM's choice on a CPU depends on the CPU's kernels.
    (states,) = {
        dict(x.split("=") for x in label.split()[1:])["state_dtype"]
        for label in result.kernels["looked_for"]
        if label.startswith("decode")
    }
    asked |= dict(state_dtype=dict(fp32=torch.float32, bf16=torch.bfloat16)[states])
    plan = preflight.plan(preflight.Asked("vllm", model, **asked), torch.device("cpu"))
    calls = [call for mode in plan.modes for call in mode.calls]
    labels = {variant.label for variant in load.needed(calls, H200)}
    assert set(result.kernels["looked_for"]) <= labels
    prefills = {label for label in labels if label.startswith("prefill")}
    assert labels - prefills <= set(result.kernels["looked_for"])


def _all_on_gated_delta(result: Run, *kinds: str) -> None:
    assert len(result.report) >= 2
    for row in result.report:
        assert ON_GATED_DELTA.items() <= row.items()
        assert row["calls"].keys() <= {"prefill", "decode", "drafts"}
        assert all(row["calls"][kind] for kind in kinds)
    for name, calls in dict(prefill="prefill", decode="decode", drafts="drafts").items():
        counted = sum(row["calls"].get(calls, 0) for row in result.report)
        also = result.calls["drafts"] - result.calls.get("verify", 0) if name == "decode" else 0
        assert result.calls.get(name, 0) == counted + also
        health = f"gated_delta health op={calls} family="
        assert (health in result.log) == (counted > 0)
    assert "backend reference" in result.log
    assert result.kernels["needed"]
    assert set(result.kernels["needed"]) <= set(
        result.kernels["looked_for"]
    )  # when the engine started


def test_tokens_of_vllm(plain: Run, tmp_path: Path) -> None:
    """Our calls include the norm: in bf16 vLLM's layer passes its gate to fused kernels.

    Another version, with the same code, is served.
    """
    result = run(tmp_path, TRAINED, job=dict(version="0.34.0"), **BF16)
    assert same_but_for_ties(result, plain)
    _all_on_gated_delta(result, "prefill", "decode")
    assert result.calls["norm"] == result.calls["decode"] + result.calls["prefill"]
    _as_planned(result, TRAINED)
    assert "vllm 0.34.0 has 0.32's code" in result.log


def test_layer_left_to_vllm(plain: Run, tmp_path: Path) -> None:
    result = run(tmp_path, TRAINED, job=dict(refuse=1), **BF16)
    assert same_but_for_ties(result, plain)
    places = [(row["decode"], row["prefill"]) for row in result.report]
    assert places == [("gated_delta",) * 2, ("vLLM: what a test says",) * 2, ("gated_delta",) * 2]
    assert (
        result.report[1]["calls"] == {}
    )  # vLLM's CPU kernels do not come through the layer's core
    assert (
        result.calls["prefill"]
        == result.report[0]["calls"]["prefill"] + result.report[2]["calls"]["prefill"]
    )
    assert "decode: vLLM: what a test says; prefill: vLLM: what a test says" in result.log


def test_engine_that_declines(plain: Run, tmp_path: Path) -> None:
    result = run(tmp_path, TRAINED, additional_config=dict(gated_delta=False), **BF16)
    assert same_but_for_ties(result, plain)
    assert result.calls == {}
    assert {row["decode"] for row in result.report} == {
        "vLLM: additional_config has gated_delta false"
    }


def test_a_switch_with_another_value(tmp_path: Path) -> None:
    """The engine does not start."""
    reason = "additional_config gated_delta: expected true or false, got 'no'"
    with pytest.raises(AssertionError, match=f"ValueError: {reason}"):
        run(tmp_path, TRAINED, additional_config=dict(gated_delta="no"), **BF16)


def test_every_change_of_the_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("vllm")
    for release in (releases.VLLM["cpu"], releases.VLLM_RING["cpu"]):
        assert release.changes() == []
        for name in breakages.each(release, monkeypatch):
            assert release.refusal("0.34.0") == f"0.34.0, which changes {name}"


def test_process_of_the_engine(models: Any, tmp_path: Path) -> None:
    """vLLM loads the plug-in in the layers' process. In fp32: batches depend on timing."""
    model = models(qwen3_5)
    result = run(
        tmp_path,
        model.path,
        env=dict(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
        enable_prefix_caching=True,
    )
    assert result.tokens == model.tokens
    assert result.report == []
    (line,) = [line for line in result.log.splitlines() if "in QwenGatedDeltaNetAttention" in line]
    assert line.startswith("(Worker ")
    assert line.endswith(
        "backend reference, in QwenGatedDeltaNetAttention: "
        "decode: gated_delta; prefill: gated_delta"
    )
