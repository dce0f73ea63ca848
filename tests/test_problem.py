"""Bad calls: each raises the right error naming the argument, and writes nothing."""

import inspect
import io
import itertools
import math
import multiprocessing

import numpy
import pytest
import torch

import gated_delta as gd
from calls import HV, H, K, N, P, T, V, buffer, buffered, call, normed, pool, tokens, writable
from gated_delta.testing import cases
from gated_delta.testing.inputs import make

i32, i64, f32, bf16, fp16, f64 = (
    torch.int32,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
)


def ints(*values, dtype=i32):
    return torch.tensor(values, dtype=dtype)


def trees(*rows):
    return torch.tensor(rows)


def last_dim_strided(*shape):
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def packed(*ends, dtype=i32):
    return {**tokens(1, ends[-1] if ends else 4), "cu_seqlens": ints(*ends, dtype=dtype)}


LENS = torch.zeros(N, 2, dtype=i32)


def checkpoints(n=N, c=2, dtype=f32):
    return torch.zeros(n, c, HV, V, K, dtype=dtype)


def checkpointed(lens, slots, t=128):
    """A prefill with checkpoints in slots of a pool."""
    indices = dict(checkpoint_lens=torch.tensor(lens), checkpoint_indices=torch.tensor(slots))
    return tokens(N, t) | dict(state=pool()) | indices


LONG = gd.KVBuffer(*(torch.cat([x] * 11, 1) for x in vars(buffer()).values()))  # room for 33


def empty_buffer(C=T, H=H, HV=HV, K=K):
    """A buffer of sizes that KVBuffer.empty refuses."""
    return gd.KVBuffer(torch.zeros(N, C, HV, V), torch.zeros(N, C, H, K), torch.zeros(N, C, HV))


GROWING = torch.tensor([[0.0, -1.0, -0.0], [math.nan, 0.5, 0.25]])[..., None].expand(N, T, HV)
"""Log decays, some above 0."""

INTERMEDIATES = dict(intermediate_states=torch.zeros(N, T, HV, V, K))

