"""Runs the PTX of compiled kernels on a CPU: finds wrong numbers, races, stray accesses, deadlocks.

Warps of all CTAs run in random order. Memory starts as NaN. An asynchronous copy makes its target
NaN when it starts and writes it at a random later time; its source must not change meanwhile, nor
the operands of a wgmma. A wgmma computes when it starts. Kernels run one after the other.

Faults:
- reading the previous kernel's results before griddepcontrol.wait
- global memory of no argument of the call; shared memory out of bounds or misaligned
- shared memory that an asynchronous copy has still to write
- stores that the tensor cores or copies do not see, for lack of fence.proxy.async
- overwriting the source of a copy or the operand of a wgmma
- loads and stores of shared memory that no barrier orders, in whichever order they ran
- arrivals that an mbarrier or barrier does not expect; deadlocks
- warp-wide instructions that only some lanes execute

Not found: a wgmma's result read before its wait, races between lanes of a warp, memory order
between CTAs, and time.
"""

from .device import emulated
from .machine import Fault

__all__ = ["Fault", "emulated"]
