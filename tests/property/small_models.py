"""Models of few small groups, for seeded runs."""

from hybridkv.specs import KVCacheSpec
from hybridkv.testing.configs import chunk_spec, cross_spec, full_spec, state_spec, window_spec

DECODERS: dict[str, tuple[KVCacheSpec, ...]] = {
    "attention": (full_spec(2), window_spec(4, 9), chunk_spec(4, 6)),
    "full and states": (full_spec(4), state_spec(4)),
    "states": (state_spec(8), state_spec(4)),
    "window and scratch": (window_spec(2, 5), state_spec(4, mode="none")),
}
ENCODER_DECODERS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (full_spec(4), cross_spec(4)),
    "full, cross of two sizes": (full_spec(2), cross_spec(2), cross_spec(4)),
    "full and window": (full_spec(4), window_spec(2, 5), cross_spec(2)),
    "full and states": (state_spec(4), full_spec(4), cross_spec(4)),
}
