"""Buffers of a model's layers, and what the layers of several block tables keep, for one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from gated_delta import api
from gated_delta.integrations.engine import load
from gated_delta.integrations.engine.counts import Counts, Places
from gated_delta.integrations.engine.ring_lengths import lengths_of
from gated_delta.integrations.vllm import process
from gated_delta.integrations.vllm.start import DEVICE
from gated_delta.problem import KVBuffer


@torch.inference_mode(False)  # so that any mode may write to it
def allocate(rows: int) -> None:
    """Gives each layer without a buffer one for `rows` requests, all in one, in the model's order.

    Of G block tables each has every G-th layer, so `flush` can take all layers in one call. The log
    says what a buffer takes before.
    """
    layers = [x for x in process.in_order() if (x.buffered or x.ring) and x.kvbuffer is None]
    for _, group in itertools.groupby(layers, key=lambda x: (x.channels, x.sizes)):
        alike = list(group)
        first, size = alike[0], dict(num_layers=len(alike))
        _, HV, V, K = first.sizes
        states = len(alike) * rows * HV * V * K * first.get_state_dtype()[1].itemsize
        taken = first.buffer(rows, "meta", **size).nbytes
        if first.ring:
            line = load.ring_line(taken, first.ring, rows, states)
        else:
            line = load.drafts_line(taken, first.num_spec * states)
        process.logger().info(line)
        buffer = first.buffer(rows, DEVICE, **size)
        for i, layer in enumerate(alike):
            layer.kvbuffer = buffer.layer(i)


@dataclass
class Pool:
    """What layers of G block tables keep, for one call: L layers of each.

    states: [L, slots, HV, V, K] and windows: [L, slots, tokens, D], in which layer i of each has
    pool i. buffer: of L layers; each table's rows follow the last one's. layer: one of them.
    """

    layer: Any
    states: Tensor
    windows: Tensor
    buffer: KVBuffer

    @classmethod
    def of(cls, tables: Sequence[Sequence[Any]]) -> Pool | None:
        """Of layers by block table; None if they do not lie evenly."""

        def windows_of(layer: Any) -> Tensor:
            pool: Tensor = layer.kv_cache[0]
            return pool.mT if is_conv_state_dim_first() else pool

        def of_buffer(name: str) -> Tensor | None:
            return _stacked(tables, lambda x: getattr(x.kvbuffer, name), follow=True)

        states, windows = _stacked(tables, lambda x: x.kv_cache[1]), _stacked(tables, windows_of)
        u, k, log_decay = map(of_buffer, ("u", "k", "log_decay"))
        if states is None or windows is None or u is None or k is None or log_decay is None:
            return None
        return cls(tables[0][0], states, windows, KVBuffer(u, k, log_decay))

    def move_windows(
        self, tables: Sequence[Tensor], rows: Tensor, counts: Counts, buffer_rows: Tensor
    ) -> Places:
        """As of ring_lengths."""
        sequences = self.windows, tables, rows, counts, buffer_rows
        sizes = dict(
            width=self.windows.shape[2] - self.layer.num_spec,
            buffer_size=self.buffer.u.shape[1] // len(tables),
        )
        places: Places = lengths_of(rows).move_windows(*sequences, **sizes)
        return places

    def fold(self, places: Places, counts: Tensor, to: Tensor) -> None:
        """Folds so many tokens of each place into the states of slots `to`."""
        self.flush(counts, places.source, buffer_indices=places.row, write_indices=to)

    def flush(self, num_accepted: Tensor, slots: Tensor, **options: Tensor) -> None:
        """Folds so many tokens into the states of these slots; options: of api.flush."""
        options |= dict(num_accepted=num_accepted, state_indices=slots)
        settings: dict[str, Any] = dict(null_index=self.layer.null_index, **options)
        api.flush(self.states, self.buffer, backend=self.layer.backend, **settings)


def _stacked(
    tables: Sequence[Sequence[Any]], part: Callable[[Any], Tensor], follow: bool = False
) -> Tensor | None:
    """[L, ...], a part of the L layers of each block table; None if they do not lie evenly.

    The tables share these tensors; or, if they follow, layer i's of all are one in axis 0.
    """
    parts = [[part(layer) for layer in layers] for layers in tables]
    first, G, L = parts[0][0], len(parts), len(parts[0])
    start, rows, size = first.data_ptr(), len(first), first.element_size()
    step = parts[0][1].data_ptr() - start if L > 1 else 0
    behind = rows * first.stride(0) * size if follow else 0
    even = [[start + t * behind + i * step for i in range(L)] for t in range(G)]
    alike = {(x.untyped_storage().data_ptr(), x.shape, x.stride()) for of in parts for x in of}
    given = [[x.data_ptr() for x in of] for of in parts]
    if given != even or len(alike) > 1 or step < 0 or step % size:
        return None
    shape = L, rows * (G if follow else 1), *first.shape[1:]
    return first.as_strided(shape, (step // size, *first.stride()))
