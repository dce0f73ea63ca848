"""benchmarks/layers.py without a GPU: every peer gets what it documents, and gives what ours gives."""

import types

import pytest
import torch

import gated_delta as gd
from benchmarks import layers, peers
from benchmarks.cells import BF16, FP32
from benchmarks.layers import layer
from benchmarks.peers import NotOffered
from test_benchmarks import CPU, runner, small  # noqa: F401

STEPS = [layer("kda", (12, 12), FP32, 1, 2), layer("gdn", (1, 2), BF16, 1, 3)]
DRAFTS = [layer("gdn", (1, 2), dtype, 3, 2) for dtype in (BF16, FP32)]

CONVOLUTION = """
import torch

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
    assert (bias, activation) == (None, "silu")
    rows = conv_state_indices.long()
    seen = torch.cat([conv_state[rows], x[..., None]], -1)
    conv_state[rows] = seen[..., 1:]
    return torch.nn.functional.silu((seen.float() * weight.float()).sum(-1)).to(x.dtype)
"""
NORM = """
import torch
from sglang.kernels.jit.utils import get_jit_cuda_arch, is_arch_support_pdl
from sglang.srt.utils import cdiv, cpu_has_amx_support, is_cpu, is_npu, next_power_of_2

assert (cdiv(5, 4), next_power_of_2(5), next_power_of_2(8)) == (2, 8, 8)
assert not (is_npu() or is_cpu() or cpu_has_amx_support() or is_arch_support_pdl() or get_jit_cuda_arch().major)

def layer_norm_gated_fwd(x, g, weight, bias, activation="swish", eps=1e-5, out_dtype=None, is_rms_norm=False):
    assert is_rms_norm and bias is None and x.ndim == 2
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps)
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation]
    return (normed * act(g.float())).to(out_dtype), None, None, x
"""
PACKED = """
import gated_delta as gd
from sglang.kernels.ops.attention.fla.utils import input_guard

def packed(mixed_qkv, a, b, gate, heads, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel):
    B, HV = out.shape[0], out.shape[2]
    H = (mixed_qkv.shape[1] // 128 - HV) // 2
    q, k, v = (x.view(B, 1, -1, 128) for x in mixed_qkv.split([H * 128, H * 128, HV * 128], -1))
    states = dict(state=initial_state, state_indices=ssm_state_indices, out=out, backend="reference")
    assert use_qk_l2norm_in_kernel
    gd.decode(q, k, v, a.view(B, 1, HV, *heads), b[:, None], gate=gate, scale=scale, beta_logits=True, **states)
    return out, initial_state

@input_guard
def fused_recurrent_gated_delta_rule_packed_decode(A_log, dt_bias, **options):
    return packed(gate=gd.Gate.softplus(A_log, dt_bias), heads=(), **options)

def fused_recurrent_kda_packed_decode(A_log, dt_bias, lower_bound, **options):
    from sglang.kernels.ops.attention import kda_packed_decode
    assert not kda_packed_decode.covered(options["mixed_qkv"])
    return packed(gate=gd.Gate.lower_bound(A_log, dt_bias.view(len(A_log), -1), lower_bound), heads=(128,), **options)
"""


