"""An engine over HTTP, with OpenAI's request and answer formats.

    body -> bodies (checked) -> forms: Asked -> generation: places in the queue, AsyncEngine -> a form: JSON, or events

A field that is not offered is rejected with an error that names it. If a client disconnects, its requests end.
Connections have limits of time and memory (server). Texts are tokenized in turns (front). Keys, origins and body sizes
are checked first (gates).
"""

from hybridkv.serve.app import create_app
from hybridkv.serve.front import ServeOptions
from hybridkv.serve.gates import ApiKeys
from hybridkv.serve.server import ConnectionLimits, Server, listen

__all__ = ["ApiKeys", "ConnectionLimits", "ServeOptions", "Server", "create_app", "listen"]
