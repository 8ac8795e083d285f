"""Commands for the server and the account of groups."""
