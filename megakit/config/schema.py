"""Every recipe key: its type, its default, and one line on what it means.

The string under a field is its documentation: `--help` and docs/config.md are made from it. A field without a default
(`MISSING`) must be given by the recipe. Rules that join several keys are in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Union

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The decoder. A family (model_zoo/) is one set of these values and a map of Hugging Face names."""

    family: str = MISSING
    """llama | mistral | qwen2 | qwen3 | gpt2: which Hugging Face name map reads and writes the weights."""
    num_layers: int = MISSING
    """Transformer layers."""
    hidden_size: int = MISSING
    """Width of the residual stream."""
    ffn_hidden_size: int = MISSING
    """Width inside the MLP (of gate and of up each, for swiglu)."""
    num_attention_heads: int = MISSING
    """Query heads."""
    num_query_groups: int = MISSING
    """Key/value heads (GQA); equal to num_attention_heads for MHA."""
    vocab_size: int = MISSING
    """True vocabulary. Rows added for the grid (make_vocab_size_divisible_by) never take part in the loss."""
    max_position_embeddings: int = MISSING
    """Longest sequence: rows of a learned position table, or the context a rotary model is meant for (linear: before scaling)."""
    kv_channels: Optional[int] = None
    """Width of a head, of queries, keys and values alike; null: hidden_size / num_attention_heads."""
    normalization: str = "rmsnorm"
    """rmsnorm | layernorm (with bias)."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside the norm."""
    activation: str = "swiglu"
    """swiglu | gelu | gelu_tanh (GPT-2's approximation)."""
    position_embedding: str = "rope"
    """rope | learned."""
    rotary_base: float = 10000.0
    """RoPE theta."""
    rope_scaling: str = "none"
    """Stretches RoPE beyond the context it was trained on: none | linear (Chen et al. 2023) | llama3 (Llama 3.1) | yarn."""
    rope_factor: Optional[float] = None
    """By how much rope_scaling lengthens the wavelengths; needed by linear, llama3 and yarn."""
    rope_original_max_position_embeddings: Optional[int] = None
    """The context before scaling; needed by llama3 and yarn."""
    rope_low_freq_factor: Optional[float] = None
    """llama3: pairs that turn fewer times than this within the original context are scaled by the whole factor."""
    rope_high_freq_factor: Optional[float] = None
    """llama3: pairs that turn more often than this within the original context are left as they are."""
    rope_beta_fast: float = 32.0
    """yarn: pairs that turn more often than this within the original context are left as they are."""
    rope_beta_slow: float = 1.0
    """yarn: pairs that turn fewer times than this within the original context are scaled by the whole factor."""
    rope_attention_factor: Optional[float] = None
    """yarn: multiplies cos and sin (its mscale), so the scores by its square; null: 0.1 * ln(rope_factor) + 1."""
    add_bias_linear: bool = False
    """Biases on every linear layer but the output head."""
    add_qkv_bias: bool = False
    """Biases on the linear layer of queries, keys and values only (Qwen2)."""
    qk_layernorm: bool = False
    """Norms each head's query and key, before rope, by the kind of normalization; one weight of a head's width (Qwen3)."""
    window_size: Optional[int] = None
    """Sliding window attention: a token sees itself and the window_size - 1 before it (Mistral v0.1); null: all before it."""
    tie_embeddings: bool = False
    """The output head is the word embedding itself."""
    hidden_dropout: float = 0.0
    """Dropout probability on the embedding's and each sub-layer's output."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections of sub-layers use std / sqrt(2 * num_layers)."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary rows of each tensor-parallel rank are padded to a multiple of this."""


