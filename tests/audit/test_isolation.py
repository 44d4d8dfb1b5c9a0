"""No secure run couples its clients: by trainer, and by module."""

import pytest

from dpfedexp.audit.isolation import audit_isolation, audit_state
from dpfedexp.trainers.select import trainer_names
from tests.sizes import sized


@pytest.mark.parametrize("trainer", sized(["loop"], trainer_names()))
def test_no_trainer_of_a_secure_run_lets_a_client_move_the_others(trainer):
    for result in audit_isolation(0, trainer, steps=2):
        assert result.outcome in ("holds", "not audited"), result


def test_no_module_of_a_secure_run_carries_data_between_clients_or_into_a_metric():
    for result in audit_state(0):
        assert result.holds, result
