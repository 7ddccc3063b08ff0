"""What is wrong with a plan, a trace in a memory, or a running server, and what to change (docs/doctor.md).

findings (the values) <- plans, traces (with replays that prove remedies), servers (their metrics)
"""

from hybridkv.doctor.findings import Diagnosis, Finding, Proof
from hybridkv.doctor.plans import examine_plan
from hybridkv.doctor.servers import Figures, examine_server
from hybridkv.doctor.traces import examine_trace

__all__ = ["Diagnosis", "Figures", "Finding", "Proof", "examine_plan", "examine_server", "examine_trace"]
