"""SGLang's commit of one of several cached states."""

import torch
from sglang.kernels.ops.memory.ptr_table import make_ptr_table
from sglang.srt.utils.common import get_device_core_count

assert make_ptr_table is not None
assert get_device_core_count(0) == 0


def fused_mamba_state_scatter_with_mask(
    dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None
):
    assert {x.dtype for x in (dst_indices_raw, step_indices_raw, src_indices_raw)} == {torch.int32}
    assert (dst.shape[0], dst.shape[2:], src.is_contiguous()) == (src.shape[0], src.shape[3:], True)
    for slot, step, row in zip(
        dst_indices_raw.tolist(), step_indices_raw.tolist(), src_indices_raw.tolist()
    ):
        if step >= 0:
            dst[:, slot] = src[:, row, step]
