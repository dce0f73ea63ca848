"""benchmarks/serve.py and tokens.py with a stand-in of SGLang: processes, cells, records."""

import contextlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import draws, process, serve, tokens
from benchmarks.__main__ import app

ENGINE = """
import gzip, json, os

def kernel(name, dur):
    return dict(cat="kernel", name=name, dur=dur)

class Engine:
    def __init__(self, model_path, **options):
        config = json.load(open(os.path.join(model_path, "config.json")))
        self.heads = config["linear_num_value_heads"]
        self.ours = options.get("linear_attn_decode_backend") == "gated_delta"
        self.fails = options.get("tp_size") == 2
        assert (options.get("load_format") == "dummy") != model_path.endswith("tiny_qwen3_5")
        assert options["page_size"] == 64
        print("gated_delta runs decode" if self.ours else "Triton runs decode", flush=True)
        self.drafts = options.get("speculative_algorithm")
        if os.environ.get("GATED_DELTA_SGLANG_KVBUFFER") == "1":
            print("gated_delta keeps drafts in 0.1 GiB", flush=True)
        if self.ours and (FAILS or self.fails):
            raise MemoryError("no room")
    def start_profile(self, output_dir, activities, with_stack, record_shapes):
        assert activities == ["GPU"]
        self.directory, self.events = output_dir, []
    def stop_profile(self):
        with gzip.open(os.path.join(self.directory, "1-TP-0.trace.json.gz"), "wt") as file:
            json.dump(dict(traceEvents=self.events), file)
        with gzip.open(os.path.join(self.directory, "1-TP-1.trace.json.gz"), "wt") as file:
            json.dump(dict(traceEvents=[kernel("gated_delta", 1e9)]), file)
    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        n = sampling_params["max_new_tokens"]
        prompt = kernel("kernel_gated_delta_scan" if self.ours else "chunk_fwd_kernel_o", 100)
        name = "kernel_gated_delta_decode" if self.ours else "fused_delta_rule_kernel"
        step = kernel(name, 4 - self.ours)
        copy = dict(cat="gpu_memcpy", name="Memcpy", dur=1)
        rest = [kernel("gemm", 10), copy, dict(cat="cpu_op", name="x")]
        head = [kernel("gemm", 7), kernel("moe", 5)]
        if self.drafts == "NEXTN":  # kernels of a graph's launch have one correlation
            step, rest = [x | dict(args=dict(correlation=1)) for x in [step, *rest]], []
            step += [x | dict(args=dict(correlation=2)) for x in head]
        else:
            step = [step]
        events, at = [prompt, *rest] + [*step, *rest] * (n - 1), 0
        self.events = [event | dict(ts=(at := at + 1000)) for event in events]
        if folder := os.environ.get("BENCHMARKS_LAUNCHES"):
            with open(os.path.join(folder, "7"), "a") as file:
                times = [1, 2, 2.25, 2.5, 2.75, 4]
                rows = zip(times, [0] + [len(input_ids)] * 4 + [0], strict=True)
                file.writelines(f"{time} {n}\\n" for time, n in rows)
        outputs, logprob = [], -0.1 - 0.01 * self.ours
        for prompt in input_ids:
            ids = [prompt[0]] * (n - self.ours) + [self.heads] * self.ours
            top = [[(logprob, token, None), (-0.3, self.heads, None)] for token in ids]
            info = dict(output_top_logprobs=top[:n]) if return_logprob else {}
            if self.drafts:
                info["spec_verify_ct"] = (n - 1) * 2 // 5
            outputs.append(dict(output_ids=ids, meta_info=info))
        return outputs
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    def install(fails=False):
        (tmp_path / "sglang.py").write_text(ENGINE.replace("FAILS", str(fails)))
        info = tmp_path / "sglang-0.5.23.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
        path = [str(tmp_path), str(Path(__file__).parents[1]), *sys.path]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


class Sides(contextlib.ExitStack):
    """Both processes, by `plugin`, and what they log."""

    def __enter__(self):
        self.logs = {False: [], True: []}
        return super().__enter__()

    def begin(self, engine="sglang", model="qwen3_next"):
        return {plugin: self.side(engine, model, plugin) for plugin in self.logs}

    def side(self, engine, model, plugin):
        options, said = dict(page_size=64), self.logs[plugin].append
        side = self.enter_context(serve.process(engine, model, plugin, options, said))
        assert side.start() > 0
        return side


def test_both_kernels_are_measured_in_every_cell_asked_for(engine):
    engine()
    labels = [label for label in serve.CELLS if label.endswith(" x 512")][:2]
    with Sides() as stack:
        sides = stack.begin()
        samples = [x for label in labels for x in serve.measure(sides, serve.CELLS[label])]
        assert [side.ask(ranks=True) for side in sides.values()] == [dict(ranks=[])] * 2
    assert stack.logs == {False: [], True: ["gated_delta runs decode"]}
    assert [sample["plugin"] for sample in samples] == [False, True] * 2
    records = serve.compared(samples)
    assert [record["label"] for record in records] == labels == ["1 x 512", "8 x 512"]
    for record in records:
        assert (record["equal_tokens"], record["tokens"]) == (
            serve.NEW_TOKENS - 1,
            serve.NEW_TOKENS,
        )
        assert (
            record["ttft_ratio"] == record["ttft_ms"]["engine"] / record["ttft_ms"]["gated_delta"]
        )
        kernels = {
            "prefill recurrence": (100, 100),
            "prefill projections": (10, 10),
            "prefill copies": (1, 1),
            "prefill all": (111, 111),
            "decode recurrence": (4, 3),
            "decode projections": (10, 10),
            "decode copies": (1, 1),
            "decode all": (15, 14),
        }
        gaps = {name: record["kernels_us"].pop(name) for name in ("prefill gap", "decode gap")}
        assert record["kernels_us"] == {
            name: dict(engine=a, gated_delta=b) for name, (a, b) in kernels.items()
        }
        for step, wall in (("prefill", record["ttft_ms"]), ("decode", record["tpot_ms"])):
            for side, ms in wall.items():
                busy = record["kernels_us"][f"{step} all"][side]
                assert gaps[f"{step} gap"][side] == pytest.approx(1e3 * ms - busy)


def test_sides_are_timed_in_turns(monkeypatch):
    """A round that is slow for both, and one that warms up, change no time."""
    asked = []

    class Side:
        def __init__(self, plugin):
            self.plugin, self.job = plugin, dict(options={})

        def ask(self, repeat, profile=None, **_):
            asked.append((self.plugin, repeat))
            slow = 1 + 9 * (repeat < 2)
            times = dict(first_s=0.1 * slow, whole_s=0.1 * slow + 0.64 * slow, tokens=[repeat])
            return {"prefill all": 1e3, "decode all": 1e3} if profile else times

    own, ours = serve.measure({False: Side(False), True: Side(True)}, serve.CELLS["1 x 512"])
    turns = [(plugin, i) for i in range(serve.ROUNDS + 1) for plugin in (False, True)]
    assert asked[: len(turns)] == turns
    assert own["ttft_ms"] == ours["ttft_ms"] == pytest.approx(100)
    assert own["tpot_ms"] == pytest.approx(10)
    assert own["kernels_us"]["decode gap"] == pytest.approx(9000)


def test_a_failing_engine_is_an_error(engine):
    engine(fails=True)
    with pytest.raises(RuntimeError, match=r"(?s)sglang ended with 1.*no room"), Sides() as stack:
        stack.begin()


def stand_in(tmp_path, monkeypatch, *lines):
    """Engines are this shell script, which has read its job; $3 is its pipe for answers."""
    (tmp_path / "engine").write_text("\n".join(["#!/bin/sh", "read job", *lines, ""]))
    (tmp_path / "engine").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "engine"))


def test_an_engine_ends_when_the_command_does(tmp_path, monkeypatch):
    """What it writes elsewhere is no answer."""
    noise, answer = """echo '{"start_s": 0}'""", """echo '{"start_s": 1}' > /proc/self/fd/$3"""
    stand_in(tmp_path, monkeypatch, "echo gated_delta", noise, answer, "exec sleep 30")
    began, stack = time.monotonic(), Sides()
    with contextlib.suppress(KeyboardInterrupt), stack:
        stack.begin()
        raise KeyboardInterrupt
    assert stack.logs[True] == ["gated_delta"]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("deaf", [False, True])
def test_an_engine_that_does_not_answer_ends(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr(process, "STOPS_S", 0.3)
    hear = "trap '' TERM" if deaf else "echo SlowError: no answer"
    stand_in(tmp_path, monkeypatch, hear, "exec sleep 30")
    began = time.monotonic()
    with serve.process("sglang", "qwen3_next", True, {}, print) as engine:
        ended = r"(?s)ended with -9" if deaf else r"(?s)ended with -15.*no answer"
        with pytest.raises(RuntimeError, match=ended):
            engine.start(0.3)
    assert time.monotonic() - began < 20


VLLM = """
import importlib

