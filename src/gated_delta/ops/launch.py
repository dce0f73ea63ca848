"""What the operations share on the host: how each describes itself, and a call as a kernel takes it.

Whatever depends on shapes, strides and dtypes alone is worked out once per shape (a `Launch`); a call adds the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .. import compile
from ..call_cache import CallCache
from ..kernels.arguments import ABSENT as NO_KIND
from ..kernels.arguments import BF16, FP16, FP32
from ..memory import Addresses, Placement
from ..problem import BUFFER, Gate, GatedNorm, Problem, Tokens, UnsupportedProblem

CHECK = os.environ.get("GATED_DELTA_CHECK") == "1"
"""Check indices and log decays on the host before a launch; costs a wait for the GPU."""

REDESCRIBE = object()
"""What a launch returns, having done nothing, where a call has to be described anew."""

NEVER_NESTED = ("A_log", "dt_bias", "norm_weight", *BUFFER)
"""Tensors of a Gate, a GatedNorm or a KVBuffer, which refuse nested ones."""

KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

_data_ptr = Tensor.data_ptr
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", int
)  # not in builds for the CPU
_stream = functools.cache(ctypes.c_void_p)  # a process has few


class Plan(NamedTuple):
    """How a problem's work is cut, and the kernels that do it, in the order of their launches."""

    schedule: Any
    variants: tuple[compile.Variant, ...]


def _refuse() -> None:
    raise TypeError


class Operation(ABC):
    """One of the four operations, as the API, packs and torch.library see it.

    `arguments` is a NamedTuple with a call's tensors first, in the order of its kernels' pointers and None where one is not given,
    then its other values, the backend last.
    """

    name: ClassVar[str]
    arguments: ClassVar[Any]
    num_tensors: ClassVar[int]
    may_write: ClassVar[tuple[str, ...]]
    """Tensors that some call writes, in the order in which they are checked."""
    archs: ClassVar[tuple[str, ...]] = tuple(compile.ARCHS.values())
    """What its kernels are compiled for."""

    def __init__(self) -> None:
        self.calls: CallCache[Any] = CallCache()
        self.key = self._key()
        hints = list(get_type_hints(self.arguments).items())
        self.flags = {name: hint is bool for name, hint in hints[self.num_tensors :]}

    def _key(self) -> Callable[..., tuple[Any, ...]]:
        """From a call's arguments to its key in the call cache; compiled: every launch waits for it.

        The key raises an error for a tensor that is nested or none, and for a flag that is no bool.
        """
        hints = get_type_hints(self.arguments)
        names = list(hints)
        (first, *tensors), values = names[: self.num_tensors], names[self.num_tensors :]
        checks = {x: f" or ({x}.is_nested and refuse())" for x in tensors if x not in NEVER_NESTED}
        required = [checks.get(x, "") for x in tensors if hints[x] is Tensor]
        parts = [f"{first}.shape", "False" + "".join(required)]
        parts += [f"{x} is None" + checks.get(x, "") for x in tensors if hints[x] is not Tensor]
        flags = [x for x in values if hints[x] is bool]
        parts += [f"{x} is True or ({x} is not False and refuse())" for x in flags]
        parts += [x for x in values if x not in flags]
        parts += [f"type({x})" for x in values if hints[x] in (int, int | None, float | None)]
        key = f"lambda {', '.join(names)}: ({', '.join(parts)}, grad())"
        return eval(key, dict(grad=torch.is_grad_enabled, refuse=_refuse))

    @abstractmethod
    def describe(self, a: Any) -> Problem:
        """Validate a call. Raises TypeError or ValueError naming the argument, UnsupportedProblem when grad is asked for."""

    def written(self, a: Any) -> tuple[str, ...]:
        """Arguments that this call writes, those that there are."""
        return self.may_write

    def allocated(self, a: Any) -> Any:
        """The call with the outputs that the caller did not give."""
        return a._replace(out=a.v.new_empty(a.v.shape)) if a.out is None else a

    def result(self, a: Any) -> Any:
        """What the operation returns, of an allocated call that has run."""
        return a.out

    @abstractmethod
    def run_reference(self, a: Any) -> None:
        """Run an allocated call on the reference backend."""

    @abstractmethod
    def check_values(self, a: Any) -> None:
        """Look at every index and log decay on the host.

        Raises IndexError past a tensor, ValueError for lengths or writes that conflict and for a log
        decay above 0.
        """

    @abstractmethod
    def needs(self, problem: Problem) -> dict[str, bool]:
        """What the kernels need, and whether this problem lacks it, whatever is compiled and on whatever device."""

    def missing(self, problem: Problem) -> list[str]:
        """What keeps this problem from the kernels."""
        return [need for need, is_missing in self.needs(problem).items() if is_missing]

    def work(self, a: Any) -> tuple[Any, ...]:
        """What `plan` asks of a call: sequences, each layer's counted, and tokens."""
        return tokens_of(a).num_sequences, a.q.shape[:2].numel()

    @abstractmethod
    def plan(self, problem: Problem, sequences: int, tokens: int) -> Plan:
        """The schedule for so much work, and its kernels."""

    @abstractmethod
    def variants(self, problem: Problem) -> list[compile.Variant]:
        """Every variant that some number of sequences and tokens leads to."""

    @abstractmethod
    def shipped(
        self, axis: str, K: int, V: int, state_dtype: torch.dtype, tokens: dict[str, Any]
    ) -> list[Problem]:
        """What a pack is built for, of a model with such heads and tokens."""

    @abstractmethod
    def launch(self, problem: Problem, plan: Plan, a: Any) -> Launch:
        """A launch for calls like this one."""


