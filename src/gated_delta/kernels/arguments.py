"""What the host hands to a kernel, in the kernel's order; `cute.py` fills it in, and needs no compiler to."""

from typing import NamedTuple

BF16, FP16, FP32, ABSENT = range(4)
"""What a tensor of one number per token or head holds, told to the kernel when it runs."""


def decode_lanes(K: int) -> int:
    """Threads that share a V row, 8 key channels each."""
    return 16 if K > 64 else 8


def decode_tile(K: int, rows: int, threads: int) -> int:
    """V rows of a block of `threads` with `rows` in flight each."""
    return rows * threads // decode_lanes(K)


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
