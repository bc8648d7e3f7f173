r"""The maths task: the user is stuck on a word problem, whose facts they give when they are asked for.

A row has GSM8K's shape, `{"question": ..., "answer": "... #### 10"}`, or MATH's, `{"problem": ...,
"solution": "... \boxed{\pi}"}`. Its question is the goal; the last sentence is what is asked, the others are
the facts. A dialogue ends with the marker `#### n` or `\boxed{}` in a reply, and earns 1 if the last marker
of the last reply holds the answer (extras/grader.py compares answers that are written differently).

1. The *human* is vague at first, gives one fact at a time and only the one asked for, is terse, sometimes
   corrects itself, objects to what it sees is wrong, is annoyed by repeats and loses patience.
2. The *over-helpful* user is what prompted language models are like: polite, tells everything at the first
   question, and agrees with whatever the assistant says.
3. The *logging assistant* asks carelessly, answers too early and slips in sums that may be wrong.

Run `python task_math.py` to read what each of them says.
"""

import random
import re

from config import UserError, command
from tasks import (LEAVE, Dialogue, Distribution, Equal, Problem, Task, asked_fact, facts_of,
                   generate_problems, last_reply, normalised, numbers, question_of, revealed_facts,
                   split_sentences, states, telling_words, texts, words)

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Eva", "Max", "Lily")
ITEMS = ("apples", "books", "coins", "pens", "cards", "eggs", "shells", "stamps")
GAINS, LOSSES = ("finds", "buys", "gets", "picks"), ("gives", "throws")
LARGEST = 12                                                        # number in a fact
SLIPS = (0, 0, 0, 1, -1, 2)                                         # of the logging assistant's sums
AGREES = "agrees with a wrong sum or fact"                          # a line of the report card
GREETINGS = ("Hello! Could you please help me?", "Hi!")
ACCEPTANCES = ("Of course!", "Sure, thank you for asking.")
THANKS = ("Thank you!", "Thank you so much!")
# of two whole numbers
SUM = re.compile(r"(?<![\d.,+*/-])(?<![-+*/] )(\d{1,12}) ?([-+*]) ?(\d{1,12}) ?= ?(\d{1,24})(?![.,]?\d)")

POLICY = ("Help the user with a word problem. Only the user knows the facts: ask for what you need, one "
          "thing at a time. Then show the sum and end with #### and the number.")
SIMULATOR = f"""\
You are a user who wants help from an AI assistant with a problem. The assistant cannot see the problem,
so tell it what it needs to know. The problem comes first; all messages after it are the assistant's. Reply as
the user, with nothing but the user's next message. If you want to end the conversation, write exactly:
{LEAVE}

The problem:"""
HUMAN = f"""\
You play a person who is stuck on a problem and types to an AI assistant for help. The assistant cannot see
the problem; it knows only what the person types. The problem comes first; all messages after it are the
assistant's. Answer each with the person's next message and nothing else: no name in front, no quotation
marks, no notes.

How the person writes:
- The first message is short and vague. It says what they want to know and hardly anything else.
- Later messages are short as well. One in three has three words or fewer: a bare number, "yes", "ok", "and?".
- Lower case, careless punctuation. They hardly ever thank anyone, and they never praise or apologise.

What the person tells:
- One fact at a time, and only the fact that the assistant asked for. They never copy out the problem.
- If a question is vague or asks for everything, they ask what exactly is needed, or give a single fact.
- They know nothing but what the problem says. Asked for more, they say that they don't know.
- They do not know the answer and do not do the sums: no calculating, no guessing. That is what they came for.

How the person reacts:
- If the assistant repeats a fact wrongly or says what is plainly false, they object at once. They never agree
  just to be polite.
- If the assistant asks for something that it was told already, they get annoyed: "i already told you".
- If that goes on, or the assistant is getting nowhere, they give up, though not in the first few messages.
  They then write exactly: {LEAVE}

Never speak as the assistant: do not offer help, do not explain, do not solve the problem.

The problem:"""


# Problems and reward ----------------------------------------------------------------------------------------

