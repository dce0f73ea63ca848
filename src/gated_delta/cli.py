"""gated-delta: info, compile, check, bench, demo."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table
from typer.core import TyperGroup

from . import __version__, dispatch
from . import compile as kernels
from .api import select
from .gpus import (
    ARCHS,
    H200,
    LEVEL,
    PRODUCTS,
    card_of,
    driver,
    forced_level,
    gpu_of,
    gpus_of,
    image,
)
from .ops import OPERATIONS
from .options import (
    DTYPES,
    MAX_DIM,
    MAX_SEQUENCES,
    MAX_TOKENS,
    Backend,
    BackendOption,
    Checked,
    DeviceOption,
    Engine,
    FileArgument,
    FilterOption,
    GateKind,
    Half,
    JsonOption,
    LevelOption,
    LimitOption,
    Model,
    Op,
    Precision,
    architectures,
    force_level,
    head_counts,
    head_dims,
    ints,
)
from .options import device_option as _device
from .pack import build_all
from .problem import MAX_DRAFT, UnsupportedProblem, unique
from .results import (
    Refusal,
    Report,
    abandon_stdout,
    console,
    document,
    first_line,
    make_table,
    one_line,
    packages,
    stdout_lost,
    tracked,
    versions,
)

if TYPE_CHECKING:
    from .preflight import Plan
    from .testing import AnyCase
    from .testing.cases import Case


SWITCHES = {
    "GATED_DELTA_JIT": True,
    "GATED_DELTA_CHECK": False,
    "GATED_DELTA_VLLM": False,
    "GATED_DELTA_SGLANG_KVBUFFER": True,
    "GATED_DELTA_SGLANG_RING": False,
    "GATED_DELTA_SGLANG_QUANTISE": False,
    "GATED_DELTA_VLLM_KVBUFFER": True,
    "GATED_DELTA_VLLM_RING": False,
}
"""Environment variables with values 0 and 1, and their defaults."""
ENGINE_OPTIONS = (
    "model",
    "gpu",
    "tp",
    "drafts",
    "tree",
    "ring",
    "requests",
    "dtype",
    "state_dtype",
)
"""Options of `check` with --engine alone."""
LIST_OPTIONS = ("filter", "quick", "limit")
"""Options of `check` without --engine alone."""


class Commands(TyperGroup):
    """Reports errors in one line, whatever the width of the terminal."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None: closed
                # For terminals that know only ASCII.
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except OSError:
            try:
                print(flush=True)  # fails too on a full disk
            except OSError as problem:
                _complain(f"gated-delta: {stdout_lost(problem)}")
                abandon_stdout()
                code = 2
            else:
                raise
        except Exception as problem:
            if not hasattr(problem, "format_message"):  # typer's errors have this method
                raise
            context = getattr(problem, "ctx", None)
            command = context.command_path if context else "gated-delta"
            _complain(f"{command}: {' '.join(problem.format_message().split())}")
            code = getattr(problem, "exit_code", 2)
        sys.exit(code)


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk
        typer.echo(line, err=True)


