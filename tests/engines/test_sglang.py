"""The plug-in in the real SGLang, on a CPU: make test-sglang. sglang_cpu.py replaces CUDA."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import breakages
import sglang_cpu

sglang_cpu.install()

from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    scatter_mamba_states_after_mtp_verify,
)
from sglang.srt import runtime_context
from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES
from sglang.srt.configs import mamba_utils
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend, utils
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

import gated_delta
from gated_delta import api, preflight
from gated_delta.gpus import H200
from gated_delta.integrations import sglang as plugin
from gated_delta.integrations.engine import load, releases, state_check
from gated_delta.integrations.sglang import checking, process
from gated_delta.integrations.sglang import cuts as sglang_cuts
from gated_delta.integrations.sglang import kernels as sglang_kernels
from gated_delta.integrations.sglang import norm as sglang_norm
from gated_delta.integrations.sglang import start as sglang_start
from gated_delta.integrations.sglang.records import decode_ring, kvbuffer
from gated_delta.integrations.sglang.records import ring as rings
from gated_delta.problem import KVBuffer, UnsupportedProblem

load_plugins()  # as each of the engine's processes does
scatter_mamba_states_after_mtp_verify = inspect.unwrap(scatter_mamba_states_after_mtp_verify)
ENGINES = dict(GDN=TritonGDNKernel, KDA=TritonKDAKernel)
H, HV, D, P = 2, 4, 32, 8
POISON = float("nan")


@pytest.fixture(autouse=True)
def _counts_of_its_own():
    """And torch fills new memory with NaN."""
    torch.set_num_threads(1)
    process.state.calls.counts.clear()
    process.state.refused.clear()
    process.state.ring = None
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(False)


# -------------------------------------------------------------------- the kernels, without a server


class Given:
    """Random inputs of one layer: sequences of these lengths and slots, and `past` more tokens."""

    def __init__(
        self,
        layers,
        lengths,
        slots,
        *,
        past=0,
        bound=None,
        dtype=torch.float32,
        states=torch.float32,
        seed=0,
    ):
        torch.manual_seed(seed)
        self.layers, self.bound, self.T = layers, bound, sum(lengths) + past
        channels = (D,) if layers == "KDA" else ()
        # Rows of a wider tensor.
        self.mixed = torch.randn(self.T, (2 * H + HV) * D + 8, dtype=dtype)[:, 8:]
        self.q, self.k, self.v = (
            x.unflatten(1, (-1, D))[None] for x in self.mixed.split([H * D, H * D, HV * D], 1)
        )
        self.a, self.b = (
            torch.randn(self.T, HV, *channels, dtype=dtype),
            torch.randn(self.T, HV, dtype=dtype),
        )
        self.A_log, self.dt_bias = torch.randn(HV), torch.randn(HV, *channels)
        # Strided slots.
        self.pool = torch.randn(P, HV * D * D + 32).to(states)[:, 32:].unflatten(1, (HV, D, D))
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.g, self.beta = self.activated()
        for one in range(self.T - past, self.T):  # may be anything
            self.mixed[one] = self.a[one] = self.b[one] = POISON

    def activated(self, work=torch.float32):
        x = self.a.to(work) + self.dt_bias.to(work)
        A = self.A_log.to(work).exp().view(HV, *[1] * (x.dim() - 2))
        g = (
            -A * torch.nn.functional.softplus(x)
            if self.bound is None
            else self.bound * torch.sigmoid(A * x)
        )
        return g, torch.sigmoid(self.b.to(work))

    def gates(self):
        """As the engine's layers hold them."""
        if self.layers == "GDN":
            return dict(A_log=self.A_log, dt_bias=self.dt_bias)
        return dict(
            A_log=self.A_log.view(1, 1, HV, 1),
            dt_bias=self.dt_bias.flatten(),
            lower_bound=self.bound,
        )

    def raw(self):
        """a, b as the engine hands them on: KDA's with a batch of 1 in front."""
        return (self.a, self.b) if self.layers == "GDN" else (self.a.flatten(1)[None], self.b[None])

    def prompt(self):
        """The tokens of `extend`, as the engine's layers and the plug-in's hook pass them."""
        if self.layers == "KDA":
            return (self.q, self.k, self.v, self.a[None], self.b[None]), self.gates()
        gate = sglang_kernels.RawGate(
            lambda: (self.g[None], self.beta[None]), self.a, self.A_log, self.dt_bias
        )
        return (self.q, self.k, self.v, gate, self.b), {}

    def where(self):
        return dict(ssm_states=self.pool, cache_indices=self.slots, query_start_loc=self.bounds)

    def truth(self):
        """In float64: outputs, the pool, each sequence's states before and after every token."""
        g, beta = self.activated(torch.float64)
        pool = self.pool.double()
        o, states = sglang_cpu.delta_rule(
            self.q[0], self.k[0], self.v[0], g, beta, pool, self.slots, self.bounds, torch.float64
        )
        return o[None], pool, states

    def truth_of_trees(self, parents):
        """As truth, but for the pool: a state after a token is that after its path."""
        g, beta = self.activated(torch.float64)
        tokens = [self.q[0], self.k[0], self.v[0], g, beta]
        o, states = torch.zeros_like(self.v, dtype=torch.float64), []
        for n, slot in enumerate(self.slots.tolist()):
            start, end = self.bounds[n : n + 2].tolist()
            states.append([self.pool[slot].double()])
            for t, parent in enumerate(parents[n][: end - start] if slot > 0 else ()):
                pool, bounds = states[n][parent + 1 if t else 0].repeat(2, 1, 1, 1), [0, 1]
                token = [x[start + t : start + t + 1] for x in tokens]
                where = torch.tensor([1]), torch.tensor(bounds)
                o[:, start + t], ((_, after),) = sglang_cpu.delta_rule(
                    *token, pool, *where, torch.float64
                )
                states[n].append(after)
        return o, states


def kernel(layers):
    return sglang_kernels.kernel_class(ENGINES[layers])()


def near(x, truth, unit=2e-4):
    assert x.shape == truth.shape
    assert torch.isfinite(x).all()
    assert (x.double() - truth).norm() <= unit * truth.norm() + 1e-30


def ran(*routes):
    """Asserts that these routes ran, and no others: a layer's kind, its mode and the backend."""
    assert set(sglang_cpu.routes(process.state.calls)) == set(routes)
    assert len(plugin.report()) == len({tuple(route.split()[:2]) for route in routes})


LAYERS = pytest.mark.parametrize(("layers", "bound"), [("GDN", None), ("KDA", None), ("KDA", -5.0)])


@LAYERS
@pytest.mark.parametrize(
    ("packed", "states"), [(True, torch.float32), (False, torch.float32), (True, torch.float16)]
)
def test_decode(layers, bound, packed, states):
    x = Given(layers, [1] * 5, [3, 0, 5, -1, 0], bound=bound, states=states)
    o, pool, _ = x.truth()
    if packed:
        options = dict(
            scale=D**-0.5, ssm_states=x.pool, cache_indices=x.slots, num_v_heads=HV, head_v_dim=D
        )
        a, b = x.raw()
        result = kernel(layers).packed_decode(
            mixed_qkv=x.mixed, a=a, b=b, **x.gates(), **options, replayssm_d=None
        )
    else:
        result = kernel(layers).decode(x.q, x.k, x.v, *x.raw(), **x.gates(), **x.where())
    near(result, o)
    near(x.pool, pool, 2e-4 if states == torch.float32 else 1e-3)
    assert not result[0, [1, 3, 4]].any()
    ran(f"{layers} decode on backend reference")


@pytest.mark.parametrize("layers", ["GDN", "KDA"])
def test_decode_in_replayssms_ring(layers):
    """Seven steps in a ring of three tokens; the prefix cache has a row folded after the second."""
    x, L = Given(layers, [1] * 4, [3, 0, 5, -1]), 3
    options = dict(scale=D**-0.5, cache_indices=x.slots, num_v_heads=HV, head_v_dim=D)
    a, b = x.raw()
    decode = functools.partial(kernel(layers).packed_decode, x.mixed, a, b, **x.gates(), **options)
    whole, lens = x.pool.clone(), torch.zeros(4, dtype=torch.int32)
    channels = (D,) if layers == "KDA" else ()
    sizes = dict(d=(HV, L, D), k=(H, L, D), g=(HV, L, *channels))
    ring = {f"replayssm_{name}": torch.full((8, *size), 7.0) for name, size in sizes.items()}
    for step in range(7):
        batch = SimpleNamespace(replayssm_write_pos=lens.clone(), replayssm_force_flush=None)
        forced = torch.tensor([0, 0, step == 1, 0], dtype=torch.int32)
        if layers == "GDN":  # the engine forces no fold of KDA
            batch.replayssm_force_flush = forced
        plugin._mark_forced_folds(batch)
        o = decode(ssm_states=x.pool, **ring, **vars(batch))
        near(o, decode(ssm_states=whole))
        folded = (lens == L - 1) | ((layers == "GDN") & (forced != 0))
        lens = torch.where(folded, 0, lens + 1)
        for n in (0, 2):  # the other slots pad
            if folded[n]:
                near(x.pool[x.slots[n]], whole[x.slots[n]].double())
    assert lens[[0, 2]].tolist() == ([1, 2] if layers == "GDN" else [1, 1])
    assert (x.pool[3] - whole[3]).abs().max() > 1e-3  # its last token is in the ring alone
    with_ring = f"{layers} decode with ReplaySSM's ring on backend reference"
    ran(with_ring, f"{layers} decode on backend reference")


@LAYERS
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float16])
def test_extend_with_states_for_the_prefix_cache(layers, bound, states):
    lengths, chunks = [70, 0, 130, 5, 9], [1, -1, 2, -1, 0]
    x = Given(layers, lengths, [3, 0, 5, 0, 1], past=3, bound=bound, states=states)
    o, pool, after = x.truth()
    track = torch.full((len(lengths), HV, D, D), 7.0)
    tokens, gates = x.prompt()
    gates |= dict(return_intermediate_states=True) if layers == "KDA" else {}
    tracked = dict(track_state=track, track_chunk_idx=torch.tensor(chunks, dtype=torch.int32))
    result = kernel(layers).extend(
        *tokens, **gates, **x.where(), **tracked, layer_id=0, extend_prefix_lens=None
    )
    assert result[1:] == ((None, None) if layers == "GDN" else (None,))
    unit = 2e-4 if states == torch.float32 else 4e-3
    near(result[0], o)
    near(x.pool, pool, unit)
    for n in (0, 2, 4):
        near(track[n], after[n][64 * chunks[n]], unit)
    if states == torch.float32:
        assert (track[[1, 3]] == 7).all()
    assert not result[0][:, -3:].any()
    ran(f"{layers} prefill on backend reference")


def test_extend_writes_to_output_and_reads_columns():
    x = Given("GDN", [5, 3], [2, 1])
    o, pool, _ = x.truth()
    output = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    (*rows, gate, b), _ = x.prompt()
    columns = [y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for y in rows]
    assert columns[0].stride(-1) != 1
    result, _, _ = kernel("GDN").extend(*columns, gate, b, **x.where(), output=output)
    assert result.data_ptr() == output.data_ptr()
    near(result, o)
    near(x.pool, pool)


def test_extend_of_gathered_copies_has_no_padding_slot():
    x = Given("GDN", [5, 3], [1, 2])
    o, pool, _ = x.truth()
    x.pool, x.slots = x.pool[1:3].clone(), torch.tensor([0, 1], dtype=torch.int32)
    result, _, _ = kernel("GDN").extend(*x.prompt()[0], **x.where())
    near(result, o)
    near(x.pool, pool[1:3])


@pytest.mark.parametrize("layers", ENGINES)
@pytest.mark.parametrize("slots", [[], [3, 4]], ids=["no sequence", "empty ones"])
def test_extend_of_nothing(layers, slots):
    """As on a rank that has no request; the tokens are padding."""
    x = Given(layers, [0] * len(slots), slots, past=2)
    before = x.pool.clone()
    tokens, gates = x.prompt()
    result = kernel(layers).extend(*tokens, **gates, **x.where())
    assert not (result[0] if layers == "GDN" else result).any()
    assert torch.equal(x.pool, before)
    ran(f"{layers} prefill on backend reference")


def test_decode_of_nothing():
    x = Given("GDN", [], [])
    options = dict(
        scale=D**-0.5, ssm_states=x.pool, cache_indices=x.slots, num_v_heads=HV, head_v_dim=D
    )
    assert kernel("GDN").packed_decode(
        mixed_qkv=x.mixed, a=x.a, b=x.b, **x.gates(), **options
    ).shape == (1, 0, HV, D)


