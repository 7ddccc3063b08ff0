"""An engine for a tiny encoder-decoder. Every logit and token is compared with plain transformers."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from runner_support import TOLERANCE, EngineFactory, EveryLogit, greedy, loaded_model, relative_difference

from hybridkv.runner import TINY_ENCODER_DECODERS, Completion, Engine, LoadedModel
from hybridkv.runner.check import forced_logits, generate_greedy
from hybridkv.runner.drafters import Drafter
from hybridkv.runner.inputs import EncoderFeed, Given, encoder_feed
from hybridkv.runner.probe import attention_implementation

OUTPUT = 24
LAYOUTS = ("natural", "reference")
NAMES = pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)


def sound(name: str, number: int) -> Given:
    """An encoder's input: 5 .. 60 token ids, or features."""
    rng = np.random.default_rng(number)
    if name == "t5":
        return [int(one) for one in rng.integers(32, 127, int(rng.integers(5, 61)))]
    return rng.standard_normal((8, 48)).astype(np.float32)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Decoder prompts: the first two and the last are the start token alone; the others share a beginning."""
    rng = np.random.default_rng(seed)
    head = [0, *rng.integers(32, 127, 20).tolist()]
    tails = [rng.integers(32, 127, int(rng.integers(1, 30))).tolist() for _ in range(count - 3)]
    return [[0], [0], *(head + tail for tail in tails), [0]]


# the last request hears what the first does, the second something else; 2 and 3 are alike but for their prompts
HEARD = (0, 1, 2, 2, 3, 4, 0)


class Listening:
    """An engine over tiny:``name`` whose every logit is compared with plain transformers.

    seed: of weights, prompts and inputs. output: tokens of each request. largest: difference of any logit so far, a
    share of the range. tokens: compared so far.
    """

    def __init__(
        self,
        make: EngineFactory,
        name: str,
        *,
        seed: int = 0,
        output: int = OUTPUT,
        **options: int | bool | str | Drafter | None,
    ) -> None:
        self.loaded, self.seen = loaded_model(name, seed), EveryLogit()
        self.prompts, self.sounds = prompts_of(len(HEARD), seed), [sound(name, one + 100 * seed) for one in HEARD]
        self.sampling = greedy(output)
        self.engine: Engine = make(self.loaded, self.prompts, output, observer=self.seen, **options)  # type: ignore[arg-type]  # by name
        self.largest, self.tokens = 0.0, 0

    @property
    def encoded(self) -> int:
        assert self.engine.runner.cross is not None
        return self.engine.runner.cross.encoded

    def run(self) -> list[Completion]:
        done = self.engine.generate(self.prompts, self.sampling, encoders=self.sounds)
        self.check(done, self.sounds)
        return done

    def check(self, done: Sequence[Completion], sounds: Sequence[Given]) -> None:
        """Logits and tokens of ``done`` are right, and nothing is held for nothing."""
        for one, given in zip(done, sounds, strict=True):
            moved = self.moved(one, given)
            assert moved.max() <= TOLERANCE, (one.request_id, moved)
            self.largest, self.tokens = max(self.largest, float(moved.max())), self.tokens + len(one.token_ids)
            assert list(one.token_ids) == generated(self.loaded, one, given)
        self.engine.scheduler.check()
        assert self.engine.cache.usage == 0
        assert self.engine.runner.cross is not None
        assert not len(self.engine.runner.cross.inputs)

    def moved(self, done: Completion, given: Given) -> torch.Tensor:
        return relative_difference(self.seen.of(done), reference(self.loaded, done, given))


def feed(loaded: LoadedModel, given: Given) -> EncoderFeed:
    return encoder_feed(loaded, given, 1 << 20)


_REFERENCE: dict[tuple[int, bytes | str, tuple[int, ...]], torch.Tensor] = {}
_GENERATED: dict[tuple[int, bytes | str, tuple[int, ...]], list[int]] = {}
"""By model (which ``loaded_model`` keeps), input and text: many runs make the same."""


def reference(loaded: LoadedModel, done: Completion, given: Given) -> torch.Tensor:
    heard = feed(loaded, given)
    key = (id(loaded.model), heard.read.digest, (len(done.prompt_token_ids), *done.prompt_token_ids, *done.token_ids))
    if key not in _REFERENCE:
        with attention_implementation(loaded.model, "eager"), torch.inference_mode():
            _REFERENCE[key] = forced_logits(loaded.model, done.prompt_token_ids, done.token_ids, encoder=heard.values)
    return _REFERENCE[key]


def generated(loaded: LoadedModel, done: Completion, given: Given) -> list[int]:
    """What transformers' own loop says behind the prompt."""
    heard, count = feed(loaded, given), len(done.token_ids)
    key = (id(loaded.model), heard.read.digest, done.prompt_token_ids)
    if len(_GENERATED.get(key, [])) < count:
        with attention_implementation(loaded.model, "eager"), torch.inference_mode():
            _GENERATED[key] = generate_greedy(loaded.model, done.prompt_token_ids, count, encoder=heard.values)
    return _GENERATED[key][:count]
