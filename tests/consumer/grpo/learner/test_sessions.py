from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.advantages import (
    ESTIMATORS,
    Estimator,
    estimate,
    load_estimator,
    per_token,
)
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.critic import Critic, gae_advantages
from consumer.grpo.learner.group_rewards import GroupRewards
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy

GAMMA, LAM = 0.9, 0.8
MAX_TOKENS = 12


@dataclass(frozen=True)
class Token:
    """One token of a session: sampled or read, and what it is worth."""

    number: int
    is_sampled: bool
    reward: float
    energy: float
    value: float


@dataclass(frozen=True)
class Session:
    score: float
    turns: Sequence[Sequence[Token]]  # each begins with its sampled tokens


def draw_session(dice: random.Random, *, is_sum: bool) -> Session:
    turns = []
    number = 0
    for _ in range(dice.randint(1, 4)):
        turn = []
        for is_sampled in [True] * dice.randint(1, 3) + [False] * dice.randint(1, 2):
            reward = dice.choice([0.0, 0.0, 0.5, -1.0, 2.0])
            turn.append(Token(number, is_sampled, reward, dice.random() + 0.1, dice.random()))
            number += 1
        turns.append(turn)
    total = sum(token.reward for turn in turns for token in turn)
    return Session(total if is_sum else dice.choice([0.0, 0.3, 1.0]), turns)


def make_states(
    index: int, session: Session, cuts: Sequence[int]
) -> list[tuple[RolloutState, list[Token | None]]]:
    """Return a rollout for each segment, and its tokens; None: repeated context.

    `cuts`: the turns that begin a segment, besides the first.
    """
    made = []
    for start, end in zip([0, *cuts], [*cuts, len(session.turns)], strict=True):
        own = [token for turn in session.turns[start:end] for token in turn]
        # some agents begin with a context, others with the first token that they sample
        again = [None] * (sum(map(len, session.turns[:start])) if index % 2 else 0)
        row: list[Token | None] = [*again, *own]
        known = [token for token in row if token]
        state = RolloutState(
            index=index,
            session_id=f"agent-{index}",
            prompt_ids=np.array([7, 8]),
            response_ids=np.array([5 + token.number if token else 4 for token in row]),
            logprobs=np.full(len(row), -1.0),
            response_mask=np.array([bool(token and token.is_sampled) for token in row]),
            token_rewards=np.array([token.reward if token else 0.0 for token in row]),
            spans=[VersionSpan(len(again), len(known), start, "initial")],
            reward={"score": session.score, "part": -session.score},
            status=Status.COMPLETED,
            sample_params=SampleParams(max_tokens=MAX_TOKENS),
        )
        made.append((state, row))
    return made


def make_group(
    sessions: Sequence[Session], dice: random.Random, *, is_cut: bool
) -> tuple[RolloutGroup, list[tuple[int, Token] | None]]:
    queues = []
    for index, session in enumerate(sessions):
        turns = range(1, len(session.turns))
        cuts = sorted(dice.sample(turns, dice.randint(0, len(turns)))) if is_cut else []
        queues.append([(index, *each) for each in make_states(index, session, cuts)])
    rows = []
    while any(queues):  # the segments of a session stay in order, between those of others
        rows.append(dice.choice([queue for queue in queues if queue]).pop(0))
    group = RolloutGroup("math-0000000001", "math", [state for _, state, _ in rows])
    owners = [(index, token) if token else None for index, _, row in rows for token in row]
    return group, owners


FURTHER: dict[str, Estimator] = {
    "gae": partial(gae_advantages, gamma=GAMMA, lam=LAM),
    "gdpo": load_estimator("gdpo", {"score": 1.0, "part": 0.5}),
}


def by_token(
    name: str,
    made: Sequence[tuple[RolloutGroup, list[tuple[int, Token] | None]]],
    buffer_tokens: int | None,
) -> dict[tuple[int, int, int], float]:
    rewards = []
    for group, owners in made:
        own = GroupRewards.of(group, buffer_tokens)
        for name_of_column, field in {"energy": "energy", "values": "value"}.items():
            given = [getattr(owner[1], field) if owner else np.nan for owner in owners]
            own.tokens[name_of_column] = np.array(given)
        rewards.append(own)
    found = {}
    advantages = estimate(name, (ESTIMATORS | FURTHER)[name], rewards)
    for number, ((group, owners), column) in enumerate(zip(made, advantages, strict=True)):
        for owner, value in zip(owners, per_token(column, group.lengths).tolist(), strict=True):
            if owner and owner[1].is_sampled:
                found[number, owner[0], owner[1].number] = value
    return found


