"""A fixed short run of the campaign (`python -m campaign`), and its oracle against states that it has to tell apart."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from campaign.case import FSDP2, Case, Part, Side, case_of, possible, random_case
from campaign.nets import fully_shard
from campaign.play import Player, _compared
from campaign.shrink import shrunk


@pytest.fixture(scope="module")
def player():
    return Player()


def sides(*names):
    return [Side(wrapper=name, world=2) for name in names if fully_shard is not None or name not in FSDP2]


#: One of each: parts that are cut in all ways, wrappers into wrappers, roads in and out.
PARTS = (
    Part(size=5),
    Part("norm", 3, unit=True, extra="dict"),
    Part("empty", 3, unit=True, frozen=True),
    Part("tied", bias=True),
)
ROADS = [("ours", "ours"), ("async", "broadcast"), ("our_calls_storage", "drop_in"), ("installed", "direct"), ("full", "by_hand")]


def fixed():
    names = ("ddp", "fsdp1_flat", "fsdp1_orig", "fsdp2", "tp")
    layouts = list(zip(sides(*names), sides(*names[1:], names[0])))
    for number, ((source, target), (save, load)) in enumerate(zip(itertools.cycle(layouts), ROADS)):
        target = replace(target, steps=number % 2, after="evaluated")
        yield possible(Case(seed=number, parts=PARTS, source=source, target=target, save=save, load=load, groups=1 + number % 2))


def test_a_fixed_run_ends_well(player):
    cases = list(fixed())
    outcomes = player.play(cases)
    bad = [(case.text(), outcome) for case, outcome in zip(cases, outcomes) if outcome.how != "fine"]
    assert not bad, bad


def test_random_plain_states_come_back_or_are_refused(player):
    cases = [Case(seed=seed, plain=True, save=save, load=load) for seed in range(20) for save, load in (("ours", "storage"),)]
    cases += [Case(seed=seed, plain=True, save="storage", load="ours") for seed in range(20, 30)]
    for case, outcome in zip(cases, player.play(cases)):
        assert outcome.how in ("fine", "refused"), (case.text(), outcome.text)


def test_a_case_is_its_seed_and_its_text():
    for seed in range(200):
        case = random_case(seed)
        assert case == random_case(seed)
        assert case_of(case.text()) == case and possible(case) == case


def test_the_oracle_sees_one_bit_of_one_element():
    saved = {("param", "w"): ("torch.float32", (2,), bytes(8)), ("slot", 0, "w", "step"): ("torch.float32", (), bytes(4))}
    assert not _compared(Case(), saved, {}, dict(saved))
    changed = {**saved, ("param", "w"): ("torch.float32", (2,), bytes(7) + b"\x01")}
    assert "('param', 'w')" in _compared(Case(), saved, {}, changed)
    lost = {key: value for key, value in saved.items() if key[0] != "slot"}
    assert "is gone" in _compared(Case(), saved, {}, lost) and "is new" in _compared(Case(), lost, {}, dict(saved))


def test_a_failure_is_made_smaller():
    case = random_case(next(seed for seed in range(100) if len(random_case(seed).parts) > 3))

    def fails(candidate):
        return any(part.kind == "block" for part in candidate.parts) and candidate.source.world > 1

    case = replace(case, parts=(*case.parts, Part()), source=replace(case.source, world=4))
    small = shrunk(case, fails, 200)
    assert fails(small) and len(small.parts) == 1 and small.source.world == 2 and not small.save_options
