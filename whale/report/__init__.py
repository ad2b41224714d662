"""The picture of a step: predicted and measured times as one HTML page, and as a trace for Perfetto."""

from whale.report.page import report_html
from whale.report.trace import trace_json

__all__ = ["report_html", "trace_json"]
