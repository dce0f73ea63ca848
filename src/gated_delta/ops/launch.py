"""Host code of all operations: how an operation describes itself, and how a call is launched.

A `Launch` holds what depends on shapes, strides and dtypes alone; a call adds the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from torch import Tensor

from .. import compile, reference
from ..call_cache import CallCache
from ..gpus import H200, Gpu
from ..kernels.arguments import ABSENT as NO_KIND
from ..kernels.arguments import BF16, FP16, FP32
from ..memory import Addresses, Placement
from ..problem import (
    BUFFER,
    CHECK,
    SHORT,
    Gate,
    GatedNorm,
    KVBuffer,
    Problem,
    Tokens,
    UnsupportedProblem,
    unique,
)

REDESCRIBE = object()
"""A launch returns it if it did nothing and the call must be described again."""

CONV = ("weight", "bias", "conv_weight", "conv_bias")
NEVER_NESTED = ("A_log", "dt_bias", "norm_weight", *CONV, *BUFFER)
"""Tensors of a Gate, GatedNorm, ShortConv or KVBuffer, which refuse nested tensors."""

KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

_data_ptr = Tensor.data_ptr
# CPU builds of torch lack this function.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_stream = functools.cache(ctypes.c_void_p)  # a process has few streams


class Plan(NamedTuple):
    """A schedule and its kernels, in launch order."""

    schedule: Any
    variants: tuple[compile.Variant, ...]
    gpu: Gpu = H200


class Model(NamedTuple):
    """A model as packs see it. tokens: dtypes, gate and beta_logits of a Problem.

    ring: decode and verify with `buffer_lens` too. trees: `parents` and `path` too. fp8: also
    outputs in FP8.
    """

    axis: str
    K: int
    V: int
    state_dtype: torch.dtype
    tokens: Mapping[str, Any]
    ring: bool = False
    trees: bool = False
    fp8: bool = False

    def problem(self, op: str, T: int | None = None, options: Iterable[str] = ()) -> Problem:
        """A call with one head."""
        tokens = {} if op == "flush" else self.tokens
        facts = dict(state_dtype=self.state_dtype, options=frozenset(options), **tokens)
        return Problem(op, self.axis, 1, 1, self.K, self.V, T, **facts)

    @property
    def interleaved(self) -> bool:
        """Whether some model of these sizes has projections by q/k head: OLMo hybrid's does not."""
        return self.axis == "head" and (self.K, self.V) != (96, 192)

    @property
    def convolution(self) -> tuple[str, ...]:
        """Options of calls with a convolution, whose weight has the tokens' dtype."""
        return "conv", f"conv_weight_{SHORT[self.tokens['dtype']]}"

    def norms(self) -> tuple[tuple[str, ...], ...]:
        """Options of calls: with a norm too if gate and beta are raw, as in engines."""
        raw = self.tokens["gate"] != "log" and self.tokens["beta_logits"]
        outputs = (("norm",), ("norm", "fp8")) if self.fp8 else (("norm",),)
        return ((), *outputs) if raw else ((),)


def _refuse() -> None:
    raise TypeError