class LLM:
    def __init__(self, worker_extension_cls, **options):
        module, _, name = worker_extension_cls.rpartition(".")
        self.worker = getattr(importlib.import_module(module), name)()
    def collective_rpc(self, method):
        assert isinstance(method, str), "vLLM sends no function to another process"
        return [getattr(self.worker, method)()] * 2

SamplingParams = dict
"""


def test_vllms_workers_report_by_a_methods_name(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    path = [str(tmp_path), str(Path(__file__).parents[1]), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with Sides() as stack:
        assert stack.begin("vllm")[True].ask(ranks=True) == dict(ranks=[[], []])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("kernel_cutlass_kernel_gated_deltakernelsdecodeDecode_object_at__", "recurrence"),
        ("fused_recurrent_gated_delta_rule_packed_decode_kernel", "recurrence"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "recurrence"),
        ("chunk_kda_fwd_kernel_intra_sub_chunk", "recurrence"),
        ("merge_16x16_to_64x64_inverse_kernel", "recurrence"),
        ("l2norm_fwd_kernel", "recurrence"),
        ("fused_gdn_gating_kernel", "recurrence"),
        ("_fused_post_conv_kernel", "recurrence"),
        ("_gather_initial_states_kernel", "recurrence"),
        ("_causal_conv1d_update_kernel", "convolution"),
        ("fused_qkvzba_split_reshape_cat_kernel", "split"),
        ("_gdn_mtp_gated_rmsnorm_kernel", "gated norm"),
        ("layer_norm_gated_fwd_kernel", "gated norm"),
        ("fused_moe_kernel", "experts"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "projections"),
        ("_fwd_kernel", "attention"),
        ("cross_device_reduce_1stage", "all-reduce"),
        ("void at::native::vectorized_elementwise_kernel<4>", "copies"),
        ("rmsnorm_kernel", None),
    ],
)
def test_a_kernel_counts_for_its_kind(kernel, kind):
    assert serve.kind(kernel) == kind


def test_distinct_experts_are_counted_in_each_layer():
    """Two tokens, two layers: the router of the second one sends both to the same experts."""
    assert serve.distinct([[[0, 1], [4, 5]], [[1, 2], [5, 4]]]) == [3, 2]


def test_overlapping_kernels_count_once():
    """In any order of the trace."""
    events = [(10, 5), (0, 4), (3, 6), (30, 1), (11, 2)]
    assert serve.busy(dict(ts=ts, dur=dur) for ts, dur in events) == 9 + 5 + 1
    assert serve.busy([]) == 0


def test_a_profile_without_a_trace_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="left no trace"):
        serve.profiled(tmp_path)


def test_cells_fit_a_card():
    assert serve.CELLS["256 x 4096"].tokens <= serve.MAX_TOKENS < 64 * 32768
    assert "64 x 32768" not in serve.CELLS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "nothing"], "filter"),
        (["--filter", "["], "expected a regular expression"),
        (["--model", "nothing"], "expected a model of qwen3_next"),
        (["--options", "[1]"], "expected a JSON object"),
        (["--options", "{"], "expected a JSON object"),
    ],
)
def test_wrong_options_are_refused(arguments, words, tmp_path):
    result = CliRunner().invoke(app, ["serve", "sglang", str(tmp_path / "new.json"), *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("by", ["ngram", "head"])
def test_steps_of_every_side_are_measured(by, engine, tmp_path, environment):
    """A step of drafts is a verify; kernels and time are those of a step, not of a token."""
    engine()
    file, sides = tmp_path / "new.json", "states,drafts folded seldom"
    arguments = ["--filter", "^16 x 512", "--sides", sides, "--repeats", "1"]
    options = ["--options", '{"page_size": 64}', "--drafts", by]
    result = CliRunner().invoke(app, ["steps", str(file), *arguments, *options])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["runs"][0]["drafts"] == by
    states, drafts = content["samples"]
    assert (states["side"], drafts["side"]) == tuple(sides.split(","))
    assert (states["tokens_a_step"], drafts["tokens_a_step"]) == (1, 2.5)
    assert states["kernels_us"]["recurrence"] == pytest.approx(3)
    assert drafts["kernels_us"]["recurrence"] == pytest.approx(3 * 2.5)
    head = drafts["kernels_us"].get("draft head", 0)
    assert head == pytest.approx(12 * 2.5 if by == "head" else 0)
    assert drafts["kernels_us"]["all"] == pytest.approx(14 * 2.5 + head)
    assert drafts["kernels_us"]["projections"] == pytest.approx(10 * 2.5)
    assert "draft head" not in states["kernels_us"]
    for sample in (states, drafts):
        assert sample["step_ms"] == pytest.approx(250)
        assert sample["tpot_ms"] == pytest.approx(sample["step_ms"] / sample["tokens_a_step"])
    keeps = "gated_delta keeps drafts in 0.1 GiB"
    assert [keeps in log for log in content["logs"].values()] == [False, True]
    assert f"drafts folded seldom: {keeps}" in result.output


def test_sides_that_do_not_start_leave_the_others(engine, tmp_path, environment):
    engine(fails=True)
    file = tmp_path / "new.json"
    result = CliRunner().invoke(
        app, ["steps", str(file), "--sides", "ring", "--options", '{"page_size": 64}']
    )
    assert result.exit_code == 1
    assert "ring: sglang ended with" in result.output
    assert json.loads(file.read_text())["samples"] == []
    for wrong in (["--sides", "rings"], ["--filter", "^8 x"], ["--drafts", "mtp"]):
        assert CliRunner().invoke(app, ["steps", str(file), *wrong]).exit_code == 2


def test_drawn_drafts_are_lines_and_requests_accept_in_turn():
    """Over a cycle of rounds every request accepts as many, and not as many as its neighbour."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    tokens = numpy.arange(100, 108)
    original = lambda corpus, requests: (tokens, numpy.zeros(32, dtype=bool))
    drafts, mask = draws.draft(original, None, ["a", "b"])
    assert drafts.reshape(2, 4)[:, 0].tolist() == [100, 104]
    assert (mask.reshape(2, 4, 4) == numpy.tril(numpy.ones((4, 4), dtype=bool))).all()
    counts = torch.zeros(2, len(draws.TOKENS), dtype=torch.int32)
    for round in range(len(draws.TOKENS)):
        predict, index = torch.full((8,), -1), torch.full((2, 4), -1, dtype=torch.int32)
        found = draws.accept(None, index, predict, counts[:, round], None)
        kept = [[place for place in row if place >= 0] for row in found.tolist()]
        assert kept == [list(range(4 * n, 4 * n + c + 1)) for n, c in enumerate(counts[:, round])]
        assert (predict >= 0).all()
    assert counts.sum(1).tolist() == [sum(draws.TOKENS) - len(draws.TOKENS)] * 2
    assert (counts[0] != counts[1]).all()


