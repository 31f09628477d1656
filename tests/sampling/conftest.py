from pathlib import Path

import pytest
from native_sampler import FLAGS, NativeSampler, compiler, why_not


@pytest.fixture(scope="session")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeSampler]:
    """The native sampler of every instruction set that this machine can run."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("sampler")
    return {isa: NativeSampler(isa, folder) for isa in FLAGS if why_not(isa) is None}


@pytest.fixture(scope="session", params=list(FLAGS))
def native(request: pytest.FixtureRequest, samplers: dict[str, NativeSampler]) -> NativeSampler:
    """The native sampler, one instruction set at a time."""
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return samplers[request.param]