app = typer.Typer(
    cls=Commands,
    help="Gated-delta-rule linear attention (GDN and KDA): prefill, decode, verify, flush.",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gated-delta {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    try:
        for name, default in SWITCHES.items():
            kernels.flag(name, default)
        forced_level()
        kernels.check_directory()
    except (ValueError, OSError) as problem:
        raise Refusal(getattr(problem, "strerror", None) or one_line(problem)) from None
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command()
def info() -> None:
    """Versions, devices, backends and variables."""
    table = Table(show_header=False, box=None)
    table.add_row("gated_delta", __version__)
    table.add_row(
        "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for package, version in packages().items():
        table.add_row(package, version or "not installed")
    table.add_row("cpu", f"{torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        table.add_row(f"cuda:{index}", _card(torch.device("cuda", index)))
    if not torch.cuda.device_count():
        table.add_row("cuda", "no device")
    table.add_row("backend reference", "available: PyTorch, any device, every operation")
    needs = kernels.missing_packages()
    supported = "every operation on compute capability 8.0 and newer; measured on 9.0"
    table.add_row("backend cute", f"needs {', '.join(needs)}" if needs else supported)
    by_version = Counter(file.parent.name for file in kernels.directory().glob("*/*.so"))
    counts = [f"{by_version.total()} kernels"]
    counts += [
        f"{count} of {kernels.COMPILER} {version} are unused unless GATED_DELTA_JIT=0"
        for version, count in by_version.items()
        if not kernels.runs_kernels_of(version)
    ]
    counts.append(f"compiling is {_compiling()}")
    table.add_row("kernel cache", f"{kernels.directory()}: {'; '.join(counts)}")
    for name, default in SWITCHES.items():
        value = int(kernels.flag(name, default))
        table.add_row(name, f"{value}" if name in os.environ else f"{value}, not set")
    table.add_row(LEVEL, forced_level() or "not set")
    console.print(table)


def _compiling() -> str:
    """Whether a kernel can be compiled here, and why not."""
    if not kernels.may_compile():
        return "off (GATED_DELTA_JIT=0)"
    try:
        kernels.check_can_build()
    except UnsupportedProblem as problem:
        return f"off: {one_line(problem)}"
    return "on"


def _card(device: torch.device) -> str:
    """A GPU's name and memory, its level, and how it runs the kernels compiled so far."""
    facts = torch.cuda.get_device_properties(device)
    capability = f"compute capability {facts.major}.{facts.minor}"
    words = f"{facts.name}, {capability}, {facts.total_memory / 2**30:.0f} GiB"
    try:
        gpu = gpu_of(device)
    except ValueError as problem:
        return f"{words}: {problem}"
    if gpu is None:
        return f"{words}: no kernels, only the reference backend"
    archs = [kernels.arch_of(file) for file in kernels.directory().glob("*/*.so")]
    counts = Counter(image(gpu, arch) for arch in archs if arch in (gpu.arch, gpu.level))
    files = ", ".join(f"{counts[x]} as {x}" for x in ("machine code", "PTX") if counts[x])
    return f"{words}: {gpu}, driver {driver()}; compiled kernels: {files or 'none'}"


def _directory(name: str) -> Path:
    """A path; refuses "", the value of an unset variable, which Path turns into the working one."""
    if not name:
        raise typer.BadParameter("expected a directory, got ''")
    return Path(name)


@app.command("compile")
def compile_kernels(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            parser=_directory,
            metavar="<path>",
            help="Directory of the pack: GATED_DELTA_CACHE_DIR on the machine that uses it.",
        ),
    ],
    file: FileArgument = None,
    arch: Annotated[
        str,
        typer.Option(
            metavar="<arch,...>",
            help=f"Of {', '.join(ARCHS)}. sm_80 and sm_90 have PTX for all newer GPUs.",
        ),
    ] = H200.arch,
    dtype: Annotated[
        Half, typer.Option(help="Inputs; the states are in fp32 or this.")
    ] = Half.bf16,
    size: Annotated[
        str,
        typer.Option(
            metavar="<KxV>", help="Head dims, e.g. 64x64; those of released models when not given."
        ),
    ] = "",
    ring: Annotated[
        bool, typer.Option("--ring", help="Also decode and verify with buffer_lens.")
    ] = False,
    trees: Annotated[bool, typer.Option("--trees", help="Also verify and flush of trees.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Also outputs in FP8.")] = False,
    cases: Annotated[
        bool, typer.Option("--cases", help="Also the kernels of `check --backend cute`.")
    ] = False,
    filter: FilterOption = "",
    limit: LimitOption = 0,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Processes.")] = os.cpu_count() or 1,
    as_json: JsonOption = False,
) -> None:
    """Compile kernels ahead of time; needs nvidia-cutlass-dsl and a C compiler, but no GPU."""
    from .testing import listed

    every = [case for op in Checked for case in (listed(op.value) if cases else ())]
    checked = [case for case in every if not case.reference_only]
    problems = unique(problem for case in checked for problem in case.problems)
    dims = head_dims(size) if size else None
    builds: list[tuple[kernels.Variant, str]] = []
    for name in architectures(arch):
        variants = [*dispatch.shipped(name, DTYPES[dtype.value], dims, ring, trees, fp8)]
        for problem, gpu in itertools.product(problems, gpus_of(name)):
            variants += dispatch.variants_of(problem, gpu)
        builds += [(x, name) for x in unique(variants) if filter in x.label]
    if not builds:
        raise typer.BadParameter(f"no variant's label contains {filter!r}", param_hint="--filter")
    if 0 < limit < len(builds):
        builds = random.Random(0).sample(builds, limit)
    try:
        kernels.check_tools()
    except UnsupportedProblem as problem:
        raise Refusal(one_line(problem)) from None
    if file is not None and file.resolve() == out.resolve():
        expected = "expected another file than the directory of --out"
        raise typer.BadParameter(f"{expected}, {str(out)!r}", param_hint="FILE")
    report = Report("compile", as_json, file)
    try:
        out.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=out))
    except OSError as problem:
        reason = f"cannot write to {str(out)!r}: {problem.strerror}"
        raise typer.BadParameter(reason, param_hint="--out") from None

    columns = ("variant", "registers", "stack", "shared", "seconds")
    table = make_table(f"{len(builds)} kernels for {arch}", *columns)
    records: list[dict[str, Any]] = []
    with report.measuring():
        build_all(builds, out.resolve(), min(jobs, len(builds)), records)
    for record in records:
        resources = [str(record.get(name, "-")) for name in ("registers", "stack", "shared")]
        seconds = "-" if record["seconds"] is None else f"{record['seconds']:.1f}"
        table.add_row(record["label"], *resources, seconds)
    report.write(document(context, records, complete=not report.interrupted))
    report.show(table)
    failed = [record for record in records if record["status"] == "failed"]
    for record in failed:
        report.show(f"FAILED {record['label']}: {record['reason']}", style="red")
    report.leave(bool(failed))


