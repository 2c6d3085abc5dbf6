"""The user's model file: imported, checked, and its model and dataset built."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autotune.errors import ModelFileError
from autotune.probe.host import resident_bytes
from autotune.source import plain_dict
from autotune.types import ModelFacts, ModelRef

LOADER_ARGUMENTS = (
    "batch_size",
    "shuffle",
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "drop_last",
)

CALLED_WITH: dict[str, tuple[str, ...]] = {
    "build_model": (),
    "build_dataset": (),
    "compute_loss": ("model", "batch"),
    "build_optimizer": ("model",),
    "collate": ("samples",),
    "build_loader": ("dataset",),
    "before_step": ("model", "optimizer"),
    "count_samples": ("batch",),
    "tensor_parallel_plan": ("model",),
}
"""The functions that a model file may define, and what each is called with."""

REQUIRED = ("build_model", "build_dataset")


def load(ref: ModelRef) -> Workload:
    """Import the model file and check what it defines.

    Raises:
        ModelFileError: If it cannot be used; the text is for its author.
    """
    before, rss_bytes = _affinity(), resident_bytes() or 0
    module = _imported(ref)
    holder = _holder(module, ref)
    defined = {name: getattr(holder, name, None) for name in CALLED_WITH}
    _check(defined, ref)
    return Workload(
        ref=ref,
        holder=holder,
        defined=defined,
        narrowed=_affinity() != before,
        rss_bytes=rss_bytes,
    )


def seed_everything(seed: int) -> None:
    """The same initial weights and augmentations in every probe: `random` reseeds at fork."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass
class Workload:
    """What the model file offers, with a default for everything optional."""

    ref: ModelRef
    holder: Any
    defined: Mapping[str, Callable[..., Any] | None]
    narrowed: bool = False
    model: nn.Module | None = None
    dataset: Dataset[Any] | None = None
    build_s: float = 0.0
    rss_bytes: int = 0
    """Resident memory before anything of the user's was built."""

    @property
    def fresh(self) -> bool:
        """Whether every probe builds model and dataset anew."""
        return bool(getattr(self.holder, "FRESH", False))

    def facts(self) -> ModelFacts:
        """What the driver has to know of the file."""
        build_loader = self.defined["build_loader"]
        return ModelFacts(
            current=plain_dict(getattr(self.holder, "CURRENT", None), "CURRENT", self.ref),
            keys=plain_dict(getattr(self.holder, "KEYS", None), "KEYS", self.ref) or {},
            unit=str(getattr(self.holder, "UNIT", "samples")),
            cacheable=bool(getattr(self.holder, "CACHEABLE", False)),
            fresh=self.fresh,
            own_loader=build_loader is not None,
            loader_accepts=accepted(build_loader) if build_loader else LOADER_ARGUMENTS,
            affinity_narrowed=self.narrowed,
        )

    def build(self, seed: int) -> None:
        """Build what needs no device, once; the probes inherit it.

        Raises:
            ModelFileError: If a builder raises or returns something else.
        """
        if self.fresh:
            return
        started = time.perf_counter()
        self._build(seed, device=None)
        self.build_s = time.perf_counter() - started

    def complete(self, seed: int, device: torch.device) -> float:
        """Build what is still missing, in the probe; return the seconds that it took."""
        if self.model is not None and self.dataset is not None:
            return 0.0
        started = time.perf_counter()
        self._build(seed, device)
        return time.perf_counter() - started

    def _build(self, seed: int, device: torch.device | None) -> None:
        if self.dataset is None:
            seed_everything(seed)
            dataset = self._call_builder("build_dataset", device)
            if dataset is not None and self.defined["build_loader"] is None:
                _check_dataset(dataset, self.ref)
            self.dataset = dataset
        if self.model is None:
            seed_everything(seed)
            model = self._call_builder("build_model", device)
            if model is not None and not isinstance(model, nn.Module):
                raise ModelFileError(
                    f"{self.ref.path}: build_model returned {type(model).__name__}; "
                    "it must return a torch.nn.Module"
                )
            self.model = model

    def _call_builder(self, name: str, device: torch.device | None) -> Any:
        """The builder's result; None while it waits for a device that is not known yet."""
        builder = self.defined[name]
        assert builder is not None
        wants_device = "device" in inspect.signature(builder).parameters
        if wants_device and device is None:
            return None
        try:
            built = builder(device=device) if wants_device else builder()
        except Exception as error:
            raise ModelFileError(f"{name} raised\n{shortened(error, self.ref)}") from error
        if built is None:
            raise ModelFileError(f"{self.ref.path}: {name} returned None")
        return built

    def loss_of(self, model: nn.Module) -> Callable[[Any], Tensor]:
        """The loss of one micro-batch: the user's function, Lightning's step, or the default."""
        if (compute_loss := self.defined["compute_loss"]) is not None:
            return lambda batch: _as_loss(compute_loss(model, batch))
        if is_lightning(model):
            return _training_step(model)
        return lambda batch: _default_loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer, or AdamW."""
        if (build_optimizer := self.defined["build_optimizer"]) is not None:
            return _as_optimizer(build_optimizer(model), "build_optimizer")
        if is_lightning(model):
            if not getattr(model, "automatic_optimization", True):
                raise RuntimeError("needs a Trainer: the module optimises manually")
            configure: Callable[[], Any] = model.configure_optimizers  # type: ignore[assignment]
            return _as_optimizer(configure(), "configure_optimizers")
        return torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What the user's loop does before each optimizer step."""
        if (before_step := self.defined["before_step"]) is not None:
            before_step(model, optimizer)

    def count(self, batch: Any) -> int | None:
        """Samples (or tokens) in a batch, where the user counts them."""
        if (count_samples := self.defined["count_samples"]) is not None:
            return int(count_samples(batch))
        return None

    @property
    def iterable(self) -> bool:
        """Whether the dataset has no indices."""
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    def loader(self, arguments: Mapping[str, Any], generator: torch.Generator) -> DataLoader[Any]:
        """The user's DataLoader, or the default one: shuffled, without the partial batch."""
        assert self.dataset is not None
        wanted = {"shuffle": not self.iterable, "drop_last": True, **arguments}
        if not wanted.get("num_workers"):
            wanted = {
                name: value
                for name, value in wanted.items()
                if name not in ("prefetch_factor", "persistent_workers")
            }
        build_loader = self.defined["build_loader"]
        if build_loader is None:
            collate = self.defined["collate"]
            return DataLoader(self.dataset, collate_fn=collate, generator=generator, **wanted)
        names = accepted(build_loader)
        loader = build_loader(
            self.dataset, **{name: value for name, value in wanted.items() if name in names}
        )
        if not isinstance(loader, DataLoader):
            raise TypeError(f"build_loader returned {type(loader).__name__}, not a DataLoader")
        return loader


