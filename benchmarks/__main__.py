"""python -m benchmarks: measure, plot, serve, steps, tokens."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections import Counter
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gated_delta import demo
from gated_delta.cli import Commands
from gated_delta.options import DeviceOption, device_option
from gated_delta.results import Refusal, Report, make_table, one_line, tracked

from . import draws as drawing
from . import layer_prompts, layers, projections
from . import serve as serving
from . import steps as stepping
from . import tokens as answers
from .cells import BUFFERED, CELLS, DETERMINISTIC, PREFILL_TP, TREES, by_label
from .measure import Runner, environment, run_facts
from .peers import LEVELS, OWN, PEERS, Prepare
from .plot import draw
from .process import Process
from .record import RESULTS, Record, merged, read, summary

TABLES = CELLS | dict(
    layer=layers.CELLS | layer_prompts.CELLS | projections.CELLS,
    prefill_tp=by_label(PREFILL_TP),
    buffer=by_label(BUFFERED),
    trees=by_label(TREES),
    deterministic=by_label(DETERMINISTIC),
)
KNOWN = PEERS | dict(
    layer=projections.PEERS, prefill_tp=PEERS["prefill"], trees={}, deterministic={}
)
Op = Enum(
    "Op",
    {
        "decode": "decode",
        "prefill": "prefill",
        "prefill_tp": "prefill_tp",
        "speculate": "speculate",
        "layer": "layer",
        "buffer": "buffer",
        "trees": "trees",
        "deterministic": "deterministic",
    },
    type=str,
)
Server = Enum("Server", {"sglang": "sglang", "vllm": "vllm"}, type=str)
Engine = Enum(
    "Engine", {"sglang": "sglang", "vllm": "vllm", "transformers": "transformers"}, type=str
)
TRAINED = str(Path(demo.__file__).parent / "tiny_qwen3_5")
app = typer.Typer(
    cls=Commands,
    help="Our kernels against their peers, on one CUDA device.",
    pretty_exceptions_enable=False,
)


@app.command()
def measure(
    op: Annotated[
        Op,
        typer.Argument(
            help="speculate: verify and flush; layer: convolution, decode or prefill, norm, "
            "and the same between projections; "
            "prefill_tp: prefill, heads under tensor parallelism; buffer: decode with a buffer; "
            "trees: verify of trees of drafts; deterministic: prefill with and without."
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(help="JSON, which keeps its other cells; benchmarks/results/OP.json."),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Such as fla,flashinfer, or none; by default all installed ones. "
            "sm_90,sm_80: our kernels of other GPUs."
        ),
    ] = "",
    filter: Annotated[
        str,
        typer.Option(
            help="Only cells whose labels match this regular expression: 'KDA 32/32 .* B=8$'."
        ),
    ] = "",
    device: DeviceOption = "auto",
) -> None:
    """Check and time our kernels, a copy and the peers; each cell is written once measured."""
    gpu, cells, known = device_option(device), TABLES[op.value], KNOWN[op.value]
    if gpu.type != "cuda":
        raise typer.BadParameter(f"expected a CUDA device, got {gpu}", param_hint="--device")
    chosen = [cell for cell in cells.values() if pattern(filter).search(cell.label)]
    if not chosen:
        raise typer.BadParameter(
            f"no cell of {op.value} matches {filter!r}; one is {next(iter(cells))!r}",
            param_hint="--filter",
        )
    installed = [name for name, peer in known.items() if peer.version]
    names = {"": installed, "none": []}.get(peers, [name.strip() for name in peers.split(",")])
    known = known | LEVELS
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(
            f"expected peers of {','.join(known)}, got {','.join(unknown)}", param_hint="--peers"
        )
    cached = OWN if op.value == "speculate" else {}
    asked = cached | {name: known[name] for name in names}
    file, command = file or RESULTS / f"{op.value}.json", f"benchmarks {op.value}"
    report = Report(command, True, file)
    try:
        before = read(file) if file.exists() and file.stat().st_size else {}
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILE") from None
    measured: list[Record] = []
    content: dict[str, Any] = {}
    failures: dict[str, list[str]] = {}
    with report.measuring(), torch.cuda.device(gpu):
        run = run_facts(gpu, {name: peer.version for name, peer in asked.items()})
        prepare: dict[str, Prepare] = {}
        for name, peer in asked.items():
            prepare |= peer.forms(name)
        runner = Runner(prepare, gpu, run, report.say)
        for cell in tracked(chosen, "checking"):
            if problems := runner.check(cell):
                failures[cell.label] = problems
        for label, problems in failures.items():
            report.say(f"fails its check, not timed: {label}: {'; '.join(problems)}")
        right = [cell for cell in chosen if cell.label not in failures]
        compared = [cell for cell in right if cell.compared]
        smallest = min(compared, key=lambda cell: cell.bytes, default=None)
        for cell in tracked(right, "timing"):
            measured.append(runner.measure(cell, host=cell is smallest))
            content = dict(command=command, **merged(before, measured, run, cells))
            report.keep(content)
            report.say(line(measured[-1]))
    if measured:
        report.write(content)
        table = make_table(
            "peer / ours, all cells of the file",
            *("family", "peer", "cells", "geomean", "least", "at", "behind"),
        )
        for row in summary(content["cells"]):
            table.add_row(*row)
        report.show(table)
    report.leave(bool(failures))


def line(record: Record) -> str:
    """A cell's times, for the terminal."""
    peers = {name: peer["us"] for name, peer in record["peers"].items()}
    times = {"ours": record["us"], **record["parts"], "copy": record["copy_us"], **peers}
    return f"{record['label']}, us: " + ", ".join(
        f"{name} {us:.2f}" for name, us in times.items() if us is not None
    )