@pytest.mark.parametrize("name", sorted(ESTIMATORS | FURTHER))
@given(seed=st.integers(0, 10**6), is_sum=st.booleans(), buffer_tokens=st.sampled_from([None, 8]))
def test_no_advantage_depends_on_segments_or_on_what_was_masked_later(
    name: str, seed: int, is_sum: bool, buffer_tokens: int | None
) -> None:
    dice = random.Random(seed)
    groups = [
        [draw_session(dice, is_sum=is_sum) for _ in range(dice.randint(2, 5))]
        for _ in range(dice.randint(1, 3))
    ]
    whole = [make_group(sessions, dice, is_cut=False) for sessions in groups]
    cut = [make_group(sessions, dice, is_cut=True) for sessions in groups]
    expected = by_token(name, whole, buffer_tokens)
    assert by_token(name, cut, buffer_tokens) == pytest.approx(expected, abs=1e-5)
    for group, _ in cut:  # by staleness, then by what a filter of batches masks
        group.mask = group.fresh_mask(dice.randint(1, 5), 2)
        group.mask = group.mask * (np.array([dice.random() for _ in group.mask]) > 0.3)
    assert by_token(name, cut, buffer_tokens) == pytest.approx(expected, abs=1e-5)


# -- the papers, turn by turn and token by token, without arrays ----------------------------------


def standardized(value: float, values: list[float]) -> float:
    if len(set(values)) < 2:
        return 0.0
    mean = sum(values) / len(values)
    std = math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1))
    return (value - mean) / (std + 1e-4)


def rewards_to_go(session: Session) -> dict[int, float]:
    tokens = [token for turn in session.turns for token in turn]
    return {
        token.number: sum(later.reward for later in tokens[place:])
        for place, token in enumerate(tokens)
        if token.is_sampled
    }


def turns_of_the_paper(sessions: Sequence[Session], scores: list[float]) -> list[dict[int, float]]:
    worth = [[sum(token.reward for token in turn) for turn in each.turns] for each in sessions]
    found = []
    for score, own, session in zip(scores, worth, sessions, strict=True):
        parts = [
            standardized(value, [other[n] for other in worth if len(other) > n])
            for n, value in enumerate(own)
        ]
        found.append(
            {
                token.number: standardized(score, scores) + sum(parts[number:])
                for number, turn in enumerate(session.turns)
                for token in turn
            }
        )
    return found


def otb_of_the_paper(sessions: Sequence[Session], scores: list[float]) -> list[dict[int, float]]:
    sampled = [[t for turn in each.turns for t in turn if t.is_sampled] for each in sessions]
    to_go = [rewards_to_go(each) for each in sessions]
    shared = sorted(map(len, sampled))[-2]
    found = []
    for index, tokens in enumerate(sampled):
        own = {}
        for place, token in enumerate(tokens):
            at = min(place, shared - 1)  # behind the second longest, the last baseline holds
            above = below = 0.0
            for other, others in enumerate(sampled):
                if len(others) > at:
                    weight = sum(each.energy for each in others[: at + 1])
                    above += weight * (scores[other] + to_go[other][others[at].number])
                    below += weight
            own[token.number] = scores[index] + to_go[index][token.number] - above / below
        found.append(own)
    return found


def gae_of_the_paper(sessions: Sequence[Session], scores: list[float]) -> list[dict[int, float]]:
    found = []
    for session, score in zip(sessions, scores, strict=True):
        tokens = [t for turn in session.turns for t in turn if t.is_sampled]
        to_go = rewards_to_go(session)
        own, later, value = {}, 0.0, 0.0
        for token, behind in zip(reversed(tokens), [None, *reversed(tokens[1:])], strict=True):
            reward = to_go[token.number] - (to_go[behind.number] if behind else -score)
            later = reward + GAMMA * value - token.value + GAMMA * LAM * later
            own[token.number], value = later, token.value
        found.append(own)
    return found