def tokens_of(a: Any) -> Tokens:
    """The tokens of a prefill's, decode's or verify's arguments."""
    gate = Gate(a.gate, a.A_log, a.dt_bias, a.bound)
    return Tokens(
        a.q, a.k, a.v, a.g, a.beta, gate, a.scale, a.qk_l2norm, a.beta_logits, a.cu_seqlens
    )


def norm_of(a: Any) -> GatedNorm | None:
    """The norm of a decode's or verify's arguments, which have its gate z, too."""
    return (
        None if a.norm_weight is None else GatedNorm(a.norm_weight, a.norm_eps, a.norm_activation)
    )


class Launch(ABC):
    """A launch for calls of given shapes and strides."""

    placement: Placement
    vectors: tuple[str, ...]
    """Arguments that have to start at a multiple of 16 bytes."""

    def __init__(self, operation: Operation, plan: Plan, a: Any):
        compile.flag(
            "GATED_DELTA_CHECK", False
        )  # a value other than 0 and 1 is an error, but not of importing this
        device = a[0].device
        arch = compile.arch_of(device)
        assert arch is not None
        self.operation, self.flags = operation, a[operation.num_tensors :]
        self.places = [i for i, x in enumerate(a[: operation.num_tensors]) if x is not None]
        self.index = device.index
        self.several_devices = torch.cuda.device_count() > 1
        self.functions = [compile.load(variant, arch) for variant in plan.variants]

    def __call__(self, tensors: tuple[Tensor, ...]) -> Any:
        """Run a call with these tensors, those that are not None.

        Returns the call's result; REDESCRIBE where the tensors' memory may overlap, or rows start off a vector's boundary.
        """
        given, placement = tuple(map(_data_ptr, tensors)), self.placement
        pointers = placement.known.get(given)
        if pointers is None and (pointers := placement(given)) is None:
            return REDESCRIBE
        if CHECK:
            self.operation.check_values(
                self.operation.arguments(*self.spread(tensors, None), *self.flags)
            )
        stream = _stream(_raw_stream(self.index))
        if self.several_devices and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(tensors, pointers, stream)
        return self.run(tensors, pointers, stream)

    @abstractmethod
    def run(self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any) -> Any:
        """Launch the kernels and return the call's result; `pointers` is what the method of that name made of the addresses."""

    def pointers(self, given: Addresses) -> Any:
        """The kernel's pointers, of the given tensors' addresses; made once for each."""
        return ready(tuple(self.spread(given, 0)))

    def spread(self, given: Sequence[Any], absent: Any) -> list[Any]:
        """The given tensors, or a number of each, at their positions among the operation's tensors; elsewhere `absent`."""
        found = [absent] * self.operation.num_tensors
        for position, x in zip(self.places, given, strict=True):
            found[position] = x
        return found


def _new_dense(v: Tensor) -> Tensor:
    return v.new_empty(v.shape)


