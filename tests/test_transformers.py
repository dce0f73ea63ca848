"""transformers' models, tiny and random, with and without gated_delta in their layers."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gated_delta as gd

transformers = pytest.importorskip("transformers")

from gated_delta.integrations.transformers import GDN, KDA, MODELS, Patch, Replacement, patch  # noqa: E402

VOCAB = 199
LINEAR_LAYERS = 3
PROMPTS = (70, 33, 5)  # one longer than a chunk of 64
STEPS = 16
TOLERANCE = 1e-5  # fp32 logits of about 1; measured: at most 2e-6, and as much to float64

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=LINEAR_LAYERS + 1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    max_position_embeddings=256,
    initializer_range=0.05,
    layer_types=["linear_attention"] * LINEAR_LAYERS + ["full_attention"],
)
_ATTENTION = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
_GDN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
)
_KDA = dict(linear_num_heads=3, linear_head_dim=16)
_MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
)
_MLA = dict(
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=16,
    v_head_dim=16, intermediate_size=64, moe_intermediate_size=24, num_experts_per_tok=2, n_group=1,
    topk_group=1,
)  # fmt: skip
_QWEN4_INDEXER = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=32,
    indexer_compress_ratio=4,
    hc_count=2,
    hc_lowrank=16,
)
_GLM5_INDEXER = dict(index_topk=64, index_head_dim=16, index_n_heads=2, index_kpool=4, hc_mult=2)
_GLM5_VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    out_hidden_size=48,
    image_size=28,
    projection_intermediate_size=16,
)

_KIMI = {**_COMMON, **_MLA, **_KDA}
_GLM5 = {**_KIMI, **_GLM5_INDEXER, "q_lora_rank": 16, "n_routed_experts": 4}
_GDN_DENSE = {**_COMMON, **_GDN, "intermediate_size": 64}
_GDN_MOE = {**_COMMON, **_ATTENTION, **_GDN, **_MOE}
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _GDN_MOE),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_GDN_DENSE, **_ATTENTION}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _GDN_MOE),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", {**_GDN_MOE, **_QWEN4_INDEXER}),
    "lara_mini": (
        "LaraMiniForCausalLM",
        "LaraMiniConfig",
        {**_GDN_MOE, "tie_word_embeddings": False},
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**_GDN_DENSE, "num_attention_heads": 2},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**_KIMI, "qk_rope_head_dim": 8, "num_local_experts": 4},
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        dict(text_config=_GLM5, vision_config=_GLM5_VISION),
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {**_COMMON, **_MLA, "qk_rope_head_dim": 8, "head_dim": 16, "num_local_experts": 4},
    ),
}
"""Model class, config class, config: three linear-attention layers, then one of full attention."""


class Tiny(NamedTuple):
    name: str
    model: Any
    tokens: Tensor  # generate() for the padded prompts, prompts included, without gated_delta
    logits: Tensor  # [steps, batch, VOCAB]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(f"transformers.models.{name}") is not None


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _functions() -> dict[tuple[str, str], object]:
    return {
        (name, f): getattr(_module(name), f)
        for name in MODELS
        if _installed(name)
        for f in MODELS[name]
    }


def _prompts() -> dict[str, Tensor]:
    """Left-padded prompts of unequal length."""
    width = max(PROMPTS)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in PROMPTS])
    return dict(input_ids=_ids(len(PROMPTS), width) * mask, attention_mask=mask)


def _ids(N: int, T: int) -> Tensor:
    return torch.randint(2, VOCAB, (N, T), generator=torch.Generator().manual_seed(1))


def _generate(model: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    options = dict(
        max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, do_sample=False, output_logits=True
    )
    result = model.generate(**_prompts(), **{**options, **kwargs}, return_dict_in_generate=True)
    return result.sequences, torch.stack(result.logits)


def _forward(model: Any, pieces: list[Tensor], cache: Any = None) -> tuple[Tensor, Any]:
    """Logits of all pieces, each one call that goes on from the one before it, and the cache."""
    logits = []
    with torch.inference_mode():
        for piece in pieces:
            result = model(input_ids=piece, past_key_values=cache, use_cache=True)
            logits.append(result.logits)
            cache = result.past_key_values
    return torch.cat(logits, 1), cache


def near(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def _states(cache: Any) -> list[Tensor]:
    return [
        layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")
    ]


@pytest.fixture(scope="module", params=list(TINY))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    name = request.param
    if not _installed(name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    class_name, config_name, config = TINY[name]
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    torch.manual_seed(0)
    model = getattr(_module(name), class_name)(
        getattr(configuration, config_name)(**copy.deepcopy(config))
    ).eval()
    for parameter_name, parameter in model.named_parameters():
        # transformers' initial gates decay by e**-10 a token: no state would survive.
        if parameter_name.endswith("A_log"):
            parameter.data.uniform_(0, 1)
        elif parameter_name.endswith("dt_bias"):
            parameter.data.uniform_(-4, -1)
    tokens, logits = _generate(model)
    assert all(len(set(row.tolist())) > STEPS // 2 for row in tokens[:, -STEPS:]), (
        f"{name}: degenerate tokens"
    )
    return Tiny(name, model, tokens, logits)


@pytest.fixture(autouse=True, scope="module")
def no_fla() -> Iterator[None]:
    """transformers prefers an installed FLA, and FLA does not run on a CPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "fla", None)
        yield