class Operation(ABC):
    """An operation, as the API, packs and torch.library see it.

    `arguments`, a NamedTuple, is the one definition of a call's arguments and their order: the
    tensors first (None if absent), then the other values, the backend last. `pointers` is the
    kernels' own tuple; a launch fills it by name.
    """

    name: ClassVar[str]
    arguments: ClassVar[Any]
    pointers: ClassVar[Any]
    may_write: ClassVar[tuple[str, ...]]
    """Tensors that some call writes, in the order of the checks."""

    def __init__(self) -> None:
        self.calls: CallCache[Any] = CallCache()
        hints = get_type_hints(self.arguments)
        self.tensors = [x for x, hint in hints.items() if hint in (Tensor, Tensor | None)]
        self.numbers = [x for x, hint in hints.items() if hint == bool | int]
        """Arguments that are a flag or an int."""
        self.flags = {x: hint is bool for x, hint in hints.items() if x not in self.tensors}
        self.key = self._key(hints)

    def _key(self, hints: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
        """A function from a call's arguments to its key in the call cache.

        It raises an error for a nested tensor, a non-tensor and a flag that is not a bool. One
        generated expression: every launch waits for it, and a loop over the arguments costs 3 us
        more.
        """
        (first, *tensors), values = self.tensors, list(self.flags)
        checks = {x: f" or ({x}.is_nested and refuse())" for x in tensors if x not in NEVER_NESTED}
        required = [checks.get(x, "") for x in tensors if hints[x] is Tensor]
        parts = [f"{first}.shape", "False" + "".join(required)]
        parts += [f"{x} is None" + checks.get(x, "") for x in tensors if hints[x] is not Tensor]
        flags = [x for x in values if self.flags[x]]
        parts += [f"{x} is True or ({x} is not False and refuse())" for x in flags]
        parts += [x for x in values if x not in flags]
        numbers = (int, int | None, float | None, bool | int)
        parts += [f"type({x})" for x in values if hints[x] in numbers]
        key = f"lambda {', '.join(hints)}: ({', '.join(parts)}, grad())"
        return eval(key, dict(grad=torch.is_grad_enabled, refuse=_refuse))

    @abstractmethod
    def describe(self, a: Any) -> Problem:
        """Validate a call.

        Raises TypeError or ValueError naming the argument, UnsupportedProblem if an input requires
        grad.
        """

    def written(self, a: Any) -> tuple[str, ...]:
        """The tensors of `may_write` that this call writes if they are given."""
        return tuple(x for x in self.may_write if x != "out_scales" or writes_scales(a))

    def allocated(self, a: Any) -> Any:
        """The call with new tensors for the outputs that the caller did not pass."""
        return a._replace(out=a.v.new_empty(output_shape(a.v))) if a.out is None else a

    def result(self, a: Any) -> Any:
        """The operation's return value, from an allocated call that has run."""
        return a.out

    @abstractmethod
    def run_reference(self, a: Any) -> None:
        """Run an allocated call on the reference backend."""

    @abstractmethod
    def check_values(self, a: Any) -> None:
        """Check every index and log decay on the host.

        Raises IndexError for an index past its tensor, ValueError for bad lengths, conflicting
        writes and a log decay above 0.
        """

    @abstractmethod
    def needs(self, problem: Problem) -> dict[str, bool]:
        """Each requirement of the kernels, and whether this problem fails it.

        Independent of the device and of what is compiled.
        """

    def missing(self, problem: Problem) -> list[str]:
        """The requirements of the kernels that this problem fails."""
        return [need for need, is_missing in self.needs(problem).items() if is_missing]

    def work(self, a: Any) -> tuple[Any, ...]:
        """The arguments of `plan` after the problem: sequences (over all layers), tokens."""
        return tokens_of(a).num_sequences, a.q.shape[:2].numel()

    @abstractmethod
    def plan(self, problem: Problem, sequences: int, tokens: int, *, gpu: Gpu = H200) -> Plan:
        """The schedule for this much work, and its kernels."""

    @abstractmethod
    def strides(self, problem: Problem, a: Any) -> tuple[int, ...]:
        """The strides in bytes that a call passes to the kernels of its plan."""

    def exceeded(self, problem: Problem, plan: Plan, a: Any) -> list[str]:
        """Limits that a call exceeds on its plan's kernels, by its strides and lengths."""
        lacks = {
            "strides below 2 GiB, in every tensor": max(self.strides(problem, a)) >= 2**31,
            "a Hopper GPU or newer for an output in FP8": (
                plan.gpu.level == "sm_80" and "fp8" in problem.options
            ),
        }
        return [need for need, is_missing in lacks.items() if is_missing]

    @abstractmethod
    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        """Every variant that `plan` returns for some number of sequences and tokens."""

    @abstractmethod
    def shipped(self, model: Model) -> list[Problem]:
        """The problems that a pack holds kernels for, for the model."""

    @abstractmethod
    def launch(self, problem: Problem, plan: Plan, a: Any) -> Launch:
        """A launch for calls with the shapes, strides and dtypes of `a`."""


def tokens_of(a: Any) -> Tokens:
    """The tokens of a prefill's, decode's or verify's arguments."""
    gate = Gate(a.gate, a.A_log, a.dt_bias, a.bound)
    flags = a.qk_l2norm, a.beta_logits, a.allow_neg_eigval
    return Tokens(a.q, a.k, a.v, a.g, a.beta, gate, a.scale, *flags, a.cu_seqlens)


def norm_of(a: Any) -> GatedNorm | None:
    """The norm of a prefill's, decode's or verify's arguments."""
    if a.norm_weight is None:
        return None
    return GatedNorm(a.norm_weight, a.norm_eps, a.norm_activation)


def quantised(a: Any, run: Callable[..., None], **given: Any) -> None:
    """Run an operation's reference function with this call's norm, output and scales."""
    o = a.out if a.out_scales is None else a.v.new_empty(a.v.shape)
    reference.check_scale(a.out_scales)
    run(tokens_of(a), **given, norm=norm_of(a), z=by_value_head(a.z), out=o)
    if a.out_scales is not None:
        reference.quantise(o, a.out, a.out_scales)


def by_value_head(z: Tensor | None) -> Tensor | None:
    """z as [N, T, HV, V]."""
    return z if z is None or z.ndim == 4 else z.flatten(2, 3)


def writes_scales(a: Any) -> bool:
    """Whether a call has an FP8 output with a scale per token and head."""
    scales = getattr(a, "out_scales", None)  # summarise has none
    return isinstance(scales, Tensor) and scales.ndim > 1


def single_token(problem: Problem) -> bool:
    """Whether each sequence of a decode has one token, dense."""
    return problem.T == 1 and not any(option.startswith("cu_seqlens") for option in problem.options)


def buffer_of(a: Any) -> KVBuffer:
    """The buffer of a call's arguments."""
    return KVBuffer(a.buffer_u, a.buffer_k, a.buffer_log_decay)


class Launch(ABC):
    """A launch for calls of given shapes and strides."""

    placement: Placement
    vectors: tuple[str, ...]
    """Arguments that must start at a multiple of 16 bytes."""

    def __init__(
        self,
        operation: Operation,
        plan: Plan,
        a: Any,
        sources: Mapping[str, str] = {},
        numbers: Mapping[str, int] = {},
        pointers: Any = None,
    ):
        """sources: arguments by pointer, where the names differ. numbers: pointers of no tensor.

        pointers: the kernels' tuple, if it is not the operation's.
        """
        compile.flag("GATED_DELTA_CHECK", False)  # raises for a bad value; the import must not
        device = a[0].device
        self.operation = operation
        self.given = [name for name in operation.tensors if getattr(a, name) is not None]
        """Names of the tensors that a call passes, in order."""
        self.values = a._replace(**dict.fromkeys(self.given))  # keeps no tensor alive
        self.index = device.index
        self.several_devices = torch.cuda.device_count() > 1
        self.functions = [compile.load(variant, plan.gpu) for variant in plan.variants]
        positions = {name: i for i, name in enumerate([*self.given, *numbers])}
        self.fields: tuple[str, ...] = (pointers or operation.pointers)._fields
        names = [sources.get(field, field) for field in self.fields]
        self._pick = itemgetter(*(positions.get(name, -1) for name in names))
        self._rest = (*numbers.values(), 0)  # the last one is the address of an absent tensor

    def __call__(self, tensors: tuple[Tensor, ...]) -> Any:
        """Run a call with these tensors, the ones named by `given`.

        Returns the call's result, or REDESCRIBE if tensors may overlap or rows are not aligned.
        """
        given, placement = tuple(map(_data_ptr, tensors)), self.placement
        pointers = placement.known.get(given)
        if pointers is None and (pointers := placement(given)) is None:
            return REDESCRIBE
        if CHECK:
            named = dict(zip(self.given, tensors, strict=True))
            self.operation.check_values(self.values._replace(**named))
        stream = self.stream()
        if self.several_devices and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.run(tensors, pointers, stream)
        return self.run(tensors, pointers, stream)

    def stream(self) -> Any:
        """The device's current stream."""
        return _stream(_raw_stream(self.index))

    @abstractmethod
    def run(self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any) -> Any:
        """Launch the kernels and return the call's result. pointers: from the method `pointers`."""

    def pointers(self, given: Addresses) -> Any:
        """The kernels' pointers for these addresses; computed once for each set of addresses."""
        return ready(self.in_kernel_order(given))

    def in_kernel_order(self, given: Addresses) -> tuple[int, ...]:
        return self._pick(given + self._rest)


def _new_dense(v: Tensor) -> Tensor:
    return v.new_empty(v.shape if v.ndim == 4 else output_shape(v))


class TokensLaunch(Launch):
    """A launch of prefill, decode or verify: tokens in, `out` as an output."""

    sizes: Any

    def __init__(
        self,
        operation: Operation,
        problem: Problem,
        plan: Plan,
        a: Any,
        sources: Mapping[str, str] = {},
        pointers: Any = None,
    ):
        super().__init__(operation, plan, a, {"o": "out", **sources}, pointers=pointers)
        self.strides = ready(operation.strides(problem, a))
        self.scale = a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale)
        self.bound = a.bound
        self.empty = tokens_of(a).num_sequences == 0
        self.v_at = self.given.index("v")
        self.out_at = None if a.out is None else self.given.index("out")
        """Position of out among the tensors; None: the launch allocates it."""
        self.o_at = self.fields.index("o")
        self.scales_at = self.given.index("out_scales") if writes_scales(a) else None
        self.new_output: Any = _new_dense
        if a.v.is_contiguous() and a.v.ndim == 4:
            self.new_output = torch.empty_like

    def pointers(self, given: Addresses) -> Any:
        if self.out_at is not None:
            return super().pointers(given)
        pointers = self.in_kernel_order(given)
        return pointers[: self.o_at], pointers[self.o_at + 1 :]

    def run(self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any) -> Any:
        if self.out_at is not None:
            out = tensors[self.out_at]
        else:
            out = self.new_output(tensors[self.v_at])
            before, after = pointers
            pointers = (*before, out.data_ptr(), *after)
        if self.empty:
            if self.scales_at is not None:
                tensors[self.scales_at].fill_(reference.LEAST_SCALE)
            return out.zero_()
        for function in self.functions:
            function(pointers, self.scale, self.bound, self.strides, self.sizes, stream)
        return out


