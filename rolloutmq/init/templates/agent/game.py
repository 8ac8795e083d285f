"""Answer the guesses of the model: higher or lower."""

import re

from rolloutmq import Answer


class Game:
    """It keeps no state: after a pause, another worker may answer the next turn."""

    async def answer(self, state, turn):
        """Return the next message for the model; an empty answer ends the conversation."""
        number = int(state.ground_truth)
        found = re.findall(r"\d+", turn.text)
        guess = int(found[-1][:9]) if found else None
        if guess == number:
            return Answer()
        hint = "Say a number." if guess is None else "Higher." if guess < number else "Lower."
        return Answer([{"role": "user", "content": hint}])
