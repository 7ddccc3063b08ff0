"""Small pictures of numbers, in characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_STEPS: Final = " ▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"


def sparkline(numbers: Sequence[float], most: float | None = None) -> str:
    """A character a number, its height that over ``most``, by default the greatest; anything above zero is seen."""
    most = max(numbers, default=0) if most is None else most
    return "".join(_STEPS[min(math.ceil(one / most * 8), 8) if most else 0] for one in numbers)


def bar(part: float, width: int = 24) -> str:
    """``part`` of ``width`` characters, 0 .. 1; anything above zero is seen."""
    eighths = min(max(math.ceil(part * width * 8), 0), width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_PARTS[rest] if rest else "")
