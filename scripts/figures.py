"""Writes the tables of README.md and docs/, and a picture, from benchmarks/results/*.json.

    python scripts/figures.py           # between <!-- figures: NAME --> and <!-- end -->
    python scripts/figures.py --check   # only names the pages that differ, and fails

Ratios are a peer's time over ours: more is better. They and their geometric means are rounded down.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/kernels/decode.md",
    "docs/kernels/verify.md",
    "docs/kernels/prefill.md",
    "docs/engines.md",
    "docs/engines-measured.md",
    "docs/gpus.md",
)

PICTURE = "docs/speed.svg"

Cell = dict[str, Any]


def cells(name: str) -> list[Cell]:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())["cells"]


def down(x: float) -> str:
    """x with two digits, rounded down."""
    return f"{math.floor(x * 100 + 1e-9) / 100:.2f}"


class Group(NamedTuple):
    """Ratios of a group of cells, and the label of the least."""

    ratios: list[float]
    least_at: str

    @staticmethod
    def of(cells: Iterable[Cell], ratio: Callable[[Cell], float]) -> Group:
        pairs = [(ratio(cell), cell["label"]) for cell in cells]
        return Group([x for x, _ in pairs], min(pairs)[1])

    @property
    def mean(self) -> str:
        return down(math.exp(sum(map(math.log, self.ratios)) / len(self.ratios)))

    @property
    def least(self) -> str:
        return down(min(self.ratios))

    @property
    def columns(self) -> list[str]:
        behind = str(sum(x < 1 for x in self.ratios) or "none")
        return [str(len(self.ratios)), self.mean, f"{self.least} ({self.least_at})", behind]


def against(*peers: str) -> Callable[[Cell], float]:
    """Time over ours of the best of these peers (by default of all) that ran the cell."""

    def ratio(cell: Cell) -> float:
        ran = [x for name, x in cell["peers"].items() if x["us"] and (not peers or name in peers)]
        return min(x["us"] / x.get("ours_us", cell["us"]) for x in ran)

    return ratio


def decode() -> dict[str, Group]:
    names = {
        "T=1": "decode, 1 token, bf16 states",
        "T>1": "decode, 2 to 8 tokens, every state written",
        "fp32": "decode, 1 token, fp32 states",
    }
    return {
        name: Group.of((c for c in cells("decode") if c["family"] == family), against())
        for family, name in names.items()
    }


def us(x: float) -> str:
    """A time in us with three digits."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


def decode_us() -> str:
    """One token, bf16 states: our time, the fastest peer's, a copy's."""
    rows = {}
    for cell in cells("decode"):
        shown = cell["series"] in ("GDN 16/64 bf16 T=1", "KDA 32/32 bf16 T=1")
        if shown and cell["sequences"] in (1, 8, 64, 512):
            peer = min((x["us"], name) for name, x in cell["peers"].items() if x["us"])
            times = [us(cell["us"]), us(peer[0]), PEERS[peer[1]], us(cell["copy_us"])]
            rows[cell["label"].replace(" T=1", "")] = times
    return table("one token, us", "ours", "best peer", "its name", "copy", rows=rows)


PEERS = dict(flashinfer="FlashInfer", sglang="SGLang", fla="FLA")


def verify_us() -> str:
    """Six drafts: verify, flush, their chain, and peers that keep a state per draft."""
    rows = {}
    for cell in cells("speculate"):
        heads, parts, peers = cell["heads"], cell["parts"], cell["peers"]
        shown = peers and cell["tokens"] == 6 and cell["sequences"] in (1, 8, 64)
        if shown and heads in ([16, 64], [32, 32]):
            times = [parts["verify"], parts["flush"], cell["us"]]
            times += [peers[name]["us"] for name in ("sglang", "flashinfer", "cached")]
            rows[cell["label"].replace(" T=6", "")] = [us(x) if x else "-" for x in times]
    heads = ("verify", "flush", "both", "SGLang", "FlashInfer", "cached")
    return table("6 drafts, us", *heads, rows=rows)


def verify(*peers: str) -> dict[str, Group]:
    families: dict[str, list[Cell]] = {}
    for cell in cells("speculate"):
        if cell["peers"]:
            families.setdefault(cell["family"], []).append(cell)
    return {
        f"verify and flush, {family} states": Group.of(group, against(*peers))
        for family, group in families.items()
    }