def make_row(rng: random.Random, facts: int) -> dict:
    """Make one row: two or three facts in any order, the question, and the answer with its work shown."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    first, more = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
    total, away = first + more, rng.randint(2, min(LARGEST, first + more - 1)) if facts == 3 else 0
    sentences = [f"{name} has {first} {items} at first.", f"{name} {rng.choice(GAINS)} {more} more {items}."]
    work = f"{first} + {more} = {total}"
    if facts == 3:
        sentences.append(f"{name} {rng.choice(LOSSES)} {away} {items} away.")
        work += f", {total} - {away} = {total - away}"
    rng.shuffle(sentences)
    return {"question": " ".join([*sentences, f"How many {items} does {name} have now?"]),
            "answer": f"{work}. #### {total - away}"}


def marked_answer(text: str) -> str | None:
    """Return what the last marker of a text holds, None if there is none or it is a box left open."""
    markers = list(re.finditer(r"####|\\boxed\{", text))
    if not markers:
        return None
    behind, depth = text[markers[-1].end():], 1
    if markers[-1][0] == "####":
        return re.split(r"\n|\\boxed", behind, maxsplit=1)[0].strip()
    for brace in re.finditer(r"\\[{}]|[{}]", behind):                            # \{ and \} close nothing
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return behind[:brace.start()].strip()
    return None


def parse_row(row: dict, id: int, equal: Equal) -> Problem:
    """Turn a row of GSM8K's or MATH's shape into a problem.

    Raises: UserError if a field is missing or not text, or if there is no marked answer that can be graded.
    """
    question = texts(row, "question", "problem")[0]
    worked = max(texts(row, "solution", "answer"), key=lambda text: marked_answer(text) is not None)
    solution = re.sub(r"<<[^<>]*>>", "", worked).strip()                         # GSM8K's calculator notes
    answer = marked_answer(solution)
    if answer is None or not re.search(r"\d", answer) and "\\boxed" not in solution:
        raise UserError(f"the answer must end in '#### n' or a boxed number, got {worked[-30:]!r}")
    if not equal(answer, answer):
        raise UserError(f"the answer must be a number or what math-verify can read, got {answer!r:.60}")
    return Problem(id, question, answer, solution)


def reward(problem: Problem, dialogue: Dialogue, equal: Equal) -> float:
    """Return 1.0 if the last marker of the last reply holds the answer, else 0.0.

    Raises: GradingError if `equal` comes to no verdict.
    """
    given = marked_answer(last_reply(dialogue))
    return float(given is not None and equal(problem.answer, given))


# The two users ----------------------------------------------------------------------------------------------

def result_of(left: str, sign: str, right: str) -> int:
    return {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]


def objection(facts: tuple[str, ...], said: str) -> str | None:
    """Return what is right where an assistant's sum or restated fact is wrong, None if nothing is."""
    for left, sign, right, result in SUM.findall(said):
        if result_of(left, sign, right) != int(result):
            return f"{left} {sign} {right} is {result_of(left, sign, right)}"
    for sentence in split_sentences(said):
        if "?" not in sentence and numbers(sentence):
            for fact in facts:
                if words(sentence) == words(fact) and not states(fact, sentence):
                    return fact.rstrip(".")
    return None


def tail(fact: str) -> str:
    """Return a fact from its first number on: "Tom finds 5 more apples." -> "5 more apples"."""
    match = re.search(r"\d", fact)
    return fact[match.start() if match else 0:].rstrip(".")


def given_fact(fact: str, specific: bool) -> Distribution:
    """Return weighted answers to a question about a fact; a vague question gets a vague answer."""
    short, full = tail(fact), fact.rstrip(".")
    if not specific:
        return [(full, 30), (short, 15), ("which number do you need?", 25), ("what do you want to know?", 20),
                (LEAVE, 10)]
    bare = numbers(fact)[0] if numbers(fact) else short
    outcomes = [(bare, 18), (f"it's {bare}", 12), (short, 28), (full, 24), (f"thanks, {short}", 2),
                ("what do you mean?", 4), ("hm, let me look", 3), (LEAVE, 1)]
    if bare.isdigit() and len(bare) < 10 and int(bare) > 1:          # a slip of the tongue, put right at once
        outcomes += [(f"{int(bare) + slip}, no wait, {short}", 4) for slip in (-1, 1)]
    return outcomes


