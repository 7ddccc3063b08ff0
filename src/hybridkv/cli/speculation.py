"""What `--speculate` names: who proposes tokens, and how many of them; of replays, what is supposed of drafts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hybridkv.cli.panels import RUN
from hybridkv.errors import ConfigError
from hybridkv.units import shown

if TYPE_CHECKING:  # these need torch, which is loaded once the command runs
    from hybridkv.planner import Plan
    from hybridkv.runner.assembly import EngineOptions
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.load import LoadedModel

DEFAULT_DRAFTS: Final = 4
_NGRAM: Final = "ngram"
_DRAFT: Final = "draft"

SpeculateOption = Annotated[
    str | None,
    typer.Option(
        help="Draft K tokens a step, verified together: ngram[:K] by the request's own text, draft:DIR[:K] by a "
        f"smaller model. K: {DEFAULT_DRAFTS}.",
        metavar="DRAFTS",
        rich_help_panel=RUN,
    ),
]


def require_drafts(drafts: object, acceptance: object) -> None:
    """ConfigError where ``acceptance`` was given, and there are no drafts to accept."""
    if acceptance is not None and not drafts:
        raise ConfigError("--acceptance is of drafts, and there are none: give --drafts N, too")


@dataclass(frozen=True, slots=True)
class Speculate:
    """source: of the draft model, a folder or tiny:NAME; None for prompt lookup. drafts: of a request in a step."""

    source: str | None
    drafts: int = DEFAULT_DRAFTS

    @classmethod
    def parse(cls, text: str) -> Speculate:
        """From ``ngram[:K]`` or ``draft:DIR[:K]``. ConfigError for anything else."""
        kind, _, rest = text.partition(":")
        source, _, last = rest.rpartition(":")
        if re.fullmatch("-?[0-9]{1,9}", last):
            rest, drafts = source, int(last)
        else:
            drafts = DEFAULT_DRAFTS
        if (kind, bool(rest)) not in {(_NGRAM, False), (_DRAFT, True)}:
            raise ConfigError(f"--speculate is ngram[:K] or draft:DIR[:K], got {shown(text)}")
        return cls(rest or None, drafts)

    def drafter(self, lengths: Sequence[int], options: EngineOptions, *, trust_remote_code: bool = False) -> Drafter:
        """The drafter, with room for requests of ``lengths`` tokens, prompt and output together.

        A draft model runs with ``options``, but for its prefix cache, which it lives on. trust_remote_code: as ``load``
        has it.
        Raises ConfigError for a number of drafts that cannot be, and as ``load`` and ``plan_for`` do.
        """
        from hybridkv.runner import plan_for  # noqa: PLC0415  # torch takes seconds: who drafts pays

        return self._drafter(lambda loaded: plan_for(loaded, lengths), options, trust_remote_code=trust_remote_code)

    def drafter_of_a_server(self, options: EngineOptions, *, trust_remote_code: bool = False) -> Drafter:
        """As ``drafter``, where nobody knows who will come: a draft model has plan_within's own memory."""
        from hybridkv.runner import plan_within  # noqa: PLC0415  # see drafter

        def plan(loaded: LoadedModel) -> Plan:
            return plan_within(loaded, max_batched_tokens=options.token_budget, max_in_flight=options.in_flight)

        return self._drafter(plan, options, trust_remote_code=trust_remote_code)

    def _drafter(
        self, plan: Callable[[LoadedModel], Plan], options: EngineOptions, *, trust_remote_code: bool
    ) -> Drafter:
        from hybridkv.runner import Engine, load  # noqa: PLC0415  # see drafter
        from hybridkv.runner.drafters import AdaptiveDrafter, DraftModel, NgramDrafter  # noqa: PLC0415  # same

        if self.source is None:
            return AdaptiveDrafter(NgramDrafter(self.drafts))
        loaded = load(self.source, trust_remote_code=trust_remote_code)
        own = replace(options, prefix_caching=True)
        return DraftModel(Engine(loaded, plan(loaded), own), self.drafts)
