"""Shared memory of verify's CTAs, read by host and kernel. Needs no compiler.

Offsets and sizes are in 32-bit words. Every size is a multiple of four: regions are 16-byte aligned.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arguments import lanes_per_row

PAD = 16  # between tokens' S k and S q: 8 lanes' accesses to 2 tokens hit all banks once
ROW_GROUP = 16  # neighbouring rows of o per partial sum of squares, for the norm
BLOCK = (
    16  # a buffer row's tokens whose log decays are in flight, whose pairs are multiplied at once
)
UNROLL = 4  # a row's tokens whose u are multiplied at once
U_PAD = 4  # between tokens' u: neighbouring lanes of decode read u of neighbouring tokens


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
    history: bool = False
    tree: bool = False

    @property
    def channel(self) -> bool:
        return self.axis == "channel"

    @property
    def padded_K(self) -> int:
        return 8 * lanes_per_row(self.K)

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def tile(self) -> int:
        """V rows of a CTA."""
        return self.rows * self.warps

    @property
    def k_blocks(self) -> int:
        """Parts of 64 bytes of a state's row: 16 bytes per lane of a quad, two mma.sync steps."""
        return -(-self.K * (4 if self.state_dtype == "fp32" else 2) // 64)

    @property
    def m_tiles(self) -> int:
        """Parts of 16 rows of the kq operand: k of eight tokens, then q of the same eight."""
        return -(-self.token_tile // 8)

    @property
    def pair_row(self) -> int:
        """Words of a token's row of Akk or Aqk."""
        return max(self.token_tile, 4)

    @property
    def square_words(self) -> int:
        """Words of a token's partial sums of squares."""
        return -(-self.V // ROW_GROUP // 4) * 4

    @property
    def product_words(self) -> int:
        """Words of a token's S k and S q, interleaved, of a warp's rows."""
        return 2 * self.rows + PAD


class Region(NamedTuple):
    """A region of a CTA's shared memory. words: its size, 0 where a variant has none."""

    name: str
    words: Callable[[Facts], int]
    writer: str
    reader: str


def _operand(f: Facts, lane_words: int) -> int:
    """Two parts, high and low: [m_tile, k_block, step of mma.sync, lane, lane_words]."""
    return 2 * f.m_tiles * f.k_blocks * 64 * lane_words


def _pairs(f: Facts) -> int:
    return 2 * f.pair_row * f.pair_row


REGIONS = (
    # k and q [token, 2, padded_K], fp32.
    Region(
        "kq",
        lambda f: 2 * f.token_tile * f.padded_K * (f.channel or f.history),
        "stage_qk",
        "pairs, history",
    ),
    # KDA's decays, and b_t, the products of the decays up to t [token, padded_K each].
    Region("decays", lambda f: f.channel * f.token_tile * f.padded_K, "decays", "pairs, history"),
    Region("cumulative", lambda f: f.channel * f.token_tile * f.padded_K, "decays", "pairs"),
    # S k and S q of each warp's rows [warp, token, product_words]; with mma_pairs and without history
    # they reuse the memory of the regions above.
    Region(
        "products", lambda f: f.warps * f.token_tile * f.product_words, "products", "substitute"
    ),
    # k b_t and q b_t (GDN: k and q), split in two, in mma.sync's order; with mma_pairs k / b_t.
    Region("kq_operand", lambda f: _operand(f, 4), "stage_qk, pairs", "products"),
    Region("k_over_b", lambda f: f.mma_pairs * _operand(f, 2), "pairs", "products"),
    # Akk and Aqk [token, 2, token]: each warp's copy of tensor cores, the CTA's of CUDA cores.
    Region(
        "warp_pairs",
        lambda f: f.warps * _pairs(f) * (f.mma_pairs or not f.channel),
        "products",
        "substitute",
    ),
    Region("cta_pairs", lambda f: f.channel * _pairs(f), "pairs", "substitute"),
    # GDN: the products of the decays behind token i up to t [t, i].
    Region("paths", lambda f: (not f.channel) * f.token_tile * f.pair_row, "decays", "products"),
    # beta and GDN's b_t [token, 2].
    Region("scalars", lambda f: 2 * f.token_tile, "decays", "substitute"),
    # Sums of squares of o over ROW_GROUP rows [token, square_words].
    Region("squares", lambda f: f.norm * f.token_tile * f.square_words, "norm", "norm"),
)
"""Regions in their order; a buffer row's (History) lie behind them."""


def lay_out(facts: Facts) -> tuple[int, Any]:
    """Words of all regions; their offsets, by name."""
    offsets, end = {}, 0
    reuses = facts.mma_pairs and not facts.history
    for region in REGIONS:
        at = 0 if region.name == "products" and reuses else end
        offsets[region.name] = at
        end = max(end, at + region.words(facts))
    return end, NamedTuple("Offsets", [(name, int) for name in offsets])(**offsets)


class History(NamedTuple):
    """A buffer row of up to C tokens, and the call's, in a CTA's shared memory.

    The product of all decays [padded_K]; k, in its place later k_restored [C, padded_K]; KDA: the
    product of the decays behind each token [C, padded_K]; the pairs k_restored . k_t and
    k_restored . q_t [t, C, 2] (decode of KDA: k_t decay and q_t decay); u of the row's tokens and,
    to fold in verify, of the call's [C + t, u_words]. C is rounded up to BLOCK but in u.
    """

    channel: bool
    padded_K: int
    token_tile: int
    tile: int

    block = BLOCK
    unroll = UNROLL

    @property
    def u_words(self) -> int:
        return self.tile + U_PAD

    @staticmethod
    def rounded(tokens: Any) -> Any:
        """Rounded up to a multiple of BLOCK."""
        return (tokens + BLOCK - 1) // BLOCK * BLOCK

    # at: the first word's address.

    def k(self, at: Any, token: Any) -> Any:
        return at + self.padded_K + token * self.padded_K

    def later(self, at: Any, C: Any, token: Any) -> Any:
        return self.k(at, self.rounded(C) + token)

    def pairs(self, at: Any, C: Any, t: Any, token: Any) -> Any:
        rounded = self.rounded(C)
        return self.k(at, rounded * (1 + self.channel)) + 2 * (t * rounded + token)

    def u(self, at: Any, C: Any, token: Any) -> Any:
        rounded = self.rounded(C)
        pairs_at = self.k(at, rounded * (1 + self.channel))
        return pairs_at + 2 * self.token_tile * rounded + token * self.u_words

    def words(self, C: Any) -> Any:
        return self.u(0, C, C + self.token_tile + UNROLL)


def history_of(facts: Facts) -> History:
    return History(facts.channel, facts.padded_K, facts.token_tile, facts.tile)


def shared_bytes(facts: Facts, C: int) -> int:
    """Bytes of a CTA's shared memory, with a buffer of C tokens."""
    words, _ = lay_out(facts)
    return 4 * (words + facts.history * history_of(facts).words(C))
