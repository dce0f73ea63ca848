"""Segments on a grid: of a fixed number of tokens, counted from a sequence's start in the call.

A sequence has whole segments and, behind them, one with the rest of its tokens, perhaps none. What
the state is behind a whole segment follows from the state in front of it and from its tokens alone.
So bits do not depend on where a prompt is cut, if at ends of segments. docs/math.md, "Segments".

Whole segments of all sequences have numbers. Number p belongs to the sequence with packed token
p L, to the segment that this token lies in: whole segments have at least L tokens between starts.
"""

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_

from ..arguments import CHUNK, STATE_BYTES
from ..layout import find_sequence, load_sequence
from .state import segment_of
from .tile_scheduler import Work, active_tokens, load_slot


def segment_tokens(args):
    return args.size.grid_chunks * CHUNK


def first_slot(args, n, start):
    """The scan's slot of a sequence's first segment: whole or not, it has at least one."""
    dense = n * (args.size.T // segment_tokens(args) + 1)
    packed = start // segment_tokens(args) + n
    return Int32(select_(args.size.cu_seqlens_kind == 0, dense, packed))


def first_whole(args, n, start):
    """Number of a sequence's first whole segment, if it has one."""
    dense = n * (args.size.T // segment_tokens(args))
    packed = (start + segment_tokens(args) - 1) // segment_tokens(args)
    return Int32(select_(args.size.cu_seqlens_kind == 0, dense, packed))


def scan_work(args, number, row_tiles, lane):
    """The scan's work tile by its number. row_tiles: of a head."""
    return work_of(args, number, row_tiles, lane, first_slot)


def whole_work(args, number, row_tiles, lane):
    """A work tile of a whole segment by its number; behind a sequence's last one it has none."""
    return work_of(args, number, row_tiles, lane, first_whole)


def work_of(args, number, row_tiles, lane, first):
    size = args.size
    row_tile, hv = number % row_tiles, number // row_tiles % size.HV
    slot = number // (row_tiles * size.HV)
    sequence = load_sequence(args, find_sequence(args, slot, lane, first))
    n, start = sequence.n, sequence.start
    segment = slot - first(args, n, start)
    whole = first_whole(args, n, start)
    return Work(sequence, load_slot(args, n), hv, row_tile, segment, Int32(0), whole)


def whole_segments(args, work):
    """Whole segments of a work tile's sequence; an inactive one has none."""
    return active_tokens(work) // segment_tokens(args)


def ends_in_state(args, work):
    """Whether the state behind a whole segment is needed: a token reads it, or it is stored."""
    stored = (args.ptr.final_state != 0) | (args.size.checkpoints_per_sequence > 0)
    behind = (work.segment + 1) * segment_tokens(args)
    tokens = active_tokens(work)
    return (behind < tokens) | ((behind == tokens) & stored)


def previous(work):
    """The work tile of the segment before."""
    return work._replace(segment=work.segment - 1)


def end_state_at(args, number):
    """Address of the state behind a whole segment."""
    return args.ptr.segment_states + number * STATE_BYTES


def start_state_at(args, work):
    """Address of the state in front of a segment; of the first one the copy."""
    at = end_state_at(args, segment_of(args, previous(work)))
    return Int64(select_(work.segment > 0, at, initial_state_at(args, segment_of(args, work))))


def initial_state_at(args, number):
    """Address of the copy of a call's initial state, in front of a first whole segment."""
    return end_state_at(args, number + Int64(args.size.whole_segments) * Int64(args.size.HV))


def flag_at(args, number):
    """Address of a whole segment's flag: nothing is passed over it."""
    states = 2 * Int64(args.size.whole_segments) * Int64(args.size.HV)
    return args.ptr.segment_states + states * STATE_BYTES + number * 4
