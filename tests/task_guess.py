"""A whole task in one file: the policy guesses a number from 1 to 20 that the user has in mind."""

import random
import re

from tasks import Dialogue, Distribution, Equal, Problem, Task, last_reply, numbers

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Eva", "Max", "Lily", "Ida", "Leo")


def make(rng: random.Random, facts: int) -> dict:
    number = rng.randint(1, 20)
    return {"goal": f"{rng.choice(NAMES)} thinks of a number from 1 to 20. It is {number}.",
            "answer": str(number), "solution": f"You think of {number}."}


def human(goal: str, dialogue: Dialogue) -> Distribution:
    """Answer every guess with one word, and anything else with a question."""
    if not dialogue:
        return [("guess my number", 0.7), ("guess", 0.3)]
    guess, number = re.findall(r"\d+", dialogue[-1]["content"][:100]), int(numbers(goal)[-1])
    if not guess:
        return [("just guess", 0.8), ("what?", 0.2)]
    return [("yes" if int(guess[0]) == number else "higher" if int(guess[0]) < number else "lower", 1.0)]


def overhelpful(goal: str, dialogue: Dialogue) -> Distribution:
    """Give the number away as soon as anything is asked, and agree with the first guess."""
    return [(f"Great, thank you! It is {numbers(goal)[-1]}!" if dialogue else "Please guess my number!", 1.0)]


def assistant(problem: Problem, dialogue: Dialogue, rng: random.Random) -> str:
    """Guess within the bounds that are known, and sometimes give up early."""
    low, high = 1, 20
    for said, answer in zip(dialogue[1::2], dialogue[2::2]):
        n = int(numbers(said["content"])[0])
        low, high = (n + 1, high) if "higher" in answer["content"] else (low, n - 1) \
            if "lower" in answer["content"] else (n, n)
    if low >= high or rng.random() < 0.2:
        return f"You think of {min(low, high)}."
    return f"Is it {rng.randint(low, high)}?"


def reward(problem: Problem, dialogue: Dialogue, equal: Equal) -> float:
    return float(last_reply(dialogue) == f"You think of {problem.answer}.")


TASK = Task(make=make, sizes={1: 10_000}, human=human, overhelpful=overhelpful, assistant=assistant,
            policy_instruction="Find the user's number. Ask 'Is it n?'; end with 'You think of n.'",
            simulator_instruction="You have a number in mind; the assistant guesses. What you know:",
            human_instruction="You have a number in mind. Answer with higher, lower or yes. What you know:",
            horizon=5, max_new_tokens=12, ends=lambda reply: reply.startswith("You think of"), reward=reward,
            measures=lambda goal, context, reply: {"gives the number away": (bool(numbers(reply)), 1)})
