"""The demo: its output, wrong results, odd prompts and terminals."""

import functools
import importlib
import inspect
import io
import math
import re

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gated_delta import UnsupportedProblem, reference
from gated_delta.cli import app

pytest.importorskip("transformers")

from gated_delta import demo

CPU, MODEL = torch.device("cpu"), demo.MODEL
runner = CliRunner()


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Speeds are not tested here."""
    monkeypatch.setattr(demo, "TURNS", 2)
    monkeypatch.setattr(demo, "TIMED", 4)


def run(*arguments):
    return runner.invoke(app, ["demo", *arguments, "--device", "cpu"])


def shown(prompt="Lambda", length=3, backend="auto", width=160, **options):
    """The demo's output, and True if all comparisons passed."""
    console = Console(file=io.StringIO(), width=width)
    passed = demo.show(prompt, length, backend, CPU, console, **options)
    return console.file.getvalue(), passed


def test_it_gives_the_same_text_and_follows_requests():
    result = run("The while statement", "--length", "24")
    assert result.exit_code == 0, result.stdout
    for words in (
        "The while statement",
        "On a CPU, on the PyTorch reference backend, the demo proves equality",
        "24 of 24 bytes",
        "plain, medians of 2 runs; no gain expected",
        "relative error against float64; limit 1e-05",
        "tokens in one call; token loop",
        "no bit of a state changes",
        "0 to 4 drafts accepted, the others rolled back",
        "18,624 bytes: as states they take 786,432, 42 times as many",
        "All comparisons are equal within their limits",
    ):
        assert words in " ".join(result.stdout.split()), words
    assert "WRONG" not in result.stdout
    assert len(result.stdout.splitlines()) <= 22


@pytest.mark.parametrize(
    ("op", "broken", "line"),
    [
        (
            "flush",
            lambda right: (
                lambda *, num_accepted, **rest: right(num_accepted=num_accepted + 1, **rest)
            ),
            "flush",
        ),
        (
            "verify",
            lambda right: lambda tokens, **rest: right(tokens._replace(v=1.001 * tokens.v), **rest),
            "verify",
        ),
        (
            "prefill",
            lambda right: (
                lambda tokens, **rest: right(tokens._replace(beta=1.1 * tokens.beta), **rest)
            ),
            "accuracy",
        ),
    ],
)
def test_it_fails_when_an_operation_is_wrong(monkeypatch, op, broken, line):
    monkeypatch.setattr(reference, op, broken(getattr(reference, op)))
    result = run("x", "--length", "2")
    assert result.exit_code == 1
    assert re.search(rf"(?m)^{line} +WRONG", result.stdout)
    assert "Not all is equal" in result.stdout


def test_writes_by_verify_or_to_other_slots_fail(monkeypatch):
    def verify(tokens, *, state, right=reference.verify, **rest):
        right(tokens, state=state, **rest)
        state[4, 0, 0, 0] += 1e-7

    monkeypatch.setattr(reference, "verify", verify)
    text, passed = shown()
    assert not passed
    assert re.search("WRONG: outputs .*: 4 draft tokens each; no bit of a state changes", text)
    monkeypatch.undo()

    def flush(*, state, right=reference.flush, **rest):
        right(state=state, **rest)
        state[0] = 0

    monkeypatch.setattr(reference, "flush", flush)
    text, passed = shown()
    assert not passed
    assert re.search("WRONG: states .*: 0 to 4 drafts accepted", text)


def test_logits_are_compared_up_to_the_first_changed_byte(monkeypatch):
    """Bytes after a changed one do not count; NaN and wrong logits always fail."""
    logits = torch.eye(256)[[1, 2, 3]]
    close, off = logits.clone(), logits.clone()
    close[1, 9], close[2] = 1.001, 7.0
    off[0] *= 1.1
    plain, turned, wrong, nothing = (
        demo.Generation(bytes(x.argmax(-1).tolist()), x, 1.0, 1.0)
        for x in (logits, close, off, logits * math.nan)
    )
    assert demo.compare(plain, plain) == (3, 0.0)
    assert demo.compare(turned, plain)[0] == 1
    assert demo.compare(turned, plain)[1] == pytest.approx(1.001 / 2**0.5)
    assert demo.compare(wrong, plain) == (3, pytest.approx(0.1 / 3**0.5))
    monkeypatch.setattr(demo, "life_of_a_request", lambda *_: [])
    for other, passes in ((plain, True), (turned, True), (wrong, False), (nothing, False)):
        texts = iter([plain, other] * (1 + demo.TURNS))
        monkeypatch.setattr(demo, "generate", lambda *_, texts=texts: next(texts))
        monkeypatch.setitem(demo.LOGITS, torch.float32, 0.05 if other is not turned else 1.0)
        text, passed = shown()
        assert passed == passes
        assert ("WRONG" in text) != passes
        assert ("unpatched:" in text) == (other.output != plain.output)
        assert ("two nearly tie, their logits 1.000 and 0.000" in text) == (other is turned)