@LAYERS
def test_verify_keeps_every_state_in_its_row(layers, bound):
    lengths, rows = [4, 2, 3, 0, 1], [2, 5, 0, 6, 6]
    x = Given(layers, lengths, [3, 5, 0, 2, -1], past=2, bound=bound)
    before, (o, _, after) = x.pool.clone(), x.truth()
    scratch = torch.full((7, 4, HV, D, D), 7.0)
    options = dict(
        intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.tensor([*rows, 1, 3], dtype=torch.int32),
    )
    a, b = x.raw()
    result = kernel(layers).target_verify(
        q=x.q,
        k=x.k,
        v=x.v,
        a=a,
        b=b,
        **x.gates(),
        **x.where(),
        **options,
        cache_steps=4,
        retrieve_parent_token=None,
    )
    near(result, o)
    assert torch.equal(x.pool, before)
    for n in (0, 1):
        near(scratch[rows[n], : lengths[n]], torch.stack(after[n][1:]))
        assert (scratch[rows[n], lengths[n] :] == 7).all()
    assert (scratch[[0, 1, 3, 4, 6]] == 7).all()
    ran(f"{layers} verify on backend reference")


# --------------------------------------------------------------------------------- verify and flush


class Configurator:
    """The parts of the engine's pool configurator that the plug-in uses, for two layers."""

    device, attn_dp_size, pp_size = "cpu", 1, 1
    model_config = SimpleNamespace(dtype=torch.float32)

    def __init__(self, layers, states=torch.float32):
        dtype = mamba_utils.Mamba2StateDType(conv=torch.float32, temporal=states)
        if layers == "GDN":
            sizes = dict(
                intermediate_size=HV * D,
                n_groups=H,
                num_heads=HV,
                head_dim=D,
                state_size=D,
                conv_kernel=4,
            )
            shape, result = (
                mamba_utils.Mamba2StateShape.create(tp_world_size=1, **sizes),
                mamba_utils.Mamba2CacheParams,
            )
        else:
            sizes = dict(num_heads=HV, head_dim=D, num_k_heads=H)
            shape, result = (
                mamba_utils.KimiLinearStateShape.create(tp_world_size=1, **sizes),
                mamba_utils.KimiLinearCacheParams,
            )
        # No convolutions: moving their windows needs CUDA.
        self.params = result(shape=dataclasses.replace(shape, conv=[]), layers=[0, 1], dtype=dtype)
        self.mambaish_config = SimpleNamespace(mamba2_cache_params=self.params)
        self.hybrid_gdn_config, self.hybrid_kda_config = (
            self.mambaish_config if layers == one else None for one in ENGINES
        )

    def _get_mamba_layer_ids_for_req_pool(self):
        return [0, 1]

    def pool(self, drafts):
        size = dict(size=P - 1, spec_state_size=4, speculative_num_draft_tokens=drafts)
        return MambaPool(**size, cache_params=self.params, mamba_layer_ids=[0, 1], device="cpu")


def under(**flags):
    settings = dict(linear_attn_backend="triton", **dict.fromkeys(process.FLAGS.values())) | flags
    return get_context().override_server_args(**settings)


@contextlib.contextmanager
def speculating(drafts=4, topk=1, kvbuffer="1", **flags):
    """kvbuffer: the environment's word; None leaves it to the default."""
    flags |= dict(speculative_num_draft_tokens=drafts, speculative_eagle_topk=topk)
    asked = {} if kvbuffer is None else {process.DRAFTS: kvbuffer}
    with (
        mock.patch.dict(os.environ, asked),
        under(linear_attn_verify_backend=process.NAME, **flags),
    ):
        yield


PARENTS = [[0, 0, 0, 1], [3, 0, 9, 9], [0, 0, 1, 0], [2, 0, 0, 9], [9, 9, 9, 9]]
"""As the engine's convolution leaves them: anything for first tokens and behind a draft's end."""
PATHS = [[0, 1, 3], [0, 1], [], [0, 2], []]


@LAYERS
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    ("request_rows", "tree"),
    [(False, False), (True, False), (True, True)],
    ids=["positions", "requests", "trees"],
)
def test_drafts_in_a_kvbuffer_are_committed(layers, bound, tracked, request_rows, tree):
    """To every layer. Of trees the engine gives the last accepted token, and the path before."""
    configurator, lengths = Configurator(layers), [4, 2, 4, 3, 0]
    steps, track_steps, track_slots = [2, 1, -1, 0, 0], [1, -1, -1, 0, -1], [6, 6, 6, 7, 0]
    if tree:
        steps, track_steps = [3, 1, -1, 2, -1], [1, -1, -1, 2, -1]
    requests = SimpleNamespace(mamba_pool=configurator.pool(4))
    before, topk = requests.mamba_pool.mem_usage, 2 if tree else 1
    with speculating(topk=topk):
        kvbuffer._replace(requests, configurator)
    caches = requests.mamba_pool.get_speculative_mamba2_params_all_layers()
    assert isinstance(caches.intermediate_ssm, kvbuffer.Drafts)
    assert requests.mamba_pool.mem_usage < before
    rows = torch.tensor([3, 0, 4, 1, 2] if request_rows else [0, 1, 2, 3, 4], dtype=torch.int32)
    expected = []
    for layer in range(2):
        x = Given(layers, lengths, [3, 5, 1, 2, -1], bound=bound, past=1, seed=layer)
        caches.temporal[layer] = x.pool
        o, after = x.truth_of_trees(PARENTS) if tree else x.truth()[::2]
        x.pool = requests.mamba_pool.mamba2_layer_cache(layer).temporal
        a, b = x.raw()
        scratch = requests.mamba_pool.mamba2_layer_cache(layer).intermediate_ssm
        options = dict(
            intermediate_states_buffer=scratch, intermediate_state_indices=rows, cache_steps=4
        )
        tokens = dict(q=x.q, k=x.k, v=x.v, a=a, b=b)
        parents = torch.tensor(PARENTS) if tree else None
        result = kernel(layers).target_verify(
            **tokens, **x.gates(), **x.where(), **options, retrieve_parent_token=parents
        )
        near(result, o)
        want = x.pool.double()
        for n, slot in enumerate(x.slots.tolist()):
            if tracked and track_steps[n] >= 0:
                want[track_slots[n]] = after[n][track_steps[n] + 1]
            if slot > 0:
                want[slot] = after[n][steps[n] + 1]
        expected.append(want)
    # Verify does not write the pool.
    assert torch.equal(
        caches.temporal[0], Given(layers, lengths, [3, 5, 1, 2, -1], bound=bound, past=1).pool
    )
    track = (torch.tensor(track_slots), torch.tensor(track_steps)) if tracked else (None, None)
    sources = rows if request_rows else None
    commit = functools.partial(
        kvbuffer.commit,
        scatter_mamba_states_after_mtp_verify,
        caches,
        x.slots,
        torch.tensor(steps),
        *track,
        src_indices_raw=sources,
    )
    with speculating(topk=topk):
        if tree:
            worker = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=requests))
            accepted = [[4 * n + t for t in path] for n, path in enumerate(PATHS)]
            accepted = torch.tensor([(path + [-1] * 3)[:3] for path in accepted])
            kvbuffer.keep_path(worker, None, None, accepted, 4)
        commit()
        if tree:
            with pytest.raises(RuntimeError, match="commit_mamba_states_after_verify"):
                commit()  # without another path
    for layer in range(2):
        near(caches.temporal[layer], expected[layer])
    ran(f"{layers} verify on backend reference")


@LAYERS
def test_accepted_drafts_stay_in_their_rows(layers, bound):
    """For as long as another verify has room. Trees and a decode server's do not stay."""
    configurator, requests = (
        Configurator(layers),
        SimpleNamespace(alloc_rows=lambda n: [4, 2, 1][:n]),
    )
    requests.mamba_pool = configurator.pool(3)
    kept = dict(drafts=3, disable_radix_cache=True)
    for flags in (
        dict(topk=2),
        dict(disaggregation_mode="decode"),
        dict(disable_radix_cache=False),
    ):
        with speculating(**kept | flags):
            assert kvbuffer.sizes(configurator)["T"] == 3
    bf16 = mock.patch.object(kvbuffer, "state_dtype_of", return_value=torch.bfloat16)
    with speculating(**kept), bf16:
        assert kvbuffer.sizes(configurator)["T"] == 6
    with speculating(**kept):
        kvbuffer._replace(requests, configurator)
    caches, ring = requests.mamba_pool.mamba_cache, process.state.ring
    assert caches.intermediate_ssm.ring is ring
    assert ring.buffer.u.shape[:3] == (2, 5, 12)
    for part in (ring.buffer.u, ring.buffer.k, ring.buffer.log_decay):
        part.fill_(POISON)
    caches.temporal.copy_(torch.randn_like(caches.temporal))
    whole, ring.lens[:] = caches.temporal.double(), 9
    assert requests.alloc_rows(2) == [4, 2]
    rows, slots = torch.tensor([4, 2, 0]), torch.tensor([3, 5, -1], dtype=torch.int32)
    ring.empty()
    flushed = 0
    for step in range(9):
        accepted = [[3, 2, 1][step % 3], step % 4, 1]
        track = [1 if step == 4 else -1, -1, -1]
        ring.step(rows, slots)
        for layer in range(2):
            x = Given(layers, [3, 3, 3], slots.tolist(), bound=bound, seed=10 * step + layer)
            x.pool = whole[layer]
            o, _, after = x.truth()
            a, b = x.raw()
            options = dict(
                ssm_states=caches.temporal[layer],
                cache_indices=x.slots,
                query_start_loc=x.bounds,
                intermediate_states_buffer=caches.intermediate_ssm[layer],
                cache_steps=3,
                intermediate_state_indices=torch.arange(3),
                retrieve_parent_token=None,
            )
            tokens = dict(q=x.q, k=x.k, v=x.v, a=a, b=b)
            with mock.patch.object(api, "verify", wraps=api.verify) as verify:
                near(kernel(layers).target_verify(**tokens, **x.gates(), **options), o)
            assert verify.call_args.kwargs["max_seqlen"] == 3  # else kernels for 12 drafts run
            for n in range(2):
                whole[layer, slots[n]] = after[n][accepted[n]]
                if track[n] >= 0:
                    whole[layer, 6] = after[n][track[n] + 1]
        before = caches.temporal[:, [3, 5]].clone()
        drafter = SimpleNamespace(is_draft_worker=True, req_to_token_pool=None)
        rings._before_extend(
            None, drafter, extend_batch(rows)
        )  # of its own layers, in between: folds nothing
        steps, tracked = torch.tensor(accepted) - 1, (torch.tensor([6, 6, 6]), torch.tensor(track))
        with speculating(**kept):
            kvbuffer.commit(scatter_mamba_states_after_mtp_verify, caches, slots, steps, *tracked)
        flushed += (caches.temporal[:, [3, 5]] != before).flatten(2).any(2)[0].int()
        assert (ring.lens <= 9).all()
        if step == 4:
            near(caches.temporal[:, 6], whole[:, 6])
    assert flushed.tolist() == [1, 1]  # of nine
    ring.fold(rows, slots)
    near(caches.temporal[:, [3, 5]], whole[:, [3, 5]])


def test_a_dummy_run_of_trees_has_no_parents(monkeypatch):
    """It runs the kernel of trees all the same, as the start loads no other."""
    monkeypatch.setattr(process.state, "trees", True)
    x, parents, verify = Given("GDN", [3, 3], [2, 1]), [], sglang_kernels.api.verify
    monkeypatch.setattr(
        sglang_kernels.api,
        "verify",
        lambda **call: parents.append(call["parents"].tolist()) or verify(**call),
    )
    options = dict(
        intermediate_states_buffer=KVBuffer.empty(2, 3, H, HV, D, D),
        intermediate_state_indices=torch.tensor([0, 1]),
        cache_steps=3,
    )
    tokens = dict(q=x.q, k=x.k, v=x.v, a=x.a, b=x.b, **x.gates(), **x.where(), **options)
    near(kernel("GDN").target_verify(**tokens, retrieve_parent_token=None), x.truth()[0])
    assert parents == [[[-1, 0, 1]] * 2]


