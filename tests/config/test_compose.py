"""Case CF1: whatever is misspelt, of a wrong type, not finite or missing is refused in one line that names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megakit.config import compose as module
from megakit.config.compose import compose, group_files, recipe_summaries
from megakit.config.typed import to_yaml
from megakit.errors import Refused
from tests.config.tiny import TINY, refusal, tiny

DEMO = ["+recipe=demo"]


@pytest.fixture
def folder(tmp_path: Path):
    """Write recipe/NAME.yaml into a folder for --config-dir."""

    def write(text: str, name: str = "recipe/mine") -> str:
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+train.lrr=5", "train.lrr is not a recipe key: did you mean optim.lr?"),
        ("++train.lrr=3", "train.lrr is not a recipe key: did you mean optim.lr?"),
        ("train.lrr=3", "train.lrr is not a recipe key: did you mean optim.lr?"),
        ("+trian.lr=5", "trian.lr is not a recipe key: did you mean optim.lr?"),
        ("+trian.steps=5", "trian.steps is not a recipe key: did you mean train.steps?"),
        ("train.micro_batch=5", "did you mean train.micro_batch_size?"),
        ("parallel.pipeline_model_parallel_size=5", "did you mean parallel.pp?"),
        ("model.dropout=0.1", "did you mean model.hidden_dropout?"),
        ("launch.slurm.partitoin=gpu", "did you mean launch.slurm.partition?"),
        ("optimiser={lr: 3}", "the keys of optim are name, lr, min_lr,"),
        ("+train.zzzz=5", "the keys of train are steps, tokens,"),
        ("+zzzz=5", "the groups of keys are model, parallel,"),
        ("train.steps.x=3", "train.steps.x is not a recipe key"),
        ("checkpoint.async_save=false", "did you mean checkpoint.async?"),
        ("~trian.steps", "trian.steps is not a recipe key: did you mean train.steps?"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(override: str, says: str):
    assert says in refusal(override, start=DEMO)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr=nan", "optim.lr = nan is not a finite number"),
        ("optim.lr=-inf", "optim.lr = -inf is not a finite number"),
        ("data.weights=[.nan]", "data.weights.0 = .nan must be a number"),
        ("data.weights=[nan]", "data.weights.0 = nan is not a finite number"),
        ("train.steps=1.5", "train.steps = 1.5 must be a whole number or null"),
        ("train.steps=1e3", "write train.steps=1000"),
        ("train.steps=ten", "train.steps = ten must be a whole number or null"),
        ("train.steps='10'", "write it without quotes"),
        ("train.steps=true", "train.steps = true must be a whole number or null"),
        ("train.steps=", "train.steps = '' must be a whole number or null"),
        ("train.seq_len=null", "train.seq_len = null must be a whole number"),
        ("data.mock=1", "data.mock = 1 must be true or false"),
        ("data.path=data/x", "data.path = data/x must be a list of text: write data.path=[data/x]"),
        ("data.path=[1]", 'data.path.0 = 1 must be text: in a yaml file write it in quotes, "1"'),
        ("parallel.layers_per_stage=[1,a]", "parallel.layers_per_stage.1 = a must be a whole number"),
        ("checkpoint.resume=1.5", "checkpoint.resume = 1.5 must be a whole number or text"),
        ("run.name=null", "run.name = null must be text"),
        ("train=3", "train = 3, but train is a group of keys"),
        ("train=null", "train = null, but train is a group of keys"),
    ],
)
def test_wrong_types_are_refused(override: str, says: str):
    assert says in refusal(override, start=DEMO)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps", "an override is written KEY=VALUE"),
        ("", "an override is written KEY=VALUE"),
        ("=3", "an override is written KEY=VALUE"),
        ("train.steps=[1", "train.steps=[1 can't be read"),
        ("train.steps={a", "train.steps={a can't be read"),
        ("train.steps=1,2", "give one value, or a list in brackets"),
        ("train.steps=range(1,3)", "give one value"),
        ("~log.tensorboard", "the recipe does not set log.tensorboard"),
        ("train.generate_prompt=${nope}", "'nope' not found"),
        ("run.dir=${oc.env:MEGAKIT_NOT_SET}", "MEGAKIT_NOT_SET"),
        ("hydra.verbose=true", "Hydra's own settings have no effect"),
        ("+hydra/launcher=basic", "Hydra's own settings have no effect"),
        ("+recipe=llama7b", "+recipe=demo and +recipe=llama7b are both given"),
        ("cluster=h10", "there is no cluster h10: did you mean h100? Choose one of a100_80g, b200, h100, h200, local"),
        ("cluster=h100,h200", "there is no cluster h100,h200"),
        ("model=null", "choose one of demo_10m, gpt2_1.5b, gpt2_124m"),
        ("~model", "choose one of demo_10m, gpt2_1.5b, gpt2_124m"),
        ("model@train=llama7b", "choose one of demo_10m"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(override: str, says: str):
    assert says in refusal(override, start=DEMO)


def test_an_unknown_recipe_is_refused_with_all_recipes():
    line = refusal("+recipe=llama8b", start=[])
    assert "there is no recipe llama8b: did you mean llama3_8b?" in line
    assert all(name in line for name in group_files()["recipe"])


def test_no_recipe_is_refused_with_all_recipes():
    line = refusal(start=[])
    assert line.startswith("no recipe is given: add +recipe=NAME, one of demo, gpt2_124m, llama3_8b, llama7b")


@pytest.mark.parametrize("override", ["optim.lr=1e-4", "+optim.lr=1e-4", "++optim.lr=0.0001"])
def test_numbers_in_e_notation_are_floats(override: str):
    lr = compose([*DEMO, override]).optim.lr
    assert isinstance(lr, float) and lr == 1e-4


def test_whole_numbers_become_floats_where_a_float_is_wanted():
    assert isinstance(tiny("optim.lr=1").optim.lr, float)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("007", "007"),
        ("true", "true"),
        ("'quoted'", "quoted"),
        ('a=b, c (d) "e" [f]:{g}', 'a=b, c (d) "e" [f]:{g}'),
        ("", ""),
        ("${run.name}-${train.steps}", "run-10"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_text_is_taken_as_it_is_written(raw: str, value: str):
    assert tiny(f"train.generate_prompt={raw}").train.generate_prompt == value


def test_overrides_of_every_kind():
    cfg = tiny(
        "train={steps: 5, seed: 7}", "data.split=98,1,1", "checkpoint.resume=100", "checkpoint.async=false", "run.dir=null"
    )
    assert (cfg.train.steps, cfg.train.seed, cfg.data.split) == (5, 7, "98,1,1")
    assert (cfg.checkpoint.resume, cfg.checkpoint.async_save, cfg.run.dir) == (100, False, None)
    assert tiny("checkpoint.resume=must").checkpoint.resume == "must"
    assert compose([*DEMO, "~log.interval"]).log.interval == 10
    assert compose(["recipe=demo"]) == compose(DEMO)
    assert compose([*DEMO, "+cluster=local"]) == compose(DEMO)
    assert compose([*DEMO, "data.path=[a,'b, c']"]).data.path == ["a", "b, c"]
    assert compose([*TINY, "train.steps=3", "train.steps=4"]).train.steps == 4


def test_a_part_of_a_recipe_can_be_exchanged():
    cfg = compose(["+recipe=llama7b", "cluster=h200", "model=llama13b"])
    assert (cfg.cluster.name, cfg.cluster.nodes, cfg.model.num_layers, cfg.optim.warmup_steps) == ("h200", 4, 40, 2000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimiser:\n  lr: 1e-4\n", "optimiser.lr is not a recipe key: did you mean optim.lr?"),
        ("train:\n  lrr: 1e-4\n", "train.lrr is not a recipe key: did you mean optim.lr?"),
        ("optimiser: {}\n", "optimiser is not a recipe key: the keys of optim are"),
        ("train: [1]\n", "In 'recipe/mine'"),
        ("train: 3\n", "train = 3, but train is a group of keys"),
        ("train:\n", "train = null, but train is a group of keys"),
        ("optim:\n  lr: .nan\n", "optim.lr = nan is not a finite number"),
        ("optim:\n  lr: '1e-4'\n", "optim.lr = 1e-4 must be a number: write it without quotes"),
        ("run:\n  name: 2024\n", 'run.name = 2024 must be text: in a yaml file write it in quotes, "2024"'),
        ("log:\n  console: off\n", 'log.console = false must be text: in a yaml file write it in quotes, "false"'),
        ("launch:\n  slurm:\n    time_limit: 24:00:00\n", "launch.slurm.time_limit = 86400 must be text"),
        ("1: 2\n", "1 is not a recipe key"),
        ("train:\n  steps: 3\n  steps: 4\n", "steps"),
        ("train: {steps: 3\n", "mine"),
        ("- a\n", "can't be composed"),
        ("defaults:\n  - override /model: llama8b\n", "model/llama8b.yaml, which is not there: did you mean llama3_8b?"),
        ("defaults:\n  - nope\n", "recipe/nope.yaml, which is not there: there are demo"),
        ("train:\n  seq_len: ${train.nope}\n", "nope"),
    ],
)
def test_faults_in_a_recipe_file_are_refused(folder, text: str, says: str):
    base = "defaults:\n  - demo\n" if "defaults" not in text and text[0] != "-" else ""
    with pytest.raises(Refused) as caught:
        compose(["+recipe=mine"], folder("# @package _global_\n" + base + text))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_without_the_package_line_is_told_so(folder):
    with pytest.raises(Refused, match="begin the recipe file with '# @package _global_'"):
        compose(["+recipe=mine"], folder("train:\n  steps: 3\n"))


def test_a_recipe_that_lacks_a_key_is_told_which_and_where_it_may_come_from(folder):
    with pytest.raises(Refused) as caught:
        compose(["+recipe=mine"], folder("# @package _global_\ntrain:\n  steps: 3\n"))
    assert "model.family has no value in mine (nor have model.num_layers, " in str(caught.value)
    assert "add model.family=VALUE, or model=NAME, one of demo_10m, gpt2_1.5b" in str(caught.value)


def test_a_recipe_of_ones_own_can_extend_a_shipped_one(folder):
    folder("hidden_size: 128\n", "model/own")
    text = "# @package _global_\ndefaults:\n  - demo\n  - override /model: llama7b\n  - _self_\noptim:\n  lr: 5e-4\n"
    cfg = compose(["+recipe=mine", "cluster=h200", "train.micro_batch_size=1"], folder(text))
    assert (cfg.optim.lr, cfg.model.num_layers, cfg.cluster.name, cfg.run.name) == (5e-4, 32, "h200", "demo")


def test_a_group_of_ones_own(folder):
    where = folder("slurm:\n  partition: gpu\n", "launch/mine")
    assert compose([*DEMO, "+launch=mine"], where).launch.slurm.partition == "gpu"


def test_config_dir_is_refused_where_it_would_be_ignored(folder, tmp_path: Path):
    with pytest.raises(Refused, match="is not a folder"):
        compose(DEMO, str(tmp_path / "nope"))
    with pytest.raises(Refused, match="has the name of a shipped file, recipes/recipe/demo"):
        compose(DEMO, folder("", "recipe/demo"))
    (tmp_path / "recipe/demo.yaml").unlink()
    with pytest.raises(Refused, match="has a section hydra"):
        compose(DEMO, folder("# @package _global_\nhydra:\n  verbose: true\n"))
    with pytest.raises(Refused, match="always read: leave it out"):
        compose(DEMO, str(module.RECIPES))


def test_config_dir_may_have_any_name(tmp_path: Path):
    odd = tmp_path / "it's, a [dir]=x"
    (odd / "recipe").mkdir(parents=True)
    (odd / "recipe/mine.yaml").write_text("# @package _global_\n# Mine\ndefaults:\n  - demo\ntrain:\n  steps: 33\n")
    assert compose(["+recipe=mine"], str(odd)).train.steps == 33
    assert recipe_summaries(str(odd))["mine"] == "Mine"


def test_a_configuration_written_as_yaml_is_read_again(tmp_path: Path):
    prompt = 'a "b": ${c} \\ é # d\n- e'
    for cfg in (compose(["+recipe=llama70b"]), tiny("run.name=2024", "launch.slurm.extra=[--exclusive]")):
        cfg.train.generate_prompt = prompt
        path = tmp_path / "config.yaml"
        path.write_text(to_yaml(cfg))
        again = compose([], config_file=str(path))
        assert again == cfg
        assert compose(["train.seed=7"], config_file=str(path)) == dataclasses.replace(
            cfg, train=dataclasses.replace(cfg.train, seed=7)
        )


def test_faults_of_a_configuration_file_are_refused(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for text, says in (
        (None, "can't be read"),
        ("a: [", "can't be read"),
        ("- a", "is not a configuration"),
        ("trian: {steps: 3}", "trian.steps is not a recipe key"),
        ("train: {steps: 3}", "model.family has no value in"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(Refused) as caught:
            compose([], config_file=str(path))
        assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(Refused, match="takes no recipe"):
        compose(DEMO, config_file=str(path))


def test_composing_leaves_no_state_behind():
    from hydra.core.global_hydra import GlobalHydra

    compose(DEMO)
    assert not GlobalHydra.instance().is_initialized()
    assert compose(DEMO) == compose(DEMO)
