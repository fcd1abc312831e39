"""Reads of uniform registers that not every path to them has set, in the assembler's code.

That of Triton 3.6 makes such code, silently: where two loops use the same descriptor of rows in shared memory, part of it is
worked out before the first loop alone, so that the second has anything where the first had no iteration.
"""

import itertools
import re

_JUMP = re.compile(r"(@!?U?P\w+ )?(BRA|BRX|JMP|JMX|EXIT|RET)\b\S*(?:.* 0x([0-9a-f]+)$)?")
# what sets a uniform register; of those beginning with U, few do not
_SETTING = re.compile(r"U(?!TMA|SETMAXREG|BLK)|R2UR|S2UR|REDUX|VOTEU")
_PAIR = re.compile(r"\.(64|WIDE)\b")


def _accesses(instruction: str) -> tuple[set[int], set[int]]:
    """(registers read, those set), the latter if a predicate allows as well."""
    name, _, operands = re.sub(r"^@!?U?P\w+ ", "", instruction).partition(" ")
    rest = [o.strip() for o in operands.split(",")]
    while len(rest) > 1 and re.fullmatch(r"U?P(\d|T)", rest[0]):
        del rest[0]
    sets: set[int] = set()
    if _SETTING.match(name) and (found := re.fullmatch(r"UR(\d+)", rest[0])):
        sets = {int(found[1]), int(found[1]) + (_PAIR.search(name) is not None)}
        del rest[0]
    reads = {int(n) for o in rest for n in re.findall(r"\bUR(\d+)\b", o)}
    # two for the descriptor of each operand, of which the first may be in registers
    if found := re.search(r"\bR\d+, (R\d+, )?gdesc\[UR(\d+)\]", operands):
        reads |= {int(found[2]) + i for i in range(4)}
        reads -= {int(found[2]) + i for i in range(2 if found[1] else 0)}
    return reads, sets


def unset_reads(sass: dict[int, str]) -> dict[int, str]:
    """The instructions with such a read, by address, of all of a kernel.  A jump to an address in a register may go wherever
    nothing else leads."""
    addresses = [*sass]
    following = dict(itertools.pairwise(addresses))
    accesses = {a: _accesses(text) for a, text in sass.items()}
    leads: dict[int, list[int]] = {}
    indirect = []
    for a, text in sass.items():
        jump = _JUMP.match(text)
        leads[a] = [following[a]] if a in following and not (jump and not jump[1]) else []
        if jump and jump[2] in ("BRX", "JMX"):
            indirect.append(a)
        elif jump and jump[3]:
            leads[a].append(int(jump[3], 16))
    reached = {addresses[0], *(b for after in leads.values() for b in after)}
    for a in indirect:
        leads[a] += [b for b in addresses if b not in reached]
    before = dict.fromkeys(addresses, frozenset(range(64)))
    before[addresses[0]] = frozenset()
    waiting = {*addresses[:1]}
    seen = set()
    while waiting:
        a = waiting.pop()
        seen.add(a)
        after = before[a] | accesses[a][1]
        for b in leads[a]:
            meet = before[b] & after
            if meet != before[b] or b not in seen:
                before[b] = meet
                waiting.add(b)
    return {a: text for a, text in sass.items() if a in seen and not accesses[a][0] <= before[a]}
