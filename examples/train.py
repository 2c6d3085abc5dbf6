"""A training script with its settings on the command line, and how fast it is with them.

    python examples/train.py model=examples/jpeg.py loader.num_workers=2 train.batch_size=64

The plain PyTorch loop that most people have. It shares no code with autotune, so it can be used to
check that what autotune recommends is as fast as it says:

    python examples/train.py model=examples/jpeg.py $(python -m autotune --model examples/jpeg.py)
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TF32 = {"fp32": False, "tf32": True}


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    if config.parallel.mode != "single":
        raise ValueError(f"parallel.mode={config.parallel.mode}; this script uses one device")
    if config.host.threads is not None:
        torch.set_num_threads(config.host.threads)
    torch.manual_seed(config.seed)
    job = load(Path(config.model))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    loader = DataLoader(
        job.build_dataset(),
        batch_size=config.train.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=getattr(job, "collate", None),
        **config.loader,
    )
    samples, seconds = measure(train(job, loader, device, config.train), len(loader), config)
    result = {"samples_per_s": samples / seconds, "samples": samples, "seconds": seconds}
    print(json.dumps(result) if config.json else f"samples/s: {samples / seconds:.1f}")


def load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent.resolve()))
    return importlib.import_module(file.stem)


def train(
    job: ModuleType, loader: DataLoader[Any], device: torch.device, settings: DictConfig
) -> Iterator[int]:
    """Train for ever; after each optimizer step, yield the micro-batches used so far."""
    set_float32(settings.precision)
    dtype = AUTOCAST.get(settings.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    model = job.build_model().to(device)
    optimizer = getattr(job, "build_optimizer", default_optimizer)(model)
    compute_loss = getattr(job, "compute_loss", default_loss)
    for count, batch in enumerate(repeat(loader), start=1):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = compute_loss(model, move(batch, device)) / settings.accumulation_steps
        scaler.scale(loss).backward()
        if count % settings.accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield count


def repeat(loader: DataLoader[Any]) -> Iterator[Any]:
    if len(loader) == 0:
        raise ValueError("the dataset is smaller than one batch")
    while True:
        yield from loader


def set_float32(precision: str) -> None:
    if precision not in {"default", *TF32, *AUTOCAST}:
        raise ValueError(f"train.precision={precision} is unknown")
    if precision in TF32:
        torch.set_float32_matmul_precision("high" if TF32[precision] else "highest")
        torch.backends.cudnn.allow_tf32 = TF32[precision]


def move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: move(part, device) for name, part in batch.items()}
    return [move(part, device) for part in batch]


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss = F.mse_loss if targets.is_floating_point() else F.cross_entropy
    return loss(model(inputs), targets)


def measure(steps: Iterator[int], epoch: int, config: DictConfig) -> tuple[int, float]:
    """Samples and seconds of a window after the warm-up.

    Whole epochs, so that each brings its restart of the loader; part of one if it is longer than
    the window.
    """
    next(steps)  # pays for the start of the workers and the choice of kernels
    begin = time.perf_counter()
    first = next(count for count in steps if time.perf_counter() - begin >= config.warmup_seconds)
    synchronize()
    start = time.perf_counter()
    for count in steps:
        done, late = count - first, time.perf_counter() - start >= config.seconds
        if late and (done < epoch or done % epoch < config.train.accumulation_steps):
            synchronize()
            return done * config.train.batch_size, time.perf_counter() - start
    raise AssertionError("training never ends")


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
