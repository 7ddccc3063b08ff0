"""Metrics of TierConnector's tiers, as vLLM's server shows them: ``make test-vllm-engine VLLM_PYTHON=...``."""

import sys
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from hybridkv.vllm.connector import METRICS, TierConnector

COUNTS = {
    "host_found_bytes": 7, "host_stored_seconds": 0.5, "disk_dropped_blocks": 3, "store_loaded_bytes": 11,
    "store_loads_lost": 2, "finds": 5,
}  # fmt: skip
WANTED = {
    'vllm:kv_offload_tiering_read_bytes_total{engine="1",tier="host"} 14.0',
    'vllm:kv_offload_tiering_write_time_total{engine="1",tier="host"} 1.0',
    'vllm:kv_offload_tiering_backpressure_stores_dropped_total{engine="1",tier="disk"} 6.0',
    'vllm:kv_offload_tiering_read_bytes_total{engine="1",tier="store"} 22.0',
    'vllm:kv_offload_tiering_promotion_job_failures_total{engine="1",tier="store"} 4.0',
}


def main() -> int:
    """Print what is missing or too much."""
    types: dict[Any, Any] = {kind: kind for kind in (Gauge, Counter, Histogram)}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="TierConnector", kv_connector_module_path="hybridkv.vllm", kv_connector_extra_config={}
        )
    )
    made = KVConnectorProm(config, ["engine"], {0: ["0"], 1: ["1"]})
    if not isinstance(made.prom_metrics, type(TierConnector.build_prom_metrics(config, _fresh(types), ["engine"], {}))):
        sys.exit("vLLM makes no metrics of TierConnector")
    for _ in range(2):
        made.observe(COUNTS, 1)
    shown = generate_latest().decode().splitlines()
    names = {f"vllm:kv_offload_tiering_{name}" for name, *_ in METRICS}
    found = {line for line in shown if line.partition("_total{")[0] in names}
    for line in sorted(found ^ WANTED):
        sys.stdout.write(f"{'missing' if line in WANTED else 'too much'}: {line}\n")
    return int(found != WANTED)


def _fresh(types: dict[Any, Any]) -> dict[Any, Any]:
    """The same classes without a registry, in which a name may stand once."""
    return {kind: lambda *args, of=one: of(*args, registry=None) for kind, one in types.items()}


if __name__ == "__main__":
    sys.exit(main())
