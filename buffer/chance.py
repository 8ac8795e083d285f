"""Chance for pauses and turns. Not the generator of the process: a trainer or a judge may have seeded that one, and two
workers with one seed would wait and ask in step."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