# error: operation: (changes of a valid call, a pattern of the message)
BAD = {
    TypeError: {
        "prefill": [
            (dict(q=[1.0]), "q: expected a torch.Tensor, got list"),
            (dict(k=None), "k: expected a torch.Tensor, got NoneType"),
            (dict(q=torch.zeros(N, T, H, K, dtype=f64)), "q: expected dtype .*got torch.float64"),
            (dict(q=torch.zeros(N, T, H, K, dtype=i64)), "q: expected dtype .*got torch.int64"),
            (
                dict(k=torch.zeros(N, T, H, K, dtype=bf16)),
                "k: expected dtype torch.float32, got torch.bfloat16",
            ),
            (
                dict(v=torch.zeros(N, T, HV, V, dtype=fp16)),
                "v: expected dtype torch.float32, got torch.float16",
            ),
            (dict(g=torch.zeros(N, T, HV, dtype=f64)), "g: expected dtype"),
            (dict(beta=torch.zeros(N, T, HV, dtype=torch.bool)), "beta: expected dtype"),
            (dict(null_index=0.0), "null_index: expected an int, got float"),
            (packed(0, 4) | dict(max_seqlen=4.0), "max_seqlen: expected an int or None, got float"),
            (packed(0, 4) | dict(max_seqlen=True), "max_seqlen: expected an int or None, got bool"),
            (
                packed(0, 4) | dict(max_seqlen=torch.tensor(4)),
                "max_seqlen: expected an int or None, got torch.Tensor",
            ),
            (
                dict(initial_state=torch.zeros(N, HV, V, K, dtype=f64)),
                "initial_state: expected dtype",
            ),
            (dict(output_final_state=None), "output_final_state: expected True or False"),
            (dict(deterministic=64.0), "deterministic: expected True, False or an int, got float"),
            (
                dict(state=pool(), has_initial_state=ints(1, 0)),
                "has_initial_state: expected dtype torch.bool",
            ),
            (
                {**tokens(1, 4), "cu_seqlens": torch.tensor([0.0, 4.0])},
                "cu_seqlens: expected dtype",
            ),
            (
                dict(checkpoint_lens=[0, 0], checkpoints=checkpoints()),
                "checkpoint_lens: expected a torch.Tensor, got list",
            ),
            (
                dict(checkpoint_lens=LENS.float(), checkpoints=checkpoints()),
                "checkpoint_lens: expected dtype torch.int32 or",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoints=checkpoints(dtype=bf16)),
                "checkpoints: expected dtype torch.float32",
            ),
            (
                dict(initial_state=pool(N, bf16), checkpoint_lens=LENS, checkpoints=checkpoints()),
                "checkpoints: expected dtype torch.bfloat16, got torch.float32",
            ),
            (
                dict(state=pool(dtype=bf16), checkpoint_lens=LENS, checkpoints=checkpoints()),
                "checkpoints: expected dtype torch.bfloat16",
            ),
            (
                dict(state=pool(), checkpoint_lens=LENS, checkpoint_indices=LENS.short()),
                "checkpoint_indices: expected dtype",
            ),
        ],
        "decode": [
            (
                dict(state=torch.zeros(P, HV, V, K, dtype=f64)),
                "state: expected dtype .*got torch.float64",
            ),
            (dict(state=None), "state: expected a torch.Tensor, got NoneType"),
            (
                dict(state_indices=torch.zeros(N)),
                "state_indices: expected dtype torch.int32 or torch.int64",
            ),
            (dict(state_indices=ints(0, 1, dtype=torch.int16)), "state_indices: expected dtype"),
            (dict(state_indices=[0, 1]), "state_indices: expected a torch.Tensor, got list"),
            (dict(write_indices=torch.zeros(N)), "write_indices: expected dtype"),
            (dict(update_state=1), "update_state: expected True or False, got int"),
            (
                dict(update_state=numpy.bool_(True)),
                "update_state: expected True or False, got numpy.bool",
            ),
            (dict(qk_l2norm="yes"), "qk_l2norm: expected True or False, got str"),
            (dict(beta_logits=None), "beta_logits: expected True or False"),
            (dict(allow_neg_eigval=1), "allow_neg_eigval: expected True or False, got int"),
            (dict(scale="0.5"), "scale: expected a number, got str"),
            (dict(null_index=True), "null_index: expected an int, got bool"),
            (dict(null_index=None), "null_index: expected an int, got NoneType"),
            (dict(scale=True), "scale: expected a number, got bool"),
            (dict(gate="softplus"), "gate: expected a gated_delta.Gate, got str"),
            (
                dict(out=torch.zeros(N, T, HV, V, dtype=bf16)),
                "out: expected dtype torch.float32, got torch.bfloat16",
            ),
            (
                dict(intermediate_states=torch.zeros(N, T, HV, V, K, dtype=bf16)),
                "intermediate_states: expected dtype",
            ),
            (
                dict(INTERMEDIATES, state=pool(dtype=fp16)),
                "intermediate_states: expected dtype torch.float16",
            ),
            (
                dict(INTERMEDIATES, intermediate_indices=torch.zeros(N)),
                "intermediate_indices: expected dtype",
            ),
        ],
        "verify": [
            (dict(null_index=ints(0)), "null_index: expected an int, got torch.Tensor"),
            (packed(0, 3) | dict(max_seqlen=3.0), "max_seqlen: expected an int or None, got float"),
            (
                dict(buffer=torch.zeros(3)),
                "buffer: expected a gated_delta.KVBuffer, got torch.Tensor",
            ),
            (dict(parents=torch.zeros(N, T)), "parents: expected dtype torch.int32 or torch.int64"),
            (
                dict(buffer=gd.KVBuffer(*(x.bfloat16() for x in vars(buffer()).values()))),
                "buffer.u: expected dtype",
            ),
        ],
        "flush": [
            (dict(null_index=numpy.bool_(True)), "null_index: expected an int, got numpy.bool"),
            (dict(num_accepted=1.0), "num_accepted: expected an int or an int tensor"),
            (dict(num_accepted=True), "num_accepted: expected an int or an int tensor"),
            (dict(num_accepted=torch.ones(N)), "num_accepted: expected dtype"),
            (dict(path=[[0, 1]]), "path: expected a torch.Tensor, got list"),
        ],
    },
    ValueError: {
        "prefill": [
            (dict(deterministic=1), "deterministic: expected True, .* multiple of 64, got 1"),
            (dict(deterministic=-64), "deterministic: expected True, .* multiple of 64, got -64"),
            (dict(deterministic=0), "deterministic: expected True, .* multiple of 64, got 0"),
            (dict(allow_neg_eigval=True), "beta_logits: expected True with allow_neg_eigval=True"),
            (dict(q=torch.zeros(T, H, K)), r"q: expected 4 dimensions \[N, T, H, K\], got shape"),
            (
                dict(k=torch.zeros(N, T, H, K + 1)),
                rf"k: expected shape .*= \[{N}, {T}, {H}, {K}\], got",
            ),
            (dict(k=torch.zeros(N, T + 1, H, K)), "k: expected shape"),
            (dict(v=torch.zeros(N, T, 3, V)), "beta: expected shape|g: expected shape"),
            (
                dict(g=torch.zeros(N, T)),
                r"g: expected \[N, T, HV\] \(GDN\) or \[N, T, HV, K\] \(KDA\)",
            ),
            (dict(g=torch.zeros(N, T, H)), "g: expected shape"),
            (dict(g=torch.zeros(N, T, HV, V)), "g: expected shape"),
            (dict(beta=torch.zeros(N, T, HV, V)), "beta: expected 3 dimensions"),
            (
                dict(v=torch.zeros(N, T, 3, V), g=torch.zeros(N, T, 3), beta=torch.zeros(N, T, 3)),
                "v: expected HV to be a multiple of H=2",
            ),
            (dict(q=torch.zeros(N, T, 0, K), k=torch.zeros(N, T, 0, K)), "at least one head"),
            (dict(initial_state=torch.zeros(N, HV, K, V)), "initial_state: expected shape"),
            (dict(initial_state=torch.zeros(N + 1, HV, V, K)), "initial_state: expected shape"),
            (dict(out=torch.zeros(N, T, H, V)), "out: expected v's shape"),
            (
                {**tokens(), "cu_seqlens": ints(0, 3)},
                r"q: expected packed tokens \[1, total, H, K\] with cu_seqlens",
            ),
            ({**tokens(1, 4), "cu_seqlens": ints()}, "cu_seqlens: expected shape"),
            (
                {**tokens(1, 4), "cu_seqlens": ints(0, 4).view(1, 2)},
                "cu_seqlens: expected 1 dimensions",
            ),
            (packed(0, 4) | dict(max_seqlen=-1), "max_seqlen: expected 0 or more, got -1"),
            (dict(max_seqlen=T), "max_seqlen: expected None without cu_seqlens, got a value"),
            (
                dict(checkpoint_lens=LENS[0], checkpoints=checkpoints()),
                r"checkpoint_lens: expected 2 dimensions \[N, C\]",
            ),
            (
                dict(checkpoint_lens=LENS[:1], checkpoints=checkpoints()),
                r"checkpoint_lens: expected shape \[N, C\]",
            ),
            (
                dict(checkpoint_lens=LENS[:, :0], checkpoints=checkpoints(c=0)),
                "checkpoint_lens: expected .* with C >= 1",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoints=checkpoints(c=3)),
                r"checkpoints: expected shape \[N, C, HV, V, K\]",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoints=checkpoints(n=3)),
                "checkpoints: expected shape",
            ),
            (
                dict(state=pool(), checkpoint_lens=LENS, checkpoint_indices=LENS[:, :1]),
                "checkpoint_indices: expected shape",
            ),
            (
                dict(state=pool(), initial_state=torch.zeros(N, HV, V, K)),
                "initial_state: expected None with state",
            ),
            (
                dict(state=pool(), output_final_state=True),
                "output_final_state: expected False with state",
            ),
            (dict(state_indices=ints(0, 1)), "state_indices: expected None without state"),
            (
                dict(has_initial_state=torch.ones(N, dtype=torch.bool)),
                "has_initial_state: expected None without state",
            ),
            (dict(checkpoints=checkpoints()), "checkpoints: expected None without checkpoint_lens"),
            (
                dict(state=pool(), checkpoint_indices=LENS),
                "checkpoint_indices: expected None without checkpoint_lens",
            ),
            (
                dict(checkpoint_lens=LENS),
                "checkpoint_lens: expected checkpoint_indices or checkpoints .*got neither",
            ),
            (
                dict(
                    state=pool(),
                    checkpoint_lens=LENS,
                    checkpoint_indices=LENS,
                    checkpoints=checkpoints(),
                ),
                r"checkpoints: expected 4 dimensions \[R, HV, V, K\]",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoint_indices=LENS, checkpoints=checkpoints()),
                r"checkpoints: expected 4 dimensions \[R, HV, V, K\]",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoint_indices=LENS),
                "checkpoint_indices: expected None without state",
            ),
            (dict(state=pool(), null_index=0), "null_index: expected -1 without state_indices"),
            (
                dict(initial_state=pool(N), null_index=0),
                "null_index: expected -1 without state_indices",
            ),
            (
                dict(q=last_dim_strided(N, T, H, K)),
                "q: expected a contiguous last dimension, got strides",
            ),
            (dict(v=last_dim_strided(N, T, HV, V)), "v: expected a contiguous last dimension"),
            (
                dict(checkpoint_lens=LENS, checkpoints=checkpoints().mT.contiguous().mT),
                "checkpoints: expected a contiguous last dimension",
            ),
            (
                dict(checkpoint_lens=LENS, checkpoints=checkpoints(c=1).expand(-1, 2, -1, -1, -1)),
                "checkpoints: expected memory of its own for every element",
            ),
            *(
                (dict(scale=x), "scale: expected a finite number, 0 or of 1.2e-38 to 3.4e.38")
                for x in (math.inf, 1e50, -1e-39)
            ),
            (dict(g=GROWING), "g: expected log decays of at most 0, got 0.5 at sequence 1"),
            (
                dict(backend="triton"),
                "backend: expected one of auto, cute, reference, got 'triton'",
            ),
            (packed(1, 4), "cu_seqlens: expected to start at 0, got 1"),
            (packed(0, 3, 2, 4), "cu_seqlens: expected values that never fall, got 3 then 2"),
            (
                {**packed(0, 4), **tokens(1, 3)},
                "cu_seqlens: expected to end within the 3 packed tokens, got 4",
            ),
            (
                checkpointed([[0, 65], [-1, -1]], [[2, 3], [4, 4]]),
                "checkpoint_lens: expected multiples of 64 .*got 65",
            ),
            (
                checkpointed([[-1, -1], [64, 192]], [[2, 2], [3, 4]]),
                "checkpoint_lens: expected multiples of 64 up to the sequence's 128 tokens, "
                "or negative ones, got 192 at sequence 1",
            ),
            (
                {**checkpointed([[64, 128]], [[3, 4]]), **packed(0, 127), "state_indices": ints(0)},
                "checkpoint_lens: .* up to the sequence's 127 tokens.* got 128 at sequence 0",
            ),
            (
                checkpointed([[0, 64], [-1, 0]], [[2, 2], [3, 4]]),
                "checkpoint_indices: expected no two states.*for 2",
            ),
            (
                checkpointed([[0, -1], [64, -1]], [[2, 3], [2, 3]]),
                "checkpoint_indices: expected no two states.*for 2",
            ),
            (
                checkpointed([[64, -1], [-1, -1]], [[0, 3], [3, 3]]),
                "checkpoint_indices: expected no two states.*for 0",
            ),
            (
                checkpointed([[64, -1], [-1, -1]], [[1, 3], [3, 3]]),
                "checkpoint_indices: expected no two states.*for 1",
            ),
            (
                checkpointed([[0, -1], [64, -1]], [[1, 3], [1, 3]]) | dict(checkpoints=pool()),
                "checkpoint_indices: expected no two states.*for 1",
            ),
            (
                dict(gate=gd.Gate.softplus(torch.zeros(H))),
                rf"A_log: expected shape \[HV\] = \[{HV}\], got \[{H}\]",
            ),
            (
                dict(gate=gd.Gate.softplus(torch.zeros(HV), torch.zeros(HV, K))),
                "dt_bias: expected 1 dimensions",
            ),
        ],
        "decode": [
            (dict(allow_neg_eigval=True), "beta_logits: expected True with allow_neg_eigval=True"),
            (dict(state=torch.zeros(P, HV, K, V)), "state: expected shape"),
            (dict(state=pool()[:1]), "state: expected P >= N=2"),
            (
                dict(state_indices=ints(0, 1, 2)),
                r"state_indices: expected shape \[N\] = \[2\], got \[3\]",
            ),
            (
                dict(state_indices=ints(0, 1), write_indices=ints(3)),
                "write_indices: expected shape",
            ),
            (
                dict(intermediate_states=torch.zeros(N, T - 1, HV, V, K)),
                "intermediate_states: expected C >= T=3",
            ),
            (
                dict(intermediate_states=torch.zeros(N - 1, T, HV, V, K)),
                "intermediate_states: expected R >= N=2",
            ),
            (
                dict(intermediate_states=torch.zeros(N, T, HV, V)),
                "intermediate_states: expected 5 dimensions",
            ),
            (
                dict(state_indices=ints(0, 1, 2, 3).view(2, 2)),
                r"state_indices: expected \[N, W\] with W >= 3, got W=2",
            ),
            (
                packed(0, 1) | dict(state_indices=ints().view(1, 0)),
                r"state_indices: expected \[N, W\] with W >= 1, got W=0",
            ),
            (tokens(N, 17), "q: expected 1 to 16 tokens per sequence, got T=17"),
            (tokens(N, 0), "q: expected 1 to 16 tokens per sequence, got T=0"),
            (
                dict(num_accepted=ints(1, 1)),
                r"num_accepted: expected None unless state_indices is \[N, W\]",
            ),
            (
                dict(
                    state=pool(9),
                    state_indices=ints(0, 1, 2, 3, 4, 5).view(2, 3),
                    write_indices=ints(6, 7),
                ),
                r"write_indices: expected None with \[N, W\]",
            ),
            (
                dict(write_indices=ints(2, 3), update_state=False),
                "write_indices: expected None with update_state=False",
            ),
            (
                dict(intermediate_indices=ints(0, 1)),
                "intermediate_indices: expected None without intermediate_states",
            ),
            (dict(state=pool().mT.contiguous().mT), "state: expected a contiguous last dimension"),
            (dict(state=pool()[:1].expand(P, -1, -1, -1)), "state: expected memory of its own"),
            (
                dict(out=torch.zeros(1, T, HV, V).expand(N, -1, -1, -1)),
                "out: expected memory of its own",
            ),
            (
                {**(aliased := tokens()), "out": aliased["v"]},
                "out: expected memory apart from .*, got some of v's",
            ),
            (dict(state=torch.zeros(P, HV, V, K, device="meta")), "state: expected device cpu"),
            (
                dict(state_indices=torch.zeros(N, dtype=i32, device="meta")),
                "state_indices: expected device cpu",
            ),
            (packed(0, 17), "cu_seqlens: expected at most 16 tokens per sequence, got 17"),
            (
                {**packed(0, 4), "intermediate_states": torch.zeros(1, 3, HV, V, K)},
                "intermediate_states: expected room for the longest sequence, 4 tokens, got 3",
            ),
            (
                dict(state_indices=ints(1, 1)),
                "state_indices: expected at most one sequence to write each row",
            ),
            (
                dict(write_indices=ints(2, 2)),
                "write_indices: expected at most one sequence to write each row",
            ),
            (
                dict(state_indices=ints(0, 1), write_indices=ints(1, 2)),
                "write_indices: expected no row that another sequence reads, got row 1,",
            ),
            (
                dict(state_indices=ints(0, 1), write_indices=ints(1, 0)),
                "write_indices: expected no row that another",
            ),
            (
                dict(state=pool(9), state_indices=ints(0, 1, 2, 1, 4, 5).view(2, 3)),
                "state_indices: expected at most one sequence to write each row, got two for row 1",
            ),
            (
                {
                    **packed(0, 1, 2),
                    "state": pool(9),
                    "state_indices": ints(0, 1, 2, 3, 4, 0).view(2, 3),
                    "num_accepted": ints(1, 3),
                },
                "state_indices: expected no row that another sequence reads, got row 0,",
            ),
            (
                dict(INTERMEDIATES, intermediate_indices=ints(1, 1)),
                "intermediate_indices: expected at most one sequence",
            ),
            (
                dict(INTERMEDIATES, intermediate_indices=ints(0, 1, 2)),
                "intermediate_indices: expected shape",
            ),
            (
                dict(state_indices=ints(1, 1), null_index=0),
                "state_indices: expected at most one sequence to write",
            ),
            (dict(g=GROWING), "g: expected log decays of at most 0, got 0.5 at sequence 1"),
            (
                dict(g=GROWING, state_indices=ints(3, 2)),
                "g: expected log decays of at most 0, got 0.5 at sequence 1",
            ),
        ],
        "verify": [
            (dict(allow_neg_eigval=True), "beta_logits: expected True with allow_neg_eigval=True"),
            (dict(g=GROWING), "g: expected log decays of at most 0, got 0.5 at sequence 1"),
            (dict(buffer=buffer(t=2)), "buffer: expected room for T=3 tokens, got 2"),
            (dict(buffer=buffer(rows=1)), "buffer: expected rows >= N=2"),
            (dict(buffer=LONG), "buffer: expected room for 1 to 32 tokens, got 33"),
            (dict(buffer=buffer(axis="channel")), "buffer: expected gate='head'"),
            (dict(buffer=buffer(layers=2)), "buffer.u: expected 4 dimensions"),
            (
                dict(buffer_indices=ints(0, 1), null_index=0),
                "null_index: expected -1 without state_indices",
            ),
            (dict(max_seqlen=T), "max_seqlen: expected None without cu_seqlens, got a value"),
            (packed(0, 3) | dict(max_seqlen=-1), "max_seqlen: expected 0 or more, got -1"),
            (
                packed(0, 1, 4) | dict(max_seqlen=2),
                "cu_seqlens: expected at most max_seqlen=2 tokens per sequence, got 3",
            ),
            (
                packed(0, 4, dtype=i64),
                "buffer: expected room for the longest sequence, 4 tokens, got 3",
            ),
            (dict(buffer_indices=ints(1, 1)), "buffer_indices: expected at most one sequence"),
            (dict(parents=ints(-1, 0)), r"parents: expected 2 dimensions \[N, W\], got shape"),
            (dict(parents=trees([-1] * T)), r"parents: expected shape \[N, W\] = \[2, W\], got"),
            (dict(parents=trees([-1, 0], [-1, 0])), "parents: expected .* W >= T=3, got W=2"),
            *(
                (
                    dict(parents=trees([-1, 0, 1, 9], [-1, *row, -7])),
                    "parents: expected -1 or the index of an earlier token, "
                    f"got {got} for token {t} of sequence 1",
                )
                for row, got, t in (
                    ([1, 0], 1, 1),
                    ([-2, 0], -2, 1),
                    ([0, 2**31 - 1], 2**31 - 1, 2),
                )
            ),
            (
                packed(0, 3) | dict(parents=trees([-1, 0])),
                "parents: expected room for the longest sequence, 3 tokens, got 2",
            ),
        ],
        "flush": [
            (dict(buffer=LONG), "buffer: expected room for 1 to 32 tokens, got 33"),
            (dict(buffer=empty_buffer(C=0)), "buffer: expected room for 1 to 32 tokens, got 0"),
            *(
                (
                    dict(
                        state=torch.zeros(P, sizes.get("HV", HV), V, sizes.get("K", K)),
                        buffer=empty_buffer(**sizes),
                    ),
                    "at least one head",
                )
                for sizes in (dict(H=0), dict(HV=0), dict(HV=0, H=0), dict(K=0))
            ),
            (dict(state=pool().unsqueeze(0)), "buffer.u: expected 5 dimensions"),
            (dict(num_accepted=-1), "num_accepted: expected 0 or more, got -1"),
            (dict(num_accepted=-(10**30)), "num_accepted: expected 0 or more, got -1000"),
            (
                dict(num_accepted=2),
                "num_accepted: expected a tensor .* with state_indices.* got 2 alone",
            ),
            (dict(num_accepted=0, buffer=buffer(rows=7)), "num_accepted: expected a tensor"),
            (dict(path=trees([0, 1])), r"path: expected shape \[N, W\] = \[2, W\], got"),
            *(
                (
                    dict(path=trees([0, 2, -9], [*path, 0])),
                    f"path: expected ascending indices of a row of 3 tokens, got .{path[0]}, "
                    f"{path[1]}. at sequence 1",
                )
                for path in ((1, 1), (2, 0), (-1, 0), (1, 3))
            ),
            (
                dict(num_accepted=ints(1, 2, 3), state_indices=ints(0, 1)),
                "num_accepted: expected shape",
            ),
            (
                dict(buffer_indices=ints(0, 1), null_index=0),
                "null_index: expected -1 without state_indices",
            ),
            (
                dict(state_indices=ints(0, 1), write_indices=ints(1, 2)),
                "write_indices: expected no row that another sequence reads, got row 1,",
            ),
        ],
    },
    IndexError: {
        "decode": [
            (
                dict(state_indices=ints(0, P)),
                f"state_indices: expected indices below {P}, got {P} at sequence 1",
            ),
            (dict(write_indices=ints(0, P)), "write_indices: expected indices below"),
            (
                dict(state_indices=ints(0, 1, 2, 3, 4, P).view(2, 3)),
                "state_indices: expected indices below",
            ),
            (
                dict(INTERMEDIATES, intermediate_indices=ints(0, 2)),
                "intermediate_indices: expected indices below 2",
            ),
        ],
        "prefill": [
            (
                dict(state=pool(), state_indices=ints(P, 0), null_index=0),
                "state_indices: expected indices below",
            ),
            (dict(state=pool(), state_indices=ints(P, 0)), "state_indices: expected indices below"),
            (
                checkpointed([[0, -1], [64, -1]], [[2, P], [P, 0]]),
                f"checkpoint_indices: expected indices below {P}, got {P} at sequence 1",
            ),
            (
                checkpointed([[0, -1], [64, -1]], [[P, 0], [P + 1, 0]])
                | dict(checkpoints=pool(P + 1)),
                f"checkpoint_indices: expected indices below {P + 1}, got {P + 1} at sequence 1",
            ),
        ],
        "verify": [
            (dict(buffer_indices=ints(0, N)), f"buffer_indices: expected indices below {N}")
        ],
        "flush": [
            (dict(state_indices=ints(0, P)), "state_indices: expected indices below"),
            (dict(write_indices=ints(3, P)), "write_indices: expected indices below"),
            (dict(buffer_indices=ints(0, N)), "buffer_indices: expected indices below"),
        ],
    },
    gd.UnsupportedProblem: {
        "decode": [
            (dict(backend="cute"), "cute.*cannot run decode"),
            (dict(q=torch.zeros(N, T, H, K, requires_grad=True)), "q requires grad.*no backward"),
        ]
    },
}
WRITTEN = torch.zeros(N, T, HV, V)
BAD_NORMS = [  # of prefill, decode and verify
    (dict(norm="silu"), "norm: expected a gated_delta.GatedNorm or None, got str", TypeError),
    (dict(z=[1.0]), "z: expected a torch.Tensor, got list", TypeError),
    (dict(z=WRITTEN.bfloat16()), "z: expected dtype torch.float32, got torch.bfloat16", TypeError),
    (dict(z=None), "z: expected a tensor with norm, got None", ValueError),
    (dict(norm=None), "z: expected None without norm, got a tensor", ValueError),
    (
        dict(z=torch.zeros(N, T + 1, HV, V)),
        r"z: expected v's shape \[2, 3, 4, 6\], got \[2, 4, 4, 6\]",
        ValueError,
    ),
    (
        dict(z=torch.zeros(N, T, HV * V)),
        r"z: expected v's shape \[2, 3, 4, 6\], got \[2, 3, 24\]",
        ValueError,
    ),
    (dict(z=last_dim_strided(N, T, HV, V)), "z: expected a contiguous last dimension", ValueError),
    (dict(z=WRITTEN.to("meta")), "z: expected device cpu, .*, got meta", ValueError),
    (
        dict(norm=gd.GatedNorm(torch.ones(K))),
        rf"norm.weight: expected shape \[V\] = \[{V}\], got \[{K}\]",
        ValueError,
    ),
    (
        dict(norm=gd.GatedNorm(torch.ones(V).to("meta"))),
        "norm.weight: expected device cpu, .*, got meta",
        ValueError,
    ),
    (
        dict(z=WRITTEN, out=WRITTEN),
        "out: expected memory apart from .*, got some of z's",
        ValueError,
    ),
    (
        dict(norm=gd.GatedNorm(WRITTEN[0, 0, 0]), out=WRITTEN),
        "out: expected memory apart from .*, got some of norm.weight's",
        ValueError,
    ),
    (
        dict(norm=gd.GatedNorm(torch.nn.Parameter(torch.ones(V)))),
        "norm.weight requires grad.*no backward",
        gd.UnsupportedProblem,
    ),
    (
        dict(z=torch.zeros(N, T, HV, V, requires_grad=True)),
        "z requires grad.*no backward",
        gd.UnsupportedProblem,
    ),
    (dict(backend="cute"), "cute.*cannot run .*-norm", gd.UnsupportedProblem),
]
FP8_OUT, SCALES = WRITTEN.to(torch.float8_e4m3fn), torch.zeros(N, T, HV)
BAD_FP8 = [  # of prefill, decode and verify, with norm
    (dict(out=FP8_OUT), "out: expected dtype torch.float32, got torch.float8_e4m3fn", TypeError),
    (
        dict(out=None, out_scales=SCALES),
        "out_scales: expected None without out, got a tensor",
        ValueError,
    ),
    (
        dict(out=WRITTEN, out_scales=SCALES),
        "out: expected dtype torch.float8_e4m3fn, got torch.float32",
        TypeError,
    ),
    (
        dict(out=FP8_OUT, out_scales=SCALES, norm=None, z=None),
        "out_scales: expected None without norm, got a tensor",
        ValueError,
    ),
    (
        dict(out=FP8_OUT, out_scales=0.5),
        "out_scales: expected a torch.Tensor, got float",
        TypeError,
    ),
    (
        dict(out=FP8_OUT, out_scales=SCALES.bfloat16()),
        "out_scales: expected dtype torch.float32, got torch.bfloat16",
        TypeError,
    ),
    (
        dict(out=FP8_OUT, out_scales=torch.ones(HV)),
        r"out_scales: expected shape \[1\] = \[1\], got \[4\]",
        ValueError,
    ),
    (
        dict(out=FP8_OUT, out_scales=torch.zeros(N, T + 1, HV)),
        r"out_scales: expected shape \[N, T, HV\] = \[2, 3, 4\], got \[2, 4, 4\]",
        ValueError,
    ),
    (
        dict(out=FP8_OUT, out_scales=torch.zeros(N, T, 1).expand(N, T, HV)),
        "out_scales: expected memory of its own for every element",
        ValueError,
    ),
    *(
        (
            dict(out=FP8_OUT, out_scales=torch.tensor(scale)),
            f"out_scales: expected a finite number above 0, got {scale:g}",
            ValueError,
        )
        for scale in (0.0, -1.0, math.inf, math.nan)
    ),
]
PARTS = buffer()
BAD_BUFFERS = [  # of decode
    (dict(buffer=[1.0]), "buffer: expected a gated_delta.KVBuffer, got list", TypeError),
    (
        dict(buffer=gd.KVBuffer(PARTS.u, PARTS.k.bfloat16(), PARTS.log_decay)),
        "buffer.k: expected dtype torch.float32, got torch.bfloat16",
        TypeError,
    ),
    (dict(buffer_lens=None), r"buffer_lens: expected a tensor \[N\] with buffer, got", TypeError),
    (dict(buffer_lens=[0, 1]), "buffer_lens: expected a torch.Tensor, got list", TypeError),
    (dict(buffer_lens=torch.zeros(N)), "buffer_lens: expected dtype torch.int32 or", TypeError),
    (dict(buffer_indices=torch.zeros(N)), "buffer_indices: expected dtype", TypeError),
    (dict(buffer=None), "buffer_lens: expected None without buffer, got a tensor", ValueError),
    (
        dict(buffer=None, buffer_lens=None, buffer_indices=ints(0, 1)),
        "buffer_indices: expected None without buffer",
        ValueError,
    ),
    (dict(buffer_lens=ints(0)), r"buffer_lens: expected shape \[N\] = \[2\], got", ValueError),
    (dict(buffer_lens=ints(0, 0).to("meta")), "buffer_lens: expected device cpu", ValueError),
    (dict(buffer_indices=ints(0)), "buffer_indices: expected shape", ValueError),
    (dict(write_indices=ints(2, 3)), "write_indices: expected None with buffer", ValueError),
    (INTERMEDIATES, "intermediate_states: expected None with buffer", ValueError),
    (
        dict(state_indices=ints(0, 1, 2, 3, 4, 5).view(2, 3), state=pool(6)),
        r"state_indices: expected \[N\] with buffer, got \[N, W\]",
        ValueError,
    ),
    (dict(update_state=False), "update_state: expected True with buffer, got False", ValueError),
    (dict(num_accepted=ints(1, 1)), "num_accepted: expected None unless", ValueError),
    (dict(buffer=buffer(axis="channel")), "buffer: expected gate='head'", ValueError),
    (dict(buffer=buffer(rows=1)), "buffer: expected rows >= N=2", ValueError),
    (dict(buffer=buffer(layers=2)), "buffer.u: expected 4 dimensions", ValueError),
    (dict(buffer=LONG), "buffer: expected room for 1 to 32 tokens, got 33", ValueError),
    (dict(buffer=empty_buffer(C=0)), "buffer: expected room for 1 to 32 tokens, got 0", ValueError),
    (dict(buffer=empty_buffer(K=K + 1)), "buffer.k: expected shape", ValueError),
    (
        dict(buffer=PARTS, out=PARTS.u),
        "out: expected memory apart from .*, got some of buffer.u's",
        ValueError,
    ),
    (
        dict(buffer=PARTS, buffer_lens=PARTS.log_decay.view(i32)[0, 0, :N]),
        "buffer.log_decay: expected memory apart from .*, got some of buffer_lens's",
        ValueError,
    ),
    (
        dict(buffer=gd.KVBuffer(PARTS.u[:1].expand(N, -1, -1, -1), PARTS.k, PARTS.log_decay)),
        "buffer.u: expected memory of its own",
        ValueError,
    ),
    (dict(g=GROWING), "g: expected log decays of at most 0, got 0.5 at sequence 1", ValueError),
    (dict(buffer_indices=ints(1, 1)), "buffer_indices: expected at most one sequence", ValueError),
    (dict(state_indices=ints(3, 3)), "state_indices: expected at most one sequence", ValueError),
    (
        packed(0, 17) | dict(buffer=buffer(1, 20), buffer_lens=ints(0)),
        "cu_seqlens: expected at most 16 tokens per sequence, got 17",
        ValueError,
    ),
    (dict(buffer_indices=ints(0, N)), f"buffer_indices: expected indices below {N}", IndexError),
    (dict(state_indices=ints(0, P)), f"state_indices: expected indices below {P}", IndexError),
    (
        dict(buffer=gd.KVBuffer(PARTS.u, PARTS.k.clone().requires_grad_(), PARTS.log_decay)),
        "buffer.k requires grad.*no backward",
        gd.UnsupportedProblem,
    ),
    (dict(backend="cute"), "cute.*cannot run decode", gd.UnsupportedProblem),
]
REFUSED = [
    (op, *row, error) for error, ops in BAD.items() for op, rows in ops.items() for row in rows
]
REFUSED += [
    (op, dict(null_index=value), f"null_index: expected {wanted}, got {value}", ValueError)
    for op in ("prefill", "decode", "verify", "flush")
    for value, wanted in (
        (-2, "-1 or more.*"),
        (2**63, r"-1 or more, below 2\*\*63"),
        (0, "-1 without state_indices.*"),
    )
]
REFUSED += [
    (op, normed() | changes, *rest)
    for op in ("prefill", "decode", "verify")
    for changes, *rest in BAD_NORMS
]
REFUSED += [
    (
        op,
        normed() | dict(z=torch.zeros(N, T, H, R, V)),
        rf"z: expected {shape}, got \[{N}, {T}, {H}, {R}, {V}\]",
        ValueError,
    )
    for op, R, shape in (
        ("prefill", HV, rf"shape .N, T, H, HV/H, V. = \[{N}, {T}, {H}, {HV // H}, {V}\]"),
        ("decode", HV // H, rf"v's shape \[{N}, {T}, {HV}, {V}\]"),
    )
]
REFUSED += [
    (op, normed() | changes, *rest)
    for op in ("prefill", "decode", "verify")
    for changes, *rest in BAD_FP8
]
REFUSED += [("decode", buffered() | changes, *rest) for changes, *rest in BAD_BUFFERS]


@pytest.mark.parametrize(
    ("op", "changes", "text", "error"),
    REFUSED,
    ids=[f"{op}-{'-'.join(c)}-{i}" for i, (op, c, *_) in enumerate(REFUSED)],
)
def test_bad_call_is_refused_and_writes_nothing(op, changes, text, error):
    """Also if the call cache has an entry of a similar valid call."""
    good = {"backend": "reference", **call(op)}
    if op != "flush":
        good["out"] = torch.full_like(good["v"], 7.0)
    getattr(gd, op)(**good)
    arguments = {**good, **changes}
    if "out" in good and "out" not in changes and isinstance(arguments["v"], torch.Tensor):
        arguments["out"] = torch.full_like(arguments["v"], 7.0)
    watched = {
        name: (x, x.clone()) for name, x in writable(arguments).items() if x.device.type == "cpu"
    }
    with pytest.raises(error, match=text) as caught:
        getattr(gd, op)(**arguments)
    assert type(caught.value) is error
    for name, (x, before) in watched.items():
        now, then = (y.float().nan_to_num(5.5) for y in (x, before))  # not of FP8
        assert torch.equal(now, then), f"{name} was written"


def every_tensor(op):
    """A valid call with all tensors that an operation takes together."""
    given = call(op) | dict(state=pool(8), state_indices=ints(0, 1), write_indices=ints(2, 3))
    if op in ("prefill", "decode", "verify"):
        given |= dict(
            gate=gd.Gate.softplus(torch.zeros(HV), torch.zeros(HV)), out=torch.zeros(N, T, HV, V)
        )
    if op == "prefill":
        given |= dict(has_initial_state=torch.ones(N, dtype=torch.bool), checkpoint_lens=LENS)
        given |= dict(checkpoint_indices=LENS - 1, checkpoints=checkpoints(4).flatten(0, 1))
    if op == "decode":
        given |= INTERMEDIATES | dict(intermediate_indices=ints(0, 1))
    if op in ("verify", "flush"):
        given["buffer_indices"] = ints(0, 1)
    names = inspect.signature(getattr(gd, op)).parameters
    return {name: x for name, x in given.items() if name in names}


def refuse_layouts(op):
    """Runs in a child process, which a nested tensor in torch's guards would abort."""
    good = every_tensor(op)
    getattr(gd, op)(**good)
    tensors = {name: x for name, x in good.items() if isinstance(x, torch.Tensor)}
    for name, x in tensors.items():
        rows = list(x.view(N, -1) if x.ndim == 1 else x)
        nested = [torch.nested.nested_tensor(rows, layout=y) for y in (torch.strided, torch.jagged)]
        for other in (*nested, x.to_sparse()):
            with pytest.raises(
                (TypeError, ValueError), match=f"{name}: expected a plain strided tensor"
            ):
                getattr(gd, op)(**good | {name: other})
    if op != "flush":
        packed_q = dict(q=torch.nested.nested_tensor(list(good["q"])), cu_seqlens=ints(0, T))
        with pytest.raises(ValueError, match="q: expected a plain strided tensor"):
            getattr(gd, op)(**good | packed_q)
    nested = torch.nested.nested_tensor([torch.ones(HV)] * 2)
    for of_tensors in (gd.Gate.softplus, gd.GatedNorm, lambda x: gd.KVBuffer(x, x, x)):
        with pytest.raises(ValueError, match="expected a plain strided tensor, got a nested one"):
            of_tensors(nested)


@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "flush"])
def test_a_nested_tensor_is_refused_after_a_plain_one(op):
    child = multiprocessing.get_context("fork").Process(target=refuse_layouts, args=(op,))
    child.start()
    child.join()
    assert child.exitcode == 0


