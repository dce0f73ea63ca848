"""Calls for tests of the CuTe backend on a GPU."""

import contextlib

import pytest
import torch

import gated_delta as gd
from gated_delta.call_cache import CallCache
from gated_delta.kernels.arguments import CHUNK, MAX_WALKED, PrefillPointers
from gated_delta.ops import PREFILL
from gated_delta.ops import prefill as on_host

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs an NVIDIA GPU of compute capability 9.0",
)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an NVIDIA GPU of compute capability 9.0",
)

H, HV, D = 4, 8, 128
AXES = ("head", "channel")
STATES = (torch.bfloat16, torch.float32, torch.float16)
PER_TOKEN = ("q", "k", "v", "g", "beta")


def tokens(
    N, T, *, axis="head", dtype=torch.bfloat16, heads=(H, HV), K=D, V=D, seed=0, gate="softplus"
):
    """Keyword arguments of prefill, decode or verify but for its states, on the GPU, dense."""
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
    """The call on some of its sequences or tokens."""
    return {name: x[index] if name in PER_TOKEN else x for name, x in call.items()}


def packed(call, lengths):
    """The first tokens of each sequence one behind the other."""
    rows = {
        name: torch.cat([call[name][n, :t] for n, t in enumerate(lengths)])[None]
        for name in PER_TOKEN
    }
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return {**call, **rows, "cu_seqlens": ends.int()}


def fused(call, shift=0):
    """The call with q, k and v as slices of one projection, which starts so many numbers into its rows."""
    sizes = [call[name].shape[2:].numel() for name in ("q", "k", "v")]
    wide = call["q"].new_empty(*call["q"].shape[:2], shift + sum(sizes))
    slices = dict(zip(("q", "k", "v"), wide[..., shift:].split(sizes, -1)))
    return call | {
        name: x.copy_(call[name].flatten(2)).unflatten(-1, call[name].shape[2:])
        for name, x in slices.items()
    }


def slowly(call):
    """Decays near 1 and weak betas, so that initial states still matter at the end."""
    return {**call, "gate": gd.Gate.log(), "g": call["g"].abs() * -1e-3, "beta": call["beta"] - 3}


def spread(x, *, dim, by):
    """x where the entries of a dimension lie `by` times as far apart, with NaN between."""
    wide = x.new_full((*x.shape[: dim + 1], by, *x.shape[dim + 1 :]), float("nan"))
    return wide.select(dim + 1, 0).copy_(x)


