"""What the host hands to a kernel, in the kernel's order. No compiler is needed to fill these in: `cute.py` does, for every launch."""

from typing import NamedTuple

BF16, FP16, FP32, ABSENT = range(4)
"""What a tensor of one number per token or head holds, told to the kernel when it runs."""


class DecodePointers(NamedTuple):
    """Addresses; 0 for an optional tensor that is not there (A_log and dt_bias are then not read, or read from g)."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    o: int
    A_log: int
    dt_bias: int
    state: int
    steps: int
    cu_seqlens: int
    reads: int
    writes: int
    accepted: int


class DecodeStrides(NamedTuple):
    """In bytes. n: sequence (0 when packed), t: token, h: head, c: channel, p: pool slot."""

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
    """Counts, and flags of 0 or 1. `wide`: indices of 64 bits. `kind`: BF16, FP16, FP32 or ABSENT."""

    N: int
    T: int
    """Tokens of every sequence; when packed, most that one may have."""
    total: int
    """Rows of packed tokens."""
    HV: int
    group: int
    """HV // H."""
    P: int
    slots: int
    """W of a [N, W] table of slots, else 0."""
    update: int
    g_kind: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_wide: int
    reads_wide: int
    writes_wide: int
    accepted_wide: int
    early: int
    """Sequences whose state is asked for before the kernel in front of this one has ended."""
    keep_lines: int
    """Whether L2 should rather keep the state's lines than others'."""
