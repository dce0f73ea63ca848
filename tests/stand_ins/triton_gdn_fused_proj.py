"""SGLang's split of Qwen3-Next's projections."""

import torch


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v
):
    rows, H, HV = len(mixed_qkvz), num_heads_qk, num_heads_v
    assert mixed_qkvz.is_contiguous()
    assert mixed_ba.is_contiguous()
    values = HV // H * head_v
    *qkv, z = mixed_qkvz.view(rows, H, -1).split([head_qk, head_qk, values, values], -1)
    b, a = mixed_ba.view(rows, H, 2, -1).unbind(2)
    z, b, a = (x.contiguous().view(rows, HV, -1) for x in (z, b, a))
    return torch.cat([x.flatten(1) for x in qkv], 1), z, b[..., 0], a[..., 0]
