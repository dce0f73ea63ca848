"""Small valid calls of every operation, for tests to change."""

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
    new = gd.KVBuffer.empty(rows, t, H, HV, K, V, gate=axis, num_layers=layers)
    for x in vars(new).values():
        x.fill_(float("nan"))
    return new


def buffered(t=T, lens=(0,) * N, axis="head"):
    """buffer and buffer_lens, for a decode."""
    return dict(buffer=buffer(t=t, axis=axis), buffer_lens=torch.tensor(lens, dtype=torch.int32))


def normed(n=N, t=T, dtype=torch.float32, seed=3, **options):
    """norm and z, for a decode or a verify."""
    rng = torch.Generator().manual_seed(seed)
    weight, z = 1 + torch.randn(V, generator=rng) / 2, torch.randn(n, t, HV, V, generator=rng)
    return dict(norm=gd.GatedNorm(weight, **options), z=z.to(dtype))


def call(op):
    """Keyword arguments of a valid call."""
    if op == "prefill":
        return tokens()
    if op == "decode":
        return tokens() | dict(state=pool())
    if op == "verify":
        return tokens() | dict(state=pool(), buffer=buffer())
    return dict(state=pool(), buffer=verified(), num_accepted=torch.tensor([2, 2]))


def verified():
    """A buffer that verify has filled."""
    filled = buffer()
    gd.verify(**tokens(), state=pool(), buffer=filled, backend="reference")
    return filled


def writable(arguments):
    """The tensors that a call may write, by name."""
    names = ("state", "intermediate_states", "checkpoints", "out")
    tensors = {name: arguments.get(name) for name in names}
    if isinstance(parts := arguments.get("buffer"), gd.KVBuffer):
        tensors |= {f"buffer.{name}": x for name, x in vars(parts).items()}
    return {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
