"""short_conv's kernel on the emulator, against float64: packed, dense, cut, on every window."""

import itertools

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gated_delta.testing import short_conv
from gpu import needs_compiler

from . import emulated

pytestmark = needs_compiler

FP16, FP32 = torch.float16, torch.float32
SHORT = [0, 1, 2, 3, 4, 0, 17, 65]


def check(call, kernels, gpu=H200):
    given = {name: x for name, x in call.items() if name != "out"}
    truth = short_conv.expected(**given | dict(windows=call["windows"].clone()))
    with emulated(kernels, gpu=gpu):
        results = gd.short_conv(**call, backend="cute")
    assert not short_conv.failures(results, call["windows"], truth)
    return torch.cat([x.flatten(2) for x in results], 2)


@pytest.mark.parametrize(
    ("options", "level"),
    [
        (dict(lengths=SHORT, padding=70, dims=(16, 24)), None),
        (dict(lengths=SHORT, interleaved=False, dtype=FP16, weight_dtype=FP32, bias=False), None),
        (dict(lengths=[3] * 34 + [130], dims=(8, 16), weight_dtype=FP32), "sm_80"),
    ],
    ids=["interleaved", "plain rows", "34 sequences"],
)
def test_packed_sequences(options, level, kernels):
    """Of 0 to 3 tokens, too. Slots that no sequence reads hold NaN, as z between the parts."""
    check(short_conv.call(**options), kernels, FORCED[level] if level else H200)


def test_dense_sequences_and_null_slots(kernels):
    """Windows with channels next to each other, in pages. An inactive sequence holds NaN."""
    call = short_conv.call([4 * 70], dims=(16, 16), interleaved=False)
    q, k, v = (call[name].unflatten(1, (4, 70))[0] for name in "qkv")
    for x in (q, k, v):
        x[1:3] = torch.nan
    pages = torch.full((6, 5 * 64 + 8), torch.nan).bfloat16()
    windows = pages[:, 8:].unflatten(1, (5, 64))[:, :3].mT
    windows[[2, 5]] = torch.randn(2, 64, 3).bfloat16()
    call |= dict(q=q, k=k, v=v, windows=windows, state_indices=torch.tensor([5, 0, -1, 2]))
    call |= dict(null_index=0, has_initial_state=None, cu_seqlens=None)
    call["out"] = torch.full((4, 70, 72), torch.nan).bfloat16()[..., 8:]
    before = pages.clone()
    out = check(call, kernels)
    assert out.data_ptr() != call["out"].data_ptr()  # a copy of its views
    assert not out[1:3].any()
    windows.fill_(0)
    before.view(6, -1)[:, 8:].unflatten(1, (5, 64))[:, :3] = 0
    assert torch.equal(pages.view(torch.int16), before.view(torch.int16))  # nothing beside them


@pytest.mark.parametrize("backend", ["cute", "reference"])
def test_a_cut_prompt_has_the_bits_of_one_call(backend, kernels):
    call, cuts = short_conv.call([150], dims=(16, 16)), (0, 1, 3, 4, 70, 70, 149, 150)
    run = lambda **part: gd.short_conv(**call | part, backend=backend)
    with emulated(kernels):
        whole, windows = run(windows=(one := call["windows"].clone())), one
        parts = []
        for start, end in itertools.pairwise(cuts):
            tokens = {name: call[name][:, start:end] for name in "qkv"}
            part = run(**tokens, cu_seqlens=torch.tensor([0, end - start]))
            call["has_initial_state"] = None
            parts.append(part)
    for x, y in zip(whole, zip(*parts)):
        assert torch.equal(x.view(torch.int16), torch.cat(y, 1).view(torch.int16))
    assert torch.equal(windows.view(torch.int16), call["windows"].view(torch.int16))


def test_infinities_reach_four_tokens_alone(kernels):
    """NaN's payload stays in the window."""
    call = short_conv.call([40], dims=(8, 8))
    plain = check(dict(call, windows=call["windows"].clone()), kernels)
    call["q"][0, 10] = torch.inf
    call["k"][0, 38].view(torch.int16).fill_(0x7FC1)
    with emulated(kernels):
        q, k, v = gd.short_conv(**call, backend="cute")
    out = torch.cat([x.flatten(2) for x in (q, k, v)], 2)
    same = (out == plain).all(2)[0]
    assert same.logical_not().nonzero().flatten().tolist() == [10, 11, 12, 13, 38, 39]
    slot = call["windows"][call["state_indices"][0]].view(torch.int16)
    assert (slot[8:16, 1] == 0x7FC1).all()
