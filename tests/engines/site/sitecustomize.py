"""First on the path of an engine's processes: declares two operators of torchvision.

PyPI's torchvision is the CUDA build; its operators do not load on a CPU.
"""

import torch

operators = torch.library.Library("torchvision", "DEF")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
