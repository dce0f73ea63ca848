"""short_conv without a kernel: refusals, the reference backend against float64, what runs it."""

import pytest
import torch

import gated_delta as gd
from gated_delta import api
from gated_delta.gpus import H200
from gated_delta.testing import short_conv

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
H, HV, K, V, T = 1, 2, 8, 16, 12
C = 2 * H * K + HV * V


def call(**options):
    return short_conv.call([5, 7], (H, HV), (K, V), **dict(dtype=F32) | options)


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def refused(changes, error, message, **options):
    one = call(**options) | dict(out=torch.full((1, T, C), 7.0))
    changes = changes(one) if callable(changes) else changes
    before = one["windows"].clone(), one["out"].clone()
    with pytest.raises(error, match=message):
        gd.short_conv(**one | changes)
    for x, y in zip((one["windows"], one["out"]), before, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(conv=zeros(C, 4)), TypeError, "conv: expected a gated_delta.ShortConv"),
        (dict(q=[0]), TypeError, "q: expected a torch.Tensor, got list"),
        (dict(q=zeros(1, T, H, K, dtype=torch.float64)), TypeError, "q: expected dtype"),
        (dict(k=zeros(1, T, H, K, dtype=BF16)), TypeError, "k: expected dtype torch.float32"),
        (dict(k=zeros(1, T, H, K + 1)), ValueError, r"k: expected shape \[1, total, H, K\]"),
        (dict(v=zeros(1, T, V)), ValueError, "v: expected 4 dimensions"),
        (
            dict(q=zeros(1, T, H, 2 * K)[..., ::2]),
            ValueError,
            "q: expected a contiguous last dimension",
        ),
        (dict(q=zeros(1, T, 3, K), k=zeros(1, T, 3, K)), ValueError, "of H=3 .*, got HV=2"),
        (dict(q=zeros(1, T, 0, K), k=zeros(1, T, 0, K)), ValueError, "at least one head"),
        (dict(q=zeros(2, T, H, K)), ValueError, "packed tokens"),
        (dict(conv=gd.ShortConv(zeros(C + 1, 4))), ValueError, r"conv.weight: .* got \[49, 4\]"),
        (dict(conv=gd.ShortConv(zeros(C, 4), zeros(3))), ValueError, "conv.bias: expected shape"),
        (dict(windows=zeros(9, C, 4)), ValueError, r"windows: expected shape \[P, C, 3\]"),
        (dict(windows=zeros(9, C, 3, dtype=BF16)), TypeError, "windows: expected dtype"),
        (dict(windows=zeros(9, C, 1).expand(-1, -1, 3)), ValueError, "memory of its own"),
        (dict(windows=zeros(1, C, 3), state_indices=None), ValueError, "windows: expected P >= N"),
        (dict(state_indices=zeros(2)), TypeError, "state_indices: expected dtype"),
        (dict(has_initial_state=zeros(2)), TypeError, "has_initial_state: expected dtype"),
        (dict(null_index=0, state_indices=None), ValueError, "null_index: expected -1 without"),
        (dict(out=zeros(1, T, C - 1)), ValueError, "out: expected shape"),
        (lambda x: dict(out=x["windows"].view(-1)[: T * C].view(1, T, C)), ValueError, "apart"),
        (dict(state_indices=torch.tensor([1, 5])), IndexError, "below 5, got 5 at sequence 1"),
        (dict(state_indices=torch.tensor([1, 1])), ValueError, "at most one sequence"),
        (dict(cu_seqlens=torch.tensor([0, 5, 13])), ValueError, "end within the 12 packed tokens"),
        (dict(backend="cute"), gd.UnsupportedProblem, "got fp32"),
        (dict(backend="fast"), ValueError, "backend: expected one of"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_calls_write_nothing(changes, error, message):
    refused(changes, error, message)


def test_weights_that_require_grad_are_refused():
    conv = gd.ShortConv(torch.nn.Parameter(zeros(C, 4)))
    refused(dict(conv=conv), gd.UnsupportedProblem, "conv.weight requires grad")
    with torch.no_grad():
        gd.short_conv(**call() | dict(conv=conv))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "weight: expected a torch.Tensor"),
        ((zeros(C, 3),), ValueError, r"weight: expected shape \[C, 4\], got \[48, 3\]"),
        ((zeros(C, 1, 4),), ValueError, r"weight: expected shape \[C, 4\]"),
        ((zeros(4, C).T,), ValueError, "weight: expected a contiguous tensor"),
        ((zeros(C, 4), zeros(C, 1)), ValueError, r"bias: expected shape \[C\]"),
        (
            (zeros(C, 4), None, "gelu"),
            ValueError,
            "activation: expected 'silu' or None, got 'gelu'",
        ),
    ],
)
def test_bad_convolutions(arguments, error, message):
    with pytest.raises(error, match=message):
        gd.ShortConv(*arguments)


@pytest.mark.parametrize("dtype", [F32, BF16, FP16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_reference_agrees_with_float64(interleaved, dtype):
    lengths = [0, 1, 2, 3, 40, 0]
    one = short_conv.call(lengths, (1, 2), (8, 16), interleaved=interleaved, dtype=dtype, padding=3)
    one["null_index"] = int(one["state_indices"].min())
    truth = short_conv.expected(**one | dict(windows=one["windows"].clone()))
    out = torch.full((1, 49, 48), torch.nan, dtype=dtype)
    results = gd.short_conv(**one, out=out)
    assert not short_conv.failures(results, one["windows"], truth)
    assert [x.shape[2:] for x in results] == [(1, 8), (1, 8), (2, 16)]
    assert results[0].data_ptr() == out.data_ptr()
    assert (~truth.out.any(2)).sum() >= 3  # rows of no active sequence


def test_without_activation():
    one = call()
    one["conv"] = gd.ShortConv(one["conv"].weight, activation=None)
    truth = short_conv.expected(**one | dict(windows=one["windows"].clone()))
    assert truth.out.min() < -1
    assert not short_conv.failures(gd.short_conv(**one), one["windows"], truth)


def on_hopper(**changes):
    """The route of a call on an H200."""
    return api.explain_on(H200, "short_conv", **call(dtype=BF16) | changes)


def test_explain_names_the_kernel_or_why_not():
    route = on_hopper()
    assert route.backend == "cute"
    assert route.kernel == "short_conv dtype=bf16 weight_dtype=bf16 silu=True"
    assert str(route).startswith("short_conv-h1x2-k8v16-bf16-cu_seqlens_i64-state_indices_i64")
    unaligned = zeros(1, T, K + 1, dtype=BF16)[..., 1:].unflatten(-1, (H, K))
    assert "multiples of 16 bytes" in str(on_hopper(q=unaligned).missing)
    empty = {name: x[:, :0] for name, x in call(dtype=BF16).items() if name in "qkv"}
    assert on_hopper(**empty).backend == "cute"
    assert "at least one token" in str(on_hopper(**empty, cu_seqlens=None, state_indices=None,
                                                 has_initial_state=None).missing)  # fmt: skip
    assert gd.explain("short_conv", **call()).backend == "reference"


def test_a_compiled_graph_has_one_node():
    one = call()
    windows, compiled = one["windows"].clone(), torch.compile(gd.short_conv, backend="aot_eager")
    want = gd.short_conv(**one)
    with torch.no_grad():
        have = compiled(**one | dict(windows=windows))
    for x, y in zip((*want, one["windows"]), (*have, windows), strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))
