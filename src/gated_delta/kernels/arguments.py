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


def lanes_per_row(K: int) -> int:
    """Threads per V row, with 8 key channels each."""
    return 16 if K > 64 else 8


def v_rows(K: int, rows: int, threads: int) -> int:
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
GROUPED = dict(v="v", z="z", g="g", beta="b")
"""decode with a convolution: tensors by value head, which may lie by q/k head, and the letters of
their strides between value heads of a q/k head; the stride of h is then that of q/k heads."""
NORM_STRIDES = dict(z="nth", norm_weight="c")
FP8_STRIDES = dict(out_scales="nth")


def strides_type(name: str, **dims: str) -> Any:
    """A tuple type with one field per dimension of each tensor: q="nt" gives q_n and q_t.

    n: sequence (0 when packed), t: token, h: head, g: value head of a q/k head, c: channel, p: pool
    slot, r: row of the KVBuffer, j: checkpoint of a sequence, l: entry of a window.
    """
    fields = [f"{tensor}_{dim}" for tensor, letters in dims.items() for dim in letters]
    strides: Any = namedtuple(name, fields)
    strides.dims = dims
    return strides


DecodeStrides = strides_type(
    "DecodeStrides",
    **TOKEN_STRIDES,
    state="ph",
    intermediate_states="nth",
    cu_seqlens="n",
    state_indices="nt",
    write_indices="n",
    num_accepted="n",
    intermediate_indices="n",
    **BUFFER_STRIDES,
    buffer_log_decay="rth",
    buffer_indices="n",
    buffer_lens="n",
    **NORM_STRIDES,
    **FP8_STRIDES,
    conv_bias="c",
    windows="pcl",
    grouped="vzgb",
)
VerifyStrides = strides_type(
    "VerifyStrides",
    **TOKEN_STRIDES,
    state="ph",
    **BUFFER_STRIDES,
    buffer_log_decay="rth",
    cu_seqlens="n",
    state_indices="n",
    buffer_indices="n",
    buffer_lens="n",
    parents="nt",
    **NORM_STRIDES,
    **FP8_STRIDES,
    conv_bias="c",
    windows="pcl",
    trails="rcl",
    trail_indices="n",
    grouped="vzgb",
)
FlushStrides = strides_type(
    "FlushStrides",
    state="ph",
    **BUFFER_STRIDES,
    buffer_log_decay="rthc",
    num_accepted="n",
    path="nt",
    state_indices="n",
    write_indices="n",
    buffer_indices="n",
)
ShortConvStrides = strides_type(
    "ShortConvStrides",
    q="nth",
    k="nth",
    v="nthg",
    bias="c",
    windows="pcl",
    cu_seqlens="n",
    state_indices="n",
    has_initial_state="n",
    o="nt",
)


# ---------------------------------------------------------------- decode


class DecodePointers(NamedTuple):
    """Addresses of tensors. Packed tokens have N = 1 and T = total.

    The KVBuffer has B rows of C tokens.
    """

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
    buffer_indices: int  # [N]
    buffer_lens: int  # [N]
    buffer_u: int  # [B, C, HV, V]
    buffer_k: int  # [B, C, H, K]
    buffer_log_decay: int  # [B, C, HV], KDA [B, C, HV, K]
    z: int  # [N, T, HV, V]
    norm_weight: int  # [V]
    o: int  # [N, T, HV, V]
    out_scales: int  # [N, T, HV], or one number
    conv_weight: int  # [C, 4], contiguous; C channels of q | k | v
    conv_bias: int  # [C]
    windows: int  # [P, C, 3]


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
    beta_factor: int
    """The bits of 1 or 2 in fp32: beta is this times the sigmoid of its logit. 0: no logit."""
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    write_indices_kind: int
    num_accepted_kind: int
    intermediate_indices_kind: int
    group_size: int
    """Value heads per q/k head: HV // H."""
    C: int
    buffer_rows: int
    buffer_indices_kind: int
    buffer_lens_kind: int
    prefetch_sequences: int
    """Prefetch the states of this many sequences into L2 before the previous kernel ends."""
    keep_in_l2: int
    """Whether loads of the state use L2's evict_last policy."""
    norm_weight_kind: int
    norm_eps: int
    """The bits of eps in fp32."""
    norm_sigmoid: int
    """Whether the activation of z is sigmoid rather than silu."""
    out_scales_given: int
    """Whether out_scales is one number, read; else there is one per token and head, written."""
    conv_key_channels: int
    """Channels of q, or of k: H * K."""
    conv_group: int
    """Value heads per q/k head."""
    conv_bias_kind: int
    conv_silu: int
    """Whether the convolution has an activation."""


