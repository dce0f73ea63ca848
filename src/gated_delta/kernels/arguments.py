"""What the host hands to a kernel, in the kernel's order; `cute.py` fills it in, and needs no compiler to."""

from typing import NamedTuple

BF16, FP16, FP32, ABSENT = range(4)
"""What a tensor of one number per token or head holds, told to the kernel when it runs."""


def lanes_of(K: int) -> int:
    """Threads that share a V row, 8 key channels each."""
    return 16 if K > 64 else 8


def tile_of(K: int, rows: int, threads: int) -> int:
    """V rows of a block of `threads` with `rows` in flight each."""
    return rows * threads // lanes_of(K)


ROOMS = (2, 4, 8, 16)


def room_for(tokens: int) -> int:
    """Tokens a verify kernel has room for."""
    return next(room for room in ROOMS if tokens <= room)


class DecodePointers(NamedTuple):
    """Addresses; 0 for an optional tensor that is not there."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    state: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    reads: int
    writes: int
    accepted: int
    steps: int
    o: int


class DecodeStrides(NamedTuple):
    """In bytes, below 2**31 each. n: sequence (0 when packed), t: token, h: head, c: channel, p: pool slot."""

    q_n: int
    q_t: int
    q_h: int
    k_n: int
    k_t: int
    k_h: int
    v_n: int
    v_t: int
    v_h: int
    g_n: int
    g_t: int
    g_h: int
    g_c: int
    beta_n: int
    beta_t: int
    beta_h: int
    o_n: int
    o_t: int
    o_h: int
    o_c: int
    A_log_h: int
    dt_bias_h: int
    dt_bias_c: int
    state_p: int
    state_h: int
    steps_n: int
    steps_t: int
    steps_h: int
    cu_seqlens_n: int
    reads_n: int
    reads_t: int
    writes_n: int
    accepted_n: int


class DecodeSizes(NamedTuple):
    """Counts, flags of 0 or 1, and kinds: BF16, FP16, FP32 or ABSENT for numbers; bytes / 4 for indices, 0 for none."""

    N: int
    T: int
    """Tokens of every sequence; when packed, most that one may have."""
    total: int
    """Rows of packed tokens."""
    HV: int
    q_heads: int
    """ceil(2**30 / (HV // H)): value head hv reads q/k head hv * q_heads >> 30, a division without dividing."""
    P: int
    slots: int
    """W of a [N, W] table of slots, else 0."""
    update: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    reads_kind: int
    writes_kind: int
    accepted_kind: int
    early: int
    """Sequences whose state is asked for before the kernel in front of this one has ended."""
    keep_lines: int
    """Whether L2 should rather keep the state's lines than others'."""


class VerifyPointers(NamedTuple):
    """Addresses; 0 for an optional tensor that is not there. u, kept_k and log_decay are the buffer's."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    state: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    reads: int
    rows: int
    u: int
    kept_k: int
    log_decay: int
    o: int


class VerifyStrides(NamedTuple):
    """As DecodeStrides; r: row of the buffer."""

    q_n: int
    q_t: int
    q_h: int
    k_n: int
    k_t: int
    k_h: int
    v_n: int
    v_t: int
    v_h: int
    g_n: int
    g_t: int
    g_h: int
    g_c: int
    beta_n: int
    beta_t: int
    beta_h: int
    o_n: int
    o_t: int
    o_h: int
    o_c: int
    A_log_h: int
    dt_bias_h: int
    dt_bias_c: int
    state_p: int
    state_h: int
    u_r: int
    u_t: int
    u_h: int
    kept_k_r: int
    kept_k_t: int
    kept_k_h: int
    log_decay_r: int
    log_decay_t: int
    log_decay_h: int
    cu_seqlens_n: int
    reads_n: int
    rows_n: int


class VerifySizes(NamedTuple):
    """As DecodeSizes."""

    N: int
    T: int
    total: int
    HV: int
    q_heads: int
    group: int
    """Value heads to a q/k head."""
    P: int
    C: int
    """Tokens a row of the buffer holds."""
    beta_logits: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    reads_kind: int
    rows_kind: int
    early: int
    keep_lines: int


class FlushPointers(NamedTuple):
    """Addresses, 0 for an optional tensor that is not there; and bytes from layer to layer, which may not fit 32 bits."""

    state: int
    u: int
    k: int
    log_decay: int
    accepted: int
    reads: int
    writes: int
    rows: int
    state_l: int
    u_l: int
    k_l: int
    log_decay_l: int


class FlushStrides(NamedTuple):
    """In bytes, below 2**31 each; r: row of the buffer, c: channel, 0 where all of a head share a decay."""

    state_p: int
    state_h: int
    u_r: int
    u_t: int
    u_h: int
    k_r: int
    k_t: int
    k_h: int
    log_decay_r: int
    log_decay_t: int
    log_decay_h: int
    log_decay_c: int
    accepted_n: int
    reads_n: int
    writes_n: int
    rows_n: int


class FlushSizes(NamedTuple):
    """Counts, flags and kinds of indices, as DecodeSizes."""

    layers: int
    N: int
    HV: int
    k_heads: int
    """As q_heads."""
    P: int
    C: int
    count: int
    """Tokens to fold where there is no tensor of them."""
    accepted_kind: int
    reads_kind: int
    writes_kind: int
    rows_kind: int
    early: int
    keep_lines: int


CHUNK = 64
"""Tokens that prefill treats at once."""

IMAGE = CHUNK * 128 * 2
"""Bytes of a chunk's keys, or queries, in prefill's workspace: fp16, as the tensor cores read shared memory."""
TRIANGLE = CHUNK * (CHUNK + 16) // 2 * 2
"""Bytes of a lower triangle of pairs of a chunk's tokens: of each 16 columns the rows from the diagonal block on."""

COLUMNS = 1024
"""Bytes of numbers that each token of a chunk, and each channel, is scaled with: fp32, but fp16 for what GDN adds to a state."""


class PrefillPointers(NamedTuple):
    """Addresses; 0 for an optional tensor that is not there. From `keys` on they lie in the workspace: docs/kernels/prefill.md."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    reads: int
    has_initial: int
    initial: int
    final: int
    o: int
    keys: int
    queries: int
    writes: int
    pairs: int
    columns: int
    order: int
    queue: int
    moves: int
    starts: int


class PrefillStrides(NamedTuple):
    """As DecodeStrides."""

    q_n: int
    q_t: int
    q_h: int
    k_n: int
    k_t: int
    k_h: int
    v_n: int
    v_t: int
    v_h: int
    g_n: int
    g_t: int
    g_h: int
    g_c: int
    beta_n: int
    beta_t: int
    beta_h: int
    o_n: int
    o_t: int
    o_h: int
    o_c: int
    A_log_h: int
    dt_bias_h: int
    dt_bias_c: int
    initial_p: int
    initial_h: int
    final_p: int
    final_h: int
    cu_seqlens_n: int
    reads_n: int
    has_initial_n: int


class PrefillSizes(NamedTuple):
    """As DecodeSizes."""

    N: int
    T: int
    """Tokens of every sequence; 0 when packed."""
    total: int
    """Rows of packed tokens; 0 when dense."""
    places: int
    """Chunks that the workspace has room for; a sequence's begin at `place_of` (chunks.py)."""
    H: int
    HV: int
    q_heads: int
    beta_logits: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    reads_kind: int
    pieces: int
    """Parts that each sequence is cut in."""
    blocks: int
    """Of the scan at most, where they take one head after another."""
