"""vLLM's scheduler, and a stand-in for the GPU's part of its second model runner, on a CPU.

The scheduler, its cache manager, the metadata's builders and MambaHybridModelState are vLLM's.
Torch does what its Triton kernels do: copies of states between block columns, and counts.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import vllm_driver

SOURCES = Path(__file__).parents[2] / "src"
TRAINED = SOURCES / "gated_delta" / "demo" / "tiny_qwen3_5"


class Steps:
    """vLLM's scheduler and its cache of a hybrid model: prompts in steps, without a model."""

    tables = 1
    """Block tables of states."""
    shapes = (3, 8), (4, 16, 8)
    draft_blocks = 0

    def __init__(self, block: int, unit: int | None = None, **options: Any):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface as kv
        from vllm.v1.core import kv_cache_utils

        blocks = options.pop("blocks", 2**16 // block)
        options = dict(async_scheduling=False, max_num_batched_tokens=2048) | options
        options = dict(enable_prefix_caching=True) | options
        options |= dict(model=str(TRAINED), dtype="float32", skip_tokenizer_init=True)
        options |= dict(prefix_match_unit=unit, block_size=block)
        self.config = config = EngineArgs(**options).create_engine_config()
        self.configured()
        cache = config.cache_config
        cache.block_size, cache.num_gpu_blocks = block, blocks
        if cache.mamba_cache_mode == "align":
            cache.mamba_block_size = block
        attention = kv.FullAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        states = kv.MambaSpec(
            block_size=cache.mamba_block_size,
            shapes=self.shapes,
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=self.draft_blocks,
        )
        specs = dict(attention=attention) | {f"states {n}": states for n in range(self.tables)}
        groups = [kv.KVCacheGroupSpec(self.names(name), spec) for name, spec in specs.items()]
        self.cache = kv.KVCacheConfig(cache.num_gpu_blocks, [], groups)
        block, unit = kv_cache_utils.resolve_kv_cache_block_sizes(self.cache, config)
        kv_cache_utils.init_none_hash(sha256)
        self.unit, self.hasher = unit, kv_cache_utils.get_request_block_hasher(unit, sha256)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=self.cache,
            structured_output_manager=SimpleNamespace(
                accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens
            ),
            block_size=block,
            hash_block_size=unit,
        )

    def names(self, group: str) -> list[str]:
        """Of a group's layers."""
        return [group]

    def configured(self) -> None:
        """Called with the configuration, before the scheduler is built."""

    def add(self, name: str, tokens: list[int], most: int = 64, goes_on: bool = False) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        options: dict[str, Any] = dict(block_hasher=self.hasher, resumable=goes_on)
        request = Request(name, tokens, sampling, None, **options)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """The tokens of each request in that step."""
        from vllm.v1.outputs import ModelRunnerOutput

        batch = self.scheduler.schedule()
        names = list(batch.num_scheduled_tokens)
        sampled = [[7] * (not self.scheduler.requests[x].is_prefill_chunk) for x in names]
        rows = {name: row for row, name in enumerate(names)}
        self.scheduler.update_from_output(batch, ModelRunnerOutput(names, rows, sampled))
        return batch.num_scheduled_tokens

    def cuts(self, tokens: int, decodes: int, prompts: int) -> list[int]:
        """Where a prompt beside others is cut: the end of its cached prefix, and of its parts."""
        from vllm.v1.request import RequestStatus

        others = [self.add(f"decode {n}", [5 + n] * (5 + n)) for n in range(decodes)]
        while any(x.num_computed_tokens < x.num_prompt_tokens for x in others):
            self.step()
        for n in range(prompts):
            self.add(f"prompt {n}", [n] * (tokens - 7 * n - 7))
        ours, cuts = self.add("ours", [tokens % 97] * tokens), set()
        while ours.num_computed_tokens < tokens:
            computed = self.step().get("ours", 0)
            cuts |= {ours.num_computed_tokens - computed, ours.num_computed_tokens}
        self.scheduler.finish_requests(
            list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED
        )
        return sorted(cuts - {0, tokens})


HV, V, K, WIDTH = 2, 8, 8, 4
VOCABULARY, BOUND = 40, -5.0


