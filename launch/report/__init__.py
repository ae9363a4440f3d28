"""A run as one page: report.html, which needs no network and nothing beside it."""

from launch.report.page import REPORT_FILE, try_report, write_report

__all__ = ["REPORT_FILE", "try_report", "write_report"]
