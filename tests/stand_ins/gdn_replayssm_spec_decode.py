"""SGLang's ReplaySSM for GDN, on verify and flush: a ring of records, folded when full."""

import torch
from sglang.kernels.ops.attention.fla.utils import is_tf32_supported
from sglang.srt.utils import is_gfx95_supported

import gated_delta as gd

assert (bool(is_tf32_supported), is_gfx95_supported()) == (True, False)


def ring(start, count, size):
    return [(int(start) + i) % size for i in range(int(count))]


def folded(state, d, k, g, places):
    """A state [HV, V, K] after the records at these places."""
    state = state[None].float().clone()
    if places:
        u, k, g = ((x[:, places]).float().transpose(0, 1)[None].contiguous() for x in (d, k, g))
        gd.flush(state, gd.KVBuffer(u, k, g), len(places), state_indices=torch.tensor([0]))
    return state[0]


def gdn_replayssm_spec_decode(
    q, k, v, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, rawv_cache,
    rawk_cache, beta_cache, out, query_start_loc, ssm_state_indices, replay_indices, write_pos,
    cache_base, is_flush, max_cache_len, max_spec_len, scale=None, use_qk_l2norm_in_kernel=True,
    null_block_id=0, launch_mode="both",
):  # fmt: skip
    assert (launch_mode, beta_cache, null_block_id, max_cache_len) == (
        "verify",
        None,
        -1,
        d_cache.shape[2],
    )
    gate = gd.Gate.softplus(A_log, dt_bias)
    for n, (slot, row) in enumerate(zip(ssm_state_indices.tolist(), replay_indices.tolist())):
        assert (int(is_flush[row]), bool(write_pos[row] + max_spec_len <= max_cache_len)) == (
            0,
            True,
        )
        span, seen = (
            slice(*query_start_loc[n : n + 2].tolist()),
            ring(cache_base[row], write_pos[row], max_cache_len),
        )
        records = [
            high[row].float() + low[row].float()
            for high, low in ((d_cache, rawv_cache), (k_cache, rawk_cache))
        ]
        state = folded(checkpoint_state[slot], *records, g_cache[row], seen)
        buffer = gd.KVBuffer.empty(1, max_spec_len, k.shape[1], v.shape[1], k.shape[2], v.shape[2])
        tokens = [one[None, span] for one in (q, k, v, a, b)]
        out[span] = gd.verify(
            *tokens, gate=gate, scale=scale, beta_logits=True, state=state[None], buffer=buffer
        )[0]
        where = ring(cache_base[row] + write_pos[row], max_spec_len, max_cache_len)
        for x, high, low in ((buffer.u, d_cache, rawv_cache), (buffer.k, k_cache, rawk_cache)):
            high[row][:, where] = (x := x[0].transpose(0, 1)).to(high.dtype)
            low[row][:, where] = (x - high[row][:, where].float()).to(low.dtype)
        g_cache[row][:, where] = buffer.log_decay[0].T
    return out


def commit_gdn_replayssm_spec(
    write_pos, cache_base, is_flush, num_accepted, replay_indices, max_cache_len, max_spec_len,
    fold_every_commit=False, cache_buf_len=None, null_block_id=0,
):  # fmt: skip
    assert (is_flush.dtype, int(is_flush.sum())) == (torch.int8, 0)
    write_pos[replay_indices] += num_accepted
    is_flush.copy_(
        write_pos > 0 if fold_every_commit else write_pos + 2 * max_spec_len > max_cache_len
    )


def commit_gdn_replayssm_circular(
    *, checkpoint_state, d_cache, k_cache, g_cache, d_residual_cache, k_residual_cache,
    state_batch_indices, replay_indices, write_pos, cache_base, is_flush, accept_lens,
    mamba_track_indices=None, mamba_steps_to_track=None, null_block_id=-1,
):  # fmt: skip
    for slot, row in zip(state_batch_indices.tolist(), replay_indices.tolist()):
        if is_flush[row]:
            records = [
                (x[0, row].float() + y[0, row].float())
                for x, y in ((d_cache, d_residual_cache), (k_cache, k_residual_cache))
            ]
            state = checkpoint_state[0, slot]
            state.copy_(
                folded(
                    state,
                    *records,
                    g_cache[0, row],
                    ring(cache_base[row], write_pos[row], d_cache.shape[3]),
                )
            )
            cache_base[row] = (cache_base[row] + write_pos[row]) % d_cache.shape[3]
            write_pos[row] = is_flush[row] = 0
