"""What an engine would run on gated_delta for a model, mode by mode: `check --engine`.

It reads the model's config.json, loads no weights, imports no engine, and asks the functions of
the plug-ins about calls like the layers'.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.table import Table

from . import compile
from .gpus import GPUS, PRODUCTS, Gpu, card_of, gpu_of, product
from .integrations.engine import card_check, load, releases
from .integrations.engine.projection import MOST_HEADS
from .integrations.sglang.kernels import ring_lacks
from .integrations.sglang.norm import SWITCH
from .integrations.sglang.process import drafts_need
from .integrations.sglang.start import Layer, in_fp8
from .integrations.vllm.calls import Recurrence, room, too_many
from .ops.launch import MAX_NORM
from .options import MAX_DIM, MAX_HEADS
from .problem import INPUT_DTYPES, MAX_DRAFT, SHORT, KVBuffer, UnsupportedProblem, unique
from .results import make_table
from .testing import AnyCase

ENGINES = dict(sglang="SGLang", vllm="vLLM")
RELEASES = dict(sglang=releases.SGLANG, vllm=releases.VLLM["cuda"])
MODES = dict(sglang=("decode", "prefill", "verify"), vllm=("decode", "prefill"))
"""As the engines' logs name them. vLLM's decode includes drafts."""
PROMPTS = ("prefill", "short_conv")
"""Operations of the mode "prefill"."""
WHERE = dict(states="as states", kvbuffer="in a KVBuffer (GATED_DELTA_{}_KVBUFFER=1)")
"""Places of drafts, with the engine's name."""
DEFAULT = "H100"
"""The GPU where there is none."""
MAX_STATE = 2**24
"""Numbers of a state on one rank, over all heads. Models have up to 2**21."""
SGLANG_STATES = "SGLANG_MAMBA_SSM_DTYPE"


class Sizes(NamedTuple):
    """A model's linear layers: "GDN" or "KDA", their number, heads and head dims."""

    family: str
    layers: int
    H: int
    HV: int
    K: int
    V: int
    lower_bound: float | None = None

    def __str__(self) -> str:
        gate = "" if self.lower_bound is None else f", gate above {self.lower_bound}"
        heads = f"H={self.H} HV={self.HV} K={self.K} V={self.V}"
        return f"{self.layers} {self.family} layers, {heads}{gate}"


class Entry(NamedTuple):
    """The values that an entry of a config.json may have, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _count(most: int) -> Entry:
    words = f"an integer from 1 to {most:,}"
    return Entry(words, lambda x: type(x) is int and 1 <= x <= most)


def _list(kind: type, words: str) -> Entry:
    return Entry(
        f"a list of {words}", lambda x: type(x) is list and all(type(y) is kind for y in x)
    )


HEADS, DIM, LAYERS = _count(MAX_HEADS), _count(MAX_DIM), _count(2**16)
INDICES, TYPES = _list(int, "integers"), _list(str, "strings")
FLAG = Entry("true or false", lambda x: type(x) is bool)
TEXT = Entry("a string", lambda x: type(x) is str)
BOUND = Entry(
    "a number from -1e30 to below 0", lambda x: type(x) in (int, float) and -1e30 <= x < 0
)
GROUPS = Entry(f"{LAYERS.words}, or {INDICES.words}", lambda x: LAYERS.holds(x) or INDICES.holds(x))
ENTRIES = dict(
    model_type=TEXT,
    dtype=TEXT,
    torch_dtype=TEXT,
    mamba_ssm_dtype=TEXT,
    linear_allow_neg_eigval=FLAG,
    linear_num_key_heads=HEADS,
    linear_num_value_heads=HEADS,
    linear_key_head_dim=DIM,
    linear_value_head_dim=DIM,
    num_hidden_layers=LAYERS,
    layer_types=TYPES,
    full_attention_layers=INDICES,
    full_attention_interval=LAYERS,
    linear_attn_config=Entry("an object", lambda x: isinstance(x, dict)),
    num_heads=HEADS,
    linear_num_heads=HEADS,
    num_attention_heads=HEADS,
    head_dim=DIM,
    linear_head_dim=DIM,
    kda_layers=INDICES,
    gate_lower_bound=BOUND,
    linear_lower_bound=BOUND,
    kda_lower_bound=BOUND,
    kda_safe_gate=FLAG,
    short_conv_kernel_size=LAYERS,
    layer_group_size=GROUPS,
    quantization_config=Entry("an object", lambda x: isinstance(x, dict)),
    quant_method=TEXT,
    weight_block_size=INDICES,
)
"""The entries of models' configurations that are read."""


