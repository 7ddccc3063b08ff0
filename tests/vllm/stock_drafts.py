"""Whether stock vLLM answers the same with drafts as without where states are kept, nothing cached: stock_drafts.py.

As long as it does not, drafts beside recurrent states are refused in the natural layout: there is nothing to compare
with. Prints a table in Markdown; exit code 0 where some model answers otherwise.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from generate_duel import Match, say
from generators import Plain, VllmError
from natural_duel import MODELS, REGIMES, Regime, answers
from rounds import make_rounds

from hybridkv.runner import tiny_model, wrap

SEED, STATES = 0, ("granite_hybrid", "mamba2")


def main() -> int:
    torch.set_num_threads(1)
    drafts = next(regime for regime in REGIMES if regime.drafts)
    otherwise = 0
    say("| model | outputs | of transformers: without drafts | with drafts |")
    say("|---|--:|--:|--:|")
    for match in (match for match in MODELS if match.name in STATES):
        alone = Match(match.name, match.fields, {**match.options, "enable_prefix_caching": False})
        model = tiny_model(match.name, SEED, match.fields)
        plain = Plain(wrap(model, name=match.name))
        rounds = make_rounds(SEED, plain.generate)[:2]
        wanted = [list(plain.generate(prompt)) for one in rounds for prompt in one.prompts]
        equal = []
        with TemporaryDirectory() as name:
            folder = Path(name) / "model"
            model.save_pretrained(folder)
            for regime in (Regime("no drafts"), drafts):
                try:
                    found = answers(folder, rounds, alone, regime, ours=False)
                except VllmError as error:
                    equal.append(str(error))
                    continue
                outputs = [answer["tokens"] for one in found["rounds"] for answer in one]
                equal.append(sum(mine == theirs for mine, theirs in zip(wanted, outputs, strict=True)))
        say(f"| tiny:{match.name} | {len(wanted)} | {equal[0]} | {equal[1]} |")
        otherwise += equal[0] != equal[1]
    return int(not otherwise)


if __name__ == "__main__":
    sys.exit(main())
