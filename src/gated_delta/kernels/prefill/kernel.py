"""The launch of a prefill kernel."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device import hopper, levels
from ..device.args import Args, typed
from ..device.norm import NORM
from ..device.recurrent import without
from .arguments import PrefillPointers, PrefillSizes, PrefillStrides
from .layout import D

Pointers, Strides, Sizes = (
    typed(PrefillPointers, Int64),
    typed(PrefillStrides, Int32),
    typed(PrefillSizes, Int32),
)


CHECKPOINTS = ("checkpoint",)
"""How the names of checkpoints' arguments begin."""
FP8 = ("out",)
"""As above, of an output in FP8."""


class PrefillKernel:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else.

    A kernel defines `kernel(args)`, its device code, and `ctas(args)`; and in __init__ `threads` of
    a CTA and `shared`, its bytes of dynamic shared memory.
    """

    arguments = (Pointers, Float32, Float32, Strides, Sizes)
    """Pointers, scale, the gate's lower bound, strides, sizes."""
    checkpoints = True
    """False drops the arguments of checkpoints: scans' and transitions'."""
    norm = False
    """False drops the arguments of the gated norm."""
    fp8 = False
    """False drops the arguments of an output in FP8."""
    boxes: dict[str, hopper.SwizzledTile] = {}  # noqa: RUF012
    """TMA boxes by tensor; `args.maps` has the tensors' maps."""
    split = True
    """`split` of hopper.make_maps."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Further options of the launch."""

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        absent = ((CHECKPOINTS, self.checkpoints), (NORM, self.norm), (FP8, self.fp8))
        unused = [prefix for prefixes, has in absent if not has for prefix in prefixes]
        ptr, stride, size = (without(x, *unused) for x in (ptr, stride, size))
        args = Args(ptr, scale, bound, stride, size)
        if cutlass.const_expr(self.boxes):
            maps = hopper.make_maps(ptr, stride, size, self.boxes, D, self.split)
            args = hopper.TmaArgs(*args, maps)
        self.kernel(args).launch(
            grid=(self.ctas(args), 1, 1),
            block=(self.threads, 1, 1),
            smem=self.launch_shared(args),
            stream=stream,
            use_pdl=levels.current().pdl,
            **self.options,
        )

    def launch_shared(self, args):
        return self.shared