class Config(dict[str, Any]):
    """A config.json with its text_config merged, or an object in it, named by `place`.

    Raises ValueError for an entry that it lacks, null included, or whose value is not of ENTRIES.
    """

    def __init__(self, entries: Mapping[str, Any], place: str = "config.json"):
        super().__init__((name, x) for name, x in entries.items() if x is not None)
        self.place = place

    def __getitem__(self, name: str) -> Any:
        entry = ENTRIES[name]
        if name not in self:
            raise ValueError(f"expected {name} in {self.place}: {entry.words}")
        value = super().__getitem__(name)
        if not entry.holds(value):
            got = reprlib.repr(value)
            raise ValueError(f"expected {name} in {self.place} to be {entry.words}, got {got}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def within(self, name: str) -> Config:
        return Config(self[name], f"{name} of {self.place}")


def _gdn(c: Config) -> Sizes:
    heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dims = c["linear_key_head_dim"], c["linear_value_head_dim"]
    return Sizes("GDN", _layers(c), *heads, *dims)


def _kimi(c: Config) -> Sizes:
    """Kimi's own configurations nest these entries; transformers writes them as GLM's."""
    if "linear_attn_config" not in c and "linear_num_heads" in c:
        return _glm(c)
    nested = c.within("linear_attn_config")
    H, D, listed = nested["num_heads"], nested["head_dim"], nested.get("kda_layers")
    bounds = nested.get("gate_lower_bound"), c.get("gate_lower_bound"), c.get("linear_lower_bound")
    bound = next((x for x in bounds if x is not None), None)
    return Sizes("KDA", _layers(c) if listed is None else len(listed), H, H, D, D, bound)


def _glm(c: Config) -> Sizes:
    if "linear_attn_config" in c:
        return _kimi(c)
    H, D = c["linear_num_heads"], c["linear_head_dim"]
    return Sizes("KDA", _layers(c), H, H, D, D, c.get("linear_lower_bound"))


def _ling(c: Config) -> Sizes:
    H, D, n = c["num_attention_heads"], c["head_dim"], c["num_hidden_layers"]
    c["short_conv_kernel_size"]  # Ling 2.5 has none: its layers are no KDA
    groups = c["layer_group_size"]
    layers = n - n // groups if isinstance(groups, int) else sum(x == 1 for x in groups)
    bound = c["kda_lower_bound"] if c["kda_safe_gate"] else None
    return Sizes("KDA", layers, H, H, D, D, bound)


def _layers(c: Config) -> int:
    if types := c.get("layer_types"):
        return types.count("linear_attention")
    n = c["num_hidden_layers"]
    if (full := c.get("full_attention_layers")) is not None:  # GigaChat
        return n - len(full)
    return n - n // c.get("full_attention_interval", 4)


READERS = {
    kind: read
    for kinds, read in {
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text": _gdn,
        "qwen4_exp qwen4_exp_text intern_s2_preview interns2_mobius interns2_mobius_text": _gdn,
        "gigachat3_5 olmo_hybrid": _gdn,
        "kimi_linear kimi_k3": _kimi,
        "glm5_next glm5_next_text": _glm,
        "bailing_hybrid bailing_moe_v3_vl": _ling,
    }.items()
    for kind in kinds.split()
}
"""By the config's model_type: the models of docs/engines.md."""


class Model(NamedTuple):
    """The linear layers of a model on one rank. block_fp8: projections are in blocks of 128."""

    kind: str
    served: releases.Served
    sizes: Sizes
    dtype: torch.dtype
    state_dtype: torch.dtype
    doubles_beta: bool
    block_fp8: bool

    def __str__(self) -> str:
        states = f"states in {SHORT[self.state_dtype]}"
        return f"{self.kind}: {self.sizes} on each rank, {SHORT[self.dtype]}, {states}"

    def state_bytes(self, rows: int) -> int:
        """Bytes of so many states in every layer."""
        _, layers, _, HV, K, V, _ = self.sizes
        return layers * rows * HV * V * K * self.state_dtype.itemsize


@dataclass
class Mode:
    """ours: our kernels run it. reason: why not, or a remark. unbuilt: kernels to be compiled."""

    name: str
    calls: list[load.Call] = field(default_factory=list)
    ours: bool = True
    reason: str = ""
    unbuilt: tuple[str, ...] = ()

    def leave(self, reason: str) -> None:
        self.ours, self.reason = False, reason


class Plan(NamedTuple):
    """For a GPU, named by `gpu`; here: whether it is in this machine. release: of the engine
    installed. drafts: bytes. cases: for the kernels, against float64."""

    engine: str
    gpu: str
    here: bool
    release: str
    model: Model
    modes: list[Mode]
    drafts: dict[str, int]
    cases: list[AnyCase]

    @property
    def ours(self) -> bool:
        return all(mode.ours for mode in self.modes)

    def tables(self) -> list[str | Table]:
        """What runs where, to be printed."""
        table = make_table(f"gated_delta in {ENGINES[self.engine]}", "mode", "runs on", "because")
        for mode in self.modes:
            runs = "gated_delta" if mode.ours else ENGINES[self.engine]
            table.add_row(mode.name, runs, mode.reason or "-")
        where = {name: place.format(self.engine.upper()) for name, place in WHERE.items()}
        sizes = (f"{x / 2**30:.3f} GiB {where[name]}" for name, x in self.drafts.items())
        drafts = [f"drafts take {' or '.join(sizes)}"] if self.drafts else []
        absent = "" if self.here else ", not for a GPU here: no kernel was run"
        return [f"for {self.gpu}{absent}", self.release, str(self.model), *drafts, table]

    def missing(self) -> list[str]:
        """The kernels that keep modes from gated_delta, to be printed."""
        modes = (mode for mode in self.modes if not mode.ours)
        return [f"{mode.name} lacks {label}" for mode in modes for label in mode.unbuilt]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        model = self.model
        return dict(
            name=self.engine,
            gpu=self.gpu,
            release=self.release,
            model_type=model.kind,
            **model.sizes._asdict(),
            dtype=SHORT[model.dtype],
            state_dtype=SHORT[model.state_dtype],
            modes=[vars(mode) | dict(calls=len(mode.calls)) for mode in self.modes],
            draft_bytes=self.drafts,
        )


class Asked(NamedTuple):
    """A server: tensor parallelism, drafts as its engine counts them, requests at once, dtypes.

    tree: drafts are trees. ring: decode keeps tokens in SGLang's ReplaySSM. modes: those to be
    ours. gpu: a product of gpus.PRODUCTS, in place of the GPU here.
    """

    engine: str
    model: Path | None
    modes: tuple[str, ...] = ()
    tp: int = 1
    drafts: int = 0
    tree: bool = False
    ring: bool = False
    requests: int = 1
    dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    gpu: str | None = None


def read(path: Path | None) -> Config:
    """Raises ValueError, in one line, if there is no config.json or it is no JSON object."""
    if path is None:
        raise ValueError("expected --model, a directory with config.json")
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as problem:
        expected = "expected --model, a directory with config.json"
        raise ValueError(f"{expected}; cannot read {str(file)!r}: {problem.strerror}") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object in {str(file)!r}")
    text = config.get("text_config")
    text = Config(text if isinstance(text, dict) else {})  # without null
    # The model_type of the whole: Kimi K3's text model has Kimi Linear's.
    return Config(config | text | {"model_type": config.get("model_type")})


def plan(asked: Asked, device: torch.device) -> Plan:
    """What the engine would run on the GPU asked for, else on `device`, else on an H100.

    Raises ValueError, in one line, for a model it cannot serve.
    """
    engine, known = asked.engine, MODES[asked.engine]
    if unknown := set(asked.modes) - set(known):
        raise ValueError(f"expected --op to be of {', '.join(known)}, got {min(unknown)}")
    if asked.tree and (engine == "vllm" or not asked.drafts):
        raise ValueError("expected --tree with --engine sglang and --drafts above 0")
    if asked.ring and engine == "vllm":
        raise ValueError("expected --ring with --engine sglang; vLLM's is GATED_DELTA_VLLM_RING=1")
    gpu, name = _gpu(asked, device)
    model = _model(asked)
    modes, drafts = (_sglang if engine == "sglang" else _vllm)(asked, model)
    release, refused = _release(engine)
    quantises = engine == "sglang" and _quantises(model, gpu)
    for mode in modes:
        mode.calls += in_fp8(mode.calls) if quantises else []
        mode.calls = [(op, arguments | dict(backend="cute")) for op, arguments in mode.calls]
        needed = [call for call in mode.calls if not _optional(call)]
        if refused:
            mode.leave(refused)
        elif mode.ours and (lacks := load.refused(needed, gpu)):
            mode.leave(f"ours needs {'; '.join(unique(lacks.values()))}")
        else:
            mode.calls = [x for x in mode.calls if not _optional(x) or not load.refused([x], gpu)]
    served = [call for mode in modes if mode.ours for call in mode.calls]
    for mode in (mode for mode in modes if mode.ours):
        _look_for_kernels(mode, served, gpu)
    calls = [call for mode in modes if mode.ours for call in mode.calls]
    # All heads; an engine's start runs few.
    heads = model.sizes.H, model.sizes.HV
    cases = [replace(case, heads=heads) for case in card_check.cases_of(calls)]
    return Plan(engine, name, gpu is device, release, model, modes, drafts, cases)


def _gpu(asked: Asked, device: torch.device) -> tuple[Gpu | torch.device, str]:
    """The GPU that is asked about, and its name: the card's if it is `device`."""
    if asked.gpu is None and device.type == "cuda":
        return device, str(card_of(device))
    try:
        name = product(asked.gpu or DEFAULT)
    except ValueError as problem:
        raise ValueError(f"--gpu: {problem}") from None
    gpu = GPUS[PRODUCTS[name]]
    return gpu, f"{name} ({gpu})"


def _model(asked: Asked) -> Model:
    config, engine = read(asked.model), asked.engine
    kind = config["model_type"]
    served = RELEASES[engine].models.get(kind)
    if served is None:
        raise ValueError(f"gated_delta serves no model_type {kind!r} in {ENGINES[engine]}")
    config.place = f"config.json of a {kind}"
    sizes = READERS[kind](config)
    H, HV = sizes.H, sizes.HV
    if sizes.layers < 1:
        raise ValueError(f"expected linear layers in {config.place}, got {sizes.layers}")
    if HV % H:
        raise ValueError(f"expected HV in {config.place} to be a multiple of H={H}, got {HV}")
    if H % asked.tp:
        raise ValueError(f"expected --tp to divide H={H}, got {asked.tp}")
    sizes = sizes._replace(H=H // asked.tp, HV=HV // asked.tp)
    if sizes.HV * sizes.K * sizes.V > MAX_STATE:
        raise ValueError(f"expected states of up to {MAX_STATE:,} numbers on a rank, got {sizes}")
    dtype = asked.dtype or _input_dtype(config)
    states = asked.state_dtype or _state_dtype(engine, served, config, dtype)
    doubles_beta = config.get("linear_allow_neg_eigval", False)
    return Model(kind, served, sizes, dtype, states, doubles_beta, _in_block_fp8(config))


def _in_block_fp8(config: Config) -> bool:
    if "quantization_config" not in config:
        return False
    how = config.within("quantization_config")
    return how.get("quant_method") == "fp8" and how.get("weight_block_size") == [128, 128]


def _input_dtype(config: Config) -> torch.dtype:
    name = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(name, "auto") == "auto":
        raise ValueError(f"expected dtype in {config.place}, or --dtype")
    return _dtype(config[name], f"{name} in {config.place}")


def _dtype(value: str, name: str) -> torch.dtype:
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"expected {name} to be bfloat16, float16 or float32, got {value!r}")
    return dtype


def _state_dtype(
    engine: str, served: releases.Served, config: Config, dtype: torch.dtype
) -> torch.dtype:
    """The engine's default."""
    if engine == "sglang" and (variable := os.environ.get(SGLANG_STATES)):
        return _dtype(variable, SGLANG_STATES)
    if "config" in served.states and (named := config.get("mamba_ssm_dtype")):
        return _dtype(named, f"mamba_ssm_dtype in {config.place}")
    return torch.float32 if "fp32" in served.states else dtype


def _release(engine: str) -> tuple[str, str]:
    """A line on the installed engine; why it is not served, or ""."""
    version = releases.installed(engine)
    if version is None:
        return f"{ENGINES[engine]} is not installed here: its release was not checked", ""
    refusal = RELEASES[engine].refusal(version)
    served = "not served" if refusal else "served"
    reason = f"expected {ENGINES[engine]} {RELEASES[engine].version}, got {refusal}"
    return f"{ENGINES[engine]} {version} is {served}", reason if refusal else ""


def _optional(call: load.Call) -> bool:
    """Whether others run where this one cannot: decode with a convolution."""
    op, arguments = call
    return op == "decode" and "conv" in arguments


def _look_for_kernels(mode: Mode, served: list[load.Call], gpu: Gpu | torch.device) -> None:
    """Leaves a mode whose kernels are missing. served: the calls of all modes, for the command."""
    if not (compile.may_compile() and compile.installed(compile.COMPILER)):
        try:
            load.load(mode.calls, gpu, served)
        except UnsupportedProblem as error:
            reason, *_ = str(error).splitlines()
            mode.leave(reason)
            mode.unbuilt = error.missing
    else:
        mode.unbuilt, command = load.unbuilt(mode.calls, gpu, served)
        if not mode.unbuilt:
            return
        mode.reason = f"its start compiles {len(mode.unbuilt)} kernels; {command}"
        try:
            compile.check_can_build()
        except UnsupportedProblem as error:
            mode.leave(f"its start cannot compile {len(mode.unbuilt)} kernels: {error.message}")


def _by_qk_head(model: Model) -> bool:
    """Whether a projection has q, k, v and z by q/k head."""
    return model.kind == "qwen3_next"


def _sglang(asked: Asked, model: Model) -> tuple[list[Mode], dict[str, int]]:
    family, layers, H, HV, K, V, bound = model.sizes
    state = torch.empty(2, HV, V, K, dtype=model.state_dtype)  # calls that are described, not run
    scratch: Any = None
    drafts: dict[str, int] = {}
    pays = load.pays(family, model.state_dtype, asked.requests * HV)
    in_kvbuffer = compile.flag("GATED_DELTA_SGLANG_KVBUFFER", pays)
    T, unfit = asked.drafts, drafts_need(asked.drafts, asked.tree, in_kvbuffer)
    gate = "channel" if family == "KDA" else "head"
    sizes: dict[str, Any] = dict(H=H, HV=HV, K=K, V=V, gate=gate)
    if 0 < T <= MAX_DRAFT:
        rows = asked.requests + 1  # and the padding's
        tokens = T if asked.tree else load.room(T, model.state_dtype)
        buffer = KVBuffer.empty(rows, tokens, **sizes, num_layers=layers, device="meta")
        drafts = dict(states=model.state_bytes(rows * T), kvbuffer=buffer.nbytes)
        scratch = state.new_empty(2, T, HV, V, K)
        if in_kvbuffer:
            scratch = KVBuffer.empty(2, tokens, **sizes)
    ring, own_ring = None, compile.flag("GATED_DELTA_SGLANG_RING", False)
    if own_ring:
        ring = KVBuffer.empty(2, 1, **sizes)
    elif asked.ring and bound is None:  # SGLang's has the states' dtype
        ring = KVBuffer.empty(2, 1, **sizes)
        ring = replace(ring, u=ring.u.to(state))
    norm = model.served.fuses_norm and V <= MAX_NORM
    few = family == "GDN" and HV <= MOST_HEADS * H
    raw = norm and (few or _by_qk_head(model))
    layer = Layer(family, H, HV, K, V, model.dtype, bound, norm, raw=raw)
    by_mode = layer.calls(state, True, scratch, T, ring, asked.tree, folds=own_ring)
    names = asked.modes or MODES["sglang"][: 3 if T else 2]
    modes = [Mode(name, by_mode.get(name, [])) for name in names]
    for mode in modes:
        if not mode.calls:
            mode.leave(f"ours needs {unfit or 'drafts: --drafts is 0'}")
        if mode.name == "decode" and (lacks := ring_lacks(ring)):
            mode.leave(f"ours needs {lacks}")
        if mode.name == "decode" and own_ring and T:
            mode.leave("a ring takes no drafts: GATED_DELTA_SGLANG_RING=1 ends the start")
        never = (family, state.element_size()) not in load.FROM_HEADS
        if mode.name == "decode" and own_ring and never:
            mode.leave(
                "16-bit states of KDA have no ring: GATED_DELTA_SGLANG_RING=1 ends the start"
            )
        if mode.name == "decode" and HV in model.served.own_decode and not own_ring:
            mode.leave(f"SGLang has a fused kernel for {HV} heads a GPU")
    return modes, drafts


def _quantises(model: Model, gpu: Gpu | torch.device) -> bool:
    """Whether our calls quantise for SGLang's projections, if it has DeepGEMM."""
    card = gpu if isinstance(gpu, Gpu) else gpu_of(gpu)
    hopper = card is not None and card.major == 9
    takes = model.block_fp8 and model.sizes.V == 128 and model.dtype == torch.bfloat16
    return takes and hopper and compile.flag(SWITCH, False)


class _Layer(Recurrence):
    """A layer as vLLM would build it."""

    def __init__(self, model: Model, drafts: int):
        family, _, H, HV, K, V, self.bound = model.sizes
        self.channels, self.sizes, self.num_spec = family == "KDA", (H, HV, V, K), drafts
        self.by_qk_head, self.inputs, self.backend = _by_qk_head(model), model.dtype, "auto"
        self.fuses_norm = model.served.fuses_norm and V <= MAX_NORM
        self.allow_neg_eigval, self.aligned = model.doubles_beta, True
        self.deterministic = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        self.A_log = torch.zeros(HV)
        self.dt_bias = torch.zeros(HV, *((K,) if self.channels else ()))

    def _norm(self) -> Any:
        activation = "sigmoid" if self.channels else "silu"
        return SimpleNamespace(weight=torch.ones(self.sizes[2]), eps=1e-6, activation=activation)

    def _lower_bound(self) -> float | None:
        return self.bound


def _vllm(asked: Asked, model: Model) -> tuple[list[Mode], dict[str, int]]:
    family, _, _, HV, K, V, _ = model.sizes
    pool = torch.empty(2, HV, V, K, dtype=model.state_dtype)
    layer, left = _Layer(model, asked.drafts), too_many(asked.drafts)
    pays = load.pays(family, model.state_dtype, asked.requests * HV)
    in_kvbuffer = compile.flag("GATED_DELTA_VLLM_KVBUFFER", pays)
    layer.buffered = in_kvbuffer and asked.drafts > 0 and not left
    tokens = room(asked.drafts, model.state_dtype)
    layer.room = tokens if layer.buffered else 0  # beside the prefix cache
    if compile.flag("GATED_DELTA_VLLM_RING", False):
        if asked.drafts:
            raise ValueError("expected --drafts 0 with GATED_DELTA_VLLM_RING=1")
        layer.ring = 1  # kernels are the same for every number of tokens
    calls = layer.calls(pool, 64)
    modes = [
        Mode(x, [call for call in calls if (call[0] in PROMPTS) == (x == "prefill")])
        for x in asked.modes or MODES["vllm"]
    ]
    for mode in modes:
        if mode.name in left:
            mode.leave(left[mode.name])
    drafts: dict[str, int] = {}
    if asked.drafts:
        drafts = dict(states=model.state_bytes(asked.requests * asked.drafts))
    if asked.drafts and not left:
        buffer = layer.buffer(asked.requests, "meta", num_layers=model.sizes.layers)
        drafts |= dict(kvbuffer=buffer.nbytes)
    return modes, drafts
