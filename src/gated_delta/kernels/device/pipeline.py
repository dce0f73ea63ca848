"""Producers and consumers in shared memory: mbarriers, bulk copies, asynchronous 16-byte copies, a pipeline's state."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_


class PipelineState(NamedTuple):
    """A chunk, the stage that holds it, and the phase in which the stage's barrier says so."""

    chunk: Int32
    stage: Int32
    phase: Int32


def advance(state, stages):
    """The next chunk's state."""
    wraps = state.stage == stages - 1
    stage, phase = Int32(select_(wraps, 0, state.stage + 1)), Int32(select_(wraps, 1 - state.phase, state.phase))
    return state._replace(chunk=state.chunk + 1, stage=stage, phase=phase)


def mbarrier(address):
    """The mbarrier at an address of shared memory."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def bulk_load(shared, source, size, barrier):
    """`size` bytes of global memory to shared memory; the mbarrier counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(size), barrier],
    )


def bulk_store(target, shared, size):
    """`size` bytes of shared memory to global memory, in a bulk group of its own."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[target, shared, Int32(size)]
    )
    cute.arch.cp_async_bulk_commit_group()


def bulk_prefetch_l2(address, size, condition):
    """Prefetch `size` bytes, a multiple of 16, to L2 where the condition holds."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p cp.async.bulk.prefetch.L2.global [{$r0}], {$r1}; }",
        read_only_args=[address, Int32(size), condition],
    )


def cp_async_or_zero(shared, source, condition):
    """16 bytes to shared memory, zeros where the condition does not hold."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, source, Int32(select_(condition, 16, 0))],
    )


def cp_async_or_fill(shared, source, condition, word):
    """16 bytes to shared memory, four times `word` where the condition does not hold."""
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        setp.ne.s32 p, {$r2}, 0;
        @p cp.async.cg.shared.global [{$r0}], [{$r1}], 16;
        @!p st.shared.v4.b32 [{$r0}], {{$r3}, {$r3}, {$r3}, {$r3}};
        }""",
        read_only_args=[shared, source, Int32(condition), word],
    )


def cp_async_arrive(barrier):
    """Arrive at the mbarrier, once the thread's asynchronous copies are complete; the barrier counts this arrival."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def atomic_increment(address):
    """Add 1 to a counter in global memory; returns its old value."""
    return cute.arch.inline_ptx("atom.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address])
