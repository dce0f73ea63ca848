"""SGLang's fold of KDA's records, on decode; a 16-bit state is rounded once, at its end."""

import gated_delta as gd


def commit_kda_replayssm_spec_all_layers(
    checkpoint_state, rawv_cache, rawk_cache, gk_cache, beta_cache, ssm_state_indices, accept_lens,
    max_cache_len, num_k_heads, mamba_track_indices=None, mamba_steps_to_track=None,
    use_qk_l2norm_in_kernel=True, null_block_id=0,
):  # fmt: skip
    assert (null_block_id, max_cache_len, num_k_heads) == (
        -1,
        rawk_cache.shape[3],
        rawk_cache.shape[2],
    )
    for slot, m in zip(ssm_state_indices.tolist(), accept_lens.tolist()):
        k, v, g, beta = (
            x[0, slot, :, :m].transpose(0, 1)[None]
            for x in (rawk_cache, rawv_cache, gk_cache, beta_cache)
        )
        state = checkpoint_state[:, slot].float()
        gd.decode(k, k, v, g, beta, state=state, backend="reference")
        checkpoint_state[:, slot] = state.to(checkpoint_state.dtype)
