"""Functions of FlashInfer, cuDNN and vLLM without an adapter, on gated_delta's operations."""

import torch

import gated_delta as gd
from gated_delta.integrations import flashinfer


class FlashKda:
    """torch.ops._flashkda_C."""

    @staticmethod
    def get_workspace_size(tokens, heads, sequences):
        return tokens * heads + sequences

    @staticmethod
    def fwd(q, k, v, g, beta, scale, o, workspace, A_log, dt_bias, bound, initial, final, *rest):
        cu_seqlens, *_ = rest
        assert workspace.numel() == q.shape[1] * q.shape[2] + len(initial)
        gate = gd.Gate.lower_bound(A_log, dt_bias, bound)
        _, states = gd.prefill(
            *(q, k, v, g, beta), gate=gate, beta_logits=True, scale=scale, cu_seqlens=cu_seqlens,
            initial_state=initial, output_final_state=True, out=o, backend="reference",
        )  # fmt: skip
        final.copy_(states)


def recurrent_kda(q, k, v, g, beta, *, num_spec_tokens=None, **options):
    if num_spec_tokens is None:
        return flashinfer.recurrent_kda(q, k, v, g, beta, **options)
    assert options["use_gate_in_kernel"]
    assert options["beta_is_logit"]
    # The adapter refuses it: a slot for every token, in another pool than the one read.
    written, slots, cu_seqlens = (
        options["initial_state"],
        options["ssm_state_indices"],
        options["cu_seqlens"],
    )
    assert slots.shape == (len(cu_seqlens) - 1, num_spec_tokens + 1)
    gate = gd.Gate.lower_bound(
        options["A_log"], options["dt_bias"].view(v.shape[2], -1), options["lower_bound"]
    )
    steps = torch.empty(*slots.shape, *written.shape[1:], dtype=written.dtype)
    read = dict(
        state=options["initial_state_source"],
        state_indices=options["initial_state_indices"],
        update_state=False,
    )
    o = gd.decode(
        q,
        k,
        v,
        g,
        beta,
        gate=gate,
        beta_logits=True,
        cu_seqlens=cu_seqlens,
        intermediate_states=steps,
        **read,
    )
    written[slots.view(-1).long()] = steps.flatten(0, 1)
    return o, None


def kimi_delta_attention(
    q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False,
    gate_lower_bound=None, gate_domain="log", a_log=None, dt_bias=None, plan_name=None,
):  # fmt: skip
    assert plan_name in ("kda_hopper_cuda", "kda_hopper")
    if plan_name == "kda_hopper":
        assert q.shape[1] == v.shape[1]
        assert {use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, safe_gate} == {False}
    if not safe_gate:
        assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int32
    o, state = gd.prefill(
        q[None], k[None], v[None], g[None], beta[None], scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        gate=gd.Gate.lower_bound(a_log, dt_bias, gate_lower_bound) if safe_gate else gd.Gate.log(),
        beta_logits=use_beta_sigmoid_in_kernel, initial_state=initial_state,
        output_final_state=True, backend="reference",
    )  # fmt: skip
    return o[0], state


def fused_kda_decode(
    x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out, *behind
):
    lower_bound, output_gate, norm_weight, norm_eps = behind
    (_, B, H, D), rows = raw_g.shape, state_indices.long()
    assert (bias, weight.dtype, tuple(weight.shape)) == (None, torch.float32, (3, 4, H * D))
    seen = torch.cat([conv_state[rows], x[..., None]], -1)
    conv_state[rows] = seen[..., 1:]
    mixed = torch.nn.functional.silu(
        (seen.float() * weight.transpose(1, 2).reshape(-1, 4)).sum(-1)
    ).bfloat16()
    gd.decode(
        *(y.view(B, 1, H, D) for y in mixed.split(H * D, -1)), raw_g.view(B, 1, H, D),
        raw_beta.view(B, 1, H), gate=gd.Gate.lower_bound(A_log, dt_bias.view(H, D), lower_bound),
        norm=gd.GatedNorm(norm_weight, norm_eps, "sigmoid"), z=output_gate.view(B, 1, H, D),
        state=state, state_indices=state_indices, out=out.view(B, 1, H, D), beta_logits=True,
        backend="reference",
    )  # fmt: skip


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv,
    a,
    b,
    A_log,
    dt_bias,
    state_indices,
    cu_seqlens,
    num_accepted,
    state,
    output_gate,
    norm_weight,
    out,
    scale,
    eps,
    act,
):
    HV, D = out.shape[1:]
    H = (mixed_qkv.shape[1] // D - HV) // 2
    assert state_indices.shape == (len(cu_seqlens) - 1, len(mixed_qkv) // len(num_accepted))
    q, k, v = (x.unflatten(-1, (-1, D))[None] for x in mixed_qkv.split([H * D, H * D, HV * D], -1))
    gd.decode(
        q, k, v, a[None], b[None], gate=gd.Gate.softplus(A_log, dt_bias),
        norm=gd.GatedNorm(norm_weight, eps, act), z=output_gate[None], state=state,
        state_indices=state_indices, num_accepted=num_accepted, cu_seqlens=cu_seqlens,
        out=out[None], scale=scale, beta_logits=True, backend="reference",
    )  # fmt: skip
