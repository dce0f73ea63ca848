"""SGLang on a machine without CUDA: PyTorch stand-ins for its CUDA builds. Import before sglang.

`sgl_kernel` has no CPU build on a package index. Here its modules import, the few functions that
these models need on a CPU are written out, and any other raises when called. The engine's two
kernels of the recurrence are among them: token loops that share nothing with gated_delta, so a test
sees if the engine's kernel or the plug-in ran.
"""

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import types

import torch
import torch.nn.functional as F


def routes(calls):
    """The plug-in's calls by route, as in "GDN decode on backend reference"."""
    return {route: n for counts in calls.counts.values() for route, n in counts.items()}


class Missing:
    """An importable name of sgl_kernel. A call raises."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"not on this machine: {self.__name__}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds sgl_kernel and all of its modules."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = Missing(spec.name).__getattr__
        return module

    def exec_module(self, module):
        module.__version__ = "0.4.10"
        functions = {
            "sgl_kernel": (
                assign_extend_cache_locs_cpu,
                assign_req_to_token_pool_cpu,
                fill_accept_out_cache_loc_cpu,
                verify_tree_greedy_cpu,
            ),
            "sgl_kernel.mamba": (
                causal_conv1d_fn_cpu,
                causal_conv1d_update_cpu,
                chunk_gated_delta_rule_cpu,
            ),
            "sgl_kernel.speculative": (reconstruct_indices_from_tree_mask,),
        }
        for function in functions.get(module.__name__, ()):
            setattr(module, function.__name__, function)


# ------------------------------------------------------------------------------------- convolutions


def convolved(sequence, weight, bias, activation):
    """sequence [dim, W-1+T], the state in front. Returns [dim, T]."""
    y = F.conv1d(
        sequence.float()[None],
        weight.float().unsqueeze(1),
        None if bias is None else bias.float(),
        groups=len(sequence),
    )[0]
    return F.silu(y) if activation in ("silu", "swish") else y


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias=None,
    conv_states=None,
    query_start_loc=None,
    cache_indices=None,
    has_initial_state=None,
    activation="silu",
    **_,
):
    """x [dim, total], conv_states [slots, dim, W-1], updated."""
    out, bounds, keep = torch.zeros_like(x), query_start_loc.tolist(), weight.shape[-1] - 1
    for slot, has, start, end in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:]
    ):
        if start == end or slot < 0:
            continue
        state = conv_states[slot]
        prior = state if has else torch.zeros_like(state)
        sequence = torch.cat([prior.to(x.dtype), x[:, start:end]], 1)
        out[:, start:end] = convolved(sequence, weight, bias, activation).to(x.dtype)
        state.copy_(sequence[:, -keep:])
    return out


def causal_conv1d_update_cpu(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    conv_state_indices=None,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    **_,
):
    """x [N, dim] or [N, dim, T].

    With intermediate_conv_window, it gets the windows after each token and the state stays. Of
    trees retrieve_parent_token gets the tokens' parents, and 0 for the first.
    """
    steps, width = x if x.dim() == 3 else x.unsqueeze(-1), weight.shape[-1]
    out, T = torch.zeros_like(steps), steps.shape[2]
    for n in range(len(steps)):
        slot, parents = int(conv_state_indices[n]), list(range(-1, T - 1))
        if slot < 0:
            continue
        if retrieve_next_token is not None:
            parents = parents_of(retrieve_next_token[n], retrieve_next_sibling[n])
            retrieve_parent_token[n] = torch.tensor(parents)
        paths = []
        for t in range(T):
            paths.append([*(paths[parents[t]] if t else ()), t])
            sequence = torch.cat([conv_state[slot].to(x.dtype), steps[n][:, paths[t]]], 1)
            out[n, :, t] = convolved(sequence, weight, bias, activation)[:, -1].to(x.dtype)
            if intermediate_conv_window is not None:
                row = intermediate_conv_window[int(intermediate_state_indices[n])]
                row[t] = sequence[:, 1 - width :]
        if intermediate_conv_window is None:
            conv_state[slot].copy_(sequence[:, 1 - width :])
    return out.view_as(x)


def parents_of(first_child, next_sibling):
    """As in the engine's kernel."""
    parents = [0] * len(first_child)
    for t, (child, sibling) in enumerate(zip(first_child.tolist(), next_sibling.tolist())):
        for token, parent in ((child, t), (sibling, parents[t])):
            if token != -1:
                parents[token] = parent
    return parents


# -------------------------------------------------------------------------- the engine's recurrence


def unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q, k, v, g, beta, pool, slots, cu_seqlens, work=torch.float32):
    """Gated delta rule, token by token. Updates the pool.

    q..beta: [T, heads, ...]; g: [T, HV] or [T, HV, K]. Returns o [T, HV, V], and per sequence
    a list of the states before each of its tokens and after the last.
    """
    bounds, out, all_states = cu_seqlens.tolist(), torch.zeros_like(v, dtype=work), []
    repeat, scale = v.shape[1] // q.shape[1], q.shape[-1] ** -0.5
    for slot, start, end in zip(slots.tolist(), bounds, bounds[1:]):
        states = [pool[slot].to(work, copy=True)]  # [HV, V, K]
        all_states.append(states)
        for t in range(start, end if slot > 0 else start):
            qt, kt = (unit(x[t].to(work)).repeat_interleave(repeat, 0) for x in (q, k))
            decay = g[t].to(work).exp()
            state = states[-1] * (decay[:, None, :] if decay.dim() == 2 else decay[:, None, None])
            u = beta[t].to(work)[:, None] * (v[t].to(work) - (state @ kt[..., None])[..., 0])
            states.append(state + u[..., None] * kt[:, None, :])
            out[t] = (states[-1] @ qt[..., None])[..., 0] * scale
        if slot > 0:
            pool[slot] = states[-1].to(pool.dtype)
    return out, all_states


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state, cu_seqlens, initial_state_indices, **_
):
    """With the state in front of each chunk of 64 tokens."""
    o, states = delta_rule(
        q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices, cu_seqlens
    )
    return (
        o.to(v.dtype)[None],
        None,
        torch.stack([state for one in states for state in one[:-1:64]])[None],
    )


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **_
):
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    o, _ = delta_rule(
        q[0], k[0], v[0], g[0], beta[0], initial_state_source, initial_state_indices, cu_seqlens
    )
    return o.to(v.dtype)[None]


# ------------------------------------------------------------------------------------------- drafts


def reconstruct_indices_from_tree_mask(
    mask, seq_lens, positions, index, next_token, next_sibling, N, T
):
    """mask [N, T, T]: whether token j is token i or before it on its path."""
    before = mask.view(N, T, T).tril(-1)
    positions.copy_((before.sum(-1) + seq_lens[:, None]).flatten())
    index.copy_(torch.arange(N * T).view(N, T))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for n in range(N):
        parents = [max(row.nonzero().flatten().tolist(), default=-1) for row in before[n]]
        for parent in range(T):
            children = [t for t in range(1, T) if parents[t] == parent]
            next_token[n, parent] = children[0] if children else -1
            for child, sibling in itertools.pairwise(children):
                next_sibling[n, child] = sibling


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    for n, (drafts, target) in enumerate(zip(candidates.tolist(), target_predict.tolist())):
        path, child = [0], int(retrive_next_token[n, 0])
        while child != -1:
            if drafts[child] == target[path[-1]]:
                path.append(child)
                child = int(retrive_next_token[n, child])
            else:
                child = int(retrive_next_sibling[n, child])
        accept_index[n, : len(path)] = retrive_index[n, path]
        accept_token_num[n] = len(path) - 1
        for token in path:
            predicts[int(retrive_index[n, token])] = target[token]


def assign_extend_cache_locs_cpu(rows, table, starts, ends, out, width):
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist())
    places = torch.cat([table[row, start:end] for row, start, end in spans])
    out[: len(places)] = places


def assign_req_to_token_pool_cpu(rows, table, starts, ends, places, *_):
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        table[row, start:end] = places[taken : taken + end - start]
        taken += end - start


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, out):
    places = out_cache_loc[accept_index[accept_index >= 0].long()]
    out[: len(places)] = places


def attend_to_trees(original, backend, q, k, v, layer, batch, save_kv_cache=True):
    """torch_native's attention, which takes drafts for a line, with the mask of trees."""
    if not batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, batch, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, (N, T) = backend.token_to_kv_pool, (len(batch.seq_lens), batch.spec_info.draft_token_num)
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    masks, q = batch.spec_info.custom_mask.view(N, T, T), q.view(N, T, -1, layer.qk_head_dim)
    outputs = []
    for n, (row, past) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist())):
        places = backend.req_to_token_pool.req_to_token[row, : past + T].long()
        keys, values = (
            x[places].transpose(0, 1)
            for x in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        mask = F.pad(masks[n], (past, 0), value=True)
        o = F.scaled_dot_product_attention(
            q[n].transpose(0, 1), keys, values, mask, scale=layer.scaling, enable_gqa=True
        )
        outputs.append(o.transpose(0, 1).reshape(T, -1))
    return torch.cat(outputs)


# ---------------------------------------------------------------------------------- norms and gates


def normalised(x, weight, eps):
    y = x.float()
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    return (-A_log.float().exp() * F.softplus(a.float() + dt_bias.float()))[
        None
    ], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, q_heads, v_heads, K, V):
    n, width = len(qkvz), 2 * q_heads * K + v_heads * V
    b, a = ba.split(v_heads, 1)
    return (
        qkvz[:, :width].contiguous(),
        qkvz[:, width:].reshape(n, v_heads, V),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, dim):
    return tuple(
        normalised(x.reshape(-1, dim), 1 + weight.float(), eps).to(x.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, dim, heads):
    q, gate = q_gate.view(len(q_gate), heads, 2 * dim).chunk(2, -1)
    return (
        *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, dim),
        gate.reshape(len(q_gate), -1),
    )


