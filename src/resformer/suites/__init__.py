"""The suites that come with the package: one file each with a `SUITE` object, imported by nothing and found by name."""
