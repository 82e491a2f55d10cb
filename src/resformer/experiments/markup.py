"""HTML and SVG that cannot be injected into, and the number formats of the report.

Text that comes from runs, corpora and configurations is escaped because everything is: only what `tag` itself returned
passes through unchanged.
"""

from __future__ import annotations

import html
import math
import re

MINUS = "\u2212"
DASH = "\u2013"
THIN_SPACE = "\u202f"  # that does not break a line between a number and its unit
_VOID = {"meta", "br", "col"}


class Markup(str):
    """A string that is already safe HTML."""


def escape(text: object) -> Markup:
    """Return `text` as safe HTML; `Markup` comes back as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=True))


def join(*parts: object) -> Markup:
    """Concatenate, escaping what is not yet safe; None is left out."""
    return Markup("".join(escape(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is written `class`, `data_x` is written `data-x`; None leaves an attribute out and True
    writes it bare.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(f" {key}" if value is True else f' {key}="{escape(value)}"')
    opening = f"<{name}{''.join(written)}>"
    return Markup(opening if name in _VOID and not children else f"{opening}{join(*children)}</{name}>")


def breakable(name: str) -> Markup:
    """A name that may be folded after an underscore, for narrow columns."""
    return Markup(escape(name).replace("_", "_<wbr>"))


def finite(value: object) -> float | None:
    """`value` as a float, or None when it is missing, not a number or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def number(value: object, digits: int = 3) -> str:
    """Fixed digits with thousands separators; an en dash for what is not known."""
    known = finite(value)
    return DASH if known is None else f"{known:,.{digits}f}".replace("-", MINUS)


def signed(value: object, digits: int = 3) -> str:
    """As `number`, with a sign; zero has none."""
    known = finite(value)
    if known is None:
        return DASH
    text = f"{abs(known):,.{digits}f}"
    if float(text.replace(",", "")) == 0.0:
        return text
    return (MINUS if known < 0 else "+") + text


def percent(share: object, digits: int = 1, *, sign: bool = False) -> str:
    """A share (0..1) as a percentage."""
    known = finite(share)
    if known is None:
        return DASH
    return f"{(signed if sign else number)(100.0 * known, digits)}{THIN_SPACE}%"


def compact(value: object) -> str:
    """A count with three significant digits: 812, 4.10k, 1.02M, 21.0B."""
    known = finite(value)
    if known is None:
        return DASH
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(known) >= 0.9995 * size:
            return f"{known / size:#.3g}".rstrip(".") + letter
    return f"{known:.0f}"


def duration(seconds: object) -> str:
    """Seconds as people say them: 48 s, 6 min 05 s, 2 h 10 min."""
    known = finite(seconds)
    if known is None:
        return DASH
    whole = round(known)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def typeset(equation: str) -> Markup:
    """An equation in the registry's plain notation, with real subscripts: `V_n <- l1_n V_1` becomes V<sub>n</sub> and
    so on.
    """
    text = html.escape(equation, quote=True).replace("&lt;-", "\u2190").replace("&gt;=", "\u2265")
    text = re.sub(r"\bl([12])_(\w+)", "\u03bb<sub>\\2,\\1</sub>", text)
    text = re.sub(r"\bl([12])\b", "\u03bb<sub>\\1</sub>", text)
    return Markup(re.sub(r"(?<=[A-Za-z)])_(\w+)", r"<sub>\1</sub>", text))
