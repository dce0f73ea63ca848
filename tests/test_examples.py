"""The examples give the promised text, and fail if they forget to roll back."""

import functools
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from gated_delta import demo, reference

pytest.importorskip("transformers")

LENGTH = 80
PROMPTS = ("The for statement is used to", 'the same as "a" or "b", the same as')
H, HV, K, V, LAYERS = 2, 4, 64, 64, 3


def load(name):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load("speculative_decoding")


@functools.cache
def model():
    return demo.load_model(torch.device("cpu"), torch.float32)


@functools.cache
def greedy(prompt):
    """The text of transformers alone."""
    return demo.generate(model(), prompt, LENGTH).text


def speculative(prompt, draft):
    return example.decode_speculatively(model(), prompt.encode(), LENGTH, draft)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("draft", [1, 3, 8])
def test_speculative_decoding_gives_the_greedy_text(prompt, draft):
    result = speculative(prompt, draft)
    assert result.text.decode() == greedy(prompt)
    assert 0 < result.accepted < result.drafted <= draft * result.steps
    # One token of the prefill, then one per step and the accepted drafts.
    assert 1 + result.steps + result.accepted == LENGTH
    assert result.buffer_bytes == (draft + 1) * LAYERS * (HV * V + H * K + HV) * 4
    assert result.states_bytes == (draft + 1) * LAYERS * HV * V * K * 4


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_matches_transformers(prompt):
    assert example.decode_plainly(model(), prompt.encode(), LENGTH).decode() == greedy(prompt)


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_request_keeps_only_accepted_tokens(count):
    """After two steps with four verified, as after decoding one by one."""
    requests = [example.Request(model(), 4) for _ in range(2)]
    for request in requests:
        request.state.fill_(math.nan)
        request.prefill(example.to_ids(b"a prompt", model().device))
    verified, decoded = requests
    for tokens in (b"some", b"more"):
        ids = example.to_ids(tokens, model().device)
        choices = verified.verify(ids)
        verified.accept(torch.tensor([count]))
        for t in range(count):
            assert decoded.decode(ids[:, t : t + 1]) == choices[:, t : t + 1]
    assert verified.length == decoded.length == 8 + 2 * count
    torch.testing.assert_close(verified.state, decoded.state, equal_nan=True)
    assert verified.state.isnan().sum((0, 2, 3, 4)).tolist() == [
        0 if s == example.SLOT else LAYERS * HV * V * K for s in range(4)
    ]
    torch.testing.assert_close(verified.conv, decoded.conv)
    torch.testing.assert_close(verified.attention.layers, decoded.attention.layers)


def test_drafts_continue_an_earlier_match():
    assert example.look_up(b"abcdef abcd", 8) == b"ef abcd"
    assert example.look_up(b"abcdef abcd", 2) == b"ef"
    assert example.look_up(b"abcd1 abcd2 abcd", 1) == b"2"
    assert example.look_up(b"aaaaa", 4) == b"a"
    assert example.look_up(b"abcdef abc", 2) == b""
    assert example.look_up(b"ab", 2) == b""


def run(*arguments):
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, arguments)


def test_the_example_prints_its_text_and_figures():
    result = run("--prompt", PROMPTS[0], "--length", str(LENGTH), "--draft", "3", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in (
        PROMPTS[0] + greedy(PROMPTS[0]),
        "drafts accepted",
        "tokens per step",
        "18,624 bytes",
        "786,432 bytes",
    ):
        assert words in result.output


def test_the_example_fails_when_the_texts_differ(monkeypatch):
    monkeypatch.setattr(reference, "flush", lambda **_: None)
    result = run("--prompt", PROMPTS[0], "--length", str(LENGTH), "--draft", "3", "--device", "cpu")
    assert isinstance(result.exception, AssertionError)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "tpu7"])
def test_a_missing_device_is_refused_in_one_line(device):
    result = run("--device", device)
    assert result.exit_code == 2
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert device in result.stderr


def test_missing_transformers_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("--device", "cpu")
    assert result.exit_code == 2
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert "pip install" in result.stderr


def test_no_prompt_and_too_many_drafts_are_refused():
    assert run("--prompt", "").exit_code == 2
    assert run("--draft", "16").exit_code == 2
