"""Parts of a call (Gate, GatedNorm, ...), its checks, and `Problem`, its description.

The checks read shapes, dtypes, strides, flags and addresses. Only the backends read values on the
device (indices, cu_seqlens), so no check waits for a GPU.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .memory import overlap, overlaps_itself

MAX_DRAFT = 16
"""Most tokens per sequence in one decode or verify call."""
MAX_BUFFER = 32
"""Most tokens of a KVBuffer's row."""

TAPS = 4
"""Taps of a ShortConv; a window holds one input less."""

CHECKPOINT_INTERVAL = 64
"""prefill stores states after multiples of this many tokens, the end of a chunk in each backend."""

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DT_BIAS_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
GATE_KINDS = ("log", "softplus", "lower_bound")
LEAST_BOUND = -1e30
"""Least bound of a log decay (natural log): products with a smaller one may overflow fp32."""
ACTIVATIONS = ("silu", "sigmoid")
FP8 = torch.float8_e4m3fn
"""The dtype of a normalised output that goes to a matrix product in FP8."""
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Least and largest normal number of fp32, the kernels' type of scale and eps."""

CHECK = os.environ.get("GATED_DELTA_CHECK") == "1"
"""Check values on the device, such as indices and log decays; waits for the GPU."""

Item = TypeVar("Item", bound=Hashable)

PLAIN = (Tensor, torch.nn.Parameter)
_compiling, _modes = torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack
_jit_state = torch._C._get_tracing_state


def traced(x: object) -> bool:
    """Whether a call with this first tensor becomes a node of a graph.

    A tracer sees neither the kernels nor the values that the reference backend reads on the host.
    """
    return (
        _compiling()
        or (type(x) not in PLAIN and isinstance(x, Tensor))
        or _modes() > 0  # make_fx and torch.export, among others
        or _jit_state() is not None  # torch.jit.trace
    )


def unique(items: Iterable[Item]) -> list[Item]:
    """The items in their order, without repetitions."""
    return list(dict.fromkeys(items))


class UnsupportedProblem(NotImplementedError):
    """A valid call that a backend cannot run. `missing`: the reasons, one per entry."""

    missing: tuple[str, ...]

    def __init__(self, message: str, missing: tuple[str, ...] = ()):
        # super().__init__() would hide the message: torch.compile cannot trace it.
        self.message, self.missing = message, missing

    def __str__(self) -> str:
        return self.message + "".join(f"\n  - {reason}" for reason in self.missing)


Self = TypeVar("Self", bound="_Tensors")


