"""A page of figures, bars, trees and pictures, as one HTML file that needs no network."""

from shardwright.report.page import Page, page_html

__all__ = ["Page", "page_html"]
