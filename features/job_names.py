"""Families of job names: names that differ in a number, a date, a version, a hash or trailing parameters are one.

Here belongs what makes two names alike, as an expression over a column of names, so that every row is told by itself:
no list of known names is kept, and the same name has the same family in training, backtest and live. Not what is made
of families.
"""

from __future__ import annotations

import polars as pl

# A number with all that may stand between its digits: 12, 0.001, 1e-4, 2024-05-17, 12:30:05, 1.2.3, 3_1.
_NUMBER = r"[0-9]+(?:[-_.:,/]?[0-9]+)*(?:e[-+]?[0-9]+)?"
_UUID = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
_HASH = r"(^|[^0-9a-z])[0-9a-f]{7,}([^0-9a-z]|$)"
# Parts at the end that hold a number: -v3, _lr#, .seed=#, (#), -#gpu.
_PARAMETERS = r"(?:[^\p{L}\p{N}#]+[a-z]{0,8}[=:]?#[a-z]{0,4}[\])}]*)+$"


def families(names: pl.Series) -> pl.Series:
    """Family of each name (`family_of`); each is worked out once, for most names come again."""
    known = names.drop_nulls().unique()
    told = pl.select(family_of(pl.lit(known))).to_series()
    return names.replace_strict(known, told, default=None, return_dtype=pl.String)


def family_of(name: pl.Expr) -> pl.Expr:
    """Family of each name, in lower case, `#` for what varies; a name in which nothing else stands is its own family.

    `train-v3_lr0.1` and `Train_seed=7` are of `train`, `exp12_bert` of `exp#_bert`, and `4711` of `4711`.
    """
    lower = name.str.to_lowercase()
    marked = lower.str.replace_all(_UUID, "#")
    for _ in range(2):  # neighbours share the character between them
        marked = marked.str.replace_all(_HASH, "${1}#${2}")
    marked = marked.str.replace_all(_NUMBER, "#")
    short = marked.str.replace(_PARAMETERS, "")
    kept = pl.when(short.str.contains("\\p{L}")).then(short).otherwise(marked)
    return pl.when(kept.str.contains("\\p{L}")).then(kept).otherwise(lower)
