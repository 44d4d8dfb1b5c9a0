"""What a run promises, as numbers: one frozen value that the statement makes from charges and the wording puts into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpfedexp.accounting.events.gaussian import NoiseBy

TUNING = "choosing the model, the clip or any other setting by trying several of them on the same clients"
METRICS = "anything measured on the clients' data without noise, such as a training loss or a test score on their data"
Source = Literal["private", "public", "test", "unknown"]
"""What a decision to stop a run early looked at: values that were released with noise, a measurement on public data, one on the
server's own test data, or something that the run does not know."""
OTHER_TUNING = "choosing anything by trying it on the same clients outside of this selection"
NOT_SECRET = "whoever saw one of the other runs, how many there were, or how long the selection took"
OTHER_USES = "other uses of the same clients' data, now or later: every further run adds to the total"


@dataclass(frozen=True)
class View:
    """The same run, accounted under `adjacency` for one observer.

    `epsilon_round` is the most expensive single round. `exact` says of the total that no smaller one holds at the same δ;
    otherwise it is an upper bound.
    """

    adjacency: str
    epsilon_round: float
    epsilon_total: float
    accountant: str
    exact: bool


@dataclass(frozen=True)
class Promise:
    """The claim of one run. `epsilon_round` is the most expensive single round; δ is for the total.

    Args:
        exact: no smaller total holds at this δ; otherwise the total is an upper bound.
        membership_advantage: bounds (true positive rate − false positive rate) of every attack that tells two
            neighbouring data sets apart, and `attack_success` its rate of right guesses when both were equally likely:
            (1 + advantage)/2.
        nominal_epsilon_round: the ε that PrivUnit was asked for, where its exact one differs.
        large_delta: δ is at least 1/clients.
        other_adjacency: the same observer under the other adjacency; None, with the reason beside it, where it has no
            meaning.
        models_only: a local or two-party run against whoever sees only the released models, when `reporting` clients at
            least report in every local round; None, with the reason beside it, where there is no such figure.
        votes: what else was released beside the updates, each with noise of its own: the names of the votes.
        chosen: what `fit` chose, in words; empty where everything was given.
        noise_by: in a two-party run, who adds noise of the stated size: "both" aggregators, or the "helper" alone.
        stopping: what decided that the run ended early (`Source`, or "hand" for an interrupt); empty where nobody decided it.
        noise_cohort: clients of a round of the larger deployment that the promise is for; None where it is for the clients of the
            run. `stand_ins` simulated clients stood for them in every round.
        selection_runs: the mean of the secret number of runs of which this one is the best; None where nothing was selected. All
            figures are then those of the whole selection.
        selection_mu: μ of the most expensive of those runs.
    """

    algorithm: str
    private: bool
    setting: str
    adjacency: str
    clients: int
    rounds: int
    epsilon_round: float
    epsilon_total: float
    delta: float
    delta_round: float
    accountant: str
    membership_advantage: float
    attack_success: float
    strength: str
    simulated: bool
    pure_epsilon_total: float | None = None
    planned_rounds: int | None = None
    planned_epsilon_total: float | None = None
    not_covered: tuple[str, ...] = (TUNING, METRICS, OTHER_USES)
    exact: bool = False
    nominal_epsilon_round: float | None = None
    large_delta: bool = False
    sampling: str = "full"
    other_adjacency: View | None = None
    no_other_adjacency: str = ""
    reporting: int | None = None
    models_only: View | None = None
    no_models_only: str = ""
    votes: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    stopping: Source | Literal["hand", ""] = ""
    noise_by: NoiseBy = ""
    noise_cohort: int | None = None
    stand_ins: float | None = None
    selection_runs: float | None = None
    selection_mu: float | None = None