@dataclass
class ParallelConfig:
    """The grid: rank = ((dp * PP + pp) * CP + cp) * TP + tp."""

    tp: int = 1
    """Tensor parallel ranks; within a node."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallel ranks: each has two of 2 * cp chunks of every sequence."""
    cp_comm_type: str = "p2p"
    """How keys and values reach the other cp ranks: p2p (a ring, under way during attention) | all_gather."""
    dp: Optional[int] = None
    """Data parallel replicas; null: all ranks that are there, divided by tp * pp * cp."""
    zero: int = 0
    """ZeRO stage, what is sharded over dp: 0 nothing, 1 the optimizer states, 2 gradients too, 3 weights too (pp = 1)."""
    zero_group: Optional[int] = None
    """Ranks that share one copy of what ZeRO shards, neighbours on dp; it is replicated over such groups. null: all of dp."""
    zero3_reduce: str = "microbatch"
    """When ZeRO 3 reduces gradients: microbatch (each time; they are always sharded) | step (once; they accumulate unsharded)."""
    sequence_parallel: bool = False
    """Shard activations between the tensor-parallel layers along the sequence."""
    schedule: str = "1f1b"
    """Pipeline schedule: gpipe | 1f1b | interleaved_1f1b | zb_h1 | zb_v (zero bubble; weight gradients are put off)."""
    virtual_stages: int = 1
    """Model chunks per pipeline rank: 2 or more for interleaved_1f1b, 2 for zb_v."""
    layers_per_stage: Optional[List[int]] = None
    """Layers of each of the pp * virtual_stages stages, in order of the model; null: by stage_balance."""
    stage_balance: str = "layers"
    """Without layers_per_stage: layers (alike; virtual stages must divide them) | cost (embedding, head, loss have a weight)."""
    recompute: str = "none"
    """Activation recomputation: none | selective (the attention core) | full (whole layers)."""
    recompute_layers: Optional[int] = None
    """With recompute=full, the first so many layers of each pipeline stage are recomputed, the others not; null: all."""
    bucket_size: int = 40_000_000
    """Elements per gradient bucket; a bucket is reduced over dp as soon as its gradients are complete."""
    allow_tp_across_nodes: bool = False
    """Permit tp to be larger than a node, over the slow network."""


@dataclass
class TrainConfig:
    """How long, on what batches, in which precision."""

    steps: Optional[int] = None
    """Optimizer steps; give this or tokens."""
    tokens: Optional[int] = None
    """Tokens to train on, rounded up to whole steps; give this or steps."""
    micro_batch_size: int = MISSING
    """Samples per forward pass of one data-parallel rank."""
    global_batch_size: int = MISSING
    """Samples per optimizer step, over all ranks."""
    rampup_batch_size: Optional[List[int]] = None
    """[START, INCREMENT, SAMPLES]: the batch grows from START to global_batch_size, by INCREMENT, over SAMPLES samples."""
    seq_len: int = MISSING
    """Tokens per sample."""
    seed: int = 1234
    """Seeds initial weights, sample order and dropout, each by itself."""
    precision: str = "bf16"
    """Compute precision: bf16 or fp16 (fp32 masters and gradients; fp16 with dynamic loss scaling) | fp32 | fp8 (bf16, but the
    products of the layers' linear layers, forward and of the input gradient; docs/kernels.md)."""
    grad_dtype: str = "fp32"
    """Gradients are accumulated and reduced in: fp32 | bf16 (half the bytes, less exact; with precision=bf16 only)."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Coefficient of the squared log-partition added to each token's loss."""
    eval_interval: int = 0
    """Steps between evaluations on the validation split; 0: never."""
    eval_samples: int = 64
    """Samples of one evaluation, always the first ones of the validation split."""
    max_skipped_steps: int = 10
    """Consecutive steps skipped for a loss or gradient that is not finite, after which the run stops with exit code 3."""
    generate_tokens: int = 0
    """Tokens to generate from train.generate_prompt when training ends; 0: none."""
    generate_prompt: str = ""
    """Text that the generation at the end continues."""