def test_models_are_all_of_transformers() -> None:
    """A function with such a name is one of a pair that MODELS has for its module."""
    found = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        functions = re.findall(
            r"^def (\w*(?:delta_rule|delta_attention)\w*)", file.read_text(), re.M
        )
        if functions:
            found[file.stem.removeprefix("modeling_")] = sorted(functions)
    assert found == {name: sorted(MODELS[name]) for name in MODELS if _installed(name)}


@pytest.fixture(autouse=True)
def nothing_left_patched() -> Iterator[None]:
    yield
    left = [key for key, function in _functions().items() if isinstance(function, Replacement)]
    assert not left, f"left patched: {left}"


# ------------------------------------------------------------------------------------- whole models


def test_generate_is_the_same(tiny: Tiny) -> None:
    with patch(tiny.model) as handle:
        tokens, logits = _generate(tiny.model)
    near(logits, tiny.logits)
    assert torch.equal(tokens, tiny.tokens), f"{tiny.name}: other tokens"
    ran = {row.function: row for row in handle.report()}
    chunk, recurrent = MODELS[tiny.name]
    tokens = LINEAR_LAYERS * len(PROMPTS) * max(PROMPTS)
    assert ran[chunk][2:] == (LINEAR_LAYERS, tokens, "reference", "reference.prefill", False)
    tokens = LINEAR_LAYERS * len(PROMPTS) * STEPS
    assert ran[recurrent][2:] == (
        LINEAR_LAYERS * STEPS,
        tokens,
        "reference",
        "reference.decode",
        False,
    )


def test_prompt_in_two_pieces(tiny: Tiny) -> None:
    pieces = list(_ids(2, 81).split([45, 33, 1, 1, 1], 1))
    expected, _ = _forward(tiny.model, pieces)
    with patch(tiny.model) as handle:
        logits, cache = _forward(tiny.model, pieces)
    near(logits, expected)
    assert [row.calls for row in handle.report()] == [2 * LINEAR_LAYERS, 3 * LINEAR_LAYERS], (
        tiny.name
    )
    # The cache holds our layout, so that a decode step transposes nothing.
    assert all(
        state.mT.is_contiguous() and state.dtype == torch.float32 for state in _states(cache)
    ), tiny.name
    assert len(_states(cache)) == LINEAR_LAYERS


@pytest.mark.parametrize("patched", ["prefill", "decode"])
def test_cache_from_the_other_side(tiny: Tiny, patched: str) -> None:
    prompt, *rest = _ids(2, 23).split([20, 1, 1, 1], 1)
    expected, _ = _forward(tiny.model, [prompt, *rest])
    with patch(tiny.model) if patched == "prefill" else contextlib.nullcontext():
        start, cache = _forward(tiny.model, [prompt])
    with patch(tiny.model) if patched == "decode" else contextlib.nullcontext():
        end, _ = _forward(tiny.model, rest, cache)
    near(torch.cat([start, end], 1), expected)


def test_bf16(tiny: Tiny) -> None:
    pieces = list(_ids(2, 74).split([70, 1, 1, 1, 1], 1))
    expected, _ = _forward(tiny.model, pieces)
    model = copy.deepcopy(tiny.model).bfloat16()
    plain, _ = _forward(model, pieces)
    with patch(model):
        ours, cache = _forward(model, pieces)
    assert ours.isfinite().all(), tiny.name
    assert all(state.dtype == torch.float32 for state in _states(cache)), tiny.name
    error, floor = ((x.float() - expected).square().mean().sqrt() for x in (ours, plain))
    assert error <= 1.5 * floor, (
        f"{tiny.name}: rms error {error}, and {floor} as transformers computes it"
    )


