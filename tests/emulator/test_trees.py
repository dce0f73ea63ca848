"""Drafts that are trees, on the emulator: bits of chains, bad indices, other branches' NaN."""

import itertools
import math

import pytest
import torch

import gated_delta as gd
from gated_delta.testing.cases import TREES
from gpu import needs_compiler, relative_error

from . import emulated
from .calls import FEW_HEADS, judge, sample

pytestmark = needs_compiler
KINDS = list(itertools.product(FEW_HEADS, (torch.float32, torch.bfloat16)))
BRIEF = (("head", torch.bfloat16), ("channel", torch.float32))
"""Without KDA on the tensor cores; a GPU runs all kinds."""
CHAIN, STAR, LEVELS = (lambda t: t - 1), (lambda t: -1), (lambda t: t // 2 - 1)


def parents_of(*shapes, T=14, dtype=torch.int32):
    return torch.tensor([[shape(t) for t in range(T)] for shape in shapes], dtype=dtype)


def drafts(axis, dtype, N=2, T=14, decay=None):
    """Arguments of verify but the buffer, with K = V = 64. decay: log decay of every token."""
    rng = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(N, T, *shape, generator=rng)
    tokens = {name: normal(1, 64).bfloat16() for name in "qkv"}
    g = -normal(1, *[64] * (axis == "channel")).abs()
    tokens |= dict(g=g if decay is None else torch.full_like(g, decay), beta=normal(1).sigmoid())
    return tokens | dict(state=torch.randn(N, 1, 64, 64, generator=rng).to(dtype))


def verified(call, axis, room=14, **options):
    """Outputs and the buffer's tensors of a verify."""
    N = len(call["state"])
    buffer = gd.KVBuffer.empty(N, room, 1, 1, 64, 64, gate=axis)
    for x in vars(buffer).values():
        x.fill_(0.1)
    o = gd.verify(**call, buffer=buffer, **options)
    return o, *vars(buffer).values()


def close(got, want):
    for x, y in zip(got, want, strict=True):
        assert relative_error(x.double(), y) <= 3e-3


@pytest.mark.parametrize(
    "case",
    [
        *(
            case
            for axis, layout in itertools.product(FEW_HEADS, TREES[:3])
            for case in sample("verify", 1, axis=(axis,), layout=(layout,))
        ),
        *sample("flush", 2, layout=TREES),
    ],
    ids=str,
)
def test_cases_of_trees_pass(case, kernels):
    judge(case, kernels)


@pytest.mark.parametrize(
    ("axis", "dtype", "behind"),
    [*((*kind, False) for kind in KINDS), *((*kind, True) for kind in BRIEF)],
    ids=str,
)
def test_a_chain_given_as_parents_has_the_chains_bits(axis, dtype, behind, kernels):
    """With strong decays too, for which KDA leaves the tensor cores."""
    lens = dict(buffer_lens=torch.tensor([2, 0])) if behind else {}
    for decay in (None, -30.0):
        call = drafts(axis, dtype, decay=decay)
        with emulated(kernels):
            chain, tree = (
                verified(call, axis, 16, backend="cute", **lens, **parents)
                for parents in ({}, dict(parents=parents_of(CHAIN, CHAIN)))
            )
        for x, y in zip(chain, tree, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("axis", "dtype"), BRIEF, ids=str)
def test_a_bad_parent_counts_as_the_root(axis, dtype, kernels):
    """Of 64 bits too; past the table's end, and past a packed draft's, nothing is read."""
    bad = (0, 1, 5, 2**31 - 1, 2**40 + 1, -2, -(2**31), -(2**40))
    parents = parents_of(LEVELS, STAR, dtype=torch.int64)
    given = parents.clone()
    parents[0, : len(bad)], given[0, : len(bad)] = -1, torch.tensor(bad)
    call = drafts(axis, dtype)
    with emulated(kernels):
        got = verified(call, axis, backend="cute", parents=given)
    want = verified(call, axis, backend="reference", parents=parents)
    close(got, want)
    with pytest.raises(ValueError, match="parents: expected -1 or the index of an earlier token"):
        verified(call, axis, backend="reference", parents=given)
    packed = {name: x.flatten(0, 1)[None] for name, x in call.items() if name != "state"}
    packed |= dict(state=call["state"], cu_seqlens=torch.tensor([0, 14, 17]))
    for width in (5, 14):
        table = given[:, :width].clone()
        table[1, 3:] = 2
        with emulated(kernels):
            got = verified(packed, axis, backend="cute", parents=table)
        table = torch.cat([table, table.new_full((2, 14 - width), -1)], 1)
        table[0, : min(width, len(bad))] = -1
        close(got, verified(packed, axis, backend="reference", parents=table))


@pytest.mark.parametrize(("axis", "dtype"), [*BRIEF, ("channel", torch.bfloat16)], ids=str)
def test_nan_and_dead_branches_stay_apart(axis, dtype, kernels):
    """Token 2 of [2, 2, 2] holds NaN, its sibling may forget all: others keep their values."""
    parents = parents_of(LEVELS, LEVELS)
    lost = [2, 6, 7]
    kept = [t for t in range(14) if t not in lost]
    for decay in (-1.0, -math.inf):
        call = drafts(axis, dtype)
        call["g"][:, 3] = decay
        want = verified(call, axis, backend="reference", parents=parents)
        for name in ("q", "k", "v", "g", "beta"):
            call[name][:, 2] = math.nan
        with emulated(kernels):
            got = verified(call, axis, backend="cute", parents=parents)
        assert got[0][:, lost].isnan().all()
        close([x[:, kept] for x in got[:3]], [x[:, kept] for x in want[:3]])


def test_a_path_outside_the_row_is_skipped(axis, kernels):
    """With and without layers; entries past num_accepted are not read."""
    call, rng = drafts(axis, torch.float32), torch.Generator().manual_seed(0)
    buffer = gd.KVBuffer(*verified(call, axis, parents=parents_of(LEVELS, CHAIN))[1:])
    wide = torch.tensor([[0, 2, 99, -1, 2**40, 7, 3], [0, 1, 2, 3, 4, 5, 99]])
    plain = torch.tensor([[0, 2, 7, -5, 99, 0, 0], [0, 1, 2, 3, 4, 5, 99]])
    accepted = torch.tensor([6, 5])
    for layers in ((), (3,)):
        parts = gd.KVBuffer(*(x.expand(*layers, *x.shape).clone() for x in vars(buffer).values()))
        state = torch.randn(*layers, 2, 1, 64, 64, generator=rng)
        got, want, chain = state.clone(), state.clone(), state.clone()
        with emulated(kernels):
            gd.flush(got, parts, accepted, path=wide, backend="cute")
            gd.flush(chain, parts, accepted, backend="cute")
        gd.flush(want, parts, torch.tensor([3, 5]), path=plain, backend="reference")
        close([got], [want])
        assert torch.equal(got[..., 1, :, :, :], chain[..., 1, :, :, :])
