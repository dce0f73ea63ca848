"""Runs compiled kernels on a CPU, by their PTX, to find wrong numbers, races and stray accesses where there is no GPU.

Warps of all blocks take turns at random. Memory starts as NaN. What an asynchronous copy is to write is lost when it starts, and there when
it ends, at random; what copies and products read must not change under way. Products are done when they start.

Kernels run one after the other.

Faults: what the kernel in front leaves, in front of griddepcontrol.wait; global memory that a call was not given, shared memory out of
bounds, misaligned or before a copy has come; stores that the tensor cores do not see for want of a fence; what is overwritten while it is
read; loads and stores of shared memory that no barrier orders, whichever comes first; arrivals that a barrier does not expect; deadlocks;
instructions of a whole warp by a part of it. Not seen: a product's result in front of its wait, lanes of a warp in each other's way, the
order of memory between blocks, and how long anything takes.
"""

from .device import emulated
from .machine import Fault

__all__ = ["Fault", "emulated"]