def accepted(build_loader: Callable[..., Any]) -> tuple[str, ...]:
    """The loader arguments that the user's `build_loader` takes."""
    parameters = inspect.signature(build_loader).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return LOADER_ARGUMENTS
    named = {parameter.name for parameter in parameters}
    return tuple(name for name in LOADER_ARGUMENTS if name in named)


def _check_dataset(dataset: Any, ref: ModelRef) -> None:
    """Refuse what no DataLoader can read; the user's own loader may read anything."""
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not by_index and not isinstance(dataset, torch.utils.data.IterableDataset):
        raise ModelFileError(
            f"{ref.path}: build_dataset returned {type(dataset).__name__}; it must return a "
            "torch.utils.data.Dataset with __len__ and __getitem__, or an IterableDataset"
        )


def is_lightning(model: object) -> bool:
    """Whether the model is a LightningModule, without importing Lightning."""
    return any(
        kind.__name__ == "LightningModule" and "lightning" in kind.__module__
        for kind in type(model).__mro__
    )


def shortened(error: BaseException, ref: ModelRef) -> str:
    """The traceback, cut down to the user's own frames."""
    root = str(_import_root(Path(ref.path))[0])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(root) and "site-packages" not in frame.filename
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip() + _hint(error)


def _hint(error: BaseException) -> str:
    """What the exception itself leaves open."""
    if isinstance(error, SystemExit):
        return "\nIt ends, or reads the command line: guard that with if __name__ == '__main__':"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        return f"\nIt looked for {os.path.abspath(error.filename)}"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return "\nIts folder is no package; an __init__.py makes it one"
    return ""


