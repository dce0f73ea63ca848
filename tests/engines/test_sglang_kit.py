"""SGLang's tests of its GDN and KDA backends, from its wheel, on the plug-in's kernels.

On a CPU with the stand-ins of sglang_cpu.py; on a GPU with the engine's kernels around ours, and in
CUDA graphs too. There these tests need Triton only: sgl_kernel may be missing.
"""

import dataclasses
import functools
import importlib.util
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

CUDA = torch.cuda.is_available()
sys.path.insert(0, str(Path(__file__).parent))
import sglang_cpu

if CUDA and importlib.util.find_spec("sgl_kernel") is None:
    sglang_cpu.stub()
elif not CUDA:
    sglang_cpu.install()
    torch.cuda.get_rng_state = torch.cuda.set_rng_state = lambda *_, **__: None

from sglang.kernels.ops.attention import triton_gdn_fused_proj
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm as RMSNormGated
from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.attention.linear import kda_prefill_graph as prefill_graph
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    enable_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_utils import prefill_graph as graph_scope
from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
from sglang.srt.models import qwen3_5, qwen3_next
from sglang.srt.models.glm5_next import Glm5NextLinearAttention
from sglang.srt.models.kimi_linear import KimiDeltaAttention
from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet
from sglang.srt.models.qwen3_next import Qwen3GatedDeltaNet
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import spec_utils
from sglang.test.kits.attention_unittest.attention_methods import gdn_attention, kda_attention
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs
from sglang.test.kits.attention_unittest.runner_modes import (
    speculative_target_verify_runner as drafts,
)

from gated_delta.integrations.sglang import conv as sglang_conv
from gated_delta.integrations.sglang import graphs as sglang_graphs
from gated_delta.integrations.sglang import kernels as sglang_kernels
from gated_delta.integrations.sglang import norm as sglang_norm
from gated_delta.integrations.sglang import process
from gated_delta.integrations.sglang.records import kvbuffer
from gated_delta.problem import UnsupportedProblem

load_plugins()
CASE = unittest.TestCase()
# For full-attention layers; the kits have none.
BACKEND = "triton" if CUDA else "torch_native"
SIZES = (
    dict(head_k_dim=128, head_v_dim=128, dtype=torch.bfloat16, device="cuda")
    if CUDA
    else dict(device="cpu", dtype=torch.float32)
)
NEAR = dict(rtol=3e-2, atol=3e-2) if CUDA else dict(rtol=1e-5, atol=1e-5)  # the kits', on a GPU
ROUTE = "cute" if CUDA else "reference"
KITS = dict(
    GDN=(
        gdn_attention,
        gdn_attention.make_gdn_cases(BACKEND),
        gdn_attention.run_gdn_attention_case,
    ),
    KDA=(
        kda_attention,
        kda_attention.make_kda_cases(BACKEND),
        kda_attention.run_kda_attention_case,
    ),
)
CASES = [
    pytest.param(layers, case, id=case.name)
    for layers, (_, cases, _) in KITS.items()
    for case in cases
]


class Context:
    """The engine's, with the flags that the kits leave alone set to the plug-in's name."""

    topk = None  # the kits': 1

    def __getattr__(self, name):
        return getattr(get_context(), name)

    def override_server_args(self, **settings):
        settings |= dict.fromkeys(process.FLAGS.values(), process.NAME)
        settings |= dict(speculative_eagle_topk=self.topk) if self.topk else {}
        return get_context().override_server_args(**settings)


@pytest.fixture(autouse=True)
def _the_flags_are_ours(monkeypatch, request):
    torch.set_num_threads(1)
    if not CUDA:  # there it would change the engine's graphs
        request.getfixturevalue("poisoned_memory")
    for kit, _, _ in KITS.values():
        monkeypatch.setattr(kit, "get_context", Context)
    monkeypatch.setenv(process.DRAFTS, "1")  # these batches are small
    process.state.calls.counts.clear()