@app.command()
def check(
    context: typer.Context,
    file: FileArgument = None,
    backend: BackendOption = Backend.auto,
    op: Annotated[
        list[Checked] | None, typer.Option(help="Only this operation; may be repeated.")
    ] = None,
    filter: FilterOption = "",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A small part of the list, with every value of every factor; on a GPU half a "
            "minute, most of it compilation.",
        ),
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            min=0, help="At most this many cases per operation, drawn with a fixed seed; 0 for all."
        ),
    ] = 0,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    level: LevelOption = None,
    engine: Annotated[
        Engine | None,
        typer.Option(help="The plug-in in this engine, for --model, in place of the list."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="With --engine: a directory with config.json.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="<gpu>",
            help=f"With --engine: {', '.join(PRODUCTS)}; by default the one here, else an H100.",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --engine: tensor parallelism.")] = 1,
    drafts: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="With --engine: draft tokens, as the engine counts them."
        ),
    ] = 0,
    tree: Annotated[
        bool, typer.Option("--tree", help="With --engine: the drafts form a tree.")
    ] = False,
    ring: Annotated[
        bool, typer.Option("--ring", help="With --engine sglang: --enable-linear-replayssm.")
    ] = False,
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SEQUENCES,
            help="With --engine: requests at once, for the drafts' memory.",
        ),
    ] = 256,
    dtype: Annotated[
        Precision | None, typer.Option(help="With --engine: the model's when not given.")
    ] = None,
    state_dtype: Annotated[
        Precision | None, typer.Option(help="With --engine: the engine's default when not given.")
    ] = None,
) -> None:
    """Compare a backend with the recurrence in float64, on the list of cases.

    With --engine: say what a model's engine runs on gated_delta; compare its kernels on a GPU here.
    """
    report = Report("check", as_json, file)
    where = _device(device)
    force_level(context, level, where)
    chosen: list[AnyCase]
    plan: Plan | None = None
    ran = backend.value
    unused, how = (ENGINE_OPTIONS, "with") if engine is None else (LIST_OPTIONS, "without")
    _refuse_given(context, unused, f"expected only {how} --engine")
    if engine is not None:
        from . import preflight

        if backend is Backend.reference:
            expected = "expected auto or cute with --engine, got reference: plug-ins run kernels"
            raise typer.BadParameter(expected, param_hint="--backend")
        if gpu is not None and level is not None:
            raise typer.BadParameter("expected only without --gpu", param_hint="--level")
        modes = tuple(x.value for x in Checked if x in (op or ()))
        given = (dtype and DTYPES[dtype.value], state_dtype and DTYPES[state_dtype.value])
        server = (tp, drafts, tree, ring, requests, *given, gpu)
        try:
            plan = preflight.plan(preflight.Asked(engine.value, model, modes, *server), where)
        except (ValueError, OSError) as problem:  # OSError: of the kernels' directory
            raise Refusal(getattr(problem, "strerror", None) or one_line(problem)) from None
        chosen, ran = plan.cases if plan.here else [], "cute"
    else:
        chosen = _listed(op or list(Checked), quick, filter, limit, backend)
    records: list[dict[str, Any]] = []
    began = time.monotonic()
    with report.measuring():
        _compile_ahead(chosen, ran, where)
        for case in tracked(chosen, f"{len(chosen)} cases on {where}"):
            records.append(_verdict(case, ran, where))
    written = document(context, records, where, complete=not report.interrupted)
    report.write(written if plan is None else written | dict(engine=plan.record()))
    if plan is not None:
        report.show(*plan.tables())
        report.show(*plan.missing(), style="yellow")

    backends = {record["backend"] for record in records if record["backend"]}
    ran = ", ".join(sorted(backends)) or ran
    _show_verdicts(report, records, f"backend {ran} on {where}, {time.monotonic() - began:.0f} s")
    if plan is None and (card := card_of(where)) is not None and not report.interrupted:
        report.show("Please report this line:", _line(str(card), records), wrap=False)
    passed = all(record["status"] == "passed" for record in records)
    report.leave(not passed or not (plan is None or plan.ours))


