"""Privacy audit: lower bounds on ε from attacks, compared with the claimed ε.

Every result states the power of its attack. An attack without power counts as a failure.
"""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

QUICK_SAMPLES, USUAL_SAMPLES = 50_000, 400_000
"""How many releases of each input the whole audit draws, with `--quick` and without."""

if TYPE_CHECKING:
    from dpfedexp.audit.bounds import Result as Result
    from dpfedexp.audit.bounds import lower_bound as lower_bound
    from dpfedexp.audit.mechanisms import Case as Case
    from dpfedexp.audit.mechanisms import audit_density as audit_density
    from dpfedexp.audit.mechanisms import audit_mechanism as audit_mechanism
    from dpfedexp.audit.mechanisms import standard_cases as standard_cases
    from dpfedexp.audit.runs import audit_training as audit_training
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
