"""Report of a run: report.html, one page that needs no network and no other file."""

from launch.report.page import REPORT_FILE, try_report, write_report

__all__ = ["REPORT_FILE", "try_report", "write_report"]
