"""What the intra-chunk terms of GDN and KDA share: norms, betas, the copies of Tinv and Aqk.

`GdnTerms` and `KdaTerms` prepare a chunk with 128 threads. The `Worker` of a kernel has these
threads' barrier and their work on the next chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from ...arguments import ABSENT
from ...device import arithmetic, hopper, ptx
from ...device.hopper import WARPGROUP
from ..arguments import CHUNK, TRIANGLE_BYTES
from ..layout import SUBCHUNK, head_chunk, token_at
from .inverse import GATE_BETA_K2

NO_ITEM = 0x7FFFFFFF
"""Number of the item, a chunk and head, after a persistent warpgroup's last one."""


@dataclass(frozen=True)
class Worker:
    """The 128 threads that prepare a chunk, and their work on the next one: here a CTA without one.

    All threads call each method but `sync` once a chunk, in this order. A worker is a frozen
    dataclass: the compiler carries any other object through dynamic branches and loops. Its fields
    may be traced values.
    """

    def sync(self):
        """Barrier of the threads."""
        cute.arch.sync_threads()

    def sync_inputs(self, coord):
        """`sync`, when the thread has its inputs in shared memory."""
        self.sync()

    def take_next(self, args, coord, spare):
        """After `sync_inputs`. spare: the warp has the least to do up to the next `sync`."""

    def sync_and_load_ahead(self, args, coord):
        """KDA: `sync`; now the chunk's operands are free. Returns loads for `store_ahead`."""
        self.sync()

    def store_ahead(self, args, ahead):
        """KDA: Tinv was computed during the loads; a `sync` follows."""


@dataclass(frozen=True)
class PersistentWorker(Worker):
    """A warpgroup that prepares one chunk after another."""

    @cute.jit
    def sync_inputs(self, coord):
        # The last chunk's stores have long arrived: the wait takes no time.
        if coord.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.sync()


class HeadAddresses(NamedTuple):
    """A value head's terms in shared memory."""

    gates: Int32
    tinv: Int32
    aqk: Int32


def chunk_token_at(args, name, coord, token, head):
    """layout.token_at of the chunk's token."""
    return token_at(args, name, coord.sequence, coord.chunk * CHUNK + token, head)


def norm_of(squares, inverse, qk_l2norm):
    """|q| or |k| as the call means it, from a row's sum of squares and 1 / its root."""
    norm = ptx.select(inverse > 0, squares * inverse, Float32(0))  # squares may be inf, inverse 0
    if qk_l2norm:
        return norm * ptx.rsqrt_or_zero(squares + Float32(arithmetic.L2NORM_EPS))
    return norm


def load_beta(args, coord, hv, token, condition, load=ptx.load_scalar):
    """A token's beta as it is in memory. load: load_scalar or load_scalar_bits."""
    at = chunk_token_at(args, "beta", coord, token, hv)
    return load(at, Int32(select_(condition, args.size.beta_kind, Int32(ABSENT))))


def activate_beta(args, beta, condition):
    """Beta, from its logits if it comes so; 0 where the condition is false."""
    factor = args.size.beta_factor
    beta = ptx.select(factor != 0, arithmetic.beta_of_logit(beta, factor), beta)
    return ptx.select(condition, beta, Float32(0))


def store_scales(scales_at, token, scales, condition):
    """Store a token's scales, given as offsets and numbers, among the chunk's in the workspace."""
    for first, x in scales:
        ptx.store_if(Float32, scales_at + (first + token * 4), x, condition)


def load_beta_k2(coord, gates_at):
    """beta |k|**2 of the lane's rows."""
    at = gates_at + (GATE_BETA_K2 + coord.subchunk * SUBCHUNK + coord.row) * 4
    return [ptx.load_shared_f32(at + 32 * i) for i in range(2)]


@cute.jit
def store_terms(args, coord, hv, head, worker):
    """Start the copies of a head's Tinv and Aqk to the workspace.

    Two buffers alternate: thread 0 waits until the copies of the head before have read theirs.
    """
    hopper.fence_async_proxy()
    if coord.thread == 0:
        ptx.wait_for_bulk_stores()
    worker.sync()
    if hopper.copies(coord.thread):
        at = args.ptr.tinv_aqk + head_chunk(args, coord.slot, hv) * (2 * TRIANGLE_BYTES)
        for i, source in enumerate((head.tinv, head.aqk)):
            target = at + i * TRIANGLE_BYTES
            hopper.store_region(target, source, TRIANGLE_BYTES, coord.thread, WARPGROUP)
