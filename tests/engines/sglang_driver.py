"""One engine and its processes, for test_sglang.py; SGLANG_CASE has the case, as JSON.

Prints RESULT and, as JSON, each round's tokens and each prompt's tokens in the prefix cache. Every
process of the engine imports this file before anything else, so its top level runs in each.
"""

import asyncio
import json
import os
import random

import sglang_cpu
import sglang_states
import torch

case = json.loads(os.environ["SGLANG_CASE"])
if "amx" in case:  # as on such a CPU; sglang_cpu hides it
    torch.cpu._is_amx_tile_supported = lambda: case["amx"]
states = sglang_states.States(case["states"]) if "states" in case else None
sglang_cpu.install()
if states:
    states.hook()

from gated_delta import api, dispatch, gpus, ops
from gated_delta.integrations.engine import load as start
from gated_delta.integrations.engine import state_check
from gated_delta.integrations.engine.calls import Calls
from gated_delta.integrations.sglang import process
from gated_delta.integrations.sglang.records import decode_ring


class Written(Calls):
    """The plug-in's counts; this process also writes those of all routes to a file."""

    def count(self, *call):
        calls = super().count(*call)
        with open(os.path.join(case["reports"], str(os.getpid())), "w") as file:
            json.dump(sglang_cpu.routes(self), file)
        return calls


def record(kernels):
    """Writes the kernels loaded at the start, the kernels that calls would launch on a GPU, the
    longest prompts that prefills were told, the lengths of their parts of prompts, and whether the
    convolution read whole rows of projections."""
    labels_of = dict(looked_for=set(), needed=set(), longest=set(), parts=set(), rows=set())

    def note(kind, problem):
        labels_of[kind] |= {variant.label for variant in dispatch.variants_of(problem)}
        with open(os.path.join(kernels, str(os.getpid())), "w") as file:
            json.dump({kind: sorted(labels) for kind, labels in labels_of.items()}, file)

    def load(calls, device):
        for op, arguments in calls:
            note("looked_for", api.explain(op, **arguments).problem)

    def noted(operation, run_reference):
        def wrapped(a):
            if operation.name == "prefill":
                labels_of["parts"] |= set(a.cu_seqlens.diff().tolist())
                labels_of["longest"] |= {a.max_seqlen} - {None}
            if operation.name == "short_conv":
                labels_of["rows"] |= {"whole" if a.v.ndim == 5 else "split"}
            note("needed", operation.describe(a))
            return run_reference(a)

        return wrapped

    start.load = load
    for operation in ops.OPERATIONS.values():
        operation.run_reference = noted(operation, operation.run_reference)


def count_compared(folder):
    """Has the checking mode work out every request; writes the number of states compared."""
    state_check.SAMPLE, compare = 1, state_check.StateCheck._compare

    def counted(self, *args):
        compare(self, *args)
        with open(os.path.join(folder, str(os.getpid())), "w") as file:
            json.dump(self.compared, file)

    state_check.StateCheck._compare = counted


# With a CPU's only attention, and torch's own kernels.
if case["engine"].get("enable_deterministic_inference"):
    from sglang.srt.arg_groups import choices
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
process.state.calls = Written("sglang", process.LOG.info)
from sglang.srt.models import qwen2_moe, qwen3_next
from sglang.srt.models.deepseek_common import attention_backend_handler as latents
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

# torch_native takes the cache's latents for keys and values where no prompt has a prefix.
latents.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
sglang_cpu.install_pairs()


class Dense(qwen2_moe.Qwen2MoeMLP):
    """In place of Qwen3-Next's experts, whose kernels no CPU has here."""

    num_fused_shared_experts = 0

    def __init__(self, config, quant_config=None, prefix="", **_):
        sizes = config.hidden_size, config.intermediate_size, config.hidden_act
        super().__init__(*sizes, quant_config, reduce_results=False, prefix=prefix)

    def forward(self, x, forward_batch=None):
        return super().forward(x)


qwen3_next.Qwen2MoeSparseMoeBlock = Dense
if "block_fp8" in case:
    sglang_cpu.install_block_fp8()
if "kernels" in case:
    record(case["kernels"])
if "on_gpu" in case:
    start.gpu_of = lambda device: gpus.H200
if "check" in case:
    count_compared(case["check"])
if "ring_from" in case:  # requests
    decode_ring.heads_of = lambda configurator, layer: case["ring_from"] * layer.HV
if "backend" in case:
    process.backend_for = lambda x: case["backend"]


async def soak(engine, requests, aborts):
    """The answers to requests (prompt, tokens), all at once; every third is aborted if `aborts`."""

    async def one(n, prompt, new_tokens):
        sampling = dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        call = engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling,
            rid=f"{aborts} {n}",
        )
        task = asyncio.ensure_future(call)
        if aborts and n % 3 == 1:
            await asyncio.wait([task], timeout=0.1 * n)
            engine.tokenizer_manager.abort_request(f"{aborts} {n}")
        answer = await task
        return dict(tokens=answer["output_ids"])

    return await asyncio.gather(*(one(n, *request) for n, request in enumerate(requests)))


def soaks(engine, text):
    """Answers to requests that share beginnings and end inside blocks: in a rush, and once more."""
    rng = random.Random(0)
    requests = [
        (text[: rng.choice((64, 70, 128))] + text[n : n + rng.randrange(30)], rng.randrange(5, 70))
        for n in range(case["soak"])
    ]
    requests[0] = case["prompts"][1], 150  # the last one, alone
    rush = engine.loop.run_until_complete(soak(engine, requests, aborts=True))
    calm = engine.loop.run_until_complete(soak(engine, requests[::-1], aborts=False))
    return rush, calm[::-1]


def main():
    import sglang

    options = dict(
        model_path=case["model"],
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        max_running_requests=4,
        max_total_tokens=4096,
        max_mamba_cache_size=24,
        context_length=1024,
        chunked_prefill_size=256,
        log_level="info",
    )
    engine = sglang.Engine(**options | case["engine"])
    sampling = dict(temperature=0, max_new_tokens=case["new_tokens"], ignore_eos=True)
    rounds = []
    for number in range(3 if "states" in case else 2):
        prompts = case["prompts"]
        if number == 2:  # answers are cached, too
            prompts = [x + one["tokens"] for x, one in zip(prompts, rounds[0], strict=True)]
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        rounds.append(
            [
                dict(tokens=one["output_ids"], cached=one["meta_info"]["cached_tokens"])
                for one in outputs
            ]
        )
    if "soak" in case:
        rounds += soaks(engine, max(case["prompts"], key=len))
    print("RESULT", json.dumps(rounds), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
