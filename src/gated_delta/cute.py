"""The CuTe backend's host side: from the tensors of a call to one launch. Needs no compiler, only compiled kernels (compile.py).

Whatever depends on shapes, strides and dtypes alone is worked out once per shape (a `...Launch`); a call adds the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from . import compile, dispatch, reference
from .dispatch import Route
from .kernels.arguments import ABSENT, BF16, FP16, FP32, DecodePointers, DecodeSizes, DecodeStrides
from .problem import MAX_DRAFT, Tokens, UnsupportedProblem

CHECK = os.environ.get("GATED_DELTA_CHECK") == "1"
"""Look at every index on the host before a launch, and raise as the reference backend does; costs a wait for the GPU."""

_data_ptr = Tensor.data_ptr
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)  # not in builds for the CPU

_stream = functools.cache(ctypes.c_void_p)  # a process has few

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
        out: Tensor | None,
    ):
        import tvm_ffi

        assert route.variant is not None
        assert route.schedule is not None
        arch = dispatch.arch_of(state.device)
        assert arch is not None
        q, k, v, g, beta, gate, scale, _, _, cu_seqlens = tokens
        self.index = state.device.index
        self.several_devices = torch.cuda.device_count() > 1
        self.function = compile.load(route.variant, arch)
        self.scale, self.bound = q.shape[-1] ** -0.5 if scale is None else scale, gate.bound
        self.update_state = update_state
        self.aligned = "unaligned_qk" not in route.problem.options
        packed = cu_seqlens is not None
        N, HV = tokens.num_sequences, v.shape[2]
        self.empty = N == 0
        o = torch.empty(v.shape, dtype=v.dtype, device="meta") if out is None else out

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
        strides = DecodeStrides(
            *rows(q, 3),
            *rows(k, 3),
            *rows(v, 3),
            *(rows(g, 4) if g.ndim == 4 else [*rows(g, 3), 0]),
            *rows(beta, 3),
            *rows(o, 4),
            *_bytes(gate.A_log, 1),
            *_bytes(gate.dt_bias, 2),
            *_bytes(state, 2),
            *_bytes(intermediate_states, 3),
            *_bytes(cu_seqlens, 1),
            *_bytes(state_indices, 2),
            *_bytes(write_indices, 1),
            *_bytes(num_accepted, 1),
        )
        if max(strides) >= 2**31:
            raise UnsupportedProblem(
                f"backend 'cute' cannot run {route.problem.label}; it needs", ("strides below 2 GiB, in every tensor",)
            )
        self.strides = tvm_ffi.convert(strides)
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

        given = (q, k, v, g, beta, state, gate.A_log, gate.dt_bias, cu_seqlens, state_indices, write_indices, num_accepted)
        present = [x is not None for x in (*given, intermediate_states, o)]
        assert len(present) == len(DecodePointers._fields)
        places = itertools.accumulate(present, initial=0)
        self.places = itemgetter(*(place if there else -1 for place, there in zip(places, present, strict=False)))
        self.own_output, self.dense_v = out is None, v.is_contiguous()

    def __call__(self, tensors: list[Tensor]) -> Tensor | None:
        """Launch for tensors like those described: those there are, in DecodePointers' order; returns o.

        None, and nothing is done, where these lie so that the call has to be described anew: out on an input, rows off a vector's
        boundary.
        """
        pointers = list(map(_data_ptr, tensors))
        out = tensors[-1]
        if self.own_output:
            v = tensors[2]
            out = torch.empty_like(v) if self.dense_v else v.new_empty(v.shape)
            pointers.append(out.data_ptr())
        elif pointers[-1] in pointers[:3] and out.numel():
            return None
        pointers.append(0)
        arguments = self.places(pointers)
        if (arguments[5] | arguments[12]) & 15 or ((arguments[0] | arguments[1]) & 15 and self.aligned):
            return None
        if CHECK:
            self.check(tensors)
        if self.empty:
            return out.zero_()
        stream = _stream(_raw_stream(self.index))
        if self.several_devices and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                self.function(arguments, self.scale, self.bound, self.strides, self.sizes, stream)
        else:
            self.function(arguments, self.scale, self.bound, self.strides, self.sizes, stream)
        return out

    def check(self, tensors: list[Tensor]) -> None:
        q, k, v, g, beta, state, _, _, cu_seqlens, reads, writes, accepted, steps, _ = self.places([*tensors, None, None])
        tokens = Tokens(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        reference.decode_rows(tokens, state, reads, writes, accepted, steps, self.update_state)


EARLY_HEADS = 1024
"""States (sequences times heads) up to which decode asks for its states early: about what the chip holds at once."""


def _bytes(x: Tensor | None, dims: int) -> list[int]:
    """The first `dims` strides in bytes; zeros for dimensions or tensors that are not there."""
    if x is None:
        return [0] * dims
    strides = [stride * x.element_size() for stride in x.stride()[:dims]]
    return strides + [0] * (dims - len(strides))


def _index_kind(x: Tensor | None) -> int:
    return 0 if x is None else x.element_size() // 4
