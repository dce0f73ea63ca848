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
