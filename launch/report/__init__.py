"""The report of a run: one page, report.html, that needs no network and no other file."""

from launch.report.page import REPORT_FILE, try_report, write_report

__all__ = ["REPORT_FILE", "try_report", "write_report"]