def test_drafts_of_a_head_are_drawn_and_its_steps_timed(tmp_path, monkeypatch):
    """The first token of each line stays. Prompts, other batches and idle ends are no steps."""
    torch = pytest.importorskip("torch")
    batch = SimpleNamespace(draft_token=torch.full((8,), -1))
    assert draws.draft_of_head(lambda worker, batch: batch, None, batch) is batch
    drawn = batch.draft_token.view(2, 4)
    assert (drawn[:, 0] == -1).all()
    assert (drawn[:, 1:] >= 0).all()

    monkeypatch.setenv(draws.LAUNCHES, str(tmp_path))
    draws.launched.cache_clear()
    times = iter([0, 1, 1.5, 2, 9, 10, 10.5, 20])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    for n, decodes in (
        (2, False),
        (2, True),
        (2, True),
        (2, True),
        (1, True),
        (2, False),
        (2, True),
    ):
        mode = SimpleNamespace(is_decode=lambda decodes=decodes: decodes)
        given = SimpleNamespace(reqs=[None] * n, forward_mode=mode)
        assert draws.launch(lambda *x, **_: x[1], None, given, pp_proxy_tensors=None) is given
    assert draws.step_s(tmp_path, 2) == 0.5
    with pytest.raises(RuntimeError, match="steps of 2 requests"):
        draws.step_s(tmp_path, 2)  # read, and emptied


