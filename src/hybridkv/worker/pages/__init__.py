"""The arena, every layer's view of it, and writes into its pages."""
