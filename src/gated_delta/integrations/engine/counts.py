"""What a step with drafts counts, whatever the device."""

from typing import NamedTuple

from torch import Tensor


class Counts(NamedTuple):
    """Tokens of sequences that have verified drafts, and block columns: [n] int32 each.

    boundary: accepted up to the end of the block, where they pass it; else 0. running_column: of
    the block that the step has run in. column: of the last accepted token's, boundary_column of the
    one that they pass. folded: of the row, the accepted ones too, to the last state; 0 if they stay
    in the row. folded_to_boundary: to the state at the block's end.
    """

    accepted: Tensor
    boundary: Tensor
    running_column: Tensor
    column: Tensor
    boundary_column: Tensor
    folded: Tensor
    folded_to_boundary: Tensor


class Places(NamedTuple):
    """What `flush` folds for n sequences of G block tables, by block table: [G n] int32 each.

    source: the slot that the step has run in. at_end: of the state at the end of the block that the
    drafts pass, 0 if they pass none; last: of the state after the accepted ones. folded,
    folded_to_boundary: as of Counts. row: of the buffer.
    """

    source: Tensor
    at_end: Tensor
    last: Tensor
    folded: Tensor
    folded_to_boundary: Tensor
    row: Tensor
