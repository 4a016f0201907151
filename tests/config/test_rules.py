"""Cases CF3 and CF5 and the other rules that join keys: refused with both values and the cure, or accepted."""

from __future__ import annotations

import pytest

from megakit.config import rules
from megakit.config.schema import Config
from megakit.errors import Refused
from tests.config.tiny import refusal, tiny

LEARNED = ["model.position_embedding=learned", "model.rotary_base=1e4"]
YARN = ["model.rope_scaling=yarn", "model.rope_factor=2", "model.rope_original_max_position_embeddings=16"]
LLAMA3 = ["model.rope_scaling=llama3", *YARN[1:], "model.rope_low_freq_factor=1", "model.rope_high_freq_factor=4"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        # CF3
        (["model.num_attention_heads=6", "model.hidden_size=72", "model.num_query_groups=6", "parallel.tp=4"],
         ["model.num_query_groups = 6", "parallel.tp = 4", "valid tp 1, 2"]),
        (["model.num_query_groups=2", "parallel.tp=4"], ["model.num_query_groups = 2", "parallel.tp = 4", "valid tp 1, 2"]),
        (["model.hidden_size=66"], ["model.hidden_size = 66", "model.num_attention_heads = 8", "64 or 80"]),
        (["model.ffn_hidden_size=175", "parallel.tp=2"], ["model.ffn_hidden_size = 175", "parallel.tp = 2", "valid tp 1"]),
        (["train.seq_len=33", "parallel.tp=2", "parallel.sequence_parallel=true"],
         ["train.seq_len = 33", "parallel.tp = 2", "valid tp 1"]),
        (["model.num_query_groups=3"], ["model.num_attention_heads = 8", "model.num_query_groups = 3", "1, 2, 4, 8"]),
        (["model.hidden_size=72", "model.num_query_groups=8"], ["72 / 8 = 9", "rope"]),
        (["model.kv_channels=7"], ["model.kv_channels = 7 is odd", "rope", "model.kv_channels=6", "8"]),
        (["model.add_qkv_bias=true", "model.add_bias_linear=true"],
         ["model.add_qkv_bias = true", "model.add_bias_linear = true", "model.add_qkv_bias=false"]),
        (["parallel.sequence_parallel=true"], ["parallel.sequence_parallel = true", "parallel.tp = 1"]),
        # the cluster
        (["cluster.gpus_per_node=1", "parallel.tp=2", "cluster.nodes=2"],
         ["parallel.tp = 2", "cluster.gpus_per_node = 1", "valid tp 1", "allow_tp_across_nodes=true"]),
        (["cluster.gpus_per_node=8", "parallel.dp=4", "parallel.pp=4"],
         ["parallel.dp = 4", "16 ranks", "8 GPUs", "cluster.nodes=2"]),
        (["cluster.gpus_per_node=8", "parallel.pp=3"], ["pp 3", "8 GPUs", "cluster.nodes=3"]),
        # the pipeline
        (["parallel.schedule=zb_h1"], ["parallel.schedule = zb_h1", "parallel.pp = 1"]),
        (["parallel.virtual_stages=2"], ["parallel.virtual_stages = 2", "parallel.pp = 1"]),
        (["parallel.stage_balance=cost"], ["parallel.stage_balance = cost", "parallel.pp = 1"]),
        (["parallel.pp=2", "parallel.layers_per_stage=[1,3]", "parallel.stage_balance=cost"],
         ["parallel.stage_balance = cost", "parallel.layers_per_stage = [1, 3]"]),
        (["parallel.layers_per_stage=[4]"], ["parallel.layers_per_stage = [4]", "parallel.pp = 1"]),
        (["parallel.allow_tp_across_nodes=true"], ["parallel.allow_tp_across_nodes = true", "parallel.tp = 1"]),
        # ZeRO
        (["parallel.zero_group=2"], ["parallel.zero_group = 2", "parallel.zero = 0"]),
        (["parallel.zero_group=1", "parallel.zero=1"], ["parallel.zero_group = 1", "parallel.zero=0"]),
        (["parallel.zero_group=3", "parallel.zero=2", "parallel.dp=4"],
         ["parallel.zero_group = 3", "4 x 1 = 4", "valid groups 2, 4"]),
        (["parallel.zero=3", "parallel.pp=2"], ["parallel.zero = 3", "parallel.pp = 2", "parallel.zero=1 or 2"]),
        (["parallel.zero=3", "parallel.bucket_size=1000"], ["parallel.bucket_size = 1000", "parallel.zero = 3"]),
        (["parallel.zero=2", "parallel.zero3_reduce=step"],
         ["parallel.zero3_reduce = step", "parallel.zero = 2", "parallel.zero=3"]),
        # CF5
        (["train.global_batch_size=10", "train.micro_batch_size=4", "parallel.dp=2"],
         ["train.global_batch_size = 10", "train.micro_batch_size = 4 x parallel.dp = 2 = 8", "8 or 16"]),
        (["train.global_batch_size=3", "train.micro_batch_size=4"], ["= 4", "use train.global_batch_size=4,"]),
        (["cluster.gpus_per_node=8"], ["train.global_batch_size = 8", "parallel.dp = 8 = 16", "use train.global_batch_size=16"]),
        # operators
        (["ops.attention=te", "parallel.cp=2"], ["ops.attention = te", "parallel.cp = 2", "ops.attention=null"]),
        (["ops.attention=te", "data.isolate_documents=true"], ["ops.attention = te", "isolate_documents", "ops.attention=null"]),
        (["train.precision=fp8", "model.ffn_hidden_size=168"], ["model.ffn_hidden_size / parallel.tp = 168", "multiple of 16"]),
        (["train.precision=fp8", "model.hidden_size=72", "model.num_attention_heads=2", "model.num_query_groups=2"],
         ["model.hidden_size = 72", "train.precision=bf16"]),
        (["ops.fp8=te"], ["ops.fp8 = te", "train.precision=fp8"]),
        (["train.precision=fp8", "ops.fp8_recipe=delayed"], ["ops.fp8_recipe = delayed", "ops.fp8 = null", "ops.fp8=te"]),
        (["train.precision=fp8", "ops.fp8=te", "parallel.pp=2", "parallel.schedule=zb_h1", "model.ffn_hidden_size=192"],
         ["ops.fp8 = te", "parallel.schedule = zb_h1", "ops.fp8=torch"]),
        (["train.precision=fp8", "ops.fp8=te", "ops.fp8_recipe=delayed", "parallel.recompute=full"],
         ["ops.fp8_recipe = delayed", "parallel.recompute = full", "ops.fp8_recipe=current"]),
        (["ops.rope=te"], ["ops.rope = te is not one of torch | csrc"]),
        (["ops.attention=apex"], ["ops.attention = apex is not one of torch | te"]),
        (["ops.backend=transformer_engine"], ["did you mean te"]),
        # words of other frameworks
        (["parallel.schedule=ZBVZeroBubble"], ["parallel.schedule = ZBVZeroBubble", "did you mean zb_v"]),
        (["parallel.schedule=Interleaved1F1B"], ["did you mean interleaved_1f1b"]),
        (["parallel.schedule=GPipe"], ["did you mean gpipe"]),
        (["parallel.schedule=Schedule1F1B"], ["did you mean 1f1b"]),
        (["train.precision=bfloat16"], ["did you mean bf16"]),
        (["+parallel.num_layers_per_virtual_pipeline_stage=2"], ["did you mean parallel.virtual_stages"]),
        (["+parallel.context_parallel_degree=2"], ["did you mean parallel.cp"]),
        # the ramp-up of the batch
        (["train.rampup_batch_size=[4,2]"], ["train.rampup_batch_size = [4, 2]", "[START, INCREMENT, SAMPLES]"]),
        (["train.rampup_batch_size=32"], ["= 32 must be", "write train.rampup_batch_size=[START, INCREMENT, SAMPLES]"]),
        (["train.rampup_batch_size=[4,0,10]"], ["train.rampup_batch_size.1 = 0", "at least 1"]),
        (["train.rampup_batch_size=[8,2,10]"], ["[8, 2, 10]", "train.global_batch_size = 8", "null"]),
        (["train.rampup_batch_size=[3,1,10]"], ["its size 3", "parallel.dp = 2", "start at 2 or 4"]),
        (["train.rampup_batch_size=[1,1,10]"], ["its size 1", "parallel.dp = 2", "start at 2"]),
        (["train.micro_batch_size=8", "train.rampup_batch_size=[4,4,10]"], ["its size 4", "no smaller batch: use null"]),
        (["train.rampup_batch_size=[2,3,10]"], ["its size 5", "parallel.dp = 2", "increment by 2 or 6"]),
        (["train.rampup_batch_size=[2,4,10]"], ["increment 4 does not divide", "8 - 2 = 6", "increment by 2 or 6"]),
        (["train.global_batch_size=16", "train.rampup_batch_size=[4,2,10]", "parallel.dp=2"],
         ["its size 6", "parallel.dp = 4", "increment by 4 or 12"]),
        (["train.steps=0"], ["train.steps = 0", "at least 1"]),
        (["train.steps=null", "train.tokens=0"], ["train.tokens = 0", "at least 1"]),
        (["train.tokens=1000"], ["train.steps = 10", "train.tokens = 1000", "train.tokens=null"]),
        (["train.steps=null"], ["train.steps", "train.tokens"]),
        # context parallel
        (["parallel.cp=3"], ["train.seq_len = 32", "parallel.cp = 3", "train.seq_len=30 or 36", "or parallel.cp=4"]),
        (["parallel.cp=32"], ["train.seq_len = 32", "parallel.cp = 32", "64: use train.seq_len=64"]),
        (["parallel.cp=3", "cluster.gpus_per_node=6", "train.micro_batch_size=1", "train.global_batch_size=12"],
         ["train.seq_len = 32", "train.seq_len=30 or 36, or parallel.cp=2"]),
        (["parallel.cp=5", "train.seq_len=45"], ["train.seq_len = 45", "parallel.cp = 5", "10", "or parallel.cp=1"]),
        (["parallel.cp=2", "model.num_attention_heads=6", "model.hidden_size=72", "model.num_query_groups=6", "parallel.tp=6",
          "model.ffn_hidden_size=180", "parallel.sequence_parallel=true", "train.seq_len=18"],
         ["train.seq_len = 18", "parallel.cp = 2", "parallel.tp = 6", "12", "train.seq_len=12 or 24", "or parallel.cp=3"]),
        (["parallel.cp_comm_type=all_gather"], ["parallel.cp_comm_type = all_gather", "parallel.cp = 1"]),
        # rope scaling
        (["model.rope_factor=2"], ["model.rope_factor = 2.0", "model.rope_scaling = none", "linear or llama3 or yarn"]),
        (["model.rope_scaling=linear"], ["model.rope_scaling = linear", "needs model.rope_factor"]),
        (["model.rope_scaling=yarn", "model.rope_factor=2"], ["needs model.rope_original_max_position_embeddings"]),
        (["model.rope_scaling=linear", "model.rope_factor=1"], ["model.rope_factor = 1.0", "greater than 1"]),
        (["model.rope_scaling=linear", "model.rope_factor=2", "model.rope_beta_fast=8"],
         ["model.rope_beta_fast = 8.0", "model.rope_scaling = linear", "model.rope_scaling=yarn"]),
        (["model.rope_scaling=linear", "model.rope_factor=2", "model.rope_original_max_position_embeddings=8"],
         ["model.rope_original_max_position_embeddings = 8", "linear", "llama3 or yarn"]),
        ([*LLAMA3, "model.rope_high_freq_factor=null"], ["model.rope_scaling = llama3", "needs model.rope_high_freq_factor"]),
        ([*LLAMA3, "model.rope_high_freq_factor=1"], ["model.rope_low_freq_factor = 1.0", "model.rope_high_freq_factor = 1.0"]),
        ([*LLAMA3, "model.rope_attention_factor=1"], ["model.rope_attention_factor = 1.0", "llama3", "yarn"]),
        ([*LLAMA3, "model.rope_original_max_position_embeddings=33"],
         ["model.rope_original_max_position_embeddings = 33", "model.max_position_embeddings = 32"]),
        ([*YARN, "model.rope_beta_slow=64"], ["model.rope_beta_slow = 64.0", "model.rope_beta_fast = 32.0"]),
        ([*YARN, *LEARNED], ["model.rope_scaling = yarn", "model.position_embedding = learned"]),
        (["model.position_embedding=learned"], ["model.rotary_base = 500000.0", "model.position_embedding = learned"]),
        # length
        ([*LEARNED, "train.seq_len=64"], ["train.seq_len = 64", "model.max_position_embeddings = 32"]),
        (["train.generate_tokens=5"], ["train.generate_tokens = 5", "data.tokenizer"]),
        # the learning rate
        (["optim.min_lr=0.01"], ["optim.min_lr = 0.01", "optim.lr = 0.001"]),
        (["optim.warmup_steps=5", "optim.decay_steps=5"], ["optim.decay_steps = 5", "optim.warmup_steps = 5", "> 5"]),
        (["optim.wsd_decay_steps=2"], ["optim.wsd_decay_steps = 2", "optim.schedule = cosine"]),
        # the algorithm and its multipliers
        (["optim.name=adam"], ["optim.name = adam", "adamw | sgd | muon", "did you mean adamw"]),
        (["optim.momentum=0.5"], ["optim.momentum = 0.5", "optim.name = adamw", "~optim.momentum", "sgd or muon"]),
        (["optim.name=sgd", "optim.beta1=0.8"], ["optim.beta1 = 0.8", "optim.name = sgd", "~optim.beta1", "adamw or muon"]),
        (["optim.name=sgd", "optim.ns_steps=3"], ["optim.ns_steps = 3", "optim.name = sgd", "optim.name=muon"]),
        (["optim.name=sgd", "optim.nesterov=true", "optim.momentum=0"], ["optim.nesterov = true", "optim.momentum = 0.0"]),
        (["optim.lr_mult=2"], ["optim.lr_mult = 2", "a map of patterns to numbers"]),
        (["optim.lr_mult={a: x}"], ["optim.lr_mult[a] = x", "a number"]),
        (["optim.lr_mult={a: -1}"], ["optim.lr_mult[a] = -1.0", "at least 0"]),
        (["optim.lr_mult={a: 1}"], ["optim.lr_mult = {a: 1.0}", "changes nothing"]),
        (["optim.wd_mult={a: 0}", "optim.weight_decay=0"], ["optim.wd_mult = {a: 0.0}", "optim.weight_decay = 0.0"]),
        (["optim.wsd_decay_style=cosine"], ["optim.wsd_decay_style = cosine", "optim.schedule = cosine"]),
        (["optim.base_batch_size=2"], ["optim.base_batch_size = 2", "optim.lr_scaling = none"]),
        (["optim.lr_scaling=linear"], ["optim.lr_scaling = linear", "optim.base_batch_size, which is null", "0.001"]),
        (["optim.lr=0.5", "optim.lr_scaling=linear", "optim.base_batch_size=2"],
         ["optim.lr = 0.5 becomes 2", "optim.base_batch_size = 2", "train.global_batch_size = 8"]),
        (["optim.schedule=constant", "optim.decay_steps=5"], ["optim.decay_steps = 5", "optim.schedule = constant"]),
        (["optim.schedule=constant", "optim.min_lr=1e-4"], ["optim.min_lr = 0.0001", "optim.schedule = constant"]),
        (["optim.schedule=wsd", "optim.warmup_steps=5", "optim.wsd_decay_steps=6"],
         ["optim.warmup_steps = 5", "6 steps", "10 steps", "<= 5"]),
        # recomputation
        (["parallel.recompute_layers=2"],
         ["parallel.recompute_layers = 2", "parallel.recompute = none", "or parallel.recompute=full"]),
        (["parallel.recompute_layers=2", "parallel.recompute=selective"], ["parallel.recompute = selective"]),
        # precision
        (["train.grad_dtype=bf16"], ["train.grad_dtype = bf16", "train.precision = fp32", "train.precision=bf16"]),
        (["train.grad_dtype=bf16", "train.precision=fp16"], ["train.grad_dtype = bf16", "train.precision = fp16"]),
        (["optim.initial_loss_scale=1024"],
         ["optim.initial_loss_scale = 1024.0", "train.precision = fp32", "use train.precision=fp16"]),
        (["optim.min_loss_scale=2"], ["optim.min_loss_scale = 2.0", "train.precision = fp32"]),
        (["optim.loss_scale_window=2", "train.precision=bf16"], ["optim.loss_scale_window = 2", "train.precision = bf16"]),
        (["optim.loss_scale_hysteresis=1"], ["optim.loss_scale_hysteresis = 1", "train.precision = fp32"]),
        (["train.precision=fp16", "optim.min_loss_scale=8", "optim.initial_loss_scale=4"],
         ["optim.min_loss_scale = 8.0", "optim.initial_loss_scale = 4.0", "<= 4.0"]),
        # data
        (["data.path=[a]"], ["data.mock = true", "[a]", "data=mock"]),
        (["data.valid_path=[a]"], ["data.mock = true", "[a]"]),
        (["data.mock=false"], ["data.path is empty", "data.mock = false"]),
        (["data.mock=false", "data.path=[a,b]", "data.weights=[1]"], ["1 entries", "data.path has 2"]),
        (["data.mock=false", "data.path=[a,b]", "data.weights=[1,0]"], ["data.weights.1 = 0.0", "greater than 0"]),
        (["data.mock=false", "data.path=[a]", "data.mock_samples=7"], ["data.mock_samples = 7", "data.mock = false"]),
        (["log.wandb_project=x"], ["log.wandb_project = x", "log.wandb = disabled"]),
        (["log.prometheus_address=0.0.0.0"], ["log.prometheus_address = 0.0.0.0", "log.prometheus = false"]),
        (["log.prometheus_port=0"], ["log.prometheus_port = 0", "log.prometheus = false", "use log.prometheus=true"]),
        (["log.prometheus_targets=null"], ["log.prometheus_targets = null", "log.prometheus = false"]),
        (["log.prometheus=true", "log.prometheus_port=65536"], ["log.prometheus_port = 65536", "65535"]),
        (["data.split=x"], ["data.split = x", "99,1"]),
        (["data.split=0,1"], ["data.split = 0,1", "99,1"]),
        (["data.split=1,-1"], ["data.split = 1,-1", "99,1"]),
        (["data.mock=false", "data.path=[a]", "data.split=1", "train.eval_interval=5"],
         ["train.eval_interval = 5", "data.split = 1", "data.split=99,1"]),
        # checkpoints
        (["checkpoint.init_from=hf", "checkpoint.resume=must"], ["checkpoint.init_from = hf", "checkpoint.resume = must"]),
        (["checkpoint.init_from=hf", "checkpoint.resume=7"], ["checkpoint.init_from = hf", "checkpoint.resume = 7"]),
        # names and Slurm
        (["run.name=a/b"], ["run.name = a/b", "run.dir"]),
        (["run.name=.."], ["run.name = ..", "run.dir"]),
        (["run.dir="], ["run.dir is empty"]),
        (["launch.slurm.time_limit=86400"], ["launch.slurm.time_limit = 86400", "24:00:00"]),
        (["launch.slurm.extra=[exclusive]"], ["launch.slurm.extra has exclusive", "--name=value"]),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], says: list[str]):
    line = refusal(*overrides)
    assert [s for s in says if s not in line] == [], line


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        LEARNED,
        ["train.seq_len=64"],  # rope has no table; the plan notes it
        ["parallel.cp=2"],
        ["parallel.cp=16", "parallel.cp_comm_type=all_gather", "data.isolate_documents=true", "data.eod_mask_loss=true"],
        ["parallel.cp=4", "parallel.tp=2", "parallel.sequence_parallel=true", "train.seq_len=24"],
        ["model.rope_scaling=linear", "model.rope_factor=2.5"],
        LLAMA3,
        YARN,
        [*YARN, "model.rope_beta_fast=16", "model.rope_beta_slow=2", "model.rope_attention_factor=1.2"],
        ["model.hidden_size=72", *LEARNED],  # an odd head width
        ["parallel.pp=8", "model.num_layers=8"],  # fewer micro-batches than stages: slow, not wrong; the plan notes it
        ["optim.warmup_steps=9"],
        ["optim.warmup_steps=2000"],  # a trial of a long recipe: the plan notes that it ends in the warm-up
        ["optim.warmup_steps=9", "optim.decay_steps=20"],
        ["optim.schedule=wsd", "optim.warmup_steps=5", "optim.wsd_decay_steps=5"],
        ["optim.schedule=constant"],
        ["optim.schedule=wsd", "optim.wsd_decay_style=minus_sqrt"],
        ["optim.lr_scaling=sqrt", "optim.base_batch_size=8"],
        ["optim.name=sgd", "optim.momentum=0"],
        ["optim.name=muon", "optim.ns_steps=6", "optim.beta2=0.99", "optim.nesterov=false"],
        ["optim.lr_mult={layers.*.weight: 0.5, layers.0.*: 1}", "optim.wd_mult={embedding.*: 0}"],
        ["train.rampup_batch_size=[2,2,10]"],
        ["train.rampup_batch_size=[2,6,1]"],
        ["train.eval_interval=5"],
        ["data.mock=false", "run.dry_run=true"],
        ["data.mock=false", "data.path=[a,b]", "data.weights=[1,0.5]", "data.split=1"],
        ["data.mock=false", "data.path=[a]", "data.valid_path=[b]", "data.split=1", "train.eval_interval=5"],
        ["checkpoint.init_from=hf"],
        ["checkpoint.init_from=hf", "checkpoint.resume=never"],
        ["cluster.gpus_per_node=1", "parallel.tp=2", "cluster.nodes=2", "parallel.allow_tp_across_nodes=true"],
        ["cluster.gpus_per_node=8", "parallel.dp=4"],  # half of the node; the plan notes it
        ["launch.slurm.time_limit=2-12:00:00", "launch.slurm.extra=[--exclusive,'--mem=0']"],
    ],
)
def test_accepted(overrides: list[str]):
    tiny(*overrides)