# ---------------------------------------------------------------- verify and flush


class VerifyPointers(NamedTuple):
    """Addresses for verify, as DecodePointers are for decode."""

    q: int
    k: int
    v: int
    g: int
    beta: int
    state: int
    A_log: int
    dt_bias: int
    cu_seqlens: int
    state_indices: int
    buffer_indices: int
    buffer_lens: int
    parents: int  # [N, W]
    buffer_u: int
    buffer_k: int
    buffer_log_decay: int
    z: int
    norm_weight: int
    o: int
    out_scales: int
    conv_weight: int
    conv_bias: int
    windows: int
    trails: int  # [R, C, W]; W >= T + 2 inputs
    trail_indices: int  # [N]


class VerifySizes(NamedTuple):
    """Sizes of a verify, as DecodeSizes are of a decode."""

    N: int
    T: int
    total: int
    HV: int
    qk_head_factor: int
    group_size: int
    P: int
    null_index: int
    C: int
    buffer_rows: int
    folds: int
    """decode with a buffer: fold a row without room for the tokens; verify skips the sequence."""
    beta_factor: int
    beta_kind: int
    dt_bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
    buffer_indices_kind: int
    buffer_lens_kind: int
    parents_kind: int
    parents_width: int
    """W of parents [N, W]."""
    prefetch_sequences: int
    keep_in_l2: int
    norm_weight_kind: int
    norm_eps: int
    norm_sigmoid: int
    out_scales_given: int
    conv_key_channels: int
    conv_group: int
    """group_size, loaded again: one load for both uses takes more registers, and spills."""
    conv_bias_kind: int
    conv_silu: int
    trail_indices_kind: int


class FlushPointers(NamedTuple):
    """Addresses in the first of L layers, then strides between layers in bytes, 64-bit."""

    state: int  # [L, P, HV, V, K]
    buffer_u: int  # [L, B, C, HV, V]
    buffer_k: int  # [L, B, C, H, K]
    buffer_log_decay: int  # [L, B, C, HV], KDA [L, B, C, HV, K]
    num_accepted: int  # [N]
    path: int  # [N, W]
    state_indices: int  # [N]
    write_indices: int  # [N]
    buffer_indices: int  # [N]
    state_l: int
    buffer_u_l: int
    buffer_k_l: int
    buffer_log_decay_l: int


class FlushSizes(NamedTuple):
    """Sizes of a flush, as DecodeSizes are of a decode."""

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
    path_kind: int
    path_width: int
    """W of path [N, W]."""
    state_indices_kind: int
    write_indices_kind: int
    buffer_indices_kind: int
    prefetch_sequences: int
    keep_in_l2: int


# ---------------------------------------------------------------- short_conv


class ShortConvPointers(NamedTuple):
    q: int  # [N, T, H, K]
    k: int  # [N, T, H, K]
    v: int  # [N, T, HV / R, R, V]
    weight: int  # [C, 4], contiguous
    bias: int  # [C]
    windows: int  # [P, C, 3]
    cu_seqlens: int  # [N + 1]
    state_indices: int  # [N]
    has_initial_state: int  # [N]
    o: int  # [N, T, C]


class ShortConvSizes(NamedTuple):
    """Sizes of a short_conv, as DecodeSizes are of a decode."""

    N: int
    T: int
    total: int
    C: int
    """Channels of q, k and v together."""
    key_channels: int
    """Channels of q, or of k."""
    K: int
    V: int
    group_size: int
    """R: value heads next to each other in v."""
    channel_tiles: int
    chunk_slots: int
    null_index: int
    bias_kind: int
    cu_seqlens_kind: int
    state_indices_kind: int