class TokensLaunch(Launch):
    """What prefill's, decode's and verify's launches share: tokens in, out as the last tensor."""

    strides: Any
    sizes: Any

    def __init__(self, operation: Operation, plan: Plan, a: Any):
        super().__init__(operation, plan, a)
        self.scale = a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale)
        self.bound = a.bound
        self.empty = tokens_of(a).num_sequences == 0
        self.own_output = a.out is None
        self.new_output: Any = torch.empty_like if a.v.is_contiguous() else _new_dense

    def pointers(self, given: Addresses) -> Any:
        return self.spread(given, 0)[:-1] if self.own_output else super().pointers(given)

    def strides_of(
        self, wanted: Any, problem: Problem, a: Any, **others: Tensor | list[int] | None
    ) -> Any:
        o = torch.empty(a.v.shape, dtype=a.v.dtype, device="meta") if a.out is None else a.out
        return strides_of(wanted, problem, a, o=o, **others)

    def run(self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any) -> Any:
        out = tensors[-1]
        if self.own_output:
            out = self.new_output(tensors[2])
            pointers = (*pointers, out.data_ptr())
        if self.empty:
            return out.zero_()
        for function in self.functions:
            function(pointers, self.scale, self.bound, self.strides, self.sizes, stream)
        return out


# ------------------------------------------------------------------------------------------------ strides and sizes


PREFETCH_HEADS = 1024
"""States (sequences times heads and layers) up to which a launch prefetches them: about what the chip holds at once."""


TOKEN_TENSORS = ("q", "k", "v", "g", "beta", "z", "o")
"""Tensors with a row for each token."""
NUMBER_TENSORS = ("beta", "dt_bias", "norm_weight")
"""Tensors of numbers whose dtype is settled when a kernel runs; the other kinds are of indices."""


def strides_of(wanted: Any, problem: Problem, a: Any, **others: Tensor | list[int] | None) -> Any:
    """Strides as `wanted`, a tuple type of arguments.py, lists them; others: of tensors that are not the call's arguments.

    From sequence to sequence tokens have none where they are packed, or there is but one.
    """
    found: list[int] = []
    for name, dims in wanted.dims.items():
        x = others[name] if name in others else getattr(a, name)
        steps = x if isinstance(x, list) else bytes_of(x, len(dims))
        one = (
            isinstance(x, Tensor)
            and name in TOKEN_TENSORS
            and (a.cu_seqlens is not None or x.shape[0] == 1)
        )
        found += [0, *steps[1:]] if one else steps
    if max(found) >= 2**31:
        raise UnsupportedProblem(
            f"backend 'cute' cannot run {problem.label}; it needs",
            ("strides below 2 GiB, in every tensor",),
        )
    return ready(wanted(*found))


def kinds_of(wanted: Any, a: Any) -> dict[str, int]:
    """The fields of a call's sizes that say which dtypes its tensors have."""
    found = {}
    for field in wanted._fields:
        if field.endswith("_kind"):
            name = field.removesuffix("_kind")
            x = getattr(a, name)
            if name in NUMBER_TENSORS:
                found[field] = NO_KIND if x is None else KINDS[x.dtype]
            else:
                found[field] = 0 if x is None else x.element_size() // 4
    return found


def token_sizes(wanted: Any, a: Any) -> dict[str, int]:
    """Those that the sizes of all kernels that read tokens have in common."""
    heads = dict(HV=a.v.shape[2], qk_head_factor=head_factor(a.v.shape[2], a.q.shape[2]))
    return dict(**kinds_of(wanted, a), **heads, null_index=null_index(a))


def state_sizes(wanted: Any, a: Any, plan: Plan) -> dict[str, int]:
    """Those that decode's and verify's sizes have in common."""
    N, HV = tokens_of(a).num_sequences, a.v.shape[2]
    (eps,) = struct.unpack("i", struct.pack("f", a.norm_eps))
    return dict(
        **token_sizes(wanted, a),
        N=N,
        total=a.q.shape[1],
        P=a.state.shape[0],
        prefetch_sequences=N if plan.schedule.prefetch and N * HV <= PREFETCH_HEADS else 0,
        keep_in_l2=int(plan.schedule.keep_in_l2),
        norm_eps=eps,
        norm_sigmoid=int(a.norm_activation == "sigmoid"),
    )


def null_index(a: Any) -> int:
    """Of a call, as 32 bits: indices past them are past any pool."""
    return min(int(a.null_index), 2**31 - 1)


def bytes_of(x: Tensor | None, dims: int) -> list[int]:
    """The first `dims` strides in bytes; zeros for dimensions or tensors that are not there."""
    if x is None:
        return [0] * dims
    strides = [stride * x.element_size() for stride in x.stride()[:dims]]
    return strides + [0] * (dims - len(strides))


def ready(numbers: tuple[int, ...]) -> Any:
    """Numbers that no call changes, as TVM-FFI takes them fastest."""
    import tvm_ffi

    return tvm_ffi.convert(numbers)


