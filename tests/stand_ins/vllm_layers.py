"""vLLM's functions around and in its GDN and KDA layers, by gated_delta's."""

import causal_conv1d_triton as sglang
import fused_recurrent
import torch
from fused_norm_gate import layer_norm_gated_fwd as sglang_norm

import gated_delta as gd


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, out=None
):
    y = sglang.causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices)
    return out.copy_(y)


def compute_causal_conv1d_metadata(query_start_loc_p_cpu, *, device):
    return {8: dict(lengths=query_start_loc_p_cpu.diff().tolist())}, device, device


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
    activation="silu", null_block_id=0, metadata=None,
):  # fmt: skip
    assert null_block_id not in cache_indices.tolist()  # these would stay unwritten
    lengths = metadata.nums_dict[8]["lengths"]
    given = (conv_states, query_start_loc, lengths, cache_indices, has_initial_state, activation)
    return sglang.causal_conv1d_fn(x, weight, bias, *given)


fused_recurrent_gated_delta_rule_packed_decode = (
    fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
)


def fused_recurrent_kda_packed_decode(
    mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices
):
    _, B, H, K = raw_g.shape
    out = torch.empty(B, 1, H, K, dtype=mixed_qkv.dtype)
    assert raw_beta.shape == (1, B, H)
    gate = gd.Gate.lower_bound(A_log, dt_bias.view(H, K), lower_bound)
    return fused_recurrent.packed(
        mixed_qkv, raw_g[0].flatten(1), raw_beta[0], gate, (K,), K**-0.5, initial_state, out,
        state_indices, True,
    )  # fmt: skip


def fused_post_conv_prep(
    conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm=True,
    output_g_exp=False,
):  # fmt: skip
    HV, sizes = len(A_log), [num_k_heads * head_k_dim] * 2
    q, k, v = conv_output.split([*sizes, HV * head_v_dim], 1)
    q, k = (torch.nn.functional.normalize(x.unflatten(1, (-1, head_k_dim)), dim=-1) for x in (q, k))
    assert apply_l2norm
    log_decay = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    decay = log_decay.exp() if output_g_exp else log_decay
    return q, k, v.unflatten(1, (HV, head_v_dim)), decay, b.float().sigmoid()


def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, **options):
    l2norm = use_qk_l2norm_in_kernel
    return gd.prefill(q, k, v, g, beta, qk_l2norm=l2norm, backend="reference", **options)


def chunk_kda_with_fused_gate(
    q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound, use_qk_l2norm_in_kernel, **states
):
    assert use_qk_l2norm_in_kernel
    gate = gd.Gate.lower_bound(A_log, g_bias.view(len(A_log), -1), lower_bound)
    return gd.prefill(
        q, k, v, raw_g, raw_beta, gate=gate, beta_logits=True, backend="reference", **states
    )


def layer_norm_gated_fwd(x, g, weight, bias, activation="swish", eps=1e-5, is_rms_norm=False):
    return sglang_norm(x, g, weight, bias, activation, eps, x.dtype, is_rms_norm)


def layer_norm_fwd(x, weight, bias, eps, z=None, is_rms_norm=False, activation="swish"):
    return sglang_norm(x, z, weight, bias, activation, eps, x.dtype, is_rms_norm)[:3]
