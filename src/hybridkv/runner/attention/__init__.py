"""Attention layers of a model on gathered pages."""