def test_the_pool_keeps_its_scratch_without_a_kvbuffer(monkeypatch, caplog):
    configurator = Configurator("GDN")
    for flags, reason in [
        (dict(drafts=17), "at most 16"),
        (dict(enable_linear_replayssm_spec=True), "ReplaySSM"),
    ]:
        caplog.clear()
        with speculating(**flags):
            assert kvbuffer.sizes(configurator) is None
        assert reason in caplog.text
    with under(speculative_num_draft_tokens=4):
        assert kvbuffer.sizes(configurator) is None  # verify is the engine's
    # As with an adaptive algorithm.
    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: 6)
    with speculating():
        assert kvbuffer.sizes(configurator)["T"] == 6
    monkeypatch.undo()
    monkeypatch.setattr(process, "backend_for", lambda x: "cute")
    requests = SimpleNamespace(mamba_pool=configurator.pool(4))
    with speculating():
        kvbuffer._replace(requests, configurator)
    assert torch.is_tensor(requests.mamba_pool.mamba_cache.intermediate_ssm)
    assert "tensors on a CUDA device, got cpu" in caplog.text


def test_another_release_gets_no_hooks_for_drafts(monkeypatch):
    """Nobody has asked for them, and it may lack what they hook into."""
    from sglang.srt.arg_groups import choices

    monkeypatch.delenv(process.DRAFTS, raising=False)
    hooked = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: hooked.append(target))
    adds = "add_linear_attn_kernel_backend_choices"
    monkeypatch.setattr(choices, adds, lambda names: None)  # it extends the flags' own lists
    for refusal in ("0.9.0", None):
        monkeypatch.setattr(choices, "LINEAR_ATTN_KERNEL_BACKEND_CHOICES", ["triton"])
        monkeypatch.setattr(process, "refusal", lambda refusal=refusal: refusal)
        hooked.clear()
        plugin.register()
        assert (kvbuffer.COMMIT in hooked) == (refusal is None)


def test_by_default_large_batches_drafts_are_in_a_kvbuffer(monkeypatch, caplog, tmp_path):
    """With fewer value heads, and always with 16-bit states of KDA, states stay."""
    monkeypatch.delenv(process.DRAFTS, raising=False)
    caplog.set_level("INFO")
    for layers, states, heads in (
        ("GDN", torch.float32, 1024),
        ("KDA", torch.float32, 2048),
        ("GDN", torch.bfloat16, 4096),
    ):
        configurator = Configurator(layers, states)
        for requests in (heads // HV - 1, heads // HV):
            caplog.clear()
            with speculating(kvbuffer=None, max_running_requests=requests):
                found = kvbuffer.sizes(configurator)
            assert (found is not None) == (requests * HV == heads)
            assert ("gains little" in caplog.text) == (found is None)
    with speculating(kvbuffer=None, max_running_requests=9999):
        assert kvbuffer.sizes(Configurator("KDA", torch.bfloat16)) is None
    # A pack without its kernels ends the start only if a buffer was asked for.
    monkeypatch.setattr(load, "gpu_of", lambda device: H200)
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    for asked in (None, "1"):
        with speculating(kvbuffer=asked, max_running_requests=9999):
            assert (kvbuffer.sizes(Configurator("GDN")) is None) == (asked is None)
    assert re.search(r"a KVBuffer needs \d+ more kernels: ", caplog.text)


def test_memory_for_drafts_is_reserved_as_they_take_it():
    """The engine subtracts its reservation: for its scratch, or for the KVBuffer."""
    from sglang.srt.mem_cache import kv_cache_configurator as module

    seen = []

    def original(configurator, rest):
        seen.append((rest, module._pd_prefill_skips_mamba_spec_state()))
        return rest

    with speculating(max_running_requests=7):
        result = kvbuffer.sizes(Configurator("GDN"))
        assert (
            kvbuffer._budget(original, Configurator("GDN"), 1.0)
            == 1.0 - KVBuffer.empty(8, **result).nbytes / 2**30
        )
    with under(speculative_num_draft_tokens=4, max_running_requests=7):
        assert kvbuffer._budget(original, Configurator("GDN"), 1.0) == 1.0
    assert [skips for _, skips in seen] == [True, False]


# ---------------------------------------------------------------------------------------- our ring


def decoding(**flags):
    return under(linear_attn_decode_backend=process.NAME, disable_radix_cache=True, **flags)


def decode_servers_pool(configurator, drafts=None):
    """By the engine's code: 4 requests run, 3 more wait for their prefill."""
    names = ("layer_info", "_get_ple_req_pool_kwargs")
    parts = SimpleNamespace(start_layer=0, end_layer=2), lambda: {}
    for name, part in zip(names, parts, strict=True):
        setattr(configurator, name, part)
    configurator.model_config = SimpleNamespace(dtype=torch.float32, context_len=64)
    build = inspect.unwrap(KVCacheConfigurator._build_hybrid_mamba_decode_req_pool)
    sizes = dict(max_num_reqs=4, extra_max_context_len=0, pre_alloc_size=3)
    more = dict(
        max_running_requests=4, max_mamba_cache_size=P - 1, speculative_num_draft_tokens=drafts
    )
    with get_context().override_server_args(**more, disaggregation_mode="decode"):
        return build(configurator, **sizes)


def hooks_of(module, monkeypatch):
    """What a module registers, by the name of the method."""
    hooks = {}
    take = lambda target, hook, kind: hooks.update({target.rpartition(".")[2]: hook})
    monkeypatch.setattr(HookRegistry, "register", take)
    monkeypatch.setattr(HookRegistry, "_hooks", {})  # the plug-in has registered by default
    module.register()
    return hooks


def test_a_decode_server_keeps_drafts_in_a_kvbuffer(monkeypatch):
    """Its pool has other code and more rows; the budget counts them all."""
    configurator, hooks = Configurator("GDN"), hooks_of(kvbuffer, monkeypatch)
    requests = decode_servers_pool(configurator, drafts=4)
    decode = dict(disaggregation_mode="decode", disaggregation_decode_extra_slots=3)
    with speculating(max_running_requests=4, **decode):
        hooks["_build_hybrid_mamba_decode_req_pool"](requests, configurator)
        rest = hooks["_handle_max_mamba_cache"](lambda _, rest: rest, configurator, 1.0)
    drafts = requests.mamba_pool.mamba_cache.intermediate_ssm
    assert isinstance(drafts, kvbuffer.Drafts)
    assert drafts.buffer.u.shape[1] == len(requests.req_to_token) == 8
    assert rest == 1.0 - drafts.buffer.nbytes / 2**30


@LAYERS
def test_a_retracted_requests_state_is_whole(layers, bound, monkeypatch):
    """Of one that decoded, and of one that no step has seen: its row has another's tokens."""
    configurator, hooks = Configurator(layers), hooks_of(decode_ring, monkeypatch)
    requests = decode_servers_pool(configurator)
    decode = dict(disaggregation_mode="decode", linear_replayssm_cache_len=5)
    with decoding(**decode):
        hooks["_build_hybrid_mamba_decode_req_pool"](requests, configurator)
    ring, states = process.state.ring, requests.mamba_pool.mamba_cache.temporal
    for part in (ring.buffer.u, ring.buffer.k, ring.buffer.log_decay):
        part.fill_(POISON)
    states.copy_(torch.randn_like(states))
    whole, ring.lens[:] = states.clone(), 4
    one, other, last = requests.alloc_rows(3)
    ring.appends = True
    slots = torch.tensor([3, 0, 5, -1], dtype=torch.int32)
    rows = torch.tensor([one, 0, other, 0])
    for row, slot in ((one, 3), (other, 5), (last, 2)):
        requests.req_index_to_mamba_index_mapping[row] = slot
    options = dict(scale=D**-0.5, num_v_heads=HV, head_v_dim=D, cache_indices=slots)
    for step in range(7):
        ring.empty()
        ring.step(rows, slots, torch.tensor([False, True, step == 1, False]))
        for layer in range(2):
            x = Given(layers, [1] * 4, slots.tolist(), bound=bound, seed=10 * step + layer)
            call = functools.partial(kernel(layers).packed_decode, x.mixed, *x.raw(), **x.gates())
            o = call(ssm_states=states[layer], **options)
            with mock.patch.object(process.state, "ring", None):
                near(o, call(ssm_states=whole[layer], **options).double())
        if step == 1:
            near(states[:, 5], whole[:, 5].double())
    assert ring.lens[[one, other]].tolist() == [2, 0]
    assert (states[:, 3] - whole[:, 3]).abs().max() > 1e-3  # the row lacks
    ring.taken, ring.lens[last] = [last], 4  # taken again
    for row, slot in ((one, 3), (other, 5), (last, 2)):
        hooks["backup_kv_cache"](
            SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)), None, requests
        )
        _, copy = requests.mamba_pool.get_cpu_copy(torch.tensor([slot]))
        near(copy[:, 0], whole[:, slot].double())
    assert not ring.lens[[one, other, last]].any()
    with_ring = f"{layers} decode in a ring on backend reference"
    ran(with_ring, f"{layers} decode on backend reference")


class Checked:
    """Two requests that decode in a ring, with every state that a snapshot takes compared."""

    def __init__(self, layers, bound, monkeypatch):
        self.layers, self.bound = layers, bound
        pool = Configurator(layers).pool(None)
        self.states = pool.mamba_cache.temporal.copy_(torch.randn_like(pool.mamba_cache.temporal))
        gate = "channel" if layers == "KDA" else "head"
        sizes = dict(num_layers=2, gate=gate, device="cpu")
        self.ring = process.state.ring = rings.Ring(
            self.states, KVBuffer.empty(5, 7, H, HV, D, D, **sizes)
        )
        self.slots, self.rows = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([1, 2])
        requests = SimpleNamespace(mamba_pool=pool, mamba_map={4: 0, 9: 1})
        self.backend = SimpleNamespace(req_to_token_pool=requests, mamba_chunk_size=64)
        self.backend._forward_metadata = self.metadata
        self.backend.init_forward_metadata_out_graph = None
        monkeypatch.setattr(state_check, "SAMPLE", 1)
        monkeypatch.setattr(sglang_kernels, "api", sglang_kernels.api)
        monkeypatch.setattr(process.state, "check", None)
        rings.attach(self.backend)
        with under(linear_attn_backend=process.NAME, mamba_radix_cache_strategy="extra_buffer"):
            runner = SimpleNamespace(device="cpu", req_to_token_pool=requests)
            checking.attach(self.backend, runner)
        self.check, self.tokens, self.names = process.state.check, 9, ["a", "b"]

    def metadata(self, batch):
        tracked = batch.mamba_track_indices
        return SimpleNamespace(mamba_cache_indices=self.slots, mamba_track_indices=tracked)

    def step(self, tracked=False, skip=""):
        """skip: what a faulty ring forgets in it."""
        self.tokens += 1
        batch = SimpleNamespace(
            logical_forward_mode=ForwardMode.DECODE,
            rids=self.names,
            seq_lens=torch.tensor([self.tokens, self.tokens + 20]),
            req_pool_indices=self.rows,
            mamba_track_mask=torch.tensor([False, tracked]),
            mamba_track_indices=torch.tensor([0, 6]),
            batch_size=2,
        )
        due, batch.mamba_track_mask = batch.mamba_track_mask, batch.mamba_track_mask.clone()
        if skip == "fold":
            batch.mamba_track_mask[:] = False
        self.backend.forward_metadata = self.backend._forward_metadata(batch)
        batch.mamba_track_mask = due
        for layer, states in enumerate(self.states):
            x = Given(self.layers, [1, 1], [3, 5], bound=self.bound, seed=2 * self.tokens + layer)
            weights = Given(self.layers, [1], [1], bound=self.bound, seed=layer)
            options = dict(scale=D**-0.5, num_v_heads=HV, head_v_dim=D, cache_indices=self.slots)
            call = kernel(self.layers).packed_decode
            call(x.mixed, *x.raw(), **weights.gates(), ssm_states=states, **options)
        if tracked:
            self.states[:, 6] = self.states[:, 3 if skip == "slot" else 5]
        checking._decoded(None, self.backend, batch, None, None, self.slots, 9)