# ---------------------------------------------------------------- strides and sizes


PREFETCH_HEADS = 1024
"""Prefetch states of launches with up to this many states (sequences x heads x layers).

About what the chip holds at once.
"""

TOKEN_TENSORS = ("q", "k", "v", "g", "beta", "z", "o", "out", "out_scales")
"""Tensors with a row per token."""
NUMBER_TENSORS = ("beta", "dt_bias", "norm_weight", "bias", "conv_bias")
"""Tensors with run-time dtypes bf16, fp16 or fp32; the other run-time dtypes are of indices."""


def value_heads(a: Any) -> int:
    """HV; v may be [N, T, H, R, V]."""
    return a.v.shape[2:-1].numel()


def output_shape(v: Tensor) -> tuple[int, ...]:
    return *v.shape[:2], v.shape[2:-1].numel(), v.shape[-1]


def output_of(a: Any) -> Tensor:
    """out, or one like the output that the launch of a call allocates."""
    return (
        torch.empty(output_shape(a.v), dtype=a.v.dtype, device="meta") if a.out is None else a.out
    )


def outputs_of(a: Any) -> dict[str, Tensor | None]:
    """The outputs whose strides a prefill, decode or verify passes."""
    return dict(o=output_of(a), out_scales=a.out_scales if writes_scales(a) else None)


