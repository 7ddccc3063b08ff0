"""Send a load to a server, or to an engine in this process, and measure it as ``vllm bench serve`` does.

    loads     requests: prompts as token ids, and how many tokens to generate
    driving   sends them at a rate, and collects an Answer of each
    figures   arithmetic over answers, and the report
    server    one request over HTTP          engine    one request to an AsyncEngine

The names of options, printed lines and saved fields are those of vLLM 0.33. Hits are added.
"""

from hybridkv.bench.driving import Answer, arrivals, drive
from hybridkv.bench.figures import METRICS, figures, report
from hybridkv.bench.loads import LoadRequest, custom, ordinary_tokens, random_load, repeated_prefixes, sharegpt

__all__ = [
    "METRICS",
    "Answer",
    "LoadRequest",
    "arrivals",
    "custom",
    "drive",
    "figures",
    "ordinary_tokens",
    "random_load",
    "repeated_prefixes",
    "report",
    "sharegpt",
]
