"""Two servers of a tiny hybrid and vllm-router in front of them: which one gets which turn of four chats."""

from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from workers import Worker, words

from routers import VllmRouter

MODEL, CHATS, TURNS = "tiny:qwen3_next", 4, 3


def main() -> None:
    """Print a table: chats whose first turns the servers know are continued through the router."""
    random = Random(7)  # noqa: S311 - of made-up words
    with TemporaryDirectory() as folder, ExitStack() as stack:
        workers = [Worker(MODEL, Path(folder)) for _ in range(2)]
        for number, worker in enumerate(workers):
            stack.enter_context(worker.server)
            print(f"worker {number}: {MODEL} at {worker.url}, process {worker.server.process.pid}")
        router = VllmRouter(workers, [worker.events for worker in workers], Path(folder), stack)
        print(
            "| chat | turn | worker | prompt tokens | the router expected cached | cached |\n|--:|--:|--:|--:|--:|--:|"
        )
        chats = [list[dict[str, str]]() for _ in range(CHATS)]
        for turn in range(TURNS):
            for number, said in enumerate(chats):
                said.append({"role": "user", "content": words(random, 8)})
                body = {"messages": said, "max_tokens": 1}
                if not turn:  # ask past the router, so that the workers know different chats
                    workers[number % 2].post(body)
                else:
                    told = router.ask(body)
                    shown = (number, turn, told.worker, told.prompt, told.credited, told.found)
                    print("|", " | ".join(map(str, shown)), "|")
                said.append({"role": "assistant", "content": words(random, 2)})


if __name__ == "__main__":
    main()
