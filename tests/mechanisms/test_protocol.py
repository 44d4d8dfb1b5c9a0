"""One two-party round over real files: the sums, and every way of asking the helper for more that is refused."""

import itertools
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dpfedexp.accounting import Ledger
from dpfedexp.core.noise import Streams, from_words
from dpfedexp.errors import InputError
from dpfedexp.flower.guard import HelperFile, Refused
from dpfedexp.mechanisms import aggregation
from dpfedexp.mechanisms.aggregation import PrivateKey, RoundBinding, new_key, seal, set_digest, unmask_sum
from dpfedexp.mechanisms.serialization import encode

from .parties import CLIENTS, MECHANISM, D, charges, helper_file, public_key, round_of, rows, seeds, sent


class Silence:
    def normal(self, clients, width, device, dtype):
        return torch.zeros(len(clients), width, device=device, dtype=dtype)


@pytest.fixture
def file(tmp_path) -> HelperFile:
    return helper_file(tmp_path)


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))


def sealed(file, round_):
    return seeds(sent(round_, public_key(file), rows()))


def ask(file, **change):
    round_ = round_of(**change)
    return file.helper().answer((round_, sealed(file, round_)))


def test_a_round_gives_the_sum_of_the_rows_and_the_helpers_noise_bit_for_bit(file):
    round_, units = round_of(), rows()
    messages = sent(round_, public_key(file), units)
    words = [message.words for message in messages.values()]
    (answer,) = file.helper(Silence).answer((round_, seeds(messages)))
    assert torch.equal(from_words(unmask_sum(words, answer.words)), units.sum(0))
    assert answer.digest == set_digest(round_, seeds(messages))
    repeated = sent(round_, public_key(file), units)
    for node, message in messages.items():
        assert message.sealed != repeated[node].sealed
        assert not np.array_equal(message.words, repeated[node].words)

    # Dropouts need no recovery: the helper answers for the clients that are there.
    again = round_of(number=2)
    messages = sent(again, public_key(file), units)
    there = list(messages)[2:7]
    streams = iter([Streams(1).at("vector", 1), Streams(1).at("scalars", 1)])
    (noisy,) = file.helper(lambda: next(streams)).answer((again, seeds(messages, there)))
    drawn = MECHANISM.noise_units(round_.columns, "helper", Streams(1).at("vector", 1), Streams(1).at("scalars", 1))
    words = [messages[node].words for node in there]
    assert torch.equal(from_words(unmask_sum(words, noisy.words)), units[2:7].sum(0) + drawn)
    assert charges(file) == 2


def groups_of(file, sizes=(4, 4)):
    """A round for two groups of clients; also their messages and rows."""
    rounds, units = (round_of(), round_of()), rows()
    messages = [sent(one, public_key(file), units[4 * n :], first=100 + 4 * n) for n, one in enumerate(rounds)]
    chosen = [seeds(one)[:size] for one, size in zip(messages, sizes, strict=True)]
    return list(zip(rounds, chosen, strict=True)), messages, units


def test_the_groups_of_a_tournament_get_their_sums_for_one_charge(file):
    groups, messages, units = groups_of(file)
    for place, answer in enumerate(file.helper(Silence).answer(*groups)):
        words = [messages[place][node].words for node, _ in groups[place][1]]
        assert torch.equal(from_words(unmask_sum(words, answer.words)), units[4 * place : 4 * place + 4].sum(0))
        assert answer.digest == set_digest(*groups[place])
    assert charges(file) == 1
    for again in groups:
        with pytest.raises(InputError, match="every round is answered once"):
            file.helper().answer(again)


VOTE = replace(MECHANISM, clip=0.5, numerator=None, question="local rate")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"number": 2}, "for the updates of one round"),
        ({}, {"run": "another"}, "for the updates of one round"),
        ({}, {"mechanism": replace(MECHANISM, noise_multiplier=3.0)}, "for the updates of one round"),
        ({"number": 0, "mechanism": VOTE}, {"number": 0, "mechanism": VOTE}, "for the updates of one round"),
        ({"nonce": "ab" * 16}, {"nonce": "ab" * 16}, "nonces must not repeat"),
        ({}, {"mechanism": replace(MECHANISM, clip=2.0)}, "above this helper's max_clip"),
    ],
    ids=["rounds", "runs", "costs", "votes", "nonces", "clip"],
)
def test_groups_that_are_not_those_of_one_round_are_refused(first, second, words, file):
    pair = [(round_of(**given), given.get("mechanism", MECHANISM)) for given in (first, second)]
    with pytest.raises(Refused, match=words):
        file.admit(*pair)
    assert charges(file) == 0


