"""KDA's inputs of a chunk in shared memory: the gate, and raw q, k and g by cp.async or by TMA.

`TileInputs` and `RawInputs` load a sub-chunk for its warp and have the addresses of its tokens. A K
block is 32 channels, of which a lane has the 8 of its `quad_lane`. Operands overwrite tokens: left
operands q and k, right operands 16-bit g.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from ...device import hopper, ptx
from ...device.args import offset, qk_head
from ..arguments import CHUNK, TILE_BYTES
from ..layout import K_BLOCKS, LOG2_E, SUBCHUNK, TILE, D
from . import common

MIN_RATE, MAX_RATE = 2.0**-100, 2.0**100
"""Limits of exp(A_log)."""

VECTOR_BYTES = 5 * 128
"""A warp's vectors: the growth of right operands, fp32 [32], then biases, fp32 [4, 32]."""
GROWTH_ROW, BIAS_ROW = 0, 1
"""Rows of 128 bytes."""

PARAMETER_BYTES = 16
"""A gate's rate and bound, of each warp."""


class KdaGate:
    """The log decay of a raw g. gate: "log", "softplus" or "lower_bound"."""

    def __init__(self, gate, g_dtype):
        self.gate, self.g_dtype = gate, g_dtype

    def load_parameters(self, args, hv):
        """exp(A_log), within MIN_RATE and MAX_RATE, and the gate's lower bound to base 2."""
        if self.gate == "log":
            return None
        at = args.ptr.A_log + offset(hv, args.stride.A_log_h)
        rate = cute.math.exp(ptx.load(Float32, at, Int32(1)))
        rate = ptx.fmax(cute.math.min(rate, Float32(MAX_RATE)), Float32(MIN_RATE))
        return rate, args.bound * Float32(LOG2_E)

    def load_biases(self, args, hv, channels):
        if self.gate == "log":
            return []
        at = args.ptr.dt_bias + offset(hv, args.stride.dt_bias_h)
        return [
            ptx.load_scalar(at + offset(channel, args.stride.dt_bias_c), args.size.dt_bias_kind)
            for channel in channels
        ]

    def log2_decay(self, g, parameters, bias):
        """arithmetic.log_decay to base 2, in as few instructions as possible.

        The rate is bounded, so inf and 0 need no cases.
        """
        if self.gate == "log":
            return g * Float32(LOG2_E)
        rate, bound = parameters
        x = g + bias
        if self.gate == "softplus":
            e = ptx.exp2(-cute.math.abs(x) * Float32(LOG2_E))
            # 1 + e loses the digits of a small e. The series' next term is below 2**-18 of e.
            small = cute.math.fma(e, Float32(LOG2_E / 3), Float32(-LOG2_E / 2))
            small = e * cute.math.fma(e, small, Float32(LOG2_E))
            soft = ptx.select(e < Float32(2.0**-6), small, ptx.log2(Float32(1) + e))
            return -rate * cute.math.fma(cute.math.max(x, Float32(0)), Float32(LOG2_E), soft)
        return bound * ptx.reciprocal(Float32(1) + ptx.exp2(x * (rate * Float32(-LOG2_E))))

    def neutral_g(self):
        """A word of raw g with a log decay of 0: minus infinity, or 0 where g is the log decay."""
        infinity = {Float32: 0xFF800000, Float16: 0xFC00FC00}.get(self.g_dtype, 0xFF80FF80)
        return Uint32(0 if self.gate == "log" else infinity)


class InputRegions(NamedTuple):
    """Byte offsets from `coord.shared`."""

    k_operands: int
    """Raw 16-bit g, later right operands."""
    qk_operands: int
    """Raw q, then k; later left operands."""
    vectors: int
    """VECTOR_BYTES of each warp."""
    g_fp32: int | None
    """Raw fp32 g."""


def lane_token(coord):
    """The lane's token for beta."""
    return coord.subchunk * SUBCHUNK + coord.lane % SUBCHUNK


def load_beta_bits(args, coord):
    """The lane's beta as it is in memory."""
    token = lane_token(coord)
    active = token < coord.tokens
    return common.load_beta(args, coord, coord.hv, token, active, ptx.load_scalar_bits)


def activate_beta_bits(args, coord, bits):
    beta = ptx.scalar_from_bits(bits, args.size.beta_kind)
    return common.activate_beta(args, beta, lane_token(coord) < coord.tokens)


def channels(coord, K):
    """The lane's channel of each K block."""
    return [cutlass.min(32 * k_block + coord.lane, K - 1) for k_block in range(K_BLOCKS)]


def add_scaled(sums, xs, factor):
    return [cute.math.fma(x, factor, y) for x, y in zip(xs, sums, strict=True)]


def bias_at(coord, vectors, k_block):
    """Address of the bias of the lane's channel of a K block."""
    warp_at = coord.shared + vectors + coord.subchunk * VECTOR_BYTES
    return warp_at + (BIAS_ROW + k_block) * 128 + coord.lane * 4


def store_biases(coord, vectors, biases):
    for k_block, bias in enumerate(biases):
        ptx.store_shared_f32(bias_at(coord, vectors, k_block), bias)


