"""Write which model types an engine runs as small models (shrunk_models): docs/data/models-run.csv, models-refused.csv.

    python tests/runner/every_model.py docs/data [MODEL_TYPE ...]

With transformers 5.24 and the types that 5.19 lacks it makes models-run-newest.csv and models-refused-newest.csv.
An Engine of each makes the self-check that every engine makes (hybridkv.runner.self_check). Takes some minutes.
"""

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from csv_table import write
from models_table import layers_of
from shrunk_models import small_model
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridkv.errors import HybridKVError
from hybridkv.models import read_model
from hybridkv.models.reader import NOT_YET
from hybridkv.runner import Engine
from hybridkv.runner.self_check import tolerance
from hybridkv.runner.states.continuation import difference

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
MEMORY, LONGEST = "256MiB", 200
_CONTEXT, _SAME = 41, 5
"""Tokens of two prompts, of which so many last ones are equal."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One model type. outcome: runs, refused, not built, or fails. layers: kinds in order.

    how: hybridkv.runner.probe.
    """

    model_type: str
    outcome: str
    how: str = "-"
    layers: tuple[str, ...] = ()
    reason: str = ""


def tried(model_type: str) -> Tried:
    """An engine of the small model of ``model_type``."""
    try:
        if model_type in NOT_YET:  # some of them are not small at all
            read_model({"model_type": model_type}, dtype="float32", backend="transformers")
        model = _quietly(model_type)
        moved = context(model)
    except HybridKVError as error:
        return Tried(model_type, "refused", reason=_line(error))
    except Exception as error:  # noqa: BLE001 - each class has its own reasons
        return Tried(model_type, "not built", reason=f"{type(error).__name__}: {_line(error)}")
    try:
        with Engine(model, memory=MEMORY, max_model_len=LONGEST) as engine:
            how, layers = str(engine.runner.forwards), layers_of(engine.loaded)
    except HybridKVError as error:
        return Tried(model_type, "refused", reason=_line(error))
    except Exception as error:  # noqa: BLE001 - it should have been refused: the table says so
        return Tried(model_type, "fails", reason=f"{type(error).__name__}: {_line(error)}")
    if moved <= 10 * tolerance(torch.float32):
        return Tried(model_type, "not built", reason=f"its weights hide what comes before ({moved:.1g})")
    return Tried(model_type, "runs", how, layers)


def _quietly(model_type: str) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old models about themselves
        return small_model(model_type)


def context(model: PreTrainedModel) -> float:
    """By how much the last logits differ where other tokens come before the last ones."""
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randint(32, 127, (1, _CONTEXT), generator=generator) for _ in range(2))
    other[:, -_SAME:] = one[:, -_SAME:]
    with torch.inference_mode():
        logits = [model(input_ids=ids, use_cache=False).logits[0, -1] for ids in (one, other)]
    return difference(logits[0], logits[1])


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Of the whole and of its parts."""
    return list({id(one.config): one.config for one in model.modules() if isinstance(one, PreTrainedModel)}.values())


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def main(folder: str, *model_types: str) -> None:
    """Try each of ``model_types``, all by default, and write both tables into ``folder``."""
    torch.set_num_threads(1)
    found = [tried(one) for one in model_types or MODEL_TYPES]
    runs = [one for one in found if one.outcome == "runs"]
    write(
        Path(folder) / "models-run.csv",
        ("model type", "layers", "forwards"),
        [(one.model_type, ", ".join(one.layers), one.how) for one in runs],
    )
    refused = [
        (one.model_type, one.reason if one.outcome == "refused" else f"{one.outcome}: {one.reason}")
        for one in found
        if one.outcome != "runs"
    ]
    write(Path(folder) / "models-refused.csv", ("model type", "reason"), refused)
    counts = Counter(one.how for one in runs)
    how = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), reverse=True))
    sys.stdout.write(f"transformers {transformers.__version__}: {len(runs)} of {len(found)} run ({how}).\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