@LAYERS
@pytest.mark.parametrize("fault", ["", "fold", "slot", "length", "row", "emptying"])
def test_the_checking_mode_names_requests(layers, bound, fault, monkeypatch):
    engine = Checked(layers, bound, monkeypatch)
    for n in range(12):
        engine.step(tracked=n == 5)
    assert engine.check.compared == 2
    if fault == "length":
        engine.ring.lens[2] += 1
    if fault == "row":
        engine.rows = torch.tensor([2, 1])
    if fault == "emptying":  # of a new request's row
        engine.names = ["a", "c"]
    names = {
        "fold": "request b, layer 4, slot 6: the state after 42 tokens is off",
        "slot": "request b, layer 4, slot 6: the state after 42 tokens is off",
        "length": "request b, layer 4, slot 6: the state after 42 tokens is off by nan",
        "row": r"request a, layer 4, slot 3: row 2 has \d tokens of request b, expected none",
        "emptying": r"request c, layer 4, slot 5: row 2 has \d tokens of request b, expected none",
    }
    if fault:
        with pytest.raises(RuntimeError, match=names[fault]):
            engine.step(tracked=True, skip=fault)
    else:
        engine.step(tracked=True)
        assert engine.check.compared == 4


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (dict(linear_attn_prefill_backend="triton"), "every mode of the linear layers on gated_"),
        (dict(mamba_radix_cache_strategy="no_buffer"), "--mamba-radix-cache-strategy extra_buffer"),
        (dict(speculative_num_draft_tokens=4), "every mode of the linear layers on gated_delta"),
        ({}, "--cuda-graph-backend-decode=disabled"),
    ],
)
def test_what_the_checking_mode_needs(flags, needed, caplog, monkeypatch):
    """A log line says that nothing is compared; graphs end the start."""
    monkeypatch.setattr(process.state, "check", None)
    flags = (
        dict(linear_attn_backend=process.NAME, mamba_radix_cache_strategy="extra_buffer") | flags
    )
    graphs = SimpleNamespace(backend="full")
    config = SimpleNamespace(decode=graphs, prefill=SimpleNamespace(backend="disabled"))
    with under(**flags, cuda_graph_config=config):
        if needed.startswith("--cuda"):
            with pytest.raises(RuntimeError, match=needed):
                checking.attach(None, SimpleNamespace(device="cuda"))
        else:
            checking.attach(None, SimpleNamespace(device="cuda"))
            assert f"compares no snapshots: it needs {needed}" in caplog.text
    assert process.state.check is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(linear_attn_decode_backend="triton"), "--linear-attn-decode-backend gated_delta"),
        (dict(speculative_num_draft_tokens=4), "no drafts"),
        (dict(enable_linear_replayssm=True), "no ReplaySSM of SGLang's"),
        (dict(linear_replayssm_cache_len=34), "--linear-replayssm-cache-len of 2 to 33"),
        (
            dict(disable_radix_cache=False, mamba_radix_cache_strategy="no_buffer"),
            "--mamba-radix-cache-strategy extra_buffer",
        ),
        (dict(enable_two_batch_overlap=True), "no --enable-two-batch-overlap"),
        (dict(enable_pdmux=True), "no --enable-pdmux"),
        (dict(enable_pd_role_switch=True), "no --enable-pd-role-switch"),
        (dict(enable_unified_memory=True), "no --enable-unified-memory"),
        (dict(pp=2), "one pipeline stage"),
        (dict(others=True), "GDN or KDA layers"),
        (dict(release=True), "SGLang 0.0.1, not 0.5.23, which changes covered"),
        (dict(gpu=True), "tensors on a CUDA device, got cpu"),
        (dict(kda_in_16_bits=True), "32-bit states of KDA layers"),
    ],
    ids=lambda x: None if isinstance(x, str) else next(iter(x)),
)
def test_what_a_ring_cannot_have_ends_the_start(flags, named, monkeypatch):
    configurator, flags = Configurator("GDN"), dict(flags)
    configurator.pp_size = flags.pop("pp", 1)
    if flags.pop("others", False):
        configurator.hybrid_gdn_config = None
    if flags.pop("release", False):
        changed = {"kernels/ops/attention/kda_fused_decode.py": dict(covered="0")}
        other = releases.SGLANG_RING._replace(version="0.0.1", code=changed)
        monkeypatch.setattr(releases, "SGLANG_RING", other)
    if flags.pop("gpu", False):
        monkeypatch.setattr(process, "backend_for", lambda x: "cute")
    if flags.pop("kda_in_16_bits", False):
        configurator = Configurator("KDA")
        params = configurator.params
        dtype = dataclasses.replace(params.dtype, temporal=torch.bfloat16)
        configurator.mambaish_config.mamba2_cache_params = dataclasses.replace(params, dtype=dtype)
    ours = dict(linear_attn_decode_backend=process.NAME, disable_radix_cache=True)
    with under(**ours | flags), pytest.raises(UnsupportedProblem) as error:
        decode_ring._budget(None, configurator, 1.0)
    assert "GATED_DELTA_SGLANG_RING=0 turns it off" in str(error.value)
    assert named in str(error.value)


def test_a_start_asks_for_the_kernels_of_its_layers(monkeypatch):
    """With their norm and bound: a pack need not have others."""
    monkeypatch.setattr(decode_ring, "heads_of", lambda *_: 0)
    monkeypatch.setattr(sglang_norm, "gate_of", lambda module: module)
    attn, asked = RadixLinearAttention.__new__(RadixLinearAttention), []
    torch.nn.Module.__init__(attn)
    attn.lower_bound = -5.0
    configurator = Configurator("KDA")
    configurator.model = SimpleNamespace(modules=lambda: [SimpleNamespace(attn=attn)])
    monkeypatch.setattr(load, "refused", lambda calls: asked.extend(calls))
    with decoding():
        decode_ring.sizes(configurator)
    with speculating(drafts=3):
        kvbuffer.sizes(configurator)
    asked = [call for op, call in asked if op != "flush"]
    assert len(asked) == 3
    assert all("norm" in call and call["gate"].bound == -5.0 for call in asked)


def test_hooks_of_other_plug_ins_do_not_displace_ours(monkeypatch):
    others = [(HookType.BEFORE, print, None)]
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list, {rings._EXTEND: others}))
    for _ in range(2):
        rings.register_folds()
    assert [hook for _, hook, _ in others] == [print, rings._before_extend]
    assert len(HookRegistry._hooks[rings._BACKUP]) == 1
    monkeypatch.setattr(HookRegistry, "_patched", {rings._FUSED, rings._EXTEND, rings._BACKUP})
    with pytest.raises(RuntimeError, match=r"must hook .*covered, but another plug-in"):
        process.hook({rings._FUSED: rings._uncovered}, "AFTER")


def test_a_rings_memory_is_reserved(monkeypatch):
    """For the requests that run; else each slot of states pays a part of a request's row."""
    monkeypatch.setitem(load.FROM_HEADS, ("KDA", 4), 7 * HV)
    configurator, seen = Configurator("KDA"), []
    configurator.extra_mamba_cache_bytes_per_req = 100
    configurator._calculate_mamba_ratio = lambda: 5

    def original(configurator, rest):
        seen.append((rest, configurator.extra_mamba_cache_bytes_per_req))

    for flags in (
        dict(max_running_requests=7),
        dict(max_running_requests=6),  # a ring would not pay
        dict(max_running_requests=None),
        dict(disaggregation_mode="prefill"),  # decodes nothing
    ):
        with decoding(linear_replayssm_cache_len=16, **flags):
            decode_ring._budget(original, configurator, 1.0)
    with decoding(linear_replayssm_cache_len=16):
        row = KVBuffer.empty(1, **decode_ring.sizes(configurator)).nbytes
    assert row == 2 * 15 * 4 * (HV * D + H * D + HV * D)
    part = 100 + -(-row // 5)
    all_rows, one_row = 1.0 - 8 * row / 2**30, 1.0 - row / 2**30
    assert seen == [(all_rows, 100), (1.0, 100), (one_row, part), (1.0, 100)]
    assert configurator.extra_mamba_cache_bytes_per_req == 100


def test_a_graph_steps_the_ring_as_it_replays():
    """Rows of new requests are emptied before a replay, not while SGLang captures a graph."""
    ring = graphs_ring(heads=3 * HV)
    backend = SimpleNamespace(
        _forward_metadata=None,
        init_forward_metadata_out_graph=lambda batch, in_capture: None,
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([5, 2, -1])),
    )
    rings.attach(backend)
    batch = decode_batch(3, 1, 2)
    ring.lens[:] = torch.tensor([0, 1, 2, 3])
    ring.taken = [1]
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert ring.taken == [1]
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    given = ring.arguments(ring.states[0], 3)
    assert given["buffer_indices"].tolist() == [3, 1, 0]  # padding has no request's row
    assert given["buffer_lens"].tolist()[:2] == [3, ~0]
    assert ring.lens.tolist()[1:] == [0, 2, 0]
    assert ring.appends
    ring.drafts, batch.forward_mode = 2, ForwardMode.TARGET_VERIFY
    ring.lens[3] = 2
    backend.init_forward_metadata_in_graph(batch)  # which advances no length
    assert ring.step_lens[:2].tolist() == [2, 0]
    assert ring.lens.tolist()[1:] == [0, 2, 2]
    batch.forward_mode = ForwardMode.DECODE  # not with drafts: it finds the states whole
    for part in (ring.buffer.u, ring.buffer.k, ring.buffer.log_decay):
        part.fill_(0.5)
    backend.init_forward_metadata_out_graph(batch)
    assert ring.states.flatten(2).any(2).tolist() == [[slot == 5 for slot in range(P)]]
    assert ring.lens.tolist()[1:] == [0, 2, 0]
    with pytest.raises(RuntimeError, match="room for batches of 72, not 73"):
        ring.step(torch.ones(73), torch.ones(73), None)


def graphs_ring(**given):
    buffer = KVBuffer.empty(4, 3, H, HV, D, D, num_layers=1)
    for part in (buffer.u, buffer.k, buffer.log_decay):
        part.fill_(0.5)
    process.state.ring = rings.Ring(torch.zeros(1, P, HV, D, D), buffer, **given)
    return process.state.ring


def decode_batch(*rows, mode=ForwardMode.DECODE):
    return SimpleNamespace(
        forward_mode=mode,
        logical_forward_mode=mode,
        req_pool_indices=torch.tensor(rows),
        mamba_track_mask=torch.arange(len(rows)) > 0,
    )


def extend_batch(rows):
    return SimpleNamespace(
        logical_forward_mode=ForwardMode.EXTEND, req_pool_indices=rows, req_pool_indices_cpu=rows
    )


@pytest.mark.parametrize("drafts", [0, 2])
def test_prompts_fold_rows_that_steps_have_filled(drafts):
    """A new request's is emptied. One that goes on in its slot, and a mixed batch's, are folded."""
    ring, folds = graphs_ring(heads=2 * HV, drafts=drafts), []
    fold, slots = ring.fold, torch.tensor([0, 5, 3, 6])
    ring.fold = lambda rows, slots: (folds.append(rows.tolist()), fold(rows, slots))
    pool = SimpleNamespace(
        alloc_rows=lambda rows: rows, get_mamba_indices=lambda rows: slots[rows].clone()
    )
    ring.follow(pool)
    runner = SimpleNamespace(is_draft_worker=False, req_to_token_pool=pool)
    of = lambda batch: SimpleNamespace(mamba_cache_indices=slots[batch.req_pool_indices])
    backend = SimpleNamespace(_forward_metadata=of, init_forward_metadata_out_graph=None)
    rings.attach(backend)
    mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE

    def steps(*rows):
        batch = decode_batch(*rows, mode=mode)
        batch.mamba_track_mask.zero_()
        backend._forward_metadata(batch)
        if drafts:
            ring.keep(torch.zeros(len(rows), dtype=torch.int64), slots[list(rows)])

    def prompts(*rows):
        folds.clear()
        rings._before_extend(None, runner, extend_batch(torch.tensor(rows)))
        assert not ring.taken
        assert not ring.lens[list(rows)].any()
        return folds

    ring.lens[1:] = 1  # of their last owners
    pool.alloc_rows([1, 2, 3])
    assert prompts(1, 2) == prompts(3, 0) == []
    steps(1, 2)
    ring.lens[3] = 1
    pool.alloc_rows([3])  # another request's
    assert prompts(3) == []  # while others decode
    assert prompts(1) == [[1]]  # its session goes on
    assert prompts(1) == []
    steps(1, 2, 3)
    if not drafts:
        backend._forward_metadata(decode_batch(1))  # small: folds row 1, and the host forgets
    assert ring.lens[3] == 1
    assert prompts(2, 0) == [[2, 0]]
    assert prompts(3, 2) == [[3, 2]]  # mixed: a row that has tokens, and a whole one
    assert prompts(3, 2) == []
    assert not ring.states[:, [0, 1, 2, 4, 7]].any()


