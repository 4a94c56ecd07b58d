r"""Numbers in texts: the value that a text states for certain.

`read_number` reads a text that is one number, `stated_number` a text that states one. Scorer
`numeric` and the judge use them, so that both know the same forms:

    -3  1,000  1{,}000  .5  1e3  3 \times 10^5  2^{10}  1/2  \frac{1}{2}  3 1/2  50%  $18  5 km

A text with several values, a pair, a time, a date, a sum, or a word that changes what a number
means ("or", "not", "million") states none. The text is the policy's: every step is linear in it.
"""

from __future__ import annotations

import math
import re

LONGEST = 200  # characters of one number with its unit; a longer text is no number
LARGEST_POWER = 1000
EQUATION = 64  # characters before a result that show whether it was calculated
SENTENCE = 1 << 14  # characters in which a text would state its number

SYMBOLS = frozenset(
    re.findall(r"\w+", "m s g h l L A V W N J K C F km cm mm kg mg ml cl min hr hrs lb oz ft mph")
)
CHANGING = frozenset(
    re.findall(
        r"\w+",
        "or and not no never nor neither between than least most about around roughly "
        "approximately to times plus minus over by squared cubed factorial power root half "
        "quarter third hundred thousand million billion trillion dozen one two "
        "three four five six seven eight nine ten "
        "eleven twelve twenty thirty forty fifty pi if unless except without isn "
        "cannot hardly sqrt square log sin cos",
    )
)
"""Words beside a number after which its value is another one, or none."""
LABELS = frozenset(
    re.findall(
        r"\w+",
        "step steps question problem case example part line item claim number option figure "
        "equation chapter page sentence point row",
    )
)
"""Words that a number follows as a label, not as a count."""

MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))
WRITTEN = (
    ("\\!", ""), ("{,}", ","), ("\\,", "\u00a0"), ("\\;", "\u00a0"), ("\\:", "\u00a0"),
    ("\\ ", "\u00a0"), ("~", "\u00a0"), ("\u2009", "\u00a0"), ("\u202f", "\u00a0"),
    ("\\left", ""), ("\\right", ""), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"), ("\\cdot", "\\times"), ("\u00d7", "\\times"), ("\u00b7", "\\times"),
    ("\\%", "%"), ("\\$", "$"), ("^\\circ", "\u00b0"), ("^{\\circ}", "\u00b0"), ("**", "^"),
)  # fmt: skip
BRACKETS = (("\\(", "\\)"), ("\\[", "\\]"), ("$", "$"), ("**", "**"), ("*", "*"), ("`", "`"))
COMMANDS = ("\\boxed{", "\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\mbox{")

# One alternative for each kind of sign, and none that could match what another has begun with.
NUMERAL = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ \u00a0][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
)
EXPONENT = re.compile(r"[eE]([-+]?[0-9]{1,4})(?![0-9A-Za-z])")
POWER = re.compile(r"\s*\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|([-+]?[0-9]{1,4}))")
TEN = re.compile(r"\s*(?:\\times|[x*])\s*10(?![0-9.,])(?=\s*\^)")
FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])([0-9])(?![0-9]))")
OVER = re.compile(r"\s*/\s*(?=[0-9.])")
UNIT = re.compile(r"[A-Za-z]+(?:\^\{?[23]\}?|[\u00b2\u00b3])?")
GAP = re.compile(r"[\s\u00a0]*")
PIECE = re.compile(r"[0-9][0-9.,:/^{}\u00a0\\]*|[A-Za-z]+|[^0-9A-Za-z]")
CALCULATION = re.compile(r"[0-9)][^0-9A-Za-z=]*[-+*/x\u00d7\u00f7][^A-Za-z=]*\Z")


def unwrapped(text: str) -> str:
    r"""Return a text without the markup around it: `\boxed{}`, `\text{}`, `$`, `**`.

    Example:
        >>> unwrapped(r"**\boxed{\text{B}}**")
        'B'
    """
    for _ in range(8):  # deeper than any answer is wrapped
        text = before = text.strip()
        for begin, end in BRACKETS:
            inner = text[len(begin) : -len(end)]
            if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
                text = inner if begin not in inner and end not in inner else text
        command = next((c for c in COMMANDS if text.startswith(c) and text.endswith("}")), "")
        if command and _is_one_group(text[len(command) : -1]):
            text = text[len(command) : -1]
        if text == before:
            break
    return text.strip()


def read_number(text: str) -> float | None:
    r"""Return the value of a text that is one number, maybe with a unit; None for another text.

    `50%` is 50. A text of more than `LONGEST` characters is none.

    Example:
        >>> read_number(r"-\frac{3}{4}"), read_number("3 1/2 cups"), read_number("1 or 2")
        (-0.75, 3.5, None)
    """
    if len(text) > 4 * LONGEST:
        return None
    text = unwrapped(text)
    if len(text) > LONGEST:
        return None
    text = text.translate(MINUS)
    for written, meant in WRITTEN:
        text = text.replace(written, meant)
    negative, text = _without_sign(text.strip())
    try:
        value, at = _value(text)
    except (ValueError, ArithmeticError):
        return None
    if value is None or not _is_unit(text[at:]):
        return None
    return (-value if negative else value) if math.isfinite(value) else None


