"""The browser view, in a real browser."""
