"""Ray Serve with its KVAwareRouter in front of servers. Arguments: a port of loopback, and the servers as JSON.

It runs in Ray's environment, without vLLM. A replica stands for one server, in the place of Ray's LLMServer: it tells
where the server's events are. A request to the port answers where Ray's router sends a prompt, as its LLMRouter does.
"""

import asyncio
import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import build_kv_token_tracker
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request


class Replica:
    """Stands for one server while that server is healthy."""

    async def __init__(self, servers: list[dict[str, Any]]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._server = servers[serve.get_replica_context().rank.rank]
        while not await asyncio.to_thread(self._is_healthy):
            pass

    def _is_healthy(self) -> bool:
        try:
            with urlopen(f"{self._server['url']}/health", timeout=5) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.2)
            return False

    async def check_health(self) -> None:
        if not await asyncio.to_thread(self._is_healthy):
            raise RuntimeError(f"{self._server['url']} is gone")

    def record_routing_stats(self) -> dict[str, Any]:
        return {"kv_event_metadata": self._server["events"], "server": self._server["url"]}


class Front:
    """Asks Ray's router, and says what it expected."""

    async def __init__(self, replicas: Any) -> None:  # type: ignore[misc]  # noqa: ANN401 - a handle
        self._replicas, self._last = replicas, dict[str, Any]()
        self._tracker = build_kv_token_tracker(SimpleNamespace(experimental_configs={}), replicas.deployment_id)
        select = self._tracker.select_worker

        async def noted(request: str, *arguments: Any) -> Any:  # noqa: ANN401 - as select_worker
            self._last = {"request": request, **await select(request, *arguments)}
            return self._last

        self._tracker.select_worker = noted
        replicas._init()

    async def __call__(self, request: Request) -> Any:  # noqa: ANN401 - JSON
        if request.method == "GET":
            return len(self._tracker._replica_id_by_worker)
        body = await request.json()
        asked = {"_reserve": False, "request_token_ids": body["prompt"]}
        async with self._replicas.choose_replica(SimpleNamespace(**body), **asked) as chosen:
            server = chosen._replica.routing_stats["server"]
        await self._tracker.on_request_completed(self._last["request"])
        return {"server": server, "credited": self._last["overlap_tokens"]}


def main() -> None:
    port, servers = int(sys.argv[1]), json.loads(sys.argv[2])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=True)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    router = RequestRouterConfig(
        request_router_class=KVAwareRouter, request_routing_stats_period_s=0.5, request_routing_stats_timeout_s=5
    )
    replicas = serve.deployment(
        Replica,
        num_replicas=len(servers),
        request_router_config=router,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1,
        health_check_timeout_s=10,
    )
    front = serve.deployment(Front, ray_actor_options={"num_cpus": 0})
    serve.run(front.bind(replicas.bind(servers)), name="front", route_prefix="/")
    signal.sigwait({signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
