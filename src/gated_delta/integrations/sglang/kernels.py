"""SGLang's kernel interface on gated_delta's operations. Imports no engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations.checks import layer_gate
from gated_delta.integrations.sglang import process
from gated_delta.problem import MAX_BUFFER, KVBuffer, UnsupportedProblem

Given = dict[str, Any]
Tokens = tuple[Tensor, ...]


class RawGate(NamedTuple):
    """GDN's gate a [T, HV] as `extend` gets it, and the engine's activation to g and beta."""

    activated: Callable[[], tuple[Tensor, Tensor]]
    a: Tensor
    A_log: Tensor
    dt_bias: Tensor


def ring_of(given: Given) -> KVBuffer | None:
    """ReplaySSM's records of a layer (--enable-linear-replayssm), L tokens a slot.

    Each step appends one, and the L-th folds them into the state: a KVBuffer of L - 1 tokens.
    None if the engine's own kernel would use none: with a bounded gate.
    """
    parts: list[Any] = [given.get(f"replayssm_{name}") for name in "dkg"]
    if given.get("lower_bound") is not None or any(x is None for x in parts):
        return None
    L = parts[0].shape[2]
    return KVBuffer(*(x.transpose(1, 2)[:, : L - 1] for x in parts))  # heads before tokens


def ring_lacks(ring: KVBuffer | None) -> str:
    """What such a ring lacks for our kernels; "" if nothing."""
    if ring is None or (ring.u.dtype == torch.float32 and 1 <= ring.u.shape[1] <= MAX_BUFFER):
        return ""
    return f"ReplaySSM's ring in fp32, of 2 to {MAX_BUFFER + 1} tokens"


def skip_preparation(backend: Any) -> None:
    """Lets an engine's GDN backend pass q, k, v to `extend` as views, and a and b raw."""
    activate, route = backend._prefill_gates, backend._init_target_verify_qkv_routing

    def raw(layer: Any, a: Tensor, b: Tensor) -> tuple[RawGate, Tensor]:
        activated = functools.partial(activate, layer, a, b)
        return RawGate(activated, a, layer.A_log, layer.dt_bias), b

    def views(batch: Any) -> None:
        route(batch)
        if not batch.forward_mode.is_target_verify():
            backend._use_strided_target_verify_qkv = True  # prefills have the same code

    backend._prefill_gates, backend._init_target_verify_qkv_routing = raw, views


def kernel_class(triton: type) -> Any:
    """`Operations` over the engine's TritonGDNKernel or TritonKDAKernel, which runs the rest."""
    return type(
        f"GatedDelta{triton.__name__}",
        (Operations, triton),
        dict(layers="KDA" if "KDA" in triton.__name__ else "GDN"),
    )