@pytest.fixture
def poisoned_memory():
    """torch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def ran(layers, mode):
    assert set(sglang_cpu.routes(process.state.calls)) == {f"{layers} {mode} on backend {ROUTE}"}


@pytest.mark.parametrize(("layers", "case"), CASES)
def test_eager(layers, case, monkeypatch):
    """Prefills get the longest of several prompts, from the engine's lengths on the host."""
    longest, prefill = set(), sglang_kernels.api.prefill
    monkeypatch.setattr(
        sglang_kernels.api,
        "prefill",
        lambda **call: longest.add(call["max_seqlen"]) or prefill(**call),
    )
    KITS[layers][2](CASE, case, **SIZES)
    ran(layers, "decode" if case.forward_mode.is_decode() else "prefill")
    if not case.forward_mode.is_decode():
        several = len(case.extend_lens) > 1
        assert longest == {-(-max(case.extend_lens) // 64) * 64 if several else None}


@pytest.mark.skipif(CUDA, reason="a CPU stands in for the engine's kernels")
@pytest.mark.parametrize("why", ["", "refused", "left"])
def test_prefill_takes_views_and_raw_gates(why, monkeypatch):
    """On a GPU the engine would copy q, k, v and activate gates, as it does if ours cannot run."""
    case = next(case for case in KITS["GDN"][1] if "ragged" in case.name)
    prepared, activate = [], gdn_backend.fused_gdn_gating

    def copied(x, *sizes):
        prepared.append("copies")
        widths = [heads * dim for heads, dim in zip(sizes[:3], sizes[3:], strict=True)]
        parts = zip(x.split(widths, -1), sizes[3:], strict=True)
        return [part.unflatten(-1, (-1, dim))[None] for part, dim in parts]

    def activated(*given):
        prepared.append("gates")
        return activate(*given)

    monkeypatch.setattr(gdn_backend, "is_cuda", lambda: True)
    monkeypatch.setattr(gdn_backend, "fused_qkv_split_gdn_prefill", copied, raising=False)
    monkeypatch.setattr(gdn_backend, "fused_gdn_gating", activated)
    if why == "refused":
        monkeypatch.setattr(sglang_kernels.api, "prefill", refuse)
    if why == "left":
        monkeypatch.setitem(process.state.left, ("GDN", "prefill"), "a test")
    KITS["GDN"][2](CASE, case, **SIZES)
    process.state.refused.clear()
    (call,) = sglang_cpu.routes(process.state.calls)
    assert call.partition(" on ")[2] == (
        "the engine's own kernel (ours needs a test)" if why else "backend reference"
    )
    assert prepared == {"": [], "refused": ["gates"], "left": ["copies", "gates"]}[why]


def verify_case(layers):
    kind = gdn_attention.GDNAttentionCase if layers == "GDN" else kda_attention.KDAAttentionCase
    sizes = dict(num_k_heads=2, num_v_heads=2)
    mode = dict(
        forward_mode=ForwardMode.TARGET_VERIFY,
        page_size=16,
        prefix_lens=(2, 15, 16),
        extend_lens=(3, 3, 3),
    )
    return kind(name=f"{layers}_verify", backend=BACKEND, **mode, **sizes)


def put_kvbuffer(fixture, layers):
    """In place of the fixture's scratch for drafts."""
    pool = fixture.runner.req_to_token_pool
    state = pool.mamba_pool.mamba_cache
    shape = SimpleNamespace(temporal=state.temporal.shape[2:], num_k_heads_per_tp=2)
    dtype = SimpleNamespace(temporal=state.temporal.dtype)
    config = SimpleNamespace(mamba2_cache_params=SimpleNamespace(shape=shape, dtype=dtype))
    kinds = dict(
        hybrid_gdn_config=config if layers == "GDN" else None,
        hybrid_kda_config=config if layers == "KDA" else None,
    )
    layer_ids = SimpleNamespace(
        _get_mamba_layer_ids_for_req_pool=lambda: [0],
        mambaish_config=config,
        device=SIZES["device"],
        pp_size=2,  # states are whole after every commit
    )
    tokens = SimpleNamespace(dtype=state.conv[0].dtype)
    kvbuffer._replace(pool, SimpleNamespace(**kinds, **vars(layer_ids), model_config=tokens))
    assert isinstance(pool.mamba_pool.mamba_cache.intermediate_ssm, kvbuffer.Drafts)


@pytest.fixture(params=[1, 2], ids=["lines", "trees"])
def topk(request, monkeypatch):
    """Trees are a first token and two that follow it, in a KVBuffer."""

    def build(*given, layers, original, **sizes):
        fixture = original(*given, **sizes)
        put_kvbuffer(fixture, layers)
        return fixture

    if request.param > 1:
        monkeypatch.setattr(Context, "topk", request.param)
    for layers in KITS if request.param > 1 else ():
        name = f"build_{layers.lower()}_attention_fixture"
        original = functools.partial(build, layers=layers, original=getattr(drafts, name))
        monkeypatch.setattr(drafts, name, original)
    return request.param


@pytest.mark.parametrize("layers", KITS)
def test_drafts(layers, topk):
    run = drafts.run_gdn_eagle_verify_case if layers == "GDN" else drafts.run_kda_eagle_verify_case
    run(CASE, verify_case(layers), topk=topk, **SIZES)
    ran(layers, "verify")


def committed(layers, tokens, accepted, topk, in_kvbuffer):
    """Outputs of accepted tokens, and states and windows after the engine's commit of them.

    tokens: the order of the three requests' drafts, three each. accepted: in it, by request.
    """
    kit, case = KITS[layers][0], verify_case(layers)
    name, device = layers.lower(), SIZES["device"]
    fixture = getattr(kit, f"build_{name}_attention_fixture")(CASE, case, **SIZES)
    pool = fixture.runner.req_to_token_pool
    batch, inputs = fixture.forward_batch, getattr(kit, f"{name}_fixture_inputs")(fixture)
    order = torch.tensor(tokens, device=device)
    inputs = {x: y.index_select(list(y.shape).index(9), order) for x, y in inputs.items()}
    runner = dict(model_config=None, req_to_token_pool=pool, attn_backend=fixture.backend)
    worker = SimpleNamespace(model_runner=SimpleNamespace(**runner, model=None))
    lens = torch.tensor([len(x) for x in accepted], device=device)
    index = torch.tensor([(x + [-1] * 2)[:3] for x in accepted], device=device)
    context = forward_context(ForwardContext(attn_backend=fixture.backend))
    if in_kvbuffer:
        put_kvbuffer(fixture, layers)
    with torch.no_grad(), context:
        drafts._prepare_target_verify_batch(batch, case, device)
        batch.spec_info = drafts._make_spec_verify_input(
            case, batch, topk=topk, device=device, spec_kind="eagle"
        )
        fixture.backend.init_forward_metadata(batch)
        o = getattr(kit, f"run_{name}_forward")(fixture, batch, inputs)
        spec_utils.commit_mamba_states_after_verify(worker, batch, lens, index, 3)
    o = o[:, [token for path in accepted for token in path]]
    return o, kit._ssm_states(fixture), kit._conv_states(fixture)


@pytest.mark.parametrize("tree", [False, True], ids=["lines", "trees"])
@pytest.mark.parametrize("layers", KITS)
def test_a_kvbuffer_is_committed_as_the_engine_commits_states(layers, tree, monkeypatch):
    """Of a tree's states the engine's are those of a line with the accepted tokens first."""
    kvbuffer.register()
    HookRegistry.apply_hooks()
    if not CUDA:
        for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
            monkeypatch.setattr(
                scatter, name, HybridLinearAttnBackend._scatter_speculative_state_with_mask
            )
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda config: True)
    tokens, rest = [0, 1, 2, 3, 4, 5, 6, 7, 8], [[3], [6, 7]]
    line = [0, 2, 1, *tokens[3:]] if tree else tokens
    accepted = [[0, 1] if tree else [0, 1, 2], *rest]
    o, states, windows = committed(layers, line, accepted, 1, in_kvbuffer=False)
    if tree:
        monkeypatch.setattr(Context, "topk", 2)
        accepted[0] = [0, 2]
    topk = 2 if tree else 1
    our_o, ours, our_windows = committed(layers, tokens, accepted, topk, in_kvbuffer=True)
    torch.testing.assert_close(our_o, o, **NEAR)
    torch.testing.assert_close(ours, states, rtol=1e-5, atol=1e-5)
    assert torch.equal(our_windows, windows)
    assert sglang_cpu.routes(process.state.calls) == {f"{layers} verify on backend {ROUTE}": 2}


class Projection(torch.nn.Module):
    """Stands in for an engine's projection: columns of its input, in two parts."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return x[..., self.columns], None


def run_layer(layers, fixture, cache, layer, x):
    """A layer's outputs on this cache of the kit's, and the routes of its calls."""
    getattr(KITS[layers][0], f"_restore_{layers.lower()}_cache")(fixture, cache)
    process.state.calls.counts.clear()
    batch, backend = fixture.forward_batch, fixture.backend
    more = dict(positions=None, zero_allocator=None) if layers == "KDA" else {}
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        o = layer.forward(hidden_states=x, forward_batch=batch, **more)
    return o, set(sglang_cpu.routes(process.state.calls))


def layer_of(kind, fixture):
    """An engine's layer around the kit's recurrence, without its weights; z is its input's end."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    attn = layer.attn = fixture.actual_module.attn
    heads, qkv, dtype = attn.num_v_heads, attn.q_dim + attn.k_dim + attn.v_dim, fixture.runner.dtype
    options = dict(eps=1e-5, device=SIZES["device"], dtype=dtype)
    layer.num_k_heads = layer.num_v_heads = heads
    layer.head_k_dim = layer.head_v_dim = layer.head_dim = attn.head_v_dim
    if gdn := issubclass(kind, Qwen3GatedDeltaNet | Qwen3_5GatedDeltaNet):
        layer.attn_tp_size, layer.alt_stream, layer._fused_in_proj_weight = 1, None, None
        layer._fused_input_proj_cpu_enabled = SimpleNamespace(value=False)
        layer.in_proj_ba = Projection(slice(0, 2 * heads))
        layer.in_proj_qkvz = Projection(slice(2 * heads, None))
        layer.norm = RMSNormGated(attn.head_v_dim, **options)
        width = 2 * heads + qkv + attn.v_dim
    else:
        parts = [attn.v_dim, qkv, attn.k_dim, heads, -heads % 8]  # z in aligned rows

        def projected(x, *_):
            z, qkv, gate, beta, _ = x.split(parts, -1)
            return qkv, beta, gate, z

        layer.forward_qkvbfg_fused = projected
        layer.do_fuse_qkvbfg, width = True, sum(parts)
        layer.o_norm = FusedRMSNormGated(attn.head_v_dim, activation="sigmoid", **options)
    layer.out_proj = layer.o_proj = Projection(slice(None))
    norm = layer.norm if gdn else layer.o_norm
    norm.weight.data.uniform_(0.5, 2)
    return layer, torch.randn(fixture.case.num_input_tokens, width).to(attn.A_log.device, dtype)


class Split(Qwen3GatedDeltaNet):
    """Qwen3-Next's layer on a GPU, whose kernel splits the projection."""


class SplitKernel:
    """A stand-in for that kernel on a CPU."""

    def __getitem__(self, grid):
        return self

    def __call__(self, qkv, z, b, a, qkvz, ba, H, HV, K, V, **_):
        r = HV // H
        parts = qkvz.unflatten(1, (H, -1)).split([K, K, r * V, r * V], -1)
        qkv[:] = torch.cat([part.flatten(1) for part in parts[:3]], 1)
        z[:] = parts[3].reshape(z.shape)
        b[:], a[:] = (x.reshape(b.shape) for x in ba.unflatten(1, (H, 2, r)).unbind(2))


MODES = [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(
    "kind",
    [Qwen3GatedDeltaNet, Split, Qwen3_5GatedDeltaNet, KimiDeltaAttention, Glm5NextLinearAttention],
)
def test_our_calls_include_a_layers_norm(kind, mode, monkeypatch):
    """Once. Behind any other call the layer's norm runs."""
    layers = "KDA" if kind in (KimiDeltaAttention, Glm5NextLinearAttention) else "GDN"
    if kind is Split and not CUDA:
        monkeypatch.setattr(qwen3_next, "_is_cpu", False)
        kernel = "fused_qkvzba_split_reshape_cat_kernel"
        monkeypatch.setattr(triton_gdn_fused_proj, kernel, SplitKernel())
    kit, (*_, case) = KITS[layers][0], KITS[layers][1]
    if mode.is_target_verify():
        case = verify_case(layers)
    elif mode.is_extend():
        case = next(case for case in KITS[layers][1] if "ragged" in case.name)
    fixture = getattr(kit, f"build_{layers.lower()}_attention_fixture")(CASE, case, **SIZES)
    layer, x = layer_of(kind, fixture)
    batch, cache = fixture.forward_batch, getattr(kit, f"_clone_{layers.lower()}_cache")(fixture)
    if mode.is_target_verify():
        drafts._prepare_target_verify_batch(batch, case, SIZES["device"])
        batch.spec_info = drafts._make_spec_verify_input(
            case, batch, topk=1, device=SIZES["device"], spec_kind="eagle"
        )

    def run(call=layer):
        getattr(kit, f"_restore_{layers.lower()}_cache")(fixture, cache)
        process.state.calls.counts.clear()
        more = dict(positions=None, zero_allocator=None) if kind is KimiDeltaAttention else {}
        context = ForwardContext(attn_backend=fixture.backend)
        with torch.no_grad(), forward_context(context, forward_batch=batch):
            fixture.backend.init_forward_metadata(batch)
            return call(hidden_states=x, forward_batch=batch, **more), set(
                sglang_cpu.routes(process.state.calls)
            )

    (expected, _), gate, before = run(), sglang_norm.gate_of(layer), dict(vars(layer))
    sglang_norm.hook(layer)
    op = dict(DECODE="decode", EXTEND="prefill").get(mode.name, "verify")
    result, routes = run()
    assert routes == {f"{layers} {op} and norm on backend {ROUTE}"}
    torch.testing.assert_close(result, expected, **NEAR)
    if mode.is_target_verify():
        return
    if mode.is_decode() and layers == "GDN":
        compiled, again = run(torch.compile(layer, backend="eager"))
        assert again == routes
        torch.testing.assert_close(compiled, expected, **NEAR)
    if CUDA or layers == "GDN":  # a CPU has no such kernel for KDA
        with monkeypatch.context() as refusing:
            refusing.setattr(sglang_kernels.api, op, refuse)
            process.state.norms[layer.attn.A_log].applied = True  # a forward did not end
            result, (route,) = run()
        assert route == f"{layers} {op} on the engine's own kernel (ours needs a test)"
        torch.testing.assert_close(result, expected, **NEAR)
        process.state.refused.clear()
    for name in {*gate.methods, gate.projection} - {""}:  # as if they had other names
        vars(layer).pop(name)
    vars(layer).update(before)
    result, routes = run()
    assert routes == {f"{layers} {op} on backend {ROUTE}"}
    torch.testing.assert_close(result, expected, **NEAR)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", [Qwen3GatedDeltaNet, Qwen3_5GatedDeltaNet, KimiDeltaAttention])
def test_a_prompts_norm_with_rows_behind_its_tokens(kind, known, monkeypatch):
    """Three rows with NaN, cut off if the engine knows of them; Qwen3-Next's gate is not copied.

    A gate in rows that are not aligned gets the layer's norm.
    """
    layers = "KDA" if kind is KimiDeltaAttention else "GDN"
    kit, cases, _ = KITS[layers]
    case = next(case for case in cases if "ragged" in case.name)
    fixture = getattr(kit, f"build_{layers.lower()}_attention_fixture")(CASE, case, **SIZES)
    (layer, x), batch, backend = layer_of(kind, fixture), fixture.forward_batch, fixture.backend
    cache, total = getattr(kit, f"_clone_{layers.lower()}_cache")(fixture), case.num_input_tokens
    run = functools.partial(run_layer, layers, fixture, cache, layer)

    layer.attn.activation = "silu"
    expected, _ = run(x)
    if kind is Qwen3GatedDeltaNet:
        monkeypatch.setattr(sglang_conv, "LEAST_TOKENS", 1)
        sglang_conv.hook(backend.linear_attn_backend, [layer])
        monkeypatch.setattr(sglang_conv, "copied", None)
    sglang_norm.hook(layer)
    batch.extend_num_tokens = total
    batch.global_num_token_non_padded_cpu = total if known else None
    o, routes = run(padded(x, 0, 3))
    assert routes == {f"{layers} prefill and norm on backend {ROUTE}"}
    torch.testing.assert_close(o[:total], expected, **NEAR)
    assert not o[total:].any()
    if kind is not Qwen3GatedDeltaNet:
        o, routes = run(torch.nn.functional.pad(x, (1, 0))[:, 1:])
        assert routes == {f"{layers} prefill on backend {ROUTE}"}
        torch.testing.assert_close(o, expected, **NEAR)


@pytest.mark.parametrize("refused", [False, True], ids=["ours", "the engine's"])
def test_a_graph_that_breaks_at_whole_rows(refused, monkeypatch):
    """A replay runs the break alone, on other rows than the capture: it normalises, z uncopied."""
    kit, cases, _ = KITS["GDN"]
    case = next(case for case in cases if "ragged" in case.name)
    fixture = kit.build_gdn_attention_fixture(CASE, case, **SIZES)
    (layer, x), batch, backend = (
        layer_of(Qwen3GatedDeltaNet, fixture),
        fixture.forward_batch,
        fixture.backend,
    )
    cache, total, attn = kit._clone_gdn_cache(fixture), case.num_input_tokens, layer.attn
    attn.activation = "silu"
    expected, _ = run_layer("GDN", fixture, cache, layer, x)
    monkeypatch.setattr(sglang_conv, "LEAST_TOKENS", 1)
    sglang_conv.hook(backend.linear_attn_backend, [layer])
    sglang_norm.hook(layer)
    process.state.norms[attn.A_log].fp8 = True  # not in such a graph
    batch.extend_num_tokens = batch.global_num_token_non_padded_cpu = total
    at_break, breaks, norms = type(attn)._eager_linear_attention, [], []
    layer.norm.register_forward_pre_hook(lambda *_: norms.append(len(breaks)))

    def captured(_, *buffers):
        breaks.append(buffers)
        buffers[-1].zero_()

    monkeypatch.setattr(type(attn), "_eager_linear_attention", captured)
    if refused:
        monkeypatch.setattr(sglang_kernels.api, "prefill", refuse)
    else:
        monkeypatch.setattr(sglang_conv, "copied", None)
    with graph_scope.prefill_graph_scope(full_graph=False), enable_breakable_cuda_graph():
        run_layer("GDN", fixture, cache, layer, torch.randn_like(x))
        assert not norms  # the graph's own part has none
        ((*inputs, output),) = breaks
        rows, ba = layer._forward_input_proj(x)
        b, a = ba.view(total, -1, 2).unbind(2)
        for buffer, given in zip(inputs, (rows, a, b), strict=True):
            buffer.copy_(given)
        kit._restore_gdn_cache(fixture, cache)
        context = ForwardContext(attn_backend=backend)
        with torch.no_grad(), forward_context(context), set_forward_batch(batch):
            backend.init_forward_metadata(batch)
            at_break(attn, *inputs, output)
    process.state.refused.clear()
    assert len(norms) == 1
    torch.testing.assert_close(layer.out_proj(output.reshape(total, -1))[0], expected, **NEAR)
    route = "on the engine's own kernel (ours needs a test)" if refused else f"on backend {ROUTE}"
    norm = "" if refused else " and norm"
    assert f"GDN prefill{norm} {route}" in sglang_cpu.routes(process.state.calls)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (Qwen3GatedDeltaNet, False),
        (Qwen3GatedDeltaNet, True),
        (Qwen3_5GatedDeltaNet, False),  # a CPU has no kernel of the engine for its pair
    ],
)
def test_a_decode_step_is_one_call(kind, refused, monkeypatch):
    """From the projection to the norm. If refused, the engine convolves a copy."""
    kit, cases, _ = KITS["GDN"]
    case = next(case for case in cases if case.forward_mode.is_decode())
    create = kit.Mamba2StateShape.create  # the kit's convolution has two taps
    of_four = lambda **sizes: create(**sizes | dict(conv_kernel=4))
    monkeypatch.setattr(kit.Mamba2StateShape, "create", of_four)
    fixture = kit.build_gdn_attention_fixture(CASE, case, **SIZES)
    (layer, x), backend = layer_of(kind, fixture), fixture.backend
    C = kit._conv_states(fixture).normal_().shape[1]
    layer.attn.activation, layer.attn.conv_weights = "silu", torch.randn(C, 4).to(x)
    cache = kit._clone_gdn_cache(fixture)
    run = functools.partial(run_layer, "GDN", fixture, cache, layer)
    expected, _ = run(x)
    windows, states = kit._clone_gdn_cache(fixture)
    linear, decode = backend.linear_attn_backend, sglang_conv.api.decode
    monkeypatch.setattr(qwen3_5, "_gdn_decode_fused_proj_conv", True)  # as on a GPU
    sglang_conv.hook(linear, [layer])
    sglang_norm.hook(layer)
    if refused:
        one = lambda *rows, **call: (refuse if "conv" in call else decode)(*rows, **call)
        monkeypatch.setattr(sglang_conv.api, "decode", one)
    for more in ("", " and norm") if refused else [" and convolution and norm"] * 2:
        o, routes = run(x)
        assert routes == {f"GDN decode{more} on backend {ROUTE}"}
        torch.testing.assert_close(o, expected, **NEAR)
        after = kit._clone_gdn_cache(fixture)
        assert torch.equal(after[0], windows)
        torch.testing.assert_close(after[1], states, **NEAR)
    if not refused:  # padding of a graph
        kit._restore_gdn_cache(fixture, cache)
        slots = linear.forward_metadata.mamba_cache_indices
        padding, slots[-1] = int(slots[-1]), -1
        x[-1] = torch.nan
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            o = layer.forward(hidden_states=x, forward_batch=fixture.forward_batch)
        torch.testing.assert_close(o[:-1], expected[:-1], **NEAR)
        assert not o[-1].any()
        for pool, before in zip(kit._clone_gdn_cache(fixture), cache, strict=True):
            assert torch.equal(pool[padding], before[padding])


