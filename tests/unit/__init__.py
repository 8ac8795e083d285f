"""Tests of one part each, without a server."""
