"""Transformer Engine and Apex as backends: what a run is told when they aren't there, and what it gets when they are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megakit.config.schema import OpsConfig
from megakit.errors import EXIT_REFUSED, Refused
from megakit.ops import apex, te
from megakit.ops.backends import Backends, choose
from megakit.ops.norm import add_norm, norm
from tests.ops import stand_ins
from tests.ops.stand_ins import installed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_are_there(monkeypatch):
    monkeypatch.setattr("megakit.ops.backends.load", lambda device_type: None)


def test_nothing_is_imported_unasked():
    code = "import sys, megakit.pretrain, megakit.plan; sys.exit(any(m in sys.modules for m in ('apex', 'transformer_engine')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_takes_neither(device):
    with installed(stand_ins.transformer_engine(), stand_ins.apex()):
        chosen, _ = choose(OpsConfig(), device)
    assert not {"te", "apex"} & set(vars(chosen).values())


def test_what_a_backend_has_is_chosen_and_the_rest_as_by_auto():
    with installed(stand_ins.transformer_engine(), stand_ins.apex()):
        chosen, words = choose(OpsConfig("te"), CUDA)
        assert chosen == Backends("te", "csrc", "csrc", "csrc", "csrc", "csrc", "te")
        assert words == "operators: csrc: rope, activation, loss, dropout_add, adamw; te: norm, attention"
        chosen, _ = choose(OpsConfig("apex", norm="te", loss="torch"), CUDA)
        assert chosen == Backends("te", "csrc", "csrc", "torch", "csrc", "apex", "torch")


def test_without_the_kernels_the_libraries_stay(monkeypatch):
    from megakit.ops.fused.library import Missing

    def missing(device_type):
        raise Missing("there is no library: build it")

    monkeypatch.setattr("megakit.ops.backends.load", missing)
    with installed(stand_ins.apex()):
        chosen, words = choose(OpsConfig("apex"), CUDA)
    assert chosen == Backends(norm="apex", adamw="apex")
    assert words.startswith("operators: apex: norm, adamw; torch: rope") and words.endswith("there is no library: build it")


def refusal(cfg: OpsConfig, device: torch.device = CUDA) -> str:
    with pytest.raises(Refused) as e:
        choose(cfg, device)
    assert e.value.code == EXIT_REFUSED and "\n" not in str(e.value)
    return str(e.value)


ABSENT = dict.fromkeys(("transformer_engine", "apex"))  # a None in sys.modules: the import fails


def test_absent():
    with installed(ABSENT):
        said = refusal(OpsConfig(norm="te"))
        assert said.startswith("ops.norm = te needs Transformer Engine, which") and "transformer-engine[pytorch]>=2.10" in said
        said = refusal(OpsConfig("apex"))
        assert said.startswith("ops.backend = apex needs NVIDIA Apex with its CUDA extensions, which")
        assert "github.com/NVIDIA/apex" in said and "pip install apex" not in said


def test_really_absent():
    """In this process as it is: neither is installed where tests run."""
    for top, cfg in (("transformer_engine", OpsConfig("te")), ("apex", OpsConfig("apex"))):
        try:
            __import__(top)
        except ModuleNotFoundError:
            assert "which is not installed: " in refusal(cfg)


@pytest.mark.parametrize("version", ["1.13.0", "2.9.1"])
def test_too_old(version):
    with installed(stand_ins.transformer_engine(version)):
        assert f"Transformer Engine 2.10 or newer, and transformer_engine {version} is installed" in refusal(OpsConfig("te"))


def test_fp8_without_the_library():
    for made, module in (("te", "transformer_engine"), ("torchao", "torchao")):
        with installed({module: None}), pytest.raises(Refused, match=rf"ops\.fp8 = {made} needs .*, which is not installed: "):
            choose(OpsConfig(fp8=made), CUDA, "fp8")
    with installed({"torchao": None, "transformer_engine": None}):
        assert choose(OpsConfig(), CPU, "fp8") == (Backends(fp8="torch"), "products in fp8: torch")
    with installed(stand_ins.transformer_engine(), gpu=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        _, words = choose(OpsConfig("torch", fp8="te", fp8_recipe="mxfp8"), CUDA, "fp8")
        assert words == "products in fp8: te, mxfp8 scaling"


def test_other_apex():
    """The package of that name on PyPI, one without CUDA extensions, and one that is too old."""
    others = {"apex.normalization": None, "apex.optimizers": None}
    with installed({**stand_ins.apex(), **others}):
        assert "its apex.optimizers can't be imported" in refusal(OpsConfig(adamw="apex"))
    with installed({**stand_ins.apex(), "amp_C": None}):
        assert "its amp_C can't be imported" in refusal(OpsConfig(adamw="apex"))
        assert choose(OpsConfig("torch", norm="apex"), CUDA)[0] == Backends(norm="apex")
    old = stand_ins.module("fused_layer_norm", fused_layer_norm_affine=None)
    with installed({**stand_ins.apex(), "apex.normalization.fused_layer_norm": old}):
        assert "apex without a version that is installed has no" in refusal(OpsConfig(norm="apex"))


@pytest.mark.parametrize("backend", ["te", "apex"])
def test_a_cpu_is_refused(backend):
    with installed(stand_ins.transformer_engine(), stand_ins.apex(), gpu=False):
        assert f"ops.backend = {backend} needs a GPU" in refusal(OpsConfig(backend), CPU)


@pytest.mark.parametrize("bias", [False, True])
def test_norms(bias):
    torch.manual_seed(0)
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)
    weight = torch.nn.Parameter(torch.randn(32))
    b = torch.nn.Parameter(torch.randn(32)) if bias else None
    with installed(stand_ins.transformer_engine(), stand_ins.apex()):
        made = te.norm(weight, b, 1e-3)
        assert made.weight is weight and (b is None or made.bias is b), "our parameters, not copies"
        assert {id(p) for p in made.parameters()} == {id(p) for p in (weight, b) if p is not None}
        want = norm(x, weight, b, 1e-3)
        torch.testing.assert_close(made(x), want)
        torch.testing.assert_close(norm(x, weight, b, 1e-3, "apex"), want)
        y, h = add_norm(x, r, weight, b, 1e-3, "apex")
        torch.testing.assert_close(h, x + r, rtol=0, atol=0)
        torch.testing.assert_close(y, norm(h, weight, b, 1e-3))
        wide = norm(x.double(), weight.double(), None if b is None else b.double(), 1e-3, "apex")
        assert wide.dtype == torch.float64, "a dtype that Apex's path isn't for falls back"


def test_adam_counts_in_32_bits(monkeypatch):
    """Flat shards longer than its kernel can count are given in pieces."""
    monkeypatch.setattr(apex, "LONGEST", 7)
    master = torch.arange(20.0)
    pieces = apex.pieces(master)
    assert [len(p) for p in pieces] == [7, 7, 6]
    pieces[1].data.zero_()
    assert master[7:14].eq(0).all() and master[14] == 14, "they share its memory"