def stated_number(text: str) -> float | None:
    r"""Return the number that a text states: it is one, or it has one after `####`, or one alone.

    A line whose last number is the result of a calculation, `8 + 7 = 15`, states that. A text of
    more than `SENTENCE` characters states only what follows `####`, which is looked for in its end.

    Returns:
        None: The text states no number, or several.

    Example:
        >>> stated_number("2+40=42\\n#### 42\\nThat took 2 steps.")
        42.0
        >>> stated_number("So 8 + 7 = 15 stickers."), stated_number("It is 1 or 2.")
        (15.0, None)
    """
    value = read_number(text)
    if value is not None:
        return value
    for line in reversed(text[-SENTENCE:].split("\n")):
        if line.startswith("####"):
            value = read_number(line.strip("# \t\r.*"))
            if value is not None:
                return value
    return _only_number(text) if len(text) <= SENTENCE else None


def _only_number(text: str) -> float | None:
    """Return the value of the only number in a sentence, or of the last one behind an equation."""
    text = text.translate(MINUS)
    before, equals, after = text.rpartition("=")
    if equals and CALCULATION.search(before[-EQUATION:]):
        text = after
    words = [word.casefold() for word in re.findall("[A-Za-z]+", text)]
    if not CHANGING.isdisjoint(words):
        return None
    pieces = PIECE.findall(text)
    places = [at for at, piece in enumerate(pieces) if piece[0].isdigit()]
    if not places:
        return None
    # From the first sign of the first number to the end of the last: more than one number is none.
    first, last = places[0], places[-1]
    while first and pieces[first - 1] in "+-.$\\{}(":
        first -= 1
    labelled = next((p for p in reversed(pieces[:first]) if p.isalpha()), "").casefold() in LABELS
    beside = pieces[first - 1] if first else " "
    if labelled or beside.isalpha() or beside.isnumeric() or beside in "/^_:,":
        return None
    follow = pieces[last + 1 : last + 3]
    if follow and (follow[0] in "/^_:!" or follow[0].isnumeric()):
        return None
    if follow and follow[0].isalpha() and follow[0] not in SYMBOLS:
        return None
    if follow[:1] == ["-"] and len(follow) > 1 and follow[1].isalpha():
        return None
    percent = "%" if follow[:1] in (["%"], ["\\"]) else ""
    return read_number("".join(pieces[first : last + 1]).strip(" .,:") + percent)


def _without_sign(text: str) -> tuple[bool, str]:
    """Remove a sign and a currency, in either order, each once."""
    negative = signed = False
    for _ in range(3):
        if text[:1] in ("-", "+") and not signed:
            negative, signed, text = text[0] == "-", True, text[1:].lstrip()
        elif text[:1] in ("$", "\u20ac", "\u00a3", "\u00a5"):
            text = text[1:].lstrip()
    return negative, text


def _value(text: str) -> tuple[float | None, int]:
    """Return the unsigned number at the beginning of a text, and the position of its end."""
    fraction = FRACTION.match(text)
    if fraction:
        over, under = (part for part in fraction.groups() if part is not None)
        return _plain_number(over) / _plain_number(under), fraction.end()
    numeral = NUMERAL.match(text)
    if numeral is None:
        return None, 0
    value, at = _plain_number(numeral[0]), numeral.end()
    whole = numeral[0].isdigit()
    if exponent := EXPONENT.match(text, at):
        return value * 10.0 ** int(exponent[1]), exponent.end()
    if power := POWER.match(text, at):
        return _power(value, power), power.end()
    if ten := TEN.match(text, at):
        power = POWER.match(text, ten.end())
        return (None, at) if power is None else (value * _power(10.0, power), power.end())
    if over := OVER.match(text, at):
        under = NUMERAL.match(text, over.end())
        return (None, at) if under is None else (value / _plain_number(under[0]), under.end())
    gap = GAP.match(text, at)
    begin = gap.end() if gap else at
    if whole and (
        text.startswith("\\frac", begin) or (begin > at and text[begin : begin + 1].isdigit())
    ):
        part, length = _value(text[begin:])
        is_part = part is not None and 0 < part < 1 and any(sign in text[begin:] for sign in "/\\")
        return (value + part, begin + length) if is_part and part is not None else (None, at)
    return value, at


def _plain_number(text: str) -> float:
    numeral = NUMERAL.fullmatch(text.strip())
    if numeral is None:
        raise ValueError(text)
    return float(re.sub("[, \u00a0]", "", numeral[0]))


def _power(base: float, power: re.Match[str]) -> float:
    exponent = int(power[1] or power[2])
    if abs(exponent) > LARGEST_POWER:
        raise OverflowError
    return base**exponent


def _is_unit(text: str) -> bool:
    r"""Whether a number keeps its value with this text behind it: `%`, `km/h`, `dollars`, none."""
    rest = text.replace("\\text{", " ").replace("\\mathrm{", " ").replace("}", " ")
    if text.strip(" \u00a0") in ("", ".", "%", "%.", "\u00b0"):
        return True
    spaced = rest[:1] in (" ", "\u00a0", "\n")
    words = re.split(r"[\s\u00a0/]+", rest.strip("\u00b0 \u00a0.\n"))
    if len(words) > 6 or not all(UNIT.fullmatch(word) for word in words):
        return False
    names = [word.rstrip("23^{}\u00b2\u00b3") for word in words]
    return all(
        name in SYMBOLS or (spaced and len(name) > 2 and name.casefold() not in CHANGING)
        for name in names
    )


def _is_one_group(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0
