"""Images by content: pixels while somebody needs them, features made once, on first need, within a bound of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from hybridkv.errors import ConfigError, HybridKVError, WorkerError
from hybridkv.runner.images.image_call import Features, ImageCall
from hybridkv.runner.images.prompt_images import Picture

_MOST_KINDS: Final = 1024


class ImageStore:
    """Pictures and their features by digest, each as long as somebody holds the digest.

    max_bytes: of features. Beyond it those that were read longest ago go, and are made anew when they are read again;
    the ones read last stay, whatever they take. encoded: how often features were made.
    """

    def __init__(self, call: ImageCall, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.encoded = 0
        self._call = call
        self._pictures: dict[str, Picture] = {}
        self._holders = Counter[str]()
        self._features: dict[str, Features] = {}  # in the order of their last reads
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        """Distinct images."""
        return len(self._pictures)

    @property
    def nbytes(self) -> int:
        """Of features kept. O(images)."""
        return sum(one.nbytes for one in self._features.values())

    def tokens_of(self, picture: Picture) -> int:
        """Placeholders that ``picture`` fills: as many as others of its shapes and sizes.

        The features of the first such are made here. ConfigError, with what the model says, where it does not take it.
        """
        known = self._tokens.get(picture.kind)
        if known is None:
            try:
                made = self._made(picture)
            except HybridKVError:
                raise
            except Exception as error:  # a vision part that was handed what it does not expect raises anything
                raise ConfigError(f"the model does not take this image ({picture.kind}): {error}") from error
            known = self._tokens[picture.kind] = len(made)
            if len(self._tokens) > _MOST_KINDS:
                del self._tokens[next(iter(self._tokens))]
        return known

    def hold(self, pictures: Iterable[Picture]) -> None:
        """One more needs each of ``pictures``."""
        for one in pictures:
            self._pictures.setdefault(one.digest, one)
            self._holders[one.digest] += 1

    def release(self, pictures: Iterable[Picture]) -> None:
        """One less; the last takes pixels and features along."""
        for one in pictures:
            self._holders[one.digest] -= 1
            if self._holders[one.digest] <= 0:
                del self._holders[one.digest]
                self._pictures.pop(one.digest, None)
                self._features.pop(one.digest, None)

    def drop_unheld(self) -> None:
        """Features made for prompts that were refused. O(images)."""
        for digest in [one for one in self._features if one not in self._pictures]:
            del self._features[digest]

    def features(self, picture: Picture) -> Features:
        """Of a picture that is held. O(1) where they are kept, else its model's vision part runs."""
        kept = self._features.pop(picture.digest, None)
        if kept is not None:
            self._features[picture.digest] = kept
            return kept
        made = self._made(picture)
        if len(made) != self._tokens[picture.kind]:
            raise WorkerError(
                f"an image of {len(made)} tokens has the sizes of one of {self._tokens[picture.kind]} ({picture.kind})"
            )
        return made

    def _made(self, picture: Picture) -> Features:
        made = self._features[picture.digest] = self._call.features(picture.values)
        self.encoded += 1
        self._trim()
        return made

    def _trim(self) -> None:
        """Within the bound, but for the newest."""
        excess = self.nbytes - self.max_bytes
        while excess > 0 and len(self._features) > 1:
            oldest = next(iter(self._features))
            excess -= self._features.pop(oldest).nbytes
