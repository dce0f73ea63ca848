"""A linear layer's packed prompts over several ranks: the convolution's halo, then the prefill.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Each rank has a run of the batch's tokens, cut anywhere in its sequences. The convolution
needs the few tokens in front of the run: gathered tails of all ranks. `parallel.prefill` needs the
state there, and exchanges what it folds into one. Rank 0 compares with the whole batch in one call.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import gated_delta as gd
from gated_delta import parallel

H, HV, K, V, WIDTH = 2, 4, 64, 64, 4
SIZES = H * K, H * K, HV * V


def halo(x: Tensor, cuts: list[int], before: int) -> Tensor:
    """[WIDTH - 1, D]: the tokens in front of the rank's x [tokens, D], zeros where there are none.

    before: tokens that the rank's first sequence has on earlier ranks.
    """
    rank, ranks, n = dist.get_rank(), dist.get_world_size(), WIDTH - 1
    tail = torch.cat([x.new_zeros(n, x.shape[1]), x])[-n:].contiguous()
    tails = [torch.empty_like(tail) for _ in range(ranks)]
    dist.all_gather(tails, tail)
    counts = [min(b - a, n) for a, b in itertools.pairwise(cuts)][:rank]  # a run may be short
    runs = [part[n - count :] for part, count in zip(tails, counts, strict=False)]
    tokens = torch.cat([x.new_zeros(n, x.shape[1]), *runs])[-n:]
    tokens[: max(n - before, 0)] = 0
    return tokens


def convolved(x: Tensor, lengths: list[int], first: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution of packed sequences x [tokens, D], weight [D, WIDTH], and SiLU."""
    parts = []
    for i, part in enumerate(x.split(lengths)):
        padded = torch.cat([torch.zeros_like(first) if i else first, part])
        parts.append(F.conv1d(padded.T[None], weight[:, None], groups=x.shape[1])[0].T)
    return F.silu(torch.cat(parts))


def heads(x: Tensor) -> dict[str, Any]:
    q, k, v = x[None].split(SIZES, -1)
    shapes = dict(q=(H, K), k=(H, K), v=(HV, V))
    return {
        name: y.unflatten(-1, shape)
        for (name, shape), y in zip(shapes.items(), (q, k, v), strict=True)
    }


def layer(x: Tensor, g: Tensor, beta: Tensor, weight: Tensor, ends: list[int], cuts: list[int],
          **options: Any) -> Tensor:  # fmt: skip
    """Outputs of the rank's tokens: x [tokens, D], g and beta [tokens, HV]."""
    start, stop = cuts[dist.get_rank() :][:2]
    inside = [min(max(end, start), stop) - start for end in ends]
    lengths = [b - a for a, b in itertools.pairwise(inside) if b > a]
    before = start - max(end for end in ends if end <= start)
    first = halo(x, cuts, before)
    tokens = heads(convolved(x, lengths, first, weight)) if lengths else heads(x)
    rest = dict(g=g[None], beta=beta[None], beta_logits=True, **options)
    return parallel.prefill(**tokens, **rest, cuts=cuts, cu_seqlens=ends)[0]


@torch.no_grad()
def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rng = torch.Generator().manual_seed(0)  # every rank makes the whole batch, and takes its run
    ends = [0, 130, 131, 700, 1000]
    x, weight = torch.randn(1000, sum(SIZES), generator=rng), torch.randn(sum(SIZES), WIDTH)
    dist.broadcast(weight := weight.to(device, dtype), 0)
    g, beta = torch.randn(2, 1000, HV, generator=rng).to(device, dtype)
    gate = gd.Gate.softplus(torch.zeros(HV, device=device), torch.full((HV,), -4.0, device=device))
    x = x.to(device, dtype)
    cuts = [1000 * r // ranks + (r > 0) for r in range(ranks)] + [1000]
    run = slice(*cuts[rank : rank + 2])
    o = layer(x[run], g[run], beta[run], weight, ends, cuts, gate=gate)

    lengths = [b - a for a, b in itertools.pairwise(ends)]
    whole = heads(convolved(x, lengths, x.new_zeros(WIDTH - 1, x.shape[1]), weight))
    rest: dict[str, Any] = dict(g=g[None], beta=beta[None], beta_logits=True, gate=gate)
    want = gd.prefill(**whole, **rest, cu_seqlens=torch.tensor(ends, device=device))[0][:, run]
    error = (o.float() - want.float()).norm() / want.float().norm()
    assert error < (1e-2 if on_gpu else 1e-5), error
    print(f"rank {rank}: {o.shape[1]} tokens, {error:.1e} from the whole batch in one call")


if __name__ == "__main__":
    import os

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
