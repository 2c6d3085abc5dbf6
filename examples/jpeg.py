"""Photographs: JPEG files, decoded and resized one by one, into a small CNN.

The classic starved job: a sample costs several times more CPU to decode than to train on, so the
loader's workers decide the speed. The files are crops of scikit-learn's two sample photographs,
written once to `examples/.cache/`; the task is to tell from which photograph and which quarter of
it a crop was taken.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import Dataset

CURRENT = {"loader.num_workers": 0, "train.batch_size": 32}

CROPS = Path(__file__).parent / ".cache" / "jpeg-crops"
CROPS_PER_PHOTOGRAPH = 512
CROP_PIXELS = 320
INPUT_PIXELS = 64
CLASSES = 8  # two photographs, four quarters each


class Crops(Dataset[tuple[Tensor, int]]):
    """JPEG files whose names start with their class; half of the samples are mirrored."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        with Image.open(file) as crop:
            image = crop.convert("RGB").resize((INPUT_PIXELS, INPUT_PIXELS))
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, height, width)
        return pixels.float() / 255, int(file.name[0])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def build_dataset() -> Dataset[tuple[Tensor, int]]:
    if not CROPS.is_dir():
        make_crops()
    return Crops(sorted(CROPS.glob("*.jpg")))


def make_crops() -> None:
    """Fill the cache. It appears whole or not at all, however many processes start at once."""
    CROPS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CROPS.parent) as scratch:
        folder = Path(scratch) / "crops"
        folder.mkdir()
        write_crops(folder)
        try:
            folder.replace(CROPS)
        except OSError:  # another process was first ...
            if not CROPS.is_dir():  # ... or was it something else?
                raise


def write_crops(folder: Path) -> None:
    from sklearn.datasets import load_sample_images  # needed once, and slow to import

    dice = random.Random(0)
    for number, pixels in enumerate(load_sample_images().images):
        photograph = Image.fromarray(pixels)
        for crop in range(CROPS_PER_PHOTOGRAPH):
            left = dice.randint(0, photograph.width - CROP_PIXELS)
            top = dice.randint(0, photograph.height - CROP_PIXELS)
            right_half = 2 * left + CROP_PIXELS > photograph.width
            lower_half = 2 * top + CROP_PIXELS > photograph.height
            label = 4 * number + 2 * lower_half + right_half
            box = (left, top, left + CROP_PIXELS, top + CROP_PIXELS)
            photograph.crop(box).save(folder / f"{label}-{crop:04d}.jpg", quality=90)