def head_factor(HV: int, H: int) -> int:
    """qk_head_factor of arguments.py."""
    return -(-(2**30) // (HV // H))


# ------------------------------------------------------------------------------------------------ schedules of states


MIB, LARGE = 2**20, 2**26
"""State bytes of a launch well over the 60 MB of an H200's L2."""


class Schedule(NamedTuple):
    """How a kernel's work is cut. rows: V rows in flight, of a thread, or for verify of a warp; threads: of a block."""

    rows: int
    threads: int
    keep_in_l2: bool = False
    """Ask L2 to rather keep the state's lines: pays once a launch's states are well over the L2, costs its neighbours below."""
    prefetch: bool = True
    """Small launches prefetch states into L2 before the previous kernel has ended."""
    chunks: int = 1
    """Of a decode's block: how often its threads take so many rows, one chunk after the other."""
    cluster: bool = False
    """decode with a norm: the blocks of a head, of 32 rows or more, are a cluster; else one block has all rows, in as many chunks
    as that takes."""
    blocks_per_sm: int = 0
    """decode: registers are held down so that as many blocks fit; 0: as many as the compiler takes."""
    prefetch_chunks: int = 0
    """decode: only the first ones of a block are prefetched; 0: all."""
    bulk: bool = False
    """decode: a block's states are prefetched by one instruction of one thread, not by one of each warp."""


Table = tuple[tuple[int, Schedule], ...]
"""(least state bytes of a launch, schedule), the largest first."""


def state_width(problem: Problem) -> str:
    """Key of schedule tables: states of as many bytes take the same time."""
    return "fp32" if problem.state_dtype == torch.float32 else "bf16"


def state_bytes(problem: Problem) -> int:
    """Of one sequence in one layer."""
    assert problem.state_dtype is not None
    return problem.HV * problem.K * problem.V * problem.state_dtype.itemsize


MAX_NORM = 256
"""V up to which a block takes a whole head, as a norm needs."""

SCATTERED = (
    "states whose V rows lie next to each other (stride K) and start at multiples of 16 bytes"
)


def shipped_norms(tokens: dict[str, Any]) -> tuple[frozenset[str], ...]:
    """Options of what is shipped: with a norm, too, where gate and beta are raw, as engines hand them over."""
    raw = tokens["gate"] != "log" and tokens["beta_logits"]
    return (frozenset(), frozenset({"norm"})) if raw else (frozenset(),)


class StateOperation(Operation):
    """decode, verify and flush: one kernel, whose schedule is chosen by the bytes of a launch's states."""

    @abstractmethod
    def schedules(self, problem: Problem) -> Table: ...

    @abstractmethod
    def block_rows(self, problem: Problem, schedule: Schedule) -> int:
        """V rows of a block, which have to divide V."""

    @abstractmethod
    def variant(self, problem: Problem, schedule: Schedule) -> compile.Variant:
        """The kernel with everything static about it; sizes, index types and a call's options are settled when it runs."""

    def needs(self, problem: Problem) -> dict[str, bool]:
        return {
            f"K a multiple of 8 up to 128, got {problem.K}": problem.K % 8 != 0 or problem.K > 128,
            f"V a multiple of 32, got {problem.V}": problem.V % 32 != 0,
            SCATTERED: "scattered_rows" in problem.options,
            f"V up to {MAX_NORM} with a norm, got {problem.V}": "norm" in problem.options
            and problem.V > MAX_NORM,
            "a buffer whose rows of k start at multiples of 16 bytes": "unaligned_buffer"
            in problem.options,
        }

    def plan(self, problem: Problem, sequences: int, tokens: int) -> Plan:
        launch_bytes = sequences * state_bytes(problem)
        schedule = next(
            schedule for least, schedule in self.schedules(problem) if launch_bytes >= least
        )
        while problem.V % self.block_rows(problem, schedule):
            schedule = self.halved(schedule)
        return Plan(schedule, (self.variant(problem, schedule),))

    def halved(self, schedule: Schedule) -> Schedule:
        """With blocks of half as many rows."""
        return (
            schedule._replace(rows=schedule.rows // 2)
            if schedule.rows > 1
            else schedule._replace(threads=schedule.threads // 2)
        )

    def variants(self, problem: Problem) -> list[compile.Variant]:
        plans = [
            self.plan(problem, -(-least // state_bytes(problem)), 0)
            for least, _ in self.schedules(problem)
        ]
        return list(dict.fromkeys(variant for plan in plans for variant in plan.variants))
