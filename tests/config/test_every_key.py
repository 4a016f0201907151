"""Every key of the schema changes what a run does, or is refused: a walk over all of them.

Each key has an entry here: another value for it, and where the difference must show (observers.py), or with which words it
is refused. Whoever adds a key adds its entry, or this fails.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megakit.config.compose import compose
from megakit.config.keys import schema_keys
from megakit.config.rules import check
from megakit.config.schema import Config
from megakit.config.typed import replace
from megakit.data.tokenizer import tokenizer_fingerprint
from megakit.data.train_tokenizer import train, write_model
from megakit.errors import Refused
from megakit.modeling.layout import model_params
from tests.checkpoint.hf_models import convert, source_of
from tests.config import observers as see
from tests.config.tiny import TINY
from tests.data.corpus import plain_text, write_corpus


@dataclass
class Changes:
    """With `other` for the key, `observe` sees something else than with the value that the base has."""

    other: Any
    observe: see.Observer
    base: dict[str, Any] = field(default_factory=dict)
    along: dict[str, Any] = field(default_factory=dict)
    """What `other` can't be without, and the base not with."""


@dataclass
class Refuses:
    """`other` is refused, in a line with these words."""

    other: Any
    words: str
    base: dict[str, Any] = field(default_factory=dict)


@dataclass
class Permits:
    """The base is refused, with `other` it isn't."""

    other: Any
    base: dict[str, Any] = field(default_factory=dict)


TINY_CONFIG = compose(TINY)
SMALL = {"model.num_layers": 2, "train.global_batch_size": 4, "train.seq_len": 16}
RUN = {"train.steps": 4, "log.console": "off", "launch.device": "cpu"}
PROMETHEUS = {"log.prometheus": True, "log.console": "off"}
ROPE = {"model.rope_scaling": 'llama3', "model.rope_factor": 8, "model.rope_original_max_position_embeddings": 8,
        "model.rope_low_freq_factor": 1, "model.rope_high_freq_factor": 4}  # fmt: skip
YARN = {"model.rope_scaling": 'yarn', "model.rope_factor": 4, "model.rope_original_max_position_embeddings": 4096,
        "model.rotary_base": 100, "model.max_position_embeddings": 65536}  # fmt: skip
GRID = {"parallel.dp": 1}
CHUNKS = {
    **GRID,
    "parallel.pp": 2,
    "parallel.schedule": "interleaved_1f1b",
    "parallel.virtual_stages": 2,
    "model.num_layers": 8,
}
FILES = {"data.mock": False, "data.path": ["{a}"]}
TEXT = {"data.mock": False, "data.path": ["{told}"], "data.tokenizer": "{tokenizer}", "model.vocab_size": 400}
SPEAKS = {**RUN, **TEXT, "train.generate_tokens": 3, "train.generate_prompt": "the"}
CLUSTER = {"cluster.nodes": 1, "cluster.gpus_per_node": 2}
KUBERNETES = {**CLUSTER, "submit.container.image": "image", "submit.target": "kubernetes"}
CLAIM = {"submit.kubernetes.claim": "work"}
IMAGE = {**CLUSTER, "submit.container.image": "image.sqsh"}
FP16 = {"train.precision": "fp16"}

