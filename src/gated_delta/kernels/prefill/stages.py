"""A chunk's stages in the shared memory of a scan by tiles, as rings.

A stage has a chunk's tiles, Tinv, Aqk, scales and values. MMA warps call `wait`, `release_values`,
`release_early`, `release` and `acquire_outputs`, in this order; load and store warps the others.
"""

import cutlass.cute as cute

from ..device import levels
from ..device.hopper import WARP, WARPGROUP
from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .layout import SQUARE
from .state import WARPGROUP_ROWS

LOAD_THREADS = 64  # two warps


def square_bytes():
    """Bytes of Tinv or Aqk: wgmma reads squares, mma.sync triangles."""
    return SQUARE.bytes if levels.current().wgmma else TRIANGLE_BYTES


def make_stages(smem, channel, rows, count, stores):
    """Stages of scan and transitions: one stage, of 64 V rows, comes and goes in two parts."""
    if count == 1:
        return SplitStages(smem, channel, 1, 2, stores)
    return TileStages(smem, channel, rows, count, stores)


class TileStages:
    """One ring for all of a chunk. SplitStages has the same methods.

    rows: V rows of the CTA. stores: threads of the store warps, 0 without outputs.
    """

    def __init__(self, smem, channel, rows, stages, stores):
        self.count = stages
        self.v_pitch = rows * 2 + 16  # bytes of a token's values: 8 tokens in different banks
        self.k, self.q = (smem.add(stages * TILE_BYTES, 1024) for _ in range(2))
        self.k_restored = smem.add(stages * TILE_BYTES, 1024) if channel else None
        self.square_bytes = square_bytes()
        self.tinv, self.aqk = (smem.add(stages * self.square_bytes, 1024) for _ in range(2))
        self.v = self.o = smem.add(stages * CHUNK * self.v_pitch, 128)  # outputs overwrite values
        self.scales = smem.add(stages * SCALE_BYTES, 128)
        self.v_absmax = smem.add(stages * 8)
        mma_threads = rows // 64 * WARPGROUP
        # Load warps arrive with their values; thread 0 for bulk copies, or all for their cp.asyncs.
        copiers = 1 if levels.current().bulk_copies else LOAD_THREADS
        self.ring = smem.add_ring(stages, copiers + LOAD_THREADS, mma_threads + stores)
        self.outputs = smem.add_ring(stages, mma_threads)
        self.rings = (self.ring, self.outputs)

    def start(self, coord):
        return self.ring.start(coord.first_chunk, coord.work.iterations_before)

    def advance(self, pipe):
        return self.ring.advance(pipe)

    def stages_of(self, name):
        """Stages of a region."""
        return self.count

    def stage_of(self, name, pipe):
        """A chunk's stage of a region, or of the right operand in it."""
        return pipe.stage

    def stage_in(self, name, stage, chunk):
        """Stage of a region for a chunk whose stage in the ring is known."""
        return stage

    def wait(self, shared, pipe):
        """MMA: wait for all that a chunk needs up to u."""
        self.ring.consumer_wait(shared, pipe.stage, pipe.phase)

    def release_values(self, coord, pipe):
        """MMA: values are in registers, but their stage is released with all others."""

    def release_early(self, coord, pipe):
        """MMA: u is known, and the same stage has what follows."""

    def release(self, coord, pipe):
        """MMA: the chunk's operands have been read."""
        self.ring.consumer_release(coord.shared, pipe.stage)

    def acquire_outputs(self, shared, pipe):
        """MMA: outputs overwrite the chunk's values; no other warp reads what a warp overwrites."""

    def acquire_values(self, shared, iteration):
        """Load warps: an empty stage of values. Returns the stage."""
        stage, phase = self.ring.locate(iteration)
        self.ring.producer_acquire(shared, stage, phase)
        return stage

    def arrive_values(self, shared, stage):
        self.ring.producer_arrive(shared, stage)

    def wait_outputs(self, shared, iteration):
        """Store warps: a chunk's outputs. Returns the stage."""
        stage, phase = self.outputs.locate(iteration)
        self.outputs.consumer_wait(shared, stage, phase)
        return stage

    def release_outputs(self, shared, stage):
        self.ring.consumer_release(shared, stage)


