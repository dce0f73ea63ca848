"""verify's convolution without a kernel: refusals, drafts one by one, trails, what runs it."""

import pytest
import torch

import gated_delta as gd
from gated_delta import api
from gated_delta.gpus import H200

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
N, T, H, HV, K, V, P, ROWS = 3, 4, 1, 2, 8, 32, 6, 5
C = 2 * H * K + HV * V
PADDING = 1  # the sequence whose slot is the null slot


def call(seed=0, **options):
    """Drafts of raw q, k and v; NaN in slots that no sequence reads, and in all that is written."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=rng)
    pools = dict(state=normal(P, HV, V, K), windows=normal(P, C, 3))
    for pool in pools.values():
        pool[[0, 2, 3, 5]] = torch.nan
    buffer = gd.KVBuffer.empty(N, T, H, HV, K, V)
    for x in (buffer.u, buffer.k, buffer.log_decay):
        x.fill_(torch.nan)
    one = dict(q=normal(N, T, H, K), k=normal(N, T, H, K), v=normal(N, T, HV, V))
    one |= dict(g=-normal(N, T, HV).abs(), beta=normal(N, T, HV).sigmoid(), **pools)
    one |= dict(conv=gd.ShortConv(normal(C, 4), normal(C)), buffer=buffer)
    one |= dict(trails=torch.full((ROWS, C, T + 3), torch.nan))
    one |= dict(trail_indices=torch.tensor([3, 0, 1]), state_indices=torch.tensor([4, 0, 1]))
    return one | dict(null_index=0) | options


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def same(x, y):
    return torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


def inputs_of(one):
    """[N, T, C]"""
    return torch.cat([one[name].flatten(2) for name in "qkv"], 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(conv=zeros(C, 4)), TypeError, "conv: expected a gated_delta.ShortConv"),
        (dict(conv=None), ValueError, "windows: expected None without conv"),
        (dict(conv=None, windows=None), ValueError, "trails: expected None without conv"),
        (
            dict(conv=None, windows=None, trails=None),
            ValueError,
            "trail_indices: expected None without conv",
        ),
        (dict(windows=None), ValueError, "windows: expected a tensor with conv, got None"),
        (dict(parents=zeros(N, T, dtype=I32)), ValueError, "parents: expected None with conv"),
        (dict(conv=gd.ShortConv(zeros(C + 1, 4))), ValueError, r"conv.weight: .* got \[81, 4\]"),
        (dict(windows=zeros(P - 1, C, 3)), ValueError, "windows: expected shape"),
        (dict(windows=zeros(P, C, 3, dtype=BF16)), TypeError, "windows: expected dtype"),
        (dict(trails=None), ValueError, "trail_indices: expected None without trails"),
        (dict(trails=zeros(ROWS, C, T + 2, dtype=BF16)), TypeError, "trails: expected dtype"),
        (dict(trails=zeros(ROWS, C - 1, T + 2)), ValueError, "trails: expected shape"),
        (
            dict(trails=zeros(ROWS, C, T + 1)),
            ValueError,
            r"trails: .* W >= 6 for 4 tokens, got W=5",
        ),
        (dict(trails=zeros(ROWS, C, 1).expand(-1, -1, 6)), ValueError, "memory of its own"),
        (
            lambda one: dict(trails=zeros(N - 1, C, T + 2), trail_indices=None),
            ValueError,
            "trails: expected trail_rows >= N=3",
        ),
        (
            lambda one: dict(trails=one["windows"].view(-1)[: C * 6].view(1, C, 6)),
            ValueError,
            "apart",
        ),
        (dict(trail_indices=zeros(N, dtype=F32)), TypeError, "trail_indices: expected dtype"),
        (dict(trail_indices=zeros(N + 1, dtype=I32)), ValueError, "trail_indices: expected shape"),
        (dict(trail_indices=torch.tensor([3, 0, 3])), ValueError, "trail_indices: .* one sequence"),
        (dict(trail_indices=torch.tensor([3, 0, ROWS])), IndexError, "trail_indices: .* below 5"),
        (dict(v=zeros(N, T, H, 2, V)), ValueError, r"g: expected 4 dimensions \[N, T, H, R\]"),
        (dict(g=zeros(N, T, HV) + 1), ValueError, "g: expected"),
        (dict(backend="cute"), gd.UnsupportedProblem, "got fp32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_drafts_write_nothing(changes, error, message):
    one = call(out=torch.full((N, T, HV, V), 7.0))
    one |= changes(one) if callable(changes) else changes
    buffer = one["buffer"]
    written = [x for name in ("windows", "state", "out", "trails") if (x := one[name]) is not None]
    written += [buffer.u, buffer.k, buffer.log_decay]
    before = [x.clone() for x in written]
    with pytest.raises(error, match=message):
        gd.verify(**one)
    for x, y in zip(written, before, strict=True):
        assert same(x, y)


def test_drafts_are_those_of_short_conv_and_verify():
    """Bit for bit; the pool and its windows stay, and a second call repeats the first."""
    one, two = call(), call()
    pools = [one[name].clone() for name in ("state", "windows")]
    for name in ("trails", "trail_indices"):
        two.pop(name)
    conv, raw = two.pop("conv"), [two.pop(x) for x in "qkv"]
    slots = dict(state_indices=two["state_indices"], null_index=0)
    q, k, v = gd.short_conv(*raw, conv, windows=two.pop("windows").clone(), **slots)
    want = gd.verify(q, k, v, **two)
    for _ in range(2):
        assert torch.equal(gd.verify(**one), want)
        for name in ("u", "k", "log_decay"):
            assert same(getattr(one["buffer"], name), getattr(two["buffer"], name))
        for name, before in zip(("state", "windows"), pools, strict=True):
            assert same(one[name], before)
    assert not want[PADDING].any()


def test_a_trail_has_the_window_after_each_token():
    """Padding and negative rows write none; entries behind a draft's end stay."""
    one = call(trail_indices=torch.tensor([3, 0, -1]), out=None)
    gd.verify(**one)
    trails, inputs = one["trails"], inputs_of(one)
    for t in range(1, T + 1):
        window = torch.cat([one["windows"][4], inputs[0, :t].T], 1)[:, -3:]
        assert torch.equal(trails[3, :, t - 1 : t + 2], window)
    assert trails[3, :, T + 2 :].isnan().all()
    assert trails[[0, 1, 2, 4]].isnan().all()