NONSENSE = [
    3,
    "x",
    [1],
    torch.zeros(0),
    object(),
    float("nan"),
    torch.empty(0, 0, 0, dtype=torch.complex128),
]


@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "flush"])
def test_every_argument_refuses_nonsense(op):
    """Twice each; the call cache has entries of the valid call and without optional tensors."""
    good = call(op)
    getattr(gd, op)(**good)
    names = [name for name in inspect.signature(getattr(gd, op)).parameters if name != "backend"]
    for name, bad in itertools.product(names, [*NONSENSE, None]):
        if (bad is None and name not in good) or (bad is NONSENSE[0] and name == "scale"):
            continue
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                getattr(gd, op)(**{**call(op), name: bad})
    for bad in (None, 3, "cuda", [1]):
        with pytest.raises(ValueError, match="backend: expected one of"):
            getattr(gd, op)(**call(op), backend=bad)


def test_calls_may_share_slots_that_no_other_one_writes():
    """A sequence without tokens, or with its write dropped, writes no slot."""
    gd.decode(
        **call("decode") | dict(state_indices=ints(0, 0), write_indices=ints(1, 2)),
        backend="reference",
    )
    gd.decode(
        **call("decode") | dict(state_indices=ints(0, -1), write_indices=ints(1, 0)),
        backend="reference",
    )
    gd.decode(
        **call("decode") | dict(state_indices=ints(0, 0), update_state=False), backend="reference"
    )
    slots = ints(0, 1, 2, 3, 4, 0).view(2, 3)
    gd.decode(
        **packed(0, 0, 3),
        state=pool(9),
        state_indices=slots,
        num_accepted=ints(3, 1),
        backend="reference",
    )
    gd.flush(
        **call("flush") | dict(state_indices=ints(0, 0), write_indices=ints(1, 2)),
        backend="reference",
    )
    gd.flush(
        **call("flush") | dict(state_indices=ints(0, 1), write_indices=ints(1, -1)),
        backend="reference",
    )