@dataclass
class OptimConfig:
    """The optimizer, on flat fp32 shards, and the learning rate."""

    name: str = "adamw"
    """adamw | sgd (as torch's: its weight decay is an L2 penalty) | muon (hidden matrices; the rest by adamw, same lr)."""
    lr: float = MISSING
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_scaling: str = "none"
    """none | linear | sqrt: lr and min_lr are multiplied by train.global_batch_size / base_batch_size, or its root."""
    base_batch_size: Optional[int] = None
    """Global batch size that lr was tuned for; only with lr_scaling."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to lr."""
    decay_steps: Optional[int] = None
    """Step at which the decay ends; null: the last step of the run."""
    schedule: str = "cosine"
    """After the warm-up: cosine | linear | constant | wsd (stable, then decays over wsd_decay_steps)."""
    wsd_decay_steps: Optional[int] = None
    """Length of the final decay of the wsd schedule, ending at decay_steps; null: a tenth of the decay steps."""
    wsd_decay_style: str = "linear"
    """Shape of the final decay of the wsd schedule: linear | cosine | minus_sqrt (1 - sqrt of the progress)."""
    weight_decay: float = 0.1
    """Decoupled weight decay (sgd: an L2 penalty); never on norms and biases."""
    lr_mult: Optional[Dict[str, float]] = None
    """Multipliers of lr and min_lr by patterns of parameter names, as {embedding.*: 0.1}; the last pattern that fits holds."""
    wd_mult: Optional[Dict[str, float]] = None
    """Multipliers of weight_decay by patterns of parameter names; the last pattern that fits holds."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.95
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: Optional[float] = None
    """Of sgd and muon; null: 0.9 for sgd, 0.95 for muon."""
    nesterov: Optional[bool] = None
    """Nesterov momentum for sgd and muon; null: false for sgd, true for muon."""
    ns_steps: Optional[int] = None
    """Newton-Schulz iterations of muon; null: 5."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    initial_loss_scale: float = 65536.0
    """First scale of the loss, fp16 only: of the mean over a micro-batch's tokens, their number rounded up to a power of two."""
    min_loss_scale: float = 1.0
    """The loss scale doesn't fall below it; steps skipped there count towards train.max_skipped_steps."""
    loss_scale_window: int = 1000
    """Good steps in a row after which the loss scale is doubled."""
    loss_scale_hysteresis: int = 2
    """Skipped steps after which the loss scale is halved, at each further one again; counted afresh when it grows."""


@dataclass
class DataConfig:
    """Indexed token files (Megatron .bin/.idx) and the order in which samples are read."""

    path: List[str] = field(default_factory=list)
    """File prefixes without .bin/.idx; relative to the folder the run was started in."""
    weights: Optional[List[float]] = None
    """Share of each path in the blend; null: by its number of tokens."""
    max_epochs: Optional[float] = None
    """Refuse a run that goes through any source of training data more often than this; null: no limit."""
    valid_path: List[str] = field(default_factory=list)
    """File prefixes of a separate validation set; when given, all of data.path is for training and split is unused."""
    tokenizer: Optional[str] = None
    """Sentencepiece .model, tokenizer.json, tiktoken file, or a folder with one; its fingerprint must be that of the data."""
    split: str = "99,1"
    """Parts of the documents for training and validation, in this order; normalised to 1."""
    mock: bool = False
    """Made-up tokens in place of files, a pure function of the seed: for benchmarks and run.shrink."""
    mock_samples: int = 4096
    """Samples in an epoch of mock data."""
    log_sample_ids: bool = False
    """Write the sample ids of every step to samples.jsonl in the run folder."""
    prefetch: int = 2
    """Batches read ahead by a background thread; 0: read when needed."""
    packing: str = "none"
    """none (samples are slices of the row of documents) | best_fit (whole documents are packed into samples)."""
    cache_dir: Optional[str] = None
    """Folder of the index that packing needs, shared by all nodes or each node's own; null: cache/ beside the data."""
    isolate_documents: bool = False
    """Keep attention inside a document, by the boundaries in the indexed file."""
    eod_mask_loss: bool = False
    """Leave a document's last token out of the loss: what follows it is another document."""


@dataclass
class CheckpointConfig:
    """Where, how often and how many; and what a start does with what is there."""

    dir: Optional[str] = None
    """Folder of the checkpoints; null: checkpoints/ in the run folder."""
    interval_steps: Optional[int] = None
    """Steps between saves; null: no saves by steps. The last step is always saved."""
    interval_minutes: Optional[float] = None
    """Minutes between saves; null: no saves by time."""
    keep: int = 2
    """Complete checkpoints to keep; 0: all."""
    async_save: bool = field(default=False, metadata={"key": "async"})
    """Save in the background while training goes on; not built yet, must be false. (`async` is a Python keyword.)"""
    resume: Union[int, str] = "auto"
    """auto (newest complete, else step 0) | must | never | the number of a step."""
    init_from: Optional[str] = None
    """Folder whose weights start the run: of Hugging Face, of tools/convert_ckpt.py, or a step of another run; a checkpoint to
    resume wins over it."""