def test_packed_drafts_of_unequal_lengths_leave_trails():
    """Of 4, 3, 0 and 1 tokens, by their place, and behind them tokens of no sequence, NaN."""
    lengths, one = [4, 3, 0, 1], call()
    for name in ("q", "k", "v", "g", "beta"):
        one[name] = one[name].flatten(0, 1)[None].clone()
        one[name][:, sum(lengths) :] = torch.nan if name in "qkv" else 0
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    slots, buffer = torch.tensor([4, 0, 1, 1]), gd.KVBuffer.empty(4, T, H, HV, K, V)
    one |= dict(cu_seqlens=bounds, state_indices=slots, buffer=buffer, trail_indices=None)
    o = gd.verify(**one, max_seqlen=T)
    inputs = inputs_of(one)[0]
    for n in (0, 3):
        m, start = lengths[n], bounds[n]
        kept = one["windows"][slots[n], :, 1:]
        want = torch.cat([kept, inputs[start : start + m].T], 1)
        assert torch.equal(one["trails"][n, :, : m + 2], want)
        assert one["trails"][n, :, m + 2 :].isnan().all()
    assert one["trails"][[1, 4]].isnan().all()
    assert torch.equal(one["trails"][2, :, :2], one["windows"][1, :, 1:])
    assert o[:, : bounds[-1]].isfinite().all()


@pytest.mark.parametrize("ends", [None, [0], [0, 0]], ids=str)
def test_calls_without_tokens_leave_windows_in_trails(ends):
    """No sequences, dense or packed, or one without tokens."""
    one, empty = call(), (0, T) if ends is None else (1, 0)
    for name in ("q", "k", "v", "g", "beta"):
        one[name] = one[name].new_empty(*empty, *one[name].shape[2:])
    sequences = 0 if ends is None else len(ends) - 1
    for name in ("state_indices", "trail_indices"):
        one[name] = one[name][:sequences]
    bounds = {} if ends is None else dict(cu_seqlens=torch.tensor(ends))
    assert gd.verify(**one, **bounds).shape == (*empty, HV, V)
    assert torch.equal(one["trails"][3, :, :2], one["windows"][4, :, 1:]) == (sequences == 1)
    assert one["trails"][:3].isnan().all()


def test_explain_names_what_drafts_convolution_lacks():
    bf16 = {name: call()[name].bfloat16() for name in ("q", "k", "v", "windows", "trails")}
    on = lambda **changes: api.explain_on(H200, "verify", **call() | bf16 | changes)
    assert "conv=fp32 conv_bias=True" in on().kernel
    unaligned = gd.ShortConv(zeros(4 * C + 1, dtype=BF16)[1:].view(C, 4))
    assert "conv.weight at a multiple of 16 bytes" in str(on(conv=unaligned).missing)
    wide = 2 * HV * K + HV * V
    kda = dict(q=zeros(N, T, HV, K, dtype=BF16), k=zeros(N, T, HV, K, dtype=BF16))
    kda |= dict(g=zeros(N, T, HV, K), buffer=gd.KVBuffer.empty(N, T, HV, HV, K, V, gate="channel"))
    kda |= dict(windows=zeros(P, wide, 3, dtype=BF16), conv=gd.ShortConv(zeros(wide, 4)))
    kda |= dict(trails=None, trail_indices=None)
    assert "GDN's gates with conv" in str(on(**kda).missing)


def test_a_compiled_node_writes_trails():
    schema = torch.ops.gated_delta.verify.default._schema
    written = {x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write}
    assert "trails" in written
    assert "windows" not in written