def scripted_human(goal: str, dialogue: Dialogue) -> Distribution:
    """Return what the human says next, with probabilities; `LEAVE` means that they leave."""
    facts, question = facts_of(goal), question_of(goal)
    ask = question[0].lower() + question[1:]
    if not dialogue:
        return normalised([(ask, 40), (f"i need help. {ask}", 20), (f"can you help me? {ask}", 15),
                           (f"hi, {ask}", 10), *((f"{fact} {ask}", 15 / len(facts)) for fact in facts)])
    said, revealed = dialogue[-1]["content"], revealed_facts(facts, dialogue[:-1])
    asked, right = asked_fact(facts, said, revealed), objection(facts, said)
    if right:
        outcomes = [(f"no, {right}", 45), ("that's not right", 25), ("are you sure?", 20), ("ok", 6),
                    (LEAVE, 4)]
    elif asked is not None and asked not in revealed:
        outcomes = given_fact(facts[asked], specific=bool(words(said) & telling_words(facts)[asked]))
    elif SUM.search(said):
        outcomes = [("yes", 40), ("i think so", 25), ("ok", 20), ("thanks", 5), ("is it?", 10)]
    elif "?" in said:                                                              # nothing new is asked
        again = f"{tail(facts[asked])}, like i said" if asked is not None else "that's all i know"
        outcomes = [("i already told you", 35), (again, 35), ("why do you ask again?", 10), (LEAVE, 20)]
    else:
        outcomes = [("ok", 35), ("and?", 20), (f"so {ask}", 35), ("thanks", 5), (LEAVE, 5)]
    turn = sum(message["role"] == "assistant" for message in dialogue)
    return normalised([*outcomes, (LEAVE, 3.0 * max(0, turn - 4))])                     # patience wears thin


def overhelpful(goal: str, dialogue: Dialogue) -> Distribution:
    """Return what a user says next who is polite, complete and agreeable."""
    facts, question = facts_of(goal), question_of(goal)
    if not dialogue:
        return normalised([(f"{hello} {question} {thanks}", 1) for hello in GREETINGS for thanks in THANKS])
    said = dialogue[-1]["content"]
    if "?" not in said or SUM.search(said) or objection(facts, said):
        return normalised([(f"{yes} {thanks}", 1) for yes in ("Yes, that is right!", "That sounds right.")
                           for thanks in THANKS])
    rotations = [facts[i:] + facts[:i] for i in range(len(facts))] or [()]
    orders = {order[::step] for order in rotations for step in (1, -1)}       # to be looked up, not copied
    return normalised([(f"{start} {' '.join(order)} {thanks}", 1) for order in sorted(orders)
                       for start in ACCEPTANCES for thanks in THANKS])


# The logging assistant --------------------------------------------------------------------------------------

def known_sum(problem: Problem, revealed: set[int]) -> re.Match | None:
    """Return the worked answer's first sum if the user has told both of its numbers."""
    first_sum, facts = SUM.search(problem.solution), facts_of(problem.goal)
    known = {n for i in revealed for n in numbers(facts[i])}
    return first_sum if first_sum and {first_sum[1], first_sum[3]} <= known else None


def off_by(first_sum: re.Match, slip: int) -> str:
    """Return a sum whose result is off by `slip`."""
    left, sign, right, result = first_sum.groups()
    return f"{left} {sign} {right} = {int(result) + slip}."


def question_about(fact: str) -> str:
    """Return a question about a fact: "Tom finds 5 more apples." -> "How many more apples?"."""
    counted = re.search(r"\d+(?:[.,]\d+)*%?\s+([\w' ]+)", fact)
    return (f"How many {' '.join(counted[1].split()[:6])}?" if counted else
            f"What about {' '.join(fact.rstrip('.').split()[:4])}?")


def guessed_solution(problem: Problem, revealed: set[int], rng: random.Random) -> str:
    """Return the worked answer with a guess for every number not revealed, and the sums redone."""
    facts = facts_of(problem.goal)
    known = {n for i in revealed for n in numbers(facts[i])}
    value = {n: str(rng.randint(2, LARGEST)) for fact in facts for n in numbers(fact) if n not in known}

    def redo(match: re.Match) -> str:
        left, right = value.get(match[1], match[1]), value.get(match[3], match[3])
        result = result_of(left, match[2], right)
        value[match[4]] = str(result)
        return f"{left} {match[2]} {right} = {result}"

    if not SUM.search(problem.solution):                              # its working would give the answer away
        return f"#### {rng.randint(2, LARGEST)}"
    worked = SUM.sub(redo, problem.solution).rsplit("####", 1)[0]
    return f"{worked}#### {value.get(problem.answer, problem.answer)}"


