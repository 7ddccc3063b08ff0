"""A module with one deliberate fault: its source with one text replaced, imported under another name."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """``module`` with the last ``old`` in its source become ``new``. AssertionError where there is none."""
    source = inspect.getsource(module)
    assert old in source, f"{old!r} stands nowhere in {module.__name__}: the fault must be written anew"
    before, after = source.rsplit(old, 1)
    path = folder / "mutated.py"
    path.write_text(before + new + after)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_mutated", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[made.__name__] = made  # Triton looks up the globals of what it compiles there
    spec.loader.exec_module(made)
    return made
