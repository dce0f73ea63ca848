"""A chunk's stages in the shared memory of a scan by tiles, as rings.

A stage has a chunk's tiles, Tinv, Aqk, scales and values; without outputs neither q nor Aqk, whose
offsets are None then, as that of GDN's k_restored is. MMA warps call `wait`, `release_values`,
`enter_late_part`, `release` and `acquire_outputs`, in this order. Load warps arrive at `values`;
store warps wait for `outputs` and release `stored`.
"""

import cutlass.cute as cute

from ...device import hopper, levels
from ...device.hopper import WARP, WARPGROUP
from ..arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from ..layout import SQUARE
from .state import WARPGROUP_ROWS

LOAD_THREADS = 64  # two warps


def square_bytes():
    """Bytes of Tinv or Aqk: wgmma reads squares, mma.sync triangles."""
    return SQUARE.bytes if levels.current().wgmma else TRIANGLE_BYTES


def make_stages(smem, channel, count, stores, deterministic):
    """Stages of the scan: a single one comes and goes in two parts."""
    if count == 1:
        return SplitStages(smem, channel, 1, 2, stores, deterministic)
    return ChunkStages(smem, channel, WARPGROUP_ROWS, count, stores, deterministic)


class ChunkStages:
    """One ring for all of a chunk. SplitStages has the same attributes and methods.

    rows: V rows of the CTA. stores: threads of the store warps, 0 without outputs. has_absmax:
    whether load warps leave the values' absmax.
    """

    def __init__(self, smem, channel, rows, count, stores, deterministic=False):
        self.channel, self.rows, self.count, self.stores = channel, rows, count, stores
        self.has_outputs = stores > 0
        self.has_absmax = rows == WARPGROUP_ROWS and not deterministic
        self.v_pitch = rows * 2 + 16  # bytes of a token's values: 8 tokens in different banks
        tiles, squares = count * TILE_BYTES, count * square_bytes()
        self.k = smem.add(tiles, 1024)
        self.q = smem.add(tiles, 1024) if self.has_outputs else None
        self.k_restored = smem.add(tiles, 1024) if channel else None
        self.tinv = smem.add(squares, 1024)
        self.aqk = smem.add(squares, 1024) if self.has_outputs else None
        self.v = self.o = smem.add(count * CHUNK * self.v_pitch, 128)  # outputs overwrite values
        self.scales = smem.add(count * SCALE_BYTES, 128)
        self.v_absmax = smem.add(count * 8)
        mma_threads = rows // WARPGROUP_ROWS * WARPGROUP
        # Load warps arrive with their values, copiers for tiles.
        loads = hopper.copiers(LOAD_THREADS) + LOAD_THREADS
        self.ring = self.values = self.stored = smem.add_ring(count, loads, mma_threads + stores)
        self.rings = (self.ring,)
        if self.has_outputs:
            self.outputs = smem.add_ring(count, mma_threads)
            self.rings += (self.outputs,)

    def stages_of(self, name):
        """Stages of a region."""
        return self.count

    def stage_of(self, name, stage, chunk):
        """Stage of a region, or of the right operand in it, for a chunk and its stage in `ring`."""
        return stage

    def wait(self, shared, pipe):
        """Wait for all that a chunk needs up to u."""
        self.ring.consumer_wait(shared, pipe.stage, pipe.phase)

    def release_values(self, coord, pipe):
        """Values are in registers, but their stage is released with all others."""

    def enter_late_part(self, coord, pipe):
        """u is known; the same stage has what follows."""

    def release(self, coord, pipe):
        """The chunk's operands have been read."""
        self.ring.consumer_release(coord.shared, pipe.stage)

    def acquire_outputs(self, shared, pipe):
        """Outputs overwrite the chunk's values; no other warp reads what a warp overwrites."""


class SplitStages:
    """Two rings: where stages are few, a chunk's tiles come and go in two parts.

    Early: k, q, Tinv and scales, which lead to u. Late: KDA's k_restored, and Aqk, which u is
    multiplied by. GDN's k, read in both parts, and scales have `deep_count` stages, the others
    `count`. Values and outputs have one stage of 64 V rows, and rings of their own.
    """

    has_outputs = True

    def __init__(self, smem, channel, count, deep_count, stores, deterministic):
        self.channel, self.rows, self.count, self.stores = channel, WARPGROUP_ROWS, count, stores
        self.has_absmax = not deterministic
        self.deep_count = deep_count
        self.deep = ("scales",) if channel else ("scales", "k", "k_update")
        self.v_pitch = WARPGROUP_ROWS * 2 + 16
        self.k, self.q = (smem.add(self.stages_of(x) * TILE_BYTES, 1024) for x in "kq")
        self.k_restored = smem.add(count * TILE_BYTES, 1024) if channel else None
        self.tinv, self.aqk = (smem.add(count * square_bytes(), 1024) for _ in range(2))
        self.v, self.o = (smem.add(CHUNK * self.v_pitch, 128) for _ in range(2))
        self.scales = smem.add(deep_count * SCALE_BYTES, 128)
        self.v_absmax = smem.add(8)
        warps, copiers = WARPGROUP // WARP, hopper.copiers(LOAD_THREADS)
        self.ring, self.late = (smem.add_ring(count, copiers, warps) for _ in range(2))
        self.values = smem.add_ring(1, LOAD_THREADS, warps)
        self.outputs = self.stored = smem.add_ring(1, WARPGROUP, stores)
        self.rings = (self.ring, self.late, self.values, self.outputs)

    def stages_of(self, name):
        return 1 if name == "v" else self.deep_count if name in self.deep else self.count

    def stage_of(self, name, stage, chunk):
        return 0 if name == "v" else chunk % self.deep_count if name in self.deep else stage

    def single(self, pipe):
        """Stage and phase of a chunk in the rings of one stage. With several stages in the others,
        a work tile begins with chunk 0."""
        return (0, pipe.phase) if self.count == 1 else self.values.locate(pipe.chunk)

    def wait(self, shared, pipe):
        self.values.consumer_wait(shared, *self.single(pipe))
        self.ring.consumer_wait(shared, pipe.stage, pipe.phase)

    def release_values(self, coord, pipe):
        self.release_part(self.values, coord, 0)

    def enter_late_part(self, coord, pipe):
        """Release the early part, wait for the late one."""
        self.release_part(self.ring, coord, pipe.stage)
        self.late.consumer_wait(coord.shared, pipe.stage, pipe.phase)

    def release(self, coord, pipe):
        self.release_part(self.late, coord, pipe.stage)

    @cute.jit
    def release_part(self, ring, coord, stage):
        cute.arch.sync_warp()  # behind all lanes' reads
        if coord.thread % WARP == 0:
            ring.consumer_release(coord.shared, stage)

    def acquire_outputs(self, shared, pipe):
        self.outputs.producer_acquire(shared, *self.single(pipe))