def test_a_small_batch_finds_states_whole():
    """Rows are folded once on the way down; an idle rank's batch folds none."""
    ring, folds = graphs_ring(heads=3 * HV), []
    fold, slots = ring.fold, {1: 5, 2: 3, 3: 6}
    ring.fold = lambda rows, slots: (folds.append(rows.tolist()), fold(rows, slots))
    of = lambda batch: torch.tensor([slots.get(x, -1) for x in batch.req_pool_indices.tolist()])
    backend = SimpleNamespace(
        _forward_metadata=lambda batch: SimpleNamespace(mamba_cache_indices=of(batch)),
        init_forward_metadata_out_graph=None,
    )
    rings.attach(backend)
    decode = lambda *rows, **mode: backend._forward_metadata(decode_batch(*rows, **mode))
    decode(1, 2)
    assert (ring.appends, folds) == (False, [])  # nothing to fold
    decode(3, 1, 2)
    decode(3, 1, 0)
    assert ring.appends
    assert ring.lens.tolist() == [0, 0, 0, 2]
    decode(0, 0, mode=ForwardMode.IDLE)
    assert (ring.appends, folds) == (False, [])
    for _ in range(2):
        decode(3, 1)
        assert (ring.appends, folds) == (False, [[3, 1]])
    assert not ring.lens.any()
    assert ring.states.flatten(2).any(2).tolist() == [[slot == 6 for slot in range(P)]]


def test_triton_updates_lengths_as_torch(monkeypatch):
    """By Triton's interpreter; row 0 pads, and has no length. Guards lie behind the batch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engine = "gated_delta.integrations.engine"
    kernels, lengths = map(
        importlib.import_module, (f"{engine}.{x}" for x in ("ring_kernels", "ring_lengths"))
    )
    monkeypatch.setattr(kernels, "BLOCK", 8)
    torch.manual_seed(0)
    for N, index in ((1, torch.int32), (8, torch.int64), (21, torch.int32)):
        rows = torch.randperm(40)[:N] + 1
        slots = torch.randint(-1, 4, (N,), dtype=index)
        for due, tokens in ((None, 0), (None, 15), (torch.rand(N) < 0.3, 15)):
            lens = 15 - torch.arange(41, dtype=torch.int32) % 3  # many are full
            both = []
            for module in (lengths, kernels):
                now, step_rows = lens.clone(), torch.full((N + 3,), 77)
                step_lens = torch.full((N + 3,), 77, dtype=torch.int32)
                module.step(rows, slots, due, now, step_rows, step_lens, tokens=tokens)
                both.append([now, step_rows, step_lens])
                if due is None:
                    last = torch.arange(N, dtype=index) % 3 - 1
                    given = last, slots, now, step_rows, step_lens
                    both[-1].append(module.keep(*given, room=9))
            for ours, triton in zip(*both):
                assert ours.dtype == triton.dtype
                assert ours.tolist() == triton.tolist()
            assert both[0][0][0] == lens[0]
            assert tokens == 0 or N < 8 or (both[0][0] != lens).any()


@pytest.mark.parametrize(
    ("N", "G", "held", "due"),
    [(1, 1, False, False), (9, 1, True, False), (9, 1, True, True), (9, 3, True, True)],
)
def test_triton_commits_drafts_as_torch(N, G, held, due, monkeypatch):
    """Counts, lengths and convolution windows of G block tables beside vLLM's prefix cache. Guards
    lie around."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engine = "gated_delta.integrations.engine"
    kernels, lengths = map(
        importlib.import_module, (f"{engine}.{x}" for x in ("ring_kernels", "ring_lengths"))
    )
    monkeypatch.setattr(kernels, "BLOCK", 8)
    monkeypatch.setattr(kernels, "CHANNELS", 16)
    met = set()
    for seed in range(5):
        torch.manual_seed(seed)
        batch, block, columns, width, D = N + 2, 5, 4, 3, 20
        rows = torch.randperm(batch)[:N]
        starts = torch.tensor([0, *torch.randint(1, 5, (N,)).cumsum(0)], dtype=torch.int32)
        before = torch.randint(0, 17, (batch,), dtype=torch.int32)
        sampled = torch.randint(0, 7, (batch,), dtype=torch.int32)  # more than tokens, too
        slots = 1 + torch.randperm(G * N * columns, dtype=torch.int32).view(G, N, columns)
        tables = list(torch.zeros(G, batch, columns, dtype=torch.int32))
        for table, of_table in zip(tables, slots, strict=True):
            table[rows] = of_table
        running = (before[rows] + starts.diff() - 1) // block
        running = running.clamp(max=columns - 1).long()
        source = slots.gather(2, running.expand(G, -1)[..., None]).flatten()
        windows = torch.randn(2, 1 + G * N * columns, width + 3, D)
        both = []
        for module in (lengths, kernels):
            ring = SimpleNamespace(
                lens=torch.full((40,), 77, dtype=torch.int32),
                step_rows=torch.arange(N + 3) * 3,
                step_lens=torch.arange(N + 3, dtype=torch.int32) * 5 % 13,
                room=12,
                due=torch.arange(N) % 3 == 0 if due else None,
            )
            after, moved = torch.full_like(before, 77), windows.clone()
            moved = moved.mT.contiguous().mT if seed % 2 else moved  # vLLM has both layouts
            given = rows, starts, before, after, sampled, ring if held else None
            counts = module.accept(*given, block=block, columns=columns)
            given = moved, tables, rows, counts, ring.step_rows
            places = module.move_windows(*given, width=width, buffer_size=100)
            both.append([*counts, *places, moved, after[rows], ring.lens])
        for ours, triton in zip(*both):
            assert ours.dtype == triton.dtype
            assert torch.equal(ours, triton)
            assert places.source.tolist() == source.tolist()
            row = torch.arange(G)[:, None] * 100 + ring.step_rows[:N]
            assert places.row.tolist() == row.flatten().tolist()
        met |= {"past a block"} if counts.boundary.any() else set()
        met |= {"stays"} if (counts.folded == 0).any() else set()
        in_place = (places.last == source) & (counts.accepted.repeat(G) > 1)
        met |= {"in place"} if in_place.any() else set()
        tokens = rows, starts, before, before, sampled, ring if held else None
        instead = module.accept(*tokens, block=block, columns=columns)
        assert torch.equal(before[rows], both[0][-2])  # before itself receives them
        assert torch.equal(instead.accepted, counts.accepted)
    assert met >= {"past a block", "in place", *(["stays"] if held else [])}
    wider = torch.zeros(batch, columns + 1, dtype=torch.int32)
    given = moved, [tables[0], wider], rows, counts, ring.step_rows
    with pytest.raises(ValueError, match=r"tables: expected rows at one distance, got \[4, 5\]"):
        kernels.move_windows(*given, width=width, buffer_size=100)


# ------------------------------------------------------------------------ the engine's own kernels


def recorded(layers):
    """Our kernel over an engine's that records its calls."""
    calls = []
    base = ENGINES[layers]
    methods = {
        name: lambda self, *args, _name=name, **given: calls.append((_name, given)) or _name
        for name in ("packed_decode", "decode", "extend", "target_verify")
    }
    return sglang_kernels.kernel_class(type(base.__name__, (base,), methods))(), calls


@pytest.mark.parametrize("layers", ENGINES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            dict(retrieve_parent_token=torch.zeros(1, 2, dtype=torch.int32)),
            "a KVBuffer for drafts that form a tree (GATED_DELTA_SGLANG_KVBUFFER=1)",
        ),
        (dict(cache_steps=17), "at most 16 draft tokens"),
        (dict(intermediate_states_buffer=None, cache_ring=True), "ReplaySSM"),
    ],
)
def test_drafts_that_the_engine_verifies_itself(layers, change, reason):
    x, (ours, calls) = Given(layers, [2], [1]), recorded(layers)
    options = dict(
        intermediate_states_buffer=torch.zeros(2, 2, HV, D, D),
        intermediate_state_indices=torch.tensor([0]),
    )
    options |= dict(cache_steps=2, retrieve_parent_token=None) | change
    a, b = x.raw()
    given = dict(q=x.q, k=x.k, v=x.v, a=a, b=b, **x.gates(), **x.where(), **options)
    assert ours.target_verify(**given) == "target_verify"
    assert calls[0][1].keys() == given.keys()
    (line,) = plugin.report()
    own = f"op=verify family={layers.lower()} engine=sglang ours=0 engine_own=1 reason="
    assert line.startswith(f"gated_delta health {own}")
    assert reason in line


def test_drafts_in_a_kvbuffer_have_no_other_kernel():
    """It could not read the buffer. Both calls raise, with the reason."""
    x, (ours, calls) = Given("GDN", [2], [1]), recorded("GDN")
    scratch = KVBuffer.empty(1, 2, x.q.shape[2], HV, D, D)
    options = dict(
        intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.tensor([0]),
        cache_steps=17,
    )
    a, b = x.raw()
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=r"KVBUFFER=0(?s:.)*at most 16"):
            ours.target_verify(
                q=x.q,
                k=x.k,
                v=x.v,
                a=a,
                b=b,
                **x.gates(),
                **x.where(),
                **options,
                retrieve_parent_token=None,
            )
    assert calls == []


def test_rings_and_scoring_stay_the_engines():
    x, (ours, calls) = Given("GDN", [1], [1]), recorded("GDN")
    options = dict(
        scale=1.0, ssm_states=x.pool, cache_indices=x.slots, num_v_heads=HV, head_v_dim=D
    )
    names = ("d", "k", "g", "write_pos")
    ring = {f"replayssm_{name}": x.pool.bfloat16() for name in names}  # fp32 is ours
    ring["replayssm_write_pos"] = torch.tensor([2, ~1, ~0, 0], dtype=torch.int32)
    assert ours.packed_decode(x.mixed, x.a, x.b, **x.gates(), **options, **ring) == "packed_decode"
    # The engine activates the gates of scoring by itself.
    assert ours.extend(x.q, x.k, x.v, x.g[None], x.beta[None], **x.where()) == "extend"
    assert [name for name, _ in calls] == ["packed_decode", "extend"]
    assert calls[0][1]["replayssm_write_pos"].tolist() == [2, 1, 0, 0]  # without our marks


@pytest.mark.parametrize("layers", ENGINES)
def test_what_our_kernels_refuse_runs_on_the_engines(layers, monkeypatch):
    """Our GPU kernels refuse CPU tensors: a refusal like any other."""
    monkeypatch.setattr(process, "backend_for", lambda x: "cute")
    x, (ours, calls) = Given(layers, [1, 1], [1, 2]), recorded(layers)
    before = x.pool.clone()
    for _ in range(2):
        assert ours.decode(x.q, x.k, x.v, *x.raw(), **x.gates(), **x.where()) == "decode"
    assert len(calls) == 2
    assert torch.equal(x.pool, before)
    (line,) = plugin.report()
    own = f"op=decode family={layers.lower()} engine=sglang ours=0 engine_own=2"
    reason = 'reason="tensors on a CUDA device, got cpu'
    assert line.startswith(f"gated_delta health {own} {reason}")


@pytest.mark.parametrize("layers", ENGINES)
def test_an_error_is_not_taken_for_a_refusal(layers):
    """The engine's kernel does not hide an error of the caller."""
    x, (ours, calls) = Given(layers, [1, 1], [1, 2]), recorded(layers)
    before = x.pool.clone()
    with pytest.raises(IndexError, match="state_indices: expected indices below 8, got 8"):
        ours.decode(
            x.q, x.k, x.v, *x.raw(), **x.gates(), **x.where() | dict(cache_indices=x.slots + P - 2)
        )
    with pytest.raises(TypeError, match=r"state: expected dtype .*, got torch.float64"):
        ours.decode(
            x.q, x.k, x.v, *x.raw(), **x.gates(), **x.where() | dict(ssm_states=x.pool.double())
        )
    assert calls == []
    assert torch.equal(x.pool, before)
    ran()


def test_tracked_states_of_the_engines_own_kernel(monkeypatch):
    """It returns every chunk's state, ours the tracked ones: track_state is the same."""
    result = []
    for backend in ("reference", "cute"):
        monkeypatch.setattr(process, "backend_for", lambda x, backend=backend: backend)
        x = Given("GDN", [70, 130, 64, 5], [3, 5, 1, 2])
        track = torch.zeros(4, HV, D, D)
        tracked = dict(
            track_state=track, track_chunk_idx=torch.tensor([1, 2, -1, 0], dtype=torch.int32)
        )
        o = kernel("GDN").extend(*x.prompt()[0], **x.where(), **tracked)[0]
        result.append((o, x.pool, track[[0, 1, 3]]))
    (line,) = plugin.report()
    assert "ours=1 engine_own=1" in line
    for ours, engines in zip(*result):
        near(ours, engines.double())


# ------------------------------------------------------------------------------ kernels of a mode


BASE = "linear_attn_backend"
CLASSES = gdn_backend.GDNKernelDispatcher, kda_backend.KDAKernelDispatcher
ORIGINALS = [one.__init__ for one in CLASSES]


