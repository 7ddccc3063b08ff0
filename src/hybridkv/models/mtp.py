"""Multi-token prediction: layers behind the model that draft tokens, each with keys and values of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.models.fields import Fields
from hybridkv.models.model import ASSUMED, Layer, ReadFact
from hybridkv.specs import Keeps

MTP: Final = "multi-token prediction layers"
FIELDS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
"""What the config says how many there are in."""
_UNSAID: Final = {"qwen3_next": 1}
"""Model types whose files say none, and have some."""
_WINDOWED: Final = ("mimo_v2_flash",)
"""Model types in which they have the window of other layers."""


def mtp_layers(fields: Fields) -> tuple[str | None, int]:
    """The field that says how many there are, and how many; None and 0 where none does."""
    key = next((one for one in FIELDS if fields.values.get(one) is not None), None)
    if key is None:
        return None, _UNSAID.get(fields.text("model_type") or "", 0)
    each = fields.integer("mtp_transformer_layers", 1) if key == "num_mtp_modules" else 1
    return key, each * fields.layers(key, minimum=0)


def with_mtp(layers: Sequence[Layer], fields: Fields, asked: int) -> tuple[tuple[Layer, ...], ReadFact]:
    """``layers`` and behind them ``asked`` multi-token prediction layers; and what was assumed of these.

    They are attention as the last layer has it that keeps every token, with its indexer (MiMo-V2-Flash: that has a
    window). ConfigError where the config has fewer.
    """
    key, there = mtp_layers(fields)
    if asked > there:
        said = f"{key} says {there}" if key else "no field says that it has any (num_nextn_predict_layers)"
        raise fields.fail(
            f"{asked} multi-token prediction layers were asked for (mtp_layers=), and {said}: "
            "ask for fewer, or say --set num_nextn_predict_layers=N (fields=)"
        )
    keeps = Keeps.WINDOW if fields.text("model_type") in _WINDOWED else Keeps.TOKENS
    like = [one for one in layers if one.spec.keeps is keeps]
    if not like:
        raise ConfigError(f"{fields.name} has no attention layer that a multi-token prediction layer could be like")
    entries = Counter(one.index for one in like)
    last = max(index for index, many in entries.items() if many == max(entries.values()))
    first = max(max(one.index for one in layers) + 1, fields.layers("num_hidden_layers", 1))
    added = [
        Layer(f"mtp.layers.{i}.self_attn" + (".indexer" if one.name.endswith(".indexer") else ""), one.spec, first + i)
        for i in range(asked)
        for one in like
        if one.index == last
    ]
    fact = ReadFact(MTP, f"{asked}, each as layer {last}", key or "its model type has them", ASSUMED)
    return (*layers, *added), fact
