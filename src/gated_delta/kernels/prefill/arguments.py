"""What the host passes to a prefill kernel: tensors, sizes, workspace. Needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arguments import FP8_STRIDES, NORM_STRIDES, TOKEN_STRIDES, strides_type

CHUNK = 64
"""Tokens of a chunk."""

TILE_BYTES = CHUNK * 128 * 2
"""A chunk's k or q in the workspace: [64, 128] of fp16, in the order of shared memory."""

TRIANGLE_BYTES = CHUNK * (CHUNK + 16) // 2 * 2
"""Tinv or Aqk in the workspace: [64, 64] of fp16 without the 16 x 16 blocks above the diagonal."""

SCALE_BYTES = 1024
"""A chunk's scales in the workspace, per token or channel: layout.py has the offsets."""

RAW_SCALE_BYTES = 3584
"""The same for scan_raw, which has no tiles in the workspace and decays raw q and k itself."""

STATE_BYTES = 128 * 128 * 4
"""A state in the workspace, or a segment's M or B: fp32 [128, 128]."""

MAX_RAW_SEQUENCES = 32
"""Sequences of prepare_raw overlapped with scan_raw: a warp has one in each lane."""

# Words of the workspace's region `counters`.
CTA_QUEUE = 0  # work tiles taken (persistent CTAs), or CTAs that have started (overlapped)
ITEM_QUEUE = 1  # overlapped: chunks of a head taken by the warpgroups that prepare
SCANNED = 2  # overlapped: chunks that scanning CTAs have started
# [chunk slots]: heads of the chunk that are prepared; polled, so in other sectors than the queues.
PREPARED = 16

PrefillStrides = strides_type(
    "PrefillStrides",
    **TOKEN_STRIDES,
    initial_state="ph",
    final_state="ph",
    cu_seqlens="n",
    state_indices="n",
    has_initial_state="n",
    checkpoint_lens="nj",
    checkpoint_indices="nj",
    checkpoints="njph",
    **NORM_STRIDES | dict(z="nthg"),
    out="nth",
    **FP8_STRIDES,
)


class PrefillTensors(NamedTuple):
    """Addresses of the call's tensors; packed tokens have 1 for N and `total` for T."""

    q: int  # [N, T, H, K]
    k: int  # [N, T, H, K]
    v: int  # [N, T, HV, V]
    g: int  # [N, T, HV], KDA [N, T, HV, K]
    beta: int  # [N, T, HV]
    A_log: int  # [HV]
    dt_bias: int  # [HV], KDA [HV, K]
    cu_seqlens: int  # [N + 1]
    state_indices: int  # [N]
    has_initial_state: int  # [N]
    checkpoint_lens: int  # [N, C]
    checkpoint_indices: int  # [N, C]
    checkpoints: int  # [N, C, HV, V, K]; with checkpoint_indices [R, HV, V, K] or the pool
    initial_state: int  # [N, HV, V, K], or the pool [P, HV, V, K]
    final_state: int  # the same
    z: int  # [N, T, H, HV / H, V]
    norm_weight: int  # [V]
    o: int  # [N, T, HV, V], 16 bits
    out: int  # the same in FP8, if that is the output; o is workspace then
    out_scales: int  # [N, T, HV], written; or [1], read


class PrefillSizes(NamedTuple):
    """Sizes of a prefill, as DecodeSizes are of a decode."""

    N: int
    T: int
    """Tokens of every sequence; 0 when packed."""
    total: int
    """Rows of packed tokens; 0 when dense."""
    chunk_slots: int
    """Chunks that fit in the workspace; `first_chunk_slot` (layout.py) is a sequence's first."""
    H: int
    HV: int
    qk_head_factor: int
    beta_factor: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    null_index: int
    cta_heads: int
    """Value heads of a CTA of prepare; they share a q/k head."""
    chunk_ctas: int
    """CTAs of prepare for a chunk of all heads: HV / cta_heads."""
    segments: int
    """Segments of each sequence, scanned in parallel; on a grid the scan's slots, of `scan_chunks`
    each, in all sequences."""
    sms: int
    """SMs of the GPU: the most CTAs of a persistent kernel."""
    scan_sms: int
    """SMs on which scan_raw overlaps with prepare_raw on the others; 0: it starts behind it."""
    checkpoint_lens_kind: int
    checkpoint_indices_kind: int
    checkpoints_per_sequence: int
    """C of checkpoint_lens, 0 without."""
    grid_chunks: int
    """Chunks of a segment on a grid; 0: no grid."""
    whole_segments: int
    """Segments of so many chunks in all sequences, at most."""
    scan_chunks: int
    """Chunks that a CTA of the scan has on a grid: of one segment or of several, in turn."""
    norm_weight_kind: int
    norm_eps: int
    norm_sigmoid: int
    out_scales_given: int