def test_a_vote_on_the_rate_has_one_answer_for_each_candidate_and_no_candidate_more(file):
    def admit(*candidates, question=VOTE, number=0):
        file.admit(*((replace(round_of(number=number, mechanism=question), candidate=n), question) for n in candidates))

    for candidate in (0, 1, 7):
        admit(candidate)
    with pytest.raises(Refused, match="every round is answered once"):
        admit(1)
    with pytest.raises(Refused, match="candidate 8 does not exist; a run has at most 8"):
        admit(8)
    with pytest.raises(Refused, match="candidate 9 does not exist"):
        admit(0, 9, question=MECHANISM, number=1)
    assert charges(file) == 3


def test_a_client_is_in_one_group(file):
    """The attack: the sums of two groups that share all clients but one are the row of that client."""
    first, second = round_of(), round_of()
    with pytest.raises(InputError, match="a client is in the sets twice"):
        file.helper().answer((first, sealed(file, first)), (second, sealed(file, second)[:-1]))
    few, *_ = groups_of(file, sizes=(4, 3))
    with pytest.raises(InputError, match="no fewer than 4"):
        file.helper().answer(*few)
    assert charges(file) == 0


class HostileServer:
    """Asks a helper for a round and its clients as `change` says, or asks twice."""

    def __init__(self, file):
        self.helper, self.key, self.round = file.helper(), public_key(file), round_of()
        self.seeds = partial(sealed, file)
        self.everybody = self.seeds(self.round)

    def ask(self, some=None, **change):
        return self.helper.answer((replace(self.round, **change), self.everybody if some is None else some))

    def then(self, **change):
        """An honest round first, and then one whose clients sealed their seeds for it as well."""
        self.ask()
        self.helper.answer((replace(self.round, **change), self.seeds(replace(self.round, **change))))

    def sealed(self, node, key):
        """A seed of the server's own."""
        return seal(bytes(32), key, self.round.info(node))

    def first(self, sealed):
        """The first client's seed is another one."""
        (node, good), *rest = self.everybody
        self.ask([(node, sealed(node, good)), *rest])


def swapped(everybody):
    (a, first), (b, second), *rest = everybody
    return [(a, second), (b, first), *rest]


OTHER_KEY = PrivateKey(bytes(range(32))).public
CENTRAL = encode(MECHANISM).replace('"kind":"two-party"', '"kind":"central-gaussian"').replace(',"strict":false', "")
HOSTILE = {
    "too few": (lambda s: s.ask(s.everybody[:3]), "no fewer than 4", 0),
    "one client twice": (lambda s: s.ask([*s.everybody[:3], s.everybody[0]]), "twice", 0),
    "repeated round": (lambda s: s.then(nonce="ab" * 16), "every round is answered once", 1),
    "two sets": (lambda s: (s.ask(), s.ask(s.everybody[:-1])), "every round is answered once", 1),
    "old nonce": (lambda s: s.then(number=2), "nonce was answered before", 1),
    "old round": (lambda s: (s.helper.answer((r := round_of(number=5), s.seeds(r))), s.ask()), "rounds go up", 1),
    "swapped clip": (lambda s: s.ask(clip=0.75, mechanism=encode(replace(MECHANISM, clip=0.75))), "don't open", 0),
    "clip beside the mechanism": (lambda s: s.ask(clip=0.75), "the mechanism says 0.5", 0),
    "less noise": (lambda s: s.ask(mechanism=encode(replace(MECHANISM, noise_multiplier=1.9))), "don't open", 0),
    "another run": (lambda s: s.ask(run="another"), "don't open", 0),
    "another dimension": (lambda s: s.ask(columns=s.round.columns + 1), "don't open", 0),
    "swapped clients": (lambda s: s.ask(swapped(s.everybody)), "seeds of 2 clients don't open", 0),
    "forged ciphertext": (lambda s: s.first(lambda _, good: good[:-1] + bytes([good[-1] ^ 1])), "of 1 clients", 0),
    "another helper's seed": (lambda s: s.first(lambda node, _: s.sealed(node, OTHER_KEY)), "of 1 clients", 0),
    "one seed for all": (lambda s: s.ask([(node, s.sealed(node, s.key)) for node, _ in s.everybody]), "same seed", 0),
    "a central mechanism": (lambda s: s.ask(mechanism=CENTRAL), "has no helper", 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_helper_refuses_a_server_that_asks_for_more(name, file):
    asks, words, paid = HOSTILE[name]
    with pytest.raises(InputError, match=words):
        asks(HostileServer(file))
    assert charges(file) == paid


def test_a_bad_seed_is_named_and_the_others_may_be_asked_for_again(file):
    round_ = round_of()
    (node, _), *rest = sealed(file, round_)
    with pytest.raises(aggregation.BadSeeds) as refused:
        file.helper().answer((round_, [(node, bytes(80)), *rest]))
    assert refused.value.nodes == [node]
    file.helper().answer((round_, rest))
    assert charges(file) == 1


def test_dropped_seeds_are_noticed_when_the_masks_are_taken_off(file):
    round_ = round_of()
    messages = sent(round_, public_key(file), rows())
    (answer,) = file.helper().answer((round_, seeds(messages)[1:]))
    assert answer.digest != set_digest(round_, seeds(messages))
    total = unmask_sum([message.words for message in messages.values()], answer.words)
    with pytest.raises(InputError, match="a mask was not removed"):
        MECHANISM.decode(from_words(total), CLIENTS, CLIENTS)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_clip": 0.4}, "max_clip"),
        ({"per_round": 0.1}, "max_epsilon_per_round"),
        ({"total": 0.1}, "max_epsilon_total"),
    ],
)
def test_each_limit_of_the_helpers_file_is_kept(tmp_path, limits, words):
    file = helper_file(tmp_path, **limits)
    with pytest.raises(InputError, match=words):
        ask(file)
    assert charges(file) == 0
    assert file.ledger.exists() is ("total" in limits)


