"""Models with an encoder whose output every decoder layer attends to."""

from __future__ import annotations

from typing import Final

from hybridkv.runner.tiny.family import TinyFamily

ENCODER_DECODER: Final = {
    "t5": TinyFamily(
        "t5",
        {
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 3,  # as many as the decoder's: transformers' generate makes its cache by the encoder's
            "num_decoder_layers": 3,
            "num_heads": 4,
            "relative_attention_num_buckets": 16,
            "relative_attention_max_distance": 48,
            "feed_forward_proj": "gated-gelu",
            "n_positions": 256,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "whisper": TinyFamily(
        "whisper",
        {
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "max_target_positions": 256,
            "decoder_start_token_id": 1,
        },
    ),
}
