"""Lower bounds on ε, measured from outside: what an attacker can do, beside what is claimed that none can.

Every result says what its attack would have proven had the claim been tight. An attack without power is a failure, not a tick.
"""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

QUICK_SAMPLES, USUAL_SAMPLES = 50_000, 400_000
"""Releases of each input that the whole audit draws, with `--quick` and without."""

if TYPE_CHECKING:
    from dpfedexp.audit.bounds import LowerBound as LowerBound
    from dpfedexp.audit.bounds import Result as Result
    from dpfedexp.audit.bounds import lower_bound as lower_bound
    from dpfedexp.audit.mechanisms import Case as Case
    from dpfedexp.audit.mechanisms import audit_density as audit_density
    from dpfedexp.audit.mechanisms import audit_mechanism as audit_mechanism
    from dpfedexp.audit.mechanisms import standard_cases as standard_cases
    from dpfedexp.audit.runs import audit_training as audit_training
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
