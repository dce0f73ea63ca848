"""Small valid calls of every operation, for tests to change."""

import itertools

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


def rollout(prompts, answers, state, piece, *, dense=False, **options):
    """Outputs of each sequence, of its prompt and of its answer; states in slots 1, 2, ...

    prompts, answers: tokens [1, T, ...] of each sequence. Packed prompts, then answers in pieces of
    piece() tokens: packed, or dense, with NaN behind a shorter piece and -1 for an ended sequence.
    """
    lengths, slots = [x["v"].shape[1] for x in prompts], torch.arange(len(prompts)) + 1
    options |= dict(state=state)
    start = dict(has_initial_state=torch.zeros(len(slots), dtype=torch.bool), deterministic=True)
    call = packed(prompts) | dict(state_indices=slots)
    outputs = [[x] for x in gd.prefill(**call, **start, **options)[0].split(lengths, 1)]
    while any(left := [x["v"].shape[1] for x in answers]):
        sizes = [min(piece(), m) for m in left]
        parts, answers = (
            [cut(x, slice(*ends)) for x, *ends in zip(answers, *bounds, strict=True)]
            for bounds in ((sizes,), (sizes, left))
        )
        if dense:
            ended = torch.tensor(sizes) == 0
            call = padded(parts) | dict(state_indices=slots.masked_fill(ended, -1))
            o = gd.decode(**call, **options)
            pieces = [o[n : n + 1, :size] for n, size in enumerate(sizes)]
        else:
            call = packed(parts) | dict(state_indices=slots)
            pieces = gd.decode(**call, **options).split(sizes, 1)
        for x, y in zip(outputs, pieces, strict=True):
            x.append(y)
    return [torch.cat(x, 1) for x in outputs]


def cut(call, rows):
    return {name: x[:, rows] for name, x in call.items()}


def packed(parts):
    """Sequences [1, T, ...] as one packed call."""
    ends = [0, *itertools.accumulate(x["v"].shape[1] for x in parts)]
    call = {name: torch.cat([x[name] for x in parts], 1) for name in parts[0]}
    return call | dict(cu_seqlens=torch.tensor(ends))


def padded(parts):
    """Sequences [1, T, ...] as one dense call, with NaN behind the shorter ones."""
    shape = len(parts), max(x["v"].shape[1] for x in parts)
    call = {name: x.new_full((*shape, *x.shape[2:]), torch.nan) for name, x in parts[0].items()}
    for n, part in enumerate(parts):
        for name, x in part.items():
            call[name][n, : x.shape[1]] = x[0]
    return call
