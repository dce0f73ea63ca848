"""Segments of a sequence: the chunks of each, and windows.

A segment with a window starts from zeros, some chunks in front of its own, over which its head's
gates forget everything: M of those chunks counts as 0. docs/math.md, "Segments".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.arch import shuffle_sync_up
from cutlass.cutlass_dsl import select_

from ...device import ptx
from ...device.hopper import WARP
from ..layout import head_chunk, num_chunks
from . import grid
from .state import WARPGROUP_ROWS
from .tile_scheduler import Work

MAX_WINDOW, SHORT_WINDOW = 32, 4  # chunks of a window at most; where segments are shorter than this
MAX_M = 2.0**-120  # of a window's M, below which it counts as 0


class ScanCoord(NamedTuple):
    """A thread's place in a work tile of a scan by tiles."""

    work: Work
    v_row: Int32
    """First V row of the thread's warpgroup."""
    first_chunk: Int32
    end_chunk: Int32
    first_stored: Int32
    """The first chunk with outputs, behind the segment's window."""
    shared: Int32
    thread: Int32
    """Within its role."""
    group: Int32
    """MMA warpgroup; -1 for load and store warps."""


def segment_chunks(args, sequence):
    """Chunks of each of a sequence's segments but the last ones, which have the rest."""
    return (num_chunks(sequence.tokens) + args.size.segments - 1) // args.size.segments


def scan_coord(args, work, rows, shared, thread, group, per_segment=None):
    """The coord of a work tile's segment, without a window. rows: V rows of the CTA. per_segment:
    its chunks on a grid."""
    chunks = num_chunks(work.sequence.tokens)
    if per_segment is None:
        per_segment = segment_chunks(args, work.sequence)
    first = cutlass.min(work.segment * per_segment, chunks)
    end = cutlass.min(first + per_segment, chunks)
    v_row = work.row_tile * rows + cutlass.max(group, 0) * WARPGROUP_ROWS
    end = Int32(select_(work.state_index >= 0, end, first))
    return ScanCoord(work, v_row, first, end, first, shared, thread, group)


def add_window(args, coord):
    """The coord from its segment's window on."""
    return coord._replace(first_chunk=coord.first_chunk - window_chunks(args, coord))


def add_grid_window(args, coord):
    """The coord of a whole segment from the window in front of its end on, if there is one."""
    most = cutlass.min(args.size.grid_chunks, MAX_WINDOW)
    work, lane = coord.work, coord.thread % WARP
    window = chunks_that_forget(args, work.sequence, work.hv, lane, coord.end_chunk, most)
    first = Int32(select_(window > 0, coord.end_chunk - window, coord.first_chunk))
    return window > 0, coord._replace(first_chunk=first)


def has_window(coord):
    return coord.first_chunk < coord.first_stored


def window_chunks(args, coord):
    """Chunks in front of a segment over which its head's M is 0; 0 where those are too many.

    A warp, whose lanes have a chunk each. The first segment has no window, nor one without chunks.
    """
    work = coord.work
    can_start = (work.segment > 0) & (work.segment < args.size.segments)
    can_start = can_start & (coord.first_chunk < coord.end_chunk)
    most = cutlass.min(cutlass.max(segment_chunks(args, work.sequence), SHORT_WINDOW), MAX_WINDOW)
    most = Int32(select_(can_start, cutlass.min(most, coord.first_chunk), 0))
    lane = coord.thread % WARP
    return chunks_that_forget(args, work.sequence, work.hv, lane, coord.first_chunk, most)


def last_window_chunks(args, sequence, hv, lane):
    """The same at a sequence's end, for a summary."""
    chunks = num_chunks(sequence.tokens)
    most = cutlass.min(chunks, MAX_WINDOW)
    return chunks_that_forget(args, sequence, hv, lane, chunks, most)


def chunks_that_forget(args, sequence, hv, lane, end, most):
    """The fewest chunks in front of chunk `end`, at most so many, over which M is 0; 0: none."""
    # The last chunk before the segment first.
    slot = sequence.first_slot + end - 1 - lane
    at = args.ptr.transition_norms + head_chunk(args, slot, hv) * 4
    norm = ptx.select(lane < most, ptx.load(Float32, at, lane < most), Float32(1))
    for step in (1, 2, 4, 8, 16):
        nearer = shuffle_sync_up(norm, offset=step, mask_and_clamp=0)
        norm = norm * ptx.select(lane >= step, nearer, Float32(1))
    forgotten = cute.arch.vote_ballot_sync((norm <= Float32(MAX_M)) & (lane < most))
    return Int32(select_(forgotten != 0, Int32(ptx.lowest_bit(forgotten)) + 1, Int32(0)))


def is_last(args, work):
    if work.first_whole is not None:
        return grid.is_last(args, work)
    return work.segment == args.size.segments - 1


def in_place(args):
    """Whether final states overwrite initial ones: in a pool."""
    return (args.ptr.initial_state == args.ptr.final_state) & (args.ptr.final_state != 0)
