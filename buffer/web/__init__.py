"""The browser's view of a run: a page, the numbers behind it, and what an operator may do with a token."""
