"""SGLang's short convolution of one token."""

import torch


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None
):
    assert (bias, activation) == (None, "silu")
    rows = conv_state_indices.long()
    seen = torch.cat([conv_state[rows], x[..., None]], -1)
    conv_state[rows] = seen[..., 1:]
    return torch.nn.functional.silu((seen.float() * weight.float()).sum(-1)).to(x.dtype)


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices, has_initial_state,
    activation,
):  # fmt: skip
    assert (bias, activation) == (None, "silu")
    assert (x.stride(0), bool(has_initial_state.all())) == (1, True)
    assert query_start_loc.diff().tolist() == seq_lens_cpu
    out, windows = torch.empty_like(x.T), conv_states[cache_indices.long()]
    pieces = zip(x.split(seq_lens_cpu, 1), out.split(seq_lens_cpu), windows, strict=True)
    for n, (piece, rows, window) in enumerate(pieces):
        seen = torch.cat([window, piece], 1)
        y = torch.nn.functional.conv1d(seen[None].float(), weight[:, None].float(), groups=len(x))
        rows.copy_(torch.nn.functional.silu(y[0]).T)
        conv_states[cache_indices[n]] = seen[:, -3:]
    return out.T