def test_tokens_are_rounded_up_to_whole_steps():
    per_step = 8 * 32
    for tokens, steps in ((1, 1), (per_step, 1), (per_step + 1, 2), (10 * per_step, 10)):
        assert rules.total_steps(tiny("train.steps=null", f"train.tokens={tokens}")) == steps
    assert rules.total_steps(tiny()) == 10


def test_tokens_under_a_rampup_are_those_of_its_steps():
    """Steps of 2, 2, 2 samples (5 are reached), 5, then 8."""
    cfg = ["train.micro_batch_size=1", "train.rampup_batch_size=[2,3,10]"]
    for samples, steps in ((1, 1), (6, 3), (7, 4), (11, 4), (12, 5), (19, 5), (20, 6)):
        assert rules.total_steps(tiny(*cfg, "train.steps=null", f"train.tokens={samples * 32}")) == steps


def test_resolve_holds_the_rampup_against_dp():
    cfg = tiny("train.rampup_batch_size=[2,2,10]")
    assert rules.resolve(cfg, 1).parallel.dp == 1
    with pytest.raises(Refused, match=r"its size 2 is not divisible by train.micro_batch_size x parallel.dp = 4: start at 4"):
        rules.resolve(cfg, 2)


def test_resolve_fills_dp_and_changes_nothing_else():
    cfg = tiny("parallel.tp=2")
    out = rules.resolve(cfg, 8)
    assert out.parallel.dp == 4 and cfg.parallel.dp is None
    cfg.parallel.dp = 4
    assert out == cfg
    assert rules.resolve(out, 8) == out


