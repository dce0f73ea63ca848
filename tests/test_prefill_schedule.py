"""Which kernels a prefill takes: the rules, their figures, and the workspace that follows."""

import itertools
import random

import pytest
import torch

from gated_delta.gpus import FORCED, H200
from gated_delta.kernels.prefill import arguments
from gated_delta.ops import PREFILL, prefill_schedule
from gated_delta.ops.prefill import scanned_segments
from gated_delta.ops.prefill_kinds import GRID, SEGMENTS, TILES
from gated_delta.ops.prefill_schedule import KINDS, RULES, Call, longest_of, rule_of, schedule_of
from gated_delta.problem import Problem
from gpu import scheduled, scheduled_by

GDN, KDA = "head", "channel"


def problem(axis, heads, *options, **changes):
    facts = dict(K=128, V=128, state_dtype=torch.float32, dtype=torch.bfloat16)
    facts |= dict(g_dtype=torch.bfloat16, gate="softplus", options=frozenset(options))
    return Problem("prefill", axis, *heads, **(facts | changes))


def planned(axis, heads, lengths, *options, gpu=H200, **changes):
    """The schedule of a call whose longest sequence is known."""
    call = problem(axis, heads, *options, **changes)
    return schedule_of(Call(call, len(lengths), sum(lengths), max(lengths, default=0), gpu))


MODELS = [
    # Qwen3-Next and Kimi Linear, and their shares under tensor parallelism.
    (GDN, (16, 32), (1024,) * 8, "fused"),
    (GDN, (16, 64), (1024,) * 8, "fused"),
    (GDN, (16, 32), (8192,), "overlapped"),
    (GDN, (4, 8), (8192,), "8 segments"),
    (GDN, (4, 8), (65536,), "8 segments"),
    (GDN, (16, 32), (512,), "tiles"),
    (GDN, (16, 32), (), "tiles"),
    (KDA, (32, 32), (1024,) * 8, "raw"),
    (KDA, (64, 64), (8192,), "raw overlapped"),
    (KDA, (32, 32), (4096,) * 2, "raw overlapped"),
    (KDA, (32, 32), (8192,), "overlapped"),
    (KDA, (8, 8), (8192,), "8 segments"),
    (GDN, (4, 8), (1024,), "4 segments"),
    (GDN, (8, 16), (1536,), "4 segments"),
    (KDA, (8, 8), (1536,), "6 segments"),
    (KDA, (8, 8), (1024,), "tiles"),
    (GDN, (8, 32), (2048,), "tiles"),
    (KDA, (32, 32), (256,), "tiles"),
    # One sequence far longer than the others leaves SMs idle.
    (GDN, (4, 8), (4096, *[455] * 9), "tiles"),
    (KDA, (8, 8), (4096, *[215] * 19), "tiles"),
    # A chunk per sequence; many value heads per k head; rounds that do not fill the SMs.
    (GDN, (16, 32), (64,) * 20, "tiles"),
    (GDN, (4, 64), (1024,) * 8, "tiles"),
    (GDN, (16, 64), (2730,) * 3, "tiles"),
]


@pytest.mark.parametrize(("axis", "heads", "lengths", "schedule"), MODELS, ids=str)
def test_models_take_the_kernels_that_were_measured(axis, heads, lengths, schedule):
    assert planned(axis, heads, lengths).label == schedule


UNSUPPORTED = [
    ("fused", GDN, dict(dtype=torch.float16)),
    ("fused", GDN, dict(K=64)),
    ("fused", KDA, {}),
    ("raw", GDN, {}),
    ("raw", KDA, dict(g_dtype=torch.float32)),
    ("raw overlapped", KDA, dict(V=64)),
    ("overlapped", KDA, dict(g_dtype=torch.float32)),
    ("overlapped", GDN, dict(dtype=torch.float16)),
    ("segments", GDN, dict(K=96)),
    ("segments", KDA, dict(V=192)),
    ("overlapped", GDN, dict(K=96, V=192)),
    ("fused", GDN, dict(V=192)),
    ("grid", GDN, {}),
    ("grid", KDA, dict(grid=64, K=96)),
    ("segments", GDN, dict(grid=64, options=frozenset({"deterministic"}))),
]
UNSUPPORTED += [
    (kind, axis, dict(options=frozenset({"deterministic"})))
    for kind, axis in (("fused", GDN), ("raw", KDA), ("raw overlapped", KDA), ("segments", GDN))
]
UNSUPPORTED += [
    (kind, axis, dict(gpu=FORCED[level]))
    for kind, axis in (("fused", GDN), ("raw", KDA), ("raw overlapped", KDA), ("overlapped", KDA))
    for level in ("sm_90", "sm_80")
]


