"""Escaping and number formats."""

from __future__ import annotations

import pytest

from resformer.experiments.markup import Markup, compact, duration, join, number, percent, signed, tag, typeset


def test_everything_but_markup_is_escaped() -> None:
    inner = tag("b", "a < b & 'c'")
    assert (
        tag("p", inner, "<i>", title='"x"')
        == '<p title="&quot;x&quot;"><b>a &lt; b &amp; &#x27;c&#x27;</b>&lt;i&gt;</p>'
    )
    assert join(None, 3, Markup("<br>")) == "3<br>"


def test_attributes_are_spelt_for_html() -> None:
    assert (
        tag("td", class_="x", data_label="y", hidden=True, style=None, open=False)
        == '<td class="x" data-label="y" hidden></td>'
    )
    assert tag("meta", name="a") == '<meta name="a">'


def test_equations_get_subscripts_and_stay_escaped() -> None:
    text = typeset("V_n <- l1_n V_1 + l2_n V_n, n >= 2 <script>")
    assert "V<sub>n</sub> \u2190 \u03bb<sub>n,1</sub> V<sub>1</sub>" in text
    assert "\u2265 2" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (number(1234.5678, 2), "1,234.57"),
        (number(-1), "\u22121.000"),
        (number(float("nan")), "\u2013"),
        (number(None), "\u2013"),
        (signed(0.1234), "+0.123"),
        (signed(-0.0001), "0.000"),
        (signed(-0.5, 1), "\u22120.5"),
        (percent(0.5625), "56.2\u202f%"),
        (percent(-0.05, 0, sign=True), "\u22125\u202f%"),
        (compact(812), "812"),
        (compact(999_900), "1.00M"),
        (compact(2_663_552), "2.66M"),
        (compact(20.97e9), "21.0B"),
        (duration(48.4), "48 s"),
        (duration(365), "6 min 05 s"),
        (duration(7800), "2 h 10 min"),
        (duration(None), "\u2013"),
    ],
)
def test_numbers(text: str, wanted: str) -> None:
    assert text == wanted
