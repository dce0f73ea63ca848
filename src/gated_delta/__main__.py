"""python -m gated_delta: the same as the command gated-delta."""

from .cli import app

app()