class _Tensors:
    """Base of Gate, GatedNorm, ...: dataclasses with tensors among their fields."""

    def to(self: Self, device: torch.device | str) -> Self:
        """A copy with its tensors on `device`; shares tensors that are on it already."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={_shown(x)}" for name, x in vars(self).items())
        return f"{type(self).__name__}({fields})"


def _shown(x: object) -> str:
    return f"{list(x.shape)} {x.dtype} {x.device}" if isinstance(x, Tensor) else repr(x)


@dataclass(frozen=True, eq=False, repr=False)
class Gate(_Tensors):
    """How `g` becomes the natural-log decay, in fp32.

    Build one with `Gate.log`, `Gate.softplus` or `Gate.lower_bound`. A_log: [HV] fp32. dt_bias:
    [HV] (GDN) or [HV, K] (KDA), fp32 or bf16. bound: natural log, below zero and at least -1e30.
    """

    kind: str = "log"
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    bound: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in GATE_KINDS:
            raise ValueError(
                f"Gate kind: expected one of {', '.join(GATE_KINDS)}, got {self.kind!r}"
            )
        if self.kind != "lower_bound" and self.bound != 0.0:
            raise ValueError(f"bound: expected 0.0 with kind={self.kind!r}, got {self.bound!r}")
        if self.kind == "log":
            return
        A_log = _tensor("A_log", self.A_log, (torch.float32,))
        if A_log.ndim != 1:
            raise ValueError(f"A_log: expected shape [HV], got {list(A_log.shape)}")
        if self.dt_bias is not None:
            _tensor("dt_bias", self.dt_bias, DT_BIAS_DTYPES)
            if self.dt_bias.ndim not in (1, 2):
                raise ValueError(
                    f"dt_bias: expected shape [HV] or [HV, K], got {list(self.dt_bias.shape)}"
                )
        if self.kind == "lower_bound":
            bound = number("bound", self.bound)
            if not LEAST_BOUND <= bound < 0:
                expected = f"a number from {LEAST_BOUND:g} to below 0 (natural log)"
                raise ValueError(f"bound: expected {expected}, got {self.bound}")
            object.__setattr__(self, "bound", bound)

    @staticmethod
    def log() -> Gate:
        """log_decay = g, at most 0 (FLA's convention for an activated gate)."""
        return Gate("log")

    @staticmethod
    def softplus(A_log: Tensor, dt_bias: Tensor | None = None) -> Gate:
        """log_decay = -exp(A_log) * softplus(g + dt_bias).

        Gated DeltaNet's (arXiv 2412.06464), in Mamba-2's parametrisation.
        """
        return Gate("softplus", A_log, dt_bias)

    @staticmethod
    def lower_bound(A_log: Tensor, dt_bias: Tensor | None = None, bound: float = -5.0) -> Gate:
        """log_decay = bound * sigmoid(exp(A_log) * (g + dt_bias)): Kimi's safe gate.

        bound < log_decay < 0.
        """
        return Gate("lower_bound", A_log, dt_bias, bound)


LOG = Gate.log()


@dataclass(frozen=True, eq=False, repr=False)
class GatedNorm(_Tensors):
    """A layer's gated RMSNorm of o, in fp32: o * rsqrt(mean(o * o) + eps) * weight * act(z).

    The mean is over V of each head. weight: [V], fp32, bf16 or fp16. eps: above 0 and finite in
    fp32. activation: of the gate z, "silu" or "sigmoid". Raises TypeError or ValueError naming the
    argument.
    """

    weight: Tensor
    eps: float = 1e-6
    activation: str = "silu"

    def __post_init__(self) -> None:
        _tensor("weight", self.weight, STATE_DTYPES)
        if self.weight.ndim != 1:
            raise ValueError(f"weight: expected shape [V], got {list(self.weight.shape)}")
        eps = number("eps", self.eps)
        if not TINY <= eps <= HUGE:  # a smaller eps is 0 in fp32: a row of zeros becomes NaN
            raise ValueError(
                f"eps: expected a finite number from {TINY:.1e} to {HUGE:.1e}, got {self.eps}"
            )
        object.__setattr__(self, "eps", eps)
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: expected one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class ShortConv(_Tensors):
    """A layer's causal convolution of q, k and v, a channel on its own, in fp32:
    act(bias + sum_{i<4} weight[:, i] * x_{t-3+i}), the oldest tap first.

    weight: [C, 4], contiguous, the channels of q, then k, then v: C = 2*H*K + HV*V. bias: [C] or
    None. Both fp32, bf16 or fp16. activation: "silu" or None. Raises TypeError or ValueError
    naming the argument.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = "silu"

    def __post_init__(self) -> None:
        _tensor("weight", self.weight, STATE_DTYPES)
        if self.weight.ndim != 2 or self.weight.shape[1] != TAPS:
            raise ValueError(f"weight: expected shape [C, {TAPS}], got {list(self.weight.shape)}")
        if not self.weight.is_contiguous():
            strides = list(self.weight.stride())
            raise ValueError(f"weight: expected a contiguous tensor, got strides {strides}")
        if self.bias is not None and _tensor("bias", self.bias, STATE_DTYPES).ndim != 1:
            raise ValueError(f"bias: expected shape [C], got {list(self.bias.shape)}")
        if self.activation not in ("silu", None):
            raise ValueError(f"activation: expected 'silu' or None, got {self.activation!r}")


@dataclass(frozen=True, eq=False, repr=False)
class KVBuffer(_Tensors):
    """`verify` fills it for `flush`: about 2*T*d fp32 numbers per head; T cached states take T*d*d.

    u: [rows, T, HV, V], the corrections u_t = beta_t * (v_t - S k_t). k: [rows, T, H, K],
    normalised if the call normalised. log_decay: [rows, T, HV] (gate "head", GDN) or [rows, T, HV,
    K] (gate "channel", KDA). With layers, each has a first dimension L. Raises TypeError for a part
    that is no tensor, ValueError for a nested one.
    """

    u: Tensor
    k: Tensor
    log_decay: Tensor

    def __post_init__(self) -> None:
        for name in ("u", "k", "log_decay"):
            if not isinstance(x := getattr(self, name), Tensor):
                raise TypeError(f"buffer.{name}: expected a torch.Tensor, got {type_name(x)}")
            refuse_nested(f"buffer.{name}", x)

    @staticmethod
    def empty(
        rows: int,
        T: int,
        H: int,
        HV: int,
        K: int,
        V: int,
        *,
        gate: str = "head",
        num_layers: int | None = None,
        device: torch.device | str | None = None,
    ) -> KVBuffer:
        """Uninitialised buffer for `rows` sequences of up to T (1..32) tokens.

        gate: "head" (GDN) or "channel" (KDA). num_layers: L, for a buffer of every layer; None for
        a buffer of one layer, without that dimension. Raises TypeError for a size that is not an
        int; ValueError for a size below 1 (rows and num_layers: below 0), T over 32, HV not a
        multiple of H, or another gate.
        """
        if gate not in ("head", "channel"):
            raise ValueError(f'gate: expected "head" (GDN) or "channel" (KDA), got {gate!r}')
        sizes = dict(rows=rows, T=T, H=H, HV=HV, K=K, V=V) | (
            {} if num_layers is None else dict(num_layers=num_layers)
        )
        for name, given in sizes.items():
            size = integer(name, given)
            if size < (least := 0 if name in ("rows", "num_layers") else 1):
                raise ValueError(f"{name}: expected {least} or more, got {size}")
        if T > MAX_BUFFER:
            raise ValueError(f"T: expected at most {MAX_BUFFER} tokens, got {T}")
        if HV % H:
            raise ValueError(f"HV: expected a multiple of H={H}, got {HV}")
        lead = (rows, T) if num_layers is None else (num_layers, rows, T)
        channels = (K,) if gate == "channel" else ()

        def new(*shape: int) -> Tensor:
            return torch.empty(*lead, *shape, dtype=torch.float32, device=device)

        return KVBuffer(u=new(HV, V), k=new(H, K), log_decay=new(HV, *channels))

    def layer(self, i: int) -> KVBuffer:
        """View of layer i of a buffer made with num_layers."""
        if self.u.ndim != 5:
            raise ValueError(
                "layer: expected a buffer made with num_layers=L, got one without layers"
            )
        return KVBuffer(self.u[i], self.k[i], self.log_decay[i])

    def advance(self, lens: Tensor, tokens: int | Tensor = 1) -> None:
        """Update `decode`'s buffer_lens after a step of `tokens` tokens per sequence, in place.

        lens: [N], int32 or int64, read as by decode. tokens: an int from 0 to 16, or an int32 or
        int64 tensor [N] for packed sequences, in memory apart from lens; on a CPU, and with
        GATED_DELTA_CHECK=1, another number is a ValueError, otherwise it is clamped. A row that the
        step folded is empty afterwards; without tokens a length stays as it is. Every layer of a
        step reads the same lens, so call it once, after the last one. Raises TypeError or
        ValueError naming the argument, before lens is written.
        """
        if self.u.ndim not in (4, 5):
            expected = "expected [rows, T, HV, V], or [L, rows, T, HV, V]"
            raise ValueError(f"buffer.u: {expected}, got {list(self.u.shape)}")
        _check_advance(lens, tokens)
        C = self.u.shape[-3]

        def after(added: Any) -> Tensor:
            return (lens + added).masked_fill_((lens < 0) | (lens > C - added), 0)

        if isinstance(tokens, Tensor):
            added = tokens.clamp(0, MAX_DRAFT)
            lens.copy_(torch.where(added > 0, after(added), lens))
        elif tokens:
            lens.copy_(after(int(tokens)))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the three tensors."""
        return sum(t.numel() * t.element_size() for t in (self.u, self.k, self.log_decay))


torch.serialization.add_safe_globals([Gate, GatedNorm, KVBuffer, ShortConv])  # for torch.load


class Tokens(NamedTuple):
    """The arguments shared by prefill, decode and verify."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate = LOG
    scale: float | None = None
    qk_l2norm: bool = True
    beta_logits: bool = False
    allow_neg_eigval: bool = False
    cu_seqlens: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> Tokens:
        """The tokens with f applied to each tensor that has a row per token."""
        return self._replace(q=f(self.q), k=f(self.k), v=f(self.v), g=f(self.g), beta=f(self.beta))

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def flush_sequences(*given: object) -> int:
    """Sequences of a flush: the length of any of its num_accepted and indices that is a tensor."""
    return next(x.shape[0] for x in given if isinstance(x, Tensor))


SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Problem:
    """The static facts of a call: the input of dispatch, errors, test ids and benchmark labels.

    Sizes that kernels take at run time (N, P, total tokens) are not among them.
    """

    op: str
    axis: str
    """"head": one decay per value head (GDN); "channel": one per key channel (KDA); "" without a
    decay, in short_conv."""
    H: int
    HV: int
    K: int
    V: int
    T: int | None = None
    """Most tokens of a sequence. decode and verify: T if dense, 16 if packed (verify: at most the
    buffer's T). flush: the buffer's T. prefill: None."""
    gate: str | None = None
    dtype: torch.dtype | None = None
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    qk_l2norm: bool = True
    beta_logits: bool = False
    grid: int | None = None
    """Tokens of a segment, of a prefill with deterministic=L."""
    options: frozenset[str] = frozenset()
    """Optional parts of the call: each index tensor, with its dtype (cu_seqlens_i32,
    buffer_lens_i64, ...), and pool, token_slots, has_initial_state, initial_state, final_state,
    checkpoints, intermediates, no_update, layers, buffer, norm, fp8, deterministic,
    allow_neg_eigval. Of a convolution: conv, conv_bias, conv_weight_bf16 and other dtypes; of
    short_conv: unactivated.
    Also rows that 16-byte accesses cannot read: unaligned_qk, of q or k; scattered_rows, V rows of
    a state, which must be contiguous too; unaligned_buffer, of a buffer's k; unaligned_weight, of a
    convolution's; unaligned_values, of v or out, or of KDA's g, in a prefill."""

    def facts(self, *names: str) -> dict[str, Any]:
        """These fields, with dtypes as in SHORT: compile-time constants of a kernel."""
        values = {name: getattr(self, name) for name in names}
        return {name: SHORT.get(value, value) for name, value in values.items()}

    @property
    def model(self) -> str:
        """The field's name for the gate's axis: "gdn" or "kda"."""
        return {"head": "gdn", "channel": "kda"}[self.axis]

    @property
    def label(self) -> str:
        """The problem as one word, for benchmark labels and test ids."""
        parts = [self.op, *([self.model] if self.axis else [])]
        parts += [f"h{self.H}x{self.HV}", f"k{self.K}v{self.V}"]
        if self.T is not None:
            parts.append(f"t{self.T}")
        parts += [self.gate] if self.gate else []
        if self.dtype is not None:
            parts.append(
                SHORT[self.dtype] + "".join(f"-{n}_{SHORT[d]}" for n, d in self._odd_dtypes())
            )
        if self.state_dtype is not None:
            parts.append(f"state_{SHORT[self.state_dtype]}")
        if self.dtype is not None:
            parts += [] if self.qk_l2norm else ["no_l2norm"]
            parts += ["beta_logits"] if self.beta_logits else []
        parts += [f"grid{self.grid}"] if self.grid else []
        return "-".join(parts + sorted(self.options))

    def _odd_dtypes(self) -> list[tuple[str, torch.dtype]]:
        pairs = [("g", self.g_dtype), ("beta", self.beta_dtype)]
        return [(name, dtype) for name, dtype in pairs if dtype is not None and dtype != self.dtype]

    def __str__(self) -> str:
        return self.label


# Error messages have one form: "argument: expected ..., got ...".


def type_name(x: object) -> str:
    """x's type in error messages, with its module: numpy has a bool too."""
    kind = type(x)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: expected dtype {' or '.join(str(d) for d in dtypes)}, got {x.dtype}"
        )
    refuse_nested(name, x)
    return x


def refuse_nested(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise ValueError(f"{name}: expected a plain strided tensor, got a nested one")


def refuse_grad(name: str, x: Tensor) -> None:
    """Raise UnsupportedProblem where a gradient for x would be lost."""
    if x.requires_grad and torch.is_grad_enabled():
        message = f"{name} requires grad, and gated_delta has no backward: "
        message += "call it under torch.no_grad() or torch.inference_mode()"
        raise UnsupportedProblem(message, ("backward",))


def absent(name: str, x: object, when: str) -> None:
    """Raise ValueError unless x is None. when: the condition, for the message."""
    if x is not None:
        kind = "tensor" if isinstance(x, Tensor) else "value"
        raise ValueError(f"{name}: expected None {when}, got a {kind}")


def number(name: str, x: object) -> float:
    """x, a Python or numpy number, as a float; inf if it is too large for one."""
    if not isinstance(x, Real) or isinstance(x, bool):
        raise TypeError(f"{name}: expected a number, got {type_name(x)}")
    try:
        return float(x)
    except OverflowError:
        return math.inf


def _check_advance(lens: Tensor, tokens: int | Tensor) -> None:
    """The checks of `KVBuffer.advance`; under a tracer of shapes and dtypes alone."""
    given = {"lens": lens} | ({"tokens": tokens} if isinstance(tokens, Tensor) else {})
    for name, x in given.items():
        _tensor(name, x, INDEX_DTYPES)
        if x.ndim != 1 or x.shape != lens.shape:
            N = lens.shape[0] if lens.ndim == 1 else "N"
            raise ValueError(f"{name}: expected shape [N] = [{N}], got {list(x.shape)}")
    expected = f"tokens: expected 0 to {MAX_DRAFT}, got"
    if "tokens" not in given:
        one = integer("tokens", tokens, "an int or an int tensor [N]")
        if not 0 <= one <= MAX_DRAFT:
            raise ValueError(f"{expected} {one}")
    if traced(lens):
        return
    check = Checker()
    for name, x in given.items():
        check.index(name, x)
    check.writes("lens")
    if isinstance(tokens, Tensor) and (CHECK or tokens.device.type == "cpu"):
        for n, m in enumerate(tokens.tolist()):
            if not 0 <= m <= MAX_DRAFT:
                raise ValueError(f"{expected} {m} at sequence {n}")


def last_dim_contiguous(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {list(x.stride())}"
        )


def integer(name: str, x: object, expected: str = "an int") -> int:
    """x, a Python or numpy integer, as an int."""
    if not isinstance(x, Integral) or isinstance(x, bool):
        raise TypeError(f"{name}: expected {expected}, got {type_name(x)}")
    return int(x)


def check_written(written: dict[str, Tensor], read: dict[str, Tensor] | None = None) -> None:
    """Raise ValueError unless a call may write these tensors.

    No two elements that the call writes may share memory, nor may an element that it reads.
    """
    for name, x in written.items():
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: expected a tensor that may be written here, got one made "
                "under torch.inference_mode(): call the operation under it too, or make it outside"
            )
        if overlaps_itself(x):
            shape, strides = list(x.shape), list(x.stride())
            raise ValueError(
                f"{name}: expected memory of its own for every element, "
                f"got shape {shape}, strides {strides}"
            )
    others = written | (read or {})
    for name, x in written.items():
        for other, y in others.items():
            if other != name and overlap(x, y):
                raise ValueError(
                    f"{name}: expected memory apart from all other tensors of the call, "
                    f"got some of {other}'s"
                )


@functools.cache
def _names(dims: str) -> tuple[str, ...]:
    return tuple(dims.split())


class _Sizes(dict[str, int]):
    """Sizes by name: the first tensor with a dimension sets its size, later ones must agree.

    A name that is a number is that size.
    """

    def bind(self, name: str, x: Tensor, dims: str) -> None:
        names, shape = _names(dims), list(x.shape)
        listed = f"[{', '.join(names)}]"
        if len(shape) != len(names):
            raise ValueError(
                f"{name}: expected {len(names)} dimensions {listed}, got shape {shape}"
            )
        for dim, size in zip(names, shape, strict=True):
            if self.setdefault(dim, int(dim) if dim.isdigit() else size) != size:
                wanted = ", ".join(str(self.get(dim, dim)) for dim in names)
                raise ValueError(f"{name}: expected shape {listed} = [{wanted}], got {shape}")


BUFFER = {"buffer_u": "buffer.u", "buffer_k": "buffer.k", "buffer_log_decay": "buffer.log_decay"}
"""A KVBuffer's tensors among an operation's arguments, and their names in errors."""


def _lead(a: Any) -> str:
    """The first two dimensions of what has a row a token."""
    return "N T" if a.cu_seqlens is None else "1 total"


class Checker:
    """Checks a call argument by argument, and collects the facts of its Problem."""

    def __init__(self) -> None:
        self.sizes = _Sizes()
        self.options: set[str] = set()
        self.device: torch.device | None = None
        self.tensors: dict[str, Tensor] = {}

    def tensor(
        self, name: str, x: object, dtypes: tuple[torch.dtype, ...], dims: str | None = None
    ) -> Tensor:
        x = _tensor(name, x, dtypes)
        if x.layout != torch.strided or x.is_neg():
            kind = f"layout {x.layout}, negated={x.is_neg()}"
            raise ValueError(f"{name}: expected a plain strided tensor, got {kind}")
        if dims is not None:
            self.sizes.bind(name, x, dims)
        if self.device is None:
            self.device = x.device
        elif x.device != self.device:
            raise ValueError(
                f"{name}: expected device {self.device}, the first tensor's, got {x.device}"
            )
        if x.is_meta:
            raise ValueError(f"{name}: expected a tensor with data, got one on the meta device")
        try:
            lost = x.numel() > 0 and not x.data_ptr()
            wrapped = lost and x.untyped_storage().nbytes() > 0
        except RuntimeError:
            wrapped = True
        if wrapped:
            when = "as in tracing and under torch.func's transforms"
            raise UnsupportedProblem(f"{name} has no memory of its own, {when}", ("memory",))
        if lost:
            raise ValueError(
                f"{name}: expected a tensor with data, got one whose storage was freed"
            )
        refuse_grad(name, x)
        self.tensors[name] = x
        return x

    def flag(self, name: str, x: object) -> None:
        if not isinstance(x, bool):
            raise TypeError(f"{name}: expected True or False, got {type_name(x)}")

    def aligned(self, x: Tensor) -> bool:
        """Whether each row of x starts at a multiple of 16 bytes."""
        strides = (
            stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1
        )
        return x.data_ptr() % 16 == 0 and all(
            stride * x.element_size() % 16 == 0 for stride in strides
        )

    def option(self, name: str, on: bool) -> None:
        if on:
            self.options.add(name)

    def qkv(self, a: Any, query: str = "q", groups: str = "") -> str:
        """Check cu_seqlens, and the dimensions of q, k and v. Returns the first two of them.

        query: q's name in errors. groups: v may be [N, T, groups, R, V], with that many groups.
        """
        dtype = self.tensor(query, a.q, INPUT_DTYPES).dtype
        if a.cu_seqlens is not None:
            self.index("cu_seqlens", a.cu_seqlens, "N+1")
            if a.cu_seqlens.shape[0] < 1:
                raise ValueError("cu_seqlens: expected shape [N+1], got [0]")
            if a.q.shape[:1] != (1,):
                expected = "expected packed tokens [1, total, H, K] with cu_seqlens"
                raise ValueError(f"{query}: {expected}, got {list(a.q.shape)}")
            self.sizes["N"] = a.cu_seqlens.shape[0] - 1
        lead = _lead(a)
        self.sizes.bind(query, a.q, f"{lead} H K")
        self.tensor("k", a.k, (dtype,), f"{lead} H K")
        in_groups = groups and isinstance(a.v, Tensor) and a.v.ndim == 5
        self.tensor("v", a.v, (dtype,), f"{lead} {groups} R V" if in_groups else f"{lead} HV V")
        return lead

    def heads(self, a: Any, query: str = "q") -> None:
        """Check rows and heads of q, k and v, whose dimensions are checked."""
        for name, x in ((query, a.q), ("k", a.k), ("v", a.v)):
            last_dim_contiguous(name, x)
        H, HV = a.q.shape[2], a.v.shape[2:-1].numel()
        if min(H, HV, self.sizes["K"], self.sizes["V"]) < 1:
            shapes = f"{query} {list(a.q.shape)}, v {list(a.v.shape)}"
            raise ValueError(f"{query}, v: expected at least one head and channel, got {shapes}")
        if HV % H:
            raise ValueError(
                f"v: expected HV to be a multiple of H={H} (grouped value heads), got HV={HV}"
            )
        self.sizes["HV"] = HV

    def convolution(
        self, a: Any, weight: Tensor, bias: Tensor | None, inside: bool = False
    ) -> None:
        """Check a ShortConv of q, k and v, whose heads are checked, and its windows.

        inside: of another operation, which has options for it.
        """
        H, HV, K, V = (self.sizes[name] for name in ("H", "HV", "K", "V"))
        self.sizes["C"] = 2 * H * K + HV * V
        self.tensor("conv.weight", weight, STATE_DTYPES, f"C {TAPS}")
        if bias is not None:
            self.tensor("conv.bias", bias, STATE_DTYPES, "C")
        self.tensor("windows", a.windows, (a.q.dtype,), f"P C {TAPS - 1}")
        if inside:
            self.option("conv", True)
            self.option(f"conv_weight_{SHORT[weight.dtype]}", True)
            self.option("conv_bias", bias is not None)
            self.option("unaligned_weight", not self.aligned(weight[:1]))

    def tokens(self, a: Any, query: str = "q") -> None:
        """Check q to cu_seqlens of a call with tokens, with gate, scale and flags.

        query: q's name in errors.
        """
        grouped = by_qk_head(a)
        lead = self.qkv(a, query, "H" if grouped else "")
        heads = "H R" if grouped else "HV"
        self.tensor("g", a.g, INPUT_DTYPES)
        if a.g.ndim not in (3, 4):
            raise ValueError(
                f"g: expected [N, T, HV] (GDN) or [N, T, HV, K] (KDA), got shape {list(a.g.shape)}"
            )
        gate_heads = "HV" if grouped or a.g.ndim == 3 else "HV K"
        self.sizes.bind("g", a.g, f"{lead} {heads if grouped else gate_heads}")
        self.tensor("beta", a.beta, INPUT_DTYPES, f"{lead} {heads}")
        self.heads(a, query)
        if a.A_log is not None:
            self.tensor("A_log", a.A_log, (torch.float32,), "HV")
        if a.dt_bias is not None:
            self.tensor("dt_bias", a.dt_bias, DT_BIAS_DTYPES, gate_heads)
        size = 0.0 if a.scale is None else abs(number("scale", a.scale))
        if size != 0 and not TINY <= size <= HUGE:
            expected = f"a finite number, 0 or of {TINY:.1e} to {HUGE:.1e} in size"
            raise ValueError(f"scale: expected {expected}, got {a.scale}")
        self.flag("qk_l2norm", a.qk_l2norm)
        self.flag("beta_logits", a.beta_logits)
        self.flag("allow_neg_eigval", a.allow_neg_eigval)
        if a.allow_neg_eigval and not a.beta_logits:
            raise ValueError("beta_logits: expected True with allow_neg_eigval=True, got False")
        self.option("allow_neg_eigval", a.allow_neg_eigval)

    def vectors(self, a: Any, *states: Tensor | None) -> None:
        """Note rows that 16-byte accesses cannot read."""
        self.option("unaligned_qk", a is not None and not all(self.aligned(x) for x in (a.q, a.k)))
        self.option(
            "scattered_rows",
            not all(x is None or (self.aligned(x) and x.stride(-2) == x.shape[-1]) for x in states),
        )

    def values(self, *given: Tensor | None) -> None:
        """Note other rows that 16-byte accesses cannot read."""
        rows = (x for x in given if x is not None)
        aligned = all(self.aligned(x) and x.stride(-1) == 1 for x in rows)
        self.option("unaligned_values", not aligned)

    def max_seqlen(self, a: Any) -> None:
        if a.cu_seqlens is None:
            absent("max_seqlen", a.max_seqlen, "without cu_seqlens")
        elif a.max_seqlen is not None and integer("max_seqlen", a.max_seqlen, "an int or None") < 0:
            raise ValueError(f"max_seqlen: expected 0 or more, got {a.max_seqlen}")

    def draft_length(self, packed: bool) -> None:
        if packed:
            self.sizes["T"] = MAX_DRAFT
        elif not 1 <= self.sizes["T"] <= MAX_DRAFT:
            raise ValueError(
                f"q: expected 1 to {MAX_DRAFT} tokens per sequence, got T={self.sizes['T']}"
            )

    def state(
        self, name: str, x: object, dims: str, dtypes: tuple[torch.dtype, ...] = STATE_DTYPES
    ) -> Tensor:
        x = self.tensor(name, x, dtypes, dims)
        last_dim_contiguous(name, x)
        return x

    def index(self, name: str, x: object, dims: str = "N") -> None:
        if x is None:
            return
        x = self.tensor(name, x, INDEX_DTYPES, dims)
        self.options.add(f"{name}_{SHORT[x.dtype]}")

    def null_index(self, null_index: object, *slots: Tensor | None) -> None:
        """slots: the call's tensors of slots."""
        if not -1 <= integer("null_index", null_index) < 2**63:  # torch.library has 64 bits
            raise ValueError(f"null_index: expected -1 or more, below 2**63, got {null_index}")
        if null_index != -1 and all(x is None for x in slots):
            expected = "expected -1 without state_indices (sequence n has slot n)"
            raise ValueError(f"null_index: {expected}, got {null_index}")

    def one_each(self, name: str, dim: str, indices: Tensor | None = None) -> None:
        """Without indices sequence n uses entry n, so there must be N entries."""
        size, N = self.sizes[dim], self.sizes["N"]
        if indices is None and size < N:
            expected = f"expected {dim} >= N={N}, one for each sequence"
            raise ValueError(f"{name}: {expected}, got {dim}={size}")

    def norm(self, a: Any, grouped: bool = False) -> None:
        """Check norm and z: both or neither. grouped: z may be [N, T, H, HV / H, V]."""
        if a.norm_weight is None:
            absent("z", a.z, "without norm")
            return
        if a.z is None:
            raise ValueError("z: expected a tensor with norm, got None")
        if grouped and isinstance(a.z, Tensor) and a.z.ndim == 5:
            self.sizes["HV/H"] = self.sizes["HV"] // self.sizes["H"]
            self.tensor("z", a.z, (a.v.dtype,), f"{_lead(a)} H HV/H V")
        else:
            self.like_v("z", a.z, a)
        last_dim_contiguous("z", a.z)
        self.tensor("norm.weight", a.norm_weight, STATE_DTYPES, "V")
        self.option("norm", True)

    def out(self, a: Any) -> None:
        scales = getattr(a, "out_scales", None)
        if a.out is None or scales is None:
            absent("out_scales", scales, "without out")
            if a.out is not None:
                self.like_v("out", a.out, a)
            return
        if a.norm_weight is None:
            absent("out_scales", scales, "without norm")
        self.like_v("out", a.out, a, FP8)
        dims = {0: "", 1: "1"}.get(getattr(scales, "ndim", 3), f"{_lead(a)} HV")
        self.tensor("out_scales", scales, (torch.float32,), dims)
        self.option("fp8", True)

    def like_v(self, name: str, x: object, a: Any, dtype: torch.dtype | None = None) -> None:
        shape = [*a.v.shape[:2], self.sizes["HV"], a.v.shape[-1]]
        if list(self.tensor(name, x, (dtype or a.v.dtype,)).shape) != shape:
            raise ValueError(
                f"{name}: expected v's shape {shape}, got {list(self.tensors[name].shape)}"
            )

    def buffer(self, a: Any, lead: str) -> str:
        """Check a buffer and return its axis."""
        channel = (
            isinstance(a.buffer_log_decay, Tensor)
            and a.buffer_log_decay.ndim > len(lead.split()) + 2
        )
        parts = (a.buffer_u, a.buffer_k, a.buffer_log_decay)
        for name, x, dims in zip(
            BUFFER.values(), parts, ("HV V", "H K", "HV K" if channel else "HV"), strict=True
        ):
            self.tensor(name, x, (torch.float32,), f"{lead} C {dims}")
            if dims != "HV":  # GDN's log decays may have any strides
                last_dim_contiguous(name, self.tensors[name])
        if not 1 <= self.sizes["C"] <= MAX_BUFFER:
            raise ValueError(
                f"buffer: expected room for 1 to {MAX_BUFFER} tokens, got {self.sizes['C']}"
            )
        if not all(self.sizes[name] for name in ("H", "HV", "K", "V")):
            shapes = f"u {list(a.buffer_u.shape)}, k {list(a.buffer_k.shape)}"
            raise ValueError(f"buffer: expected at least one head and channel, got {shapes}")
        return "channel" if channel else "head"

    def buffer_of_tokens(self, a: Any) -> None:
        """Check the buffer of a call with tokens, and its indices."""
        axis = self.buffer(a, "rows")
        if not by_qk_head(a) and axis != axis_of(a.g):
            expected = f"expected gate={axis_of(a.g)!r}, as g has {a.g.ndim} dimensions"
            raise ValueError(f"buffer: {expected}, got a buffer with gate={axis!r}")
        self.index("buffer_indices", a.buffer_indices)
        self.one_each("buffer", "rows", a.buffer_indices)
        self.option("unaligned_buffer", not self.aligned(a.buffer_k))

    def writes(self, *names: str) -> None:
        """Check the tensors that the call writes: those of `names` that it passes."""
        names = tuple(BUFFER.get(name, name) for name in names)
        written = {name: self.tensors[name] for name in names if name in self.tensors}
        check_written(written, self.tensors)

    def problem(self, op: str, a: Any, state_dtype: torch.dtype, T: int | None) -> Problem:
        """The problem of a call with tokens."""
        facts: dict[str, Any] = {name: self.sizes[name] for name in ("H", "HV", "K", "V")}
        facts |= dict(
            dtype=a.q.dtype, g_dtype=a.g.dtype, beta_dtype=a.beta.dtype, state_dtype=state_dtype
        )
        facts |= dict(gate=a.gate, qk_l2norm=a.qk_l2norm, beta_logits=a.beta_logits)
        axis = "head" if by_qk_head(a) else axis_of(a.g)
        return Problem(op, axis, T=T, **facts, options=frozenset(self.options))


def by_qk_head(a: Any) -> bool:
    """Whether a call with a convolution has v [N, T, H, R, V], g and beta [N, T, H, R]."""
    conv = getattr(a, "conv_weight", None) is not None
    return conv and isinstance(a.v, Tensor) and a.v.ndim == 5


def axis_of(g: Tensor) -> str:
    """Problem.axis."""
    return "head" if g.ndim == 3 else "channel"