class Operations:
    """The engine's kernel interface (its linear/kernels/kernel_backend.py) on our operations.

    `super()` is the engine's kernel. States are updated in the engine's pool, by slot. Slot 0 is
    its padding; so are negative slots.
    """

    layers: str
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    supports_fused_chain_verify = False  # its fused kernel would replace target_verify

    def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """One token a sequence; mixed_qkv [B, q|k|v], after the convolution. [1, B, HV, V]."""
        engine: Any = super()
        V, K = given["ssm_states"].shape[-2:]
        value = given["num_v_heads"] * V
        key = (mixed_qkv.shape[1] - value) // 2
        q, k, v = (
            x.unflatten(1, (-1, d))[None]
            for x, d in zip(mixed_qkv.split([key, key, value], 1), (K, K, V), strict=True)
        )
        lens = given.get("replayssm_write_pos")
        ring = ring_of(given) if lens is not None else None

        def engines() -> Tensor:
            if lens is not None:
                given["replayssm_write_pos"] = torch.maximum(lens, ~lens)  # sglang marked some
            return engine.packed_decode(mixed_qkv, a, b, **given)

        return self._step((q, k, v, a, b), given, ring_lacks(ring), engines, ring)

    def decode(self, *tokens: Tensor, **given: Any) -> Tensor:
        """One token a sequence: q, k, v [1, B, H, D], a, b. Returns [1, B, HV, V]."""
        engine: Any = super()
        return self._step(tokens, given, "", lambda: engine.decode(*tokens, **given))

    def _step(
        self, tokens: Tokens, given: Given, missing: str, engine: Any, ring: KVBuffer | None = None
    ) -> Tensor:
        norm, own_ring = self._norm(tokens, given), process.state.decode_ring
        if own_ring and not own_ring.appends:
            own_ring = None

        def ours(backend: str) -> Tensor:
            q, k, v, a, b = tokens
            rows = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), a, b
            call = self._raw(rows, given) | _pool(given, q.shape[1])
            rows_of_norm = (x for x in norm if x != "norm")
            call |= norm | {x: norm[x].transpose(0, 1) for x in rows_of_norm}
            if ring:  # the engine advances its lengths, once per step
                call |= dict(buffer=ring, buffer_indices=call["state_indices"])
                call |= dict(buffer_lens=given["replayssm_write_pos"])
            elif own_ring:
                call |= own_ring.arguments(given["ssm_states"], q.shape[1])
            o = api.decode(**call, scale=given.get("scale"), backend=backend)
            return self._applied(o.transpose(0, 1), v, norm, given)

        where = " with ReplaySSM's ring" if ring else " in a ring" if own_ring else ""
        route = more(norm) + where
        engine = None if own_ring else engine  # which would not read the ring
        return self._run("decode", ours, engine, missing, tokens, given, route)

    def _norm(self, tokens: Tokens, given: Given, padded: bool = False) -> Given:
        """norm, z [1, T, ...] and outputs in FP8 of a layer whose norm our call can include."""
        fused = process.state.norms.get(given["A_log"])
        norm: Given = fused.arguments(tokens[2][0], padded) if fused else {}
        return norm | {x: norm[x][None] for x in norm if x != "norm"}

    def _applied(self, o: Tensor, v: Tensor, norm: Given, given: Given) -> Tensor:
        """o of our call; the layer's norm leaves it as it is if the call had it.

        In FP8: memory like v's, never read. The norm has the numbers.
        """
        if norm:
            process.state.norms[given["A_log"]].applied = True
        return v.new_empty(v.shape) if "out" in norm else o

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, **given: Any) -> Any:
        """Packed prompts or parts of prompts: q, k, v [1, T, H, D], g raw, beta logits.

        States for the prefix cache go to track_state. GDN: g is a RawGate; returns (o, None, None).
        KDA: returns o or (o, None). Its beta is raw even where the engine's prefill graphs say
        beta_is_raw=False.
        """
        engine: Any = super()
        track, gdn, gate, activated = given.get("track_state"), self.layers == "GDN", given, None
        if isinstance(g, RawGate):
            activated, g, A_log, dt_bias = g
            gate = dict(A_log=A_log, dt_bias=dt_bias)
        missing = "" if "A_log" in gate else "raw gates, not those of multi-item scoring"
        tokens = q, k, v, g, beta
        # Graphs that break at the layer have the engine's norm, which may have other bits.
        norm = {} if missing or process.state.deterministic else self._norm(tokens, gate, True)

        def ours(backend: str) -> Any:
            bounds, states = given["query_start_loc"], given["ssm_states"]
            N = len(bounds) - 1
            call = self._raw(tokens, gate) | norm
            call |= _pool(given, N) | dict(
                deterministic=process.state.deterministic,
                max_seqlen=process.state.max_seqlen.get(bounds),
            )
            if len(states) == N:
                # The engine's copies of strided slots, in order: no padding slot among them.
                call |= dict(null_index=-1)
            if track is not None:
                same = track.dtype == states.dtype
                checkpoints = track if same else torch.empty_like(track, dtype=states.dtype)
                call |= dict(
                    checkpoint_lens=given["track_chunk_idx"][:N, None] * process.CHUNK,
                    checkpoints=checkpoints[:N, None],
                )
            call = dict(out=given.get("output")) | call
            o, _ = api.prefill(**call, cu_seqlens=bounds, backend=backend)
            if track is not None and checkpoints is not track:
                track.copy_(checkpoints)
            o = self._applied(o, v, norm, gate)
            if gdn:
                return o, None, None
            return (o, None) if given.get("return_intermediate_states") else o

        def engines() -> Any:
            gates = (g, beta) if activated is None else activated()
            results = engine.extend(q, k, v, *gates, **given)
            if gdn and track is not None:  # an argument that this kernel ignores
                _copy_tracked(results[2], given)
            return results

        return self._run("prefill", ours, engines, missing, tokens, given, more(norm))

    def target_verify(self, **given: Any) -> Tensor:
        """Drafts q, k, v, packed [1, T, H, D]. The pool stays as it is.

        The state after each token goes to intermediate_states_buffer, or the tokens to a KVBuffer
        there. Of trees retrieve_parent_token [N, T] has the parents, as the engine's convolution
        just wrote them; the first token's means nothing.
        """
        engine: Any = super()
        tokens = tuple(given[name] for name in ("q", "k", "v", "a", "b"))
        scratch = given.get("intermediate_states_buffer")
        parents = given.get("retrieve_parent_token")
        in_kvbuffer, norm = isinstance(scratch, KVBuffer), self._norm(tokens, given)
        missing = process.drafts_need(given["cache_steps"], parents is not None, in_kvbuffer)
        if scratch is None:
            missing = missing or "a buffer for drafts, not ReplaySSM's"

        def ours(backend: str) -> Tensor:
            bounds = given["query_start_loc"]
            N = len(bounds) - 1
            call = self._raw(tokens, given) | _pool(given, N) | norm
            call |= dict(cu_seqlens=bounds, backend=backend)
            rows = given["intermediate_state_indices"][:N]
            if isinstance(scratch, KVBuffer):  # kvbuffer put it in the pool
                tree = parents
                if tree is None and process.state.trees:
                    # A dummy run; the start loads no kernel for lines.
                    tree = torch.arange(-1, given["cache_steps"] - 1, device=bounds.device)
                    tree = tree.repeat(N, 1)
                ring = process.state.ring
                if ring is not None and not process.state.trees:
                    call |= ring.arguments(given["ssm_states"], N)
                else:
                    call |= dict(parents=tree, buffer=scratch, buffer_indices=rows)
                o = api.verify(**call, max_seqlen=given["cache_steps"])
                return self._applied(o, tokens[2], norm, given)
            steps = dict(intermediate_states=scratch, intermediate_indices=rows)
            o = api.decode(**call, **steps, update_state=False)
            return self._applied(o, tokens[2], norm, given)

        engines = None if in_kvbuffer else lambda: engine.target_verify(**given)
        return self._run("verify", ours, engines, missing, tokens, given, more(norm))

    def _raw(self, tokens: Tokens, given: Given) -> Given:
        """Arguments for tokens with a raw gate: the layer's gate too."""
        q, k, v, a, b = tokens
        lead, HV, channels = v.shape[:2], v.shape[2], (q.shape[-1],) if self.layers == "KDA" else ()
        gate = layer_gate(
            given["A_log"].reshape(-1),
            given["dt_bias"].reshape(HV, *channels),
            given.get("lower_bound"),
        )
        g, beta = a.reshape(*lead, HV, *channels), b.reshape(*lead, HV)
        return dict(q=_rows(q), k=_rows(k), v=_rows(v), g=g, beta=beta, beta_logits=True, gate=gate)

    def _run(
        self,
        mode: str,
        ours: Callable[[str], Any],
        engine: Callable[[], Any] | None,
        missing: str,
        tokens: Tokens,
        given: Given,
        more: str = "",
    ) -> Any:
        """Runs our operation. Runs the engine's kernel if something is missing, or on refusal.

        more: what ours includes besides the mode, for the log.
        """
        state, states = process.state, given["ssm_states"]
        backend = process.backend_for(tokens[0])
        of_tokens = ((x.dtype, x.shape[-1]) for x in tokens)
        problem = self.layers, mode, states.dtype, states.stride(0) % 8, *of_tokens
        missing = state.left.get((self.layers, mode), missing)
        missing = missing or state.refused.get(problem, "")
        result = None
        if not missing:
            try:
                result = ours(backend)
            except UnsupportedProblem as error:  # nothing was written
                missing = state.refused[problem] = "; ".join(error.missing) or str(error)
        if missing and engine is None:
            what = dict(verify="verifies drafts in a KVBuffer", decode="decodes in a ring")[mode]
            variable = dict(verify="KVBUFFER", decode="RING")[mode]
            raise UnsupportedProblem(
                f"only gated_delta {what} (GATED_DELTA_SGLANG_{variable}=0 turns it off); it needs",
                (missing,),
            )
        if not missing:
            state.count(self.layers, mode, f"{more} on backend {backend}")
            return result
        route = f" on the engine's own kernel (ours needs {missing})"
        state.count(self.layers, mode, route, missing)
        assert engine is not None
        return engine()


def more(norm: Given) -> str:
    """What a call includes, for the log."""
    return " and norm in FP8" if "out" in norm else " and norm" if norm else ""


def _pool(given: Given, N: int) -> Given:
    return dict(state=given["ssm_states"], state_indices=given["cache_indices"][:N], null_index=0)


def _rows(x: Tensor) -> Tensor:
    """x, copied if its last dimension has a stride: the convolution leaves wide layers so."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _copy_tracked(chunk_states: Tensor, given: Given) -> None:
    """Copies the tracked states to track_state, by the chunks of the engine's kernel.

    chunk_states: [1, chunks, HV, V, K], the state before every chunk of every sequence.
    """
    chunks = (given["query_start_loc"].diff() + process.CHUNK - 1) // process.CHUNK
    row = chunks.cumsum(0) - chunks + given["track_chunk_idx"][: len(chunks)].clamp(min=0)
    given["track_state"][: len(chunks)] = (
        chunk_states[0].index_select(0, row.clamp(max=chunk_states.shape[1] - 1)).float()
    )
