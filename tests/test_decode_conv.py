"""decode's convolution without a kernel: refusals, calls of one token each, what runs it."""

import pytest
import torch

import gated_delta as gd
from gated_delta import api
from gated_delta.gpus import GPUS, H200

F32, BF16 = torch.float32, torch.bfloat16
N, H, HV, K, V, P = 3, 1, 2, 8, 32, 6
C = 2 * H * K + HV * V


def call(T=1, seed=0, H=H, HV=HV, **options):
    """A GDN decode on raw q, k and v, with NaN in slots that no sequence reads or writes."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=rng)
    slots = torch.tensor([4, 0, 1])
    pools = dict(state=normal(P, HV, V, K), windows=normal(P, 2 * H * K + HV * V, 3))
    for pool in pools.values():
        pool[[0, 2, 3, 5]] = torch.nan
    one = dict(q=normal(N, T, H, K), k=normal(N, T, H, K), v=normal(N, T, HV, V))
    one |= dict(g=-normal(N, T, HV).abs(), beta=normal(N, T, HV).sigmoid(), **pools)
    conv = gd.ShortConv(normal(2 * H * K + HV * V, 4), normal(2 * H * K + HV * V))
    return one | dict(conv=conv, state_indices=slots, null_index=0) | options


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def same(x, y):
    return torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


def shared_weight():
    windows = zeros(P, C, 3)
    return dict(windows=windows, conv=gd.ShortConv(windows.view(-1)[: 4 * C].view(C, 4)))


BUFFER = gd.KVBuffer.empty(N, 4, H, HV, K, V)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(conv=zeros(C, 4)), TypeError, "conv: expected a gated_delta.ShortConv"),
        (dict(conv=None), ValueError, "windows: expected None without conv"),
        (dict(windows=None), ValueError, "windows: expected a tensor with conv, got None"),
        (lambda: call(T=2), ValueError, "q: expected one token .* got T=2"),
        (
            lambda: (
                {name: x.transpose(0, 1) for name, x in call().items() if name in ("q", "k", "v")}
                | dict(g=zeros(1, N, HV), beta=zeros(1, N, HV), cu_seqlens=torch.arange(N + 1))
            ),
            ValueError,
            "q: expected one token .* got packed tokens",
        ),
        (dict(conv=gd.ShortConv(zeros(C + 1, 4))), ValueError, r"conv.weight: .* got \[81, 4\]"),
        (dict(conv=gd.ShortConv(zeros(C, 4), zeros(3))), ValueError, "conv.bias: expected shape"),
        (dict(windows=zeros(P, C, 4)), ValueError, r"windows: expected shape \[P, C, 3\]"),
        (dict(windows=zeros(P - 1, C, 3)), ValueError, r"windows: expected shape"),
        (dict(windows=zeros(P, C, 3, dtype=BF16)), TypeError, "windows: expected dtype"),
        (dict(windows=zeros(P, C, 1).expand(-1, -1, 3)), ValueError, "memory of its own"),
        (
            lambda: dict(
                windows=(x := zeros(P * C * 3)).view(P, C, 3), out=x[:192].view(N, 1, 2, V)
            ),
            ValueError,
            "apart",
        ),
        (shared_weight, ValueError, "windows: .*apart .* conv.weight"),
        (dict(state_indices=torch.tensor([[4], [0], [1]])), ValueError, r"\[N\] with conv"),
        (
            dict(intermediate_states=zeros(N, 1, HV, V, K)),
            ValueError,
            "intermediate_states: expected None with conv",
        ),
        (
            dict(buffer=BUFFER, buffer_lens=torch.zeros(N, dtype=torch.int32)),
            ValueError,
            "buffer: expected None with conv",
        ),
        (dict(state_indices=torch.tensor([1, 0, 1])), ValueError, "at most one sequence"),
        (dict(state_indices=torch.tensor([1, 0, P])), IndexError, "below 6, got 6 at sequence 2"),
        (dict(g=zeros(N, 1, HV) + 1), ValueError, "g: expected"),
        (dict(v=zeros(N, 1, H, 2, V)), ValueError, r"g: expected 4 dimensions \[N, T, H, R\]"),
        (dict(v=zeros(N, 1, HV, 1, V)), ValueError, r"v: expected shape \[N, T, H, R, V\]"),
        (
            dict(v=zeros(N, 1, H, 2, V), conv=None, windows=None),
            ValueError,
            "v: expected 4 dimensions",
        ),
        (dict(backend="cute"), gd.UnsupportedProblem, "got fp32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_calls_write_nothing(changes, error, message):
    one = call(out=torch.full((N, 1, HV, V), 7.0))
    one |= changes() if callable(changes) else changes
    written = [x for name in ("windows", "state", "out") if (x := one[name]) is not None]
    before = [x.clone() for x in written]
    with pytest.raises(error, match=message):
        gd.decode(**one)
    for x, y in zip(written, before, strict=True):
        assert same(x, y)


def test_calls_of_one_token_are_short_conv_and_decode():
    """Behind a prompt of three tokens and a window; bit for bit, the windows too."""
    T, one = 4, call(T=4)
    whole = call(T=4)
    conv, windows = whole.pop("conv"), whole.pop("windows")
    raw, slots = (
        [whole.pop(x) for x in "qkv"],
        dict(state_indices=whole["state_indices"], null_index=0),
    )
    q, k, v = gd.short_conv(*raw, conv, windows=windows, **slots)
    want = gd.decode(q, k, v, **whole)
    outputs = []
    for t in range(T):
        token = {name: one[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        outputs.append(gd.decode(**one | token))
    assert torch.equal(torch.cat(outputs, 1), want)
    assert same(one["state"], whole["state"])
    assert same(one["windows"], windows)
    assert not want[1].any()


def test_rows_by_qk_head_are_those_by_value_head():
    """q, k, v, z, g and beta as views of interleaved projections, bit for bit."""
    heads = dict(H=2, HV=6)
    one, two = call(**heads), call(**heads)
    z, norm = torch.randn(N, 1, 6, V), gd.GatedNorm(torch.randn(V))
    by_head = [x.unflatten(2, (2, 3)).flatten(3) for x in (one["v"], z)]
    rows = torch.cat([one["q"], one["k"], *by_head], 3).split((K, K, 3 * V, 3 * V), 3)
    gates = [one[name].unflatten(2, (2, 3)) for name in ("beta", "g")]
    views = dict(zip("qkvz", rows, strict=True))
    views |= {name: views[name].unflatten(3, (3, V)) for name in "vz"}
    views |= dict(zip(("beta", "g"), torch.cat(gates, 3).chunk(2, 3), strict=True))
    o = gd.decode(**one | views, norm=norm)
    assert o.shape == z.shape
    assert torch.equal(o, gd.decode(**two, z=z, norm=norm))
    for name in ("state", "windows"):
        assert same(one[name], two[name])
    assert torch.equal(gd.decode(**call(**heads) | views | dict(z=z), norm=norm), o)


def test_windows_go_where_the_states_go():
    one = call(write_indices=torch.tensor([2, 3, 0]))
    before = one["windows"].clone()
    gd.decode(**one)
    x = torch.cat([one[name][0, 0].flatten() for name in "qkv"])
    before[2] = torch.cat([before[4, :, 1:], x[:, None]], 1)
    assert same(one["windows"], before)
    frozen = call(update_state=False, windows=call()["windows"].expand(P, C, 3))
    before = frozen["windows"].clone()
    gd.decode(**frozen)
    assert same(frozen["windows"], before)


def bf16_of(one):
    return {name: one[name].bfloat16() for name in ("q", "k", "v", "windows")}


def on(gpu, **changes):
    return api.explain_on(gpu, "decode", **call() | bf16_of(call()) | changes)


def test_explain_names_the_convolution_or_what_lacks():
    assert gd.explain("decode", **call()).backend == "reference"
    assert "conv=fp32 conv_bias=True conv_group=2" in on(H200).kernel
    nine = call(HV=9)
    lacks = on(H200, **nine | bf16_of(nine)).missing
    assert "at most 8 value heads per q/k head with conv" in str(lacks)
    unaligned = gd.ShortConv(zeros(4 * C + 1, dtype=BF16)[1:].view(C, 4))
    kda = dict(q=zeros(N, 1, HV, K, dtype=BF16), k=zeros(N, 1, HV, K, dtype=BF16))
    kda |= dict(g=zeros(N, 1, HV, K))
    kda |= dict(windows=zeros(P, 2 * HV * K + HV * V, 3, dtype=BF16))
    kda |= dict(conv=gd.ShortConv(zeros(2 * HV * K + HV * V, 4)))
    assert "GDN's gates with conv" in str(on(H200, **kda).missing)
    assert "conv.weight at a multiple of 16 bytes" in str(on(H200, conv=unaligned).missing)
    assert "a Hopper GPU" in str(on(next(x for x in GPUS.values() if x.level == "sm_80")).missing)


def test_a_compiled_node_writes_windows():
    schema = torch.ops.gated_delta.decode.default._schema
    written = {x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write}
    assert {"state", "windows"} <= written