def test_in_the_precision_of_a_gpu():
    assert demo.precision(torch.device("cuda")) == torch.bfloat16
    text, passed = shown(length=12, dtype=torch.bfloat16)
    assert passed, text
    assert "in bf16" in text


PROMPTS = {
    "one byte": "x",
    "one byte in, one out": " ",
    "non-ASCII": "Größe, \u4f60\u597d \U0001f600",
    "long": "The for statement. " * 158,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_odd_prompts(prompt):
    text, passed = shown(prompt, 1 if prompt == " " else 2)
    assert passed, text
    assert " ".join(prompt.split())[:20] in text


def test_one_byte_has_no_decode_speed():
    text, passed = shown(length=1)
    assert passed
    assert "1 of 1 bytes" in text
    assert "nan" not in text


def test_a_text_cannot_control_the_terminal(monkeypatch):
    monkeypatch.setattr(demo.Generation, "text", "a\x1b[2Jb\r\nc[red]")
    text, _ = shown("[bold]\x07\tx\x1b[0m")
    assert "[bold]\ufffd x\ufffd[0m a\ufffd[2Jb c[red]" in text


@pytest.mark.parametrize("width", [20, 40, 80])
def test_narrow_terminals_show_everything(width):
    text, passed = shown(width=width)
    assert passed
    assert max(map(len, text.splitlines())) <= width
    assert "draft memory 18,624 bytes: as states they take 786,432, 42 times as many" in " ".join(
        text.split()
    )


def test_it_fits_a_terminal_of_80_by_24():
    text, _ = shown(length=160, width=80)
    lines = text.splitlines()
    assert len(lines) < 24
    assert all(re.match(r"[a-z ]{16}\S| {16}\S", line) for line in lines[8:-2]), text


def test_without_its_model_it_tells_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "MODEL", tmp_path)
    nothing, config, cut = (
        {},
        {"config.json": (MODEL / "config.json").read_bytes()},
        {"model.safetensors": b"cut short"},
    )
    for more in (nothing, config, cut):
        for name, content in more.items():
            (tmp_path / name).write_bytes(content)
        result = run("x")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert f"config.json and model.safetensors, in {tmp_path}" in result.stderr
        assert "install gated-delta again" in result.stderr


@pytest.mark.filterwarnings("error")
def test_no_warning_of_transformers_is_shown():
    demo.generate(demo.load_model(CPU, torch.float32), "x", 2)


def test_a_terminal_sees_progress_while_text_is_generated(monkeypatch):
    bars = []
    monkeypatch.setattr(
        demo, "tracked", lambda items, text: bars.append((len(items), text)) or items
    )
    shown(length=1)
    assert bars == [(3, "generating text")]


def test_a_backend_that_cannot_run_prints_nothing():
    console = Console(file=io.StringIO())
    with pytest.raises(UnsupportedProblem, match="a CUDA device"):
        demo.show("Lambda", 3, "cute", CPU, console)
    assert console.file.getvalue() == ""


def test_without_a_prompt_it_is_refused():
    assert run("").exit_code == 2


def test_on_a_cpu_no_kernels_of_installed_packages_run(monkeypatch):
    """As beside FLA and causal_conv1d, whose kernels transformers takes for any tensor."""
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    on_gpus = {}
    for name in names:
        own = inspect.unwrap(getattr(module, name))
        on_gpus[name] = functools.wraps(own)(lambda *_, **__: pytest.fail("a kernel of a GPU ran"))
        monkeypatch.setattr(module, name, on_gpus[name])
    assert shown()[1]
    assert {name: getattr(module, name) for name in names} == on_gpus