def strides_of(wanted: Any, a: Any, **others: Tensor | list[int] | None) -> Any:
    """Strides in the fields of `wanted`, a tuple type of arguments.py.

    others: tensors (or strides in bytes) that are not arguments of the call. Tokens that are
    packed, or of one sequence, have sequence stride 0.
    """
    strides: list[int] = []
    for name, dims in wanted.dims.items():
        x = others[name] if name in others else getattr(a, name, None)
        steps = x if isinstance(x, list) else bytes_of(x, len(dims))
        one_sequence = (
            isinstance(x, Tensor)
            and name in TOKEN_TENSORS
            and (a.cu_seqlens is not None or x.shape[0] == 1)
        )
        strides += [0, *steps[1:]] if one_sequence else steps
    return wanted(*strides)


def kinds_of(wanted: Any, a: Any) -> dict[str, int]:
    """The fields `*_kind` of a kernel's sizes: the run-time dtypes of a call's tensors."""
    kinds = {}
    for field in wanted._fields:
        if field.endswith("_kind"):
            name = field.removesuffix("_kind")
            x = getattr(a, name, None)  # decode has no parents
            if name in NUMBER_TENSORS:
                kinds[field] = NO_KIND if x is None else KINDS[x.dtype]
            else:
                kinds[field] = 0 if x is None else x.element_size() // 4
    return kinds


