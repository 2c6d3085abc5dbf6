"""What the doctor finds, judges and says: every row of its table, and its exit codes."""

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write

from autotune import checkup, doctor, telemetry
from autotune.checkup import Limits, StartFacts, Surroundings, TorchFacts
from autotune.doctor import CHECKS, Verdict
from autotune.telemetry import Survey, SurveyedGpu

GIB = 1024**3
ROOT = Path(__file__).resolve().parent.parent

UUID = "GPU-6c1a8f5e-7c0e-4f6f-9d53-0f6f9f1d2a3b"
TOLD = {
    "version": "2.11.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "threads": 16,
    "triton": True,
    "device": {
        "type": "cuda",
        "count": 1,
        "driver": "580.159.03",
        "devices": ["cuda:0"],
        "names": ["NVIDIA H200"],
        "uuids": [UUID.removeprefix("GPU-")],
        "capabilities": ["9.0"],
        "total_memory": [139 * GIB],
    },
}


GPU = SurveyedGpu(
    index=0,
    uuid=UUID,
    name="NVIDIA H200",
    memory_bytes=139 * GIB,
    used_bytes=GIB // 2,
    mig=False,
    gpm=True,
    persistent=True,
    power_limit_w=700.0,
    others="",
    readable={"energy": "J"},
    unread=(),
    lost="",
)
SURVEY = Survey(driver="580.159.03", nvml="13.580.159", gpus=(GPU,))

WELL = Surroundings(
    python=(3, 12, 3),
    packages=dict.fromkeys(checkup.REQUIRED.values(), "1.0"),
    torch=TorchFacts(told=TOLD),
    start=StartFacts(ready_s=3.0),
    survey=SURVEY,
    device_files=("/dev/nvidia0",),
    visible_devices=None,
    compiler="/usr/bin/g++",
    headers=True,
    cpus=16,
    cpus_limit="the machine's CPUs",
    machine_cpus=16,
    load=0.3,
    memory_bytes=128 * GIB,
    available_bytes=120 * GIB,
    machine_bytes=128 * GIB,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    open_files=(65536, 65536),
    folder="/home/somebody",
    disk_free_bytes=60 * GIB,
    writable=True,
    sandbox=(),
)
"""A machine with a GPU on which nothing is amiss."""


def on_cpu(**device):
    return TorchFacts(told={**TOLD, "cuda": None, "device": {"type": "cpu", **device}})


def with_gpu(**changes):
    return replace(SURVEY, gpus=(replace(GPU, **changes),))


def device(**changes):
    return TorchFacts(told={**TOLD, "device": {**TOLD["device"], **changes}})


AMISS = {
    "python": [
        ({"python": (3, 10, 1)}, "broken", "3.11"),
        ({"python": (3, 14, 0)}, "limits", "picklable"),
    ],
    "packages": [({"packages": {"optuna": None, "rich": "15"}}, "broken", "pip install optuna")],
    "torch": [
        ({"torch": TorchFacts(trouble="ImportError: libc10")}, "broken", "ImportError: libc10"),
        ({"torch": TorchFacts()}, "broken", "a package is missing"),
        ({"torch": on_cpu()}, "limits", "CUDA build"),
    ],
    "probes": [
        ({"start": StartFacts(trouble="no process can compute")}, "broken", "ulimit -u"),
        ({"start": StartFacts(fallback="started anew")}, "limits", "--budget"),
    ],
    "torch.compile": [
        ({"compiler": None}, "limits", "not_applicable"),
        ({"headers": False}, "limits", "python3-dev"),
        ({"torch": TorchFacts(told={**TOLD, "triton": False})}, "limits", "pip install triton"),
    ],
    "devices": [
        (
            {"torch": TorchFacts(told={"version": "2.11.0"}, trouble="no answer within 1 s")},
            "broken",
            "no answer within 1 s",
        ),
        ({"torch": device(capabilities=["7.5"])}, "limits", "bf16 emulated"),
        (
            {"torch": TorchFacts(told={**TOLD, "device": {"type": "cpu"}})},
            "limits",
            "too old for CUDA 13.0",
        ),
    ],
    "visible devices": [
        ({"visible_devices": "-1", "torch": on_cpu()}, "limits", "hides every GPU"),
        ({"visible_devices": "", "torch": on_cpu()}, "limits", "unset CUDA_VISIBLE_DEVICES"),
    ],
    "NVML": [
        ({"survey": None}, "limits", "libnvidia-ml.so.1"),
        ({"survey": Survey(problem="driver/library mismatch")}, "limits", "mismatch"),
        ({"survey": with_gpu(unread=("energy", "clocks"))}, "limits", "energy, clocks"),
    ],
    "GPM": [({"survey": with_gpu(gpm=False)}, "limits", "sm_active_pct")],
    "MIG": [({"survey": with_gpu(mig=True)}, "limits", "slice")],
    "other users": [({"survey": with_gpu(others="2 others")}, "limits", "2 others")],
    "power": [({"survey": with_gpu(persistent=False)}, "limits", "nvidia-smi -pm 1")],
    "CPUs": [({"cpus": 4, "cpus_limit": "CPU affinity"}, "limits", "4 of 16")],
    "load": [({"load": 9.0}, "limits", "other processes")],
    "memory": [({"memory_bytes": 4 * GIB}, "limits", "4.0 GiB of 128.0 GiB")],
    "/dev/shm": [
        ({"shm_free_bytes": 64 * 2**20}, "limits", "--shm-size"),
        ({"shm_bytes": None, "shm_free_bytes": None}, "limits", "tmpfs"),
    ],
    "open files": [({"open_files": (256, 4096)}, "limits", "ulimit -n 768 (here up to 4096)")],
    "disk": [
        ({"disk_free_bytes": 10**6}, "limits", "--output"),
        ({"writable": False}, "limits", "not writable"),
    ],
    "sandbox": [
        ({"sandbox": ("gVisor",)}, "limits", "/proc"),
        ({"sandbox": ("WSL",)}, "limits", "NVML"),
    ],
}
"""Row: what may be amiss, how that is judged, and words that must be said about it."""