PROOFS: dict[str, Changes | Refuses | Permits] = {
    "model.family": Changes("gpt2", see.hugging_face_names),
    "model.num_layers": Changes(3, see.training),
    "model.hidden_size": Changes(32, see.training),
    "model.ffn_hidden_size": Changes(64, see.training),
    "model.num_attention_heads": Changes(4, see.training),
    "model.num_query_groups": Changes(4, see.training),
    "model.vocab_size": Changes(99, see.training),
    "model.max_position_embeddings": Changes(64, see.specs, {"model.position_embedding": "learned", "model.rotary_base": 10000}),
    "model.normalization": Changes("layernorm", see.training),
    "model.norm_epsilon": Changes(0.01, see.training),
    "model.activation": Changes("gelu", see.training),
    "model.position_embedding": Changes("learned", see.training, {"model.rotary_base": 10000}),
    "model.rotary_base": Changes(100, see.training),
    "model.rope_scaling": Changes("linear", see.training, along={"model.rope_factor": 4}),
    "model.rope_factor": Changes(4, see.training, ROPE),
    "model.rope_original_max_position_embeddings": Changes(16, see.training, ROPE),
    "model.rope_low_freq_factor": Changes(2, see.training, ROPE),
    "model.rope_high_freq_factor": Changes(8, see.training, ROPE),
    "model.rope_beta_fast": Changes(256, see.training, YARN),
    "model.rope_beta_slow": Changes(16, see.training, YARN),
    "model.rope_attention_factor": Changes(2, see.training, YARN),
    "model.add_bias_linear": Changes(True, see.training),
    "model.kv_channels": Changes(12, see.training),
    "model.add_qkv_bias": Changes(True, see.training),
    "model.qk_layernorm": Changes(True, see.training),
    "model.window_size": Changes(5, see.training),
    "model.tie_embeddings": Changes(True, see.training),
    "model.hidden_dropout": Changes(0.1, see.training),
    "model.attention_dropout": Changes(0.1, see.training),
    "model.init_method_std": Changes(0.1, see.initial_weights),
    "model.make_vocab_size_divisible_by": Changes(8, see.specs),
    "parallel.tp": Changes(2, see.step, GRID),
    "parallel.pp": Changes(2, see.step, GRID),
    "parallel.cp": Changes(2, see.step, GRID),
    "parallel.cp_comm_type": Changes("all_gather", see.step, {**GRID, "parallel.cp": 2}),
    "parallel.dp": Changes(2, see.step, GRID),
    "parallel.zero": Changes(1, see.step, {"parallel.dp": 2}),
    "parallel.sequence_parallel": Changes(True, see.step, {**GRID, "parallel.tp": 2}),
    "parallel.zero_group": Changes(2, see.step, {"parallel.dp": 4, "parallel.zero": 1, "train.micro_batch_size": 1}),
    "parallel.zero3_reduce": Changes("step", see.plan, {"parallel.dp": 2, "parallel.zero": 3, "train.micro_batch_size": 1}),
    "parallel.schedule": Changes("gpipe", see.step, {**GRID, "parallel.pp": 2}),
    "parallel.virtual_stages": Changes(4, see.step, CHUNKS),
    "parallel.stage_balance": Changes("cost", see.specs, {"parallel.pp": 2, "model.num_layers": 8, "model.vocab_size": 1000}),
    "parallel.layers_per_stage": Changes([1, 3], see.specs, {"parallel.pp": 2, "model.num_layers": 4}),
    "parallel.recompute": Changes("full", see.kept, GRID),
    "parallel.recompute_layers": Changes(1, see.kept, {**GRID, "parallel.recompute": "full"}),
    "parallel.bucket_size": Changes(10000, see.step, {"parallel.dp": 2}),
    "parallel.allow_tp_across_nodes": Permits(True, {"parallel.tp": 2, "cluster.gpus_per_node": 1, "cluster.nodes": 2}),
    "train.steps": Changes(3, see.whole_run, RUN),
    "train.tokens": Changes(768, see.whole_run, {**RUN, "train.steps": None, "train.tokens": 256}),
    "train.micro_batch_size": Changes(4, see.step, GRID),
    "train.global_batch_size": Changes(8, see.training),
    "train.rampup_batch_size": Changes([2, 2, 8], see.whole_run, RUN),
    "train.seq_len": Changes(8, see.training),
    "train.seed": Changes(8, see.training),
    "train.precision": Changes("bf16", see.training),
    "train.grad_dtype": Changes("bf16", see.training, {"train.precision": "bf16"}),
    "train.label_smoothing": Changes(0.1, see.training),
    "train.z_loss": Changes(0.1, see.training),
    "train.eval_interval": Changes(2, see.whole_run, RUN),
    "train.eval_samples": Changes(3, see.whole_run, {**RUN, "train.eval_interval": 4}),
    "train.max_skipped_steps": Changes(2, see.whole_run, {**RUN, "model.init_method_std": 1e39}),
    "train.generate_tokens": Changes(5, see.whole_run, SPEAKS),
    "train.generate_prompt": Changes("of", see.whole_run, SPEAKS),
    "optim.name": Changes("sgd", see.training),
    "optim.lr": Changes(0.01, see.training),
    "optim.min_lr": Changes(0.0001, see.whole_run, RUN),
    "optim.lr_scaling": Changes("sqrt", see.whole_run, RUN, {"optim.base_batch_size": 2}),
    "optim.base_batch_size": Changes(4, see.whole_run, {**RUN, "optim.lr_scaling": "linear", "optim.base_batch_size": 2}),
    "optim.warmup_steps": Changes(2, see.whole_run, RUN),
    "optim.decay_steps": Changes(3, see.whole_run, RUN),
    "optim.schedule": Changes("linear", see.whole_run, RUN),
    "optim.wsd_decay_steps": Changes(3, see.whole_run, {**RUN, "optim.schedule": "wsd"}),
    "optim.wsd_decay_style": Changes("cosine", see.whole_run, {**RUN, "optim.schedule": "wsd", "optim.wsd_decay_steps": 3}),
    "optim.weight_decay": Changes(0, see.training),
    "optim.lr_mult": Changes({"layers.*": 0.5}, see.training),
    "optim.wd_mult": Changes({"layers.*": 5}, see.training),
    "optim.momentum": Changes(0.5, see.training, {"optim.name": "sgd"}),
    "optim.nesterov": Changes(True, see.training, {"optim.name": "sgd"}),
    "optim.ns_steps": Changes(3, see.training, {"optim.name": "muon"}),
    "optim.beta1": Changes(0.5, see.training),
    "optim.beta2": Changes(0.5, see.training),
    "optim.eps": Changes(0.001, see.training),
    "optim.clip_grad": Changes(0.001, see.training),
    "optim.initial_loss_scale": Changes(1024, see.training, FP16),
    "optim.min_loss_scale": Changes(1000000000000.0, see.training, {**FP16, "optim.initial_loss_scale": 1000000000000.0}),
    "optim.loss_scale_window": Changes(1, see.training, FP16),
    "optim.loss_scale_hysteresis": Changes(1, see.training, {**FP16, "optim.initial_loss_scale": 1000000000000.0}),
    "data.path": Changes(["{b}"], see.streams, FILES),
    "data.weights": Changes([1, 5], see.streams, {"data.mock": False, "data.path": ["{a}", "{b}"]}),
    "data.max_epochs": Changes(0.001, see.streams),
    "data.valid_path": Changes(["{b}"], see.streams, {**FILES, "train.eval_interval": 1, "data.split": "80,20"}),
    "data.tokenizer": Changes("{stranger}", see.streams, TEXT),
    "data.split": Changes("50,50", see.streams, {**FILES, "train.eval_interval": 1, "data.split": "80,20"}),
    "data.mock": Refuses(False, "data.path is empty"),
    "data.mock_samples": Changes(40, see.streams),
    "data.log_sample_ids": Changes(True, see.whole_run, RUN),
    "data.prefetch": Changes(0, see.whole_run, RUN),
    "data.packing": Changes("best_fit", see.streams, FILES),
    "data.cache_dir": Changes("{elsewhere}", see.packing_folders, {**FILES, "data.packing": "best_fit"}),
    "data.isolate_documents": Changes(True, see.whole_run, RUN),
    "data.eod_mask_loss": Changes(True, see.whole_run, RUN),
    "checkpoint.dir": Changes("elsewhere", see.whole_run, RUN),
    "checkpoint.interval_steps": Changes(3, see.whole_run, RUN),
    "checkpoint.interval_minutes": Changes(1e-09, see.whole_run, RUN),
    "checkpoint.keep": Changes(3, see.whole_run, {**RUN, "checkpoint.interval_steps": 1}),
    "checkpoint.async": Refuses(True, "not built yet"),
    "checkpoint.resume": Changes("never", see.second_run, RUN),
    "checkpoint.init_from": Changes("{hf}", see.whole_run, RUN),
    "log.console": Changes("lines", see.whole_run, RUN),
    "log.interval": Changes(1, see.whole_run, {**RUN, "log.console": "lines"}),
    "log.tensorboard": Changes(True, see.whole_run, RUN),
    "log.wandb": Changes("online", see.wandb_run, {"log.wandb": "offline", "log.console": "off"}),
    "log.wandb_project": Changes("other", see.wandb_run, {"log.wandb": "offline", "log.console": "off"}),
    "log.prometheus": Changes(True, see.prometheus_run, {"log.console": "off"}),
    "log.prometheus_address": Changes("0.0.0.0", see.prometheus_run, PROMETHEUS),
    "log.prometheus_port": Changes(0, see.prometheus_run, PROMETHEUS),
    "log.prometheus_targets": Changes(None, see.prometheus_run, PROMETHEUS),
    "launch.device": Changes("cpu", see.ranks_here),
    "launch.timeout_s": Changes(60, see.process),
    "launch.threads_per_rank": Changes(7, see.process),
    "launch.slurm.partition": Changes("big", see.job_script, CLUSTER),
    "launch.slurm.account": Changes("us", see.job_script, CLUSTER),
    "launch.slurm.qos": Changes("high", see.job_script, CLUSTER),
    "launch.slurm.constraint": Changes("h100&ib", see.job_script, CLUSTER),
    "launch.slurm.time_limit": Changes("1:00:00", see.job_script, CLUSTER),
    "launch.slurm.cpus_per_task": Changes(4, see.job_script, CLUSTER),
    "launch.slurm.signal_lead_s": Changes(60, see.job_script, CLUSTER),
    "launch.slurm.requeue": Changes(False, see.job_script, CLUSTER),
    "launch.slurm.extra": Changes(["--exclusive"], see.job_script, CLUSTER),
    "submit.target": Changes("kubernetes", see.submitted, {**KUBERNETES, "submit.target": "slurm"}, CLAIM),
    "submit.kubernetes.namespace": Changes("team", see.manifest, {**KUBERNETES, **CLAIM}),
    "submit.kubernetes.claim": Changes("other", see.manifest, {**KUBERNETES, **CLAIM}),
    "submit.kubernetes.mount": Changes("/mnt", see.manifest, {**KUBERNETES, **CLAIM}),
    "submit.render_only": Changes(True, see.submitted, CLUSTER),
    "submit.template": Changes("torchrun", see.job_script, CLUSTER),
    "submit.max_attempts": Changes(5, see.job_script, CLUSTER),
    "submit.sweep": Changes(["optim.lr=1e-4,2e-4"], see.job_script, CLUSTER),
    "submit.sweep_parallel": Changes(1, see.job_script, {**CLUSTER, "submit.sweep": ["optim.lr=1e-4,2e-4"]}),
    "submit.chain": Changes(3, see.submitted, {**CLUSTER, "launch.slurm.requeue": False}),
    "submit.python": Changes("python3", see.job_script, CLUSTER),
    "submit.modules": Changes(["cuda"], see.job_script, CLUSTER),
    "submit.setup": Changes(["ulimit -c 0"], see.job_script, CLUSTER),
    "submit.container.image": Changes("image.sqsh", see.job_script, CLUSTER),
    "submit.container.runtime": Changes("apptainer", see.job_script, IMAGE),
    "submit.container.mounts": Changes(["/data:/data:ro"], see.job_script, IMAGE),
    "cluster.name": Changes("other", see.plan),
    "cluster.nodes": Changes(1, see.job_script, {"cluster.gpus_per_node": 1, "cluster.nodes": 2}),
    "cluster.gpus_per_node": Changes(2, see.job_script, {"cluster.gpus_per_node": 1}),
    "cluster.gpu_memory_gib": Changes(0.001, see.plan),
    "cluster.peak_bf16_tflops": Changes(1, see.record_on_a_gpu, {"train.precision": "bf16"}),
    "cluster.peak_fp32_tflops": Changes(1, see.record_on_a_gpu),
    "cluster.memory_bandwidth_tb_s": Changes(1, see.plan),
    "cluster.nvlink_gb_s": Changes(1, see.plan),
    "cluster.network_gb_s": Changes(1, see.plan),
    "cluster.gpu_hour_price": Changes(2.0, see.plan, {"cluster.name": "h100"}),
    "cluster.env": Changes({"NCCL_DEBUG": "INFO"}, see.job_script, CLUSTER),
    "ops.backend": Changes("csrc", see.operators),
    "ops.norm": Changes("csrc", see.operators),
    "ops.rope": Changes("csrc", see.operators),
    "ops.activation": Changes("csrc", see.operators),
    "ops.loss": Changes("csrc", see.operators),
    "ops.loss_chunk": Changes(8, see.plan),
    "ops.dropout_add": Changes("csrc", see.operators),
    "ops.adamw": Changes("csrc", see.operators),
    "ops.attention": Changes("te", see.operators),
    "ops.fp8": Changes("torchao", see.operators, {"train.precision": "fp8", "model.ffn_hidden_size": 192}),
    "ops.fp8_recipe": Changes(
        "delayed", see.operators, {"train.precision": "fp8", "model.ffn_hidden_size": 192, "ops.fp8": "te"}
    ),
    "run.name": Changes("other", see.whole_run, RUN),
    "run.dir": Changes("elsewhere", see.whole_run, RUN),
    "run.dry_run": Changes(True, see.command),
    "run.shrink": Changes(True, see.command),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the entries name in braces: corpora, tokenizers, weights."""
    folder = tmp_path_factory.mktemp("files")
    out = {name: folder / name for name in ("a", "b", "told", "hf", "tokenizer", "stranger", "elsewhere")}
    for seed, name in enumerate(("tokenizer", "stranger")):
        write_model(str(out[name]), train(iter(plain_text(300, seed)), 400))
    lengths = [40 + i % 7 for i in range(30)]
    write_corpus(out["a"], lengths, seed=1)
    write_corpus(out["b"], lengths[::-1], seed=2)
    write_corpus(out["told"], lengths, vocab=400, seed=3, tokenizer=tokenizer_fingerprint(out["tokenizer"]))
    tensors = {name: torch.full(p.shard.shape, 0.01) for name, p in model_params(TINY_CONFIG).items()}
    convert(source_of(tensors, TINY_CONFIG, folder / "ours"), "hf", out["hf"])
    return out


@pytest.fixture
def composed(files):
    """The configuration with these values, checked."""
    names = {name: str(path) for name, path in files.items()}

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(v) for v in value]
        return value.format(**names) if isinstance(value, str) else value

    def make(*values: dict[str, Any]) -> Config:
        changes = {key: fill(value) for one in (SMALL, *values) for key, value in one.items()}
        cfg = replace(TINY_CONFIG, changes)
        check(cfg)
        return cfg

    return make


@pytest.fixture
def seen(pools, tmp_path, monkeypatch):
    """An observer's view of a configuration, each time from an empty folder."""

    def look(observe: see.Observer, cfg: Config) -> str:
        place = see.Place(pools(1), Path(tempfile.mkdtemp(dir=tmp_path)), monkeypatch)
        return repr(observe(cfg, place))  # as text: nan equals itself

    return look


@pytest.fixture(scope="module")
def views() -> dict[tuple, str]:
    """Of bases: many keys share one."""
    return {}


def test_every_key_has_a_proof():
    keys, proven = set(schema_keys()), set(PROOFS)
    assert not keys - proven, f"no proof that these keys change anything: {sorted(keys - proven)}"
    assert not proven - keys, f"no such keys: {sorted(proven - keys)}"


@pytest.mark.parametrize("key", PROOFS)
def test_the_key_changes_something_or_is_refused(key, composed, seen, views):
    proof = PROOFS[key]
    given = {key: proof.other}
    if isinstance(proof, Changes):
        base, other = composed(proof.base), composed(proof.base, proof.along, given)
        view = (proof.observe, repr(proof.base))
        if view not in views:
            views[view] = seen(proof.observe, base)
        assert seen(proof.observe, other) != views[view], f"{key} = {proof.other} changes nothing here"
    elif isinstance(proof, Refuses):
        composed(proof.base)
        with pytest.raises(Refused, match=proof.words):
            composed(proof.base, given)
    else:
        with pytest.raises(Refused, match=key):
            composed(proof.base)
        composed(proof.base, given)


OBSERVERS = {p.observe: p for p in PROOFS.values() if isinstance(p, Changes)}


@pytest.mark.parametrize("observe", OBSERVERS, ids=lambda o: o.__name__)
def test_an_observer_sees_the_same_twice(observe, composed, seen):
    """Else every key would seem to change something."""
    cfg = composed(OBSERVERS[observe].base)
    assert seen(observe, cfg) == seen(observe, cfg)