def prefill(ratio: str, file: str = "prefill") -> dict[str, Group]:
    """ratio: "raw_ratio" with the time of preparing a peer's inputs, "ratio" without."""
    kinds = [
        ("GDN", "gdn", ("fast", "slow")),
        ("KDA, slow gates", "kda", ("slow",)),
        ("KDA, fast gates", "kda", ("fast",)),
    ]
    return {
        f"prefill, {name}": Group.of(
            (c for c in cells(file) if c["model"] == model and c["facts"]["gates"] in gates),
            lambda cell: cell[ratio],
        )
        for name, model, gates in kinds
    }


def made_beforehand(groups: dict[str, Group]) -> dict[str, Group]:
    return {f"{name}, peers' inputs made beforehand": group for name, group in groups.items()}


def layer() -> dict[str, Group]:
    """Decode with convolution and norm; drafts are already convolved."""
    layers = cells("layer")
    groups = {
        "KDA, 1 token, fp32 states: vLLM's fused kernel": Group.of(
            (c for c in layers if c["family"] == "KDA step" and c["state_dtype"] == "fp32"),
            against("vllm"),
        ),
        "GDN, 2 to 8 drafts: vLLM's fused kernel": Group.of(
            (c for c in layers if c["family"] == "GDN drafts"), against("vllm")
        ),
    }
    for B in (1, 8, 64, 256):
        steps = (
            c
            for c in layers
            if c["tokens"] == 1 and c["state_dtype"] == "bf16" and c["sequences"] == B
        )
        groups[f"GDN and KDA, 1 token, bf16 states, B={B}: the best chain"] = Group.of(
            steps, against()
        )
    return groups


def projected() -> str:
    """A layer from its input projection to its output projection, us; at the end, means."""
    rows, groups = {}, {}
    for cell in (layers := cells("h100/layer_projected")):
        peers = (cell["peers"].get(name, {}).get("us") for name in ("sglang", "vllm"))
        times = (cell["parts"]["projections"], cell["us"], *peers)
        layer, _, batch = cell["label"].replace(" projected", "").rpartition(" ")
        rows[f"{layer} | {batch}"] = [*(us(x) if x else "-" for x in times), down(against()(cell))]
    for cell in layers:
        few = "1 and 8 requests" if cell["sequences"] <= 8 else "64 and 256 requests"
        groups.setdefault("prompts" if cell["tokens"] > 1 else few, []).append(cell)
    for name, group in groups.items():
        rows[f"geometric mean | {name}"] = [*[""] * 4, Group.of(group, against()).mean]
    heads = ("the projections", "ours", "SGLang's chain", "vLLM's chain", "best over ours")
    return table("one H100, us", "batch", *heads, rows=rows)


def h100() -> str:
    groups = prefill("raw_ratio", "h100/prefill") | made_beforehand(
        prefill("ratio", "h100/prefill")
    )
    return summary("best peer's time over ours, one H100", groups)


def levels() -> str:
    """Our kernels of other GPUs' levels, on the GPU of the results."""

    def ratios(op: str, level: str, over: str = "") -> list[float]:
        """Times of the level over those of the shipped kernels; or of a peer over the level's."""
        times = [
            (cell["peers"][level]["us"], cell["peers"][over]["us"] if over else cell["us"])
            for cell in cells(f"levels/{op}")
            if cell["peers"].get(level, {}).get("us") and (not over or cell["peers"][over]["us"])
        ]
        return [peer / us if over else us / peer for us, peer in times]

    def said(x: list[float], end: Callable[[list[float]], float]) -> str:
        if not x:
            return "-"
        return f"{math.exp(sum(map(math.log, x)) / len(x)):.2f}, {end(x):.2f}"

    rows = {}
    for level in ("sm_90", "sm_120", "sm_80", "sm_86"):
        rows[level] = [said(ratios("prefill", level, "fla"), min)]
        rows[level] += [said(ratios(op, level), max) for op in ("prefill", "decode", "speculate")]
    heads = "prefill: FLA's time over ours, mean, least", "prefill over sm_90a's: mean, most"
    return table("level", *heads, "decode", "verify and flush", rows=rows)


