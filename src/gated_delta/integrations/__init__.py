"""Adapters that give other libraries' interfaces to gated_delta's operations."""
