"""Which rows of a Step read images, and what its forward is handed for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hybridkv.runner.images.image_call import Features, ImageCall, attends_both_ways
from hybridkv.runner.images.image_store import ImageStore
from hybridkv.runner.images.prompt_images import Images, PromptImages, prompt_images
from hybridkv.runner.load import LoadedModel
from hybridkv.step import Step

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ImageRead:
    """What a forward is handed beside its tokens. positions: int64[1 + axes, 1, tokens], those of text first, or None.

    features: of all placeholders among its tokens, in their order; None where it runs none of an image.
    last_seen: int64[tokens], the position of the last token that each sees, where that is not itself; else None.
    """

    positions: torch.Tensor | None
    features: Features | None
    last_seen: Int64 | None = None

    def arguments(self) -> dict[str, Any]:
        """By name, for the model."""
        said: dict[str, Any] = {}
        if self.positions is not None:
            said["position_ids"] = self.positions
        if self.features is not None:
            said["mm_encoder_outputs"] = self.features.outputs()
        return said


class StepImages:
    """The images of requests, by id, and of the Steps in flight, by row.

    A Step launched holds the images of its rows until it has landed: their requests may end before it runs.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        self.call = ImageCall.of(model)
        self.store = ImageStore(self.call, max_bytes)
        self._requests: dict[str, PromptImages] = {}
        self._rows: dict[int, PromptImages] = {}  # as of the Step launched last
        self._steps: dict[int, dict[int, PromptImages]] = {}

    # -- requests, and steps in flight

    def of_prompt(
        self, loaded: LoadedModel, prompt: str | Sequence[int], given: Images
    ) -> tuple[list[int], PromptImages]:
        """As ``prompt_images``. What was made for a prompt that was refused is not kept."""
        self.store.drop_unheld()
        try:
            return prompt_images(loaded, self.call, self.store.tokens_of, prompt, given)
        except BaseException:
            self.store.drop_unheld()
            raise

    def begin(self, request_id: str, images: PromptImages) -> None:
        """A request that reads ``images`` was queued."""
        self._requests[request_id] = images
        self.store.hold(images.pictures)

    def end(self, request_id: str) -> None:
        """It runs no longer. Unknown ids are a no-op."""
        images = self._requests.pop(request_id, None)
        if images is not None:
            self.store.release(images.pictures)

    def launched(self, step: Step) -> None:
        """``step`` was scheduled, behind those before it. O(rows)."""
        for row in step.finished_rows.tolist():
            self._rows.pop(row, None)
        for new in step.new_rows:
            self._rows.pop(new.row, None)
            if new.request_id in self._requests:
                self._rows[new.row] = self._requests[new.request_id]
        if self._rows:
            mine = {row: self._rows[row] for row in step.rows.tolist() if row in self._rows}
            self._steps[step.id] = mine
            for images in mine.values():
                self.store.hold(images.pictures)

    def landed(self, step: Step) -> None:
        """It ran, or never will."""
        for images in self._steps.pop(step.id, {}).values():
            self.store.release(images.pictures)

    # -- the forward

    def read(self, step: Step, tokens: Int64, positions: Int64) -> ImageRead | None:
        """What the forward over ``tokens`` at ``positions``, int64[n] each, is handed; None where no row has images."""
        rows = self._steps.get(step.id, {})
        if not any(row in rows for row in step.rows.tolist()):
            return None
        with torch.inference_mode():
            seen = self._last_seen(step, rows, positions) if attends_both_ways(self.call.model) else None
            return ImageRead(self._positions(step, rows, positions), self._features(step, rows, tokens), seen)

    @staticmethod
    def _last_seen(step: Step, rows: Mapping[int, PromptImages], positions: Int64) -> Int64:
        seen = positions.copy()
        for row, place, first, behind in _rows_of(step):
            if row in rows:
                seen[place : place + behind - first] = rows[row].last_seen(first, behind)
        return seen

    def _positions(self, step: Step, rows: Mapping[int, PromptImages], positions: Int64) -> torch.Tensor | None:
        axes = next((len(one.positions) for one in rows.values() if one.positions is not None), 0)
        if not axes:
            return None
        all_axes = np.tile(positions, (1 + axes, 1))
        for row, place, first, behind in _rows_of(step):
            if row in rows:
                all_axes[1:, place : place + behind - first] = rows[row].positions_of(first, behind)
        return torch.from_numpy(all_axes)[:, None].to(self.call.model.device)

    def _features(self, step: Step, rows: Mapping[int, PromptImages], tokens: Int64) -> Features | None:
        """Those of images stand where their placeholders do; the token's own elsewhere."""
        parts: list[tuple[Int64, Features, Int64]] = []  # (places in the step, of an image, which of its rows)
        for row, place, first, behind in _rows_of(step):
            if row not in rows:
                continue
            images = rows[row]
            mine = slice(*np.searchsorted(images.places, (first, behind)).tolist())
            for number in np.unique(images.image[mine]).tolist():
                of_image = np.flatnonzero(images.image[mine] == number) + mine.start
                features = self.store.features(images.pictures[number])
                parts.append((images.places[of_image] - first + place, features, images.row[of_image]))
        if not parts:
            return None
        placeholders = np.flatnonzero(tokens == self.call.token_id)
        merged = self.call.of_token(parts[0][1], len(placeholders))
        for places, features, wanted in parts:
            at, taken = (
                torch.from_numpy(one).to(merged.rows.device) for one in (np.searchsorted(placeholders, places), wanted)
            )
            for whole, part in zip((merged.rows, *merged.deep), (features.rows, *features.deep), strict=True):
                whole[at] = part[taken]
        return merged


def _rows_of(step: Step) -> list[tuple[int, int, int, int]]:
    """(row, its first token's place in the Step, its first position, the one behind its last)."""
    counts = step.num_scheduled.astype(np.int64)
    firsts = step.num_computed.astype(np.int64)
    places = np.cumsum(counts) - counts
    return list(zip(*(one.tolist() for one in (step.rows, places, firsts, firsts + counts)), strict=True))