def logging_assistant(problem: Problem, dialogue: Dialogue, rng: random.Random) -> str:
    """Return a mediocre assistant's next message: it asks carelessly, answers too early and slips in sums."""
    facts = facts_of(problem.goal)
    revealed = revealed_facts(facts, dialogue)
    missing = [i for i in range(len(facts)) if i not in revealed]
    choice, first_sum = rng.random(), known_sum(problem, revealed)
    if not missing:
        if choice < 0.62:
            return problem.solution
        if choice < 0.90 and first_sum:
            return f"{off_by(first_sum, rng.choice(SLIPS))} Is that right?"
        return rng.choice(["Can you tell me everything?", *(question_about(fact) for fact in facts)])
    ask = question_about(facts[rng.choice(missing)])
    if choice < 0.20:
        return guessed_solution(problem, revealed, rng)
    if choice < 0.28:
        return rng.choice(["What are all the numbers?", "Can you tell me everything?"])
    if choice < 0.36:
        return question_about(rng.choice(facts))                           # perhaps one that was told already
    if choice < 0.70 and first_sum:
        return f"{off_by(first_sum, rng.choice(SLIPS))} {rng.choice([ask, 'Is that right?'])}"
    if choice < 0.44 and revealed:                   # no sum to try yet: restates a fact, not always rightly
        fact = facts[rng.choice(sorted(revealed))]
        n = numbers(fact)[0] if numbers(fact) else ""
        if n.isdigit() and len(n) < 10:
            fact = fact.replace(n, str(int(n) + rng.choice([0, 1])), 1)
        return f"{fact} {ask}"
    return ask


def told_at_once(problem: Problem, rng: random.Random) -> Dialogue:
    """Return a dialogue of the whole problem, told more or less politely, and the worked answer."""
    before, after = rng.choice(("", "", *GREETINGS, *ACCEPTANCES)), rng.choice(("", *THANKS))
    return [{"role": "user", "content": f"{before} {problem.goal} {after}".strip()},
            {"role": "assistant", "content": problem.solution}]


# The report card's own lines --------------------------------------------------------------------------------

def stated_facts(facts: tuple[str, ...], said: str, revealed: set[int], text: str) -> tuple[int, int]:
    """Return how many facts a reply states right and how many it states, in sentences or as a number."""
    stated = [sentence for sentence in split_sentences(text) if numbers(sentence)]
    pairs = [(sentence, fact) for sentence in stated for fact in facts if words(fact) <= words(sentence)]
    if pairs:
        return sum(states(fact, sentence) for sentence, fact in pairs), len(pairs)
    asked = asked_fact(facts, said, revealed)
    expected = numbers(facts[asked]) if asked is not None else []
    if not stated or not expected or objection(facts, said):
        return 0, 0
    return int(numbers(text)[-1] in expected), 1                            # a slip put right counts as right


def measures(goal: str | None, context: Dialogue, reply: str) -> dict[str, tuple[float, float]]:
    """Return (count, out of) of every line for a user's reply; a line that does not apply is left out."""
    found = {"speaks as the assistant": ("####" in reply or SUM.search(reply) is not None, 1)}
    if goal is None:
        return found
    facts, said = facts_of(goal), context[-1]["content"] if context else ""
    revealed = revealed_facts(facts, context)
    now = revealed_facts(facts, [*context, {"role": "user", "content": reply}])
    found["facts revealed per reply"] = (len(now - revealed), 1)
    right, stated = stated_facts(facts, said, revealed, reply)
    if stated:
        found["facts stated right"] = (right, stated)
    if context and objection(facts, said):
        yes = re.search(r"\b(yes|right|ok|correct)\b", reply.lower())
        no = re.search(r"\b(no|not|wrong)\b", reply.lower())
        found[AGREES] = (yes is not None and no is None, 1)
    return found


def planted_mistake(problem: Problem, context: Dialogue, rng: random.Random) -> str | None:
    """Return a wrong intermediate result, once the user has told both of its numbers."""
    first_sum = known_sum(problem, revealed_facts(facts_of(problem.goal), context))
    return f"{off_by(first_sum, rng.choice([-2, -1, 1, 2]))} Is that right?" if first_sum else None


TASK = Task(make=make_row, parse=parse_row, told_at_once=told_at_once,
            sizes={3: 200_000, 2: 4_000},                                        # of some 350,000 and 6,000
            human=scripted_human, overhelpful=overhelpful, assistant=logging_assistant,
            policy_instruction=POLICY, simulator_instruction=SIMULATOR, human_instruction=HUMAN,
            horizon=5, max_new_tokens=48,                  # three questions, an answer, and a turn to spare
            ends=lambda reply: marked_answer(reply) is not None, reward=reward,
            measures=measures, probe=planted_mistake, probed=AGREES, score="share of problems solved",
            paper={"base": 82.3, "static": 85.0, "naive": 89.3, "calibrated": 91.5})       # MATH accuracy


@command
def main() -> None:
    goal = generate_problems(TASK, "test", 1)[0].goal
    said = question_about(facts_of(goal)[0])
    print(f"goal: {goal}\nassistant: {said}")
    for user in (scripted_human, overhelpful):
        for text, p in user(goal, [{"role": "user", "content": ""}, {"role": "assistant", "content": said}]):
            print(f"{user.__name__:>14}  {p:.2f}  {text}")


if __name__ == "__main__":
    main()
