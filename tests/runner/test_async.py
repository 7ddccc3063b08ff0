"""AsyncEngine with many tasks: slow readers, cancelled tasks and failed forwards."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from runner_support import failing, generated, greedy, loaded_model, run, shared_prompts

from hybridkv.errors import CacheError, ConfigError, OwnershipError
from hybridkv.request import SamplingParams
from hybridkv.runner import AsyncEngine, Engine, EngineOptions, Increment, LoadedModel, Stream, encode
from hybridkv.runner.async_engine import Reading
from hybridkv.schedule import FinishReason

LLAMA = loaded_model("llama")
PROMPTS = shared_prompts(6, 11)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)


@asynccontextmanager
async def engines(*, max_unread: int = 16, **options: int) -> AsyncIterator[tuple[AsyncEngine, Engine]]:
    engine = Engine(LLAMA, memory="2MiB", max_model_len=256, options=EngineOptions(**options))  # type: ignore[arg-type]  # ints by name
    async with AsyncEngine(engine, max_unread=max_unread) as front:
        yield front, engine


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # another thread makes it true: no event tells
        await asyncio.sleep(0.001)


async def read(front: AsyncEngine, prompt: list[int], sampling: SamplingParams) -> list[Increment]:
    return [part async for part in front.stream(prompt, sampling)]


def tokens(parts: list[Increment]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.token_ids)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_async_tasks_share_steps_and_get_tokens_of_plain_model(in_flight: int) -> None:
    lengths = [20, 1, 7, 20, 13, 20]

    async def work() -> tuple[list[list[Increment]], int, str]:
        async with engines(in_flight=in_flight) as (front, _):
            sampling = [greedy(one) for one in lengths]
            parts = await asyncio.gather(*(read(front, *one) for one in zip(PROMPTS, sampling, strict=True)))
            return parts, front.statistics().steps, LLAMA.model.config._attn_implementation

    parts, steps, attention = run(work)
    assert [tokens(one) for one in parts] == [generated(LLAMA, *one) for one in zip(PROMPTS, lengths, strict=True)]
    assert all(
        "".join(part.text or "" for part in one) == one[-1].completion.text for one in parts if one[-1].completion
    )
    assert [one[-1].finish_reason for one in parts] == [FinishReason.LENGTH] * 6
    assert [sum(part.completion is not None for part in one) for one in parts] == [1] * 6
    assert steps < sum(lengths) / 2  # side by side
    assert attention == "hybridkv_gather"
    assert LLAMA.model.config._attn_implementation == "eager"


def test_async_generate_keeps_the_order_of_prompts_and_outputs() -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, n=3)
    with Engine(LLAMA, memory="2MiB", max_model_len=256) as plain:
        first, second, _ = plain.generate(PROMPTS[1:2], drawn)
        early = next(one for one in second.token_ids[:5] if one not in first.token_ids)
        drawn = replace(drawn, stop_token_ids=(early,))  # the second output ends before the first
        expected = plain.generate(PROMPTS[:3], [greedy(9), drawn, greedy(3)])

    async def work() -> list[tuple[int, ...]]:
        async with engines() as (front, _):
            return [one.token_ids for one in await front.generate(PROMPTS[:3], [greedy(9), drawn, greedy(3)])]

    assert run(work) == [one.token_ids for one in expected]


def test_async_batch_with_invalid_prompt_aborts_its_other_prompts() -> None:
    async def work() -> None:
        async with engines() as (front, engine):
            with pytest.raises(ConfigError, match="outside the vocabulary"):
                await front.generate([*PROMPTS[:2], [999]], greedy(150))
            assert front.statistics().steps < 100
            await until(lambda: engine.idle)
            assert front.statistics().running == 0
            assert engine.cache.usage == 0
            with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
                await front.generate(PROMPTS[:2], [greedy(1)])

    run(work)


def test_between_steps_returns_the_result_and_raises_when_closed() -> None:
    async def work() -> None:
        async with engines() as (front, engine):
            parts = front.stream(PROMPTS[0], greedy(200))
            await anext(parts)
            assert await front.between_steps(lambda one: (one is engine, one.scheduler.num_running)) == (True, 1)
            with pytest.raises(ZeroDivisionError):
                await front.between_steps(lambda _: 1 // 0)
            await parts.aclose()
            ends = [front.ended]
        assert [*ends, front.ended] == [False, True]
        with pytest.raises(CacheError, match="closed"):
            await front.between_steps(id)

    run(work)


def test_prompt_logprobs_come_with_the_first_part_of_a_stream() -> None:
    asked = replace(greedy(5), prompt_logprobs=2, n=2)
    with Engine(LLAMA, memory="2MiB", max_model_len=256) as plain:
        expected = plain.generate([PROMPTS[0]], asked)

    async def work() -> list[Increment]:
        async with engines() as (front, _):
            return await read(front, PROMPTS[0], asked)

    parts = run(work)
    for output, whole in enumerate(expected):
        first, *others = [one for one in parts if one.output == output]
        assert first.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        assert [one.token_id for one in first.prompt_logprobs] == [one.token_id for one in whole.prompt_logprobs]
        assert {one.prompt_logprobs for one in others} == {None}


# -- slow readers


def test_engine_with_one_paused_reader_stops_at_max_unread() -> None:
    expected = generated(LLAMA, PROMPTS[0], 60)

    async def work() -> None:
        async with engines(max_unread=4) as (front, engine):
            parts = front.stream(PROMPTS[0], greedy(60))
            first = [await anext(parts)]
            await until(lambda: engine.statistics().steps >= 5)
            await asyncio.sleep(0.05)
            assert engine.statistics().steps == 5  # one part read, four unread
            first += [await anext(parts), await anext(parts)]
            await until(lambda: engine.statistics().steps >= 7)
            await asyncio.sleep(0.05)
            assert engine.statistics().steps == 7
            rest = [part async for part in parts]
            assert tokens(first + rest) == expected

    run(work)


def test_async_slow_reader_delays_no_other_and_gets_larger_parts() -> None:
    expected = generated(LLAMA, PROMPTS[0], 60)
    expected_too = generated(LLAMA, PROMPTS[1], 60)

    async def work() -> None:
        async with engines(max_unread=2) as (front, _):
            slow = front.stream(PROMPTS[0], greedy(60))
            parts = [await anext(slow)]
            quick = await read(front, PROMPTS[1], greedy(60))
            assert tokens(quick) == expected_too
            parts += [part async for part in slow]
            assert tokens(parts) == expected
            assert len(parts) < 30
            assert max(len(part.token_ids) for part in parts) > 20

    run(work)


# -- several requests read together


def queued(prompt: list[int], most: int, engine: Engine) -> Stream:
    return engine.stream(prompt, greedy(most))


async def all_of(reading: Reading) -> None:
    while await reading.next():
        pass


def test_joint_reader_gets_all_unread_parts_at_once() -> None:
    lengths = [20, 1, 7]
    expected = [generated(LLAMA, *one) for one in zip(PROMPTS, lengths, strict=False)]

    async def work() -> None:
        async with engines(max_unread=4) as (front, engine):
            asked = [partial(queued, *one) for one in zip(PROMPTS, lengths, strict=False)]
            found: list[list[Increment]] = [[], [], []]
            turns = 0
            with front.read(asked) as reading:
                while new := await reading.next():
                    turns += 1
                    for number, part in new:
                        found[number].append(part)
                    if turns == 2:  # all are read in one go, however many steps they took
                        await until(lambda: engine.statistics().steps >= 6)
                        await asyncio.sleep(0.02)
                    assert reading.ended == (sum(one[-1].completion is not None for one in found if one) == 3)
                assert reading.ended
                assert await reading.next() == []
            assert [tokens(one) for one in found] == expected
            assert turns < 20
            assert engine.idle

    run(work)


def test_async_joint_reader_gets_the_error_last() -> None:
    async def work() -> None:
        async with engines() as (front, engine):
            with (
                pytest.raises(ConfigError, match="outside the vocabulary"),
                front.read([partial(queued, PROMPTS[0], 99), partial(queued, [999], 1)]) as reading,
            ):
                await all_of(reading)
            await until(lambda: engine.idle)
            assert engine.statistics().steps < 50
            with (
                failing(LLAMA.model.model.layers[1], (4).__eq__),
                front.read([partial(queued, PROMPTS[0], 9)]) as reading,
            ):
                await until(lambda: engine.statistics().failed_steps == 1)
                await asyncio.sleep(0.02)
                assert len(await reading.next()) == 3
                with pytest.raises(RuntimeError, match="the device is gone"):
                    await reading.next()

    run(work)


def test_async_late_reader_gets_the_error_of_one_output() -> None:
    async def work() -> None:
        opened: list[Stream] = []

        def two(engine: Engine) -> Stream:
            asked = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=0, n=2)
            opened.append(engine.stream(PROMPTS[0], asked))
            return opened[0]

        async with engines() as (front, engine):
            with front.read([two]) as reading:
                await reading.next()
                opened[0]._outputs[0].error = ValueError("no such text")
                await until(lambda: engine.idle)
                with pytest.raises(ValueError, match="no such text"):
                    await all_of(reading)
            assert engine.cache.usage == 0

    run(work)


def test_joint_reader_of_a_closed_stream_ends_at_once() -> None:
    async def work() -> None:
        def closed(engine: Engine) -> Stream:
            stream = queued(PROMPTS[0], 9, engine)
            stream.close()
            return stream

        async with engines() as (front, _):
            with front.read([closed]) as reading:
                assert await reading.next() == []
                assert reading.ended

    run(work)


def test_joint_reader_that_leaves_ends_waiters_and_requests() -> None:
    async def work() -> None:
        async with engines() as (front, engine):
            with front.read([partial(queued, PROMPTS[0], 180)]) as reading:
                await reading.next()
                waiting = asyncio.create_task(reading.next())
                await asyncio.sleep(0)
                reading.leave()
                await waiting
                assert await reading.next() == []
                await until(lambda: engine.idle)
            assert engine.statistics().steps < 100
            assert engine.cache.usage == 0
        with pytest.raises(CacheError, match="was closed"), front.read([partial(queued, PROMPTS[0], 1)]):
            pass

    run(work)


def test_prompt_encoding_reads_the_vocabulary_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([LLAMA.vocab_size])
    monkeypatch.setattr(LoadedModel, "vocab_size", property(lambda _: next(sizes)))
    assert encode(LLAMA, [1, 2, 3] * 100) == [1, 2, 3] * 100


# -- readers that leave


@pytest.mark.parametrize("in_flight", [1, 2])
def test_async_cancelled_reader_aborts_its_request_only(in_flight: int) -> None:
    expected = generated(LLAMA, PROMPTS[1], 60)

    async def work() -> None:
        async with engines(in_flight=in_flight) as (front, engine):
            doomed = asyncio.create_task(read(front, PROMPTS[0], greedy(180)))
            other = asyncio.create_task(read(front, PROMPTS[1], greedy(60)))
            await until(lambda: engine.statistics().steps > 5)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert tokens(await other) == expected
            await until(lambda: engine.idle)
            assert engine.statistics().steps < 100
            assert engine.cache.usage == 0
            engine.scheduler.check()

    run(work)


def test_stream_that_is_closed_early_aborts_its_request() -> None:
    async def work() -> None:
        async with engines() as (front, engine):
            async with aclosing(front.stream(PROMPTS[0], greedy(180))) as parts:
                async for _ in parts:
                    break
            await until(lambda: engine.idle)
            assert engine.statistics().steps < 100
            never = front.stream(PROMPTS[1], greedy(180))
            await never.aclose()
            assert engine.idle

    run(work)


def test_abort_from_another_thread_ends_the_stream() -> None:
    async def work() -> None:
        async with engines() as (front, _):
            parts = front.stream(PROMPTS[0], greedy(180), request_id="mine")
            seen = [await anext(parts)]
            found: list[bool] = []
            thread = threading.Thread(target=lambda: found.append(front.abort("mine")))
            thread.start()
            thread.join()
            assert found == [True]
            seen += [part async for part in parts]
            assert seen[-1].finish_reason is FinishReason.ABORT
            assert 0 < len(tokens(seen)) < 180
            assert front.abort("mine") is False

    run(work)


# -- failures


def test_failed_forward_ends_every_stream_and_later_requests_run() -> None:
    expected = generated(LLAMA, PROMPTS[0], 20)

    async def work() -> None:
        async with engines() as (front, engine):
            with failing(LLAMA.model.model.layers[1], (6).__eq__):
                found = await asyncio.gather(
                    *(read(front, one, greedy(40)) for one in PROMPTS[:3]), return_exceptions=True
                )
            assert [str(one) for one in found] == ["the device is gone"] * 3
            assert all(isinstance(one, RuntimeError) for one in found)
            (done,) = await front.generate(PROMPTS[:1], greedy(20))
            assert done.token_ids == expected
            assert engine.statistics().failed_steps == 1
            await until(lambda: engine.idle)
            engine.scheduler.check()

    run(work)


def test_forward_that_always_fails_runs_once_per_batch() -> None:
    async def work() -> None:
        async with engines() as (front, _):
            with failing(LLAMA.model.model.layers[0]) as calls:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match="the device is gone"):
                        await front.generate(PROMPTS[:2], greedy(9))
                await asyncio.sleep(0.05)
            assert calls == [1, 2]

    run(work)


def test_closed_engine_ends_every_stream_with_an_error() -> None:
    async def work() -> None:
        async with engines() as (front, _):
            task = asyncio.create_task(read(front, PROMPTS[0], greedy(180)))
            await until(lambda: front.statistics().steps > 2)
            await front.close()
            with pytest.raises(CacheError, match="was closed"):
                await task
            with pytest.raises(CacheError, match="was closed"):
                await read(front, PROMPTS[0], greedy(3))
            assert LLAMA.model.config._attn_implementation == "eager"

    run(work)
    names = [one.name for one in threading.enumerate()]
    assert not any(name.startswith("hybridkv") for name in names)


def test_engine_of_another_thread_is_rejected_by_async_engine() -> None:
    async def work() -> None:
        engine = Engine(LLAMA, memory="2MiB", max_model_len=256)
        engine.generate(PROMPTS[:1], greedy(1))
        async with AsyncEngine(engine) as front:
            with pytest.raises(OwnershipError):
                await read(front, PROMPTS[0], greedy(3))
            calls = 0

            def step() -> None:
                nonlocal calls
                calls += 1
                raise OwnershipError("still another thread's")

            engine.step = step  # type: ignore[assignment,method-assign]  # to count
            await asyncio.sleep(0.05)
            assert calls <= 1  # it waits for the next request
        with pytest.raises(ConfigError, match="max_unread"):
            AsyncEngine(engine, max_unread=0)

    run(work)


def test_async_stream_applies_stop_strings_and_cache_salt() -> None:
    text = LLAMA.tokenizer.decode(list(generated(LLAMA, PROMPTS[0], 20)))

    async def work() -> list[Increment]:
        async with engines() as (front, _):
            await front.generate(PROMPTS[:1], greedy(1))
            sampling = replace(greedy(20), stop=(text[8:11],))
            return [one async for one in front.stream(PROMPTS[0], sampling, cache_salt="tenant", marks=[8])]

    parts = run(work)
    assert "".join(one.text or "" for one in parts) == text[: text.index(text[8:11])]
    assert parts[-1].completion is not None
    assert parts[-1].completion.hit_tokens == 0


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_async_forward_with_base_exception_ends_every_stream(raised: BaseException) -> None:
    """The event loop goes on, every stream ends, and ``close`` raises what it was."""

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise raised

    calls: list[None] = []

    async def work() -> None:
        engine = Engine(LLAMA, memory="2MiB", max_model_len=256)
        front = AsyncEngine(engine)
        with LLAMA.model.register_forward_pre_hook(fail):
            tasks = [asyncio.create_task(read(front, prompt, greedy(8))) for prompt in PROMPTS[:2]]
            done, waiting = await asyncio.wait(tasks, timeout=20)
        assert not waiting
        said = f"the engine's thread ended with {type(raised).__name__}: close the engine"
        for task in done:
            assert str(task.exception()).startswith(said)
        with pytest.raises(CacheError, match=said):
            await read(front, PROMPTS[0], greedy(2))
        with pytest.raises(type(raised)):
            await front.close()
        with pytest.raises(CacheError):
            engine.step()

    run(work)


def test_async_request_that_another_engine_began_goes_on_beside_others(tmp_path: Path) -> None:
    """It is exported after some tokens, while others run in both engines, and ends with the text of one engine."""

    async def begin() -> tuple[int, ...]:
        async with engines() as (front, _):
            other = asyncio.create_task(read(front, PROMPTS[1], greedy(30)))
            async with aclosing(front.stream(PROMPTS[0], SAMPLED, request_id="a")) as stream:
                known = [await anext(stream), await anext(stream)]
                session = await front.export("a", tmp_path / "a", key=b"secret")
            drawn = session.token_ids[len(PROMPTS[0]) :]
            assert drawn[: len(tokens(known))] == tokens(known)
            assert tokens(await other) == generated(LLAMA, PROMPTS[1], 30)
            return drawn

    async def go_on() -> list[Increment]:
        async with engines() as (front, _):
            other = asyncio.create_task(read(front, PROMPTS[2], greedy(30)))
            parts = [part async for part in front.resume(tmp_path / "a", request_id="b", key=b"secret")]
            assert tokens(await other) == generated(LLAMA, PROMPTS[2], 30)
            assert front.statistics().hit_tokens >= len(PROMPTS[0])
            return parts

    async def whole() -> list[Increment]:
        async with engines() as (front, _):
            return await read(front, PROMPTS[0], SAMPLED)

    drawn, parts, expected = run(begin), run(go_on), run(whole)
    assert 0 < len(drawn) < SAMPLED.max_tokens
    assert tokens(parts[:1])[: len(drawn)] == drawn
    assert tokens(parts) == tokens(expected)
    assert "".join(part.text or "" for part in parts) == "".join(part.text or "" for part in expected)
    assert {part.request_id for part in parts} == {"b"}
    assert sum(part.completion is not None for part in parts) == 1


def test_async_conversation_goes_on_in_another_engine(tmp_path: Path) -> None:
    async def first() -> list[int]:
        async with engines() as (front, _):
            (done,) = await front.generate([PROMPTS[0]], greedy(10))
            session = await front.export(done, tmp_path / "a", note="mine")
            assert session.note == "mine"
            return [*PROMPTS[0], *done.token_ids]

    async def second(turn: list[int]) -> tuple[int, int, tuple[int, ...]]:
        async with engines() as (front, _):
            session = await front.import_(tmp_path / "a")
            (done,) = await front.generate([turn], greedy(10))
            return session.resume_tokens, done.hit_tokens, tuple(done.token_ids)

    conversation = run(first)
    turn = [*conversation, 70, 71]
    assert run(lambda: second(turn)) == (len(turn) - 3, len(turn) - 3, generated(LLAMA, turn, 10))


def test_async_sessions_that_cannot_be_read_raise_in_their_task_alone(tmp_path: Path) -> None:
    async def work() -> tuple[int, ...]:
        async with engines() as (front, engine):
            other = asyncio.create_task(read(front, PROMPTS[1], greedy(20)))
            with pytest.raises(FileNotFoundError):
                await anext(front.resume(tmp_path / "missing"))
            with pytest.raises(FileNotFoundError):
                await front.import_(tmp_path / "missing")
            with pytest.raises(ConfigError, match="no request 'a' runs: give its Completion"):
                await front.export("a", tmp_path / "a")
            with pytest.raises(ConfigError, match="no request 'a' runs or waits"):
                await front.between_steps(lambda _: engine.stream_of("a"))
            return tokens(await other)

    assert run(work) == generated(LLAMA, PROMPTS[1], 20)


def test_stream_of_a_queued_request_reads_it_in_place_of_step() -> None:
    with Engine(LLAMA, memory="2MiB", max_model_len=256, options=EngineOptions(self_check=False)) as engine:
        engine.add(PROMPTS[0], greedy(5), request_id="a")
        assert engine.step() == []
        with engine.stream_of("a") as stream:
            assert tokens(list(stream)) == generated(LLAMA, PROMPTS[0], 5)
        assert engine.idle