def _listed(
    ops: Sequence[Checked], quick: bool, part: str, limit: int, backend: Backend
) -> list[AnyCase]:
    """The listed cases of these operations whose label contains `part`; a sample of `limit` each.

    Raises BadParameter if there is none.
    """
    from .testing import listed

    chosen: list[AnyCase] = []
    for name in ops:
        cases = [x for x in listed(name.value, quick) if part in x.label]
        if backend is Backend.cute:
            cases = [case for case in cases if not case.reference_only]
        if 0 < limit < len(cases):
            cases = sorted(random.Random(0).sample(cases, limit), key=lambda case: case.seed)
        chosen += cases
    if not chosen:
        raise typer.BadParameter(f"no case's label contains {part!r}", param_hint="--filter")
    return chosen


def _show_verdicts(report: Report, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table by operation, then every failure, then why cases are unsupported."""
    columns = ("operation", "cases", "passed", "failed", "unsupported", "worst error / tolerance")
    table = make_table(title, *columns)
    for name in Checked:
        of_op = [record for record in records if record["op"] == name.value]
        if of_op:
            statuses = Counter(record["status"] for record in of_op)
            counts = [str(statuses[status]) for status in ("passed", "failed", "unsupported")]
            shares = [e["share"] for record in of_op for e in record["errors"].values()]
            worst = f"{max(shares):.2f}" if shares else "-"
            table.add_row(name.value, str(len(of_op)), *counts, worst)
    if records:
        report.show(table)
    for record in records:
        if record["status"] == "failed":
            report.show(f"FAILED {record['label']} lengths {record['lengths']}", style="red")
            report.show(*(f"    {line}" for line in record["failures"]))
    reasons = Counter(reason for record in records for reason in record["missing"])
    for reason, count in reasons.most_common():
        report.show(f"unsupported in {count} cases: needs {reason}", style="yellow")


def _refuse_given(context: typer.Context, names: Sequence[str], expected: str) -> None:
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(expected, param_hint=f"--{name.replace('_', '-')}")


def _line(card: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The results on a card in one line, for a report to the project."""
    packages = (f"{name} {version}" for name, version in versions().items() if version)
    counts = Counter(record["status"] for record in records)
    cases = ", ".join(f"{counts[x]} {x}" for x in ("passed", "failed", "unsupported"))
    ours = sum(record["backend"] == "cute" for record in records)
    shares = [e["share"] for record in records for e in record["errors"].values()]
    worst = f"errors at most {max(shares):.2f} of their limits" if shares else "no errors to judge"
    return f"{card}; {', '.join(packages)}: {cases}, {ours} by the kernels, {worst}"


def _compile_ahead(cases: Sequence[AnyCase], backend: str, device: torch.device) -> None:
    """Compile the missing kernels of the cases in parallel processes: one by one takes minutes."""
    gpu = gpu_of(device)
    can_compile = kernels.installed(kernels.COMPILER) and kernels.may_compile()
    if gpu is None or backend == "reference" or not can_compile:
        return
    variants: set[kernels.Variant] = set()
    for case in cases:
        work = len(case.lengths), sum(case.lengths)
        for problem in case.problems:
            with contextlib.suppress(UnsupportedProblem):
                route = select(OPERATIONS[problem.op], problem, device, backend, *work)
                variants.update(route.variants)
    missing = [(variant, gpu.arch) for variant in variants if kernels.find(variant, gpu) is None]
    if missing:  # a kernel that does not compile fails its case
        build_all(missing, kernels.directory(), min(os.cpu_count() or 1, len(missing)), [])


def _verdict(case: AnyCase, backend: str, device: torch.device) -> dict[str, Any]:
    """Run a case and return its record. Its "backend": the one that ran, None if none did."""
    from .testing import run_case

    record = dict[str, Any](label=case.label, op=case.op, lengths=case.lengths)
    record |= dict(backend=None, seconds=None, failures=[], missing=[], errors={})
    try:
        result = run_case(case, backend, device)
    except UnsupportedProblem as problem:
        missing = problem.missing or [one_line(problem)]
        return dict(record, status="unsupported", missing=missing)
    except Exception as problem:  # the other cases still run
        return dict(record, status="failed", failures=[first_line(problem)])
    errors = {
        name: dict(error=vars(e), plain=vars(p), unit=unit, share=e.share(p, unit))
        for name, (e, p, unit) in result.errors.items()
    }
    names = ("backend", "seconds", "failures")
    record |= {name: getattr(result, name) for name in names} | dict(errors=errors)
    return dict(record, status="passed" if result.passed else "failed")


@app.command()
def bench(
    context: typer.Context,
    file: FileArgument = None,
    op: Annotated[Op, typer.Option(help="Operation to time.")] = Op.decode,
    model: Annotated[
        list[Model] | None, typer.Option(help="gdn or kda; may be repeated, both when not given.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences, e.g. 1,8,64.")] = "1,8",
    tokens: Annotated[
        str, typer.Option(help="Tokens per sequence, e.g. 1,4; 4096 for a prefill when not given.")
    ] = "",
    heads: Annotated[str, typer.Option(help="H/HV: query/key heads and value heads.")] = "8/8",
    dim: Annotated[int, typer.Option(min=1, max=MAX_DIM, help="K = V.")] = 128,
    gate: Annotated[GateKind, typer.Option(help="Kind of the gate g.")] = GateKind.softplus,
    dtype: Annotated[Precision, typer.Option(help="Inputs.")] = Precision.bf16,
    state_dtype: Annotated[Precision, typer.Option(help="State's dtype.")] = Precision.fp32,
    backend: BackendOption = Backend.auto,
    token_loop: Annotated[
        bool, typer.Option("--token-loop", help="Prefill: time the token recurrence too, in turns.")
    ] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    level: LevelOption = None,
) -> None:
    """Check an operation, then time it, a copy of as many bytes, and the host's work."""
    from . import bench as timing

    where = _device(device)
    force_level(context, level, where)
    H, HV = head_counts(heads)
    if token_loop and op is not Op.prefill:
        raise typer.BadParameter(
            "only a prefill has a token loop to compare with", param_hint="--token-loop"
        )
    most = MAX_TOKENS if op is Op.prefill else MAX_DRAFT
    lengths = ints(tokens or ("4096" if op is Op.prefill else "1"), "--tokens", most)
    sizes: dict[str, Any] = dict(op=op.value, D=dim, heads=(H, HV), gate=gate.value)
    dtypes: dict[str, Any] = dict(
        dtype=DTYPES[dtype.value],
        g_dtype=DTYPES[dtype.value],
        state_dtype=DTYPES[state_dtype.value],
    )
    chosen = [
        timing.typical(
            axis={"gdn": "head", "kda": "channel"}[m.value], lengths=(T,) * N, **sizes, **dtypes
        )
        for m in model or list(Model)
        for N in ints(batch, "--batch", MAX_SEQUENCES)
        for T in lengths
    ]
    for case in chosen:
        _refuse_unfit(case, backend.value, where)
    report = Report("bench", as_json, file)
    records: list[dict[str, Any]] = []
    with (
        report.measuring(),
        torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext(),
    ):
        for case in tracked(chosen, f"{op.value} on {where}"):
            try:
                records.append(timing.time_case(case, backend.value, where, token_loop))
            except Exception as problem:  # mostly out of memory; the other cases still run
                records.append(dict(label=case.label, status="failed", reason=first_line(problem)))
            if records[-1]["status"] == "failed":
                report.say(f"{records[-1]['reason']}: {case.label}")
    report.write(document(context, records, where, complete=not report.interrupted))
    if timed := [record for record in records if record["status"] == "timed"]:
        report.show(timing.table(op.value, timed))
    report.leave(len(records) > len(timed))


def _refuse_unfit(case: Case, backend: str, device: torch.device) -> None:
    """Raises BadParameter if the device lacks memory for the case, or the backend its kernels."""
    from . import bench as timing

    N, total = len(case.lengths), sum(case.lengths)
    if timing.least_memory(case) > (room := timing.memory(device)):
        heads = "/".join(map(str, case.heads))
        asked = f"N={N:,} T={case.lengths[0]:,} heads {heads} dim {case.D}"
        reason = f"{asked} takes more than the {room / 2**30:.0f} GiB of {device}"
        raise typer.BadParameter(reason, param_hint="--batch")
    try:
        for problem in case.problems:
            select(OPERATIONS[problem.op], problem, device, backend, N, total)
    except UnsupportedProblem as problem:
        raise typer.BadParameter(one_line(problem), param_hint="--backend") from None


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Argument(help="Text for the model to continue.")
    ] = "The for statement is used to",
    length: Annotated[int, typer.Option(min=1, max=2000, help="Bytes to generate.")] = 160,
    backend: BackendOption = Backend.auto,
    device: DeviceOption = "auto",
) -> None:
    """Run the shipped model with and without gated_delta, then one request step by step."""
    from .demo import show

    try:
        if not prompt.encode():
            raise typer.BadParameter("expected some text", param_hint="PROMPT")
    except UnicodeEncodeError:
        raise typer.BadParameter(
            "expected text in the encoding of the locale", param_hint="PROMPT"
        ) from None
    where = _device(device)
    if backend is Backend.cute and where.type != "cuda":
        raise typer.BadParameter(f"cute needs a CUDA device, got {where}", param_hint="--backend")
    if where.type == "cpu":
        torch.set_num_threads(1)  # the model is small, and idle threads spin
    report = Report("demo", as_json=False, file=None)
    passed = False
    try:
        with report.measuring():
            passed = show(prompt, length, backend.value, where, console)
    except (ImportError, UnsupportedProblem) as problem:
        raise Refusal(one_line(problem)) from None
    report.leave(not passed)


if __name__ == "__main__":
    app()