class WorkspaceShape(NamedTuple):
    """What the workspace's size depends on."""

    N: int
    HV: int
    chunk_slots: int
    """0 for fused, which keeps a chunk's terms in shared memory."""
    tile_heads: int
    """Heads with k and q tiles: H, KDA HV; 0 without tiles."""
    channel: bool
    raw: bool
    segments: int
    """Of each sequence; with whole_segments 1."""
    whole_segments: int
    """Of all sequences on a grid, at most; 0: no grid."""
    has_windows: bool
    """Whether segments may start from zeros, some chunks early."""
    ranked: bool
    """Whether CTAs take the longest sequences first."""
    queued: bool
    """Whether CTAs take work from a queue."""
    overlapped: bool
    summary: bool = False

    @property
    def head_segments(self) -> int:
        if self.whole_segments:
            return self.HV * self.whole_segments
        return self.N * self.HV * self.segments if self.segments > 1 or self.summary else 0


class Region(NamedTuple):
    """A region of the workspace. size: its bytes, 0 where a call has none."""

    name: str
    size: Callable[[WorkspaceShape], int]
    writer: str
    reader: str


def _head_chunks(size: int) -> Callable[[WorkspaceShape], int]:
    return lambda w: w.chunk_slots * w.HV * size


def _tiles(w: WorkspaceShape) -> int:
    return w.chunk_slots * w.tile_heads * TILE_BYTES


WORKSPACE = (
    # Of each chunk and head.
    Region("k_tiles", _tiles, "prepare", "scan, transitions, overlapped"),
    Region("q_tiles", _tiles, "prepare", "scan, overlapped"),
    Region(
        "k_restored", lambda w: w.channel * _tiles(w), "prepare", "scan, transitions, overlapped"
    ),
    Region("tinv_aqk", _head_chunks(2 * TRIANGLE_BYTES), "prepare", "every scan, transitions"),
    Region(
        "scales",
        lambda w: _head_chunks(RAW_SCALE_BYTES if w.raw else SCALE_BYTES)(w),
        "prepare",
        "every scan, transitions",
    ),
    # Of the launch.
    Region(
        "sequence_order",
        lambda w: w.ranked * w.N * 4,
        "rank, prepare, prepare_raw",
        "every scan, transitions",
    ),
    Region(
        "counters",
        lambda w: 4 * (PREPARED + w.chunk_slots) if w.overlapped else 4 * w.queued,
        "rank, prepare_raw",
        "prepare_raw, fused, scan_raw, overlapped",
    ),
    # Of each segment and head: M and B; initial states, then a flag a segment. On a grid: states at
    # the segments' ends, copies of calls' initial states, flags.
    Region(
        "segment_transitions",
        lambda w: w.head_segments * 2 * STATE_BYTES,
        "transitions",
        "state_passing",
    ),
    Region(
        "segment_states",
        lambda w: w.head_segments * ((1 + (w.whole_segments > 0)) * STATE_BYTES + 4),
        "transitions, state_passing",
        "scan",
    ),
    Region(
        "transition_norms",
        lambda w: w.has_windows * _head_chunks(4)(w),
        "prepare",
        "transitions, scan",
    ),
)
"""Regions of the workspace, in the order of PrefillPointers' last fields."""

PrefillPointers: Any = NamedTuple(
    "PrefillPointers",
    [(name, int) for name in (*PrefillTensors._fields, *(region.name for region in WORKSPACE))],
)
"""Addresses of tensors, then of the workspace's regions; 0 for an absent one."""


def lay_out_workspace(shape: WorkspaceShape) -> tuple[int, list[int]]:
    """Bytes of the workspace; each region's offset, 256-byte aligned, -1 for an absent one."""
    offsets, end = [], 0
    for region in WORKSPACE:
        size = region.size(shape)
        offsets.append(end if size else -1)
        end += -(-size // 256) * 256
    return end, offsets
