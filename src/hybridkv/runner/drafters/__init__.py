"""Who proposes tokens: a request's own text (ngram), or a smaller model (draft_model); and how many are worth it."""

from hybridkv.runner.drafters.adaptive import AdaptiveDrafter
from hybridkv.runner.drafters.draft_model import DraftModel
from hybridkv.runner.drafters.drafter import MOST_TOKENS, Drafter
from hybridkv.runner.drafters.ngram import NgramDrafter

__all__ = ["MOST_TOKENS", "AdaptiveDrafter", "DraftModel", "Drafter", "NgramDrafter"]