@pytest.mark.parametrize(("kind", "axis", "changes"), UNSUPPORTED, ids=str)
def test_kinds_without_kernels_for_a_problem(kind, axis, changes):
    facts = {name: x for name, x in changes.items() if name != "gpu"}
    gpu = changes.get("gpu", H200)
    assert not scheduled_by(kind).kind.supports(problem(axis, (16, 32), **facts), gpu=gpu)
    for lengths in ((64,), (8192,), (4096,) * 2, (1024,) * 8, (300,) * 40):
        for heads in ((2, 2), (16, 32), (64, 64)):
            assert planned(axis, heads, lengths, **changes).kind.name != kind


def test_a_scan_of_raw_tokens_overlaps_with_32_sequences_at_most():
    kind = scheduled_by("raw overlapped").kind
    assert kind.supports(problem(KDA, (2, 2)), 32)
    assert not kind.supports(problem(KDA, (2, 2)), 33)


def test_schedules_fit_the_gpu():
    """Segments of all heads run at once; every schedule has kernels; other GPUs have other SMs."""
    rng, kinds = random.Random(0), set()
    for _ in range(3000):
        axis, H = rng.choice((GDN, KDA)), rng.choice((1, 2, 4, 8, 16, 24, 32, 48, 64, 96))
        heads = (H, H * rng.choice((1, 2, 4)))
        longest = 2 ** rng.randrange(1, 17)
        lengths = [rng.randrange(longest) + 1 for _ in range(rng.choice((1, 1, 2, 4, 10, 40)))]
        sms, options = rng.choice((20, 78, 114, 132)), rng.choice(((), ("deterministic",)))
        gpu = rng.choice((H200, H200, FORCED["sm_90"], FORCED["sm_86"]))._replace(sms=sms)
        grid = rng.choice((None, 64, 1024)) if options else None
        schedule = planned(axis, heads, lengths, *options, gpu=gpu, grid=grid)
        kinds.add((gpu.level, schedule.kind))
        assert schedule.kind.supports(problem(axis, heads, *options, grid=grid), len(lengths), gpu)
        assert schedule.kind.on_grid == (max(lengths) >= (grid or 2**20))
        if schedule.kind.segmented and not schedule.kind.on_grid:
            least = 4 if gpu.level == "sm_90a" else 2
            assert least <= schedule.segments <= sms // (2 * heads[1] * len(lengths))
        else:
            assert schedule.segments == 1
    portable = (TILES, SEGMENTS, GRID)
    by_level = {"sm_90a": KINDS, "sm_90": portable, "sm_80": portable}
    assert kinds == {(level, kind) for level, kinds in by_level.items() for kind in kinds}


def test_rules_are_few_and_have_their_reasons():
    thresholds = {
        name: len(x) if isinstance(x, dict) else 1
        for name, x in vars(prefill_schedule).items()
        if name.isupper() and isinstance(x, int | float | dict) and not hasattr(arguments, name)
    }
    assert len(RULES) <= 8
    assert sum(thresholds.values()) <= 15
    for rule in RULES:
        assert rule.condition
        assert rule.figure or rule is RULES[-1]


def test_explain_prints_the_rule():
    route = str(planned(GDN, (16, 32), (1024,) * 8))
    assert route == "fused: GDN, heads fill the SMs, sequences of more than a chunk"
    assert str(planned(GDN, (4, 8), (8192,))).startswith("8 segments: few heads")


def test_a_prompt_of_no_tokens_takes_tiles():
    assert rule_of(Call(problem(GDN, (2, 4)), 0, 0, 0, H200)).kind.name == "tiles"


def test_packed_tokens_lie_on_a_grid_whatever_max_seqlen_says():
    """Bits may not depend on it. Dense sequences have their own length."""
    options = frozenset({"deterministic", "cu_seqlens_i32"})
    packed = problem(GDN, (2, 4), options=options, grid=1024)
    for tokens, name in ((1023, "tiles"), (1024, "grid")):
        for max_seqlen in (None, 1, 5000):
            longest = longest_of(packed, 8, tokens, max_seqlen)
            assert schedule_of(Call(packed, 8, tokens, longest, H200)).kind.name == name
    assert planned(GDN, (2, 4), (1023,) * 8, "deterministic", grid=1024).kind.name == "tiles"