def fused_sigmoid_mul_cpu(x, gate):
    return x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    return (normalised(x, weight, eps) * F.silu(z.float())).to(x.dtype)


class Ops:
    """torch.ops.sgl_kernel: the functions above, and Missing for the rest."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return globals().get(name) or Missing(f"torch.ops.sgl_kernel.{name}")


# --------------------------------------------------------------------------------------- block FP8


def block_fp8_linear(input, weight, weight_scale, input_scale=None, bias=None, **_):
    """DeepGEMM's product, and in front of it the engine's quantiser if there are no scales."""
    if input_scale is None:
        heads = input.float().unflatten(1, (-1, 128))
        amax = heads.abs().amax(-1).clamp(min=1e-10)
        input_scale = amax * torch.tensor(1 / 448)
        values = heads * (torch.tensor(448.0) / amax)[..., None]
        input = values.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    x = input.float().unflatten(1, (-1, 128)) * input_scale[..., None]
    w = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    w = (w * weight_scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return (x.flatten(1) @ w.T).bfloat16()


def install_block_fp8():
    """The engine has none for a CPU without AMX."""
    from sglang.srt.layers.quantization import fp8, fp8_utils

    fp8._is_cpu = False
    for module in (fp8, fp8_utils):
        module.deepgemm_w8a8_block_fp8_linear_with_fallback = block_fp8_linear
        module.dispatch_w8a8_block_fp8_linear = lambda **_: block_fp8_linear


def install_pairs():
    """Qwen3.5's decode gets a pair of projections, as on a GPU, and the engine splits it there."""
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import qwen3_5

    qwen3_5._gdn_decode_fused_proj_conv = True
    fits = "can_use_fused_qkvzba_causal_conv1d_update_contiguous"
    setattr(gdn_backend, fits, lambda *_, **given: (False, "a CPU"))
    splits = fused_qkvzba_split_reshape_cat_contiguous_cpu
    gdn_backend.fused_qkvzba_split_reshape_cat_contiguous = splits


# ------------------------------------------------------------------- in place of CUDA in the engine


def gated_norm(self, x, z=None):
    y = normalised(x, self.weight, self.eps)
    if z is not None:
        y = y * (torch.sigmoid if self.activation == "sigmoid" else F.silu)(z.float())
    return y.to(x.dtype)


def track_all_layers(conv, ssm, slots, mask, destinations, count, **_):
    rows = mask[:count]
    for pool in (conv, ssm):
        pool[:, destinations[:count][rows].long()] = pool[:, slots[:count][rows].long()]


def track_one_layer(conv, ssm, slots, mask, destinations, count, **_):
    track_all_layers(conv[None], ssm[None], slots, mask, destinations, count)


def scatter_windows(*given):
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    HybridLinearAttnBackend._scatter_speculative_state_with_mask(*given)


def windows_overlap(_, __, breadth, kda):
    """As on a GPU, where drafts' windows share memory unless drafts fork."""
    return not kda and (breadth or 1) == 1


def pin_cpu():
    """Every CPU is one to the engine: x86 without AMX, of one NUMA node.

    It takes other branches for AMX or ARM, which want more of sgl_kernel, and asks lscpu for nodes.
    """
    torch.cpu._is_amx_tile_supported = lambda: False  # the engine asks as it is imported
    from sglang.srt import utils

    for module in (utils, utils.common):
        module.is_host_cpu_x86, module.is_host_cpu_arm64 = (lambda: True), (lambda: False)
        module.get_cpu_ids_by_node = lambda: ["0"]


libraries = []


def stub():
    """Stands in for sgl_kernel alone, as where an engine runs on Triton's kernels."""
    sys.meta_path.insert(0, Stub())
    torch.ops.sgl_kernel = Ops()
    pin_cpu()
    from sglang.srt.utils import patch_torch

    # Its operators do not exist here.
    patch_torch.register_fake_if_exists = lambda name: lambda function: function


def install():
    """Call before `import sglang`; each engine process imports the driver's module first."""
    os.environ |= dict(SGLANG_USE_CPU_ENGINE="1", SGLANG_NATIVE_MOVE_KV_CACHE="1")
    # A package index has the CUDA build, and it does not load here.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    libraries.append(library)
    torch.Tensor.pin_memory = lambda self, *_: self
    stub()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention, hybrid = (
        "sglang.srt.layers.attention.",
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.",
    )
    for target, function in {
        attention + "linear.kda_backend.causal_conv1d_fn": causal_conv1d_fn_cpu,
        hybrid + "track_mamba_states_all_layers": track_all_layers,
        hybrid + "track_mamba_states_if_needed": track_one_layer,
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward": gated_norm,
        "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward": gated_norm,
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer": lambda: (
            True
        ),
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
        "fused_conv_window_scatter_with_mask": scatter_windows,
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": lambda _: (
            None
        ),
        "sglang.srt.mem_cache.memory_pool.conv_window_dedup_enabled": windows_overlap,
    }.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    HookRegistry.register(
        attention + "torch_native_backend.TorchNativeAttnBackend.forward_extend",
        attend_to_trees,
        HookType.AROUND,
    )
