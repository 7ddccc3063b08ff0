"""Tokens out of logits: drawn, verified, with their log probabilities."""
