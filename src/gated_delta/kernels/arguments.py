"""A kernel's arguments: pointers, strides and sizes, in the kernel's order. Needs no compiler.

The host fills them by name. Pointers are byte addresses, 0 for an absent tensor. Strides are in
bytes, below 2**31, 0 for an absent tensor.
"""

from collections import namedtuple
from typing import Any, NamedTuple

BF16, FP16, FP32, ABSENT = range(4)
"""Run-time dtypes of tensors with one number per token, head or channel; passed among the sizes."""

TOKEN_TILES = (2, 4, 8, 16)
"""verify's compile-time draft lengths."""

CHUNK = 64
"""Tokens of a chunk of prefill."""

TILE_BYTES = CHUNK * 128 * 2
"""k or q of a chunk in prefill's workspace: [64, 128] fp16, in the order of shared memory."""

TRIANGLE_BYTES = CHUNK * (CHUNK + 16) // 2 * 2
"""Tinv or Aqk of a chunk in the workspace: [64, 64] fp16, no 16 x 16 blocks above the diagonal."""

SCALE_BYTES = 1024
"""Scales of a chunk in the workspace, per token or channel. Offsets: kernels/device/chunks.py."""

RAW_SCALE_BYTES = 3584
"""The same for prefill_scan_raw: it decays raw q and k of KDA itself, without tiles."""

FIRST_COUNTER = 16
"""Padding in words: keeps the polled counters of prepared chunks off the queues' cache line."""

MAX_WALKED = 32
"""Most sequences of a scan of raw tokens that overlaps prepare: prepare has one per lane."""


def lanes_per_row(K: int) -> int:
    """Threads per V row, with 8 key channels each."""
    return 16 if K > 64 else 8


def tile_rows(K: int, rows: int, threads: int) -> int:
    """V rows of a CTA of `threads` threads with `rows` rows each."""
    return rows * threads // lanes_per_row(K)


def round_up_tokens(tokens: int) -> int:
    """The smallest token tile that holds a draft of this length."""
    return next(tile for tile in TOKEN_TILES if tokens <= tile)


# ---------------------------------------------------------------- strides

TOKEN_STRIDES = dict(
    q="nth", k="nth", v="nth", g="nthc", beta="nth", o="nthc", A_log="h", dt_bias="hc"
)
BUFFER_STRIDES = dict(buffer_u="rth", buffer_k="rth")
NORM_STRIDES = dict(z="nth", norm_weight="c")


def _strides(name: str, **dims: str) -> Any:
    """A tuple type with one field per dimension of each tensor: q="nt" gives q_n and q_t.

    n: sequence (0 when packed), t: token, h: head, c: channel, p: pool slot, r: row of the
    KVBuffer, j: checkpoint of a sequence.
    """
    made: Any = namedtuple(
        name, [f"{tensor}_{dim}" for tensor, letters in dims.items() for dim in letters]
    )
    made.dims = dims
    return made


DecodeStrides = _strides(
    "DecodeStrides",
    **TOKEN_STRIDES,
    state="ph",
    intermediate_states="nth",
    cu_seqlens="n",
    state_indices="nt",
    write_indices="n",
    num_accepted="n",
    intermediate_indices="n",
    **NORM_STRIDES,
)
VerifyStrides = _strides(
    "VerifyStrides",
    **TOKEN_STRIDES,
    state="ph",
    **BUFFER_STRIDES,
    buffer_log_decay="rth",
    cu_seqlens="n",
    state_indices="n",
    buffer_indices="n",
    **NORM_STRIDES,
)
FlushStrides = _strides(
    "FlushStrides",
    state="ph",
    **BUFFER_STRIDES,
    buffer_log_decay="rthc",
    num_accepted="n",
    state_indices="n",
    write_indices="n",
    buffer_indices="n",
)
PrefillStrides = _strides(
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
)


# ---------------------------------------------------------------- decode


class DecodePointers(NamedTuple):
    """Addresses of tensors. Packed tokens have N = 1 and T = total."""

    q: int  # [N, T, H, K]
    k: int  # [N, T, H, K]
    v: int  # [N, T, HV, V]
    g: int  # [N, T, HV], KDA [N, T, HV, K]
    beta: int  # [N, T, HV]
    state: int  # [P, HV, V, K]
    A_log: int  # [HV]
    dt_bias: int  # [HV], KDA [HV, K]
    cu_seqlens: int  # [N + 1]
    state_indices: int  # [N], [N, W]
    write_indices: int  # [N]
    num_accepted: int  # [N]
    intermediate_states: int  # [R, C, HV, V, K]
    intermediate_indices: int  # [N]
    z: int  # [N, T, HV, V]
    norm_weight: int  # [V]
    o: int  # [N, T, HV, V]