def test_unknown_arguments_are_python_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
        gd.decode(**call("decode"), sclae=1.0)


@pytest.mark.parametrize(
    ("make_gate", "error", "text"),
    [
        (lambda: gd.Gate("tanh"), ValueError, "Gate kind: expected one of"),
        (lambda: gd.Gate.softplus([1.0]), TypeError, "A_log: expected a torch.Tensor"),
        (
            lambda: gd.Gate.softplus(torch.zeros(4, dtype=bf16)),
            TypeError,
            "A_log: expected dtype torch.float32",
        ),
        (lambda: gd.Gate.softplus(torch.zeros(1, 4)), ValueError, r"A_log: expected shape \[HV\]"),
        (
            lambda: gd.Gate.softplus(torch.zeros(4), torch.zeros(4, dtype=fp16)),
            TypeError,
            "dt_bias: expected dtype",
        ),
        (
            lambda: gd.Gate.softplus(torch.zeros(4), torch.zeros(1, 1, 4)),
            ValueError,
            "dt_bias: expected shape",
        ),
        (
            lambda: gd.Gate.lower_bound(torch.zeros(4), bound=0.0),
            ValueError,
            "bound: expected a number from -1e.30 to below 0",
        ),
        (
            lambda: gd.Gate.lower_bound(torch.zeros(4), bound=-3e38),
            ValueError,
            "bound: expected a number from -1e.30 to below 0",
        ),
        (
            lambda: gd.Gate.lower_bound(torch.zeros(4), bound=float("-inf")),
            ValueError,
            "bound: expected a number from",
        ),
        (
            lambda: gd.Gate.lower_bound(torch.zeros(4), bound="-5"),
            TypeError,
            "bound: expected a number",
        ),
        *(
            (
                lambda kind=kind, bound=bound: gd.Gate(kind, torch.zeros(4), bound=bound),
                ValueError,
                "bound: expected 0.0 with kind=",
            )
            for kind in ("log", "softplus")
            for bound in (-5.0, math.nan, "-5")
        ),
        (
            lambda: gd.KVBuffer.empty(2, 33, 2, 4, 8, 8, gate="head"),
            ValueError,
            "T: expected at most 32",
        ),
        (
            lambda: gd.KVBuffer.empty(2, 4, 3, 4, 8, 8, gate="head"),
            ValueError,
            "HV: expected a multiple of H=3",
        ),
        (lambda: gd.KVBuffer.empty(2, 4, 2, 4, 8, 8, gate="log"), ValueError, "gate: expected"),
        (
            lambda: gd.KVBuffer.empty(2, 4, 2, 4, 0, 8, gate="head"),
            ValueError,
            "K: expected 1 or more, got 0",
        ),
        (
            lambda: gd.KVBuffer.empty(2.0, 4, 2, 4, 8, 8, gate="head"),
            TypeError,
            "rows: expected an int",
        ),
        (
            lambda: gd.KVBuffer.empty(2, 4, 2, 4, 8, 8, num_layers=-1),
            ValueError,
            "num_layers: expected 0 or more, got -1",
        ),
        (
            lambda: gd.KVBuffer.empty(2, 4, 2, 4, 8, 8, num_layers=True),
            TypeError,
            "num_layers: expected an int, got bool",
        ),
        (
            lambda: gd.KVBuffer.empty(2, 4, 2, 4, 8, 8, num_layers=2.0),
            TypeError,
            "num_layers: expected an int, got float",
        ),
        (
            lambda: gd.KVBuffer.empty(2, 4, 2, 4, 8, 8, gate="head").layer(0),
            ValueError,
            "layer: expected a buffer made with num_layers",
        ),
        (lambda: gd.KVBuffer(1, 2, 3), TypeError, "buffer.u: expected a torch.Tensor, got int"),
        (
            lambda: gd.KVBuffer(None, PARTS.k, PARTS.log_decay),
            TypeError,
            "buffer.u: expected a torch.Tensor, got NoneType",
        ),
        (lambda: gd.GatedNorm([1.0]), TypeError, "weight: expected a torch.Tensor, got list"),
        (
            lambda: gd.GatedNorm(torch.ones(4).double()),
            TypeError,
            "weight: expected dtype .*got torch.float64",
        ),
        (
            lambda: gd.GatedNorm(torch.ones(1, 4)),
            ValueError,
            r"weight: expected shape \[V\], got \[1, 4\]",
        ),
        (
            lambda: gd.GatedNorm(torch.ones(4), "small"),
            TypeError,
            "eps: expected a number, got str",
        ),
        (lambda: gd.GatedNorm(torch.ones(4), True), TypeError, "eps: expected a number, got bool"),
        *(
            (
                lambda eps=eps: gd.GatedNorm(torch.ones(4), eps),
                ValueError,
                "eps: expected a finite number from",
            )
            for eps in (0.0, -1e-6, 1e-39, 1e39, math.inf, math.nan)
        ),
        *(
            (
                lambda name=name: gd.GatedNorm(torch.ones(4), activation=name),
                ValueError,
                "activation: expected one of silu, sigmoid",
            )
            for name in ("swish", None, [])
        ),
    ],
)
def test_bad_gates_norms_and_buffers(make_gate, error, text):
    with pytest.raises(error, match=text):
        make_gate()


