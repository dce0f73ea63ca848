"""Calls and checks for tests of compiled kernels, on a GPU and emulated."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta import cli, compile, gpus, options
from gated_delta.call_cache import CallCache
from gated_delta.gpus import H200, gpu_of
from gated_delta.kernels.prefill.arguments import CHUNK, PrefillPointers
from gated_delta.ops import PREFILL
from gated_delta.ops import prefill as host
from gated_delta.ops.prefill_schedule import KINDS, Schedule

needs_compiler = pytest.mark.skipif(
    compile.installed(compile.COMPILER) is None or compile.missing_packages() != (),
    reason=f"needs {compile.COMPILER}",
)

GPU = gpu_of(torch.device("cuda")) if torch.cuda.is_available() else None
"""The GPU that tests run on, as GATED_DELTA_LEVEL has it."""
IS_HOPPER = GPU is not None and GPU.level == "sm_90a"

needs_gpu = pytest.mark.skipif(
    GPU is None, reason="needs an NVIDIA GPU of compute capability 8.0 or newer"
)

needs_hopper = pytest.mark.skipif(
    not IS_HOPPER, reason="needs the kernels of an NVIDIA GPU of compute capability 9.0"
)

H, HV, D = 4, 8, 128
AXES = ("head", "channel")
STATES = (torch.bfloat16, torch.float32, torch.float16)
PER_TOKEN = ("q", "k", "v", "g", "beta")


def pretend(monkeypatch, major, minor):
    """Makes a GPU of a compute capability the only CUDA device, for what the host reads of it."""
    facts = dict(name="A card", major=major, minor=minor)
    facts |= dict(total_memory=48 * 2**30, multi_processor_count=100)
    monkeypatch.setattr(gpus, "driver", lambda: "570.86.15, CUDA 12.9")
    monkeypatch.setattr(cli, "driver", gpus.driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**facts)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    monkeypatch.setattr(options, "usable_device", torch.device)


def tokens(
    N, T, *, axis="head", dtype=torch.bfloat16, heads=(H, HV), K=D, V=D, seed=0, gate="softplus"
):
    """Arguments of a dense prefill, decode or verify on the GPU, without states."""
    rng = torch.Generator("cuda").manual_seed(seed)
    H, HV = heads

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda")

    channels = (K,) if axis == "channel" else ()
    A_log, dt_bias = normal(HV) / 2, normal(HV, *channels) / 2
    gates = {
        "softplus": gd.Gate.softplus(A_log, dt_bias),
        "lower_bound": gd.Gate.lower_bound(A_log, dt_bias),
        "log": gd.Gate.log(),
    }
    g = normal(N, T, HV, *channels)
    return dict(
        q=normal(N, T, H, K).to(dtype),
        k=normal(N, T, H, K).to(dtype),
        v=normal(N, T, HV, V).to(dtype),
        g=(-g.abs() if gate == "log" else g).to(dtype),
        beta=normal(N, T, HV).to(dtype),
        beta_logits=True,
        gate=gates[gate],
    )


def pool(slots, dtype=torch.bfloat16, HV=HV, K=D, V=D, seed=1):
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(slots, HV, V, K, generator=rng, device="cuda") / 2).to(dtype)


def part(call, *index):
    """The call with only the indexed sequences or tokens."""
    return {name: x[index] if name in PER_TOKEN else x for name, x in call.items()}


def packed(call, lengths):
    """The first `lengths` tokens of each sequence, packed."""
    rows = {
        name: torch.cat([call[name][n, :t] for n, t in enumerate(lengths)])[None]
        for name in PER_TOKEN
    }
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return {**call, **rows, "cu_seqlens": ends.int()}


def fused(call, shift=0):
    """The call with q, k and v as slices of one projection, `shift` elements into its rows."""
    sizes = [call[name].shape[2:].numel() for name in ("q", "k", "v")]
    wide = call["q"].new_empty(*call["q"].shape[:2], shift + sum(sizes))
    slices = dict(zip(("q", "k", "v"), wide[..., shift:].split(sizes, -1)))
    return call | {
        name: x.copy_(call[name].flatten(2)).unflatten(-1, call[name].shape[2:])
        for name, x in slices.items()
    }


def slow_gates(call):
    """The call with decays near 1 and small betas: initial states still matter at its end."""
    return {**call, "gate": gd.Gate.log(), "g": call["g"].abs() * -1e-3, "beta": call["beta"] - 3}


def spread(x, *, dim, by):
    """x with a dimension's stride `by` times as large, and NaN between its entries."""
    wide = x.new_full((*x.shape[: dim + 1], by, *x.shape[dim + 1 :]), float("nan"))
    return wide.select(dim + 1, 0).copy_(x)


def relative_error(x, y):
    """|x - y| / |y| in Frobenius norms; NaN stays NaN."""
    return float((x.double() - y.double()).norm() / y.double().norm())


PATHS = ("tiles", "fused", "raw", "raw overlapped", "overlapped", 4)
"""prefill's: kinds of schedules, and four segments."""
PERSISTENT = ("fused", "raw", "raw overlapped")
"""Paths with persistent CTAs, or CTAs that scan beside others that prepare."""


def paths_here(*paths):
    """The paths that have kernels on the GPU of the tests; all of them without a GPU."""
    hopper_only = (*PERSISTENT, "overlapped")
    return [path for path in paths if GPU is None or IS_HOPPER or path not in hopper_only]


