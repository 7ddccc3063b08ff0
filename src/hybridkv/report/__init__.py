"""Charts of plans, replays, sweeps and searches as HTML files that need no network (docs/reports.md).

caches     pages of a plan and of a replay
settings   pages of a sweep and of a search
page       the HTML file, and the forms of chart that both use
"""

from hybridkv.report.caches import plan_page, replay_page
from hybridkv.report.page import Chart, Table, page
from hybridkv.report.settings import sweep_page, tune_page

__all__ = ["Chart", "Table", "page", "plan_page", "replay_page", "sweep_page", "tune_page"]