@pytest.mark.parametrize("dtype", [i32, i64], ids=str)
def test_advance_updates_lens_in_place(dtype):
    """As decode does: lens of at most 3; rows that overflow, and negative ones, are empty.

    Without tokens a length stays as it is.
    """
    rows, lens = buffer(t=3), ints(0, 2, 3, ~1, 9, torch.iinfo(dtype).max, dtype=dtype)
    rows.advance(lens)
    assert lens.tolist() == [1, 3, 0, 0, 0, 0]
    lens[-2:] = ints(~1, torch.iinfo(dtype).min, dtype=dtype)
    rows.advance(lens, ints(2, 0, 4, 3, 0, 1, dtype=i64))
    assert lens.tolist() == [3, 3, 0, 3, ~1, 0]
    assert lens.dtype == dtype
    buffer(t=3, layers=2).advance(lens, 0)
    assert lens.tolist() == [3, 3, 0, 3, ~1, 0]
    buffer(t=3, layers=2).advance(lens, 1)
    assert lens.tolist() == [0, 0, 1, 0, 0, 1]


@torch.inference_mode()
def inference(x):
    return x.clone()


FOUR = torch.arange(4)


@pytest.mark.parametrize(
    ("lens", "tokens", "error", "text"),
    [
        ([1, 2], 1, TypeError, "lens: expected a torch.Tensor, got list"),
        (ints(1, 2, dtype=torch.uint8), 1, TypeError, "lens: expected dtype torch.int32 or"),
        (ints(1, 2), 1.0, TypeError, r"tokens: expected an int or an int tensor \[N\], got float"),
        (ints(1, 2), -1, ValueError, "tokens: expected 0 to 16, got -1"),
        (ints(1, 2), 2**40, ValueError, "tokens: expected 0 to 16, got 1099"),
        (ints(1, 2), torch.ones(2), TypeError, "tokens: expected dtype torch.int32 or"),
        (ints(1, 2), ints(1), ValueError, r"tokens: .* shape \[N\] = \[2\], got \[1\]"),
        (ints(1, 2), [1, 1], TypeError, "tokens: expected an int or an int tensor"),
        *(
            (ints(1, 2), ints(0, m, dtype=i64), ValueError, f"tokens: .* got {m} at sequence 1")
            for m in (-5, -1, 17, 2**31 - 1, 2**63 - 1)
        ),
        (ints(1, 2).view(2, 1), 1, ValueError, r"lens: expected shape \[N\] = \[N\], got \[2, 1\]"),
        (ints(1)[0], ints(1)[0], ValueError, r"lens: expected shape \[N\] = \[N\], got \[\]"),
        (ints(1, 2).to("meta"), 1, ValueError, "lens: expected a tensor with data"),
        (ints(1, 2), ints(1, 2).to("meta"), ValueError, "tokens: expected device cpu"),
        (ints(1, 2).to_sparse(), 1, ValueError, "lens: expected a plain strided tensor"),
        (ints(1, 2), ints(1, 2).to_sparse(), ValueError, "tokens: expected a plain strided"),
        (ints(1).expand(2), 1, ValueError, "lens: expected memory of its own for every element"),
        (FOUR[1:3], FOUR[2:], ValueError, "lens: expected memory apart from .* got some of tokens"),
        (inference(ints(1, 2)), 1, ValueError, "lens: expected a tensor that may be written"),
    ],
    ids=str,
)
def test_advance_refuses_other_lens_and_tokens(lens, tokens, error, text):
    readable = isinstance(lens, torch.Tensor) and lens.layout == torch.strided and not lens.is_meta
    before = lens.tolist() if readable else None
    with pytest.raises(error, match=text):
        PARTS.advance(lens, tokens)
    assert not readable or lens.tolist() == before