@dataclass
class LogConfig:
    """Where the one record per step goes, besides metrics.jsonl."""

    console: str = "auto"
    """auto (a bar on a terminal, lines elsewhere) | bar | lines | off."""
    interval: int = 10
    """Steps between console lines."""
    tensorboard: bool = False
    """Write TensorBoard events to tensorboard/ in the run folder."""
    wandb: str = "disabled"
    """Weights & Biases: disabled | offline | online."""
    wandb_project: str = "megakit"
    """Weights & Biases project."""
    prometheus: bool = False
    """Serve the metrics to Prometheus over HTTP, from rank 0 (docs/monitoring.md); needs prometheus-client."""
    prometheus_address: str = "127.0.0.1"
    """Address that it listens at; 0.0.0.0: all of the host's, for a Prometheus on another one. It asks no password."""
    prometheus_port: int = 9464
    """Port that it listens at; 0: any that is free. One that is taken costs the metrics, not the run."""
    prometheus_targets: Optional[str] = "runs/prometheus"
    """Folder for a file that tells Prometheus' file_sd_configs where this run listens; null: none."""


@dataclass
class SlurmConfig:
    """What the job asks of Slurm, in the script that python -m megakit.submit writes."""

    partition: Optional[str] = None
    """Partition; null: the cluster's default."""
    account: Optional[str] = None
    """Account to charge; null: the user's default."""
    qos: Optional[str] = None
    """Quality of service; null: the user's default."""
    constraint: Optional[str] = None
    """Features that the nodes must have, as sbatch --constraint takes them: "h100&ib"; null: none."""
    time_limit: str = "24:00:00"
    """Wall time, as sbatch takes it."""
    cpus_per_task: int = 8
    """CPU cores of each rank."""
    signal_lead_s: int = 300
    """Seconds before the time limit at which the job is told to save and leave."""
    requeue: bool = True
    """Queue the job again after exit code 75, and after a failure (submit.max_attempts)."""
    extra: List[str] = field(default_factory=list)
    """Further #SBATCH options, each as --name=value."""


@dataclass
class LaunchConfig:
    """How the ranks start and how long they wait for one another."""

    device: str = "auto"
    """auto (GPUs if there are any, else CPU) | cuda | cpu."""
    timeout_s: float = 600.0
    """Seconds after which any collective or send/recv gives up; reaches every process group."""
    threads_per_rank: Optional[int] = None
    """CPU threads of each rank; null: the cores of the machine divided by its ranks."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


@dataclass
class ContainerConfig:
    """The image in which the job script starts the ranks."""

    image: Optional[str] = None
    """Image, as the runtime names it: nvcr.io#nvidia/pytorch:26.06-py3 or a .sqsh, .sif file; null: no container."""
    runtime: str = "pyxis"
    """pyxis (srun --container-image, by enroot) | apptainer (apptainer exec --nv)."""
    mounts: List[str] = field(default_factory=list)
    """Folders as SOURCE:TARGET or SOURCE:TARGET:FLAGS; the folder of submission is always mounted, at its own path."""


@dataclass
class KubernetesConfig:
    """Where a JobSet runs; its image is submit.container.image."""

    namespace: Optional[str] = None
    """Namespace; null: kubectl's."""
    claim: Optional[str] = None
    """PersistentVolumeClaim that all pods share: the data and the run folder are there."""
    mount: str = "/work"
    """Where the claim is mounted; the folder that the run starts in."""