@pytest.mark.parametrize("command", ["serve", "tokens"])
@pytest.mark.parametrize("missing", ["engine", "device"])
def test_a_missing_engine_or_device_is_refused_in_one_line(
    missing, command, engine, tmp_path, monkeypatch
):
    if missing == "device":
        engine()
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("torch.cuda._lazy_init", no_device)
    elif importlib.util.find_spec("sglang"):
        pytest.skip("sglang is installed")
    result = CliRunner().invoke(app, [command, "sglang", str(tmp_path / "new.json")])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert (
        "sglang is not installed" if missing == "engine" else "expected a CUDA device"
    ) in result.stderr
    assert not (tmp_path / "new.json").exists()


def no_device():
    raise RuntimeError("No CUDA GPUs are available")


def sample(plugin, ttft, tpot=2.0, kernels=1500.0, cell="1 x 512"):
    us = {"decode all": kernels, "decode gap": 1e3 * tpot - kernels}
    times = dict(ttft_ms=ttft, tpot_ms=tpot, kernels_us=us)
    return dict(times, plugin=plugin, cell=cell, tokens=[1, 2])


def test_starts_give_medians_ranges_and_a_verdict():
    own = [sample(False, x, y) for x, y in ((9.0, 2.0), (30.0, 3.0), (10.0, 1.9))]
    ours = [sample(True, x, y, 1400.0) for x, y in ((8.0, 1.8), (7.0, 2.5), (8.5, 1.7))]
    alone = sample(False, 1.0, cell="8 x 512")
    (record,) = serve.compared([*own, alone, *ours])
    assert (record["label"], record["starts"]) == ("1 x 512", dict(engine=3, gated_delta=3))
    assert record["ttft_ms"] == dict(engine=10.0, gated_delta=8.0)
    assert (record["ttft_ratio"], record["tpot_ratio"]) == (1.25, pytest.approx(2.0 / 1.8))
    assert record["kernels_us"]["decode gap"] == dict(engine=500.0, gated_delta=400.0)
    assert record["spread"]["tpot_ms"] == dict(engine=[1.9, 3.0], gated_delta=[1.7, 2.5])
    assert record["verdict"] == {
        "ttft_ms": "ahead",
        "tpot_ms": "within",
        "decode all": "ahead",
        "decode gap": "within",
    }
    swapped = [dict(x, plugin=not x["plugin"]) for x in (*own, *ours)]
    assert serve.compared(swapped)[0]["verdict"]["decode all"] == "behind"
    (record,) = serve.compared([*own, *ours[:2]])
    assert set(record["verdict"].values()) == {None}