@pytest.mark.parametrize("kind", [Qwen3GatedDeltaNet, Qwen3_5GatedDeltaNet])
def test_drafts_in_a_kvbuffer_are_one_call(kind, monkeypatch):
    """From the projection to the norm, the engine's windows too; if refused, it convolves."""
    kit, case = KITS["GDN"][0], verify_case("GDN")
    create = kit.Mamba2StateShape.create  # the kit's convolution has two taps
    of_four = lambda **sizes: create(**sizes | dict(conv_kernel=4))
    monkeypatch.setattr(kit.Mamba2StateShape, "create", of_four)
    monkeypatch.setattr(qwen3_5, "_gdn_decode_fused_proj_conv", True)  # as on a GPU
    fixture = kit.build_gdn_attention_fixture(CASE, case, **SIZES)
    put_kvbuffer(fixture, "GDN")
    (layer, x), backend, batch = layer_of(kind, fixture), fixture.backend, fixture.forward_batch
    C = kit._conv_states(fixture).normal_().shape[1]
    layer.attn.activation, layer.attn.conv_weights = "silu", torch.randn(C, 4).to(x)
    drafts._prepare_target_verify_batch(batch, case, SIZES["device"])
    batch.spec_info = drafts._make_spec_verify_input(
        case, batch, topk=1, device=SIZES["device"], spec_kind="eagle"
    )
    cache = kit._clone_gdn_cache(fixture)
    pool = fixture.runner.req_to_token_pool.mamba_pool.mamba_cache
    steps, rows = pool.intermediate_conv_window[0], pool.intermediate_ssm.buffer
    written = steps, rows.u, rows.k, rows.log_decay

    def run():
        for tensor in written:
            tensor.fill_(torch.nan)
        o, routes = run_layer("GDN", fixture, cache, layer, x)
        return o, [tensor.clone() for tensor in written], routes

    expected, (windows, *records), _ = run()
    sglang_conv.hook(backend.linear_attn_backend, [layer])
    sglang_norm.hook(layer)
    verify, pair = sglang_conv.api.verify, kind is Qwen3_5GatedDeltaNet
    one = lambda *given, **call: (refuse if "conv" in call else verify)(*given, **call)
    for refused in (False, False, True):
        if refused:
            monkeypatch.setattr(sglang_conv.api, "verify", one)
        o, (our_windows, *ours), routes = run()
        # A pair's z has the rows of v, which the norm takes; a whole row's does not.
        more = " and convolution and norm" if not refused else " and norm" if pair else ""
        assert routes == {f"GDN verify{more} on backend {ROUTE}"}
        torch.testing.assert_close(o, expected, **NEAR)
        assert torch.equal(our_windows.nan_to_num(9), windows.nan_to_num(9))
        for our, record in zip(ours, records, strict=True):
            torch.testing.assert_close(our, record, equal_nan=True, **NEAR)
        for now, before in zip(kit._clone_gdn_cache(fixture), cache, strict=True):
            assert torch.equal(now, before)


