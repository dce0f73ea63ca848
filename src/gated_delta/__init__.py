"""Gated-delta-rule linear attention (GDN, KDA) for inference: prefill, decode, verify, flush."""

from . import library as _library  # noqa: F401  registers torch.ops.gated_delta
from .api import Route, decode, explain, flush, prefill, summarise, verify
from .problem import Gate, GatedNorm, KVBuffer, Problem, UnsupportedProblem

__all__ = [
    "Gate",
    "GatedNorm",
    "KVBuffer",
    "Problem",
    "Route",
    "UnsupportedProblem",
    "decode",
    "explain",
    "flush",
    "prefill",
    "summarise",
    "verify",
]
__version__ = "0.1.0"
