"""Folders of other programs with something wrong in them: one error that names the file and says what is wrong, and nothing is
written."""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard

FOREIGN = Path(__file__).parents[2] / "crates/reshard/tests/foreign"


def pickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the pickle of a `torch.save` file; the archive stays sound."""
    with zipfile.ZipFile(path) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.infolist()]
    changed = False
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in entries:
            if entry.filename.endswith("data.pkl"):
                data, before = change(data), data
                changed = data != before
            archive.writestr(entry.filename, data)
    assert changed, path


def number_after(word: bytes, number: int) -> Callable[[bytes], bytes]:
    """Sets the small number that follows a word in a pickle."""

    def change(data: bytes) -> bytes:
        at = data.index(word) + len(word)
        at = data.index(b"K", at, at + 8)
        return data[: at + 1] + bytes([number]) + data[at + 2 :]

    return change


def renamed(word: bytes, other: bytes) -> Callable[[bytes], bytes]:
    assert len(word) == len(other)
    return lambda data: data.replace(word, other)


def gone(name: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        (folder / name).unlink()
        return Path(name).name

    return damage


def edited(name: str, change: Callable[[bytes], bytes], words: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        pickled(folder / name, change)
        return f"{Path(name).name}&{words}"

    return damage


def beside(name: str, other: str, damage: Callable[[Path], str]) -> Callable[[Path], str]:
    """Where a second step lies beside the first."""

    def both(folder: Path) -> str:
        shutil.copytree(folder / name, folder / other)
        return damage(folder)

    return both


def taken(name: str, source: str, words: str) -> Callable[[Path], str]:
    """A file of another checkpoint, or of another rank, under this name."""

    def damage(folder: Path) -> str:
        shutil.copy(FOREIGN / source, folder / name)
        return words

    return damage


def stored(name: str, old: bytes, new: bytes, words: str) -> Callable[[Path], str]:
    """Other bytes in a tensor of a `torch.save` file."""

    def damage(folder: Path) -> str:
        with zipfile.ZipFile(folder / name) as archive:
            entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        assert any(data == old for _, data in entries), [entry for entry, _ in entries]
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_STORED) as archive:
            for entry, data in entries:
                archive.writestr(entry, new if data == old else data)
        return words

    return damage


def plain(name: str, old: bytes, new: bytes, words: str) -> Callable[[Path], str]:
    """Other bytes in a file that is no archive."""

    def damage(folder: Path) -> str:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new, 1))
        return words

    return damage


def texted(name: str, old: str, new: str, words: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        return words

    return damage


ZERO = "global_step2/zero_pp_rank_1_mp_rank_00_"
UNIVERSAL = "global_step2_universal/zero/"
NANO = "3/model/layer/down/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
NANO_OPTIMIZER = "3/optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt"
MEGATRON = "iter_0000003/mp_rank_01/"

BROKEN = {
    "deepspeed, a rank is missing": ("deepspeed-0.19/zero2_w3", gone(ZERO + "optim_states.pt")),
    "deepspeed, a tensor parallel rank is missing": (
        "deepspeed-0.19/zero2_w4_tp",
        gone("global_step2/mp_rank_01_model_states.pt"),
    ),
    "deepspeed, two steps": (
        "deepspeed-0.19/zero3_w3_sub",
        edited(ZERO + "model_states.pt", number_after(b"global_steps", 9), "two saves are mixed"),
    ),
    "deepspeed, two steps of tensor parallel ranks": (
        "deepspeed-0.19/zero2_w4_tp",
        edited("global_step2/mp_rank_01_model_states.pt", number_after(b"global_steps", 9), "two saves are mixed"),
    ),
    "deepspeed, sizes": (
        "deepspeed-0.19/zero3_w3_sub",
        taken(
            ZERO + "optim_states.pt",
            "deepspeed-0.19/zero3_w4_bf16/checkpoint/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "zero_pp_rank_",
        ),
    ),
    "deepspeed, an unknown layout": (
        "deepspeed-0.19/zero1_w2",
        edited(
            "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            renamed(b"single_partition_of_fp32_groups", b"single_partition_of_fp99_groups"),
            "ds_to_universal",
        ),
    ),
    "megatron, a rank is missing": ("megatron-optimizer/torch", gone(MEGATRON + "model_optim_rng.pt")),
    "megatron, an optimizer's file is missing": ("megatron-optimizer/torch", gone(MEGATRON + "distrib_optim.pt")),
    "megatron, two iterations": (
        "megatron-optimizer/torch",
        edited(MEGATRON + "model_optim_rng.pt", number_after(b"iteration", 9), "two saves are mixed"),
    ),
    "megatron, another backend": (
        "megatron-0.16/tp2_dp2",
        texted("iter_0000007/metadata.json", "torch_dist", "zarr", "zarr&torch_dist is"),
    ),
    "verl, a rank is missing": ("ranks-torch-2.13/verl_w4", gone("optim_world_size_4_rank_2.pt")),
    "accelerate, a rank is missing": ("ranks-torch-2.13/accelerate_w2", gone("pytorch_model_fsdp_0_rank0.bin")),
    "torch_checkpointing, a rank is missing": ("torch_checkpointing-0.1/fsdp2_w2", gone("model_1.pt")),
    "verl, a file of another rank": (
        "ranks-torch-2.13/verl_w4",
        taken(
            "model_world_size_4_rank_1.pt",
            "ranks-torch-2.13/verl_w4/checkpoint/model_world_size_4_rank_0.pt",
            "hold only parts of",
        ),
    ),
    "accelerate, a file of another rank": (
        "ranks-torch-2.13/accelerate_w2",
        taken(
            "pytorch_model_fsdp_0_rank1.bin",
            "ranks-torch-2.13/accelerate_w2/checkpoint/pytorch_model_fsdp_0_rank0.bin",
            "hold only parts of",
        ),
    ),
    "torch_checkpointing, a file of another rank": (
        "torch_checkpointing-0.1/fsdp2_w2",
        taken("model_1.pt", "torch_checkpointing-0.1/fsdp2_w2/checkpoint/model_0.pt", "hold only parts of"),
    ),
    "deepspeed, a file of another rank": (
        "deepspeed-0.19/zero2_w3",
        taken(
            ZERO + "optim_states.pt",
            "deepspeed-0.19/zero2_w3/checkpoint/global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "another rank's file",
        ),
    ),
    "deepspeed, a pipeline's layers": (
        "deepspeed-0.19/zero2_w3",
        taken(
            "global_step2/layer_00-model_states.pt",
            "deepspeed-0.19/zero2_w3/checkpoint/global_step2/mp_rank_00_model_states.pt",
            "layer_00-model_states.pt&ds_to_universal",
        ),
    ),
    "universal, sizes": (
        "deepspeed-0.19/zero2_w3_universal",
        taken(
            UNIVERSAL + "up.weight/exp_avg.pt",
            "deepspeed-0.19/zero2_w3_universal/checkpoint/" + UNIVERSAL + "down.weight/exp_avg.pt",
            "up.weight/exp_avg.pt&sizes disagree",
        ),
    ),
    "universal, sizes of flat slots": (
        "deepspeed-0.19/zero3_w3_sub_universal",
        taken(
            UNIVERSAL + "up.weight/exp_avg.pt",
            "deepspeed-0.19/zero3_w3_sub_universal/checkpoint/" + UNIVERSAL + "down.weight/exp_avg.pt",
            "up.weight/exp_avg.pt&sizes disagree",
        ),
    ),
    "universal, two steps": (
        "deepspeed-0.19/zero3_w3_sub_universal",
        edited(
            "global_step2_universal/zero_pp_rank_1_mp_rank_00_model_states.pt",
            number_after(b"global_steps", 9),
            "two saves are mixed",
        ),
    ),
    "universal, an unknown layout": (
        "deepspeed-0.19/zero2_w3_universal",
        edited(UNIVERSAL + "up.weight/fp32.pt", renamed(b"param", b"porom"), 'no "param"'),
    ),
    "megatron, two iterations of the common state": (
        "megatron-0.16/tp2_dp2",
        beside(
            "iter_0000007",
            "iter_0000009",
            edited("iter_0000007/common.pt", number_after(b"iteration", 9), "two saves are mixed&iter_0000009"),
        ),
    ),
    "verl, two steps": (
        "ranks-torch-2.13/verl_w4",
        stored("optim_world_size_4_rank_2.pt", struct.pack("<f", 3.0), struct.pack("<f", 4.0), "rank_2.pt&two saves are mixed"),
    ),
    "verl, two numbers of ranks": (
        "ranks-torch-2.13/verl_w4",
        taken(
            "model_world_size_2_rank_0.pt",
            "ranks-torch-2.13/verl_w4/checkpoint/model_world_size_4_rank_0.pt",
            "two saves are mixed",
        ),
    ),
    "verl, sizes": (
        "ranks-torch-2.13/verl_w4",
        edited("model_world_size_4_rank_1.pt", lambda data: data.replace(b"K\nK\x06", b"K\x0cK\x06"), "shape [12, 6]"),
    ),
    "verl, an unknown layout": (
        "ranks-torch-2.13/verl_w4",
        edited("model_world_size_4_rank_1.pt", renamed(b"Shard", b"Shart"), "Shart"),
    ),
    "torch_checkpointing, another number of ranks": (
        "torch_checkpointing-0.1/fsdp2_w2",
        plain("metadata.pkl", b"world_size", b"world_seize", "metadata.pkl"),
    ),
    "torch_checkpointing, an unknown version": (
        "torch_checkpointing-0.1/fsdp2_w2",
        plain("metadata.pkl", b"2.0", b"9.0", "metadata.pkl&9.0"),
    ),
    "torch_checkpointing, sizes": (
        "torch_checkpointing-0.1/fsdp2_w2",
        edited("model_1.pt", lambda data: data.replace(b"K\x03K\x05", b"K\x02K\x05"), "model_1.pt"),
    ),
    "universal, a weight is missing": (
        "deepspeed-0.19/zero3_w3_sub_universal",
        gone("global_step2_universal/zero/up.weight/fp32.pt"),
    ),
    "megatron, the common state is missing": ("megatron-0.16/tp2_dp2", gone("iter_0000007/common.pt")),
    "megatron, sizes of a rank's buffers": (
        "megatron-optimizer/torch",
        edited(MEGATRON + "distrib_optim.pt", lambda data: data.replace(b"M\x05\x01", b"M\x01\x01"), "mp_rank_01"),
    ),
    "accelerate, sizes": (
        "ranks-torch-2.13/accelerate_w2",
        edited("pytorch_model_fsdp_0_rank1.bin", lambda data: data.replace(b"K\x05K\x03", b"K\x06K\x03"), "shape [6, 3]"),
    ),
    "accelerate, an unknown layout": (
        "ranks-torch-2.13/accelerate_w2",
        edited("optimizer_0_rank1.bin", renamed(b"Shard", b"Shart"), "Shart"),
    ),
    "nanotron, two steps": (
        "nanotron-0.4/zero1_dp2_tp2",
        stored(NANO_OPTIMIZER, struct.pack("<f", 3.0), struct.pack("<f", 4.0), "two saves are mixed"),
    ),
    "lightning, the metadata is missing": ("lightning-2.6/fsdp2_w2", gone(".metadata")),
    "nanotron, a rank is missing": ("nanotron-0.4/zero1_dp2_tp2", gone(NANO)),
    "nanotron, an optimizer's file is missing": ("nanotron-0.4/zero1_dp2_tp2", gone(NANO_OPTIMIZER)),
    "nanotron, sizes": (
        "nanotron-0.4/zero1_dp2_tp2",
        taken(
            NANO,
            "nanotron-0.4/zero1_dp2_tp2/checkpoint/3/model/embedding/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
            "tp-rank-1-of-2.safetensors&two saves are mixed",
        ),
    ),
    "nanotron, an unknown layout": (
        "nanotron-0.4/zero0_dp2_tp2",
        edited("3/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt", renamed(b"names", b"nomen"), "unknown form"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_said_and_nothing_is_written(what, tmp_path):
    case, damage = BROKEN[what]
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOREIGN / case / "checkpoint", folder)
    words = damage(folder)
    for attempt in (
        lambda: reshard.open(str(folder)),
        lambda: reshard.convert(str(folder), str(tmp_path / "out"), to="dcp"),
        lambda: reshard.digest(str(folder)),
    ):
        with pytest.raises(reshard.ReshardError) as raised:
            attempt()
        text = str(raised.value)
        for word in words.split("&"):
            assert word in text, text
    assert not (tmp_path / "out").exists()


def test_a_data_file_of_megatron_that_is_missing_is_named(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOREIGN / "megatron-optimizer/fully_reshardable/checkpoint", folder)
    data = sorted((folder / "iter_0000003").glob("*.distcp"))[0]
    data.unlink()
    report = reshard.verify(str(folder))
    assert not report.sound
    assert any(data.name in str(finding) for finding in report.findings)
    with pytest.raises(reshard.ReshardError, match=data.name):
        reshard.convert(str(folder), str(tmp_path / "out"), to="dcp")


def test_an_iteration_of_megatron_that_was_given_another_number_opens(tmp_path):
    """Whoever calls a folder otherwise has mixed nothing."""
    run = tmp_path / "run"
    shutil.copytree(FOREIGN / "megatron-0.16/tp2_dp2/checkpoint", run)
    (run / "iter_0000007").rename(run / "iter_0000010")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    for path in (run, run / "iter_0000010"):
        with reshard.open(str(path)) as checkpoint:
            assert checkpoint["iteration"] == 7


def test_latest_of_nanotron_names_a_step_that_is_there(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOREIGN / "nanotron-0.4/zero0_dp2_tp2/checkpoint", folder)
    (folder / "latest.txt").write_text("9")
    with pytest.raises(reshard.ReshardError, match="names the step 9"):
        reshard.open(str(folder))
    metadata = folder / "3/checkpoint_metadata.json"
    metadata.write_text(json.dumps({"version": "1.5"}))
    with pytest.raises(reshard.ReshardError, match="checkpoint_metadata.json"):
        reshard.open(str(folder / "3"))


@pytest.mark.parametrize(
    ("target", "latest", "below"),
    [
        ("deepspeed-universal", "latest_universal", "global_step2_universal"),
        ("megatron", "latest_checkpointed_iteration.txt", "iter_0000002"),
    ],
)
def test_a_conversion_that_was_stopped_is_run_again(target, latest, below, tmp_path):
    """What it left has a marker, is no checkpoint, and is gone when it was run again."""
    source, out = FOREIGN / "deepspeed-0.19/zero1_w2/checkpoint", tmp_path / "out"
    convert = lambda: reshard.convert(str(source), str(out), to=target, skip_opaque=True)
    convert()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not list(out.rglob(".reshard-unfinished"))
    (out / latest).unlink()
    (out / below / ".reshard-unfinished").touch()
    with pytest.raises(reshard.ReshardError):
        reshard.open(str(out))
    convert()
    assert len([path for path in out.rglob("*") if path.is_file()]) == len(files)
    assert not list(out.rglob(".reshard-unfinished"))
    assert reshard.verify(str(out)).sound


def test_plain_tensors_that_differ_between_ranks_are_not_put_together(tmp_path):
    """Nothing says what they are parts of: shards that a program of its own cut, without DTensors."""
    for rank in range(2):
        weight = torch.arange(6.0) + rank
        torch.save({"w": weight, "same": torch.ones(3)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(
        reshard.ReshardError, match=r'model_world_size_2_rank_1.pt.*another "model.w" than model_world_size_2_rank_0.pt'
    ):
        reshard.open(str(tmp_path))
    torch.save({"w": torch.arange(6.0), "same": torch.ones(3)}, tmp_path / "model_world_size_2_rank_1.pt")
    with reshard.open(str(tmp_path)) as checkpoint:
        assert checkpoint["model.w"].numpy().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("case", ["lightning-2.6/fsdp2_w2", "torchtitan-0.3/fsdp2_w2", "megatron-fsdp/fsdp_dtensor"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_data_file_that_is_missing_or_shorter_is_named(case, how, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOREIGN / case / "checkpoint", folder)
    data = sorted(folder.rglob("*.distcp"))[1]
    content = data.read_bytes()
    data.unlink() if how == "gone" else data.write_bytes(content[: len(content) // 2])
    report = reshard.verify(str(folder))
    assert not report.sound and any(data.name in str(finding) for finding in report.findings)
    with pytest.raises(reshard.ReshardError, match=data.name):
        reshard.convert(str(folder), str(tmp_path / "out"), to="dcp", skip_opaque=True)
    assert not (tmp_path / "out" / ".metadata").exists()
