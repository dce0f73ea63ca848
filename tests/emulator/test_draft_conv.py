"""verify's convolution on the emulator: cases with trails, against the oracle."""

import pytest

from gpu import needs_compiler

from .calls import judge, sample

pytestmark = needs_compiler

CASES = [
    *sample("verify", 1, layout=("conv_drafts",), norm=("silu", "sigmoid"), D=(128,)),
    *sample("verify", 1, layout=("packed_conv",), norm=("silu", "sigmoid")),
    *sample("verify", 1, layout=("packed_conv",), norm=(None,), D=(64, 96)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_raw_drafts_agree_with_the_oracle(case, kernels):
    judge(case, kernels)
