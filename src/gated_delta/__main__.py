"""python -m gated_delta: the command line without an installed script."""

from .cli import app

app()