class DecodeSizes(NamedTuple):
    """Counts, flags (0 or 1) and kinds, the run-time dtypes.

    A kind of numbers is BF16, FP16, FP32 or ABSENT; of indices it is bytes / 4, 0 if absent.
    """

    N: int
    T: int
    """Tokens of each sequence; if packed, of the longest one allowed."""
    total: int
    """Rows of packed tokens."""
    HV: int
    qk_head_factor: int
    """ceil(2**30 / (HV // H)): value head hv reads q/k head hv * factor >> 30: no division."""
    P: int
    null_index: int
    """Indices up to this one name no slot: no read (the sequence is inactive), no write."""
    slots_per_sequence: int
    """W of state_indices [N, W], otherwise 0."""
    update_state: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    write_indices_kind: int
    num_accepted_kind: int
    intermediate_indices_kind: int
    prefetch_sequences: int
    """Prefetch the states of this many sequences into L2 before the previous kernel ends."""
    keep_in_l2: int
    """Whether loads of the state use L2's evict_last policy."""
    norm_weight_kind: int
    norm_eps: int
    """The bits of eps in fp32."""
    norm_sigmoid: int
    """Whether the activation of z is sigmoid rather than silu."""


# ---------------------------------------------------------------- verify and flush


class VerifyPointers(NamedTuple):
    """As DecodePointers. The KVBuffer has B rows of C tokens."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    state: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    state_indices: int  # [N]
    buffer_indices: int  # [N]
    buffer_u: int  # [B, C, HV, V]
    buffer_k: int  # [B, C, H, K]
    buffer_log_decay: int  # [B, C, HV], KDA [B, C, HV, K]
    z: int
    norm_weight: int
    o: int


class VerifySizes(NamedTuple):
    """As DecodeSizes."""

    N: int
    T: int
    total: int
    HV: int
    qk_head_factor: int
    group_size: int
    """Value heads per q/k head: HV // H."""
    P: int
    null_index: int
    C: int
    beta_logits: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    buffer_indices_kind: int
    prefetch_sequences: int
    keep_in_l2: int
    norm_weight_kind: int
    norm_eps: int
    norm_sigmoid: int


class FlushPointers(NamedTuple):
    """Addresses in the first of L layers, then strides between layers in bytes, 64-bit."""

    state: int  # [L, P, HV, V, K]
    buffer_u: int  # [L, B, C, HV, V]
    buffer_k: int  # [L, B, C, H, K]
    buffer_log_decay: int  # [L, B, C, HV], KDA [L, B, C, HV, K]
    num_accepted: int  # [N]
    state_indices: int  # [N]
    write_indices: int  # [N]
    buffer_indices: int  # [N]
    state_l: int
    buffer_u_l: int
    buffer_k_l: int
    buffer_log_decay_l: int


class FlushSizes(NamedTuple):
    """As DecodeSizes."""

    layers: int
    N: int
    HV: int
    qk_head_factor: int
    P: int
    null_index: int
    C: int
    num_accepted_all: int
    """Tokens to fold into each state if num_accepted is not a tensor."""
    num_accepted_kind: int
    state_indices_kind: int
    write_indices_kind: int
    buffer_indices_kind: int
    prefetch_sequences: int
    keep_in_l2: int


# ------------------------------------------------------------------------------------------------ prefill


class PrefillPointers(NamedTuple):
    """As DecodePointers, then parts of the workspace, chunk by chunk: docs/kernels/prefill.md."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    state_indices: int  # [N]
    has_initial_state: int  # [N]
    checkpoint_lens: int  # [N, C]
    checkpoint_indices: int  # [N, C]
    checkpoints: int  # [N, C, HV, V, K], or [R, HV, V, K] or the pool, by checkpoint_indices
    initial_state: int  # [N, HV, V, K], or the pool [P, HV, V, K]
    final_state: int  # the same
    o: int
    k_tiles: int
    q_tiles: int
    k_restored: int
    tinv_aqk: int
    scales: int
    sequence_order: int  # [N]
    # [1]; beside prepare: [FIRST_COUNTER + chunk_slots], its blocks, chunks of heads, each chunk's heads that are prepared;
    # segments with windows: [1 + N * HV * V / 64], its blocks, warps that have loaded the initial state of 64 V rows
    work_queue: int
    segment_transitions: int
    segment_states: int
    transition_norms: int  # [chunk_slots, HV]: an upper bound of |M| over a chunk, fp32


class PrefillSizes(NamedTuple):
    """As DecodeSizes."""

    N: int
    T: int
    """Tokens of every sequence; 0 when packed."""
    total: int
    """Rows of packed tokens; 0 when dense."""
    chunk_slots: int
    """Chunks that fit in the workspace; `first_chunk_slot` (device/chunks.py) says which are a sequence's."""
    H: int
    HV: int
    qk_head_factor: int
    beta_logits: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    null_index: int
    block_heads: int
    """Value heads of a block of prepare; all of a block share a q/k head."""
    chunk_blocks: int
    """Blocks of prepare for a chunk of all heads: HV / block_heads."""
    segments: int
    """Segments of each sequence, scanned in parallel."""
    sms: int
    """SMs of the chip: blocks of a persistent scan at most."""
    walking: int
    """SMs of a scan of raw tokens that walks chunks while the others prepare them; 0: it begins behind prepare."""
    checkpoint_lens_kind: int
    checkpoint_indices_kind: int
    checkpoints_per_sequence: int
    """C of checkpoint_lens, 0 without."""