def fused_kda_decode(x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out, *behind):
    lower_bound, output_gate, norm_weight, norm_eps = behind
    (_, B, H, D), rows = raw_g.shape, state_indices.long()
    assert (bias, weight.dtype, tuple(weight.shape)) == (None, torch.float32, (3, 4, H * D))
    seen = torch.cat([conv_state[rows], x[..., None]], -1)
    conv_state[rows] = seen[..., 1:]
    mixed = torch.nn.functional.silu((seen.float() * weight.transpose(1, 2).reshape(-1, 4)).sum(-1)).bfloat16()
    gd.decode(
        *(y.view(B, 1, H, D) for y in mixed.split(H * D, -1)), raw_g.view(B, 1, H, D), raw_beta.view(B, 1, H),
        gate=gd.Gate.lower_bound(A_log, dt_bias.view(H, D), lower_bound), norm=gd.GatedNorm(norm_weight, norm_eps, "sigmoid"),
        z=output_gate.view(B, 1, H, D), state=state, state_indices=state_indices, out=out.view(B, 1, H, D), beta_logits=True,
        backend="reference",
    )  # fmt: skip


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted, state, output_gate, norm_weight, out, scale, eps, act
):
    HV, D = out.shape[1:]
    H = (mixed_qkv.shape[1] // D - HV) // 2
    assert state_indices.shape == (len(cu_seqlens) - 1, len(mixed_qkv) // len(num_accepted))
    q, k, v = (x.unflatten(-1, (-1, D))[None] for x in mixed_qkv.split([H * D, H * D, HV * D], -1))
    gd.decode(
        q, k, v, a[None], b[None], gate=gd.Gate.softplus(A_log, dt_bias), norm=gd.GatedNorm(norm_weight, eps, act),
        z=output_gate[None], state=state, state_indices=state_indices, num_accepted=num_accepted, cu_seqlens=cu_seqlens,
        out=out[None], scale=scale, beta_logits=True, backend="reference",
    )  # fmt: skip


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    for name, text in dict(causal_conv1d_triton=CONVOLUTION, fused_norm_gate=NORM, fused_recurrent=PACKED).items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    operations = types.SimpleNamespace(
        fused_kda_decode=fused_kda_decode, fused_gdn_decode_post_conv_mtp=fused_gdn_decode_post_conv_mtp
    )
    monkeypatch.setattr(layers, "vllm", lambda name: getattr(operations, name))
    peers.sglang.cache_clear()
    yield
    peers.sglang.cache_clear()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", layers.PEERS)
@pytest.mark.parametrize("cell", [*STEPS, *DRAFTS], ids=lambda cell: cell.label)
def test_peers_are_asked_for_the_same_or_refuse(runner, name, cell):  # noqa: F811
    prepare = layers.PEERS[name].prepare
    if name == "sglang" and cell in DRAFTS:
        with pytest.raises(NotOffered, match="one token"):
            prepare(cell, cell.make(cell, CPU, 0))
        return
    found = runner({name: prepare}, **{name: 7.0}, decode=1.0, decode_norm=1.5).measure(small(cell))
    (peer,) = found["peers"].values()
    assert found["parts"] == dict(decode=1.0, decode_norm=1.5)
    assert peer["reason"] is None
    assert peer["error"] < 5e-3


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("cell", STEPS, ids=lambda cell: cell.label)
def test_a_step_is_a_convolution_the_recurrence_and_a_norm(cell):
    """By definition, from the same tensors; the windows move on, and `results` leaves them as they were."""
    b = cell.make(cell, CPU, 0)
    before, rows = b.windows.clone(), b.state_indices.long()
    seen = torch.cat([before[rows], b.mixed[..., None]], -1)
    tokens = b.arguments() | b.split(torch.nn.functional.silu((seen.float() * b.weight.float()).sum(-1)).bfloat16())
    o = gd.decode(**tokens, state=b.state.clone(), state_indices=b.state_indices, backend="reference").float()
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[b.norm.activation]
    want = torch.nn.functional.rms_norm(o, (128,), b.norm.weight, b.norm.eps) * act(b.z.float())
    found, _ = b.results(b.ours("reference"))
    assert torch.linalg.vector_norm(found.float() - want) < 1e-2 * torch.linalg.vector_norm(want)
    assert torch.equal(b.windows, before)
    b.ours("reference")()
    assert torch.equal(b.windows[rows], seen[..., 1:])


def test_vllms_kernels_are_named_where_they_are_missing(monkeypatch):
    monkeypatch.delenv(layers.LIBRARY, raising=False)
    with pytest.raises(ImportError, match=layers.LIBRARY):
        layers.vllm("fused_kda_decode")


def test_fused_kda_is_offered_for_some_heads_and_fp32_states_alone():
    for cell in (layer("kda", (12, 12), BF16, 1, 2), layer("kda", (32, 32), FP32, 1, 2)):
        with pytest.raises(NotOffered, match="12, 24, 48 or 96 heads"):
            layers.vllm_fused(cell, cell.make(cell, CPU, 0))


def test_every_cell_has_a_case_and_its_own_label():
    assert len(layers.CELLS) == len(layers.STEPS) + len(layers.DRAFTS)
    for cell in layers.CELLS.values():
        assert [(case.op, case.norm) for case in cell.cases(cell)] == [("decode", {"gdn": "silu", "kda": "sigmoid"}[cell.model])]
