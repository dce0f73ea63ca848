"""Gated-delta-rule linear attention (GDN, KDA) for inference: prefill, decode, verify, flush."""

from . import library as _library  # noqa: F401  registers torch.ops.gated_delta
from .api import Route, decode, explain, flush, prefill, short_conv, summarise, verify
from .problem import Gate, GatedNorm, KVBuffer, Problem, ShortConv, UnsupportedProblem

__all__ = [
    "Gate",
    "GatedNorm",
    "KVBuffer",
    "Problem",
    "Route",
    "ShortConv",
    "UnsupportedProblem",
    "decode",
    "explain",
    "flush",
    "prefill",
    "short_conv",
    "summarise",
    "verify",
]
__version__ = "0.1.0"
