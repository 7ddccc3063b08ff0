"""docs/models.md: a model of trained weights in six regimes, token by token against plain transformers.

    python tests/runner/real_regimes.py MODEL [docs/models.md]

`make test-real` fetches the model first (examples/real_model.py). Takes minutes; one thread.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from models_table import put

from hybridkv.request import SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, LoadedModel, load, plan_for
from hybridkv.runner.chat import Message, chat_ids
from hybridkv.runner.check import LogitRecorder, check_completions, generate_greedy
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.runner.probe import attention_implementation

MARK = "<!-- of a real model, written by make test-real -->"
OUTPUT = 32
SYSTEM = "You are a teacher who answers in two short sentences, in plain words."
TOPICS = ("The moon", "Bread", "Prime numbers", "The sea", "Batteries", "Rome", "Volcanoes", "Music")
ASKS = (
    "{}: what should a child of six know, who has never heard of it, likes stories and asks a lot of questions?",
    "{}: tell me one thing that few people know, that is true, and that I could tell my friends at dinner tonight.",
    "{}: why does it matter to people who live in a small town far from any city, and would they miss it?",
    "{}: write one sentence, then the same sentence again, then the same sentence once more, and nothing else at all.",
)
"""The topic first: what follows is longer than a block, so that few beginnings of other chats end in the same one."""
EARLIER = ({"role": "user", "content": "Good morning! Are you there?"}, {"role": "assistant", "content": "Yes, I am."})
BLOCK = 16
SQUEEZED = 2
"""Chats whose longest fits that often into the memory where others are preempted."""
REGIMES = ("cold", "warm", "chunked", "preempted", "drafts", "hits inside blocks")


class RegimeError(Exception):
    """A regime was not what it says, or a token is not the reference's."""


@dataclass(frozen=True, slots=True)
class Regime:
    """What a regime showed. seconds: the processor's, of the engine's run compared. shown: what makes it so."""

    name: str
    chats: int
    tokens: int
    near_ties: int
    seconds: float
    shown: str


def chats(loaded: LoadedModel) -> list[list[int]]:
    """32 conversations as token ids, half of them behind an exchange."""
    asked = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    found = []
    for number, content in enumerate(asked):
        said: list[Message] = [{"role": "system", "content": SYSTEM}, *(EARLIER if number % 2 else ())]
        found.append(chat_ids(loaded, [*said, {"role": "user", "content": content}]))
    return found


