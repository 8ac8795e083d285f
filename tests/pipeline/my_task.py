"""A data set, a judge, an environment and an agent loop of a user, in one file."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, arg-type, list-item, union-attr"

import numpy as np
from openai import AsyncOpenAI

from rolloutmq import Answer, Status, run_all


def problems(most):  # a data set: anything with a length and [row], or to iterate over
    return [{"question": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(most)]


def score(
    response, ground_truth, state
):  # a judge: a number, or numbers by name with "score" among them
    return {"score": float(ground_truth in response), "letters": len(response)}


class Hints:  # an environment, for the loop "multi_turn"
    async def answer(self, state, turn):
        right = state.ground_truth in turn.text
        return Answer() if right else Answer([{"role": "user", "content": "No. Try again."}])


async def debate(task):  # an agent that gives the model two roles, and a critic that is not trained
    reward = {}
    for role, turns in (("pro", [0.5]), ("contra", [0.25, 0.5]), ("critic", [0])):
        messages = [{"role": "user", "content": f"{role}: {task.question}"}]
        side = task.role(role)
        async with AsyncOpenAI(base_url=side.base_url, api_key=side.api_key) as client:
            for _ in turns:
                said = await client.chat.completions.create(
                    model="any", messages=messages, max_tokens=6
                )
                messages += [said.choices[0].message, messages[0]]
        reward[role] = {"score": said.usage.completion_tokens, "turn_rewards": turns}
    return reward


class Twice:  # an agent loop: the model answers, reads a doubt, and answers again
    def __init__(self, *, judge, tokenizer, eos_ids, partial_rollout, doubt):
        self.judge, self.tokenizer = judge, tokenizer
        self.doubt = np.array(tokenizer.encode(doubt, add_special_tokens=False), np.int32)

    async def generate_group(
        self, states, engine, gid
    ):  # all rollouts of one prompt, at the same time
        open_ones = [state for state in states if state.status is not Status.COMPLETED]
        await run_all(self.run(state, engine, f"{gid}/{state.index}") for state in open_ones)
        return states

    async def run(self, state, engine, name):
        state.reset_response()
        for turn in range(2):
            if turn:
                state.read(self.doubt)  # tokens that nobody sampled: not trained
            tokens = np.concatenate([state.prompt_ids, state.response_ids])
            made = await engine.generate(
                f"{name}/{turn}", tokens, state.sample_params
            )  # for each turn
            state.append(
                made.token_ids, made.logprobs, made.spans
            )  # exactly what was sampled, by which weights
            if made.finish_reason == "abort":  # the run is paused; the group comes back later
                state.reset_response()
                state.status = Status.ABORTED
                return
        state.response = self.tokenizer.decode(state.response_ids, skip_special_tokens=True)
        state.finish_reason, state.reward = made.finish_reason, await self.judge.judge(state)
        state.status = Status.COMPLETED
