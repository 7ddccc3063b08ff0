"""``vllm serve`` twice with NIXL, as docs/vllm.md types it: one prefills, the other decodes: ``make test-vllm-engine``.

OpenAI's SDK asks. Tokens must be those of one server of stock. Prints a table in Markdown.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from generate_duel import say
from generation import make_rounds
from generators import OUTPUT
from served import LINES, SEED, USAGE, answer_of, ask, free_port, metrics, model_with_words, server, tokens_of

EXTERNAL = "vllm:external_prefix_cache_hits_total"
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"
FIRST = {"do_remote_decode": True, "do_remote_prefill": False}
"""Transfer parameters of a request to the prefill engine. Its answer has those of the request to the decode engine."""


RELEASED_WITHIN_S = 2.0
"""Both servers count the blocks of the last request as free by then."""


def require_nixl() -> None:
    """End with the command that installs NIXL, where it is missing."""
    if find_spec("nixl") is None:
        raise SystemExit(f"{sys.executable} lacks nixl: run make vllm-nixl, or pip install --no-deps nixl nixl-cu12")


def connector(role: str, *, natural: bool = False, varied: bool = False) -> dict[str, Any]:
    """A value of --kv-transfer-config. varied: with the faults of nixl_variants."""
    name = f"{'Variant' if varied else ''}{'Natural' if natural else ''}NixlConnector"
    module = "nixl_variants" if varied else "hybridkv.vllm.nixl" if natural else None
    path = {} if module is None else {"kv_connector_module_path": module}
    return {"kv_connector": name, **path, "kv_role": role, "kv_load_failure_policy": "recompute"}


def handed_over(first: str, second: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a router does: the prompt to ``first`` for a token, then to ``second`` with the parameters of the answer."""
    outputs = []
    for prompt in prompts:
        answer = answer_of(first, prompt, 1, kv_transfer_params=FIRST)
        params = answer.model_extra["kv_transfer_params"]  # type: ignore[index] # vLLM's field
        outputs.append(tokens_of(second, prompt, OUTPUT, kv_transfer_params=params))
    return outputs


def main(arguments: Sequence[str] | None = None) -> int:
    names = [line.name for line in LINES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", nargs="+", default=names, choices=names)
    sides = parser.parse_args(arguments).sides
    require_nixl()
    wrong = 0
    say("| vllm serve, twice | prompts | loaded, of the second's metrics | |")
    say("|---|--:|--:|---|")
    with TemporaryDirectory() as name:
        model = Path(name) / "model"
        plain = model_with_words(model)
        prompts = [prompt for one in make_rounds(SEED, plain.generate) for prompt in one.prompts]
        with server(model, ()) as address:
            wanted = ask(address, prompts).outputs
        for line in (line for line in LINES if line.name in sides):
            natural = line.name == "natural"
            first, second = (
                (*line.options, "--kv-transfer-config", json.dumps(connector(role, natural=natural)))
                for role in ("kv_producer", "kv_consumer")
            )
            ports = ({SIDE_CHANNEL: str(free_port())} for _ in range(2))
            with server(model, first, next(ports)) as one, server(model, second, next(ports)) as two:
                found = handed_over(one, two, prompts)
                time.sleep(RELEASED_WITHIN_S)
                told = [metrics(address) for address in (one, two)]
            pairs = enumerate(zip(wanted, found, strict=True))
            bad = [f"prompt {number}: {a}, {line.name} {b}" for number, (a, b) in pairs if a != b]
            bad += [f"{one[USAGE]} of the blocks are in use at the end" for one in told if one[USAGE]]
            bad += [] if told[1][EXTERNAL] else ["nothing was loaded"]
            said = f"**{len(bad)} faults**" if bad else "equal"
            say(f"| {line.name} | {len(prompts)} | {told[1][EXTERNAL]:,.0f} | {said} |")
            for fault in bad[:8]:
                say(fault)
            wrong += len(bad)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
