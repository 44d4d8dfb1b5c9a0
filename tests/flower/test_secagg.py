"""Why docs/trust.md leaves SecAgg+ out: two facts about Flower. If one of these tests fails, that page must be rewritten."""

import numpy as np
from flwr.app import ConfigRecord
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState, _unmask
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen


def test_masks_depend_on_32_bits_of_the_secret_only():
    one = bytes(range(32))
    other = one[4:8] + one[:4] + one[8:]
    assert one != other
    masks = [pseudo_rand_gen(seed, 2**32 - 1, [(50,)])[0] for seed in (one, other)]
    np.testing.assert_array_equal(*masks)


def test_a_client_reveals_both_secrets_of_a_node_that_is_called_alive_and_dropped():
    state = SecAggPlusState()
    state.threshold = 2
    state.rd_seed_share_dict = {1: b"seed of 1", 2: b"seed of 2"}
    state.sk1_share_dict = {1: b"key of 1", 2: b"key of 2"}
    asked = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: [1, 2], Key.DEAD_NODE_ID_LIST: [2]})
    assert _unmask(state, asked)[Key.SHARE_LIST] == [b"seed of 1", b"seed of 2", b"key of 2"]