PAPERS: dict[str, Callable[[Sequence[Session], list[float]], list[dict[int, float]]]] = {
    "turns": turns_of_the_paper,
    "otb": otb_of_the_paper,
    "gae": gae_of_the_paper,
}


@pytest.mark.parametrize("name", PAPERS)
@given(seed=st.integers(0, 10**6), is_sum=st.booleans())
def test_advantages_by_position_are_those_of_the_papers(name: str, seed: int, is_sum: bool) -> None:
    """Where each score is the sum of what the turns got, it counts once: at the turns."""
    dice = random.Random(seed)
    sessions = [draw_session(dice, is_sum=is_sum) for _ in range(dice.randint(2, 5))]
    is_counted = all(np.isclose(rewards_to_go(each)[0], each.score) for each in sessions)
    scores = [0.0 if is_counted else each.score for each in sessions]
    got = by_token(name, [make_group(sessions, dice, is_cut=True)], None)
    expected = PAPERS[name](sessions, scores)
    assert got == pytest.approx(
        {(0, n, number): expected[n][number] for _, n, number in got}, abs=1e-5
    )


def of_steps(*rewards: float, score: float = 0.0) -> Session:
    turns = [
        [Token(2 * n, True, reward, 1.0, 0.0), Token(2 * n + 1, False, 0.0, 0.0, 0.0)]
        for n, reward in enumerate(rewards)
    ]
    return Session(score, turns)


def test_a_segment_without_values_changes_no_advantage_of_other_sessions() -> None:
    """It was too long for the model. The scores are sums, which count once."""
    sessions = [of_steps(0.5, 1, score=1.5), of_steps(0.5, 0, score=0.5)]
    group, _ = make_group(sessions, random.Random(3), is_cut=True)
    found = []
    for is_known in (True, False):
        rewards = GroupRewards.of(group)
        values = np.zeros(len(group.mask))
        values[: group.lengths[0]] = 0.0 if is_known else np.nan
        rewards.tokens["values"] = values
        found.append(gae_advantages([rewards])[0])
    others = np.repeat(np.array(group.sessions) != group.sessions[0], group.lengths)
    assert found[0][others].any()
    assert found[1][others].tolist() == found[0][others].tolist()


# -- with a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "turns", "otb", "gae", "reinforce_pp"])
def test_what_is_masked_later_changes_no_advantage_of_the_others(
    name: str, model_dir: Path
) -> None:
    learner = Policy(model_dir, LearnerConfig(token_budget=40), seed=7)
    critic = None
    if name == "gae":
        critic = Critic(model_dir, CriticConfig(gamma=GAMMA, lam=LAM), learner)
        torch.nn.init.normal_(critic.model.head.weight)
    controller = TrainController(learner, name, critic=critic)
    found = []
    for is_masked in (False, True):
        dice = random.Random(5)
        group, _ = make_group([draw_session(dice, is_sum=False) for _ in "abcd"], dice, is_cut=True)
        columns = [np.zeros(len(group.mask), np.float32)]
        if is_masked:
            group.mask = group.fresh_mask(4, 2)
            group.mask[: group.lengths[0]] = 0
        batch = controller.compute_values(controller.pack_pad_dispatch([group]))
        for update in controller.compute_advantages(batch).updates:
            update.batches.fill(columns, update.advantages)
        found.append((columns[0], group.mask > 0))
    (expected, all_sampled), (got, trained) = found
    assert 0 < trained.sum() < all_sampled.sum()
    assert got[trained] == pytest.approx(expected[trained], abs=1e-5)


def test_a_truncated_session_is_masked_as_a_whole() -> None:
    dice = random.Random(1)
    sessions = [draw_session(dice, is_sum=False) for _ in "abcd"]
    group, owners = make_group(sessions, dice, is_cut=True)
    states = group.states
    last = max(n for n, state in enumerate(states) if state.index == 2)
    assert sum(state.index == 2 for state in states) > 1
    states[last].finish_reason = "length"
    group = RolloutGroup(group.gid, group.task, states)
    BatchFilter(mask_truncated=True).apply([group])
    trained = {owner[0] for owner, mask in zip(owners, group.mask, strict=True) if owner and mask}
    assert trained == {0, 1, 3}
