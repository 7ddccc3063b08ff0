"""Pictures of plans, replays, sweeps and searches: one HTML file each, which needs no network (docs/reports.md).

plan, replay, sweep, tune (which charts there are) -> charts (their forms) -> page (the file)
"""

from hybridkv.report.page import Chart, Table, page
from hybridkv.report.plan import plan_page
from hybridkv.report.replay import replay_page
from hybridkv.report.sweep import sweep_page
from hybridkv.report.tune import tune_page

__all__ = ["Chart", "Table", "page", "plan_page", "replay_page", "sweep_page", "tune_page"]