def measure(file, *more, engine="sglang"):
    """The exit code of the command, and its file's content."""
    arguments = ["serve", engine, str(file), "--options", '{"page_size": 64}', *more]
    result = CliRunner().invoke(app, arguments)
    return result, json.loads(file.read_text())


@pytest.fixture
def environment(monkeypatch):
    """The facts of a run, which a test may change."""
    facts = dict(date="today", commit="1", peers=dict(sglang="0.5.23"))
    monkeypatch.setattr("benchmarks.__main__.environment", lambda device, peers: dict(facts))
    return facts


def test_the_file_has_a_line_for_every_cell_and_start(engine, tmp_path, environment):
    engine()
    file = tmp_path / "new.json"
    result, content = measure(file, "--filter", "^1 x 512")
    assert result.exit_code == 0, result.output
    assert content["runs"][0]["peers"] == {"sglang": "0.5.23"}
    assert [start["log"] for start in content["starts"]] == [[], ["gated_delta runs decode"]]
    assert all(start["start_s"] > 0 for start in content["starts"])
    assert [cell["label"] for cell in content["cells"]] == ["1 x 512"]
    assert sum(line.startswith('  {"label"') for line in file.read_text().splitlines()) == 1
    assert sum(line.startswith('  {"start"') for line in file.read_text().splitlines()) == 2


def test_starts_go_on_in_turns_where_the_file_ends(engine, tmp_path, environment):
    """A call ended in the second start, behind its first cell."""
    engine()
    file, cells = tmp_path / "new.json", ("--filter", "^(1|8) x 512")
    _, content = measure(file, *cells, "--starts", "2")
    lost = [content["samples"].pop() for _ in range(2)]
    assert [sample["cell"] for sample in lost] == ["8 x 512"] * 2
    file.write_text(json.dumps(content))
    environment["date"] = "tomorrow"
    result, content = measure(file, *cells, "--starts", "3")
    assert result.exit_code == 0, result.output
    assert [start["plugin"] for start in content["starts"]] == [False, True] * 4
    assert [start["run"] for start in content["starts"]] == [0] * 4 + [1] * 4
    measured = [(sample["start"], sample["cell"]) for sample in content["samples"][6:]]
    assert measured == [(4, "8 x 512"), (5, "8 x 512")] + [
        (i, cell) for cell in ("1 x 512", "8 x 512") for i in (6, 7)
    ]
    assert [cell["starts"] for cell in content["cells"]] == [dict(engine=3, gated_delta=3)] * 2
    assert "ahead" in result.output  # the kernels of the stand-in always take the same time


