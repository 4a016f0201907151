"""A small trained tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakit.data.train_tokenizer import train, write_model
from tests.data.corpus import plain_text


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    write_model(str(path), train(iter(plain_text(300)), 400))
    return path
