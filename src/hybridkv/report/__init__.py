"""Charts of plans, replays, sweeps and searches: one HTML file each, which needs no network (docs/reports.md).

caches and settings choose the charts -> page draws them and writes the file
"""

from hybridkv.report.caches import plan_page, replay_page
from hybridkv.report.page import Chart, Table, page
from hybridkv.report.settings import sweep_page, tune_page

__all__ = ["Chart", "Table", "page", "plan_page", "replay_page", "sweep_page", "tune_page"]
