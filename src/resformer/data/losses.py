"""What a build left out, in words: bad lines, files of other types, duplicates, whole domains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN_FILES = 20
_BAD = {
    "bad_lines": ("bad line", "bad lines"),
    "bad_files": ("bad file", "bad files"),
    "truncated_files": ("truncated file", "truncated files"),
    "bad_documents": ("bad document", "bad documents"),
    "embedded_files_not_utf8": ("installed source that is not UTF-8", "installed sources that are not UTF-8"),
}
_LEFT_OUT = {
    "duplicate": ("exact duplicate", "exact duplicates"),
    "empty": ("empty document", "empty documents"),
}


def losses(index: Mapping[str, Any]) -> list[str]:
    """One line for each file with something that could not be read, and one for each other kind of loss.

    `index` is that of a prepared corpus; nothing to say gives an empty list.
    """
    readers = index["readers"]
    lines = [
        f"{file}: skipped {_counted(entry, _BAD)} ({'; '.join(entry['sample'])})"
        for file, entry in list(readers["problems"].items())[:_SHOWN_FILES]
    ]
    more = readers["files_with_problems"] - len(lines)
    if more > 0:
        lines.append(f"{more:,} more files with something skipped")
    skipped = _counted(readers["totals"], _BAD)
    if skipped:
        lines.append(f"skipped in all: {skipped}")
    unknown = sum(domain["counts"].get("unknown_tokens", 0) for domain in index["domains"].values())
    if unknown:
        lines.append(f"the tokenizer has no token for some text: {unknown:,} tokens are its unknown one")
    cut = readers["totals"].get("inputs_cut_by_max_bytes", 0)
    if cut:
        lines.append(f"--max-bytes: of {cut:,} input{'s' * (cut > 1)} only the beginning was taken")
    passed = readers["passed_over_suffixes"]
    if passed:
        named = ", ".join(f"{suffix} {count:,}" for suffix, count in passed.items())
        lines.append(f"passed over {sum(passed.values()):,} files of types that are not read: {named}")
    for name, counts in readers.get("domains_left_out", {}).items():
        lines.append(f"domain '{name}' is left out, no document of it is new: {_counted(counts, _LEFT_OUT)}")
    totals = {key: sum(domain["counts"].get(key, 0) for domain in index["domains"].values()) for key in _LEFT_OUT}
    left_out = _counted(totals, _LEFT_OUT)
    if left_out:
        lines.append(f"left out of the domains: {left_out}")
    return lines


def _counted(counts: Mapping[str, Any], words: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{n:,} {words[key][n != 1]}" for key in words if (n := counts.get(key, 0)))
