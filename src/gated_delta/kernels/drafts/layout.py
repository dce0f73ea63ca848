"""Shared memory of verify's CTAs, read by host and kernel. Needs no compiler.

Offsets and sizes are in 32-bit words. Every size is a multiple of four: regions are aligned.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..arguments import lanes_per_row
from ..device.history_layout import HistoryLayout

PAD = 16  # between tokens' S k and S q: 8 lanes' accesses to 2 tokens hit all banks once
ROW_GROUP = 16  # neighbouring rows of o per partial sum of squares, for the norm


class Facts(NamedTuple):
    """Compile-time constants of a variant of verify."""

    axis: str
    K: int
    V: int
    dtype: str
    g_dtype: str
    state_dtype: str
    gate: str
    qk_l2norm: bool
    aligned: bool
    token_tile: int
    rows: int
    """V rows of a warp."""
    threads: int
    mma_pairs: bool = False
    """Whether KDA's Akk and Aqk are tensor-core products."""
    norm: bool = False
    fp8: bool = False
    history: bool = False
    tree: bool = False
    conv: str = ""
    """The dtype of the weights of the convolution of q, k and v; empty without one."""
    conv_bias: bool = False


class Region(NamedTuple):
    """A region of a CTA's shared memory. words: its size, 0 where a variant has none."""

    name: str
    words: Callable[["Layout"], int]
    writer: str
    reader: str


REGIONS = (
    # Convolved q and k [token, 2, padded_K], fp32.
    Region("raw", lambda x: bool(x.facts.conv) * 2 * x.rows_of_K, "conv", "store_qk"),
    # k and q [token, 2, padded_K], fp32.
    Region("kq", lambda x: x.keeps_kq * 2 * x.rows_of_K, "store_qk", "pairs, history"),
    # KDA's decays, and b_t, the products of the decays up to t [token, padded_K each].
    Region("decays", lambda x: x.channel * x.rows_of_K, "decays", "pairs, history"),
    Region("cumulative", lambda x: x.channel * x.rows_of_K, "decays", "pairs"),
    # What `products`, if it overlies the regions above, needs beyond them.
    Region("overhang", lambda x: x.overlies * max(0, x.products - 4 * x.rows_of_K), "", ""),
    # k b_t and q b_t (GDN: k and q), split in two, in mma.sync's order; with mma_pairs k / b_t
    # [high or low part, m_tile, k_block, step, lane, 4 or 2].
    Region("kq_operand", lambda x: x.operand_blocks * 4, "store_qk, pairs", "products"),
    Region("k_over_b", lambda x: x.facts.mma_pairs * x.operand_blocks * 2, "pairs", "products"),
    # S k and S q of each warp's rows, interleaved [warp, token, product_words]: with mma_pairs and
    # without history from offset 0 on, over the tokens, which the mainloop no longer needs.
    Region("products", lambda x: (not x.overlies) * x.products, "products", "substitute"),
    # Akk and Aqk [token, 2, token]: each warp's copy of tensor cores, the CTA's of CUDA cores.
    Region("warp_pairs", lambda x: x.mma * x.warps * x.pair_words, "products", "substitute"),
    Region("cta_pairs", lambda x: x.channel * x.pair_words, "pairs", "substitute"),
    # GDN: the products of the decays behind token i up to t [t, i].
    Region("paths", lambda x: (not x.channel) * x.tokens * x.pair_row, "decays", "products"),
    # beta and GDN's b_t [token, 2].
    Region("scalars", lambda x: 2 * x.tokens, "decays", "substitute"),
    # Sums of squares of o over ROW_GROUP rows [token, square_words].
    Region("squares", lambda x: x.facts.norm * x.tokens * x.square_words, "norm", "norm"),
    # Each warp's largest normalised output [token, square_words].
    Region("maxima", lambda x: x.facts.fp8 * x.tokens * x.square_words, "norm", "norm"),
)
"""Regions in their order; those of a buffer's row (HistoryLayout) lie behind them."""

Offsets: Any = NamedTuple("Offsets", [(region.name, int) for region in REGIONS])


class Layout:
    """Dims of a variant's CTA, and the offset `at` of each region by name; `words` of all."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.channel, self.tokens = facts.axis == "channel", facts.token_tile
        self.mma = facts.mma_pairs or not self.channel  # Akk and Aqk on the tensor cores
        self.keeps_kq = self.channel or facts.history
        self.padded_K, self.warps = 8 * lanes_per_row(facts.K), facts.threads // 32
        self.rows_of_K = self.tokens * self.padded_K
        self.cta_rows = facts.rows * self.warps  # V rows of a CTA
        # A k_block is 64 bytes of a state's row: 16 bytes per lane of a quad, two mma.sync steps.
        self.k_blocks = -(-facts.K * (4 if facts.state_dtype == "fp32" else 2) // 64)
        # An m_tile is 16 rows of the kq operand: k of eight tokens, then q of the same eight.
        self.m_tiles = -(-self.tokens // 8)
        self.operand_blocks = 2 * self.m_tiles * self.k_blocks * 64
        self.product_words = 2 * facts.rows + PAD
        self.products = self.warps * self.tokens * self.product_words
        self.overlies = facts.mma_pairs and not facts.history
        self.pair_row = max(self.tokens, 4)
        self.pair_words = 2 * self.pair_row * self.pair_row
        self.square_words = -(-facts.V // ROW_GROUP // 4) * 4
        *offsets, self.words = itertools.accumulate((x.words(self) for x in REGIONS), initial=0)
        self.at = Offsets(*offsets)
        if self.overlies:
            self.at = self.at._replace(products=0)
        self.history = HistoryLayout(self.channel, self.padded_K, self.tokens, self.cta_rows)

    def shared_words(self, C: Any) -> Any:
        """Words of the CTA, with a buffer of C tokens."""
        return self.words + self.history.words(C) if self.facts.history else self.words
