"""Drafting: the side of an engine that asks a drafter, and waits for results that its drafts need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.runner.completion import Progress
from hybridkv.runner.inputs import drafts_by_request
from hybridkv.runner.load import LoadedModel
from hybridkv.schedule import Scheduler
from hybridkv.step import Step

if TYPE_CHECKING:  # a draft model is an engine, too
    from hybridkv.runner.drafters import Drafter

logger = logging.getLogger(__name__)


class Drafting:
    """Asks a drafter before each step, until it fails.

    Args:
        drafter: the drafter; None for none.
        loaded: the model that verifies its drafts.

    Attributes:
        drafter: the drafter; None for none, and after it failed.
    """

    def __init__(self, drafter: Drafter | None, loaded: LoadedModel) -> None:
        self.drafter = drafter
        self._loaded = loaded
        self._took: Callable[[int, float], object] | None = getattr(drafter, "took", None)
        self._decoded: tuple[int, float] | None = None
        self._found_none = False

    def ran(self, step: Step, seconds: float) -> None:
        """Note how long a step took, for the drafter, if the step only decoded."""
        if len(step) and step.decodes.all():
            self._decoded = (step.num_tokens, seconds)

    def may_run_ahead(self, scheduler: Scheduler, in_flight: Iterable[Step]) -> bool:
        """Return whether another step may be scheduled before the results of those in flight.

        With a drafter, a step that samples without drafts must be awaited: its next token could get no drafts. The
        exception is one step after the drafter had no drafts for any request; it is asked again after that step.
        """
        if self.drafter is None:
            return True
        if scheduler.waits_for_drafts:
            return False
        found_none, self._found_none = self._found_none, False
        # a row that samples without drafts gets an input that the drafter does not know yet
        sampled = (step.samples & (np.diff(step.drafts.indptr) == 0) for step in in_flight)
        return found_none or not any(rows.any() for rows in sampled)

    def propose(self, scheduler: Scheduler, live: Iterable[Progress]) -> None:
        """Ask the drafter about the requests with one token left to run; it needs their newest tokens."""
        if self.drafter is None:
            return
        ready = [one.request for one in live if one.decodes]
        if not ready:
            return
        decoded, self._decoded = self._decoded, None
        try:
            if self._took is not None and decoded is not None:
                self._took(*decoded)
            drafts = drafts_by_request(self.drafter.propose(ready), ready, self._loaded)
        except Exception as error:
            logger.warning("%s failed, no more drafts: %r", type(self.drafter).__name__, error, exc_info=True)
            self.drafter = None
            return
        self._found_none = not any(map(len, drafts.values()))  # len, because drafts may be arrays
        scheduler.propose(drafts)
