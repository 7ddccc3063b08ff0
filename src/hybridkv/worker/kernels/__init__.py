"""Triton kernels: imported only by who asks for them, an accelerator and never a requirement."""
