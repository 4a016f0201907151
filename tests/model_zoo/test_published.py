"""Each model of recipes/model is the published one: every key, and the number of parameters, by our own layout, by transformers'
model on the meta device, and as published. `python tests/model_zoo/test_published.py` writes the table of docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megakit.config.compose import RECIPES, compose, group_files
from megakit.config.derived import head_dim
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import parameter_count
from model_zoo import family
from tests.model_zoo.published import PAPER, PUBLISHED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/model_zoo/test_published.py -->\n", "<!-- end -->\n"


def composed(name: str) -> ModelConfig:
    return compose(["+recipe=demo", f"model={name}"]).model


def described(name: str) -> ModelConfig:
    config = PUBLISHED[name].config
    return family(config["model_type"]).from_hf(config)


def test_the_zoo_is_complete():
    assert set(PUBLISHED) == set(group_files()["model"]) - {"demo_10m"}
    kinds = {name: family(one.config["model_type"]).name for name, one in PUBLISHED.items()}
    assert set(kinds.values()) == {"gpt2", "llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_is_that_of_its_configuration(name):
    assert vars(composed(name)) == vars(described(name))
    first = (RECIPES / "model" / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ") and f"{PUBLISHED[name].parameters:,} parameters" in first


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    published, model = PUBLISHED[name], described(name)
    keys = {key: value for key, value in published.config.items() if key != "model_type"}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(published.config["model_type"], **keys, **ids)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert type(theirs).__name__ == family(published.config["model_type"]).architecture
    assert parameter_count(Config(model=model)) == sum(p.numel() for p in theirs.parameters()) == published.parameters
    if published.millions is not None:  # three digits, or the last one of four or five a 0
        assert published.millions == round(published.parameters / 1e6, -1 if published.millions > 1000 else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_says_the_same(name):
    """config.json as we write it, read by transformers, has every value of the published one."""
    published, model = PUBLISHED[name], described(name)
    its = family(published.config["model_type"])
    written = its.config_json(model, "bfloat16", 1, [2, 3], None)
    keys = {key: value for key, value in published.config.items() if key != "model_type"}
    read = transformers.AutoConfig.for_model(**written).to_dict()
    expected = transformers.AutoConfig.for_model(published.config["model_type"], **keys).to_dict()
    said = {key for key in expected if key in {*keys, "rope_parameters"} and key != "max_window_layers"}  # of no window
    assert {key: read[key] for key in said} == {key: expected[key] for key in said}
    assert read["architectures"] == [its.architecture] and read["eos_token_id"] == [2, 3] and read["dtype"] == "bfloat16"


def row(name: str) -> str:
    m, one = described(name), PUBLISHED[name]
    source = "table 2.1 of the paper" if one.source == PAPER else f"`{one.source}`"
    heads = f"{m.num_attention_heads}" + (f" / {m.num_query_groups}" if m.num_query_groups != m.num_attention_heads else "")
    cells = (f"`{name}`", f"{one.parameters:,}", m.family, m.num_layers, m.hidden_size, m.ffn_hidden_size, heads, head_dim(m))
    tail = (f"{m.vocab_size:,}", f"{m.max_position_embeddings:,}", "yes" if m.tie_embeddings else "", source)
    return "| " + " | ".join(map(str, (*cells, *tail))) + " |"


def table() -> str:
    head = ("`model=`", "Parameters", "Family", "Layers", "Hidden", "MLP", "Heads / kv", "Width", "Vocabulary", "Context", "Tied")
    lines = ["| " + " | ".join((*head, "Published as")) + " |", "| --- " * (len(head) + 1) + "|"]
    return "\n".join([*lines, *map(row, PUBLISHED)]) + "\n"


def test_the_page_has_the_table():
    assert PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip() == table().strip(), "run this file"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{table()}\n{END}{text.split(END)[1]}", encoding="utf-8")