class Regimes:
    """Runs ``prompts``, greedy, ``output`` tokens each at most, in every regime, and compares.

    expected: what plain transformers says to each; None to ask it. Raises RegimeError as soon as something is wrong.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[list[int]],
        output: int,
        expected: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.loaded, self.prompts, self.sampling = loaded, prompts, SamplingParams(max_tokens=output)
        begun = time.process_time()
        self.expected = [self._plain(prompt) for prompt in prompts] if expected is None else list(expected)
        self.plain_seconds = time.process_time() - begun

    def __iter__(self) -> Iterator[Regime]:
        """Every regime in turn."""
        return map(self.run, REGIMES)

    def run(self, name: str) -> Regime:
        """One of REGIMES."""
        runs = (self._cold, self._warm, self._chunked, self._preempted, self._drafts, self._inside_blocks)
        return dict(zip(REGIMES, runs, strict=True))[name]()

    def _cold(self) -> Regime:
        engine, seen = self._engine(prefix_caching=False)
        with engine:
            done, seconds = self._timed(engine)
        _require(not any(one.hit_tokens for one in done), "cold: something was hit")
        return self._compared("cold", done, seen, seconds, "nothing is shared")

    def _warm(self) -> Regime:
        engine, seen = self._engine()
        with engine:
            engine.generate(self.prompts, self.sampling)
            done, seconds = self._timed(engine)
        whole = [one.hit_tokens == len(one.prompt_token_ids) - 1 for one in done]
        _require(all(whole), f"warm: {whole.count(False)} prompts were not hit up to their last token")
        hits = sum(one.hit_tokens for one in done)
        return self._compared("warm", done, seen, seconds, f"{hits:,} prompt tokens were hit, all but one of each")

    def _chunked(self) -> Regime:
        engine, seen = self._engine(token_budget=13)
        with engine:
            done, seconds = self._timed(engine)
            steps = engine.statistics().steps
        ran = sum(one.computed_tokens for one in done)
        _require(steps * 13 >= ran, "chunked: steps were longer than 13 tokens")
        return self._compared("chunked", done, seen, seconds, f"{steps:,} steps of at most 13 tokens")

    def _preempted(self) -> Regime:
        engine, seen = self._engine(room_for=SQUEEZED)
        with engine:
            done, seconds = self._timed(engine)
        count = sum(one.preemptions for one in done)
        _require(count > 0, "preempted: nobody was")
        return self._compared("preempted", done, seen, seconds, f"memory for {SQUEEZED} chats, {count} preemptions")

    def _drafts(self) -> Regime:
        engine, seen = self._engine(drafter=NgramDrafter(4))
        with engine:
            done, seconds = self._timed(engine)
            stats = engine.statistics()
        _require(stats.accepted_tokens > 0, "drafts: none was accepted")
        shown = f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} drafts accepted"
        return self._compared("drafts", done, seen, seconds, shown)

    def _inside_blocks(self) -> Regime:
        """Each prompt behind nearly all of it, which ends inside a block: the block is copied, and written on."""
        wanted = [1 + at % (BLOCK - 1) for at in range(len(self.prompts))]
        cuts = [len(one) - 2 - (len(one) - 2 - left) % BLOCK for one, left in zip(self.prompts, wanted, strict=True)]
        engine, seen = self._engine()
        with engine:
            beginnings = [prompt[:cut] for prompt, cut in zip(self.prompts, cuts, strict=True)]
            engine.generate(beginnings, SamplingParams(max_tokens=1, ignore_eos=True))
            done, seconds = self._timed(engine)
        _require(all(one.hit_tokens >= cut for one, cut in zip(done, cuts, strict=True)), "a beginning was not hit")
        inside = sum(one.hit_tokens % BLOCK > 0 for one in done)
        _require(inside > len(done) // 2, "hits did not end inside blocks")
        return self._compared("hits inside blocks", done, seen, seconds, f"{inside} hits end inside a block")

    def _engine(
        self, *, room_for: int | None = None, drafter: NgramDrafter | None = None, **options: bool | int
    ) -> tuple[Engine, LogitRecorder]:
        """An engine with room for everybody, or for ``room_for`` of the longest."""
        lengths = [len(prompt) + self.sampling.max_tokens for prompt in self.prompts]
        if room_for is not None:
            lengths = [max(lengths)] * room_for
        seen, drafts = LogitRecorder(), 0 if drafter is None else drafter.num_speculative_tokens
        plan = plan_for(self.loaded, lengths, num_speculative_tokens=drafts, block_size=BLOCK)
        asked = EngineOptions(**options)  # type: ignore[arg-type]  # int or bool by name
        return Engine(self.loaded, plan, asked, observer=seen, speculate=drafter), seen

    def _timed(self, engine: Engine) -> tuple[list[Completion], float]:
        begun = time.process_time()
        return engine.generate(self.prompts, self.sampling), time.process_time() - begun

    def _plain(self, prompt: list[int]) -> tuple[int, ...]:
        """What transformers says to ``prompt``, up to its end."""
        with attention_implementation(self.loaded.model, "eager"), torch.inference_mode():
            found = generate_greedy(self.loaded.model, prompt, self.sampling.max_tokens)
        end = next((at for at, one in enumerate(found) if one in self.loaded.eos_token_ids), len(found))
        return tuple(found[: end + 1])

    def _compared(
        self, name: str, done: Sequence[Completion], seen: LogitRecorder, seconds: float, shown: str
    ) -> Regime:
        """Token by token; where one differs, logits say whether it is a near-tie."""
        _require(len(done) == len(self.expected), f"{name}: {len(done)} of {len(self.expected)} chats ended")
        other = [one for one, wanted in zip(done, self.expected, strict=True) if one.token_ids != wanted]
        report = check_completions(self.loaded, other, [self.sampling] * len(other), seen)
        _require(report.ok and (not other or report.near_ties > 0), f"{name}: {report}")
        return Regime(name, len(done), sum(len(one.token_ids) for one in done), report.near_ties, seconds, shown)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RegimeError(otherwise)


def table(found: Sequence[Regime], plain_seconds: float) -> Iterator[str]:
    """In Markdown, a regime a line."""
    yield "| regime | chats | tokens | near-ties | processor seconds | |"
    yield "|---|--:|--:|--:|--:|---|"
    counts = f"{found[0].chats} | {found[0].tokens:,}"
    yield f"| plain transformers, one after the other | {counts} | | {plain_seconds:.1f} | |"
    for one in found:
        yield f"| {one.name} | {one.chats} | {one.tokens:,} | {one.near_ties} | {one.seconds:.1f} | {one.shown} |"


def main(model: str, document: str | None = None) -> None:
    """Run them, print the table, and put it into ``document``."""
    torch.set_num_threads(1)
    loaded = load(model)
    regimes = Regimes(loaded, chats(loaded), OUTPUT)
    found: list[Regime] = []
    for one in regimes:
        sys.stderr.write(f"{one}\n")
        found.append(one)
    lines = list(table(found, regimes.plain_seconds))
    sys.stdout.write("\n".join([*lines, ""]))
    if document is not None:
        path = Path(document)
        path.write_text(put(path.read_text("utf-8"), MARK, iter(lines)), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
