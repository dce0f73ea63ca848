"""gated-delta: info, check, bench, demo."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import __version__
from . import compile as kernels
from .problem import UnsupportedProblem

if TYPE_CHECKING:
    from .bench import Agenda, Outcome

app = typer.Typer(help="Gated-delta-rule linear attention (GDN and KDA): prefill, decode, verify, flush.", no_args_is_help=True)
# Piped output has no width of its own, and a label cut short names nothing.
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


class Op(str, Enum):
    prefill = "prefill"
    decode = "decode"
    verify = "verify"
    flush = "flush"


class BenchOp(str, Enum):
    prefill = "prefill"
    decode = "decode"
    verify = "verify"
    flush = "flush"
    speculate = "speculate"


class Backend(str, Enum):
    auto = "auto"
    cute = "cute"
    reference = "reference"


class Model(str, Enum):
    gdn = "gdn"
    kda = "kda"


class Precision(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.value]


class GateKind(str, Enum):
    log = "log"
    softplus = "softplus"
    lower_bound = "lower_bound"


JsonOption = Annotated[bool, typer.Option("--json", help="Give the results as JSON: to FILE, or else to the standard output.")]
FileArgument = Annotated[Path | None, typer.Argument(help="File for --json.", show_default=False)]
DeviceOption = Annotated[str, typer.Option(help="Where to run, e.g. cpu or cuda; a GPU when there is one.")]
BackendOption = Annotated[Backend, typer.Option(help="Which backend to run.")]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise typer.BadParameter(f"{name!r}: {str(problem).splitlines()[0]}", param_hint="--device") from None
    return device


def _ints(text: str, what: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"expected positive numbers such as 1,8,64, got {text!r}", param_hint=what)
    return values


def _some_of(known: Collection[str], text: str, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"expected some of {','.join(known)}, got {','.join(unknown)}", param_hint=what)
    return names


def _report(as_json: bool, file: Path | None) -> Console:
    """Where tables go: beside JSON on the standard output they would spoil it."""
    if file is not None and not as_json:
        raise typer.BadParameter(f"unexpected without --json: {file}", param_hint="FILE")
    return errors if as_json and file is None else console


def _write_json(file: Path | None, content: Any) -> None:
    text = json.dumps(content, indent=1)
    if file is None:
        sys.stdout.write(text + "\n")
    else:
        _replace(file, text + "\n")
        console.print(f"wrote {file}", highlight=False)


def _replace(file: Path, text: str) -> None:
    """The whole of it or nothing: a run may be cut short at any time, and the file may hold what other runs found."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


