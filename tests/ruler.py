"""An independent ruler: how fast a config really trains, by a plain loop in a fresh process.

It shares no code with the tuner, so that a fault of the tuner's probes cannot hide in it. As a
program it measures once and prints samples/s; `compare` runs it for several configs in turn, order
reversed each round, so that what slows the machine down hits all of them alike.

    python ruler.py FILE[:FACTORY] '{"train.batch_size": 32}' SECONDS
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from statistics import fmean

WARM_S = 1.0
LONGEST = 2
"""Times the asked seconds that whole epochs may take, before one is broken off."""


# --- one measurement, in a process of its own ---------------------------------------------------


def measured(reference: str, config: dict, seconds: float) -> float:
    """Samples/s over whole epochs, what each one's start costs included."""
    import torch

    path, _, factory = reference.partition(":")
    job = loaded(Path(path).resolve())
    if factory:
        job = getattr(job, factory)()
    if threads := config.get("host.threads"):
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    dataset = job.build_dataset()
    loader = torch.utils.data.DataLoader(dataset, **loader_arguments(job, dataset, config))
    return samples_per_s(loader, trainer(job, config), seconds)


def loaded(path: Path):
    """The model file as a module, its siblings importable."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def loader_arguments(job, dataset, config: dict) -> dict:
    """What a DataLoader is built with, in training code as people write it."""
    workers = config.get("loader.num_workers", 0)
    arguments = {
        "batch_size": config.get("train.batch_size", 32),
        "num_workers": workers,
        "drop_last": True,
        "shuffle": hasattr(dataset, "__len__"),
        "collate_fn": getattr(job, "collate", None),
    }
    if workers:
        arguments["prefetch_factor"] = config.get("loader.prefetch_factor", 2)
        arguments["persistent_workers"] = config.get("loader.persistent_workers", False)
    return arguments


def trainer(job, config: dict):
    """A function that trains on one micro-batch."""
    import torch

    model = job.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    compute_loss = getattr(job, "compute_loss", cross_entropy)
    accumulation = config.get("train.accumulation_steps", 1)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.get("train.precision"))
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
    seen = 0

    def train(batch) -> None:
        nonlocal seen
        with torch.autocast("cpu", dtype=half, enabled=half is not None):
            loss = compute_loss(model, batch)
        scaler.scale(loss / accumulation).backward()
        seen += 1
        if seen % accumulation == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return train


def cross_entropy(model, batch):
    """What the tuner assumes of a file without a loss of its own, for classes."""
    import torch

    inputs, target = batch
    return torch.nn.functional.cross_entropy(model(inputs), target)


def samples_per_s(loader, train, seconds: float) -> float:
    """From one place in an epoch to the same place in a later one, once the workers are warm.

    So that whole epochs count, each with its start. A long one is broken off: its start matters
    little then.
    """
    warm_s = time.perf_counter() + WARM_S
    samples, started_s, start = 0, math.inf, -1
    while True:
        for place, batch in enumerate(loader):
            train(batch)
            now_s = time.perf_counter()
            samples += loader.batch_size
            if start < 0 and now_s > warm_s:
                samples, started_s, start = 0, now_s, place
            elif now_s - started_s >= (seconds if place == start else LONGEST * seconds):
                return samples / (now_s - started_s)


# --- several configs, side by side ----------------------------------------------------------------


def measure(reference: str, config: dict, seconds: float) -> float:
    """Samples/s of one config, measured in a fresh process."""
    command = [sys.executable, __file__, reference, json.dumps(config), str(seconds)]
    limit_s = 60 + 10 * LONGEST * seconds
    # Libraries read this one while they are loaded.
    policy = config.get("host.omp_wait_policy", "default")
    environment = {**os.environ, **({} if policy == "default" else {"OMP_WAIT_POLICY": policy})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"the ruler failed on {config}:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def compare(reference: str, configs: dict[str, dict], *, seconds: float, rounds: int) -> dict:
    """Each config's rates by name, measured in turn, the order reversed each round."""
    rates = {name: [] for name in configs}
    for turn in range(rounds):
        for name in list(configs)[:: -1 if turn % 2 else 1]:
            rates[name].append(measure(reference, configs[name], seconds))
    return rates


def ratio(rates: dict, name: str, over: str) -> float:
    """How many times faster one is than the other: the geometric mean over the rounds."""
    logs = [math.log(a / b) for a, b in zip(rates[name], rates[over], strict=True)]
    return math.exp(fmean(logs))


def noise(rates: dict) -> float:
    """How far two rounds of the same config lie apart, at most, relative."""
    pairs = [pair for known in rates.values() for pair in combinations(known, 2)]
    return max((abs(a / b - 1) for a, b in pairs), default=0.0)


if __name__ == "__main__":
    _, model, words, length = sys.argv
    sys.stdout.write(f"{measured(model, json.loads(words), float(length))}\n")
