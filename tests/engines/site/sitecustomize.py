"""First on the path of an engine's processes.

Declares two operators of torchvision: PyPI's is the CUDA build, and they do not load on a CPU.
Shows every x86 CPU as one with AVX2 alone, or the engine's library, convolutions and attention
would depend on it.
"""

import torch

operators = torch.library.Library("torchvision", "DEF")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

for feature in ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16"):
    setattr(torch.cpu, f"_is_{feature}_supported", lambda: False)
