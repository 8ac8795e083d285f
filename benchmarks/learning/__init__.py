"""Does it learn, and what does staleness cost? A small model, real sampling, a real server: see
__main__.py.
"""
