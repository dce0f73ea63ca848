"""A prompt over the GPUs of one host, as times of one GPU: docs/context_parallel.md.

torchrun --nproc-per-node 4 -m benchmarks.parallel [TOKENS]
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gated_delta import parallel
from gated_delta import prefill as alone
from gated_delta.bench import capture

from .cells import SPEEDS, Heads, prefill

MODELS: dict[str, Heads] = {"gdn": (16, 32), "kda": (32, 32)}
PER_TOKEN = ("q", "k", "v", "g", "beta")
TOKENS, LIMIT, TIMES = 131072, 1e-2, 7


def slowest(call: Callable[[], object]) -> float:
    """us of a call in a CUDA graph on every rank, of the slowest one."""
    replay = capture([call])
    us = torch.tensor([statistics.median(replay() for _ in range(TIMES))], device="cuda")
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    return us.item()


@torch.no_grad()
def times(model: str, gates: str, tokens: int, device: torch.device) -> tuple[float, float]:
    """us of prefill on each GPU alone, and of parallel.prefill over all of them, checked."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cell = prefill(model, MODELS[model], gates, f"1x{tokens}", (tokens,))
    whole: dict[str, Any] = cell.make(cell, device, 0).arguments()
    cuts = [tokens * r // ranks for r in range(ranks + 1)]
    ours = slice(*cuts[rank : rank + 2])
    part = {name: whole[name][:, ours].clone() for name in PER_TOKEN}
    options = {name: x for name, x in whole.items() if name not in (*PER_TOKEN, "out")}

    o, want = parallel.prefill(**part, **options, cuts=cuts)[0], alone(**whole)[0][:, ours]
    error = float((o.float() - want.float()).norm() / want.float().norm())
    if not error < LIMIT:
        raise RuntimeError(f"rank {rank}: {model} {gates} is off by {error:.1e}")
    one = slowest(lambda: alone(**whole))
    return one, slowest(lambda: parallel.prefill(**part, **options, cuts=cuts))


def main() -> None:
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        command = "torchrun --nproc-per-node 4 -m benchmarks.parallel"
        print(f"expected GPUs, and a process for each: {command}", file=sys.stderr)
        sys.exit(2)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS
    for model, gates in itertools.product(MODELS, SPEEDS):
        one, all_ranks = times(model, gates, tokens, torch.device("cuda"))
        if dist.get_rank() == 0:
            label = f"{model.upper()} {gates}, {tokens} tokens, {dist.get_world_size()} GPUs"
            print(f"{label}: {one:.0f} us on one, {all_ranks:.0f} on all, {one / all_ranks:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