class Quantised(Projection):
    """A projection in block FP8: of (numbers, scales). inputs: how many such it got."""

    inputs = 0

    def forward(self, x):
        if isinstance(x, tuple):
            self.inputs += 1
            values, scales = x
            assert scales.stride() == (1, -(-len(values) // 4) * 4)  # DeepGEMM's
            assert values.is_contiguous()
            x = (values.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
        return super().forward(x)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("kind", [Qwen3_5GatedDeltaNet, KimiDeltaAttention])
def test_our_calls_quantise_for_a_projection_in_fp8(kind, mode, monkeypatch):
    """Three rows with NaN behind a prompt have zeros. Behind another call the norm gives none."""
    layers = "KDA" if kind is KimiDeltaAttention else "GDN"
    kit, cases, _ = KITS[layers]
    case = cases[-1]
    if mode.is_target_verify():
        case = verify_case(layers)
    elif mode.is_extend():
        case = next(case for case in cases if "ragged" in case.name)
    fixture = getattr(kit, f"build_{layers.lower()}_attention_fixture")(CASE, case, **SIZES)
    (layer, x), batch = layer_of(kind, fixture), fixture.forward_batch
    cache, total = getattr(kit, f"_clone_{layers.lower()}_cache")(fixture), case.num_input_tokens
    if mode.is_target_verify():
        drafts._prepare_target_verify_batch(batch, case, SIZES["device"])
        batch.spec_info = drafts._make_spec_verify_input(
            case, batch, topk=1, device=SIZES["device"], spec_kind="eagle"
        )
    run = functools.partial(run_layer, layers, fixture, cache, layer)

    layer.out_proj = layer.o_proj = projection = Quantised(slice(None))
    expected, _ = run(x)
    monkeypatch.setattr(sglang_norm, "takes_fp8", lambda *_: True)
    sglang_norm.hook(layer)
    padding = 3 if mode is ForwardMode.EXTEND else 0
    if padding:
        batch.extend_num_tokens = batch.global_num_token_non_padded_cpu = total
    o, routes = run(padded(x, 0, padding))
    op = dict(DECODE="decode", EXTEND="prefill").get(mode.name, "verify")
    assert routes == {f"{layers} {op} and norm in FP8 on backend {ROUTE}"}
    assert projection.inputs == 1
    heads = expected.unflatten(1, (-1, layer.head_v_dim)).float()
    units = heads.abs().amax(-1, keepdim=True) / 448
    error = (o[:total].unflatten(1, heads.shape[1:]) - heads).abs()
    assert (error <= heads.abs() * 2**-4 * 1.01 + units * 2**-9 + 1e-5).all()
    assert error.any()
    assert not o[total:].any()
    if mode.is_target_verify() or (layers == "KDA" and not CUDA):
        return
    monkeypatch.setattr(sglang_kernels.api, op, refuse)
    o, (route,) = run(x)
    assert "the engine's own kernel" in route
    assert projection.inputs == 1
    torch.testing.assert_close(o, expected, **NEAR)
    process.state.refused.clear()


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        (dict(weight_block_size=[128, 64]), False),
        (dict(weight_block_size=None), False),
        (dict(use_marlin=True), False),
        (dict(use_mxfp8=True), False),
        (dict(w8a8_block_fp8_linear=fp8_utils.triton_w8a8_block_fp8_linear), False),
        (dict(params_dtype=torch.float16), False),
        (dict(head_v_dim=64), False),
        (dict(switch="0"), False),
    ],
)
def test_projections_that_take_fp8(changes, takes, monkeypatch):
    """In blocks, by DeepGEMM; SGLang's method hands our numbers and scales on to it."""
    calls, name = [], "deepgemm_w8a8_block_fp8_linear_with_fallback"
    monkeypatch.setattr(fp8_utils, name, lambda **given: calls.append(given))
    monkeypatch.setenv(sglang_norm.SWITCH, changes.get("switch", "1"))
    method = object.__new__(fp8.Fp8LinearMethod)
    facts = dict(weight_block_size=[128, 128], use_marlin=False, use_mxfp8=False, block_quant=True)
    facts |= dict(block_fp8_as_mxfp8=False, w8a8_block_fp8_linear=getattr(fp8_utils, name))
    vars(method).update(facts | changes)
    dtype = changes.get("params_dtype", torch.bfloat16)
    linear = SimpleNamespace(quant_method=method, params_dtype=dtype, weight=0, weight_scale_inv=1)
    attn = SimpleNamespace(head_v_dim=changes.get("head_v_dim", 128))
    layer = SimpleNamespace(out_proj=linear, attn=attn)
    gate = sglang_norm.GATES["Qwen3_5GatedDeltaNet"]
    with Context().override_server_args():
        assert sglang_norm.takes_fp8(layer, gate) == takes
    if takes:
        method.apply(linear, ("numbers", "scales"))
        ((input_, scales),) = [(x["input"], x["input_scale"]) for x in calls]
        assert (input_, scales) == ("numbers", "scales")


@pytest.mark.parametrize(("mode", "known"), [*((mode, False) for mode in MODES), (MODES[1], True)])
@pytest.mark.parametrize("layers", KITS)
def test_rows_behind_the_tokens_are_zeros(layers, mode, known, poisoned_memory):
    """Three rows with NaN, in new memory; a prefill's are cut off where the engine knows of them.

    A decode's have a padding slot each, those of a verify have one for all: a request of drafts.
    """
    kit, (*_, case) = KITS[layers][0], KITS[layers][1]
    if mode.is_target_verify():
        case = verify_case(layers)
    elif mode.is_extend():
        case = next(case for case in KITS[layers][1] if "ragged" in case.name)
    else:
        case = dataclasses.replace(case, prefix_lens=(5, 2))
    build = getattr(kit, f"build_{layers.lower()}_attention_fixture")
    fixture = build(CASE, case, **SIZES, runner_batch_size=4)
    backend, batch = fixture.backend, fixture.forward_batch
    inputs = getattr(kit, f"{layers.lower()}_fixture_inputs")(fixture)
    cache = getattr(kit, f"_clone_{layers.lower()}_cache")(fixture)
    if mode.is_target_verify():
        drafts._prepare_target_verify_batch(batch, case, SIZES["device"])
        batch.spec_info = drafts._make_spec_verify_input(
            case, batch, topk=1, device=SIZES["device"], spec_kind="eagle"
        )
    total, results = case.num_input_tokens, []
    for past in (0, 3):
        rows = {name: padded(x, list(x.shape).index(total), past) for name, x in inputs.items()}
        getattr(kit, f"_restore_{layers.lower()}_cache")(fixture, cache)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            metadata = backend.linear_attn_backend.forward_metadata
            if mode.is_extend_without_speculative():
                batch.global_num_token_non_padded_cpu = total if known else None
            elif past:
                slots, bounds = metadata.mamba_cache_indices, metadata.query_start_loc
                step = past if mode.is_target_verify() else 1
                ends = torch.arange(total + step, total + past + 1, step).to(bounds)
                metadata.mamba_cache_indices = torch.cat([slots, slots.new_zeros(len(ends))])
                metadata.query_start_loc = torch.cat([bounds, ends])
                batch.req_pool_indices = torch.nn.functional.pad(
                    batch.req_pool_indices, (0, len(ends))
                )
                batch.batch_size += len(ends)
            o = getattr(kit, f"run_{layers.lower()}_forward")(fixture, batch, rows)
        assert o.shape[1] == total + past
        assert not o[:, total:].any()
        results.append(o[:, :total])
    torch.testing.assert_close(*results, **NEAR)
    ran(layers, {"DECODE": "decode", "EXTEND": "prefill"}.get(mode.name, "verify"))


def padded(x, dim, rows):
    """x with so many rows of NaN behind."""
    shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
    return torch.cat([x, x.new_full(shape, float("nan"))], dim)


def refuse(*_, **__):
    raise UnsupportedProblem("this decode", ("a test",))


def track_state(ssm_pool, h_track, track_mode, track_dst, cache_indices):
    """The engine's kda_track_ssm_state, on a CPU."""
    for mode, dst, slot, state in zip(track_mode.tolist(), track_dst, cache_indices, h_track):
        if mode:
            ssm_pool[dst] = ssm_pool[slot] if mode == prefill_graph.TRACK_FINAL_STATE else state


def resize(batch, lengths, tracked, slots):
    """Gives a batch of the kits other lengths, and states to keep of these for the cache."""
    device, total = batch.seq_lens.device, sum(lengths)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = sizes, list(lengths)
    batch.extend_start_loc = sizes.cumsum(0, dtype=torch.int32) - sizes
    batch.extend_num_tokens = batch.global_num_token_non_padded_cpu = total
    batch.mamba_prefill_track_mask_cpu = tracked
    batch.mamba_track_mask = torch.tensor(tracked, device=device)
    batch.mamba_track_indices = torch.tensor(slots, device=device)
    batch.mamba_track_seqlens = batch.extend_prefix_lens + sizes
    batch.mamba_track_seqlens_cpu = batch.mamba_track_seqlens.tolist()


@pytest.mark.parametrize("layers", KITS)
def test_prefills_in_a_graph(layers, monkeypatch):
    """One graph, for any batch that fits: results, states and cached prefixes as without it."""
    name, (kit, cases, _) = layers.lower(), KITS[layers]
    case = next(case for case in cases if "ragged" in case.name)
    build = getattr(kit, f"build_{name}_attention_fixture")
    fixture = build(CASE, case, **SIZES, runner_batch_size=8, max_context_len=256)
    batch, backend = fixture.forward_batch, fixture.backend.linear_attn_backend
    assert backend.supports_prefill_graph_extend()
    with envs.SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND.override(True):
        assert not backend.supports_prefill_graph_extend()
    extra = SimpleNamespace(mamba=SimpleNamespace(enable_mamba_extra_buffer=True))
    monkeypatch.setattr(kda_backend, "get_exec", lambda: extra)
    if layers == "GDN" or not CUDA:
        monkeypatch.setattr(prefill_graph, "kda_track_conv_window", sglang_graphs.copy_windows)
    if not CUDA:
        monkeypatch.setattr(prefill_graph, "kda_track_ssm_state", track_state)
        monkeypatch.setattr(prefill_graph, "causal_conv1d_fn", sglang_cpu.causal_conv1d_fn_cpu)
    attn, pool = fixture.actual_module.attn, (kit._conv_states(fixture), kit._ssm_states(fixture))
    attn.activation = "silu"
    attn.conv_weights.normal_()
    before, bucket = [x.clone() for x in pool], 256
    some = dict(device=SIZES["device"], dtype=SIZES["dtype"])
    channels = (attn.head_k_dim,) if layers == "KDA" else ()
    lead = (1,) if layers == "KDA" else ()
    mixed_qkv = torch.randn(bucket, attn.q_dim + attn.k_dim + attn.v_dim, **some)
    a = torch.randn(*lead, bucket, attn.num_v_heads, *channels, **some)
    b = torch.randn(*lead, bucket, attn.num_v_heads, **some)

    def forward(tokens):
        parts = dict(mixed_qkv=mixed_qkv[:tokens], a=a, b=b)
        parts |= {x: parts[x].narrow(len(lead), 0, tokens) for x in ("a", "b")}
        return fixture.backend.forward_extend(attn, batch, **parts)

    def restore():
        for x, y in zip(pool, before):
            x.copy_(y)

    batches = [
        ([130, 8, 64], [True, False, True], [5, 0, 7]),
        ([1, 200, 30], [False, True, False], [0, 6, 0]),
    ]
    graph = torch.cuda.CUDAGraph() if CUDA else None
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=fixture.backend)):
        for number, (lengths, tracked, slots) in enumerate(batches):
            resize(batch, lengths, tracked, slots)
            restore()
            fixture.backend.init_forward_metadata(batch)
            assert not backend.prefill_graph_extend_active()
            expected = forward(sum(lengths))
            states = [x[1:].clone() for x in pool]  # without padding
            restore()
            if number == 0:
                batch.extend_num_tokens = bucket
                tables = backend.init_prefill_graph_metadata(batch)
                result = forward(bucket)  # compiles, on a GPU
                if CUDA:
                    with torch.cuda.graph(graph):
                        result = forward(bucket)
                    restore()
                    graph.replay()
            else:
                backend.refresh_prefill_graph_metadata(tables, batch)
                if CUDA:
                    graph.replay()
                else:
                    result = forward(bucket)
            assert backend.prefill_graph_extend_active()
            torch.testing.assert_close(result[:, : sum(lengths)], expected, **NEAR)
            assert not result[:, sum(lengths) :].any()
            for x, y in zip(pool, states):
                torch.testing.assert_close(x[1:], y, **NEAR)
        monkeypatch.setattr(sglang_graphs, "MAX_TOKENS", 0)
        assert backend.init_prefill_graph_metadata(batch) is None  # the graph breaks here
        assert not backend.prefill_graph_extend_active()
    hooked = {target.rpartition(".")[2] for target in HookRegistry._patched}
    assert "can_replay_locally" in hooked
    ran(layers, "prefill")


@pytest.mark.skipif(not CUDA, reason="needs a GPU: CUDA graphs")
@pytest.mark.parametrize(("layers", "case"), [one for one in CASES if "decode" in one.id])
def test_decode_in_a_cuda_graph(layers, case):
    run = (
        graphs.run_gdn_cuda_graph_decode_case
        if layers == "GDN"
        else graphs.run_kda_cuda_graph_decode_case
    )
    run(CASE, case, **SIZES, cuda_graph_capture_batch_size=case.batch_size)
    ran(layers, "decode")


@pytest.mark.skipif(not CUDA, reason="needs a GPU: CUDA graphs")
@pytest.mark.parametrize("layers", KITS)
def test_drafts_in_a_cuda_graph(layers, topk):
    run = (
        drafts.run_gdn_eagle_verify_cuda_graph_case
        if layers == "GDN"
        else drafts.run_kda_eagle_verify_cuda_graph_case
    )
    run(CASE, verify_case(layers), topk=topk, **SIZES)
    ran(layers, "verify")
