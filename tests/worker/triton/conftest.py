import triton_here  # noqa: F401
