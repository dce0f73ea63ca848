"""prefill(deterministic=L) on the emulator: bits of any batch, cuts at multiples of L, any GPU."""

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gpu import needs_compiler, prefill_path

from . import emulated
from .calls import call, decaying, largest_head_error

pytestmark = needs_compiler

L = 64


def sequence(one, begin, end):
    """The call with these packed tokens alone, dense."""
    names = ("q", "k", "v", "g", "beta")
    call = {name: x[:, begin:end] if name in names else x for name, x in one.items()}
    return {name: x for name, x in call.items() if name != "cu_seqlens"}


@pytest.mark.parametrize(
    ("level", "axis", "D"),
    [("sm_90a", "head", 128), ("sm_90a", "channel", 128), ("sm_86", "head", 64)],
)
def test_bits_of_a_grid_are_those_of_its_parts(level, axis, D, kernels):
    """From a pool, beside others, on few SMs: a CTA then scans several segments. Of GDN's heads
    one forgets over a chunk."""
    gpu, lengths = {"sm_90a": H200, **FORCED}[level], (2 * L + 20, L, 0)
    if D == 64:
        one = call(axis, sum(lengths), lengths, heads=(1, 1), K=D, V=D)
    elif axis == "head":
        one = decaying(axis, sum(lengths), [-1e-3, -1.4], lengths)
    else:
        one = call(axis, sum(lengths), lengths)
    HV = one["v"].shape[2]
    start = torch.randn(4, HV, D, D, generator=torch.Generator().manual_seed(0))
    state, has_state = start.clone(), torch.tensor([True, False, True])
    pool = dict(state=state, state_indices=torch.tensor([3, 0, 2]), has_initial_state=has_state)
    lens, kept = torch.tensor([[2 * L, L], [L, -1], [0, -1]]), torch.zeros(3, 2, HV, D, D)
    packed = {name: x for name, x in one.items() if name != "output_final_state"}
    packed |= pool | dict(checkpoint_lens=lens, checkpoints=kept)
    options = dict(deterministic=L, backend="cute")
    with emulated(kernels, gpu=gpu), prefill_path("grid", 2):
        o, _ = gd.prefill(**packed, **options)
    first = sequence(one, 0, lengths[0]) | dict(initial_state=start[3:])
    for x, y, dim in zip((o[:, : lengths[0]], state[3:]), gd.prefill(**first), (2, 1), strict=True):
        assert largest_head_error(x.double(), y, dim) <= 3e-3
    parts, last = [], start[3:]
    with emulated(kernels, gpu=gpu):
        for begin, end in ((0, L), (L, 2 * L), (2 * L, lengths[0])):
            part = sequence(one, begin, end) | dict(initial_state=last)
            part_o, last = gd.prefill(**part, **options)
            parts.append(part_o)
            for j, length in enumerate(lens[0].tolist()):
                assert length != end or torch.equal(kept[0, j], last[0])
        alone_o, alone = gd.prefill(**sequence(one, lengths[0], lengths[0] + L), **options)
    assert torch.equal(torch.cat([*parts, alone_o], 1), o)
    assert torch.equal(last[0], state[3])
    assert torch.equal(alone[0], state[0])
    assert torch.equal(kept[1, 0], state[0])
    assert torch.equal(kept[2, 0], start[2])
    assert torch.equal(state[1:3], start[1:3])
