"""Write a plan as one HTML page that needs no network."""

from shardwright.tools.report.page import Page, page_html
from shardwright.tools.report.plan_page import plan_page, write_page

__all__ = ["Page", "page_html", "plan_page", "write_page"]