@app.command()
def plot(
    files: Annotated[
        list[Path] | None, typer.Argument(help="JSON of `measure`; benchmarks/results/*.json")
    ] = None,
) -> None:
    """Draw times and ratios of every series, into a PNG next to each file."""
    for file in files or sorted(RESULTS.glob("*.json")):
        try:
            content = read(file)
        except (OSError, ValueError) as problem:
            raise typer.BadParameter(str(problem), param_hint="FILES") from None
        draw(content, file.with_suffix(".png"))
        typer.echo(f"wrote {file.with_suffix('.png')}")


@app.command()
def serve(
    engine: Annotated[Engine, typer.Argument(help="Installed with gated_delta.")],
    file: Annotated[
        Path | None, typer.Argument(help="JSON; benchmarks/results/serve/ENGINE.json.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model: " + ", ".join(serving.MODELS))] = next(
        iter(serving.MODELS)
    ),
    filter: Annotated[
        str, typer.Option(help="Only cells whose labels match this regular expression: '^8 x'.")
    ] = "",
    options: Annotated[str, typer.Option(help="The engine's options, as JSON.")] = "{}",
    starts: Annotated[
        int, typer.Option(help="Starts of both, side by side; FILE keeps those it has.", min=1)
    ] = 1,
) -> None:
    """Time a serving engine with its kernels and with ours: tokens for users, GPU kernels."""
    labels = [label for label in serving.CELLS if pattern(filter).search(label)]
    if model not in serving.MODELS or not labels:
        models, cells = ", ".join(serving.MODELS), ", ".join(serving.CELLS)
        raise typer.BadParameter(f"expected a model of {models} and a filter of {cells}")
    given = object_of(options, "--options")
    report, run = served(engine.value, "serve", file)
    run |= dict(model=model, options=given)
    assert report.file is not None
    content = continued(report.file, f"benchmarks serve {engine.value}", run)
    samples, began = content["samples"], content["starts"]
    done = Counter(sample["cell"] for sample in samples if sample["plugin"])

    def keep() -> None:
        content["cells"] = serving.compared(samples)
        report.keep(content)

    def begin(plugin: bool, stack: contextlib.ExitStack) -> Process:
        start = dict[str, Any](run=len(content["runs"]) - 1, plugin=plugin, log=[])
        began.append(start)
        process = serving.process(engine.value, model, plugin, given, start["log"].append)
        start |= dict(start_s=stack.enter_context(process).start())
        return process

    with report.measuring():
        for turn in range(starts):
            missing = [label for label in labels if done[label] <= turn]
            if not missing:
                continue
            with contextlib.ExitStack() as stack:
                sides = {plugin: begin(plugin, stack) for plugin in (False, True)}
                for label in missing:
                    for sample in serving.measure(sides, serving.CELLS[label]):
                        start = len(began) - 1 - (not sample["plugin"])
                        samples.append(dict(start=start, **sample))
                        report.say(f"start {turn + 1}: {sample}")
                    done[label] += 1
                    keep()
                for start, side in zip(began[-2:], sides.values(), strict=True):
                    start["log"] += ranks(side.ask(ranks=True))
    keep()
    report.write(content)
    names = ("engine", "gated_delta")
    table = make_table("medians of starts (least, most)", "cell", "of", *names, "ratio", "verdict")
    for cell in content["cells"]:
        for name, spread in cell["spread"].items():
            medians = cell.get(name) or cell["kernels_us"][name]
            ranges = [f"{medians[x]:.2f} ({spread[x][0]:.2f}, {spread[x][1]:.2f})" for x in names]
            absent = name.endswith("gap") or not medians["gated_delta"]  # a kind's kernels may be
            ratio = "" if absent else f"{medians['engine'] / medians['gated_delta']:.3f}"
            table.add_row(
                cell["label"], name, *ranges, ratio, cell["verdict"][name] or "few starts"
            )
    report.show(table)
    report.leave()


