"""Pictures of plans and replays: one HTML file each, which needs no network (docs/reports.md).

plan, replay (which charts there are) -> charts (their forms) -> page (the file)
"""

from hybridkv.report.page import Chart, page
from hybridkv.report.plan import plan_page
from hybridkv.report.replay import replay_page

__all__ = ["Chart", "page", "plan_page", "replay_page"]