def test_advance_takes_every_lens_that_may_be_written():
    lens = ints(0, 9, 1, 9, dtype=i64)
    PARTS.advance(lens[::2], ints(1, 1)[:, None].expand(2, 3)[:, 1])
    assert lens.tolist() == [1, 9, 2, 9]
    with torch.inference_mode():
        PARTS.advance(made := ints(1, 2))
    assert made.tolist() == [2, 3]
    PARTS.advance(empty := ints(), ints())
    assert empty.shape == (0,)


def test_advance_needs_a_buffer_with_tokens():
    flat = gd.KVBuffer(*[torch.zeros(3)] * 3)
    with pytest.raises(ValueError, match=r"buffer.u: expected \[rows, T, HV, V\], or .* got \[3\]"):
        flat.advance(ints(1))


def test_buffer_shapes_and_layer_views():
    layers = gd.KVBuffer.empty(5, 4, 2, 6, 8, 16, gate="channel", num_layers=3)
    assert layers.u.shape == (3, 5, 4, 6, 16)
    assert layers.k.shape == (3, 5, 4, 2, 8)
    assert layers.log_decay.shape == (3, 5, 4, 6, 8)
    assert {x.dtype for x in vars(layers).values()} == {f32}
    assert layers.layer(2).u.data_ptr() == layers.u[2].data_ptr()
    assert gd.KVBuffer.empty(5, 4, 2, 6, 8, 16, gate="head").log_decay.shape == (5, 4, 6)
    assert layers.nbytes == 4 * sum(x.numel() for x in vars(layers).values())