def dispatchers(**flags):
    """Both dispatchers under these flags, as the first ones of an engine."""
    for one, original in zip(CLASSES, ORIGINALS):
        one.__init__ = original
        target = f"{one.__module__}.{one.__qualname__}.__init__"
        HookRegistry._patched.discard(target)
        HookRegistry._hooks.pop(target, None)
    settings = dict(linear_attn_backend="triton", **dict.fromkeys(process.FLAGS.values())) | flags
    with get_context().override_server_args(**settings):
        backends = utils.resolve_linear_attn_backends()
        result = [
            gdn_backend.GDNKernelDispatcher(backends.decode, backends.prefill, backends.verify)
        ]
        result.append(
            kda_backend.KDAKernelDispatcher(backends.decode, backends.prefill, backends.verify)
        )
    return result


def ours_in(dispatcher):
    return {
        mode
        for mode, name in plugin._KERNELS.items()
        if isinstance(getattr(dispatcher, name), sglang_kernels.Operations)
    }


def test_the_flags_know_the_name():
    import argparse

    plugin.register()  # a second call does nothing
    assert LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count(process.NAME) == 1
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for flag in process.FLAGS.values():
        (action,) = [one for one in parser._actions if one.dest == flag]
        assert action.choices.count(process.NAME) == 1


def test_without_a_flag_every_kernel_is_the_engines():
    for dispatcher in dispatchers():
        assert ours_in(dispatcher) == set()
    assert [one.__init__ for one in CLASSES] == ORIGINALS


@pytest.mark.parametrize("mode", process.FLAGS)
def test_a_flag_gives_its_mode_alone(mode):
    for dispatcher in dispatchers(**{process.FLAGS[mode]: process.NAME}):
        assert ours_in(dispatcher) == {mode}
        tree = getattr(dispatcher, "tree_verify_kernel", dispatcher.verify_kernel)
        assert isinstance(tree, sglang_kernels.Operations) == (mode == "verify")


def test_the_base_flag_gives_decode_and_prefill():
    for dispatcher in dispatchers(linear_attn_backend=process.NAME):
        assert ours_in(dispatcher) == {"decode", "prefill"}


def given(**flags):
    """The engine's flags for linear layers, as it resolves these."""
    arguments = ServerArgs(model_path="dummy", **flags)
    arguments.resolve_once()
    return {flag: getattr(arguments, flag) for flag in (BASE, *process.FLAGS.values())}


def test_another_release_with_the_same_code_is_served(monkeypatch, caplog):
    monkeypatch.setattr(process, "RELEASE", process.RELEASE._replace(version="0.0.1"))
    every = dict.fromkeys(process.FLAGS.values(), process.NAME)
    assert given(**every) == every | {BASE: "triton"}
    assert "sglang 0.5.23 has 0.0.1's code" in caplog.text


def test_another_release_chooses_its_own_kernels(monkeypatch, caplog):
    """As without the flags, whatever it changes: FlashInfer's prefill for example."""
    release = process.RELEASE._replace(version="0.0.1")
    monkeypatch.setattr(process, "RELEASE", release)
    assert release.changes() == []
    every = dict.fromkeys(process.FLAGS.values(), process.NAME)
    for name in breakages.each(release, monkeypatch):
        caplog.clear()
        assert given(**every) == given(**{BASE: process.NAME}) == given()
        assert (
            f"gated_delta knows SGLang 0.0.1, not 0.5.23, which changes {name}: the engine chooses"
            in caplog.text
        )
    others = dict.fromkeys(process.FLAGS.values(), "flashinfer")
    caplog.clear()
    assert given(**others) == others | {BASE: "triton"}
    assert not caplog.text


def test_flags_that_a_refused_release_keeps_are_tritons(monkeypatch):
    """If it has no `resolve_once`, or resolved them before the plug-in was loaded."""
    release = process.RELEASE._replace(version="0.0.1", code={"a file": dict(name="0")})
    monkeypatch.setattr(process, "RELEASE", release)
    for dispatcher in dispatchers(**dict.fromkeys(process.FLAGS.values(), process.NAME)):
        assert ours_in(dispatcher) == set()
    assert [one.__init__ for one in CLASSES] == ORIGINALS


needs_cxx = pytest.mark.skipif(
    shutil.which("c++") is None, reason="needs a C++ compiler: the engine builds its corpus"
)


@needs_cxx
def test_drafts_of_breadth_1_fork(monkeypatch):
    """SGLang's linear layers take them for lines. Its corpus joins all matching suffixes."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    # For ninja.
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    corpus = NgramCorpus(min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=4)
    for text in (b"xyA1p", b"zzA2rs"):
        corpus.batch_put([list(text)])
    corpus.synchronize()
    tokens, seen = corpus.batch_get(["one"], [list(b"xyA")], [3])
    assert bytes(tokens.tolist()) == b"A21p"
    assert seen.reshape(4, 4)[2].tolist() == [1, 0, 1, 0]  # the third token follows the first


@pytest.mark.parametrize(
    ("breadth", "drafts", "warned"), [(1, 4, True), (1, 2, False), (10, 4, False)]
)
def test_drafts_that_may_fork_unseen_are_a_warning(breadth, drafts, warned, caplog):
    with under(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=drafts,
        speculative_eagle_topk=breadth,
    ):
        sglang_start.warn_of_forks()
    assert ("n-gram drafts of breadth 1, which may fork" in caplog.text) == warned


EXPECTED = {
    utils.resolve_linear_attn_backends: "prefill_default",
    gdn_backend.GDNAttnBackend.__init__: "self model_runner",
    gdn_backend.GDNAttnBackend.init_forward_metadata: "self forward_batch",
    gdn_backend.GDNAttnBackend._convolve_prefill: (
        "self layer forward_batch mixed_qkv conv_states cache_indices"
    ),
    kda_backend.KDAAttnBackend.__init__: "self model_runner",
    kda_backend.KDAAttnBackend._convolve_prefill: (
        "self layer forward_batch mixed_qkv conv_states cache_indices"
    ),
    gdn_backend.GDNKernelDispatcher.__init__: "self decode_backend prefill_backend verify_backend",
    kda_backend.KDAKernelDispatcher.__init__: "self decode_backend prefill_backend verify_backend",
}
EXPECTED |= {
    KVCacheConfigurator._handle_max_mamba_cache: "self total_rest_memory",
    KVCacheConfigurator._build_hybrid_req_pool: "self max_num_reqs extra_max_context_len",
    scatter_mamba_states_after_mtp_verify: (
        "mamba_caches state_indices_tensor last_correct_step_indices mamba_track_indices "
        "mamba_steps_to_track src_indices_raw"
    ),
    commit_mamba_states_after_verify: (
        "target_worker batch accept_lens accept_index draft_token_num prepared_step_indices"
    ),
}
STEP = "A_log dt_bias ssm_states cache_indices query_start_loc"
PACKED = "self mixed_qkv a b A_log dt_bias scale ssm_states cache_indices num_v_heads head_v_dim"
VERIFY = (
    f"self A_log dt_bias q k v a b {STEP[14:]} intermediate_states_buffer "
    "intermediate_state_indices cache_steps retrieve_parent_token"
)
EXTEND = "self q k v g beta ssm_states cache_indices query_start_loc"
EXPECTED |= {
    TritonGDNKernel.packed_decode: f"{PACKED} kwargs",
    TritonKDAKernel.packed_decode: f"{PACKED} lower_bound kwargs",
    TritonGDNKernel.decode: f"self q k v a b {STEP} kwargs",
    TritonKDAKernel.decode: f"self q k v a b {STEP} lower_bound kwargs",
    TritonGDNKernel.extend: f"{EXTEND} inplace_update kwargs",
    TritonKDAKernel.extend: (
        f"{EXTEND} A_log dt_bias lower_bound beta_is_raw return_intermediate_states kwargs"
    ),
    TritonGDNKernel.target_verify: f"{VERIFY} kwargs",
    TritonKDAKernel.target_verify: (
        f"{VERIFY} lower_bound cache_ring replayssm_rawv replayssm_rawk replayssm_g "
        "replayssm_beta kwargs"
    ),
}


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__qualname__)
def test_the_engine_has_the_functions_that_the_plug_in_replaces(function):
    assert " ".join(inspect.signature(inspect.unwrap(function)).parameters) == EXPECTED[function]


# --------------------------------------------------------------------------------- cuts of prompts


class Request(mock.MagicMock):
    extend_len = property(lambda self: self.extend_end - self.prefix_len)


class Queue:
    """The engine's scheduling of prompts alone, with the alignment that its scheduler starts with.

    chunk: tokens in a batch, of which decodes take some. radix: with a prefix cache; without one,
    prompts that ignore the end of a sequence are cut elsewhere.
    """

    def __init__(self, chunk, decodes=0, radix=True, align=None):
        self.chunk, self.decodes, self.radix = chunk, decodes, radix
        scheduler = SimpleNamespace(truncation_align_size=align)
        Scheduler.init_mamba_truncation_align(scheduler)
        self.align = scheduler.truncation_align_size

    def batch(self):
        tokens = TokenToKVPoolAllocator(2**16, torch.float32, "cpu", None, False)
        tree = mock.MagicMock(disable=not self.radix, buffer_pipeline=None)
        tree.full_evictable_size.return_value = 0
        return schedule_policy.PrefillAdder(
            1, tree, tokens, None, 1.0, 2**16, self.chunk, self.decodes
        )

    def add(self, batch, tokens, cached=0):
        sampling = SamplingParams(max_new_tokens=1, ignore_eos=not self.radix)
        lists = dict(full_untruncated_fill_ids=range(tokens), origin_input_ids=range(tokens))
        lists |= dict(output_ids=[], prefix_len=cached, host_hit_length=0, swa_host_hit_length=0)
        request = Request(**lists, sampling_params=sampling, extend_end=cached)
        request.needs_host_load_back.return_value = False
        batch.add_one_req(request, has_chunked_req=False, truncation_align_size=self.align)
        return request

    def cuts(self, tokens, behind, cached=0):
        """Of a prompt behind another one: where its parts end."""
        batch = self.batch()
        self.add(batch, behind)
        request = self.add(batch, tokens, cached)
        if request not in batch.can_run_list:
            request = self.add(self.batch(), tokens, cached)
        result = [request.extend_end]
        while result[-1] < tokens:
            request.prefix_len = result[-1]
            self.batch().add_chunked_req(request)
            assert request.extend_end > result[-1]
            result.append(request.extend_end)
        return result


@pytest.fixture
def aligned(monkeypatch):
    """As after the start of an engine under --enable-deterministic-inference."""
    monkeypatch.setattr(process.state, "deterministic", True)
    with get_context().override_server_args(
        disable_radix_cache=False, enable_mixed_chunk=True, mamba_radix_cache_strategy="no_buffer"
    ):
        sglang_cuts.align()
        yield


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("decodes", [0, 3])
@pytest.mark.parametrize("chunk", [128, 2000, 8192])
def test_cuts_of_prompts_lie_on_the_grid(chunk, decodes, radix, aligned):
    queue = Queue(chunk, decodes, radix)
    for behind in (1, 60, chunk // 2 + 7):
        for tokens in (chunk - behind, 2 * chunk + 1, 3 * chunk - 5):
            for cached in (0, 64) if radix else (0,):
                *cuts, end = queue.cuts(tokens, behind, cached)
                assert end == tokens
                assert not [cut for cut in cuts if cut % 64], (tokens, behind, cached)


def test_cuts_of_prompts_are_the_engines_elsewhere(aligned, monkeypatch):
    """A prompt behind 1,000 tokens, and the engine's own alignment for FlashInfer's attention."""
    assert Queue(8192).cuts(9000, 1000)[0] == 7168
    assert Queue(8192, align=4096).cuts(9000, 1000)[0] == 4096
    monkeypatch.setattr(process.state, "deterministic", False)
    assert Queue(8192).cuts(9000, 1000)[0] == 7192


def test_a_log_tells_what_bits_depend_on(caplog, request):
    request.getfixturevalue("aligned")
    assert "bits depend on cached prefixes, unless --mamba-radix-cache-strategy" in caplog.text
    assert "; decodes beside prompts, which --enable-mixed-chunk allows" in caplog.text
    sglang_cuts._warn_of_a_cut.cache_clear()
    assert Queue(128, 100).cuts(150, 1)[1] % 64  # decodes leave no room for 64 tokens
    assert "a batch had room for less than 64 tokens of a prompt" in caplog.text


# ------------------------------------------------------------------------------------ whole engines

PROMPTS = [
    list(text.encode())
    for text in (
        "for",
        "def f(x):\n    return x\n" * 12,
        "class A:\n    def g(self):\n        pass\n" * 16,
    )
]
NEW = 24
LONG = 70
"""Tokens: every answer crosses a multiple of 64, where the prefix cache takes a state."""
PREFILL = "GDN prefill and norm on backend reference"
BOTH = {"GDN decode and convolution and norm on backend reference", PREFILL}
OURS = dict(linear_attn_decode_backend="gated_delta", linear_attn_prefill_backend="gated_delta")
RING = dict(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=64)


@pytest.fixture(scope="session")
def qwen3_5():
    """The shipped model."""
    return Path(gated_delta.__file__).parent / "demo/tiny_qwen3_5"


def by_transformers(model, new_tokens=NEW):
    """Its tokens, in fp32."""
    with torch.inference_mode():
        result = [
            model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)[0]
            for prompt in PROMPTS
        ]
    return [tokens[len(prompt) :].tolist() for tokens, prompt in zip(result, PROMPTS)]


@pytest.fixture(scope="session")
def expected(qwen3_5):
    import transformers

    return by_transformers(
        transformers.AutoModelForCausalLM.from_pretrained(qwen3_5, dtype=torch.float32).eval()
    )


@pytest.fixture(scope="session", params=["kimi_linear", "ling"])
def kda(request, tmp_path_factory):
    """A random model of three KDA layers and one of full attention, and transformers' tokens.

    Ling-3.0 is Kimi Linear with gates of full rank; the decay's is at least -5, as GLM's.
    """
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    torch.manual_seed(0)
    D = 32  # verify on a GPU takes no less; Ling's is MLA's too
    layers = dict(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        first_k_dense_replace=4,
    )
    attention = dict(
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
    )
    sizes = dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        v_head_dim=D,
    )
    rest = dict(
        rms_norm_eps=1e-6 if request.param == "ling" else 1e-5,
        linear_num_heads=2,
        linear_head_dim=D,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    tokens = dict(
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    config = transformers.KimiLinearConfig(**layers, **attention, **sizes, **rest, **tokens)
    model = transformers.KimiLinearForCausalLM(config).float().eval()
    ling = request.param == "ling"
    for layer in model.model.layers[:3] if ling else ():
        gate = layer.self_attn.forget_gate
        gate.__class__, gate.safe_gate_lower_bound = Glm5NextTextForgetGate, -5.0
    # SGLang has Ling's head in bf16. Ling's attention rotates queries' last parts, Kimi's does not.
    model.lm_head.weight.data.copy_(model.lm_head.weight.bfloat16())
    model.model.layers[3].self_attn.q_proj.weight.data.view(2, 32, 64)[:, 16:] = 0
    result = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(result)
    # As in released checkpoints: dense layers' names, and one table of layer kinds.
    weights = {
        name.replace("block_sparse_moe", "mlp"): x.clone()
        for name, x in load_file(result / "model.safetensors").items()
    }
    if ling:
        for prefix in [f"model.layers.{layer}.self_attn." for layer in range(3)]:
            weights[f"{prefix}A_log"] = weights[f"{prefix}A_log"].flatten()
            for gate in "fg":
                low, high = (weights.pop(f"{prefix}{gate}_{part}_proj.weight") for part in "ab")
                weights[f"{prefix}{gate}_proj.weight"] = high @ low
        names = {"embed_tokens": "word_embeddings", ".self_attn.": ".attention."}
        for old, new in names.items():
            weights = {name.replace(old, new): x for name, x in weights.items()}
    save_file(weights, result / "model.safetensors", metadata=dict(format="pt"))
    table = dict(
        kda_layers=[1, 2, 3],
        full_attn_layers=[4],
        num_heads=2,
        head_dim=D,
        short_conv_kernel_size=4,
    )
    config = json.loads((result / "config.json").read_text()) | dict(
        linear_attn_config=table, mla_use_nope=True
    )
    if ling:
        config |= dict(
            architectures=["BailingMoeV3ForCausalLM"],
            model_type="bailing_hybrid",
            head_dim=D,
            layer_group_size=4,
            short_conv_kernel_size=4,
            no_kda_lora=True,
            kda_safe_gate=True,
            kda_lower_bound=-5.0,
            num_experts=4,
            rope_parameters=dict(rope_theta=1e4, rope_type="default"),
        )
    (result / "config.json").write_text(json.dumps(config))
    return result, by_transformers(model, 2 * LONG)


@pytest.fixture(scope="session")
def qwen3_next(tmp_path_factory):
    """A random Qwen3-Next with dense layers, as the driver builds SGLang's, and its tokens."""
    import transformers

    torch.manual_seed(0)
    layers = ["linear_attention", "linear_attention", "full_attention"]
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    linear |= dict(linear_key_head_dim=32, linear_value_head_dim=64)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, max_position_embeddings=1024)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2)
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=3, layer_types=layers, mlp_only_layers=[0, 1, 2],
        full_attention_interval=3, **heads, **linear, **sizes, **tokens,
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config).float().eval()
    result = tmp_path_factory.mktemp("models") / "qwen3_next"
    model.save_pretrained(result)
    return result, by_transformers(model)