def test_a_row_that_would_fill_the_helpers_memory_is_refused_before_it_is_charged(file):
    """The attack: HPKE's base mode lets a server seal seeds of its own, for rows of 32 GB."""
    round_ = round_of(columns=2**32)
    own = [(node, seal(secrets.token_bytes(32), public_key(file), round_.info(node))) for node in range(CLIENTS)]
    with pytest.raises(InputError, match="above this helper's max_columns of 100000000"):
        file.helper().answer((round_, own))
    assert charges(file) == 0
    replace(file, max_columns=MECHANISM.columns(D)).admit((round_of(), MECHANISM))


def test_of_two_sets_that_are_asked_for_at_the_same_moment_one_is_answered(file):
    round_ = round_of()
    everybody = sealed(file, round_)
    with ThreadPoolExecutor(4) as pool:
        sets = (everybody, everybody[1:], everybody[2:], everybody[:-1])
        asked = [pool.submit(file.helper().answer, (round_, some)) for some in sets]
    assert [isinstance(one.exception(), InputError) for one in asked].count(True) == 3
    assert charges(file) == 1


def test_two_servers_share_the_helpers_budget_and_its_nonces(tmp_path):
    """Each knows nothing of the other; a nonce that one of them used is refused to the other."""
    file = helper_file(tmp_path, total=15.0)
    answered = [ask(file, run="theirs", nonce="ab" * 16)]
    with pytest.raises(InputError, match="the nonce was answered before"):
        ask(file, run="ours", nonce="ab" * 16)
    more = itertools.product(range(2, 50), ("theirs", "ours"))
    with pytest.raises(InputError, match="max_epsilon_total"):
        answered.extend(ask(file, number=number, run=run) for number, run in more)
    with Ledger.open(file.ledger, read_only=True) as ledger:
        assert len(ledger) == len(answered) > 2, "both were charged"
        assert ledger.guarantee(1e-5).epsilon <= 15.0


def test_an_old_back_up_of_the_helpers_ledger_is_refused(tmp_path, file):
    ask(file, number=1)
    back_up = {path: path.read_bytes() for path in tmp_path.glob("helper*") if path.is_file()}
    ask(file, number=2)
    for path, content in back_up.items():
        path.write_bytes(content)
    with pytest.raises(Refused, match="was put back together with its anchor") as refused:
        ask(file, number=3)
    assert str(tmp_path) not in refused.value.shown


def test_no_two_bindings_have_the_same_bytes():
    fields = itertools.product(
        (MECHANISM, replace(MECHANISM, clip=0.25)), (1, 2), ("a", "a\0", "b"), ("00" * 16, "01" * 16), (6, 7)
    )
    rounds = [round_of(*one) for one in fields]
    rounds += [replace(round_, candidate=100) for round_ in rounds]
    infos = {round_.info(node) for round_ in rounds for node in (1, 2)}
    assert len(infos) == 2 * len(rounds)
    sets = ([(1, b"a"), (2, b"b")], [(1, b"b"), (2, b"a")], [(1, b"a"), (3, b"b")], [(1, b"a")])
    assert len({set_digest(rounds[0], chosen) for chosen in sets}) == len(sets)


@pytest.mark.parametrize(
    "wrong", [{"nonce": "g" * 32}, {"nonce": "0" * 31}, {"number": -1}, {"columns": 0}, {"columns": 2**40}]
)
def test_a_round_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError):
        RoundBinding(**{"run": "r", "number": 1, "nonce": "0" * 32, "columns": 3, "clip": 1, "mechanism": "{}"} | wrong)


def test_a_key_is_for_its_owner_alone_and_never_replaced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    public = new_key(tmp_path / "key")
    assert synced == [2 * 32 + 1], "all of it is on disk before sites pin the public key"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert PrivateKey.load(tmp_path / "key").public == public
    with pytest.raises(InputError, match="not overwritten"):
        new_key(tmp_path / "key")
    with pytest.raises(InputError, match="helper_key"):
        seal(bytes(32), "00" * 32, b"a public key of small order")
