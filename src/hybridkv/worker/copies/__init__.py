"""Blocks and states that are moved and copied."""
