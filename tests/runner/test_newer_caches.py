"""Plans compared with measured caches of the model types that only a newer transformers has (classes/newer.json).

Skipped with transformers 5.19. With 5.24 or later: ``pip install --no-deps --target DIR transformers==5.24.0`` and
``PYTHONPATH=DIR pytest tests/runner/test_newer_caches.py``.
"""

from typing import Any

import pytest
import torch
from measured_caches import measured_cache
from measured_models import as_file, differences, read
from transformers import CONFIG_MAPPING

from hybridkv.models.reading import MADE_BY_CLASS, table

torch.set_num_threads(1)

FILES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 6},
    "inkling2_loop_text": {"num_hidden_layers": 18},
    "inkling2_text": {"num_hidden_layers": 6},
    "lfm3": {"num_hidden_layers": 6},
}
"""Fields of a file of each type, which leaves everything else to its class."""
BUILT = [one for one in FILES if one in CONFIG_MAPPING]


@pytest.mark.skipif(not BUILT, reason="this transformers has none of the newer types")
@pytest.mark.parametrize("model_type", BUILT)
def test_plan_of_a_newer_type_matches_its_measured_cache(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**FILES[model_type])
    measured = measured_cache(config)
    assert list(differences(read(as_file(config)), measured)) == []
    if model_type in table("newer")["defaults"]:
        file = {"model_type": model_type, "vocab_size": 9, **FILES[model_type]}
        assert list(differences(read(file), measured)) == []


@pytest.mark.parametrize("model_type", [one for one in table("newer")["defaults"] if one in CONFIG_MAPPING])
def test_newer_defaults_are_those_of_the_class(model_type: str) -> None:
    made = CONFIG_MAPPING[model_type]()
    for key, value in table("newer")["defaults"][model_type].items():
        assert value == MADE_BY_CLASS or getattr(made, key) == value, key
