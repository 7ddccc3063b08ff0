"""Recurrent layers that go on from a state."""
