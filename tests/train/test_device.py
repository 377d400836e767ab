"""The device that trains: sums in a fixed order within a stage, and which GPUs are refused in one line."""

import pytest

from ddtree.errors import DeviceMemoryError, UsageError


@pytest.fixture
def found(torch, monkeypatch):
    """PyTorch finds a GPU that does bf16."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)


def test_a_gpu_without_a_compiler_is_refused(found, monkeypatch):
    from ddtree.train.device import open_device

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match="no gcc or clang"):
        open_device("cuda")


def test_a_stage_takes_sums_in_a_fixed_order_and_leaves_the_process_as_it_was(torch, text, short, tmp_path):
    import torch._inductor.config as inductor

    from ddtree.train import stages
    from ddtree.train.device import repeatable

    def modes():
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        compiler = getattr(inductor, "deterministic", None)
        return torch.are_deterministic_algorithms_enabled(), warn_only, filled, compiler

    seen, before = [], modes()
    torch.use_deterministic_algorithms(True, warn_only=True)
    if before[3] is not None:
        inductor.deterministic = True
    try:
        others = modes()
        with repeatable():
            assert modes()[:3] == (True, False, False)
        assert modes() == others and others[:3] == (True, True, True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if before[3] is not None:
            inductor.deterministic = before[3]
    for stage in stages.ALL:
        work = stages.start(
            str(text), str(tmp_path), short, 0, "cpu", None, lambda line: seen.append(modes())
        )
        assert stage(work)
    assert seen and {mode[:3] for mode in seen} == {(True, False, False)} and modes() == before


@pytest.mark.parametrize(
    "kind, said, raises, match",
    [
        (
            "RuntimeError",
            "It is not deterministic. See CUBLAS_WORKSPACE_CONFIG\n",
            UsageError,
            "before Python starts",
        ),
        ("OutOfMemoryError", "CUDA out of memory\n", DeviceMemoryError, "the GPU is full"),
        ("AcceleratorError", "device-side assert", RuntimeError, "device-side assert"),
    ],
)
def test_a_gpu_that_fails_at_the_first_product(torch, found, monkeypatch, kind, said, raises, match):
    from ddtree.train import device

    def refuses(*size, **options):
        raise getattr(torch, kind, RuntimeError)(said)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gcc")
    monkeypatch.setattr("torch.ones", refuses)
    with pytest.raises(raises, match=match) as caught, device.memory_errors():
        device.open_device("cuda")
    assert "\n" not in str(caught.value)


def test_a_full_gpu_is_one_line(torch):
    from ddtree.train.device import memory_errors

    with pytest.raises(DeviceMemoryError) as caught, memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
    assert str(caught.value).count("\n") == 0 and "2 GiB" in str(caught.value)