def row(found, name):
    (check,) = [check for check in doctor.judged(found) if check.name == name]
    return check


def test_a_well_machine_has_nothing_to_complain_of():
    checks = doctor.judged(WELL)
    assert [(check.name, check.value) for check in checks if check.verdict is not Verdict.OK] == []
    assert doctor.broken(checks) == ()
    assert doctor.text(checks).endswith("nothing here limits it.")
    assert UUID in doctor.text(checks, 120)


def test_a_machine_without_a_gpu_is_well_too():
    found = replace(WELL, torch=on_cpu(), survey=None, device_files=())
    assert {check.verdict for check in doctor.judged(found)} == {Verdict.OK}


def test_every_row_knows_something_amiss():
    assert [row.name for row in CHECKS] == list(AMISS)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in AMISS for number in range(len(AMISS[name]))]
)
def test_what_is_amiss_is_judged_and_told(name, number):
    changes, verdict, words = AMISS[name][number]
    check = row(replace(WELL, **changes), name)
    assert check.verdict == verdict
    assert check.advice
    assert words in f"{check.value} {check.advice}"
    reasons = doctor.broken(doctor.judged(replace(WELL, **changes)))
    assert any(reason.startswith(f"{name}: ") for reason in reasons) == (verdict == "broken")


def test_unreadable_facts_break_no_row():
    names = "survey compiler cpus load memory_bytes available_bytes machine_bytes"
    names += " shm_bytes shm_free_bytes open_files disk_free_bytes"
    unread = dict.fromkeys(names.split())
    found = replace(WELL, torch=device(names=[None], uuids=[None], capabilities=[None]), **unread)
    assert not [check for check in doctor.judged(found) if "could not be read" in check.value]
    bare = with_gpu(memory_bytes=None, used_bytes=None, persistent=None, power_limit_w=None)
    told = {check.name: check for check in doctor.judged(replace(WELL, survey=bare))}
    assert told["power"].value == "limit not readable"
    assert told["power"].value == "limit not readable"


def test_a_row_that_fails_hides_no_other():
    check = row(replace(WELL, python="none"), "python")
    assert (check.verdict, "TypeError" in check.value) == (Verdict.LIMITS, True)
    assert len(doctor.judged(replace(WELL, python="none"))) == len(CHECKS)


