"""SGLang's gated RMSNorm."""

import torch
from sglang.kernels.jit.utils import get_jit_cuda_arch, is_arch_support_pdl
from sglang.srt.utils import cdiv, cpu_has_amx_support, is_cpu, is_npu, next_power_of_2

assert (cdiv(5, 4), next_power_of_2(5), next_power_of_2(8)) == (2, 8, 8)
assert not any(
    [is_npu(), is_cpu(), cpu_has_amx_support(), is_arch_support_pdl(), get_jit_cuda_arch().major]
)


def layer_norm_gated_fwd(
    x, g, weight, bias, activation="swish", eps=1e-5, out_dtype=None, is_rms_norm=False
):
    assert (is_rms_norm, bias, x.ndim) == (True, None, 2)
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight, eps)
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation]
    return (normed * act(g.float())).to(out_dtype), None, None, x
