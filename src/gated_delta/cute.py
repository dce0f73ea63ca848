"""The CuTe backend's host side: from the tensors of a call to one launch. Needs no compiler, only compiled kernels (compile.py).

Whatever depends on shapes, strides and dtypes alone is worked out once per shape (a `...Launch`); a call adds the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import compile, dispatch, reference
from .dispatch import Route
from .kernels.arguments import (
    ABSENT,
    BF16,
    CHUNK,
    COLUMNS,
    FP16,
    FP32,
    IMAGE,
    TRIANGLE,
    DecodeSizes,
    DecodeStrides,
    FlushSizes,
    FlushStrides,
    PrefillSizes,
    PrefillStrides,
    VerifySizes,
    VerifyStrides,
)
from .memory import Apart
from .problem import MAX_DRAFT, KVBuffer, Tokens, UnsupportedProblem, flush_sequences

CHECK = os.environ.get("GATED_DELTA_CHECK") == "1"
"""Look at every index on the host before a launch, and raise as the reference backend does; costs a wait for the GPU."""

_data_ptr = Tensor.data_ptr
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)  # not in builds for the CPU

_stream = functools.cache(ctypes.c_void_p)  # a process has few

KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


class Launch:
    """What launches have in common. given: the tensors whose addresses the kernel takes, in its order; None for an absent one.

    Calling one returns None, and does nothing, where the tensors' addresses ask for another description of the call: their memory
    may overlap, or rows start off a vector's boundary.
    """

    apart: Apart

    def __init__(self, route: Route, device: torch.device, given: Sequence[Tensor | None]):
        arch = dispatch.arch_of(device)
        assert arch is not None
        self.index = device.index
        self.several_devices = torch.cuda.device_count() > 1
        self.functions = [compile.load(variant, arch) for variant in route.variants]
        present = [x is not None for x in given]
        places = itertools.accumulate(present, initial=0)
        self.places = itemgetter(*(place if there else -1 for place, there in zip(places, present, strict=False)))
        """From the tensors there are, or their addresses, and what stands for an absent one behind them, to all there may be."""

    def launch(self, *arguments: Any) -> None:
        stream = _stream(_raw_stream(self.index))
        if self.several_devices and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                for function in self.functions:
                    function(*arguments, stream)
        else:
            for function in self.functions:
                function(*arguments, stream)


class TokensLaunch(Launch):
    """What decode and verify share: tokens in, o out."""

    strides: Any
    sizes: Any

    def __init__(self, route: Route, tokens: Tokens, given: Sequence[Tensor | None], out: Tensor | None):
        # There is always an o behind what is given: the caller's, or a call's own that is like v.
        super().__init__(route, tokens.q.device, (*given, tokens.v if out is None else out))
        self.scale = _scale(tokens)
        self.bound = tokens.gate.bound
        self.aligned = "unaligned_qk" not in route.problem.options
        self.empty = tokens.num_sequences == 0
        self.own_output, self.dense_v = out is None, tokens.v.is_contiguous()

    def __call__(self, tensors: list[Tensor]) -> Tensor | None:
        """Launch for tensors like those described: those there are, in the order of the addresses; returns o."""
        pointers, apart = list(map(_data_ptr, tensors)), self.apart
        if apart.known.get(pointers[apart.key]) != pointers and not apart(pointers):
            return None
        out = tensors[-1]
        if self.own_output:
            v = tensors[2]
            out = torch.empty_like(v) if self.dense_v else v.new_empty(v.shape)
            pointers.append(out.data_ptr())
        pointers.append(0)
        arguments = self.places(pointers)
        if self.unreachable(arguments) or ((arguments[0] | arguments[1]) & 15 and self.aligned):
            return None
        if CHECK:
            self.check(self.places([*tensors, None, None]))
        if self.empty:
            return out.zero_()
        self.launch(arguments, self.scale, self.bound, self.strides, self.sizes)
        return out

    def unreachable(self, arguments: tuple[int, ...]) -> bool:
        """Whether a tensor starts off a vector's boundary that must not."""
        raise NotImplementedError

    def check(self, given: tuple[Any, ...]) -> None:
        """Raise for an index that nobody can serve, given all the tensors there may be."""
        raise NotImplementedError


