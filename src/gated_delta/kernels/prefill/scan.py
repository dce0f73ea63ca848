"""prefill_scan: the scan by tiles, behind prefill_prepare. K of 64, 96, 128; V of 64, 128, 192.

A CTA has 64 V rows of a head of one sequence, or of one of its segments, and two warpgroups. Warps
0 and 1 load: thread 0 starts bulk copies of a chunk's tiles, both bring its values. Warps 2 and 3
store outputs. The second warpgroup runs the MMAs with the state in registers: mainloop/fp32.py.
Three stages of shared memory, one or two on GPUs with less of it, each a chunk's tiles, Tinv, Aqk,
scales, values and outputs.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device import hopper, ptx
from ..device.args import DTYPES
from ..device.hopper import WARPGROUP
from .arguments import CHUNK
from .kernel import PrefillKernel
from .layout import D, init_shared
from .mainloop import grid
from .mainloop.fp32 import MainloopFp32
from .mainloop.load_store import LoadStoreWarps, has_values
from .mainloop.pipeline import LOAD_THREADS, make_stages
from .mainloop.segments import add_window, in_place, scan_coord
from .mainloop.state import load_rows, prefetch_initial_state, segment_state_at, state_coord
from .mainloop.tile_scheduler import work_of

ROWS = 64  # V rows of a CTA
STORE_THREADS = 64


class WarpRole(enum.IntEnum):
    """First warp of each role."""

    LOAD = 0
    STORE = 2
    MMA = 4


class PrefillScan(PrefillKernel):
    """windows: whether segments may start from zeros, a window of chunks early, where gates forget;
    else from the state that state passing leaves. checkpoints: whether it stores states between
    chunks, where a call asks for them. deterministic: whether a chunk's bits follow from its state
    and tokens alone: docs/kernels/prefill.md, "What bits depend on". grid: whether segments lie on
    a grid; a CTA may have several, and loads the state in front of each.
    """

    def __init__(
        self,
        axis: str,
        K: int,
        V: int,
        dtype: str,
        state_dtype: str,
        windows: bool,
        checkpoints: bool,
        deterministic: bool = False,
        stages: int = 3,
        grid: bool = False,
    ):
        self.on_grid = grid
        self.windows, self.checkpoints, self.v_tiles = windows, checkpoints, V // ROWS
        self.state_bytes = V * K * DTYPES[state_dtype].width // 8
        channel, self.threads = axis == "channel", 2 * WARPGROUP
        smem = hopper.SharedMemory()
        self.stages = make_stages(smem, channel, stages, STORE_THREADS, deterministic)
        self.shared = smem.size
        # KDA's scan is bound by its bytes, and loses by a prefetch.
        self.copies = LoadStoreWarps(self.stages, DTYPES[dtype], self.v_tiles, not channel, windows)
        self.mainloop = MainloopFp32(
            self.stages,
            K,
            DTYPES[dtype],
            DTYPES[state_dtype],
            deterministic=deterministic,
            checkpoints=checkpoints,
            on_grid=grid,
        )

    def ctas(self, args):
        sequences = 1 if self.on_grid else args.size.N
        return self.v_tiles * args.size.HV * sequences * args.size.segments

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        stages = self.stages
        shared = init_shared(stages.rings, stages.tinv, 2 * stages.count, thread, self.threads)
        if args.ptr.sequence_order != 0:
            hopper.wait_for_previous_kernel()
        cute.arch.sync_threads()
        group = thread // WARPGROUP - 1
        # Warp-uniform, else ptxas computes wgmma descriptors in every lane, in 62 instructions a
        # chunk. With checkpoints it does not, and the hints cost 65.
        hinted = not self.checkpoints
        group = hopper.warp_uniform(group + 1) - 1 if hinted else group
        cta = hopper.warp_uniform(cta) if self.windows else cta
        if cutlass.const_expr(self.on_grid):
            lane = thread % hopper.WARP
            work = grid.work_of(args, cta, self.v_tiles, lane, grid.first_slot)
        else:
            work = work_of(args, cta, self.v_tiles)
        chunks = args.size.scan_chunks if self.on_grid else None
        coord = scan_coord(args, work, ROWS, shared, thread % WARPGROUP, group, chunks)
        if cutlass.const_expr(self.windows):
            self.prefetch(args, coord)
            hopper.wait_for_previous_kernel()
            coord = add_window(args, coord)
        if cutlass.const_expr(hinted):
            first, end = (hopper.warp_uniform(x) for x in (coord.first_chunk, coord.end_chunk))
            coord = coord._replace(first_chunk=first, end_chunk=end)
        if group >= 0:
            self.mainloop.scan(args, coord, self.windows, self.load_state)
        elif thread < WarpRole.STORE * hopper.WARP:
            self.copies.load(args, coord)
        else:
            self.copies.store(args, coord._replace(thread=thread - LOAD_THREADS))

    @cute.jit
    def prefetch(self, args, coord):
        """Prefetch to L2 the initial state, or for a window the values of the CTA's first chunk and
        of the one before."""
        work = coord.work
        if (coord.group < 0) & (coord.end_chunk > coord.first_chunk):
            if (coord.thread == 0) & (work.segment == 0):
                prefetch_initial_state(args, work.state_index, work.hv, self.state_bytes)
            token = coord.first_chunk * CHUNK - CHUNK + coord.thread
            v_at = self.copies.v_address(args, work, cutlass.max(token, 0), 0)
            ptx.prefetch_l2(v_at, (token >= 0) & has_values(coord, token))

    @cute.jit
    def load_state(self, args, coord, state):
        """The call's initial state; a segment's from the workspace, or zeros in front of a window.

        In a pool the last segment overwrites the initial state: transitions has kept a copy.
        """
        work, rows = coord.work, state_coord(coord.v_row, coord.thread)
        if cutlass.const_expr(self.on_grid):
            self.load_state_on_grid(args, coord, rows, state)
        elif (args.size.segments > 1) & ((work.segment > 0) | in_place(args)):
            hopper.wait_for_previous_kernel()
            at = segment_state_at(args, work)
            load_rows(at, Float32, D, rows, Int32(coord.first_chunk == coord.first_stored), state)
        else:
            self.mainloop.states.load_initial(args, work, rows, state)
        hopper.wait_for_previous_kernel()

    @cute.jit
    def load_state_on_grid(self, args, coord, rows, state):
        work = coord.work
        copied = in_place(args) & (grid.whole_segments(args, work) > 0)
        if (work.segment > 0) | copied:
            hopper.wait_for_previous_kernel()
            at = grid.state_at(args, work, coord.first_chunk)
            has_chunks = coord.first_chunk < coord.end_chunk
            load_rows(at, Float32, D, rows, Int32(has_chunks), state)
        else:
            self.mainloop.states.load_initial(args, work, rows, state)
