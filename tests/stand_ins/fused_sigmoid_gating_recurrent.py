"""SGLang's decode, by gated_delta's; with cache_ring it leaves records of the tokens."""

import torch
from sglang.kernels.jit.utils import is_arch_support_pdl
from sglang.srt.utils import get_device_sm, is_cuda, is_gfx95_supported, is_hip, is_sm90_supported

import gated_delta as gd

assert not any(
    [
        is_arch_support_pdl(),
        is_cuda(),
        is_gfx95_supported(),
        is_hip(),
        is_sm90_supported(),
        get_device_sm(),
    ]
)


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
    initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False,
    lower_bound=None, disable_state_update=False, intermediate_states_buffer=None,
    intermediate_state_indices=None, cache_steps=None, cache_ring=False, replayssm_rawv=None,
    replayssm_rawk=None, replayssm_g=None, replayssm_beta=None,
):  # fmt: skip
    assert (softplus_beta, softplus_threshold, use_qk_l2norm_in_kernel) == (1.0, 20.0, True)
    assert (lower_bound is not None) == is_kda
    assert cache_ring or cache_steps is None or cache_steps == intermediate_states_buffer.shape[1]
    if cache_ring:
        assert (is_kda, disable_state_update, cache_steps <= replayssm_rawv.shape[2]) == (
            True,
            True,
            True,
        )
        log_decay = lower_bound * torch.sigmoid(
            A_log.exp()[:, None] * (a.view(-1, *dt_bias.shape).float() + dt_bias)
        )
        records = (
            (replayssm_rawv, v[0]),
            (replayssm_rawk, k[0]),
            (replayssm_g, log_decay),
            (replayssm_beta, b.float().sigmoid()),
        )
        for ring, x in records:
            ring[initial_state_indices.long(), :, :cache_steps] = (
                x.unflatten(0, (-1, cache_steps)).transpose(1, 2).to(ring.dtype)
            )
    a = a.view(1, a.shape[0], v.shape[2], -1)
    a = a if is_kda else a[..., 0]
    gate = (
        gd.Gate.lower_bound(A_log, dt_bias, lower_bound)
        if is_kda
        else gd.Gate.softplus(A_log, dt_bias)
    )
    return gd.decode(
        q, k, v, a, b[None], gate=gate, scale=scale, beta_logits=True, cu_seqlens=cu_seqlens,
        state=initial_state_source, state_indices=initial_state_indices,
        intermediate_states=intermediate_states_buffer, update_state=not disable_state_update,
        backend="reference",
    )  # fmt: skip
