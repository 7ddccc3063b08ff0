"""``vllm serve`` twice, as docs/vllm.md types it: one prefills, the other decodes: ``make test-vllm-engine``.

OpenAI's SDK asks. Tokens must be those of one server of stock. Prints a table in Markdown.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from generate_duel import say
from generation import make_rounds
from generators import OUTPUT
from served import LINES, SEED, USAGE, ask, metrics, model_with_words, server, tokens_of

EXTERNAL = "vllm:external_prefix_cache_hits_total"


def options(role: str, folder: Path) -> Sequence[str]:
    """Behind those of the line."""
    transfer = {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": "folder_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    return ("--kv-transfer-config", json.dumps(transfer))


def handed_over(first: str, second: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a router does: the prompt but its last token to ``first``, all of it to ``second``, both by one name."""
    outputs = []
    for number, prompt in enumerate(prompts):
        tokens_of(first, prompt[:-1], 1, kv_transfer_params={"handover": str(number), "send": True})
        outputs.append(tokens_of(second, prompt, OUTPUT, kv_transfer_params={"handover": str(number)}))
    return outputs


def main() -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))
    wrong = 0
    say("| vllm serve, twice | prompts | loaded, of the second's metrics | |")
    say("|---|--:|--:|---|")
    with TemporaryDirectory() as name:
        folder = Path(name)
        model, other = folder / "first" / "model", folder / "second" / "model"
        plain = model_with_words(model)
        copytree(model, other)
        prompts = [prompt for one in make_rounds(SEED, plain.generate) for prompt in one.prompts]
        with server(model, ()) as address:
            wanted = ask(address, prompts).outputs
        for line in LINES:
            first, second = ((*line.options, *options(role, folder)) for role in ("kv_producer", "kv_consumer"))
            with server(model, first) as one, server(other, second) as two:
                found = handed_over(one, two, prompts)
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
