"""A trained ranker as a Hugging Face directory, which ``userkv serve --model`` takes, and back."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file, save_file

from userkv.core.errors import InvalidSettingError
from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTUModel
from userkv.ranking.config_keys import ITEMS_FILE

WEIGHTS_FILE = "model.safetensors"
EVALUATION_FILE = "evaluation.json"


def check_output(directory: Path) -> None:
    """Whether a model can be written there, before hours of training rather than after.

    Raises:
        InvalidSettingError: something is there already, or nothing can be written there.

    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise InvalidSettingError(f"--output must be a new or empty directory, but {directory} has something in it")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent):
            pass
    except OSError as error:
        raise InvalidSettingError(f"--output cannot be written in {directory.parent}: {error.strerror}") from error


def save_ranker(
    directory: Path, model: HSTUModel, catalogue: npt.NDArray[np.int64], evaluation: Mapping[str, Any]
) -> None:
    """Write the directory; it appears complete or not at all.

    Args:
        directory: new or empty.
        model: what is served.
        catalogue: item ids, in the order of their tokens.
        evaluation: what is known about its quality; kept as it is in ``evaluation.json``.

    Raises:
        InvalidSettingError: it cannot be written.

    """
    check_output(directory)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            model.config.save_pretrained(partial)
            weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
            (partial / ITEMS_FILE).write_text(json.dumps(catalogue.tolist()) + "\n")
            (partial / EVALUATION_FILE).write_text(json.dumps(evaluation, indent=2) + "\n")
            # mkdtemp and safetensors create private files, but another account may serve the model.
            partial.chmod(0o755)
            for file in partial.iterdir():
                file.chmod(0o644)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InvalidSettingError(f"--output cannot be written: {directory}: {error.strerror or error}") from error


def load_ranker(directory: Path) -> HSTUModel:
    """The model of a directory that :func:`save_ranker` wrote, in evaluation mode.

    Raises:
        InvalidSettingError: there is none.

    """
    try:
        model: HSTUModel = HSTUModel(HSTUConfig.from_pretrained(directory, local_files_only=True))
        model.load_state_dict(load_file(directory / WEIGHTS_FILE))
    except (OSError, RuntimeError) as error:
        raise InvalidSettingError(f"{directory} holds no ranker: {error}") from error
    model.eval()
    return model
