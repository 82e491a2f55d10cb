"""Mixtures with a name: the domain weights of a publication, for any corpus that has these domains."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from resformer.errors import UserError, did_you_mean

PRESETS = MappingProxyType(
    {
        # SlimPajama as the paper draws it (arXiv 2410.17897 v1, table 2): 20B tokens in all.
        "paper": MappingProxyType(
            {
                "commoncrawl": 0.50,
                "c4": 0.20,
                "github": 0.10,
                "book": 0.05,
                "arxiv": 0.05,
                "wikipedia": 0.05,
                "stackexchange": 0.05,
            }
        ),
    }
)
"""Name of a mixture -> weights (sum 1) by domain."""

# Letters and digits of a name -> the domain as `PRESETS` writes it.
_ALIASES = {"cc": "commoncrawl", "books": "book", "wiki": "wikipedia"}


def check_name(name: str) -> None:
    """UserError for a mixture that there is not."""
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(
            f"--weights: no mixture '{name}'{did_you_mean(name, PRESETS)}; expected {known} or weights such as "
            "github=0.3 wikipedia=0.7"
        )


def preset(name: str, domains: Iterable[str]) -> dict[str, float]:
    """Weights of the mixture `name` by the names that the corpus gives its `domains`.

    Names count as equal when their letters and digits are (`stack_exchange`), and by a few usual short forms (`cc`,
    `books`, `wiki`). Domains of the corpus that the mixture does not name get no weight. UserError for an unknown
    mixture, for domains that the corpus lacks, and for two names of one domain.
    """
    check_name(name)
    weights = PRESETS[name]
    names = list(domains)
    found: dict[str, str] = {}
    for own in names:
        domain = _canonical(own)
        if domain not in weights:
            continue
        if domain in found:
            raise UserError(
                f"--weights {name}: '{found[domain]}' and '{own}' both name the domain '{domain}'; give the weights by "
                "name"
            )
        found[domain] = own
    if missing := [domain for domain in weights if domain not in found]:
        raise UserError(
            f"--weights {name}: the corpus has no {', '.join(missing)}; it has {', '.join(names) or 'no domain'}; add "
            "their files to --input or give the weights by name"
        )
    return {found[domain]: weight for domain, weight in weights.items()}


def _canonical(name: str) -> str:
    plain = "".join(character for character in name.lower() if character.isalnum())
    return _ALIASES.get(plain, plain)