def test_several_gpus_are_told_apart():
    survey = replace(SURVEY, gpus=(GPU, replace(GPU, others="somebody")))
    assert row(replace(WELL, survey=survey), "other users").value == "GPU 1: somebody"
    two = device(count=2, names=["A", "B"], capabilities=["9.0", "7.5"])
    lines = row(replace(WELL, torch=two), "devices").value.splitlines()
    assert [line.rpartition(", ")[2] for line in lines] == ["bf16 native", "bf16 emulated"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_fits_the_terminal_and_keeps_options_whole(width):
    for changes in (changes for cases in AMISS.values() for changes, _, _ in cases):
        text = doctor.text(doctor.judged(replace(WELL, **changes)), width)
        assert max(map(len, text.splitlines())) <= width
        assert "set_sharing_strategy('file_system')" in text or "open_files" not in changes
        assert not re.search(r" -{1,2}\n|-\n", text)
        assert all(f"\n{check.group}\n" in f"\n{text}\n" for check in CHECKS)


def test_the_required_packages_are_those_that_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[>=<]", name)[0] for name in project["dependencies"]}
    assert names == set(checkup.REQUIRED.values())


# --- how things are looked at ---------------------------------------------------------------------


def test_a_compiler_is_what_torch_would_call(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkup.compiler() is None
    tool = write(tmp_path / "clang++", "#!/bin/sh\n")
    tool.chmod(0o755)
    assert checkup.compiler() == str(tool)
    monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    assert checkup.compiler() is None


def test_the_files_that_may_be_opened_are_read(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, resource.RLIM_INFINITY))
    assert checkup._open_files() == (64, -1)


def fake_torch(folder, monkeypatch, text):
    write(folder / "torch.py", text)
    monkeypatch.syspath_prepend(str(folder))


def test_a_torch_that_never_answers_is_waited_for_no_longer_than_said(tmp_path, monkeypatch):
    fake_torch(tmp_path, monkeypatch, "import time; time.sleep(600)")
    facts = checkup.torch_facts(0.3)
    assert (facts.imported, facts.trouble) == (False, "no answer within 0.3 s")


def test_a_torch_that_dies_is_told_of(tmp_path, monkeypatch):
    fake_torch(tmp_path, monkeypatch, "import os; os.abort()")
    assert "SIGABRT" in checkup.torch_facts(60.0).trouble


def test_a_missing_package_needs_no_other_to_be_told(monkeypatch):
    known = checkup.importlib.util.find_spec
    monkeypatch.setattr(
        checkup.importlib.util,
        "find_spec",
        lambda name: None if name in ("psutil", "rich") else known(name),
    )
    checks = doctor.examine(Limits(torch_s=0.1, fork_s=0.1))
    assert row_of(checks, "packages").value == "missing: psutil, rich"
    assert row_of(checks, "torch").verdict is Verdict.BROKEN


def test_nvml_is_asked_where_its_packages_are_there(monkeypatch):
    monkeypatch.setattr(telemetry, "survey", lambda: SURVEY)
    assert checkup._survey() is SURVEY
    monkeypatch.setitem(sys.modules, "autotune.telemetry", None)  # as if psutil were missing
    assert checkup._survey() is None


def row_of(checks, name):
    return next(check for check in checks if check.name == name)


def test_no_process_can_start_where_there_is_no_temporary_folder(monkeypatch):
    def none(**_):
        raise FileNotFoundError("no usable temporary folder")

    monkeypatch.setattr(checkup.tempfile, "TemporaryDirectory", none)
    assert checkup.torch_facts(1.0).trouble == "no usable temporary folder"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_tells_of_this_machine(cli):
    ran = cli("doctor", env={"COLUMNS": "80"})
    assert (ran.code, ran.err) == (0, "")
    assert "\n\nThis machine can tune" in ran.out
    for check in CHECKS:
        assert re.search(rf"^  (ok|limits) +{re.escape(check.name)} ", ran.out, re.MULTILINE)
    assert "forked; the first is ready" in ran.out
    assert not list(cli.folder.iterdir())


def test_the_command_fails_where_torch_cannot_be_imported(cli, tmp_path):
    fake = write(tmp_path / "fake" / "torch.py", "raise ImportError('libtorch is gone')").parent
    ran = cli("doctor", env={"PYTHONPATH": str(fake)})
    assert ran.code == 1
    assert ran.err.startswith("autotune: nothing can be tuned here: torch: ")
    assert "libtorch is gone" in ran.err
    assert "Nothing can be tuned here" in ran.out
    assert "not tried" in ran.out


def test_the_command_takes_no_arguments(cli):
    ran = cli("doctor", "--gpu")
    assert (ran.code, ran.out) == (2, "")
    assert "--gpu" in ran.err