# -------------------------------------------------------------------------------- by cp.async


class TileInputs:
    """A warp copies its tokens. A line of 128 bytes has two K blocks of a token.

    Raw 16-bit g is in `k_operands`.
    """

    def __init__(self, gate, K, regions):
        self.gate, self.K, self.regions = gate, K, regions

    def load(self, args, coord):
        """Copy the warp's tokens and biases to shared memory. Returns beta's bits, parameters."""
        self.start_load_tokens(args, coord)
        bits = load_beta_bits(args, coord)
        parameters = self.gate.load_parameters(args, coord.hv)
        biases = self.gate.load_biases(args, coord.hv, channels(coord, self.K))
        store_biases(coord, self.regions.vectors, biases)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        return bits, parameters

    def operands_at(self, coord, region, k_block):
        """Address of a pair of K blocks of the sub-chunk's tokens."""
        subchunk_at = coord.shared + region + coord.subchunk * (TILE_BYTES // 4)
        return subchunk_at + k_block // 2 * (SUBCHUNK * 128)

    def lane_operand_at(self, coord, region, i, k_block, row):
        """Address of the lane's 8 channels of token row + 8 i."""
        at = self.operands_at(coord, region, k_block) + i * 1024
        return at + hopper.half_line_offset(row, k_block % 2, coord.quad_lane)

    @cute.jit
    def start_load_tokens(self, args, coord):
        """Start asynchronous copies of the warp's tokens, two at a time: whole lines.

        Past the last token q and k are zeros, and g gives a log decay of 0.
        """
        stride, regions = args.stride, self.regions
        k_block, second = coord.lane // 4 % 4, coord.lane // 16
        token = coord.subchunk * SUBCHUNK + second
        # Of the lane's 16 bytes; 16 lanes have a token.
        h = qk_head(coord.hv, args.size.qk_head_factor)
        q_at, k_at, g_at = (
            common.chunk_token_at(args, name, coord, token, head) + coord.lane % 16 * 16
            for name, head in (("q", h), ("k", h), ("g", coord.hv))
        )
        at = self.lane_operand_at(coord, 0, 0, k_block, second)
        # Two tokens' q, k and g in turn: eight copies of one tensor after another are 6% slower.
        for t in cutlass.range(0, SUBCHUNK, 2, unroll=1):
            active = (token + t < coord.tokens) & (32 * k_block < self.K)
            if cutlass.const_expr(self.regions.g_fp32 is None):
                neutral_g = self.gate.neutral_g()
                ptx.cp_async_or_fill(at + regions.k_operands, g_at, active, neutral_g)
            ptx.cp_async_or_zero(at + regions.qk_operands, q_at, active)
            ptx.cp_async_or_zero(at + regions.qk_operands + TILE_BYTES, k_at, active)
            at += 2 * 128
            q_at, k_at, g_at = (
                x + offset(2, step)
                for x, step in ((q_at, stride.q_t), (k_at, stride.k_t), (g_at, stride.g_t))
            )
        if cutlass.const_expr(self.regions.g_fp32 is not None):
            self.start_load_g_fp32(args, coord)
        cute.arch.cp_async_commit_group()

    def start_load_g_fp32(self, args, coord):
        """Start copies of fp32 g, a row per token."""
        first = coord.subchunk * SUBCHUNK
        source = common.chunk_token_at(args, "g", coord, first, coord.hv) + coord.lane * 16
        for t in range(SUBCHUNK):
            active = (first + t < coord.tokens) & (4 * coord.lane < self.K)
            target = self.g_fp32_row(coord, t) + coord.lane * 16
            source_t = source + offset(t, args.stride.g_t)
            ptx.cp_async_or_fill(target, source_t, active, self.gate.neutral_g())

    def g_fp32_row(self, coord, t):
        return coord.shared + self.regions.g_fp32 + (coord.subchunk * SUBCHUNK + t) * (D * 4)

    def load_g(self, coord, k_block):
        """Raw g of the sub-chunk's tokens, of the lane's channel of a K block."""
        if self.regions.g_fp32 is not None:
            column = (32 * k_block + coord.lane) * 4
            addresses = [self.g_fp32_row(coord, t) + column for t in range(SUBCHUNK)]
        else:
            half = k_block % 2 * 64  # half_line_offset of even rows; odd rows have the other half
            at = self.operands_at(coord, self.regions.k_operands, k_block) + coord.lane * 2
            pairs = [at + t * 128 for t in range(0, SUBCHUNK, 2)]
            addresses = [x for pair in pairs for x in (pair + half, pair + 128 + 64 - half)]
        return [ptx.load_shared_as_f32(address, self.gate.g_dtype) for address in addresses]


# -------------------------------------------------------------------------------- by TMA


class RawInputs:
    """TMA copies a chunk's tokens, a box per tensor, while the chunk before is inverted.

    K = 128, 16-bit g. Beta and the gate's parameters are loaded a chunk ahead too: the same warp
    stores and reads them.
    """

    box = TILE

    def __init__(self, gate, K, regions, smem):
        assert K == D
        self.gate, self.regions = gate, regions
        self.betas = smem.add(CHUNK * 4)
        self.parameters = smem.add(4 * PARAMETER_BYTES)
        self.ring = smem.add_ring(1, 1)

    # ---------------------------------------------------------------------------- a chunk ahead

    def copies(self, args, hv):
        """Tensors of a chunk, their heads and their regions."""
        h, regions = qk_head(hv, args.size.qk_head_factor), self.regions
        return (
            ("q", h, regions.qk_operands),
            ("k", h, regions.qk_operands + TILE_BYTES),
            ("g", hv, regions.k_operands),
        )

    @cute.jit
    def start_load_tokens(self, args, shared, n, token, hv):
        """Start, with one warp, the copies of a chunk's tokens, the first of them `token`."""
        with cute.arch.elect_one():
            self.ring.producer_expect(shared, 0, 3 * TILE_BYTES)
        for name, head, region in self.copies(args, hv):
            tensor_map, coord = getattr(args.maps, name), hopper.BoxCoord(n, token, head, 0)
            full_at = self.ring.full_at(shared, 0)
            hopper.copy_box(tensor_map, self.box, coord, shared + region, full_at)

    def prefetch_tokens(self, args, n, token, hv):
        """Prefetch, with one warp, the same tokens to L2."""
        for name, head, _ in self.copies(args, hv):
            coord = hopper.BoxCoord(n, token, head, 0)
            hopper.prefetch_box(getattr(args.maps, name), self.box, coord)

    def load_ahead(self, args, coord):
        """The lane's beta as it is in memory; the gate's parameters and biases."""
        parameters = self.gate.load_parameters(args, coord.hv)
        bits = load_beta_bits(args, coord)
        biases = self.gate.load_biases(args, coord.hv, channels(coord, D))
        return coord, bits, parameters, biases

    def store_ahead(self, args, ahead):
        """Store the results of `load_ahead` to shared memory."""
        coord, bits, parameters, biases = ahead
        ptx.store_shared_f32(self.beta_at(coord), activate_beta_bits(args, coord, bits))
        store_biases(coord, self.regions.vectors, biases)
        for i, x in enumerate(parameters or ()):
            ptx.store_shared_f32(self.parameters_at(coord) + 4 * i, x)

    def beta_at(self, coord):
        return coord.shared + self.betas + lane_token(coord) * 4

    def parameters_at(self, coord):
        return coord.shared + self.parameters + coord.subchunk * PARAMETER_BYTES

    # ---------------------------------------------------------------------------- the chunk

    @cute.jit
    def load(self, args, coord):
        """Wait for the tokens and clear those past the last one. Returns beta and parameters."""
        beta = ptx.load_shared_f32(self.beta_at(coord))
        parameters = [
            ptx.load_shared_f32(self.parameters_at(coord) + 4 * i)
            for i in range(0 if self.gate.gate == "log" else 2)
        ]
        self.ring.consumer_wait(coord.shared, *self.ring.locate(coord.iteration))
        if coord.tokens < CHUNK:
            self.clear_tokens(coord)
        cute.arch.sync_warp()
        return beta, parameters

    @cute.jit
    def clear_tokens(self, coord):
        """Past the last token, where others may lie, store zeros and a g with a log decay of 0."""
        regions, row, vector = self.regions, coord.lane // 16, coord.lane % 16
        for t in cutlass.range(row, SUBCHUNK, 2, unroll=1):
            if coord.subchunk * SUBCHUNK + t >= coord.tokens:
                for region, word in (
                    (regions.qk_operands, 0),
                    (regions.qk_operands + TILE_BYTES, 0),
                    (regions.k_operands, self.gate.neutral_g()),
                ):
                    at = self.operands_at(coord, region, vector // 4) + t * 64 + vector % 4 * 16
                    ptx.store_shared_x4(at, [Uint32(word)] * 4)

    def operands_at(self, coord, region, k_block):
        """Address of a K block of the sub-chunk's tokens, rows of 64 bytes of the box."""
        block_at = coord.shared + region + k_block * self.box.block_bytes
        return block_at + coord.subchunk * (SUBCHUNK * 64)

    def lane_operand_at(self, coord, region, i, k_block, row):
        """Address of the lane's 8 channels of token row + 8 i."""
        at = self.operands_at(coord, region, k_block) + i * 512
        return at + self.box.offset_in_block(row, row, coord.quad_lane)

    def load_g(self, coord, k_block):
        """Raw g of the sub-chunk's tokens, of the lane's channel of a K block."""
        at = self.operands_at(coord, self.regions.k_operands, k_block) + coord.lane % 8 * 2
        # Rows 2 i and 2 i + 1 have the same swizzle.
        swizzled = [at + self.box.offset_in_block(0, 2 * i, coord.lane // 8) for i in range(4)]
        addresses = [swizzled[t // 2 % 4] + t * 64 for t in range(SUBCHUNK)]
        return [ptx.load_shared_as_f32(address, self.gate.g_dtype) for address in addresses]