@pytest.fixture(scope="session")
def in_block_fp8(tmp_path_factory):
    """A random Qwen3-Next of one linear and one attention layer, quantised as its FP8 release."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=128)
    linear = dict(linear_num_key_heads=1, linear_num_value_heads=2)
    linear |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=128)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2)
    config = transformers.Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1], full_attention_interval=2, max_position_embeddings=1024,
        **heads, **linear, **sizes, **tokens,
    )  # fmt: skip
    result = tmp_path_factory.mktemp("models") / "qwen3_next_fp8"
    transformers.Qwen3NextForCausalLM(config).bfloat16().save_pretrained(result)
    tensors = load_file(result / "model.safetensors")
    for name in [x for x in tensors if x.endswith("proj.weight") or "qkvz" in x]:
        w = tensors[name].float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = w.abs().amax((1, 3), keepdim=True) / 448
        values = (w / scale).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
        tensors |= {name: values, f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}
    save_file(tensors, result / "model.safetensors", metadata=dict(format="pt"))
    kept = ["lm_head", "model.layers.0.linear_attn.in_proj_ba"]
    quantised = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
    quantised |= dict(weight_block_size=[128, 128], modules_to_not_convert=kept)
    config = json.loads((result / "config.json").read_text())
    (result / "config.json").write_text(json.dumps(config | dict(quantization_config=quantised)))
    return result


class Run:
    """One engine: two rounds of the prompts, the second from the prefix cache."""

    def __init__(self, model, tmp_path, engine, variables=(), starts=True, **case):
        reports = tmp_path / "reports"
        reports.mkdir()
        self.kernels = tmp_path / "kernels"
        self.kernels.mkdir()
        case = dict(prompts=PROMPTS, new_tokens=NEW) | case
        case |= dict(model=str(model), engine=engine, reports=str(reports))
        case |= dict(kernels=str(self.kernels)) if starts else {}
        self.checked = tmp_path / "checked"
        if "GATED_DELTA_CHECK" in dict(variables):
            self.checked.mkdir()
            case |= dict(check=str(self.checked))
        environment = os.environ | dict(
            SGLANG_CASE=json.dumps(case), SGLANG_MAMBA_CONV_DTYPE="float32", OMP_NUM_THREADS="1"
        )
        environment |= dict(variables)
        command = [sys.executable, str(HERE / "sglang_driver.py")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=900, cwd=tmp_path
        )
        self.log = done.stdout + done.stderr
        if not starts:
            assert done.returncode
            return
        results = [line for line in self.log.splitlines() if line.startswith("RESULT ")]
        assert results, self.log[-8000:]
        self.rounds = json.loads(results[-1].removeprefix("RESULT "))
        self.ranks = [json.loads(file.read_text()) for file in reports.iterdir()]
        self.ran = {route: calls for rank in self.ranks for route, calls in rank.items()}

    def tokens(self, n):
        return [one["tokens"] for one in self.rounds[n]]

    def looked_for_what_it_needs(self, unused=(), longest=256, maybe=()):
        """The start loaded the kernels that the calls would launch on a GPU, and no others.

        unused: how the labels begin of kernels that it loads, too. longest: where two prompts
        share a chunk of 256 tokens, the longer part. maybe: labels of kernels for batches that need
        not occur.
        """
        records = [
            one
            for file in self.kernels.iterdir()
            if (one := json.loads(file.read_text()))["needed"]
        ]
        looked_for = [
            [
                x
                for x in one["looked_for"]
                if not x.startswith(unused) and (x in one["needed"] or not x.startswith(maybe))
            ]
            for one in records
        ]
        assert looked_for == [one["needed"] for one in records] != []
        assert all(longest in one["longest"] for one in records)

    def convolved(self):
        """The rows that our convolution read."""
        return {x for file in self.kernels.iterdir() for x in json.loads(file.read_text())["rows"]}

    def cached(self, n):
        return [one["cached"] for one in self.rounds[n]]

    def compared(self):
        """The states that the checking mode compared."""
        return sum(json.loads(file.read_text()) for file in self.checked.iterdir())


def test_engine_with_chunked_prefill_and_the_prefix_cache(qwen3_5, expected, tmp_path):
    """In ReplaySSM's ring of four tokens, too: decode folds three tokens and its own.

    The CPU has AMX here, and nothing on the path tells its NUMA nodes.
    """
    ring = dict(enable_linear_replayssm=True, linear_replayssm_cache_len=4)
    engine = OURS | dict(mamba_radix_cache_strategy="no_buffer") | ring
    run = Run(qwen3_5, tmp_path, engine, dict(PATH=str(tmp_path)), amx=True)
    assert run.tokens(0) == run.tokens(1) == expected
    assert run.cached(0) == [0, 0, 0]
    assert min(run.cached(1)[1:]) > 200
    in_ring = "GDN decode and norm with ReplaySSM's ring on backend reference"
    assert run.ran.keys() == {in_ring, PREFILL}
    # Three layers, two rounds.
    assert run.ran[in_ring] >= 2 * 3 * (NEW - 1)
    assert run.ran[PREFILL] >= 3 * 4  # chunks of 256 tokens of 900
    assert (
        f"gated_delta {gated_delta.__version__} serves GDN decode, prefill in place of "
        "TritonGDNKernel; verify stays TritonGDNKernel" in run.log
    )
    run.looked_for_what_it_needs()


def test_engine_with_states_kept_inside_a_prefill(qwen3_5, expected, tmp_path):
    run = Run(qwen3_5, tmp_path, OURS | dict(mamba_radix_cache_strategy="extra_buffer"))
    assert run.tokens(0) == run.tokens(1) == expected
    # Of 276 tokens, in chunks of at most 256: a state inside a chunk.
    tokens_kept = run.cached(1)[1]
    assert tokens_kept >= 128
    assert tokens_kept % 64 == 0
    assert run.cached(1)[2] > 256
    assert run.ran.keys() == BOTH
    run.looked_for_what_it_needs(maybe="decode ")
    assert run.convolved() == {"split"}
    # `check --engine` asks about the same kernels.
    asked = preflight.Asked("sglang", qwen3_5, dtype=torch.float32)
    modes = preflight.plan(asked, torch.device("cpu")).modes
    planned = load.needed([call for mode in modes for call in mode.calls], H200)
    looked_for = [json.loads(file.read_text())["looked_for"] for file in run.kernels.iterdir()]
    assert sorted(variant.label for variant in planned) in looked_for
    health = "gated_delta health op=decode family=gdn engine=sglang ours=100 engine_own=0 reason="
    assert health in run.log


def test_engine_with_deterministic_inference(qwen3_5, expected, tmp_path):
    """Prefills have the engine's flag, and so have the kernels that it looks for when it starts.

    The CPU has no AMX here.
    """
    run = Run(
        qwen3_5,
        tmp_path,
        OURS | dict(mamba_radix_cache_strategy="extra_buffer", enable_deterministic_inference=True),
        amx=False,
    )
    assert run.tokens(0) == run.tokens(1) == expected
    assert run.cached(1)[1] >= 128
    assert run.ran.keys() == {
        "GDN decode and norm on backend reference",
        "GDN prefill on backend reference",
    }
    run.looked_for_what_it_needs(longest=192)  # 253 tokens of room
    (record,) = [
        one for file in run.kernels.iterdir() if (one := json.loads(file.read_text()))["needed"]
    ]
    scans = [label for label in record["needed"] if "prefill_scan" in label]
    assert {"deterministic=True" in label for label in scans} == {True}
    # All parts but a prompt's last one.
    assert {x % 64 for x in record["parts"]} <= {0, *(len(prompt) % 64 for prompt in PROMPTS)}
    assert "gated_delta has prompts cut at multiples of 64 tokens, for equal bits" in run.log
    assert "gated_delta: bits depend on" not in run.log


@needs_cxx
def test_engine_with_trees_of_drafts(qwen3_5, expected, tmp_path):
    """Of n-grams, in a KVBuffer. Whether drafts are trees or lines changes few of its tokens."""
    trees = dict(
        linear_attn_verify_backend="gated_delta",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        speculative_ngram_max_bfs_breadth=4,
        mamba_radix_cache_strategy="extra_buffer",
    )
    run = Run(qwen3_5, tmp_path, OURS | trees, dict(GATED_DELTA_SGLANG_KVBUFFER="1"))
    assert run.tokens(0) == run.tokens(1) == expected
    assert run.cached(1)[1] >= 128
    verify = "GDN verify and norm on backend reference"
    assert run.ran.keys() == {PREFILL, verify}
    assert run.ran[verify] < 2 * 3 * (NEW - 1)  # three layers, two rounds, drafts accepted
    assert "gated_delta keeps drafts in " in run.log
    run.looked_for_what_it_needs(unused="decode ")


def test_engine_that_retracts_requests(qwen3_5, expected, tmp_path):
    """As with little memory: every third step retracts requests; they return as prompts."""
    run = Run(
        qwen3_5,
        tmp_path,
        OURS | dict(mamba_radix_cache_strategy="extra_buffer"),
        dict(SGLANG_TEST_RETRACT="1"),
    )
    assert run.log.count("retract") >= 5
    assert run.tokens(0) == run.tokens(1) == expected
    assert run.ran.keys() == BOTH


def test_engine_under_tensor_parallelism(qwen3_5, expected, tmp_path):
    """Two processes with half of the heads each: two value heads, one of keys.

    The CPU has AMX here, for which the engine reduces in shared memory.
    """
    engine = OURS | dict(mamba_radix_cache_strategy="extra_buffer", tp_size=2)
    run = Run(qwen3_5, tmp_path, engine, dict(SGLANG_CPU_OMP_THREADS_BIND="0|1"), amx=True)
    assert run.tokens(0) == run.tokens(1) == expected
    assert len(run.ranks) == 2
    assert run.ranks[0] == run.ranks[1]
    assert run.ran.keys() == BOTH
    run.looked_for_what_it_needs(maybe="decode ")


def unused_norm(model):
    """Ling's projection has beta between, so that with two heads the gate of its norm is unaligned:
    no prompt of ours has its norm."""
    return "prefill_norm" if model.name == "ling" else ()


@pytest.mark.parametrize("kda", ["ling"], indirect=True)
def test_engine_with_kda_layers(kda, tmp_path):
    model, tokens = kda
    engine = dict(mamba_radix_cache_strategy="no_buffer", enable_fp32_lm_head=True)
    run = Run(model, tmp_path, OURS | engine)
    run.looked_for_what_it_needs(unused_norm(model))
    assert run.tokens(0) == run.tokens(1) == [one[:NEW] for one in tokens]
    assert run.ran.keys() == {
        "KDA decode and norm on backend reference",
        "KDA prefill on backend reference",
    }
    assert run.convolved() == {"split"}


@needs_cxx
def test_engine_with_drafts_of_kda_layers(kda, tmp_path):
    """In a KVBuffer: SGLang commits drafts from its own states on a GPU alone. Two cannot fork."""
    model, tokens = kda
    lines = dict(
        linear_attn_verify_backend="gated_delta",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=2,
        speculative_ngram_max_bfs_breadth=1,
    )
    engine = OURS | RING | lines | dict(enable_fp32_lm_head=True)
    variables = dict(GATED_DELTA_SGLANG_KVBUFFER="1", GATED_DELTA_CHECK="1")
    run = Run(model, tmp_path, engine, variables, new_tokens=LONG)
    assert run.tokens(0) == run.tokens(1) == [one[:LONG] for one in tokens]
    assert run.compared() >= 2 * 3 * 3  # rounds, layers, prompts
    assert run.cached(1)[1] >= 128
    prefill = "prefill" if unused_norm(model) else "prefill and norm"
    routes = {f"KDA {op} on backend reference" for op in ("verify and norm", prefill)}
    assert run.ran.keys() == routes
    run.looked_for_what_it_needs(unused=("decode ", *filter(None, [unused_norm(model)])))


def test_engine_convolves_whole_rows(qwen3_next, tmp_path):
    """Qwen3-Next's projection interleaves q, k, v and z. Windows are kept inside a prefill."""
    model, tokens = qwen3_next
    run = Run(model, tmp_path, OURS | dict(mamba_radix_cache_strategy="extra_buffer"))
    assert run.tokens(0) == run.tokens(1) == tokens
    assert run.cached(1)[1] >= 128
    assert run.convolved() == {"whole"}