def apart(x, y):
    """Relative distance as a whole; NaN stays NaN."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def force_segments(segments, monkeypatch):
    """Prefills from here on split each sequence into that many segments, however many sequences there are.

    "persistent": one segment, all V rows in a block, and three blocks, so that each has several heads; blocks of prepare have all of
    a k head's value heads, however few they are. "fused": in one kernel, too. "raw": the scan decays raw tokens itself.
    "beside": it does so beside prepare, of as many sequences as it can. "joined": four segments, of which those behind one that does
    not forget are joined to it. "overlapped": prepare beside scan. Deterministic ones have one segment.
    """
    persistent = segments in ("persistent", "fused", "raw", "beside")

    def segmentation_of(problem, sequences, *_work):
        if segments == "overlapped":
            return on_host.Segmentation(1, overlapped=on_host.can_overlap(problem))
        if "deterministic" in problem.options:
            return on_host.Segmentation(1, problem.V if persistent else 64)
        if segments == "joined":
            return on_host.Segmentation(4, joins=True)
        fused = segments == "fused" and on_host.can_fuse(problem)
        even = fused and not any(option.startswith("cu_seqlens") for option in problem.options)
        raw = segments in ("raw", "beside") and on_host.can_scan_raw(problem)
        beside = raw and segments == "beside" and sequences <= MAX_WALKED
        made = on_host.Segmentation(1, problem.V, fused, even=even, raw=raw, overlapped=beside)
        return made if persistent else on_host.Segmentation(segments)

    monkeypatch.setattr(on_host, "segmentation_of", segmentation_of)
    if (
        persistent or segments == 4
    ):  # blocks that take turns, of which the longest sequences' come first
        monkeypatch.setattr(on_host, "sms_of", lambda _: 3)
        monkeypatch.setattr(on_host, "MAX_PREPARE_BLOCKS", 0 if persistent else 88)
    monkeypatch.setattr(PREFILL, "calls", CallCache())


def left_in_workspace(run, monkeypatch):
    """What run returns, o or a tuple that begins with it, and the regions of the one prefill's workspace behind it, by name."""
    launch, empty, kept = on_host.PrefillLaunch.run, torch.empty, []

    def watched(self, *args):
        def keep(*shape, **options):
            made = empty(*shape, **options)
            if options.get("dtype") == torch.uint8:
                kept.append((made, self.workspace[1]))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", keep)
            return launch(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(on_host.PrefillLaunch, "run", watched)
        made = run()
    ((workspace, starts),) = kept
    names = PrefillPointers._fields[-len(starts) :]
    return made, {
        name: workspace[start:] for name, start in zip(names, starts, strict=True) if start >= 0
    }


def transition_norms(o, regions):
    """[N, HV, chunks], of a dense call with segments."""
    chunks = -(-o.shape[1] // CHUNK)
    norms = regions["transition_norms"][: len(o) * chunks * o.shape[2] * 4].view(torch.float32)
    return norms.view(len(o), chunks, o.shape[2]).transpose(1, 2)


def windows_of_segments(run, segments, monkeypatch):
    """Chunks of the windows [N, HV, segments - 1] of such a call, 0 for a segment without one, by the norms it leaves."""
    norms = transition_norms(*left_in_workspace(run, monkeypatch))
    each = -(-norms.shape[2] // segments)
    found = torch.zeros(*norms.shape[:2], segments - 1, dtype=torch.long)
    for first in range(each, norms.shape[2], each):
        most = min(max(each, 4), 32, first)
        small = norms[..., first - most : first].flip(2).cumprod(2) <= 2.0**-120
        found[..., first // each - 1] = (small.any(2) * (small.int().argmax(2) + 1)).cpu()
    return found


def captured(run):
    """The run as a CUDA graph, and what it returned, which replays write again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


@contextlib.contextmanager
def no_waits():
    """Nothing in the block waits for the GPU."""
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
    """x's shape, filled with the values in turn."""
    values = torch.tensor(values, dtype=x.dtype, device=x.device)
    return values[torch.arange(x.numel(), device=x.device) % len(values)].view(x.shape)


def with_channels_of_any_size(call):
    """The call with keys whose channels differ by up to 2**23, and queries that bring those of 2**-10 and more back."""
    sizes = 2.0 ** -torch.arange(call["k"].shape[-1], device=call["k"].device).remainder(24)
    return call | dict(
        k=(call["k"] * sizes).bfloat16(), q=(call["q"] / sizes.clamp_min(2.0**-10)).bfloat16()
    )


def writing(N, v, beta=1.0, T=1):
    """Calls without decay whose keys are all one unit vector: with beta 1, S[:, 0] becomes v, [N, T, HV, V], and o is v."""
    q = torch.zeros(N, T, H, D, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 1
    values = torch.full((N, T, HV, D), v, device="cuda", dtype=torch.bfloat16)
    gates = dict(
        g=torch.zeros(N, T, HV, device="cuda"), beta=torch.full((N, T, HV), beta, device="cuda")
    )
    return dict(q=q, k=q.clone(), v=values, **gates, gate=gd.Gate.log(), scale=1.0, qk_l2norm=False)


def large_states(N):
    """In fp16, near its largest number, with one NaN, small and subnormal numbers."""
    states = torch.zeros(N, HV, D, D, dtype=torch.float16, device="cuda")
    states[..., 1], states[..., 2], states[..., 3], states[..., 4] = 65504, -65504, 2.0**-24, 1e-5
    states[0, 0, 1, 9] = float("nan")
    return states


def check_saturated(after, before, want):
    """Column 0 is `want`, all else as it was; the row with NaN is NaN in column 0 too, as its S k is NaN."""
    column = after[..., 0].clone()
    column[0, 0, 1] = want
    assert (column == want).all()
    same(after[1:, ..., 1:].contiguous(), before[1:, ..., 1:].contiguous())
    assert after[0, 0, 1].isnan().any()
    assert after.isnan().sum() == after[0, 0, 1].isnan().sum()


def same(a, b):
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
