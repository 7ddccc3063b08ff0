"""docs/models.md: which model types are planned, and whether their models keep what is planned.

    python tests/runner/kept_table.py docs/models.md [MODEL_TYPE ...]

Every causal language model of transformers with the defaults of its config class (kept_models.REPAIRS where these build
no model). Takes some minutes.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers
from kept import KeptLayer, NotMeasured
from kept_models import ON_CPU, REPAIRS, as_file, config_of, differences, kept_by_default, read
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridkv.errors import ConfigError

BEGIN, END = "<!-- of plans, written by tests/runner/kept_table.py -->", "<!-- end -->"

NOT_BUILT = {"gemma3n": "its vision part needs timm and pillow: its text part, gemma3n_text, is measured"}
"""Models that are planned and cannot be built here, and why."""


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
        measured = kept_by_default(model_type)
    except NotMeasured as error:
        return Compared(model_type, "not built", keeps(plan), NOT_BUILT.get(model_type, _line(error)))
    wrong = list(differences(plan, measured))
    return Compared(model_type, "different" if wrong else "equal", keeps(measured), wrong[0] if wrong else "")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def note(found: Compared) -> None:
    """Write it down where the environment says."""
    if path := os.environ.get("HYBRIDKV_KEPT"):
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(found)) + "\n")


def keeps(layers: Mapping[int, KeptLayer]) -> str:
    """32 x 16,384 B a token: equal layers together."""
    counts = Counter(_words(layer) for layer in layers.values())
    return "; ".join(f"{count} x {words}" for words, count in counts.items()) or "nothing"


def _words(layer: KeptLayer) -> str:
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


def table(found: Sequence[Compared]) -> Iterator[str]:
    """In Markdown: those that are planned, then those that are not."""
    planned = [one for one in found if one.outcome != "refused"]
    equal = sum(one.outcome == "equal" for one in planned)
    count = f"{len(planned)} of {len(found)} planned"
    yield f"transformers {transformers.__version__}: {count}, {equal} of these measured and equal."
    yield ""
    yield "| model type | its cache, in bf16 | plan | built with |"
    yield "|---|---|---|---|"
    for one in planned:
        said = one.outcome if one.outcome == "equal" else f"**{one.outcome}**: {one.reason}"
        given = {**REPAIRS.get(one.model_type, {}), **ON_CPU.get(one.model_type, {})}
        yield f"| {one.model_type} | {one.keeps} | {said} | {', '.join(given) or '-'} |"
    yield ""
    yield "| not planned | why |"
    yield "|---|---|"
    for one in found:
        if one.outcome == "refused":
            yield f"| {one.model_type} | {one.reason.replace('|', ' ')} |"


def main(document: str, *model_types: str) -> None:
    """Put the table between its marks in ``document``."""
    path = Path(document)
    text = path.read_text("utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END, 1)
    found = [compare(one) for one in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    lines = "\n".join(table(found))
    path.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
