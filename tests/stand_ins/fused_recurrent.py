"""SGLang's decode of the convolution's output, by gated_delta's."""

from sglang.kernels.ops.attention.fla.utils import input_guard

import gated_delta as gd


def packed(
    mixed_qkv,
    a,
    b,
    gate,
    heads,
    scale,
    initial_state,
    out,
    ssm_state_indices,
    use_qk_l2norm_in_kernel,
):
    B, HV = out.shape[0], out.shape[2]
    H = (mixed_qkv.shape[1] // 128 - HV) // 2
    q, k, v = (x.view(B, 1, -1, 128) for x in mixed_qkv.split([H * 128, H * 128, HV * 128], -1))
    states = dict(
        state=initial_state, state_indices=ssm_state_indices, out=out, backend="reference"
    )
    assert use_qk_l2norm_in_kernel
    gd.decode(
        q,
        k,
        v,
        a.view(B, 1, HV, *heads),
        b[:, None],
        gate=gate,
        scale=scale,
        beta_logits=True,
        **states,
    )
    return out, initial_state


@input_guard
def fused_recurrent_gated_delta_rule_packed_decode(A_log, dt_bias, **options):
    return packed(gate=gd.Gate.softplus(A_log, dt_bias), heads=(), **options)


def fused_recurrent_kda_packed_decode(A_log, dt_bias, lower_bound, **options):
    from sglang.kernels.ops.attention import kda_packed_decode

    assert not kda_packed_decode.covered(options["mixed_qkv"])
    return packed(
        gate=gd.Gate.lower_bound(A_log, dt_bias.view(len(A_log), -1), lower_bound),
        heads=(128,),
        **options,
    )
