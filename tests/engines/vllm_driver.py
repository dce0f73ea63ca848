"""One vLLM engine: reads a job (JSON) from stdin, writes its results to the job's file.

On a CPU vLLM has no Triton, and its convolution ignores drafts: for drafts torch replaces it.
"""

import collections
import itertools
import json
import sys
import time

import torch
import torch.nn.functional as F

CALLS = collections.Counter()
BATCHES = set()


def conv_update(
    x,
    conv_state,
    weight,
    bias,
    activation,
    *,
    conv_state_indices,
    out,
    validate_data,
    num_accepted_tokens=None,
    query_start_loc=None,
    max_query_len=1,
):
    """x [tokens, D]. With num_accepted_tokens, the state is the window ending at the last draft."""
    assert num_accepted_tokens is None or (num_accepted_tokens >= 1).all()
    bounds = list(range(len(x) + 1)) if query_start_loc is None else query_start_loc.tolist()
    out.zero_()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        slot = int(conv_state_indices[n])
        assert end - start <= max_query_len
        if start < end and slot > 0:
            first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
            held = conv_state[slot]
            window = torch.cat(
                [held[:, first : first + weight.shape[1] - 1], x[start:end].T.to(held.dtype)], 1
            )
            out[start:end] = _conv(window, weight, bias, activation).T
            rest = window[:, 1:]
            held[:, : rest.shape[1]] = rest
    return out


def _conv(window, weight, bias, activation):
    assert activation == "silu"
    y = F.conv1d(
        window.float()[None],
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=len(weight),
    )[0]
    return F.silu(y).to(window.dtype)


def stand_in(drafts):
    from llvmlite.binding import ffi
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.model_executor.models import bailing_moe_v3
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

    # numba's, with any attribute; vLLM looks for kernels in every module's values.
    library = type(ffi.lib)
    find = library.__getattr__
    library.__getattr__ = lambda self, name: (
        find(self, name) if name != "__dict__" else object.__getattribute__(self, name)
    )
    # It needs experts, and their kernels need bf16.
    Qwen3NextForCausalLM.set_moe_parameters = lambda self: None
    batch_invariant.init_batch_invariance = lambda: None  # kernels of Triton, for other layers
    # No MLA on a CPU.
    bailing_moe_v3._is_kda_layer = lambda *sizes: True
    olmo_gdn_linear_attn.set_triton_allocator = lambda device: None
    # It takes shard_id as an argument; vLLM sets it as an attribute.
    loader = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
    olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = lambda *dims: (
        lambda param, x: loader(*dims)(param, x, x.shard_id)
    )
    if drafts:
        causal_conv1d.causal_conv1d_update = conv_update


def count():
    """Counts every call of the operations, outside the plug-in."""
    from gated_delta import api

    def counted(name, f):
        def call(*args, **kwargs):
            if type(kwargs["backend"]) is str:  # a run, no question of explain
                CALLS[name] += 1
                accepted = kwargs.get("num_accepted")
                CALLS["drafts"] += name == "verify" or (name == "decode" and accepted is not None)
                # The first token is no draft.
                CALLS.update(
                    f"accepted {n - 1}" for n in ([] if accepted is None else accepted.tolist())
                )
                CALLS["norm"] += kwargs.get("norm") is not None
                CALLS["raw steps"] += name == "decode" and kwargs.get("conv") is not None
                CALLS["deterministic"] += kwargs.get("deterministic", False) is not False
                most = max(CALLS["most sequences"], len(kwargs["state_indices"]))
                CALLS["most sequences"] = most
                CALLS["whole rows"] += name == "short_conv" and args[2].ndim == 5
                CALLS["checkpoints"] += kwargs.get("checkpoint_lens") is not None
                if longest := kwargs.get("max_seqlen"):  # in chunks
                    assert 0 <= longest - int(kwargs["cu_seqlens"].diff().max()) < 64
                    CALLS["longest"] += 1
                CALLS["prefill from a state"] += name == "prefill" and bool(
                    kwargs["has_initial_state"].any()
                )
            return f(*args, **kwargs)

        return call

    for name in ("prefill", "decode", "verify", "flush", "short_conv"):
        setattr(api, name, counted(name, getattr(api, name)))