def token_sizes(wanted: Any, a: Any) -> dict[str, int]:
    """The sizes that prefill, decode and verify share."""
    heads = dict(HV=value_heads(a), qk_head_factor=head_factor(value_heads(a), a.q.shape[2]))
    factor = fp32_bits(a.beta_logits + a.allow_neg_eigval)
    return dict(**kinds_of(wanted, a), **heads, beta_factor=factor, null_index=null_index(a))


def state_sizes(wanted: Any, a: Any, plan: Plan) -> dict[str, int]:
    """The sizes that decode and verify share."""
    N, HV = tokens_of(a).num_sequences, value_heads(a)
    return dict(
        **token_sizes(wanted, a),
        N=N,
        total=a.q.shape[1],
        P=a.state.shape[0],
        prefetch_sequences=N if plan.schedule.prefetch and N * HV <= PREFETCH_HEADS else 0,
        keep_in_l2=int(plan.schedule.keep_in_l2),
        **norm_sizes(a),
    )


def norm_sizes(a: Any) -> dict[str, int]:
    """The sizes that hold a norm's eps and activation, and whether its output's scale is given."""
    sigmoid = int(a.norm_activation == "sigmoid")
    scales = getattr(a, "out_scales", None)
    given = int(scales is not None and not writes_scales(a))
    return dict(norm_eps=fp32_bits(a.norm_eps), norm_sigmoid=sigmoid, out_scales_given=given)


def fp32_bits(x: float) -> int:
    """The bits of x in fp32, as a 32-bit int."""
    (bits,) = struct.unpack("i", struct.pack("f", x))
    return bits


def null_index(a: Any) -> int:
    """A call's null_index, clamped to 32 bits: no pool has as many slots."""
    return min(int(a.null_index), 2**31 - 1)


def bytes_of(x: Tensor | None, dims: int) -> list[int]:
    """The first `dims` strides of x in bytes; 0 for a missing dimension or tensor."""
    if x is None:
        return [0] * dims
    strides = [stride * x.element_size() for stride in x.stride()[:dims]]
    return strides + [0] * (dims - len(strides))


def ready(numbers: tuple[int, ...]) -> Any:
    """The numbers converted to TVM-FFI's own array: a launch then need not convert them."""
    import tvm_ffi

    return tvm_ffi.convert(numbers)


