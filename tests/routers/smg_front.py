"""A gRPC worker of smg's public schema in front of a server. Arguments: its port of loopback, and the server as JSON.

It runs in smg's environment. Events come from the server's endpoints by the relay that smg publishes for vLLM.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.request import Request, urlopen

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_servicer.kv_relay import Engine, RankSource, relay


class Front(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # generated, without types
    """Forwards prompts of token ids to one server."""

    def __init__(self, server: dict[str, Any]) -> None:
        self._server = server

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        data = None if body is None else json.dumps(body).encode()
        sent = Request(self._server["url"] + path, data, {"Content-Type": "application/json"})  # noqa: S310 - loopback
        with urlopen(sent, timeout=60) as answer:  # noqa: S310 - same
            return json.loads(answer.read() or b"null")

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802, ARG002 - of the schema
        try:
            await asyncio.to_thread(self._asked, "/health")
        except OSError as error:
            return vllm_engine_pb2.HealthCheckResponse(healthy=False, message=str(error))
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802, ARG002 - same
        model = self._server["model"]
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=model,
            served_model_name=model,
            tokenizer_path=self._server["tokenizer"],
            is_generation=True,
            max_context_length=512,
            vocab_size=256,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802, ARG002 - same
        return vllm_engine_pb2.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1, block_size=16)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401, N802, ARG002 - same
        body = {"model": self._server["model"], "prompt": list(request.tokenized.input_ids), "max_tokens": 1}
        usage = (await asyncio.to_thread(self._asked, "/v1/completions", body))["usage"]
        yield vllm_engine_pb2.GenerateResponse(
            complete=vllm_engine_pb2.GenerateComplete(
                output_ids=[7],
                finish_reason="length",
                prompt_tokens=usage["prompt_tokens"],
                completion_tokens=1,
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            )
        )

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401, N802 - same
        events = self._server["events"]
        source = RankSource(0, events["endpoint"], events["replay_endpoint"])
        async for batch in relay([source], Engine.VLLM, request.start_sequence_number, context):
            yield batch


async def main() -> None:
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Front(json.loads(sys.argv[2])), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