class Exporter:
    """Keeps the convolution's inputs before a checkpoint, in the checkpoint's slot."""

    def __init__(self, state_len):
        self.state_len = state_len

    def export(self, m, *, raw_qkv, conv_state, cu_seqlens):
        CALLS["windows"] += 1
        for n, (offset, slot) in enumerate(
            zip(m.checkpoint_offsets.tolist(), m.state_indices.tolist(), strict=True)
        ):
            if slot > 0 and offset >= self.state_len:
                end = int(cu_seqlens[n]) + offset
                conv_state[slot, :, : self.state_len] = raw_qkv[end - self.state_len : end].T.to(
                    conv_state.dtype
                )


def draft_from(answers):
    """Drafts of 0 to 3 tokens of the model's answer; every fifth token is wrong."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def propose(self, num_requests, asking, num_tokens, token_ids, k):
        drafts = []
        for row in range(num_requests):
            n = int(num_tokens[row])
            said = token_ids[row, :n].tolist()
            answer = next((a for a in answers if a[:n] == said), []) if row in asking else []
            drafts.append([x ^ (i % 5 == 0) for i, x in enumerate(answer[n : n + n % (k + 1)], n)])
        return drafts

    NgramProposer.batch_propose = propose


def ask_for_checkpoints():
    """vLLM 0.32 has their bookkeeping; the layers' methods and the exporter are 0.33's."""
    from vllm.model_executor.layers.mamba import abstract, checkpoint

    abstract.get_mamba_prefill_checkpoint_alignment = lambda config: 64
    abstract.get_mamba_prefill_checkpoint_grid = lambda config: config.cache_config.mamba_block_size
    checkpoint.MambaPrefillCheckpointExporter = Exporter


def refuse(layer):
    """The operations refuse that layer's calls when it is built."""
    from gated_delta import UnsupportedProblem, api
    from gated_delta.integrations.vllm import start

    explain, missing, layers = api.explain, start.missing, itertools.count()

    def refused(*args, **kwargs):
        raise UnsupportedProblem("", ("what a test says",))

    def scarce(*args):
        api.explain = refused if next(layers) == layer else explain
        try:
            return missing(*args)
        finally:
            api.explain = explain

    start.missing = scarce


def record(kernels, on_gpu):
    """Records the kernels loaded at the start and needed by calls. on_gpu: loads a GPU's."""
    from gated_delta import api, dispatch, gpus, ops
    from gated_delta.integrations.engine import load as start

    def note(kind, problem):
        kernels[kind] = sorted(
            {*kernels[kind], *(variant.label for variant in dispatch.variants_of(problem))}
        )

    def noted(operation, run_reference):
        def wrapped(a):
            note("needed", operation.describe(a))
            return run_reference(a)

        return wrapped

    def load(calls, device):
        for op, arguments in calls:
            note("looked_for", api.explain(op, **arguments).problem)

    for operation in ops.OPERATIONS.values():
        operation.run_reference = noted(operation, operation.run_reference)
    if on_gpu:
        profile_before_the_cache()
        start.gpu_of = lambda device: gpus.H200
    else:
        start.load = load


def profile_before_the_cache():
    """As a GPU's worker does."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    available = CPUWorker.determine_available_memory

    def determine_available_memory(worker):
        worker.model_runner.profile_run()
        return available(worker)

    CPUWorker.determine_available_memory = determine_available_memory


def prompts_alone():
    """As a server that sends its caches to others, on an older GPU; it decodes here all the same.

    There decode has no convolution.
    """
    from gated_delta.integrations.vllm import layers

    layers.only_prefills = lambda config: True
    layers.Qwen.raw_steps = lambda layer, pool: []


def fail(op):
    """The operation ends with an error when it is run."""
    from gated_delta import api

    original = getattr(api, op)

    def failing(*args, **kwargs):
        if type(kwargs["backend"]) is str:  # a run, no question of explain
            raise RuntimeError(f"{op}: what a test says")
        return original(*args, **kwargs)

    setattr(api, op, failing)


def preempt_every(steps):
    """As where memory is short: a request leaves, and comes back as a prompt."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, calls = Scheduler.schedule, itertools.count(1)

    def pressed(self, *args, **kwargs):
        if next(calls) % steps == 0 and len(self.running) > 1:
            self._preempt_request(self.running.pop(), time.monotonic())
            CALLS["preempted"] += 1
        return schedule(self, *args, **kwargs)

    Scheduler.schedule = pressed


