"""Calls for tests of the CuTe backend on a GPU."""

import pytest
import torch

import gated_delta as gd

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs an NVIDIA GPU of compute capability 9.0",
)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an NVIDIA GPU of compute capability 9.0",
)

H, HV, D = 4, 8, 128
AXES = ("head", "channel")
STATES = (torch.bfloat16, torch.float32)
PER_TOKEN = ("q", "k", "v", "g", "beta")


def tokens(N, T, *, axis="head", dtype=torch.bfloat16, heads=(H, HV), K=D, V=D, seed=0, gate="softplus"):
    """Keyword arguments of prefill, decode or verify but for its states, on the GPU, dense."""
    rng = torch.Generator("cuda").manual_seed(seed)
    H, HV = heads

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda")

    channels = (K,) if axis == "channel" else ()
    A_log, dt_bias = normal(HV) / 2, normal(HV, *channels) / 2
    gates = {"softplus": gd.Gate.softplus(A_log, dt_bias), "lower_bound": gd.Gate.lower_bound(A_log, dt_bias), "log": gd.Gate.log()}
    g = normal(N, T, HV, *channels)
    return dict(
        q=normal(N, T, H, K).to(dtype),
        k=normal(N, T, H, K).to(dtype),
        v=normal(N, T, HV, V).to(dtype),
        g=(-g.abs() if gate == "log" else g).to(dtype),
        beta=normal(N, T, HV).to(dtype),
        beta_logits=True,
        gate=gates[gate],
    )


def pool(slots, dtype=torch.bfloat16, HV=HV, K=D, V=D, seed=1):
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(slots, HV, V, K, generator=rng, device="cuda") / 2).to(dtype)


def part(call, *index):
    """The call on some of its sequences or tokens."""
    return {name: x[index] if name in PER_TOKEN else x for name, x in call.items()}


def packed(call, lengths):
    """The first tokens of each sequence one behind the other."""
    rows = {name: torch.cat([call[name][n, :t] for n, t in enumerate(lengths)])[None] for name in PER_TOKEN}
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return {**call, **rows, "cu_seqlens": ends.int()}


def decode(call, state, **options):
    return gd.decode(**call, state=state, backend="cute", **options)


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")


def cycle(values, x):
    """x's shape, filled with the values in turn."""
    values = torch.tensor(values, dtype=x.dtype, device=x.device)
    return values[torch.arange(x.numel(), device=x.device) % len(values)].view(x.shape)


def same(a, b):
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