def buffered() -> str:
    """Bare decode's time and SGLang's ReplaySSM's over that of decode with a buffer."""
    rows: dict[str, list[str]] = {}
    for cell in cells("buffer"):
        peer = cell["peers"].get("replayssm", {}).get("us")
        for name, theirs in (("bare decode", cell["parts"]["decode"]), ("ReplaySSM", peer)):
            if theirs:
                rows.setdefault(f"{cell['series']}: {name}", []).append(down(theirs / cell["us"]))
    return table("", *(f"B = {B}" for B in (1, 8, 64, 256)), rows=rows)


def trees() -> str:
    """The time of a tree of 14 drafts over that of a chain of 14, rounded up."""
    rows: dict[str, list[str]] = {}
    for cell in cells("trees"):
        ratio = cell["us"] / cell["parts"]["chain"]
        rows.setdefault(cell["series"], []).append(f"{math.ceil(ratio * 100 - 1e-9) / 100:.2f}")
    return table("`[2, 2, 2]`, 14 drafts", *(f"B = {B}" for B in (1, 8, 64)), rows=rows)


def deterministic() -> str:
    """The time of a deterministic prefill over the default's, rounded up: True, then L = 1024."""
    rows: dict[str, list[str]] = {}
    for cell in cells("h100/deterministic"):
        ratios = [math.ceil(x / cell["us"] * 100 - 1e-9) / 100 for x in cell["parts"].values()]
        rows.setdefault(cell["series"], []).append("; ".join(f"{x:.2f}" for x in ratios))
    return table("one H100", "1 x 1024", "1 x 8192", "1 x 65536", "8 x 1024", rows=rows)