@pytest.mark.parametrize("tiny", ["qwen3_5", "kimi_linear"], indirect=True)
def test_beam_search_reorders_states(tiny: Tiny) -> None:
    options = dict(num_beams=2, max_new_tokens=6, min_new_tokens=6)
    expected, _ = _generate(tiny.model, **options)
    with patch(tiny.model):
        tokens, _ = _generate(tiny.model, **options)
    assert torch.equal(tokens, expected), tiny.name


def test_grad_is_refused(tiny: Tiny) -> None:
    with patch(tiny.model), pytest.raises(gd.UnsupportedProblem, match="no_grad"):
        tiny.model(input_ids=_ids(1, 5))


# ------------------------------------------------------------------------------------ the functions


def _call(
    functions: tuple[str, str], T: int, N: int = 2
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """A call like transformers' forward: q, k, v with time contiguous, its state layout."""
    g = torch.Generator().manual_seed(2)
    H, K, V = (4, 16, 24) if functions is GDN else (3, 16, 16)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    q, k, v = (normal(N, H, d, T).permute(0, 3, 1, 2) for d in (K, K, V))
    # Without l2norm a longer key makes the recurrence grow without bound.
    k = torch.nn.functional.normalize(k, dim=-1) * 0.9
    gates = dict(g=-normal(N, T, H, K).abs() / 4, beta=normal(N, T, H).sigmoid())
    gates["g"] = gates["g"][..., 0] if functions is GDN else gates["g"]
    return (q, k, v), gates | dict(initial_state=normal(N, H, K, V))


@pytest.fixture(params=["qwen3_5", "kimi_linear"])
def originals(request: pytest.FixtureRequest) -> Any:
    """transformers' chunk and recurrent functions, ours, and their names."""
    names = MODELS[request.param]
    before = tuple(getattr(_module(request.param), f) for f in names)
    with patch(request.param):
        yield before, tuple(getattr(_module(request.param), f) for f in names), names


@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("T", [1, 4, 16, 17, 70])
@pytest.mark.parametrize("layout", ["theirs", "ours", "none"])
@pytest.mark.parametrize("l2norm", [True, False])
def test_function(originals: Any, which: int, T: int, layout: str, l2norm: bool) -> None:
    theirs, ours, names = originals
    qkv, rest = _call(names, T)
    state: Any = rest.pop("initial_state")
    if layout == "ours":
        state = state.mT.contiguous().mT
    before = state.clone()
    given = dict(initial_state=None if layout == "none" else state, use_qk_l2norm_in_kernel=l2norm)
    o, final = theirs[which](*qkv, **rest, **given, output_final_state=True)
    got, got_final = ours[which](
        *qkv, **rest, **given, output_final_state=True, use_cache=True, output_router_logits=False
    )
    torch.testing.assert_close(got, o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_final, final, rtol=1e-5, atol=1e-5)
    assert got_final.mT.is_contiguous()
    assert torch.equal(state, before), "initial_state was written"
    assert ours[which](*qkv, **rest, **given, output_final_state=False)[1] is None


@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("lengths", [(3, 0, 5), (1, 20)])
def test_packed(originals: Any, which: int, lengths: tuple[int, ...]) -> None:
    theirs, ours, names = originals
    qkv, rest = _call(names, sum(lengths), N=1)
    state = torch.randn(
        len(lengths),
        *rest.pop("initial_state").shape[1:],
        generator=torch.Generator().manual_seed(3),
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    got, got_final = ours[which](
        *qkv, **rest, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
    )
    start = 0
    for n, length in enumerate(lengths):
        span = slice(start, start := start + length)
        if not length:
            assert torch.equal(got_final[n], state[n])
            continue
        part = dict(initial_state=state[n : n + 1], output_final_state=True)
        o, final = theirs[which](
            *(x[:, span] for x in qkv), **{name: x[:, span] for name, x in rest.items()}, **part
        )
        torch.testing.assert_close(got[:, span], o, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_final[n : n + 1], final, rtol=1e-5, atol=1e-5)


def test_compiles_without_a_break(originals: Any) -> None:
    _, ours, names = originals
    for which, T in ((0, 20), (1, 1)):
        qkv, rest = _call(names, T)

        def layer(
            *qkv: Tensor, f: Replacement = ours[which], **rest: Tensor
        ) -> tuple[Tensor, Tensor]:
            return f(*qkv, **rest, output_final_state=True, use_qk_l2norm_in_kernel=True)

        for got, expected in zip(
            torch.compile(layer, fullgraph=True, backend="eager")(*qkv, **rest),
            layer(*qkv, **rest),
            strict=True,
        ):
            torch.testing.assert_close(got, expected)
        assert ours[which].rows()[0].calls == 1


@pytest.mark.parametrize("which", [0, 1], ids=["chunk", "recurrent"])
def test_report_says_that_a_function_runs_in_a_compiled_graph(which: int) -> None:
    """Calls there are not counted; saying so may neither break the graph nor compile it again."""
    from torch._dynamo.testing import CompileCounter  # slow: not at collection

    qkv, rest = _call(GDN, 20 if which == 0 else 1)
    torch._dynamo.reset()
    graphs = CompileCounter()
    with patch("qwen3_5") as handle:
        module = _module("qwen3_5")

        @torch.compile(fullgraph=True, backend=graphs)
        def layer(*qkv: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
            return getattr(module, GDN[which])(*qkv, **rest, output_final_state=True)

        for _ in range(3):
            layer(*qkv, **rest)
        assert graphs.frame_count == 1
        rows = handle.report()
        assert [(row.calls, row.compiled) for row in rows] == [(0, i == which) for i in range(2)]
        assert str(rows[which]).endswith(
            f"{GDN[which]}: part of torch.compile graphs, where calls are not counted"
        )
        assert str(rows[1 - which]).endswith("not called")
        getattr(module, GDN[which])(*qkv, **rest)
        layer(*qkv, **rest)
        assert graphs.frame_count == 1
        row = handle.report()[which]
        assert (row.calls, row.compiled) == (1, True)
        assert str(row).endswith("; part of torch.compile graphs, where calls are not counted")
    with patch(
        "qwen3_5"
    ) as handle:  # graphs of an earlier patch are none of this one, until they are compiled for it
        assert not any(row.compiled for row in handle.report())
        layer(*qkv, **rest)
        assert handle.report()[which].compiled


# ----------------------------------------------------------------------------------------- patching


def test_undo_restores_the_same_objects() -> None:
    before = _functions()
    handle = patch()
    assert {
        key for key, function in _functions().items() if isinstance(function, Replacement)
    } == set(before)
    assert [(row.calls, row.backend) for row in handle.report()] == [(0, "")] * len(before)
    handle.undo()
    assert all(function is before[key] for key, function in _functions().items())
    later = patch("qwen3_5")
    handle.undo()  # a second time, which must not undo another's patch
    assert isinstance(_module("qwen3_5").torch_chunk_gated_delta_rule, Replacement)
    later.undo()


def test_context_restores_on_an_exception() -> None:
    before = _functions()
    with pytest.raises(ZeroDivisionError), patch():
        1 / 0  # noqa: B018
    assert _functions() == before


def test_a_handle_is_entered_once() -> None:
    before = _functions()
    handle = patch("qwen3_5")
    handle.undo()
    with pytest.raises(RuntimeError, match=r"undone already: call patch\(\) again"), handle:
        pass
    with patch("qwen3_5") as handle:
        with pytest.raises(RuntimeError, match="entered already"), handle:
            pass
        assert handle.active  # the with block around it is still patched
        handle.undo()
        assert _functions() == before
    assert _functions() == before


def test_undo_leaves_what_others_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper around ours, say: the others are restored, and the error names it."""
    module, (chunk, recurrent) = _module("qwen3_5"), GDN
    before = _functions()
    handle = patch("qwen3_5")
    ours = getattr(module, chunk)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(module, chunk, wrapper)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=f"{module.__name__}.{chunk}: replaced by something else"
        ) as raised:
            handle.undo()
        assert recurrent not in str(raised.value)
        assert getattr(module, chunk) is wrapper
        assert getattr(module, recurrent) is before["qwen3_5", recurrent]
        assert handle.active
    monkeypatch.undo()
    handle.undo()
    assert not handle.active
    assert _functions() == before


def test_undo_after_others_restored_the_original() -> None:
    before = _functions()
    with patch("qwen3_5"):
        setattr(_module("qwen3_5"), GDN[0], before["qwen3_5", GDN[0]])
    assert _functions() == before


def test_threads() -> None:
    """Of two that patch at once one does; calls of all are counted."""
    before = _functions()
    start = threading.Barrier(4)

    def try_to(_: int) -> Patch | None:
        start.wait()
        try:
            return patch("qwen3_5")
        except RuntimeError:
            return None

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            (handle,) = (x for x in pool.map(try_to, range(4)) if x is not None)
            list(pool.map(lambda _, handle=handle: handle.undo(), range(4)))
            assert _functions() == before
        qkv, rest = _call(GDN, 1)
        with patch("qwen3_5") as handle, torch.inference_mode():
            function = getattr(_module("qwen3_5"), GDN[1])
            list(pool.map(lambda _: [function(*qkv, **rest) for _ in range(50)], range(4)))
        assert [row.calls for row in handle.report()] == [0, 200]


def test_twice_is_an_error_and_others_are_not() -> None:
    with patch("qwen3_5") as handle, patch(iter(["kimi_linear"])):
        current = _functions()
        with pytest.raises(
            RuntimeError, match=r"qwen3_5\.torch_chunk_gated_delta_rule is patched already"
        ):
            patch()
        assert _functions() == current
        assert handle.active


def test_a_model_patches_its_own_modules(tiny: Tiny) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.model

    for model in (tiny.model, Wrapper()):
        with patch(model) as handle:
            assert {row.module for row in handle.report()} == {_module(tiny.name).__name__}


def test_a_subclassed_layer_counts() -> None:
    class Layer(_module("qwen3_5").Qwen3_5GatedDeltaNet):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    with patch(Layer()) as handle:
        assert {row.module for row in handle.report()} == {_module("qwen3_5").__name__}


ONE_LINE = r"^models: expected a model.*names of model modules.*or None[^\n]*got "
REFUSED = [
    *(
        (dict(models=models), ValueError, words)
        for models, words in (
            ("llama", "qwen3_next.*got 'llama'"),
            (["qwen3_5", "qwen9"], "got 'qwen9'"),
            ("", "got ''"),
            ([], "got none"),
            (iter(()), "got none"),
            (torch.nn.Linear(1, 1), "a Linear"),
        )
    ),
    *(
        (dict(models=models), TypeError, f"{ONE_LINE}{came}[^\n]*$")
        for models, came in (
            (3, "int 3"),
            ([3], "a list with int 3"),
            (["qwen3_5", None], "a list with NoneType None"),
            (b"qwen3_5", "a bytes with int 113"),
            (torch.nn.Linear, "the class Linear"),
            ([torch.nn.Linear(1, 1)], "a list with Linear"),
            (torch.zeros(()), "Tensor"),
        )
    ),
    *(
        (dict(backend=x), ValueError, "backend: expected one of auto.*got " + re.escape(repr(x)))
        for x in ("cuda", "", 3, None, ["auto"])
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), REFUSED)
def test_refused(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        patch(**arguments)


def test_backend_that_cannot_run() -> None:
    qkv, rest = _call(KDA, 3)
    with (
        patch("kimi_linear", backend="cute") as handle,
        pytest.raises(gd.UnsupportedProblem, match="cute"),
    ):
        _module("kimi_linear").chunk_kimi_delta_attention(*qkv, **rest)
    assert "not called" in str(handle.report()[0])


def test_report_prints() -> None:
    qkv, rest = _call(GDN, 3)
    with patch("qwen3_5") as handle:
        for _ in range(2):
            _module("qwen3_5").torch_chunk_gated_delta_rule(*qkv, **rest)
    lines = [str(row).rpartition(".models.")[2] for row in handle.report()]
    assert lines == [
        "qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule: "
        "2 calls, 12 tokens, backend reference, kernel reference.prefill",
        "qwen3_5.modeling_qwen3_5.torch_recurrent_gated_delta_rule: not called",
    ]


# ----------------------------------------------------------------------------------- other releases


def test_missing_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_module("olmo_hybrid"), GDN[1])
    with pytest.raises(
        RuntimeError, match=rf"modeling_olmo_hybrid of transformers .* has no function {GDN[1]}"
    ):
        patch(["qwen3_5", "olmo_hybrid"])
    assert not isinstance(_module("qwen3_5").torch_chunk_gated_delta_rule, Replacement)


def test_function_that_no_layer_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_module("qwen3_5"), "Qwen3_5GatedDeltaNet")
    with pytest.raises(RuntimeError, match="no layer that looks up torch_chunk_gated_delta_rule"):
        patch("qwen3_5")


def test_release_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "glm5" in name else find_spec(name)
    )
    with patch() as handle:
        assert not any("glm5" in row.module for row in handle.report())
    with pytest.raises(ValueError, match="got 'glm5_next'"):
        patch("glm5_next")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install gated-delta\[demo\]"):
        patch()
