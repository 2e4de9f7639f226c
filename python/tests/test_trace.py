"""What a save and a load did when, in a file for a trace viewer; and the rank that the others waited for."""

import json
import logging

import pytest
import torch

import reshard
import reshard.torch as rt


def events(path):
    """As viewers read it: the end of the array may be missing."""
    text = path.read_text()
    assert text.startswith("[\n")
    return json.loads(text.rstrip().rstrip(",") + "]")


def test_phases_of_saves_and_loads_are_in_one_file(tmp_path):
    state, file = {"w": torch.ones(1000), "n": 1}, tmp_path / "trace.json"
    rt.save(state, tmp_path / "a", trace=file)
    rt.async_save(state, tmp_path / "b", trace=str(file)).result()
    rt.load(state, tmp_path / "b", trace=file)
    with rt.Checkpointer(tmp_path / "run", state={"s": state}, trace=file) as ckpt:
        ckpt.save(3)
        assert ckpt.restore() == 4
    rt.load(state, tmp_path / "b")
    found = events(file)
    names = [event["name"] for event in found]
    assert names.count("commit") == 3 and names.count("stage") == 2 and names.count("read") == 2
    assert names.count("load") == 2 and names.count("process_name") == 5
    # In the order in which they happened, and none longer than all.
    commits = [event for event in found if event["name"] == "commit"]
    assert commits == sorted(commits, key=lambda event: event["ts"]) and all(event["dur"] >= 0 for event in commits)


def test_a_trace_that_cannot_be_written_is_an_error_before_anything_is(tmp_path):
    for call in (rt.save, rt.async_save):
        with pytest.raises(reshard.InvalidInput, match="no trace can be written"):
            call({"w": torch.ones(3)}, tmp_path / "a", trace=tmp_path / "missing" / "trace.json")
    assert not (tmp_path / "a").exists()


def traced(rank, size, folder):
    state = {"w": rt.PerRank(torch.ones(1000)), "n": 1}
    saved = rt.save(state, f"{folder}/a", trace=f"{folder}/trace.json")
    loaded = rt.load(state, f"{folder}/a", trace=f"{folder}/trace.json")
    return saved.slowest, loaded.slowest


def test_ranks_share_a_file_and_know_the_slowest_of_them(tmp_path, ranks):
    told = ranks(3, traced, str(tmp_path))
    assert {event["pid"] for event in events(tmp_path / "trace.json")} == {0, 1, 2}
    assert len(set(told)) == 1
    saved, loaded = told[0]
    assert saved.rank in range(3) and saved.phase in ("write", "sync") and saved.seconds > 0
    assert loaded.rank in range(3) and loaded.phase == "read"


def test_a_line_in_the_log_has_bytes_seconds_phase_and_rank(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="reshard"):
        rt.save({"w": torch.ones(1000)}, tmp_path / "a")
        rt.load({"w": torch.ones(1000)}, tmp_path / "a")
    for record, verb in zip(caplog.records, ("saved", "loaded"), strict=True):
        assert record.message.startswith(f"{verb} ") and "4.0 kB" in record.message
        assert " s, most of it " in record.message and "; slowest: rank 0, " in record.message
