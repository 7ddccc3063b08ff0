"""How the forward of a model is called: what it has for the cache and the positions, and which logits it can give."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.runner.attention.formulas import attention_modules

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """The forward of ``model``, looked at once: signatures of large models take longer to read than a Step to plan.

    cache_parameter: the cache's name; models of recurrent layers alone call it ``cache_params``.
    takes_positions: whether it is told where tokens stand. keeps_logits: whether it computes only those asked for.
    """

    model: PreTrainedModel
    cache_parameter: str
    takes_positions: bool
    keeps_logits: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelCall:
        """As ``model`` is now. One that hands on whatever it gets is given positions where there is attention."""
        known, hands_on = _parameters(model)
        return cls(
            model=model,
            cache_parameter="cache_params" if "cache_params" in known else "past_key_values",
            takes_positions="position_ids" in known or (hands_on and any(attention_modules(model))),
            keeps_logits="logits_to_keep" in known,
        )

    def arguments(self, cache: Cache, positions: torch.Tensor | None) -> dict[str, Any]:
        """``cache`` and int64[rows, tokens] ``positions``, if taken, by name. None: the model makes its own."""
        arguments: dict[str, Any] = {self.cache_parameter: cache}
        if positions is not None and self.takes_positions:
            arguments["position_ids"] = positions
        return arguments

    def logits_behind(
        self,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        cache: Cache,
        positions: torch.Tensor | None,
        more: Mapping[str, Any] = _NOTHING,
    ) -> torch.Tensor:
        """Logits [k, vocabulary] of a forward over int64[tokens] ``tokens`` behind those at int64[k] ``keep``.

        positions: int64[tokens], as in ``arguments``. more: arguments beside these, or in their place.
        """
        arguments = self.arguments(cache, None if positions is None else positions[None])
        if self.keeps_logits:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(input_ids=tokens[None], use_cache=True, **{**arguments, **more}).logits[0]
        return logits if self.keeps_logits else logits[keep]


def _parameters(model: PreTrainedModel) -> tuple[set[str], bool]:
    """What the forward of ``model`` takes by name, and whether it takes anything else, too.

    One that does, in a subclass or on the instance, hands it on to the forward that it replaced: to the next class's.
    """
    classes = [vars(one) for one in type(model).__mro__ if issubclass(one, PreTrainedModel)]
    known: set[str] = set()
    for forward in (model.forward, *(one["forward"] for one in classes if "forward" in one)):
        parameters = inspect.signature(forward).parameters
        known |= set(parameters)
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return known, False
    return known, True
