"""short_conv's kernel on the emulator, against float64."""

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gated_delta.testing import short_conv
from gpu import needs_compiler

from . import emulated

pytestmark = needs_compiler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(call, kernels, gpu=H200, **changes):
    call = call | changes
    given = {name: x for name, x in call.items() if name not in ("out", "backend")}
    truth = short_conv.expected(**given | dict(windows=call["windows"].clone()))
    with emulated(kernels, gpu=gpu):
        results = gd.short_conv(**call, backend="cute")
    assert not short_conv.failures(results, call["windows"], truth)
    return results


@pytest.mark.parametrize(
    "options",
    [
        dict(lengths=[0, 1, 2, 3, 17, 64, 65, 130], padding=70),
        dict(lengths=[5, 70], interleaved=False, dtype=FP16, weight_dtype=FP32, bias=False),
        dict(lengths=[20] * 34, heads=(1, 1), dims=(96, 192), weight_dtype=FP32),
        dict(lengths=[9], heads=(2, 2), dims=(8, 24)),
    ],
    ids=["short sequences", "plain rows", "34 sequences", "few channels"],
)
def test_the_kernel_agrees_with_float64(options, kernels):
    check(short_conv.call(**options), kernels)
