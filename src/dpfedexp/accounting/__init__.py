"""Composition, calibration and the ledger. The accountant sees of a mechanism only the events that it charges."""

from dpfedexp.accounting.calibrate import affordable_rounds, calibrate_noise, calibrate_privunit, epsilon, noise, rounds
from dpfedexp.accounting.compose import Guarantee, compose
from dpfedexp.accounting.events import Event, GaussianEvent, NonPrivateEvent, PrivUnitEvent, PureEvent, Query, Sampling
from dpfedexp.accounting.gdp import joint_mu
from dpfedexp.accounting.ledger import Budget, Ledger, LedgerEntry
from dpfedexp.accounting.statement import PrivacyStatement

__all__ = [
    "Budget",
    "Event",
    "GaussianEvent",
    "Guarantee",
    "Ledger",
    "LedgerEntry",
    "NonPrivateEvent",
    "PrivUnitEvent",
    "PrivacyStatement",
    "PureEvent",
    "Query",
    "Sampling",
    "affordable_rounds",
    "calibrate_noise",
    "calibrate_privunit",
    "compose",
    "epsilon",
    "joint_mu",
    "noise",
    "rounds",
]
