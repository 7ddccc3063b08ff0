"""A model folder with Python code. Each of its files leaves a trace next to the folder when it runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridkv.runner import byte_tokenizer, tiny_model

TRACE = "ran"
CONFIG_CODE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
TOKENIZER_CODE = {"AutoTokenizer": [None, "tokenization_x.XTokenizer"]}

_SOURCES = {
    "configuration_x": "from transformers import LlamaConfig\n\n\nclass XConfig(LlamaConfig):\n    pass\n",
    "modeling_x": "from transformers import LlamaForCausalLM\nfrom .configuration_x import XConfig\n\n\n"
    "class XForCausalLM(LlamaForCausalLM):\n    config_class = XConfig\n",
    "tokenization_x": "from transformers import PreTrainedTokenizerFast\n\n\n"
    "class XTokenizer(PreTrainedTokenizerFast):\n    pass\n",
}


def hostile_folder(where: Path) -> Path:
    """A Llama with code for config, model, tokenizer and generation, none of which its JSON files name yet."""
    folder = where / "hostile"
    tiny_model("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "custom_generate").mkdir()
    sources = {**_SOURCES, "custom_generate/generate": "def generate(model, **kwargs):\n    pass\n"}
    for name, source in sources.items():
        trace = f"with open({str(where / TRACE)!r}, 'a') as trace:\n    trace.write({name + ' '!r})\n"
        (folder / f"{name}.py").write_text(trace + source, "utf-8")
    return folder


def put(folder: Path, file: str, **fields: object) -> None:
    """Fields of one of the folder's JSON files; None takes one out."""
    path = folder / file
    held: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = {name: value for name, value in {**held, **fields}.items() if value is not None}
    path.write_text(json.dumps(kept), "utf-8")


def ran(folder: Path) -> set[str]:
    """The files of the folder that were run so far."""
    trace = folder.parent / TRACE
    return set(trace.read_text("utf-8").split()) if trace.exists() else set()