def _imported(ref: ModelRef) -> ModuleType:
    path = Path(ref.path)
    root, name = _import_root(path)
    sys.path.insert(0, str(root))
    known = sys.modules.get(name)
    taken = known is not None and getattr(known, "__file__", None) != str(path)
    if taken or "." in path.stem:
        return _imported_beside(path, name, ref)
    try:
        return importlib.import_module(name)
    except BaseException as error:
        raise ModelFileError(f"{ref.path} cannot be imported\n{shortened(error, ref)}") from error


def _imported_beside(path: Path, name: str, ref: ModelRef) -> ModuleType:
    """Import a file whose name is taken by a library, or is none for a module, under another."""
    alias = f"{name}_model_file"
    spec = importlib.util.spec_from_file_location(alias, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise ModelFileError(f"{ref.path} cannot be imported\n{shortened(error, ref)}") from error
    return module


def _import_root(path: Path) -> tuple[Path, str]:
    """The folder to import from, and the dotted name: relative imports work in packages."""
    names = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def _holder(module: ModuleType, ref: ModelRef) -> Any:
    if ref.factory is None:
        return module
    factory = getattr(module, ref.factory, None)
    if factory is None:
        raise ModelFileError(f"{ref.path} has no {ref.factory}")
    if not callable(factory) or not _takes(factory, ()):
        raise ModelFileError(
            f"{ref.path}: {ref.factory} must be a class or a function without arguments"
        )
    try:
        return factory()
    except Exception as error:
        raise ModelFileError(f"{ref.factory} raised\n{shortened(error, ref)}") from error


def _check(defined: Mapping[str, Any], ref: ModelRef) -> None:
    for name in REQUIRED:
        if defined[name] is None:
            where = f"{ref.path}:{ref.factory}" if ref.factory else ref.path
            raise ModelFileError(f"{where} defines no {name}()")
    for name, function in defined.items():
        if function is None:
            continue
        shown = f"{name}({', '.join(CALLED_WITH[name])})"
        if not callable(function):
            raise ModelFileError(
                f"{ref.path}: {name} must be a function, {shown}; it is {type(function).__name__}"
            )
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ModelFileError(f"{ref.path}: {name} must be a plain function, {shown}")
        named = accepted(function) if name == "build_loader" else ()
        if not _takes(function, CALLED_WITH[name], named):
            raise ModelFileError(
                f"{ref.path}: {name}{inspect.signature(function)} cannot be called as {shown}"
            )


def _takes(
    function: Callable[..., Any], names: tuple[str, ...], named: tuple[str, ...] = ()
) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return True
    if "device" in signature.parameters and not names:
        named = ("device",)
    try:
        signature.bind(*names, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _as_loss(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        result = result.get("loss")
    if not isinstance(result, Tensor):
        raise TypeError(f"the loss must be a tensor, it is {type(result).__name__}")
    return result


def _training_step(model: Any) -> Callable[[Any], Tensor]:
    """Lightning's step, which may ask for the batch's number, too."""
    if len(inspect.signature(model.training_step).parameters) < 2:
        return lambda batch: _as_loss(model.training_step(batch))
    numbers = itertools.count()
    return lambda batch: _as_loss(model.training_step(batch, next(numbers)))


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return _pair_loss(model, *batch)
    if isinstance(batch, Mapping):
        return _as_loss(model(**batch).loss)
    raise TypeError(
        f"cannot guess the loss of a batch of type {type(batch).__name__}; "
        "define compute_loss(model, batch)"
    )


def _pair_loss(model: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """Mean squared error against real numbers, cross-entropy against classes."""
    output = model(inputs)
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target.reshape(output.shape))
    return nn.functional.cross_entropy(output, target)


def _as_optimizer(result: Any, name: str) -> torch.optim.Optimizer:
    """The one optimizer in any of the forms that Lightning allows."""
    if isinstance(result, Mapping):
        result = result["optimizer"]
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list | tuple):
        result = result[0]
    if isinstance(result, list | tuple):
        if len(result) != 1:
            raise RuntimeError(f"needs a Trainer: {name} returned {len(result)} optimizers")
        result = result[0]
    if isinstance(result, Mapping):
        result = result["optimizer"]
    if not isinstance(result, torch.optim.Optimizer):
        raise TypeError(f"{name} returned {type(result).__name__}, not an Optimizer")
    return result


def _affinity() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