@pytest.mark.parametrize(
    ("axis", "heads", "lengths", "changes", "halved"),
    [
        (GDN, (2, 4), (8192,), dict(grid=1024), True),  # 4 x 8 x 4 CTAs
        (GDN, (2, 4), (2048,) * 4, dict(grid=1024), True),
        (GDN, (2, 5), (8192,), dict(grid=1024), False),
        (GDN, (2, 4), (8192,), dict(grid=1024, V=64), False),
        (GDN, (2, 4), (8192,), dict(grid=1024, gpu=FORCED["sm_90"]), False),
        (KDA, (8, 8), (1536,), {}, False),  # 8 x 5 x 4
        (GDN, (4, 8), (1024,), {}, True),  # 8 x 3 x 4
        (GDN, (4, 8), (1023,), {}, False),  # tiles
    ],
)
def test_transitions_are_halved_where_ctas_run_at_once(axis, heads, lengths, changes, halved):
    options = ("deterministic",) if "grid" in changes else ()
    schedule = planned(axis, heads, lengths, *options, **changes)
    assert schedule.halved == halved


@pytest.mark.parametrize(("segments", "ctas", "most"), [(8, 16, 1), (64, 16, 8), (8, 24, 2)])
def test_ctas_that_scan_a_grid_run_at_once(segments, ctas, most):
    """GDN 4/8 and KDA 12/12 on 132 SMs."""
    each = scanned_segments(segments, ctas, 132)
    assert each == most
    assert ctas * -(-segments // each) <= 132


def test_unknown_packed_lengths_count_as_uneven():
    dense, packed = problem(GDN, (2, 2)), problem(GDN, (2, 2), "cu_seqlens=int32")
    assert longest_of(dense, 4, 4000, None) == 1000
    assert longest_of(packed, 4, 4000, None) == 2000
    assert longest_of(packed, 100, 6000, None) == 2000
    assert longest_of(packed, 4, 4000, 1200) == 1200
    assert longest_of(packed, 4, 4000, 2**40) == 4000
    assert longest_of(packed, 0, 0, None) == 0


# ------------------------------------------------------------------------------ schedules passed in


def plan(axis, **changes):
    return PREFILL.plan(problem(axis, (2, 2), **changes), 1, 64)


def test_a_schedule_passed_in_is_taken_and_given_up():
    with scheduled(*map(scheduled_by, ("fused", "raw", "tiles"))):
        assert plan(GDN).schedule.kind.name == "fused"
        assert plan(KDA).schedule.kind.name == "raw"
        assert plan(KDA, dtype=torch.float16).schedule.kind.name == "tiles"
    assert plan(GDN).schedule.kind.name == "tiles"
    with scheduled(scheduled_by("fused")), pytest.raises(AssertionError, match="no kernels"):
        plan(KDA)


def test_a_number_of_sms_passed_in_is_taken_and_given_up():
    long = problem(GDN, (4, 8)), 1, 4096
    with scheduled(scheduled_by("tiles"), sms=3):
        assert PREFILL.plan(*long).gpu == H200._replace(sms=3)
    assert PREFILL.plan(*long).gpu == H200
    with scheduled(scheduled_by("tiles")):
        assert PREFILL.plan(*long, gpu=FORCED["sm_86"]).gpu == FORCED["sm_86"]


# -------------------------------------------------------------------------------- the workspace


def test_regions_of_the_workspace_do_not_overlap():
    """In the order of PrefillPointers, 256-byte aligned; absent ones have no address."""
    names = [region.name for region in arguments.WORKSPACE]
    assert arguments.PrefillPointers._fields[-len(names) :] == tuple(names)
    flags = itertools.product((False, True), repeat=6)
    for channel, raw, has_windows, ranked, queued, overlapped in flags:
        for segments, chunk_slots in itertools.product((1, 4), (0, 1, 7)):
            shape = arguments.WorkspaceShape(
                N=3,
                HV=5,
                chunk_slots=chunk_slots,
                tile_heads=0 if raw else 5,
                channel=channel,
                raw=raw,
                segments=segments,
                whole_segments=chunk_slots * (segments > 1),
                has_windows=has_windows,
                ranked=ranked,
                queued=queued,
                overlapped=overlapped,
            )
            size, offsets = arguments.lay_out_workspace(shape)
            end = 0
            for region, offset in zip(arguments.WORKSPACE, offsets, strict=True):
                needed = region.size(shape)
                assert (offset >= 0) == (needed > 0)
                if needed:
                    assert offset >= end
                    assert offset % 256 == 0
                    end = offset + needed
            assert size >= end
