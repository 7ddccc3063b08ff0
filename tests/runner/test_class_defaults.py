"""The table of transformers' config classes equals the output of its script in the same version of transformers."""

import json
from importlib.resources import files

import transformers
from config_classes import classes, document

PATH = files("hybridkv.models").joinpath("classes", "defaults.json")


def test_class_defaults_table_matches_its_script() -> None:
    """With another version of transformers, at most 2% of the common fields may differ."""
    kept = json.loads(PATH.read_text("utf-8"))
    if kept["written_with"]["transformers"] == transformers.__version__:
        assert PATH.read_text("utf-8") == document()
        return
    made = classes()["defaults"]
    both = kept["defaults"].keys() & made.keys()
    assert len(both) > 100
    fields = [(name, key) for name in both for key in kept["defaults"][name]]
    other = [pair for pair in fields if made[pair[0]].get(pair[1]) != kept["defaults"][pair[0]][pair[1]]]  # type: ignore[attr-defined]  # a table
    assert len(other) <= len(fields) // 50, other
