"""What a step with drafts counts, whatever the device."""

from typing import NamedTuple

from torch import Tensor


class Counts(NamedTuple):
    """Tokens of sequences that have verified drafts, and block columns: [n] int32 each.

    boundary: accepted up to the end of the block, where they pass it; else 0. column: of the last
    accepted token's block, boundary_column of the one that they pass. folded: of the row, the
    accepted ones too, to the last state; 0 if they stay in the row. folded_to_boundary: to the
    state at the block's end.
    """

    accepted: Tensor
    boundary: Tensor
    column: Tensor
    boundary_column: Tensor
    folded: Tensor
    folded_to_boundary: Tensor
