"""Inference with gated-delta-rule linear attention (GDN and KDA): prefill, decode, verify, flush."""

from . import library as _library  # noqa: F401  registers torch.ops.gated_delta
from .api import decode, explain, flush, prefill, verify
from .problem import Gate, GatedNorm, KVBuffer, UnsupportedProblem

__all__ = ["Gate", "GatedNorm", "KVBuffer", "UnsupportedProblem", "decode", "explain", "flush", "prefill", "verify"]
__version__ = "0.1.0"
