"""The report of a step: predicted and measured times as one HTML page, and as a trace for Perfetto."""

from whale.report.comparison import comparison_html, differences
from whale.report.page import recorded_run, report_html
from whale.report.trace import trace_json

__all__ = ["comparison_html", "differences", "recorded_run", "report_html", "trace_json"]
