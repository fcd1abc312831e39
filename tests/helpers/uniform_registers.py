"""Reads of uniform registers that not every path to them has set, in the assembler's code.

That of Triton 3.6 makes such code, silently: where two loops use the same descriptor of rows in shared memory, part of it is
worked out before the first loop alone, so that the second has anything where the first had no iteration.  A move is no read:
copies lead nowhere where a group of registers, of which not all are in use, makes room for another and comes back.
"""

import itertools
import re

_JUMP = re.compile(r"(@!?U?P\w+ )?(BRA|BRX|JMP|JMX|EXIT|RET)\b\S*(?:.* 0x([0-9a-f]+)$)?")
# what sets a uniform register; of those beginning with U, few do not
_SETTING = re.compile(r"U(?!TMA|SETMAXREG|BLK)|R2UR|S2UR|REDUX|VOTEU")
_PAIR = re.compile(r"\.(64|WIDE)\b")
_MOVE = re.compile(r"(?:U?MOV|R2UR|IMAD\.(?:U32|MOV\.U32)) (U?R\d+), (?:RZ, RZ, )?(U?R\d+)")


def _accesses(instruction: str) -> tuple[set[str], set[str], str | None]:
    """(registers read, those set, the one that is copied), also if a predicate must allow it."""
    instruction = re.sub(r"^@!?U?P\w+ ", "", instruction)
    if move := _MOVE.fullmatch(instruction):
        return set(), {move[1]}, move[2]
    name, _, operands = instruction.partition(" ")
    rest = [o.strip() for o in operands.split(",")]
    while len(rest) > 1 and re.fullmatch(r"U?P(\d|T)", rest[0]):
        del rest[0]
    sets: set[str] = set()
    if _SETTING.match(name) and (found := re.fullmatch(r"UR(\d+)", rest[0])):
        sets = {rest[0], f"UR{int(found[1]) + (_PAIR.search(name) is not None)}"}
        del rest[0]
    elif re.fullmatch(r"R\d+", rest[0]) and not name.startswith("ST"):
        sets = {rest[0]}
        del rest[0]
    reads = {n for o in rest for n in re.findall(r"\bU?R\d+\b", o)}
    # two for the descriptor of each operand, of which the first may be in registers
    if found := re.search(r"\bR\d+, (R\d+, )?gdesc\[UR(\d+)\]", operands):
        reads |= {f"UR{int(found[2]) + i}" for i in range(4)}
        reads -= {f"UR{int(found[2]) + i}" for i in range(2 if found[1] else 0)}
    return reads, sets, None


def loops_of_products(sass: dict[int, str], most: int = 1400) -> list[list[str]]:
    """The instructions between a jump back and where it leads, where products are among them, and no such loop that begins
    later.  Longer ones are waits for barriers, which stand behind all other code."""
    found = {}
    for a, text in sass.items():
        jump = _JUMP.match(text)
        if jump and jump[3] and int(jump[3], 16) < a:
            first = int(jump[3], 16)
            body = [sass[b] for b in range(first, a, 16)]
            if len(body) < most and any("HGMMA" in i for i in body):
                found[first, a] = body
    within = lambda loop: any(loop[0] < first and end < loop[1] for first, end in found)
    return [body for loop, body in found.items() if not within(loop)]


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
    unset: dict[int, set[str]] = {a: set() for a in addresses}  # before it, on some path
    unset[addresses[0]] = {f"UR{i}" for i in range(64)}
    waiting = {*addresses[:1]}
    seen = set()
    while waiting:
        a = waiting.pop()
        seen.add(a)
        _, sets, copied = accesses[a]
        after = unset[a] - sets | (sets if copied in unset[a] else set())
        for b in leads[a]:
            if b not in seen or not after <= unset[b]:
                unset[b] |= after
                waiting.add(b)
    return {a: text for a, text in sass.items() if a in seen and accesses[a][0] & unset[a]}
