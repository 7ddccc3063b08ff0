"""Write which model types are planned, and whether their models keep what the plan says.

    python tests/runner/measured_table.py docs/data [MODEL_TYPE ...]     models-planned.csv and models-not-planned.csv

Compares every causal language model of transformers, with the defaults of its config class. Where the defaults build no
model, measured_models.REPAIRS adds to them. Takes some minutes.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers
from csv_table import write
from measured_caches import LayerCache, NotMeasured
from measured_models import ON_CPU, REPAIRS, as_file, cache_by_default, config_of, differences, read
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridkv.errors import ConfigError
from hybridkv.models.compressed import COMPRESSED

NOT_BUILT = {
    "deepseek_v4": "what a token adds depends on its place in a group: an engine compares pages with a forward"
}
"""Models that are planned and not measured here, and why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One model type. outcome: equal, refused, not built, or different. keeps: in words."""

    model_type: str
    outcome: str
    keeps: str
    reason: str


def compare(model_type: str) -> Compared:
    """The plan of the default config beside what its model keeps."""
    try:
        config = config_of(model_type)
    except Exception as error:  # noqa: BLE001 - config classes raise what they like
        return Compared(model_type, "refused", "-", f"no default config: {_line(error)}")
    file = as_file(config)
    try:
        plan = read(file)
    except ConfigError as error:
        return Compared(model_type, "refused", "-", _line(error))
    try:
        measured = cache_by_default(model_type)
    except NotMeasured as error:
        # a layer with compressors has windows of two sizes, for which the table has no words
        words = "-" if model_type in COMPRESSED else keeps(plan)
        return Compared(model_type, "not built", words, NOT_BUILT.get(model_type, _line(error)))
    wrong = list(differences(plan, measured))
    return Compared(model_type, "different" if wrong else "equal", keeps(measured), wrong[0] if wrong else "")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def note(found: Compared) -> None:
    """Write it down where the environment says."""
    if path := os.environ.get("HYBRIDKV_KEPT"):
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(found)) + "\n")


def keeps(layers: Mapping[int, LayerCache]) -> str:
    """32 x 16,384 B a token: equal layers together."""
    counts = Counter(_words(layer) for layer in layers.values())
    return "; ".join(f"{count} x {words}" for words, count in counts.items()) or "nothing"


def _words(layer: LayerCache) -> str:
    said = []
    if layer.token_bytes:
        said.append(f"{layer.token_bytes:,} B")
    if layer.window_bytes:
        said.append(f"{layer.window_bytes:,} B in {layer.window:,}")
    if layer.encoder_bytes:
        said.append(f"{layer.encoder_bytes:,} B an encoder token")
    if layer.states:
        said.append(
            "state " + " ".join(f"{'x'.join(map(str, shape))} {_SHORT[dtype]}" for shape, dtype in layer.states)
        )
    return " + ".join(said)


_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def main(folder: str, *model_types: str) -> None:
    """Compare each of ``model_types``, all by default, and write both tables into ``folder``."""
    found = [compare(one) for one in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    planned = [one for one in found if one.outcome != "refused"]
    rows = []
    for one in planned:
        said = one.outcome if one.outcome == "equal" else f"{one.outcome}: {one.reason}"
        given = {**REPAIRS.get(one.model_type, {}), **ON_CPU.get(one.model_type, {})}
        rows.append((one.model_type, one.keeps, said, ", ".join(given) or "-"))
    header = ("model type", "its cache, in bf16", "plan", "fields set to build it")
    write(Path(folder) / "models-planned.csv", header, rows)
    refused = [(one.model_type, one.reason) for one in found if one.outcome == "refused"]
    write(Path(folder) / "models-not-planned.csv", ("model type", "reason"), refused)
    equal = sum(one.outcome == "equal" for one in planned)
    count = f"{len(planned)} of {len(found)} planned"
    sys.stdout.write(f"transformers {transformers.__version__}: {count}, {equal} measured and equal.\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
