"""Every request's states in float64, by token loops beside SGLang's, for test_sglang.py.

They are compared with the engine's where it reads a state whole: where the prefix cache copies it,
where a prefill continues from it, and where decode has no ring.
"""

import json
import os
from collections import Counter

import sglang_cpu
import torch

from gated_delta.integrations.sglang import kernels


class States:
    """live: by a layer's pool (its address) and slot, the state of the request in it."""

    def __init__(self, folder):
        """Before sglang_cpu.install."""
        self.file = os.path.join(folder, str(os.getpid()))
        self.live, self.worst, self.compared = {}, 0.0, Counter()
        track = sglang_cpu.track_all_layers
        for op in ("decode", "prefill"):
            kernels.api = Through(kernels.api, op, getattr(self, op))

        def tracked(conv, pools, slots, mask, destinations, count, **given):
            for row in mask[:count].nonzero().flatten().tolist():
                for pool in pools:
                    self.compare("snapshots", pool, int(slots[row]))
            track(conv, pools, slots, mask, destinations, count, **given)

        sglang_cpu.track_all_layers = tracked

    def compare(self, where, pool, slot):
        truth = self.live[pool.data_ptr(), slot]
        error = float((pool[slot].double() - truth).norm() / truth.norm())
        self.worst = max(self.worst, error)
        self.compared[where] += 1
        with open(self.file, "w") as file:
            json.dump(dict(self.compared, worst=self.worst), file)

    def decode(self, call):
        if "buffer" not in call:
            self.compare_all("decodes", call)
        self.advance(call, call["state_indices"], torch.arange(len(call["q"]) + 1))

    def prefill(self, call):
        self.compare_all("prefills", call)
        self.advance(call, call["state_indices"], call["cu_seqlens"])

    def compare_all(self, where, call):
        for slot in call["state_indices"].tolist():
            if (call["state"].data_ptr(), slot) in self.live:
                self.compare(where, call["state"], slot)

    def advance(self, call, slots, bounds):
        pool, gate = call["state"], call["gate"]
        q, k, v, g, beta = (call[x].flatten(0, 1).double() for x in ("q", "k", "v", "g", "beta"))
        A, x = gate.A_log.double().exp(), g + gate.dt_bias.double()
        A = A.view(-1, *[1] * (x.dim() - 2))
        softplus = -A * torch.nn.functional.softplus(x)
        g = softplus if gate.kind == "softplus" else gate.bound * torch.sigmoid(A * x)
        for n, slot in enumerate(slots.tolist()):
            one = slice(*bounds[n : n + 2].tolist())
            if slot <= 0 or one.start == one.stop:
                continue
            key = pool.data_ptr(), slot
            two = torch.stack([pool[slot].double(), self.live.get(key, pool[slot].double())])
            sglang_cpu.delta_rule(
                q[one],
                k[one],
                v[one],
                g[one],
                beta[one].sigmoid(),
                two,
                torch.tensor([1]),
                torch.tensor([0, one.stop - one.start]),
                torch.float64,
            )
            self.live[key] = two[1]

    def hook(self):
        """After it."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks = dict(
            clear_slots=lambda pool, slots: self.forget(slots),
            copy_from=lambda pool, source, slots: self.forget(slots),
        )
        for name, function in hooks.items():
            target = f"sglang.srt.mem_cache.memory_pool.MambaPool.{name}"
            HookRegistry.register(target, function, HookType.BEFORE)

    def forget(self, slots):
        """Another request takes these slots."""
        for slot in slots.tolist():
            self.live = {key: x for key, x in self.live.items() if key[1] != slot}


class Through:
    """gated_delta's operations; one of them shows its arguments before it runs."""

    def __init__(self, api, op, show):
        def shown(**call):
            show(call)
            return getattr(api, op)(**call)

        self.api = api
        setattr(self, op, shown)

    def __getattr__(self, name):
        return getattr(self.api, name)