def abort_at(step):
    """As for a disconnected user: the second request ends in that step, its blocks are free."""
    from vllm.v1.engine.llm_engine import LLMEngine

    original, calls = LLMEngine.step, itertools.count(1)

    def leave(self):
        if next(calls) == step:
            self.abort_request([list(self.output_processor.request_states)[1]], internal=True)
            CALLS["aborted"] += 1
        return original(self)

    LLMEngine.step = leave


def poison():
    """Fills the states' memory with NaN, but for vLLM's null block."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    bind = MambaBase.bind_kv_cache

    def poisoned(self, kv_cache):
        bind(self, kv_cache)
        for states in self.kv_cache:
            states[1:].fill_(torch.nan)

    MambaBase.bind_kv_cache = poisoned


def rank(worker):
    """The report of a worker's process."""
    from gated_delta.integrations import vllm as plugin

    return [row._asdict() for row in plugin.report()]


def watch():
    """Records the kinds of batches."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder as Builder

    def noted(build):
        def watched(*args, **kwargs):
            m = build(*args, **kwargs)
            kinds = dict(prefill=m.num_prefills, decode=m.num_decodes, drafts=m.num_spec_decodes)
            BATCHES.add("+".join(kind for kind, n in kinds.items() if n))
            if m.num_spec_decodes:
                CALLS["blocks a request"] = m.spec_state_indices_tensor.shape[1]
            return m

        return watched

    start = Builder.__init__

    def begin(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.build = noted(self.build)  # Kimi K3's builder has a build of its own

    Builder.__init__ = begin


def gap(candidates):
    """Log probability of the most likely token over that of the next."""
    best, second = sorted((x.logprob for x in candidates.values()), reverse=True)[:2]
    return best - second


def main():
    job = json.load(sys.stdin)
    if "version" in job:
        import vllm

        vllm.__version__ = job["version"]
    if "grid" in job:
        ask_for_checkpoints()
    if "answers" in job:
        draft_from(job["answers"])
    if "preempt_every" in job:
        preempt_every(job["preempt_every"])
    if "abort_at" in job:
        abort_at(job["abort_at"])
    if "poison" in job:
        poison()
    if "fail" in job:
        fail(job["fail"])
    if "refuse" in job:
        refuse(job["refuse"])
    if "prompts_alone" in job:
        prompts_alone()
    kernels = dict(looked_for=[], needed=[])
    record(kernels, job.get("on_gpu"))
    stand_in("speculative_config" in job["engine"] and not job.get("own_convolution"))
    count()
    watch()
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, **job["engine"])
    options = dict(detokenize=False, ignore_eos=True, logprobs=job.get("logprobs"))
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], **options)
    prompts = [dict(prompt_token_ids=p) for p in job["prompts"]]
    rounds = []
    for n in range(job["rounds"]):
        if "alone" in job and n == 0:
            first = prompts[: job["alone"]]
            outputs = [llm.generate([p], sampling, use_tqdm=False)[0] for p in first]
        else:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append(
            dict(
                tokens=[list(o.outputs[0].token_ids) for o in outputs],
                cached=[o.num_cached_tokens for o in outputs],
                gaps=[[gap(x) for x in o.outputs[0].logprobs or ()] for o in outputs],
            )
        )
    from gated_delta.integrations import vllm as plugin

    results = dict(
        rounds=rounds,
        calls=CALLS,
        batches=sorted(BATCHES),
        report=[row._asdict() for row in plugin.report()],
    )
    results |= dict(kernels=kernels, ranks=llm.collective_rpc(rank) if "ranks" in job else [])
    with open(job["result"], "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main()
