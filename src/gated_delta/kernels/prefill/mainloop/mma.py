"""The products of the fp32 mainloop: wgmma, or mma.sync on levels without it.

V rows are the M dimension. A warp has the same 16 rows in the same registers either way, and the
sums are the same: state.py has the order of an accumulator. An mma.sync product is complete when it
has started, so waiting for it does nothing.
"""

import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ...device import hopper, ptx
from ...device.hopper import WARP
from ..arguments import CHUNK, TILE_BYTES, TRIANGLE_BYTES
from ..layout import SQUARE, TILE, D, triangle_offset, triangle_panel
from .state import Fragments, Operands, make_fragments, right_operands


class Wgmma:
    """stages: ChunkStages or SplitStages."""

    asynchronous = True

    def __init__(self, stages):
        self.stages, self.channel = stages, stages.channel

    def make_fragments(self, coord):
        tensors = {name: self.tensor(coord, name) for name in ("k", "q", "tinv", "aqk")}
        tensors["k_update"] = self.tensor(coord, "k_restored") if self.channel else tensors["k"]
        return make_fragments(Float32, right_operands(coord.thread, Float32, **tensors))

    def tensor(self, coord, name):
        """A region of the stages, or None."""
        at, tile = getattr(self.stages, name), SQUARE if name in ("tinv", "aqk") else TILE
        return None if at is None else tile.tensor(coord.shared + at, self.stages.stages_of(name))

    def start(self, accumulator, left, right, name, stage, accumulate):
        major = hopper.MAJOR.MN if name == "k_update" else hopper.MAJOR.K
        hopper.start_mma(accumulator, left, getattr(right, name), stage, accumulate, major)

    def wait(self, pending):
        """Wait until at most so many products, the last ones, are incomplete."""
        warpgroup.wait_group(pending)


class MmaSync:
    """Tinv and Aqk are triangles in shared memory too: no block above the diagonal is read."""

    asynchronous = False

    def __init__(self, stages):
        self.stages, self.channel = stages, stages.channel

    def make_fragments(self, coord):
        right = self.right_operands(coord)
        state, s_k, o = (cute.make_rmem_tensor((n // 2,), Float32) for n in (D, CHUNK, CHUNK))
        operands = [cute.make_rmem_tensor((n // 2,), Float16) for n in (D, CHUNK, CHUNK)]
        return Fragments(state, s_k, o, *operands, right)

    def right_operands(self, coord):
        """The lane's address in ldmatrix of a 16 x 16 block: of N and K rows in memory, and of the
        update's K and N."""
        lane, shared, stages = coord.thread % WARP, coord.shared, self.stages
        matrix = lane // 8
        n_row, n_vector = matrix // 2 * 8 + lane % 8, matrix % 2
        k_row, k_vector = matrix % 2 * 8 + lane % 8, matrix // 2
        update = stages.k_restored if self.channel else stages.k
        outputs = stages.has_outputs
        return Operands(
            k=shared + stages.k + TILE.offset(n_row, n_vector),
            q=shared + stages.q + TILE.offset(n_row, n_vector) if outputs else None,
            tinv=shared + stages.tinv + triangle_offset(n_row, n_vector),
            aqk=shared + stages.aqk + triangle_offset(n_row, n_vector) if outputs else None,
            k_update=shared + update + TILE.offset(k_row, k_vector),
        )

    def start(self, accumulator, left, right, name, stage, accumulate):
        words = cute.recast_tensor(left, Uint32)
        a = [words[i] for i in range(cute.size(words))]
        triangle = name in ("tinv", "aqk")
        base = ptx.opaque(
            getattr(right, name) + stage * (TRIANGLE_BYTES if triangle else TILE_BYTES)
        )
        load = ptx.ldmatrix_x4_trans if name == "k_update" else ptx.ldmatrix_x4
        for n in range(0, cute.size(accumulator) * 2, 16):
            at = [range((n // 8 + j) * 4, (n // 8 + j) * 4 + 4) for j in range(2)]
            sums = [[accumulator[i] if accumulate else Float32(0) for i in x] for x in at]
            for k in range(n // 16 + 1 if triangle else len(a) // 4):
                b = load(self.block_at(base, name, n, k))
                for j in range(2):
                    sums[j] = ptx.mma_sync(
                        sums[j], a[4 * k : 4 * k + 4], b[2 * j : 2 * j + 2], Float16
                    )
            for x, numbers in zip(at, sums, strict=True):
                for i, number in zip(x, numbers, strict=True):
                    accumulator[i] = number

    def block_at(self, base, name, n, k):
        """The lane's address in the 16 x 16 block of columns n and of the k-th 16 products."""
        if name in ("tinv", "aqk"):
            return base + triangle_panel(k) + (n - 16 * k) * 32
        row, column = (16 * k, n) if name == "k_update" else (n, 16 * k)
        at = base + row * 2 * TILE.width + column // TILE.width * TILE.block_bytes
        return at ^ 32 if column % TILE.width else at  # the other two of a row's four vectors

    def wait(self, pending):
        pass