class SplitStages:
    """Two rings: where stages are few, a chunk's tiles come and go in two parts.

    Early: k, q, Tinv and scales, which lead to u. Late: KDA's k_restored, and Aqk, which u is
    multiplied by. GDN's k, read in both parts, and scales have `deep_count` stages, the others
    `count`. Values and outputs have one stage of 64 V rows, and rings of their own.
    """

    def __init__(self, smem, channel, count, deep_count, store_threads):
        self.channel, self.count, self.deep_count = channel, count, deep_count
        self.deep = ("scales",) if channel else ("scales", "k")
        self.v_pitch = WARPGROUP_ROWS * 2 + 16
        self.square_bytes = square_bytes()
        names = ("k", "q", "k_restored") if channel else ("k", "q")
        for name in names:
            setattr(self, name, smem.add(self.stages_of(name) * TILE_BYTES, 1024))
        self.tinv, self.aqk = (smem.add(count * self.square_bytes, 1024) for _ in range(2))
        self.v, self.o = (smem.add(CHUNK * self.v_pitch, 128) for _ in range(2))
        self.scales = smem.add(self.deep_count * SCALE_BYTES, 128)
        self.v_absmax = smem.add(8)
        warps = WARPGROUP // WARP
        copiers = 1 if levels.current().bulk_copies else LOAD_THREADS
        self.early, self.late = (smem.add_ring(count, copiers, warps) for _ in range(2))
        self.values = smem.add_ring(1, LOAD_THREADS, warps)
        self.outputs = smem.add_ring(1, WARPGROUP, store_threads or None)
        self.rings = (self.early, self.late, self.values, self.outputs)

    def stages_of(self, name):
        return 1 if name == "v" else self.deep_count if name in self.deep else self.count

    def stage_in(self, name, stage, chunk):
        """Stage of a region for a chunk whose stage in the rings is known."""
        return 0 if name == "v" else chunk % self.deep_count if name in self.deep else stage

    def start(self, coord):
        return self.early.start(coord.first_chunk, coord.work.iterations_before)

    def advance(self, pipe):
        return self.early.advance(pipe)

    def stage_of(self, name, pipe):
        region = "k" if name == "k_update" and not self.channel else name
        return self.stage_in(region, pipe.stage, pipe.chunk)

    def single(self, pipe):
        """Stage and phase of a chunk in the rings of one stage. With several stages in the others,
        a work tile begins with chunk 0."""
        return (0, pipe.phase) if self.count == 1 else self.values.locate(pipe.chunk)

    def wait(self, shared, pipe):
        self.values.consumer_wait(shared, *self.single(pipe))
        self.early.consumer_wait(shared, pipe.stage, pipe.phase)

    @cute.jit
    def release_values(self, coord, pipe):
        cute.arch.sync_warp()  # behind all lanes' reads
        if coord.thread % WARP == 0:
            self.values.consumer_release(coord.shared, 0)

    def release_early(self, coord, pipe):
        self.release_part(self.early, coord, pipe)
        self.late.consumer_wait(coord.shared, pipe.stage, pipe.phase)

    def release(self, coord, pipe):
        self.release_part(self.late, coord, pipe)

    @cute.jit
    def release_part(self, ring, coord, pipe):
        cute.arch.sync_warp()
        if coord.thread % WARP == 0:
            ring.consumer_release(coord.shared, pipe.stage)

    def acquire_outputs(self, shared, pipe):
        self.outputs.producer_acquire(shared, *self.single(pipe))

    def acquire_values(self, shared, iteration):
        self.values.producer_acquire(shared, *self.values.locate(iteration))
        return 0

    def arrive_values(self, shared, stage):
        self.values.producer_arrive(shared, 0)

    def wait_outputs(self, shared, iteration):
        self.outputs.consumer_wait(shared, *self.outputs.locate(iteration))
        return 0

    def release_outputs(self, shared, stage):
        self.outputs.consumer_release(shared, 0)