class Truth:
    """The recurrence in float64, token by token, of every text that was asked for.

    channels: KDA's, with a bounded gate.
    """

    def __init__(self, channels: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        rand = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
        self.H, self.channels = HV if channels else 1, channels
        self.width = 2 * self.H * K + HV * V
        gates = (HV, K) if channels else (HV,)
        self.x, self.g = rand(VOCABULARY, self.width), rand(VOCABULARY, *gates)
        self.beta, self.weight = rand(VOCABULARY, HV), rand(self.width, WIDTH) / 2
        self.A_log, self.dt_bias = rand(HV), rand(*gates)
        self.known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def window(self, tokens: tuple[int, ...], width: int = WIDTH - 1) -> torch.Tensor:
        """[width, D]: the convolution's last inputs."""
        last = self.x[list(tokens[-width:])]
        return torch.cat([last.new_zeros(width - len(last), self.width), last])

    def after(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The state [HV, V, K] after the tokens, and the last one's output [HV, V]."""
        n = next((n for n in range(len(tokens), 0, -1) if tokens[:n] in self.known), 0)
        state = self.known[tokens[:n]][0] if n else torch.zeros(HV, V, K, dtype=torch.float64)
        out = self.known[tokens[:n]][1] if n else torch.zeros(HV, V, dtype=torch.float64)
        for end in range(n + 1, len(tokens) + 1):
            y = F.silu((self.window(tokens[:end], WIDTH) * self.weight.T).sum(0))
            q, k, v = y.split((self.H * K, self.H * K, HV * V))
            q, k = (x.view(-1, K, 1).expand(HV, -1, -1) for x in (q, k))
            q, k = (x * (x.square().sum(1, True) + 1e-6).rsqrt() for x in (q, k))
            last = tokens[end - 1]
            state = state * self._log_decay(last).exp().view(HV, 1, -1)
            u = self.beta[last].sigmoid()[:, None] * (v.view(HV, V) - (state @ k)[..., 0])
            state = state + u[:, :, None] * k.mT
            out = (state @ q)[..., 0] * K**-0.5
            self.known[tokens[:end]] = state, out
        return state, out

    def _log_decay(self, token: int) -> torch.Tensor:
        x, rate = self.g[token] + self.dt_bias, self.A_log.exp()
        return BOUND * (rate[:, None] * x).sigmoid() if self.channels else -rate * F.softplus(x)


def conv_prefill(x: Any, weight: Any, bias: Any, **kw: Any) -> torch.Tensor:
    """vLLM's convolution of whole sequences: x [D, tokens]."""
    out, starts = torch.zeros_like(x), kw["query_start_loc"].tolist()
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        slot, width = int(kw["cache_indices"][n]), weight.shape[1] - 1
        if start == end or slot == 0:
            continue
        held = kw["conv_states"][slot][:, :width]
        first = held if kw["has_initial_state"][n] else torch.zeros_like(held)
        window = torch.cat([first, x[:, start:end]], 1)
        out[:, start:end] = vllm_driver._conv(window, weight, bias, kw["activation"])
        kw["conv_states"][slot][:, :width] = window[:, -width:]
    return out


SEEN = (
    "hit",
    "one-token rest",
    "one-token part",
    "part of a prompt",
    "beside a prompt",
    "preempted",
    "aborted",
    "idle",
    "end of a block",
    "past a block",
    "short of a block",
    "went on",
    "padded prompt",
    "checked",
)
"""What a run meets. hit: of a cached prefix. idle: a dummy batch. went on: with more input. past,
short of: drafts end in the next block, and the accepted ones do or do not. padded prompt: of one
token, with drafts."""


NEAR = dict(rtol=1e-4, atol=1e-5)


class Kernel:
    """A Triton kernel by a function of its arguments: kernel[grid](...)."""

    def __init__(self, run: Any):
        self.run = run

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, **kwargs)


def preprocess(rows, columns, computed, starts, accepted, src, off, n, *, MAMBA_BLOCK_SIZE, **_):
    for i, r in enumerate(rows[:n].tolist()):
        src[r], off[r] = columns[r], max(int(accepted[r]) - 1, 0)
        after = int(computed[r] + starts[i + 1] - starts[i])
        column = -(-after // MAMBA_BLOCK_SIZE) - 1
        if columns[r] >= 0 and column != columns[r]:
            accepted[r] = 1
        columns[r] = column


def scatter(rows, sampled, accepted):
    for i, r in enumerate(rows.tolist()):
        accepted[r] = max(int(sampled[i]), 1)


def postprocess(
    rows, sampled, which, before, columns, accepted, *, MAMBA_BLOCK_SIZE, BLOCK_TABLE_WIDTH
):
    """RecoverSSM's: for each sequence with drafts."""
    for i in range(len(rows)) if which is None else which.tolist():
        column = max(int(before[i] + sampled[i]) - 1, 0) // MAMBA_BLOCK_SIZE
        columns[rows[i]], accepted[rows[i]] = min(column, BLOCK_TABLE_WIDTH - 1), 1


class Copies:
    """MambaSpecDecodeGPUContext: states between block columns."""

    def __init__(self, runner: Runner):
        self.runner, self.is_initialized = runner, True

    def compute_aligned_state_indices(self, lens: torch.Tensor, n: int) -> torch.Tensor:
        columns = ((lens[:n] - 1) // self.runner.block).clamp(min=0).long()
        columns = columns[:, None] + torch.arange(1 + self.runner.draft_blocks)
        return torch.stack([t[:n].gather(1, columns) for t in self.runner.in_batch])

    def copy(self, request: int, source: int, to: int, bias: int) -> None:
        for table in self.runner.by_request:
            a, b = (int(table[request, column]) for column in (source, to))
            states, windows = self.runner.states, self.runner.windows
            states[:, b] = states[:, int(table[request, source + bias])].clone()
            windows[:, b, : windows.shape[2] - bias] = windows[:, a, bias:].clone()

    def run_fused_precopy(self, n, columns, src, bias, rows):
        for r in rows[:n].tolist():
            if 0 <= src[r] != columns[r]:
                self.copy(r, int(src[r]), int(columns[r]), int(bias[r]))

    def run_fused_postprocess_align(self, n, accepted, columns, computed, rows):
        counts = accepted.clone()
        for r in rows[:n].tolist():
            running = int(computed[r] - counts[r]) + 1
            full = int(computed[r]) // self.runner.block
            bias, to = full * self.runner.block - running, full - 1
            if bias < 0:
                continue
            if columns[r] == to:
                accepted[r] = 1
            if columns[r] != to or bias:
                self.copy(r, int(columns[r]), to, bias)


class Requests:
    """vLLM's RequestState: the last index that is free is the next."""

    def __init__(self, most: int):
        self.req_id_to_index: dict[str, int] = {}
        self.free = list(range(most))

    def add_request(self, req_id: str, **_: Any) -> None:
        self.req_id_to_index[req_id] = self.free.pop()

    def remove_request(self, req_id: str) -> int | None:
        row = self.req_id_to_index.pop(req_id, None)
        self.free += [] if row is None else [row]
        return row

    def apply_staged_writes(self) -> None:
        pass


class Runner(Steps):
    """Two block tables of two linear layers each, served in steps; drafts are random.

    accept: the share of drafts that the model accepts. ring: tokens of a row of decode's ring, and
    no drafts. room: tokens of a row in which drafts stay; 0: they do not. slots: a block for each
    draft, and no KVBuffer. channels: KDA's layers. k3: Kimi K3's, of channels too.
    """

    tables = 2

    def __init__(self, monkeypatch: Any, seed: int, **options: Any):
        from vllm.v1.worker.utils import AttentionGroup

        from gated_delta.integrations.vllm import layers, process

        self.monkeypatch = monkeypatch
        self.asynchronous = options.pop("asynchronous", False)
        self.ring, self.k3 = options.pop("ring", 0), options.pop("k3", False)
        self.slots = options.pop("slots", False)
        self.truth = Truth(options.pop("channels", self.k3))
        self.room, self.drafts = options.pop("room", 0), 0 if self.ring else 3
        self.shapes = (WIDTH - 1 + self.drafts, self.truth.width), (HV, V, K)
        self.draft_blocks = self.drafts * self.slots
        method = "ngram_gpu" if self.asynchronous else "ngram"
        ngram = dict(method=method, num_speculative_tokens=self.drafts, prompt_lookup_max=2)
        ngram |= dict(prompt_lookup_min=1)
        super().__init__(speculative_config=ngram if self.drafts else None, **options)
        self.random, self.accept = random.Random(seed), 0.7
        self.block = self.config.cache_config.mamba_block_size
        P, R = self.cache.num_blocks, self.config.scheduler_config.max_num_seqs
        self.states = torch.full((2, P, HV, V, K), torch.nan)
        self.windows = torch.full((2, P, *self.shapes[0]), torch.nan)
        self.states[:, 0] = self.windows[:, 0] = 0
        columns = -(-self.config.model_config.max_model_len // self.block) + self.draft_blocks
        self.by_request = [torch.zeros(R, columns, dtype=torch.int32) for _ in range(2)]
        self.in_batch = [torch.zeros(2 * R, columns, dtype=torch.int32) for _ in range(2)]
        self.req_states, self.requests = Requests(R), {}
        self.computed = torch.zeros(R, dtype=torch.int32)
        self.tokens_of: dict[bytes, tuple[int, ...]] = {}
        self.hasher = functools.partial(self._hash, self.hasher)
        self.seen: dict[str, int] = dict.fromkeys(SEEN, 0)

        monkeypatch.setattr(process, "layers", self._layers(layers, R))
        self._replace_kernels(monkeypatch)
        self._hook(monkeypatch)
        self.groups: list[list[Any]] = [[]]
        for n, group in enumerate(self.cache.kv_cache_groups[1:], 1):
            layer = self.config.compilation_config.static_forward_context[group.layer_names[0]]
            names, spec = group.layer_names, group.kv_cache_spec
            x = AttentionGroup(layer.get_attn_backend(), names, spec, n)
            x.create_metadata_builders(self.config, torch.device("cpu"), None)
            builder = x.get_metadata_builder(0)
            # As on a GPU.
            builder.supports_update_block_table = not self.k3
            builder.mamba_aligned_state_indices = None
            self.groups.append([x])

    def _replace_kernels(self, monkeypatch: Any) -> None:
        from vllm.model_executor.layers.mamba.ops import causal_conv1d
        from vllm.v1.worker.gpu.model_states import mamba_hybrid, recoverssm

        monkeypatch.setattr(causal_conv1d, "causal_conv1d_update", vllm_driver.conv_update)
        monkeypatch.setattr(causal_conv1d, "causal_conv1d_fn", conv_prefill)
        for module, name, run in (
            (mamba_hybrid, "preprocess_mamba_align_fused_kernel", preprocess),
            (mamba_hybrid, "_scatter_num_accepted_kernel", scatter),
            (recoverssm, "_postprocess_recoverssm_align_kernel", postprocess),
        ):
            monkeypatch.setattr(module, name, Kernel(run))

    def _hook(self, monkeypatch: Any) -> None:
        """The plug-in's hooks, and vLLM's state of the model and of its requests."""
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.model_states import default, mamba_hybrid

        from gated_delta import problem
        from gated_delta.integrations.vllm import checking, layers, padded
        from gated_delta.integrations.vllm.records import commit, ring

        base, kind = default.DefaultModelState, mamba_hybrid.MambaHybridModelState
        monkeypatch.setattr(base, "__init__", default.ModelState.__init__)
        for name in ("add_request", "remove_request", "apply_staged_writes"):
            monkeypatch.setattr(base, name, lambda *_: None)
        for name in ("__init__", "add_request", "preprocess_state", "prepare_attn"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
        if self.drafts:
            padded.verify_from_zeros.__wrapped__(True)
        runner = model_runner.GPUModelRunner
        monkeypatch.setattr(runner, "add_requests", runner.add_requests)
        if self.ring or self.room:
            ring.follow_requests.__wrapped__()
        if not self.ring and not self.slots:
            commit.at_recoverssm_seam.__wrapped__()
        if problem.CHECK:
            monkeypatch.setattr(kind, "postprocess_state", kind.postprocess_state)
            monkeypatch.setattr(layers, "api", layers.api)
            checking.hook.__wrapped__(layers)
        cache = self.config.cache_config
        block, cache.mamba_block_size = cache.mamba_block_size, 1  # vLLM sets it later
        self.model = kind(self.config, None, None, torch.device("cpu"))
        cache.mamba_block_size = block
        self.model._mamba_ctx = Copies(self)
        self.worker = SimpleNamespace(
            vllm_config=self.config,
            req_states=self.req_states,
            model_state=self.model,
            block_tables=SimpleNamespace(append_block_ids=lambda *_, **__: None),
            lora_state=SimpleNamespace(add_request=lambda *_: None),
            is_last_pp_rank=False,
            **dict.fromkeys(
                ("adaptive_verification", "pooling_runner", "encoder_cache", "sampler")
            ),
        )
        self.worker._remove_request = self.req_states.remove_request
        self.add_requests = functools.partial(runner.add_requests, self.worker)

    def configured(self) -> None:
        """vLLM chooses this runner where it has Triton."""
        self.monkeypatch.setattr(type(self.config), "use_v2_model_runner", True)
        self.config.scheduler_config.async_scheduling = self.asynchronous

    def names(self, group: str) -> list[str]:
        return [f"{group} {n}" for n in range(2)]

    def _layers(self, module: Any, rows: int) -> list[Any]:
        from gated_delta.integrations.vllm.records import ring

        layers, truth = self.config.compilation_config.static_forward_context, self.truth
        T, tokens = 1 + self.drafts, self.ring or self.room
        shared = ring.Rows(tokens, 0 if self.ring else T, rows, 64, "cpu") if tokens else None
        weights = dict(A_log=truth.A_log.float(), dt_bias=truth.dt_bias.float())
        weight, kind = truth.weight.float(), module.Kimi if truth.channels else module.Qwen
        if self.k3:
            from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

            kind = type(
                "K3", (module.LATER[KimiK3DeltaAttention.__name__], KimiK3DeltaAttention), {}
            )
        for table in range(2):
            for n, name in enumerate(self.names(f"states {table}")):
                layers[name] = layer = object.__new__(kind)
                metadata = functools.partial(self.metadata, name)
                windows = self.windows[n].mT
                vars(layer).update(**weights, prefix=name, sizes=(truth.H, HV, V, K), refused={})
                vars(layer).update(kv_cache=(self.windows[n], self.states[n]), num_spec=self.drafts)
                buffered = not self.ring and not self.slots
                vars(layer).update(buffered=buffered, ring=self.ring, rows=shared)
                vars(layer).update(room=self.room)
                vars(layer).update(fuses_norm=False, deterministic=False, gate_lower_bound=BOUND)
                vars(layer).update(builder=None, aligned=False, _metadata=metadata)
                vars(layer)["_convolution"] = lambda w=windows, x=weight: (w, x, None, "silu")
        if not self.slots:
            alike = [layers[f"states {table} {n}"] for n in range(2) for table in range(2)]
            buffer = alike[0].buffer(rows, "cpu", num_layers=4)
            for x in vars(buffer).values():
                x.fill_(torch.nan)
            for i, layer in enumerate(alike):
                layer.kvbuffer = buffer.layer(i)
        return list(layers.values())

    def metadata(self, name: str) -> Any:
        return self.of_step[name]

    def forward(self, tokens: list[int], batch: Any, tables: Any) -> torch.Tensor:
        """Every layer's output of a batch [layers, tokens, HV, V]."""
        from vllm.config.compilation import CUDAGraphMode

        padded = batch.num_tokens_after_padding > batch.num_tokens
        mode = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        attn = (batch, mode, tables, [torch.zeros(2, 0)] * 3, self.groups, self.cache)
        self.of_step = self.model.prepare_attn(*attn)
        ids = torch.tensor([*tokens, *[0] * (batch.num_tokens_after_padding - len(tokens))])
        rows = [x[ids].float() for x in (self.truth.x, self.truth.g, self.truth.beta)]
        outputs = []
        for layer in self.config.compilation_config.static_forward_context.values():
            outputs.append(out := torch.full((len(ids), HV, V), torch.nan))
            assert layer._run(*rows, out)
            assert not out[len(tokens) :].any()
        return torch.stack(outputs)[:, : len(tokens)]

    def execute(self, batch: Any) -> dict[str, list[int]]:
        """The worker's part of a step: what it samples, by request."""
        self._update(batch)
        names = sorted(
            batch.num_scheduled_tokens,
            key=lambda name: (
                not batch.scheduled_spec_decode_tokens.get(name),
                batch.num_scheduled_tokens[name] != 1 + self.drafts,
                batch.num_scheduled_tokens[name],
            ),
        )
        if not names:
            return {}
        requests = [self.requests[name] for name in names]
        drafts = [len(batch.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        if not self.asynchronous:
            for name, request in zip(names, requests, strict=True):
                proposed = batch.scheduled_spec_decode_tokens.get(name, ())
                request.drafts = [max(token, 0) for token in proposed]  # vLLM's padding is 0
        lens = [batch.num_scheduled_tokens[name] for name in names]
        rows = torch.tensor([request.row for request in requests])
        for by_request, in_batch in zip(self.by_request, self.in_batch, strict=True):
            in_batch.zero_()
            in_batch[: len(rows)] = by_request[rows]
        known = np.array([request.known for request in requests])
        prefill = np.array([request.prefill for request in requests])
        new, known = np.array(lens) - np.array(drafts), np.minimum(known, prefill)
        inputs = self._batch(rows, lens, self.computed[rows])
        inputs.is_prefilling_np = known < prefill
        inputs.prefill_runs_as_decode_np = (known < prefill) & (new == 1) & (known > 0)
        inputs.num_draft_tokens_per_req = np.array(drafts, np.int32)
        if self.ring + self.room and min(lens) == max(lens) == 1 + self.drafts:
            self._pad(inputs)  # as for a CUDA graph
        self.model.preprocess_state(inputs, self._tables(), self.cache, self.computed)
        texts = []
        for request, s, n, k in zip(requests, lens, self.computed[rows].tolist(), drafts):
            text = tuple([*request.tokens, *request.drafts[:k]][: n + s])
            assert len(text) == n + s
            texts.append((text, n))
        tables = tuple(x[: inputs.num_reqs_after_padding] for x in self._tables())
        out = self.forward([x for text, n in texts for x in text[n:]], inputs, tables)
        expected = [
            self.truth.after(text[: i + 1])[1] for text, n in texts for i in range(n, len(text))
        ]
        torch.testing.assert_close(
            out.double(), torch.stack(expected).expand(4, -1, -1, -1), **NEAR
        )
        answers, sampled = self._sample(requests, texts, drafts, inputs)
        self.model.postprocess_state(rows, sampled, self.computed)
        self.save()
        for request, (text, _), k, first in zip(requests, texts, drafts, inputs.is_prefilling_np):
            if first and not k:  # a connector may send a prompt's state, wherever it ends
                column = -(-len(text) // self.block) - 1
                for table in self.by_request:
                    self.compare(text, int(table[request.row, column]))
        self._note(texts, drafts, answers, inputs)
        return dict(zip(names, answers, strict=True))

    def _sample(self, requests: Any, texts: Any, drafts: Any, inputs: Any) -> Any:
        answers = []
        for request, (text, n), k in zip(requests, texts, drafts, strict=True):
            kept = 0
            while kept < k and self.random.random() < self.accept:
                kept += 1
            answer = [*request.drafts[:kept], self.random.randrange(VOCABULARY)]
            part = len(text) - k < request.prefill
            answers.append(answer := [] if part else answer)
            request.tokens += answer
            self.computed[request.row] += len(text) - n - (0 if part else k - kept)
            proposed = self.drafts if self.asynchronous else self.random.randrange(self.drafts + 1)
            request.drafts = [self.random.randrange(VOCABULARY) for _ in range(proposed)]
        return answers, torch.tensor([len(x) for x in answers], dtype=torch.int32)

    def _note(self, texts: Any, drafts: Any, answers: Any, inputs: Any) -> None:
        """Counts what the step has met."""
        running = inputs.is_prefilling_np & ~inputs.prefill_runs_as_decode_np
        self.seen["beside a prompt"] += bool(running.any() and not running.all())
        for (text, n), k, answer, first in zip(texts, drafts, answers, inputs.is_prefilling_np):
            s, B = len(text) - n, self.block
            self.seen["part of a prompt"] += not answer
            self.seen["one-token part"] += not answer and s == 1 and n > 0
            self.seen["padded prompt"] += bool(first and k > 0 and n == 0)
            if k and not first:
                end = n + len(answer)
                self.seen["end of a block"] += end % B == 0
                self.seen["past a block"] += end // B > n // B and end % B > 0
                self.seen["short of a block"] += n % B > 0 and -(-end // B) < -(-(n + s) // B)

    def _batch(self, rows: torch.Tensor, lens: list[int], computed: torch.Tensor) -> Any:
        """vLLM's InputBatch, as far as the metadata needs it."""
        starts = np.cumsum([0, *lens], dtype=np.int32)
        seq_lens = computed.int() + torch.tensor(lens, dtype=torch.int32)
        n, total = len(lens), int(starts[-1])
        return SimpleNamespace(
            num_reqs=n,
            num_reqs_after_padding=n,
            num_tokens=total,
            num_tokens_after_padding=total,
            idx_mapping=rows,
            query_start_loc=torch.from_numpy(starts.copy()),
            query_start_loc_np=starts,
            num_scheduled_tokens=np.array(lens, np.int32),
            max_query_len=max(lens),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            is_prefilling_np=np.zeros(n, bool),
            prefill_runs_as_decode_np=None,
            num_draft_tokens_per_req=None,
            dcp_local_seq_lens=None,
            positions=None,
            prompt_lens=None,
        )

    def _pad(self, inputs: Any) -> None:
        """With rows behind the batch's; vLLM's metadata has them too."""
        n = inputs.num_reqs
        more = -n % 4 if (inputs.is_prefilling_np <= inputs.prefill_runs_as_decode_np).all() else 0
        inputs.num_reqs_after_padding = n + more
        inputs.num_tokens_after_padding = (n + more) * (1 + self.drafts)
        inputs.query_start_loc = F.pad(inputs.query_start_loc, (0, more), value=inputs.num_tokens)
        inputs.query_start_loc_np = inputs.query_start_loc.numpy()
        inputs.seq_lens = F.pad(inputs.seq_lens, (0, more))
        inputs.seq_lens_cpu_upper_bound = F.pad(inputs.seq_lens_cpu_upper_bound, (0, more))

    def _tables(self) -> Any:
        n = len(self.in_batch[0])
        return (torch.zeros(n, 1, dtype=torch.int32), *self.in_batch)

    def idle(self) -> None:
        """The dummy batch of a data-parallel rank without requests."""
        n = self.random.randrange(1, 4)
        before = [x.clone() for x in self.in_batch]
        for table in self.in_batch:
            table.zero_()
        tokens = [self.random.randrange(VOCABULARY) for _ in range(n * (1 + self.drafts))]
        inputs = self._batch(torch.arange(n), [1 + self.drafts] * n, torch.zeros(n))
        self.forward(tokens, inputs, tuple(x[:n] for x in self._tables()))
        for table, held in zip(self.in_batch, before, strict=True):
            table.copy_(held)
        self.seen["idle"] += 1

    def _update(self, batch: Any) -> None:
        """Requests that leave, come and go on."""
        self.seen["preempted"] += len(batch.preempted_req_ids or ())
        for name in sorted(batch.finished_req_ids | (batch.preempted_req_ids or set())):
            self.req_states.remove_request(name)
            self.requests.pop(name, None)
        self.seen["went on"] += sum(x.req_id in self.requests for x in batch.scheduled_new_reqs)
        self.add_requests(batch)
        for new in batch.scheduled_new_reqs:
            row, known = self.req_states.req_id_to_index[new.req_id], new.num_computed_tokens
            tokens = list(new.prefill_token_ids)
            self.requests[new.req_id] = SimpleNamespace(
                row=row,
                tokens=tokens,
                prefill=len(tokens),
                known=known,
                drafts=[0] * self.drafts,
                columns=0,
            )
            self.computed[row] = known
            self.seen["hit"] += known > 0
            self.seen["one-token rest"] += len(tokens) - known == 1
            self._append(self.requests[new.req_id], new.block_ids)
        cached = batch.scheduled_cached_reqs
        for name, known, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self.requests[name].known = known
            if blocks is not None:
                self._append(self.requests[name], blocks)
        for copy in batch.kv_cache_block_copies or ():
            for pool in (self.states, self.windows):
                pool[:, copy.dst_block_id] = pool[:, copy.src_block_id]

    def _append(self, request: Any, blocks: Any) -> None:
        for table, ids in zip(self.by_request, blocks[1:], strict=True):
            end = request.columns + len(ids)
            table[request.row, request.columns : end] = torch.tensor(ids, dtype=torch.int32)
        request.columns = end

    def _hash(self, hasher: Any, request: Any) -> Any:
        new, first = hasher(request), len(request.block_hashes) + 1
        for n, key in enumerate(new, first):
            self.tokens_of[key] = tuple(request.all_token_ids[: n * self.unit])
        return new

    def check(self) -> None:
        """Every hashed block has the state and the window after its tokens."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            key = block.block_hash
            if key is None or int.from_bytes(key[-4:], "big") == 0:
                continue
            text = self.tokens_of[key[:-4]][: block.block_hash_num_tokens]
            assert len(text) == block.block_hash_num_tokens
            self.compare(text, block.block_id)
            self.seen["checked"] += 1

    def compare(self, text: tuple[int, ...], slot: int) -> None:
        state, window = self.truth.after(text)[0], self.truth.window(text)
        states, windows = self.states[:, slot].double(), self.windows[:, slot, : WIDTH - 1]
        torch.testing.assert_close(states, state.expand(2, -1, -1, -1), **NEAR)
        assert torch.equal(windows, window.float().expand(2, -1, -1))

    def save(self) -> None:
        """What a KV connector would save of the step, if there is one."""

    def serve(self, most: int) -> None:
        """So many requests, at random: new texts, and texts that go on; all must end."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        texts: list[list[int]] = [[]]
        added, waiting = 0, []
        while added < most or self.scheduler.requests:
            if added < most and self.random.random() < 0.3:
                text = self.random.choice(texts[-8:])
                text = text[: self.random.choice((len(text), self.random.randrange(200)))]
                more = self.random.choice((1, 1, 5, 40, 90))
                text = [*text, *(self.random.randrange(VOCABULARY) for _ in range(more))]
                # With drafts vLLM resumes at fewer tokens than the state has.
                goes_on = self.ring > 0 and self.random.random() < 0.3
                self.add(f"{added}", text, self.random.randrange(1, 60), goes_on)
                added += 1
            self._go_on()
            chance = self.random.random()
            forced = chance < 0.02 and not self.asynchronous  # its last answer is on the way
            if forced and len(self.scheduler.running) > 1:
                self.scheduler._preempt_request(self.scheduler.running.pop(), time.monotonic())
            elif chance < 0.03 and self.scheduler.requests:
                name = self.random.choice(sorted(self.scheduler.requests))
                self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
                self.seen["aborted"] += 1
            elif chance < 0.1:
                self.idle()
            batch = self.scheduler.schedule()
            answers = self.execute(batch)
            self.check()
            rows = {name: row for row, name in enumerate(answers)}
            waiting.append((batch, ModelRunnerOutput(list(answers), rows, list(answers.values()))))
            if len(waiting) > self.asynchronous:
                done, output = waiting.pop(0)
                for name in done.num_scheduled_tokens:
                    request = self.scheduler.requests.get(name)
                    texts += [list(request.all_token_ids)] if request else []
                self.scheduler.update_from_output(done, output)
                names = [name for name in answers if name in self.requests]
                drafts = [self.requests[name].drafts for name in names]
                if not self.asynchronous:
                    self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _go_on(self) -> None:
        """More input, or the end, for requests that wait for it."""
        from vllm.v1.request import RequestStatus

        for name, request in list(self.scheduler.requests.items()):
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                more = self.random.choice((1, 1, 2, 20))
                tokens = [self.random.randrange(VOCABULARY) for _ in range(more)]
                goes_on = request.num_tokens < 300 and self.random.random() < 0.7
                self.add(name, tokens, self.random.randrange(1, 30), goes_on)
