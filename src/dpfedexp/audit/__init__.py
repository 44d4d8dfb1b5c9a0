"""Lower bounds on ε, measured from outside: what an attacker can do, beside what is claimed that none can.

Every result says what its attack would have proven had the claim been tight. An attack without power is a failure, not a tick.
"""

from dpfedexp.audit.bounds import LowerBound, lower_bound
from dpfedexp.audit.mechanisms.cases import Case, standard_cases
from dpfedexp.audit.mechanisms.density import audit_density
from dpfedexp.audit.mechanisms.release import audit_mechanism
from dpfedexp.audit.result import Result
from dpfedexp.audit.runs.canaries import audit_training

__all__ = [
    "Case",
    "LowerBound",
    "Result",
    "audit_density",
    "audit_mechanism",
    "audit_training",
    "lower_bound",
    "standard_cases",
]
