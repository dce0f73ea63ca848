"""The instructions that a kernel may use. `compile.py` sets the level before it traces a kernel."""

from typing import NamedTuple


class Level(NamedTuple):
    """Instructions beyond compute capability 8.0's."""

    pdl: bool
    """griddepcontrol: a kernel starts before the previous one ends. Clusters."""
    bulk_copies: bool
    """cp.async.bulk, mbarriers that count its bytes and wait, stmatrix, bf16 products."""
    wgmma: bool
    """Products of a warpgroup, TMA tensor maps, setmaxnreg."""


LEVELS = {
    "sm_80": Level(pdl=False, bulk_copies=False, wgmma=False),
    "sm_90": Level(pdl=True, bulk_copies=True, wgmma=False),
    "sm_90a": Level(pdl=True, bulk_copies=True, wgmma=True),
}

_current = LEVELS["sm_90a"]


def set_current(name):
    global _current
    _current = LEVELS[name]


def current():
    """The level of the kernel that is being compiled."""
    return _current