def table(*heads: str, rows: dict[str, list[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *((name, *columns) for name, columns in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(title: str, groups: dict[str, Group]) -> str:
    return table(
        title,
        "cells",
        "geometric mean",
        "least",
        "behind in",
        rows={n: g.columns for n, g in groups.items()},
    )


def operations() -> dict[str, Group]:
    """The groups of all operations, from a peer's raw inputs."""
    step = Group.of(cells("layer"), against())
    groups = decode() | {"a layer's decode step, with its convolution and norm": step}
    return groups | verify("sglang", "flashinfer") | prefill("raw_ratio")


def all_operations() -> str:
    groups = operations() | made_beforehand(prefill("ratio"))
    return summary("best peer's time over ours, one H200", groups)


def headline() -> str:
    """A figure each for decode, prefill and time to first token in an engine."""
    cell = next(c for c in cells("serve/sglang") if c["label"] == "64 x 512")
    engine, ours = cell["ttft_ms"].values()
    prompts = prefill("raw_ratio")["prefill, GDN"]
    tokens = decode()["decode, 1 token, bf16 states"]
    rows = {
        "decode of a token, bf16 states": [
            f"**{tokens.mean}** (mean of {len(tokens.ratios)} shapes)",
            "the best of FlashInfer, SGLang, FLA",
            "`python -m benchmarks measure decode --peers flashinfer,sglang,fla`",
        ],
        "prefill of GDN, with normalising q and k and activating gates": [
            f"**{prompts.mean}** (mean of {len(prompts.ratios)} shapes)",
            "the best of FlashInfer, FlashQLA, cuDNN, FLA",
            "`python -m benchmarks measure prefill --peers fla,flashinfer,cudnn,flashqla`",
        ],
        "time to first token, 64 prompts of 512 tokens": [
            f"**{down(cell['ttft_ratio'])}** ({ours:.1f} ms, not {engine:.1f})",
            "SGLang's own kernels, 8 layers with Qwen3-Next's sizes",
            "`python -m benchmarks serve sglang --starts 3`",
        ],
    }
    return table("one H200", "times as fast", "as", "command", rows=rows)


def picture() -> str:
    """A bar for each group: the geometric mean of the best peer's time over ours; a tick: least."""
    groups = operations()
    left, unit, step, top = 380, 130, 24, 46
    bottom = top + step * len(groups)
    size = f"0 0 {left + 3 * unit + 20} {bottom + 44}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-size="12"',
        '  font-family="sans-serif" fill="#222">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<text x="10" y="22" font-weight="bold">Times as fast as the best peer, one H200</text>',
        f'<text x="{left}" y="22">bar: geometric mean; tick: least of all shapes</text>',
        f'<text x="{left + unit}" y="{bottom + 34}" text-anchor="middle" fill="#c00">equal</text>',
    ]
    for x in range(4):
        at, dash = left + x * unit, ' stroke-dasharray="2 4"' * (x > 1)
        lines.append(f'<path d="M{at} {top - 8}V{bottom}" stroke="#888"{dash}/>')
        lines.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{x}</text>')
    for i, (name, group) in enumerate(groups.items()):
        y, end = top + step * i, left + float(group.mean) * unit
        least = left + float(group.least) * unit
        lines += [
            f'<text x="10" y="{y + 12}">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="16" fill="#76b900"/>',
            f'<path d="M{least:.1f} {y - 2}v20" stroke="#222" stroke-width="2"/>',
            f'<rect x="{end + 2:.1f}" y="{y}" width="34" height="16" fill="#fff"/>',
            f'<text x="{end + 6:.1f}" y="{y + 12}">{group.mean}</text>',
        ]
    equal = f'<path d="M{left + unit} {top - 8}V{bottom}" stroke="#c00"/>'
    return "\n".join([*lines, equal, "</svg>", ""])


def verify_peers() -> str:
    """Our chain against single peers, and the memory of drafts."""
    memory: dict[str, float] = {}
    for cell in cells("speculate"):
        if cell["peers"] and cell["tokens"] == 4:
            memory[f"verify and flush, {cell['family']} states"] = cell["facts"]["memory_ratio"]
    peers = [verify(name) for name in ("sglang", "cached")]
    rows = {
        name: [x for peer in peers for x in (peer[name].mean, peer[name].least)]
        + [f"{math.floor(ratio)} times less"]
        for name, ratio in memory.items()
    }
    heads = ("SGLang: mean", "least", "cached: mean", "least", "rollback memory, T=4")
    return table("a peer's time over our chain's", *heads, rows=rows)


def replayssm() -> str:
    """A round of four drafts: ours, half of two rounds, ReplaySSM, a state per draft."""
    rows = {}
    for cell in cells("replayssm"):
        heads, peers = cell["heads"], cell["peers"]
        shown = cell["tokens"] == 4 and cell["sequences"] in (1, 8, 64)
        if shown and heads in ([16, 64], [32, 32]):
            times = [cell["us"], cell["parts"]["two_rounds"] / 2]
            times += [peers[name]["us"] for name in ("replayssm", "sglang")]
            rows[cell["label"].replace(" T=4", "")] = [us(x) for x in times]
    return table("", "ours", "two rounds", "ReplaySSM", "a state per draft", rows=rows)


def served(engine: str) -> str:
    """Several starts: medians, ranges of wall times, and whether the two ranges are apart."""
    rows = {}
    for cell in cells(f"serve/{engine}"):
        columns = rows[cell["label"]] = []
        for name, digits in (("ttft", 1), ("tpot", 2)):
            columns += ranged(cell, f"{name}_ms", digits)
            columns.append(down(cell[f"{name}_ratio"]) + judged(cell, f"{name}_ms"))
    heads = ("TTFT, ms: its kernels", "ours", "ratio", "TPOT, ms: its kernels", "ours", "ratio")
    return table("prompts x tokens", *heads, rows=rows)


def serving() -> str:
    """The least and most ratios of each engine's wall times, and of its prefill's kernels."""
    rows = {}
    for name, engine in (("SGLang", "sglang"), ("vLLM", "vllm")):
        measured = cells(f"serve/{engine}")
        kernels = [x for x in measured if "kernels_us" in x]
        columns = [[float(down(x[f"{time}_ratio"])) for x in measured] for time in ("ttft", "tpot")]
        columns.append([float(ratio(x, "prefill all")) for x in kernels])
        columns.append([float(ratio(x, "decode all")) for x in kernels])
        rows[name] = [f"{min(x):.2f} to {max(x):.2f}" for x in columns]
    heads = ("time to first token", "time per token", "prefill's kernels", "a step's kernels")
    return table("", *heads, rows=rows)


def ring() -> str:
    """us of a step's kernels with SGLang's ring of decoded tokens."""
    rows = {}
    for cell in cells("serve/sglang_ring"):
        times = cell["kernels_us"]["decode all"].values()
        rows[cell["label"]] = [f"{x:,.0f}" for x in times]
    return table("prompts x tokens", "SGLang's ring", "ours", rows=rows)


def ranged(cell: Cell, name: str, digits: int) -> list[str]:
    """A time with the engine's kernels and with ours, each with its least and most if known."""
    times = []
    for side, median in cell[name].items():
        least, most = cell.get("spread", {}).get(name, {}).get(side, (median, median))
        ends = f" ({least:.{digits}f}-{most:.{digits}f})" if least < most else ""
        times.append(f"{median:.{digits}f}{ends}")
    return times


def judged(cell: Cell, name: str) -> str:
    """What follows a ratio of several starts: whether their ranges are apart."""
    verdict = cell.get("verdict", {}).get(name)
    return f" {verdict}" if verdict else ""


def kernels(file: str) -> str:
    """The engine's times of GPU kernels over ours."""
    names = [f"{part} {name}" for part in ("prefill", "decode") for name in ("recurrence", "all")]
    rows = {
        cell["label"]: [ratio(cell, name) + judged(cell, name) for name in names]
        for cell in cells(f"serve/{file}")
        if "kernels_us" in cell
    }
    heads = ("prefill's recurrence", "all kernels", "a decode step's recurrence", "all kernels")
    return table("prompts x tokens", *heads, rows=rows)


def ratio(cell: Cell, name: str) -> str:
    times = cell["kernels_us"][name]
    return down(times["engine"] / times["gated_delta"])


def tokens(engine: str) -> str:
    """Equal answers; the engine's largest preference for its own token where answers differ."""
    rows = {}
    for cell in cells(f"serve/{engine}_tokens"):
        known = None not in cell["parted"]  # else our token was not among the engine's best
        gaps = f"{max(cell['parted'], default=0):.4f}" if known else "beyond the best 5"
        deviation = f"{cell['deviation']['mean']:.4f}" if cell["deviation"] else "not asked for"
        rows[cell["label"]] = [f"{cell['equal']} of {cell['prompts']}", gaps, deviation]
    return table(
        "answers",
        "equal",
        "largest gap where they part",
        "mean difference of log probabilities",
        rows=rows,
    )


def prefill_rules() -> str:
    """The rules of prefill's schedules, from the code."""
    import torch

    from gated_delta.gpus import H200
    from gated_delta.ops import prefill_schedule
    from gated_delta.problem import Problem

    rows = {}
    for number, rule in enumerate(prefill_schedule.RULES, 1):
        axis = "channel" if rule.kind.raw else "head"
        facts = dict(dtype=torch.bfloat16, g_dtype=torch.bfloat16, state_dtype=torch.float32)
        problem = Problem("prefill", axis, 1, 1, 128, 128, gate="softplus", **facts)
        variants = rule.kind.variants(problem, True, H200)
        names = [variant.kernel.removeprefix("prefill_") for variant in variants]
        figure, _, h100 = rule.figure.partition("; H100 ")
        rows[str(number)] = [rule.kind.name, rule.condition, ", ".join(names), figure, h100]
    return table("", "schedule", "if", "kernels", "figure", "H100", rows=rows)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "all": all_operations,
    "serve": serving,
    "ring sglang": ring,
    "serve sglang": lambda: served("sglang"),
    "serve vllm": lambda: served("vllm"),
    "serve transformers": lambda: served("transformers"),
    "kernels sglang": lambda: kernels("sglang"),
    "kernels sglang drafts": lambda: kernels("sglang_drafts_kernels"),
    "kernels sglang kimi": lambda: kernels("sglang_kimi_kernels"),
    "kernels vllm": lambda: kernels("vllm"),
    "kernels vllm kimi": lambda: kernels("vllm_kimi_kernels"),
    "tokens sglang": lambda: tokens("sglang"),
    "tokens vllm": lambda: tokens("vllm"),
    "decode us": decode_us,
    "verify us": verify_us,
    "buffer": buffered,
    "trees": trees,
    "deterministic": deterministic,
    "projected": projected,
    "layer": lambda: summary(
        "the engines' time over ours, with a convolution in front of one token", layer()
    ),
    "verify peers": verify_peers,
    "replayssm": replayssm,
    "prefill h100": h100,
    "prefill rules": prefill_rules,
    "levels": levels,
}


def filled(text: str) -> str:
    """The page with every table of the results."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- figures: ([\w ]+) -->)\n.*?<!-- end -->", fill, text, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a page differs"
    )
    check = parser.parse_args().check
    new = {page: filled((ROOT / page).read_text()) for page in PAGES} | {PICTURE: picture()}
    stale = [name for name, text in new.items() if (ROOT / name).read_text() != text]
    for name in stale:
        print(f"{name} {'differs from' if check else 'now has'} the figures of benchmarks/results")
        if not check:
            (ROOT / name).write_text(new[name])
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
