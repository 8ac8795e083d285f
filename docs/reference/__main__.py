"""Writes all reference pages."""

from __future__ import annotations

from docs.reference import PAGES, REFERENCES

for name, page in REFERENCES.items():
    (PAGES / name).write_text(page(), encoding="utf-8")
