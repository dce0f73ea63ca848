"""The CuTe backend's host side: from the tensors of a call to one launch. Needs no compiler, only compiled kernels (compile.py).

Whatever depends on shapes, strides and dtypes alone is worked out once per shape (a `...Launch`); a call adds the addresses.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from . import compile, reference
from .dispatch import Route
from .kernels.arguments import ABSENT, BF16, FP16, FP32, DecodePointers, DecodeSizes, DecodeStrides
from .problem import MAX_DRAFT, Tokens

CHECK = os.environ.get("GATED_DELTA_CHECK") == "1"
"""Look at every index on the host before a launch, and raise as the reference backend does; costs a wait for the GPU."""

KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


class DecodeLaunch:
    """A decode of given shapes and strides."""

    def __init__(
        self,
        route: Route,
        tokens: Tokens,
        *,
        state: Tensor,
        state_indices: Tensor | None,
        write_indices: Tensor | None,
        num_accepted: Tensor | None,
        intermediate_states: Tensor | None,
        update_state: bool,
        out: Tensor,
    ):
        import tvm_ffi

        assert route.variant is not None
        assert route.schedule is not None
        device = state.device
        self.index = device.index
        self.function = compile.load(route.variant, compile.ARCHS[torch.cuda.get_device_capability(device)])
        self.default_scale = tokens.q.shape[-1] ** -0.5
        q, k, v, g, beta, gate, cu_seqlens = *tokens[:6], tokens.cu_seqlens
        packed = cu_seqlens is not None
        N, HV = tokens.num_sequences, v.shape[2]

        def rows(x: Tensor, dims: int) -> list[int]:
            """Strides of sequence, token, head, ...; a packed sequence starts where its first token is."""
            strides = _bytes(x, dims)
            return [0, *strides[1:]] if packed else strides

        slots = 0
        longest = MAX_DRAFT if packed else q.shape[1]
        if intermediate_states is not None:
            longest = min(longest, intermediate_states.shape[1])
        if state_indices is not None and state_indices.ndim == 2:
            slots = state_indices.shape[1]
            longest = min(longest, slots)
        self.strides = tvm_ffi.convert(
            DecodeStrides(
                *rows(q, 3),
                *rows(k, 3),
                *rows(v, 3),
                *(rows(g, 4) if g.ndim == 4 else [*rows(g, 3), 0]),
                *rows(beta, 3),
                *rows(out, 4),
                *_bytes(gate.A_log, 1),
                *_bytes(gate.dt_bias, 2),
                *_bytes(state, 2),
                *_bytes(intermediate_states, 3),
                *_bytes(cu_seqlens, 1),
                *_bytes(state_indices, 2),
                *_bytes(write_indices, 1),
                *_bytes(num_accepted, 1),
            )
        )
        self.sizes = tvm_ffi.convert(
            DecodeSizes(
                N=N,
                T=longest,
                total=q.shape[1],
                HV=HV,
                q_heads=-(-(2**30) // (HV // q.shape[2])),
                P=state.shape[0],
                slots=slots,
                update=int(update_state),
                beta_kind=KINDS[beta.dtype],
                dt_bias_kind=ABSENT if gate.dt_bias is None else KINDS[gate.dt_bias.dtype],
                cu_seqlens_kind=_index_kind(cu_seqlens),
                reads_kind=_index_kind(state_indices),
                writes_kind=_index_kind(write_indices),
                accepted_kind=_index_kind(num_accepted),
                early=N if N * HV <= EARLY_HEADS else 0,
                keep_lines=int(route.schedule.keep_lines),
            )
        )
        self.empty = N == 0

    def __call__(
        self,
        tokens: Tokens,
        *,
        state: Tensor,
        state_indices: Tensor | None,
        write_indices: Tensor | None,
        num_accepted: Tensor | None,
        intermediate_states: Tensor | None,
        update_state: bool,
        out: Tensor,
    ) -> None:
        q, k, v, g, beta, gate, scale, _, _, cu_seqlens = tokens
        if CHECK:
            reference.decode_rows(tokens, state, state_indices, write_indices, num_accepted, intermediate_states, update_state)
        if self.empty:
            out.zero_()
            return
        g_address = g.data_ptr()
        pointers = DecodePointers(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            g_address,
            beta.data_ptr(),
            out.data_ptr(),
            g_address if gate.A_log is None else gate.A_log.data_ptr(),
            g_address if gate.dt_bias is None else gate.dt_bias.data_ptr(),
            state.data_ptr(),
            0 if intermediate_states is None else intermediate_states.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            0 if state_indices is None else state_indices.data_ptr(),
            0 if write_indices is None else write_indices.data_ptr(),
            0 if num_accepted is None else num_accepted.data_ptr(),
        )
        self.launch(pointers, self.default_scale if scale is None else scale, gate.bound)

    def launch(self, pointers: DecodePointers, scale: float, bound: float) -> None:
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.function(pointers, scale, bound, self.strides, self.sizes, _stream(self.index))
        else:
            self.function(pointers, scale, bound, self.strides, self.sizes, _stream(self.index))


EARLY_HEADS = 1024
"""States (sequences times heads) up to which decode asks for its states early: about what the chip holds at once."""


def _stream(index: int) -> Any:
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))


def _bytes(x: Tensor | None, dims: int) -> list[int]:
    """The first `dims` strides in bytes; zeros for dimensions or tensors that are not there."""
    if x is None:
        return [0] * dims
    strides = [stride * x.element_size() for stride in x.stride()[:dims]]
    return strides + [0] * (dims - len(strides))


def _index_kind(x: Tensor | None) -> int:
    return 0 if x is None else x.element_size() // 4


LAUNCHES = {"decode": DecodeLaunch}
