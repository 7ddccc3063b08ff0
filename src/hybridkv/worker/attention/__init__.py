"""Attention over pages, in parts and over ranks."""