OBJECTS = {
    "gate": lambda: gd.Gate.lower_bound(torch.zeros(HV), torch.ones(HV, dtype=bf16), bound=-3.0),
    "log gate": gd.Gate.log,
    "norm": lambda: gd.GatedNorm(torch.ones(V), 1e-5, "sigmoid"),
    "buffer": lambda: buffer(rows=99),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_tensors_move_and_are_saved_and_shown(name):
    given = OBJECTS[name]()
    moved = given.to("meta")
    file = io.BytesIO()
    torch.save(given, file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    for field, x in vars(given).items():
        there, back = getattr(moved, field), getattr(loaded, field)
        if isinstance(x, torch.Tensor):
            assert (there.device.type, there.shape, there.dtype) == ("meta", x.shape, x.dtype)
            assert torch.equal(back.nan_to_num(9.0), x.nan_to_num(9.0))
            assert f"{field}={list(x.shape)} {x.dtype} cpu" in repr(given)
        else:
            assert there == back == x
            assert f"{field}={x!r}" in repr(given)


@pytest.mark.parametrize("op", ["prefill", "decode", "verify", "flush"])
def test_a_call_has_the_problem_of_its_case(op):
    for case in cases(op)[::37]:
        assert gd.explain(op, **make(case).arguments).problem == case.problem, case.label


def test_labels_are_unique():
    for op in ("prefill", "decode", "verify", "flush"):
        labels = {}
        for case in cases(op):
            assert labels.setdefault(case.problem.label, case.problem) == case.problem


def test_explain_names_the_backend_and_missing_needs():
    route = gd.explain("decode", **call("decode"))
    assert isinstance(route, gd.Route)
    assert isinstance(route.problem, gd.Problem)
    assert (route.backend, route.kernel) == ("reference", "reference.decode")
    assert any("CUDA" in reason for reason in route.missing)
    assert route.problem.label in str(route)
    assert "cute needs" in str(route)
    assert gd.explain("flush", **call("flush")).problem.op == "flush"
    assert "buffer" in gd.explain("decode", **call("decode") | buffered()).problem.options
    for op in ("train", None, ["decode"]):
        with pytest.raises(ValueError, match="op: expected one of"):
            gd.explain(op)
    with pytest.raises(ValueError, match="state: expected shape"):
        gd.explain("decode", **{**call("decode"), "state": torch.zeros(P, HV, K, V)})
    with pytest.raises(gd.UnsupportedProblem) as caught:
        gd.explain("verify", **call("verify"), backend="cute")
    assert caught.value.missing
    assert isinstance(caught.value, NotImplementedError)