@pytest.mark.parametrize("change", ["commit", "model", "options"])
def test_starts_of_other_code_or_models_are_not_mixed(change, engine, tmp_path, environment):
    engine()
    file, more = tmp_path / "new.json", ["--filter", "^1 x 512"]
    measure(file, *more)
    before = file.read_text()
    if change == "commit":
        environment["commit"] = "2"
    more += dict(model=["--model", "kimi_linear"], options=["--options", "{}"]).get(change, [])
    result, _ = measure(file, *more)
    assert result.exit_code == 2
    assert f"has starts with another {change}" in " ".join(result.output.replace("│", "").split())
    assert file.read_text() == before


def test_nothing_is_measured_if_ours_fail(engine, tmp_path, environment):
    engine(fails=True)
    arguments = ["serve", "sglang", str(tmp_path / "new.json"), "--options", '{"page_size": 64}']
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no room" in str(result.exception)
    assert not (tmp_path / "new.json").exists()


# ----------------------------------------------------------------------------------------- tokens


def answer(tokens, *top):
    return [tokens, [[list(pair) for pair in pairs] for pairs in top]]


def test_answers_part_at_the_first_different_token():
    same = answer([7, 8], [(7, -0.1), (9, -2.0)], [(8, -0.5), (9, -0.625)])
    tie = answer([7, 9], [(7, -0.2), (9, -1.0)], [(9, -0.5), (8, -0.625)])
    far = answer([5, 5], [(5, -0.1), (4, -4.0)], [(5, -0.1), (4, -4.0)])
    results = tokens.compared([same, same, same], [same, tie, far])
    assert results == dict(
        prompts=3,
        equal=1,
        tokens=2,
        parted=[None, 0.125],
        deviation=dict(mean=pytest.approx(0.1 / 3), largest=pytest.approx(0.1)),
    )


def test_answers_may_lack_log_probabilities():
    own = answer([7, 8], [(7, -0.1), (9, -2.0)], [(8, -0.5), (9, -0.75)])
    assert tokens.compared([own], [answer([7, 9])])["parted"] == [0.25]
    assert tokens.compared([own], [answer([7, 8])]) == dict(
        prompts=1, equal=1, tokens=2, parted=[], deviation=None
    )


def test_prompts_are_pieces_of_text_and_always_the_same():
    prompts = tokens.prompts(50)
    assert prompts == tokens.prompts(60)[:50]
    assert {8 <= len(prompt) <= tokens.LONGEST for prompt in prompts} == {True}
    assert "statement" in "".join(bytes(prompt).decode(errors="ignore") for prompt in prompts)


def test_tokens_of_every_start_are_compared(engine, tmp_path, monkeypatch):
    """A failed start has a row too, and sets the exit code."""
    engine()
    monkeypatch.setattr("benchmarks.__main__.environment", lambda device, peers: dict(peers=peers))
    file = tmp_path / "new.json"
    starts = ["--also", '{"speculative_algorithm": "NGRAM"}', "--also", '{"tp_size": 2}']
    arguments = [
        "tokens",
        "sglang",
        str(file),
        "--count",
        "3",
        "--new-tokens",
        "4",
        "--options",
        '{"page_size": 64}',
        *starts,
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    own, ours, drafts, failed = json.loads(file.read_text())["cells"]
    assert (own["label"], own["equal"], own["log"]) == ("sglang {}", 3, [])
    assert own["deviation"] == dict(mean=0, largest=0)
    assert (ours["label"], ours["equal"], ours["prompts"], ours["tokens"]) == (
        "gated_delta {}",
        0,
        3,
        4,
    )
    assert ours["log"] == ["gated_delta runs decode"]
    assert ours["parted"] == [pytest.approx(0.2)] * 3
    assert ours["deviation"]["largest"] == pytest.approx(0.01)
    assert (drafts["parted"], drafts["deviation"]) == (ours["parted"], None)
    assert failed["equal"] is None