@app.command()
def info() -> None:
    """Versions, devices and backends."""
    table = Table(show_header=False, box=None)
    table.add_row("gated_delta", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", torch.__version__)
    for package in ("transformers", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        table.add_row(package, kernels.installed(package) or "not installed")
    table.add_row("cpu", f"{torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.device_count():
        table.add_row("cuda", "no device")
    table.add_row("backend reference", "available: PyTorch, any device, every operation")
    needs = kernels.missing_packages()
    table.add_row(
        "backend cute",
        f"needs {', '.join(needs)}"
        if needs
        else "all four operations on compute capability 9.0; decode, verify, flush compile for 10.0, untried",
    )
    found = sum(1 for _ in kernels.directory().glob("*/*.so"))
    table.add_row(
        "kernel cache", f"{kernels.directory()}: {found} kernels; compiling is {'on' if kernels.may_compile() else 'off'}"
    )
    console.print(table)


class Arch(str, Enum):
    sm_90a = "sm_90a"
    sm_100a = "sm_100a"


@app.command("compile")
def compile_kernels(
    out: Annotated[Path, typer.Option(help="Directory of the pack, to be named in GATED_DELTA_CACHE_DIR where it is used.")],
    file: FileArgument = None,
    arch: Annotated[Arch, typer.Option(help="What to compile for; sm_100a is untried.")] = Arch.sm_90a,
    cases: Annotated[bool, typer.Option("--cases", help="Also what `check --backend cute` needs.")] = False,
    filter: Annotated[str, typer.Option(help="Only variants whose label contains this text.")] = "",
    limit: Annotated[int, typer.Option(help="At most this many, drawn with a fixed seed; 0 for all.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    as_json: JsonOption = False,
) -> None:
    """Compile kernels ahead of time; needs nvidia-cutlass-dsl and a C compiler, but no GPU."""
    from . import dispatch
    from .testing import cases as listed

    report = _report(as_json, file)
    variants = dispatch.shipped()
    if cases:
        ops = ("prefill", "decode", "verify", "flush")
        problems = [problem for op in ops for case in listed(op) if not case.reference_only for problem in case.problems]
        wanted = [variant for problem in dict.fromkeys(problems) for variant in dispatch.variants_of(problem)]
        variants = list(dict.fromkeys(variants + wanted))
    variants = [variant for variant in variants if filter in variant.label and dispatch.compiles(variant, arch.value)]
    if not variants:
        errors.print(f"no variant's label contains {filter!r}")
        raise typer.Exit(2)
    if 0 < limit < len(variants):
        variants = random.Random(0).sample(variants, limit)
    table = Table(title=f"{len(variants)} kernels for {arch.value}")
    for column in ("variant", "registers", "stack", "shared", "seconds"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    records = []
    with ProcessPoolExecutor(jobs, get_context("spawn"), _build_in, (str(out.resolve()),)) as pool:
        built = pool.map(_build, variants, [arch.value] * len(variants))
        hidden = not sys.stderr.isatty()
        for variant, (resources, seconds) in zip(
            variants, track(built, total=len(variants), console=errors, disable=hidden), strict=True
        ):
            facts = [str(resources.registers), str(resources.stack), str(resources.shared)] if resources else ["-"] * 3
            table.add_row(variant.label, *facts, f"{seconds:.1f}")
            records.append(dict(variant=variant.label, seconds=seconds, **(vars(resources) if resources else {})))
    report.print(table)
    if as_json:
        _write_json(file, {"arch": arch.value, "sources": kernels.sources(), "kernels": records})


def _build_in(directory: str) -> None:
    os.environ["GATED_DELTA_CACHE_DIR"] = directory


def _build(variant: kernels.Variant, arch: str) -> tuple[kernels.Resources | None, float]:
    began = time.monotonic()
    built = kernels.build(variant, arch)
    seconds = time.monotonic() - began
    return kernels.resources(built), seconds


@app.command()
def check(
    file: FileArgument = None,
    backend: BackendOption = Backend.auto,
    op: Annotated[list[Op] | None, typer.Option(help="Only this operation; may be repeated.")] = None,
    filter: Annotated[str, typer.Option(help="Only cases whose label contains this text.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the list, with every value of every factor.")] = False,
    limit: Annotated[int, typer.Option(help="At most this many cases per operation, drawn with a fixed seed; 0 for all.")] = 0,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Judge a backend by the case list, against the recurrence in float64."""
    from .testing import Case, Result, cases, quick_cases, run_case

    report = _report(as_json, file)
    where = _device(device)
    chosen = []
    for name in op or list(Op):
        listed = [case for case in (quick_cases if quick else cases)(name.value) if filter in case.label]
        if backend is Backend.cute:
            listed = [case for case in listed if not case.reference_only]
        chosen += sorted(random.Random(0).sample(listed, limit), key=lambda c: c.seed) if 0 < limit < len(listed) else listed
    if not chosen:
        errors.print(f"no case's label contains {filter!r}")
        raise typer.Exit(2)
    results: list[Result] = []
    unsupported: list[tuple[Case, UnsupportedProblem]] = []
    began = time.monotonic()
    for case in track(chosen, description=f"{len(chosen)} cases on {where}", console=errors, disable=not sys.stderr.isatty()):
        try:
            results.append(run_case(case, backend.value, where))
        except UnsupportedProblem as problem:
            unsupported.append((case, problem))

    table = Table(title=f"backend {backend.value} on {where}, {time.monotonic() - began:.0f} s")
    for column in ("operation", "cases", "passed", "failed", "unsupported", "worst error / tolerance"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for name in Op:
        mine = [r for r in results if r.case.op == name.value]
        lacking = sum(case.op == name.value for case, _ in unsupported)
        if mine or lacking:
            passed = sum(r.passed for r in mine)
            worst = max((r.share for r in mine), default=float("nan"))
            table.add_row(name.value, str(len(mine) + lacking), str(passed), str(len(mine) - passed), str(lacking), f"{worst:.2f}")
    report.print(table)
    failed = [r for r in results if not r.passed]
    for result in failed:
        report.print(f"[red]FAILED[/] {result.case.label} lengths {result.case.lengths}", highlight=False)
        for line in result.failures:
            report.print(f"    {line}", highlight=False)
    for reason, count in Counter(reason for _, problem in unsupported for reason in problem.missing).most_common():
        report.print(f"[yellow]unsupported[/] in {count} cases: needs {reason}", highlight=False)
    if as_json:
        _write_json(file, {"backend": backend.value, "device": str(where), "cases": [_record(r) for r in results]})
    if failed or unsupported:
        raise typer.Exit(1)


def _record(result: Any) -> dict[str, Any]:
    found = {
        name: dict(error=vars(e), plain=vars(p), unit=unit, share=e.share(p, unit)) for name, (e, p, unit) in result.errors.items()
    }
    case = result.case
    return dict(
        label=case.label, lengths=case.lengths, passed=result.passed, failures=result.failures, seconds=result.seconds, errors=found
    )


@app.command()
def bench(
    context: typer.Context,
    file: FileArgument = None,
    op: Annotated[BenchOp, typer.Option(help="Operation to time; speculate, on a GPU: verify and flush.")] = BenchOp.decode,
    model: Annotated[list[Model] | None, typer.Option(help="gdn or kda; may be repeated, both when not given.")] = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences, e.g. 1,8,64.")] = "1,8",
    tokens: Annotated[str, typer.Option(help="Tokens per sequence, e.g. 1,4; 4096 for a prefill when not given.")] = "",
    heads: Annotated[str, typer.Option(help="H/HV: query/key heads and value heads.")] = "8/8",
    dim: Annotated[int, typer.Option(help="K = V.")] = 128,
    gate: Annotated[GateKind, typer.Option(help="What g holds.")] = GateKind.softplus,
    dtype: Annotated[Precision, typer.Option(help="Inputs.")] = Precision.bf16,
    state_dtype: Annotated[Precision, typer.Option(help="State: fp32 or bf16.")] = Precision.fp32,
    backend: BackendOption = Backend.auto,
    token_loop: Annotated[bool, typer.Option("--token-loop", help="Prefill: time the token recurrence too, in turns.")] = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="On a GPU: a fixed grid, narrowed by the options given; always for speculate.")
    ] = False,
    peers: Annotated[
        str,
        typer.Option(
            help="The grid beside these: flashinfer,sglang,fla; speculate: no fla; "
            "prefill, in parts that benchmarks/results/prefill.json or FILE gathers: fla,flashinfer,cudnn,cudnn_cute,flashqla.",
            show_default=False,
        ),
    ] = "",
    gates: Annotated[
        str, typer.Option(help="Prefill's grid: fast,slow, how the gates forget; both when not given.", show_default=False)
    ] = "",
    shapes: Annotated[
        str, typer.Option(help="Prefill's grid: e.g. 1x8192,8x1024,10-skewed-4096; all when not given.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a picture of the timings to this file.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Time an operation; a case that fails its check is not timed."""
    from . import bench as timing

    report = _report(as_json, file)
    where = _device(device)
    try:
        H, HV = (int(part) for part in heads.split("/"))
    except ValueError:
        raise typer.BadParameter(f"expected H/HV such as 16/64, got {heads!r}", param_hint="--heads") from None
    if HV < H or H < 1 or HV % H:
        raise typer.BadParameter(f"expected HV to be a multiple of H, got {heads!r}", param_hint="--heads")
    if state_dtype is Precision.fp16:
        raise typer.BadParameter("a state is fp32 or bf16", param_hint="--state-dtype")
    if token_loop and op is not BenchOp.prefill:
        raise typer.BadParameter("only a prefill has a token loop to compare with", param_hint="--token-loop")
    if grid or peers or gates or shapes or op is BenchOp.speculate:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        if fixed := given & {"dim", "gate", "dtype", "token_loop"}:
            raise typer.BadParameter("the grid settles it", param_hint=f"--{min(fixed).replace('_', '-')}")
        if op.value not in timing.AGENDAS or backend is Backend.reference or where.type != "cuda":
            raise typer.BadParameter(
                f"grids time the CuTe backend's {' or '.join(timing.AGENDAS)} on a CUDA device, "
                f"got {op.value}, {backend.value}, {where}",
                param_hint="--peers" if peers else "--grid" if grid else "--op",
            )
        options: dict[str, tuple[str, list[Any]]] = {
            # option: what it is of a cell, the values given
            "--model": ("model", [m.value for m in model or ()]),
            "--heads": ("heads", [(H, HV)] if "heads" in given else []),
            "--state-dtype": ("state_dtype", [state_dtype.dtype] if "state_dtype" in given else []),
            "--tokens": ("tokens", _ints(tokens, "--tokens") if tokens else []),
            "--batch": ("sequences", _ints(batch, "--batch") if "batch" in given else []),
            "--gates": ("gates", _some_of(timing.SPEEDS, gates, "--gates")),
            "--shapes": ("shape", _some_of(timing.SHAPES, shapes, "--shapes")),
        }
        wanted = {name: values for name, values in options.values() if values}
        for option, (name, _) in options.items():
            if name in wanted and not hasattr(timing.AGENDAS[op.value]().grid[0], name):
                raise typer.BadParameter(f"the grid of {op.value} settles it", param_hint=option)
        agenda = timing.AGENDAS[op.value](**wanted)
        if agenda.results is not None and not as_json:
            as_json, file = True, agenda.results
        kept = _kept(file, agenda) if agenda.results is not None and file is not None and file.exists() else []
        _bench_grid(agenda, peers, where, report, file, as_json, plot_file, kept)
        return
    lengths = _ints(tokens or ("4096" if op is BenchOp.prefill else "1"), "--tokens")
    if op is not BenchOp.prefill and max(lengths) > 16:
        raise typer.BadParameter(f"{op.value} takes at most 16 tokens a sequence, got {max(lengths)}", param_hint="--tokens")
    bandwidth = timing.copy_bandwidth(where)
    table = Table(title=f"{op.value}, backend {backend.value}, {timing.device_name(where)}, copy {bandwidth / 1e9:.1f} GB/s")
    columns = ["case", "N", "T", "us", "tokens/s", "floor us", "x floor", "host us"] + (
        ["token loop us", "ratio"] if token_loop else []
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    done = []
    failed = 0
    axes = {"gdn": "head", "kda": "channel"}
    for axis in (axes[m.value] for m in model or list(Model)):
        for N in _ints(batch, "--batch"):
            for T in lengths:
                case = timing.bench_case(op.value, axis, (H, HV), dim, gate.value, N, T, dtype.dtype, state_dtype.dtype)
                taken = timing.time_case(case, backend.value, where, bandwidth, token_loop=token_loop)
                if taken is None:
                    failed += 1
                    errors.print(f"[red]fails its check, not timed:[/] {case.label}", highlight=False)
                    continue
                done.append(taken)
                row = [taken.label.split("/")[0], str(N), str(T), f"{taken.seconds * 1e6:.1f}", f"{taken.tokens_per_second:.0f}"]
                row += [f"{taken.floor_seconds * 1e6:.1f}", f"{taken.seconds / taken.floor_seconds:.1f}"]
                row += [f"{taken.host_seconds * 1e6:.1f}"]
                if taken.token_loop_seconds is not None:
                    row += [f"{taken.token_loop_seconds * 1e6:.0f}", f"{taken.token_loop_seconds / taken.seconds:.1f}"]
                table.add_row(*row)
    if done:
        report.print(table)
        if as_json:
            _write_json(file, [t.record() for t in done])
        if plot_file is not None:
            timing.plot(done, plot_file)
            report.print(f"wrote {plot_file}", highlight=False)
    if failed:
        raise typer.Exit(1)


def _kept(file: Path, agenda: Agenda) -> list[Outcome]:
    """What earlier runs over parts of the grid left there."""
    from . import bench as timing

    try:
        return timing.restored(json.loads(file.read_text()), agenda.grid)
    except (ValueError, KeyError, TypeError):
        raise typer.BadParameter(f"{file} holds nothing that results can be added to", param_hint="FILE") from None


def _bench_grid(
    agenda: Agenda,
    peers: str,
    device: torch.device,
    report: Console,
    file: Path | None,
    as_json: bool,
    plot_file: Path | None,
    kept: Sequence[Outcome] = (),
) -> None:
    from . import bench as timing

    if not agenda.cells:
        raise typer.BadParameter("no cell of the grid has all the values given", param_hint="--grid")
    asked = _some_of(agenda.peers, peers, "--peers")
    for target in (file, plot_file):
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
    rivals = {**agenda.baselines, **{form: peer for name in asked for form, peer in agenda.peers[name].forms.items()}}
    hidden = not sys.stderr.isatty()
    outcomes: list[timing.Outcome] = []
    failed = 0
    with torch.cuda.device(device):
        contest = timing.Contest(
            rivals,
            device,
            lambda remark: errors.print(remark, highlight=False, markup=False),
            capture=partial(timing.capture, passes=agenda.passes),
            eager=timing.eager if agenda.eager else None,
            facts=timing.run_facts(device, rivals, agenda.facts(device)),
        )
        run = contest.run
        right = []
        for one in track([*agenda.cells, *agenda.probes], description="checking", console=errors, disable=hidden):
            if wrong := contest.check(one):
                failed += 1
                errors.print(f"fails its check, not timed: {one}: {'; '.join(wrong)}", style="red", highlight=False, markup=False)
            else:
                right.append(one)
        for one in track(right, description="timing", console=errors, disable=hidden):
            if isinstance(one, timing.Cell):
                outcomes.append(contest.measure(one))
            else:
                run.setdefault(one.name, []).append(contest.probe(one))
            if as_json and file is not None:  # a run cut short leaves what it has
                _replace(file, json.dumps(timing.record(timing.merged(kept, outcomes, agenda.grid), run), indent=1) + "\n")
        if outcomes and not agenda.eager:
            smallest = min((o.cell for o in outcomes), key=lambda cell: cell.bytes)
            run |= dict(host_us=contest.host(smallest), host_us_of=smallest.label)
    everything = timing.merged(kept, outcomes, agenda.grid)
    for table in [*timing.tables(outcomes), *timing.summary_tables(everything)]:
        report.print(table)
    for name in dict.fromkeys(probe.name for probe in agenda.probes if probe.name in run):
        report.print(timing.probe_table(name, run[name]))
    for fact in ("gemm_tflops", "kernels", "host_us", "host_us_of"):
        if fact in run:
            report.print(f"{fact.replace('_', ' ')}: {run[fact]}", highlight=False)
    if as_json:
        _write_json(file, timing.record(everything, run))
    if plot_file is not None and everything:
        timing.plot_outcomes(everything, ", ".join(dict.fromkeys(o.run["device"] for o in everything)), plot_file)
        report.print(f"wrote {plot_file}", highlight=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="Text for the model to continue.")] = "The for statement is used to",
    length: Annotated[int, typer.Option(min=1, max=2000, help="Bytes to generate.")] = 160,
    backend: BackendOption = Backend.auto,
    device: DeviceOption = "auto",
) -> None:
    """Run the shipped model with and without gated_delta, then follow one request through the four operations."""
    from .demo import show

    if not prompt:
        raise typer.BadParameter("expected some text", param_hint="PROMPT")
    where = _device(device)
    if where.type == "cpu":
        torch.set_num_threads(1)  # the model is too small for more, and threads that wait spin
    if not show(prompt, length, backend.value, where, console):
        raise typer.Exit(1)
