"""Where free blocks come from: blocks of one size, or slabs of several sizes."""