@dataclass
class SubmitConfig:
    """What python -m megakit.submit makes of a recipe; what the job asks of Slurm is in launch.slurm."""

    target: str = "slurm"
    """slurm | kubernetes (a JobSet, one pod per node)."""
    render_only: bool = False
    """Print the job script or manifest, and submit nothing."""
    template: str = "srun"
    """Who starts the ranks: srun (each of them) | torchrun (one per node, which restarts its ranks in place)."""
    max_attempts: int = 3
    """Failures from the same newest checkpoint after which the job is not queued again, and ends with exit code 4."""
    sweep: List[str] = field(default_factory=list)
    """Entries KEY=V1,V2,...: an array with one task, and one run folder, for each combination of them."""
    sweep_parallel: Optional[int] = None
    """Tasks of the sweep that may run at the same time; null: all."""
    chain: Union[int, str] = 1
    """With launch.slurm.requeue=false, jobs in a row, each going on where the last one stopped: a number | auto (planned)."""
    python: Optional[str] = None
    """Interpreter of the ranks; null: the one that submits, in a container `python`."""
    modules: List[str] = field(default_factory=list)
    """Modules to load."""
    setup: List[str] = field(default_factory=list)
    """Lines of bash that the job script runs before the ranks start, as they are."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass
class ClusterConfig:
    """The machines that a recipe is meant for."""

    name: str = "local"
    """Name of the kind of machine; shipped are local, a100_80g, b200, h100 and h200."""
    nodes: int = 1
    """Nodes."""
    gpus_per_node: Optional[int] = None
    """GPUs of a node; null: what this machine has."""
    gpu_memory_gib: Optional[float] = None
    """Memory of a GPU, GiB."""
    peak_bf16_tflops: Optional[float] = None
    """Dense bf16 peak of a GPU, TFLOP/s; metrics.jsonl's mfu divides by it."""
    peak_fp32_tflops: Optional[float] = None
    """fp32 (non-tensor-core) peak of a GPU, TFLOP/s."""
    memory_bandwidth_tb_s: Optional[float] = None
    """Memory bandwidth of a GPU, TB/s."""
    nvlink_gb_s: Optional[float] = None
    """NVLink bandwidth of a GPU, GB/s in each direction."""
    network_gb_s: Optional[float] = None
    """Network bandwidth of a node per GPU, GB/s in each direction."""
    gpu_hour_price: Optional[float] = None
    """Price of a GPU-hour, in any currency: the plan says what the run costs; null: it doesn't."""
    env: Optional[Dict[str, str]] = None
    """Environment variables of every rank, as {NCCL_IB_HCA: mlx5}; what is already set where the ranks start wins."""


@dataclass
class OpsConfig:
    """Fused operators."""

    backend: str = "auto"
    """auto (csrc on a GPU for which it has been built, else torch) | torch | csrc (the kernels of csrc/; on a CPU an emulation,
    for tests) | te (Transformer Engine) | apex (NVIDIA's); what te and apex don't have is as by auto. See docs/kernels.md."""
    norm: Optional[str] = None
    """RMSNorm and LayerNorm: torch | csrc | te | apex; null, as for the keys below: what ops.backend says."""
    rope: Optional[str] = None
    """Rotary embedding: torch | csrc (turned in place)."""
    activation: Optional[str] = None
    """SwiGLU and GELU: torch | csrc."""
    loss: Optional[str] = None
    """Cross entropy: torch | csrc (the gradient takes the place of the logits, without an fp32 copy)."""
    loss_chunk: Optional[int] = None
    """Tokens whose logits are held at once, by either loss; the head's product is made once more in the backward pass, and a
    third time where weight gradients are put off. null: all of a micro-batch."""
    dropout_add: Optional[str] = None
    """Dropout and add on the residual stream: torch | csrc. The two draw different masks."""
    adamw: Optional[str] = None
    """AdamW's step and the squared norm of the gradient (that of apex is torch's): torch | csrc | apex."""
    attention: Optional[str] = None
    """The attention core: torch (scaled_dot_product_attention) | te (DotProductAttention; not with cp or isolated documents)."""
    fp8: Optional[str] = None
    """Who makes the products of train.precision=fp8: torch (torch._scaled_mm) | te | torchao; null: torch."""
    fp8_recipe: Optional[str] = None
    """Scaling of ops.fp8=te: current (by the largest values of now) | delayed (of before) | mxfp8 (blocks of 32; Blackwell);
    null: current."""


@dataclass
class RunConfig:
    """One folder for all ranks, and the ways to look before a run."""

    name: str = "run"
    """Name of the run."""
    dir: Optional[str] = None
    """Run folder, used again by a restart; null: a new runs/NAME-TIME, under Slurm and torchrun one runs/NAME-JOB per job."""
    dry_run: bool = False
    """Validate, print the plan and exit; no process group, no data."""
    shrink: bool = False
    """Keep the structure of the recipe and cut its sizes until it runs on this machine's CPU in under a minute."""


@dataclass
class Config:
    """A recipe, composed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    run: RunConfig = field(default_factory=RunConfig)
