"""Shared memory of a buffer's row, in 32-bit words, read by host and kernel. Needs no compiler."""

from typing import Any, NamedTuple

U_PAD = 4  # between tokens' u: neighbouring lanes of decode read u of neighbouring tokens
BLOCK = 16  # a row's tokens whose log decays are in flight, and whose pairs are multiplied at once
UNROLL = 4  # a row's tokens whose u are multiplied at once


class HistoryLayout(NamedTuple):
    """A buffer row of up to C tokens, and the call's, in a CTA's shared memory.

    The product of all decays [padded_K]; k, in its place later k_restored [C, padded_K]; KDA: the
    product of the decays behind each token [C, padded_K]; the pairs k_restored . k_t and
    k_restored . q_t [t, C, 2] (decode of KDA: k_t decay and q_t decay); u of the row's tokens and,
    to fold in verify, of the call's [C + t, u_words]. C is rounded up to BLOCK but in u.
    """

    channel: bool
    padded_K: int
    tokens: int
    cta_rows: int

    @property
    def u_words(self) -> int:
        return self.cta_rows + U_PAD

    # at: address of the first word, or 0 for an offset.

    def k(self, at: Any, token: Any) -> Any:
        return at + self.padded_K + token * self.padded_K

    def later(self, at: Any, C: Any, token: Any) -> Any:
        return self.k(at, round_up(C) + token)

    def pairs(self, at: Any, C: Any, t: Any, token: Any) -> Any:
        rounded = round_up(C)
        return self.k(at, rounded * (1 + self.channel)) + 2 * (t * rounded + token)

    def u(self, at: Any, C: Any, token: Any) -> Any:
        rounded = round_up(C)
        pairs_at = self.k(at, rounded * (1 + self.channel))
        return pairs_at + 2 * self.tokens * rounded + token * self.u_words

    def words(self, C: Any) -> Any:
        return self.u(0, C, C + self.tokens + UNROLL)


def round_up(tokens: Any) -> Any:
    """Round up to a multiple of BLOCK."""
    return (tokens + BLOCK - 1) // BLOCK * BLOCK
