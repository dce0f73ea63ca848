"""benchmarks/serve.py with an engine that is a stand-in of SGLang: processes, cells, records."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import serve
from benchmarks.__main__ import app

ENGINE = """
class Engine:
    def __init__(self, model_path, **options):
        import json, os
        self.heads = json.load(open(os.path.join(model_path, "config.json")))["linear_num_value_heads"]
        self.ours = options.get("linear_attn_decode_backend") == "gated_delta"
        assert options["load_format"] == "dummy" and options["page_size"] == 64
        print("gated_delta runs decode" if self.ours else "Triton runs decode", flush=True)
        if self.ours and FAILS:
            raise MemoryError("no room")
    def generate(self, input_ids, sampling_params):
        n = sampling_params["max_new_tokens"]
        return [dict(output_ids=[prompt[0]] * (n - self.ours) + [self.heads] * self.ours) for prompt in input_ids]
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


def test_both_kernels_are_measured_in_every_cell_asked_for(engine):
    engine()
    labels = [label for label in serve.CELLS if label.endswith(" x 512")][:2]
    made = [list(serve.run("sglang", "qwen3_next", plugin, labels, dict(page_size=64), repeats=1)) for plugin in (False, True)]
    assert made[1].pop(0) == dict(log="gated_delta runs decode")
    assert [row["start_s"] > 0 for row in (made[0].pop(0), made[1].pop(0))] == [True, True]
    records = serve.compared(*made)
    assert [record["cell"] for record in records] == labels == ["1 x 512", "8 x 512"]
    for record in records:
        assert (record["equal_tokens"], record["tokens"]) == (serve.NEW_TOKENS - 1, serve.NEW_TOKENS)
        assert record["ttft_ratio"] == record["ttft_ms"]["engine"] / record["ttft_ms"]["gated_delta"]


def test_an_engine_that_fails_says_so(engine):
    engine(fails=True)
    with pytest.raises(RuntimeError, match=r"(?s)sglang ended with 1.*no room"):
        list(serve.run("sglang", "qwen3_next", True, ["1 x 512"], dict(page_size=64)))


def test_cells_stay_below_what_a_card_holds():
    assert serve.CELLS["256 x 4096"].tokens <= serve.MAX_TOKENS < 64 * 32768
    assert "64 x 32768" not in serve.CELLS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--filter", "nothing"], "filter"),
        (["--model", "nothing"], "expected a model of qwen3_next"),
        (["--options", "[1]"], "expected a JSON object"),
        (["--options", "{"], "expected a JSON object"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, words, tmp_path):
    result = CliRunner().invoke(app, ["serve", "sglang", str(tmp_path / "new.json"), *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not (tmp_path / "new.json").exists()


def test_the_file_has_a_line_for_every_cell(engine, tmp_path, monkeypatch):
    engine()
    monkeypatch.setattr("benchmarks.__main__.run_facts", lambda device, peers: dict(peers=peers))
    file = tmp_path / "new.json"
    result = CliRunner().invoke(app, ["serve", "sglang", str(file), "--filter", "^1 x 512", "--options", '{"page_size": 64}'])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["runs"][0]["peers"] == {"sglang": "0.5.23"}
    assert content["runs"][0]["log"] == ["gated_delta runs decode"]
    assert [cell["label"] for cell in content["cells"]] == ["1 x 512"]
    assert sum(line.startswith('  {"label"') for line in file.read_text().splitlines()) == 1
