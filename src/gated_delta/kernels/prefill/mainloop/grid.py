"""Segments on a grid: of a fixed number L of tokens, counted from a sequence's start in the call.

A sequence has whole segments and, behind them, the rest of its tokens. The state behind a whole
segment follows from the state in front of it and from its tokens alone. So bits do not depend on
where a prompt is cut, if at ends of segments. docs/math.md, "Segments".

Whole segments of all sequences have numbers. Token p L of packed tokens lies in the segment with
number p: no two whole segments start within L tokens.
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
    """The scan's first slot of a sequence, which has at least one."""
    tokens = args.size.scan_chunks * CHUNK
    dense = n * ((args.size.T + tokens - 1) // tokens)
    return Int32(select_(args.size.cu_seqlens_kind == 0, dense, start // tokens + n))


def first_whole(args, n, start):
    """Number of a sequence's first whole segment, if it has one."""
    tokens = segment_tokens(args)
    packed = (start + tokens - 1) // tokens
    return Int32(select_(args.size.cu_seqlens_kind == 0, n * (args.size.T // tokens), packed))


def work_of(args, number, row_tiles, lane, first):
    """A work tile by its number. row_tiles: of a head. first: `first_slot`, for the scan, or
    `first_whole`: a whole segment, behind the sequence's last one none."""
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


def is_last(args, work):
    """Whether a work tile of the scan ends its sequence."""
    tokens = args.size.scan_chunks * CHUNK
    slots = (active_tokens(work) + tokens - 1) // tokens
    return work.segment == slots - Int32(slots > 0)


def is_needed(args, work, chunk):
    """Whether the state in front of a chunk, behind a segment, is: it is read there, or stored."""
    stored = (args.ptr.final_state != 0) | (args.size.checkpoints_per_sequence > 0)
    before, tokens = chunk * CHUNK, active_tokens(work)
    return (before < tokens) | ((before == tokens) & stored)


def end_state_at(args, number):
    """Address of the state behind a whole segment."""
    return args.ptr.segment_states + number * STATE_BYTES


def state_at(args, work, chunk):
    """Address of the state in front of a chunk, a segment's first; of the first one the copy."""
    segments = chunk // args.size.grid_chunks
    behind = segment_of(args, work._replace(segment=segments - 1))
    first = segment_of(args, work._replace(segment=Int32(0)))
    at = initial_state_at(args, first)
    return Int64(select_(segments > 0, end_state_at(args, behind), at))


def initial_state_at(args, number):
    """Address of the copy of a call's initial state, in front of a first whole segment."""
    return end_state_at(args, number + Int64(args.size.whole_segments) * Int64(args.size.HV))


def flag_at(args, number):
    """Address of a whole segment's flag: nothing is passed over it."""
    states = 2 * Int64(args.size.whole_segments) * Int64(args.size.HV)
    return args.ptr.segment_states + states * STATE_BYTES + number * 4
