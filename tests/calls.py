"""Small valid calls for tests to bend."""

import torch
import torch.nn.functional as F

import gated_delta as gd

N, T, H, HV, K, V, P = 2, 3, 2, 4, 8, 6, 5


def tokens(n=N, t=T, *, axis="head", dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    channels = (K,) if axis == "channel" else ()
    return dict(
        q=torch.randn(n, t, H, K, generator=rng).to(dtype),
        k=torch.randn(n, t, H, K, generator=rng).to(dtype),
        v=torch.randn(n, t, HV, V, generator=rng).to(dtype),
        g=-F.softplus(torch.randn(n, t, HV, *channels, generator=rng)).to(dtype),
        beta=torch.rand(n, t, HV, generator=rng).to(dtype),
    )


def pool(slots=P, dtype=torch.float32, seed=1):
    return torch.randn(slots, HV, V, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


def buffer(rows=N, t=T, axis="head", layers=None):
    made = gd.KVBuffer.empty(rows, t, H, HV, K, V, gate=axis, num_layers=layers)
    for x in (made.u, made.k, made.log_decay):
        x.fill_(float("nan"))
    return made


def normed(n=N, t=T, dtype=torch.float32, seed=3, **options):
    """norm and z, for a decode or a verify."""
    rng = torch.Generator().manual_seed(seed)
    weight, z = 1 + torch.randn(V, generator=rng) / 2, torch.randn(n, t, HV, V, generator=rng)
    return dict(norm=gd.GatedNorm(weight, **options), z=z.to(dtype))


def call(op):
    """Keyword arguments of a valid call."""
    return {
        "prefill": lambda: tokens(),
        "decode": lambda: {**tokens(), "state": pool()},
        "verify": lambda: {**tokens(), "state": pool(), "buffer": buffer()},
        "flush": lambda: {
            "state": pool(),
            "buffer": verified(),
            "num_accepted": torch.tensor([2, 2]),
        },
    }[op]()


def verified():
    made = buffer()
    gd.verify(**tokens(), state=pool(), buffer=made, backend="reference")
    return made


def writable(arguments):
    """Every tensor a call may write, by name."""
    found = {}
    for name in ("state", "intermediate_states", "checkpoints", "out"):
        if isinstance(arguments.get(name), torch.Tensor):
            found[name] = arguments[name]
    if isinstance(arguments.get("buffer"), gd.KVBuffer):
        parts = vars(arguments["buffer"]).items()
        found |= {f"buffer.{part}": x for part, x in parts if isinstance(x, torch.Tensor)}
    return found