class DecodeLaunch(TokensLaunch):
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
        q, k, v, g, beta, gate, _, _, _, cu_seqlens = tokens
        given = (q, k, v, g, beta, state, gate.A_log, gate.dt_bias, cu_seqlens, state_indices, write_indices, num_accepted)
        super().__init__(route, tokens, (*given, intermediate_states), out)
        self.update_state = update_state
        slots = 0
        longest = MAX_DRAFT if cu_seqlens is not None else q.shape[1]
        if intermediate_states is not None:
            longest = min(longest, intermediate_states.shape[1])
        if state_indices is not None and state_indices.ndim == 2:
            slots = state_indices.shape[1]
            longest = min(longest, slots)
        self.strides = _short(
            route,
            DecodeStrides(
                **_token_strides(tokens, out),
                **_named("state", "ph", _bytes(state, 2)),
                **_named("steps", "nth", _bytes(intermediate_states, 3)),
                **_named("reads", "nt", _bytes(state_indices, 2)),
                **_named("writes", "n", _bytes(write_indices, 1)),
                **_named("accepted", "n", _bytes(num_accepted, 1)),
            ),
        )
        self.sizes = _ready(
            DecodeSizes(
                **_token_sizes(route, tokens, state),
                T=longest,
                slots=slots,
                update=int(update_state),
                reads_kind=_index_kind(state_indices),
                writes_kind=_index_kind(write_indices),
                accepted_kind=_index_kind(num_accepted),
            )
        )

    def unreachable(self, arguments: tuple[int, ...]) -> bool:
        return (arguments[5] | arguments[12]) & 15 != 0

    def check(self, given: tuple[Any, ...]) -> None:
        q, k, v, g, beta, state, _, _, cu_seqlens, reads, writes, accepted, steps, _ = given
        tokens = Tokens(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        reference.decode_rows(tokens, state, reads, writes, accepted, steps, self.update_state)


class VerifyLaunch(TokensLaunch):
    """A verify of given shapes and strides."""

    def __init__(
        self,
        route: Route,
        tokens: Tokens,
        *,
        state: Tensor,
        state_indices: Tensor | None,
        buffer: KVBuffer,
        buffer_indices: Tensor | None,
        out: Tensor | None,
    ):
        q, k, v, g, beta, gate, _, _, _, cu_seqlens = tokens
        given = (q, k, v, g, beta, state, gate.A_log, gate.dt_bias, cu_seqlens, state_indices, buffer_indices)
        super().__init__(route, tokens, (*given, buffer.u, buffer.k, buffer.log_decay), out)
        longest = route.problem.T
        assert longest is not None
        self.strides = _short(
            route,
            VerifyStrides(
                **_token_strides(tokens, out),
                **_named("state", "ph", _bytes(state, 2)),
                **_named("u", "rth", _bytes(buffer.u, 3)),
                **_named("kept_k", "rth", _bytes(buffer.k, 3)),
                **_named("log_decay", "rth", _bytes(buffer.log_decay, 3)),
                **_named("reads", "n", _bytes(state_indices, 1)),
                **_named("rows", "n", _bytes(buffer_indices, 1)),
            ),
        )
        self.sizes = _ready(
            VerifySizes(
                **_token_sizes(route, tokens, state),
                T=longest,
                group=v.shape[2] // q.shape[2],
                C=buffer.u.shape[1],
                beta_logits=int(tokens.beta_logits),
                reads_kind=_index_kind(state_indices),
                rows_kind=_index_kind(buffer_indices),
            )
        )

    def unreachable(self, arguments: tuple[int, ...]) -> bool:
        return (arguments[5] | arguments[12]) & 15 != 0

    def check(self, given: tuple[Any, ...]) -> None:
        q, k, v, g, beta, state, _, _, cu_seqlens, reads, rows, u, kept_k, log_decay, _ = given
        tokens = Tokens(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        reference.verify_rows(tokens, state, reads, KVBuffer(u, kept_k, log_decay), rows)


class FlushLaunch(Launch):
    """A flush of given shapes and strides."""

    def __init__(
        self,
        route: Route,
        *,
        state: Tensor,
        buffer: KVBuffer,
        num_accepted: int | Tensor,
        state_indices: Tensor | None,
        write_indices: Tensor | None,
        buffer_indices: Tensor | None,
    ):
        accepted = num_accepted if isinstance(num_accepted, Tensor) else None
        u, k, log_decay = buffer.u, buffer.k, buffer.log_decay
        super().__init__(route, state.device, (state, u, k, log_decay, accepted, state_indices, write_indices, buffer_indices))
        assert isinstance(route.schedule, dispatch.Schedule)
        self.count = None if isinstance(num_accepted, Tensor) else int(num_accepted)
        N = flush_sequences(state_indices, write_indices, buffer_indices, num_accepted)
        layers, HV, C = state.shape[0] if state.ndim == 5 else 1, u.shape[-2], u.shape[-3]
        self.layer_strides = tuple(_bytes(x, 1)[0] if state.ndim == 5 else 0 for x in (state, u, k, log_decay))
        first = [x[0] if state.ndim == 5 else x for x in (state, u, k, log_decay)] if layers else [state, u, k, log_decay]
        self.strides = _short(
            route,
            FlushStrides(
                **_named("state", "ph", _bytes(first[0], 2)),
                **_named("u", "rth", _bytes(first[1], 3)),
                **_named("k", "rth", _bytes(first[2], 3)),
                **_named("log_decay", "rthc", _bytes(first[3], 4)),
                **_named("accepted", "n", _bytes(accepted, 1)),
                **_named("reads", "n", _bytes(state_indices, 1)),
                **_named("writes", "n", _bytes(write_indices, 1)),
                **_named("rows", "n", _bytes(buffer_indices, 1)),
            ),
        )
        self.empty = N * layers == 0
        self.sizes = _ready(
            FlushSizes(
                layers=layers,
                N=N,
                HV=HV,
                k_heads=_head_factor(HV, k.shape[-2]),
                P=state.shape[-4],
                C=C,
                count=min(self.count or 0, C),
                accepted_kind=_index_kind(accepted),
                reads_kind=_index_kind(state_indices),
                writes_kind=_index_kind(write_indices),
                rows_kind=_index_kind(buffer_indices),
                early=N if layers * N * HV <= EARLY_HEADS else 0,
                keep_lines=int(route.schedule.keep_lines),
            )
        )

    def __call__(self, tensors: list[Tensor]) -> bool | None:
        """Launch for tensors like those described: those there are, in FlushPointers' order; returns True."""
        pointers, apart = list(map(_data_ptr, tensors)), self.apart
        if pointers[0] & 15 or (apart.known.get(pointers[0]) != pointers and not apart(pointers)):
            return None
        if CHECK:
            state, u, k, log_decay, accepted, reads, writes, rows = self.places([*tensors, None])
            counts = accepted if self.count is None else self.count
            reference.flush_rows(state, KVBuffer(u, k, log_decay), counts, reads, writes, rows)
        if not self.empty:
            self.launch((*self.places([*pointers, 0]), *self.layer_strides), self.strides, self.sizes)
        return True


class PrefillLaunch(Launch):
    """A prefill of given shapes and strides."""

    def __init__(
        self,
        route: Route,
        tokens: Tokens,
        *,
        initial_state: Tensor | None,
        output_final_state: bool,
        final_state: Tensor | None,
        state: Tensor | None,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
        out: Tensor | None,
    ):
        q, k, v, g, beta, gate, _, _, _, cu_seqlens = tokens
        initial = initial_state if state is None else state
        given = (q, k, v, g, beta, gate.A_log, gate.dt_bias, cu_seqlens, state_indices, has_initial_state)
        super().__init__(route, q.device, (*given, initial, final_state, out))
        # Where each tensor is among those there are, one behind them for an absent one.
        self.absent = sum(x is not None for x in (*given, initial, final_state, out))
        *self.given, self.final_at, self.out_at = self.places([*range(self.absent), self.absent])
        assert isinstance(route.schedule, dispatch.Cut)
        self.scale = _scale(tokens)
        self.bound = gate.bound
        self.channel = g.ndim == 4
        self.pooled, self.own_output, self.dense_v = state is not None, out is None, v.is_contiguous()
        N, H, HV = tokens.num_sequences, q.shape[2], v.shape[2]
        self.final_shape = (N, HV, v.shape[3], q.shape[3]) if output_final_state and final_state is None else None
        self.final_dtype = torch.float32 if initial is None else initial.dtype
        total, T = (q.shape[1], 0) if cu_seqlens is not None else (0, q.shape[1])
        places = total // CHUNK + N if cu_seqlens is not None else max(N * -(-T // CHUNK), 1)
        self.empty = N == 0
        self.workspace = _workspace(route.problem.axis, N, H, HV, places, route.schedule.pieces, cu_seqlens is not None)
        final = state if state is not None else final_state
        if self.final_shape is not None:
            final = torch.empty(self.final_shape, dtype=self.final_dtype, device="meta")
        self.strides = _short(
            route,
            PrefillStrides(
                **_token_strides(tokens, out),
                **_named("initial", "ph", _bytes(initial, 2)),
                **_named("final", "ph", _bytes(final, 2)),
                **_named("reads", "n", _bytes(state_indices, 1)),
                **_named("has_initial", "n", _bytes(has_initial_state, 1)),
            ),
        )
        self.sizes = _ready(
            PrefillSizes(
                N=N,
                T=T,
                total=total,
                places=places,
                H=H,
                HV=HV,
                q_heads=_head_factor(HV, H),
                beta_logits=int(tokens.beta_logits),
                beta_kind=KINDS[beta.dtype],
                dt_bias_kind=ABSENT if gate.dt_bias is None else KINDS[gate.dt_bias.dtype],
                cu_seqlens_kind=_index_kind(cu_seqlens),
                reads_kind=_index_kind(state_indices),
                pieces=route.schedule.pieces,
                blocks=dispatch.BLOCKS,
            )
        )

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor | None] | None:
        """Launch for tensors like those described, those there are in PrefillPointers' order; returns o and the final state."""
        given, final_at, out_at = self.given, self.final_at, self.out_at
        pointers, apart = list(map(_data_ptr, tensors)), self.apart
        if apart.known.get(pointers[apart.key]) != pointers and not apart(pointers):
            return None
        pointers.append(0)
        reached = pointers[0] | pointers[1] | pointers[2] | pointers[given[10]] | pointers[final_at] | pointers[out_at]
        if (reached | (pointers[3] if self.channel else 0)) & 15:
            return None
        if CHECK:
            self.check(self.places([*tensors, None]))
        final = None if final_at == self.absent else tensors[final_at]
        if self.final_shape is not None:
            final = torch.empty(self.final_shape, dtype=self.final_dtype, device=tensors[0].device)
        v = tensors[2]
        out = (torch.empty_like(v) if self.dense_v else v.new_empty(v.shape)) if self.own_output else tensors[out_at]
        if self.empty:
            out.zero_()
            return out, final
        stored = pointers[given[10]] if self.pooled else 0 if final is None else final.data_ptr()
        size, offsets = self.workspace
        scratch = torch.empty(size, dtype=torch.uint8, device=v.device)
        start = scratch.data_ptr()
        arguments = (*(pointers[i] for i in given), stored, out.data_ptr(), *(start + at if at >= 0 else 0 for at in offsets))
        self.launch(arguments, self.scale, self.bound, self.strides, self.sizes)
        return out, final

    def check(self, given: tuple[Any, ...]) -> None:
        """Raise for an index that nobody can serve, given all the tensors there may be."""
        q, k, v, g, beta, _, _, cu_seqlens, state_indices, _, initial, _, _ = given
        tokens = Tokens(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        reference.prefill_rows(tokens, initial, state_indices)


def _workspace(axis: str, N: int, H: int, HV: int, places: int, pieces: int, packed: bool) -> tuple[int, list[int]]:
    """Bytes of a prefill's workspace, and where in it lies what PrefillPointers ends with; -1 for what is not there."""
    channel, cut = axis == "channel", pieces > 1
    heads, states = (HV if channel else H), N * HV * pieces * 4 * 128 * 128
    sizes = (
        places * heads * IMAGE,  # keys
        places * heads * IMAGE,  # queries
        places * HV * IMAGE if channel else 0,  # writes
        places * HV * 2 * TRIANGLE,  # pairs
        places * HV * COLUMNS,  # columns
        N * 4 if packed else 0,  # order
        4,  # queue
        2 * states if cut else 0,  # moves
        states if cut else 0,  # starts
    )
    ends = list(itertools.accumulate(-(-size // 256) * 256 for size in sizes))
    return ends[-1], [end - -(-size // 256) * 256 if size else -1 for size, end in zip(sizes, ends, strict=True)]


EARLY_HEADS = 1024
"""States (sequences times heads and layers) up to which a launch asks for them early: about what the chip holds at once."""


def _scale(tokens: Tokens) -> float:
    return tokens.q.shape[-1] ** -0.5 if tokens.scale is None else float(tokens.scale)


def _token_strides(tokens: Tokens, out: Tensor | None) -> dict[str, int]:
    """Those that the strides of all kernels that read tokens have in common."""
    q, k, v, g, beta, gate = tokens[:6]
    o = torch.empty(v.shape, dtype=v.dtype, device="meta") if out is None else out
    packed = tokens.cu_seqlens is not None

    def rows(x: Tensor, dims: int) -> list[int]:
        """Strides of sequence, token, head, ...; none to the next sequence where they are packed, or there is but one."""
        strides = _bytes(x, dims)
        return [0, *strides[1:]] if packed or x.shape[0] == 1 else strides

    return dict(
        **_named("q", "nth", rows(q, 3)),
        **_named("k", "nth", rows(k, 3)),
        **_named("v", "nth", rows(v, 3)),
        **_named("g", "nthc", rows(g, 4) if g.ndim == 4 else [*rows(g, 3), 0]),
        **_named("beta", "nth", rows(beta, 3)),
        **_named("o", "nthc", rows(o, 4)),
        **_named("A_log", "h", _bytes(gate.A_log, 1)),
        **_named("dt_bias", "hc", _bytes(gate.dt_bias, 2)),
        **_named("cu_seqlens", "n", _bytes(tokens.cu_seqlens, 1)),
    )


def _token_sizes(route: Route, tokens: Tokens, state: Tensor) -> dict[str, int]:
    """Those that decode's and verify's sizes have in common."""
    assert isinstance(route.schedule, dispatch.Schedule)
    N, HV, gate = tokens.num_sequences, tokens.v.shape[2], tokens.gate
    return dict(
        N=N,
        total=tokens.q.shape[1],
        HV=HV,
        q_heads=_head_factor(HV, tokens.q.shape[2]),
        P=state.shape[0],
        beta_kind=KINDS[tokens.beta.dtype],
        dt_bias_kind=ABSENT if gate.dt_bias is None else KINDS[gate.dt_bias.dtype],
        cu_seqlens_kind=_index_kind(tokens.cu_seqlens),
        early=N if N * HV <= EARLY_HEADS else 0,
        keep_lines=int(route.schedule.keep_lines),
    )


def _bytes(x: Tensor | None, dims: int) -> list[int]:
    """The first `dims` strides in bytes; zeros for dimensions or tensors that are not there."""
    if x is None:
        return [0] * dims
    strides = [stride * x.element_size() for stride in x.stride()[:dims]]
    return strides + [0] * (dims - len(strides))


def _named(tensor: str, dims: str, strides: Sequence[int]) -> dict[str, int]:
    """Strides under their names in arguments.py."""
    return {f"{tensor}_{dim}": stride for dim, stride in zip(dims, strides, strict=True)}


def _ready(numbers: tuple[int, ...]) -> Any:
    """Numbers that no call changes, as TVM-FFI takes them fastest."""
    import tvm_ffi

    return tvm_ffi.convert(numbers)


def _short(route: Route, strides: tuple[int, ...]) -> Any:
    if max(strides) >= 2**31:
        raise UnsupportedProblem(
            f"backend 'cute' cannot run {route.problem.label}; it needs", ("strides below 2 GiB, in every tensor",)
        )
    return _ready(strides)


def _head_factor(HV: int, H: int) -> int:
    """q_heads of arguments.py."""
    return -(-(2**30) // (HV // H))


def _index_kind(x: Tensor | None) -> int:
    return 0 if x is None else x.element_size() // 4
