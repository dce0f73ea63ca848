"""A vLLM layer's calls of our operations, from its sizes alone. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_delta import problem
from gated_delta.integrations.checks import layer_gate
from gated_delta.integrations.engine import load, projection
from gated_delta.problem import MAX_BUFFER, MAX_DRAFT, TAPS, Gate, GatedNorm, KVBuffer, ShortConv


def room(drafts: int, states: torch.dtype) -> int:
    """Tokens of a row in which accepted drafts stay. vLLM has a state for each draft, so a row is a
    20th of them if a verify of one token more fits twice."""
    return max(load.room(drafts, states), min(2 * (1 + drafts), MAX_BUFFER))


def too_many(drafts: int) -> dict[str, str]:
    """Operations left to vLLM for so many draft tokens a request, and why."""
    most = MAX_DRAFT - 1  # the token before them is in the same call
    return dict(decode=f"more than {most} draft tokens") if drafts > most else {}


class Recurrence:
    """A linear layer on this rank, as our operations see it.

    sizes: H, HV, V, K. channels: the gate has K channels. by_qk_head: the projection has q, k, v
    and z by q/k head. num_spec: draft tokens. fuses_norm: our operations include the gated norm.
    aligned: prefill also keeps states inside a prompt.
    allow_neg_eigval: beta is 2 sigmoid(b). buffered: drafts go to a KVBuffer. ring: decode keeps so
    many tokens in one, in a request's row; 0: none. room: tokens of a row in which accepted drafts
    stay; 0: they do not. kvbuffer: of either, once there is one. Gate weights A_log, dt_bias: any
    device.
    """

    channels = False
    by_qk_head = False
    allow_neg_eigval = False
    buffered = False
    ring = 0
    room = 0
    kvbuffer: KVBuffer | None = None
    null_index = 0
    sizes: tuple[int, int, int, int]
    num_spec: int
    fuses_norm: bool
    aligned: bool
    deterministic: bool | int
    inputs: torch.dtype
    backend: str
    A_log: Any
    dt_bias: Any

    def _norm(self) -> Any:
        """The gated norm after the recurrence: weight, eps, activation."""
        raise NotImplementedError

    def _lower_bound(self) -> float | None:
        """The bound of KDA's log decays; None without one."""
        return None

    def _conv_dtype(self) -> torch.dtype:
        """The dtype of the convolution's weight."""
        return torch.float32 if self.channels else self.inputs

    def _gate(self, A_log: Tensor, dt_bias: Tensor) -> Gate:
        if not self.channels:
            return layer_gate(A_log, dt_bias)
        return layer_gate(A_log.flatten(), dt_bias.view(A_log.numel(), -1), self._lower_bound())

    def _arguments(
        self, rows: Sequence[Tensor], pool: Tensor, packed: bool, gate: Gate | None = None
    ) -> dict[str, Any]:
        """An operation's arguments for tokens: packed sequences, or one token a sequence.

        rows: x after the convolution, g, beta, and z if the operation includes the norm.
        """
        (H, HV, V, K), (x, g, beta, *z) = self.sizes, rows
        lead = (1, len(x)) if packed else (len(x), 1)
        q, k, v = x.split((H * K, H * K, HV * V), -1)
        of_gate = (HV, K) if self.channels else (HV,)
        shapes = dict(q=(H, K), k=(H, K), v=(HV, V), g=of_gate, beta=(HV,))
        given = dict(q=q, k=k, v=v, g=g, beta=beta)
        tensors: dict[str, Any] = {x: given[x].reshape(*lead, *shapes[x]) for x in given}
        if z:
            gate_of_norm = z[0].unflatten(0, lead)
            if not packed or gate_of_norm.is_contiguous():  # prefill alone takes z in groups
                gate_of_norm = gate_of_norm.reshape(*lead, HV, V)
            tensors |= dict(z=gate_of_norm, norm=self._gated_norm(x.device))
        return tensors | self._settings(pool, gate)

    def _raw_step(
        self,
        rows: Sequence[Tensor],
        pool: Tensor,
        convolution: dict[str, Any],
        gate: Gate | None = None,
    ) -> dict[str, Any]:
        """decode's arguments for one token a sequence, with its convolution and norm.

        rows: of the projection, g and beta [N, HV], z [N, HV, V]; by q/k head [N, H, R] and
        [N, H, R, V].
        """
        x, g, beta, z = rows
        parts = projection.split_interleaved if self.by_qk_head else projection.split
        q, k, v = parts(x, self.sizes)[:3]
        tensors = dict(q=q, k=k, v=v, g=g, beta=beta, z=z)
        call: dict[str, Any] = {name: y[:, None] for name, y in tensors.items()}
        call |= convolution | dict(norm=self._gated_norm(x.device))
        return call | self._settings(pool, gate)

    def _gated_norm(self, device: torch.device) -> GatedNorm:
        norm = self._norm()
        weight = norm.weight
        if weight.device != device:
            weight = torch.empty_like(weight, device=device)
        activation = "sigmoid" if norm.activation == "sigmoid" else "silu"  # or "swish"
        return GatedNorm(weight, norm.eps, activation)

    def _settings(self, pool: Tensor, gate: Gate | None) -> dict[str, Any]:
        """Arguments of every operation on tokens. gate: the layer's, if none is given."""
        gate = gate or self._gate(self.A_log, self.dt_bias)
        flags = dict(beta_logits=True, allow_neg_eigval=bool(self.allow_neg_eigval))
        options = dict(null_index=self.null_index, backend=self.backend)
        return dict(**flags, **options, gate=gate, state=pool)

    def buffer(self, rows: int, device: Any, num_layers: int | None = None) -> KVBuffer:
        """For the drafts of `rows` requests and the token before them, or for rows of the ring."""
        H, HV, V, K = self.sizes
        gate = "channel" if self.channels else "head"
        options: dict[str, Any] = dict(gate=gate, num_layers=num_layers, device=device)
        tokens = self.ring or self.room or 1 + self.num_spec
        return KVBuffer.empty(rows, tokens, H, HV, K, V, **options)

    def calls(self, pool: Tensor, tokens: int) -> list[load.Call]:
        """Calls like those of batches, on that pool: a prefill of `tokens`, a decode, drafts, a
        convolution."""
        (H, HV, V, K), W = self.sizes, 1 + self.num_spec
        gate = self._gate_on(pool.device)
        widths = [(2 * H * K + HV * V,), (HV, K) if self.channels else (HV,), (HV,)]
        widths += [(HV, V)] if self.fuses_norm else []
        rows = [pool.new_empty(tokens, *width, dtype=self.inputs) for width in widths]
        one = torch.ones(1, dtype=torch.int32, device=pool.device)
        slots: dict[str, Any] = dict(state_indices=one)
        cu_seqlens = torch.cat([0 * one, one])
        prefill = slots | dict(has_initial_state=one.bool(), cu_seqlens=cu_seqlens * tokens)
        prefill |= dict(deterministic=self.deterministic)
        decode = slots
        folds: list[load.Call] = []
        if self.buffered or self.ring:
            buffer = slots | dict(buffer=self.kvbuffer or self.buffer(2, pool.device))
            options = dict(null_index=self.null_index, backend=self.backend)
            folds = [("flush", buffer | options | dict(state=pool, num_accepted=one))]
        if self.ring:
            decode = buffer | dict(buffer_indices=one, buffer_lens=one)
        cases = [("prefill", tokens, prefill), ("decode", 1, decode)]
        if self.buffered:
            kept = dict(buffer_indices=one, buffer_lens=one) if self.room else {}
            packed = dict(cu_seqlens=cu_seqlens * W, max_seqlen=W)
            cases.append(("verify", W, buffer | packed | kept))
        elif self.num_spec:
            accepted = dict(num_accepted=one, cu_seqlens=cu_seqlens * W)
            cases.append(("decode", W, dict(state_indices=one.repeat(1, W)) | accepted))
        if self.aligned:
            checkpoints = dict(checkpoint_lens=-one[:, None], checkpoint_indices=one[:, None])
            cases.append(("prefill", tokens, prefill | checkpoints))

        def call(op: str, n: int, options: dict[str, Any]) -> load.Call:
            inputs = [x[:n] for x in rows]
            return op, self._arguments(inputs, pool, "cu_seqlens" in options, gate) | options

        weight = pool.new_empty(rows[0].shape[1], TAPS, dtype=self._conv_dtype())
        windows = pool.new_empty(2, rows[0].shape[1], TAPS - 1, dtype=self.inputs)
        q, k, v = (x[None] for x in projection.split(rows[0], self.sizes))
        convolution: dict[str, Any] = dict(q=q, k=k, v=v, conv=ShortConv(weight), windows=windows)
        convolution |= dict(null_index=self.null_index, backend=self.backend)
        for name in ("state_indices", "has_initial_state", "cu_seqlens"):
            convolution[name] = prefill[name]
        steps = self.raw_steps(pool)
        return [*(call(*case) for case in cases), *steps, *folds, ("short_conv", convolution)]

    @torch.no_grad()
    def raw_steps(self, pool: Tensor) -> list[load.Call]:
        """The decode that includes its tokens' convolution, if the layer's is one and ours runs it.

        Not with drafts or a ring, nor in the checking mode, which works states out from convolved
        tokens.
        """
        (H, HV, V, _), C = self.sizes, projection.width(self.sizes)
        few = not self.channels and HV <= projection.MOST_HEADS * H
        if not (self.by_qk_head or few) or not self.fuses_norm:
            return []
        if self.num_spec or self.ring or problem.CHECK:
            return []
        x = pool.new_empty(1, C + HV * V, dtype=self.inputs)
        heads = x.new_empty(1, *((H, HV // H) if self.by_qk_head else (HV,)))
        z = heads[..., None].expand(*heads.shape, V).contiguous()
        weight = x.new_empty(C, TAPS, dtype=self._conv_dtype())
        convolution = dict(conv=ShortConv(weight), windows=x.new_empty(2, C, TAPS - 1))
        gate, slots = self._gate_on(x.device), torch.ones(1, dtype=torch.int32, device=x.device)
        step = self._raw_step([x, heads, heads, z], pool[:2], convolution, gate)
        calls: list[load.Call] = [("decode", step | dict(state_indices=slots))]
        return [] if load.refused(calls) else calls

    def _gate_on(self, device: torch.device) -> Gate:
        """The layer's gate with weights on that device, of any values."""
        return self._gate(*(torch.empty_like(x, device=device) for x in (self.A_log, self.dt_bias)))