def test_resolve_refuses_what_does_not_fit_the_world():
    for overrides, world, says in (
        (["parallel.dp=2"], 4, ["parallel.dp = 2", "2 ranks", "there are 4", "start 2 ranks", "parallel.dp=4"]),
        (["parallel.pp=2", "parallel.tp=2"], 6, ["6 ranks", "pp 2 x tp 2 = 4", "start 4 or 8 ranks"]),
        (["parallel.pp=2", "parallel.tp=2"], 1, ["1 ranks", "start 4 ranks"]),
        ([], 3, ["train.global_batch_size = 8", "parallel.dp = 3 = 6", "use train.global_batch_size=6 or 12"]),
    ):
        with pytest.raises(Refused) as caught:
            rules.resolve(tiny(*overrides), world)
        assert [s for s in says if s not in str(caught.value)] == [], caught.value


def test_the_world_a_recipe_asks_for():
    assert rules.planned_world(tiny("parallel.tp=2")) == 2
    assert rules.planned_world(tiny("parallel.tp=2", "parallel.dp=4")) == 8
    cluster = ["cluster.nodes=2", "cluster.gpus_per_node=2"]
    assert rules.planned_world(tiny(*cluster)) == 4
    assert rules.planned_world(tiny(*cluster, "parallel.dp=2")) == 2
    assert rules.cluster_world(tiny()) is None


def test_check_is_made_on_a_config_object_too():
    cfg: Config = tiny()
    cfg.parallel.tp = 4
    with pytest.raises(Refused, match="valid tp 1, 2"):
        rules.check(cfg)