def head_factor(HV: int, H: int) -> int:
    """qk_head_factor of arguments.py."""
    return -(-(2**30) // (HV // H))


# ---------------------------------------------------------------- schedules


MIB = 2**20
LARGE = 64 * MIB
"""State bytes of a launch that exceed the 60 MB L2 of an H200."""


class Schedule(NamedTuple):
    """A kernel's split of the work. Constants of a variant, but for keep_in_l2 and prefetch."""

    rows: int
    """V rows in flight: of a thread, in verify of a warp."""
    threads: int
    """Threads of a CTA."""
    keep_in_l2: bool = False
    """Load states with L2's evict_last policy. Faster if the states far exceed L2; else it evicts
    other kernels' data."""
    prefetch: bool = True
    """Prefetch the states of a small launch into L2 before the previous kernel ends."""
    chunks: int = 1
    """decode: chunks of rows that a CTA processes one after the other."""
    cluster: bool = False
    """decode with a norm: the CTAs of a head, of at least 32 rows each, form a cluster. Otherwise
    one CTA processes all rows of a head, in as many chunks as that takes."""
    ctas_per_sm: int = 0
    """decode: limit registers so that this many CTAs fit on an SM; 0: no limit."""
    prefetch_chunks: int = 0
    """decode: prefetch only the first chunks of a CTA; 0: all."""
    bulk: bool = False
    """decode: one thread prefetches a CTA's states with one instruction; otherwise one per warp."""


Table = tuple[tuple[int, Schedule], ...]
"""(least state bytes of a launch, schedule), the largest first."""


def state_width(problem: Problem) -> str:
    """Key of the tables of schedules: states of equal size take equal time."""
    return "fp32" if problem.state_dtype == torch.float32 else "bf16"


def state_bytes(problem: Problem) -> int:
    """Bytes of one sequence's state in one layer."""
    assert problem.state_dtype is not None
    return problem.HV * problem.K * problem.V * problem.state_dtype.itemsize


MAX_NORM = 256
"""Largest V of a head that one CTA can process whole, as a norm requires."""

SCATTERED = (
    "states whose V rows lie next to each other (stride K) and start at multiples of 16 bytes"
)


class StateOperation(Operation):
    """decode, verify or flush: one kernel. The state bytes of a launch choose its schedule."""

    @abstractmethod
    def schedules(self, problem: Problem) -> Table: ...

    @abstractmethod
    def cta_rows(self, problem: Problem, schedule: Schedule) -> int:
        """V rows of a CTA, a divisor of V."""

    @abstractmethod
    def variant(self, problem: Problem, schedule: Schedule) -> compile.Variant:
        """The kernel and its compile-time constants.

        Sizes, index dtypes and most options of a call are run-time arguments.
        """

    def needs(self, problem: Problem) -> dict[str, bool]:
        K, V, options = problem.K, problem.V, problem.options
        return {
            f"K a multiple of 8 up to 128, got {K}": K % 8 != 0 or K > 128,
            f"V a multiple of 32, got {V}": V % 32 != 0,
            SCATTERED: "scattered_rows" in options,
            f"V up to {MAX_NORM} with a norm, got {V}": "norm" in options and V > MAX_NORM,
            "a buffer whose rows of k (decode: of u, too) start at multiples of 16 bytes": (
                "unaligned_buffer" in options
            ),
        }

    def plan(self, problem: Problem, sequences: int, tokens: int, *, gpu: Gpu = H200) -> Plan:
        """Raises UnsupportedProblem unless V is a multiple of 32."""
        if problem.V % 32:
            missing = tuple(self.missing(problem))
            raise UnsupportedProblem(f"no kernel runs {problem.label}; it needs", missing)
        launch_bytes = sequences * state_bytes(problem)
        schedule = next(
            schedule for least, schedule in self.schedules(problem) if launch_bytes >= least
        )
        if gpu.level == "sm_80":
            schedule = self.without_pdl(schedule)
        while problem.V % self.cta_rows(problem, schedule):
            schedule = self.halved(schedule)
        return Plan(schedule, (self.variant(problem, schedule),), gpu)

    def without_pdl(self, schedule: Schedule) -> Schedule:
        """The schedule where a kernel starts after the previous one's end, without clusters."""
        return schedule._replace(cluster=False, prefetch=False, prefetch_chunks=0, bulk=False)

    def halved(self, schedule: Schedule) -> Schedule:
        """The schedule with half the rows per CTA."""
        if schedule.rows > 1:
            return schedule._replace(rows=schedule.rows // 2)
        return schedule._replace(threads=schedule.threads // 2)

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        plans = [
            self.plan(problem, -(-least // state_bytes(problem)), 0, gpu=gpu)
            for least, _ in self.schedules(problem)
        ]
        return unique(variant for plan in plans for variant in plan.variants)
