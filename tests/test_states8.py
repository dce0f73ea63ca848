"""The experiment with states of 8 bits: rounding, and folds against decode with a buffer."""

import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gated_delta as gd
from benchmarks import states8
from benchmarks.__main__ import TRAINED, app
from benchmarks.states8 import FORMATS, Folds, Format
from gated_delta.problem import Tokens
from gated_delta.reference import activate

EIGHT = {name: form for name, form in FORMATS.items() if form.values in ("int8", "e4m3")}


@pytest.mark.parametrize("form", EIGHT.values(), ids=EIGHT)
def test_rounding_is_within_a_step_and_keeps_zeros(form):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, 64, 128, generator=generator) * 2.0 ** torch.arange(-20, 44)[:, None]
    state[0, :32] = 0
    got = form.rounded(state, generator)
    blocks = state.abs().view(2, 64 // form.rows, form.rows, 128 // form.channels, form.channels)
    largest = blocks.amax((2, 4), keepdim=True).expand_as(blocks).reshape(state.shape)
    if form.values == "int8":
        step = largest / 127 / 2**form.bits
    else:
        step = torch.maximum(state.abs() / 8, largest / 448 / 2**9)
    slack = 1.01 if form.bits else 1.0001  # scales of bf16
    assert ((got - state).abs() <= step * (1 if form.stochastic else 0.5) * slack).all()
    assert (got.abs() <= largest * slack).all()
    assert (got[0, :32] == 0).all()
    if not form.stochastic and not form.bits:
        torch.testing.assert_close(form.rounded(got), got)  # a second rounding loses nothing
        torch.testing.assert_close(form.rounded(0.999 * state), 0.999 * got)  # nor does a decay


def test_e4m3_rounds_as_torch_does():
    x = torch.linspace(-448, 448, 4097).view(1, 1, -1)
    x = torch.cat([x, x / 2**14], -1)
    want = x.to(torch.float8_e4m3fn).float()
    assert torch.equal(Format("e4m3", channels=x.shape[-1]).rounded(x), want)


@pytest.mark.parametrize("values", ["int8", "e4m3"])
def test_stochastic_rounding_is_unbiased(values):
    state = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    form, generator = Format(values, stochastic=True), torch.Generator().manual_seed(2)
    mean = sum(form.rounded(state, generator) for _ in range(4000)) / 4000
    step = state.abs().max() / 127 if values == "int8" else state.abs() / 8
    assert ((mean - state).abs() <= 5 * step / 2 / 4000**0.5 + 1e-4).all()  # 5 standard errors
    assert ((Format(values).rounded(state) - state).abs() > 0.1 * step).any()


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("L", [2, 8])
def test_a_fold_of_L_tokens_is_decode_with_a_buffer(gate, L):
    """A row of L - 1 tokens is full at the L-th, whose fold the slot's rounding follows."""
    N, T, H, HV, K, V = 2, 24, 1, 2, 32, 16
    generator = torch.Generator().manual_seed(3)
    normal = functools.partial(torch.randn, generator=generator)
    q, k, v, beta = normal(N, T, H, K), normal(N, T, H, K), normal(N, T, HV, V), normal(N, T, HV)
    g = -normal(N, T, HV, *((K,) if gate == "channel" else ())).abs() / 8
    raw = Tokens(q, k, v, g, beta, gate=gd.Gate.log(), qk_l2norm=True, beta_logits=True)
    form, zeros = FORMATS["int8, 32 channels"], torch.zeros(N * HV, V, K)
    expected, last = Folds.of(activate(raw, torch.float32), L).outputs(zeros, form.rounded)

    state, lens = zeros.view(N, HV, V, K).clone(), torch.zeros(N, dtype=torch.int32)
    buffer = gd.KVBuffer.empty(N, L - 1, H, HV, K, V, gate=gate)
    for t in range(T):
        token = raw.map(lambda x, t=t: x[:, t : t + 1])._asdict()
        o = gd.decode(**token, state=state, buffer=buffer, buffer_lens=lens)
        buffer.advance(lens)
        if lens[0] == 0:
            state.copy_(form.rounded(state))
        torch.testing.assert_close(o[:, 0], expected[:, t], rtol=0, atol=2e-5)
    torch.testing.assert_close(state.flatten(0, 1), last, rtol=0, atol=2e-5)


def test_a_model_has_its_logits_with_exact_states_alone():
    pytest.importorskip("transformers")
    model = states8.Model(Path(TRAINED))
    ids = model.held_out[:2, :40]
    with torch.inference_mode():
        expected = model.model(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids, FORMATS["fp32"], 8), expected, rtol=0, atol=1e-3)
    assert (model.logits(ids, FORMATS["e4m3, a row"], 1) - expected).abs().max() > 1e-2


def test_a_second_run_keeps_other_formats(tmp_path, monkeypatch):
    for name, value in dict(SEGMENT=64, SEGMENTS={16: 1}, SHOWN=(1,)).items():
        monkeypatch.setattr(states8, name, value)
    arguments = ["states8", "synthetic", str(tmp_path / "new.json"), "--filter"]
    for pattern, code in (("bf16", 0), ("int8, 32 c", 0), ("int4", 2)):
        assert CliRunner().invoke(app, [*arguments, pattern]).exit_code == code
    cells = json.loads((tmp_path / "new.json").read_text())["cells"]
    assert [cell["label"] for cell in cells] == ["bf16 L=16", "int8, 32 channels L=16"]
    bf16, int8 = (cell["errors"]["KDA slow"][0] for cell in cells)
    assert 1e-4 < bf16 < int8 / 2 < 0.01
