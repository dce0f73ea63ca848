"""Host code of the operations: supported problems, schedules, launches. launch.py is shared."""

from .decode import Decode
from .flush import Flush
from .launch import Operation
from .prefill import Prefill
from .short_conv import ShortConvolution
from .summarise import ResumablePrefill, Summarise
from .verify import Verify

PREFILL, DECODE, VERIFY, FLUSH = Prefill(), Decode(), Verify(), Flush()
SHORT_CONV, SUMMARISE, RESUMABLE_PREFILL = ShortConvolution(), Summarise(), ResumablePrefill()

OPERATIONS: dict[str, Operation] = {
    op.name: op for op in (PREFILL, DECODE, VERIFY, FLUSH, SHORT_CONV, SUMMARISE)
}