def prefill_path(path, sms=None):
    """Every prefill in the block takes a path: a kind of schedule, or a number of segments.

    A call that has no kernels for it takes tiles. On 3 SMs persistent CTAs scan several heads, and
    prepare's CTAs take all value heads of a k head. Transitions of four segments are halved.
    """
    schedule = scheduled_by("segments", path) if isinstance(path, int) else scheduled_by(path)
    schedule = schedule._replace(halved=path == 4)
    if sms is None and (path in PERSISTENT or path == 4):
        sms = 3
    return scheduled(schedule, scheduled_by("tiles"), sms=sms)


def scheduled_by(kind, segments=1):
    """A schedule of the kind with this name."""
    return Schedule(next(x for x in KINDS if x.name == kind), segments)


@contextlib.contextmanager
def scheduled(*schedules, sms=None):
    """Every prefill in the block takes the first of these schedules whose kernels it has.

    sms: of the GPU, as the schedule and the kernels' sizes have it.
    """

    def plan(problem, sequences, tokens, max_seqlen=None, *, gpu=H200):
        gpu = gpu._replace(sms=sms or gpu.sms)
        for schedule in schedules:
            if schedule.kind.supports(problem, sequences, gpu):
                halved = schedule.halved and schedule.kind.can_halve(problem, gpu)
                taken = schedule._replace(halved=halved)
                return host.plan_of(taken, problem, sequences, gpu)
        raise AssertionError(f"no kernels for {problem.label} by {schedules}")

    with mock.patch.object(PREFILL, "plan", plan), mock.patch.object(PREFILL, "calls", CallCache()):
        yield


def workspace_after(run, monkeypatch):
    """run's result, and the regions of its one prefill's workspace by name, each up to the end."""
    launch, empty, workspaces = host.PrefillLaunch.run, torch.empty, []

    def watched(self, *args):
        def recorded(*shape, **options):
            tensor = empty(*shape, **options)
            if options.get("dtype") == torch.uint8:
                workspaces.append((tensor, self.workspace[1]))
            return tensor

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recorded)
            return launch(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(host.PrefillLaunch, "run", watched)
        result = run()
    ((workspace, starts),) = workspaces
    names = PrefillPointers._fields[-len(starts) :]
    return result, {
        name: workspace[start:] for name, start in zip(names, starts, strict=True) if start >= 0
    }


def transition_norms(o, regions):
    """Bounds of |M|, [N, HV, chunks], that a dense call in segments left in its workspace."""
    chunks = -(-o.shape[1] // CHUNK)
    norms = regions["transition_norms"][: len(o) * chunks * o.shape[2] * 4].view(torch.float32)
    return norms.view(len(o), chunks, o.shape[2]).transpose(1, 2)


def windows_of_segments(run, segments, monkeypatch):
    """Chunks of each window, [N, HV, segments - 1]; 0: the segment needs its initial state.

    Computed from the bounds that run, which returns o, left in the workspace.
    """
    norms = transition_norms(*workspace_after(run, monkeypatch))
    chunks = norms.shape[2]
    per_segment = -(-chunks // segments)
    windows = torch.zeros(*norms.shape[:2], segments - 1, dtype=torch.long)
    for first in range(per_segment, chunks, per_segment):
        longest = min(max(per_segment, 4), 32, first)
        small = norms[..., first - longest : first].flip(2).cumprod(2) <= 2.0**-120
        window = small.any(2) * (small.int().argmax(2) + 1)
        windows[..., first // per_segment - 1] = window.cpu()
    return windows


def captured(run):
    """A CUDA graph of the run, and its result, which replays overwrite."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@contextlib.contextmanager
def no_waits():
    """The block must not synchronize with the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decode(call, state, **options):
    return gd.decode(**call, state=state, backend="cute", **options)


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")


def cycle(values, x):
    """A tensor like x, filled with the values in turn."""
    values = torch.tensor(values, dtype=x.dtype, device=x.device)
    return values[torch.arange(x.numel(), device=x.device) % len(values)].view(x.shape)


def with_channels_of_any_size(call):
    """Scales keys by 2**0 to 2**-23 per channel, queries by the inverse, up to 2**10."""
    sizes = 2.0 ** -torch.arange(call["k"].shape[-1], device=call["k"].device).remainder(24)
    return call | dict(
        k=(call["k"] * sizes).bfloat16(), q=(call["q"] / sizes.clamp_min(2.0**-10)).bfloat16()
    )


def writing(N, v, beta=1.0, T=1):
    """A call without decay whose keys are one unit vector: at beta 1, S[:, 0] and o become v."""
    q = torch.zeros(N, T, H, D, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 1
    values = torch.full((N, T, HV, D), v, device="cuda", dtype=torch.bfloat16)
    gates = dict(
        g=torch.zeros(N, T, HV, device="cuda"), beta=torch.full((N, T, HV), beta, device="cuda")
    )
    return dict(q=q, k=q.clone(), v=values, **gates, gate=gd.Gate.log(), scale=1.0, qk_l2norm=False)


def large_states(N):
    """fp16 states with largest, small and subnormal numbers and one NaN."""
    states = torch.zeros(N, HV, D, D, dtype=torch.float16, device="cuda")
    states[..., 1], states[..., 2], states[..., 3], states[..., 4] = 65504, -65504, 2.0**-24, 1e-5
    states[0, 0, 1, 9] = float("nan")
    return states


def check_saturated(after, before, want):
    """Column 0 is `want`, the rest unchanged; in the row with NaN column 0 is NaN too, by S k."""
    column = after[..., 0].clone()
    column[0, 0, 1] = want
    assert (column == want).all()
    same(after[1:, ..., 1:].contiguous(), before[1:, ..., 1:].contiguous())
    assert after[0, 0, 1].isnan().any()
    assert after.isnan().sum() == after[0, 0, 1].isnan().sum()


def same(a, b):
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
