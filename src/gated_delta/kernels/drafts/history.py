"""verify with a buffer's row whose tokens the state lacks (device/history.py), and without one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from ..device import ptx
from ..device.history import History, Row, decayed
from ..device.history_layout import UNROLL
from ..device.recurrent import StateRows, load_index, nothing, shared_tensor
from .layout import Facts

FOLDED = 8  # V rows that a thread folds at once, if it has as many


class NoHistory:
    """The state lacks no tokens: the call's are the first of their row, padded with zeros."""

    unused = ("buffer_lens", "buffer_rows", "folds")

    prefetch = load = wait = stage = add_products = fold = nothing

    def row(self, args, coord, length):
        index = load_index(args, "buffer_indices", coord.n, n=coord.n)
        return Row(index, Int32(0), length, args.size.C)

    def active(self, draft, active):
        return active

    def stage_channel_decays(self, draft, i, past):
        return Float32(1)


class DraftHistory:
    """The row's tokens add to S k and S q; decode folds a row without room, verify skips it.

    kq: of the call's k and q in the shared memory; decays: KDA's part, which has their decays.
    """

    unused = ()

    def __init__(self, history: History, facts: Facts, kq: int, decays):
        self.history, self.state, self.rows = history, history.state, facts.rows
        self.kq, self.decays = kq, decays
        self.prefetch, self.row = history.prefetch, history.row
        self.stage_channel_decays = history.stage_channel_decays
        self.folded = min(FOLDED, facts.rows // self.state.warp_groups)
        rows = self.folded * self.state.warp_groups
        self.fold_rows = StateRows(facts.K, facts.state_dtype, rows)

    def active(self, draft, active):
        return active & ((draft.args.size.folds != 0) | (draft.row.end == draft.length))

    def load(self, draft, active):
        """Start the copies of k and u; load the log decays."""
        self.history.copy(draft, active)
        return self.history.load_log_decays(draft, Int32(0), active)

    def wait(self):
        """Wait for the thread's copies."""
        cute.arch.cp_async_wait_group(0)

    def kq_at(self, draft, t):
        """Addresses of k and q of the call's token t."""
        return [draft.shared + self.kq + (2 * t + kq) * self.state.padded_K for kq in range(2)]

    def stage(self, draft, past):
        """Write k_restored and the pairs."""
        history, later = self.history, None
        if not history.channel:
            later = history.stage_head_decays(draft, past)
        decays_at = draft.shared + self.decays.offset
        history.stage(draft, lambda t: self.kq_at(draft, t), decays_at, later)

    @cute.jit
    def add_products(self, draft, products_at):
        """Add the row's part to S k and S q of the lane's V row; GDN: decay the state's part.

        products_at: (t) -> S k and S q in shared memory.
        """
        coord, cta_rows, channel = draft.coord, self.history.cta_rows, self.history.channel
        cute.arch.sync_threads()
        v_row = coord.o_row - coord.v_tile * cta_rows
        own = Int32(select_(coord.stores_o, draft.length, Int32(0)))
        for t in cutlass.range(own, unroll=1):
            s = products_at(t)
            s_k, s_q = s[0], s[1]
            if cutlass.const_expr(not channel):
                decay = shared_tensor(self.history.product(draft), self.state.padded_K)[0]
                s_k, s_q = s_k * decay, s_q * decay
            for first in cutlass.range(0, draft.row.first, UNROLL, unroll=1):
                us = [self.history.u(draft, first + i)[v_row] for i in range(UNROLL)]
                for i in cutlass.range_constexpr(0, UNROLL, 2):
                    pairs = self.history.pairs(draft, t, first + i, 2).load()
                    for j in cutlass.range_constexpr(2):
                        s_k = cute.math.fma(pairs[2 * j], us[i + j], s_k)
                        s_q = cute.math.fma(pairs[2 * j + 1], us[i + j], s_q)
            s[0] = s_k
            s[1] = s_q

    # ------------------------------------------------------------ folding

    @cute.jit
    def fold(self, draft, slot, us):
        """Fold the row and the tokens into the state if the row cannot take them."""
        if draft.row.end < draft.length:
            self.stage_u(draft, us)
            cute.arch.sync_warp()
            rows = self.folded * self.state.warp_groups
            for part in cutlass.range(0, self.rows // rows, unroll=1):
                self.fold_part(draft, slot, part * rows)

    @cute.jit
    def stage_u(self, draft, us):
        """Write u of the call's tokens, of the lane's V row, behind the row's."""
        coord = draft.coord
        if coord.stores_o:
            for t in cutlass.range_constexpr(len(us)):
                if t < draft.length:
                    sU = self.history.u(draft, draft.row.first + t)
                    sU[coord.o_row - coord.v_tile * self.history.cta_rows] = us[t]

    @cute.jit
    def fold_part(self, draft, slot, part_row):
        """Fold the row and the call's tokens into some of the warp's rows of the state."""
        args, coord = draft.args, draft.coord
        first_row = coord.warp_row + part_row + coord.thread % 32 // self.state.lanes
        at = self.state.address(args, coord, slot, first_row)
        rows = self.fold_rows.load(at, coord, self.state.policy(args.size.keep_in_l2), True)
        product = self.state.load_shared(self.history.product(draft), coord)
        rFold = decayed(rows, product, self.state.dtype)
        self.history.fold_row(rFold, draft, first_row)
        for t in cutlass.range(0, draft.length, unroll=1):
            decay = self.decays.of_token(draft, t)
            for r in cutlass.range_constexpr(self.folded):
                for c in cutlass.range_constexpr(8):
                    rFold[c, r] = rFold[c, r] * decay[c]
            k = self.state.load_shared(self.kq_at(draft, t)[0], coord)
            self.history.fold_token(rFold, draft, first_row, draft.row.first + t, k)
        folded = [
            ptx.pack([rFold[c, r] for c in range(8)], self.state.dtype) for r in range(self.folded)
        ]
        self.fold_rows.store(folded, at, coord, True)
