"""Three hospitals want one model. A promise per hospital can't work; a promise per patient can.

python examples/three_hospitals.py            # about ten seconds
"""

import sys

import numpy as np
import torch

from dpfedexp import Execution, Federation, Full, cdp_fedexp, fit
from dpfedexp.engine.advice import preflight
from dpfedexp.engine.plan import Plan


def records(hospitals: int, patients: int, seed: int = 0):
    """Three visits of every patient: who, eight measurements, and whether the patient came back."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=8)
    patient = np.repeat(np.arange(hospitals * patients), 3)
    measurements = rng.normal(size=(len(patient), 8)).astype(np.float32)
    returned = (measurements @ weights + rng.logistic(size=len(patient)) > 0).astype(np.int64)
    return patient, measurements, returned


def main(small: bool = False) -> float:
    patients = 300 if small else 1000
    patient, measurements, returned = records(3, patients)
    model = torch.nn.Linear(8, 2)
    dimension = sum(p.numel() for p in model.parameters())

    # One client to a hospital: whatever protects a whole hospital drowns what three of them say.
    print("A promise per hospital, ε = 8:")
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    for advice in preflight(Plan.of(algorithm, Full(), population=3, dimension=dimension, rounds=50)):
        print("  -", advice.sentence)

    # One client to a patient: the promise that a patient understands, and enough of them to keep it. Hospitals train where the
    # patients' rows lie; what leaves a hospital is the sum over its patients.
    print(f"\nA promise per patient, ε = 8, {3 * patients} patients:")
    held_out = patient % 10 == 0
    clients = Federation.from_arrays(measurements[~held_out], returned[~held_out], patient[~held_out])
    run = fit(
        model,
        clients,
        epsilon=8.0,
        rounds=5 if small else 30,
        evaluate=(measurements[held_out], returned[held_out]),
        execution=Execution(progress=not small),
    )
    accuracy = run.history[-1]["test_accuracy"]
    print(
        f"  accuracy {accuracy:.3f} on patients who took no part, ε = {run.privacy.epsilon_total:.3f} for each who did"
    )
    return accuracy


if __name__ == "__main__":
    main(small="--small" in sys.argv)