def continued(file: Path, command: str, run: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of `serve` with another run, which goes on with its starts.

    Raises BadParameter if these are of other code, another device, model or options.
    """
    text = file.read_text() if file.is_file() else ""
    before = json.loads(text) if text else {}
    runs = before["runs"] if "samples" in before else []  # before 2026-11-26: one start each
    known = json.loads(json.dumps(run, default=str))
    other = [
        name
        for name in known
        if runs and name not in ("date", "dirty") and known[name] != runs[0].get(name)
    ]
    if other:
        raise typer.BadParameter(
            f"{str(file)!r} has starts with another {', '.join(other)}, expected another file",
            param_hint="FILE",
        )
    samples, starts = (before[x] if runs else [] for x in ("samples", "starts"))
    return dict(command=command, runs=[*runs, run], starts=starts, cells=[], samples=samples)


@app.command()
def steps(
    file: Annotated[
        Path | None, typer.Argument(help="JSON; benchmarks/results/serve/sglang_steps.json.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model: " + ", ".join(serving.MODELS))
    ] = "qwen3_next_experts",
    filter: Annotated[
        str, typer.Option(help="Only cells whose labels match this regular expression: '^64 x'.")
    ] = "",
    sides: Annotated[
        str, typer.Option(help="Engines, started together: " + ", ".join(stepping.SIDES))
    ] = ",".join(stepping.SIDES),
    drafts: Annotated[str, typer.Option(help="Who drafts: " + ", ".join(drawing.OPTIONS))] = "head",
    options: Annotated[str, typer.Option(help="The engine's options, as JSON.")] = "{}",
    repeats: Annotated[int, typer.Option(help="Times of each side in a cell.", min=1)] = 3,
) -> None:
    """Time a step of SGLang with whole states, and with records of decode and of drafts."""
    labels = [label for label in stepping.CELLS if pattern(filter).search(label)]
    names = [name.strip() for name in sides.split(",")]
    known = [list(x) for x in (serving.MODELS, stepping.CELLS, stepping.SIDES, drawing.OPTIONS)]
    asked = [model], labels, names, [drafts]
    if any(not x or set(x) - set(y) for x, y in zip(asked, known, strict=True)):
        models, cells, allowed, who = (", ".join(x) for x in known)
        raise typer.BadParameter(
            f"expected a model of {models}, a filter of {cells}, sides of {allowed}, "
            f"drafts of {who}"
        )
    given = object_of(options, "--options")
    report, run = served("sglang", "steps", file)
    logs: dict[str, list[str]] = {name: [] for name in names}
    samples: list[dict[str, Any]] = []
    content = dict(
        command="benchmarks steps sglang",
        runs=[run | dict(model=model, drafts=drafts, options=given)],
        logs=logs,
        samples=samples,
    )
    with report.measuring(), contextlib.ExitStack() as stack:
        engines = stepping.begun(stack, names, model, drafts, given, logs, report.say)
        for label in labels:
            try:
                cell = stepping.measure(engines, label, drafts, repeats)
            except RuntimeError as problem:  # the other sides go on
                report.say(f"{label}: {problem}")
                engines = {name: x for name, x in engines.items() if x.process.poll() is None}
                continue
            samples += cell
            report.keep(content)
            for line in stepping.table(cell):
                report.say(line)
    report.write(content)
    report.leave(len(samples) < len(names) * len(labels))


@app.command()
def tokens(
    engine: Annotated[Server, typer.Argument(help="Installed with gated_delta.")],
    file: Annotated[
        Path | None, typer.Argument(help="JSON; benchmarks/results/serve/ENGINE_tokens.json.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A byte-level checkpoint, or one to generate: " + ", ".join(serving.MODELS)
        ),
    ] = TRAINED,
    count: Annotated[int, typer.Option(help="Prompts.", min=1)] = 320,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 32,
    options: Annotated[str, typer.Option(help="The engine's options, as JSON.")] = "{}",
    also: Annotated[
        list[str] | None,
        typer.Option(help="More options, for another start with ours: '{\"tp_size\": 2}'."),
    ] = None,
) -> None:
    """Compare an engine's greedy tokens with its kernels and with ours."""
    given = object_of(options, "--options")
    starts = [(False, {}), (True, {}), *((True, object_of(more, "--also")) for more in also or ())]
    report, run = served(engine.value, "tokens", file)
    asked = dict(prompts=answers.prompts(count), new_tokens=new_tokens)
    reference: list[Any] = []
    rows: list[dict[str, Any]] = []
    content = dict(
        command=f"benchmarks tokens {engine.value}",
        runs=[run | dict(model=model, options=given)],
        cells=rows,
    )
    with report.measuring(), tempfile.TemporaryDirectory() as directory:
        if model in serving.MODELS:
            answers.save_random(serving.MODELS[model], Path(directory))
        path = directory if model in serving.MODELS else model
        for plugin, more in starts:
            log: list[str] = []
            received: list[Any] = []
            top = not any("speculative" in name for name in more)
            process = serving.process(engine.value, path, plugin, given | more, log.append)
            try:
                with process:
                    process.start()
                    received = process.ask(top=top, **asked)["answers"]
                    log += ranks(process.ask(ranks=True))
            except RuntimeError as problem:  # the other starts still run
                report.say(str(problem))
            reference = reference or received
            label = f"{'gated_delta' if plugin else engine.value} {json.dumps(more)}"
            verdict = answers.compared(reference, received) if received else dict(equal=None)
            rows.append(dict(label=label, run=0, log=log) | verdict)
            report.say(str(rows[-1]))
            report.keep(content)
    report.write(content)
    report.leave(any(row["equal"] is None for row in rows))


def pattern(filter: str) -> re.Pattern[str]:
    try:
        return re.compile(filter)
    except re.error as problem:
        raise typer.BadParameter(
            f"expected a regular expression, got {filter!r}: {problem}", param_hint="--filter"
        ) from None


def object_of(text: str, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}", param_hint=name) from None


def served(engine: str, command: str, file: Path | None) -> tuple[Report, dict[str, Any]]:
    """The report of an engine's results, and the facts of the run."""
    try:
        run = environment(torch.device("cuda"), {engine: metadata.version(engine)})
    except metadata.PackageNotFoundError:
        raise typer.BadParameter(f"{engine} is not installed", param_hint="ENGINE") from None
    except (AssertionError, RuntimeError) as problem:
        raise Refusal(f"expected a CUDA device: {one_line(problem)}") from None
    if file is None:
        (RESULTS / "serve").mkdir(exist_ok=True)
        file = RESULTS / "serve" / f"{engine}{'' if command == 'serve' else '_' + command}.json"
    return Report(f"benchmarks {command} {engine}", True, file), run


def ranks(answer: dict[str, Any]) -> list[str]:
    """gated_delta's report of each rank of an engine."""
    return [f"rank {i}: {line}" for i, rank in enumerate(answer["ranks"]) for line in rank]


if __name__ == "__main__":
    app()
