"""Speed of answers with speculation and without, in interleaved pairs.

    python benchmarks/speculation.py MODEL.gguf [--draft-model MODEL.gguf] --pairs 7

Both engines run in this process, one at a time. Prompts are in the prefix cache after a first round that is not
counted, so that times are those of decoding. Answers must be the same.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pelton import LLM, SamplingParams
from pelton.llm import Result

CODE = '''
class Inventory:
    """Items and how many of each are in stock."""

    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name] < count:
            raise ValueError("not enough items in stock")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def report(self):
        for name, count in sorted(self.items.items()):
            print(f"{name}: {count}")
'''
LETTER = """
Minutes of the meeting on 12 March. Present were Maria Jensen (maria.jensen@example.com, sales), Tom Okafor
(tom.okafor@example.com, engineering), Li Wei (li.wei@example.com, support) and Priya Natarajan
(priya.natarajan@example.com, finance). Maria reported that the order of the Hamburg office for 240 desks had been
delivered on 3 March and that the invoice number 2024-0193 was still open. Tom said that the new release would be
shipped on 28 March, two weeks later than planned, because the tests of the payment module had shown three faults.
Li Wei asked for two more people in support, since the number of tickets had grown from 310 to 455 in a month. Priya
Natarajan agreed to one person from 1 April. The next meeting is on 9 April at 10:00 in room 4.
"""
TICKETS = """
Shift report, service desk, Tuesday 4 November. At 8:15 Helen Marsh of the Leeds branch called: the label printer in the
packing hall prints blank labels since the weekend. I had her replace the ribbon, which helped; closed. Just after nine
Omar Haddad (Bristol, accounts) wrote that he cannot open the payroll folder any more. His group membership was lost
when the accounts were moved on Friday; passed on to the directory team, urgent, because salaries are paid on Thursday.
At 10:40 the Dublin warehouse reported by phone, through Aoife Byrne, that the hand scanners lose their wireless
connection near gate 7. Not reproducible from here, a technician goes there tomorrow; still open, normal. In the
afternoon, 14:05, Stefan Vogel from Cologne asked for a second screen for his desk. Low priority, ordered, waiting for
the supplier.
"""
TICKETS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tickets": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "reporter": {"type": "string"},
                    "location": {"type": "string"},
                    "time": {"type": ["string", "null"]},
                    "problem": {"type": "string"},
                    "priority": {"enum": ["low", "normal", "urgent"]},
                    "status": {"enum": ["open", "waiting", "escalated", "closed"]},
                },
                "required": ["reporter", "location", "time", "problem", "priority", "status"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["tickets"],
    "additionalProperties": False,
}


class Work(NamedTuple):
    """One kind of request. `prompts` are asked at once: texts of a user, or token ids. `schema`: of the answers."""

    name: str
    prompts: list[str] | list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    schema: dict[str, Any] | None = None


def works(vocab_size: int) -> list[Work]:
    source = random.Random(0)
    sky = "Why is the sky blue? Explain it to a child."
    rewrite = f"Rewrite this file. Rename the class Inventory to Warehouse and change nothing else.\n```python{CODE}```"
    contacts = f"Extract all people as a JSON list of objects with name, email and department.\n{LETTER}"
    quote = f"Copy the following text word for word.\n{LETTER}"
    tickets = f"Extract all tickets from this report.\n{TICKETS}"
    questions = [sky, "How do I boil an egg?", "Write a poem about rain.", "What is a prime number?"]
    return [
        Work("code editing", [rewrite], 200),
        Work("extraction", [f"List each person's name, e-mail address and department, one a line.\n{LETTER}"], 120),
        Work("extraction as JSON", [contacts], 250),
        Work("extraction under a schema", [tickets], 300, schema=TICKETS_SCHEMA),
        Work("extraction under a schema, temperature 0.8", [tickets], 300, 0.8, TICKETS_SCHEMA),
        Work("quoting", [quote], 150),
        Work("chat", [sky], 120),
        Work("chat, temperature 0.8", [sky], 120, 0.8),
        Work("new code", ["Write a Python class for a bank account with deposit, withdraw and a history."], 120),
        Work("random tokens", [[source.randrange(1000, vocab_size) for _ in range(200)]], 120, 1.0),
        Work("chat, 4 streams", questions, 60),
        Work("code editing, 4 streams", [rewrite + "\n" * i for i in range(4)], 80),
    ]


def ask(llm: LLM, work: Work) -> tuple[list[tuple[int, ...]], float]:
    """The answers' tokens, and tokens per second over all of them."""
    params = SamplingParams(max_tokens=work.max_tokens, temperature=work.temperature, seed=1)
    chats: Any = [[{"role": "user", "content": prompt}] for prompt in work.prompts]
    call: Callable[..., list[Result]] = llm.chat if isinstance(work.prompts[0], str) else llm.generate
    settings: dict[str, Any] = {"use_tqdm": False} | ({"json_schema": work.schema} if work.schema else {})
    started = time.perf_counter()
    results = call(chats if isinstance(work.prompts[0], str) else work.prompts, params, **settings)
    seconds = time.perf_counter() - started
    return [result.token_ids for result in results], sum(r.usage.completion_tokens for r in results) / seconds


def drafts(llm: LLM) -> tuple[int, ...]:
    """Drafted and accepted tokens, of all and of the draft model's."""
    counters: Any = llm._service.engine.counters
    return counters.drafted, counters.accepted, counters.drafted_by_model, counters.accepted_by_model


def measure(plain: LLM, drafting: LLM, work: Work, num_pairs: int) -> str:
    """A row of the table."""
    expected, _ = ask(plain, work)
    first, _ = ask(drafting, work)
    assert first == expected, f"{work.name}: other tokens with speculation"
    before = drafts(drafting)
    speeds: list[tuple[float, float]] = []
    for pair in range(num_pairs):
        ran = {llm: ask(llm, work) for llm in ((plain, drafting) if pair % 2 else (drafting, plain))}
        assert ran[plain][0] == ran[drafting][0] == expected
        speeds.append((ran[plain][1], ran[drafting][1]))
    counts = [(after - then) / num_pairs for after, then in zip(drafts(drafting), before, strict=True)]
    num_tokens = sum(map(len, expected))
    ratio = statistics.median(after / then for then, after in speeds)
    without, with_drafts = (statistics.median(column) for column in zip(*speeds, strict=True))
    return (
        f"| {work.name} | {num_tokens} | {without:.1f} | {with_drafts:.1f} | {ratio:.2f}x | "
        f"{counts[0]:.0f} / {counts[1]:.0f} | {counts[2]:.0f} / {counts[3]:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--tokens", type=int, default=1000, help="of an answer, at most")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", action="append", help="only kinds whose name has this in it; repeatable")
    args = parser.parse_args()
    settings: dict[str, Any] = {"in_process": True, "context": 2048, "threads": args.threads, "kv_memory": 256 << 20}
    with (
        LLM(args.model, speculation="off", **settings) as plain,
        LLM(args.model, draft_model=args.draft_model, **settings) as drafting,
    ):
        vocab_size = plain._service.engine.info.vocab_size
        print(f"{Path(args.model).name}, median of {args.pairs} pairs\n")
        print("| work | tokens | plain, tokens/s | drafts, tokens/s | ratio | drafted / accepted | of them by model |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for work in works(vocab_size):
            if not args.work or any(part in work.name for part in args.work):
                work = work._replace(max_tokens=min(work.max_tokens, args.tokens))
                print(measure(plain, drafting, work, args.pairs), flush=True)


if __name__ == "__main__":
    main()