@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=needs_cxx)])
def test_engine_with_qwen3_next(drafts, qwen3_next, tmp_path):
    """The gate of its norm lies between q, k and v. Drafts of two tokens cannot fork."""
    model, tokens = qwen3_next
    engine = OURS | dict(mamba_radix_cache_strategy="extra_buffer")
    if drafts:
        engine |= dict(
            linear_attn_verify_backend="gated_delta",
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=2,
            speculative_ngram_max_bfs_breadth=1,
        )
    run = Run(model, tmp_path, engine, dict(GATED_DELTA_SGLANG_KVBUFFER=str(int(drafts))))
    assert run.tokens(0) == run.tokens(1) == tokens
    assert run.cached(1)[1] >= 128
    op = "verify" if drafts else "decode"
    assert run.ran.keys() == {f"GDN {op} and convolution and norm on backend reference", PREFILL}
    unused = dict(unused="decode ") if drafts else {}
    run.looked_for_what_it_needs(**unused, maybe=f"{op} ")


def test_engine_with_a_checkpoint_in_block_fp8(in_block_fp8, tmp_path):
    """Tokens are those of the engine's quantiser behind our norm."""
    engine = OURS | dict(mamba_radix_cache_strategy="extra_buffer", dtype="bfloat16")
    runs = []
    for quantises in (False, True):
        folder = tmp_path / str(quantises)
        folder.mkdir()
        variables = dict(SGLANG_MAMBA_CONV_DTYPE="bfloat16")
        variables |= dict(GATED_DELTA_SGLANG_QUANTISE=str(int(quantises)))
        runs.append(Run(in_block_fp8, folder, engine, variables, block_fp8=True))
        what = "norm in FP8" if quantises else "norm"
        ops = "decode and convolution", "prefill"
        routes = {f"GDN {op} and {what} on backend reference" for op in ops}
        assert runs[-1].ran.keys() == routes
        maybe = ("decode ", "prefill_norm ") if quantises else ("decode ",)
        runs[-1].looked_for_what_it_needs(maybe=maybe)
    for n in range(2):
        assert runs[0].tokens(n) == runs[1].tokens(n)
    assert len({tuple(x) for x in runs[0].tokens(0)}) == 3


def test_engine_that_lacks_kernels_does_not_start(qwen3_5, tmp_path):
    """As on a GPU without the compiler, with a pack that lacks these layers' kernels."""
    strict = dict(GATED_DELTA_JIT="0", GATED_DELTA_CACHE_DIR=str(tmp_path))
    run = Run(
        qwen3_5,
        tmp_path,
        OURS | dict(mamba_radix_cache_strategy="no_buffer", dtype="bfloat16"),
        strict,
        starts=False,
        on_gpu=True,
    )
    assert (
        "kernels that this engine needs are missing: GATED_DELTA_JIT=0 or no compiler, "
        "and no compiled kernel" in run.log
    )
    command = f"gated-delta compile --size 64x64 --out {tmp_path}"
    assert f"; `{command}` builds the kernels ahead of time\n" in run.log
    named = set(re.findall(r"  - (\w+) axis=head K=64", run.log))  # of both modes
    assert {"decode", "prefill_prepare", "prefill_scan"} <= named


def test_engine_runs_its_own_kernels_where_ours_cannot(qwen3_5, expected, tmp_path):
    """Our GPU kernels refuse every call on a CPU, tracked states too."""
    run = Run(
        qwen3_5, tmp_path, OURS | dict(mamba_radix_cache_strategy="extra_buffer"), backend="cute"
    )
    assert run.tokens(0) == run.tokens(1) == expected
    reasons = (
        "the engine's own kernel (ours needs tensors on a CUDA device, got cpu; "
        "bf16 or fp16 inputs, got fp32)"
    )
    assert run.ran.keys() == {f"GDN {mode} on {reasons}" for mode in ("decode", "prefill")}
    assert f"gated_delta runs GDN prefill on {reasons}" in run.log


class InRing(Run):
    """An engine whose decode has a ring, with its states watched; a third round has longer hits."""

    def __init__(self, model, tmp_path, engine, variables=()):
        states = tmp_path / "states"
        states.mkdir()
        variables = dict(variables) | dict(GATED_DELTA_SGLANG_RING="1", GATED_DELTA_CHECK="1")
        case = dict(new_tokens=LONG, states=str(states), ring_from=2, soak=12)
        super().__init__(model, tmp_path, OURS | RING | engine, variables, **case)
        (self.states,) = (json.loads(file.read_text()) for file in states.iterdir())

    def agrees_with(self, tokens):
        """Tokens of LONG and LONG more: two rounds have the first, a third has the others."""
        first, others = ([x[part] for x in tokens] for part in (slice(LONG), slice(LONG, None)))
        assert self.tokens(0) == self.tokens(1) == first
        assert self.tokens(2) == others
        *_, rush, calm = self.rounds
        assert len(rush) == 12
        for mine, its in zip(rush, calm):
            assert mine["tokens"] == its["tokens"][: len(mine["tokens"])]
        assert sum(len(x["tokens"]) < len(y["tokens"]) for x, y in zip(rush, calm)) >= 1  # aborted
        assert self.states["snapshots"] >= 3 * 3  # layers, prompts
        assert self.states["decodes"] >= 3 * 64  # of the last request, alone
        assert self.states["worst"] < 1e-5
        assert self.compared() >= self.states["snapshots"]


@pytest.fixture(scope="session")
def expected_long(qwen3_5):
    import transformers

    return by_transformers(
        transformers.AutoModelForCausalLM.from_pretrained(qwen3_5, dtype=torch.float32).eval(),
        2 * LONG,
    )


def test_engine_in_a_ring(qwen3_5, expected_long, tmp_path):
    """With the overlap schedule, cached prefixes, mixed batches, and requests that come back."""
    engine = dict(disable_overlap_schedule=False, enable_mixed_chunk=True)
    retract = dict(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="20")
    run = InRing(qwen3_5, tmp_path, engine, retract)
    run.agrees_with(expected_long)
    assert run.log.count("retract") >= 5
    in_ring = "GDN decode and norm in a ring on backend reference"
    # One request is decoded without the ring; the checking mode works out convolved tokens.
    alone = "GDN decode and norm on backend reference"
    assert run.ran.keys() == {PREFILL, alone, in_ring}
    assert run.ran[in_ring] > run.ran[PREFILL]
    assert min(run.cached(2)) >= 64  # a state that decode kept
    assert "15 tokens of 4 requests, 36 % of a state each" in run.log
    run.looked_for_what_it_needs(maybe="decode ")


@needs_cxx
def test_engine_that_folds_drafts_seldom(qwen3_5, expected, tmp_path):
    """Lines of two n-grams, which cannot fork; mixed batches, and requests that come back."""
    lines = dict(
        linear_attn_verify_backend="gated_delta",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=2,
        speculative_ngram_max_bfs_breadth=1,
    )
    variables = dict(GATED_DELTA_SGLANG_KVBUFFER="1", SGLANG_TEST_RETRACT="1")
    run = Run(qwen3_5, tmp_path, OURS | RING | lines, variables | dict(GATED_DELTA_CHECK="1"))
    assert run.tokens(0) == run.tokens(1) == expected
    assert run.log.count("retract") >= 5
    assert run.cached(1)[1] >= 128
    assert "seldom needs" not in run.log
    assert run.compared() >= 3 * 3  # layers, prompts
    # The checking mode leaves the convolution to the engine.
    run.looked_for_what_it_needs(unused="decode ", maybe="verify ")


def test_engine_with_kda_layers_in_a_ring(kda, tmp_path):
    """One of them has bounded gates."""
    model, tokens = kda
    run = InRing(model, tmp_path, dict(enable_fp32_lm_head=True, disable_overlap_schedule=False))
    run.agrees_with(tokens)
    run.looked_for_what_it_needs(unused_norm(model), maybe="decode ")
